"""Secrets are hidden from those who look from afar, in whatever text they stand."""

from __future__ import annotations

import pytest

from ajet_trainer.runs.hidden import Hidden


@pytest.mark.parametrize(("text", "shown"), [
    ("http://u:p@h/x", "http://***@h/x"), ("http://u:p@ss@h/x", "http://***@h/x"), ("http://u:p/ss@h", "http://***@h"),
    ("postgres://u:p#a?b@h/db and more", "postgres://***@h/db and more"), ("'http://u:p@h' b@c", "'http://***@h' b@c"),
    ("x-api-key: abcdef", "x-api-key: ***"), ("http://h/?api_key=abcdef&n=1", "http://h/?api_key=***&n=1"),
    ('{"password": "abcdef"}', '{"password": "***"}'), ("Authorization: Bearer abc", "Authorization: Bearer ***"),
    ("sk-" + "a" * 20, "***"), ("max_tokens: 4096", "max_tokens: 4096"), ("the token is 7", "the token is 7"),
])  # fmt: skip
def test_what_is_hidden(text: str, shown: str) -> None:
    assert Hidden({}).text(text) == shown
    assert Hidden({}).value({"a": [text, 1]}) == {"a": [shown, 1]}
