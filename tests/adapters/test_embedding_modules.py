"""Embeddings and heads that carry LoRA: wrapped, loaded, served."""

import pytest
import torch
import torch.nn.functional as F
from adapter_world import Tenants, decode, unchanged
from torch import Tensor, nn

from punica.adapters import LoRAModelManager, LoRARequest
from punica.adapters.write import stage
from punica.config import LoRAConfig
from punica.parallel import LogitsProcessor, ParallelLMHead, ReplicatedLinear, VocabParallelEmbedding
from tests.ops.helpers import write_slot

VOCAB, DIM = 21, 12
ROLES = {"embed_tokens": "input_embeddings", "lm_head": "output_embeddings"}
SIZES = {"embed_tokens": (VOCAB, DIM), "proj": (DIM, DIM), "lm_head": (DIM, VOCAB)}  # in, out


class TinyLM(nn.Module):
    """Embedding, one linear layer, head: `forward` gives logits of every row."""

    embedding_modules = ROLES

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = VocabParallelEmbedding(VOCAB, DIM, padding_size=8)
        self.proj = ReplicatedLinear(DIM, DIM, bias=False, return_bias=False)
        self.lm_head = ParallelLMHead(VOCAB, DIM, padding_size=8)
        self.logits_processor = LogitsProcessor(VOCAB)
        for module in (self.embed_tokens, self.proj, self.lm_head):
            module.weight_loader(
                module.weight, torch.randn(module.weight.shape[0], DIM)[: VOCAB if module is not self.proj else DIM]
            )
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.logits_processor(self.lm_head, torch.tanh(self.proj(self.embed_tokens(ids))))


def tensors(seed: int, rank: int, modules: tuple[str, ...] = tuple(SIZES)) -> dict[str, Tensor]:
    """PEFT-named A and B; those of an embedding have names of their own."""
    generator = torch.Generator().manual_seed(seed)
    named = {}
    for name in modules:
        width, height = SIZES[name]
        kind = "lora_embedding_{}" if name == "embed_tokens" else "lora_{}.weight"
        named[f"base_model.model.{name}.{kind.format('A')}"] = torch.randn(rank, width, generator=generator) / 4
        named[f"base_model.model.{name}.{kind.format('B')}"] = torch.randn(height, rank, generator=generator)
    return named


def manage(model: nn.Module, device: str = "cpu", **config: object) -> LoRAModelManager:
    return LoRAModelManager(model, 4, 16, VOCAB, LoRAConfig(**{"max_lora_rank": 4, **config}), device)


def delta(named: dict[str, Tensor], module: str) -> Tensor:
    """`2 B A` of a module, zero if the adapter has none; scaling 2 is that of `Tenants.write`."""
    found = [t for name, t in named.items() if f".{module}." in name]
    return 2 * found[1] @ found[0] if found else torch.zeros(SIZES[module][::-1])


def merged_logits(model: TinyLM, named: dict[str, Tensor], ids: Tensor) -> Tensor:
    weights = {name: getattr(model, name).weight.clone() for name in ("embed_tokens", "proj", "lm_head")}
    table = weights["embed_tokens"][:VOCAB] + delta(named, "embed_tokens").T
    hidden = torch.tanh(F.embedding(ids, table) @ (weights["proj"] + delta(named, "proj")).T)
    return hidden @ (weights["lm_head"][:VOCAB] + delta(named, "lm_head")).T


ADAPTERS = {1: tensors(1, 4), 2: tensors(2, 1, ("embed_tokens",)), 3: tensors(3, 3, ("lm_head", "proj"))}


@pytest.fixture
def folders(tenants: Tenants) -> Tenants:
    for i, named in ADAPTERS.items():
        tenants.write(i, named, rank=next(iter(named.values())).shape[0])
    return tenants


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits_processor": None}, "head 'lm_head' needs a logits_processor beside it.*'the model' has none"),
        ({"embed_tokens": lambda: nn.Embedding(VOCAB, DIM)}, r"'embed_tokens' of class Embedding.*max_loras=3"),
        ({"embed_tokens": lambda: VocabParallelEmbedding(VOCAB + 1, DIM)}, "has 22 ids, but vocab_size is 21"),
        ({"second": lambda: ParallelLMHead(VOCAB, DIM)}, "head 'second' shares its logits_processor"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_models_that_cannot_be_wrapped(changes, message):
    model = TinyLM()
    model.embedding_modules = {**ROLES, "second": "output_embeddings"}
    for name, build in changes.items():
        setattr(model, name, None if build is None else build())
    before = dict(model.named_modules())
    with pytest.raises(ValueError, match=message):
        manage(model, max_loras=3)
    assert dict(model.named_modules()) == before
    assert set(manage(model, target_modules=["proj"]).modules) == {"proj"}


A_NAME, B_NAME = "base_model.model.embed_tokens.lora_embedding_A", "base_model.model.embed_tokens.lora_embedding_B"
HEAD_B = "base_model.model.lm_head.lora_B.weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({A_NAME: torch.ones(4, VOCAB + 1)}, "vocabulary of 22 ids, the model has 21"),
        ({B_NAME: torch.ones(DIM + 1, 4)}, "'embed_tokens'.*12 rows, got 13"),
        ({HEAD_B: torch.ones(VOCAB - 1, 4)}, "lm_head.*21 rows, got 20"),
        ({A_NAME: torch.full((4, VOCAB), float("inf"))}, "'embed_tokens': A contains NaN or inf"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_bad_adapters_change_nothing(folders, changes, message):
    manager = manage(TinyLM(), max_loras=1)
    manager.set_active_adapters([folders.request(1)], decode(1, 0))
    folders.write(4, ADAPTERS[1] | changes)
    with unchanged(manager), pytest.raises(ValueError, match=message):
        manager.add_adapter(folders.request(4))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_slots_are_reused_without_a_trace(folders, device):
    """On a GPU, where slots are written past `set_lora`, too: the embedding's adapter works, then leaves."""
    with torch.device(device):
        model = TinyLM()
        ids = torch.tensor([3, 4, 20])
        expected = {i: merged_logits(model, {n: t.to(device) for n, t in ADAPTERS[i].items()}, ids) for i in ADAPTERS}
    manager = manage(model, device, max_loras=1)
    for i in (3, 1, 2, 3):
        manager.set_active_adapters([folders.request(i)], decode(i, i, i))
        torch.testing.assert_close(model(ids), expected[i], rtol=1e-3, atol=1e-3)
    assert not manager.modules["embed_tokens"].lora_a_stacked.any()


def test_an_image_holds_embedding_and_head(folders):
    """Packed, they fill a slot with the bits of `set_lora`; and unpacked again they are the adapter that was loaded."""
    manager = manage(TinyLM(), max_loras=2, lora_dtype=torch.float16)
    for i in ADAPTERS:
        manager.remove_all_adapters()
        manager.add_adapter(folders.request(i))
        lora = manager.get_adapter(i)
        staged = stage(manager.modules, lora, torch.float16, pin_memory=False)
        parts = [part for layer in manager.modules.values() for part in layer.slot_parts()]
        write_slot(staged.image, [part.stored().slots for part in parts], [part.ranks for part in parts], 1)
        for part in parts:
            assert torch.equal(part.slots[1], part.slots[0])
            assert part.ranks[1] == part.ranks[0]
        for name, weights in lora.loras.items():
            assert torch.equal(staged.get_lora(name).lora_a, weights.lora_a)
            assert torch.equal(staged.get_lora(name).lora_b, weights.lora_b)


def test_dummies_cover_the_embedding_modules_that_are_asked_for():
    manager = manage(TinyLM(), max_loras=2, max_cpu_loras=4)
    assert set(manager.create_dummy_lora(1, 4).loras) == set(SIZES)
    assert set(manager.create_dummy_lora(1, 4, ["lm_head"]).loras) == {"lm_head", "proj"}
    assert set(manager.create_dummy_lora(1, 4, embedding_modules=[]).loras) == {"proj"}
    with pytest.raises(ValueError, match=r"embedding_modules \['proj'\] are none of the model's"):
        manager.create_dummy_lora(1, 4, ["proj"])
    assert manager.add_dummy_lora(LoRARequest("warm-up", 2, "nowhere"), 4)
    manager.set_adapter_mapping(decode(2, 2))
    ids = torch.tensor([3, 4])
    torch.testing.assert_close(manager.model(ids), merged_logits(manager.model, {}, ids))
