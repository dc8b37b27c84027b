"""Llama 2 and 3, Mistral, Qwen2 and Qwen3: the backbone that all adapters share, from a Hugging Face config.

One decoder layer, for token rows ``x [T, hidden]`` of *all* requests of a step:

    q, k, v = QKV(RMSNorm(x));   x += O(attention(rope(q), rope(k), v))
    gate, up = GateUp(RMSNorm(x));   x += Down(silu(gate) * up)

The families differ in biases, and Qwen3 normalises every head of q and k before rotation (``families.py``).

Dense layers treat all rows alike, of any request or adapter. Attention, which does not, is injected: this file has no
cache and no batch layout.

The adapter manager replaces layers by their LoRA versions, by name: linear layers of :mod:`punica.parallel`
(``qkv_proj`` packs ``q_proj, k_proj, v_proj``; ``gate_up_proj`` packs ``gate_proj, up_proj``), the embedding, and
``logits_processor`` for the head. A tied embedding and head share their weight, not their adapters.
"""

import warnings
from pathlib import Path
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor, nn

from punica.checks import check_bool
from punica.models.checkpoint import (
    NO_WEIGHTS,
    CheckpointEntry,
    StoredTensor,
    check_tensors,
    fill_random,
    load_tensors,
    stored_tensors,
)
from punica.models.families import DENSE, resolve_config, warn_of_quantization
from punica.models.rotary import RotaryEmbedding
from punica.ops.backbone import HeadNorms, PackedHeads, add_rms_norm, swiglu
from punica.parallel import (
    LinearBase,
    LogitsProcessor,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the two tables over the vocabulary in checkpoints."""


class Attention(Protocol):
    """Attention of the engine: rotates queries and keys, stores this layer's keys and values, and attends."""

    def attend(self, layer_index: int, packed: PackedHeads) -> Tensor:
        """Map this rank's heads of T rows, which it may overwrite, to ``[T, H, D]``."""


class LlamaAttention(nn.Module):
    """Projections, rotation and the call into the engine's attention. ``Hkv < H`` is grouped-query attention."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.layer_index = layer_index
        self.head_size: int = config.head_dim
        hidden, heads, kv_heads = config.hidden_size, config.num_attention_heads, config.num_key_value_heads
        common: dict[str, Any] = {"params_dtype": config.dtype, "return_bias": False}
        self.qkv_proj = QKVParallelLinear(hidden, self.head_size, heads, kv_heads, bias=config.qkv_bias, **common)
        self.o_proj = RowParallelLinear(heads * self.head_size, hidden, bias=config.o_bias, **common)
        self.num_heads, self.num_kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.q_norm, self.k_norm = (
            nn.RMSNorm(self.head_size, config.rms_norm_eps, dtype=config.dtype) if config.qk_norm else None
            for _ in range(2)
        )

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        heads = self.qkv_proj(x).view(x.shape[0], -1, self.head_size)
        norms = None
        if self.q_norm is not None and self.k_norm is not None:
            norms = HeadNorms(self.q_norm.weight, self.k_norm.weight, cast(float, self.q_norm.eps))
        packed = PackedHeads(heads, self.num_kv_heads, cos, sin, norms)
        return self.o_proj(attention.attend(self.layer_index, packed).flatten(1))


class LlamaMLP(nn.Module):
    """SwiGLU: ``Down(silu(Gate x) * Up x)``."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size
        common: dict[str, Any] = {"bias": config.mlp_bias, "params_dtype": config.dtype, "return_bias": False}
        self.gate_up_proj = MergedColumnParallelLinear(hidden, [inner, inner], **common)
        self.down_proj = RowParallelLinear(inner, hidden, **common)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_up_proj(x)))


class LlamaDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm, whose launch on a GPU also adds the block before to the residual."""

    def __init__(self, config: Any, layer_index: int) -> None:
        super().__init__()
        self.self_attn, self.mlp = self.make_parts(config, layer_index)
        for module in self.modules() if config.fp8_weights else ():
            if isinstance(module, LinearBase):
                module.hold_fp8()  # here, so that no more than a layer's weights are ever of 16 bits
        norms = (nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=config.dtype) for _ in range(2))
        self.input_layernorm, self.post_attention_layernorm = norms

    def forward(self, x: Tensor, delta: Tensor | None, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """Add ``delta`` (of the layer before) and attention to residual ``x [T, hidden]``; return the MLP's output."""
        delta = self.self_attn(normed(self.input_layernorm, x, delta), cos, sin, attention)
        return self.mlp(normed(self.post_attention_layernorm, x, delta))

    def make_parts(self, config: Any, layer_index: int) -> tuple[LlamaAttention, nn.Module]:
        return LlamaAttention(config, layer_index), LlamaMLP(config)


def normed(norm: nn.RMSNorm, x: Tensor, delta: Tensor | None) -> Tensor:
    """Add ``delta`` to the residual stream ``x [T, hidden]`` in place, and return its norm."""
    return add_rms_norm(x, delta, norm.weight, cast(float, norm.eps))


class LlamaModel(nn.Module):
    """Embedding, decoder layers, final norm; in the config's dtype, on the default device."""

    def __init__(self, config: Any, layer_class: type[LlamaDecoderLayer] = LlamaDecoderLayer) -> None:
        super().__init__()
        dtype = cast(torch.dtype, config.dtype)
        self.embed_tokens = VocabParallelEmbedding(config.vocab_size, config.hidden_size, params_dtype=dtype)
        self.rotary = RotaryEmbedding(config)
        self.layers = nn.ModuleList(layer_class(config, index) for index in range(config.num_hidden_layers))
        self.norm = nn.RMSNorm(config.hidden_size, config.rms_norm_eps, dtype=dtype)

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Map ``token_ids [T]`` and ``positions [T]`` (int64) to hidden states ``[T, hidden]``."""
        x = self.embed_tokens(token_ids)
        cos, sin = self.rotary(positions)  # once per step, not per layer
        delta = None
        for layer in self.layers:
            delta = layer(x, delta, cos, sin, attention)
        return normed(self.norm, x, delta)


class LlamaForCausalLM(nn.Module):
    """A Llama, Mistral, Qwen2 or Qwen3 with its language-model head, sharded over the current tensor-parallel group.

    Args:
        config: a ``transformers.LlamaConfig``, ``MistralConfig``, ``Qwen2Config`` or ``Qwen3Config``, or a folder whose
            ``config.json`` is one. The attribute is a copy with the ``dtype``.
        dtype, device: of the weights; ``dtype`` ``None`` takes the config's, or float32 when it has none.
        fp8_weights: linear layers hold float8_e4m3fn with a scale per output row, quantised as they are loaded from
            ``dtype``, in which rows are still computed; embedding, head and norms keep it.

    The weights are uninitialised until :meth:`init_random_weights` or :meth:`load_weights`. Engines refuse a model
    whose ``has_weights`` is False; set it after filling the parameters in another way. Full attention is exact up to
    ``max_context`` tokens: the model's positions, scaled as its RoPE is, or its shorter sliding window. Raises the
    errors of :func:`~punica.models.families.resolve_config`, and ValueError for a RoPE type that ``rotary.py`` lacks.
    """

    packed_modules_mapping: ClassVar = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    embedding_modules: ClassVar = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}
    config_classes: ClassVar[dict[str, type[Any]]] = DENSE
    layer_class: ClassVar[type[LlamaDecoderLayer]] = LlamaDecoderLayer

    def __init__(
        self, config: Any, dtype: torch.dtype | None = None, device: torch.device | str = "cpu",
        *, fp8_weights: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        check_bool("fp8_weights", fp8_weights)
        self.config: Any = self.resolve_config(config)
        self.config.dtype = dtype or self.config.dtype or torch.float32
        self.config.fp8_weights = fp8_weights
        self.max_context: int = self.config.max_context
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        with torch.device(device):
            self.model = LlamaModel(self.config, self.layer_class)
            self.lm_head = ParallelLMHead(vocab, hidden, params_dtype=self.config.dtype)
            if self.config.tie_word_embeddings:
                self.lm_head.weight = self.model.embed_tokens.weight
            self.logits_processor = LogitsProcessor(vocab)
        self.requires_grad_(False)
        self.has_weights = False
        for name, module in self.named_modules():
            if isinstance(module, LinearBase):
                module.prefix = name
        self.num_layers: int = self.config.num_hidden_layers
        attention: LlamaAttention = self.model.layers[0].self_attn  # type: ignore[union-attr, assignment]
        self.num_kv_heads, self.head_size = attention.num_kv_heads, attention.head_size

    def forward(self, token_ids: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Map ``token_ids [T]``, ``positions [T]`` (int64, on the model's device) to hidden states ``[T, hidden]``."""
        return self.model(token_ids, positions, attention)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states ``[S, hidden]`` of the rows to sample to logits ``[S, vocab]`` (on every rank)."""
        return self.logits_processor(self.lm_head, hidden)

    def init_random_weights(self, seed: int = 0) -> None:
        """Fill the weights from N(0, ``config.initializer_range``), as in the paper's harness; equal on any ranks."""
        fill_random(self.checkpoint_entries(), seed, self.config.initializer_range)
        self.has_weights = True

    def load_weights(self, folder: str | Path) -> None:
        """Read a Hugging Face folder. A head unlike its embedding is kept, whatever ``tie_word_embeddings`` says, as by
        transformers. Errors of `stored_tensors` and `check_tensors` (:mod:`punica.models.checkpoint`) change nothing;
        after those of `load_tensors` the model has no weights.
        """
        stored = self._stored_tensors(folder)
        entries = self.checkpoint_entries()
        head = self._own_head(stored) if self.config.tie_word_embeddings else None
        entries += [head] if head is not None else []
        check_tensors(entries, stored, folder)
        warn_of_quantization(self.config)
        self.has_weights = False
        load_tensors(entries, stored)
        if head is not None:
            self.lm_head.weight = head.parameter
            self.config.tie_word_embeddings = False
        self.has_weights = True

    def _stored_tensors(self, folder: str | Path) -> dict[str, StoredTensor]:
        """List a folder's tensors by the names of :meth:`checkpoint_entries`."""
        return stored_tensors(folder, NO_WEIGHTS)

    def _own_head(self, stored: dict[str, StoredTensor]) -> CheckpointEntry | None:
        """Return a head of its own for a tied model whose checkpoint has one; else leave the head out of ``stored``."""
        head = stored.pop(HEAD, None)
        if head is None:
            return None
        embedding = stored.setdefault(EMBEDDING, head)  # either one serves for both
        if head.shape == embedding.shape and torch.equal(head.read(), embedding.read()):
            return None
        warnings.warn(
            f"tie_word_embeddings is true, but the checkpoint's {HEAD} differs from {EMBEDDING}: the head is kept; set "
            "tie_word_embeddings to false in config.json",
            stacklevel=3,
        )
        stored[HEAD] = head
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        with torch.device(self.lm_head.weight.device):
            own = ParallelLMHead(vocab, hidden, params_dtype=self.config.dtype).requires_grad_(False)
        return CheckpointEntry(HEAD, (vocab, hidden), own.weight)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        outcome = super().load_state_dict(*args, **kwargs)
        self.has_weights = True
        return outcome

    def checkpoint_entries(self) -> list[CheckpointEntry]:
        """List every tensor of a Hugging Face checkpoint of this model, with its parameter."""
        vocab, hidden = self.config.vocab_size, self.config.hidden_size
        entries = [CheckpointEntry(EMBEDDING, (vocab, hidden), self.model.embed_tokens.weight)]
        for index, layer in enumerate(self.model.layers):
            entries += self._layer_entries(f"model.layers.{index}", layer)
        entries.append(CheckpointEntry("model.norm.weight", (hidden,), self.model.norm.weight))
        if not self.config.tie_word_embeddings:
            entries.append(CheckpointEntry(HEAD, (vocab, hidden), self.lm_head.weight))
        return entries

    def _layer_entries(self, prefix: str, layer: Any) -> list[CheckpointEntry]:
        hidden, attention = self.config.hidden_size, layer.self_attn
        q_rows = self.config.num_attention_heads * self.head_size
        kv_rows = self.config.num_key_value_heads * self.head_size
        entries = []
        for name, shape, module, shard_id in (
            ("self_attn.q_proj", (q_rows, hidden), attention.qkv_proj, "q"),
            ("self_attn.k_proj", (kv_rows, hidden), attention.qkv_proj, "k"),
            ("self_attn.v_proj", (kv_rows, hidden), attention.qkv_proj, "v"),
            ("self_attn.o_proj", (hidden, q_rows), attention.o_proj, None),
            ("input_layernorm", (hidden,), layer.input_layernorm, None),
            ("post_attention_layernorm", (hidden,), layer.post_attention_layernorm, None),
        ):
            entries += _entries_of(f"{prefix}.{name}", shape, module, shard_id)
        for name in ("q_norm", "k_norm") if self.config.qk_norm else ():
            norm = getattr(attention, name)
            entries += _entries_of(f"{prefix}.self_attn.{name}", (self.head_size,), norm, None)
        return entries + self._mlp_entries(prefix, layer.mlp)

    def _mlp_entries(self, prefix: str, mlp: Any) -> list[CheckpointEntry]:
        hidden, inner = self.config.hidden_size, self.config.intermediate_size
        entries = _entries_of(f"{prefix}.mlp.gate_proj", (inner, hidden), mlp.gate_up_proj, 0)
        entries += _entries_of(f"{prefix}.mlp.up_proj", (inner, hidden), mlp.gate_up_proj, 1)
        return entries + _entries_of(f"{prefix}.mlp.down_proj", (hidden, inner), mlp.down_proj, None)

    @classmethod
    def resolve_config(cls, config: Any) -> Any:
        return resolve_config(config, cls.config_classes)


def _entries_of(name: str, shape: tuple[int, ...], module: Any, shard_id: Any) -> list[CheckpointEntry]:
    entries = [CheckpointEntry(f"{name}.weight", shape, module.weight, shard_id)]
    if getattr(module, "bias", None) is not None:
        entries.append(CheckpointEntry(f"{name}.bias", shape[:1], module.bias, shard_id))
    return entries
