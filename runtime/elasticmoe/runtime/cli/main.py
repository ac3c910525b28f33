"""The `elasticmoe` command: finds the subcommand and turns our errors, and files' faults, into one sentence on stderr.

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
        status = _dispatch(words)
        print(end="", flush=True)  # what can't be written is told now, not when the interpreter ends
    except ElasticMoEError as error:
        return refuse(str(error))
    except BrokenPipeError:
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        _drop_output()
        is_the_systems = error.errno is not None  # libraries raise their own sentences as OSError
        wanted = f"want files and an output that can be used: {error}; name others, or make room"
        return refuse(wanted if is_the_systems else " ".join(str(error).split()))
    except KeyboardInterrupt:
        print("elasticmoe: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    return status


def _drop_output() -> None:
    """Lose what stdout holds, if nobody reads it or it has no room; else the interpreter would try again."""
    try:
        print(end="", flush=True)
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


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
