"""A wrapper with the contract's methods alone is called with all of a layer's weights, and may return a tensor."""

from types import SimpleNamespace

import torch

from punica.ops.scales import PER_CHANNEL
from punica.ops.weights import LoRAWeights, Stack
from punica.vllm.wrapper import inner_form


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
