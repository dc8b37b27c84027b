"""What every LoRA layer is: a base layer, slots with stacked adapter weights, and calls to the PunicaWrapper.

This file is the interface that the adapter manager drives. :mod:`punica.layers.slots` fills slots,
:mod:`punica.layers.base_linear` adds the forward of the linear layers; embeddings and logits have their own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from punica.config import LoRAConfig
    from punica.wrapper import PunicaWrapperABC


class BaseLayerWithLoRA(nn.Module):
    """The interface that the adapter manager drives; every method is implemented by a layer family."""

    punica_wrapper: PunicaWrapperABC | None = None

    def slice_lora_a(self, lora_a: Any) -> Any:
        """This rank's part of A; a tensor gives a tensor, a list a list, ``None`` entries stay ``None``."""
        raise NotImplementedError(f"{type(self).__name__}.slice_lora_a")

    def slice_lora_b(self, lora_b: Any) -> Any:
        """This rank's part of B; a tensor gives a tensor, a list a list, ``None`` entries stay ``None``."""
        raise NotImplementedError(f"{type(self).__name__}.slice_lora_b")

    def create_lora_weights(self, max_loras: int, lora_config: LoRAConfig, model_config: Any = None) -> None:
        """Allocate zeroed slots on the base layer's device. Called once."""
        raise NotImplementedError(f"{type(self).__name__}.create_lora_weights")

    def reset_lora(self, index: int) -> None:
        """Zero slot ``index`` in all buffers."""
        raise NotImplementedError(f"{type(self).__name__}.reset_lora")

    def set_lora(self, index: int, lora_a: Any, lora_b: Any) -> None:
        """Replace the content of slot ``index`` by one adapter's full (unsharded) matrices."""
        raise NotImplementedError(f"{type(self).__name__}.set_lora")

    def set_mapping(self, punica_wrapper: PunicaWrapperABC) -> None:
        """Store the wrapper, shared by all layers of a model, that knows which row uses which slot."""
        self.punica_wrapper = punica_wrapper

    @classmethod
    def can_replace_layer(
        cls,
        *,
        source_layer: nn.Module,
        lora_config: LoRAConfig,
        packed_modules_list: list[str],
        model_config: Any = None,
    ) -> bool:
        """Whether this class wraps ``source_layer`` in this configuration (keyword arguments only).

        ``packed_modules_list``: names under which adapters know the matrices packed in the layer; empty if not packed.
        A class names the keywords that it looks at and lets the others pass.
        """
        raise NotImplementedError(f"{cls.__name__}.can_replace_layer")
