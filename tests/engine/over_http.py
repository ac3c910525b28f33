"""Requests to a server that speaks OpenAI's API, all of them at once. Used by tests/engine and tests/e2e."""

import httpx

from tests.engine.engines import Requests, Tokens

ANSWER_S = 300.0
"""Only a server that hangs takes longer."""


def generate(base_url: str, model: str, requests: Requests) -> Tokens:
    """Return each request's greedy tokens.

    All prompts go in one request, so that however fast the server is, the first is not done before the last has come.
    Each is asked for as many tokens as the longest; the first ones are those that it would have alone.
    """
    body = {"model": model, "prompt": requests.prompts, "max_tokens": max(requests.max_tokens), "temperature": 0}
    url, more = f"{base_url}/v1/completions", {"ignore_eos": True, "return_token_ids": True}
    answer = httpx.post(url, json=body | more, timeout=ANSWER_S, trust_env=False)
    answer.raise_for_status()
    tokens = [choice["token_ids"] for choice in sorted(answer.json()["choices"], key=lambda choice: choice["index"])]
    return [list(ids[:num]) for ids, num in zip(tokens, requests.max_tokens, strict=True)]
