"""Every kernel of the package is in `kernel_calls`, which runs under tools that watch kernels."""

import pytest
import torch

from tests.ops.triton_ops import kernel_calls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_every_kernel_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    kernel_calls.main(DEVICE)
    assert capsys.readouterr().out.split() == sorted(kernel_calls.kernels())
