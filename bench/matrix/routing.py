"""Routing as measured of a real model, forced into one with random weights; switched while it serves.

logits[t, e] = a (0.8 g[l, e] + 0.75 r[l, row, e]) + z[l, (offset[row] + position) mod P, e], a = 1 skewed, 0 flat.
`row` names the request, so a request is routed alike on every system. Shapes: L layers, N experts, R rows, P positions
of an AR(1) process, T tokens. Imports torch; vLLM is patched by `forced.py`.
"""

import torch

NUM_ROWS = 512
NUM_POSITIONS = 4096
EXPERT_WEIGHT, REQUEST_WEIGHT, RHO = 0.8, 0.75, 0.5
SEED = 20
PREDICTION_NOISE = 0.16
"""Standard deviation that a prediction's logits are off by: of a token's 8 experts of 128 it names 90 % when skewed and
86 % when flat, less than what gates predict in real models (97 %, Fate)."""


class ForcedRouting:
    """The generator's tables, and where each token of the running step stands in them: fixed addresses throughout."""

    def __init__(self, num_layers: int, num_experts: int, max_tokens: int, device: torch.device) -> None:
        """Draw the tables on the CPU, so that they are the same on every device; skewed at first."""
        gen = torch.Generator().manual_seed(SEED)

        def draw(*size: int) -> torch.Tensor:
            return torch.randn(size, generator=gen)

        self.num_experts = num_experts
        self.g = (EXPERT_WEIGHT * draw(num_layers, num_experts)).to(device)  # [L, N]
        self.r = (REQUEST_WEIGHT * draw(num_layers, NUM_ROWS, num_experts)).to(device)  # [L, R, N]
        self.z = _autoregress(draw(num_layers, NUM_POSITIONS, num_experts)).to(device)  # [L, P, N]
        self.offset = torch.randint(NUM_POSITIONS, (NUM_ROWS,), generator=gen, dtype=torch.int32).to(device)
        self.skew = torch.ones(1, device=device)
        self.guessed = self.z + PREDICTION_NOISE * draw(num_layers, NUM_POSITIONS, num_experts).to(device)  # [L, P, N]
        self.places = torch.zeros((2, max_tokens), dtype=torch.int32, device=device)
        """Row and position of each token; what pads a batch has 0 and 0."""

    @torch.inference_mode()
    def set_skewed(self, *, is_skewed: bool) -> None:
        """Switch for the steps to come, captured graphs included."""
        self.skew.fill_(float(is_skewed))

    def logits(self, layer: int, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Return router logits [T, N] of the running step's first tokens in one layer."""
        return self._logits(layer, num_tokens, dtype, self.z)

    def predicted(self, layer: int, num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the same as it would be guessed a layer before: nearly what comes, and as cheap as a gate.

        The forced routing doesn't follow from hidden states, so that a real predictor has nothing to go by.
        """
        return self._logits(layer, num_tokens, dtype, self.guessed)

    def _logits(self, layer: int, num_tokens: int, dtype: torch.dtype, z: torch.Tensor) -> torch.Tensor:
        out = torch.empty((num_tokens, self.num_experts), dtype=dtype, device=self.g.device)
        if not out.is_cuda:
            return out.copy_(self.reference(layer, num_tokens, z))
        from bench.matrix.logits_kernel import write_logits

        write_logits(out, (self.g[layer], self.r[layer], z[layer], self.offset), self.skew, self.places)
        return out

    def reference(self, layer: int, num_tokens: int, z: torch.Tensor | None = None) -> torch.Tensor:
        """Return the same [T, N] in float32 by torch, with another `z` [L, P, N] than the own if one is given."""
        rows, positions = self.places[:, :num_tokens].long()
        skewed = self.skew * (self.g[layer] + self.r[layer, rows])
        return skewed + (self.z if z is None else z)[layer, (self.offset[rows] + positions) % NUM_POSITIONS]


def _autoregress(noise: torch.Tensor) -> torch.Tensor:
    """Return an AR(1) process of unit variance along dim 1 out of unit noise [L, P, N]."""
    out = noise.clone()
    for step in range(1, noise.shape[1]):
        out[:, step] = RHO * out[:, step - 1] + (1 - RHO**2) ** 0.5 * noise[:, step]
    return out
