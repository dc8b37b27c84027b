"""API keys: which opens which model, and who may load and unload."""

from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from punica.serve.access import Keys
from punica.serve.catalogue import Catalogue
from punica.serve.errors import ApiError

KEYS = Keys("server", {"tenant-0": "zero", "later": "one"})


@pytest.fixture
def catalogue(world: Any) -> Catalogue:
    return Catalogue("tiny", world.adapters[:2], KEYS, ())


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
    catalogue = Catalogue("tiny", world.adapters[:2], Keys(None, {"tenant-0": "zero"}), ())
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
    from fastapi.testclient import TestClient

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
