"""The methods that layers call, on torch's and on Triton's operators."""

import torch

from punica.config import LoRAConfig
from punica.metadata import LoRABatch, LoRAKernelMeta, RowGroups
from punica.ops.moe_torch import TorchExpertOps
from punica.ops.torch_ops import TorchOps
from punica.wrapper.experts import ExpertMethods

_TENSORS = (
    "token_lora_mapping", "token_indices_sorted_by_lora_ids", "num_tokens_per_lora", "lora_token_start_loc", "lora_ids",
)  # fmt: skip
"""Names of `LoRABatch.tensors`."""


class CPUBackend(ExpertMethods):
    """Plain torch, on any device. Products by segment: the layout of the step is planned once and used by every layer.

    Prefill and decode take the same path, so they give equal results. Products are accumulated in float32 and rounded
    once into y's dtype; rows without adapter are never computed.
    """

    _ops = TorchOps()
    _experts = TorchExpertOps()


class GPUBackend(ExpertMethods):
    """One shrink launch and one expand launch per layer, whatever the number of slices and adapters.

    Nothing is launched for a step without adapters. The only allocation of a call is its float32 intermediate and the
    host never waits for the device, so every method can be captured in a CUDA graph; the graph then covers as many rows
    as the call had, and a replay with fewer tokens leaves the others alone (their slot is -1). On CPU tensors the
    kernels run under Triton's interpreter (``TRITON_INTERPRET=1``).
    """

    takes_aside = True
    limits_runs = False  # no kernel reads segments: tokens are grouped by slot instead

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str,
        *, max_loras: int | None = None, lora_config: LoRAConfig | None = None,
    ) -> None:  # fmt: skip
        if lora_config is None:
            if max_loras is None:
                raise TypeError("PunicaWrapperGPU needs lora_config=LoRAConfig(...) or max_loras=<number of slots>")
            lora_config = LoRAConfig(max_loras=max_loras)
        super().__init__(max_num_batched_tokens, max_batches, device, max_loras=max_loras, lora_config=lora_config)
        # imported here so that the CPU path never imports triton
        from punica.ops.triton_ops import Options, TritonOps
        from punica.ops.triton_ops.moe_ops import TritonExpertOps

        tuned_dir = None if lora_config.tuned_dir is None else str(lora_config.tuned_dir)
        options = Options(lora_config.batch_invariant, lora_config.pdl, tuned_dir)
        self._ops = TritonOps(options)
        self._experts = TritonExpertOps(options)
        self._verifies = lora_config.debug_checks
        self.token_mapping_meta: LoRAKernelMeta = self.batch.kernel_meta
        self.prompt_mapping_meta: LoRAKernelMeta = self.batch.sampled.kernel_meta

    def begin_step(
        self, tokens: RowGroups, sampled: RowGroups, vocab_size: int,
        *, is_prefill: bool = False, padding_slot: int | None = None,
    ) -> None:  # fmt: skip
        """Begin the next step; with ``debug_checks`` the values on the device are verified."""
        super().begin_step(tokens, sampled, vocab_size, is_prefill=is_prefill, padding_slot=padding_slot)
        if self._verifies and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            for batch in (self.batch, self.batch.sampled):
                verify_indices(batch)


def verify_indices(batch: LoRABatch) -> None:
    """Compare `LoRABatch.tensors` with its rows, waiting for the device. ValueError: the first that differs."""
    step = LoRABatch(batch.max_num_tokens, batch.max_loras)
    step.fill(batch.rows)
    for name, found, wanted in zip(_TENSORS, batch.tensors, step.tensors, strict=True):
        known = batch.num_rows if name == _TENSORS[1] else wanted.numel()  # behind them order has rows of other steps
        for at in (found[:known].cpu() != wanted[:known]).nonzero()[:1, 0].tolist():
            raise ValueError(f"{name}[{at}] is {int(found[at])} on {found.device}, and {int(wanted[at])} in the step")
