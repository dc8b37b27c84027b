"""How a call of fused MoE LoRA is launched: path, kernels, grids and blocks from the checked forms of its operands.

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
from punica.ops.triton_ops.fused_moe_single import _fused_moe_lora_small_batch_kernel, moe_one_shot_kernel
from punica.ops.triton_ops.launch import (
    INTERPRETED,
    Launch,
    block_at_least,
    multiprocessors,
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
    ``path``: one of the three (None: the rules choose).
    """

    configs: tuple[Numbers, Numbers] | None = None
    active: int | None = None
    early: bool = False
    site: str | None = None
    path: str | None = None
    options: Options = Options()


class MoEPlan(NamedTuple):
    """The launches of a checked call. ``partials``: shape of what lies between two of them; ``numbers`` of each."""

    form: ExpertForm
    launches: tuple[Launch, ...]
    numbers: tuple[Numbers, ...]
    partials: tuple[int, int, int, int] | None


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
    partials = (shrink["split_k"], form.slices, form.pairs, form.rank)
    return MoEPlan(form, launches, (common.numbers, common.numbers), partials)


def _plan_one_shot(common: _Common, config: Config, pdl: bool) -> MoEPlan:
    form, given = common.form, common.given
    block_r, block_n = block_at_least(form.rank), 128 if common.wide_bytes == 2 else 64
    block_k = min(128 if block_r <= 64 else 64, block_at_least(form.hidden))
    programs = common.num_tiles * form.slices
    parts = rules.one_shot_parts(programs, form.hidden, form.width, multiprocessors(common.device))
    read_a, read_b = common.reads
    per_stage = stage_bytes(read_a, common.wide_bytes, common.block_m * block_k, block_r * block_k)
    constants = common.constants | common.writes | common.ranks | {
        "K": form.hidden, "R": form.rank, "FACTOR": form.factor, "BLOCK_N": block_n, "BLOCK_K": block_k,
        "BLOCK_R": block_r, "PARTS": parts, "NUM_STAGES": stages_that_fit(3, per_stage, common.device),
        "STAGES_N": config["num_stages"], "READ_A": read_a, "READ_B": read_b, "PDL": pdl,
    }  # fmt: skip
    grid, strides = (common.num_tiles * parts, form.slices, 1), (*given.x.stride(), given.output.stride(1))
    launch = common.launch(moe_one_shot_kernel, grid, strides, constants, config, pdl)
    return MoEPlan(form, (launch,), (common.numbers,), None)


def _plan_small_batch(common: _Common) -> MoEPlan:
    form, given = common.form, common.given
    block_r = block_at_least(form.rank)
    block_n, block_k = min(128, block_at_least(form.width)), min(max(64, 8192 // block_r), block_at_least(form.hidden))
    sms, tiles = multiprocessors(common.device), triton.cdiv(form.width, block_n)
    per_chunk = rules.pick_small_batch_chunk(form.pairs * form.slices, tiles, sms)
    chunks = triton.cdiv(tiles, per_chunk)
    work_total = form.pairs * form.slices * chunks
    read_a, read_b = common.reads
    constants = common.writes | {
        "K": form.hidden, "R": form.rank, "FACTOR": form.factor, "NUM_SLICES": form.slices, "BLOCK_N": block_n,
        "BLOCK_K": block_k, "BLOCK_R": block_r, "EVEN_K": form.hidden % block_k == 0,
        "HAS_RANKS": given.lora_ranks is not None, "READ_A": read_a, "READ_B": read_b,
    }  # fmt: skip
    grid, strides = (min(work_total, max(1, 2 * sms)), 1, 1), (*given.x.stride(), given.output.stride(1))
    launch = common.launch(_fused_moe_lora_small_batch_kernel, grid, strides, constants, {"num_warps": 4})
    numbers = (work_total, chunks, per_chunk, form.top_k, form.slots, form.experts)
    return MoEPlan(form, (launch,), (numbers,), None)


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
    between = switches.fully_sharded or (given.fp8 is not None and given.fp8.h_scale is not None)
    pdl = how.options.pdl and supports_pdl(given.x.device)
    tuned = {part: tuned_config(how.site, part, form, how.options) for part in ("shrink", "expand")}
    path = how.path or rules.path(work, between, pdl, how.configs is not None or any(tuned.values()))
    if path == "small_batch":
        if not naive or form.rank > rules.SMALL_BATCH_RANK:
            raise ValueError(f"the small-batch path takes naive input and ranks up to {rules.SMALL_BATCH_RANK}, got "
                             f"rank {form.rank} and {'naive' if naive else 'sorted'} input")  # fmt: skip
        return _plan_small_batch(common)
    if path == "one_shot":
        return _plan_one_shot(common, rules.one_shot_config(work), pdl)
    if how.configs is not None and not work.invariant:
        shrink, expand = _of_numbers(how.configs[0], True), _of_numbers(how.configs[1], False)
    else:
        shrink = tuned["shrink"] or rules.shrink_config(work)
        expand = tuned["expand"] or rules.expand_config(work)
    return _plan_two_stage(common, shrink, expand, how)
