"""The `elasticmoe` command: finds the subcommand and turns our errors into one sentence on stderr.

`serve` takes every flag of `vllm serve`, so its part of the command line goes to it as it is.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from elasticmoe.runtime.cli import coordinator, make_model, plan, profile
from elasticmoe.runtime.cli.refuse import refuse
from elasticmoe.runtime.errors import ElasticMoEError


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status of the subcommand that `argv` names (default: the process's own arguments)."""
    signal.signal(signal.SIGTERM, _end)  # until the subcommand has its own way: a container's first process has none
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(words)
    except ElasticMoEError as error:
        return refuse(str(error))


def _end(number: int, _: FrameType | None) -> None:
    """End at once, as by default: an exception could be swallowed by what is being imported."""
    os._exit(128 + number)


def _dispatch(words: list[str]) -> int:
    """Run the subcommand; `serve` gets the rest of the words untouched."""
    if words[:1] == ["serve"]:
        from elasticmoe.runtime.cli import serve

        return serve.run(words[1:])
    parser = _parser()
    args, rest = parser.parse_known_args(words)
    if rest and not getattr(args, "takes_rest", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    args.rest = rest
    status: int = args.run(args)
    return status


def _parser() -> argparse.ArgumentParser:
    """Return the parser of all subcommands; `serve` is there for the list in `--help` alone."""
    parser = argparse.ArgumentParser(prog="elasticmoe", description="Expert weights and KV cache in one pool of pages.")
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND")
    subparsers.add_parser("serve", add_help=False, help="vllm serve with the elastic pool; takes all its flags")
    coordinator.add_parser(subparsers)
    make_model.add_parser(subparsers)
    profile.add_parser(subparsers)
    plan.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
