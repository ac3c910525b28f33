"""The paged MoE and its fetches in plain torch: the specification of every kernel here, and the backend on a CPU.

Shapes: T tokens, N experts, K top-k, d hidden, f intermediate, P page indices of the arena view, S slots, R rounds,
E bytes of one matrix.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional


def paged_moe(
    hidden: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    up_pages: torch.Tensor,
    down_pages: torch.Tensor,
    table: torch.Tensor,
) -> torch.Tensor:
    """Return sum_k topk_weights[t, k] * W2 (silu(W1 x_t) * (W3 x_t)) of the K experts of each token, [T, d].

    `hidden` [T, d]; `topk_weights` [T, K] float32; `topk_ids` [T, K] int; `up_pages` [P, f, d] and `down_pages`
    [P, d, f] are two views of one arena; `table` [N, 3] int holds the index of W1's, W3's and W2's page of each expert.
    The products of a token are summed in order of K, in the dtype of `topk_weights`.
    Source of the address rule: Rimuru, addr_e(n, t) = B_P + p_e(n) f d + (n mod f) d + t.
    """
    order = topk_ids.reshape(-1).argsort()
    counts = torch.bincount(topk_ids.reshape(-1), minlength=table.shape[0]).tolist()
    rows = hidden[order // topk_ids.shape[1]]  # [T * K, d], by expert
    products = torch.empty_like(rows)
    start = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        w1, w3, w2 = table[expert].tolist()
        span = slice(start, start + count)
        gate = functional.linear(rows[span], up_pages[w1])
        up = functional.linear(rows[span], up_pages[w3])
        products[span] = functional.linear(functional.silu(gate) * up, down_pages[w2])
        start += count
    return _weighted_sums(products, order, topk_weights)


def _weighted_sums(products: torch.Tensor, order: torch.Tensor, topk_weights: torch.Tensor) -> torch.Tensor:
    """Return [T, d] out of `products` [T * K, d], whose row i belongs to pair `order[i]` of token and rank."""
    by_token = torch.empty_like(products)
    by_token[order] = products
    by_token = by_token.view(*topk_weights.shape, products.shape[1])
    return (by_token.to(topk_weights.dtype) * topk_weights.unsqueeze(-1)).sum(dim=1).to(products.dtype)


@dataclass(frozen=True, slots=True)
class Needed:
    """The experts that one layer needs in this forward and that aren't resident; all int32, on the device.

    Entry i of the list has slot i mod S and round i // S: a round's experts are in the slots together.
    """

    experts: torch.Tensor
    """[N]: the expert of each entry, -1 past the last."""
    pages: torch.Tensor
    """[N, 3]: the pages that W1, W3 and W2 of each entry are copied to, those of its slot; -1 past the last."""
    places: torch.Tensor
    """[N]: each expert's place in the list, -1 if it isn't in it."""
    table: torch.Tensor
    """[N, 3]: the page table of this forward: a listed expert's row is its slot's, any other the layer's own."""
    spans: torch.Tensor
    """[R, 2]: the entries [first, last) that are still to be copied in each round."""
    count: torch.Tensor
    """[1]: entries of the list; more than R * S if some are in no round."""


def num_rounds(num_offloaded: int, num_slots: int) -> int:
    """How many rounds are enough for any routing of a layer that has so many experts offloaded; at least one."""
    return max(-(-num_offloaded // num_slots), 1)


def list_needed(
    topk_ids: torch.Tensor,
    table: torch.Tensor,
    resident: torch.Tensor,
    slots: torch.Tensor,
    *,
    rounds: int = 1,
    before: Needed | None = None,
) -> Needed:
    """List what `topk_ids` [T, K] int needs and the layer hasn't, each expert once, in order of experts.

    `table` [N, 3] int32 and `resident` [N] bool are the layer's own; a row of an expert that isn't resident is passed
    on unless the expert is listed. `slots` [slots, 3] int32 holds the pages of each slot: S are alive, the rows from
    the first -1 on are not there at present. Ids that are no expert's, as -1, need nothing.

    More needed than S are worked in rounds. For r in 0, 1, … `rounds` - 1 the caller fetches round r, computes the
    layer with `round_ids` of round r and `table`, and adds up the outputs; all in one stream order, since a round's
    experts lie where the last round's lay. Each expert is copied once, each pair computed once; the residents are in
    round 0. An expert past the last round is in none and adds nothing, so `rounds` is to be `num_rounds` of the most
    experts that the layer may have offloaded.

    `before` is the list of the same layer and slots made ahead, of what was predicted: its round 0, which the caller
    has fetched, heads this list, and isn't in `spans`.
    """
    alive = int((slots[:, 0] >= 0).sum())
    entries = [] if before is None else before.experts[: min(int(before.count), alive)].tolist()
    held = len(entries)
    is_routed = torch.zeros_like(resident)
    is_routed[topk_ids[(topk_ids >= 0) & (topk_ids < len(resident))].long()] = True
    entries += [e for e in (is_routed & ~resident).nonzero().flatten().tolist() if e not in entries]
    needed = _empty_list(table, rounds, len(entries))
    for place, expert in enumerate(entries):
        needed.experts[place] = expert
        needed.places[expert] = place
        if alive:
            needed.pages[place] = needed.table[expert] = slots[place % alive]
    for index in range(rounds):
        first, last = (min(edge * alive, len(entries)) for edge in (index, index + 1))
        needed.spans[index] = torch.tensor((max(first, held), last) if index == 0 else (first, last))
    return needed


def _empty_list(table: torch.Tensor, rounds: int, count: int) -> Needed:
    """Return a list that still has to be filled."""

    def filled(*size: int) -> torch.Tensor:
        return torch.full(size, -1, dtype=torch.int32, device=table.device)

    num_experts = table.shape[0]
    return Needed(
        filled(num_experts), filled(num_experts, 3), filled(num_experts), table.clone(), filled(rounds, 2),
        filled(1).fill_(count),
    )  # fmt: skip


def round_ids(topk_ids: torch.Tensor, needed: Needed, index: int) -> torch.Tensor:
    """Return `topk_ids` [T, K] int32 with -1 for every pair that isn't computed in round `index`.

    An expert that isn't listed is resident, or nobody's: it belongs to round 0.
    """
    is_expert = (topk_ids >= 0) & (topk_ids < needed.places.shape[0])
    place = torch.where(is_expert, needed.places[topk_ids.where(is_expert, 0).long()], -1)
    first, last = needed.spans[index].tolist()
    is_in = place < last if index == 0 else (place >= first) & (place < last)
    return topk_ids.where(is_expert & is_in, -1)


def fetch(needed: Needed, index: int, masters: torch.Tensor, storage: torch.Tensor, granule_bytes: int) -> None:
    """Copy the entries of round `index` to their pages.

    `masters` uint8 [N, 3, E] are the layer's experts in host memory, without gaps; `storage` uint8 [bytes] is the
    arena, in which page p starts at p * `granule_bytes`.
    """
    first, last = needed.spans[index].tolist()
    for expert, pages in zip(needed.experts[first:last].tolist(), needed.pages[first:last].tolist(), strict=True):
        for page, master in zip(pages, masters[expert], strict=True):
            start = page * granule_bytes
            storage[start : start + master.numel()].copy_(master)
