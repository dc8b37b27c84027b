"""What every rank of a tensor-parallel group runs: each layer beside the same layer on one rank.

Ranks may be threads, so that one at a time draws random numbers.
"""

import threading
from collections.abc import Callable

import torch
from layer_cases import (
    ALONE,
    DIM,
    IN,
    LINEAR,
    MIXED,
    NEVER_SHARDED,
    ORG,
    VOCAB,
    assert_close,
    config_for,
    embedding_layer,
    expected_class,
    fill,
    joined,
    linear_layer,
    logits_layer,
    random_pair,
    use,
    wrapper_for,
)
from torch import Tensor

from punica.parallel import (
    LogitsProcessor,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from tests.ops.helpers import captured

NAMES = [
    *(f"{name}/plain" for name in LINEAR),
    *(f"{name}/sharded" for name in LINEAR if name not in NEVER_SHARDED),
    *(f"{layer}/{kind}" for layer in ("embedding", "logits") for kind in ("plain", "sharded")),
]


DRAWING = threading.Lock()


def check(rank: int, device_type: str = "cpu", dtype_name: str = "float32") -> dict[str, str]:
    """Run every check on this rank of the current group; name -> what was wrong."""
    device = device_type
    if device_type == "cuda":
        torch.cuda.set_device(rank)
        device = f"cuda:{rank}"
    dtype = getattr(torch, dtype_name)
    found = {}
    for name in NAMES:
        layer, kind = name.split("/")
        checks: dict[str, Callable[..., None]] = {"embedding": check_embedding, "logits": check_logits}
        try:
            checks.get(layer, check_linear)(layer, kind == "sharded", device, dtype)
        except AssertionError as error:
            found[name] = str(error) or repr(error)
    return found


def check_graph(rank: int) -> bool:
    """A column and a row layer, fully sharded, in one CUDA graph with their collectives; adapters change afterwards."""
    torch.cuda.set_device(rank)
    device = f"cuda:{rank}"
    torch.manual_seed(4)
    config = config_for(torch.bfloat16, fully_sharded_loras=True)
    wrapper = wrapper_for(config, device)
    layers = [linear_layer(LINEAR[name], config, device)[0] for name in ("column-gathered", "row-whole-input")]
    for layer in layers:
        layer.set_mapping(wrapper)
    use(wrapper, MIXED)
    x = torch.randn(len(MIXED), IN, device=device, dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        return [layer(x) for layer in layers]

    graph, outputs = captured(run)  # after a step that connects the ranks
    changed = True
    for slots, swap in ((MIXED, {}), (MIXED[::-1], {0: 1}), ([-1] * len(MIXED), {}), (MIXED, {2: 8, 1: 3})):
        before = [output.clone() for output in outputs]
        for slot, size in swap.items():
            for layer in layers:
                fill(layer, slot, [random_pair(size, IN, 12)])
        use(wrapper, slots)
        graph.replay()
        for output, expected in zip(outputs, run(), strict=True):
            assert_close(output, expected)
        if swap:
            changed &= not any(torch.equal(*pair) for pair in zip(outputs, before, strict=True))
    return changed


def check_linear(name: str, sharded: bool, device: str, dtype: torch.dtype) -> None:
    case = LINEAR[name]
    together, alone = (steps_of(name, sharded, device, dtype, place) for place in (None, ALONE))
    gathered = [tensor_model_parallel_all_gather(output.unsqueeze(0), dim=0) for output in together]
    for outputs, expected in zip(gathered, alone, strict=True):
        assert_close(joined(list(outputs), case.pieces), expected)


def steps_of(name: str, sharded: bool, device: str, dtype: torch.dtype, place: dict[str, int] | None) -> list[Tensor]:
    """Three steps: adapters of all ranks; no adapter at all; after small and large ranks changed places."""
    case = LINEAR[name]
    config = config_for(dtype, fully_sharded_loras=sharded and place is None)
    with DRAWING:
        torch.manual_seed(1)
        layer, _ = linear_layer(case, config, device, place)
        x = torch.randn(len(MIXED), IN).to(device, dtype)
        ranks = {0: 1, 2: 8, 1: 3}
        changed = {slot: [random_pair(rank, IN, size) for size in case.sizes] for slot, rank in ranks.items()}
    assert type(layer) is expected_class(case, sharded and place is None)
    wrapper = wrapper_for(config, device)
    layer.set_mapping(wrapper)
    if case.cut_input and place is None:
        x = x.chunk(get_tensor_model_parallel_world_size(), dim=-1)[get_tensor_model_parallel_rank()].contiguous()
    outputs = []
    for slots, changes in ((MIXED, {}), ([-1] * len(MIXED), {}), (MIXED, changed)):
        for slot, pairs in changes.items():
            fill(layer, slot, pairs)
        use(wrapper, slots)
        outputs.append(layer(x.clone()))
    return outputs


def check_embedding(name: str, sharded: bool, device: str, dtype: torch.dtype) -> None:
    """With adapters, 1-D; without, 2-D (all ids but the first)."""
    ids, found = torch.tensor([0, 19, 7, 14, 15, 3, 8], device=device), []
    for place in ({}, ALONE):
        config = config_for(dtype, fully_sharded_loras=sharded)
        with DRAWING:
            torch.manual_seed(2)
            layer, _ = embedding_layer(config, device, **place)
        wrapper = wrapper_for(config, device)
        layer.set_mapping(wrapper)
        use(wrapper, MIXED, ORG)
        flat = layer(ids)
        use(wrapper, [-1] * 6, ORG)
        plain = layer(ids[1:].view(2, 3))
        assert plain.shape == (2, 3, DIM)
        found.append((flat, plain))
    for output, expected in zip(*found, strict=True):
        assert_close(output, expected)
    assert not torch.equal(flat[1:].view(2, 3, DIM), plain)


def check_logits(name: str, sharded: bool, device: str, dtype: torch.dtype) -> None:
    hidden = torch.linspace(-2, 2, len(MIXED) * DIM, device=device).view(-1, DIM).to(dtype)

    def logits_of(all_gather: bool, place: dict[str, int]) -> Tensor | None:
        config = config_for(dtype, fully_sharded_loras=sharded)
        processor = LogitsProcessor(VOCAB, scale=0.5, soft_cap=2.0)
        processor.use_all_gather = all_gather
        with DRAWING:
            torch.manual_seed(3)
            layer, head, _ = logits_layer(config, device, processor=processor, **place)
        assert (layer.sharded_to_full_mapping_gpu is None) == bool(place)
        wrapper = wrapper_for(config, device)
        layer.set_mapping(wrapper)
        use(wrapper, MIXED)
        if place:
            processor._gather_logits = lambda logits: logits  # one rank beside the group
        return layer(head, hidden)

    expected, everywhere, at_root = logits_of(True, ALONE), logits_of(True, {}), logits_of(False, {})
    assert expected is not None
    assert expected.shape == (len(MIXED), VOCAB)
    for found, here in ((everywhere, True), (at_root, get_tensor_model_parallel_rank() == 0)):
        assert (found is not None) == here
        if found is not None:
            assert_close(found, expected)
