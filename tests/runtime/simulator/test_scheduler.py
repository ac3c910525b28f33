"""vLLM's rules of scheduling: order, chunks, admission, preemption."""

from elasticmoe.runtime.simulator.kv import StockKv
from elasticmoe.runtime.simulator.requests import Arrival, Request
from elasticmoe.runtime.simulator.scheduler import Limits, Scheduler


def make(num_blocks: int, *lengths: tuple[int, int], seqs: int = 8, tokens: int = 64) -> Scheduler:
    """Return a scheduler over so many usable blocks with requests of (prompt, answer) tokens waiting."""
    scheduler = Scheduler(StockKv(num_blocks + 1), Limits(max_num_seqs=seqs, max_num_batched_tokens=tokens))
    scheduler.waiting.extend(Request(Arrival(0.0, *pair), n, pair[0]) for n, pair in enumerate(lengths))
    return scheduler


def step(scheduler: Scheduler) -> list[tuple[int, int]]:
    """Take a step; return (request, new tokens) of what it scheduled."""
    scheduler.schedule()
    found = [(request.group, num_new) for request, num_new in scheduler.scheduled]
    scheduler.finish_step(1.0)
    return found


def test_a_prompt_is_cut_to_the_step() -> None:
    """64 tokens a step: 40 of the first prompt, 24 of the second; its rest comes with the first one's next token."""
    scheduler = make(100, (40, 3), (50, 3))
    assert step(scheduler) == [(0, 40), (1, 24)]
    assert step(scheduler) == [(0, 1), (1, 26)]
    assert step(scheduler) == [(0, 1), (1, 1)]


def test_the_last_prompt_token_brings_the_first_answer() -> None:
    """A prompt and two answers are two steps; the second token's KV is never computed."""
    scheduler = make(100, (10, 2))
    assert step(scheduler) == [(0, 10)]
    request = scheduler.running[0]
    assert (request.first_token_s, request.generated) == (1.0, 1)
    assert step(scheduler) == [(0, 1)]
    assert not scheduler.has_requests
    assert request.finished_s == 1.0
    assert scheduler.kv.num_free == 100  # type: ignore[attr-defined]


def test_at_most_so_many_run() -> None:
    """The third request waits for max_num_seqs."""
    scheduler = make(100, (5, 9), (5, 9), (5, 9), seqs=2)
    assert [request for request, _ in step(scheduler)] == [0, 1]
    demand = scheduler.demand()
    assert (demand.num_running, demand.num_waiting, demand.waiting_blocks) == (2, 0, 0)


def test_a_prompt_starts_only_if_all_of_it_fits() -> None:
    """Four blocks hold the first 40 tokens, and not the second 40, though their first chunk would fit."""
    scheduler = make(4, (40, 3), (40, 3), tokens=48)
    assert step(scheduler) == [(0, 40)]
    demand = scheduler.demand()
    assert (demand.num_waiting, demand.waiting_blocks) == (1, 3)
    assert (demand.num_tokens, demand.prompt_tokens) == (40, 40), "nobody asks for blocks any more"


def test_who_asks_for_blocks_counts_as_part_of_the_step() -> None:
    """Two prompts of 20 and 30 tokens, 32 a step: the asking one's tokens are told too, beside prompts and decodes."""
    scheduler, heard = make(4, (20, 9), (30, 3), tokens=32), []
    allocate = scheduler.kv.allocate

    def listen(request: Request, num_new: int, num_wanted: int, lost_tokens: int) -> bool:
        demand = scheduler.demand()
        heard.append((demand.num_tokens, demand.prompt_tokens, demand.asked_tokens, demand.has_prompt))
        return allocate(request, num_new, num_wanted, lost_tokens)

    scheduler.kv.allocate = listen  # type: ignore[method-assign]
    step(scheduler)
    assert heard == [(20, 20, 20, False), (32, 32, 12, True)]
    step(scheduler)
    assert heard[2:] == [(19, 18, 18, False)]
    demand = scheduler.demand()
    assert (demand.num_tokens, demand.prompt_tokens, demand.asked_tokens) == (19, 18, 0)


def test_who_waits_for_a_first_token_is_told_of_from_its_arrival() -> None:
    """The first of those that wait; one that was preempted after its first token waits for none."""
    scheduler = make(100, (10, 5), (10, 5), (10, 5), seqs=2)
    assert scheduler.demand().waited_s == 0
    scheduler.now_s = 3.0
    assert scheduler.demand().waited_s == 3.0
    step(scheduler)
    assert (scheduler.demand().num_waiting, scheduler.demand().waited_s) == (0, 0.0)
    scheduler = make(3, (16, 40), (16, 40), (32, 40))
    step(scheduler)
    while not scheduler.num_preemptions:
        step(scheduler)
    assert [request.group for request in scheduler.waiting] == [1, 2]
    assert scheduler.waiting[0].first_token_s >= 0
    scheduler.now_s = 7.0
    assert scheduler.demand().waited_s == 7.0
    scheduler.waiting.pop()
    assert (scheduler.demand().num_waiting, scheduler.demand().waited_s) == (1, 0.0)


def test_the_last_one_is_preempted_and_starts_again_first() -> None:
    """Short of a block, the last running request goes, loses its KV, and is the first to be admitted again."""
    scheduler = make(3, (16, 20), (16, 20), (16, 20))
    assert [request for request, _ in step(scheduler)] == [0, 1, 2]
    assert step(scheduler) == [(0, 1)]
    assert scheduler.num_preemptions == 2
    assert [request.group for request in scheduler.waiting] == [1, 2]
    assert scheduler.waiting[0].computed == 0


def test_nobody_starts_in_a_step_that_preempts() -> None:
    """A request that would fit waits for the next step."""
    scheduler = make(4, (30, 20), (30, 20), (1, 2))
    assert [request for request, _ in step(scheduler)] == [0, 1]
    step(scheduler), step(scheduler)
    assert step(scheduler) == [(0, 1)]
    assert [request.group for request in scheduler.waiting] == [1, 2]


def test_what_was_generated_is_computed_again() -> None:
    """A preempted request comes back with all its tokens, and its next step computes them together."""
    scheduler = make(4, (30, 6), (30, 20))
    steps = [step(scheduler) for _ in range(8)]
    assert scheduler.num_preemptions == 1
    again = [pair for pairs in steps[1:] for pair in pairs if pair[0] == 1 and pair[1] > 1]
    assert again == [(1, 33)]


def test_one_that_cannot_grow_alone_goes_itself() -> None:
    """With nobody behind it, the request preempts itself; nothing is scheduled."""
    scheduler = make(1, (16, 5))
    assert step(scheduler) == [(0, 16)]
    assert step(scheduler) == []
    assert scheduler.num_preemptions == 1


def test_an_aborted_request_gives_its_blocks_back() -> None:
    """Whether it runs or waits; the others stay."""
    scheduler = make(4, (40, 9), (40, 9), (5, 9))
    step(scheduler)
    running, waiting = scheduler.running[0], scheduler.waiting[0]
    scheduler.abort(running)
    scheduler.abort(waiting)
    assert scheduler.kv.num_free == 4  # type: ignore[attr-defined]
    assert [request.group for request in (*scheduler.running, *scheduler.waiting)] == [2]
