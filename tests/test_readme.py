"""README and pages of docs/: the quickstart runs as written, and every command that they name exists."""

import ast
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.harness.catalogue import experiments
from experiments.harness.settings import keys_read, refuse_unread
from punica.adapters import write_random_adapter
from tests.world import BEGIN, END, VOCAB, byte_tokenizer, write_backbone

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = "\n".join([README, *(path.read_text(encoding="utf-8") for path in sorted(ROOT.glob("docs/*.md")))])


@pytest.mark.slow
def test_quickstart_with_a_checkpoint_runs_as_written(tmp_path: Path) -> None:
    """In a folder with the names of the first block: a tiny Llama with a tokenizer, and two adapters."""
    ends = {"vocab_size": VOCAB, "bos_token_id": BEGIN, "eos_token_id": END}
    backbone = write_backbone(tmp_path / "checkpoint", {}, byte_tokenizer(), seed=1, **ends)
    for rank, name in ((4, "sql"), (8, "poet")):
        write_random_adapter(tmp_path / "adapters" / name, backbone.config, rank=rank, seed=rank)
    code = "".join(re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL))
    epilogue = """
wanted = torch.stack([b[slot] @ (a[slot] @ row) if slot >= 0 else 0 * b[0, :, 0] for slot, row in zip(slots, x)])
assert y.allclose(wanted, atol=1e-3)
model.model.layers[0].mlp.up_proj = linear
assert not logits.allclose(model(torch.tensor([[1, 2, 3]])).logits)
print(repr([(result.text, result.token_ids, result.finish_reason) for result in results]))"""
    command, environment = [sys.executable, "-c", code + epilogue], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    results = ast.literal_eval(done.stdout.strip().splitlines()[-1])
    tokenizer = byte_tokenizer()
    assert len({text for text, _, _ in results}) == 3, "the adapters make no difference"
    for text, tokens, reason in results:
        assert text == tokenizer.decode(tokens, skip_special_tokens=True)
        assert (reason, len(tokens)) == ("length", 32) or (reason, tokens[-1]) == ("stop", END)
        assert f"{reason} {text}" in done.stdout


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, flags=re.MULTILINE))
    named = set(re.findall(r"(?:`|^\$ )make ([a-z-]+)", PAGES, flags=re.MULTILINE))
    assert len(named) > 5
    assert named <= targets


def command_lines() -> list[tuple[str, list[str]]]:
    """Parse every `$ make reproduce ARGS="figures=..."` and `$ python -m experiments.<figure> ...`: name, overrides."""
    command = r"^\$ (?:make (reproduce) ARGS=(?=.figures)|python -m experiments\.)(.*)$"
    lines = re.findall(command, PAGES, flags=re.MULTILINE)
    found = []
    for command, rest in lines:
        words = shlex.split(rest, comments=True)
        given = words[0].split() if command else words[1:]
        found.append((command or words[0], [word for word in given if not word.startswith("--")]))
    return found


def test_no_command_gives_figures_what_they_do_not_read() -> None:
    known = {experiment.name: experiment for experiment in experiments()}
    checked = 0
    for name, given in command_lines():
        if name == "reproduce":
            (chosen,) = (word for word in given if word.startswith("figures="))
            names = chosen.removeprefix("figures=[").strip("]").split(",")
            assert [len(experiments([name])) for name in names] == [1] * len(names), f"a prefix of several: {chosen}"
            reads = set.union(*map(keys_read, experiments(names)))
            refuse_unread(given, {"figures", *reads}, "README")
        elif name in known:
            refuse_unread([word for word in given if word != "job"], keys_read(known[name]), "README")
        checked += name == "reproduce" or name in known
    assert checked >= 12
