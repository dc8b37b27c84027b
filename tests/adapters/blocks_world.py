"""What every rank does with block-diagonal adapters; without PEFT, which takes a process seconds to import."""

from collections import Counter
from pathlib import Path

from managed_world import Ours

from punica.parallel.group import TorchDistGroup

PROMPTS = [[3, 1, 4, 1, 5], [9, 2, 6], [5, 3, 5, 8]]


def serve(rank: int, root: Path, folders: dict[str, Path]) -> dict:
    """One batch with all adapters and one without, plain and fully sharded: logits, collectives and ranks of slots."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> None:
        run = getattr(TorchDistGroup, name)

        def count(*arguments: object) -> object:
            counts[name] += 1
            return run(*arguments)

        setattr(TorchDistGroup, name, count)

    for name in ("all_reduce", "all_gather", "gather"):
        counted(name)
    found = {}
    for kind in ("plain", "fully sharded"):
        ours = Ours(root, folders, fully_sharded_loras=kind == "fully sharded")
        ours.logits(PROMPTS, list(folders))  # loads the adapters, for which the ranks agree
        steps = {}
        for of, names in (("adapters", list(folders)), ("none", [None] * len(PROMPTS))):
            counts.clear()
            steps[of] = ours.logits(PROMPTS, names), dict(counts)
        slots = [ours.manager.lora_index_to_id.index(request.lora_int_id) for request in ours.requests.values()]
        ranks = {name: layer.lora_ranks[:, slots].T.tolist() for name, layer in ours.manager.modules.items()}
        found[kind] = steps, ranks
    return found
