"""The two ends of a model on one rank: embedding and logits, rows, slots, limits, and when they do nothing."""

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from layer_cases import (
    DIM,
    MAX_LORAS,
    MIXED,
    ORG,
    RANKS,
    VOCAB,
    assert_close,
    config_for,
    embedding_layer,
    logits_layer,
    lora_term,
    on_devices,
    random_pair,
    rounded,
    under_default_devices,
    use,
    wrapper_for,
)
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers import (
    LogitsProcessorWithLoRA,
    VocabParallelEmbeddingWithLoRA,
    capturing_vocabulary,
    from_layer_logits_processor,
    utils,
)
from punica.metadata import LoRAMapping
from punica.parallel import LogitsProcessor, ParallelLMHead, VocabParallelEmbedding
from punica.wrapper import PunicaWrapperCPU
from tests.ops.helpers import E5M2

IDS = torch.tensor([0, 9, 3, 17, 7, 14, 19])  # 17 and 19 are added ids
T = len(MIXED)


def mapped(layer, slots=MIXED, vocab_size=ORG):
    layer.set_mapping(use(wrapper_for(config_for(), layer.device), slots, vocab_size))
    return layer


def embedding(slots=MIXED, dtype=torch.float32, device="cpu", fp8=None):
    layer, adapters = embedding_layer(config_for(dtype, fp8=fp8), device)
    return mapped(layer, slots), rounded(adapters, fp8)


def logits_of(dtype=torch.float32, org=ORG, device="cpu", fp8=None, **options):
    processor = LogitsProcessor(VOCAB, **options)
    layer, head, adapters = logits_layer(config_for(dtype, fp8=fp8), device, org, processor)
    return mapped(layer), head, rounded(adapters, fp8)


def check(result: Tensor, base: Tensor, x: Tensor, slots, adapters, dtype=torch.float32) -> None:
    assert result.dtype == base.dtype
    assert_close(result, base.cpu().double() + lora_term(x, slots, adapters, dtype), dtype)


def one_hot(ids: Tensor) -> Tensor:
    return F.one_hot(ids.clamp(max=ORG), ORG + 1)[:, :ORG].float()


@on_devices
@pytest.mark.parametrize(
    ("shape", "ids_dtype", "dtype", "fp8"),
    [((T,), torch.int64, torch.bfloat16, None), ((1, T), torch.int32, torch.float32, None),
     ((T,), torch.int64, torch.float32, E5M2)],
)  # fmt: skip
def test_embedding_plus_lora(shape, ids_dtype, dtype, fp8, device) -> None:
    layer, adapters = embedding(dtype=dtype, device=device, fp8=fp8)
    ids = IDS.to(device)
    assert layer.weight is layer.base_layer.weight
    result, base = layer(ids.to(ids_dtype).view(shape)), layer.base_layer(ids)
    assert result.shape == (*shape, DIM)
    check(result.view(T, DIM), base, one_hot(IDS), MIXED, adapters, dtype)
    assert torch.equal(result.view(T, DIM)[[1, 3]], base[[1, 3]]), "no adapter, and an added id: the base row"


@on_devices
def test_rows_past_the_mapping_added_ids_alone_and_no_rows(device) -> None:
    layer, adapters = embedding(MIXED[:4], device=device)
    ids = IDS.to(device)
    check(layer(ids), layer.base_layer(ids), one_hot(IDS), [*MIXED[:4], -1, -1, -1], adapters)
    added = torch.tensor([ORG, VOCAB - 1, ORG, ORG], device=device)
    assert torch.equal(layer(added), layer.base_layer(added))
    assert mapped(layer, [])(ids[:0]).shape == (0, DIM)


def test_slots_of_an_embedding() -> None:
    layer, adapters = embedding(dtype=torch.bfloat16)
    assert tuple(layer.lora_b_stacked.shape) == (MAX_LORAS, 1, DIM, 8)
    assert layer.lora_a_stacked_2d.data_ptr() == layer.lora_a_stacked.data_ptr()
    assert tuple(layer.lora_a_stacked_2d.shape) == (MAX_LORAS * ORG, 8)
    ((a, b),) = adapters[1]
    assert torch.equal(layer.lora_a_stacked[1, :, :5], a.T.bfloat16())
    assert torch.equal(layer.lora_b_stacked[1, 0, :, :5], b.bfloat16())
    layer.set_lora(0, torch.full((2, ORG), 2.0), torch.full((DIM, 2), 3.0))
    assert layer.lora_a_stacked[0, 0].tolist() == [2.0] * 2 + [0.0] * 6
    assert layer.lora_b_stacked[0, 0, 0].tolist() == [3.0] * 2 + [0.0] * 6
    layer.reset_lora(1)
    assert not layer.lora_a_stacked[1].any()
    for a, b, message in ((VOCAB, DIM, "15 .* 20"), (ORG, ORG, "24 .* 15")):
        with pytest.raises(ValueError, match=message):
            layer.set_lora(0, torch.ones(2, a), torch.ones(b, 2))
    assert layer.lora_ranks.tolist() == [[2, 0, 1, 0]]


@under_default_devices
def test_a_default_device_changes_nothing(default) -> None:
    hidden = torch.randn(T, DIM)
    with torch.device(default):
        layer, adapters = embedding()
        check(layer(IDS), layer.base_layer(IDS), one_hot(IDS), MIXED, adapters)
        layer, head, adapters = logits_of()
        check(layer(head, hidden), layer.base_layer(head, hidden), hidden, MIXED, adapters)


def test_steps_that_an_embedding_refuses() -> None:
    layer, _ = embedding()
    with pytest.raises(ValueError, match=r"5 ids.* 7"):
        layer(IDS[:5])
    with pytest.raises(ValueError, match=r"=20.*=15"):
        mapped(layer, vocab_size=VOCAB)(IDS)
    layer.set_mapping(PunicaWrapperCPU(8, 8, "cpu", max_loras=MAX_LORAS))
    with pytest.raises(RuntimeError, match="update_metadata"):
        layer(IDS)
    with pytest.raises(RuntimeError, match="create_lora_weights"):
        VocabParallelEmbeddingWithLoRA(VocabParallelEmbedding(VOCAB, DIM))(IDS)


@pytest.mark.parametrize("kind", ["embedding", "logits"])
def test_no_adapter_in_any_slot_means_no_work(kind, monkeypatch) -> None:
    if kind == "embedding":
        layer, _ = embedding()
        given = (IDS,)
    else:
        layer, head, _ = logits_of()
        given = (head, torch.randn(T, DIM))
    wrapper, recorded = use(wrapper_for(config_for(), "cpu"), MIXED, ORG), []
    wrapper.add_lora_embedding = wrapper.add_lora_logits = lambda y, *_, **keywords: recorded.append(keywords)
    layer.set_mapping(wrapper)

    def calls() -> int:
        assert torch.equal(layer(*given), layer.base_layer(*given))
        return len(recorded)

    assert calls() == 1
    assert recorded[0]["lora_ranks"] is layer.lora_ranks
    for slot in RANKS:
        layer.reset_lora(slot)
    assert calls() == 1
    monkeypatch.setattr(utils, "is_being_captured", lambda tensor: True)
    assert calls() == 2, "a CUDA graph must contain the work of adapters that come later"
    layer.mark_slot(3, True)
    with capturing_vocabulary(False):
        assert calls() == 2, "but one for steps whose adapters are for other layers"
        with capturing_vocabulary(True):
            assert calls() == 3
    layer.mark_slot(3, False)
    assert calls() == 4
    monkeypatch.undo()
    layer.mark_slot(3, True)
    assert calls() == 5, "a writer that fills slots by itself says so"
    with capturing_vocabulary(False):
        assert calls() == 6, "it says nothing of steps that are not captured"


def test_what_one_thread_captures_says_nothing_of_another(monkeypatch) -> None:
    monkeypatch.setattr(utils, "is_being_captured", lambda tensor: True)
    tensor = torch.zeros(1)
    with ThreadPoolExecutor(1) as other, capturing_vocabulary(False):
        assert not utils.has_vocabulary_work({0}, tensor)
        assert other.submit(utils.has_vocabulary_work, set(), tensor).result()
    assert utils.has_vocabulary_work(set(), tensor)


@on_devices
@pytest.mark.parametrize(
    ("org", "scale", "soft_cap", "dtype", "fp8"),
    [(VOCAB, 1.0, None, torch.bfloat16, None), (ORG, 0.5, None, torch.float32, None),
     (ORG, 1.0, 3.0, torch.float32, None), (VOCAB, 2.0, 1.5, torch.float32, E5M2)],
)  # fmt: skip
def test_cap_and_scale_follow_the_lora_term(org, scale, soft_cap, dtype, fp8, device) -> None:
    layer, head, adapters = logits_of(dtype, org, device, fp8, scale=scale, soft_cap=soft_cap)
    hidden = torch.randn(T, DIM, device=device).to(dtype)
    columns = head.column_of_id()[:VOCAB]
    plain = hidden.double() @ head.weight[columns].double().T + head.bias[columns].double()
    expected = plain.cpu() + lora_term(hidden, MIXED, adapters, dtype)
    if soft_cap is not None:
        expected = soft_cap * torch.tanh(expected / soft_cap)
    assert_close(layer(head, hidden), scale * expected)


def test_bias_sampled_rows_dtype_and_a_wrapped_head() -> None:
    layer, head, adapters = logits_of(org=VOCAB)
    hidden, bias = torch.randn(T, DIM), torch.randn(head.num_embeddings_padded)
    check(layer(head, hidden, bias), layer.base_layer(head, hidden, bias), hidden, MIXED, adapters)
    assert torch.equal(layer(SimpleNamespace(base_layer=head), hidden), layer(head, hidden))
    wrapper = wrapper_for(config_for(), "cpu")
    wrapper.update_metadata(LoRAMapping([0] * 7, [3, 1]), [*range(1, MAX_LORAS + 1)], MAX_LORAS, 32)
    layer.set_mapping(wrapper)  # sampled rows have their own slots
    check(layer(head, hidden[:2]), layer.base_layer(head, hidden[:2]), hidden[:2], [2, 0], adapters)
    head, hidden = ParallelLMHead(VOCAB, DIM, params_dtype=torch.float32), hidden.bfloat16().float()
    head.weight.data.normal_()
    layer = mapped(from_layer_logits_processor(LogitsProcessor(VOCAB), head, MAX_LORAS, config_for(torch.bfloat16)))
    layer.set_lora(0, *(pair := random_pair(8, DIM, VOCAB)))
    found = {0: [pair], 1: [pair], 2: [pair]} | {slot: [(pair[0] * 0, pair[1])] for slot in (1, 2)}
    check(layer(head, hidden), layer.base_layer(head, hidden), hidden, MIXED, found, torch.bfloat16)


def test_reordering_example() -> None:
    """Ids 0..3 original, 4 and 5 added, padding 4, two ranks: the gathered columns hold ids 0,1,4,5 | 2,3,-,-."""
    head = ParallelLMHead(6, DIM, org_num_embeddings=4, padding_size=4, tp_rank=0, tp_size=2)
    processor = LogitsProcessor(6)
    layer = mapped(from_layer_logits_processor(processor, head, MAX_LORAS, config_for()), [1])
    assert layer.sharded_to_full_mapping == [0, 1, 4, 5, 2, 3, 6, 7]
    assert layer.sharded_to_full_mapping_gpu.tolist() == layer.sharded_to_full_mapping
    assert layer.sharded_to_full_mapping_gpu.dtype == torch.int64
    processor._gather_logits = lambda logits: torch.tensor([[0.0, 1, 4, 5, 2, 3, -1, -1]])
    hidden = torch.eye(1, DIM)
    assert layer(head, hidden).tolist() == [[0, 1, 2, 3, 4, 5]]
    layer.set_lora(1, torch.eye(1, DIM), torch.tensor([[10.0], [20], [30], [40], [50], [60]]))
    assert layer(head, hidden).tolist() == [[10, 21, 32, 43, 54, 65]]


def test_logits_that_are_not_made_here() -> None:
    layer, head, _ = logits_of(logits_as_input=True, scale=2.0)
    logits = torch.randn(T, VOCAB)
    assert torch.equal(layer(head, logits), 2 * logits)
    layer, head, _ = logits_of()
    layer.base_layer._gather_logits = lambda logits: None  # a rank without logits
    layer.set_mapping(SimpleNamespace(add_lora_logits=None))
    assert layer(head, torch.randn(T, DIM)) is None


def test_widest_vocabulary() -> None:
    config = LoRAConfig(max_lora_rank=1, max_loras=1, lora_dtype=torch.bfloat16)
    layers = [
        LogitsProcessorWithLoRA(LogitsProcessor(vocab), 2, torch.float32, torch.device("meta"), None)
        for vocab in (258048, 258049)
    ]
    layers[0].create_lora_weights(1, config)
    with pytest.raises(ValueError, match=r"258048 .* 258049"):
        layers[1].create_lora_weights(1, config)
