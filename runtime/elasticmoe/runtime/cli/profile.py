"""`elasticmoe profile MODEL REQUESTS -o FILE`: counts which experts the user's own requests are routed to.

What it writes is an offline ranking for `elasticmoe serve --elastic-profile`. Requests are a JSONL file, one JSON
object a line with a `prompt` or with chat `messages` (also inside `body`, as in OpenAI's batch files).
"""

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elasticmoe.runtime.cli.model_argument import refuse_model
from elasticmoe.runtime.cli.refuse import refuse_output
from elasticmoe.runtime.cli.staging import write_whole
from elasticmoe.runtime.errors import ConfigError

Request = str | list[dict[str, Any]]
"""A prompt as text, or the messages of a chat."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add `profile` to the command's subparsers."""
    parser = subparsers.add_parser(
        "profile", help="count which experts your requests use, for serve --elastic-profile; takes vLLM's engine flags"
    )
    add = parser.add_argument
    add("model", help="the checkpoint, as vllm serve takes it")
    add("requests", type=Path, help="JSONL: one object a line with a `prompt`, or with chat `messages`")
    add("-o", "--output", type=Path, required=True, help="the profile to write")
    add("--max-tokens", type=int, default=128, help="tokens that each request may generate (default: 128)")
    add("--limit", type=int, default=None, help="take the first so many requests (default: all)")
    parser.set_defaults(run=run, takes_rest=True)


def run(args: argparse.Namespace) -> int:
    """Run the requests and write the profile; 0 when done."""
    for flag, number in (("--max-tokens", args.max_tokens), ("--limit", args.limit)):
        if number is not None and number < 1:
            raise ConfigError(f"{flag}: want a number above 0, it is {number}")
    refuse_output("--output", args.output)
    refuse_model(args.model, args.rest)
    requests = read_requests(args.requests)[: args.limit]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the counts are read from the engine core
    os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
    from elasticmoe.runtime.engine.profiling import count_routed

    counts = count_routed(args.model, requests, args.max_tokens, args.rest)
    document = {"model": args.model, "num_requests": len(requests), "counts": counts.tolist()}
    write_whole(args.output, json.dumps(document) + "\n")
    layers, experts = counts.shape
    print(f"wrote {args.output}: {int(counts.sum())} selections of {layers} layers of {experts} experts")
    return 0


def read_requests(path: Path) -> Sequence[Request]:
    """Return the requests of a JSONL file; raises ConfigError that names the line and what it lacks."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        message = f"requests {path}: want a JSONL file, but it can't be read ({error}); give another"
        raise ConfigError(message) from error
    requests = [_request(f"{path}:{number}", line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not requests:
        message = f"requests {path}: want at least one request, there is none; give another file"
        raise ConfigError(message)
    return requests


def _request(where: str, line: str) -> Request:
    try:
        document: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        message = f"{where}: want one JSON object a line, but it can't be read ({error})"
        raise ConfigError(message) from error
    if isinstance(document, Mapping):
        body = document.get("body", document)
        given = body.get("prompt", body.get("messages")) if isinstance(body, Mapping) else None
        if isinstance(given, str) and given:
            return given
        if isinstance(given, list) and given and all(isinstance(part, dict) and "role" in part for part in given):
            return given
    message = f"{where}: want a `prompt` of text or a list of chat `messages`; it is {line[:80]!r}"
    raise ConfigError(message)
