"""The process that `elasticmoe serve` supervises: vLLM's own server, told how to end and when to say that it serves."""

import functools
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, ParamSpec, TypeVar

from elasticmoe.runtime.cli.model_argument import refuse_model
from elasticmoe.runtime.cli.refuse import refuse
from elasticmoe.runtime.cli.supervise import begin_supervised, tell_serving
from elasticmoe.runtime.contract.names import ENV_REFUSAL_FILE
from elasticmoe.runtime.errors import ElasticMoEError

P = ParamSpec("P")
R = TypeVar("R")
CLOSE_WITHIN_S: Final = 5
"""Time that open answers get once the engine has ended."""


def main(words: Sequence[str]) -> int:
    """Serve with vLLM's command line `words` until stopped; returns the exit status."""
    begin_supervised()
    try:
        _serve(words)
    except ElasticMoEError as error:
        return refuse(str(error))
    except RuntimeError:
        refusal = Path(os.environ[ENV_REFUSAL_FILE])  # by a process of vLLM's
        if not refusal.exists():
            raise
        return refuse(refusal.read_text(encoding="utf-8"))
    return 0


def _serve(words: Sequence[str]) -> None:
    """Hand over to vLLM's own command."""
    sys.argv = ["vllm", "serve", *words]
    from vllm.entrypoints.cli.main import main as vllm_main

    _judge_the_model(words)
    _bound_the_end()
    _say_when_it_serves()
    vllm_main()


def _judge_the_model(words: Sequence[str]) -> None:
    """Have the model judged that vLLM's own parser finds: it alone knows which words before it are a flag's value."""
    from vllm.entrypoints.cli.serve import ServeSubcommand

    validate = ServeSubcommand.validate

    def judge_and_validate(self: ServeSubcommand, args: Namespace) -> None:
        refuse_model(args.model if args.model_tag is None else args.model_tag, words)
        validate(self, args)

    ServeSubcommand.validate = judge_and_validate


def _bound_the_end() -> None:
    """Have answers that still stream cut off after a while once the server is to end.

    Told to end, vLLM kills its engine first and then waits, without a limit, for answers that nobody works on any more.
    """
    from vllm.entrypoints.launcher import uvicorn

    init = functools.partialmethod(uvicorn.Config.__init__, timeout_graceful_shutdown=CLOSE_WITHIN_S)
    vars(uvicorn)["Config"].__init__ = init


def _say_when_it_serves() -> None:
    """Tell the supervisor once vLLM listens to signals: with one server that is when it opens its socket.

    With several, or none, vLLM's first process only watches over others and listens from the start.
    """
    from vllm.entrypoints.cli import serve
    from vllm.entrypoints.launcher import uvicorn

    vars(uvicorn)["Server"].serve = _after_telling(uvicorn.Server.serve)
    for name in ("run_multi_api_server", "run_headless"):
        setattr(serve, name, _after_telling(getattr(serve, name)))


def _after_telling(call: Callable[P, R]) -> Callable[P, R]:
    @functools.wraps(call)
    def tell_and_call(*args: P.args, **kwargs: P.kwargs) -> R:
        tell_serving()
        return call(*args, **kwargs)

    return tell_and_call


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
