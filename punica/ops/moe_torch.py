"""Fused MoE LoRA in plain torch, on any device: alignment, and one pair of products per (adapter, expert).

Both stages iterate over the groups of the alignment, so an adapter's expert is read once however many tokens use it.
Products are accumulated in float32 and rounded once into the output. Values are read back to the host.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from punica.ops import collectives
from punica.ops.experts import (
    ExpertForm,
    ExpertLoRAWeights,
    Experts,
    Fp8Experts,
    Numbers,
    Switches,
    check_alignment,
    check_experts,
)  # fmt: skip
from punica.ops.scales import Scheme, real_rows, real_weight, rounded

Group = tuple[int, int, Tensor]
"""Slot, expert, pairs."""


def moe_lora_align_block_size(
    topk_ids: Tensor, token_lora_mapping: Tensor, num_experts: int, block_size: int, max_loras: int,
    max_num_tokens_padded: int, max_num_m_blocks: int, sorted_token_ids: Tensor, expert_ids: Tensor,
    num_tokens_post_pad: Tensor, adapter_enabled: Tensor, lora_ids: Tensor, expert_map: Tensor | None = None,
) -> None:  # fmt: skip
    """Group the pairs of every slot in ``lora_ids`` by expert, in blocks of ``block_size``, in place.

    Args:
        topk_ids: ``[T, k]`` int32 or int64; global experts when there is an ``expert_map``, int32 ``[E_g]``, local
            expert or -1. Ids from ``num_experts`` on are dropped, like negative ones.
        token_lora_mapping: ``[T]`` int32.
        sorted_token_ids, expert_ids, num_tokens_post_pad: int32, ``[L, P]``, ``[L, B]`` and ``[L]``, flat or not, with
            P = ``max_num_tokens_padded`` and B = ``max_num_m_blocks``.
        adapter_enabled: int32 ``[L+1]``: slots with weights here. lora_ids: int32, slots in use (-1: none).

    Row l of the outputs then holds the pairs of slot l, experts ascending and pairs ascending within one, each expert's
    filled up with the sentinel ``T * k``; the expert of every block (-1 past the last); and how many ids that makes.
    Rows of other slots stay as they are. ValueError and TypeError before any write.
    """
    padded, blocks = max_num_tokens_padded, max_num_m_blocks
    outputs = (sorted_token_ids, expert_ids, num_tokens_post_pad)
    sizes = (num_experts, block_size, max_loras, padded, blocks)
    check_alignment(topk_ids, token_lora_mapping, adapter_enabled, lora_ids, expert_map, sizes, outputs, 1)
    pairs, top_k = topk_ids.numel(), topk_ids.shape[1]
    ids = topk_ids.reshape(-1).long()
    legal = (ids >= 0) & (ids < num_experts)
    if expert_map is not None:
        ids = expert_map.long()[ids.where(legal, ids.new_zeros(()))] if expert_map.numel() else ids - num_experts
        legal &= (ids >= 0) & (ids < num_experts)
    slots = token_lora_mapping.repeat_interleave(top_k)
    rows, expert_rows = sorted_token_ids.view(max_loras, padded), expert_ids.view(max_loras, blocks)
    enabled = adapter_enabled.tolist()
    for slot in lora_ids.tolist():
        if not 0 <= slot < max_loras or not enabled[slot]:
            continue
        mine = ((slots == slot) & legal).nonzero().flatten()
        mine = mine[ids[mine].argsort(stable=True)]
        experts, counts = ids[mine].unique_consecutive(return_counts=True)
        group_blocks = (counts + block_size - 1) // block_size
        # position of a pair: start of its group, plus its number in the group
        begins = (group_blocks.cumsum(0) - group_blocks) * block_size - (counts.cumsum(0) - counts)
        places = torch.arange(mine.numel(), device=mine.device) + begins.repeat_interleave(counts)
        rows[slot].fill_(pairs)
        rows[slot, places] = mine.int()
        used = int(group_blocks.sum())
        expert_rows[slot].fill_(-1)
        expert_rows[slot, :used] = experts.repeat_interleave(group_blocks).int()
        num_tokens_post_pad[slot] = used * block_size


def fused_moe_lora(
    given: Experts, max_lora_rank: int, top_k_num: int, switches: Switches, block_m: int | None = None
) -> None:
    """Run `punica.ops.reference.fused_moe_lora` on aligned or naive operands, in place. Checked before any write."""
    form = check_experts(given, max_lora_rank, top_k_num, switches, block_m)
    if not form.pairs:
        return
    groups = list(_groups(given, form))
    low = torch.zeros(form.slices, form.pairs, form.rank, dtype=torch.float32, device=given.x.device)
    ranks, gathered = [[form.full_rank] * form.slots] * form.slices, form.rank != form.full_rank
    if given.lora_ranks is not None:
        ranks = given.lora_ranks.clamp(0, form.full_rank).tolist()
    first = collectives.current().rank() * form.rank if gathered else 0
    fp8 = given.fp8 or Fp8Experts((), ())
    x = real_rows(given.x, fp8.x_scale, fp8.shrink)
    read_a = _reader(given.lora_a, fp8.a_scale, fp8.shrink)
    read_b = _reader(given.lora_b, fp8.b_scale, fp8.expand)
    for slot, expert, pairs in groups:
        rows = x[pairs // form.factor]
        for s, part in enumerate(low):
            rank = min(max(ranks[s][slot] - first, 0), form.rank)
            part[pairs, :rank] = rows @ read_a(s, slot, expert)[:rank].t()
    if switches.fully_sharded:
        group = collectives.current()
        low = group.all_gather(low) if gathered else group.all_reduce(low)
    if fp8.h_scale is not None:
        low = rounded(low, fp8.h_scale, fp8.expand, given.lora_b[0].dtype)
    weights = given.topk_weights.reshape(-1, 1).float() if switches.mul_routed_weight else None
    rows_of_y = given.output.view(form.pairs, -1)[:, switches.offset :]
    for slot, expert, pairs in groups:
        for s, (part, y) in enumerate(zip(low, rows_of_y.split(form.width, dim=1), strict=False)):
            rank = ranks[s][slot]
            delta = part[pairs, :rank] @ read_b(s, slot, expert)[:, :rank].t()
            if weights is not None:
                delta *= weights[pairs]
            y[pairs] = (y[pairs].float() + delta if switches.add_inputs else delta).to(y.dtype)


def _reader(
    weights: Sequence[Tensor], scales: Sequence[Tensor], scheme: Scheme
) -> Callable[[int, int, int], Tensor]:  # fmt: skip
    if not scales:
        return lambda s, slot, expert: weights[s][slot, expert].float()
    return lambda s, slot, expert: real_weight(weights[s][slot, expert], scales[s][slot, expert], scheme)


def _groups(given: Experts, form: ExpertForm) -> Iterator[Group]:
    enabled = given.enabled.tolist()
    slots = range(form.slots) if given.lora_ids is None else given.lora_ids.tolist()
    active = [slot for slot in slots if 0 <= slot < form.slots and enabled[slot]]
    if given.sorted_ids is None or given.counts is None:
        yield from _naive_groups(given, form, active)
        return
    counts = given.counts.tolist()
    for slot in active:
        blocks = counts[slot] // form.block_m
        ids = given.sorted_ids[slot, : blocks * form.block_m].long()
        experts, runs = given.expert_ids[slot, :blocks].unique_consecutive(return_counts=True)
        parts = ids.split((runs * form.block_m).tolist())
        for expert, part in zip(experts.tolist(), parts, strict=True):
            if 0 <= expert < form.experts:
                yield slot, expert, part[(part >= 0) & (part < form.pairs)]


def _naive_groups(given: Experts, form: ExpertForm, active: list[int]) -> Iterator[Group]:
    experts, slots = given.expert_ids.long(), given.mapping.repeat_interleave(form.top_k).long()
    legal = (experts >= 0) & (experts < form.experts) & torch.isin(slots, torch.tensor(active, device=slots.device))
    pairs = legal.nonzero().flatten()
    keys = slots[pairs] * form.experts + experts[pairs]
    order = keys.argsort(stable=True)
    found, counts = keys[order].unique_consecutive(return_counts=True)
    for key, part in zip(found.tolist(), pairs[order].split(counts.tolist()), strict=True):
        yield key // form.experts, key % form.experts, part


class TorchExpertOps:
    """Alignment and fused op on a CPU (`punica.ops.experts.ExpertOps`)."""

    smallest_block = 1

    def align(
        self, topk_ids: Tensor, mapping: Tensor, sizes: tuple[int, int, int, int, int], enabled: Tensor,
        expert_map: Tensor | None, lora_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        _, _, max_loras, padded, blocks = sizes
        new: dict[str, Any] = {"dtype": torch.int32, "device": topk_ids.device}
        ids = torch.full((max_loras * padded,), topk_ids.numel(), **new)
        experts, counts = torch.full((max_loras * blocks,), -1, **new), torch.zeros(max_loras, **new)
        listed = mapping.unique() if lora_ids is None else lora_ids
        moe_lora_align_block_size(topk_ids, mapping, *sizes, ids, experts, counts, enabled, listed, expert_map)
        return ids, experts, counts

    def use_naive_assignment(self, pairs: int, active: int, weights: ExpertLoRAWeights) -> bool:
        return weights.prefers_naive(pairs)

    def block_size(self, tokens: int, top_k: int, active: int, weights: ExpertLoRAWeights) -> int:
        return 16

    def add(
        self, given: Experts, max_lora_rank: int, top_k: int, switches: Switches,
        configs: tuple[Numbers, Numbers] | None, active: int, site: str | None,
    ) -> None:  # fmt: skip
        fused_moe_lora(given, max_lora_rank, top_k, switches, None if configs is None else configs[0][0])
