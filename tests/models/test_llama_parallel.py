"""Llama and its relatives unchanged on 1, 2 and 4 ranks: logits are Hugging Face's, with any launcher."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from punica.models import LlamaForCausalLM
from punica.parallel import spawn_tensor_parallel
from tests.models.moe_world import hugging_face, logits_of, wanted
from tests.models.test_llama import CONFIGS, IDS, make_config

ROOT = Path(__file__).resolve().parents[2]
VARIANTS = {"plain": make_config(), **{name: CONFIGS[name] for name in ("tied", "biases", "qwen2", "qwen3")}}


def on_rank(rank: int, folders: list[str]) -> tuple[list[Tensor], Tensor, tuple[int, int]]:
    loaded = []
    for folder in folders:
        model = LlamaForCausalLM(folder)
        model.load_weights(folder)
        loaded.append(logits_of(model, IDS))
    model.init_random_weights(3)
    attention = model.model.layers[0].self_attn
    return loaded, logits_of(model, IDS), (attention.num_heads, attention.num_kv_heads)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tensor]:
    """Folder of a checkpoint of each variant -> its logits by transformers."""
    made = {}
    for name, config in VARIANTS.items():
        reference, folder = hugging_face(config), tmp_path_factory.mktemp(name)
        reference.save_pretrained(folder)
        made[str(folder)] = wanted(reference, IDS)
    return made


@pytest.mark.slow
@pytest.mark.parametrize(("tp_size", "heads"), [(2, (2, 1)), (4, (1, 1))], ids=["tp2", "tp4"])
def test_logits_equal_hugging_face(saved: dict[str, Tensor], tp_size: int, heads: tuple[int, int]) -> None:
    _, alone, _ = on_rank(0, [*saved])
    for loaded, random, rank_heads in spawn_tensor_parallel(on_rank, tp_size, [*saved], backend="gloo"):
        assert rank_heads == heads
        torch.testing.assert_close(loaded, [*saved.values()], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(random, alone, atol=1e-4, rtol=1e-4)


def torchrun(ranks: int, program: Path) -> str:
    """Standard output of ranks that are started the way a user does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--log-dir", str(program.parent / "logs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(program)], capture_output=True, text=True, env=environment, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_program_of_the_docs_gives_the_same_tokens_on_one_and_two_ranks(tmp_path: Path) -> None:
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    match = re.search(r"cat > two_ranks\.py <<'EOF'\n(.*?)\nEOF\n\$ (.*?)\n", page, flags=re.DOTALL)
    assert match, "docs/distributed.md has no two_ranks.py"
    assert match.group(2) == "torchrun --nproc-per-node 2 two_ranks.py"
    program = tmp_path / "two_ranks.py"
    program.write_text(match.group(1))
    tokens = json.loads(torchrun(2, program))
    assert [len(generated) for generated in tokens] == [8, 8]
    assert tokens == json.loads(torchrun(1, program))
