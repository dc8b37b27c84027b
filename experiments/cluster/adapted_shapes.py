"""Shapes of dense models and of mixtures of experts: what a step reads, and what a LoRA server exchanges with it."""

from dataclasses import dataclass

from experiments.harness.schema import CONF, ConfigError, model_conf

ITEM = 2
"""Bytes of a 16-bit element, of weights, activations and adapters alike."""
MIXTURES = {
    # hidden, inner (of an expert), queries, keys, layers, vocabulary, experts, experts of a token
    "mixtral-8x7b": (4096, 14336, 4096, 1024, 32, 32000, 8, 2),
    "qwen3-30b-a3b": (2048, 768, 4096, 512, 48, 151936, 128, 8),
}
"""Mixture of experts -> its widths; those of `ext_moe`."""


@dataclass(frozen=True)
class Product:
    """Products of one input of a layer, in elements. Their deltas take one round trip to a LoRA server.

    ``weights``, and ``lora`` per unit of rank, are of one expert; a token meets ``top`` of ``experts``. ``sent`` is a
    token's input, ``returned`` the deltas of its outputs.
    """

    weights: int
    lora: int
    sent: int
    returned: int
    experts: int = 1
    top: int = 1


@dataclass(frozen=True)
class Shape:
    """A model with adapters on all projections, in elements: ``head`` of the output, ``kv`` per token of cache."""

    layers: int
    head: int
    kv: int
    products: tuple[Product, ...]

    @property
    def weights(self) -> int:
        """Weights that are held and may be read, the input embedding apart."""
        return self.head + self.layers * sum(part.experts * part.weights for part in self.products)

    @property
    def lora(self) -> int:
        """Elements of an adapter per unit of rank."""
        return self.layers * sum(part.experts * part.lora for part in self.products)


def shape_of(model: str) -> Shape:
    """Return the shape of a mixture, or of `conf/model/<model>.yaml`; ConfigError names the models there are."""
    if model in MIXTURES:
        return _shape(*MIXTURES[model])
    known = sorted(path.stem for path in (CONF / "model").glob("llama*.yaml"))
    if model not in known:
        raise ConfigError(f"figure.models has {model!r}; it can have {', '.join([*MIXTURES, *known])}")
    conf = model_conf(model)
    keys = conf.hidden_size // conf.num_attention_heads * conf.num_key_value_heads
    return _shape(
        conf.hidden_size, conf.intermediate_size, conf.hidden_size, keys, conf.num_hidden_layers, conf.vocab_size
    )


def _shape(
    hidden: int, inner: int, queries: int, keys: int, layers: int, vocab: int, experts: int = 1, top: int = 1
) -> Shape:
    """Four inputs, so four round trips a layer: of q, k and v; of o; of gate and up; of down.

    Gate and up of a token's experts have one input, sent once. Their inner rows are one per expert. A server adds the
    deltas of down over a token's experts, as the layer does, and returns one row.
    """
    merged = queries + 2 * keys
    products = (
        Product(hidden * merged, 3 * hidden + merged, hidden, merged),
        Product(queries * hidden, queries + hidden, queries, hidden),
        Product(2 * hidden * inner, 2 * (hidden + inner), hidden, 2 * top * inner, experts, top),
        Product(inner * hidden, inner + hidden, top * inner, hidden, experts, top),
    )
    return Shape(layers, hidden * vocab, 2 * layers * keys, products)
