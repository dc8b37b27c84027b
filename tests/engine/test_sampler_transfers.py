"""The host never waits while it tells the device how to choose tokens: all it sends is sent asynchronously, and nothing
is read back. Shown with tensors that cannot be read (device "meta"), and on a GPU with torch's own watch on waiting.
"""

from types import SimpleNamespace

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from punica.engine import sampler
from punica.engine.sampler import choose_tokens, token_logprobs
from punica.metadata.staging import send
from punica.scheduling import SamplingParams

VOCAB = 1001
PARAMS = [
    SamplingParams(logprobs=3),
    SamplingParams(temperature=0.8, logprobs=0),
    SamplingParams(temperature=0.7, top_k=9, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.2),
    SamplingParams(temperature=1.1, repetition_penalty=1.2, logprobs=20),
    SamplingParams(temperature=1.1, repetition_penalty=0.9, top_p=0.5),
    SamplingParams(min_tokens=9, logit_bias={5: 2.0}, bad_words=[[4], [7, 8]]),
    SamplingParams(temperature=1.1, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(),
]
MAKERS = {torch.tensor, torch.as_tensor, torch.asarray, torch.Tensor.new_tensor}


class Waits(Exception):
    """The host would wait for the device."""


class NoMaking(TorchFunctionMode):
    """Tensors are not made on `device` from what the host has: torch copies it there and waits."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func in MAKERS and made.device.type == self.device:
            raise Waits(f"{func.__name__} on {made.device}")
        return made


class Copies(TorchDispatchMode):
    """Notes the sources of copies from one device to another; those that make the host wait are refused."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[torch.Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        source, target = None, None
        if name == "_to_copy":
            source, target = args[0], kwargs.get("device") or args[0].device
        elif name == "copy_":
            source, target = args[1], args[0].device
        if source is not None and source.device.type != torch.device(target).type:
            if not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])):
                raise Waits(f"{name} from {source.device} to {target}")
            self.sources.append(source)
        return func(*args, **kwargs)


def states() -> list[SimpleNamespace]:
    tokens = [[0, 5, 5, 17, 33], [VOCAB - 1]]
    return [
        SimpleNamespace(
            params=params, seed=i, token_ids=tokens[i % 2], num_generated=i, end_token_ids=(3,),
            bad_sequences=params.bad_words,
        )
        for i, params in enumerate(PARAMS)
    ]


def watched(logits: torch.Tensor) -> tuple[torch.Tensor, sampler.PendingLogprobs, list[torch.Tensor]]:
    with NoMaking(logits.device.type), Copies() as copies:
        tokens = choose_tokens(logits, states())
        pending = token_logprobs(logits, tokens, states())
    return tokens, pending, copies.sources


def test_nothing_waits() -> None:
    tokens, pending, sources = watched(torch.empty(len(PARAMS), VOCAB, device="meta"))
    assert tokens.shape == (len(PARAMS),)
    assert pending.table.shape == (3, 2, 21)
    assert len(sources) == 8, "rows, numbers, cut rows, four adjustments, rows with log-probabilities"


@pytest.mark.parametrize(
    "wrong", [
        lambda values, dtype, device: torch.tensor(values, dtype=dtype, device=device),
        lambda values, dtype, device: torch.tensor(values, dtype=dtype).to(device),
        lambda values, dtype, device: torch.empty_like(t := torch.tensor(values, dtype=dtype), device=device).copy_(t),
        lambda values, dtype, device: send(values, dtype, device)[send([True], torch.bool, device)],
        lambda values, dtype, device: send([send(values, dtype, device).sum().item()], dtype, device),
    ],
    ids=["made there", "sent", "copied", "chosen by mask", "read back"],
)  # fmt: skip
def test_the_watch_sees_who_waits(monkeypatch, wrong) -> None:
    monkeypatch.setattr(sampler, "send", wrong)
    with pytest.raises((Waits, RuntimeError, NotImplementedError)):
        watched(torch.empty(len(PARAMS), VOCAB, device="meta"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_nothing_waits_on_a_gpu(dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(len(PARAMS), VOCAB, generator=generator).mul(3).to("cuda", dtype)
    logits[0, 5] = float("nan")
    watched(logits)  # the first call loads kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        tokens, pending, sources = watched(logits)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(source.is_pinned() for source in sources)
    assert len(sources) == 8
    on_host = choose_tokens(logits.cpu(), states())
    assert int(tokens[0]) == sampler.NO_TOKEN
    assert tokens.cpu().equal(on_host)
    found, wanted = pending.read(), token_logprobs(logits.cpu(), on_host, states()).read()
    assert found.keys() == wanted.keys() == {0, 1, 4}
    assert list(found[1].values()) == pytest.approx(list(wanted[1].values()), abs=1e-4)
