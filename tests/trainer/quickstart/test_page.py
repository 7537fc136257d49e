from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

from ajet_trainer.quickstart.page import Token, page_html, rows_of, token_html, versions_of


def call(name: str, prompt: list[int], sampled: list[int], version: Any = 1, **more: Any) -> dict[str, Any]:
    return {
        "call": name, "started_at": float(name[1:]), "prompt_token_ids": prompt, "token_ids": sampled,
        "logprobs": [-0.5] * len(sampled), "policy_version": version, **more,
    }  # fmt: skip


def record(*calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"episode": "ep-1", "task": "t", "state": "trained", "reward": 0.5, "calls": list(calls), **more}


def ids(row: list[Token]) -> list[int]:
    return [token.id for token in row]


def test_calls_that_go_on_make_one_row_with_each_sampled_token_once() -> None:
    rows = rows_of([call("c2", [1, 2, 3, 4, 5], [6]), call("c1", [1, 2], [3, 4])])
    assert [ids(row) for row in rows] == [[1, 2, 3, 4, 5, 6]]
    assert [token.logprob is not None for token in rows[0]] == [False, False, True, True, False, True]


def test_a_call_that_does_not_go_on_makes_a_row_of_its_own() -> None:
    rows = rows_of([call("c1", [1, 2], [3, 4]), call("c2", [1, 2, 9, 4], [6])])
    assert [ids(row) for row in rows] == [[1, 2, 3, 4], [1, 2, 9, 4, 6]]


def test_incomplete_calls_are_left_out() -> None:
    assert rows_of([call("c1", [1], [2], complete=False)]) == []


def test_versions_of_a_call_over_a_weight_update() -> None:
    assert versions_of([[3, 2], [4, 1]], 3) == [3, 3, 4]
    assert versions_of(5, 2) == [5, 5]


def test_tokens_say_what_is_known_of_them_and_are_escaped() -> None:
    assert 'class="c"' in token_html(Token(7), "a")
    sampled = token_html(Token(7, -0.6931, 3), "<b>")
    assert "&lt;b&gt;" in sampled
    assert "logprob -0.693 (p = 0.500) · policy version 3" in sampled
    assert "<b>" not in token_html(Token(7), '<script>"').replace("<b>↵</b>", "")


class Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.outside += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag in ("script", "link", "iframe"):
            self.outside.append(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_holds_everything_and_asks_nobody() -> None:
    sections = [("Early", [record(call("c1", [1], [2]))]), ("Late", [record(call("c1", [1], [2]), reward=None)])]
    page = page_html("Title & more", "Intro", sections, {1: "one\n", 2: "two"}.__getitem__)
    links = Links()
    links.feed(page)
    assert not links.outside
    assert not re.search(r"https?://|url\(|@import", page)
    assert "{{" not in page
    assert "Title & more" in links.text
    assert links.text.count("two") == 2
