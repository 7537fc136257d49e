"""Server-sent events at any split: no byte is lost, no event is late, no character is cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.protocol.sse import SseEvent, SseParser
from tests.kit.steps import own_s

PIECES = st.lists(
    st.sampled_from((
        b"data: ", b"data:", b"data", b"event: x", b": note", b"\n", b"\r", b"\r\n", b"\n\n", b"\r\n\r\n", b"\r\r",
        b"{}", b"[DONE]", b" ", b"\xef\xbb\xbf", "é日😀".encode(), b"\xff", b"id: 1", b"datax: 1",
    )),
    max_size=30,
).map(b"".join)  # fmt: skip


def parse(parts: list[bytes]) -> tuple[list[SseEvent], bytes]:
    parser = SseParser()
    events = [event for part in parts for event in parser.feed(part)]
    return events, parser.take()


def data_of(events: list[SseEvent]) -> list[bytes]:
    return [event.data for event in events if event.data is not None]


def cuts(stream: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({0, len(stream), *(place % (len(stream) + 1) for place in places)})
    return [stream[a:b] for a, b in pairwise(marks)]


@given(PIECES, st.lists(st.integers(0, 10_000), max_size=12))
def test_no_split_matters(stream: bytes, places: list[int]) -> None:
    whole, rest = parse([stream])
    assert b"".join(event.raw for event in whole) + rest == stream
    for parts in (cuts(stream, places), [stream[i : i + 1] for i in range(len(stream))]):
        events, left = parse(parts)
        assert b"".join(event.raw for event in events) + left == stream
        assert data_of(events) == data_of(whole)


def test_lines_may_end_in_three_ways() -> None:
    for end in (b"\n", b"\r\n", b"\r"):
        stream = end.join((b"data: one", b"", b"data: two", b"event: x", b"", b""))
        events, rest = parse([stream])
        assert [event.data for event in events] == [b"one", b"two"]
        assert rest == b""


def test_an_event_leaves_with_its_last_byte() -> None:
    parser = SseParser()
    assert parser.feed(b"data: x\n") == []
    assert parser.feed(b"\n") == [SseEvent(b"data: x\n\n", b"x")]
    assert parser.feed(b"data: y\r\n\r") == [SseEvent(b"data: y\r\n\r", b"y")]
    assert parser.feed(b"\ndata: z\r\n\r\n") == [SseEvent(b"\n", None), SseEvent(b"data: z\r\n\r\n", b"z")]


def test_a_crlf_in_two_parts_is_one_line_end() -> None:
    events, rest = parse([b"data: a\r", b"\ndata: b\r", b"\n\r\n"])
    assert events == [SseEvent(b"data: a\r\ndata: b\r\n\r\n", b"a\nb")]
    assert rest == b""


def test_lines_of_data_are_joined() -> None:
    (event,), _ = parse([b"data: a\ndata:b\ndata\nevent: e\ndata:  c\n\n"])
    assert event.data == b"a\nb\n\n c"


def test_what_is_no_data_passes() -> None:
    events, _ = parse([b": keep-alive\n\nevent: ping\n\n\n\ndatax: 1\n\n"])
    assert data_of(events) == []
    assert b"".join(event.raw for event in events) == b": keep-alive\n\nevent: ping\n\n\n\ndatax: 1\n\n"


def test_a_byte_order_mark_is_no_part_of_the_name() -> None:
    (event,), _ = parse([b"\xef\xbb\xbfdata: x\n\n"])
    assert event.data == b"x"


def test_data_is_exchanged_and_nothing_else() -> None:
    cases = {
        b"data: old\n\n": b"data: new\n\n",
        b"data:old\r\n\r\n": b"data:new\r\n\r\n",
        b"data\n\n": b"data: new\n\n",
        b"data:\n\n": b"data:new\n\n",
        b": c\nevent: e\ndata: a\nid: 1\ndata: b\n\n": b": c\nevent: e\ndata: new\nid: 1\n\n",
        b"data: old\r\r": b"data: new\r\r",
    }
    for raw, expected in cases.items():
        (event,), _ = parse([raw])
        assert event.with_data(b"new") == expected


def test_data_of_several_lines_keeps_them() -> None:
    (event,), _ = parse([b'data: {"a":1,\ndata:"b":2,\nid: 1\ndata\ndata: "c":3}\n\n'])
    assert event.data == b'{"a":1,\n"b":2,\n\n"c":3}'
    changed = event.with_data(event.data.replace(b"2", b"null"))
    assert changed == b'data: {"a":1,\ndata:"b":null,\nid: 1\ndata: \ndata: "c":3}\n\n'


def test_the_last_event_may_lack_its_blank_line() -> None:
    parser = SseParser()
    assert parser.feed(b"data: a\n\ndata: b\n") == [SseEvent(b"data: a\n\n", b"a")]
    assert parser.finish() == [SseEvent(b"data: b\n", b"b")]
    assert parser.finish() == []


def test_taking_forgets() -> None:
    parser = SseParser()
    parser.feed(b"data: half")
    assert parser.unfinished == b"data: half"
    assert parser.take() == b"data: half" and not parser.unfinished
    assert parser.feed(b"data: x\n\n") == [SseEvent(b"data: x\n\n", b"x")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_long_event_in_small_parts_costs_no_more_than_its_length(end: bytes) -> None:
    def read(parts: int) -> None:
        parser = SseParser()
        assert parser.feed(b"id: 1" + end) == []
        assert all(parser.feed(b"x" * 1000) == [] for _ in range(parts))
        assert [len(event.raw) for event in parser.feed(2 * end)] == [parts * 1000 + 5 + 3 * len(end)]

    assert own_s(lambda: read(8000), 3) < 8 * own_s(lambda: read(2000), 3)
