"""Random weights for a test model, with the fixed part of the routing skew in its gates.

Gates have no bias, so the fixed part g goes through what the hidden states have in common: one forward over sample
tokens sets each gate just before its first use, from the hidden states that reach it. Over those tokens expert e's
logit is then 0.8 g_e + z, z of mean 0 and variance 1, as in the generator it follows.
Shapes: T tokens, N experts, d hidden size, V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from elasticmoe.runtime.cli.models.presets import Preset
from elasticmoe.runtime.cli.models.text import sentences

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Hook = Callable[[nn.Module, tuple[Tensor, ...]], None]

FIXED_PART: Final = 0.8  # the weight of g in a router logit
_COMMON_PART: Final = 0.6  # what all embeddings share, as a part of their norm, so that a mean survives to each gate
_ATTENTION_SHARPNESS: Final = 2.5  # the spread of attention logits: keeps long contexts from averaging out
_BIAS_SPREAD: Final = 0.1
_HEAD_GAIN: Final = 3.0  # the spread of the output logits
_RARE_HEAD_GAIN: Final = 0.1  # for tokens that sample text hardly has, so that answers are made of words
_RARE_COUNT: Final = 10
_SAMPLE_ROWS: Final = 24
_HEAD_SAMPLE_ROWS: Final = 200
_ROW_TOKENS: Final = 128
_TOKENS_PER_SENTENCE: Final = 8  # fewer than any sentence has on average, so that sample text is long enough


def popularity(preset: Preset, seed: int) -> Tensor:
    """Return g, the fixed part of the routing: standard normal, `[layers, N]`."""
    return torch.randn(preset.num_layers, preset.num_experts, generator=torch.Generator().manual_seed(seed))


def sample_text_ids(tokenizer: "PreTrainedTokenizerFast", rows: int, seed: int) -> Tensor:
    """Return sample text as tokens, `[rows, 128]`."""
    text = " ".join(sentences(rows * _ROW_TOKENS // _TOKENS_PER_SENTENCE, seed))
    ids = torch.tensor(tokenizer(text, verbose=False)["input_ids"])
    return ids[: rows * _ROW_TOKENS].view(rows, _ROW_TOKENS)


@torch.no_grad()
def fill_weights(model: nn.Module, preset: Preset, tokenizer: "PreTrainedTokenizerFast", seed: int) -> None:
    """Overwrite every weight of a transformers causal LM; the same for the same seed on the same machine."""
    rng = torch.Generator().manual_seed(seed + 1)
    for name, weight in sorted(model.named_parameters()):
        weight.copy_(_random_weight(name, weight.shape, preset.moe_gain, rng))
    text = sample_text_ids(tokenizer, _SAMPLE_ROWS, seed)
    noise = torch.randint(len(tokenizer.all_special_ids), len(tokenizer), text.shape, generator=rng)
    setters = [_gate_setter(FIXED_PART * fixed) for fixed in popularity(preset, seed)]
    modules = [*gates(model), model.get_submodule("lm_head")]
    with _one_thread(), _before_forward(modules, [*setters, _head_setter(_head_gains(tokenizer, seed))]):
        model(torch.cat([text, noise]))


def gates(model: nn.Module) -> list[nn.Module]:
    """Return the router of each layer of a transformers Qwen2-MoE or Qwen3-MoE."""
    return [layer.get_submodule("mlp.gate") for layer in model.get_submodule("model.layers").children()]


def gate_weight(hidden: Tensor, fixed: Tensor, directions: Tensor) -> Tensor:
    """Return gate rows `[N, d]` whose logits over `hidden` have mean `fixed` and variance 1.

    hidden: [T, d]; fixed: [N]; directions: [N, d], random, N < d. What varies is read along orthogonal directions: a
    norm made all hidden states equally long, so other text than this spreads the logits about as far.
    """
    mean = hidden.double().mean(0)
    common = mean / mean.norm()
    varying = directions.double() - torch.outer(directions.double() @ common, common)
    rows = torch.linalg.qr(varying.T).Q.T  # [N, d], orthonormal
    spread = (hidden.double() @ rows.T).std(0)
    weight: Tensor = rows / spread[:, None] + torch.outer(fixed.double() / mean.norm(), common)
    return weight.float()


def _random_weight(name: str, shape: torch.Size, moe_gain: float, rng: torch.Generator) -> Tensor:
    """Return a matrix that keeps the spread of its input, times a gain, or a norm's constant."""
    kind = name.removesuffix(".weight").rsplit(".", 1)[-1]
    if kind.endswith("norm"):
        return torch.full(shape, _ATTENTION_SHARPNESS if kind == "q_norm" else 1.0)
    noise = torch.randn(shape, generator=rng)
    if kind == "embed_tokens":
        common = torch.randn(shape[-1], generator=rng)
        return common.mul(_COMMON_PART) + noise.mul((1 - _COMMON_PART**2) ** 0.5)
    if kind == "bias":
        return noise.mul(_BIAS_SPREAD)
    gains = {"q_proj": _ATTENTION_SHARPNESS, "experts.down_proj": moe_gain, "lm_head": _HEAD_GAIN}
    gain = next((gain for suffix, gain in gains.items() if name.removesuffix(".weight").endswith(suffix)), 1.0)
    return noise.mul(gain * float(shape[-1]) ** -0.5)


def _head_gains(tokenizer: "PreTrainedTokenizerFast", seed: int) -> Tensor:
    """Return what each output row is multiplied by, `[V]`: little for tokens that text hardly has, the end excepted."""
    counts = torch.bincount(sample_text_ids(tokenizer, _HEAD_SAMPLE_ROWS, seed).flatten(), minlength=len(tokenizer))
    counts[tokenizer.eos_token_id] = _RARE_COUNT
    return torch.where(counts < _RARE_COUNT, _RARE_HEAD_GAIN, 1.0)


def _gate_setter(fixed: Tensor) -> Hook:
    """Return a hook that sets a gate from the hidden states that are about to reach it."""

    def set_gate(gate: nn.Module, args: tuple[Tensor, ...]) -> None:
        weight = gate.get_parameter("weight")
        weight.copy_(gate_weight(args[0].flatten(0, -2), fixed, weight))

    return set_gate


def _head_setter(gains: Tensor) -> Hook:
    """Return a hook that takes what all hidden states share out of the output rows, so that no token always wins."""

    def set_head(head: nn.Module, args: tuple[Tensor, ...]) -> None:
        weight = head.get_parameter("weight")
        common = nn.functional.normalize(args[0].flatten(0, -2).mean(0), dim=0)
        weight.sub_(torch.outer(weight @ common, common)).mul_(gains[:, None])

    return set_head


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread while the context is open: sums then don't depend on the number of cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextmanager
def _before_forward(modules: list[nn.Module], hooks: list[Hook]) -> Iterator[None]:
    """Call each hook before its module's forward, while the context is open."""
    handles = [module.register_forward_pre_hook(hook) for module, hook in zip(modules, hooks, strict=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
