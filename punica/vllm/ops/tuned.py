"""`get_lora_op_configs`: the configuration of a launch by name and sizes."""

import torch

from punica.metadata import StepShape
from punica.ops.triton_ops import configs
from punica.ops.triton_ops.schedules import Problem


def get_lora_op_configs(
    op_type: str,
    max_loras: int, batch: int, hidden_size: int, rank: int, num_slices: int,
    add_inputs: bool | None = None, moe_intermediate_size: int | None = None, tuned_dir: str | None = None,
    batch_invariant: bool = False,
) -> configs.Config:  # fmt: skip
    """Return the configuration of one launch. ``max_loras``: segments of the grid; ``batch``: rows;
    ``batch_invariant``: the one form and split that depends on neither, whatever a tuned file says.
    """
    configs.check_op_type(op_type)
    is_shrink, is_expand = op_type == "shrink", op_type == "expand"
    sizes: tuple[int, ...] = (batch, hidden_size, rank) if is_shrink else (batch, rank, hidden_size)
    if moe_intermediate_size is not None:
        sizes += (moe_intermediate_size,)
    wanted = (max_loras, num_slices, *sizes)
    if not batch_invariant and (found := configs.tuned_config(op_type, add_inputs, tuned_dir, wanted)) is not None:
        return dict(found)
    if not (is_shrink or is_expand):
        return configs.expert_default(op_type, rank)
    k, width = (hidden_size, 0) if is_shrink else (0, hidden_size)
    shape = StepShape.even(max_loras, batch)
    problem = Problem(shape, batch, k, (width,) * num_slices, rank, by_rows=True, direct=is_shrink)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    schedule = configs.choose(op_type, problem, configs.Options(batch_invariant), device)
    config = schedule._asdict() | {"row_wise": not schedule.block_m, "block_m": schedule.block_m or 16}
    del config["split_k" if is_expand else "tiles_n"]
    if is_shrink:
        config |= {"block_r": 1 if schedule.block_m else schedule.block_n, "block_n": max(16, schedule.block_n)}
    return config
