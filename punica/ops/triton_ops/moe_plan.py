"""Plan of a fused MoE LoRA call: kernels, grids and blocks from the checked forms of its operands.

Schedules are the caller's, those of tuned files, or `moe_rules`'. Launches hold numbers only.
"""

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from punica.checks import check_count
from punica.ops import collectives
from punica.ops.experts import ExpertForm, Experts, Fp8Experts, Numbers, Switches, check_block_size, check_experts
from punica.ops.quant import FP8_DTYPES
from punica.ops.scales import Scheme
from punica.ops.triton_ops.configs import Options, expert_default, load_lora_op_config, schedule_of, tuned_config
from punica.ops.triton_ops.device import max_tiles
from punica.ops.triton_ops.fp8_device import TYPES, WIDE, Quant, fp8_format
from punica.ops.triton_ops.launch import Launch, block_at_least, stages_that_fit, supports_pdl
from punica.ops.triton_ops.moe_lora import PairShape, PairTile, moe_expand_kernel, moe_shrink_kernel
from punica.ops.triton_ops.moe_rules import Work, choose_expand, choose_shrink
from punica.ops.triton_ops.moe_tiles import Pairs
from punica.ops.triton_ops.op import check_runnable
from punica.ops.triton_ops.schedules import Schedule

Config = dict[str, Any]


class How(NamedTuple):
    """Options of a call, besides its operands. ``configs``: the seven numbers each of shrink and expand (None: the
    rules choose, or the tuned files of ``site``, "w13" or "w2"). ``active``: adapters in use, as far as the host knows.
    ``early``: shrink may start early (PDL), as its first loads do not depend on the predecessor. ``low``: dtype of the
    intermediate.
    """

    configs: tuple[Numbers, Numbers] | None = None
    active: int | None = None
    early: bool = False
    site: str | None = None
    options: Options = Options()
    low: torch.dtype = torch.float32


class MoEPlan(NamedTuple):
    """The two launches of a checked call, their counts, and the shape of the partial sums between them."""

    form: ExpertForm
    shrink: Launch
    expand: Launch
    counts: Numbers
    partials: tuple[int, int, int, int]


class _Common(NamedTuple):
    """Operands of both launches, and the number of tiles of their grids."""

    form: ExpertForm
    given: Experts
    switches: Switches
    low: torch.dtype
    num_tiles: int
    block_m: int

    @property
    def pairs(self) -> Pairs:
        form, naive = self.form, self.given.sorted_ids is None
        listed = None if naive else self.given.lora_ids
        num_ids, searched = (-1, form.slots) if listed is None else (len(listed), len(listed))
        block_slots = 2 if naive else block_at_least(searched, 2)
        return Pairs(form.top_k, form.slots, form.experts, self.block_m, block_slots, naive, num_ids)

    @property
    def counts(self) -> Numbers:
        ids, experts = self.given.sorted_ids, self.given.expert_ids
        return self.form.pairs, self.num_tiles, *((0, 0) if ids is None else (ids.shape[1], experts.shape[1]))

    def shape(self, rank: int, quant: Quant) -> PairShape:
        has_ranks = self.given.lora_ranks is not None
        return PairShape(self.pairs, rank, self.form.slices, has_ranks, TYPES[self.given.wide], quant)

    def launch(
        self, kernel: Any, per_tile: int, strides: Numbers, constants: Config, num_warps: int, pdl: bool
    ) -> Launch:
        given = self.given
        dtypes = (
            given.x.dtype, given.lora_a[0].dtype, self.low, given.output.dtype, given.topk_weights.dtype,
            given.expert_ids.dtype,
        )  # fmt: skip
        grid = (self.num_tiles * per_tile, 1, 1)
        return Launch(kernel, grid, dtypes, strides, constants, num_warps=num_warps, pdl=pdl, device=given.x.device)


def _quant(weights: Tensor, scheme: Scheme, x: Tensor | None = None, x_scale: Tensor | None = None) -> Quant:
    """Storage of one slice ``[L, E, N, K]``; with ``x_scale``, ``x`` is FP8 as well."""
    if weights.dtype not in FP8_DTYPES:
        return WIDE
    rows, k = weights.shape[-2:]
    scales, column, blocks = (rows, 1, 1) if scheme.per_channel_quant else (1, 0, 1)
    if scheme.block_wise:
        column = blocks = triton.cdiv(k, scheme.group_k)
        scales = triton.cdiv(rows, scheme.group_n) * blocks
    quant = Quant(
        fp8_format(weights.dtype), slots=(scales,), columns=(column,), blocks=(1,), group_n=max(1, scheme.group_n),
        group_k=scheme.group_k if blocks > 1 else 0,
    )  # fmt: skip
    if x is None or x_scale is None:
        return quant
    groups = x_scale.shape[1] if x_scale.ndim == 2 else 1
    row = 0 if x_scale.numel() == 1 else groups
    return quant._replace(x_format=fp8_format(x.dtype), has_a=True, a_row=row, a_group=int(groups > 1))


def _stage_bytes(quant: Quant, itemsize: int, x: int, weights: int) -> int:
    return x * (itemsize + 4 * quant.has_a) + weights * (itemsize + 4 * (quant.group_k > 0))


def _plan_shrink(common: _Common, schedule: Schedule, pdl: bool, early: bool) -> Launch:
    form, given, rows = common.form, common.given, not schedule.block_m
    fp8 = given.fp8 or Fp8Experts((), ())
    quant = _quant(given.lora_a[0], fp8.shrink, given.x, fp8.x_scale)
    block_r = min(schedule.block_n, block_at_least(form.rank))
    block_k = min(schedule.block_k, block_at_least(form.hidden))
    joined = form.slices == 2 and not rows
    per_stage = _stage_bytes(
        quant, given.wide.itemsize, common.block_m * block_k, (2 if joined else 1) * block_r * block_k
    )
    first_rank = collectives.current().rank() * form.rank if form.rank != form.full_rank else 0
    shape = common.shape(form.rank, quant)._replace(k=form.hidden, first_rank=first_rank, factor=form.factor)
    stages = stages_that_fit(schedule.num_stages, per_stage, given.x.device)
    tile = PairTile(rows, block_k, block_r, stages, schedule.split_k, pdl, joined=joined)
    per_tile = schedule.split_k * triton.cdiv(form.rank, block_r) * (1 if joined else form.slices)
    constants = {"SHAPE": shape, "TILE": tile}
    return common.launch(
        moe_shrink_kernel, per_tile, given.x.stride(), constants, schedule.num_warps, early and pdl
    )  # fmt: skip


def _plan_expand(common: _Common, schedule: Schedule, partials: int, pdl: bool) -> Launch:
    form, given, switches, rows = common.form, common.given, common.switches, not schedule.block_m
    quant = _quant(given.lora_b[0], given.fp8.expand if given.fp8 is not None else Scheme())
    itemsize, rank = given.wide.itemsize, form.full_rank
    most = 128 if itemsize == 2 else 32
    block_r = block_at_least(rank) if rows or rank <= most else min(schedule.block_k, most)
    block_n, tiles_n = schedule.block_n, schedule.tiles_n
    if itemsize == 4 and not rows:
        block_n = min(block_n, 64)  # operands of an IEEE product are in registers
    per_stage = _stage_bytes(quant, itemsize, 0, block_r * block_n)
    per_stage += common.block_m * block_n * given.output.element_size()
    at_once = 16 // given.lora_b[0].element_size()
    shape = common.shape(rank, quant)._replace(
        n=form.width, offset=switches.offset, weighted=switches.mul_routed_weight, add=switches.add_inputs,
        vector=at_once if given.lora_ranks is not None and rank % at_once == 0 else 1,
    )  # fmt: skip
    stages = stages_that_fit(schedule.num_stages, per_stage, given.x.device)
    tile = PairTile(rows, block_n, block_r, stages, partials, pdl, tiles_n)
    per_tile = triton.cdiv(form.width, block_n * tiles_n) * form.slices
    constants = {"SHAPE": shape, "TILE": tile}
    return common.launch(moe_expand_kernel, per_tile, (given.output.stride(1),), constants, schedule.num_warps, pdl)


def _check_configs(shrink: Numbers, expand: Numbers) -> None:
    for where, numbers in (("shrink", shrink), ("expand", expand)):
        for name, value in zip(("m", "n", "k"), numbers, strict=False):
            try:
                check_block_size(value, 16)
            except ValueError as error:
                raise ValueError(f"{where}_block_size_{name}: {error}") from None
        for name, value in zip(("group_size_m", "num_warps", "num_stages", "split_k"), numbers[3:], strict=True):
            check_count(f"{where}_{name}", value)
        if numbers[4] & (numbers[4] - 1):
            raise ValueError(f"{where}_num_warps is {numbers[4]}, must be a power of two")
    if shrink[0] != expand[0]:
        raise ValueError(f"shrink_block_size_m is {shrink[0]}, expand_block_size_m {expand[0]}; they must be equal")


def site_config(site: str | None, part: str, form: ExpertForm, options: Options) -> Config | None:
    """Return the configuration of the tuned file of a site; None where there is no file."""
    op_type = f"fused_moe_lora_{site}_{part}"
    if site is None or options.batch_invariant or options.tuned_dir is None:
        return None
    if load_lora_op_config(op_type, None, options.tuned_dir) is None:
        return None
    hidden, inner = (form.hidden, form.width) if site == "w13" else (form.width, form.hidden)
    wanted = (form.slots, form.slices, form.tokens, form.rank, hidden, inner)
    return tuned_config(op_type, None, options.tuned_dir, wanted) or expert_default(op_type, form.rank)


def plan_experts(given: Experts, max_lora_rank: int, top_k: int, switches: Switches, how: How) -> MoEPlan | None:
    """Check a call and plan its launches; None when there is nothing to do."""
    if how.active is not None and how.active < 0:
        raise ValueError(f"num_active_loras is {how.active}; it must be at least 0, or None for all slots")
    if how.configs is not None:
        _check_configs(*how.configs)
    form = check_experts(given, max_lora_rank, top_k, switches, how.configs[0][0] if how.configs else None)
    naive = given.sorted_ids is None
    check_runnable(given.x.device)
    if 0 in (form.pairs, form.slots, form.experts, form.rank, form.hidden, form.width) or how.active == 0:
        return None
    active = form.slots if how.active is None else min(how.active, form.slots)
    work = Work(form, naive, active, given.lora_a[0].element_size(), how.options.batch_invariant)
    block_m = 16 if naive else form.block_m
    if not naive:
        check_block_size(block_m, 16)
    tiles = form.pairs if naive else max_tiles(form.pairs, active * form.experts, block_m)
    common = _Common(form, given, switches, how.low, tiles, block_m)
    shrink, expand = _schedules(work, how)
    # a collective or torch op between the two ends the chain
    sharded, rounds = switches.fully_sharded, given.fp8 is not None and given.fp8.h_scale is not None
    pdl = how.options.pdl and supports_pdl(given.x.device) and not sharded and not rounds
    shrink = shrink._replace(split_k=1) if sharded else shrink
    first = _plan_shrink(common, shrink, pdl, how.early)
    second = _plan_expand(common, expand, 1 if rounds else shrink.split_k, pdl)
    return MoEPlan(form, first, second, common.counts, (shrink.split_k, form.slices, form.pairs, form.rank))


def _schedules(work: Work, how: How) -> list[Schedule]:
    if how.configs is not None and not work.invariant:
        return [Schedule(m, n, k, warps, stages, split) for m, n, k, _, warps, stages, split in how.configs]
    found = [site_config(how.site, part, work.form, how.options) for part in ("shrink", "expand")]
    return [
        choose(work) if config is None else schedule_of("", config)
        for config, choose in zip(found, (choose_shrink, choose_expand), strict=True)
    ]
