"""Folders of requests: what is outside is not told apart from what does not exist. Keys: who may use and load what."""

import os
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from punica.serve import access
from punica.serve.access import Keys, allowed_folder, allowed_roots
from punica.serve.catalogue import Catalogue
from punica.serve.errors import ApiError


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """``allowed/good`` with a file, ``secret`` beside ``allowed``, and links between them."""
    for name in ("allowed/good", "allowed/linked-file", "allowed-not", "secret"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("allowed/good", "secret"):
        (tmp_path / name / "adapter_config.json").write_text("{}")
    (tmp_path / "allowed/inner").symlink_to(tmp_path / "allowed/good")
    (tmp_path / "allowed/outer").symlink_to(tmp_path / "secret")
    (tmp_path / "allowed/circle").symlink_to(tmp_path / "allowed/circle")
    (tmp_path / "allowed/linked-file/adapter_config.json").symlink_to(tmp_path / "secret/adapter_config.json")
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


# --- keys -------------------------------------------------------------------------------------------------------------

KEYS = Keys("server", {"tenant-0": "zero", "later": "one"})


@pytest.fixture
def catalogue(world: Any) -> Catalogue:
    return Catalogue("tiny", world.adapters[:2], KEYS, (), 128)


@pytest.mark.parametrize(
    ("key", "opened"),
    [("server", ["tiny", "tenant-1"]), ("zero", ["tenant-0"]), ("one", [])],
)
def test_a_key_opens_and_shows_its_models_alone(catalogue: Catalogue, key: str, opened: list[str]) -> None:
    assert [model["id"] for model in catalogue.visible(key)] == opened
    for name in ("tiny", "tenant-0", "tenant-1", "later", "nothing"):
        if name in opened:
            catalogue.find(name, key)
        else:
            with pytest.raises(ApiError) as caught:
                catalogue.find(name, key)
            assert (caught.value.status, caught.value.code) == (404, "model_not_found")


@pytest.mark.parametrize("key", [None, "", "SERVER", "server ", "ü\ud800"])
def test_other_keys_open_nothing(catalogue: Catalogue, key: str | None) -> None:
    for look in (lambda: catalogue.find("tiny", key), lambda: catalogue.visible(key)):
        with pytest.raises(ApiError) as caught:
            look()
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")


@pytest.mark.parametrize("key", ["", " ", " a", "k\n", "\u043a\u043b\u044e\u0447"])
def test_a_key_that_no_header_carries_is_refused(key: str) -> None:
    """An empty one, of an unset variable, would close the server to all."""
    with pytest.raises(ValueError, match="the API key of 'the server' must be printable Latin-1") as caught:
        Keys(key)
    with pytest.raises(ValueError, match="the API key of 'sql' must be printable Latin-1"):
        Keys(None, {"sql": key})
    assert len(key.strip()) < 2 or key not in str(caught.value)


def test_without_a_key_of_the_server_only_keyed_adapters_are_closed(world: Any) -> None:
    catalogue = Catalogue("tiny", world.adapters[:2], Keys(None, {"tenant-0": "zero"}), (), 128)
    assert [model["id"] for model in catalogue.visible(None)] == ["tiny", "tenant-1"]
    assert [model["id"] for model in catalogue.visible("zero")] == ["tiny", "tenant-0", "tenant-1"]
    with pytest.raises(ApiError):
        catalogue.find("tenant-0", None)


@pytest.mark.parametrize("bad", [None, "zero", ""])
def test_loading_needs_the_servers_key(bad: str | None) -> None:
    KEYS.check_manager("server")
    Keys().check_manager(bad)
    with pytest.raises(ApiError, match="may not load"):
        KEYS.check_manager(bad)


@pytest.mark.parametrize("key", [None, "k"])
def test_adapters_with_keys_are_not_loaded_under_other_names(key: str | None) -> None:
    """Else anyone could serve the folder of a keyed adapter under a name without a key."""
    with pytest.raises(ApiError, match="start it with --api-key"):
        Keys(None, {"x": "k"}).check_manager(key)


def test_keys_travel_as_bearer_tokens(world: Any) -> None:
    _, app = world.app(2, keys=KEYS)
    body = {"model": "tenant-0", "prompt": "a", "max_tokens": 1}
    with TestClient(app) as client:
        for header, status in (("Bearer zero", 200), ("bearer zero", 200), ("Bearer server", 404), ("zero", 401)):
            answer = client.post("/v1/completions", json=body, headers={"authorization": header})
            assert answer.status_code == status
        assert client.post("/v1/completions", json=body).status_code == 401
        load = {"lora_name": "x", "lora_path": "/tmp"}
        assert client.post("/v1/load_lora_adapter", json=load).status_code == 401
        assert client.post("/v1/unload_lora_adapter", json={"lora_name": "tenant-0"}).status_code == 401
        assert client.get("/health").status_code == 200
