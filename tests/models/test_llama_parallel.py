"""Llama and its relatives unchanged on 1, 2 and 4 ranks: logits are Hugging Face's, with any launcher."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config

from punica.models import LlamaForCausalLM
from punica.parallel import spawn_tensor_parallel
from tests.models.moe_world import CausalAttention

ROOT = Path(__file__).resolve().parents[2]
IDS = [5, 0, 76, 31, 31, 2, 64, 17, 8]
# 4 heads and 2 kv heads, so that 4 ranks replicate the kv heads; a vocabulary that needs padding
SIZES = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 96, "vocab_size": 77, "initializer_range": 0.2,
}  # fmt: skip
VARIANTS = {
    "plain": {},
    "tied embeddings": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "qwen2": {"config_class": Qwen2Config},
    "qwen3": {"config_class": Qwen3Config, "head_dim": 24},
}


def logits_of(model: LlamaForCausalLM) -> Tensor:
    ids = torch.tensor(IDS)
    with torch.inference_mode():
        return model.compute_logits(model(ids, torch.arange(len(ids)), CausalAttention())).clone()


def on_rank(rank: int, folders: list[str]) -> tuple[list[Tensor], Tensor, tuple[int, int]]:
    """Logits of each checkpoint, logits with random weights, and this rank's heads."""
    loaded = []
    for folder in folders:
        model = LlamaForCausalLM(folder)
        model.load_weights(folder)
        loaded.append(logits_of(model))
    model.init_random_weights(3)
    attention = model.model.layers[0].self_attn
    return loaded, logits_of(model), (attention.num_heads, attention.num_kv_heads)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A checkpoint of each variant, with norms and biases away from their neutral initial values."""
    made = []
    for name, changes in VARIANTS.items():
        torch.manual_seed(2)
        fields = {**SIZES, **changes}
        model = transformers.AutoModelForCausalLM.from_config(fields.pop("config_class", LlamaConfig)(**fields))
        for key, parameter in model.named_parameters():
            if "norm" in key or key.endswith("bias"):
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
        made.append(tmp_path_factory.mktemp(name.replace(" ", "_")))
        model.save_pretrained(made[-1])
    return made


def hugging_face(folder: Path) -> Tensor:
    with torch.inference_mode():
        return transformers.AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([IDS])).logits[0]


@pytest.mark.parametrize(
    ("tp_size", "heads"),
    [(1, (4, 2)), pytest.param(2, (2, 1), marks=pytest.mark.slow), pytest.param(4, (1, 1), marks=pytest.mark.slow)],
    ids=["tp1", "tp2", "tp4"],
)
def test_logits_equal_hugging_face(folders: list[Path], tp_size: int, heads: tuple[int, int]) -> None:
    alone = on_rank(0, [str(folder) for folder in folders])
    ranks = [alone]
    if tp_size > 1:
        ranks = spawn_tensor_parallel(on_rank, tp_size, [str(f) for f in folders], backend="gloo")
    expected = [hugging_face(folder) for folder in folders]
    assert all(logits.std() > 0.5 for logits in expected)  # the comparison below is between numbers of this size
    for loaded, random, rank_heads in ranks:
        assert rank_heads == heads
        for found, logits in zip(loaded, expected, strict=True):
            torch.testing.assert_close(found, logits, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(random, alone[1], atol=1e-4, rtol=1e-4)


def torchrun(ranks: int, program: Path, *arguments: str) -> str:
    """Standard output of ranks that are started the way a user does."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--log-dir", str(program.parent / "logs")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [*command, str(program), *arguments], capture_output=True, text=True, env=environment, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


TORCHRUN_PROGRAM = """
import json, sys
from pathlib import Path
import torch
import torch.distributed as dist
from test_llama_parallel import logits_of
from punica.models import LlamaForCausalLM
from punica.parallel import init_tensor_parallel

with init_tensor_parallel() as group:
    model = LlamaForCausalLM(sys.argv[1])
    model.load_weights(sys.argv[1])
    Path(sys.argv[2], str(group.rank)).write_text(json.dumps([group.world_size, logits_of(model).tolist()]))
assert not dist.is_initialized()
"""


@pytest.mark.slow
def test_torchrun(folders: list[Path], tmp_path: Path) -> None:
    program, answers = tmp_path / "two_ranks.py", tmp_path / "answers"
    answers.mkdir()
    program.write_text(f"import sys\nsys.path.append({str(Path(__file__).parent)!r})\n" + TORCHRUN_PROGRAM)
    torchrun(2, program, str(folders[0]), str(answers))
    alone = on_rank(0, [str(folders[0])])[0][0]
    for rank in ("0", "1"):
        world_size, logits = json.loads((answers / rank).read_text())
        assert world_size == 2
        torch.testing.assert_close(torch.tensor(logits), alone, atol=1e-4, rtol=1e-4)


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
