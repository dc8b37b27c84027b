"""`PunicaWrapperGPU`: the wrapper on the Triton kernels `lora_shrink` and `lora_expand`."""

import torch

from punica.config import LoRAConfig
from punica.metadata import HostIndices, LoRAKernelMeta, MetaArgs, compute_meta, get_captured_lora_counts
from punica.wrapper.base import PunicaWrapperBase
from punica.wrapper.operands import Slices, Weights


class PunicaWrapperGPU(PunicaWrapperBase):
    """One shrink launch and one expand launch per layer, whatever the number of slices and adapters.

    Needs ``lora_config``, or ``max_loras`` as a shorthand for its defaults (TypeError without either). Two kernel
    metadata objects of capacity N are refilled from the host copy of each step: ``token_mapping_meta`` for the tokens
    and ``prompt_mapping_meta`` for the sampled rows (of which speculative decoding may have more than requests).

    Nothing is launched for a step without adapters. The only allocation of a call is its float32 intermediate and the
    host never waits for the device, so every method can be captured in a CUDA graph; the graph then covers as many rows
    as the call had, and a replay with fewer tokens leaves the others alone (their slot is -1). On CPU tensors the
    kernels run under Triton's interpreter (``TRITON_INTERPRET=1``).
    """

    def __init__(
        self,
        max_num_batched_tokens: int,
        max_batches: int,
        device: torch.device | str,
        *,
        max_loras: int | None = None,
        lora_config: LoRAConfig | None = None,
    ) -> None:
        if lora_config is None:
            if max_loras is None:
                raise TypeError("PunicaWrapperGPU needs lora_config=LoRAConfig(...) or max_loras=<number of slots>")
            lora_config = LoRAConfig(max_loras=max_loras)
        super().__init__(max_num_batched_tokens, max_batches, device, max_loras=max_loras, lora_config=lora_config)
        # imported here so that the CPU path never imports triton
        from punica.ops.triton_ops.checks import verify_indices
        from punica.ops.triton_ops.lora_expand import lora_expand
        from punica.ops.triton_ops.lora_linear import lora_linear
        from punica.ops.triton_ops.lora_shrink import lora_shrink

        self._lora_shrink, self._lora_expand, self._lora_linear = lora_shrink, lora_expand, lora_linear
        self._specialize, self._batch_invariant = lora_config.specialize_active_lora, lora_config.batch_invariant
        self._pdl = lora_config.pdl
        self._tuned_dir = None if lora_config.tuned_dir is None else str(lora_config.tuned_dir)
        slots = lora_config.max_loras
        self._slots, self._debug_checks, self._verify_indices = slots, lora_config.debug_checks, verify_indices
        counts = get_captured_lora_counts(slots, self._specialize)
        self.token_mapping_meta = LoRAKernelMeta.make(slots, max_num_batched_tokens, self.device, counts)
        self.prompt_mapping_meta = LoRAKernelMeta.make(slots, max_num_batched_tokens, self.device, counts)

    @property
    def prefill_metadata(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
        """As in the base class, but computed when asked for: no kernel reads it, so ``max_batches`` sets no limit."""
        self._check_prefill()
        segments = compute_meta(torch.from_numpy(self._current().token_slots))
        starts, lengths, slots = (part.to(self.device) for part in segments[:3])
        return starts, lengths, slots, segments.batch_size, segments.max_length, segments.token_nums

    def _checked_segments(self, host: HostIndices) -> None:
        """No kernel reads segments: tokens are grouped by slot instead."""

    def _prepare_backend(self, host: HostIndices) -> None:
        self.token_mapping_meta.prepare_tensors(torch.from_numpy(host.token_slots))
        self.prompt_mapping_meta.prepare_tensors(torch.from_numpy(host.sampler_slots))

    def _check_buffer(self, buffer: Slices | None) -> None:
        if buffer is not None:
            raise ValueError("buffer is created internally by PunicaWrapperGPU; call without it")

    def _meta_args(self, rows: int, sampled: bool) -> MetaArgs:
        meta = self.prompt_mapping_meta if sampled else self.token_mapping_meta
        args = meta.meta_args(rows, self._specialize)
        if self._debug_checks and not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            self._verify_indices(args[:5], self._slots)
        return args

    def _shrink(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights: Weights,
        scale: float,
        *,
        accumulate: bool,
        lora_ranks: torch.Tensor | None,
        sampled: bool,
    ) -> None:
        self._lora_shrink(
            x,
            weights,
            y,
            *self._meta_args(x.shape[0], sampled),
            scale,
            accumulate,
            lora_ranks=lora_ranks,
            batch_invariant=self._batch_invariant,
        )

    def _expand(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights: Weights,
        offset_start: int,
        add_inputs: bool,
        *,
        lora_ranks: torch.Tensor | None,
        sampled: bool,
    ) -> None:
        self._lora_expand(
            x,
            weights,
            y,
            *self._meta_args(y.shape[0], sampled),
            offset_start,
            add_inputs,
            lora_ranks=lora_ranks,
            batch_invariant=self._batch_invariant,
        )

    def _linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        weights_a: Weights,
        weights_b: Weights,
        scale: float,
        buffer: Slices | None,
        add_inputs: bool,
        lora_ranks: torch.Tensor | None,
        *,
        sampled: bool,
    ) -> None:
        """Both kernels as one op: K may be split between them, and expand starts while shrink still runs."""
        self._lora_linear(
            y,
            x,
            weights_a,
            weights_b,
            *self._meta_args(y.shape[0], sampled),
            scale,
            add_inputs,
            lora_ranks=lora_ranks,
            batch_invariant=self._batch_invariant,
            pdl=self._pdl,
            tuned_dir=self._tuned_dir,
        )
