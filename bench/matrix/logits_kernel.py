"""The forced router logits in one launch a layer; `ForcedRouting.reference` is what it computes."""

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _logits_kernel(  # type: ignore[no-untyped-def]  # noqa: ANN202, PLR0913, PLR0917
    out_ptr,  # noqa: ANN001
    g_ptr,  # noqa: ANN001
    r_ptr,  # noqa: ANN001
    z_ptr,  # noqa: ANN001
    offset_ptr,  # noqa: ANN001
    skew_ptr,  # noqa: ANN001
    places_ptr,  # noqa: ANN001
    max_tokens,  # noqa: ANN001
    num_experts,  # noqa: ANN001
    num_positions,  # noqa: ANN001
    BLOCK: tl.constexpr,  # noqa: N803
):
    token = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    mask = experts < num_experts
    row = tl.load(places_ptr + token)
    position = (tl.load(offset_ptr + row) + tl.load(places_ptr + max_tokens + token)) % num_positions
    g = tl.load(g_ptr + experts, mask)
    r = tl.load(r_ptr + row * num_experts + experts, mask)
    z = tl.load(z_ptr + position * num_experts + experts, mask)
    logits = tl.load(skew_ptr) * (g + r) + z
    tl.store(out_ptr + token.to(tl.int64) * num_experts + experts, logits.to(out_ptr.dtype.element_ty), mask)


def write_logits(out: torch.Tensor, tables: tuple[torch.Tensor, ...], skew: torch.Tensor, places: torch.Tensor) -> None:
    """Write logits of the running step's first tokens into `out` [T, N].

    `tables`: one layer's g [N], r [R, N] and z [P, N], and the offset of each row [R].
    """
    num_tokens, num_experts = out.shape
    if not num_tokens:
        return
    z = tables[2]
    _logits_kernel[(num_tokens,)](
        out, *tables, skew, places, places.shape[1], num_experts, z.shape[0],
        BLOCK=triton.next_power_of_2(num_experts), num_warps=1,
    )  # fmt: skip
