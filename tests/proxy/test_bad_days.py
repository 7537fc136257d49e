"""Bad input and bad days, against the real proxy and a scripted engine: a clear error each, and nobody else notices.

Around every test lives a bystander: an episode that has made one call before, makes another one after, is rewarded and
must then be whole and ready.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from ajet_sdk.frame import VERSION
from tests.kit.ports import free_port
from tests.kit.proxy_process import ProxyProcess, failed_start
from tests.kit.rig import Rig, error_of
from tests.kit.stub_process import stub_process

SECRET = "a-secret-of-the-operator"
MAX_BODY = 200_000
DAEMON = ("--max-body", str(MAX_BODY))


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    with stub_process("--model", "stub") as url:
        yield url


@pytest.fixture
def rig(proxy: ProxyProcess) -> Iterator[Rig]:
    with Rig(proxy.url) as hands:
        yield hands


@pytest.fixture(autouse=True)
def bystander(request: pytest.FixtureRequest, proxy: ProxyProcess) -> Iterator[None]:
    with Rig(proxy.url) as rig:
        episode = rig.open(task=f"bystander of {request.node.name}")
        messages = [{"role": "user", "content": "hello"}]
        answer = rig.chat(episode, messages).raise_for_status().json()["choices"][0]["message"]
        yield
        messages += [{"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "again"}]
        rig.chat(episode, messages).raise_for_status()
        assert rig.reward(episode, 0.5).is_success
        record = rig.record(episode)
        assert record["state"] == "ready"
        assert record["reward"] == 0.5
        assert [call["complete"] for call in record["calls"]] == [True, True]
        rig.status()


def fault(kind: str, **options: Any) -> dict[str, str]:
    return {"x-stub-fault": json.dumps({"kind": kind} | options)}


def calls_of(rig: Rig, episode: str) -> list[bool]:
    return [call["complete"] for call in rig.record(episode)["calls"]]


# ---- what an agent may send


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b'"text"', b"null", b'{"messages": [}', b"\xff\xfe{}", b'{"a": "\xc3"}']
)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/ajet/v1/episodes/{}/rewards"])
def test_malformed_json(rig: Rig, path: str, body: bytes) -> None:
    episode = rig.open(task="malformed")
    prefix = "" if path.startswith("/ajet") else f"/e/{episode}"
    headers = {"content-type": "application/json"}
    error_of(rig.http.post(prefix + path.format(episode), content=body, headers=headers), 400)
    record = rig.record(episode)
    assert (record["state"], record["calls"], record["rewards"]) == ("open", [], [])


@pytest.mark.parametrize("action", ["rewards", "seal", "abort", "heartbeat"])
def test_an_unknown_episode(rig: Rig, action: str) -> None:
    opened = rig.status()["episodes"]["opened"]
    error_of(rig.post(f"/episodes/nobody/{action}", {"value": 1.0} if action == "rewards" else {}), 404)
    error_of(rig.get("/episodes/nobody"), 404)
    assert rig.status()["episodes"]["opened"] == opened


def test_a_call_after_the_episode_ended(rig: Rig) -> None:
    episode = rig.open(task="late")
    assert rig.post(f"/episodes/{episode}/abort", {"reason": "enough"}).is_success
    error_of(rig.chat(episode), 409)
    error_of(rig.reward(episode), 409)
    assert rig.record(episode)["reason"] == "aborted"


def test_an_oversized_body(rig: Rig) -> None:
    episode = rig.open(task="large")
    error_of(rig.chat(episode, "x" * (MAX_BODY + 1)), 413)
    error_of(rig.reward(episode, 1.0, note="x" * (MAX_BODY + 1)), 413)
    assert rig.record(episode)["calls"] == []
    assert rig.chat(episode, "x" * 1000).is_success


@pytest.mark.parametrize(
    "value", ["NaN", "Infinity", "-Infinity", '"1.0"', "true", "null", "[1]", "{}", "1e999", "1.1e12"]
)
def test_a_reward_that_is_no_number(rig: Rig, value: str) -> None:
    episode = rig.open(task="reward")
    headers = {"content-type": "application/json"}
    answer = rig.http.post(f"/ajet/v1/episodes/{episode}/rewards", content=f'{{"value": {value}}}', headers=headers)
    error_of(answer, 400)
    assert rig.record(episode)["state"] == "open"


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "one", "", "0x1", "1e999", "-1e300"])
def test_a_reward_header_that_is_no_number_stops_the_request(rig: Rig, value: str) -> None:
    episode = rig.open(task="reward header")
    error_of(rig.chat(episode, headers={"x-ajet-reward": value}), 400)
    record = rig.record(episode)
    assert (record["rewards"], record["calls"]) == ([], [])


def test_a_misspelt_field_is_named(rig: Rig) -> None:
    episode = rig.open(task="misspelt")
    error = error_of(rig.reward(episode, 1.0, finall=False), 400)
    assert error["param"] == "finall"
    assert "final" in error["message"]
    assert rig.record(episode)["state"] == "open"


def test_one_reward_id_has_one_value(rig: Rig) -> None:
    episode = rig.open(task="twice")
    rig.chat(episode)
    assert rig.reward(episode, 1.0, id="r1").is_success
    assert rig.reward(episode, 1.0, id="r1").is_success
    error_of(rig.reward(episode, 0.0, id="r1"), 409)
    assert rig.record(episode)["reward"] == 1.0


@pytest.mark.parametrize(
    "path", ["/pause", "/sleep", "/collective_rpc", "/e/ep-1/pause", "/v1/../pause", "/metrics/../pause"]
)
def test_the_engines_control_routes_are_unreachable(rig: Rig, engine: str, path: str) -> None:
    assert rig.http.post(path, json={}).status_code in (403, 404, 405)
    seen = httpx.get(f"{engine}/stub/requests", trust_env=False).json()
    assert not [item for item in seen if "pause" in item["path"]]


# ---- what an engine may do


def test_a_refusal_of_the_engine_is_the_agents_to_see(rig: Rig, engine: str) -> None:
    episode = rig.open(task="refused")
    asked = {"model": "nobody", "messages": [{"role": "user", "content": "hello"}]}
    direct = httpx.post(f"{engine}/v1/chat/completions", json=asked, trust_env=False)
    through = rig.http.post(f"/e/{episode}/v1/chat/completions", json=asked)
    assert (through.status_code, through.content) == (direct.status_code, direct.content)
    assert calls_of(rig, episode) in ([], [False])


@pytest.mark.parametrize("after", [0, 1, 300, 1500])
def test_a_stream_cut_in_the_middle(rig: Rig, after: int) -> None:
    episode = rig.open(task="cut")
    assert rig.chat(episode).is_success
    try:
        answer = rig.chat(episode, "say: a long enough answer", stream=True, headers=fault("cut", after=after))
        assert answer.status_code in (200, 502)
        assert answer.status_code == 502 or b"[DONE]" not in answer.content
    except httpx.RemoteProtocolError:
        pass  # what the agent would have seen without us
    assert calls_of(rig, episode) == [True, False]
    assert rig.reward(episode).is_success


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["no_token_ids", "no_logprobs"])
def test_an_engine_without_ids_passes_through_and_is_not_trained(rig: Rig, kind: str, stream: bool) -> None:
    episode = rig.open(task="no ids")
    answer = rig.chat(episode, "say: all is well", stream=stream, headers=fault(kind))
    assert answer.is_success
    assert "prompt_token_ids" not in answer.text or kind == "no_logprobs" or stream
    assert calls_of(rig, episode) == [False]
    assert rig.reward(episode).is_success
    record = rig.record(episode)
    assert (record["state"], record["reason"]) == ("discarded", "incomplete_call")


@pytest.mark.parametrize("kind", ["error_event", "no_finish", "abort"])
def test_a_stream_that_ends_badly_is_not_trained(rig: Rig, kind: str) -> None:
    episode = rig.open(task="bad end")
    answer = rig.chat(episode, "say: a long enough answer", stream=True, headers=fault(kind, after=4))
    assert answer.is_success
    assert calls_of(rig, episode) == [False]


def test_something_that_is_no_engine(rig: Rig) -> None:
    episode = rig.open(task="html")
    answer = rig.chat(episode, headers=fault("not_vllm"))
    assert (answer.status_code, answer.text) == (200, "<html><body>It works!</body></html>")
    assert calls_of(rig, episode) == [False]


def test_an_engine_that_closes_without_a_word(rig: Rig) -> None:
    episode = rig.open(task="silent")
    error = error_of(rig.chat(episode, headers=fault("silent_close")), 502)
    assert error["type"] == "engine_error"
    assert calls_of(rig, episode) == [False]


def test_an_engine_that_is_unwell(rig: Rig) -> None:
    episode = rig.open(task="unwell")
    answer = rig.chat(episode, headers=fault("status", status=503))
    assert answer.status_code == 503
    assert "unwell" in answer.text
    assert calls_of(rig, episode) in ([], [False])


def test_an_engine_that_is_down(tmp_path: Path) -> None:
    with ProxyProcess(f"http://127.0.0.1:{free_port()}", tmp_path / "data") as down, Rig(down.url) as rig:
        episode = rig.open(task="down")
        error = error_of(rig.chat(episode), 502)
        assert error["type"] == "engine_error"
        assert calls_of(rig, episode) == [False]
        error_of(rig.http.get("/v1/models"), 502)
        rig.status()


def test_an_agent_that_goes_away_cancels_the_engines_work(rig: Rig, engine: str) -> None:
    episode = rig.open(task="gone")
    body = {"model": "stub", "messages": [{"role": "user", "content": "say: " + "word " * 200}], "stream": True}
    slow = fault("slow", delay_s=0.05)
    with rig.http.stream("POST", f"/e/{episode}/v1/chat/completions", json=body, headers=slow) as answer:
        next(answer.iter_bytes())
    for _ in range(100):
        seen = httpx.get(f"{engine}/stub/requests", trust_env=False).json()
        if any(item["cancelled"] and item["headers"].get("x-stub-fault") == slow["x-stub-fault"] for item in seen):
            break
    else:
        pytest.fail("the engine went on generating")
    assert calls_of(rig, episode) == [False]


# ---- what a trainer, an operator or a stranger may do


def test_a_wire_version_that_nobody_speaks(rig: Rig) -> None:
    error = error_of(rig.post("/batches/lease", {}, headers={"x-ajet-wire": "99"}), 400)
    assert error["code"] == "wire_version"
    assert rig.post("/batches/lease", {"group_size": 50}, headers={"x-ajet-wire": str(VERSION)}).status_code == 204


def test_batches_that_nobody_leased(rig: Rig) -> None:
    error_of(rig.post("/batches/nothing/ack", {"policy_version": 1}), 404)
    error_of(rig.post("/batches/nothing/nack"), 404)
    error_of(rig.post("/batches/nothing/extend", {"lease_s": 10}), 404)


def test_a_second_proxy_on_the_same_data(proxy: ProxyProcess, engine: str) -> None:
    options = ["--upstream", engine, "--listen", f"127.0.0.1:{free_port()}", "--data-dir", str(proxy.data_dir)]
    status, said = failed_start(options)
    assert status == 1
    assert str(proxy.data_dir) in said
    assert "Traceback" not in said
    assert len(said.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--listen", "0.0.0.0:0"], "secret"),
        (["--listen", "127.0.0.1:0", "--grup-size", "4"], "group-size"),
        (["--listen", "nonsense"], "listen"),
        (["--upstream", "ftp://engine"], "upstream"),
    ],
)
def test_a_configuration_that_cannot_be_meant(options: list[str], word: str, tmp_path: Path) -> None:
    status, said = failed_start([*options, "--data-dir", str(tmp_path / "data")])
    assert status in (1, 2)
    assert word in said
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def guarded(engine: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyProcess]:
    """A proxy with an admin secret: nothing without a key."""
    data = tmp_path_factory.mktemp("guarded") / "data"
    with ProxyProcess(engine, data, env={"AJET_ADMIN_SECRET": SECRET}) as running:
        yield running
        written = running.errors()
        assert SECRET not in written
        assert "Bearer" not in written


def test_without_a_key_or_with_a_forged_one(guarded: ProxyProcess) -> None:
    with Rig(guarded.url, SECRET) as admin:
        episode = admin.open(task="mine")
        good = admin.post("/episodes", {"task": "theirs"}).json()["api_key"]
    forged = good[:-4] + ("AAAA" if not good.endswith("AAAA") else "BBBB")
    for key in (None, "EMPTY", "sk-123", "ajet-", "ajet-forged", forged, SECRET[:-1]):
        with Rig(guarded.url, key) as stranger:
            for answer in (
                stranger.post("/episodes"), stranger.get("/status"), stranger.get(f"/episodes/{episode}"),
                stranger.chat(episode), stranger.chat(None), stranger.reward(episode),
                stranger.post("/batches/lease"), stranger.post("/gate/close"),
            ):  # fmt: skip
                error_of(answer, 401)


def test_another_agents_key(guarded: ProxyProcess) -> None:
    with Rig(guarded.url, SECRET) as admin:
        mine, theirs = (admin.post("/episodes", {"task": "keys"}).json() for _ in range(2))
        with Rig(guarded.url, mine["api_key"]) as agent:
            other = theirs["episode"]
            for answer in (
                agent.get(f"/episodes/{other}"), agent.reward(other), agent.chat(other),
                agent.post(f"/episodes/{other}/abort"), agent.post(f"/episodes/{other}/seal"),
                agent.post("/batches/lease"), agent.post("/gate/close"),
                agent.post("/policy", {"model": "m", "version": 1}),
                agent.get("/episodes"),
            ):  # fmt: skip
                error_of(answer, 403)
            assert agent.chat(mine["episode"]).is_success
            assert agent.chat(None).headers["x-ajet-episode"] == mine["episode"]
            assert agent.reward(mine["episode"]).is_success
        assert admin.record(theirs["episode"])["state"] == "open"
        assert admin.record(theirs["episode"])["calls"] == []
