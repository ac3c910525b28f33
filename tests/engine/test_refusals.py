"""What can't be served is refused in one sentence that names the flag or the file, before anything is loaded."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from elasticmoe.runtime.errors import ConfigError, ElasticMoEError, UnsupportedError
from tests.engine.checkpoints import drop_tensor
from tests.engine.sizes import arena_bytes, read_config, read_shape

pytestmark = pytest.mark.vllm


def _configure(model: Path, elastic: dict[str, Any] | None = None, **flags: Any) -> Any:
    """Return vLLM's whole configuration for an elastic engine, without starting it."""
    from vllm.engine.arg_utils import EngineArgs

    config = {"elasticmoe": {} if elastic is None else elastic}
    defaults = {"dtype": "float32", "block_size": 16, "max_model_len": 256, "skip_tokenizer_init": True}
    return EngineArgs(model=str(model), additional_config=config, **{**defaults, **flags}).create_engine_config()


@pytest.mark.parametrize(
    ("flags", "name"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size 2"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"cpu_offload_gb": 1}, "--cpu-offload-gb"),
        ({"num_gpu_blocks_override": 10}, "--num-gpu-blocks-override"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "--worker-cls"),
        ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype fp8"),
    ],
)
def test_a_flag_that_is_not_served_is_named(tiny: Path, flags: dict[str, Any], name: str) -> None:
    """An unsupported flag is refused by its name."""
    with pytest.raises(UnsupportedError) as refused:
        _configure(tiny, **flags)
    assert name in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_quantized_checkpoint_is_refused(tiny: Path, tmp_path: Path) -> None:
    """A checkpoint whose config.json says it is quantized is refused with the method's name."""
    quantized = _variant(tiny, tmp_path, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    with pytest.raises(UnsupportedError, match=r"quantization fp8 .*config\.json"):
        _configure(quantized, dtype="bfloat16")


def test_an_architecture_that_is_not_paged_is_refused(tiny: Path, tmp_path: Path) -> None:
    """A model of another architecture is refused with its name and the ones that are paged."""
    other = _variant(tiny, tmp_path, architectures=["MixtralForCausalLM"], model_type="mixtral", num_local_experts=8)
    with pytest.raises(UnsupportedError, match=r"MixtralForCausalLM.*Qwen3MoeForCausalLM"):
        _configure(other)


def test_an_unknown_key_is_named_with_the_known_ones(tiny: Path) -> None:
    """additional_config may hold no key that we don't know."""
    with pytest.raises(ConfigError, match=r"unknown key elasticmoe\.policies.*policy"):
        _configure(tiny, {"policies": "threshold"})


def test_two_sizes_for_one_arena_are_refused(tiny: Path) -> None:
    """--kv-cache-memory-bytes beside arena_bytes is refused with both numbers."""
    with pytest.raises(ConfigError, match=r"--kv-cache-memory-bytes 100000.*arena_bytes 200000"):
        _configure(tiny, {"arena_bytes": 200000}, kv_cache_memory_bytes=100000)


def test_as_many_loading_buffers_as_layers_are_refused(tiny: Path) -> None:
    """With a buffer for every MoE layer no eviction frees a page: one less is the most."""
    layers = read_shape(tiny).num_layers
    _configure(tiny, {"loading_depth": layers - 1})
    with pytest.raises(ConfigError, match=rf"loading_depth: want less than the model's {layers} MoE.*it is {layers}"):
        _configure(tiny, {"loading_depth": layers})


@pytest.mark.parametrize(("variable", "value"), [("ELASTICMOE_LIMIT", "ten"), ("ELASTICMOE_TRANSPORT", "pigeon")])
def test_a_wrong_variable_is_named(tiny: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str) -> None:
    """A variable of ours with a value that can't be used is refused by name and value."""
    monkeypatch.setenv(variable, value)
    with pytest.raises(ElasticMoEError, match=rf"{variable}.*{value}"):
        _configure(tiny)


def test_serve_refuses_in_one_sentence(tiny: Path) -> None:
    """`elasticmoe serve` ends with status 2 and the sentence as its last line (vLLM puts its process's name before)."""
    done = _serve(tiny, "--pipeline-parallel-size", "2")
    assert done.returncode == 2
    assert "elasticmoe: --pipeline-parallel-size 2 can't be combined" in done.stderr.splitlines()[-1]


def test_a_checkpoint_that_lacks_a_matrix_is_refused(tiny: Path, tmp_path: Path) -> None:
    """The missing tensor is named, also though it is found out only when vLLM's processes load the model."""
    lacking = _variant(tiny, tmp_path)
    drop_tensor(lacking, "model.layers.1.mlp.experts.3.up_proj.weight")
    done = _serve(lacking)
    assert done.returncode == 2
    assert "model.layers.1.mlp.experts.3.up_proj.weight" in done.stderr.splitlines()[-1]


def test_an_arena_too_small_is_refused_with_the_numbers(tiny: Path) -> None:
    """An arena that can't hold one layer's experts and one request says what it needs and what there is."""
    done = _serve(tiny, "--elastic-arena-bytes", "2000000")
    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert "arena_bytes" in last
    assert "--max-model-len" in last
    assert arena_bytes(tiny, 16, 0) > 2000000


@pytest.mark.parametrize("words", [["--port", "0", "M"], ["--enforce-eager", "M", "-tp", "2"], ["--config", "C"]])
def test_the_model_is_judged_wherever_vllm_finds_it(tmp_path: Path, words: list[str]) -> None:
    """After a flag with a value or without one, or in a file: what vLLM's own parser takes for it."""
    gone, file = str(tmp_path / "gone"), tmp_path / "config.yaml"
    file.write_text(f"model: {gone}\nport: 0\n")
    refused = _run([{"M": gone, "C": str(file)}.get(word, word) for word in words])
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[-1].startswith(f"elasticmoe: model '{gone}': want the folder of a checkpoint")
    assert "Traceback" not in refused.stderr


def _serve(model: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    common = ("--dtype", "float32", "--block-size", "16", "--max-model-len", "256", "--port", "0")
    return _run([str(model), *common, *flags])


def _run(words: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "elasticmoe.runtime.cli.main", "serve", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


def _variant(model: Path, tmp_path: Path, **config: Any) -> Path:
    """Return a copy of a checkpoint with other entries in its config.json."""
    copy = tmp_path / "variant"
    shutil.copytree(model, copy)
    (copy / "config.json").write_text(json.dumps({**read_config(model), **config}))
    return copy
