"""The sampling of calls, as the proxy records it, beside what a real vLLM says of the same requests.

One engine is as it comes. Another has a model with defaults of its own, reports processed logprobs, and has render
routes. They tell the parameters that vLLM makes of a request, defaults included: they are asked about each request. The
third has such defaults too, and no render routes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_proxy.core.protocol.sampling import OFF
from ajet_sdk.frame import decode_batch
from ajet_sdk.sample import spans_of
from tests.e2e.conftest import OWN, Engine, Pair, doctor, served
from tests.kit.proxy_process import ProxyProcess

pytestmark = pytest.mark.slow

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
HIDDEN = {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.05}
"""The defaults of the third engine's model."""
SAID = [{"role": "user", "content": "Hello"}]
ANY = {"type": "object"}
FUNCTION = {"name": "guess", "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}}}
TOOL, STRICT = ({"type": "function", "function": FUNCTION | more} for more in ({}, {"strict": True}))
FLAT, FLAT_STRICT = ({"type": "function", **FUNCTION, "strict": strict} for strict in (False, True))
SHAPES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "as trained": {"temperature": 1, "top_p": 1},
    "null": {"temperature": None, "top_p": None, "top_k": None},
    "cold": {"temperature": 0.5, "top_k": 7},
    "coldest": {"temperature": 0.001, "top_p": 0.5},
    "greedy": {"temperature": 0, "top_p": 0.5, "top_k": 3},
    "lax": {"temperature": "0.5", "top_k": 5.0},
    "penalties": {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 1.25},
    "bias": {"logit_bias": {"11": 1.5, "12": 1000}},
    "seed": {"seed": 7},
    "xargs": {"vllm_xargs": {"a": "b"}},
    "no seed": {"seed": -1},
    "regex": {"structured_outputs": {"regex": "(yes|no)"}},
}
BY_ROUTE: dict[str, dict[str, dict[str, Any]]] = {
    CHAT: {
        **SHAPES,
        "min_p": {"min_p": 0.25}, "min_tokens": {"min_tokens": 2}, "words": {"bad_words": ["yes"]},
        "ids": {"allowed_token_ids": [11, 12, 13]},
        "json": {"response_format": {"type": "json_object"}},
        "schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": ANY}}},
        "text": {"response_format": {"type": "text"}},
        "tools": {"tools": [TOOL]}, "strict tools": {"tools": [TOOL, STRICT]},
        "no tools": {"tools": [STRICT], "tool_choice": "none"},
        "must": {"tools": [TOOL], "tool_choice": "required"},
        "named": {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "guess"}}},
    },
    COMPLETIONS: {
        **SHAPES, "min_p": {"min_p": 0.25}, "json": {"response_format": {"type": "json_object"}},
        "min_tokens": {"min_tokens": 2},
    },
    RESPONSES: {
        **SHAPES, "min_p": {"min_p": 0.25}, "min_tokens": {"min_tokens": 2},
        "json": {"text": {"format": {"type": "json_object"}}},
        "tools": {"tools": [FLAT]}, "strict tools": {"tools": [FLAT_STRICT]},
        "must": {"tools": [FLAT], "tool_choice": "required"},
        "named": {"tools": [FLAT], "tool_choice": {"type": "function", "name": "guess"}},
    },
    MESSAGES: {
        "nothing": {}, "cold": {"temperature": 0.5, "top_k": 7}, "greedy": {"temperature": 0},
        "as trained": {"top_p": 1, "temperature": 1},
        "tools": {"tools": [{"name": "guess", "input_schema": ANY}]},
        "must": {"tools": [{"name": "guess", "input_schema": ANY}], "tool_choice": {"type": "any"}},
    },
}  # fmt: skip
CASES = [(route, name) for route, shapes in BY_ROUTE.items() for name in shapes]


def body_of(route: str, name: str) -> dict[str, Any]:
    plain: dict[str, Any] = {"messages": SAID, "max_tokens": 6}
    if route == COMPLETIONS:
        plain = {"prompt": "Hello", "max_tokens": 6}
    elif route == RESPONSES:
        plain = {"input": "Hello", "max_output_tokens": 16}
    return {"model": "tiny", **plain, **BY_ROUTE[route][name]}


@pytest.fixture(scope="module")
def own_and_plain(
    vllm: Engine, shaped: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Pair]]:
    folder = tmp_path_factory.mktemp("sampling")
    with ProxyProcess(vllm.url, folder / "plain") as plain, ProxyProcess(shaped.url, folder / "own") as own:
        pairs = {"plain": Pair(vllm, plain), "own": Pair(shaped, own)}
        for name, pair in pairs.items():
            while not known(asked(pair, f"first-{name}-{time.monotonic_ns()}", CHAT, body_of(CHAT, "nothing"))):
                time.sleep(1)  # an engine that has just started may take long for its first tokens
        yield pairs
        assert "Traceback" not in plain.errors() + own.errors()


def known(call: Any) -> bool:
    """Tell whether the proxy knew by then how the engine samples."""
    return call["sampling"]["logprobs"] != "unknown" and None not in call["sampling"].values()


def asked(pair: Pair, episode: str, route: str, body: dict[str, Any]) -> Any:
    """The record of the one call that came of it."""
    answer = httpx.post(f"{pair.proxy.url}/e/{episode}{route}", json=body, timeout=300)
    assert answer.status_code == 200, answer.text
    (call,) = httpx.get(f"{pair.proxy.url}/ajet/v1/episodes/{episode}?tokens=1", timeout=300).json()["calls"]
    assert call["complete"] is True
    return call


@pytest.mark.parametrize(("route", "name"), CASES)
def test_what_is_recorded_is_what_the_engine_says_of_the_request(
    own_and_plain: dict[str, Pair], route: str, name: str
) -> None:
    pair, body = own_and_plain["own"], body_of(route, name)
    rendered = httpx.post(f"{pair.engine.url}{route}/render", json=body, timeout=300)
    assert rendered.status_code == 200, rendered.text
    told = rendered.json()
    params = (told[0] if isinstance(told, list) else told)["sampling_params"]
    call = asked(pair, f"own-{route[4:].replace('/', '-')}-{name.replace(' ', '-')}", route, body)
    found = dict(call["sampling"])
    scored = "scored_logprobs" in call["altered"]
    assert found.pop("logprobs") == ("scored" if scored else "processed")
    assert (found.pop("structured", None) is not None) == bool(params.get("structured_outputs"))
    assert {name: found.pop(name) for name in OFF if name in found} == pytest.approx({
        name: params[name] for name, off in OFF.items() if params.get(name, off[0]) not in off
    })
    others = {name: params.get(name) for name in ("seed", "min_tokens", "logit_bias", "bad_words", "allowed_token_ids")}
    others["vllm_xargs"] = params.get("extra_args")
    assert found == {name: value for name, value in others.items() if value}


def test_the_defaults_of_the_model_count_and_a_request_overrides_them(own_and_plain: dict[str, Pair]) -> None:
    pair = own_and_plain["own"]
    processed = {"logprobs": "processed"}
    assert asked(pair, "by-default", CHAT, body_of(CHAT, "nothing"))["sampling"] == {**processed, **OWN}
    assert asked(pair, "as-trained", CHAT, body_of(CHAT, "as trained"))["sampling"] == processed


@pytest.mark.parametrize(("route", "name", "expected"), [
    (CHAT, "nothing", {}), (CHAT, "as trained", {}), (COMPLETIONS, "nothing", {}), (MESSAGES, "nothing", {}),
    (RESPONSES, "nothing", {}), (CHAT, "cold", {"temperature": 0.5, "top_k": 7}), (CHAT, "greedy", {"temperature": 0}),
    (CHAT, "tools", {}), (CHAT, "must", {"structured": "tools"}), (CHAT, "strict tools", {"structured": None}),
    (RESPONSES, "must", {"structured": "tools"}), (COMPLETIONS, "regex", {"structured": "regex"}),
])  # fmt: skip
def test_an_engine_without_render_routes_is_seen_to_have_no_defaults(
    own_and_plain: dict[str, Pair], route: str, name: str, expected: Any
) -> None:
    episode = f"plain-{route[4:].replace('/', '-')}-{name.replace(' ', '-')}"
    call = asked(own_and_plain["plain"], episode, route, body_of(route, name))
    assert call["sampling"] == {"logprobs": "raw", **expected}


def test_its_hidden_defaults_are_found_or_known_to_be_unknown(tmp_path: Path) -> None:
    with served(tmp_path, defaults=HIDDEN) as engine:
        with ProxyProcess(engine.url, tmp_path / "data") as proxy:
            pair = Pair(engine, proxy)
            for _ in range(300):  # how long the engine takes for its first tokens is nobody's promise
                found = asked(pair, f"ep-{time.monotonic_ns()}", CHAT, body_of(CHAT, "nothing"))["sampling"]
                if found["logprobs"] != "unknown":
                    break
                time.sleep(1)
            named = asked(pair, "named", CHAT, body_of(CHAT, "as trained") | {"repetition_penalty": 1, "top_k": -1})
        faults = [item for item in doctor(engine.url, tmp_path) if item["level"] == "fault"]
    assert found == {
        "logprobs": "raw", "temperature": 0.6, "top_k": None, "min_p": None, "repetition_penalty": None,
    }
    assert named["sampling"] == {"logprobs": "raw", "min_p": None}
    assert "temperature 0.6, top_k (perhaps), min_p (perhaps), repetition_penalty (perhaps)" in faults[0]["message"]


@pytest.mark.parametrize(("engine", "narrowed"), [("own", True), ("plain", False)])
def test_processed_logprobs_are_those_of_what_is_told(
    own_and_plain: dict[str, Pair], engine: str, narrowed: bool
) -> None:
    """One of three tokens is drawn, of hundreds that the tiny model takes to be about as likely."""
    three = {"allowed_token_ids": [11, 12, 13], "temperature": 1, "top_p": 1, "ignore_eos": True}
    call = asked(own_and_plain[engine], f"three-{engine}", CHAT, body_of(CHAT, "nothing") | three)
    assert set(call["token_ids"]) <= {11, 12, 13}
    assert (max(map(math.exp, call["logprobs"])) > 0.25) is narrowed


def test_a_trainer_is_told_in_runs(own_and_plain: dict[str, Pair]) -> None:
    url = own_and_plain["own"].proxy.url
    said = [*SAID]
    for more in ({}, {}, {"temperature": 0}):
        answer = httpx.post(f"{url}/e/runs/v1/chat/completions", timeout=300, json=body_of(CHAT, "nothing") | {
            "messages": said, **more,
        })  # fmt: skip
        said += [answer.json()["choices"][0]["message"], {"role": "user", "content": "again"}]
        said = [{name: message[name] for name in ("role", "content")} for message in said]
    httpx.post(f"{url}/ajet/v1/episodes/runs/rewards", json={"value": 1.0}, timeout=300).raise_for_status()
    leased = httpx.post(f"{url}/ajet/v1/batches/lease", json={"group_size": 1, "groups": 1}, timeout=300)
    (sample,) = (
        sample for group in decode_batch(leased.content).groups for one in group.episodes for sample in one.samples
        if one.episode == "runs"
    )  # fmt: skip
    processed = {"logprobs": "processed"}
    assert [sampling for sampling, _ in sample.sampling] == [{**processed, **OWN}, {**processed, "temperature": 0}]
    assert sum(count for _, count in sample.sampling) == sum(sample.loss_mask)
    assert spans_of(list(map(list, sample.policy_versions)), sum(sample.loss_mask))
    assert len(sample.finish_reasons) == len(sample.calls) == 3


def test_the_doctor_calls_hidden_defaults_a_fault(shaped: Engine, tmp_path: Path) -> None:
    found = doctor(shaped.url, tmp_path)
    (fault,) = (item for item in found if item["level"] == "fault")
    assert "temperature 0.7, top_p 0.9" in fault["message"]
    assert "--generation-config vllm" in fault["advice"]
    assert any("its logprobs are processed" in item["message"] for item in found)
