"""The headers of a request: labels, rewards, and names that nearly are ours.

What two attempts at one request have in common.
"""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from multidict import CIMultiDict

from ajet_proxy.core.identity.headers import LIKELY, Headers, Labels, is_text, meant, retries, retry_key, retry_keys
from ajet_sdk.errors import BadRequest
from ajet_sdk.routes import Reward


def labels(**sent: str) -> Labels:
    return Headers({f"x-ajet-{name.replace('_', '-')}": value for name, value in sent.items()}).labels


def test_labels() -> None:
    assert labels(task="gsm8k/17", agent="solver", eval=" True ") == Labels("gsm8k/17", "solver", True, None)
    assert labels(task="", eval="0") == Labels(None, None, False, None)


@pytest.mark.parametrize("sent", [
    {"x-ajet-eval": "maybe"}, {"x-ajet-task": "\udcff"}, {"x-ajet-agent": "a" * 1001}, {"x-ajet-reward": "nan"},
    {"x-ajet-reward": "1_0"},
    {"x-ajet-reward": "-inf"}, {"x-ajet-reward": "1e999"}, {"x-ajet-reward": "good"}, {"x-ajet-reward": ""},
    {"x-ajet-reward": "1", "x-ajet-final": "2"}, {"x-ajet-final": "1"}, {"x-ajet-reward-call": "call-1"},
    {"x-ajet-reward": "1", "x-ajet-reward-state": "s"},
    {"x-ajet-reward": "1", "x-ajet-reward-call": "c", "x-ajet-reward-state": "s" * 1001},
])  # fmt: skip
def test_an_unusable_label_is_refused_each_time(sent: Mapping[str, str]) -> None:
    headers = Headers(sent)
    for _ in range(2):
        with pytest.raises(BadRequest) as caught:
            headers.labels  # noqa: B018 - asking is what raises
        assert caught.value.param is not None and caught.value.param.lower() in ("x-ajet-reward", *sent)


def test_rewards() -> None:
    assert labels(reward="0.5").reward == Reward(0.5, None, None, False)
    assert labels(reward="-1", final="1").reward == Reward(-1.0, None, None, True)
    assert labels(reward="1e0", final="0", reward_call="call-1").reward == Reward(1.0, "call-1", None, False)
    stated = labels(reward="0", reward_call="call-1", reward_state="kitchen").reward
    assert stated == Reward(0.0, "call-1", None, False, state="kitchen")
    assert labels(reward="0", reward_note="n" * 10_000).reward == Reward(0.0, final=False, note="n" * 10_000)
    cut = labels(reward="0", reward_note="\udce9" + "n" * 10_000).reward
    assert cut == Reward(0.0, final=False, note=f"?{'n' * 9_994}(cut)")
    with pytest.raises(BadRequest):
        labels(reward_note="of nothing")


def test_two_rewards_must_be_one() -> None:
    first, other = ("X-AJet-Reward", "1"), ("accept", "2")
    assert Headers(CIMultiDict([first, other, first])).labels.reward == Reward(1.0, None, None, False)
    with pytest.raises(BadRequest, match="X-AJet-Reward is there twice"):
        Headers(CIMultiDict([first, other, ("x-ajet-reward", "0")])).labels  # noqa: B018 - asking is what raises


def test_the_key_is_read_once() -> None:
    headers = Headers({"authorization": "Bearer sk-a"})
    assert headers.key == headers.key == "sk-a"
    assert Headers({}).key is None and Headers({}).misspelt == []


def test_names_of_episodes() -> None:
    assert (Headers({}).episode, Headers({}).session) == (None, None)
    assert Headers({"x-ajet-episode": "ep-1", "session-id": ""}).episode == "ep-1"
    assert Headers({"session-id": "", "x-session-id": "s", "thread-id": "t"}).session == ("thread-id", "t")
    with pytest.raises(BadRequest):
        Headers({"x-ajet-episode": "no good"}).episode  # noqa: B018


def test_text_is_what_utf8_holds() -> None:
    assert is_text("é日😀")
    assert not is_text("\ud800")


def test_a_header_that_looks_like_ours_is_told_from_those_that_are() -> None:
    names = ["X-AJet-Episode", "x-ajet-call", "X-AJET-TASK", "X-AJet-Agent", "X-AJet-Eval", "X-AJet-Wire"]
    ours = [*names, "X-AJet-Reward", "X-AJet-Reward-Call", "X-AJet-Reward-State", "X-AJet-Reward-Model", "X-AJet-Final",
            "X-AJet-Reward-Agent", "X-AJ", "Accept"]  # fmt: skip
    assert Headers(dict.fromkeys(ours, "")).misspelt == []
    long = "x-ajet-" + "a" * 60_000
    unknown = Headers(dict.fromkeys(["x-ajet-rewards", "X-AJet-Epsiode", "X-AJet-", long], "")).misspelt
    assert unknown == ["x-ajet-rewards", "x-ajet-epsiode", "x-ajet-", long[:LIKELY]]
    assert list(map(meant, unknown[:3])) == ["X-AJet-Reward", "X-AJet-Episode", "X-AJet-Wire"]
    assert meant(unknown[3]).startswith("X-AJet-")


@pytest.mark.parametrize("whose", ["model", "agent"])
def test_a_reward_may_be_for_one_model_or_agent(whose: str) -> None:
    reward = Headers({"x-ajet-reward": "0.5", f"x-ajet-reward-{whose}": "planner"}).labels.reward
    assert reward is not None
    other = {"model": reward.agent, "agent": reward.model}[whose]
    assert (reward.value, getattr(reward, whose), other) == (0.5, "planner", None)
    with pytest.raises(BadRequest, match="the headers X-AJet-Reward-… need X-AJet-Reward"):
        Headers({f"x-ajet-reward-{whose}": "planner"}).labels  # noqa: B018


def test_the_way_that_a_request_came() -> None:
    sent = CIMultiDict([("VIA", "1.1 front"), ("Via", "1.0 x,1.1 ajet_proxy-1 (a comment)"), ("X-Via", "ajet_proxy-2")])
    assert Headers(sent).came_through("ajet_proxy-1")
    assert not Headers(sent).came_through("ajet_proxy")
    assert not Headers(sent).came_through("ajet_proxy-2")
    assert not Headers({}).came_through("ajet_proxy-1")


# --- test retries


COUNT, KEY = "X-Stainless-Retry-Count", "Idempotency-Key"


@pytest.mark.parametrize(
    ("count", "often"),
    [(None, 0), ("", 0), ("0", 0), ("00", 0), ("1", 1), ("10", 10), ("-1", 0), ("x", 0), ("\u0661", 0),
     ("0002", 2), ("9" * 5000, 999_999_999)],
)  # fmt: skip
def test_a_client_says_how_often_it_tried(count: str | None, often: int) -> None:
    headers = {} if count is None else {COUNT: count}
    assert retries(headers) == often
    assert retry_keys(headers, "/p", b"{}", scope=b"")["retries"] == often


def test_a_key_is_kept_as_a_digest_whatever_bytes_it_has() -> None:
    keys = [retry_key({KEY: key}) for key in ("a", "b", "\udcff")]
    assert len(set(keys)) == 3 and all(key is not None and len(key) == 64 for key in keys)
    assert retry_key({}) is None and retry_key({KEY: ""}) is None


def test_attempts_of_two_clients_or_at_two_requests_have_nothing_in_common() -> None:
    def one(path: str = "/p", body: bytes = b"{}", scope: bytes = b"s", key: str = "k") -> tuple[str, str]:
        found = retry_keys({KEY: key}, path, body, scope=scope)
        return found["body_hash"], found["idempotency_key"]

    assert one() == one()
    others = [one(path="/q"), one(body=b"[]"), one(scope=b"t")]
    assert len({one()[0], *(body for body, _ in others)}) == 4
    assert one()[1] not in (one(key="l")[1], one(body=b"[]")[1], one(scope=b"t")[1])
    assert retry_keys({}, "/p", b"{}", scope=b"s") == {
        "body_hash": one()[0], "idempotency_key": None, "retries": 0
    }  # fmt: skip
