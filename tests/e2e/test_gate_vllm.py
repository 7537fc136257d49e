"""The gate in its pausing mode, and the doctor, on a real vLLM: calls freeze between two tokens and go on whole."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Engine, doctor
from tests.kit.proxy_process import ProxyProcess

TOKENS = 1500
"""Some seconds of the tiny model's, in which a busy machine closes a gate."""
ATTEMPTS = 10
FLOWING = 5
"""So many tokens have come before the gate is closed."""
QUIET = 20
"""So often others are answered and nothing comes of a stream that is frozen."""
BODY = {"model": "tiny", "messages": [{"role": "user", "content": "Go on"}], "max_tokens": TOKENS, "ignore_eos": True}


@pytest.fixture
def restored(vllm: Engine) -> Iterator[None]:
    """The engine runs with its own weights after the test, however it ended: other tests share it."""
    yield
    load(vllm, vllm.model)
    httpx.post(f"{vllm.url}/resume", timeout=300, trust_env=False).raise_for_status()


async def test_a_stream_freezes_while_the_gate_is_closed_and_ends_whole(
    vllm: Engine, restored: None, tmp_path: Path
) -> None:
    already = computed_again(vllm)
    with ProxyProcess(vllm.url, tmp_path / "data", options=["--gate-mode", "pause"]) as proxy:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=300, trust_env=False) as http:
            episode, events, streaming, version = await caught_midway(http, vllm)
            held = asyncio.create_task(http.post("/e/held/v1/chat/completions", json=BODY | {"max_tokens": 4}))
            seen = len(events)
            await asyncio.sleep(2.0)
            assert len(events) == seen
            assert not streaming.done()
            assert not held.done()
            assert (await http.post("/ajet/v1/gate/open", json={"policy_version": version + 1})).status_code == 200
            assert (await held).status_code == 200
            assert await streaming == "length"
            record = (await http.get(f"/ajet/v1/episodes/{episode}?tokens=1")).json()
            (call,) = record["calls"]
            assert call["complete"] is True
            assert len(call["token_ids"]) == len(call["logprobs"]) == TOKENS
            (before, sampled_before), (after, sampled_after) = call["policy_version"]
            assert (before, after, sampled_before + sampled_after) == (version, version + 1, TOKENS)
            assert sampled_before >= FLOWING
            assert sampled_after >= 1
    assert computed_again(vllm) == already, "what was computed before the gate closed is kept"


def computed_again(engine: Engine) -> float:
    """The number of calls that the engine has put back, to compute from their first token on again."""
    told = httpx.get(f"{engine.url}/metrics", timeout=300, trust_env=False).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in told if line.startswith("vllm:num_preemptions_total{"))


async def test_after_an_update_no_call_uses_what_other_weights_left_in_the_prefix_cache(
    vllm: Engine, restored: None, tmp_path: Path
) -> None:
    """A frozen call holds its part of vLLM's prefix cache, so that it is not emptied when weights are loaded."""
    question = BODY | {"messages": [{"role": "user", "content": "Remember this sentence. " * 40}], "max_tokens": 1}
    asked = question | {"logprobs": True}
    with ProxyProcess(vllm.url, tmp_path / "data", options=["--gate-mode", "pause"]) as proxy:
        async with httpx.AsyncClient(base_url=proxy.url, timeout=300, trust_env=False) as http:
            for path in ("/e/before", vllm.url):
                await first(http, path, asked)
            _, _, streaming, version = await caught_midway(http, vllm)
            load(vllm, other_weights(vllm, tmp_path))
            await http.post("/ajet/v1/gate/open", json={"policy_version": version + 1})
            seen = await first(http, "/e/after", asked)
            stale = await first(http, vllm.url, asked)
            fresh = await first(http, vllm.url, asked | {"cache_salt": "nobody else has it"})
            assert await streaming == "length"
    assert seen == fresh
    assert stale != fresh, "without the salt there is nothing to see here"


async def first(http: httpx.AsyncClient, base: str, body: dict[str, Any]) -> tuple[str, float]:
    """The first token of a greedy answer, and its logprob."""
    answer = await http.post(f"{base}/v1/chat/completions", json=body | {"temperature": 0})
    (told,) = answer.json()["choices"][0]["logprobs"]["content"]
    return told["token"], told["logprob"]


def other_weights(engine: Engine, folder: Path) -> Path:
    """The engine's model with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(engine.model / "model.safetensors")
    other = {name: tensor + 0.1 * torch.randn_like(tensor) for name, tensor in tensors.items()}
    save_file(other, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(engine: Engine, folder: Path) -> None:
    """As the trainer does it."""
    body = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    for path, said in (("/collective_rpc", body), ("/reset_prefix_cache", None)):
        httpx.post(engine.url + path, json=said, timeout=300, trust_env=False).raise_for_status()


async def caught_midway(http: httpx.AsyncClient, vllm: Engine) -> tuple[str, list[Any], asyncio.Task[Any], int]:
    """A stream that the gate closed upon: its episode, its events so far, its end, and the policy version.

    On a busy machine the engine may have given a whole answer before the gate closes; then another one is asked for.
    The end of that one is on the way for as long as this process, or the proxy, is behind with reading it.
    """
    for version in range(ATTEMPTS):
        events: list[Any] = []
        flowing = asyncio.Event()
        streaming = asyncio.create_task(stream(http, f"frozen-{version}", events, flowing))
        await flowing.wait()
        closed = (await http.post("/ajet/v1/gate/close", json={})).json()
        assert closed["gate"] == "closed" and closed["in_flight"] in (0, 1)
        if closed["in_flight"] and not await ended(http, vllm, streaming, events):
            return f"frozen-{version}", events, streaming, version
        assert await asyncio.wait_for(streaming, 300) == "length"
        (await http.post("/ajet/v1/gate/open", json={"policy_version": version + 1})).raise_for_status()
    raise AssertionError(f"each of {ATTEMPTS} answers was whole before the gate closed")


async def ended(http: httpx.AsyncClient, vllm: Engine, streaming: asyncio.Task[Any], events: list[Any]) -> bool:
    """Tell whether a stream ends now that the gate is closed. If not, nothing comes of it any more: nothing has while
    the engine and the proxy have answered other requests."""
    seen, quiet = len(events), 0
    while quiet < QUIET and not streaming.done():
        for url in (f"{vllm.url}/health", "/ajet/v1/status"):
            (await http.get(url)).raise_for_status()
        await asyncio.wait({streaming}, timeout=0.3)
        quiet = quiet + 1 if len(events) == seen else 0
        seen = len(events)
    return streaming.done()


async def stream(http: httpx.AsyncClient, episode: str, events: list[Any], flowing: asyncio.Event) -> Any:
    """One long answer's finish reason, and its `events` as they come. `flowing` is set once it is under way."""
    async with http.stream("POST", f"/e/{episode}/v1/chat/completions", json=BODY | {"stream": True}) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                events.append(json.loads(line[6:]))
                if len(events) > FLOWING:  # the first one tells the role alone
                    flowing.set()
    return events[-1]["choices"][0]["finish_reason"]


def test_the_doctor_finds_no_fault_in_vllm(vllm: Engine, tmp_path: Path) -> None:
    findings = doctor(vllm.url, tmp_path, "--gate-mode", "pause")
    assert not any(finding["level"] == "fault" for finding in findings), findings
    said = " ".join(finding["message"] for finding in findings)
    assert "exact token ids and a logprob for each" in said
    assert "can be paused" in said
    assert "its logprobs are raw" in said
    assert "at temperature 1 over the whole vocabulary" in said
