"""Plan of a fused MoE LoRA call: kernels, grids and blocks from the checked forms of its operands.

`moe_rules` chooses, or the numbers that the caller gives, or the tuned files. Launches hold numbers only.
"""

from typing import Any, NamedTuple

import torch
import triton

from punica.checks import check_count
from punica.ops import collectives
from punica.ops.moe_checks import ExpertForm, Experts, Switches, check_block_size, check_experts
from punica.ops.triton_ops import moe_rules as rules
from punica.ops.triton_ops.configs import Options, get_lora_op_configs, load_lora_op_config
from punica.ops.triton_ops.device import max_tiles
from punica.ops.triton_ops.fp8_device import TYPES
from punica.ops.triton_ops.fused_moe_kernels import moe_expand_kernel, moe_shrink_kernel
from punica.ops.triton_ops.launch import (
    INTERPRETED,
    Launch,
    block_at_least,
    stages_that_fit,
    supports_pdl,
)
from punica.ops.triton_ops.moe_reading import Reading, reading_of, stage_bytes
from punica.ops.triton_ops.op import check_runnable

Numbers = tuple[int, ...]
Config = dict[str, Any]


class How(NamedTuple):
    """How a call is to run, besides its operands. ``configs``: the seven numbers each of shrink and expand (None: the
    rules choose, or the tuned files of ``site``, "w13" or "w2"). ``active``: adapters in use, as far as the host knows.
    ``early``: shrink may start before the kernel in front has ended, as nothing that it reads first is from there.
    """

    configs: tuple[Numbers, Numbers] | None = None
    active: int | None = None
    early: bool = False
    site: str | None = None
    options: Options = Options()


class MoEPlan(NamedTuple):
    """The two launches of a checked call, their counts, and the shape of the partial sums between them."""

    form: ExpertForm
    shrink: Launch
    expand: Launch
    numbers: Numbers
    partials: tuple[int, int, int, int]


class _Common(NamedTuple):
    """What all kernels of a call are told."""

    form: ExpertForm
    given: Experts
    switches: Switches
    num_tiles: int
    block_m: int
    device: torch.device

    @property
    def wide_bytes(self) -> int:
        """Of an element of the products' operands, once they are wide."""
        return self.given.wide.itemsize

    @property
    def reads(self) -> tuple[Reading, Reading]:
        """How shrink and expand read theirs."""
        given, fp8 = self.given, self.given.fp8
        if fp8 is None:
            plain = Reading(TYPES[given.wide])
            return plain, plain
        return (
            reading_of(given.lora_a[0], given.wide, fp8.shrink, given.x, fp8.x_scale),
            reading_of(given.lora_b[0], given.wide, fp8.expand),
        )

    @property
    def ranks(self) -> Config:
        """Of kernels that read B: ranks that one load takes, where these are looked at."""
        has_ranks, at_once = self.given.lora_ranks is not None, 16 // self.given.lora_b[0].element_size()
        vector = at_once if has_ranks and self.form.full_rank % at_once == 0 else 1
        return {"HAS_RANKS": has_ranks, "VECTOR": vector}

    @property
    def naive(self) -> bool:
        return self.given.sorted_ids is None

    @property
    def numbers(self) -> Numbers:
        """pairs, num_tiles, top_k, padded, blocks, num_slots, num_experts."""
        ids, experts = self.given.sorted_ids, self.given.expert_ids
        lengths = (0, 0) if ids is None else (ids.shape[1], experts.shape[1])
        return self.form.pairs, self.num_tiles, self.form.top_k, *lengths, self.form.slots, self.form.experts

    @property
    def constants(self) -> Config:
        return {
            "NUM_SLICES": self.form.slices,
            "NAIVE": self.naive,
            "HAS_IDS": self.given.lora_ids is not None and not self.naive,
            "BLOCK_SLOTS": block_at_least(self.form.slots + 1, 2),
            "BLOCK_M": self.block_m,
            "INTERPRET": INTERPRETED,
        }

    @property
    def writes(self) -> Config:
        """Of those that write y."""
        return {
            "N": self.form.width,
            "OFFSET": self.switches.offset,
            "WEIGHTED": self.switches.mul_routed_weight,
            "ADD": self.switches.add_inputs,
        }

    def launch(
        self, kernel: Any, grid: tuple[int, int, int], strides: Numbers, constants: Config, config: Config,
        early: bool = False,
    ) -> Launch:  # fmt: skip
        given = self.given
        dtypes = (
            given.x.dtype, given.lora_a[0].dtype, given.output.dtype, given.topk_weights.dtype, given.expert_ids.dtype,
        )  # fmt: skip
        return Launch(
            kernel, grid, dtypes, strides, constants, num_warps=config["num_warps"], pdl=early, device=self.device
        )


def _plan_shrink(common: _Common, config: Config, pdl: bool, early: bool) -> Launch:
    form, rows = common.form, config["rows"]
    block_r = min(config["block_n"], block_at_least(form.rank))
    block_k = min(config["block_k"], block_at_least(form.hidden))
    joined = form.slices == 2 and not rows
    per_stage = stage_bytes(
        common.reads[0], common.wide_bytes, common.block_m * block_k, (2 if joined else 1) * block_r * block_k
    )
    gathered = form.rank != form.full_rank
    constants = common.constants | {
        "K": form.hidden, "R": form.rank, "FACTOR": form.factor, "BLOCK_R": block_r, "BLOCK_K": block_k,
        "SPLIT_K": config["split_k"], "GROUP_M": config["group_m"],
        "NUM_STAGES": stages_that_fit(config["num_stages"], per_stage, common.device),
        "ROWS": rows, "JOINED": joined, "HAS_RANKS": common.given.lora_ranks is not None,
        "FIRST_R": collectives.current().rank() * form.rank if gathered else 0, "READ": common.reads[0], "PDL": pdl,
    }  # fmt: skip
    per_tile = config["split_k"] * triton.cdiv(form.rank, block_r) * (1 if joined else form.slices)
    grid = (common.num_tiles * per_tile, 1, 1)
    return common.launch(moe_shrink_kernel, grid, common.given.x.stride(), constants, config, early and pdl)


def _plan_expand(common: _Common, config: Config, partials: int, pdl: bool) -> Launch:
    form, given, rows = common.form, common.given, config["rows"]
    rank, most = form.full_rank, 128 if common.wide_bytes == 2 else 32
    block_r = block_at_least(rank) if rows or rank <= most else min(config["block_k"], most)
    block_n, tiles_n = config["block_n"], config["tiles_n"]
    if common.wide_bytes == 4 and not rows:
        block_n = min(block_n, 64)  # operands of an IEEE product lie in registers
    per_stage = stage_bytes(common.reads[1], common.wide_bytes, 0, block_r * block_n)
    per_stage += common.block_m * block_n * given.output.element_size()
    constants = common.constants | common.writes | common.ranks | {
        "R": rank, "BLOCK_N": block_n, "BLOCK_R": block_r, "TILES_N": tiles_n, "GROUP_M": config["group_m"],
        "NUM_STAGES": stages_that_fit(config["num_stages"], per_stage, common.device), "PARTIALS": partials,
        "ROWS": rows, "READ": common.reads[1], "PDL": pdl,
    }  # fmt: skip
    grid = (common.num_tiles * triton.cdiv(form.width, block_n * tiles_n) * form.slices, 1, 1)
    return common.launch(moe_expand_kernel, grid, (given.output.stride(1),), constants, config, pdl)


def _plan_two_stage(common: _Common, shrink: Config, expand: Config, how: How) -> MoEPlan:
    form, sharded = common.form, common.switches.fully_sharded
    pdl = how.options.pdl and supports_pdl(common.device) and not sharded
    shrink = shrink | {"split_k": 1} if sharded else shrink
    rounds = common.given.fp8 is not None and common.given.fp8.h_scale is not None
    pdl = pdl and not rounds  # torch stands between the two
    launches = (
        _plan_shrink(common, shrink, pdl, how.early),
        _plan_expand(common, expand, 1 if rounds else shrink["split_k"], pdl),
    )
    return MoEPlan(form, *launches, common.numbers, (shrink["split_k"], form.slices, form.pairs, form.rank))


def _of_numbers(numbers: Numbers, is_shrink: bool) -> Config:
    """The tiled form that the seven numbers of the op describe."""
    _, block_n, block_k, group_m, num_warps, num_stages, split_k = numbers
    config = {"rows": False, "block_n": block_n, "block_k": block_k, "group_m": group_m, "num_warps": num_warps}
    config |= {"num_stages": num_stages}
    return config | ({"split_k": split_k} if is_shrink else {"tiles_n": 1})


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


def tuned_config(site: str | None, part: str, form: ExpertForm, options: Options) -> Config | None:
    """What the tuned file of a site says, as the rules say it; None where there is no file."""
    op_type = f"fused_moe_lora_{site}_{part}"
    if site is None or options.batch_invariant or options.tuned_dir is None:
        return None
    if load_lora_op_config(op_type, None, options.tuned_dir) is None:
        return None
    hidden, inner = (form.hidden, form.width) if site == "w13" else (form.width, form.hidden)
    found = get_lora_op_configs(
        op_type, form.slots, form.tokens, hidden, form.rank, form.slices,
        moe_intermediate_size=inner, tuned_dir=options.tuned_dir,
    )  # fmt: skip
    return {"rows": found.get("row_wise", False), "tiles_n": 1, "group_m": found.get("group_size_m", 1)} | found


def plan_experts(given: Experts, max_lora_rank: int, top_k: int, switches: Switches, how: How) -> MoEPlan | None:
    """All checks, then the launches; None when there is nothing to do."""
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
    work = rules.Work(form, naive, active, given.lora_a[0].element_size(), how.options.batch_invariant)
    block_m = 16 if naive else form.block_m
    if not naive:
        check_block_size(block_m, 16)
    tiles = form.pairs if naive else max_tiles(form.pairs, active * form.experts, block_m)
    common = _Common(form, given, switches, tiles, block_m, given.x.device)
    tuned = {part: tuned_config(how.site, part, form, how.options) for part in ("shrink", "expand")}
    if how.configs is not None and not work.invariant:
        shrink, expand = _of_numbers(how.configs[0], True), _of_numbers(how.configs[1], False)
    else:
        shrink = tuned["shrink"] or rules.shrink_config(work)
        expand = tuned["expand"] or rules.expand_config(work)
    return _plan_two_stage(common, shrink, expand, how)
