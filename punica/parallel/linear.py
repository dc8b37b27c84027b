"""The linear layers that LoRA wraps: replicated, or split over tensor-parallel ranks by columns or by rows.

Every layer computes ``y = x W^T (+ b)`` with ``W`` of shape ``[out, in]``. *Column parallel* keeps a block of **rows**
of ``W``: each rank makes ``out / tp`` outputs. *Row parallel* keeps a block of **columns**: each rank takes ``in / tp``
inputs and makes a partial sum. A pair column -> row, as in attention and MLP, needs one all-reduce and no gather
(Megatron-LM). Parameters are frozen and uninitialised; a model fills them through ``weight_loader``.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from punica.checks import check_count
from punica.ops.quant import E4M3, quantize_per_channel
from punica.parallel import group
from punica.parallel.matmul import fp8_linear, invariant_linear, linear

LinearOutput = Tensor | tuple[Tensor, Tensor | None]


class UnquantizedLinearMethod:
    """Plain product ``x @ weight^T (+ bias)``. Quantised layers replace ``layer.quant_method``."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return linear(x, layer.weight, bias)

    def operands(self, layer: Any, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the product's operands as `punica.ops.interface.Beside` takes them."""
        return (layer.weight,) if bias is None else (layer.weight, bias)


class Fp8LinearMethod:
    """The product with a weight in float8_e4m3fn and ``layer.weight_scale``; rows and sums as without it."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8_linear(x, layer.weight, layer.weight_scale, bias)

    def operands(self, layer: Any, bias: Tensor | None) -> tuple[Tensor | None, ...]:
        return layer.weight, bias, layer.weight_scale


class BatchInvariantLinearMethod:
    """The product with bits independent of the batch; on a GPU 64 rows at a time, each reading the weight."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return invariant_linear(x, layer.weight, bias)


PLAIN_METHODS = (UnquantizedLinearMethod, BatchInvariantLinearMethod)
SKINNY_METHODS = (UnquantizedLinearMethod, Fp8LinearMethod)
"""Methods whose product of few rows the op of a LoRA term can make as well."""


def dense_layers(model: nn.Module) -> dict[str, Any]:
    """Linear layers and heads of ``model`` by name, as they are before LoRA replaces them."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "quant_method")}


def check_batch_invariant(layers: Mapping[str, Any]) -> None:
    """ValueError: a layer whose product is no plain one (experts, quantised layers), or one that is not on a GPU."""
    for name, layer in layers.items():
        if type(layer.quant_method) not in PLAIN_METHODS or not layer.weight.is_cuda:
            raise ValueError(
                f"batch_invariant needs plain linear layers on a GPU, {name} multiplies by "
                f"{type(layer.quant_method).__name__}; serve this model without batch_invariant"
            )


def set_batch_invariant(layers: Mapping[str, Any], wanted: bool) -> None:
    for layer in layers.values():
        if type(layer.quant_method) in PLAIN_METHODS:
            layer.quant_method = PLAIN_METHODS[wanted]()


def resolve_tp(tp_rank: int | None, tp_size: int | None) -> tuple[int, int]:
    """The place, taken from the current group where ``None``; ``ValueError`` unless ``0 <= tp_rank < tp_size``."""
    size = group.get_tensor_model_parallel_world_size() if tp_size is None else tp_size
    rank = group.get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"tp_rank must be in [0, tp_size) and tp_size >= 1, got tp_rank={rank}, tp_size={size}")
    return rank, size


def check_last_dim(x: Tensor, expected: int, layer_name: str) -> None:
    """``ValueError`` unless ``x`` is ``[..., expected]``; called before the matmul."""
    if x.ndim == 0 or x.shape[-1] != expected:
        raise ValueError(f"{layer_name}: last input dimension must be {expected}, got input of shape {tuple(x.shape)}")


def check_checkpoint_shape(loaded: Tensor, expected: Sequence[int], what: str) -> None:
    """``ValueError`` with both shapes when a checkpoint tensor is not the full tensor that the layer expects."""
    if tuple(loaded.shape) != tuple(expected):
        raise ValueError(f"{what}: checkpoint tensor must have shape {tuple(expected)}, got {tuple(loaded.shape)}")


def annotated_parameter(values: Tensor, weight_loader: Callable[..., None]) -> nn.Parameter:
    """A frozen parameter with what loaders read: ``weight_loader``, ``output_dim`` and, of a matrix, ``input_dim``."""
    parameter = nn.Parameter(values, requires_grad=False)
    parameter.output_dim, parameter.weight_loader = 0, weight_loader  # type: ignore[attr-defined]
    if values.ndim == 2:
        parameter.input_dim = 1  # type: ignore[attr-defined]
    return parameter


@dataclass(frozen=True)
class OutputShard:
    """One checkpoint matrix of a layer: of its ``full`` rows this rank has the ``index``-th block of ``rows`` rows."""

    full: int
    index: int
    rows: int

    def rows_of(self, matrix: Tensor) -> Tensor:
        """This rank's rows of the full matrix (or bias), a view."""
        return matrix.narrow(0, self.index * self.rows, self.rows)


class LinearBase(nn.Module):
    """Sizes, tensor-parallel place and parameters common to all linear layers.

    Sizes are full ones, at least 1; ``params_dtype`` ``None`` is the default dtype; ``prefix`` is the layer's name, for
    messages. ``skip_bias_add``: the bias is left out of the product, the caller adds the returned one. ``return_bias``:
    ``forward`` returns ``(output, bias if skip_bias_add else None)`` instead of the output alone. ``tp_rank``,
    ``tp_size``: this rank's place; ``None`` asks the current group.
    """

    weight: nn.Parameter
    weight_scale: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, input_size: int, output_size: int,
        skip_bias_add: bool = False, params_dtype: torch.dtype | None = None, prefix: str = "",
        return_bias: bool = True, tp_rank: int | None = None, tp_size: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.input_size = check_count("input_size", input_size)
        self.output_size = check_count("output_size", output_size)
        self.skip_bias_add = skip_bias_add
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.prefix, self._label, self.return_bias = prefix, prefix or type(self).__name__, return_bias
        self.tp_rank, self.tp_size = resolve_tp(tp_rank, tp_size)
        self.quant_method: Any = UnquantizedLinearMethod()

    def _create_parameters(self, out_features: int, in_features: int, bias: bool) -> None:
        weight = torch.empty(out_features, in_features, dtype=self.params_dtype)
        self.weight = annotated_parameter(weight, self.weight_loader)
        zeros = torch.zeros(out_features, dtype=self.params_dtype) if bias else None
        self.register_parameter("bias", None if zeros is None else annotated_parameter(zeros, self.weight_loader))

    def hold_fp8(self) -> None:
        """Hold the weight, which is not loaded yet, in float8_e4m3fn, with ``weight_scale``, float32 ``[out]``.

        Loaders then quantise full rows, rounded to ``params_dtype``: all ranks, and any number of them, have one scale
        for a row. ValueError for NaN, inf, and numbers beyond that dtype.
        """
        rows, device = self.weight.shape[0], self.weight.device
        self.weight = annotated_parameter(torch.empty_like(self.weight, dtype=E4M3), self._load_fp8)
        scales = torch.ones(rows, dtype=torch.float32, device=device)
        self.weight_scale = annotated_parameter(scales, self.weight_loader)
        self.quant_method = Fp8LinearMethod()

    def _load_fp8(self, param: nn.Parameter, loaded_weight: Tensor, shard_id: Hashable = None) -> None:
        values, scale = quantize_per_channel(loaded_weight.to(param.device, self.params_dtype), check=False)
        if not bool(torch.isfinite(scale).all()):
            raise ValueError(
                f"the weight of {self.prefix or self._label} has NaN, inf or a number beyond {self.params_dtype}, for "
                "which there is no scale; save the checkpoint again, or serve it with dtype bfloat16"
            )
        self.weight_loader(param, values, shard_id)
        self.weight_loader(self.weight_scale, scale, shard_id)

    def output_shards(self) -> dict[Hashable, OutputShard]:
        """Checkpoint matrices by shard id, in the order of their parts in the weight; here one, whole."""
        return {None: OutputShard(self.output_size, 0, self.output_size)}

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard_id: Hashable = None) -> None:
        """Copy this rank's part of the **full** checkpoint tensor into ``param``: its rows of one matrix
        (``shard_id``), or of all of them stacked (``None``). ``ValueError``, and no change: unknown id, another shape.
        """
        shards = self.output_shards()
        if shard_id is not None and shard_id not in shards:
            known = [key for key in shards if key is not None]
            allowed = f"None or one of {known}" if known else "None (this layer holds one matrix)"
            raise ValueError(f"{self._label}: shard_id must be {allowed}, got {shard_id!r}")
        wanted = shards if shard_id is None else {shard_id: shards[shard_id]}
        full_rows = [shard.full for shard in wanted.values()]
        check_checkpoint_shape(loaded_weight, (sum(full_rows), *param.shape[1:]), self._label)
        sources = dict(zip(wanted, loaded_weight.split(full_rows), strict=True))
        targets = param.data.split([shard.rows for shard in shards.values()])
        for (key, shard), target in zip(shards.items(), targets, strict=True):
            if key in sources:
                target.copy_(shard.rows_of(sources[key]))

    def _result(self, output: Tensor) -> LinearOutput:
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None


class ReplicatedLinear(LinearBase):
    """The whole weight on every rank: small layers (routers, gates) that are not worth splitting."""

    def __init__(self, input_size: int, output_size: int, bias: bool = True, **common: Any) -> None:
        super().__init__(input_size, output_size, **common)
        self._create_parameters(output_size, input_size, bias)

    def forward(self, input_: Tensor) -> LinearOutput:
        check_last_dim(input_, self.input_size, self._label)
        return self._result(self.quant_method.apply(self, input_, None if self.skip_bias_add else self.bias))


class ColumnParallelLinear(LinearBase):
    """``W`` split by rows: rank ``p`` computes outputs ``[p * out/tp, (p+1) * out/tp)``.

    ``gather_output``: all-gather the outputs so that every rank holds all ``out`` columns. ``output_sizes``: widths
    of the matrices packed in this layer. ``ValueError``: they do not add up to ``output_size``, or do not divide.
    """

    def __init__(
        self, input_size: int, output_size: int,
        bias: bool = True, gather_output: bool = False, output_sizes: Sequence[int] | None = None, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(input_size, output_size, **common)
        sizes = [output_size] if output_sizes is None else list(output_sizes)
        if sum(sizes) != output_size:
            raise ValueError(f"output_sizes must add up to output_size={output_size}, got {sizes} (sum {sum(sizes)})")
        for i, size in enumerate(sizes):
            check_count(f"output_sizes[{i}]", size)
        self.gather_output, self.input_size_per_partition = gather_output, input_size
        self.output_partition_sizes = [group.divide(size, self.tp_size) for size in sizes]
        self.output_size_per_partition = sum(self.output_partition_sizes)
        self._create_parameters(self.output_size_per_partition, input_size, bias)

    def output_shards(self) -> dict[Hashable, OutputShard]:
        return {None: OutputShard(self.output_size, self.tp_rank, self.output_size_per_partition)}

    def forward(self, input_: Tensor) -> LinearOutput:
        """``[..., in] -> [..., out/tp]``, or ``[..., out]`` with ``gather_output``."""
        check_last_dim(input_, self.input_size, self._label)
        output = self.quant_method.apply(self, input_, None if self.skip_bias_add else self.bias)
        if self.gather_output and self.tp_size > 1:
            output = group.tensor_model_parallel_all_gather(output)
        return self._result(output)


class MergedColumnParallelLinear(ColumnParallelLinear):
    """Several column-parallel matrices with one input, multiplied at once (gate and up of the MLP).

    ``output_sizes``: the full widths. A rank's weight holds its part of every matrix, one below the other: its output
    is ``[gate_p, up_p]``. Checkpoint shard ids: ``0 .. n-1``, or ``None`` for all matrices stacked.
    """

    def __init__(self, input_size: int, output_sizes: Sequence[int], bias: bool = True, **common: Any) -> None:
        if not output_sizes:
            raise ValueError("output_sizes must name at least one width, got none")
        super().__init__(input_size, sum(output_sizes), bias=bias, output_sizes=output_sizes, **common)
        self.output_sizes = list(output_sizes)

    def output_shards(self) -> dict[Hashable, OutputShard]:
        sizes = zip(self.output_sizes, self.output_partition_sizes, strict=True)
        return {i: OutputShard(full, self.tp_rank, rows) for i, (full, rows) in enumerate(sizes)}


class QKVParallelLinear(ColumnParallelLinear):
    """Query, key and value projections in one matmul, split by heads (grouped-query attention).

    With fewer kv heads than ranks every kv head is replicated on ``num_kv_head_replicas = tp / total_num_kv_heads``
    ranks: rank ``p`` holds q shard ``p`` and k/v shard ``p // num_kv_head_replicas``. ``output_sizes`` counts the
    replicas. Checkpoint shard ids: ``"q"``, ``"k"``, ``"v"``, or ``None``: stacked. ``ValueError``: heads that do not
    divide over the ranks.
    """

    def __init__(
        self, hidden_size: int, head_size: int, total_num_heads: int,
        total_num_kv_heads: int | None = None, bias: bool = True, tp_rank: int | None = None,
        tp_size: int | None = None, **common: Any,
    ) -> None:  # fmt: skip
        tp_rank, tp_size = resolve_tp(tp_rank, tp_size)
        total_kv = total_num_heads if total_num_kv_heads is None else total_num_kv_heads
        check_count("head_size", head_size)
        check_count("total_num_heads", total_num_heads)
        check_count("total_num_kv_heads", total_kv)
        num_heads = group.divide(total_num_heads, tp_size)
        replicas = group.divide(tp_size, total_kv) if tp_size >= total_kv else 1
        num_kv_heads = group.divide(total_kv * replicas, tp_size)
        sizes = [heads * head_size * tp_size for heads in (num_heads, num_kv_heads, num_kv_heads)]
        place = {"tp_rank": tp_rank, "tp_size": tp_size}
        super().__init__(hidden_size, sum(sizes), bias, gather_output=False, output_sizes=sizes, **place, **common)
        self.hidden_size, self.head_size, self.output_sizes = hidden_size, head_size, sizes
        self.total_num_heads, self.total_num_kv_heads = total_num_heads, total_kv
        self.num_heads, self.num_kv_heads, self.num_kv_head_replicas = num_heads, num_kv_heads, replicas

    def output_shards(self) -> dict[Hashable, OutputShard]:
        """``"q"``, ``"k"`` and ``"v"``; k and v without replicas, as the checkpoint has them."""
        q_rows, kv_rows, _ = self.output_partition_sizes
        q = OutputShard(self.total_num_heads * self.head_size, self.tp_rank, q_rows)
        kv_index = self.tp_rank // self.num_kv_head_replicas
        kv = OutputShard(self.total_num_kv_heads * self.head_size, kv_index, kv_rows)
        return {"q": q, "k": kv, "v": kv}


class RowParallelLinear(LinearBase):
    """``W`` split by columns: rank ``p`` multiplies inputs ``[p * in/tp, (p+1) * in/tp)`` into a partial sum.

    The bias is added on rank 0 only. ``input_is_parallel``: the input is already this rank's slice (as a column layer
    leaves it). ``reduce_results``: all-reduce the partial sums. ``ValueError``: ``in`` does not divide by ``tp_size``;
    or a bias to add, ``tp_size > 1`` and no reduction here, as the caller's could not know which rank's bias counts.
    """

    def __init__(
        self, input_size: int, output_size: int,
        bias: bool = True, input_is_parallel: bool = True, reduce_results: bool = True, **common: Any,
    ) -> None:  # fmt: skip
        super().__init__(input_size, output_size, **common)
        if bias and not self.skip_bias_add and not reduce_results and self.tp_size > 1:
            raise ValueError(
                f"reduce_results=False with an added bias and tp_size={self.tp_size} would count the bias "
                "inconsistently; pass bias=False or skip_bias_add=True and add it after the reduction"
            )
        self.input_size_per_partition = group.divide(input_size, self.tp_size)
        self.input_is_parallel, self.reduce_results = input_is_parallel, reduce_results
        self._create_parameters(output_size, self.input_size_per_partition, bias)

    def weight_loader(self, param: nn.Parameter, loaded_weight: Tensor, shard_id: Hashable = None) -> None:
        """Copy this rank's columns of the full ``[out, in]`` weight, or the whole bias; ``ValueError`` as above."""
        if param.ndim == 2:
            check_checkpoint_shape(loaded_weight, (self.output_size, self.input_size), self._label)
            columns = self.input_size_per_partition
            loaded_weight = loaded_weight.narrow(1, self.tp_rank * columns, columns)
        super().weight_loader(param, loaded_weight, shard_id)

    def forward(self, input_: Tensor) -> LinearOutput:
        """``[..., in/tp]`` (or ``[..., in]`` when not ``input_is_parallel``) to ``[..., out]``."""
        expected = self.input_size_per_partition if self.input_is_parallel else self.input_size
        check_last_dim(input_, expected, self._label)
        if not self.input_is_parallel:
            input_ = group.split_tensor_along_last_dim(input_, self.tp_size)[self.tp_rank].contiguous()
        bias = None if self.skip_bias_add or self.tp_rank > 0 else self.bias
        output = self.quant_method.apply(self, input_, bias)
        if self.reduce_results and self.tp_size > 1:
            output = group.tensor_model_parallel_all_reduce(output)
        return self._result(output)
