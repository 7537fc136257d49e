"""The engine's word on its template: what its answers say, and which requests need to know."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.anthropic.template import (
    COUNT,
    TOKENIZE,
    Template,
    depends_on_template,
    questions,
    template_of,
)

COUNTS = ({"input_tokens": 9}, {"input_tokens": 7})
KNOWN = [{"tokens": [n]} for n in range(6)]


@pytest.mark.parametrize(("asked", "expected"), [
    ({}, False), ({"messages": 1, "thinking": "off"}, False), ({"messages": [1, {"role": "user"}]}, False),
    ({"messages": [{"role": "user"}, {"role": "system"}]}, True), ({"thinking": {"type": "disabled"}}, True),
    ({"thinking": {"type": "enabled"}}, False),
])  # fmt: skip
def test_which_requests_depend_on_it(asked: dict[str, Any], expected: bool) -> None:
    assert depends_on_template(asked) is expected


def test_what_is_asked() -> None:
    asked = questions("m")
    assert [route for route, _ in asked] == [COUNT] * 2 + [TOKENIZE] * 6
    assert all(body["model"] == "m" for _, body in asked)
    inline, front = (body for _, body in asked[:2])
    texts = [message["content"] for message in inline["messages"] if message["role"] == "system"]
    assert front["system"] == inline["system"] + "".join(texts)
    assert front["messages"] == [message for message in inline["messages"] if message["role"] != "system"]


@pytest.mark.parametrize(("counts", "merges"), [
    (({"input_tokens": 7}, {"input_tokens": 7}), True), (COUNTS, False), ((None, {"input_tokens": 7}), False),
    ((None, None), False), (("?", []), False),
])  # fmt: skip
def test_equal_counts_are_the_same_conversation(counts: tuple[Any, Any], merges: bool) -> None:
    assert template_of([*counts, *KNOWN]) == Template(merges, "none")


@pytest.mark.parametrize(("rendered", "effort"), [
    (KNOWN, "none"), ([None, *KNOWN[1:]], "low"), ([KNOWN[3], *KNOWN[1:]], "low"), ([KNOWN[0], *[None] * 5], "none"),
    ([None] * 6, "none"),
])  # fmt: skip
def test_a_template_that_knows_no_none_gets_a_low_effort(rendered: list[Any], effort: str) -> None:
    assert template_of([*COUNTS, *rendered]) == Template(False, effort)


def test_an_engine_that_says_nothing() -> None:
    assert template_of([None] * 8) is None
