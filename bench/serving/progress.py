"""The progress lines of the demo and the benches."""

import time

STARTED_S = time.monotonic()


def say(message: str) -> None:
    """Print a line with the seconds since the start."""
    print(f"[{time.monotonic() - STARTED_S:4.0f} s] {message}", flush=True)
