"""What the ranks of a spawned test run, and the dense arithmetic it must equal.

A :class:`Case` builds one base layer for the current group, loads a full checkpoint and returns what the layer gives,
put together over the ranks; ``expected`` is the same product in float64 without any layer. Weights and inputs come
from generators seeded by the case's name, so that all processes see the same numbers.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from punica.parallel import (
    ColumnParallelLinear,
    LogitsProcessor,
    MergedColumnParallelLinear,
    ParallelLMHead,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    get_tensor_model_parallel_rank,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)

WIDTH = 8  # input of every linear layer; divisible by all tp sizes


@dataclass(frozen=True)
class Numbers:
    """Random tensors that depend on a name and a shape alone."""

    name: str
    dtype: torch.dtype = torch.float32

    def __call__(self, label: str, *shape: int) -> Tensor:
        seed = zlib.crc32(f"{self.name} {label}".encode())
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(self.dtype)


@dataclass(frozen=True)
class Case:
    """``run()`` inside a group of any size gives ``expected(tp_size)`` (float64) on every rank."""

    run: Callable[[], Tensor]
    expected: Callable[[int], Tensor]
    tolerance: float = 1e-5


CASES: dict[str, Case] = {}


def dense(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x.double() @ weight.double().T
    return y if bias is None else y + bias.double()


def load(layer, weight: Tensor, bias: Tensor | None, shard_id=None) -> None:
    layer.weight_loader(layer.weight, weight, shard_id)
    if bias is not None:
        layer.weight_loader(layer.bias, bias, shard_id)


def product(layer, x: Tensor, bias: Tensor | None) -> Tensor:
    """The layer's output; with ``skip_bias_add`` the bias that it hands back must be the one to add later."""
    output, returned = layer(x)
    if layer.skip_bias_add and bias is not None:
        assert returned is layer.bias
    else:
        assert returned is None
    return output


def rank_major(slices: list[Tensor], tp_size: int) -> Tensor:
    """What gathering packed outputs gives: for every rank its piece of each slice in turn."""
    return torch.cat([piece for p in range(tp_size) for piece in (s.chunk(tp_size, -1)[p] for s in slices)], -1)


def add_column(name: str, out=12, lead=(5,), bias=True, skip=False, gather=True, dtype=torch.float32) -> None:
    numbers = Numbers(name, dtype)
    x, weight, offset = numbers("x", *lead, WIDTH), numbers("w", out, WIDTH), numbers("b", out) if bias else None

    def run() -> Tensor:
        layer = ColumnParallelLinear(
            WIDTH, out, bias=bias, gather_output=gather, skip_bias_add=skip, params_dtype=dtype
        )
        load(layer, weight, offset)
        output = product(layer, x, offset)
        return output if gather else tensor_model_parallel_all_gather(output)

    tolerance = 0.05 if dtype == torch.bfloat16 else 1e-5
    CASES[name] = Case(run, lambda tp_size: dense(x, weight, None if skip else offset), tolerance)


def add_merged(name: str, fused: bool, gather: bool) -> None:
    numbers, sizes = Numbers(name), (8, 4, 12)
    x = numbers("x", 5, WIDTH)
    weights = [numbers(f"w{i}", size, WIDTH) for i, size in enumerate(sizes)]
    offsets = [numbers(f"b{i}", size) for i, size in enumerate(sizes)]

    def run() -> Tensor:
        layer = MergedColumnParallelLinear(WIDTH, sizes, gather_output=gather)
        if fused:
            load(layer, torch.cat(weights), torch.cat(offsets))
        else:
            for i in (2, 0, 1):
                load(layer, weights[i], offsets[i], i)
        output = product(layer, x, layer.bias)
        return output if gather else tensor_model_parallel_all_gather(output)

    CASES[name] = Case(
        run, lambda tp_size: rank_major([dense(x, w, b) for w, b in zip(weights, offsets, strict=True)], tp_size)
    )


def add_qkv(name: str, heads: int, kv_heads: int, fused: bool) -> None:
    numbers, head = Numbers(name), 3
    x = numbers("x", 5, WIDTH)
    rows = {"q": heads * head, "k": kv_heads * head, "v": kv_heads * head}
    weights = {key: numbers(f"w{key}", size, WIDTH) for key, size in rows.items()}
    offsets = {key: numbers(f"b{key}", size) for key, size in rows.items()}

    def run() -> Tensor:
        layer = QKVParallelLinear(WIDTH, head, heads, kv_heads)
        if fused:
            load(layer, torch.cat(list(weights.values())), torch.cat(list(offsets.values())))
        else:
            for key in ("v", "q", "k"):
                load(layer, weights[key], offsets[key], key)
        return tensor_model_parallel_all_gather(product(layer, x, layer.bias))

    def expected(tp_size: int) -> Tensor:
        replicas = max(1, tp_size // kv_heads)  # ranks that share one kv head
        full = {key: dense(x, weights[key], offsets[key]) for key in rows}
        repeated = [
            y.unflatten(-1, (kv_heads, head)).repeat_interleave(replicas, dim=-2).flatten(-2)
            for y in (full["k"], full["v"])
        ]
        return rank_major([full["q"], *repeated], tp_size)

    CASES[name] = Case(run, expected)


def add_row(name: str, lead=(5,), bias=True, skip=False, parallel=True, reduce=True) -> None:
    numbers, out = Numbers(name), 6
    x, weight, offset = numbers("x", *lead, WIDTH), numbers("w", out, WIDTH), numbers("b", out) if bias else None

    def run() -> Tensor:
        layer = RowParallelLinear(
            WIDTH, out, bias=bias, input_is_parallel=parallel, reduce_results=reduce, skip_bias_add=skip
        )
        load(layer, weight, offset)
        own = x.chunk(layer.tp_size, dim=-1)[layer.tp_rank] if parallel else x
        output = product(layer, own, offset)
        return output if reduce else tensor_model_parallel_all_reduce(output)

    CASES[name] = Case(run, lambda tp_size: dense(x, weight, None if skip else offset))


def add_replicated(name: str) -> None:
    numbers = Numbers(name)
    x, weight, offset = numbers("x", 5, WIDTH), numbers("w", 7, WIDTH), numbers("b", 7)

    def run() -> Tensor:
        layer = ReplicatedLinear(WIDTH, 7)
        load(layer, weight, offset)
        return product(layer, x, offset)

    CASES[name] = Case(run, lambda tp_size: dense(x, weight, offset))


def add_embedding(name: str, org: int, added: int, padding: int, ids: list, dtype=torch.int64) -> None:
    table, tokens = Numbers(name)("table", org + added, 3), torch.tensor(ids, dtype=dtype)

    def run() -> Tensor:
        layer = VocabParallelEmbedding(org + added, 3, org_num_embeddings=org, padding_size=padding)
        layer.weight.data.fill_(99.0)  # loading must clear the padding
        layer.weight_loader(layer.weight, table)
        return layer(tokens)

    CASES[name] = Case(run, lambda tp_size: table.double()[tokens.long()], tolerance=0.0)


def add_logits(name: str, org: int, added: int, padding: int, bias=False, to_root=False, **options) -> None:
    numbers, vocab = Numbers(name), org + added
    table, hidden = numbers("table", vocab, WIDTH), numbers("hidden", 3, WIDTH)
    offset = numbers("b", vocab) if bias else None

    def run() -> Tensor:
        head = ParallelLMHead(vocab, WIDTH, bias=bias, org_num_embeddings=org, padding_size=padding)
        load(head, table, offset)
        processor = LogitsProcessor(vocab, **options)
        processor.use_all_gather = not to_root
        logits = processor(head, hidden)
        if to_root and get_tensor_model_parallel_rank() > 0:
            assert logits is None
            logits = torch.zeros(3, options.get("org_vocab_size", vocab))
        return tensor_model_parallel_all_reduce(logits.contiguous()) if to_root else logits

    def expected(tp_size: int) -> Tensor:
        logits = dense(hidden, table, offset)[:, : options.get("org_vocab_size", vocab)]
        cap = options.get("soft_cap")
        logits = logits if cap is None else cap * torch.tanh(logits / cap)
        return logits * options.get("scale", 1.0)

    CASES[name] = Case(run, expected)


add_replicated("replicated")
add_column("column, not gathered", gather=False)
add_column("column, no bias", bias=False)
add_column("column, skip_bias_add", skip=True)
add_column("column, 3-D input", lead=(2, 3))
add_column("column, no rows", lead=(0,))
add_column("column, bfloat16", dtype=torch.bfloat16)
add_merged("merged, gathered, fused checkpoint", True, gather=True)
add_merged("merged, not gathered, by slice", False, gather=False)
for heads, kv_heads, fused in ((4, 4, True), (4, 2, False), (4, 1, True), (8, 2, False)):
    add_qkv(f"qkv {heads}/{kv_heads}", heads, kv_heads, fused)
add_row("row, split input")
add_row("row, whole input, no bias", parallel=False, bias=False)
add_row("row, whole input, skip_bias_add", parallel=False, skip=True)
add_row("row, split input, not reduced", reduce=False, bias=False)
add_row("row, whole input, not reduced, skip_bias_add", parallel=False, reduce=False, skip=True)
add_row("row, 3-D input", lead=(2, 3))
add_row("row, no rows", lead=(0,))
add_embedding("embedding", 16, 0, 4, [0, 15, 7, 8, 3, 4, 11, 12])
add_embedding("embedding, padded", 13, 0, 8, [[12, 0], [7, 8]])
add_embedding("embedding, added ids", 10, 7, 8, [[9, 10, 16], [0, 12, 13]], torch.int32)
add_embedding("embedding, no ids", 10, 7, 8, [])
for to_root in (False, True):
    where = "rank 0" if to_root else "all ranks"
    add_logits(f"logits on {where}, padded, bias", 13, 0, 8, bias=True, to_root=to_root)
    add_logits(f"logits on {where}, added ids, bias", 10, 7, 8, bias=True, to_root=to_root)
    add_logits(f"logits on {where}, cut, soft cap, scale", 10, 7, 8, to_root=to_root,
               org_vocab_size=10, soft_cap=2.0, scale=0.5)  # fmt: skip


def run_cases() -> dict[str, Tensor]:
    with torch.inference_mode():
        return {name: case.run() for name, case in CASES.items()}
