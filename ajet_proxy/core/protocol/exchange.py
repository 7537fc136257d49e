"""One LLM exchange as a state machine: what the engine is asked, what the agent sees of its answer, and the calls.

`TRANSITIONS` is the machine; an event that has no row for a state changes nothing::

    waiting        ──document──▶       document
                   ──stream──▶         stream
                   ──lost document──▶  lost document
                   ──lost stream──▶    watched
                   ──unread──▶         unread
    stream         ──ended──▶          held
                   ──overlong──▶       cut
    held           ──release──▶        watched
                   ──overlong──▶       cut
    watched        ──overlong──▶       unread
    cut            ──release──▶        unread
    any            ──over──▶           over

What becomes of the engine's bytes in each state:

- ``document``, ``lost document``: all is kept until `finish`. No call comes of a lost one.
- ``stream``: each event leaves at once. It has ``ended`` with the last choice, or when it cannot be read.
- ``held``: the calls are known and not yet durable, so nothing leaves until `release`.
- ``watched``: each event leaves at once. One that contradicts the calls loses them after all (`contradicted`).
- ``cut``: an event was too long to wait for its end. Nothing leaves until `release`.
- ``unread``: bytes leave as they come, if they are in the client's own protocol. Of an answer that is not captured they
  are read beside that (`Beside`), to know whether its client was answered (`failed`).

Invariant: what was fed comes out once and in order, except for the values and events that only the proxy asked for. The
bytes that complete an answer leave after `settled`, so that the caller can make the calls durable before the agent can
know of them. What cannot be read passes as it came and its calls are lost: an agent never pays for a capture that went
wrong. Nor does it wait for what an engine may say after the finish. What comes in one piece with the finish counts
before the calls are `settled`. What comes after it and cannot be read tells nothing of them.

Next: ajet_proxy/core/protocol/chat.py
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Literal, get_args

from msgspec.structs import replace

from ajet_proxy.core.identity.headers import is_text
from ajet_proxy.core.protocol.cache_salt import salted
from ajet_proxy.core.protocol.dialect import Ask, Dialect, Reader, with_versions
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.sse import SseEvent, SseParser
from ajet_proxy.core.trajectory import call as reasons
from ajet_proxy.core.trajectory.call import CAPTURE_FAILED, Lost, Outcome
from ajet_sdk.errors import BadRequest
from ajet_sdk.limits import MAX_ID

MAX_EVENT = 32 << 20
"""A longer event of a stream is not waited for; the ids of a million tokens are a quarter of it. A longer document
that is not captured is not read."""
State = Literal["waiting", "document", "lost document", "stream", "held", "watched", "cut", "unread", "over"]
Event = Literal["document", "stream", "lost document", "lost stream", "unread", "ended", "overlong", "release", "over"]
TRANSITIONS: dict[tuple[State, Event], State] = {
    ("waiting", "document"): "document",
    ("waiting", "stream"): "stream",
    ("waiting", "lost document"): "lost document",
    ("waiting", "lost stream"): "watched",
    ("waiting", "unread"): "unread",
    ("stream", "ended"): "held",
    ("stream", "overlong"): "cut",
    ("held", "release"): "watched",
    ("held", "overlong"): "cut",
    ("watched", "overlong"): "unread",
    ("cut", "release"): "unread",
}
TRANSITIONS.update({(state, "over"): "over" for state in get_args(State)})
_BUFFERED = ("document", "lost document")
_UNSETTLED = ("waiting", "document", "stream")
_STREAMED = ("stream", "held", "watched")
_FAILURES = (reasons.ENGINE_ERROR, reasons.ENGINE_ABORTED, reasons.TRUNCATED)


def question(dialect: Dialect, asked: JsonBody, max_choices: int) -> Ask:
    """The form in which `dialect` asks what is `asked`; `BadRequest` for more than `max_choices`, since each would be a
    call."""
    if dialect.choices(asked.fields) > max_choices:
        raise BadRequest(
            f"a request may ask for {max_choices} choices at most, n times its prompts",
            code="too_many_choices", param="n",
        )
    return dialect.ask(asked.fields)


class Exchange:
    """One request and its answer. Feed it the engine's bytes; it gives the client's."""

    def __init__(
        self, dialect: Dialect, asked: JsonBody, *, ask: Ask | None = None, model: str | None = None,
        versions: bool = False,
    ) -> None:
        """`asked` is the client's request as `dialect` has translated it, and `ask` its `question` if that is known.
        `model`, if given, replaces the request's model. `versions` says that the engine `tells_versions`."""
        ask = ask or dialect.ask(asked.fields)
        if versions:
            ask = with_versions(ask, asked.fields)
        named = asked.naming(model)
        fields = {**ask.fields, **named}
        self.choices = ask.choices
        """The number of calls the exchange makes."""
        self.altered = tuple(fields)
        """The names of the request's fields that the engine sees otherwise than the client sent them."""
        self.dialect = dialect
        self.target = dialect.target
        """The engine's route."""
        self.asked = asked
        """The request in the form of the engine's route, without what only the proxy asks for."""
        self.cache_salt: Any = asked.fields.get("cache_salt")
        """With what the engine's prefix cache is told apart; as the client sent it, until `under`."""
        self._named = named
        self.skip = ask.skip
        """Why the exchange is not captured, if it is not."""
        self.state: State = "waiting"
        self.buffered = False
        """True if the answer is one document, which `finish` gives as a whole."""
        self.settled = False
        """True if it is known what became of the calls; from here on `outcomes` holds and `release` is due."""
        self.outcomes: tuple[Outcome, ...] = ()
        """The outcome of each choice, in order, as far as is known; empty until `settled`."""
        self.heard = False
        """True if the client has got an event since this was last set to false. A comment is none."""
        self.contradicted: str | None = None
        """Why calls that were captured when they `settled` are lost after all, if they are; `outcomes` says so too."""
        self.ask = ask
        """The form in which the engine is asked, and what of the answer the client must not see."""
        self._fields = fields
        self.reader = dialect.reader(
            ask if ask.skip is None else replace(ask, choices=dialect.choices(asked.fields))
        )
        """Reads the answer, also one that is not captured."""
        self._translates = self.reader.translates
        self._is_mixed = False
        """True if the client was sent events that are not the engine's."""
        self._is_awaited = False
        """True if nothing has come yet of a stream that is not read."""
        self._is_watched = False
        """True if the answer is not captured, and read all the same to know how it ended."""
        self._beside: Beside | None = None
        self._parser = SseParser()
        self._document: list[bytes] = []
        self._held: list[bytes] = []

    def upstream_body(self, **more: str) -> bytes:
        """The body that the engine gets, with `more` fields (name to JSON text) set."""
        return self.asked.with_fields({**self._fields, **more})

    def under(self, version: int, since: float) -> None:
        """Say which weights answer, by their policy version and the gate's last move. The engine may then use only what
        these weights have put into its prefix cache."""
        salt = salted(self.cache_salt, version, since)
        if salt is not None:
            self.cache_salt = salt
            self._fields = self._fields | {"cache_salt": json.dumps(salt)}
            self.altered = tuple(self._fields)

    @cached_property
    def answers(self) -> tuple[Mapping[str, Any] | None, ...]:
        """The words of each choice, for recognizing history by its words; see `Reader.answers`. Ask once `settled`."""
        return self.reader.answers()

    @property
    def response_id(self) -> str | None:
        """The id of the answer that the client sees, if it can be the name of one; known once `settled`."""
        name = self.reader.response_id
        return name if isinstance(name, str) and len(name) <= MAX_ID and is_text(name) else None

    @property
    def kept_as(self) -> str | None:
        """The id under which the engine may keep the answer, if it gives answers out again; known once `settled`."""
        keeps = self.dialect.gives_again and self.asked.fields.get("store") is not False
        return self.response_id if keeps else None

    @property
    def failed(self) -> str | None:
        """Why the client of an answer that is not captured has none, as far as is known. Ask again until it is over."""
        gave_up = self._beside is not None and self._beside.gave_up
        known = self._is_watched and not gave_up and (self.reader.ended or self.state == "over")
        return _failure(self.reader) if known else None

    def keep_alive(self) -> bytes:
        """Bytes for a client that has waited for an event. Nothing after the end. Nothing either once a stream has
        begun that is not read, since the client may have a part of an event."""
        says = self.state in _STREAMED or (self.state == "unread" and self._is_awaited)
        said = self.reader.keep_alive(held=self.state == "held") if says else b""
        self._is_mixed = self._is_mixed or bool(said)
        return said

    def pass_by(self) -> None:
        """The engine answers the client's own request on the client's own route. The client gets the answer as it is,
        and no call comes of it."""
        self.skip = reasons.NO_CHAT_ROUTE
        self._translates = False
        self.reader = self.dialect.own_reader(self.ask)

    def retreat(self) -> bool:
        """The engine refused the question: whether it can be asked as the client put it. If so, `upstream_body()` is
        that from now on, and no call comes of the answer."""
        if self.skip is not None or self.upstream_body() == self.asked.with_fields(self._named):
            return False
        self._fields = self._named
        self.skip = reasons.UNASKABLE
        return True

    def on_headers(self, status: int, content_type: str) -> None:
        """The engine's answer begins."""
        stream = content_type.lower().startswith("text/event-stream")
        if status < 400 and self.skip is None:
            self._go("stream" if stream else "document")
            return
        lost: Event = "lost stream" if stream and status < 400 else "lost document"
        self._go(lost if self._translates else "unread", reasons.REFUSED if status >= 400 else self.skip)
        self._is_awaited = stream and status < 400
        self._is_watched = status < 400
        if self._is_watched and not self._translates:
            self._beside = Beside(self.reader, stream=stream)

    def feed(self, data: bytes) -> list[bytes]:
        """Takes bytes from the engine; returns what of them the client gets at once."""
        state = self.state
        if state in _STREAMED:
            if state == "held" or self._parser.unfinished:
                out = self._events(self._parser.feed(data))
                return out if len(self._parser.unfinished) <= MAX_EVENT else out + self._overlong()
            out, end = self.reader.usual(data)
            self.heard = self.heard or bool(out)
            return out if end == len(data) else out + self._events(self._parser.feed(data[end:]))
        if self.buffered:
            self._document.append(data)
        elif not self._translates:
            self._is_awaited = False
            if self._beside is not None:
                self._beside.feed(data)
            if state != "cut":
                return [data]
            self._held.append(data)
        return []

    def release(self) -> list[bytes]:
        """The bytes that were kept back until the calls were durable."""
        held = [*map(self._leaving, self._held)]
        self.heard, self._held = self.heard or bool(held), []
        self._go("release")
        return held

    def finish(self) -> list[bytes]:
        """The engine's answer ended as it should; the rest of the client's bytes. `settled` holds afterwards."""
        if self.buffered:
            return self._finish_document()
        if self._beside is not None:
            self._beside.finish()
        rest = self._parser.finish()
        out = self._events(rest) if rest else []
        self._go("over")
        return out + self.release()

    def abort(self, reason: str = reasons.TRUNCATED) -> list[bytes]:
        """The exchange broke off; returns the bytes that came and were not passed on. A client of another protocol has
        no use for pieces of the engine's, and gets none. `settled` holds afterwards."""
        pieces = [*self._document, self._parser.take()]
        rest = self._held if self._translates else [*self._held, *pieces]
        self._held, self._document = [], []
        self._go("over", reason)
        return [part for part in rest if part]

    def _leaving(self, event: bytes) -> bytes:
        return self.reader.leaving(event) if self._is_mixed else event

    def _go(self, event: Event, lost: str | None = None) -> None:
        """Take the transition of `event`. Calls that it settles are `lost` for this reason. Without one they are what
        was read."""
        self.state = TRANSITIONS.get((self.state, event), self.state)
        self.buffered = self.state in _BUFFERED
        if self.settled or self.state in _UNSETTLED:
            return
        self.settled = True
        self.outcomes = (
            self.reader.outcomes() if lost is None else tuple(Lost(index, lost) for index in range(self.choices))
        )

    def _events(self, events: list[SseEvent]) -> list[bytes]:
        out: list[bytes] = []
        for event in events:
            seen: bytes | None = event.raw
            try:
                seen = self.reader.show(event)
            except Exception:  # the one broad except: a capture that fails must not cost the agent its answer
                if not self.reader.ended:
                    self._go("ended", CAPTURE_FAILED)
            if seen and (self.state == "held" or (self.reader.ended and self.state == "stream")):
                self._held.append(seen)
            elif seen:
                out.append(self._leaving(seen))
                self.heard = self.heard or bool(event.data)
        if not self.settled:
            if self.reader.ended:
                self._go("ended")
        elif (why := self.reader.spoilt) is not None:
            self.contradicted = why
            self.outcomes = tuple(one if isinstance(one, Lost) else Lost(one.index, why) for one in self.outcomes)
        return out

    def _overlong(self) -> list[bytes]:
        """Stop waiting for an event that does not end. The client gets its bytes, and whatever follows, if they are in
        the client's own protocol."""
        piece = self._parser.take()
        if not self._translates:
            self._held.append(piece)
        self._go("overlong", CAPTURE_FAILED)
        return self.release() if self.state == "unread" else []

    def _finish_document(self) -> list[bytes]:
        body = b"".join(self._document)
        self._document = []
        try:
            body = self.reader.document(body)
        except Exception:  # as in feed
            self._go("over", CAPTURE_FAILED)
        else:
            self._go("over")
        return [body]


class Beside:
    """Has `reader` read an answer that is not captured, beside its way to the client, to know whether its client was
    answered. It is fed piece by piece: the events of a `stream`, or one document. The bytes pass as they came, and
    nothing in them makes the reading fail. Of what is too large nothing is said."""

    def __init__(self, reader: Reader, *, stream: bool) -> None:
        self.gave_up = False
        """True if it was too large."""
        self._reader = reader
        self._parser = SseParser() if stream else None
        self._kept: list[bytes] = []
        self._size = 0

    def feed(self, data: bytes) -> None:
        """Takes the next piece."""
        if self.gave_up:
            return
        if self._parser is None:
            self._kept.append(data)
            self._size += len(data)
        else:
            self._read(self._reader.show, self._parser.feed(data))
            self._size = len(self._parser.unfinished)
        if self._size > MAX_EVENT:
            self.gave_up, self._kept, self._parser = True, [], None

    def finish(self) -> None:
        """The answer has ended as it should."""
        if self._parser is not None:
            self._read(self._reader.show, self._parser.finish())
        elif not self.gave_up:
            self._read(self._reader.document, [b"".join(self._kept)])

    def _read(self, by: Callable[[Any], object], pieces: Iterable[Any]) -> None:
        for piece in pieces:
            try:
                by(piece)
            except Exception:  # as in `Exchange`: an answer that cannot be read costs the agent nothing
                self._reader.spoil(CAPTURE_FAILED)


def _failure(reader: Reader) -> str | None:
    """Why the client of the answer that `reader` has read has no answer, if it has none."""
    for outcome, said in zip(reader.outcomes(), reader.answers(), strict=True):
        if isinstance(outcome, Lost) and (
            outcome.reason in _FAILURES or (outcome.reason == CAPTURE_FAILED and said is None)
        ):
            return outcome.reason
    return None
