"""Server-sent events, cut out of a byte stream at any split.

An event leaves `SseParser.feed` with the very bytes it came in (`raw`), so that a relay can pass on what it does not
change. Invariant: the `raw` parts of all events, joined, plus what `take` returns, are the bytes that were fed. The
`data` of the events does not depend on how the stream was split.

Lines end with LF, CRLF or CR (https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream).
A CR at the end of a read ends its line at once: when the LF of a CRLF arrives later, it forms an event without data.
Nothing is decoded here, so a character cut in two by a split stays whole.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_BLANK_LINE = re.compile(rb"(?>\r\n|\r|\n)(?>\r\n|\r|\n)")
_LINE_END = re.compile(rb"\r\n|\r|\n")
_BOM = b"\xef\xbb\xbf"


class SseEvent(NamedTuple):
    """One event, blank line included. ``data`` is None for comments and for events without a data field."""

    raw: bytes
    data: bytes | None

    def with_data(self, data: bytes) -> bytes:
        """This event's bytes with `data` in place of its own data. It must have some, and `data` no more lines than
        that."""
        if self.raw == b"data: %b\n\n" % (self.data or b""):
            return b"data: %b\n\n" % data
        out = []
        rest = data.split(b"\n")
        for line, end in _lines(self.raw):
            if (value := _field(line)) is None:
                out.append(line + end)
            elif rest:
                name = line[: len(line) - len(value)]
                out.append(name + (b"" if b":" in name else b": ") + rest.pop(0) + end)
        return b"".join(out)


class SseParser:
    """Bytes in, whole events out."""

    def __init__(self) -> None:
        self.unfinished = bytearray()
        """The bytes so far of an event that has begun and is not complete."""
        self._searched = 0
        self._plain = True

    def feed(self, data: bytes) -> list[SseEvent]:
        """The events that `data` completes."""
        if not self.unfinished and _is_one_event(data):
            return [SseEvent(data, data[6:-2])]
        plain = self._plain = b"\r" not in data and (self._plain or not self.unfinished)
        buffer: bytes | bytearray = data
        if self.unfinished:
            self.unfinished += data
            buffer = self.unfinished
        events = []
        at = 0
        while at < len(buffer):
            if buffer[at] in b"\r\n":
                end = at + (2 if buffer.startswith(b"\r\n", at) else 1)
            else:
                end = _end_of_event(buffer, max(at, self._searched), plain)
                if end < 0:
                    break
            events.append(_event(bytes(buffer[at:end])))
            at = end
        if at or buffer is data:  # else it has grown in place
            self.unfinished = bytearray(buffer[at:])
        self._searched = max(0, len(self.unfinished) - 3)
        return events

    def take(self) -> bytes:
        """Hand over the bytes of the event that is still incomplete, and forget them."""
        rest, self.unfinished, self._searched = bytes(self.unfinished), bytearray(), 0
        return rest

    def finish(self) -> list[SseEvent]:
        """The stream is over: the last event, if its blank line is missing."""
        rest = self.take()
        return [_event(rest)] if rest else []


def _is_one_event(raw: bytes) -> bool:
    """Tell whether `raw` is one event in the form in which nearly all come: a single data line."""
    return raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and raw[-1] == 10 and b"\r" not in raw


def _end_of_event(buffer: bytes | bytearray, at: int, plain: bool) -> int:
    """Where the blank line after `at` ends, or -1; `plain` says that no CR is there."""
    if plain:
        found = buffer.find(b"\n\n", at)
        return found + 2 if found >= 0 else -1
    blank = _BLANK_LINE.search(buffer, at)
    return blank.end() if blank else -1


def _event(raw: bytes) -> SseEvent:
    if _is_one_event(raw):
        return SseEvent(raw, raw[6:-2])
    fields = [value for line, _ in _lines(raw) if (value := _field(line)) is not None]
    return SseEvent(raw, b"\n".join(fields) if fields else None)


def _lines(raw: bytes) -> list[tuple[bytes, bytes]]:
    """The lines of `raw`, each with its line end (empty if the last line has none)."""
    out = []
    at = 0
    for found in _LINE_END.finditer(raw):
        out.append((raw[at : found.start()], found.group()))
        at = found.end()
    return [*out, (raw[at:], b"")] if at < len(raw) else out


def _field(line: bytes) -> bytes | None:
    """The value of a data line."""
    name, colon, value = line.removeprefix(_BOM).partition(b":")
    if name != b"data":
        return None
    return value.removeprefix(b" ") if colon else b""
