"""Text completions: several prompts, each choice with its own, and what cannot be captured.

``echo``: the prompt stands before the answer again, and its logprobs are not taken for the answer's.
"""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.completions import COMPLETIONS as DIALECT
from ajet_proxy.core.protocol.dialect import Echo
from tests.proxy.core.protocol.answers import COMPLETIONS, completion_event, event, reasons, stream

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
END = part("", [], [], finish="stop")


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
