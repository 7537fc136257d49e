"""The view that a person has of a status and of an episode."""

from __future__ import annotations

from typing import Any

from ajet_sdk.views import clients_view, episode_view, sampling_text, status_view

STATUS: dict[str, Any] = {
    "version": "0.1.0",
    "models": {"m": {"policy_version": 3, "gate": "open", "upstreams": ["http://a", "http://b"]}, "n": {}},
    "episodes": {
        "opened": 7, "open": 1, "sealed": 0, "ready": 2, "leased": 1, "trained": 2, "recorded": 1, "discarded": 0,
    },
    "groups": {"complete": 1, "waiting": 2},
    "drift": {"retokenized": 3, "template": None},
}
RECORD: dict[str, Any] = {
    "episode": "ep-1", "task": "t", "state": "discarded", "reason": "aborted", "model": "m", "eval": False,
    "rewards": [{"id": "r", "value": 0.5, "final": True, "note": None}], "reward": 0.5, "identified_by": "key",
    "opened_at": 1.79525e9, "metadata": {},
    "calls": [
        {"call": "c1", "prompt_tokens": 10, "sampled_tokens": 3, "finish_reason": "stop", "policy_version": 3,
         "identified_by": "key", "complete": True, "sampling": {"logprobs": "raw", "temperature": 0.7, "top_p": 0.9}},
        {"call": "c2", "prompt_token_ids": [1, 2], "token_ids": [3], "policy_version": [[3, 1]], "complete": False,
         "reason": "disconnected"},
    ],
    "timelines": [{"calls": ["c1", "c2"], "tokens": 13, "broken_by": None}, "c3"],
}


def test_the_sum_that_must_hold_is_shown() -> None:
    view = status_view(STATUS)
    sum_of = "open 1 + sealed 0 + ready 2 + leased 1 + trained 2 + recorded 1 + discarded 0"
    assert f"opened 7 = {sum_of}" in view
    for words in ("ajet proxy 0.1.0", "http://a, http://b", "groups: complete 1, waiting 2", "drift: retokenized 3"):
        assert words in view
    broken = {**STATUS, "episodes": {**STATUS["episodes"], "opened": 8}}
    assert f"opened 8 ≠ {sum_of}" in status_view(broken)


def test_a_proxy_with_nothing_yet() -> None:
    assert "no models yet" in status_view({})


def test_what_serves_any_model_is_shown_among_them() -> None:
    others = {"policy_version": 5, "gate": "open", "upstreams": ["http://all"]}
    alone = [line.split("  ") for line in status_view({"any_model": others}).splitlines()]
    cells = [[cell.strip() for cell in line if cell] for line in alone]
    assert ["any model", "5", "open", "-", "-", "http://all"] in cells
    view = status_view({**STATUS, "any_model": others})
    assert "any other model" in view
    assert "any_model" not in view
    assert "no models" not in view


def test_a_team_and_who_waits_for_whom() -> None:
    team = {"coder": {"updates": 3}, "planner": {"updates": 5, "waits_for": "coder"}}
    assert "\nteam  coder 3, planner 5 (waits for coder)" in status_view({**STATUS, "teams": [team]})
    assert "team" not in status_view(STATUS)


def test_an_episode() -> None:
    view = episode_view(RECORD)
    for words in (
        "episode ep-1: discarded (aborted)", "opened_at: 2026-11-21 08:33:20 UTC", "1 reward\n  id r, value 0.5",
        "2 calls", "lost: disconnected", "2 timelines", "c1 → c2, tokens 13", "  c3",
    ):
        assert words in view
    rows = [line.split() for line in view.splitlines()]
    assert ["c1", "10", "3", "stop", "3", "key", "T=0.7", "top_p=0.9,", "raw", "logprobs", "-"] in rows
    assert ["c2", "2", "1", "-", "3,", "1", "-", "-", "-", "lost:", "disconnected"] in rows
    assert "metadata" not in view


def test_who_learned_what_from_an_episode() -> None:
    models = {
        "planner": {"calls": 2, "sampled_tokens": 9, "reward": 1.0, "share": "trained", "policy_version": 3},
        "coder": {"calls": 1, "sampled_tokens": 4, "reward": 0.5, "share": "filtered", "reason": "filtered: too_long"},
        "judge": {"calls": 1, "sampled_tokens": 2, "reward": None}, "late": {"calls": 0, "share": "ready"},
    }
    view = [line.split() for line in episode_view({"episode": "e", "state": "trained", "models": models}).splitlines()]
    at = view.index(["4", "models"])
    assert view[at + 1 : at + 6] == [
        "model calls sampled reward learned".split(), "planner 2 9 1 trained, policy version 3".split(),
        "coder 1 4 0.5 filtered: too_long".split(), "judge 1 2 - nothing".split(), "late 0 None - ready".split(),
    ]


def test_an_episode_of_another_shape_is_still_shown() -> None:
    view = episode_view({"episode": "e", "state": "open", "opened_at": "yesterday", "later": [1, 2]})
    assert "opened_at: yesterday" in view
    assert "later: 1, 2" in view
    assert "0 rewards" in view
    assert "timelines" not in view


def test_an_agents_words_do_not_steer_the_terminal() -> None:
    view = episode_view({"episode": "ep-2", "state": "open", "task": "\x1b[2J\x07 naïve 模型"})
    assert "\\x1b[2J\\x07 naïve 模型" in view
    assert "\x1b" not in view


def test_how_a_call_was_sampled_in_short() -> None:
    assert sampling_text({"logprobs": "processed"}) == "processed logprobs"
    unknown = {"logprobs": "unknown", "temperature": 0, "top_p": None, "min_p": None}
    assert sampling_text(unknown) == "T=0, 2 unknown, unknown logprobs"
    long = {"bad_words": ["a"], "logit_bias": "sha256:0", "logprobs": "raw", "seed": 1790000000, "structured": "regex"}
    assert sampling_text(long) == "bad_words logit_bias seed=1790000000 structured=regex, raw logprobs"
    assert sampling_text({}) == "unknown logprobs" and sampling_text(None) == "-"


CLIENT: dict[str, Any] = {
    "client": "client-1", "name": "host:agent.py", "state": "joined", "lane": None, "revision": "abc", "heard_at": 90.0,
    "episodes": {"opened": 14, "open": 2, "sealed": 1, "ready": 2, "leased": 1, "trained": 3, "recorded": 1},
    "discarded": {"aborted": 3, "stale": 9, "no_reward": 1}, "failures": {"infra": 2, "agent": 1}, "per_minute": 12.34,
    "mean_reward": 0.5,
}


def test_who_plays() -> None:
    assert "no clients" in clients_view({"clients": []})
    gone = [
        {"name": f"gone-{number}", "state": "gone", "reason": "silent", "lane": "math", "heard_at": 40.0}
        for number in range(12)
    ]
    rows = [line.split() for line in clients_view({"now": 100.0, "clients": [CLIENT, *gone]}).splitlines()]
    assert rows[1] == "host:agent.py - abc joined 2 4 4 2 2 12.3 0.500 10 s ago".split()
    assert rows[2] == "gone-0 math - silent 0 0 0 0 0 0.0 - 60 s ago".split()
    assert len(rows) == 12
