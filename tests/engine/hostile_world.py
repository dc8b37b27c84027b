"""One engine that serves a good tenant while others try everything, and the PEFT library as judge of what is served."""

import contextlib
import copy
import json
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file

from punica.adapters import LoRARequest, write_random_adapter
from punica.engine import Engine, EngineConfig, Request, SamplingParams
from tests.engine.hostile_cases import CONFIG, ENDLESS, WEIGHTS, all_cases
from tests.world import Backbone

PROMPT, PATIENCE = (3, 1, 4, 1, 5), 10.0  # CPU seconds for one case, which others do not take
CLEAR = ("ValueError", "TypeError", "FileNotFoundError")
BAD = ("raw error", "hang", "state changed", "others disturbed", "served differently")
TARGETS = ("q_proj", "v_proj", "up_proj", "down_proj")


class Arena:
    """The engine, its good tenant, and the judge."""

    def __init__(self, backbone: Backbone, root: Path) -> None:
        self.root = root
        self.base = transformers.LlamaForCausalLM.from_pretrained(backbone.folder).eval()
        self.valid = write_random_adapter(root / "valid", backbone.config, 4, 1, target_modules=TARGETS)
        self.good = LoRARequest("good", 1, backbone.adapters[2].lora_path)
        sizes = EngineConfig(max_batch_size=4, max_model_len=64)
        self.engine = Engine(backbone.model(), sizes.lora_config(8, max_loras=3), sizes)
        self.expected = backbone.generate_merged(PROMPT, 2, 6)

    def state(self) -> tuple:
        manager = self.engine.manager
        return (
            sorted(manager.list_adapters()), list(manager.lora_index_to_id), manager.pinned_adapters,
            dict(self.engine._residency._users), self.engine.blocks.num_free,
            len(self.engine.scheduler.waiting), len(self.engine.scheduler.running),
            [tensor.double().sum().item() for layer in manager.modules.values() for tensor in layer.lora_a_stacked],
        )  # fmt: skip

    def attempt(self, change: Callable[[Path], Any]) -> str:
        """Let a tenant ask for a folder that was changed, beside a request of the good one; return the outcome."""
        folder = self.root / "tenant"
        shutil.copytree(self.valid, folder)
        path = change(folder) or folder
        outcome = self._outcome(path, folder)
        self.engine.manager.remove_adapter(2)
        if folder.is_dir() and not folder.is_symlink():
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
        return outcome

    def _outcome(self, path: str | Path, folder: Path) -> str:
        beside = self.engine.add_request(Request("good", PROMPT, 6, self.good))
        self.engine.step()
        before, asked, refusal, start = self.state(), None, None, time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                params = SamplingParams(max_new_tokens=1, logprobs=20)
                adapter = LoRARequest("tenant", 2, str(path))
                asked = self.engine.add_request(Request("tenant", PROMPT, params, adapter))
            except Exception as error:
                refusal = type(error).__name__, str(error)
            unchanged = asked is not None or self.state() == before
            while self.engine.has_unfinished():
                self.engine.step()
        if time.process_time() - start > PATIENCE:
            return "hang"
        if beside.output_token_ids != self.expected:
            return "others disturbed"
        if not unchanged:
            return "state changed"
        if refusal is not None:
            return "refused" if _is_clear(*refusal) else "raw error"
        result = self.engine.result_of(asked)
        if result.error is not None:
            kind, _, text = result.error.partition(": ")
            return "failed" if _is_clear(kind, text) else "raw error"
        return self._judged(folder, result.logprobs[0])

    def _judged(self, folder: Path, ours: dict[int, float]) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _spare_the_judge(folder)
                judge = peft.PeftModel.from_pretrained(copy.deepcopy(self.base), str(folder)).eval()
            except Exception:
                return "served, PEFT refuses"
        with torch.inference_mode():
            theirs = judge(torch.tensor([PROMPT])).logits[0, -1].float().log_softmax(-1)
        same = torch.allclose(torch.tensor(list(ours.values())), theirs[list(ours)], atol=2e-3, rtol=1e-3)
        blown_up = not torch.isfinite(theirs).all()  # numbers so large that both overflow, each in its own way
        return "served equal" if same or blown_up else "served differently"


def _spare_the_judge(folder: Path) -> None:
    """Name the modules that have tensors, which decide here, and take out what keeps PEFT busy for ever.

    Those are expressions that match no module of the model.
    """
    config = json.loads((folder / CONFIG).read_text())
    for key in ("rank_pattern", "alpha_pattern"):
        if isinstance(config.get(key), dict):
            config[key] = {name: value for name, value in config[key].items() if name not in ENDLESS}
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in load_file(folder / WEIGHTS)}
    (folder / CONFIG).write_text(json.dumps({**config, "target_modules": sorted(modules)}))


def _is_clear(kind: str, text: str) -> bool:
    return kind in CLEAR and ("adapter" in text or "LoRARequest" in text) and len(text) < 4000


CASES = all_cases()
NAMED = [name for name in CASES if name.partition(":")[0] not in ("path", "folder", "file", "config")]


def mutation(draw: random.Random) -> Callable[[Path], None]:
    """Random changes of a valid folder; more than half of them leave config and header readable."""
    kinds = (_named, _named, _data_bytes, _data_bytes, _data_bytes, _any_bytes)
    chosen = [draw.choice(kinds) for _ in range(draw.choice([1, 1, 1, 2, 3]))]

    def apply(folder: Path) -> None:
        for change in chosen:
            with contextlib.suppress(Exception):  # what an earlier change has made unreadable stays as it is
                change(folder, draw)

    return apply


def _named(folder: Path, draw: random.Random) -> None:
    CASES[draw.choice(NAMED)](folder)


def _data_bytes(folder: Path, draw: random.Random) -> None:
    """Other numbers: bits of the data flip, the header stays."""
    data = bytearray((folder / WEIGHTS).read_bytes())
    header = 8 + int.from_bytes(data[:8], "little")
    for _ in range(draw.choice([1, 4, 64])):
        position = draw.randrange(header, len(data))
        data[position] ^= 1 << draw.randrange(8)
    (folder / WEIGHTS).write_bytes(data)


def _any_bytes(folder: Path, draw: random.Random) -> None:
    """Bytes of a file flip, vanish or come twice."""
    file = folder / draw.choice([CONFIG, WEIGHTS])
    data = bytearray(file.read_bytes())
    start = draw.randrange(min(len(data), draw.choice([64, 1000, 1 << 30])))
    length = draw.choice([1, 1, 8, 100])
    kind = draw.randrange(4)
    if kind == 0:
        data[start] = draw.randrange(256)
    elif kind == 1:
        del data[start : start + length]
    elif kind == 2:
        data[start:start] = data[start : start + length]
    else:
        del data[start:]
    file.write_bytes(data)


def bad(outcomes: dict[str, str]) -> dict[str, str]:
    return {name: outcome for name, outcome in outcomes.items() if outcome in BAD}


def try_cases(arena: Arena, names: list[str]) -> dict[str, str]:
    return {name: arena.attempt(CASES[name]) for name in names}


def try_mutations(arena: Arena, count: int, seed: int) -> dict[str, str]:
    return {f"mutation {i}": arena.attempt(mutation(random.Random(f"{seed} {i}"))) for i in range(count)}
