"""`elasticmoe make-model` on the command line, and what transformers makes of the checkpoints it writes."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerFast

from elasticmoe.runtime.cli.main import main
from elasticmoe.runtime.cli.models import build
from elasticmoe.runtime.cli.models.presets import PRESETS, Preset
from elasticmoe.runtime.cli.models.weights import FIXED_PART, gates, popularity, sample_text_ids

Written = tuple[Preset, Path]

TOP_PARTS = (0.10, 0.25, 0.50)
END = "<|im_end|>"
MAKE = (sys.executable, "-m", "elasticmoe.runtime.cli.main", "make-model")
HELD = """
import sys, time
from elasticmoe.runtime.cli.main import main
from elasticmoe.runtime.cli.models import build
class Model:
    def save_pretrained(self, folder):
        (folder / "model.safetensors").write_text("half")
        print("begun", flush=True)
        time.sleep(600)
build.build_model = lambda *_: Model()
sys.exit(main())
"""
"""The command, which stays where the weights are half written."""
END_S = 100.0


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small for more threads, which only wait for one another on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(scope="module", params=sorted({*PRESETS} - {"medium"}))  # it is 6 GiB
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A preset and the folder that the command wrote it to."""
    target = tmp_path_factory.mktemp("models") / request.param
    assert main(["make-model", request.param, str(target)]) == 0
    return PRESETS[request.param], target


@pytest.fixture(scope="module")
def model(written: Written) -> PreTrainedModel:
    """The checkpoint as transformers loads it."""
    return AutoModelForCausalLM.from_pretrained(written[1])


@pytest.fixture(scope="module")
def tokenizer(written: Written) -> PreTrainedTokenizerFast:
    """The tokenizer as transformers loads it."""
    return AutoTokenizer.from_pretrained(written[1])


@torch.no_grad()
def routed(model: PreTrainedModel, ids: torch.Tensor) -> list[torch.Tensor]:
    """Return what each layer's router selected for the tokens, `[T, K]` each."""
    selected: list[torch.Tensor] = []
    hooks = [gate.register_forward_hook(lambda _gate, _args, out: selected.append(out[2])) for gate in gates(model)]
    model(ids)
    for hook in hooks:
        hook.remove()
    return selected


@torch.no_grad()
def greedy(model: PreTrainedModel, ids: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Return the next `num_tokens` tokens of each prompt, going on past the end token."""
    out: torch.Tensor = model.generate(
        ids, max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    return out[:, ids.shape[1] :]


def top_shares(selected: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return the share of selections that the top 10, 25 and 50 % of experts take."""
    counts = torch.bincount(selected.flatten(), minlength=num_experts).sort(descending=True).values
    return torch.stack([counts[: round(num_experts * part)].sum() / counts.sum() for part in TOP_PARTS])


def generated_shares(fixed: torch.Tensor, top_k: int) -> torch.Tensor:
    """Return the top shares that logits 0.8 g + z give, z standard normal for each token."""
    noise = torch.randn(20_000, len(fixed), generator=torch.Generator().manual_seed(7))
    return top_shares((FIXED_PART * fixed + noise).topk(top_k).indices, len(fixed))


@pytest.mark.parametrize("kind", ["random tokens", "text", "its own answers"])
def test_routing_is_as_skewed_as_the_generator(
    written: Written, model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, kind: str
) -> None:
    """The top 10, 25 and 50 % of experts take the generator's shares of the selections, within 5 points."""
    preset = written[0]
    ids = sample_text_ids(tokenizer, 4, seed=99)
    if kind == "random tokens":
        ids = torch.randint(3, len(tokenizer), ids.shape, generator=torch.Generator().manual_seed(5))
    if kind == "its own answers":
        ids = greedy(model, sample_text_ids(tokenizer, 8, seed=3)[:, :24], 64)
    measured = torch.stack([top_shares(layer, preset.num_experts) for layer in routed(model, ids)]).mean(0)
    fixed = popularity(preset, seed=0)
    wanted = torch.stack([generated_shares(layer, preset.num_experts_per_tok) for layer in fixed]).mean(0)
    assert (measured - wanted).abs().max() < 0.05, f"measured {measured}, generator {wanted}"


def test_routing_differs_from_token_to_token(model: PreTrainedModel) -> None:
    """Few neighbouring tokens get the same experts: the skew is not mere sameness of hidden states."""
    ids = torch.randint(3, 1024, (2, 128), generator=torch.Generator().manual_seed(6))
    for layer in routed(model, ids):
        chosen = layer.sort(dim=-1).values
        same = (chosen[1:] == chosen[:-1]).all(dim=-1).float().mean()
        assert same < 0.1


def test_answers_differ_between_prompts_and_do_not_repeat_one_token(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Greedy answers of 48 tokens hold at least 16 different ones, and no two prompts get the same answer."""
    answers = greedy(model, sample_text_ids(tokenizer, 6, seed=11)[:, :16], 48)
    assert min(len(set(answer.tolist())) for answer in answers) >= 16
    assert len({tuple(answer.tolist()) for answer in answers}) == len(answers)


def test_a_wrong_expert_changes_the_answer(model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast) -> None:
    """With the experts of one layer in another order, every greedy answer is a different one."""
    prompts = sample_text_ids(tokenizer, 4, seed=12)[:, :16]
    before = greedy(model, prompts, 24)
    down_proj = model.get_parameter("model.layers.1.mlp.experts.down_proj")
    original = down_proj.detach().clone()
    with torch.no_grad():
        down_proj.copy_(original.roll(1, dims=0))
        after = greedy(model, prompts, 24)
        down_proj.copy_(original)
    assert (before != after).any(dim=-1).all()


def test_every_expert_has_three_matrices_of_the_page_size(written: Written) -> None:
    """The safetensors name gate_proj, up_proj and down_proj of each expert, E bytes each, in float32."""
    preset, target = written
    with safe_open(target / "model.safetensors", "pt") as tensors:
        names = [name for name in tensors.keys() if ".mlp.experts." in name]  # noqa: SIM118 (not a dict)
        assert len(names) == preset.num_layers * preset.num_experts * 3
        for name in names:
            matrix = tensors.get_tensor(name)
            assert matrix.dtype == torch.float32
            assert matrix.nbytes == preset.expert_page_bytes


def test_config_says_float32_and_the_end_token(written: Written, tokenizer: PreTrainedTokenizerFast) -> None:
    """config.json and generation_config.json name the dtype and the token that ends an answer."""
    config = json.loads((written[1] / "config.json").read_text())
    generation = json.loads((written[1] / "generation_config.json").read_text())
    assert config["dtype"] == "float32"
    assert config["vocab_size"] == len(tokenizer)
    assert config["eos_token_id"] == generation["eos_token_id"] == tokenizer.convert_tokens_to_ids(END)


@pytest.mark.parametrize("text", ["The page moves slowly.", "héllo, 漢字 \n\t 17%", ""])
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    """Byte-level: decoding what was encoded gives the same text."""
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_chat_template_marks_roles_and_opens_the_answer(tokenizer: PreTrainedTokenizerFast) -> None:
    """ChatML, whose marks are one token each."""
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Why?"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == f"<|im_start|>system\nBe short.{END}\n<|im_start|>user\nWhy?{END}\n<|im_start|>assistant\n"
    ids = tokenizer(text)["input_ids"]
    assert ids.count(tokenizer.convert_tokens_to_ids("<|im_start|>")) == 3
    assert ids.count(tokenizer.eos_token_id) == 2


def test_page_sizes_are_what_the_presets_are_for() -> None:
    """E is 2 S in `tiny`; in `tiny-qwen2` it is 11/6 S, as in Qwen1.5-MoE-A2.7B."""
    tiny, qwen2 = PRESETS["tiny"], PRESETS["tiny-qwen2"]
    assert tiny.expert_page_bytes == 2 * tiny.block_bytes
    assert 6 * qwen2.expert_page_bytes == 11 * qwen2.block_bytes


def test_the_seed_decides_every_byte(written: Written, tmp_path: Path) -> None:
    """The same seed writes the same files again, another seed other weights."""
    preset, target = written
    assert main(["make-model", preset.name, str(tmp_path / "same")]) == 0
    assert main(["make-model", preset.name, str(tmp_path / "other"), "--seed", "1"]) == 0
    for file in target.iterdir():
        assert (tmp_path / "same" / file.name).read_bytes() == file.read_bytes(), file.name
    weights = "model.safetensors"
    assert (tmp_path / "other" / weights).read_bytes() != (target / weights).read_bytes()


def test_a_folder_with_files_is_refused_in_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit status 2, the folder named, --force offered, nothing written."""
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["make-model", "tiny", str(tmp_path)]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path) in message
    assert "--force" in message
    assert message.count("\n") == 1
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is a file is never written to, not even with --force."""
    file = tmp_path / "model"
    file.write_text("keep")
    assert main(["make-model", "tiny", str(file), "--force"]) == 2
    assert f"{file} can't be one" in capsys.readouterr().err
    assert file.read_text() == "keep"


def test_force_writes_beside_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --force other files stay, the checkpoint appears, and the report says what it is."""
    (tmp_path / "mine.txt").write_text("keep")
    assert main(["make-model", "tiny", str(tmp_path), "--force"]) == 0
    assert (tmp_path / "mine.txt").read_text() == "keep"
    assert (tmp_path / "model.safetensors").stat().st_size > PRESETS["tiny"].expert_bytes
    assert "E = 2 S" in capsys.readouterr().out


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """`elasticmoe --help` names both commands, though `serve` parses its own words."""
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert "serve" in shown
    assert "make-model" in shown


def test_an_unknown_preset_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The message lists the presets there are."""
    with pytest.raises(SystemExit) as stopped:
        main(["make-model", "huge", str(tmp_path)])
    assert stopped.value.code == 2
    assert "tiny-qwen2" in capsys.readouterr().err


def test_a_seed_that_no_generator_takes_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is written."""
    assert main(["make-model", "tiny", str(tmp_path / "model"), "--seed", "9" * 30]) == 2
    assert "--seed: want a number of at most 4294967295, it is 999" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_one_that_is_ended_leaves_nothing_in_the_way(tmp_path: Path, number: signal.Signals) -> None:
    """Told to end it leaves no folder; what a killed one leaves doesn't keep the next from writing, and goes."""
    target = tmp_path / "model"
    command, pipe = [sys.executable, "-c", HELD, "make-model", "tiny", str(target)], subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "begun\n"
            assert any(target.glob(".writing-*/model.safetensors"))
            process.send_signal(number)
            _, said = process.communicate(timeout=END_S)
        finally:
            process.kill()
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number)
    assert said == ("elasticmoe: interrupted\n" if number == signal.SIGINT else "")
    assert target.exists() == (number == signal.SIGKILL)
    if target.exists():
        assert main(["make-model", "tiny", str(target)]) == 0
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {file.name for file in target.iterdir()}
        assert not any(target.glob(".writing-*"))


def test_a_disk_without_room_is_told_in_one_sentence(tmp_path: Path) -> None:
    """Though a library tells it in an error of its own; here no file may have more than 100 KiB."""
    target = tmp_path / "model"
    command = ["bash", "-c", 'ulimit -f 100 && exec "$@"', "bash", *MAKE, "tiny", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=END_S, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"elasticmoe: want files and an output that can be used: [Errno 27] File too large: '{target}'; "
        "name others, or make room\n"
    )
    assert not target.exists()


def test_other_faults_of_a_library_are_not_taken_for_the_systems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug keeps its traceback."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(build, "build_model", fail)
    with pytest.raises(ZeroDivisionError):
        main(["make-model", "tiny", str(tmp_path / "model")])
    assert not (tmp_path / "model").exists()
