"""Logits with LoRA on one rank: order of columns, cap and scale after the LoRA term, limits."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers import LogitsProcessorWithLoRA, capturing_vocabulary, from_layer_logits_processor, utils
from punica.metadata import LoRAMapping
from punica.parallel import LogitsProcessor, ParallelLMHead
from punica.wrapper import PunicaWrapperCPU

VOCAB, DIM = 10, 6
SLOTS = [0, -1, 2, 2, 1]
RANKS = {0: 8, 1: 1, 2: 5}


def wrapper_for(sampled: list[int], tokens: list[int] | None = None) -> PunicaWrapperCPU:
    wrapper = PunicaWrapperCPU(16, 16, "cpu", max_loras=4)
    ids = [slot + 1 for slot in sampled]
    token_ids = ids if tokens is None else [slot + 1 for slot in tokens]
    wrapper.update_metadata(LoRAMapping(token_ids, ids), [1, 2, 3, 4], 4, 32)
    return wrapper


def random_head(org: int = VOCAB, bias: bool = True, dtype: torch.dtype = torch.float32) -> ParallelLMHead:
    head = ParallelLMHead(VOCAB, DIM, bias, dtype, org_num_embeddings=org, padding_size=4)
    head.weight_loader(head.weight, torch.randn(VOCAB, DIM))
    if bias:
        head.weight_loader(head.bias, torch.randn(VOCAB))
    return head


def logits_layer(config: LoRAConfig, head: ParallelLMHead, sampled: list[int], **options):
    layer = from_layer_logits_processor(LogitsProcessor(VOCAB, **options), head, 4, config)
    layer.set_mapping(wrapper_for(sampled))
    adapters = {slot: (torch.randn(rank, DIM), torch.randn(VOCAB, rank)) for slot, rank in RANKS.items()}
    for slot, pair in adapters.items():
        layer.set_lora(slot, *pair)
    return layer, adapters


def dense(head: ParallelLMHead, hidden: Tensor, slots: list[int], adapters: dict) -> Tensor:
    """``W h + b + B A h`` in float64, columns in the order of the ids."""
    columns = head.column_of_id()[:VOCAB]
    logits = hidden.double() @ head.weight[columns].double().T
    if head.bias is not None:
        logits = logits + head.bias[columns].double()
    for row, slot in enumerate(slots):
        if slot in adapters:
            a, b = (factor.double() for factor in adapters[slot])
            logits[row] += b @ (a @ hidden[row].double())
    return logits


@pytest.mark.parametrize(
    ("org", "bias", "scale", "soft_cap"),
    [(10, True, 1.0, None), (7, False, 0.5, None), (7, True, 1.0, 3.0), (10, False, 2.0, 1.5)],
)
def test_cap_and_scale_follow_the_lora_term(org, bias, scale, soft_cap, lora_config) -> None:
    head, hidden = random_head(org, bias), torch.randn(5, DIM)
    layer, adapters = logits_layer(lora_config(), head, SLOTS, scale=scale, soft_cap=soft_cap)
    reference = dense(head, hidden, SLOTS, adapters)
    if soft_cap is not None:
        reference = soft_cap * torch.tanh(reference / soft_cap)
    result = layer(head, hidden)
    assert result.shape == (5, VOCAB)
    torch.testing.assert_close(result.double(), scale * reference, rtol=1e-4, atol=1e-4)


def test_the_embedding_bias_takes_the_place_of_the_heads(lora_config) -> None:
    head, hidden = random_head(bias=True), torch.randn(5, DIM)
    layer, adapters = logits_layer(lora_config(), head, SLOTS)
    bias = torch.randn(head.num_embeddings_padded)
    reference = dense(head, hidden, SLOTS, adapters) - head.bias[:VOCAB] + bias[:VOCAB]
    torch.testing.assert_close(layer(head, hidden, bias).double(), reference, rtol=1e-4, atol=1e-4)


def test_sampled_rows_have_their_own_slots(lora_config) -> None:
    head, hidden = random_head(), torch.randn(2, DIM)
    layer, adapters = logits_layer(lora_config(), head, SLOTS)
    layer.set_mapping(wrapper_for([2, 0], tokens=[-1] * 7))
    reference = dense(head, hidden, [2, 0], adapters)
    torch.testing.assert_close(layer(head, hidden).double(), reference, rtol=1e-4, atol=1e-4)


def test_adapters_of_another_dtype_than_the_hidden_states(lora_config) -> None:
    head, hidden = random_head(), torch.randn(5, DIM).bfloat16().float()
    layer, adapters = logits_layer(lora_config(lora_dtype=torch.bfloat16), head, SLOTS)
    stored = {slot: (a.bfloat16(), b.bfloat16()) for slot, (a, b) in adapters.items()}
    result = layer(head, hidden)
    assert result.dtype == torch.float32
    torch.testing.assert_close(result.double(), dense(head, hidden, SLOTS, stored), rtol=1e-4, atol=1e-4)


def test_a_wrapped_head_is_unwrapped(lora_config) -> None:
    head, hidden = random_head(), torch.randn(5, DIM)
    layer, _ = logits_layer(lora_config(), head, SLOTS)
    assert torch.equal(layer(SimpleNamespace(base_layer=head), hidden), layer(head, hidden))


def test_reordering_example(lora_config) -> None:
    """Ids 0..3 original, 4 and 5 added, padding 4, two ranks: the gathered columns hold ids 0,1,4,5 | 2,3,-,-."""
    head = ParallelLMHead(6, DIM, org_num_embeddings=4, padding_size=4, tp_rank=0, tp_size=2)
    processor = LogitsProcessor(6)
    layer = from_layer_logits_processor(processor, head, 4, lora_config())
    layer.set_mapping(wrapper_for([1]))
    assert layer.sharded_to_full_mapping == [0, 1, 4, 5, 2, 3, 6, 7]
    assert layer.sharded_to_full_mapping_gpu.dtype == torch.int64
    assert layer.sharded_to_full_mapping_gpu.tolist() == [0, 1, 4, 5, 2, 3, 6, 7]
    processor._gather_logits = lambda logits: torch.tensor([[0.0, 1, 4, 5, 2, 3, -1, -1]])
    hidden = torch.zeros(1, DIM)
    assert layer(head, hidden).tolist() == [[0, 1, 2, 3, 4, 5]]
    hidden[0, 0] = 1
    a = torch.eye(1, DIM)
    layer.set_lora(1, a, torch.tensor([[10.0], [20], [30], [40], [50], [60]]))
    assert layer(head, hidden).tolist() == [[10, 21, 32, 43, 54, 65]]


def test_ranks_without_logits_add_nothing(lora_config) -> None:
    head = random_head()
    layer, _ = logits_layer(lora_config(), head, SLOTS)
    layer.base_layer._gather_logits = lambda logits: None
    layer.set_mapping(SimpleNamespace(add_lora_logits=None))
    assert layer(head, torch.randn(5, DIM)) is None


def test_logits_as_input(lora_config) -> None:
    head = random_head()
    layer, _ = logits_layer(lora_config(), head, SLOTS, logits_as_input=True, scale=2.0)
    logits = torch.randn(5, VOCAB)
    assert torch.equal(layer(head, logits), 2 * logits)


def test_settings_are_the_base_layers(lora_config) -> None:
    base = LogitsProcessor(VOCAB, 8, scale=0.5, logits_as_input=True, soft_cap=3.0)
    base.use_all_gather, base.include_gpu_probs_tensor = False, True
    layer = LogitsProcessorWithLoRA(base, DIM, torch.float32, torch.device("cpu"), None)
    assert (layer.vocab_size, layer.org_vocab_size, layer.scale, layer.soft_cap) == (VOCAB, 8, 0.5, 3.0)
    flags = (layer.logits_as_input, layer.use_all_gather, layer.include_gpu_probs_tensor)
    assert flags == (True, False, True)
    assert layer.should_modify_greedy_probs_inplace is False
    with pytest.raises(AttributeError):
        layer.scale = 2.0
    assert layer.sharded_to_full_mapping_gpu is None
    with pytest.raises(RuntimeError, match="create_lora_weights"):
        layer._get_logits(torch.randn(2, DIM), random_head())


def test_slots(lora_config) -> None:
    layer, adapters = logits_layer(lora_config(lora_dtype=torch.bfloat16), random_head(), SLOTS)
    assert tuple(layer.lora_a_stacked.shape) == (4, 1, 8, DIM)
    assert tuple(layer.lora_b_stacked.shape) == (4, 1, VOCAB, 8)
    assert layer.slot_bytes == 2 * 8 * (VOCAB + DIM)
    assert layer.lora_ranks.tolist() == [[8, 1, 5, 0]]
    with pytest.raises(ValueError, match="6 columns, got 7"):
        layer.set_lora(2, torch.ones(2, DIM + 1), torch.ones(VOCAB, 2))
    with pytest.raises(ValueError, match="10 rows, got 12"):
        layer.set_lora(2, torch.ones(2, DIM), torch.ones(VOCAB + 2, 2))
    assert torch.equal(layer.lora_b_stacked[2, 0, :, :5], adapters[2][1].bfloat16())
    layer.reset_lora(0)
    assert (layer.lora_b_stacked[0] == 0).all()
    assert layer.lora_ranks.tolist() == [[0, 1, 5, 0]]


@pytest.mark.parametrize(("vocab", "fits"), [(258048, True), (258049, False)])
def test_widest_vocabulary(vocab, fits) -> None:
    layer = LogitsProcessorWithLoRA(LogitsProcessor(vocab), 2, torch.float32, torch.device("meta"), None)
    config = LoRAConfig(max_lora_rank=1, max_loras=1, lora_dtype=torch.bfloat16)
    if fits:
        layer.create_lora_weights(1, config)
        assert tuple(layer.lora_b_stacked.shape) == (1, 1, vocab, 1)
    else:
        with pytest.raises(ValueError, match=r"at most 258048 .* got 258049"):
            layer.create_lora_weights(1, config)
        assert layer.lora_config is None


def test_no_adapter_in_any_slot_means_no_work(lora_config, monkeypatch) -> None:
    head, hidden, calls = random_head(), torch.randn(5, DIM), []
    layer, _ = logits_layer(lora_config(), head, SLOTS)
    wrapper = layer.punica_wrapper
    monkeypatch.setattr(wrapper, "add_lora_logits", lambda *args, **kwargs: calls.append(kwargs))
    layer.set_mapping(wrapper)
    layer(head, hidden)
    assert len(calls) == 1
    assert calls[0]["lora_ranks"] is layer.lora_ranks
    for slot in RANKS:
        layer.reset_lora(slot)
    assert torch.equal(layer(head, hidden), layer.base_layer(head, hidden))
    assert len(calls) == 1
    monkeypatch.setattr(utils, "is_being_captured", lambda tensor: True)
    layer(head, hidden)
    assert len(calls) == 2, "a CUDA graph must contain the work of adapters that come later"
    with capturing_vocabulary(False):
        layer(head, hidden)
    assert len(calls) == 2, "but one for steps whose adapters are for other layers"


def test_a_returned_tensor_is_honoured(lora_config) -> None:
    head, hidden = random_head(), torch.randn(5, DIM)
    layer, _ = logits_layer(lora_config(), head, SLOTS)
    layer.set_mapping(SimpleNamespace(add_lora_logits=lambda y, *args, **kwargs: y + 1))
    torch.testing.assert_close(layer(head, hidden), layer.base_layer(head, hidden) + 1)
