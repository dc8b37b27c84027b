"""Events of a stream: what is encoded once is the same as each event encoded whole."""

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extra serve: pip install 'punica[serve]'")

from punica.serve.forms import Candidate, ChatForm, CompletionForm, Position, TextEvents, event, usage


@pytest.mark.parametrize("form", [CompletionForm(), ChatForm()], ids=["completion", "chat"])
@pytest.mark.parametrize("extra", [{}, {"usage": None}], ids=["plain", "usage"])
def test_an_event_is_its_object_encoded_whole(form: Any, extra: dict[str, Any]) -> None:
    head: dict[str, Any] = {"id": "x", "model": 'a"", ""', **extra}
    events = TextEvents(form, head)

    def check(index: int, text: str, logprobs: Any = None, reason: str | None = None) -> None:
        found = events.of(index, text, logprobs, reason)
        assert found == event({**head, "choices": [form.delta(index, text, logprobs, reason)]})
        assert json.loads(found.removeprefix(b"data: "))["model"] == head["model"]

    for index, text in [(0, "a"), (1, '"" \\ \n\x00'), (0, "größe ☃ 𝄞"), (11, "</s>"), (1, "")]:
        check(index, text)
    check(1, "", reason="stop")
    check(0, "a", form.logprobs([Position(0, [Candidate("a", -1.0, b"a", "a")])], 1))
    if extra:
        for count in range(3):
            head = {**head, "usage": usage(5, count)}
            events.set_usage(usage(5, count))
            check(0, "a")
            check(0, "b")
