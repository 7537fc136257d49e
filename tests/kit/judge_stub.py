"""A model that judges, scripted: an OpenAI-compatible endpoint in a thread."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit.http_server import Heard, JsonServer, Say

Answers = Callable[[dict[str, Any]], Any]
"""Gets what is judged, by label; returns the verdicts by label, another text, or an HTTP status."""


class JudgeStub:
    """`url` is its base URL; `asked` has the bodies of requests. `answers` may be replaced."""

    def __init__(self, url: str, answers: Answers) -> None:
        self.url, self.answers = url, answers
        self.asked: list[dict[str, Any]] = []
        self.models = ["grader"]


def shown_in(body: dict[str, Any]) -> dict[str, Any]:
    """The object that a request has in its fence."""
    found: dict[str, Any] = json.loads(re.split(r"\nDATA-\w+\n", body["messages"][1]["content"])[1])
    return found


@contextmanager
def judging(answers: Answers) -> Iterator[JudgeStub]:
    """``with judging(lambda items: {label: 1.0 for label in items}) as model``"""

    def answer(heard: Heard) -> Say:
        if heard.method == "GET":
            return Say(200, {"data": [{"id": name} for name in stub.models]})
        stub.asked.append(heard.body)
        found = stub.answers(shown_in(heard.body))
        if isinstance(found, int):
            return Say(found, {"error": {"message": "no"}})
        text = found if isinstance(found, str) else json.dumps(found)
        return Say(200, {"choices": [{"message": {"content": text}}], "usage": {"total_tokens": 100}})

    with JsonServer(answer) as server:
        stub = JudgeStub(f"{server.url}/v1", answers)
        yield stub
