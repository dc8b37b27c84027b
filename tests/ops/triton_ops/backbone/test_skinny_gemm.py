"""A projection of few rows: every form computes x @ weight^T + bias, for all sizes, layouts and splits; in FP8 too."""

import itertools
from typing import Any

import pytest
import torch
from test_layer_kernels import DTYPES, TOLERANCE, rows_apart

from punica.capture import capture
from punica.ops.quant import E4M3, dequantize, quantize_per_channel
from punica.ops.triton_ops.backbone import dequantise, skinny_gemm
from punica.ops.triton_ops.backbone.gemm_forms import (
    GemmForm,
    RowsForm,
    TilesForm,
    WeightForm,
    choose_form,
    weight_form,
)
from punica.ops.triton_ops.backbone.skinny_gemm import run_form

STORED = pytest.mark.parametrize(("dtype", "fp8"), list(itertools.product(DTYPES, (False, True))), ids=str)
TOKENS = (1, 2, 3, 8, 16, 17, 32, 33, 64)


class Case:
    """Operands whose rows lie apart, NaN between them, and the product in float64."""

    def __init__(
        self, tokens: int, n: int, k: int, dtype: torch.dtype, device: str, gap: int = 8, fp8: bool = False
    ) -> None:
        self.x, _ = rows_apart(tokens, k, dtype, device, gap)
        self.weight, whole = rows_apart(n, k, dtype, device, gap)
        self.weight /= k**0.5
        self.scale: torch.Tensor | None = None
        self.bias = torch.randn(n).to(device, dtype)
        self.out, self.whole = rows_apart(tokens, n, dtype, device, gap)
        real = self.weight.double()
        if fp8:
            self.scale = quantize_per_channel(self.weight)[1] * torch.logspace(-1, 1, n, device=device)
            stored = (whole.float() / self.scale[:, None]).clamp(-448, 448).to(E4M3)  # NaN in the gaps
            self.weight = stored[:, :k]
            real = dequantize(self.weight, self.scale).double()
        self.product = self.x.double() @ real.t()

    def check(self, with_bias: bool) -> None:
        expected, tolerance = self.product + self.bias.double() * with_bias, TOLERANCE[self.out.dtype]
        torch.testing.assert_close(self.out.double(), expected, rtol=tolerance, atol=tolerance)
        assert bool(self.whole[:, self.out.shape[1] :].isnan().all())

    def run(self, with_bias: bool = True, batch_invariant: bool = False) -> torch.Tensor:
        bias = self.bias if with_bias else None
        skinny_gemm(self.out, self.x, self.weight, bias, self.scale, batch_invariant=batch_invariant)
        self.check(with_bias)
        return self.out.clone()

    def run_form(self, form: GemmForm) -> None:
        stored = weight_form(self.weight, self.bias)
        run_form(self.out, self.x, (self.weight, self.bias, self.scale), stored, form)
        self.check(True)


@STORED
@pytest.mark.parametrize("tokens", TOKENS)
def test_any_number_of_rows(tokens: int, dtype: torch.dtype, fp8: bool, device: str) -> None:
    case = Case(tokens, 40, 96, dtype, device, fp8=fp8)
    case.run(with_bias=False)
    case.run(batch_invariant=True)


@pytest.mark.parametrize(("n", "k", "gap"), [(1, 1, 0), (33, 7, 1), (70, 129, 3), (8, 640, 0)])
@pytest.mark.parametrize("tokens", [1, 3, 9])
def test_odd_sizes_and_layouts(tokens: int, n: int, k: int, gap: int, device: str) -> None:
    for dtype, fp8 in ((torch.float32, False), (torch.float16, False), (torch.float16, True)):
        (case := Case(tokens, n, k, dtype, device, gap, fp8)).run()
    real = torch.full((n, k + gap), torch.nan, dtype=torch.float16, device=device)
    dequantise(real[:, :k], case.weight, case.scale)
    torch.testing.assert_close(real[:, :k], dequantize(case.weight, case.scale).half(), rtol=0, atol=0)
    assert bool(real[:, k:].isnan().all())


@pytest.mark.parametrize("split_k", [1, 2, 3])
@pytest.mark.parametrize(("k", "fp8"), [(192, False), (200, False), (192, True), (208, True)])
def test_every_form_and_split(k: int, fp8: bool, split_k: int, device: str) -> None:
    Case(1 if fp8 else 3, 40, k, torch.float16, device, fp8=fp8).run_form(RowsForm(2 << split_k, 32, 4))
    case = Case(3, 40, k, torch.float16, device, fp8=fp8)
    for block_t, ahead in ((8, 0), (16, 64)):
        case.run_form(TilesForm(block_t, 16, 32, split_k, 3, 4, ahead))


def test_rows_do_not_depend_on_their_batch(device: str) -> None:
    for dtype, fp8 in (*((dtype, False) for dtype in DTYPES), (torch.bfloat16, True)):
        case = Case(17, 24, 600, dtype, device, fp8=fp8)
        whole = case.run(batch_invariant=True)
        for first, end in ((0, 1), (5, 8), (7, 16)):
            out = torch.empty(end - first, 24, dtype=dtype, device=device)
            skinny_gemm(out, case.x[first:end], case.weight, case.bias, case.scale, batch_invariant=True)
            assert torch.equal(out, whole[first:end])


@pytest.mark.parametrize("tokens", [1, 16])
def test_every_value_of_fp8_with_scales_of_any_size(tokens: int, device: str) -> None:
    """Subnormals, zeros and both NaN; sums leave the range of float16 before they are scaled."""
    x = 200 * torch.eye(16, dtype=torch.float16)[:tokens].to(device)
    codes, scale = torch.arange(256, dtype=torch.uint8).view(16, 16).view(E4M3), torch.logspace(-35, -4, 16)
    scale[3], scale[4] = 0.0, 1e38
    out = torch.empty(tokens, 16, dtype=torch.float16, device=device)
    skinny_gemm(out, x, codes.to(device), None, scale.to(device))
    expected = ((x.cpu().double() @ codes.double().T) * scale.double()).half()
    assert (int(expected.isnan().sum()), bool(expected.isinf().any())) == (2 * tokens, True)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-3, atol=1e-7, equal_nan=True)


def test_the_invariant_form_is_one_form() -> None:
    sizes = ((4096, 4096), (12288, 4096), (22016, 4096), (4096, 11008))
    for (n, k), (dtype, fp8) in itertools.product(sizes, itertools.product(DTYPES, (0, 1))):
        weight = WeightForm(n, k, k, False, True, fp8)
        forms = [choose_form(weight, tokens, dtype, 132, True) for tokens in range(1, 65)]
        tiles = [form for form in forms if isinstance(form, TilesForm)]
        assert len(tiles) == len(forms)
        assert len({(form.block_k, form.split_k) for form in tiles}) == 1
        assert fp8 or len({form._replace(block_t=0, num_stages=0) for form in tiles}) == 1
        assert min(form.block_t - tokens for tokens, form in enumerate(tiles, 1)) == 0


def test_halves_of_a_block_are_operands_of_a_tensor_core() -> None:
    for k in (16, 32, 48, 4096):
        form = choose_form(WeightForm(40, k, k, False, True, 1), 3, torch.float16, 132, False)
        assert form.block_k // 2 >= 16


def test_no_rows_are_no_launch(device: str) -> None:
    skinny_gemm(torch.empty(0, 8, device=device), torch.empty(0, 4, device=device), torch.ones(8, 4, device=device))


def test_bad_operands_are_refused(device: str) -> None:
    good: dict[str, Any] = {
        "out": torch.zeros(2, 8, device=device), "x": torch.zeros(2, 4, device=device),
        "weight": torch.zeros(8, 4, device=device), "bias": torch.zeros(8, device=device),
    }  # fmt: skip
    fp8, ones = good["weight"].to(E4M3), torch.ones(8, device=device)
    wide = torch.zeros(65, 4, device=device)
    for kind, message, changes in (
        (ValueError, r"weight must be \[any, 4\]", {"weight": torch.zeros(8, 5, device=device)}),
        (ValueError, r"out must be \[2, 8\]", {"out": good["out"][:1]}),
        (ValueError, r"bias must be \[8\]", {"bias": good["bias"][:7]}),
        (ValueError, "weight must have a last stride of 1", {"weight": torch.zeros(4, 8, device=device).t()}),
        (TypeError, "weight must be torch.float32", {"weight": good["weight"].half()}),
        (TypeError, "weight must be .* without scales", {"weight": fp8}),
        (TypeError, "weight must be .* torch.float32 on .* with scales", {"scale": ones}),
        (TypeError, "torch.float8_e5m2 on", {"weight": good["weight"].to(torch.float8_e5m2), "scale": ones}),
        (TypeError, "scale of weight must be torch.float32", {"weight": fp8, "scale": ones.half()}),
        (ValueError, r"scale of weight must be \[8\]", {"weight": fp8, "scale": ones[:7]}),
        (ValueError, "up to 64 rows", {"x": wide, "out": torch.zeros(65, 8, device=device)}),
    ):
        with pytest.raises(kind, match=message):
            skinny_gemm(**good | changes)


@pytest.mark.gpu
@STORED
@pytest.mark.parametrize(("n", "k"), [(4096, 4096), (12288, 4096), (4096, 11008), (1000, 5120)])
def test_full_sizes(n: int, k: int, dtype: torch.dtype, fp8: bool) -> None:
    case = Case(64, n, k, dtype, "cuda", 16, fp8)
    whole = case.run(batch_invariant=True)
    for tokens in TOKENS:
        x, out = case.x[:tokens], torch.empty(tokens, n, dtype=dtype, device="cuda")
        skinny_gemm(out, x, case.weight, case.bias, case.scale, batch_invariant=True)
        assert torch.equal(out, whole[:tokens])
        for _ in range(2):
            skinny_gemm(out, x, case.weight, case.bias, case.scale)
            again = torch.empty_like(out)
            skinny_gemm(again, x, case.weight, case.bias, case.scale)
            assert torch.equal(out, again)
        expected = case.product[:tokens] + case.bias.double()
        torch.testing.assert_close(out.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.gpu
def test_a_graph_counts_arrivals_at_a_new_weight_by_itself() -> None:
    case = Case(1, 64, 8192, torch.float16, "cuda")
    form = TilesForm(16, 64, 128, 2, 3, 4, 0)
    known = case.weight.clone()
    stored = weight_form(known, None)
    run_form(case.out, case.x, (known, None, None), stored, form)  # compiled
    stranger, graph, expected = case.weight.clone(), torch.cuda.CUDAGraph(), case.out.clone()
    torch.cuda.synchronize()
    with capture(graph):
        run_form(case.out, case.x, (stranger, None, None), stored, form)
    for _ in range(3):
        case.out.fill_(float("nan"))
        graph.replay()
        assert case.out.equal(expected)
        run_form(case.out, case.x, (stranger, None, None), stored, form)  # and outside of it
        assert case.out.equal(expected)
