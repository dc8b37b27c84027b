"""The package for others: files that cite it agree, the Containerfile names what exists, a release packs a commit."""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

import punica

ROOT = Path(__file__).parents[1]
LOAD = """
import pathlib, sys, kernels, torch
kernel = kernels.get_local_kernel(pathlib.Path(sys.argv[1]))
slots, x = torch.tensor([2, -1, 0, 2, 2]), torch.randn(5, 40)
a, b = torch.randn(3, 8, 40), torch.randn(3, 24, 8)
meta = kernel.LoRAKernelMeta.make(3, 5, "cpu")
meta.prepare_tensors(slots)
wanted = torch.stack([0.5 * b[slot] @ (a[slot] @ row) if slot >= 0 else 0 * b[0, :, 0] for row, slot in zip(x, slots)])
triton, low, plain = torch.zeros(5, 24), torch.zeros(5, 8), torch.zeros(5, 24)
kernel.lora_linear(triton, x, [a], [b], *meta.meta_args(5)[:6], 0.5)
kernel.bgmv_shrink(x, a, low, slots, 0.5)
kernel.bgmv_expand(low, b, plain, slots)
assert torch.allclose(triton, wanted, atol=1e-4) and torch.allclose(plain, wanted, atol=1e-4), (triton, plain, wanted)
print(kernel.__version__, [name for name in sys.modules if name.partition(".")[0] == "punica"])
"""
BUILD = "#!/bin/sh\nmkdir -p outputs/site && echo built > outputs/site/index.html\n"
"""In place of make: `make docs` has tests of its own."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    place = tmp_path / "checkout"
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", place], check=True)
    (place / ".venv").symlink_to(sys.prefix)
    (place / ".git/info/exclude").write_text(".venv\n")
    shutil.copytree(ROOT / ".ci", place / ".ci", dirs_exist_ok=True)  # as it is here, be it committed or not
    author = ["-c", "user.name=t", "-c", "user.email=t"]
    subprocess.run(["git", *author, "commit", "--quiet", "--all", "--allow-empty", "-m", "x"], cwd=place, check=True)
    (tmp_path / "make").write_text(BUILD)
    (tmp_path / "make").chmod(0o755)
    return place


def release(checkout: Path) -> "subprocess.CompletedProcess[str]":
    environment = os.environ | {"PATH": f"{checkout.parent}:{os.environ['PATH']}"}
    return subprocess.run([".ci/release"], cwd=checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_archives_hold_the_commit_and_have_their_checksums(checkout: Path) -> None:
    done = release(checkout)
    assert done.returncode == 0, done.stderr
    target = checkout / "outputs/release"
    sums = [line.split() for line in (target / "SHA256SUMS").read_text().splitlines()]
    assert len(sums) == 4
    assert all(hashlib.sha256((target / name).read_bytes()).hexdigest() == said for said, name in sums)
    source, docs = sorted(target.glob("*.tar.gz"), key=lambda path: "docs" in path.name)
    listed = subprocess.run(["git", "ls-files"], cwd=checkout, capture_output=True, text=True, check=True).stdout
    ours = {name for name in listed.splitlines() if name.startswith("punica/")}
    sdist, wheel = sorted(target.glob("dist/*"), key=lambda path: path.suffix == ".whl")
    with tarfile.open(sdist) as archive, zipfile.ZipFile(wheel) as packed:
        assert ours <= {name.partition("/")[2] for name in archive.getnames()}
        assert ours == {name for name in packed.namelist() if name.startswith("punica/")}
        texts = {name.partition("/")[2]: packed.read(name) for name in packed.namelist() if ".dist-info" in name}
        assert b"punica-serve = punica.serve.cli:main\n" in texts["entry_points.txt"]
    with tarfile.open(source) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    assert held >= {*listed.splitlines(), ".commit.json"}
    with tarfile.open(docs) as archive:
        assert "site/index.html" in archive.getnames()


@pytest.mark.slow
def test_the_folder_of_the_kernels_hub_loads_without_punica(tmp_path: Path) -> None:
    pytest.importorskip("kernels", reason=".ci/run installs it, without its dependencies")
    subprocess.run([ROOT / ".ci/kernels-hub", tmp_path / "hub"], check=True)
    command, environment = [sys.executable, "-c", LOAD, tmp_path / "hub"], os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{punica.__version__} []\n"), done.stderr
    assert len({path.parent.name for path in tmp_path.glob("hub/build/*/metadata.json")}) == 2


def test_uncommitted_changes_are_refused(checkout: Path) -> None:
    (checkout / "README.md").write_text("changed")
    done = release(checkout)
    assert done.returncode == 1
    assert "commit them first" in done.stderr
    assert not (checkout / "outputs").exists()


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_files_that_cite_the_package_agree() -> None:
    citation, project = yaml.safe_load(text_of("CITATION.cff")), tomllib.loads(text_of("pyproject.toml"))["project"]
    zenodo, codemeta = (json.loads(text_of(name)) for name in (".zenodo.json", "codemeta.json"))
    (version,) = {one["version"] for one in (citation, project, zenodo, codemeta)} | {punica.__version__}
    (date,) = {str(citation["date-released"]), zenodo["publication_date"], codemeta["datePublished"]}
    assert f"\n## {version} ({date})\n" in text_of("CHANGELOG.md")
    assert {citation["license"], project["license"], zenodo["license"]} == {"Apache-2.0"}
    assert codemeta["license"].endswith("/Apache-2.0")
    assert len({tuple(one["name"] for one in authors) for authors in (
        citation["authors"], zenodo["creators"], codemeta["author"])}) == 1  # fmt: skip
    (reference,), paper = citation["references"], codemeta["referencePublication"]
    assert reference["identifiers"][0]["value"] == zenodo["related_identifiers"][0]["identifier"] == paper["identifier"]
    assert len(paper["author"]) == len(reference["authors"])
    assert zenodo["description"] == codemeta["description"] == citation["abstract"].strip()
    required = {text.split(">")[0].split(";")[0].strip() for text in project["dependencies"]}
    assert set(codemeta["softwareRequirements"]) == required


def test_the_containerfile_names_packages_targets_and_files_that_exist() -> None:
    text, ignored = text_of("Containerfile"), text_of(".dockerignore").split("\n")
    (fresh,) = re.findall(r"--include=(\S+)", text_of(".ci/fresh"))
    (installed,) = re.findall(r"--no-install-recommends ([\w\- ]+) \$more", text)
    assert sorted(installed.split()) == sorted(fresh.split(","))
    targets = {*re.findall(r"make (\w+)", text), *re.findall(r'CMD \["make", "(\w+)"\]', text)} - {"git"}
    assert targets >= {"setup", "reproduce"}
    assert all(re.search(rf"^{target}:", text_of("Makefile"), re.MULTILINE) for target in targets)
    (copied,) = re.findall(r"^COPY (.+) \./$", text, re.MULTILINE)
    assert all((ROOT / name).is_file() for name in copied.split())
    assert ".git" not in ignored
    assert {".venv", "outputs"} <= set(ignored)
