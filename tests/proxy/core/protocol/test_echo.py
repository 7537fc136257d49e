"""``echo``: the prompt stands before the answer again, and its logprobs are not taken for the answer's."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.proxy.core.protocol.answers import (
    COMPLETIONS,
    completion_event,
    document,
    dump,
    event,
    ids_of,
    reasons,
    stream,
)

ASKED = {"prompt": 'a "é"\n', "echo": True}
STREAMED = {**ASKED, "stream": True}


def part(text: str, ids: list[int], rows: list[float | None], **more: Any) -> dict[str, Any]:
    return completion_event(text, ids=ids, logprobs=rows, **more)


FIRST = part("x", [5], [None, -2.0, -0.5], prompt=[1, 2])
NEXT = part("y", [6, 7], [-0.25, -0.125])
END = part("", [], [], finish="stop")


def moved(shown: dict[str, Any], offsets: list[int]) -> dict[str, Any]:
    shown["choices"][0]["logprobs"]["text_offset"] = offsets
    return shown


def test_the_prompt_comes_before_the_first_words_of_a_stream() -> None:
    seen, outcomes = stream(COMPLETIONS, [FIRST, NEXT, END, "[DONE]"], STREAMED)
    assert seen == [
        completion_event('a "é"\nx', prompt=[1, 2]), completion_event("y"), completion_event("", finish="stop"),
        "[DONE]",
    ]  # fmt: skip
    assert ids_of(outcomes) == [(5, 6, 7)]
    assert outcomes[0].logprobs == (-0.5, -0.25, -0.125)  # type: ignore[union-attr]


def test_offsets_of_later_events_count_from_the_prompt() -> None:
    seen, outcomes = stream(COMPLETIONS, [FIRST, NEXT, END, "[DONE]"], {**STREAMED, "logprobs": 0})
    assert seen[0] == part('a "é"\nx', None, [None, -2.0, -0.5], prompt=[1, 2])  # type: ignore[arg-type]
    assert seen[1] == moved(part("y", None, [-0.25, -0.125]), [6, 6])  # type: ignore[arg-type]
    assert ids_of(outcomes) == [(5, 6, 7)]


def test_an_agent_that_asks_for_ids_gets_no_prompt_from_the_engine_either() -> None:
    events: list[Any] = [FIRST, NEXT, END, "[DONE]"]
    for prompt in ("a", [1, 2]):
        request = {**STREAMED, "prompt": prompt, "return_token_ids": True, "logprobs": 0}
        seen, outcomes = stream(COMPLETIONS, events, request)
        assert seen == events
        assert ids_of(outcomes) == [(5, 6, 7)]


@pytest.mark.parametrize("own", [{}, {"prompt_logprobs": 0}])
def test_a_document_begins_with_each_prompt(own: dict[str, Any]) -> None:
    def body(*shown: Any) -> dict[str, Any]:
        return {"model": "m", "choices": [
            completion_event(text, index=index, ids=ids, logprobs=rows, finish="stop", prompt=prompt)["choices"][0]
            | {"prompt_logprobs": told} for index, (text, ids, rows, prompt, told) in enumerate(shown)
        ]}  # fmt: skip

    told = [None, {"2": {"logprob": -2.0}}]
    sent = body(*(("x", [5], [None, -2.0, -0.5], [1, 2], told) for _ in range(4)))
    request = {"prompt": ["a ", "\\"], "n": 2, "echo": True, **own}
    seen, outcomes = document(COMPLETIONS, dump(sent).encode(), request)
    kept = told if own else None
    assert json.loads(seen) == body(
        ("a x", None, None, None, kept), ("a x", None, None, None, kept),
        ("\\x", None, None, None, kept), ("\\x", None, None, None, kept),
    )  # fmt: skip
    assert ids_of(outcomes) == [(5,)] * 4


def test_an_engine_that_tells_no_ids_has_put_the_prompt_there_itself() -> None:
    own = [completion_event('a "é"\nx'), completion_event("y", finish="stop"), "[DONE]"]
    seen, outcomes = stream(COMPLETIONS, own, STREAMED)
    assert seen == own
    assert reasons(outcomes) == ["no_token_ids"]


def test_fewer_logprobs_than_ids_are_no_capture() -> None:
    seen, outcomes = stream(COMPLETIONS, [part("x", [5, 6], [-0.5], prompt=[1], finish="stop"), "[DONE]"], STREAMED)
    assert event(seen[0]).startswith(b"data:")
    assert reasons(outcomes) == ["no_logprobs"]


@pytest.mark.parametrize("change", [
    {"text": None}, {"text": 3}, {"index": -1}, {"index": 1}, {"index": True}, {"index": "0"},
])  # fmt: skip
def test_the_prompt_is_put_into_texts_of_its_choice_alone(change: dict[str, Any]) -> None:
    odd = {**FIRST, "choices": [{**FIRST["choices"][0], **change}]}
    seen, _ = stream(COMPLETIONS, [odd, FIRST, END, "[DONE]"], STREAMED)
    hidden = {"token_ids": None, "logprobs": None}
    assert seen[0]["choices"][0] == odd["choices"][0] | hidden
    assert seen[1] == completion_event('a "é"\nx', prompt=[1, 2])
