"""Engines that tell a thing twice, or once for several: on every route that tells choices, in streams and documents."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.protocol.reading import Reading
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import Captured, Outcome
from tests.proxy.core.protocol.answers import (
    CHAT,
    COMPLETIONS,
    chat_event,
    chat_start,
    completion_event,
    document,
    dump,
    event,
    ids_of,
    reasons,
    stream,
)

BOTH = pytest.mark.parametrize("path", [CHAT, COMPLETIONS])


def prompts_of(outcomes: tuple[Outcome, ...]) -> list[tuple[int, ...]]:
    ids_of(outcomes)
    return [outcome.prompt_token_ids for outcome in outcomes if isinstance(outcome, Captured)]


def said(path: str, word: str, token: int, *, index: int = 0, finish: str | None = None) -> dict[str, Any]:
    """A piece of one token."""
    if path == COMPLETIONS:
        return completion_event(word, index=index, ids=[token], logprobs=[-0.5], finish=finish)
    return chat_event({"content": word}, index=index, ids=[token], logprobs=[-0.5], finish=finish)


def start(path: str, prompt: Any, *, index: int = 0) -> dict[str, Any]:
    """The event that tells the prompt."""
    if path == COMPLETIONS:
        return completion_event("", index=index, ids=[], logprobs=[], prompt=prompt)
    return chat_start(prompt, index=index)


def whole(path: str, *choices: tuple[int, int, str | None], prompt: Any = (1, 2)) -> dict[str, Any]:
    """A document of choices, each by its index, its token and how it ended; its prompt stands at the top."""
    made = [said(path, "a", token, index=index, finish=finish)["choices"][0] for index, token, finish in choices]
    for choice in made:
        choice["message"] = {"role": "assistant", **choice.pop("delta", {})}
    return {"id": "x", "model": "policy", "choices": made, "prompt_token_ids": prompt and list(prompt)}


@BOTH
def test_an_answer_that_ended_in_an_error_is_none(path: str) -> None:
    events = [start(path, [1]), said(path, "a", 5), said(path, "", 6, finish="error"), "[DONE]"]
    seen, outcomes = stream(path, events)
    assert reasons(outcomes) == ["engine_error"] and seen[-2]["choices"][0]["finish_reason"] == "error"
    assert reasons(document(path, whole(path, (0, 5, "error")))[1]) == ["engine_error"]
    both = document(path, whole(path, (0, 5, "error"), (1, 6, "stop")), {"n": 2, "prompt": "x"})[1]
    assert reasons(both) == ["engine_error", "captured"], "by itself"


@BOTH
@pytest.mark.parametrize("choices", [
    [(0, 5, "stop"), (0, 6, "stop")], [(0, 5, None), (0, 6, "stop")], [(0, 5, "stop"), (0, 5, "stop"), (1, 6, "stop")],
    [(1, 5, None), (0, 6, "stop"), (1, 5, "stop")],
])  # fmt: skip
def test_a_choice_that_is_given_twice_spoils_a_document(path: str, choices: list[tuple[int, int, str | None]]) -> None:
    n = 1 + max(index for index, _, _ in choices)
    asked = {"return_token_ids": True, "logprobs": True, "n": n, "prompt": "x"}
    body = dump(whole(path, *choices)).encode()
    seen, outcomes = document(path, body, asked)
    assert seen == body and reasons(outcomes) == ["capture_failed"] * n


@BOTH
def test_a_choice_that_is_given_twice_in_one_event_spoils_a_stream(path: str) -> None:
    twice = said(path, "a", 5)
    twice["choices"] *= 2
    for n in (1, 2):
        begun = [start(path, [1], index=index) for index in range(n)]
        ends = [said(path, "", 6, index=index, finish="stop") for index in range(n)]
        seen, outcomes = stream(path, [*begun, twice, *ends, "[DONE]"], {"n": n})
        assert reasons(outcomes) == ["capture_failed"] * n
        assert [choice["token_ids"] for choice in seen[n]["choices"]] == [None, None]


@BOTH
@pytest.mark.parametrize("again", [None, "stop"])
def test_ids_behind_the_finish_spoil_a_stream(path: str, again: str | None) -> None:
    more = said(path, "b", 7, finish=again)
    events = [start(path, [1]), said(path, "a", 5), said(path, "", 6, finish="stop"), more, "[DONE]"]
    assert reasons(stream(path, events)[1]) == ["capture_failed"]
    two = [start(path, [1], index=1), said(path, "x", 9, index=1, finish="stop")]
    assert reasons(stream(path, [*events[:4], *two, "[DONE]"], {"n": 2})[1]) == ["capture_failed"] * 2


@BOTH
def test_the_fast_way_is_not_for_what_stands_behind_a_finish(path: str) -> None:
    here = Reading(CAPTURED[path], CAPTURED[path].ask({}))  # type: ignore[arg-type]
    usual = event(said(path, "a", 5))
    assert here.usual(usual)[1] == len(usual)
    here.event(event(said(path, "", 6, finish="stop"))[6:-2])
    assert here.usual(usual) == ([], 0) and here.sampled == (2,)
    two = Reading(CAPTURED[path], CAPTURED[path].ask({"n": 2}))  # type: ignore[arg-type]
    two.event(event(said(path, "", 6, finish="stop"))[6:-2])
    assert two.usual(usual) == ([], 0) and two.sampled == (1, 0)


@BOTH
@pytest.mark.parametrize("done", [True, False])
def test_nothing_is_kept_of_what_stands_behind_the_end(path: str, done: bool) -> None:
    here = Reading(CAPTURED[path], CAPTURED[path].ask({}))  # type: ignore[arg-type]
    here.event(event(said(path, "a", 5))[6:-2])
    here.event(b"[DONE]" if done else event(said(path, "", 6, finish="stop"))[6:-2])
    before, kept = here.sampled, [list(partial.said) for partial in here._choices]
    for _ in range(3):
        assert here.usual(event(said(path, "b", 7))) == ([], 0)
        here.event(event(said(path, "b", 7))[6:-2])
    assert here.sampled == before and [partial.said for partial in here._choices] == kept
    assert here.spoilt == "capture_failed"


@BOTH
def test_an_empty_finish_reason_is_none(path: str) -> None:
    """As servers send it in every event."""
    begun = start(path, [1, 2])
    begun["choices"][0]["finish_reason"] = ""
    words = [said(path, "a", 5, finish=""), said(path, "b", 6, finish="")]
    seen, outcomes = stream(path, [begun, *words, said(path, "", 7, finish="stop"), "[DONE]"])
    assert ids_of(outcomes) == [(5, 6, 7)] and seen[-3]["choices"][0]["finish_reason"] == ""
    assert reasons(document(path, whole(path, (0, 5, "")))[1]) == ["truncated"]


@pytest.mark.parametrize("quiet", [False, True])
def test_an_event_that_only_the_proxy_asked_for_is_one_whatever_stands_for_no_finish(quiet: bool) -> None:
    asked = {"include_reasoning": False} if quiet else {}
    filler = chat_event({}, ids=[5], logprobs=[-0.5], finish="")
    seen, outcomes = stream(CHAT, [start(CHAT, [1]), filler, said(CHAT, "", 6, finish="stop"), "[DONE]"], asked)
    assert ids_of(outcomes) == [(5, 6)] and len(seen) == 3
    filler["choices"][0]["finish_reason"] = {}  # which stands for nothing
    assert len(stream(CHAT, [start(CHAT, [1]), filler, said(CHAT, "", 6, finish="stop"), "[DONE]"], asked)[0]) == 4


@BOTH
def test_an_empty_prompt_says_nothing_against_another(path: str) -> None:
    ends = [said(path, "a", 5, finish="stop"), "[DONE]"]
    for told in ([[], [1, 2]], [[1, 2], []], [[], [1, 2], []]):
        seen, outcomes = stream(path, [*(start(path, prompt) for prompt in told), *ends])
        assert prompts_of(outcomes) == [(1, 2)] and "[1" not in dump(seen)
    assert prompts_of(stream(path, [start(path, []), *ends])[1]) == [()], "which a completion of nothing has"


@BOTH
def test_a_prompt_that_changes_in_mid_stream_spoils_it(path: str) -> None:
    ends = [said(path, "a", 5, finish="stop"), "[DONE]"]
    assert prompts_of(stream(path, [start(path, [1, 2]), start(path, [1, 2]), *ends])[1]) == [(1, 2)]
    for other in ([1, 3], [1], "x"):
        seen, outcomes = stream(path, [start(path, [1, 2]), start(path, other), *ends])
        assert reasons(outcomes) == ["capture_failed"] and "[1" not in dump(seen)
        two = [start(path, [1, 2], index=0), start(path, other, index=1), said(path, "b", 6, index=1, finish="stop")]
        assert reasons(stream(path, [*two, *ends], {"n": 2})[1]) == ["capture_failed"] * 2


@BOTH
def test_a_prompt_that_is_told_in_two_places_is_told_alike(path: str) -> None:
    for other, reason in (([1, 2], "captured"), ([1, 3], "capture_failed")):
        body = whole(path, (0, 5, "stop"))
        body["choices"][0]["prompt_token_ids"] = other
        assert reasons(document(path, body)[1]) == [reason]


@BOTH
def test_a_prompt_that_is_told_once_is_that_of_all_its_choices(path: str) -> None:
    asked = {"n": 3, "prompt": "x"}
    rest = [said(path, "a", 5 + index, index=index, finish="stop") for index in (1, 0, 2)]
    for first in (start(path, [1, 2], index=1), {"choices": [], "prompt_token_ids": [1, 2]}):
        seen, outcomes = stream(path, [first, *rest, "[DONE]"], asked)
        assert (ids_of(outcomes), prompts_of(outcomes)) == ([(5,), (6,), (7,)], [(1, 2)] * 3)
        assert "[1,2]" not in dump(seen)
    body = whole(path, (0, 5, "stop"), (1, 6, "stop"), (2, 7, "stop"))
    at_one = json.loads(dump(body | {"prompt_token_ids": None}))
    at_one["choices"][1]["prompt_token_ids"] = [1, 2]
    for told in (body, at_one):
        shown, outcomes = document(path, told, asked)
        assert (ids_of(outcomes), prompts_of(outcomes)) == ([(5,), (6,), (7,)], [(1, 2)] * 3)
        assert b"[1,2]" not in shown


def test_each_of_several_prompts_is_that_of_its_own_choices() -> None:
    """Choice number ``prompt x n + i`` is the i-th answer to that prompt."""
    asked = {"n": 2, "prompt": ["x", "y"]}
    ends = [said(COMPLETIONS, "a", 5 + index, index=index, finish="stop") for index in range(4)]
    first, second = (start(COMPLETIONS, prompt, index=index) for prompt, index in (([1], 0), ([2], 3)))
    outcomes = stream(COMPLETIONS, [first, second, *ends, "[DONE]"], asked)[1]
    assert prompts_of(outcomes) == [(1,), (1,), (2,), (2,)]
    outcomes = stream(COMPLETIONS, [first, *ends, "[DONE]"], asked)[1]
    assert reasons(outcomes) == ["captured", "captured", "no_token_ids", "no_token_ids"]
    body = whole(COMPLETIONS, *((index, 5, "stop") for index in range(4)))
    assert reasons(document(COMPLETIONS, body, asked)[1]) == ["no_token_ids"] * 4, "it does not say which it is"


@BOTH
@pytest.mark.parametrize("model", [5, True, 2.5, 2**70, [1], {"a": 1}, "\ud800"])
def test_a_model_that_no_record_can_name_loses_the_call_and_leaves_the_answer(path: str, model: Any) -> None:
    """As an engine that repeats the model of any request says it."""
    body = json.dumps(whole(path, (0, 5, "stop")) | {"model": model}).encode()
    shown, outcomes = document(path, body, {"return_token_ids": True, "logprobs": True, "prompt": "x"})
    assert shown == body and reasons(outcomes) == ["capture_failed"]
    events = [{**one, "model": model} for one in (start(path, [1]), said(path, "a", 5, finish="stop"))]
    seen, outcomes = stream(path, [json.dumps(one) for one in events] + ["[DONE]"])
    assert [one["model"] for one in seen[:-1]] == [model] * 2 and reasons(outcomes) == ["capture_failed"]
