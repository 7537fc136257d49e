"""A run whose engine does not tell what it sampled: said by the daemon, by every view of it, and by `ajet run`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import httpx
import pytest

import ajet_sdk
from ajet_sdk.play.episode import Outcome
from ajet_sdk.untrainable import GIVES_LOGPROBS, GIVES_TOKEN_IDS, UNTRAINABLE
from tests.kit.asking import AGENT
from tests.kit.patience import LONG_S, until
from tests.kit.proxy_process import PROXY, ProxyProcess
from tests.sdk.conftest import Ajet
from tests.sdk.test_with_proxy import ask

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")
ALL = 9999


BOTH_WAYS = pytest.mark.parametrize(
    "proxy", [("--workers", "1"), ("--workers", "2")], ids=["one process", "workers"], indirect=True, scope="module"
)


def spoil(engine: str, kind: str = "", times: int = ALL) -> None:
    faults = [{"kind": kind, "times": times}] if kind else []
    httpx.post(f"{engine}/stub/faults", json=faults, timeout=LONG_S, trust_env=False).raise_for_status()


@pytest.fixture
def run(ajet: Ajet) -> Ajet:
    """Plays the agent."""
    return lambda *options: ajet("run", "--task", "t", "--quiet", *options, "--", sys.executable, "-c", AGENT)


@BOTH_WAYS
@pytest.mark.parametrize(("kind", "said", "remedy"), [
    ("no_token_ids", "gives no token ids (no_token_ids)", GIVES_TOKEN_IDS),
    ("refuses_ids", "refuses requests for token ids and logprobs (unaskable)", UNTRAINABLE["unaskable"].remedy),
])  # fmt: skip
def test_a_run_of_which_nothing_can_be_trained_fails_and_says_why(
    daemon: ProxyProcess, run: Ajet, engine: str, kind: str, said: str, remedy: str
) -> None:
    spoil(engine, kind)
    code, out, err = run("--repeat", "2")
    assert (code, err) == (1, f"nothing of this run can be trained: the engine {said}; {remedy}\n")
    assert out.endswith("2 episodes: 2 rewarded, mean reward 1, 2 cannot be trained\n")
    code, _, err = run("--eval")
    assert (code, err) == (0, "")


@BOTH_WAYS
def test_a_run_of_which_some_can_be_trained_succeeds_and_says_the_rest(
    daemon: ProxyProcess, run: Ajet, engine: str
) -> None:
    spoil(engine, "no_logprobs", times=1)
    code, out, err = run("--repeat", "2")
    assert code == 0
    assert err == (
        "1 of them cannot be trained: the engine does not give a logprob for each token (no_logprobs); "
        f"{GIVES_LOGPROBS}\n"
    )
    assert out.endswith("2 episodes: 2 rewarded, mean reward 1, 1 cannot be trained\n")


def test_the_daemon_says_it_once_until_the_engine_tells(ajet: Ajet, run: Ajet, engine: str, tmp_path: Path) -> None:
    spoil(engine, "no_token_ids")
    with ProxyProcess(engine, tmp_path / "data", options=("--workers", "2")) as proxy:
        for _ in range(3):
            assert run("--proxy", proxy.url)[0] == 1
        line = f"{engine}/v1/chat/completions gives no token ids (no_token_ids), so nothing that it samples can be"
        assert line in ajet("status", "--proxy", proxy.url)[1]
        assert proxy.report()["alerts"][0].startswith(line) and proxy.report()["alerts"][0].endswith(GIVES_TOKEN_IDS)
        metrics = httpx.get(f"{proxy.url}/metrics", timeout=LONG_S, trust_env=False).text
        assert "\najet_alerts 1\n" in metrics
        assert until(lambda: f"alert: {line}" in proxy.errors())
        spoil(engine)
        assert run("--proxy", proxy.url)[0] == 0
        assert proxy.report()["alerts"] == []
        assert until(lambda: "alert over: what" in proxy.errors())
        assert proxy.errors().count(f"alert: {line}") == 1


@BOTH_WAYS
def test_an_agent_in_python_is_told_as_well(daemon: ProxyProcess, ajet: Ajet, engine: str) -> None:
    spoil(engine, "no_token_ids")

    def agent(task: str, episode: ajet_sdk.Episode) -> float:
        return float(ask(episode).is_success)

    results = ajet_sdk.run(agent, ["real/1"], repeat=2)
    assert results.untrainable == list(results)
    assert {item.reason for item in results} == {"discarded by the proxy: incomplete_call (no_token_ids)"}
    with ajet_sdk.episode("real/2") as episode:
        ask(episode)
        episode.reward(1.0)
    assert episode.outcome == Outcome(reward=1.0, discarded="incomplete_call", lost="no_token_ids")
    assert json.loads(ajet("show", episode.id, "--json")[1])["detail"] == "no_token_ids"
