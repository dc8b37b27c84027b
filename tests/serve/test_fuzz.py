"""What the trial `api_bodies` of `tests/reliability` calls a fault of an answer."""

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")
pytest.importorskip("hypothesis", reason="needs the hypothesis package (extra dev)")

from tests.serve.random_requests import fault_of


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (500, b'{"error": {"message": "m", "type": "t", "param": null, "code": null}}'),
        (400, b'{"error": {"message": "m"}}'),
        (404, b'{"error": {"message": "", "type": "t", "param": null, "code": null}}'),
        (200, b"data: {}\n\n"),
        (200, b'data: {"error":{"type":"server_error"}}\n\ndata: [DONE]\n\n'),
    ],
)
def test_wrong_answers_are_told(status: int, content: bytes) -> None:
    assert fault_of(status, content)
