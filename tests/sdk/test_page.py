"""The owner's page as a document: whole, closed in itself, and safe whatever agents wrote."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from typing import Any

import pytest

from ajet_sdk import page
from ajet_sdk.page import live_page, still_page

EVIL = ("</script><script>alert(1)</script>", "<!--<script>", "{{script}}", "]]>", "\u2028", '"><img src=x>', "&lt;")


class Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.scripts: list[tuple[str, str]] = []
        self.outside: list[str] = []
        self.tags: list[str] = []
        self._in: str | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        named = dict(attrs)
        self.outside += [value or "" for name, value in attrs if name in ("src", "href", "action")]
        if tag in ("script", "style"):
            self._in = named.get("type") or tag
            self.scripts.append((self._in, ""))

    def handle_endtag(self, tag: str) -> None:
        self._in = None

    def handle_data(self, data: str) -> None:
        if self._in is not None:
            self.scripts[-1] = (self._in, self.scripts[-1][1] + data)


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    return reader


def data_of(text: str) -> Any:
    return json.loads(next(body for kind, body in read(text).scripts if kind == "application/json"))


def test_the_live_page_is_one_file_that_names_no_other() -> None:
    text, policy = live_page()
    reader = read(text)
    assert reader.outside == ["data:,"]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text)
    assert "{{" not in re.sub(r"<script>.*</script>", "", text, flags=re.DOTALL)
    assert "connect-src 'self'" in policy and policy in text
    assert data_of(text) is None


def test_the_policy_names_the_very_script_and_style() -> None:
    for text, policy in (live_page(), (still_page("T", "I", [], {}), page.policy_of("'none'"))):
        assert policy in text
        bodies = dict(read(text).scripts)
        for kind in ("script", "style"):
            digest = base64.b64encode(hashlib.sha256(bodies[kind].encode()).digest()).decode()
            assert f"{kind}-src 'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none';") and "unsafe" not in policy


@pytest.mark.parametrize("evil", EVIL)
def test_whatever_an_agent_wrote_stays_data(evil: str) -> None:
    sections = [{"heading": evil, "episodes": [{"task": evil, "calls": [], evil: evil}]}]
    text = still_page(evil, evil, sections, {1: evil})
    assert read(text).tags == read(live_page()[0]).tags
    assert data_of(text) == {"title": evil, "intro": evil, "sections": sections, "texts": {"1": evil}}


@pytest.mark.parametrize("name", page.SCRIPTS)
def test_the_script_makes_nodes_and_never_markup(name: str) -> None:
    script = (page.FOLDER / name).read_text()
    markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|srcdoc"
    assert not re.search(rf"{markup}|localStorage|cookie", script)
    assert len(script.splitlines()) < 400
