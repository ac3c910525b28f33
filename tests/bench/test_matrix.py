"""The serving matrix: what its cells, routing, figures and result are, and one run of it on a real engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.matrix.agreement import tolerances
from bench.matrix.cells import Cell, parse_cells
from bench.matrix.combine import add_ratios, combine, compare_tokens, read_lines, tokens_path
from bench.matrix.drive import Recorder, Served
from bench.matrix.logits_kernel import _logits_kernel as kernel
from bench.matrix.measure import company, figures, is_good
from bench.matrix.plans import Answer
from bench.matrix.routing import ForcedRouting
from bench.matrix.systems import Model, goal_bytes, prefetch_group, read_model
from bench.matrix.workloads import Sizes, make_prompts, plan_arrivals
from bench.serving.errors import BadScenario
from elasticmoe.runtime.units import ExpertKey
from tests.fakes.snapshots import make_snapshot, offloaded_tail

ROOT = Path(__file__).resolve().parent.parent.parent
QWEN3 = ROOT / "bench" / "models" / "qwen3-30b-a3b.json"
CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 32,
    "hidden_act": "silu", "hidden_size": 128, "intermediate_size": 256, "max_position_embeddings": 4096,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 128, "norm_topk_prob": True,
    "num_attention_heads": 4, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 4,
    "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": False,
    "torch_dtype": "float32", "vocab_size": 1024,
}  # fmt: skip


def test_a_spec_names_cells_and_their_repeats() -> None:
    """Each repeat is a cell of its own, in the order of the spec; a cell that is named again goes on counting."""
    assert parse_cells("closed:flat:1x2, open:skewed:2@3.5,light:flat:1+logprobs,closed:flat:1") == (
        Cell("closed", "flat", 1.0, repeat=0),
        Cell("closed", "flat", 1.0, repeat=1),
        Cell("open", "skewed", 2.0, 3.5),
        Cell("light", "flat", 1.0, has_logprobs=True),
        Cell("closed", "flat", 1.0, repeat=2),
    )


WRONG = "closed:skewed shut:flat:1 closed:round:1 open:flat:1 light:flat:1@2 open:flat:1@0 closed:flat:0 closed:flat:."


@pytest.mark.parametrize("spec", [*WRONG.split(), "closed:flat:1.2.3", "closed:flat:1x0", "closed:flat:1x9999"])
def test_a_spec_that_is_none_is_refused(spec: str) -> None:
    """The sentence names the part; only the open loop has a rate, and it must have one."""
    with pytest.raises(BadScenario, match=spec):
        parse_cells("closed:flat:1," + spec)


def _drawn(*, is_skewed: bool) -> torch.Tensor:
    """How often each expert [layers, N] is drawn by 60 requests of 200 tokens, most drawn first."""
    routing = ForcedRouting(4, 128, 12000, CPU)
    routing.set_skewed(is_skewed=is_skewed)
    routing.places[0] = torch.arange(60).repeat_interleave(200)
    routing.places[1] = torch.arange(200).repeat(60)
    ids = torch.stack([routing.logits(layer, 12000, torch.float32).topk(8).indices.flatten() for layer in range(4)])
    counts = torch.zeros((4, 128)).scatter_add_(1, ids, torch.ones(ids.shape))
    return counts.sort(descending=True).values / counts.sum(1, keepdim=True)


def test_skewed_routing_is_as_measured() -> None:
    """The top 10, 25 and 50 % of experts draw about 43, 70 and 91 % of all tokens, pooled over requests."""
    shares = _drawn(is_skewed=True).mean(0).cumsum(0)
    assert [float(shares[n - 1]) for n in (13, 32, 64)] == pytest.approx([0.43, 0.70, 0.91], abs=0.04)


def test_flat_routing_is_near_uniform() -> None:
    """No expert draws a third more or less than the mean."""
    shares = _drawn(is_skewed=False) * 128
    assert 0.67 < float(shares.min()) < float(shares.max()) < 1.33


def test_the_process_behind_a_request_is_autoregressive() -> None:
    """The noise has unit variance and a correlation of a half with the token before, and less than a third two back."""
    z = ForcedRouting(2, 64, 1, CPU).z
    assert float(z.var()) == pytest.approx(1, abs=0.03)
    assert float((z[:, 1:] * z[:, :-1]).mean()) == pytest.approx(0.5, abs=0.03)
    assert float((z[:, 2:] * z[:, :-2]).mean()) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(("is_skewed", "recall"), [(True, 0.9), (False, 0.86)])
def test_a_guess_names_most_of_a_tokens_experts(is_skewed: bool, recall: float) -> None:  # noqa: FBT001
    """Nine of ten when skewed, a little less when flat; and it is no worse for one layer than for another."""
    routing = ForcedRouting(3, 128, 4000, CPU)
    routing.set_skewed(is_skewed=is_skewed)
    routing.places[0], routing.places[1] = torch.arange(4000) % 500, torch.arange(4000)
    for layer in range(3):
        come = routing.logits(layer, 4000, torch.float32).topk(8).indices
        guessed = routing.predicted(layer, 4000, torch.float32).topk(8).indices
        found = (come[:, :, None] == guessed[:, None, :]).any(-1).float().mean()
        assert float(found) == pytest.approx(recall, abs=0.03)


INTERPRETED = """
import torch
from bench.matrix.logits_kernel import write_logits
from bench.matrix.routing import ForcedRouting
routing = ForcedRouting(3, 20, 7, torch.device("cpu"))
routing.places[0], routing.places[1] = torch.arange(7) * 70, torch.arange(7) * 300
for skewed in (True, False):
    routing.set_skewed(is_skewed=skewed)
    out = torch.empty((5, 20))
    tables = routing.g[2], routing.r[2], routing.z[2], routing.offset
    write_logits(out, tables, routing.skew, routing.places)
    torch.testing.assert_close(out, routing.reference(2, 5))
    assert bool((out == routing.z[2, (routing.offset[routing.places[0, :5].long()] + routing.places[1, :5]) % 4096])
                .all()) != skewed
"""


def test_the_kernel_writes_what_the_reference_says() -> None:
    """In Triton's interpreter, skewed and flat, for fewer tokens than there are places and N no power of two."""
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], cwd=ROOT, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_kernel_compiles_for_a_gpu() -> None:
    """For a Hopper GPU and bf16 logits, without one."""
    floats = dict.fromkeys(("g_ptr", "r_ptr", "z_ptr", "skew_ptr"), "*fp32")
    types = floats | dict.fromkeys(("offset_ptr", "places_ptr"), "*i32") | {"out_ptr": "*bf16"}
    types |= dict.fromkeys(("max_tokens", "num_experts", "num_positions"), "i32") | {"BLOCK": "constexpr"}
    block = {(kernel.arg_names.index("BLOCK"),): 128}
    made = triton.compile(ASTSource(kernel, types, block), target=GPUTarget("cuda", 90, 32), options={"num_warps": 1})
    assert "st.global" in made.asm["ptx"]


def test_arrivals_of_each_workload() -> None:
    """All at once, eight of the mean length, by the trace's clock, and a calm after a burst."""
    sizes = Sizes(requests=20, seconds=10, max_model_len=8192)
    closed = plan_arrivals(Cell("closed", "flat", 1), sizes)
    assert len(closed) == 20
    assert {one.at_s for one in closed} == {0}
    assert plan_arrivals(Cell("closed", "flat", 1), sizes) == closed
    assert {(one.num_in, one.num_out) for one in plan_arrivals(Cell("light", "flat", 1), sizes)} == {(168, 205)}
    burst = plan_arrivals(Cell("burst", "flat", 1), sizes)
    assert [one.at_s for one in burst if one.is_after_burst] == [n / 2 for n in range(20)]


def test_the_open_loop_comes_faster_by_its_rate() -> None:
    """Twice the rate is the same requests in half the time, and more of them; prompts are short enough."""
    sizes = Sizes(seconds=20, max_model_len=1024)
    slow, fast = (plan_arrivals(Cell("open", "flat", 1, rate), sizes) for rate in (1.0, 2.0))
    assert [(one.at_s / 2, one.num_in) for one in slow] == [(one.at_s, one.num_in) for one in fast[: len(slow)]]
    assert len(fast) > 1.3 * len(slow) > 0
    assert max(one.num_in for one in fast) <= 512
    assert max(one.num_in + one.num_out for one in fast) <= 1024


def test_prompts_are_as_long_as_asked() -> None:
    """And the same for the same seed."""
    arrivals = plan_arrivals(Cell("closed", "flat", 1), Sizes(requests=5))
    prompts = make_prompts(arrivals, 1000, seed=1)
    assert [len(prompt) for prompt in prompts] == [one.num_in for one in arrivals]
    assert prompts == make_prompts(arrivals, 1000, seed=1) != make_prompts(arrivals, 1000, seed=2)


def test_stock_offloaders_free_about_what_ours_may() -> None:
    """Ten experts of 9.4 MB in 48 layers are 4.5 GB; the prefetch offloader frees whole layers, at least as much."""
    model: Model = read_model(QWEN3)
    assert goal_bytes(model) == 10 * 48 * 3 * 2048 * 768 * 2
    group, freed = prefetch_group(model)
    assert 48 // group == freed + 1
    assert 1 <= freed * model.layer_bytes / goal_bytes(model) < 1.3


def _recorder() -> Recorder:
    recorder = Recorder(scheduler=None)
    recorder.served = {
        0: Served(arrived_s=1.0, tokens=[1] * 11, first_s=2.0, last_s=3.0),
        1: Served(arrived_s=1.0, tokens=[1] * 11, first_s=7.0, last_s=7.5),
        2: Served(arrived_s=1.0, tokens=[1] * 11, first_s=1.5, last_s=3.5),
    }
    recorder.steps = [{0: 5, 2: 5}]
    return recorder


def test_figures_of_three_requests() -> None:
    """TTFT from arrival, TPOT between tokens; one came too late and one too slowly, so one of three is good."""
    row = figures(_recorder(), wall_s=10.0)
    assert (row["tok_s"], row["ttft_ms"], row["p99_ttft_ms"]) == (3.3, 1000.0, 6000.0)
    assert (row["tpot_ms"], row["p99_tpot_ms"]) == (100.0, 200.0)
    assert (row["goodput_ok"], row["goodput_tok_s"]) == (pytest.approx(1 / 3), 1.1)
    assert is_good(Served(arrived_s=0.0, tokens=[1], first_s=1.0, last_s=1.0))


def test_company_tells_batches_apart() -> None:
    """A request has the same digest only if every batch that it was in was the same, and in the same order."""
    one = company([{0: 5, 1: 7}, {0: 1, 1: 1}, {2: 4}])
    assert one == company([{1: 7, 0: 5}, {0: 1, 1: 1}, {2: 4}])
    other = company([{0: 5, 1: 7}, {0: 1, 1: 1}, {0: 1}, {2: 4}])
    assert [one[n] == other[n] for n in range(3)] == [False, True, True]
    assert company([{0: 5}, {0: 1}])[0] != company([{0: 1}, {0: 5}])[0]


def _row(system: str, tok_s: float, repeat: int = 0, kv_gib: float = 1.0) -> dict[str, Any]:
    cell = {"workload": "closed", "routing": "flat", "kv_gib": kv_gib, "gpus": 1, "bus_gb_s": None, "rate": None}
    return cell | {"has_logprobs": False, "system": system, "repeat": repeat, "tok_s": tok_s}


def test_ratios_are_to_the_median_of_stock() -> None:
    """Of the same cell only, whatever the bus, which stock doesn't use; None where stock did not run it."""
    rows = [_row("stock-graphs", tok_s, n) for n, tok_s in enumerate((10.0, 30.0, 20.0))]
    rows += [_row("ours", 40.0), _row("ours", 40.0, kv_gib=2.0), _row("ours", 30.0) | {"bus_gb_s": 26.0}]
    assert [row["ratio"] for row in add_ratios(rows)] == [0.5, 1.5, 1.0, 2.0, None, 1.5]


def test_tokens_are_compared_where_both_ran_the_same_batches() -> None:
    """Others don't count; the replay with most in common does; with nothing in common nothing is said."""
    ours = {"company": {"0": "a", "1": "b"}, "tokens": {"0": [1], "1": [2]}}
    other = {"company": {"0": "a", "1": "x"}, "tokens": {"0": [1], "1": [9]}}
    assert compare_tokens(ours, [other]) == {"num_comparable": 1, "tokens_equal": True}
    wrong = {"company": {"0": "a", "1": "b"}, "tokens": {"0": [1], "1": [9]}}
    assert compare_tokens(ours, [other, wrong]) == {"num_comparable": 2, "tokens_equal": False}
    assert compare_tokens(ours, []) == {"num_comparable": 0, "tokens_equal": None}


def test_a_line_that_was_broken_off_is_left_out(tmp_path: Path) -> None:
    """A run that was cut off keeps what it has; a broken line elsewhere is a fault."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"a": 1}\n{"a": ')
    assert read_lines(path) == [{"a": 1}]
    path.write_text('{"a": \n{"a": 1}\n')
    with pytest.raises(BadScenario, match=r"rows\.jsonl:1: want a JSON object, it can't be read \(Expecting value"):
        read_lines(path)


def test_a_noted_plan_is_followed_only_where_it_fits() -> None:
    """Who leaves must be resident, who comes away, and there must be pages for those that come."""
    snap = make_snapshot(offloaded_tail(2, 0), free_pages=2)
    resident, away = ExpertKey(0, 0), ExpertKey(0, 7)
    assert Answer((resident,), (away,), is_swap=True).fits(snap)
    assert Answer((resident, ExpertKey(1, 7)), (), is_swap=False).fits(snap)
    assert not Answer((away,), (), is_swap=False).fits(snap)
    assert not Answer((), (resident,), is_swap=False).fits(snap)
    assert not Answer((), (away,), is_swap=False).fits(snap)


def _run(folder: Path, system: str, *more: str) -> Path:
    """Run one system through the matrix, in a process of its own as always; its rows' file."""
    (folder / "config.json").write_text(json.dumps(TINY))
    out = folder / f"{system}.jsonl"
    words = ["--system", system, "--model", str(folder / "config.json"), "--out", str(out), "--eager"]
    sizes = ["--max-kv-gib", "0.0625", "--max-model-len", "256", "--requests", "16", "--seconds", "1"]
    command = [sys.executable, "-m", "bench.serving_h200", "run", *words, *sizes, *more]
    environ = os.environ | {"TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return out


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_systems_serve_the_same_cells(tmp_path: Path) -> None:
    """Stock and ours in rooms that are too small give equal tokens, other ones under flat routing, and a replay agrees.

    Ours evicts, and every expert is back for the next cell; both have the same blocks of KV.
    """
    cells = ["--cells", "closed:skewed:0.001+logprobs,closed:flat:0.001,burst:skewed:0.001"]
    stock = _run(tmp_path, "stock-eager", *cells)
    ours = _run(tmp_path, "ours", "--fetch", "host", *cells)
    replay = _run(tmp_path, "replay", "--fetch", "host", "--follow", str(ours), *cells)
    rows, rivals = read_lines(ours), read_lines(stock)
    assert [row["kv_blocks"] for row in rows] == [row["kv_blocks"] for row in rivals] == [32] * 3
    assert all(row["was_settled"] and row["evictions"] > 0 and row["missed"] > 0 for row in rows)
    assert all(row["peak"] > rival["peak"] for row, rival in zip(rows, rivals, strict=True))
    assert rows[2]["resident_min"] < rows[2]["series"][-1]["resident"]
    tokens, others = (read_lines(tokens_path(path)) for path in (ours, stock))
    assert [entry["tokens"] for entry in tokens] == [entry["tokens"] for entry in others]
    assert tokens[0]["tokens"] != tokens[1]["tokens"]
    apart = tolerances(tokens[0], others[0])
    assert apart["logprob_apart_max"] < 1e-3
    assert "margin_where_apart_max" not in apart
    result = combine([ours, stock, replay], "none", None)
    compared = [row for row in result["rows"] if row["system"] == "ours" and row["workload"] == "closed"]
    assert [(row["tokens_equal"], row["num_comparable"]) for row in compared] == [(True, 16)] * 2
