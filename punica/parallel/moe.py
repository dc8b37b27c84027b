"""Mixture of experts: the router, the experts' products, and the placement of experts on ranks.

For a token x and the k experts that its router chose (Shazeer et al., 2017; Mixtral, Qwen3-MoE, gpt-oss):

    y = sum_j  p_j * W2[e_j] act(W13[e_j] x)            p: the router's probabilities of the chosen experts

``W13`` holds gate (w1) and up (w3) of a gated expert, or the one up projection (w1) of another; ``W2`` is down. Tensor
parallelism cuts every expert, expert parallelism gives every rank whole ones. All ranks see all tokens, and one
all-reduce adds up their results. The products of all (token, expert) pairs stay apart, ``[T, k, width]``, until the
last sum: LoRA is added to them (:mod:`punica.layers.fused_moe`), with each token's own adapter.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from punica.checks import check_count
from punica.ops import backbone, collectives
from punica.parallel import group
from punica.parallel.linear import check_checkpoint_shape, check_last_dim, resolve_tp
from punica.parallel.matmul import linear

collectives.install(
    collectives.Collectives(
        group.get_tensor_model_parallel_world_size,
        group.get_tensor_model_parallel_rank,
        group.tensor_model_parallel_all_reduce,
        group.tensor_model_parallel_all_gather,
    )
)

PLACEMENTS, LAYOUTS = ("linear", "round_robin"), ("concatenated", "interleaved")


@dataclass(frozen=True)
class MoEParallelConfig:
    """Placement of the experts. With ``use_ep`` ranks hold whole experts, and ``tp_size`` is 1."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0
    use_ep: bool = False
    all2all_backend: str = "allgather_reducescatter"
    is_sequence_parallel: bool = False


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a layer: experts of all ranks and of this one, experts per token, widths (I: this rank's)."""

    num_experts: int
    num_local_experts: int
    experts_per_token: int
    hidden_dim: int
    intermediate_size_per_partition: int
    is_act_and_mul: bool
    moe_parallel_config: MoEParallelConfig


def place_experts(num_experts: int, size: int, rank: int, placement: str = "linear") -> list[int]:
    """Global numbers of the experts on one of ``size`` ranks, in local order: a block of them, or every size-th; the
    first ranks have one more where the experts do not divide. ValueError for another placement.
    """
    if placement not in PLACEMENTS:
        raise ValueError(f"placement must be one of {list(PLACEMENTS)}, got {placement!r}")
    if placement == "round_robin":
        return list(range(rank, num_experts, size))
    base, more = divmod(num_experts, size)
    start = rank * base + min(rank, more)
    return list(range(start, start + base + (rank < more)))


def expert_map_of(local: list[int], num_experts: int) -> Tensor:
    """int32 ``[E_g]``: local number of every expert, -1 where it is on another rank."""
    found = torch.full((num_experts,), -1, dtype=torch.int32)
    found[local] = torch.arange(len(local), dtype=torch.int32, device=found.device)
    return found


def route(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The ``top_k`` most probable experts of each row, ``[T, k]`` float32 and int64; ``renormalize``: to the sum 1."""
    weights, ids = torch.softmax(router_logits.float(), dim=-1).topk(top_k, dim=-1)
    return (weights / weights.sum(dim=-1, keepdim=True) if renormalize else weights), ids


def halves(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Gate and up of a gated expert: two halves, or even and odd columns."""
    if layout == "interleaved":
        return x[..., ::2], x[..., 1::2]
    gate, up = x.chunk(2, dim=-1)
    return gate, up


def swiglu_of_gpt_oss(gate: Tensor, up: Tensor) -> Tensor:
    """``(up + 1) * gate * sigmoid(1.702 gate)``, both cut at 7."""
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


GATED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda gate, up: F.silu(gate) * up, "swigluoai": swiglu_of_gpt_oss,
}  # fmt: skip
PLAIN: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "gelu": F.gelu, "relu2": lambda x: F.relu(x).square()}


class PairGroups:
    """The (token, expert) pairs of a routing, grouped by expert once for all products of a layer, in plain torch.

    ``topk_ids``: local experts ``[T, k]``, -1 where an expert is on another rank.
    `punica.ops.triton_ops.moe_align.PairGroups` is the same without host synchronisation.
    """

    def __init__(self, topk_ids: Tensor) -> None:
        self.shape = topk_ids.shape
        ids = topk_ids.reshape(-1)
        order = ids.argsort(stable=True)
        experts, counts = ids[order].unique_consecutive(return_counts=True)
        self.groups = list(zip(experts.tolist(), order.split(counts.tolist()), strict=True))

    def multiply(self, x: Tensor, weights: Tensor, factor: int) -> Tensor:
        """``x [T*k / factor, in]``, row ``i // factor`` for pair i, times ``weights [E, out, in]``: ``[T, k, out]``."""
        output = x.new_zeros(self.shape.numel(), weights.shape[1])
        for expert, pairs in self.groups:
            if expert >= 0:
                output[pairs] = linear(x[pairs // factor], weights[expert])
        return output.view(*self.shape, weights.shape[1])


def group_pairs(topk_ids: Tensor, experts: int, whole: bool) -> Any:
    """``whole``: all experts are here."""
    if topk_ids.is_cuda:
        from punica.ops.triton_ops import moe_align  # importing punica must not need Triton

        return moe_align.PairGroups(topk_ids, experts, whole)
    return PairGroups(topk_ids)


class RoutedExperts(nn.Module):
    """The experts of this rank: ``w13_weight [E, 2*I, H]`` (``[E, I, H]`` if not gated) and ``w2_weight [E, H, I]``.
    ``lora_context``: of a LoRA layer around the layer, see `punica.layers.moe_context`.
    """

    def __init__(self, config: MoEConfig, activation: str, layout: str, dtype: torch.dtype) -> None:
        super().__init__()
        self.config, self.layout = config, layout
        self.gated = config.is_act_and_mul
        known = GATED if self.gated else PLAIN
        if activation not in known:
            raise ValueError(f"activation must be one of {sorted(known)} for these experts, got {activation!r}")
        self._activation: Any = known[activation]
        experts, hidden, inner = config.num_local_experts, config.hidden_dim, config.intermediate_size_per_partition
        rows = 2 * inner if self.gated else inner
        self.w13_weight = nn.Parameter(torch.empty(experts, rows, hidden, dtype=dtype), requires_grad=False)
        self.w2_weight = nn.Parameter(torch.empty(experts, hidden, inner, dtype=dtype), requires_grad=False)
        self.lora_context: Any = None

    def supports_lora(self) -> bool:
        return True

    def set_lora_context(self, context: Any) -> None:
        self.lora_context = context

    def activate(self, product: Tensor) -> Tensor:
        """``[..., w13 rows]`` to ``[..., I]``."""
        if self.gated and self._activation is GATED["silu"] and self.layout == "concatenated":
            return backbone.swiglu(product.flatten(0, -2)).unflatten(0, product.shape[:-1])
        return self._activation(*halves(product, self.layout)) if self.gated else self._activation(product)

    def forward(self, x: Tensor, weights: Tensor, ids: Tensor, expert_map: Tensor | None, on_input: bool) -> Tensor:
        """``x [T, H]`` to ``[T, H]``, summed over k. ``weights``, ``ids`` ``[T, k]`` of global experts."""
        local = ids if expert_map is None else expert_map[ids].long()
        rows = x * weights.to(x.dtype) if on_input else x
        factors = torch.ones_like(weights) if on_input else weights
        groups = group_pairs(local, self.config.num_local_experts, expert_map is None)
        up = groups.multiply(rows, self.w13_weight, ids.shape[1])
        context, assignment = self.lora_context, None
        if context is not None:
            assignment = context.assign(ids, weights, expert_map)
            context.punica_wrapper.add_lora_experts(up, context.rows_of_w13(rows), context.w13, assignment)
        inner = self.activate(up).flatten(0, 1)
        down = groups.multiply(inner, self.w2_weight, 1)
        if not on_input:
            down *= factors.to(down.dtype).unsqueeze(-1)
        if assignment is not None:
            assignment = assignment._replace(topk_weights=factors)
            context.punica_wrapper.add_lora_experts(down, context.as_adapters(inner), context.w2, assignment)
        return down.sum(dim=1)


class UnquantizedMoEMethod:
    """Products of the experts, one by one: a monolithic method could not take LoRA."""

    is_monolithic = False


class FusedMoE(nn.Module):
    """A mixture-of-experts layer without its router's matrix.

    Args:
        num_experts: of all ranks. top_k: experts of a token. hidden_size, intermediate_size: full sizes.
        params_dtype: ``None`` is the default dtype.
        renormalize: the chosen probabilities sum to 1.
        use_ep: every rank holds whole experts, by ``placement``, instead of a part of each.
        is_act_and_mul: experts have a gate. activation: ``"silu"``, or ``"swigluoai"`` of gpt-oss.
        w13_layout: ``"concatenated"`` (gate above up) or ``"interleaved"`` (even rows gate, odd rows up).
        apply_router_weight_on_input: the input is weighted, not the output; for one expert per token.
        reduce_results: all-reduce the ranks' sums.
        tp_rank, tp_size: this rank's place; ``None`` asks the current group.

    ValueError for sizes below 1 or that do not divide, or another activation or layout.
    """

    def __init__(
        self, num_experts: int, top_k: int, hidden_size: int, intermediate_size: int,
        params_dtype: torch.dtype | None = None, renormalize: bool = True, use_ep: bool = False,
        placement: str = "linear", is_act_and_mul: bool = True, activation: str = "silu",
        w13_layout: str = "concatenated", apply_router_weight_on_input: bool = False, reduce_results: bool = True,
        prefix: str = "", tp_rank: int | None = None, tp_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        rank, size = resolve_tp(tp_rank, tp_size)
        check_count("num_experts", num_experts)
        check_count("hidden_size", hidden_size)
        check_count("intermediate_size", intermediate_size)
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"top_k must be in [1, num_experts={num_experts}], got {top_k}")
        if w13_layout not in LAYOUTS:
            raise ValueError(f"w13_layout must be one of {list(LAYOUTS)}, got {w13_layout!r}")
        if apply_router_weight_on_input and top_k != 1:
            raise ValueError(f"apply_router_weight_on_input is for models with one expert per token, got top_k={top_k}")
        self.prefix, self.top_k, self.renormalize = prefix, top_k, renormalize
        self.w13_layout, self.apply_router_weight_on_input = w13_layout, apply_router_weight_on_input
        self.intermediate_size, self.reduce_results = intermediate_size, reduce_results
        self.local_experts = place_experts(num_experts, size if use_ep else 1, rank if use_ep else 0, placement)
        shared_out = MoEParallelConfig(ep_size=size, ep_rank=rank, use_ep=True)
        place = shared_out if use_ep else MoEParallelConfig(tp_size=size, tp_rank=rank)
        inner = intermediate_size if use_ep else group.divide(intermediate_size, size)
        sizes = (num_experts, len(self.local_experts), top_k, hidden_size, inner)
        self.moe_config = MoEConfig(*sizes, is_act_and_mul, place)
        self._ranks = size
        self._shared_experts: nn.Module | None = None
        self.is_internal_router = False
        self.quant_method = UnquantizedMoEMethod()
        dtype = params_dtype or torch.get_default_dtype()
        self.routed_experts = RoutedExperts(self.moe_config, activation, w13_layout, dtype)
        for weight in (self.routed_experts.w13_weight, self.routed_experts.w2_weight):
            weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]
        everywhere = not use_ep or size == 1
        self.expert_map: Tensor | None
        local_map = None if everywhere else expert_map_of(self.local_experts, num_experts)
        self.register_buffer("expert_map", local_map, persistent=False)

    runner = property(lambda self: self, doc="The module that runs the experts: this layer itself.")
    # this rank's place among those that share every expert
    tp_rank = property(attrgetter("moe_config.moe_parallel_config.tp_rank"))
    tp_size = property(attrgetter("moe_config.moe_parallel_config.tp_size"))

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard_id: Hashable = None) -> None:
        """Copy this rank's part of one matrix: ``shard_id`` is (global expert, "w1", "w2" or "w3"); other ranks'
        experts are passed over. ValueError for a wrong id or shape, and ``param`` is unchanged.
        """
        expert, which = shard_id if isinstance(shard_id, tuple) and len(shard_id) == 2 else (None, None)
        config, inner = self.moe_config, self.moe_config.intermediate_size_per_partition
        known = ("w1", "w2", "w3") if config.is_act_and_mul else ("w1", "w2")
        if not isinstance(expert, int) or not 0 <= expert < config.num_experts or which not in known:
            raise ValueError(f"{self.prefix}: shard_id is {shard_id!r}, not (expert < {config.num_experts}, {known})")
        full = (self.intermediate_size, config.hidden_dim)
        full = full[::-1] if which == "w2" else full
        check_checkpoint_shape(loaded_weight, full, f"{self.prefix}.{expert}.{which}")
        if expert not in self.local_experts:
            return
        target = param.data[self.local_experts.index(expert)]
        own = loaded_weight.narrow(1 if which == "w2" else 0, self.tp_rank * inner, inner)
        if which == "w2" or not config.is_act_and_mul:
            target.copy_(own)
        else:
            halves(target.T, self.w13_layout)[which == "w3"].copy_(own.T)

    def forward(self, x: Tensor, router_logits: Tensor) -> Tensor:
        """``x [T, H]`` and the router's ``[T, E_g]`` to ``[T, H]``, summed over k and the ranks."""
        check_last_dim(x, self.moe_config.hidden_dim, self.prefix or type(self).__name__)
        weights, ids = route(router_logits, self.top_k, self.renormalize)
        output = self.routed_experts(x, weights, ids, self.expert_map, self.apply_router_weight_on_input)
        if self.reduce_results and self._ranks > 1:
            output = group.tensor_model_parallel_all_reduce(output)
        return output
