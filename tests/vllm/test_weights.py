"""Weights given by their tensors are made once, anew where a tensor is another one, and go through a contract."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from punica.ops.scales import PER_CHANNEL, PLAIN
from punica.ops.weights import LoRAWeights, Stack
from punica.vllm import weights
from punica.vllm.weights import known_stack, known_weights
from punica.vllm.wrapper import inner_form


def pair(rank: int = 4) -> tuple[list[Tensor], list[Tensor]]:
    return [torch.randn(3, 1, rank, 8) for _ in range(2)], [torch.randn(3, 1, width, rank) for width in (6, 5)]


def known(a: list[Tensor], b: list[Tensor], ranks: Tensor | None = None) -> weights.LoRAWeights:
    return known_weights(a, b, ranks, (None, None), (PLAIN, PLAIN))


def test_the_same_tensors_are_recognised_and_followed_in_place() -> None:
    (a, b), ranks = pair(), torch.ones(2, 3, dtype=torch.int32)
    made = known(a, b)
    assert known(list(a), list(b)) is made
    assert known(a, b, ranks) is not made
    a[0].fill_(7)
    assert (made.a.tensors[0] == 7).all()
    assert known_stack(a, -2, None, None, PLAIN) is known_stack(a, -2, None, None, PLAIN)
    assert known_stack(a, -2, None, None, PLAIN).form == made.a.form


@pytest.mark.parametrize(
    "change",
    [
        lambda a: setattr(a[0], "data", a[0].data.clone()),
        lambda a: a[0].transpose_(0, 1).transpose_(0, 1).resize_(2, 1, 4, 8),
        lambda a: setattr(a[0], "data", a[0].data.double()),
        lambda a: a.reverse(),
        lambda a: a.__setitem__(1, a[1].clone()),
    ],
    ids=["other memory", "other shape", "other dtype", "other order", "another tensor"],
)
def test_a_changed_tensor_is_no_old_acquaintance(change) -> None:
    a, _ = pair()
    made = known_stack(a, -2, None, None, PLAIN)
    change(a)
    try:
        other = known_stack(a, -2, None, None, PLAIN)
    except (TypeError, ValueError):  # slices that differ are no weights
        return
    assert other is not made
    assert [t.data_ptr() for t in other.tensors] == [t.data_ptr() for t in a]


def test_freed_tensors_are_forgotten_before_others_have_their_addresses() -> None:
    weights._KNOWN.clear()
    for round in range(20):
        a, b = pair(rank=2 + round % 3)
        made = known(a, b)
        assert [t.data_ptr() for t in made.a.tensors] == [t.data_ptr() for t in a]
        assert made.a.form.stored.rank == 2 + round % 3
        assert len(weights._KNOWN) == 1
        del a, b, made
    assert not weights._KNOWN


@pytest.mark.parametrize("wrong", [None, [None], [torch.ones(2, 3)], torch.ones(3, 1, 4, 8), [[1.0]]], ids=repr)
def test_what_are_no_weights_the_checks_name(wrong) -> None:
    with pytest.raises((TypeError, ValueError), match="lora_a_stacked"):
        known_stack(wrong, -2, None, None, PLAIN)


def test_weights_in_fp8_go_with_their_own_scales() -> None:
    seen: dict[str, dict] = {}
    names = ("add_lora_linear", "add_lora_logits", "add_shrink", "add_expand", "add_lora_embedding")

    def noted(name):
        return lambda y, *_, **given: (seen.update({name: given}), y + 1)[1]  # a new tensor, in place of y

    wrapper = SimpleNamespace(**{name: noted(name) for name in names})
    ranks = torch.ones(1, 2, dtype=torch.int32)
    a_values, b_values = (torch.zeros(2, 1, *shape).to(torch.float8_e4m3fn) for shape in ((4, 8), (6, 4)))
    a = Stack.of_a([a_values], ranks, [torch.ones(2, 4)], PER_CHANNEL)
    b = Stack.of_b([b_values], ranks, [torch.ones(2, 6)], PER_CHANNEL)
    form, y, x, weights = inner_form(wrapper), torch.zeros(3, 6), torch.zeros(3, 8), LoRAWeights(a, b)
    form.add_linear(y, x, weights, False)
    form.add_logits(y, x, weights)
    form.add_shrunk(h := torch.zeros(1, 3, 4), x, a)
    form.add_expanded(y, h, b, 2)
    form.add_embedding(y, h[0], b)
    assert (y.unique().tolist(), h.unique().tolist()) == ([4], [1])
    both = {"lora_ranks": ranks, "lora_a_scale": a.scales, "lora_b_scale": b.scales, "quant_args": PER_CHANNEL}
    of_a, of_b = ({k: v for k, v in both.items() if k != other} for other in ("lora_b_scale", "lora_a_scale"))
    assert seen == {
        "add_lora_linear": both | {"add_inputs": False}, "add_lora_logits": both, "add_shrink": of_a,
        "add_expand": of_b, "add_lora_embedding": of_b,
    }  # fmt: skip
