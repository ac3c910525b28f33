"""`elasticmoe make-model PRESET DIR`: writes a small checkpoint for demos and tests, with real safetensors.

Random weights with skewed routing, a trained tokenizer, a chat template. Nothing is downloaded.
"""

import argparse
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Final

from elasticmoe.runtime.cli.models.presets import BLOCK_TOKENS, PRESETS, Preset
from elasticmoe.runtime.cli.staging import filled_whole, is_leftover, refuse_no_folder
from elasticmoe.runtime.errors import ConfigError

_KIB: Final = 1024
_MIB: Final = 1024**2
MOST_SEED: Final = 2**32 - 1
_OS_ERROR: Final = re.compile(r"\(os error (\d+)\)")
_READABLE: Final = 0o644  # safetensors writes 0600, but another user may serve the model


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `make-model` to the command's subparsers."""
    parser = subparsers.add_parser("make-model", help="write a small MoE checkpoint with skewed routing")
    parser.add_argument("preset", choices=sorted(PRESETS), help="which shape")
    parser.add_argument("dir", type=Path, help="the folder to write; made if it does not exist")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and the routing (default: 0)")
    parser.add_argument("--force", action="store_true", help="write into a folder that is not empty")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the model that the arguments name and print what was written; 0 when done."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    preset = PRESETS[args.preset]
    if abs(args.seed) > MOST_SEED:
        msg = f"--seed: want a number of at most {MOST_SEED}, it is {args.seed}; give a smaller one"
        raise ConfigError(msg)
    started_s = time.monotonic()
    write_model(preset, args.dir, seed=args.seed, force=args.force)
    seconds = time.monotonic() - started_s
    print(
        f"wrote {preset.name} to {args.dir} in {seconds:.1f} s (seed {args.seed})", describe(preset, args.dir), sep="\n"
    )
    return 0


def write_model(preset: Preset, target: Path, *, seed: int, force: bool) -> None:
    """Write the checkpoint into `target`, whole or not at all; files in it are refused, or replaced with `force`."""
    _refuse_target(target, force=force)
    from elasticmoe.runtime.cli.models.build import build_model
    from elasticmoe.runtime.cli.models.tokenizer import train_tokenizer

    tokenizer = train_tokenizer(preset.max_position)
    with filled_whole(target, last="config.json") as folder, _system_errors(target):
        build_model(preset, tokenizer, seed).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for file in folder.iterdir():
            file.chmod(_READABLE)


def describe(preset: Preset, target: Path) -> str:
    """Return what a written model holds: its experts, their bytes, and the page sizes that follow."""
    weights_bytes = sum(file.stat().st_size for file in target.glob("*.safetensors"))
    page, block = preset.expert_page_bytes, preset.block_bytes
    return (
        f"  {preset.model_type}, float32: {preset.num_layers} layers of {preset.num_experts} experts, "
        f"top-{preset.num_experts_per_tok}\n"
        f"  safetensors {weights_bytes / _MIB:.1f} MiB, of which experts {preset.expert_bytes / _MIB:.1f} MiB\n"
        f"  E = {page / _KIB:g} KiB (one matrix), S = {block / _KIB:g} KiB (one block of {BLOCK_TOKENS} tokens): "
        f"E = {Fraction(page, block)} S"
    )


def _refuse_target(target: Path, *, force: bool) -> None:
    """Raise if `target` can't be a folder or, without `force`, has files in it."""
    refuse_no_folder(target)
    if not force and target.exists() and not all(map(is_leftover, target.iterdir())):
        msg = f"need an empty folder to write the model into, {target} has files in it: name another or add --force"
        raise ConfigError(msg)


@contextmanager
def _system_errors(target: Path) -> Iterator[None]:
    """Raise as OSError what libraries of Rust say of the system's faults in errors of their own."""
    try:
        yield
    except Exception as error:
        if (found := _OS_ERROR.search(str(error))) is None:
            raise
        number = int(found[1])
        raise OSError(number, os.strerror(number), str(target)) from error
