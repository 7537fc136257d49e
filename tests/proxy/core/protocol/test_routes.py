"""The routes that are open to agents, and the word for those who asked for another."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.conversation.history import PROBE
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED, CONTROL_ROUTES, GENERATING, described, open_route


@pytest.mark.parametrize(("written", "route"), [
    ("/v1/chat/completions", "/v1/chat/completions"), ("/v1/models/", "/v1/models"), ("/health", "/health"),
    ("/v1/%65mbeddings", "/v1/embeddings"), ("/tokenize/", "/tokenize"), ("/v1/a%20b", "/v1/a b"),
    ("/sleep", None), ("/v1", None), ("/", None), ("", None), ("/pause", None), ("/v1/load_lora_adapter", None),
    ("/v1/unload_lora_adapter/", None), ("/v1/%75nload_lora_adapter", None), ("/v1/../sleep", None),
    ("/v1/%2e/sleep", None), ("/v1//sleep", None), ("/v1/a%5cb", None), ("/v1/a%00", None),
])  # fmt: skip
def test_only_the_protocols_are_open(written: str, route: str | None) -> None:
    assert open_route(written) == route


def test_the_operator_may_open_more() -> None:
    assert open_route("/metrics", ("/metrics",)) == "/metrics"
    assert open_route("/metrics/x", ("/metrics",)) is None


@pytest.mark.parametrize("path", sorted(CONTROL_ROUTES))
def test_what_changes_the_engine_nobody_may_open(path: str) -> None:
    assert open_route(path, (path,)) is open_route(path + "/", (path,)) is None


@pytest.mark.parametrize("path", sorted(GENERATING))
def test_what_generates_without_a_record_is_closed_and_names_the_route_to_use(path: str) -> None:
    assert open_route(path) is open_route(f"{path}/") is None and open_route(path, (path,)) == path
    assert any(f"use {route}" in described(f"{path}/") for route in CAPTURED)


@pytest.mark.parametrize(("written", "words"), [
    ("", "/e/EPISODE: the base URL of an OpenAI client ends in /v1"),
    ("/chat/completions/", "/chat/completions/: the base URL of an OpenAI client ends in /v1"),
    ("/models", "/models: the base URL of an OpenAI client ends in /v1"),
    ("/", "/: the owner's page is /ajet/"),
    ("/sl%65ep", "/sleep"),
    ("/" + "x" * 300, "/" + "x" * 199),
])
def test_what_is_said_of_a_closed_one(written: str, words: str) -> None:
    assert described(written) == words


@pytest.mark.parametrize(("path", "fields", "continued"), [
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, True),
    ("/v1/messages", {"messages": [{"role": "user", "content": "hi"}]}, True),
    ("/v1/responses", {"input": "hi", "model": "m"}, True),
    ("/v1/completions", {"prompt": "hi"}, False),
])  # fmt: skip
def test_each_dialect_tells_the_past_of_a_request(path: str, fields: dict[str, Any], continued: bool) -> None:
    dialect, request = CAPTURED[path], JsonBody(b"{}")
    assert dialect.path == path
    assert path == "/v1/messages" or (dialect.translate(request) is request and dialect.target == path)
    history = dialect.history(fields, b"scope", exact=True)
    assert history is not None and dialect.history({}, b"scope", exact=True) is None
    outline = dialect.outline(fields, history, episode="e", model="m", agent="")
    assert (outline is not None) == dialect.takes_ids == continued
    assert dialect.doubt(fields) is None


def test_what_an_engine_does_with_messages_depends_on_its_template() -> None:
    doubt = CAPTURED["/v1/messages"].doubt({"messages": [], "thinking": {"type": "disabled"}})
    assert doubt is not None and doubt.questions("m")
    answers = [{"input_tokens": 9}, {"input_tokens": 9}, *({"tokens": [n]} for n in range(6))]
    assert doubt.settled([None] * 8) is None and doubt.settled(answers) is not None


CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
USER, MODEL = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}


@pytest.mark.parametrize(("path", "fields", "probe"), [
    (CHAT, {}, False), (CHAT, {"max_tokens": PROBE}, True), (CHAT, {"max_tokens": PROBE + 1}, False),
    (RESPONSES, {"max_output_tokens": 1}, True), (CHAT, {"max_completion_tokens": 500, "max_tokens": 1}, False),
    (CHAT, {"max_tokens": 1, "tools": [{}]}, False), (COMPLETIONS, {"max_tokens": "1"}, False),
])  # fmt: skip
def test_a_probe_allows_few_tokens_and_no_tools(path: str, fields: dict[str, Any], probe: bool) -> None:
    assert CAPTURED[path].is_probe(fields) == probe


@pytest.mark.parametrize(("path", "fields", "first"), [
    (CHAT, {"messages": [USER]}, True), (CHAT, {"messages": [USER, MODEL, USER]}, False),
    (MESSAGES, {"messages": [USER, MODEL, USER]}, False), (COMPLETIONS, {"prompt": "hello"}, True),
    (RESPONSES, {"input": "hello"}, True), (RESPONSES, {"input": [USER, {"type": "reasoning"}]}, False),
    (RESPONSES, {"input": [USER, MODEL, USER]}, False), (CHAT, {"messages": ["odd"]}, True),
    (RESPONSES, {"input": "more", "previous_response_id": "resp"}, False), (CHAT, {"messages": 7}, True),
])  # fmt: skip
def test_a_conversation_begins_without_an_answer(path: str, fields: dict[str, Any], first: bool) -> None:
    assert CAPTURED[path].is_first(fields) == first
