"""Writes one stub library in place of CUDA's, under each of their names, so that torch's CUDA build loads on a CPU.

`stubs.py DIR`: DIR is torch/lib. Called by images/build. No nvidia package is needed: names, versions and symbols are
what torch's own libraries ask for. Every function returns cudaErrorNoDevice, so torch sees no GPU.
"""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Final

STUB: Final = "libcuda_stubs.so"
NO_DEVICE: Final = 100
_CUDA_LIBRARY: Final = re.compile(r"lib(cu|nccl|nv)\w*\.so\.\d+")
_CUDA_SYMBOL: Final = re.compile(r"(cu|__cuda|nccl|nv)\w+")
_SAYS_WHAT: Final = re.compile(r"Get\w*(String|Name)$")


def main(folder: Path) -> None:
    """Write the stub library into `folder`, and a link to it for each CUDA library that is missing there."""
    libraries = sorted(folder.glob("*.so*"))
    symbols = find_symbols(libraries)
    with tempfile.TemporaryDirectory() as scratch:
        compile_stub(Path(scratch), symbols, folder / STUB)
    for name in sorted(find_names(libraries)):
        if not (folder / name).exists():
            (folder / name).symlink_to(STUB)


def find_names(libraries: list[Path]) -> set[str]:
    """Return the CUDA libraries that these need, by soname."""
    dynamic = _readelf("--dynamic", libraries)
    needed = re.findall(r"\(NEEDED\)\s+Shared library: \[(.+?)\]", dynamic)
    return {name for name in needed if _CUDA_LIBRARY.fullmatch(name)}


def find_symbols(libraries: list[Path]) -> dict[str, set[str]]:
    """Return the CUDA functions that these import, by version; the version of those without one is empty."""
    symbols: dict[str, set[str]] = defaultdict(set)
    for line in _readelf("--dyn-syms", libraries).splitlines():
        words = line.split()
        if len(words) < 8 or words[6] != "UND":  # noqa: PLR2004 -- number, value, size, type, bind, visibility, section, name
            continue
        name, _, version = words[7].partition("@")
        if _CUDA_SYMBOL.fullmatch(name):
            symbols[version].add(name)
    return symbols


def compile_stub(scratch: Path, symbols: dict[str, set[str]], target: Path) -> None:
    """Compile a library that defines these symbols at these versions."""
    names = sorted(set().union(*symbols.values()))
    source, versions = scratch / "stubs.c", scratch / "stubs.map"
    source.write_text("\n".join(map(_function, names)) + "\n")
    nodes = [f"{version} {{ global: {'; '.join(sorted(found))}; }};" for version, found in symbols.items() if version]
    versions.write_text("\n".join(nodes) + "\n")
    command = ["gcc", "-shared", "-fPIC", "-O1", "-s", "-fno-builtin", f"-Wl,--version-script={versions}"]
    subprocess.run([*command, f"-Wl,-soname,{STUB}", "-o", target, source], check=True)  # noqa: S603 -- our own words


def _function(name: str) -> str:
    """Return the C of one function."""
    if _SAYS_WHAT.search(name):
        return f'const char *{name}(void) {{ return "this image has no CUDA"; }}'
    return f"long {name}(void) {{ return {NO_DEVICE}; }}"


def _readelf(what: str, libraries: list[Path]) -> str:
    command: list[str | Path] = ["readelf", "--wide", what, *libraries]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603 -- our own words


if __name__ == "__main__":
    main(Path(sys.argv[1]))
