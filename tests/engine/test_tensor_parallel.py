"""The same engine on two tensor-parallel ranks (gloo): every rank generates the tokens of the merged models."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

RANK_PROGRAM = """
import json, sys
import torch.distributed as dist
from punica.adapters import LoRARequest
from punica.engine import Engine, EngineConfig
from punica.models import LlamaForCausalLM
from punica.parallel import TorchDistGroup, set_tensor_parallel_group

job = json.load(open(sys.argv[1]))
rank = int(sys.argv[2])
dist.init_process_group("gloo", init_method=job["store"], rank=rank, world_size=2)
set_tensor_parallel_group(TorchDistGroup(dist.group.WORLD))
model = LlamaForCausalLM(job["folder"])
assert model.num_kv_heads == 1
model.load_weights(job["folder"])
config = EngineConfig(max_batch_size=8, max_model_len=64)
engine = Engine(model, config.lora_config(16), config)
adapters = [LoRARequest(*adapter) if adapter else None for adapter in job["adapters"]]
print(json.dumps(engine.generate(job["prompts"], adapters, job["new"])))
set_tensor_parallel_group(None)  # gloo aborts when the group outlives its process group
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_ranks_equal_merged_models(backbone, mixed_wishes, tmp_path: Path) -> None:
    wishes = mixed_wishes[:8]
    requests = [backbone.adapters.get(wish.adapter_id) for wish in wishes]
    job = {
        "store": (tmp_path / "store").as_uri(),
        "folder": str(backbone.folder),
        "prompts": [wish.prompt for wish in wishes],
        "adapters": [[r.lora_name, r.lora_int_id, r.lora_path] if r else None for r in requests],
        "new": [wish.new for wish in wishes],
    }
    (tmp_path / "job.json").write_text(json.dumps(job))
    command = [sys.executable, "-c", RANK_PROGRAM, str(tmp_path / "job.json")]
    ranks = [subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()  # when one rank fails the other would wait for it
    expected = [backbone.generate_merged(wish.prompt, wish.adapter_id, wish.new) for wish in wishes]
    for process, output in zip(ranks, outputs, strict=True):
        assert process.returncode == 0
        assert json.loads(output.splitlines()[-1]) == expected
