"""Every event survives the journal's codec, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, get_args

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core import events as ev
from ajet_proxy.io.codec import UnknownRecord, decode, encode
from ajet_sdk.sample import Call
from tests.kit.strategies import make_call

number = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(codec=None), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6,
)
ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6).map(tuple)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    token_ids = draw(ids)
    logprobs = draw(st.lists(number, min_size=len(token_ids), max_size=len(token_ids)))
    call = make_call(draw(text), draw(ids), token_ids, at=draw(number), model=draw(text), agent=draw(text))
    return dataclasses.replace(
        call, logprobs=tuple(logprobs), parent=draw(st.none() | text), identified_by=draw(st.none() | text),
        altered=tuple(draw(st.lists(text, max_size=2))), episode=draw(text),
    )


names = st.lists(text, max_size=3).map(tuple)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "float": number,
    "str": text,
    "str | None": st.none() | text,
    "bool": st.booleans(),
    "int": st.integers(-(2**63), 2**63 - 1),
    "Call": calls(),
    "tuple[str, ...]": names,
    "tuple[str, ...] | None": st.none() | names,
    "Mapping[str, Any]": st.dictionaries(text, json_values, max_size=3),
    "Mapping[str, str] | None": st.none() | st.dictionaries(text, text, max_size=3),
    "tuple[tuple[str, tuple[str, ...]], ...]": st.lists(st.tuples(text, names), max_size=3).map(tuple),
}


@st.composite
def any_event(draw: st.DrawFn) -> ev.Event:
    kind = draw(st.sampled_from(get_args(ev.Event)))
    event: ev.Event = kind(**{field.name: draw(FIELDS[str(field.type)]) for field in dataclasses.fields(kind)})
    return event


@given(any_event())
def test_what_is_written_is_what_is_read(event: ev.Event) -> None:
    back = decode(encode(event))
    assert back == event
    assert repr(back) == repr(event)


@pytest.mark.parametrize("logprob", [-0.1, -1e-300, -0.0, math.nextafter(-1.0, 0.0)])
def test_logprobs_keep_every_bit(logprob: float) -> None:
    call = dataclasses.replace(make_call("c", [1], [2]), logprobs=(logprob,))
    back = decode(encode(ev.CallFinished(1.0, call)))
    assert isinstance(back, ev.CallFinished)
    assert back.call.logprobs[0].hex() == logprob.hex()


def test_fields_from_the_future_are_ignored_and_missing_ones_take_their_default() -> None:
    record = msgpack.packb(["TaskNamed", {"at": 1.0, "episode": "e", "task": "t", "colour": "blue"}])
    assert decode(record) == ev.TaskNamed(1.0, "e", "t", derived=True)


@pytest.mark.parametrize(
    "record",
    [
        msgpack.packb(["NoSuchEvent", {}]), msgpack.packb(["TaskNamed", {"at": 1.0}]), msgpack.packb(7), b"", b"\xc1",
        msgpack.packb(["TaskNamed", {}])[:-1], msgpack.packb(["CallFinished", {"at": 1.0, "call": {}}]),
        msgpack.packb(["CallFinished", {"at": 1.0, "call": {"logprobs": b"123", "token_ids": b"", "x": 1}}]),
        msgpack.packb(["EpisodeOpened", {"metadata": "{"}]),
    ],
)
def test_what_cannot_be_read_says_so(record: bytes) -> None:
    with pytest.raises(UnknownRecord):
        decode(record)
