"""Whether the daemon's record says that an agent went unanswered, by what the scripted engine answers word for word."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.kit.stub_process import stub_process

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")
CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/chat/completions", "/completions", "/messages", "/responses"
ERROR = {"error": {"message": "unwell", "type": "InternalServerError", "code": 500}}
STREAM = "text/event-stream"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, str, str]]:
    """A client of the daemon, its address, and that of its engine."""
    folder: Path = tmp_path_factory.mktemp("unanswered")
    client = httpx.Client(trust_env=False, timeout=300.0)
    with stub_process() as engine, ProxyProcess(engine, folder / "data") as proxy, client as http:
        yield http, proxy.url, engine


def says(body: Any, media: str = "application/json") -> dict[str, str]:
    return {"kind": "says", "body": body if isinstance(body, str) else json.dumps(body), "media": media}


def event(value: Any) -> str:
    return f"data: {json.dumps(value)}\n\n"


def asking(path: str) -> dict[str, Any]:
    said = {RESPONSES: {"input": "two"}, COMPLETIONS: {"prompt": "two", "max_tokens": 9}}
    return {"model": "stub"} | said.get(path, {"messages": [{"role": "user", "content": "two"}], "max_tokens": 9})


def unanswered(daemon: tuple[httpx.Client, str, str], path: str, body: dict[str, Any], *faults: Any) -> list[str]:
    """Why a request went unanswered that the engine answered with `faults`. Its client got what the engine says to one
    who asks directly."""
    http, proxy, engine = daemon
    episode = http.post(f"{proxy}/ajet/v1/episodes", json={"task": "t"}).json()["episode"]
    assert http.post(engine + "/stub/faults", json=faults).status_code == 200
    with suppress(httpx.HTTPError):
        http.post(f"{proxy}/e/{episode}/v1{path}", json=body)
    http.post(engine + "/stub/faults", json=[])
    record = http.get(f"{proxy}/ajet/v1/episodes/{episode}").json()
    return [one["reason"] for one in record["unanswered"]]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES])
@pytest.mark.parametrize(("body", "reasons"), [
    (ERROR, {"engine_error"}),
    ({"object": "error", "message": "unwell", "code": 500}, {"engine_error", "truncated", "capture_failed"}),
    ({}, {"truncated", "capture_failed"}),
])  # fmt: skip
def test_an_error_in_an_answer_with_status_200_is_no_answer(
    daemon: tuple[httpx.Client, str, str], path: str, body: dict[str, Any], reasons: set[str]
) -> None:
    (reason,) = unanswered(daemon, path, asking(path), says(body))
    assert reason in reasons


@pytest.mark.parametrize("body", [
    {"id": "r", "object": "response", "status": "in_progress", "output": [], "error": None},
    {"id": "r", "object": "response", "status": "incomplete", "output": [], "error": None},
])  # fmt: skip
def test_a_response_that_has_not_ended_is_no_answer(
    daemon: tuple[httpx.Client, str, str], body: dict[str, Any]
) -> None:
    asked = asking(RESPONSES)
    assert unanswered(daemon, RESPONSES, asked, says(body)) == ["truncated"]
    last = event({"type": f"response.{body['status']}", "response": body, "sequence_number": 1})
    assert unanswered(daemon, RESPONSES, asked | {"stream": True}, says(last, STREAM)) == ["truncated"]


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
SEEN = {"messages": [{"role": "user", "content": [{"type": "text", "text": "two"}, IMAGE]}]}
REFUSES = {"kind": "status", "status": 400}
OPEN = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "stub", "choices": [
    {"index": 0, "delta": {"content": "a"}, "finish_reason": None}
]}  # fmt: skip


@pytest.mark.parametrize(("path", "more", "fault", "reason"), [
    (CHAT, SEEN, says(ERROR), "engine_error"), (CHAT, SEEN, says("<html>", "text/html"), "capture_failed"),
    (CHAT, SEEN, {"kind": "abort"}, "engine_aborted"),
    (CHAT, SEEN | {"stream": True}, {"kind": "abort"}, "engine_aborted"),
    (CHAT, SEEN | {"stream": True}, {"kind": "no_finish"}, "truncated"),
    (CHAT, SEEN | {"stream": True}, says(event(OPEN), STREAM), "truncated"),
    (COMPLETIONS, {"use_beam_search": True, "stream": True}, {"kind": "no_finish"}, "truncated"),
    (RESPONSES, {"background": True}, says({"id": "r", "status": "failed", "output": []}), "engine_error"),
    (RESPONSES, {"background": True}, says({"id": "r", "status": "queued", "output": []}), None),
    (CHAT, SEEN, {"kind": "slow"}, None), (CHAT, SEEN | {"stream": True}, {"kind": "no_done"}, None),
])  # fmt: skip
def test_a_call_that_is_not_captured_is_answered_by_an_answer_alone(
    daemon: tuple[httpx.Client, str, str], path: str, more: dict[str, Any], fault: dict[str, Any], reason: str | None
) -> None:
    assert unanswered(daemon, path, asking(path) | more, fault) == ([] if reason is None else [reason])


def test_a_question_that_was_put_again_is_answered_by_an_answer_alone(daemon: tuple[httpx.Client, str, str]) -> None:
    asked = asking(CHAT) | {"stream": True}
    assert unanswered(daemon, CHAT, asked, REFUSES, says(event(OPEN), STREAM)) == ["truncated"]
    assert unanswered(daemon, CHAT, asked, REFUSES) == []
