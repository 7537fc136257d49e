"""Every event survives the journal's codec, bit for bit."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ajet_proxy.core.conversation.history import Mark
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.trajectory.timeline import Packed, pack
from ajet_proxy.io.storage import snapshot
from ajet_proxy.io.storage.codec import UnknownRecord, decode, encode
from ajet_proxy.io.storage.journal import BEGINNING
from ajet_sdk.routes import DISCARD_REASONS
from ajet_sdk.sample import Call
from tests.kit.ledger_rig import LedgerRig, picture
from tests.kit.strategies import EPISODE, EVENT_KINDS, make_call, packed_call, tangled_calls

number = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(codec=None), max_size=8)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | number | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6,
)
ids = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6).map(tuple)


@st.composite
def calls(draw: st.DrawFn) -> Packed:
    token_ids = draw(ids)
    logprobs = draw(st.lists(number, min_size=len(token_ids), max_size=len(token_ids)))
    call = make_call(draw(text), draw(ids), token_ids, at=draw(number), model=draw(text), agent=draw(text))
    return pack(dataclasses.replace(
        call, logprobs=tuple(logprobs), identified_by=draw(st.none() | text),
        altered=tuple(draw(st.lists(text, max_size=2))), continuity=draw(st.none() | text),
        version_uncertain=draw(st.booleans()), same_text=draw(st.none() | st.tuples(text, st.integers(1, 2**31))),
        response=draw(st.none() | text),
    ))  # fmt: skip


TURN = {
    "call": "c", "model": "m", "agent": "", "started_at": 1.0, "start": 1, "end": 2, "text": bytes(8),
    "logprobs": bytes(8), "finish_reason": "stop", "policy_versions": [[1, 1]],
}  # fmt: skip
"""A call's record."""
names = st.lists(text, max_size=3).map(tuple)
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "float": number,
    "str": text,
    "str | None": st.none() | text,
    "bool": st.booleans(),
    "DiscardReason": st.sampled_from(DISCARD_REASONS),
    "float | None": st.none() | number,
    "tuple[tuple[str | None, str | None, float, str | None], ...]": st.lists(
        st.tuples(st.none() | text, st.none() | text, number, st.none() | text), max_size=3
    ).map(tuple),
    "int": st.integers(-(2**63), 2**63 - 1),
    "int | None": st.none() | st.integers(-(2**63), 2**63 - 1),
    "Packed": calls(),
    "tuple[str, ...]": names,
    "tuple[Mark, ...]": st.lists(st.builds(Mark, text, st.integers(0, 2**40), text), max_size=2).map(tuple),
    "tuple[str, ...] | None": st.none() | names,
    "Mapping[str, Any]": st.dictionaries(text, json_values, max_size=3),
    "Mapping[str, float]": st.dictionaries(text, st.floats(0.0, 1.0), max_size=3),
    "Mapping[str, str]": st.dictionaries(text, text, max_size=3),
    "Mapping[str, str] | None": st.none() | st.dictionaries(text, text, max_size=3),
    "tuple[tuple[str, tuple[str, ...]], ...]": st.lists(st.tuples(text, names), max_size=3).map(tuple),
}


def _fields(kind: type) -> list[tuple[str, str]]:
    return [field for base in kind.__mro__ for field in inspect.get_annotations(base).items()]


@st.composite
def any_event(draw: st.DrawFn) -> ev.Event:
    kind = draw(st.sampled_from(EVENT_KINDS))
    event: ev.Event = kind(**{name: draw(FIELDS[how]) for name, how in _fields(kind)})
    return event


@given(any_event())
def test_what_is_written_is_what_is_read_and_begins_as_the_journal_looks_for_it(event: ev.Event) -> None:
    back = decode(encode(event))
    assert BEGINNING.match(encode(event))
    assert back == event
    assert repr(back) == repr(event)


def test_a_field_that_has_its_default_is_left_out() -> None:
    event = ev.EpisodeDiscarded(1.0, "e", "aborted")
    assert msgpack.unpackb(encode(event)) == ["EpisodeDiscarded", {"at": 1.0, "episode": "e", "reason": "aborted"}]


def test_fields_from_the_future_are_ignored_and_missing_ones_take_their_default() -> None:
    record = msgpack.packb(["TaskNamed", {"at": 1.0, "episode": "e", "task": "t", "colour": "blue"}])
    assert decode(record) == ev.TaskNamed(1.0, "e", "t", derived=True)


@pytest.mark.parametrize(
    "record",
    [
        msgpack.packb(["NoSuchEvent", {}]), msgpack.packb(["TaskNamed", {"at": 1.0}]), msgpack.packb(7), b"", b"\xc1",
        msgpack.packb(["TaskNamed", {}])[:-1], msgpack.packb(["CallFinished", {"at": 1.0, "call": {}}]),
        msgpack.packb(["CallFinished", {"at": 1.0, "episode": "e", "call": {"logprobs": b"123", "text": b"", "x": 1}}]),
        msgpack.packb(["CallFinished", {"at": 1.0, "episode": "e", "call": {**TURN, "logprobs": b"1234567"}}]),
        msgpack.packb(["CallFinished", {"at": 1.0, "episode": "e", "call": {**TURN, "text": b"123"}}]),
        msgpack.packb(["CallFinished", {"at": 1.0, "episode": "e", "call": {**TURN, "text": "12345678"}}]),
        msgpack.packb(["CallFinished", {"at": 1.0, "episode": "e", "call": {**TURN, "logprobs": [0.0] * 8}}]),
        msgpack.packb(["EpisodeOpened", {"metadata": "{"}]),
    ],
)
def test_what_cannot_be_read_says_so(record: bytes) -> None:
    with pytest.raises(UnknownRecord):
        decode(record)


def rewritten(rig: LedgerRig) -> tuple[LedgerRig, list[bytes]]:
    """`rig` again, from the records of its events."""
    live, read, written = LedgerRig(), LedgerRig(), []
    for event in rig.events:
        written.append(encode(event, live.state.episodes))
        live.run([event])
        read.run([decode(written[-1], read.state.episodes)])
    return read, written


@given(tangled_calls())
def test_calls_are_read_back_whatever_they_share(calls: list[Call]) -> None:
    rig = LedgerRig()
    rig.open(EPISODE)
    for call in calls:
        rig.run([ev.CallStarted(1.0, EPISODE, (call.call,), call.model, call.agent, "path", "")])
    for call in calls:
        rig.run([ev.CallFinished(2.0, EPISODE, pack(call))])
    read, _ = rewritten(rig)
    assert read.events == rig.events
    assert picture(read.state) == picture(rig.state)


def test_a_call_that_a_retry_replaced_is_nobodys_history() -> None:
    rig = LedgerRig()
    rig.open("ep")
    for prompt, body in (((1, 2), "first"), ((1, 2, 3, 4), "second")):
        for retry in (False, True, True):
            (call,) = rig.begin("ep", body=body, retry=retry)
            rig.finish("ep", call, prompt, (3,))
    read, _ = rewritten(rig)
    assert read.events == rig.events
    assert picture(read.state) == picture(rig.state)


def test_a_history_that_is_not_there_says_so() -> None:
    rig = LedgerRig()
    rig.open("ep")
    one, two = rig.begin("ep"), rig.begin("ep")
    rig.finish("ep", one[0], (1, 2, 3))
    record = encode(ev.CallFinished(2.0, "ep", packed_call(two[0], (1, 2, 3, 4), (5,))), rig.state.episodes)
    with pytest.raises(UnknownRecord, match="ep"):
        decode(record)


def sizes_of(rounds: Iterable[Iterable[Call]]) -> tuple[list[int], int]:
    """Bytes in the journal, in a snapshot, in memory and in the archive, of one episode whose requests have these
    choices; and how many tokens are distinct."""
    live, written, beginnings = LedgerRig(), 0, set()
    episode = live.open(task="t")
    for choices in rounds:
        calls = list(choices)
        names = live.begin(episode, choices=len(calls))
        for name, call in zip(names, calls, strict=True):
            event = ev.CallFinished(2.0, episode, pack(dataclasses.replace(call, call=name)))
            written += len(encode(event, live.state.episodes))
            live.run([event])
            text = hash(())
            for token in (*call.prompt_token_ids, *call.token_ids):
                text = hash((text, token))
                beginnings.add(text)
    known = live.state.episodes[episode]
    growing, held = sum(map(len, snapshot.pack_state(live.state))), known.transcript.size()
    live.reward(episode)
    assert known.transcript.size() == held
    return [written, growing, held, len(snapshot.pack(known))], len(beginnings)


def conversations(agents: int, turns: int) -> Iterator[list[Call]]:
    """Agents that take turns, each with a history of its own behind what all of them are told."""
    told = {agent: (*range(300), agent, *range(agent, agent + 200)) for agent in range(agents)}
    for turn in range(turns):
        for agent in told:
            answer = tuple(range(turn, turn + 20))
            yield [make_call("", told[agent], answer)]
            told[agent] = (*told[agent], *answer, *range(turn, turn + 30))


@pytest.mark.parametrize("agents", [1, 8, 9, 40])
def test_journal_snapshot_and_archive_grow_in_a_straight_line(agents: int) -> None:
    """However many conversations take turns: with each turn by its own tokens and what is said about the call."""
    sizes = {}
    for turns in (20, 40, 80):
        found, distinct = sizes_of(conversations(agents, turns))
        assert distinct == 300 + agents * (201 + turns * 50 - 30)
        sizes[turns] = found
    own, calls = 4 * 50 + 8 * 20, 40 * agents
    for twenty, forty, eighty in zip(*sizes.values(), strict=True):
        assert abs((eighty - forty) - 2 * (forty - twenty)) < 0.02 * eighty  # a straight line
        assert eighty - forty < calls * (own + 600)
    assert sizes[80][2] == 4 * (300 + agents * (201 + 80 * 50 - 30)) + 8 * 20 * 80 * agents


@pytest.mark.parametrize("choices", [1, 8, 64])
def test_choices_of_one_request_and_forks_of_one_history_cost_what_is_said_about_it_once(choices: int) -> None:
    prompt = tuple(range(5000))
    asked = [make_call("", prompt, tuple(range(number, number + 10))) for number in range(choices)]
    forked = [[call] for call in asked]
    gone_on = [[make_call("", (*call.prompt_token_ids, *call.token_ids, 1), (2, 3))] for call in asked]
    for rounds in ([asked], forked, [asked, *gone_on]):
        calls = sum(map(len, rounds))
        found, distinct = sizes_of(rounds)
        assert distinct == len(prompt) + choices * 10 + 3 * choices * (rounds[0] is asked and calls > choices)
        most = 4 * distinct + 8 * 10 * calls + (700 + 20 * choices) * calls + 2000
        assert all(size < most for size in found)
