"""Finding the call that a prompt repeats in other tokens, by the text that somebody else decodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from ajet_proxy.core.tokens import pack_tokens
from ajet_proxy.core.trajectory.repair import TRIED, find_same_text, with_same_text
from ajet_proxy.core.trajectory.timeline import pack
from ajet_sdk.sample import Call
from tests.kit.engine_tokens import IM_END, decode, encode
from tests.kit.strategies import make_call

ANSWER = (*encode("ok naïve"), IM_END)
ASKED = make_call("a", encode("hi "), ANSWER, at=1.0)


def search(prompt: Sequence[int], *calls: Call, spell: Callable[[Sequence[int]], str] | None = None) -> object:
    """The result of `find`, and the number of times that it had to ask."""
    running, asked = find_same_text(pack_tokens(prompt), [pack(call) for call in calls]), 0
    try:
        ids = next(running)
        while True:
            asked += 1
            ids = running.send((spell or (lambda ids: decode(ids, skip_chat_marks=False)))(ids))
    except StopIteration as ended:
        return ended.value, asked


def test_the_same_text_in_other_tokens_is_found_with_its_length() -> None:
    read = [*encode("hi ok naïve", merged=True), IM_END]
    assert len(read) < len(encode("hi ok naïve")) + 1
    found, asked = search([*read, *encode(" more")], ASKED)  # type: ignore[misc]
    assert found == ("a", len(read))
    assert asked < 12


@pytest.mark.parametrize(
    "prompt",
    [
        [*encode("hi "), *ANSWER, *encode(" more")], [*encode("hi ok naïf", merged=True), IM_END],
        encode("hi ok naïve", merged=True), encode("something else"),
    ],
    ids=["the same tokens", "other text", "no stop token", "nothing shared"],
)
def test_what_is_not_found(prompt: Sequence[int]) -> None:
    found, _ = search(prompt, ASKED)  # type: ignore[misc]
    assert found is None


def test_the_latest_call_that_fits_is_taken_and_few_are_tried() -> None:
    longer = make_call("b", [*ASKED.prompt_token_ids, *ANSWER, *encode(" and ")], (*encode("guess"), IM_END), at=2.0)
    read = [*encode("hi ok naïve<|im_end|> and guess<|im_end|>", merged=True), *encode(" x")]
    found, _ = search(read, ASKED, longer)  # type: ignore[misc]
    assert found == ("b", len(read) - 2)
    others = [make_call(f"o{i:02d}", encode("hi ok other"), (i,), at=3.0 + i) for i in range(TRIED)]
    assert search(read, ASKED, *others[1:])[0] == ("a", 8)  # type: ignore[index]
    assert search(read, ASKED, *others)[0] is None  # type: ignore[index]


def test_half_a_character_is_no_text() -> None:
    def spell(ids: Sequence[int]) -> str:
        return bytes(ids).decode("utf-8", "replace")

    half = make_call("h", encode("hi "), encode("é")[:1], at=1.0)
    assert search(encode("hi é"), half, spell=spell) == (None, 0), "its tokens are the prompt's beginning"
    assert search(encode("hi \N{REPLACEMENT CHARACTER}"), half, spell=spell) == (None, 1)


def test_a_text_that_ends_within_a_token_is_not_found() -> None:
    """The engine read one token where the call ends in its middle."""
    cut = make_call("c", encode("hi "), encode("hel"), at=1.0)
    found, _ = search([*encode("hi "), *encode("hello", merged=True)], cut)  # type: ignore[misc]
    assert found is None


def test_only_earlier_calls_of_one_model_and_agent_count_and_what_is_known_stays() -> None:
    read = (*encode("hi ok naïve<|im_end|>", merged=True), *encode(" x"))
    asked: list[str] = []

    def text(model: str, ids: Sequence[int]) -> str:
        asked.append(model)
        return decode(ids, skip_chat_marks=False)

    later, other = make_call("b", read, (5,), at=2.0), make_call("d", read, (5,), at=2.0, agent="judge")
    known = make_call("e", read, (5,), at=0.5)
    out = {call.call: call.same_text for call in with_same_text([other, later, ASKED, known], text)}
    assert out == {"a": None, "b": ("a", len(read) - 2), "d": None, "e": None}
    again = with_same_text(list(with_same_text([later, ASKED], text)), lambda model, ids: "")
    assert [call.same_text for call in again] == [None, ("a", len(read) - 2)]
    assert set(asked) == {"m"}
