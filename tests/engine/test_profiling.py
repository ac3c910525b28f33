"""`elasticmoe profile` on a real engine, and a server's ranking that starts from what it wrote."""

import json
from pathlib import Path

import numpy as np
import pytest

from elasticmoe.runtime.cli.main import main
from elasticmoe.runtime.expert_load import ExpertLoad, read_profile
from tests.engine.sizes import read_shape

pytestmark = pytest.mark.vllm


def test_a_profile_counts_every_token_of_every_layer(tiny: Path, tmp_path: Path) -> None:
    """Each layer draws top_k experts for each token that was computed, and the counts start a ranking."""
    requests, output = tmp_path / "requests.jsonl", tmp_path / "profile.json"
    lines = [{"prompt": f"the cat number {n} sat on the mat"} for n in range(12)]
    requests.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    flags = ["--dtype", "float32", "--max-model-len", "256"]
    assert main(["profile", str(tiny), str(requests), "-o", str(output), "--max-tokens", "40", *flags]) == 0
    shape = read_shape(tiny)
    counts = read_profile(output, shape.num_layers, shape.num_experts)
    by_layer = counts.sum(axis=1)
    assert (by_layer == by_layer[0]).all()
    assert by_layer[0] % shape.top_k == 0
    assert by_layer[0] / shape.top_k > 12 * 20, "prompts and most of the answers"
    load = ExpertLoad(shape.num_layers, shape.num_experts, 4096, shape.top_k)
    load.seed(counts)
    assert load.ranking[:, 0].tolist() == np.argmax(counts, axis=1).tolist()
