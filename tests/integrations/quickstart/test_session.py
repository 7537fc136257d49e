"""The quick start's page: the episodes it is given, with the text of each token, and nothing twice."""

from __future__ import annotations

import json
import re
from typing import Any

from integrations.quickstart.session import page_html


def record(name: str, *tokens: int, **more: Any) -> dict[str, Any]:
    prompt, sampled = list(tokens[:-1]), list(tokens[-1:])
    call = {"call": "c1", "complete": True, "prompt_token_ids": prompt, "token_ids": sampled, "logprobs": [-0.5]}
    timeline = {
        "sample": f"{name}/0", "model": "m", "agent": "", "token_ids": [*prompt, *sampled], "calls": ["c1"],
        "loss_mask": [*(0 for _ in prompt), 1], "logprobs": [*(0.0 for _ in prompt), -0.5],
        "policy_versions": [[3, 1]], "spans": [["c1", len(prompt), len(tokens)]],
    }
    return {"episode": name, "task": "t", "state": "trained", "reward": 0.5, "calls": [call],
            "timelines": [timeline], **more}


def data_of(page: str) -> Any:
    found = re.search(r'<script type="application/json" id="ajet-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_the_page_holds_its_episodes_and_the_text_of_each_token() -> None:
    sections = [("Early", [record("ep-1", 1, 2)]), ("Late", [record("ep-2", 1, 3, reward=None)])]
    page = page_html("Title & more", "Intro", sections, {1: "one\n", 2: "two", 3: "three"}.__getitem__)
    data = data_of(page)
    assert (data["title"], data["intro"]) == ("Title & more", "Intro")
    assert data["texts"] == {"1": "one\n", "2": "two", "3": "three"}
    assert [section["heading"] for section in data["sections"]] == ["Early", "Late"]
    (late,) = data["sections"][1]["episodes"]
    assert late["timelines"][0]["token_ids"] == [1, 3]
    assert late["calls"] == [{"call": "c1", "complete": True}]


def test_an_episode_without_timelines_is_no_trouble() -> None:
    page = page_html("T", "I", [("H", [{"episode": "e", "calls": []}])], str)
    assert data_of(page)["texts"] == {}
