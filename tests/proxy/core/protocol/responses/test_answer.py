"""Responses: what is asked for, where it is found, what goes back to what it would have been."""

from __future__ import annotations

import json
from typing import Any

import pytest

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.responses.answer import ResponseReading
from ajet_proxy.core.protocol.responses.dialect import LIMIT, KeptResponses, fetched, shown
from ajet_proxy.core.protocol.responses.dialect import RESPONSES as DIALECT
from ajet_proxy.core.trajectory.call import Captured, Outcome, Unscored
from tests.kit import tapes
from tests.kit.record_responses import FILE
from tests.proxy.core.protocol.answers import document, dump, event, exchange, ids_of, reasons
from tests.proxy.core.streams import streaming

RESPONSES = "/v1/responses"
IDS = {"enable_response_messages": "true"}
WANTED = "message.output_text.logprobs"
LOGPROBS = {"include": f'["{WANTED}"]', "top_logprobs": "0"}
ITEM = {"type": "function_call", "name": "guess", "arguments": "{}"}
ASKS_LOGPROBS = {"include": [WANTED]}


def rows(*values: Any) -> list[dict[str, Any]]:
    return [{"token": "é", "logprob": value, "top_logprobs": []} for value in values]


def text(logprobs: Any) -> dict[str, Any]:
    return {"type": "message", "content": [{"type": "output_text", "text": "é", "logprobs": logprobs}]}


def raw(*messages: Any) -> list[dict[str, Any]]:
    return [{"message": "é", "tokens": tokens, "type": "raw_message_tokens"} for tokens in messages]


def response(output: Any, *, prompt: Any = (1, 2), ids: Any = (5, 6), top: Any = 0, **more: Any) -> dict[str, Any]:
    told = {"input_messages": raw(list(prompt)) if prompt else None, "output_messages": raw(list(ids)) if ids else None}
    head = {"id": "resp_1", "model": "policy", "output": output, "status": "completed", "top_logprobs": top}
    return {**head, **told, **more}


def seen_of(output: Any, **more: Any) -> dict[str, Any]:
    return response(output, prompt=None, ids=None, top=None, **more)


def step(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + event({**fields, "sequence_number": 1, "type": kind})


def delta(said: str, logprobs: Any, **more: Any) -> bytes:
    where = {"output_index": 0, "sequence_number": 3, "type": "response.output_text.delta"}
    body = {"content_index": 0, "delta": said, "item_id": "m1", "logprobs": logprobs, **where, **more}
    return b"event: response.output_text.delta\n" + event(body)


def begin(top: Any) -> bytes:
    body = response([], top=top, prompt=None, ids=None, status="in_progress")
    return step("response.created", response=body) + step("response.in_progress", response=body)


def end(body: Any, kind: str = "response.completed") -> bytes:
    return step(kind, response=body)


def replay(parts: list[bytes], request: dict[str, Any] | None = None) -> tuple[bytes, tuple[Outcome, ...], int]:
    """Give what the client sees, the outcomes, and how many tokens were counted before the end."""
    running = streaming(request, RESPONSES)
    out = b"".join(b"".join([*running.feed(part), *running.release()]) for part in parts)
    return out + b"".join(running.finish()), running.outcomes, running.reader.sampled[0]


@pytest.mark.parametrize(("request_", "fields", "hidden"), [
    ({}, IDS | LOGPROBS, (True, True)),
    ({"enable_response_messages": False, "include": None, "top_logprobs": None}, IDS | LOGPROBS, (True, True)),
    ({"enable_response_messages": True}, LOGPROBS, (False, True)),
    ({"include": ["reasoning.encrypted_content"], "top_logprobs": 100},
     IDS | LOGPROBS | {"include": f'["reasoning.encrypted_content", "{WANTED}"]'}, (True, True)),
    ({"include": [WANTED], "top_logprobs": 3}, IDS, (True, False)),
    ({"include": [WANTED], "top_logprobs": None}, IDS, (True, False)),
    # the engine refuses some of these, and must go on refusing them
    ({"enable_response_messages": None}, LOGPROBS, (False, True)),
    ({"enable_response_messages": "yes"}, LOGPROBS, (False, True)),
    ({"include": "nonsense"}, IDS, (True, False)),
    ({"top_logprobs": "5"}, IDS, (True, False)),
    ({"top_logprobs": True}, IDS, (True, False)),
])  # fmt: skip
def test_what_the_engine_is_asked(request_: dict[str, Any], fields: dict[str, str], hidden: tuple[bool, bool]) -> None:
    ask = DIALECT.ask({"input": "hello", **request_})
    assert ask.fields == fields
    assert (ask.hide_ids, ask.hide_logprobs) == hidden
    assert (ask.choices, ask.skip) == (1, None)
    assert DIALECT.choices({"n": 5000, **request_}) == 1


@pytest.mark.parametrize(("request_", "reason"), [
    ({"background": True}, "background"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}, {"type": "input_image"}]}]}, "multimodal"),
    ({"input": [{"type": "function_call_output", "output": [{"type": "input_file"}]}]}, "multimodal"),
    ({"input": [{"role": "user", "content": [{"type": "input_text"}, {"text": "a"}, "b"]}, "c", ITEM]}, None),
    ({"input": [{"role": "user", "content": "a"}, {"type": "reasoning", "content": [{"type": "refusal"}]}]}, None),
    ({"background": False, "input": 7}, None),
])  # fmt: skip
def test_what_cannot_be_captured_goes_out_as_it_is(request_: dict[str, Any], reason: str | None) -> None:
    ask = DIALECT.ask(request_)
    assert ask.skip == reason
    assert bool(ask.fields) == (reason is None)


def test_a_document_keeps_every_other_character() -> None:
    more = {"text": {"format": {"type": "text"}}, "usage": 1.50}
    body = dump(response([{"type": "reasoning", "content": None}, text(rows(-0.5, -1)), ITEM], **more))
    seen, outcomes = document(RESPONSES, f" {body}\n".encode())
    expected = seen_of([{"type": "reasoning", "content": None}, text(None), ITEM], **more)
    assert seen.decode() == f" {dump(expected)}\n"
    assert outcomes == (Captured(0, "policy", (1, 2), (5, 6), (-0.5, -1.0), "tool_calls"),)


@pytest.mark.parametrize("output", [
    [ITEM], [text(None)], [text([])], [text(rows(-0.5))], [text(rows(-0.5, None))],
])  # fmt: skip
def test_tokens_without_logprobs_have_to_be_scored(output: Any) -> None:
    _, outcomes = document(RESPONSES, response(output))
    assert outcomes == (Unscored(0, "policy", (1, 2), (5, 6), "tool_calls" if output == [ITEM] else "stop"),)


@pytest.mark.parametrize("value", [0.5, 1e300, -3.5e38, float("nan"), float("-inf"), pytest.param(10**400, id="huge")])
def test_logprobs_that_cannot_be_are_not_asked_for_again(value: float) -> None:
    told = response([text(rows(-0.5, value))])
    seen, outcomes = document(RESPONSES, told)
    assert reasons(outcomes) == ["no_logprobs"] == reasons(replay([begin(0), end(told)])[1])
    assert json.loads(seen) == seen_of([text(None)])


@pytest.mark.parametrize(("changes", "reason"), [
    ({"prompt": None}, "no_token_ids"),
    ({"ids": None}, "no_token_ids"),
    ({"input_messages": [{"role": "user"}]}, "no_token_ids"),
    ({"output_messages": raw([5, True])}, "no_token_ids"),
    ({"output_messages": raw([5, 6], [1, 2, 5, 6, 7], [8])}, "several_generations"),
    ({"input_messages": raw([1], [2])}, "no_token_ids"),
    ({"input_messages": "no list"}, "no_token_ids"),
    ({"status": "failed"}, "engine_error"),
    ({"status": "cancelled"}, "engine_aborted"),
    ({"status": "in_progress"}, "truncated"),
    ({"status": "incomplete"}, "truncated"),
    ({"status": "incomplete", "incomplete_details": {"reason": "whim"}}, "capture_failed"),
    ({"model": None}, "capture_failed"), ({"model": [5]}, "capture_failed"),
    ({"output": [7]}, "capture_failed"),
    ({"output": None}, "capture_failed"),
    ({"output_messages": [7]}, "capture_failed"),
])  # fmt: skip
def test_an_answer_that_does_not_tell_all_is_lost(changes: dict[str, Any], reason: str) -> None:
    _, outcomes = document(RESPONSES, response(**{"output": [text(rows(-0.5, -1.0))], **changes}))
    assert reasons(outcomes) == [reason]


@pytest.mark.parametrize(("body", "reason"), [
    ({"error": {"message": "unwell", "code": 500}}, "engine_error"),
    ({"object": "error", "message": "unwell", "code": 500}, "engine_error"),
    (response([text(rows(-0.5, -1.0))], error={"code": "server_error"}), "engine_error"),
    ({}, "truncated"), ({"output": []}, "truncated"), ({"status": "queued", "output": []}, "truncated"),
    ({"status": "in_progress", "output": [ITEM], "error": None}, "truncated"),
    *(({"status": "incomplete", "output": [ITEM], "incomplete_details": why}, "truncated")
      for why in (None, {}, {"reason": None}, "odd")),
    ({"status": "completed", "output": [ITEM], "error": None}, "no_token_ids"),
    ({"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}, "no_token_ids"),
    ({"output": [ITEM]}, "no_token_ids"),
])  # fmt: skip
def test_how_an_answer_ended_counts_before_what_it_told(body: dict[str, Any], reason: str) -> None:
    """Also where the engine reports no ids. Otherwise a client that got no answer would count as answered."""
    seen, outcomes = document(RESPONSES, body)
    assert json.loads(seen).keys() == body.keys()
    for kind in ("response.completed", "response.incomplete"):
        assert reasons(replay([begin(0), end(body, kind)])[1]) == reasons(outcomes) == [reason]
    failed = replay([begin(0), end(body, "response.failed")])[1]
    assert reasons(failed) == ["engine_error"]


@pytest.mark.parametrize(("reason", "finish"), [("max_output_tokens", "length"), ("content_filter", "content_filter")])
def test_an_answer_that_was_cut_short_is_a_whole_call(reason: str, finish: str) -> None:
    body = response([text(rows(-0.5, -1.0))], status="incomplete", incomplete_details={"reason": reason})
    for outcomes in (document(RESPONSES, body)[1], replay([end(body, "response.incomplete")])[1]):
        (outcome,) = outcomes
        assert isinstance(outcome, Captured) and outcome.finish_reason == finish


def test_a_stream_is_put_back_event_by_event() -> None:
    item = step("response.output_item.added", item={"type": "message"}, output_index=0)
    args = step("response.function_call_arguments.delta", delta="{", output_index=1)
    odd = delta(" x", [{**row, "bytes": [1]} for row in rows(-2.0, -3.0)])
    final = response([text(rows(-0.5, -1.0))])
    parts = [begin(0), item, delta("é\"\n", rows(-0.5)), args, delta("", []), odd, b": comment\n\n", end(final)]
    seen, outcomes, counted = replay(parts)
    shown = [begin(None), item, delta("é\"\n", []), args, delta("", []), delta(" x", []), b": comment\n\n"]
    assert seen == b"".join(shown) + end(seen_of([text(None)]))
    assert reasons(outcomes) == ["captured"]
    assert counted == 5


def test_the_fast_way_and_the_slow_way_see_alike() -> None:
    tokens = [delta("a", rows(-0.5, -0.25)), step("response.reasoning_text.delta", delta="b"), delta("c", [])]
    parts = [begin(0), *tokens, end(response([ITEM]))]
    whole = b"".join(parts)
    expected = replay([whole])
    assert replay(parts) == expected
    assert replay([whole[at : at + 1] for at in range(len(whole))]) == expected
    assert expected[2] == 4
    crlf = replay([part.replace(b"\n", b"\r\n") for part in parts])
    assert (crlf[0].replace(b"\r\n", b"\n"), *crlf[1:]) == expected


@pytest.mark.parametrize("word", [b"\xff", b"\x00", b"\\q"])
def test_a_delta_that_is_no_json_passes_as_it_came(word: bytes) -> None:
    spoiled = delta("WORD", rows(-0.5)).replace(b"WORD", word)
    for parts in ([begin(0), spoiled], [begin(0), spoiled[:9], spoiled[9:]]):
        assert replay(parts)[0].endswith(spoiled)


def test_an_agent_that_asked_for_logprobs_gets_them_in_the_stream() -> None:
    parts = [begin(0), delta("a", rows(-0.5)), delta("b", [{**rows(-1.0)[0], "top_logprobs": [{"token": "b"}]}])]
    parts.append(end(response([text(rows(-0.5, -1.0))])))
    seen, outcomes, counted = replay(parts, ASKS_LOGPROBS)
    assert seen == b"".join(parts[:-1]) + end(response([text(rows(-0.5, -1.0))], prompt=None, ids=None))
    assert reasons(outcomes) == ["captured"] and counted == 2


def test_what_a_stream_showed_is_told_beside_its_end_which_has_other_ids() -> None:
    running = streaming(path=RESPONSES)
    shown = {**ITEM, "call_id": "call_9"}
    running.feed(begin(0) + step("response.output_item.done", item=shown, output_index=0) + end(response([ITEM])))
    assert running.answers == ({"id": "resp_1", "output": [ITEM], "shown": [shown]},)


@pytest.mark.parametrize(("parts", "reason"), [
    ([begin(0)], "truncated"),
    ([begin(0), step("error", message="m")], "engine_error"),
    ([begin(0), event({"error": {"message": "m"}})], "engine_error"),
    ([begin(0), end(response([], status="failed", ids=None), "response.failed")], "engine_error"),
    ([begin(0), step("error", message="m"), end(response([text(rows(-0.5, -1.0))]))], "engine_error"),
    ([begin(0), b"data: [DONE]\n\n"], "truncated"),
    ([begin(0), b"data: done\n\n"], "capture_failed"),
    ([begin(0), event({"response": 7})], "capture_failed"),
])  # fmt: skip
def test_a_stream_without_a_good_end_is_lost(parts: list[bytes], reason: str) -> None:
    seen, outcomes, _ = replay(parts)
    assert reasons(outcomes) == [reason]
    assert seen.startswith(begin(None))


@pytest.mark.parametrize(("more", "reason"), [
    (step("response.output_text.delta", delta="x", logprobs=[]), "capture_failed"),
    (step("response.reasoning_text.delta", delta="x"), "capture_failed"),
    (step("response.output_item.done", item=ITEM), "capture_failed"),
    (end(response([text(rows(-0.5, -1.0))])), "capture_failed"),
    (end(response([], status="failed", ids=None), "response.failed"), "engine_error"),
    (step("error", message="m"), "engine_error"),
    (step("response.created", response=response([], prompt=(1, 3), ids=None)), "capture_failed"),
    (step("response.created", response=response([], prompt=(1, 2), ids=None)), "captured"),
    (step("response.created", response={"input_messages": []}), "captured"),
    (b"data: [DONE] \n\n", "captured"), (b"data:\n\n", "captured"), (b"data: no json\n\n", "captured"),
])  # fmt: skip
def test_a_call_is_lost_by_what_contradicts_it_behind_the_end_and_by_nothing_else(more: bytes, reason: str) -> None:
    running = streaming(path=RESPONSES)
    running.feed(begin(0) + end(response([text(rows(-0.5, -1.0))])))
    assert running.release() and ids_of(running.outcomes) == [(5, 6)]
    reader = running.reader
    assert isinstance(reader, ResponseReading)
    shown = list(reader.shown)
    running.feed(more)
    assert reasons(running.outcomes) == [reason] == [running.contradicted or "captured"]
    assert reader.shown == shown, "nothing of it is kept"


def test_a_prompt_that_changes_in_mid_stream_is_not_told_exactly() -> None:
    whole = response([text(rows(-0.5, -1.0))])
    for prompt, reason in ((raw([1, 2]), "captured"), (raw([1, 3]), "capture_failed"), ([], "captured")):
        begun = response([], ids=None, status="in_progress", input_messages=prompt)
        seen, outcomes, _ = replay([step("response.created", response=begun), end(whole)])
        assert reasons(outcomes) == [reason]
        shown = [step("response.created", response=seen_of([], status="in_progress")), end(seen_of([text(None)]))]
        assert seen == b"".join(shown)


# --- responses that the engine keeps


def answered(path: str = RESPONSES, *, response: Any = "resp_1", **asked: Any) -> Exchange:
    """An exchange whose answer has the id `response`."""
    running = exchange(path, asked)
    running.on_headers(200, "application/json")
    running.feed(dump({"id": response, "status": "completed", "model": "policy", "output": []}).encode())
    running.finish()
    return running


def noted(*exchanges: Exchange, limit: int = LIMIT) -> KeptResponses:
    kept = KeptResponses(limit)
    for running in exchanges:
        if running.kept_as is not None:
            kept.keep(running.response_id, running.ask)
    return kept


def knows(kept: KeptResponses, response: str) -> bool:
    return kept.kept(response) is not None


@pytest.mark.parametrize("name", ["plain", "logprobs", "ids", "tool", "nulls"])
def test_a_response_that_is_fetched_is_what_the_agent_was_told(name: str) -> None:
    told = tapes.load(FILE)
    asked, kept = told[name, tapes.AGENT], told[name, tapes.PROXY]
    running = exchange(RESPONSES, asked.request)
    running.on_headers(200, "application/json")
    running.feed(kept.body)
    seen = b"".join(running.finish())
    ask = noted(running).kept(json.loads(kept.body)["id"])
    assert ask is not None
    for _ in range(2):
        assert shown(ask, kept.body) == seen
    assert seen != kept.body


@pytest.mark.parametrize(("method", "path", "response"), [
    ("GET", f"{RESPONSES}/resp_1", "resp_1"), ("GET", f"{RESPONSES}/resp_1/", "resp_1"), ("GET", "/", None),
    ("GET", f"{RESPONSES}/resp%5F1", "resp_1"), ("DELETE", f"{RESPONSES}/resp_1", None),
    ("GET", f"{RESPONSES}/resp_1/input_items", None),
])  # fmt: skip
def test_only_what_fetches_a_response_is_read(method: str, path: str, response: str | None) -> None:
    assert fetched(method, path) == response


def test_what_the_engine_does_not_keep_is_not_remembered() -> None:
    asked = answered(store=False), answered(response=7), exchange(RESPONSES), exchange("/v1/completions")
    assert not any(knows(noted(*asked), name) for name in ("resp_1", "7", "None"))
    assert knows(noted(answered()), "resp_1")


def test_the_latest_are_remembered() -> None:
    kept = noted(*(answered(response=name) for name in ("a", "b", "c")), limit=2)
    assert [knows(kept, name) for name in ("a", "b", "c")] == [False, True, True]


@pytest.mark.parametrize("body", [b"{", b"7", b"\xff", b'{"status":"completed"}', b'{"output":7}'])
def test_what_is_no_response_stays_as_it_is(body: bytes) -> None:
    assert shown(answered().ask, body) == body
