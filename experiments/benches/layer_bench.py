"""One decoder layer with LoRA in a decode step, for Figure 10. Metadata is set outside the timing, as once per step."""

import torch

from experiments.benches.model_steps import TOLERANCE, Invocation, check_rows, llama_config, random_llama, spans
from experiments.harness.schema import ModelConf
from experiments.measure.timing import Call
from punica.adapters import LoRAModelManager, random_adapter
from punica.config import LoRAConfig
from punica.metadata import LoRAMapping


class LayerBench:
    """Layer 0 of `model`, `slots` random adapters of `rank`, a cache of `max_tokens` places."""

    def __init__(self, model: ModelConf, rank: int, slots: int, max_tokens: int, device: str) -> None:
        llama = random_llama(model, device, layers=1)
        self.invocation = Invocation(llama, max_tokens)
        self.layer = llama.model.layers[0]
        self.rotary = llama.model.rotary
        self.hidden_size = model.hidden_size
        self.dtype = getattr(torch, model.dtype.name)
        self.manager = LoRAModelManager(
            llama, slots, slots, model.vocab_size, LoRAConfig(max_lora_rank=rank, max_loras=slots), device
        )
        config = llama_config(model, layers=1)
        for adapter_id in range(1, slots + 1):
            self.manager.add_adapter(random_adapter(adapter_id, config, rank, adapter_id, dtype=self.dtype))
            self.manager.activate_adapter(adapter_id)

    def rows(self, batch_size: int) -> torch.Tensor:
        """Hidden states `[batch_size, hidden]`, the same first rows for every batch size."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(batch_size, self.hidden_size, generator=generator)
        return x.to(self.dtype).to(self.invocation.device)

    def begin(self, adapter_ids: list[int], kv_length: int, first_row: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Begin a decode step: `adapter_ids` one per row, 0 for none; row i reads the blocks of request `first_row +
        i`.
        """
        requests = spans(first_row + len(adapter_ids), 1, kv_length)[first_row:]
        layout = [span._replace(start=row) for row, span in enumerate(requests)]
        _, positions = self.invocation.begin(layout)
        self.manager.set_adapter_mapping(LoRAMapping(adapter_ids, adapter_ids))
        cos, sin = self.rotary(positions)
        return cos, sin

    def run(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        """Run the layer: attention is added to `x [T, hidden]` in place, the MLP's output is returned."""
        return self.layer(x, None, cos, sin, self.invocation.attention)

    def output(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        return x.add_(self.run(x, cos, sin))

    def checked_call(self, adapter_ids: list[int], kv_length: int) -> Call:
        self.check(adapter_ids, kv_length)
        x = self.rows(len(adapter_ids))
        cos, sin = self.begin(adapter_ids, kv_length)
        return torch.inference_mode()(lambda: self.run(x, cos, sin))

    @torch.inference_mode()
    def check(self, adapter_ids: list[int], kv_length: int) -> None:
        """`CheckFailed` unless first and last row equal the same row alone, and not without its adapter."""
        x = self.rows(len(adapter_ids))

        def of_row(row: int) -> tuple[torch.Tensor, torch.Tensor]:
            one, own = x[row : row + 1], [adapter_ids[row]]
            alone = self.output(one, *self.begin(own, kv_length, row))
            return alone, self.output(one, *self.begin([0], kv_length, row))

        check_rows(self.output(x, *self.begin(adapter_ids, kv_length)), of_row, TOLERANCE[self.dtype])
