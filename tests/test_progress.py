"""Progress of a loop: lines where standard error is a file, a bar where it is a terminal."""

import sys

import pytest

from punica import progress


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert list(progress.shown("abc", "short", "letter")) == [*"abc"]
    clock = iter(range(0, 100, 4))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    assert list(progress.shown("abcdefg", "reading", "letter")) == [*"abcdefg"]
    assert capsys.readouterr().err == "reading: 3 of 7 letters\nreading: 6 of 7 letters\n"


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setattr(progress, "BAR_S", 0.0)
    monkeypatch.setattr(progress, "LINE_S", 0.0)
    assert list(progress.shown("abc", "reading", "letter")) == [*"abc"]
    shown = capsys.readouterr().err
    assert "reading: 100%" in shown
    assert "3 letters" not in shown
