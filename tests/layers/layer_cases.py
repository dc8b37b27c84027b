"""Every LoRA layer class, built the same on any number of ranks and any device, and the answers to compare with."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from punica import layers
from punica.config import LoRAConfig
from punica.layers import from_layer, from_layer_logits_processor
from punica.metadata import LoRAMapping
from punica.ops.quant import Fp8Matrix
from punica.parallel import (
    ColumnParallelLinear,
    LogitsProcessor,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from punica.wrapper import PunicaWrapperBase, get_punica_wrapper

IN, MAX_RANK, MAX_LORAS = 16, 8, 4
ORG, VOCAB, DIM = 15, 20, 24
RANKS = {0: 8, 1: 5, 2: 1}
MIXED = [0, -1, 1, 1, 2, -1, 0]
ALONE = {"tp_rank": 0, "tp_size": 1}
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.float16: (4e-3, 2e-3), torch.bfloat16: (3.2e-2, 2e-2)}
Pairs = list[tuple[Tensor, Tensor]]
CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
on_devices = pytest.mark.parametrize("device", ["cpu", CUDA])
under_default_devices = pytest.mark.parametrize("default", ["meta", CUDA])
"""Programs set one, and the library still makes its host tensors on the host."""


def once(tp_size: int) -> int:
    return 1


def over_two_kv_heads(tp_size: int) -> int:
    return max(1, tp_size // 2)


class LinearCase(NamedTuple):
    """``build``: the base layer. ``packed``: its adapter-visible modules. ``sizes``: full widths, one per slice.

    ``pieces``: what lies in the output of a rank: full width, and on how many ranks each part of it is repeated; None:
    the ranks' outputs are equal; ("gathered", pieces): each has those of all, rank by rank; "sum": they are partial
    sums. ``cut_input``: ranks get their part of x.
    """

    class_name: str
    build: Callable[..., Any]
    packed: int
    sizes: tuple[int, ...]
    pieces: Any
    cut_input: bool = False


COLUMN = lambda **kw: ColumnParallelLinear(IN, 12, **kw)  # noqa: E731
TWO = lambda **kw: MergedColumnParallelLinear(IN, [8, 16], **kw)  # noqa: E731
THREE = lambda **kw: MergedColumnParallelLinear(IN, [8, 4, 12], **kw)  # noqa: E731
QKV = lambda **kw: QKVParallelLinear(IN, 3, 4, 2, **kw)  # noqa: E731
ROW = lambda **kw: RowParallelLinear(IN, 12, **kw)  # noqa: E731
TWO_PIECES = [(8, once), (16, once)]
QKV_PIECES = [(12, once), (6, over_two_kv_heads), (6, over_two_kv_heads)]
LINEAR = {
    "replicated": LinearCase("ReplicatedLinear", lambda **kw: ReplicatedLinear(IN, 12, **kw), 0, (12,), None),
    "column": LinearCase("ColumnParallelLinear", COLUMN, 0, (12,), [(12, once)]),
    "column-gathered": LinearCase("ColumnParallelLinear", partial(COLUMN, gather_output=True), 0, (12,), None),
    "merged-as-one": LinearCase("ColumnParallelLinear", TWO, 1, (24,), TWO_PIECES),
    "merged": LinearCase("MergedColumnParallelLinear", TWO, 2, (8, 16), TWO_PIECES),
    "merged-gathered": LinearCase(
        "MergedColumnParallelLinear", partial(TWO, gather_output=True), 2, (8, 16), ("gathered", TWO_PIECES)
    ),
    "variable": LinearCase(
        "MergedColumnParallelLinearVariableSlice", THREE, 3, (8, 4, 12), [(8, once), (4, once), (12, once)]
    ),
    "qkv-as-one": LinearCase("QKVParallelLinear", QKV, 1, (24,), QKV_PIECES),
    "qkv": LinearCase("MergedQKVParallelLinear", QKV, 3, (12, 6, 6), QKV_PIECES),
    "row": LinearCase("RowParallelLinear", ROW, 0, (12,), None, cut_input=True),
    "row-whole-input": LinearCase("RowParallelLinear", partial(ROW, input_is_parallel=False), 0, (12,), None),
    "row-not-reduced": LinearCase(
        "RowParallelLinear", lambda **kw: ROW(reduce_results=False, **{**kw, "bias": False}), 0, (12,), "sum", True
    ),
}
NEVER_SHARDED = ("replicated", "variable")


def expected_class(case: LinearCase, sharded: bool) -> type[nn.Module]:
    kind = "WithShardedLoRA" if sharded and case.class_name != "ReplicatedLinear" else "WithLoRA"
    return getattr(layers, case.class_name + kind)


COMMON: dict[str, Any] = {}
"""Options of every configuration: what a whole set of checks is run with."""


def config_for(dtype: torch.dtype = torch.float32, max_lora_rank: int = MAX_RANK, **options: Any) -> LoRAConfig:
    options = COMMON | options
    return LoRAConfig(max_lora_rank=max_lora_rank, max_loras=MAX_LORAS, lora_dtype=dtype, **options)


def wrapper_for(config: LoRAConfig, device: str) -> PunicaWrapperBase:
    return get_punica_wrapper(32, 32, device, lora_config=config)


def use(wrapper: PunicaWrapperBase, slots: list[int], vocab_size: int = 32) -> PunicaWrapperBase:
    """The rows of the next step use these slots (-1: no adapter)."""
    ids = [slot + 1 for slot in slots]
    wrapper.update_metadata(LoRAMapping(ids, ids), [*range(1, MAX_LORAS + 1)], MAX_LORAS, vocab_size)
    return wrapper


def used(slots: list[int]) -> PunicaWrapperBase:
    """A wrapper on the CPU whose rows use these slots."""
    return use(wrapper_for(config_for(), "cpu"), slots)


def assert_close(actual: Tensor, expected: Tensor, dtype: torch.dtype | None = None) -> None:
    """Compare on the CPU in float64, within the tolerance of ``dtype`` (of ``actual``)."""
    rtol, atol = TOLERANCE[dtype or actual.dtype]
    torch.testing.assert_close(actual.cpu().double(), expected.cpu().double(), rtol=rtol, atol=atol)


def random_pair(rank: int, in_size: int, out_size: int) -> tuple[Tensor, Tensor]:
    """A and B on the CPU, whatever the default device."""
    a, b = torch.randn(rank, in_size, device="cpu"), torch.randn(out_size, rank, device="cpu")
    return a / in_size**0.5, b / rank**0.5


def rounded(adapters: dict[int, Pairs], fp8: torch.dtype | None) -> dict[int, Pairs]:
    """What slots in FP8 leave of the adapters, all where there are none."""
    if fp8 is None:
        return adapters
    return {slot: [tuple(Fp8Matrix.of(w, fp8).real() for w in pair) for pair in of] for slot, of in adapters.items()}


def linear_layer(
    case: LinearCase, config: LoRAConfig, device: str = "cpu", place: dict[str, int] | None = None, **options: Any
) -> tuple[Any, dict[int, Pairs]]:
    """The wrapped layer with random weights and an adapter of every rank; the same draws for every place."""
    dtype = config.lora_dtype
    with torch.device(device):
        base = case.build(**{"return_bias": False, "params_dtype": dtype, **(place or {}), **options})
    rows = sum(case.sizes)
    weight, bias = torch.randn(rows, IN, device="cpu") / IN**0.5, torch.randn(rows, device="cpu")
    base.weight_loader(base.weight, weight)
    if base.bias is not None:
        base.weight_loader(base.bias, bias)
    layer = from_layer(base, MAX_LORAS, config, ["m"] * case.packed)
    adapters = {slot: [random_pair(rank, IN, size) for size in case.sizes] for slot, rank in RANKS.items()}
    for slot, pairs in adapters.items():
        fill(layer, slot, pairs)
    return layer, adapters


def embedding_layer(config: LoRAConfig, device: str = "cpu", **place: int) -> tuple[Any, dict[int, Pairs]]:
    """An embedding with added ids, filled as `linear_layer`."""
    with torch.device(device):
        base = VocabParallelEmbedding(VOCAB, DIM, config.lora_dtype, org_num_embeddings=ORG, padding_size=4, **place)
    base.weight_loader(base.weight, torch.randn(VOCAB, DIM, device="cpu"))
    layer = from_layer(base, MAX_LORAS, config, [])
    adapters = {slot: [random_pair(rank, ORG, DIM)] for slot, rank in RANKS.items()}
    for slot, pairs in adapters.items():
        fill(layer, slot, pairs)
    return layer, adapters


def logits_layer(
    config: LoRAConfig, device: str = "cpu", org: int = ORG, processor: LogitsProcessor | None = None, **place: int
) -> tuple[Any, ParallelLMHead, dict[int, Pairs]]:
    """Logits and their head with a bias and, by default, added ids, filled as `linear_layer`."""
    with torch.device(device):
        head = ParallelLMHead(VOCAB, DIM, True, config.lora_dtype, org_num_embeddings=org, padding_size=4, **place)
    head.weight_loader(head.weight, torch.randn(VOCAB, DIM, device="cpu") / DIM**0.5)
    head.weight_loader(head.bias, torch.randn(VOCAB, device="cpu"))
    layer = from_layer_logits_processor(processor or LogitsProcessor(VOCAB), head, MAX_LORAS, config)
    adapters = {slot: [random_pair(rank, DIM, VOCAB)] for slot, rank in RANKS.items()}
    for slot, pairs in adapters.items():
        fill(layer, slot, pairs)
    return layer, head, adapters


def fill(layer: Any, slot: int, pairs: Pairs) -> None:
    layer.set_lora(slot, *as_arguments(layer, pairs))


def as_arguments(layer: Any, pairs: Pairs) -> tuple[Any, Any]:
    """A and B as `set_lora` of this layer takes them: lists of one per slice, or the only ones."""
    a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return (a, b) if isinstance(layer, layers.MergedColumnParallelLinearWithLoRA) else (a[0], b[0])


def lora_term(x: Tensor, slots: list[int], adapters: dict[int, Pairs], dtype: torch.dtype) -> Tensor:
    """Row by row in float64, from the weights as the slots hold them."""
    rows = []
    for row, slot in zip(x.cpu().double(), slots, strict=True):
        pairs = adapters.get(slot) or [(torch.zeros_like(a), torch.zeros_like(b)) for a, b in adapters[0]]
        rows.append(torch.cat([row @ a.to(dtype).double().T @ b.to(dtype).double().T for a, b in pairs]))
    return torch.stack(rows)


def joined(outputs: list[Tensor], pieces: Any) -> Tensor:
    """The output of one rank, from those of all ranks."""
    if pieces is None:
        assert all(torch.equal(output, outputs[0]) for output in outputs)
        return outputs[0]
    if isinstance(pieces, tuple):
        return joined(list(joined(outputs, None).chunk(len(outputs), dim=-1)), pieces[1])
    if pieces == "sum":
        return torch.stack(outputs).sum(0)
    tp_size = len(outputs)
    copies = [repeated(tp_size) for _, repeated in pieces]
    widths = [full * count // tp_size for (full, _), count in zip(pieces, copies, strict=True)]
    parts = [output.split(widths, dim=-1) for output in outputs]
    for i, count in enumerate(copies):
        for rank in range(tp_size):
            torch.testing.assert_close(parts[rank][i], parts[rank // count * count][i])
    return torch.cat([parts[rank][i] for i, n in enumerate(copies) for rank in range(0, tp_size, n)], dim=-1)
