"""Dense methods of both wrappers against a float64 loop over rows: one product per row with its adapter's weights."""

import itertools
from collections.abc import Iterator

import pytest
import torch

from punica.metadata import LoRAMapping
from punica.wrapper import PunicaWrapperBase, PunicaWrapperCPU, PunicaWrapperGPU
from tests.ops.helpers import assert_close, assert_shrunk, products

L = 4
ADAPTERS = [11, 12, 13, 14]  # adapter 11 + s lies in slot s
MIXED = [0, 2, 2, -1, 3, 0, 0, -1, 1, 2, 1]  # slots of 11 tokens


@pytest.fixture(params=[PunicaWrapperCPU, PunicaWrapperGPU], ids=["torch", "kernels"])
def backend(request) -> Iterator[type]:
    """Class of the wrapper; tensors of the test are made on its device, the CPU in Triton's interpreter."""
    torch.set_default_device("cuda" if request.param is PunicaWrapperGPU and torch.cuda.is_available() else "cpu")
    yield request.param
    torch.set_default_device("cpu")


def wrapper_for(
    slots: list[int], sampled: list[int] | None = None, is_prefill: bool = False, backend: type = PunicaWrapperCPU
) -> PunicaWrapperBase:
    wrapper = backend(64, 64, torch.empty(0).device, max_loras=L)
    to_id = [0, *ADAPTERS]
    mapping = LoRAMapping([to_id[s + 1] for s in slots], [to_id[s + 1] for s in sampled or slots], is_prefill)
    wrapper.update_metadata(mapping, ADAPTERS, L + 1, 1000)
    return wrapper


def weights(n: int, hidden: int, rank: int, widths: list[int], dtype: torch.dtype, four_d: bool = True):
    a = [torch.randn(L, 1, rank, hidden) / hidden**0.5 for _ in range(n)]
    b = [torch.randn(L, 1, width, rank) / rank**0.5 for width in widths]
    if not four_d:
        a, b = [w.squeeze(1) for w in a], [w.squeeze(1) for w in b]
    return tuple(w.to(dtype) for w in a), tuple(w.to(dtype) for w in b)


def added(y, delta, slots, add_inputs=True, start=0):
    """float64 y with the delta of rows with an adapter in its columns from ``start``."""
    out, used = y.cpu().double(), torch.as_tensor(slots, device="cpu") >= 0
    columns = out[: len(slots), start : start + delta.shape[1]]
    columns[used] = (delta[: len(slots)] + (columns if add_inputs else 0))[used]
    return out


def expected_linear(y, x, a, b, scale, slots, add_inputs=True, ranks=None):
    deltas = []
    for i, (one_a, one_b) in enumerate(zip(a, b, strict=True)):
        live = None if ranks is None else ranks[i]
        deltas.append(products(products(x, one_a, slots, scale, live), one_b, slots, 1.0, live, of_b=True))
    return added(y, torch.cat(deltas, 1), slots, add_inputs)


TRUE_RANKS = [[16, 5, 0, 8], [16, 5, 0, 0]]


@pytest.mark.parametrize(
    ("slots", "hidden", "rank", "widths", "dtype", "options"),
    [
        (MIXED, 33, 1, [7], torch.float32, {}),
        (MIXED, 33, 20, [20, 7, 7], torch.bfloat16, {}),
        (sorted(MIXED)[4:], 33, 8, [5] * 8, torch.float16, {}),
        ([2], 2049, 24, [31, 5], torch.float32, {}),
        (MIXED, 20, 4, [6, 5], torch.float32, {"add_inputs": False}),
        (MIXED, 30, 16, [9, 9], torch.float32, {"lora_ranks": TRUE_RANKS}),
    ],
    ids=["rank 1", "q k v", "grouped, eight slices", "one token, odd size", "overwrite, 3-D weights", "true ranks"],
)
def test_linear_equals_dense_rows(slots, hidden, rank, widths, dtype, options, backend) -> None:
    """Prefill and decode bit for bit; rows past the mapping are padding, and lanes beyond a true rank NaN."""
    a, b = weights(len(widths), hidden, rank, widths, dtype, four_d="add_inputs" not in options)
    ranks, given = options.get("lora_ranks"), dict(options)
    if ranks is not None:
        given["lora_ranks"] = torch.tensor(ranks, dtype=torch.int32)
        for i, slot in itertools.product(range(2), range(L)):
            a[i][slot, 0, ranks[i][slot] :] = b[i][slot, 0, :, ranks[i][slot] :] = float("nan")
    x, y = torch.randn(len(slots) + 5, hidden).to(dtype), torch.randn(len(slots) + 5, sum(widths) + 2).to(dtype)
    before, prefilled = y.clone(), y.clone()
    assert wrapper_for(slots, backend=backend).add_lora_linear(y, x, a, b, 0.5, widths, **given) is None
    assert_close(y, expected_linear(before, x, a, b, 0.5, slots, options.get("add_inputs", True), ranks))
    untouched = [t for t, slot in enumerate([*slots, *[-1] * 5]) if slot < 0]
    assert torch.equal(y[untouched], before[untouched])
    assert torch.equal(y[:, -2:], before[:, -2:])
    wrapper_for(slots, None, True, backend).add_lora_linear(prefilled, x, a, b, 0.5, widths, **given)
    assert torch.equal(prefilled, y)


@pytest.mark.parametrize("as_tuple", [False, True], ids=["tensor", "tuple"])
def test_buffer_is_zeroed_and_holds_the_shrink_result(as_tuple: bool) -> None:
    a, b = weights(2, 12, 3, [4, 6], torch.float32)
    x, y = torch.randn(len(MIXED) + 2, 12), torch.zeros(len(MIXED) + 2, 10)
    buffer = torch.full((2, len(x), 3), float("nan"))
    given = tuple(buffer) if as_tuple else buffer
    wrapper_for(MIXED).add_lora_linear(y, x, a, b, 0.5, (4, 6), buffer=given)
    assert_close(y, expected_linear(torch.zeros_like(y), x, a, b, 0.5, MIXED))
    for low, one in zip(buffer, a, strict=True):
        assert_shrunk(low, products(x, one, MIXED, 0.5))


def test_three_dimensional_and_non_contiguous_operands() -> None:
    a, b = weights(1, 12, 4, [10], torch.float32)
    slots, x = [*MIXED, 0], torch.randn(12, 12).t()
    wide = torch.full((12, 14), 7.0)
    wide[:, 3:13] = y = torch.randn(12, 10)
    expected = expected_linear(y, x, a, b, 1.0, slots)
    for target, rows in ((y.clone(), x), (y.clone().view(3, 4, 10), x.reshape(3, 4, 12)), (wide[:, 3:13], x)):
        wrapper_for(slots).add_lora_linear(target, rows, a, b, 1.0, [10])
        assert_close(target.reshape(-1, 10), expected)
    assert (wide[:, [0, 1, 2, 13]] == 7.0).all()


@pytest.mark.parametrize("rows", [10, 65], ids=["fewer than the mapping", "more than the capacity"])
def test_row_count_outside_the_limits_raises(rows: int) -> None:
    a, b = weights(1, 12, 4, [10], torch.float32)
    y = torch.zeros(rows, 10)
    with pytest.raises(ValueError, match=rf"{rows} rows.*11 tokens.*64"):
        wrapper_for(MIXED).add_lora_linear(y, torch.ones(rows, 12), a, b, 1.0, (10,))
    assert not y.any()


def test_no_rows_and_no_adapter_do_nothing() -> None:
    a, b = weights(1, 12, 4, [10], torch.float32)
    wrapper_for(MIXED).add_lora_linear(torch.zeros(0, 10), torch.zeros(0, 12), a, b, 1.0, (10,))
    for is_prefill in (False, True):
        y = torch.full((3, 10), 5.0)
        wrapper_for([-1] * 3, is_prefill=is_prefill).add_lora_linear(y, torch.ones(3, 12), a, b, 1.0, (10,))
        assert (y == 5.0).all()


A, B = weights(2, 12, 4, [6, 5], torch.float32)
X, H = torch.ones(11, 12), torch.ones(2, 11, 4)
BAD_LINEAR = {
    "another dtype of x": ({"x": X.half()}, TypeError, "float16"),
    "a slice that is none": ({"lora_a_stacked": (A[0], None)}, TypeError, r"lora_a_stacked\[1\]"),
    "rows differ": ({"x": torch.ones(12, 12)}, ValueError, "x has 12 rows and y has 11"),
    "y one-dimensional": ({"y": torch.zeros(11)}, ValueError, "at least 2 dimensions"),
    "y no view": ({"y": torch.zeros(2, 3, 11).transpose(0, 1), "x": torch.ones(3, 2, 12)}, ValueError, r"\(3, 2, 11\)"),
    "scale": ({"scale": float("nan")}, ValueError, "scale is nan"),
    "scale beyond float32": ({"scale": 1e39}, ValueError, r"scale is 1e\+39"),
    "slices": ({"output_slices": (5, 6)}, ValueError, r"output_slices is \[5, 6\]"),
    "slices no list": ({"output_slices": 11}, TypeError, "output_slices"),
    "rank": ({"lora_a_stacked": tuple(w[:, :, :3] for w in A)}, ValueError, "add_shrink"),
    "buffer": ({"buffer": torch.zeros(2, 11, 5)}, ValueError, "buffer"),
    "buffer in halves": ({"buffer": torch.zeros(2, 11, 4).half()}, TypeError, "buffer"),
    "ranks": ({"lora_ranks": torch.ones(2, 3, dtype=torch.int32)}, ValueError, "lora_ranks"),
    "add_inputs": ({"add_inputs": 1}, TypeError, "add_inputs"),
    "unknown keyword": ({"add_input": True}, TypeError, "add_input"),
}  # fmt: skip
BAD_SHRINK = {
    "shrunk parts": ({"y": (torch.zeros(11, 4), torch.zeros(11, 4).half())}, TypeError, r"y\[1\]"),
    "shrunk parts, scale": ({"y": tuple(torch.zeros(2, 11, 4)), "scale": float("nan")}, ValueError, "scale"),
    "keyword of an expand": ({"add_inputs": False}, TypeError, "add_inputs"),
}  # fmt: skip
BAD_EXPAND = {
    "first column": ({"offset_start": -1}, ValueError, "-1"),
    "last column": ({"x": tuple(H), "y": torch.zeros(11, 11)[:, :10]}, ValueError, "10"),
    "intermediate in halves": ({"x": H.half()}, TypeError, "float16"),
}  # fmt: skip
CALLS = {"add_lora_linear": BAD_LINEAR, "add_shrink": BAD_SHRINK, "add_expand": BAD_EXPAND}


@pytest.mark.parametrize(("method", "case"), [(method, case) for method, cases in CALLS.items() for case in cases])
def test_bad_arguments_raise_and_write_nothing(method: str, case: str) -> None:
    change, error, message = CALLS[method][case]
    call = {
        "add_lora_linear": {"x": X, "lora_a_stacked": A, "lora_b_stacked": B, "scale": 1.0, "output_slices": (6, 5)},
        "add_shrink": {"x": X, "lora_a_stacked": A, "scale": 1.0},
        "add_expand": {"x": H, "lora_b_stacked": B, "output_slices": (6, 5)},
    }[method]
    y = torch.zeros(2, 11, 4) if method == "add_shrink" else torch.zeros(11, 11)
    with pytest.raises(error, match=message):
        getattr(wrapper_for(MIXED), method)(**{"y": y, **call, **change})
    assert not any(part.any() for part in change.get("y", y))


def test_weights_without_a_slot_of_the_step_and_outputs_that_overlap_are_refused(backend: type) -> None:
    """By kernels too, which would read memory of others, or write an element for several rows."""
    wrapper, x, (a, b) = wrapper_for(MIXED, backend=backend), torch.ones(11, 12), weights(1, 12, 4, [10], torch.float32)
    few, y = [(one[:3],) for one in (*a, *b)], torch.zeros(11, 10)
    wrapper.add_lora_linear(torch.zeros(11, 10), x, a, b, 1.0, (10,))  # what it keeps is not of an output that overlaps
    calls = [
        lambda: wrapper.add_shrink(torch.zeros(1, 11, 4), x, few[0], 1.0),
        lambda: wrapper.add_expand(y, torch.ones(1, 11, 4), few[1], (10,)),
        lambda: wrapper.add_lora_linear(y, x, *few, 1.0, (10,)),
        lambda: wrapper.add_lora_linear(y[:1].expand(11, 10), x, a, b, 1.0, (10,)),
    ]
    for call, message in zip(calls, (*["slot 3.* 0 to 2"] * 3, r"y has strides \(0, 1\)"), strict=True):
        with pytest.raises(ValueError, match=message):
            call()
    assert not y.any()


@pytest.mark.parametrize(("as_tuple", "dtype"), [(False, torch.float32), (True, torch.bfloat16)])
def test_shrink_accumulates_and_leaves_other_rows(as_tuple: bool, dtype: torch.dtype, backend: type) -> None:
    a, _ = weights(3, 50, 6, [], dtype)
    x, y = torch.randn(len(MIXED) + 1, 50).to(dtype), torch.randn(3, len(MIXED) + 1, 6)
    before = y.clone()
    wrapper_for(MIXED, backend=backend).add_shrink(tuple(y) if as_tuple else y, x, a, 0.5)
    for new, old, one in zip(y, before, a, strict=True):
        assert_close(new, added(old, products(x, one, MIXED, 0.5), MIXED))
    untouched = [3, 7, len(MIXED)]
    assert torch.equal(y[:, untouched], before[:, untouched])


@pytest.mark.parametrize(
    ("as_tuple", "add_inputs", "x_dtype"), [(False, True, torch.float32), (True, False, torch.bfloat16)]
)
def test_expand_into_columns(as_tuple: bool, add_inputs: bool, x_dtype: torch.dtype, backend: type) -> None:
    _, b = weights(2, 1, 6, [7, 5], torch.bfloat16)
    x = torch.randn(2, len(MIXED), 6).bfloat16().to(x_dtype)  # kernels round it to the dtype of B
    y = torch.randn(len(MIXED), 20).bfloat16()
    before, delta = y.clone(), torch.cat([products(low, one, MIXED) for low, one in zip(x, b, strict=True)], 1)
    wrapper_for(MIXED, backend=backend).add_expand(y, tuple(x) if as_tuple else x, b, (7, 5), 3, add_inputs)
    assert_close(y, added(before, delta, MIXED, add_inputs, 3))
    assert torch.equal(y[[3, 7]], before[[3, 7]])


@pytest.mark.parametrize(("add_inputs", "dtype"), [(True, torch.bfloat16), (False, torch.float32)])
def test_embedding(add_inputs: bool, dtype: torch.dtype, backend: type) -> None:
    _, (b,) = weights(1, 1, 8, [40], dtype)
    x, y = torch.randn(len(MIXED), 8).to(dtype), torch.randn(len(MIXED), 40).to(dtype)
    before = y.clone()
    assert wrapper_for(MIXED, backend=backend).add_lora_embedding(y, x, b, add_inputs) is None
    assert_close(y, added(before, products(x, b, MIXED), MIXED, add_inputs))
    assert torch.equal(y[[3, 7]], before[[3, 7]])


@pytest.mark.parametrize(("vocab", "padded", "is_prefill"), [(300, 320, False), (70, 70, True)])
def test_logits_use_the_slots_of_the_sampled_rows(vocab: int, padded: int, is_prefill: bool, backend: type) -> None:
    tokens, sampled = [0, 0, 0, -1, -1, 1], [2, -1, 3]
    (a,), (b,) = weights(1, 24, 4, [vocab], torch.bfloat16)
    x, y = torch.randn(3, 24).bfloat16(), torch.randn(3, padded).bfloat16()
    before = y.clone()
    assert wrapper_for(tokens, sampled, is_prefill, backend).add_lora_logits(y, x, a, b, 0.5) is None
    assert_close(y, expected_linear(before, x, (a,), (b,), 0.5, sampled))
    assert torch.equal(y[:, vocab:], before[:, vocab:])
    assert torch.equal(y[1], before[1])


def test_logits_when_only_sampled_rows_have_an_adapter() -> None:
    (a,), (b,) = weights(1, 24, 4, [30], torch.float32)
    wrapper = wrapper_for([-1, -1, -1], [1], is_prefill=True)
    assert wrapper.no_lora
    x, y = torch.randn(1, 24), torch.zeros(1, 30)
    wrapper.add_lora_logits(y, x, a, b, 1.0)
    assert_close(y, expected_linear(torch.zeros(1, 30), x, (a,), (b,), 1.0, [1]))


def test_logits_buffer_and_errors() -> None:
    (a,), (b,) = weights(1, 24, 4, [30], torch.float32)
    wrapper = wrapper_for(MIXED, [2, -1, 3])
    x, y = torch.randn(3, 24), torch.zeros(3, 30)
    for buffer in (torch.ones(3, 4), torch.ones(1, 3, 4), (torch.ones(3, 4),)):
        wrapper.add_lora_logits(y.zero_(), x, a, b, 1.0, buffer=buffer)
        assert_close(y, expected_linear(torch.zeros(3, 30), x, (a,), (b,), 1.0, [2, -1, 3]))
        assert not buffer[..., 1, :].any() if isinstance(buffer, torch.Tensor) else not buffer[0][1].any()
    y.zero_()
    with pytest.raises(ValueError, match="outside of y with 29 columns"):
        wrapper.add_lora_logits(y[:, :29], x, a, b, 1.0)
    with pytest.raises(ValueError, match=r"2 rows.*3 sampled rows"):
        wrapper.add_lora_logits(y[:2], x[:2], a, b, 1.0)
    with pytest.raises(TypeError, match="add_inputs"):
        wrapper.add_lora_logits(y, x, a, b, 1.0, add_inputs=False)
    with pytest.raises(TypeError, match=r"lora_a_stacked\[0\] must be a tensor"):
        wrapper.add_lora_logits(y, x, (a,), b, 1.0)
    assert not y.any()


def test_a_step_by_slots_pads_as_one_by_adapters() -> None:
    wrapper = wrapper_for(MIXED, [0, -1])
    by_adapter = wrapper.sampler_indices_padded.tolist()
    wrapper.begin_step(wrapper.batch.rows, wrapper.batch.sampled.rows, 1000)
    assert wrapper.sampler_indices_padded.tolist() == by_adapter
