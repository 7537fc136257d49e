"""The tree of texts against a plain list of them."""

from __future__ import annotations

from itertools import product
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.tokens import pack_tokens, stands_at, unpack_tokens
from ajet_proxy.core.trajectory import texts as module
from ajet_proxy.core.trajectory.texts import START, Reader, Text, Texts

Tokens = tuple[int, ...]
some = st.lists(st.lists(st.integers(0, 2), max_size=6).map(tuple), max_size=12)


def shared(a: Tokens, b: Tokens) -> int:
    return next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def tree_of(said: list[Tokens]) -> tuple[Texts, list[int]]:
    """A tree of what was said, by calls that are named by their place, and the number of each of their texts."""
    texts = Texts()
    return texts, [texts.add(pack_tokens(tokens), str(place)) for place, tokens in enumerate(said)]


@given(some, st.lists(st.integers(0, 2), max_size=7).map(tuple))
def test_what_was_added_is_there_and_the_nearest_is_found(said: list[Tokens], prompt: Tokens) -> None:
    texts, numbers = tree_of(said)
    for number, tokens in zip(numbers, said, strict=True):
        for end in range(len(tokens) + 1):
            assert texts.whole(number, end) == pack_tokens(tokens[:end])
            for other in numbers:
                whole = texts.whole(other, texts.texts[other].end if other != START else 0)
                begins = bool(end) and whole.startswith(pack_tokens(tokens[:end]))
                found = texts.reached([(other, end)]).get(texts.holder(number, end), 0) >= end > 0
                assert found == begins
    ends = [(number, end) for number, tokens in zip(numbers, said, strict=True) for end in (len(tokens), 0)]
    for (one, length), (other, most) in product(ends, ends):
        read = [unpack_tokens(texts.whole(*end)) for end in ((one, length), (other, most))]
        assert texts.common((one, length), (other, most)) == shared(*read)
    reader = Reader(texts)
    assert [reader.whole(*end) for end in ends] == [texts.whole(*end) for end in ends]
    assert texts.holders(ends) == [texts.holder(*end) for end in ends]
    assert texts.shared_with(pack_tokens(prompt), ends) == [
        shared(prompt, unpack_tokens(texts.whole(*end))) for end in ends
    ]
    call, length = texts.nearest(pack_tokens(prompt))
    assert length == max((shared(prompt, tokens) for tokens in said), default=0)
    assert call == "" if length == 0 else shared(prompt, said[int(call)]) >= length


@given(some)
def test_many_that_are_added_at_once_are_the_same_tree(said: list[Tokens]) -> None:
    texts = Texts()
    again = texts.add_all([(pack_tokens(tokens), str(place)) for place, tokens in enumerate(said)])
    assert texts.size() == tree_of(said)[0].size()
    for number, tokens in zip(again, said, strict=True):
        assert texts.whole(number, len(tokens)) == pack_tokens(tokens)


@given(some)
def test_texts_are_ordered_as_what_they_say(said: list[Tokens]) -> None:
    texts, numbers = tree_of(said)
    places = texts.places()
    assert sorted(places) == [START, *range(len(texts.texts))] and sorted(places.values()) == list(range(len(places)))

    def place(at: int) -> tuple[int, int]:
        return places[texts.holder(numbers[at], len(said[at]))], len(said[at])

    assert sorted(range(len(said)), key=place) == sorted(range(len(said)), key=lambda at: pack_tokens(said[at]))


@given(some)
def test_a_token_that_several_begin_with_is_kept_once(said: list[Tokens]) -> None:
    texts, _ = tree_of(said)
    assert texts.size() == 4 * len({tokens[:end] for tokens in said for end in range(1, len(tokens) + 1)})
    for number, text in enumerate(texts.texts):
        assert text.tokens
        assert text.start == (0 if text.behind == START else texts.texts[text.behind].end)
        assert texts.whole(number, text.end) == pack_tokens(said[int(text.call)][: text.end])


@given(some, st.data())
def test_what_beginnings_share_is_counted_once(said: list[Tokens], data: st.DataObject) -> None:
    texts, numbers = tree_of(said)
    some_of = [data.draw(st.sampled_from(range(len(said)))) for _ in range(data.draw(st.integers(0, 5))) if said]
    ends = [data.draw(st.integers(0, len(said[place]))) for place in some_of]
    beginnings = {said[place][:n] for place, end in zip(some_of, ends, strict=True) for n in range(1, end + 1)}
    asked = [(numbers[place], end) for place, end in zip(some_of, ends, strict=True)]
    assert texts.distinct(asked) == len(beginnings)


@given(some, some)
def test_a_tree_of_what_is_written_goes_on_as_before(said: list[Tokens], later: list[Tokens]) -> None:
    texts, _ = tree_of(said)
    again = Texts([Text(text.behind, text.start, text.tokens, text.call) for text in texts.texts])
    assert again == texts
    for tokens in later:
        assert again.add(pack_tokens(tokens), "later") == texts.add(pack_tokens(tokens), "later")
    assert again == texts


def test_one_conversation_is_one_text() -> None:
    texts, numbers = tree_of([tuple(range(end)) for end in range(2, 100)])
    assert (len(texts.texts), set(numbers)) == (1, {0})
    whole = texts.texts[0].tokens
    assert texts.whole(0, 99) is whole


def test_the_way_to_the_nearest_does_not_grow_with_the_texts() -> None:
    """Many conversations behind one prompt: what is compared is the prompt, once, and one text more."""
    prompt = tuple(range(50))
    for conversations in (10, 1000):
        texts, _ = tree_of([(*prompt, 1000 + number, 7) for number in range(conversations)])
        with mock.patch.object(module, "stands_at", side_effect=stands_at) as compared:
            assert texts.nearest(pack_tokens((*prompt, 1009, 7, 8))) == ("9", 52)
        assert compared.call_count == 2
