"""Numbers in what programs and graders print: only what can be nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ajet_sdk.rewards.numbers import LastNumber
from tests.kit.steps import is_within


def read(*pieces: bytes) -> LastNumber:
    reader = LastNumber()
    for piece in pieces:
        reader.feed(piece)
    return reader


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("1", 1.0), (" -0.5\r", -0.5), ("1e3", 1000.0), ("+.5", 0.5), ("5.", 5.0), ("-0", 0.0), ("٣", 3.0),
        ("\x1b[1;32m0.5\x1b[0m", 0.5), ("\ufeff0.5", 0.5), ("50%\r0.5", 0.5), ("1e12", 1e12),
    ],
)
def test_a_line_that_is_a_number(line: str, value: float) -> None:
    reader = read(f"{line}\n".encode())
    assert (reader.value, reader.named) == (value, value)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("score: 0.5", 0.5), ("score=-.5", -0.5), ("Score :\t+1 ", 1.0), ("reward = 1e-3\r", 0.001), ("a: b: 3", 3.0),
        ("step 5: 0.5", 0.5), ("pass@1=0.5", 0.5), ("f1:0.8", 0.8), ('"score": 0.5', 0.5),
        ("score: \x1b[1m0.5\x1b[0m", 0.5), ("Punkte: ٣", 3.0),
    ],
)
def test_a_line_that_ends_in_a_number_after_a_sign(line: str, value: float) -> None:
    reader = read(f"{line}\n".encode())
    assert (reader.value, reader.named) == (None, value)


@pytest.mark.parametrize(
    "line",
    [
        "9 passed, 2 warnings", "1 error in 0.05s", "collected 12 items", "line 7: pytest: not found", "17/20", "85%",
        "3/4", "score: 85%", "score: 17/20", "score: 0.5.", "score: 0.5 of 1", '{"score": 0.5}', "1,000", "1,5",
        "score: 1,000", "1_000", "0x10", "nan", "inf", "-infinity", "score: nan", "1e400", "1e13", "score=1e400",
        "12:30", "took 0:01:05", "ratio 3:4", "3 : 4", "http://localhost:8484", "127.0.0.1:80", "assert 3 == 5",
        "a != 5", "a >= 5", "= 5", "=== 5", ": 5", "v1.2.3", "x7", "- 5", "−5", "1 2", "½", "", "\x00", "score:",
    ],
)
def test_anything_else_is_no_number(line: str) -> None:
    reader = read(f"{line}\n".encode())
    assert (reader.value, reader.named) == (None, None)


def test_the_last_line_that_counts_decides() -> None:
    reader = read(b"0.25\n", b"score: 0.5\n", b"done, see all files\n", b"\n", b" \n")
    assert (reader.value, reader.named, reader.last) == (0.25, 0.5, "done, see all files")


@pytest.mark.parametrize("printed", [
    b"Using --randomly-seed=1234567\ncollected 9 items\n9 passed, 2 warnings\n", b"tests: 20\nscore: 85%\n",
    b"see build.log:12\n", b"at src/main:7\n", b"passed=5, failed=3\n", b"0.25\nscore: 0.5\n9 passed\n",
    b"12:30:05 at main:7: error 3\n", b"finished at 12:30:05\n",
])  # fmt: skip
def test_a_number_that_may_be_something_else_is_none(printed: bytes) -> None:
    assert read(*printed.splitlines(keepends=True)).named is None


@pytest.mark.parametrize("printed", [
    b"pass@1: 0.5\n", b"top-1 accuracy = 0.5\n", b"eval.score=0.5\n", b"score:0.5\nOK\n", b"9 passed\nscore: 0.5\n",
    b"9 passed\n0.5\n", b"0.5\n9 passed in 3.1s\n", b"0.5\nscore: 3/4\n", b"score: 0.25\n0.5\n9 passed\n",
    b"[12:30:05] score: 0.5\n", b"2026-11-27 14:00:01,123 INFO score: 0.5\n",
])  # fmt: skip
def test_a_name_and_what_stands_before_it_may_have_numbers(printed: bytes) -> None:
    assert read(*printed.splitlines(keepends=True)).named == 0.5


@pytest.mark.parametrize("last", [b"nan\n", b"1e400\n", b"score: inf\n"])
def test_what_no_reward_can_be_is_not_passed_over(last: bytes) -> None:
    assert read(b"0.25\n", last).named is None


def test_a_piece_of_a_longer_line_is_no_number() -> None:
    reader = read(b"x" * 65536, b"7", b"\n", b"0.5")
    assert (reader.value, reader.named) == (0.5, 0.5)
    assert read(b"0.5\n", b"x" * 65536, b"7\n").value == 0.5


def test_bytes_that_are_no_text_are_no_number() -> None:
    assert read(b"0.5\n", b"\xff\xfe\n").value == 0.5


def test_a_long_line_is_read_at_once() -> None:
    """And not in the square of its length: sixteen times the line within sixty times the time."""

    def reading(length: int) -> Callable[[], None]:
        def reads() -> None:
            for line in (b"a:" * (length // 2) + b" b c\n", b" " * length + b"x\n", b"=" * length + b"\n"):
                assert read(line).named is None

        return reads

    assert is_within(60, reading(4_000), reading(64_000))
