"""Watches the file that says how many experts of a layer may leave the GPU, in a thread of the engine-core process."""

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from elasticmoe.runtime.contract.config import parse_limit
from elasticmoe.runtime.errors import ConfigError

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25


class LimitFile:
    """Keeps the last good limit; a missing or empty file says nothing, a wrong one is warned of once and ignored."""

    def __init__(self, path: Path, num_experts: int, on_change: Callable[[int], None]) -> None:
        """Call `on_change`, in the watching thread, with every limit that the file newly says."""
        self._path = path
        self._num_experts = num_experts
        self._on_change = on_change
        self._text = ""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="elasticmoe-limit-file", daemon=True)

    def start(self) -> None:
        """Start to watch."""
        self._thread.start()

    def stop(self) -> None:
        """Stop to watch; returns when the thread has ended."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def poll(self) -> int | None:
        """Return the limit if the file says something new, else None."""
        text = self._read()
        if text in ("", self._text):
            return None
        self._text = text
        try:
            return self._parse(text)
        except ConfigError as error:
            logger.warning("%s; the limit stays as it was", error)
            return None

    def _parse(self, text: str) -> int:
        source = f"limit file {self._path}"
        limit = parse_limit(text, source)
        if limit > self._num_experts:
            message = f"{source}: want at most {self._num_experts} (experts of a layer); it is {limit}"
            raise ConfigError(message)
        return limit

    def _read(self) -> str:
        try:
            return self._path.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            return f"unreadable ({error})"

    def _watch(self) -> None:
        while not self._stop.wait(INTERVAL_S):
            limit = self.poll()
            if limit is not None:
                self._on_change(limit)
