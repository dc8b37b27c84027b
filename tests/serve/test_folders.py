"""Paths of requests: nothing outside of the allowed folders is opened, or told apart from what does not exist."""

import os
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from punica.serve import access
from punica.serve.access import allowed_folder, allowed_roots
from punica.serve.errors import ApiError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """``allowed/good`` with a file, ``secret`` beside ``allowed``, and links between them."""
    for name in ("allowed/good", "allowed/linked-file", "secret"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("allowed/good", "secret"):
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "allowed/inner").symlink_to(tmp_path / "allowed/good")
    (tmp_path / "allowed/outer").symlink_to(tmp_path / "secret")
    (tmp_path / "allowed/circle").symlink_to(tmp_path / "allowed/circle")
    (tmp_path / "allowed/linked-file/adapter_config.json").symlink_to(tmp_path / "secret/adapter_config.json")
    (tmp_path / "allowed-not").symlink_to(tmp_path / "secret")
    return tmp_path


@pytest.mark.parametrize("name", ["allowed/good", "allowed/inner", "allowed/../allowed/./good", "allowed/good/"])
def test_a_folder_inside_is_its_real_path(home: Path, name: str) -> None:
    assert allowed_folder(f"{home}/{name}", allowed_roots([f"{home}/allowed"])) == f"{home}/allowed/good"


def test_relative_paths_start_at_the_working_directory(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home / "allowed")
    roots = allowed_roots(["."])
    assert allowed_folder("good", roots) == f"{home}/allowed/good"
    with pytest.raises(ApiError) as caught:
        allowed_folder("../secret", roots)
    assert caught.value.status == 403


@pytest.mark.parametrize(
    "path",
    ["{}/secret", "{}/missing", "{}/allowed/../secret", "{}/allowed/outer", "{}/allowed/outer/../secret", "/etc",
     "{}/allowed-not", "{}/allowed/linked-file", "~root", "{}/allowed/\0", "{}/secret/" + "a" * 5000],
)  # fmt: skip
def test_what_is_outside_is_forbidden_whether_it_exists_or_not(home: Path, path: str) -> None:
    with pytest.raises(ApiError) as caught:
        allowed_folder(path.format(home), allowed_roots([f"{home}/allowed"]))
    assert (caught.value.status, caught.value.param) == (403, "lora_path")
    assert "secret/adapter" not in caught.value.message


@pytest.mark.parametrize("name", ["missing", "good/adapter_config.json", "circle"])
def test_no_folder_inside_is_not_found(home: Path, name: str) -> None:
    with pytest.raises(ApiError) as caught:
        allowed_folder(f"{home}/allowed/{name}", allowed_roots([f"{home}/allowed"]))
    assert caught.value.status in (403, 404)


def test_no_roots_and_too_many_entries(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ApiError, match="--allow-folder"):
        allowed_folder(f"{home}/allowed/good", ())
    monkeypatch.setattr(access, "MOST_ENTRIES", 0)
    with pytest.raises(ApiError, match="more than 0 entries"):
        allowed_folder(f"{home}/allowed/good", allowed_roots([f"{home}/allowed"]))


def test_roots_must_be_folders(home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        allowed_roots([f"{home}/nothing"])
    with pytest.raises(NotADirectoryError, match="--allow-folder"):
        allowed_roots([os.fspath(home / "secret/adapter_config.json")])
