"""Text completions: several prompts, each choice with its own, and what cannot be captured.

``echo``: the prompt stands before the answer again, and its logprobs are not taken for the answer's.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.protocol.completions import COMPLETIONS as DIALECT
from ajet_proxy.core.protocol.dialect import Echo
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
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

IDS = {"return_token_ids": "true"}
LOGPROBS = {"logprobs": "0"}


@pytest.mark.parametrize(("request_", "fields", "hidden"), [
    ({}, IDS | LOGPROBS, (True, True)),
    ({"logprobs": None, "return_token_ids": False}, IDS | LOGPROBS, (True, True)),
    ({"logprobs": 0}, IDS, (True, False)),
    ({"logprobs": 2, "return_token_ids": True}, {}, (False, False)),
    ({"logprob_token_ids": [1]}, IDS, (True, False)),  # the engine refuses it, and must go on refusing it
    ({"return_token_ids": "2"}, LOGPROBS, (True, True)),
])  # fmt: skip
def test_what_the_engine_is_asked(request_: dict[str, Any], fields: dict[str, str], hidden: tuple[bool, bool]) -> None:
    ask = DIALECT.ask(request_)
    assert ask.fields == fields
    assert (ask.hide_ids, ask.hide_logprobs, ask.skip) == (*hidden, None)


@pytest.mark.parametrize(("prompt", "n", "choices"), [
    ("a text", 1, 1), ("a text", 2, 2), ([1, 2, 3], 1, 1), ([1, 2, 3], 2, 2), (["a", "b"], 1, 2), (["a", "b"], 3, 6),
    ([[1], [2, 3], [4]], 2, 6), ([], 1, 1), (None, 1, 1), ([1.0, 2.0], 1, 1),
    ([True], "2", 2),
])  # fmt: skip
def test_how_many_choices_come(prompt: Any, n: int, choices: int) -> None:
    assert DIALECT.ask({"prompt": prompt, "n": n}).choices == choices


@pytest.mark.parametrize(("request_", "reason"), [
    ({"echo": True, "prompt": [1, 2]}, "echo"), ({"echo": True, "prompt": ["a", [1]]}, "echo"),
    ({"echo": True}, "echo"), ({"echo": True, "prompt": "a", "max_tokens": 0}, "echo"),
    ({"echo": True, "prompt": "a", "return_token_ids": True, "max_tokens": 0}, "echo"),
    ({"echo": True, "prompt": "a", "n": 2, "stream": True}, "echo"),
    ({"echo": True, "prompt": "a", "truncate_prompt_tokens": 3}, "echo"),
    ({"prompt_embeds": "x"}, "prompt_embeds"), ({"use_beam_search": True}, "beam_search"),
])  # fmt: skip
def test_what_cannot_be_captured_goes_out_as_it_is(request_: dict[str, Any], reason: str) -> None:
    ask = DIALECT.ask(request_)
    assert (ask.skip, ask.fields, ask.choices) == (reason, {}, 1)


def test_an_echo_is_made_from_the_agents_own_prompts() -> None:
    ask = DIALECT.ask({"echo": True, "prompt": ["a", "b"], "n": 2, "prompt_logprobs": 1})
    assert (ask.fields, ask.show_prompt, ask.skip) == (IDS | LOGPROBS, False, None)
    assert ask.echo == Echo(("a", "a", "b", "b"), prompt_logprobs=True)
    ask = DIALECT.ask({"echo": True, "prompt": [1, 2], "return_token_ids": True, "stream": True, "logprobs": 1, "n": 2})
    assert (ask.fields, ask.show_prompt, ask.echo) == ({}, True, Echo(("", "")))
    assert DIALECT.ask({"echo": True, "prompt": "a", "n": 2, "stream": True, "logprobs": 0}).skip is None


def test_the_route() -> None:
    request = JsonBody(b"{}")
    assert DIALECT.translate(request) is request
    assert DIALECT.target == DIALECT.path
    assert CAPTURED["/v1/completions"] is DIALECT


def test_each_choice_has_its_own_prompt() -> None:
    events = [
        completion_event("a", index=0, ids=[5], logprobs=[-0.5], prompt=[1, 2]),
        completion_event("b", index=1, ids=[6], logprobs=[-0.25], prompt=[3]),
        completion_event("c", index=1, ids=[7], logprobs=[-0.125], finish="stop"),
        completion_event("", index=0, ids=[8, 9], logprobs=[-1.0, -2.0], finish="length"),
        "[DONE]",
    ]
    seen, outcomes = stream(COMPLETIONS, events, {"prompt": ["x", "y"]})
    assert ids_of(outcomes) == [(5, 8, 9), (6, 7)]
    assert [outcome.prompt_token_ids for outcome in outcomes] == [(1, 2), (3,)]
    expected: list[Any] = [
        completion_event("a", index=0), completion_event("b", index=1), completion_event("c", index=1, finish="stop"),
        completion_event("", index=0, finish="length"), "[DONE]",
    ]  # fmt: skip
    assert seen == expected


def test_logprobs_of_another_shape_are_none() -> None:
    assert DIALECT.logprobs({"token_logprobs": None}) == []
    assert DIALECT.logprobs({"token_logprobs": [None, -1.0]}) == [None, -1.0]


def test_text_without_ids_is_text_that_cannot_be_trained() -> None:
    good = completion_event("a", ids=[5], logprobs=[-0.5], prompt=[1])
    _, outcomes = stream(COMPLETIONS, [good, completion_event("b"), completion_event("", finish="stop"), "[DONE]"])
    assert reasons(outcomes) == ["no_token_ids"]


def test_an_event_without_text_is_no_filler() -> None:
    first = completion_event("", ids=[5], logprobs=[-0.5], prompt=[1])
    seen, _ = stream(COMPLETIONS, [first, completion_event("", ids=[6], logprobs=[-0.5])])
    assert seen == [completion_event(""), completion_event("")]


# --- test echo


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
