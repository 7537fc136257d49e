"""Values as the engine's validation reads them; the table was made with pydantic, which vLLM uses."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.protocol.coercion import flag, integer, unread


@pytest.mark.parametrize(("value", "expected"), [
    (True, True), (False, False), (1, True), (0, False), (1.0, True), (0.0, False), (2, None), (1.5, None),
    ("true", True), ("TRUE", True), ("on", True), ("Y", True), ("1", True), ("t", True), ("yes", True),
    ("false", False), ("off", False), ("N", False), ("0", False), ("f", False), ("no", False),
    (" true", None), ("", None), ("1.0", None), ([], None), ({}, None), (None, None), (10**30, None),
])  # fmt: skip
def test_truth_values(value: Any, expected: bool | None) -> None:
    assert flag({"x": value}, "x") is expected
    assert unread({"x": value}, "x") is (expected is None and value is not None)
    assert not unread({}, "x")


@pytest.mark.parametrize(("value", "expected"), [
    (2, 2), (0, 0), (-1, -1), (True, 1), (False, 0), (2.0, 2), (2.5, None), (1e30, None), (float("nan"), None),
    (float("inf"), None), (10**30, 10**30), ("2", 2), (" 2 ", 2), ("+2", 2), ("-2", -2), ("1_0", 10), ("2.0", 2),
    ("02", 2), ("-0", 0), ("2.5", None), ("1__0", None), ("1e3", None), ("0x1", None), ("١", None), ("", None),
    ("1" * 5000, None), ([], None), (None, None),
])  # fmt: skip
def test_whole_numbers(value: Any, expected: int | None) -> None:
    got = integer({"x": value}, "x")
    assert got == expected
    assert type(got) is type(expected)


def test_what_is_left_out_is_none() -> None:
    assert flag({}, "x") is None
    assert integer({}, "x") is None
