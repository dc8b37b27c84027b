"""Every kernel of the package is in `kernel_calls`, which runs under tools that watch kernels."""

import pytest
import torch

from tests.ops.triton_ops import kernel_calls

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_every_kernel_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    kernel_calls.main(DEVICE)
    assert capsys.readouterr().out.split() == sorted(kernel_calls.kernels())
    assert len(kernel_calls.kernels()) >= 19


def test_a_kernel_that_is_forgotten_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_calls, "CALLS", (kernel_calls.slot,))
    with pytest.raises(SystemExit, match=r"not launched: \['_add_rms_norm_kernel'"):
        kernel_calls.main(DEVICE)
