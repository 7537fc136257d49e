"""Cases for the core, in process: one request, one answer, one exchange, and all that the core does with them."""

from __future__ import annotations

import json
import random
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from ajet_proxy.core.continuity.memory import Known, Memory, Outline, ended
from ajet_proxy.core.conversation.history import marks_of
from ajet_proxy.core.identity.headers import Headers
from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.identity.ladder import identify
from ajet_proxy.core.protocol.dialect import Dialect
from ajet_proxy.core.protocol.exchange import Exchange, question
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.responses.history import spoken
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.tokens import pack_tokens
from ajet_proxy.core.trajectory.call import Captured
from ajet_sdk.errors import AjetError, BadRequest
from tests.fuzz import anthropic, asking, engine
from tests.fuzz.engine import MESSAGES, Answer
from tests.fuzz.mutations import mutated, pieces
from tests.fuzz.reference import Loose, Reference, events
from tests.kit import tapes
from tests.kit.engine_stub import CHAT, COMPLETIONS, RESPONSES
from tests.kit.record_tapes import PASSED
from tests.kit.tapes import AGENT, PROXY

PATHS = (CHAT, CHAT, CHAT, COMPLETIONS, COMPLETIONS, RESPONSES, RESPONSES)
ASKED_FOR = {
    "return_token_ids", "logprobs", "top_logprobs", "include_reasoning", "enable_response_messages", "include",
}
CONTENT_TYPES = ("", "text/plain", "Text/Event-Stream", "application/x-ndjson")


class Differs(Exception):
    """The client sees something else than it would have seen."""


@dataclass(slots=True)
class Case:
    """A case, as the report of its failure tells it."""

    seed: str
    notes: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def dice(self) -> random.Random:
        return random.Random(self.seed)


def run(case: Case) -> None:
    """Play `case`; raises whatever is wrong with it."""
    dice = case.dice
    kind = dice.choices((_request, _answer, _anthropic), (30, 58, 12))[0]
    case.counts[kind.__name__.removeprefix("_")] += 1
    kind(case, dice)


def _request(case: Case, dice: random.Random) -> None:
    """A mutated request, and the engine's answers to it with and without what the proxy adds, byte by byte."""
    path = dice.choice(PATHS)
    body, names = asking.odd(path, dice)
    case.notes += [path, *names, repr(body[:2000])]
    direct = engine.ask(path, body)
    try:
        request = JsonBody(body)
    except BadRequest:
        case.counts["unreadable"] += 1
        return  # the front passes it on as it is
    _look(path, request)
    try:
        exchange = Exchange(CAPTURED[path], request, ask=question(CAPTURED[path], request, 1024))
    except BadRequest as error:
        same((error.code, direct.status), ("too_many_choices", 400), "what refuses it")  # as no engine takes so many
        case.counts["too many choices"] += 1
        return
    _only_added(request, exchange)
    asked = engine.ask(exchange.target, exchange.upstream_body())
    if asked.status == 400 and exchange.retreat():
        case.counts["retreat"] += 1
        asked = engine.ask(exchange.target, exchange.upstream_body())
    seen = _play(exchange, asked, dice)
    case.counts[f"status {direct.status}"] += 1
    same(asked.status, direct.status, "status")
    same(_by_choice(seen, exchange), _by_choice(direct.body, exchange), "body")
    if direct.status == 200 and exchange.skip is None:
        lost = [outcome for outcome in exchange.outcomes if not isinstance(outcome, Captured)]
        if path != RESPONSES and lost:
            raise Differs(f"a whole answer was not captured: {lost[0]}")
    _remember(path, request, exchange)


def _answer(case: Case, dice: random.Random) -> None:
    """A request out of a pool, and the engine's answer to it mutated."""
    name, path, body, answer = dice.choice(pool())
    case.notes += [name, path]
    exchange = Exchange(CAPTURED[path], JsonBody(body))
    parts, names = mutated(list(answer.parts), dice)
    case.notes += names
    content_type = dice.choice(CONTENT_TYPES) if dice.random() < 0.05 else answer.content_type
    broken = dice.random() < 0.15
    case.notes += [content_type, "broken off" if broken else "ended", repr(b"".join(parts)[:6000])]
    status = answer.status if dice.random() < 0.97 else dice.choice((200, 204, 400, 404, 500, 503))
    changed = Answer(status, content_type, tuple(parts))
    reference = reference_of(path, body)
    try:
        expected = expected_of(reference, exchange, changed, broken)
    except Loose:
        case.counts["loose"] += 1
        expected = None
    seen = _play(exchange, changed, dice, expected=expected, broken=broken)
    if expected is not None:
        same(seen, b"".join(expected), "body")
        case.counts["captured" if any(isinstance(o, Captured) for o in exchange.outcomes) else "lost"] += 1
        _sound(exchange, reference)
    _remember(path, JsonBody(body), exchange)


def _anthropic(case: Case, dice: random.Random) -> None:
    """The Messages API, whose requests and answers are translated."""
    body, names = json.dumps(asking.request(MESSAGES, dice)).encode(), ["as it should be"]
    if dice.random() < 0.3:
        body, names = asking.odd(MESSAGES, dice)
    case.notes += [MESSAGES, *names, repr(body[:2000])]
    try:
        request = JsonBody(body)
        translated = CAPTURED[MESSAGES].translate(request)
    except BadRequest:
        case.counts["refused"] += 1
        return
    _look(MESSAGES, request)
    exchange = Exchange(CAPTURED[MESSAGES], translated)
    asked = engine.ask(exchange.target, exchange.upstream_body())
    if asked.status == 400 and exchange.retreat():
        asked = engine.ask(exchange.target, exchange.upstream_body())
    parts, names = mutated(list(asked.parts), dice)
    case.notes += [*names, repr(b"".join(parts)[:6000])]
    broken = dice.random() < 0.15
    changed = Answer(asked.status, asked.content_type, tuple(parts))
    seen = _play(exchange, changed, dice, broken=broken)
    again = Exchange(CAPTURED[MESSAGES], translated)
    if exchange.skip is not None:
        again.skip = exchange.skip
    same(seen, _play(again, changed, None, broken=broken), "body at another split")
    anthropic.check(seen, changed, whole=not names and not broken)
    _remember(MESSAGES, request, exchange)


# ---- what is played, and what is looked at


def _play(
    exchange: Exchange, answer: Answer, dice: random.Random | None, *, expected: list[bytes] | None = None,
    broken: bool = False,
) -> bytes:  # fmt: skip
    """Give what the client gets of `answer`. `expected` are its events, each of which must leave when it is whole."""
    exchange.on_headers(answer.status, answer.content_type)
    body, out, fed = answer.body, b"", 0
    clock = _timetable(answer, expected) if not exchange.buffered and not _passes(exchange, answer) else None
    for piece in pieces(body, dice) if dice is not None else [body]:
        out += b"".join(exchange.feed(piece))
        fed += len(piece)
        if exchange.settled:
            out += b"".join(exchange.release())
        if clock is not None and len(out) != clock[bisect_right(clock, fed, key=lambda entry: entry[0]) - 1][1]:
            raise Differs(f"after {fed} bytes {len(out)} have left, not at once or too many")
    out += b"".join(exchange.abort() if broken else exchange.finish())
    if not exchange.settled or len(exchange.outcomes) != exchange.choices:
        raise Differs(f"{len(exchange.outcomes)} outcomes of {exchange.choices} choices")
    return out


def _by_choice(body: bytes, exchange: Exchange) -> bytes:
    """`body` with its events choice by choice: which of several speaks first is the engine's whim."""

    def place(event: bytes) -> int:
        found = re.search(rb'"choices":\[\{"index":(\d+),', event)
        return int(found[1]) if found else 1 << 30

    if exchange.choices == 1:
        return body
    ordered: list[bytes] = sorted(events(body), key=place)
    return b"".join(ordered)


def _passes(exchange: Exchange, answer: Answer) -> bool:
    return answer.status >= 400 or exchange.skip is not None


def _timetable(answer: Answer, expected: list[bytes] | None) -> list[tuple[int, int]] | None:
    """The number of bytes that have to have left when so many came. A line that ends with CR may end once more with LF,
    so nothing is said of those."""
    if expected is None or b"\r" in answer.body:
        return None
    table = [(0, 0)]
    for raw, seen in zip(events(answer.body), expected, strict=True):
        if raw == b"\n" or raw.endswith(b"\n\n"):
            table.append((table[-1][0] + len(raw), table[-1][1] + len(seen)))
    return table


def expected_of(reference: Reference, exchange: Exchange, answer: Answer, broken: bool) -> list[bytes]:
    """Tell what the client must see, event by event; raises `Loose`."""
    if _passes(exchange, answer):
        return [answer.body]
    if not answer.content_type.lower().startswith("text/event-stream"):
        return [answer.body if broken else reference.document(answer.body)]
    whole = list(events(answer.body))
    pending = broken and whole and not whole[-1].endswith((b"\n\n", b"\r\r", b"\r\n\r", b"\n\r", b"\r\n\r\n"))
    if pending and whole[-1].strip(b"\r\n"):
        return [*map(reference.event, whole[:-1]), whole[-1]]
    return [*map(reference.event, whole)]


def same(seen: object, expected: object, what: str) -> None:
    if seen != expected:
        at = 0
        if isinstance(seen, bytes) and isinstance(expected, bytes):
            alike = (place for place, (a, b) in enumerate(zip(seen, expected, strict=False)) if a != b)
            at = max(0, next(alike, min(len(seen), len(expected))) - 60)
            seen, expected = seen[at : at + 1500], expected[at : at + 1500]
        raise Differs(f"{what} (from {at})\n  seen     {seen!r}\n  expected {expected!r}")


def _only_added(request: JsonBody, exchange: Exchange) -> None:
    """Nothing of the request is another than the client's but what is said to be."""
    sent, put = request.fields, json.loads(exchange.upstream_body())
    if set(exchange.altered) - ASKED_FOR:
        raise Differs(f"altered: {exchange.altered}")
    for name in set(sent) | set(put):
        if name not in exchange.altered:
            same(json.dumps(put.get(name, "?")), json.dumps(sent.get(name, "?")), f"field {name}")


def _sound(exchange: Exchange, reference: Reference) -> None:
    """A captured call has the ids that the engine reported, in their order, and nothing else."""
    for outcome in exchange.outcomes:
        if isinstance(outcome, Captured) and exchange.target != RESPONSES:
            told = reference.ids.get(outcome.index, [])
            same(list(outcome.token_ids), told[: len(outcome.token_ids)], "captured ids")
            pack_tokens(outcome.token_ids + outcome.prompt_token_ids)
            if list(outcome.prompt_token_ids) not in reference.prompts:
                raise Differs("a prompt was captured that was not reported")
            same(len(outcome.logprobs), len(outcome.token_ids), "logprobs")


def _look(path: str, request: JsonBody) -> None:
    """Read what else the core reads of a request: whose it is, and what came before it."""
    try:
        identify(
            path=path, headers=Headers({"x-session-id": "é"}), body=request.fields,
            claims=Claims("admin", "", None),
        )
    except AjetError:
        return
    CAPTURED[path].history(request.fields, b"scope", exact=True)


def _remember(path: str, request: JsonBody, exchange: Exchange) -> None:
    """Keep of an answer what the core keeps for the next turn, and find it again."""
    answers = exchange.answers
    captured = {outcome.index: outcome for outcome in exchange.outcomes if isinstance(outcome, Captured)}
    history = exchange.dialect.history(exchange.asked.fields, b"scope", exact=True)
    for index, said in enumerate(answers):
        marks_of(history, said, captured.get(index))
    fields = exchange.asked.fields
    asked = _outlined(exchange.dialect, fields)
    if asked is None or exchange.skip is not None:
        return
    memory = Memory()
    for index, outcome in captured.items():
        if (said := answers[index]) is not None:
            memory.remember(asked.ends(said), asked.sought.shape, "call", ended(outcome, asked.called(said)))
            for more in _continued(exchange.target, fields, said):
                following = _outlined(exchange.dialect, fields | more)
                known = memory.recall(following.sought) if following is not None else None
                if not isinstance(known, Known) and known != "stop_string":
                    raise Differs(f"an answer is not known again: {known}")
    memory.recall(asked.sought)


def _outlined(dialect: Dialect, fields: Mapping[str, Any]) -> Outline | None:
    history = dialect.history(fields, b"scope", exact=True)
    return None if history is None else dialect.outline(fields, history, episode="e", model="m", agent="")


def _continued(route: str, fields: Mapping[str, Any], said: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The changes of the next turn in `fields`, if its history is told with the answer `said`."""
    if route == CHAT:
        messages = [*fields["messages"], {**said, "role": "assistant"}, {"role": "user", "content": "go on"}]
        yield {"messages": messages}
        return
    first = fields["input"] if isinstance(fields["input"], list) else [{"role": "user", "content": fields["input"]}]
    asked = spoken(first) or []
    for output in (said["output"], said["shown"]):
        messages = (spoken(output) or []) if isinstance(output, list) else []
        roles = [one.message["role"] for one in (*asked[-1:], *messages)]
        if len(roles) == 2 and roles[0] != "assistant" == roles[1] and fields.get("previous_response_id") is None:
            yield {"input": [*first, *output, {"role": "user", "content": "go on"}]}
    if fields.get("store") is not False and isinstance(said["id"], str):
        yield {"input": "go on", "previous_response_id": said["id"]}


@cache
def pool() -> tuple[tuple[str, str, bytes, Answer], ...]:
    """Requests with the engine's answers to them as the proxy asks: real ones, from tapes, and the stub's."""
    out = []
    for (name, asked_by), tape in tapes.load().items():
        if asked_by == PROXY and name not in PASSED:
            body = json.dumps(tapes.load()[name, AGENT].request).encode()
            parts = tuple(events(tape.body)) if tape.stream and tape.status == 200 else (tape.body,)
            out.append((name, tape.route, body, Answer(tape.status, tape.headers["content-type"], parts)))
    dice = random.Random("pool")
    for number in range(200):
        path = dice.choice(PATHS)
        body = json.dumps(asking.request(path, dice)).encode()
        exchange = Exchange(CAPTURED[path], JsonBody(body))
        out.append((f"stub-{number}", path, body, engine.ask(path, exchange.upstream_body())))
    return tuple(out)


def reference_of(path: str, body: bytes) -> Reference:
    """That of an answer to the request `body`."""
    return Reference(CAPTURED[path].ask(JsonBody(body).fields), path)
