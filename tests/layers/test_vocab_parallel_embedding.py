"""The embedding with LoRA on one rank: gathered rows, added ids, padding, when it does nothing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from punica.config import LoRAConfig
from punica.layers import VocabParallelEmbeddingWithLoRA, capturing_vocabulary, from_layer, utils
from punica.metadata import LoRAMapping
from punica.parallel import VocabParallelEmbedding
from punica.wrapper import PunicaWrapperCPU

ORG, VOCAB, DIM = 10, 13, 6
SLOTS = [0, -1, 2, 2, 1, 0]
IDS = [0, 9, 3, 12, 7, 9]
RANKS = {0: 8, 1: 1, 2: 5}


def wrapper_for(slots: list[int], vocab_size: int = ORG) -> PunicaWrapperCPU:
    wrapper = PunicaWrapperCPU(16, 16, "cpu", max_loras=4)
    ids = [slot + 1 for slot in slots]
    wrapper.update_metadata(LoRAMapping(ids, ids), [1, 2, 3, 4], 4, vocab_size)
    return wrapper


def embedding(config: LoRAConfig, slots: list[int], dtype: torch.dtype = torch.float32):
    """The layer with random table and one adapter of each rank; and the adapters."""
    base = VocabParallelEmbedding(VOCAB, DIM, dtype, org_num_embeddings=ORG, padding_size=4)
    base.weight_loader(base.weight, torch.randn(VOCAB, DIM))
    layer = from_layer(base, 4, config, [])
    layer.set_mapping(wrapper_for(slots))
    adapters = {slot: (torch.randn(rank, ORG), torch.randn(DIM, rank)) for slot, rank in RANKS.items()}
    for slot, pair in adapters.items():
        layer.set_lora(slot, *pair)
    return layer, adapters


def expected(base: VocabParallelEmbedding, ids: list[int], slots: list[int], adapters: dict) -> Tensor:
    rows = []
    for token, slot in zip(ids, slots, strict=True):
        row = base(torch.tensor([token]))[0].double()
        if slot in adapters and token < ORG:
            a, b = (factor.double() for factor in adapters[slot])
            row = row + b @ a[:, token]
        rows.append(row)
    return torch.stack(rows)


@pytest.mark.parametrize(("shape", "ids_dtype"), [((6,), torch.int64), ((2, 3), torch.int32)])
def test_base_plus_lora(shape, ids_dtype, lora_config) -> None:
    layer, adapters = embedding(lora_config(), SLOTS)
    assert type(layer) is VocabParallelEmbeddingWithLoRA
    assert layer.weight is layer.base_layer.weight
    result = layer(torch.tensor(IDS, dtype=ids_dtype).view(shape))
    assert result.shape == (*shape, DIM)
    reference = expected(layer.base_layer, IDS, SLOTS, adapters)
    torch.testing.assert_close(result.view(6, DIM).double(), reference, rtol=1e-4, atol=1e-4)
    base = layer.base_layer(torch.tensor(IDS))
    assert torch.equal(result.view(6, DIM)[[1, 3]], base[[1, 3]]), "no adapter, and an added id: the base row"


def test_half_precision(lora_config) -> None:
    layer, adapters = embedding(lora_config(lora_dtype=torch.bfloat16), SLOTS, torch.bfloat16)
    stored = {slot: (a.bfloat16(), b.bfloat16()) for slot, (a, b) in adapters.items()}
    result = layer(torch.tensor(IDS))
    assert result.dtype == torch.bfloat16
    reference = expected(layer.base_layer, IDS, SLOTS, stored)
    torch.testing.assert_close(result.double(), reference, rtol=1.6e-2, atol=1e-2)


def test_rows_past_the_mapping_are_padding(lora_config) -> None:
    layer, adapters = embedding(lora_config(), SLOTS[:4])
    result = layer(torch.tensor(IDS))
    reference = expected(layer.base_layer, IDS, [*SLOTS[:4], -1, -1], adapters)
    torch.testing.assert_close(result.double(), reference, rtol=1e-4, atol=1e-4)


def test_added_ids_alone_and_no_rows(lora_config) -> None:
    layer, _ = embedding(lora_config(), [0, 1])
    ids = torch.tensor([10, 12])
    assert torch.equal(layer(ids), layer.base_layer(ids))
    layer.set_mapping(wrapper_for([]))
    assert layer(torch.empty(0, dtype=torch.int64)).shape == (0, DIM)


def test_slots(lora_config) -> None:
    layer, adapters = embedding(lora_config(lora_dtype=torch.bfloat16), SLOTS)
    assert tuple(layer.lora_a_stacked.shape) == (4, ORG, 8)
    assert tuple(layer.lora_b_stacked.shape) == (4, 1, DIM, 8)
    assert layer.lora_a_stacked_2d.data_ptr() == layer.lora_a_stacked.data_ptr()
    assert tuple(layer.lora_a_stacked_2d.shape) == (4 * ORG, 8)
    assert layer.lora_ranks.tolist() == [[8, 1, 5, 0]]
    assert layer.slot_bytes == 2 * 8 * (ORG + DIM)
    a, b = adapters[2]
    assert torch.equal(layer.lora_a_stacked[2, :, :5], a.T.bfloat16())
    assert torch.equal(layer.lora_b_stacked[2, 0, :, :5], b.bfloat16())
    layer.set_lora(0, torch.full((2, ORG), 2.0), torch.full((DIM, 2), 3.0))
    assert layer.lora_a_stacked[0, 0].tolist() == [2.0] * 2 + [0.0] * 6
    assert layer.lora_b_stacked[0, 0, 0].tolist() == [3.0] * 2 + [0.0] * 6
    layer.reset_lora(2)
    assert (layer.lora_a_stacked[2] == 0).all()
    assert layer.lora_ranks.tolist() == [[2, 1, 0, 0]]


def test_refusals(lora_config) -> None:
    layer, _ = embedding(lora_config(), SLOTS)
    before = layer.lora_a_stacked.clone()
    with pytest.raises(ValueError, match="10 columns, got 13"):
        layer.set_lora(1, torch.ones(2, VOCAB), torch.ones(DIM, 2))
    with pytest.raises(ValueError, match="6 rows, got 10"):
        layer.set_lora(1, torch.ones(2, ORG), torch.ones(ORG, 2))
    assert torch.equal(layer.lora_a_stacked, before)
    with pytest.raises(ValueError, match="got 5 ids, expected at least the 6 tokens"):
        layer(torch.tensor(IDS[:5]))
    layer.set_mapping(wrapper_for(SLOTS, VOCAB))
    with pytest.raises(ValueError, match="vocab_size=13, but this embedding has org_vocab_size=10"):
        layer(torch.tensor(IDS))
    layer.set_mapping(PunicaWrapperCPU(8, 8, "cpu", max_loras=4))
    with pytest.raises(RuntimeError, match="update_metadata"):
        layer(torch.tensor(IDS))
    layer = VocabParallelEmbeddingWithLoRA(VocabParallelEmbedding(VOCAB, DIM))
    with pytest.raises(RuntimeError, match="create_lora_weights"):
        layer(torch.tensor(IDS))


class Recorder:
    """Counts the LoRA work that reaches the wrapper."""

    def __init__(self, slots: list[int]) -> None:
        self._wrapper, self.calls = wrapper_for(slots), 0

    def __getattr__(self, name):
        return getattr(self._wrapper, name)

    def add_lora_embedding(self, *args, **kwargs):
        self.calls += 1
        return self._wrapper.add_lora_embedding(*args, **kwargs)


def test_no_adapter_in_any_slot_means_no_work(lora_config, monkeypatch) -> None:
    layer, _ = embedding(lora_config(), SLOTS)
    recorder, ids = Recorder(SLOTS), torch.tensor(IDS)
    layer.set_mapping(recorder)
    layer(ids)
    assert recorder.calls == 1
    for slot in RANKS:
        layer.reset_lora(slot)
    assert torch.equal(layer(ids), layer.base_layer(ids))
    assert recorder.calls == 1
    monkeypatch.setattr(utils, "is_being_captured", lambda tensor: True)
    assert torch.equal(layer(ids), layer.base_layer(ids))
    assert recorder.calls == 2, "a CUDA graph must contain the work of adapters that come later"
    layer.mark_slot(3, True)
    with capturing_vocabulary(False):
        assert torch.equal(layer(ids), layer.base_layer(ids))
        assert recorder.calls == 2, "but one for steps whose adapters are for other layers"
        with capturing_vocabulary(True):
            layer(ids)
    assert recorder.calls == 3
    layer.mark_slot(3, False)
    layer(ids)
    assert recorder.calls == 4
    monkeypatch.undo()
    layer.mark_slot(3, True)
    layer(ids)
    assert recorder.calls == 5, "a writer that fills slots by itself says so"
    with capturing_vocabulary(False):
        layer(ids)
    assert recorder.calls == 6, "it says nothing of steps that are not captured"
    layer.set_mapping(without := Recorder([-1] * 6))
    layer(ids)
    assert without.calls == 0


def test_a_returned_tensor_is_honoured(lora_config) -> None:
    class OutOfPlace(Recorder):
        def add_lora_embedding(self, y, x, b, **kwargs):
            return y + 1

    layer, _ = embedding(lora_config(), SLOTS)
    layer.set_mapping(OutOfPlace(SLOTS[:4]))
    ids = torch.tensor(IDS).view(2, 3)
    difference = (layer(ids) - layer.base_layer(ids)).view(6, DIM)
    torch.testing.assert_close(difference, torch.tensor([1.0, 1, 1, 1, 0, 0]).unsqueeze(1).expand(6, DIM))


def test_what_one_thread_captures_says_nothing_of_another(monkeypatch) -> None:
    monkeypatch.setattr(utils, "is_being_captured", lambda tensor: True)
    tensor = torch.zeros(1)
    with ThreadPoolExecutor(1) as other, capturing_vocabulary(False):
        assert not utils.has_vocabulary_work({0}, tensor)
        assert other.submit(utils.has_vocabulary_work, set(), tensor).result()
    assert utils.has_vocabulary_work(set(), tensor)
