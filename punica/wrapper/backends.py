"""The methods that layers call, on torch's and on Triton's operators."""

from collections.abc import Sequence

import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.metadata import LoRAKernelMeta, RowGroups
from punica.ops.moe_torch import TorchExpertOps
from punica.ops.torch_ops import TorchOps
from punica.wrapper.experts import ExpertMethods


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
        self._verify_indices = verify_indices if lora_config.debug_checks else None
        self.token_mapping_meta: LoRAKernelMeta = self.batch.kernel_meta
        self.prompt_mapping_meta: LoRAKernelMeta = self.batch.sampled.kernel_meta

    def begin_step(
        self, tokens: RowGroups, sampled: RowGroups, vocab_size: int,
        *, is_prefill: bool = False, padding_slot: int | None = None,
    ) -> None:  # fmt: skip
        """Begin the next step; with ``debug_checks`` the values on the device are verified."""
        super().begin_step(tokens, sampled, vocab_size, is_prefill=is_prefill, padding_slot=padding_slot)
        if self._verify_indices and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            for batch in (self.batch, self.batch.sampled):
                self._verify_indices(batch.tensors, batch.kernel_meta.active_lora_ids.shape[0] - 1)


def verify_indices(tensors: Sequence[Tensor], slots: int) -> None:
    """Check `LoRABatch.tensors`, waiting for the device; rows past a step have no adapter. ValueError: the first bad.
    """
    mapping, order, counts, starts, ids = (tensor.cpu() for tensor in tensors)
    tokens = mapping.shape[0]
    used = int(starts.max())
    limits = [("token_lora_mapping", mapping, -1, slots - 1), ("lora_ids", ids, -1, slots - 1)]
    limits += [("num_tokens_per_lora", counts, 0, tokens), ("lora_token_start_loc", starts, 0, tokens)]
    for name, values, low, high in (*limits, ("token_indices_sorted_by_lora_ids", order[:used], 0, tokens - 1)):
        bad = ((values < low) | (values > high)).nonzero().flatten()
        if bad.numel():
            position = int(bad[0])
            raise ValueError(f"{name}[{position}] is {int(values[position])}; it must be in [{low}, {high}]")
    for entry, slot in enumerate(ids.tolist()):
        first, count = int(starts[entry]), int(counts[entry])
        rows = order[first : first + count].long()
        if slot >= 0 and (rows.numel() != count or bool((mapping[rows] != slot).any())):
            raise ValueError(
                f"segment {entry} of lora_ids (slot {slot}, sorted positions {first} to {first + count}) holds rows of "
                "another slot: the metadata tensors are not of one step"
            )
