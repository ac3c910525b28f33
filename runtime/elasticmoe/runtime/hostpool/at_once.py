"""Many pieces of work at a time, in threads that a process which ends doesn't wait for, as it would for an executor."""

from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import NamedTuple, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class _Ended(NamedTuple):
    """A thread has nothing left to do, or failed."""

    fault: BaseException | None


def at_once(work: Callable[[T], R], pieces: Iterable[T], num_threads: int, name: str) -> Iterator[R]:
    """Yield what `work` makes of each piece, in the order in which they are done; the threads are called `name`.

    Raises what the first failing piece raised, or RuntimeError where the system refuses a thread. Then, and where the
    caller stops, no further piece is begun, and those in hand are waited for.
    """
    left, lock, is_over = iter(pieces), Lock(), Event()
    results = SimpleQueue[R | _Ended]()

    def draw() -> None:
        nothing = object()
        try:
            while not is_over.is_set():
                with lock:
                    piece = next(left, nothing)
                if piece is nothing:
                    break
                results.put(work(piece))  # type: ignore[arg-type]
        except BaseException as fault:  # noqa: BLE001 -- whoever asks for results gets it
            results.put(_Ended(fault))
        else:
            results.put(_Ended(None))

    threads = [Thread(target=draw, name=name, daemon=True) for _ in range(num_threads)]
    try:
        for thread in threads:
            thread.start()
        yield from _until_ended(results, num_threads)
    finally:
        is_over.set()
        for thread in threads:
            if thread.is_alive():  # one that the system refused to start isn't
                thread.join()


def _until_ended(results: "SimpleQueue[R | _Ended]", num_threads: int) -> Iterator[R]:
    while num_threads:
        result = results.get()
        if not isinstance(result, _Ended):
            yield result
        elif result.fault is not None:
            raise result.fault
        else:
            num_threads -= 1
