"""docs/: links resolve, Python blocks run as written, tables and API pages are complete, the site builds."""

import ast
import importlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote

import pytest

from experiments.facts.systems import SYSTEMS
from experiments.harness.catalogue import experiments
from experiments.measure.records import read_rows
from experiments.simulator.other_systems import SCHEDULING_RULES
from experiments.workload import WORKLOADS
from punica.engine import compile_ahead
from punica.layers import selection
from punica.models.families import DENSE
from punica.scheduling import ADMISSION_RULES
from punica.serve import cli
from punica.wrapper import BACKENDS

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
LINKING = [*sorted(ROOT.glob("*.md")), *PAGES, ROOT / "paper_results/README.md"]
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^()\s]+)\)")
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
REGISTRIES = (BACKENDS, WORKLOADS, ADMISSION_RULES, SCHEDULING_RULES, SYSTEMS)
NOT_PUBLIC = {
    "Registry": "punica.wrapper imports it to make one", "lazily": "offers names of other rooms",
    "offer_module": "offers paths",
    "sgmv_": "methods of PaperOps", "bgmv_": "likewise",
}  # fmt: skip


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    heads = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text("utf-8")), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def broken_links(page: Path) -> Iterator[str]:
    """Yield the links of a page that lead nowhere; those with a scheme are not followed."""
    for link in LINK.findall(FENCED.sub("", page.read_text("utf-8"))):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if "://" in link or path.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            yield link


def test_links_lead_somewhere(tmp_path: Path) -> None:
    assert [(page.name, link) for page in LINKING for link in broken_links(page)] == []
    (tmp_path / "b.md").write_text("# A head: `x`\n```\n# none\n```\n")
    (tmp_path / "a.md").write_text("[1](b.md#a-head-x) [2](c.md) [3](b.md#none) [4](#gone) [5](https://x.y)\n")
    assert list(broken_links(tmp_path / "a.md")) == ["c.md", "b.md#none", "#gone"]


@pytest.fixture
def untouched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What examples register is gone afterwards; files that they write are temporary."""
    for registry in REGISTRIES:
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    monkeypatch.setattr(selection, "LORA_CLASSES", selection.LORA_CLASSES)
    kept = dict(DENSE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield
    DENSE.clear()
    DENSE.update(kept)


def run_blocks(page: str) -> dict[str, Any]:
    """Run the Python blocks of a page in order, in one namespace, and return that."""
    names: dict[str, Any] = {"__name__": page}
    text = (DOCS / page).read_text(encoding="utf-8")
    for match in BLOCK.finditer(text):
        line = text.count("\n", 0, match.start(1))
        exec(compile("\n" * line + match[1], DOCS / page, "exec"), names)
    return names


SLOW_PAGES = {"extending.md"}
WITH_CODE = [path.name for path in sorted(DOCS.glob("*.md")) if BLOCK.search(path.read_text(encoding="utf-8"))]


@pytest.mark.usefixtures("untouched")
@pytest.mark.parametrize(
    "page", [pytest.param(name, marks=pytest.mark.slow if name in SLOW_PAGES else ()) for name in WITH_CODE]
)
def test_python_blocks_run_as_written(page: str) -> None:
    names = run_blocks(page)
    if page == "index.md":
        tokens = [tuple(result.token_ids) for result in names["results"]]
        assert [len(one) for one in tokens] == [8] * 4
        assert len(set(tokens)) == 4, "the adapters make no difference"


def test_files_that_pages_name_exist() -> None:
    """But those that a page about extensions has its reader write."""
    named = {
        file for page in LINKING if page.name not in ("CHANGELOG.md", "extending.md")
        for file in re.findall(r"`((?:tests|punica|experiments)/[\w/]+\.\w+)`", page.read_text(encoding="utf-8"))
    } | set(re.findall(r"`(tests/[\w/]+\.py)`", (DOCS / "extending.md").read_text(encoding="utf-8")))  # fmt: skip
    assert len(named) > 20
    assert [file for file in sorted(named) if not (ROOT / file).exists()] == []


def test_every_experiment_has_a_row() -> None:
    text = (DOCS / "running.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| [^|]+ \| `(\w+)` \|", text, flags=re.MULTILINE)
    assert sorted(listed) == sorted(one.name for one in experiments())


def public_names(package: Path) -> set[str]:
    """Names that the ``__init__`` of a package imports from this library or defines."""
    found = set()
    for node in ast.parse(package.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("punica."):
            found |= {alias.asname or alias.name for alias in node.names}
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
    return {name for name in found if not name.startswith(("_", *NOT_PUBLIC))}


def test_api_pages_have_every_public_name() -> None:
    for package in sorted(path.parent for path in ROOT.glob("punica/*/__init__.py") if path.parent.name != "serve"):
        page = (DOCS / "api" / f"{package.name}.md").read_text("utf-8")
        entries = re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)
        assert public_names(package / "__init__.py") <= {entry.rpartition(".")[2] for entry in entries}
        for entry in entries:
            home, _, name = entry.rpartition(".")
            needs_triton = home.endswith(("triton_ops", "vllm.ops"))
            assert needs_triton or hasattr(importlib.import_module(home), name) or importlib.import_module(entry), entry


def imported(page: Path) -> Iterator[tuple[str, str]]:
    """Yield package and name of everything that the Python blocks of a page import from this library."""
    for block in BLOCK.findall(page.read_text(encoding="utf-8")):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("punica."):
                yield from ((str(node.module), alias.name) for alias in node.names)


def test_api_pages_have_what_pages_import_and_the_classes_of_a_backend() -> None:
    pages = [page.read_text(encoding="utf-8") for page in DOCS.glob("api/*.md")]
    entries = {entry for page in pages for entry in re.findall(r"^::: .*\.(\w+)$", page, re.MULTILINE)}
    backend = {"Ops", "TorchOps", "TritonOps", "LoRAWeights", "Stack"}
    used = {name for page in DOCS.glob("*.md") for package, name in imported(page)
            if not isinstance(getattr(importlib.import_module(package), name), ModuleType)}  # fmt: skip
    assert len(used) > 20
    assert {name for name in used | backend if not name.startswith(tuple(NOT_PUBLIC))} <= entries


def test_every_option_of_the_server_that_a_page_names_exists() -> None:
    option = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
    named = set(option.findall((DOCS / "deployment.md").read_text(encoding="utf-8")))
    known = {name for made in (cli.parser(), compile_ahead.parser()) for name in option.findall(made.format_help())}
    assert len(named) > 15
    assert named <= known


@pytest.mark.slow
def test_the_figure_that_a_page_adds_is_measured_and_drawn(tmp_path: Path) -> None:
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    script = next(block for block in BLOCK.findall(text) if "EXPERIMENT = main(Copy" in block)
    (settings,) = re.findall(r"```yaml\n(.*?)```", text, flags=re.DOTALL)
    for folder in ("experiments", "conf"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in ("punica", "paper_results"):
        (tmp_path / folder).symlink_to(ROOT / folder)
    (tmp_path / "experiments/ext_copy.py").write_text(script)
    (tmp_path / "conf/figure/ext_copy.yaml").write_text(settings)
    command = [sys.executable, "-m", "experiments.ext_copy", "scale=smoke", "hardware=cpu"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (rows,) = tmp_path.glob("outputs/cpu/smoke/rows/ext_copy.csv")
    assert {row.batch_size for row in read_rows(rows)} == {1, 16}
    assert list(tmp_path.glob("outputs/cpu/smoke/figures/ext_copy.png"))


@pytest.mark.slow
def test_the_site_builds_with_addresses_of_files_and_no_script_from_elsewhere(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="needs the extra docs: pip install 'punica-lora[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", DOCS / "site/mkdocs.yml", "-d", tmp_path]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    pages = {page.relative_to(tmp_path).as_posix(): page.read_text("utf-8") for page in tmp_path.rglob("*.html")}
    assert {page.relative_to(DOCS).with_suffix(".html").as_posix() for page in PAGES} < set(pages)
    del pages["404.html"]  # a server's, whose addresses begin at its root
    for page, text in pages.items():
        plain = re.sub(r"<(pre|code)\b.*?</\1>", "", text, flags=re.DOTALL)
        for address in re.findall(r"""(?:href|src)=["']?([^"'> ]+)""", plain):
            path = unquote(address.partition("#")[0])
            if not re.match(r"\w+:", address):
                assert not path or (tmp_path / page).parent.joinpath(path).is_file(), (page, address)
        assert not re.search(r"<(script|link|img)[^>]*(src|href)=.?https?:", text), page
        assert "iframe-worker.js" in text
        assert text.count("<img") > 5 or not page.startswith("results-")
    assert 'src="figures/h200/hero.png"' in pages["index.html"]
