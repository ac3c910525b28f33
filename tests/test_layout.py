"""The layout rules that the namespace package and the import contracts rest on."""

import ast
import importlib.metadata
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE_ROOTS = ("operator", "runtime", "kernels")
RUNTIME = ROOT / "runtime" / "elasticmoe" / "runtime"
EDGE_ROOMS = {"cli", "engine", "coordinator", "device"}  # may import torch, and the engine vllm
PURE_CORE = "the pure core imports no framework"
OUTSIDE_THE_ROOMS = {"bench", "charts", "engine", "e2e", "fakes", "gpu", "images"}
"""Folders of tests that mirror no room."""


def list_rooms(folder: Path) -> set[str]:
    """The names of the modules and packages directly in a folder that hold any code."""
    modules = {path.stem for path in folder.glob("*.py") if path.name != "__init__.py"}
    return modules | {path.parent.name for path in folder.glob("*/__init__.py")}


def read_contracts() -> dict[str, dict[str, list[str]]]:
    """The import contracts of pyproject.toml by name."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {contract["name"]: contract for contract in settings["tool"]["importlinter"]["contracts"]}


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_a_source_root_holds_only_the_namespace(root: str) -> None:
    """operator/__init__.py would hide the standard library's operator; elasticmoe/__init__.py hides the other roots."""
    assert not (ROOT / root / "__init__.py").exists()
    assert not (ROOT / root / "elasticmoe" / "__init__.py").exists()
    assert (ROOT / root / "elasticmoe" / root / "__init__.py").is_file()


@pytest.mark.parametrize("root", SOURCE_ROOTS)
def test_top_packages_import_nothing(root: str) -> None:
    """The operator's image imports runtime.contract without torch, so the package above it imports nothing."""
    init = ROOT / root / "elasticmoe" / root / "__init__.py"
    statements = ast.parse(init.read_text(encoding="utf-8")).body
    assert [ast.unparse(s) for s in statements if not isinstance(s, ast.Expr)] == []


def test_the_roots_join_in_one_namespace() -> None:
    """All three roots are installed as the one namespace package elasticmoe, and vLLM finds the plugin."""
    import elasticmoe  # noqa: PLC0415  # what the test is about

    assert {Path(path).parent.name for path in elasticmoe.__path__} == set(SOURCE_ROOTS)
    plugins = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert plugins["elasticmoe"].value == "elasticmoe.runtime.engine.plugin:register"


def test_every_room_is_an_edge_or_in_the_pure_core() -> None:
    """A new room of the runtime is put under the contract that forbids frameworks, or named here as an edge."""
    pure = {name.rsplit(".", 1)[1] for name in read_contracts()[PURE_CORE]["source_modules"]}
    assert pure == list_rooms(RUNTIME) - EDGE_ROOMS


def test_only_the_engine_imports_vllm() -> None:
    """Every other edge room is forbidden vllm by a contract."""
    forbidden = {
        name.rsplit(".", 1)[1]
        for contract in read_contracts().values()
        if "vllm" in contract.get("forbidden_modules", [])
        for name in contract["source_modules"]
    }
    assert (EDGE_ROOMS & list_rooms(RUNTIME)) - forbidden <= {"engine", "cli"}


def test_tests_mirror_the_rooms() -> None:
    """A folder of tests is named after a room, so that the tests of a file are found without a search."""
    known = {path.parent.resolve() for root in SOURCE_ROOTS for path in (ROOT / root).rglob("*.py")}
    for test in (ROOT / "tests").rglob("test_*.py"):
        first, *rest = test.parent.relative_to(ROOT / "tests").parts or [""]
        if first in SOURCE_ROOTS:
            assert ROOT.joinpath(first, "elasticmoe", first, *rest) in known, f"{test} mirrors no room"
        else:
            assert first in OUTSIDE_THE_ROOMS | {""}, f"{test} is in no known folder"
