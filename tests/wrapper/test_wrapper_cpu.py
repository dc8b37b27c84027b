"""PunicaWrapperCPU against a float64 loop over rows: one product per row with its adapter's dense weights."""

import pytest
import torch

from punica.metadata import LoRAMapping
from punica.wrapper import PunicaWrapperCPU

L = 4
ADAPTERS = [11, 12, 13, 14]  # adapter 11 + s lies in slot s
TOLERANCE = {torch.float32: (1e-4, 1e-4), torch.float16: (4e-3, 2e-3), torch.bfloat16: (1.6e-2, 1e-2)}
MIXED = [0, 2, 2, -1, 3, 0, 0, -1, 1, 2, 1]  # slots of 11 tokens


def wrapper_for(slots: list[int], sampled: list[int] | None = None, is_prefill: bool = False) -> PunicaWrapperCPU:
    wrapper = PunicaWrapperCPU(64, 64, "cpu", max_loras=L)
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


def dense(weight: torch.Tensor, slot: int) -> torch.Tensor:
    return weight.reshape(L, weight.shape[-2], weight.shape[-1])[slot].double()


def expected_linear(y, x, a, b, scale, slots, add_inputs=True, ranks=None):
    out = y.double().clone()
    for t, slot in enumerate(slots):
        column = 0
        for i in range(len(b)):
            width = b[i].shape[-2]
            if slot >= 0:
                r = a[i].shape[-2] if ranks is None else int(ranks[i, slot])
                delta = scale * dense(b[i], slot)[:, :r] @ (dense(a[i], slot)[:r] @ x[t].double())
                old = out[t, column : column + width] if add_inputs else 0
                out[t, column : column + width] = old + delta
            column += width
    return out


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    rtol, atol = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=rtol, atol=atol)


# ---- add_lora_linear


@pytest.mark.parametrize("is_prefill", [False, True], ids=["decode", "prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("hidden", "rank", "widths"),
    [(33, 1, [7]), (100, 20, [64, 16, 16]), (128, 8, [33] * 8), (2049, 24, [31, 5])],
    ids=["one slice, rank 1", "q k v", "eight slices", "odd hidden size"],
)
@pytest.mark.parametrize("slots", [MIXED, sorted(MIXED), [2], [1] * 9, [0, 1, 2, 3]],
                         ids=["mixed", "grouped", "one token", "identical", "distinct"])  # fmt: skip
def test_linear_equals_dense_rows(slots, hidden, rank, widths, dtype, is_prefill) -> None:
    a, b = weights(len(widths), hidden, rank, widths, dtype)
    x, y = torch.randn(len(slots), hidden).to(dtype), torch.randn(len(slots), sum(widths)).to(dtype)
    before = y.clone()
    result = wrapper_for(slots, is_prefill=is_prefill).add_lora_linear(y, x, a, b, 0.5, widths)
    assert result is None
    assert_close(y, expected_linear(before, x, a, b, 0.5, slots))
    none = [t for t, slot in enumerate(slots) if slot < 0]
    assert torch.equal(y[none], before[none])


def test_prefill_and_decode_are_equal_bit_for_bit() -> None:
    a, b = weights(3, 100, 16, [32, 8, 8], torch.bfloat16)
    x = torch.randn(len(MIXED), 100).bfloat16()
    results = []
    for is_prefill in (False, True):
        y = torch.zeros(len(MIXED), 48, dtype=torch.bfloat16)
        wrapper_for(MIXED, is_prefill=is_prefill).add_lora_linear(y, x, a, b, 1.0, (32, 8, 8))
        results.append(y)
    assert torch.equal(*results)


def test_linear_overwrites_with_add_inputs_false() -> None:
    a, b = weights(2, 20, 4, [6, 5], torch.float32, four_d=False)
    x, y = torch.randn(len(MIXED), 20), torch.full((len(MIXED), 13), 9.0)
    expected = expected_linear(y, x, a, b, 2.0, MIXED, add_inputs=False)
    wrapper_for(MIXED).add_lora_linear(y, x, a, b, 2.0, (6, 5), add_inputs=False)
    assert_close(y, expected)
    assert (y[:, 11:] == 9.0).all()
    assert (y[[3, 7]] == 9.0).all()


def test_true_ranks_hide_the_lanes_beyond_them() -> None:
    a, b = weights(2, 30, 16, [9, 9], torch.float32)
    ranks = torch.tensor([[16, 5, 0, 8], [16, 5, 0, 0]], dtype=torch.int32)
    for i in range(2):
        for slot in range(L):
            a[i][slot, 0, ranks[i, slot] :] = float("nan")
            b[i][slot, 0, :, ranks[i, slot] :] = float("nan")
    x, y = torch.randn(len(MIXED), 30), torch.randn(len(MIXED), 18)
    expected = expected_linear(y, x, a, b, 0.5, MIXED, ranks=ranks)
    wrapper_for(MIXED).add_lora_linear(y, x, a, b, 0.5, (9, 9), lora_ranks=ranks)
    assert_close(y, expected)


def test_slots_that_are_not_used_are_never_read() -> None:
    a, b = weights(1, 16, 4, [8], torch.float32)
    for slot in (0, 2, 3):
        a[0][slot] = b[0][slot] = float("nan")
    x, y = torch.randn(4, 16), torch.zeros(4, 8)
    wrapper_for([1, -1, -1, 1]).add_lora_linear(y, x, a, b, 1.0, (8,))
    assert y.isfinite().all()
    assert y[0].any()
    assert not y[1].any()


def test_intermediate_is_float32() -> None:
    """Rank lanes of 256 + 1/2 and -256 cancel: a bfloat16 intermediate would round the half away."""
    a = torch.tensor([[[256.0, 0.5], [-256.0, 0.0]]]).bfloat16()
    b = torch.ones(1, 3, 2).bfloat16()
    x = torch.ones(1, 2).bfloat16()
    wrapper = PunicaWrapperCPU(4, 4, "cpu", max_loras=1)
    wrapper.update_metadata(LoRAMapping((5,), (5,)), [5], 2, 10)
    y = torch.zeros(1, 3).bfloat16()
    wrapper.add_lora_linear(y, x, (a,), (b,), 1.0, (3,))
    assert y.tolist() == [[0.5] * 3]


def test_large_sums_that_cancel_survive_sixteen_bit_weights() -> None:
    hidden = 512
    a = torch.cat([torch.full((L, 4, hidden), 64.0), torch.full((L, 4, hidden), -64.0)], dim=2)
    a[:, :, 0] += 0.5
    b = torch.randn(L, 10, 4).bfloat16()
    x = torch.ones(len(MIXED), 2 * hidden).bfloat16()
    y = torch.zeros(len(MIXED), 10).bfloat16()
    a = a.bfloat16()
    expected = expected_linear(y, x, (a,), (b,), 1.0, MIXED)
    wrapper_for(MIXED).add_lora_linear(y, x, (a,), (b,), 1.0, (10,))
    assert expected.abs().max() > 0.1
    assert_close(y, expected)


@pytest.mark.parametrize("as_tuple", [False, True], ids=["tensor", "tuple"])
def test_buffer_is_zeroed_and_holds_the_shrink_result(as_tuple: bool) -> None:
    a, b = weights(2, 12, 3, [4, 6], torch.float32)
    x, y = torch.randn(len(MIXED) + 2, 12), torch.zeros(len(MIXED) + 2, 10)
    buffer = torch.full((2, len(x), 3), float("nan"))
    wrapper_for(MIXED).add_lora_linear(
        y, x, a, b, 0.5, (4, 6), buffer=tuple(buffer.clone() for buffer in buffer) if as_tuple else buffer
    )
    assert_close(y[: len(MIXED)], expected_linear(torch.zeros(len(MIXED), 10), x, a, b, 0.5, MIXED))
    if not as_tuple:
        for i in range(2):
            for t, slot in enumerate([*MIXED, -1, -1]):
                row = 0.5 * dense(a[i], slot) @ x[t].double() if slot >= 0 else torch.zeros(3).double()
                torch.testing.assert_close(buffer[i, t].double(), row)


def test_three_dimensional_and_non_contiguous_operands() -> None:
    a, b = weights(1, 12, 4, [10], torch.float32)
    slots = [*MIXED, 0]
    x = torch.randn(12, len(slots)).t()
    y = torch.randn(len(slots), 10)
    expected = expected_linear(y, x, a, b, 1.0, slots)
    flat = y.clone()
    wrapper_for(slots).add_lora_linear(flat, x, a, b, 1.0, (10,))
    assert_close(flat, expected)
    cube = y.clone().view(3, 4, 10)
    wrapper_for(slots).add_lora_linear(cube, x.reshape(3, 4, 12), a, b, 1.0, [10])
    assert_close(cube.view(-1, 10), expected)
    wide = torch.full((len(slots), 14), 7.0)
    wide[:, 3:13] = y
    wrapper_for(slots).add_lora_linear(wide[:, 3:13], x, a, b, 1.0, (10,))
    assert_close(wide[:, 3:13], expected)
    assert (wide[:, :3] == 7.0).all()
    assert (wide[:, 13:] == 7.0).all()


def test_y_that_cannot_be_viewed_as_rows_raises() -> None:
    a, b = weights(1, 12, 4, [10], torch.float32)
    y = torch.randn(2, 3, 10).transpose(0, 1)
    before = y.clone()
    with pytest.raises(ValueError, match=r"y with shape \(3, 2, 10\) and strides \(10, 30, 1\)"):
        wrapper_for([0] * 6).add_lora_linear(y, torch.randn(3, 2, 12), a, b, 1.0, (10,))
    assert torch.equal(y, before)


def test_rows_past_the_mapping_are_padding() -> None:
    a, b = weights(1, 12, 4, [10], torch.float32)
    x, y = torch.randn(len(MIXED) + 5, 12), torch.randn(len(MIXED) + 5, 10)
    before = y.clone()
    wrapper_for(MIXED).add_lora_linear(y, x, a, b, 1.0, (10,))
    assert_close(y[: len(MIXED)], expected_linear(before[: len(MIXED)], x, a, b, 1.0, MIXED))
    assert torch.equal(y[len(MIXED) :], before[len(MIXED) :])


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


def test_output_dtype_may_differ_from_the_weights() -> None:
    a, b = weights(1, 64, 8, [16], torch.bfloat16)
    x, y = torch.randn(len(MIXED), 64).bfloat16(), torch.randn(len(MIXED), 16)
    expected = expected_linear(y, x, a, b, 1.0, MIXED)
    wrapper_for(MIXED).add_lora_linear(y, x, a, b, 1.0, (16,))
    torch.testing.assert_close(y.double(), expected, rtol=1e-2, atol=1e-2)


def linear_arguments() -> dict:
    torch.manual_seed(1)
    a, b = weights(2, 12, 4, [6, 5], torch.float32)
    return {"y": torch.randn(11, 11), "x": torch.randn(11, 12), "lora_a_stacked": a, "lora_b_stacked": b, "scale": 1.0,
            "output_slices": (6, 5)}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c: {"x": c["x"].double()}, TypeError, "x has dtype torch.float64"),
        (lambda c: {"x": c["x"].half()}, TypeError, "x has dtype torch.float16"),
        (lambda c: {"x": c["x"].tolist()}, TypeError, "x must be a tensor"),
        (lambda c: {"lora_a_stacked": (c["lora_a_stacked"][0], None)}, TypeError, r"lora_a_stacked\[1\] must be a"),
        (lambda c: {"x": c["x"][:, :11]}, ValueError, r"\(11, 11\).*hidden size.*12"),
        (lambda c: {"x": torch.ones(12, 12)}, ValueError, "x has 12 rows and y has 11"),
        (lambda c: {"y": c["y"].long()}, TypeError, "y has dtype torch.int64"),
        (lambda c: {"y": c["y"][:, :10]}, ValueError, "outside of y with 10 columns"),
        (lambda c: {"y": c["y"][0]}, ValueError, "at least 2 dimensions"),
        (lambda c: {"scale": float("nan")}, ValueError, "scale is nan"),
        (lambda c: {"scale": float("inf")}, ValueError, "scale is inf"),
        (lambda c: {"scale": torch.tensor(1.0)}, TypeError, "scale"),
        (lambda c: {"output_slices": (5, 6)}, ValueError, r"output_slices is \[5, 6\]"),
        (lambda c: {"output_slices": (6,)}, ValueError, "output_slices"),
        (lambda c: {"output_slices": 11}, TypeError, "output_slices"),
        (lambda c: {"lora_a_stacked": c["lora_a_stacked"][:1]}, ValueError, "1 slices, lora_b_stacked 2"),
        (lambda c: {"lora_a_stacked": c["lora_a_stacked"][0]}, TypeError, "tuple of tensors"),
        (lambda c: {"lora_a_stacked": ()}, ValueError, "empty"),
        (
            lambda c: {"lora_a_stacked": tuple(w[:, :, :3] for w in c["lora_a_stacked"])},
            ValueError,
            "rank 3.*4.*add_sh",
        ),
        (lambda c: {"lora_a_stacked": tuple(w[:3] for w in c["lora_a_stacked"])}, ValueError, "3 slots"),
        (lambda c: {"lora_a_stacked": tuple(w[0, 0] for w in c["lora_a_stacked"])}, ValueError, r"\(L, \(1\), r, K\)"),
        (lambda c: {"lora_b_stacked": (c["lora_b_stacked"][0], c["lora_b_stacked"][1].half())}, TypeError, "float16"),
        (lambda c: {"lora_b_stacked": (c["lora_b_stacked"][0], c["lora_b_stacked"][1][:2])}, ValueError, "slots 4 "),
        (lambda c: {"lora_b_stacked": tuple(w.to("meta") for w in c["lora_b_stacked"])}, ValueError, "on cpu.*meta"),
        (lambda c: {"buffer": torch.zeros(2, 11, 5)}, ValueError, r"buffer has shape \(2, 11, 5\)"),
        (lambda c: {"buffer": torch.zeros(2, 11, 4).half()}, TypeError, "buffer"),
        (lambda c: {"lora_ranks": torch.ones(2, 3, dtype=torch.int32)}, ValueError, r"lora_ranks.*\(2, 4\)"),
        (lambda c: {"lora_ranks": torch.ones(2, 4)}, TypeError, "lora_ranks"),
        (lambda c: {"add_inputs": 1}, TypeError, "add_inputs"),
        (lambda c: {"add_input": True}, TypeError, r"\['add_input'\]"),
        (lambda c: {"quant_args": {"group": 16}}, TypeError, "group"),
    ],
)
def test_bad_arguments_raise_and_write_nothing(change, error, message) -> None:
    call = linear_arguments()
    y = call["y"]
    before = y.clone()
    with pytest.raises(error, match=message):
        wrapper_for(MIXED).add_lora_linear(**{**call, **change(call)})
    assert torch.equal(y, before)


# ---- add_shrink and add_expand


@pytest.mark.parametrize("as_tuple", [False, True], ids=["tensor", "tuple"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_shrink_accumulates_and_leaves_other_rows(as_tuple: bool, dtype: torch.dtype) -> None:
    a, _ = weights(3, 50, 6, [], dtype)
    x = torch.randn(len(MIXED) + 1, 50).to(dtype)
    y = torch.randn(3, len(MIXED) + 1, 6)
    before = y.clone()
    wrapper_for(MIXED).add_shrink(tuple(y) if as_tuple else y, x, a, 0.5)
    expected = before.double()
    for i in range(3):
        for t, slot in enumerate(MIXED):
            if slot >= 0:
                expected[i, t] += 0.5 * dense(a[i], slot) @ x[t].double()
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-4)
    untouched = [3, 7, len(MIXED)]
    assert torch.equal(y[:, untouched], before[:, untouched])


@pytest.mark.parametrize("add_inputs", [True, False])
@pytest.mark.parametrize("as_tuple", [False, True], ids=["tensor", "tuple"])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_expand_into_columns(as_tuple: bool, add_inputs: bool, x_dtype: torch.dtype) -> None:
    _, b = weights(2, 1, 6, [7, 5], torch.bfloat16)
    x = torch.randn(2, len(MIXED), 6).to(x_dtype)
    y = torch.randn(len(MIXED), 20).bfloat16()
    before = y.clone()
    wrapper_for(MIXED).add_expand(y, tuple(x) if as_tuple else x, b, (7, 5), 3, add_inputs)
    expected = before.double()
    for t, slot in enumerate(MIXED):
        for i, columns in enumerate((slice(3, 10), slice(10, 15))):
            if slot >= 0:
                old = expected[t, columns] if add_inputs else 0
                expected[t, columns] = old + dense(b[i], slot) @ x[i, t].double()
    assert_close(y, expected)
    assert torch.equal(y[[3, 7]], before[[3, 7]])
    assert torch.equal(y[:, :3], before[:, :3])
    assert torch.equal(y[:, 15:], before[:, 15:])


def test_split_ranks_add_up_through_shrink_and_expand() -> None:
    """A rank-sharded A: two shards shrink into halves of one intermediate, one expand finishes."""
    a, b = weights(1, 30, 8, [9], torch.float32)
    x, y = torch.randn(len(MIXED), 30), torch.randn(len(MIXED), 9)
    expected = expected_linear(y, x, a, b, 0.5, MIXED)
    wrapper = wrapper_for(MIXED)
    halves = []
    for shard in a[0].split(4, dim=2):
        half = torch.zeros(1, len(MIXED), 4)
        wrapper.add_shrink(half, x, (shard,), 0.5)
        halves.append(half)
    wrapper.add_expand(y, torch.cat(halves, dim=2), b, (9,))
    assert_close(y, expected)


@pytest.mark.parametrize(
    ("method", "change", "error", "message"),
    [
        ("add_shrink", {"y": torch.zeros(1, 11, 4)}, ValueError, r"y has shape \(1, 11, 4\)"),
        ("add_shrink", {"y": (torch.zeros(11, 4), torch.zeros(11, 3))}, ValueError, "y.* has shape"),
        ("add_shrink", {"y": (torch.zeros(11, 4), torch.zeros(11, 4).half())}, TypeError, r"y\[1\]"),
        ("add_shrink", {"y": None}, TypeError, "y must be a tensor"),
        ("add_shrink", {"add_inputs": False}, TypeError, "add_inputs"),
        ("add_shrink", {"b_scale": 1.0}, TypeError, "b_scale"),
        ("add_expand", {"x": torch.zeros(2, 11, 5)}, ValueError, "x has shape"),
        ("add_expand", {"x": torch.zeros(2, 10, 4)}, ValueError, "x has shape"),
        ("add_expand", {"x": torch.zeros(2, 11, 4).half()}, TypeError, "x has dtype torch.float16"),
        ("add_expand", {"offset_start": -1}, ValueError, "offset_start -1"),
        ("add_expand", {"offset_start": 1}, ValueError, "end at column 12"),
        ("add_expand", {"offset_start": 1.0}, TypeError, "offset_start"),
        ("add_expand", {"quant_arg": None}, TypeError, "quant_arg"),
    ],
)
def test_bad_shrink_and_expand_arguments(method: str, change: dict, error, message) -> None:
    a, b = weights(2, 12, 4, [6, 5], torch.float32)
    calls = {
        "add_shrink": {"y": torch.zeros(2, 11, 4), "x": torch.ones(11, 12), "lora_a_stacked": a, "scale": 1.0},
        "add_expand": {"y": torch.zeros(11, 11), "x": torch.ones(2, 11, 4), "lora_b_stacked": b,
                       "output_slices": (6, 5)},
    }  # fmt: skip
    call = calls[method]
    with pytest.raises(error, match=message):
        getattr(wrapper_for(MIXED), method)(**{**call, **change})
    assert not call["y"].any()


# ---- add_lora_embedding and add_lora_logits


@pytest.mark.parametrize("add_inputs", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_embedding(add_inputs: bool, dtype: torch.dtype) -> None:
    _, (b,) = weights(1, 1, 8, [40], dtype)
    x, y = torch.randn(len(MIXED), 8).to(dtype), torch.randn(len(MIXED), 40).to(dtype)
    before = y.clone()
    assert wrapper_for(MIXED).add_lora_embedding(y, x, b, add_inputs) is None
    expected = before.double()
    for t, slot in enumerate(MIXED):
        if slot >= 0:
            expected[t] = (expected[t] if add_inputs else 0) + dense(b, slot) @ x[t].double()
    assert_close(y, expected)
    assert torch.equal(y[[3, 7]], before[[3, 7]])


@pytest.mark.parametrize("is_prefill", [False, True])
@pytest.mark.parametrize(("vocab", "padded"), [(300, 320), (32000, 32000), (32000, 32064), (128256, 128256)])
def test_logits_use_the_slots_of_the_sampled_rows(vocab: int, padded: int, is_prefill: bool) -> None:
    tokens, sampled = [0, 0, 0, -1, -1, 1], [2, -1, 3]
    (a,), (b,) = weights(1, 24, 4, [vocab], torch.bfloat16)
    x, y = torch.randn(3, 24).bfloat16(), torch.randn(3, padded).bfloat16()
    before = y.clone()
    assert wrapper_for(tokens, sampled, is_prefill).add_lora_logits(y, x, a, b, 0.5) is None
    expected = before.double()
    expected[:, :vocab] = expected_linear(before[:, :vocab], x, (a,), (b,), 0.5, sampled)
    assert_close(y, expected)
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


def test_slices_given_apart_are_all_checked_before_the_first_is_written() -> None:
    a, b = weights(2, 12, 4, [6, 5], torch.float32)
    wrapper, y = wrapper_for(MIXED), torch.zeros(11, 10)
    with pytest.raises(ValueError, match=r"slices \[6, 5\] end at column 11, outside of y with 10"):
        wrapper.add_expand(y, (torch.ones(11, 4), torch.ones(11, 4)), b, (6, 5))
    assert not y.any()
    parts = (torch.zeros(11, 4), torch.zeros(11, 4))
    with pytest.raises(ValueError, match="scale is nan"):
        wrapper.add_shrink(parts, torch.ones(11, 12), a, float("nan"))
    assert not any(part.any() for part in parts)


def test_no_rows_through_a_buffer() -> None:
    a, b = weights(1, 12, 4, [6], torch.float32)
    wrapper_for(MIXED).add_lora_linear(
        torch.zeros(0, 6), torch.zeros(0, 12), a, b, 1.0, (6,), buffer=torch.zeros(1, 0, 4)
    )


def test_operands_stay_checked_after_a_good_call() -> None:
    a, b = weights(1, 12, 4, [6], torch.float32)
    wrapper, x, y = wrapper_for(MIXED), torch.ones(11, 12), torch.zeros(11, 6)
    wrapper.add_lora_linear(y, x, a, b, 1.0, (6,))
    with pytest.raises(TypeError, match="x must be a tensor"):
        wrapper.add_lora_linear(y, None, a, b, 1.0, (6,))
    wrapper.add_lora_linear(y, x, a, b, 1.0, (6,), lora_ranks=torch.full((1, L), 4, dtype=torch.int32))
    with pytest.raises(TypeError, match="lora_ranks must be a tensor"):
        wrapper.add_lora_linear(y, x, a, b, 1.0, (6,), lora_ranks=[[4] * L])
    a[0].data = a[0].data[:1]
    with pytest.raises(ValueError, match="1 slots"):
        wrapper.add_lora_linear(y, x, a, b, 1.0, (6,))


def test_a_step_by_slots_pads_as_one_by_adapters() -> None:
    wrapper = wrapper_for(MIXED, [0, -1])
    by_adapter = wrapper.sampler_indices_padded.tolist()
    wrapper.begin_step(wrapper.batch.rows, wrapper.batch.sampled.rows, 1000)
    assert wrapper.sampler_indices_padded.tolist() == by_adapter
