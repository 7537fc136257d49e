"""The state at the end of a segment, as a file: whoever has it needs no segment up to there.

A snapshot is made of records framed like the journal's: a header, one record for each episode, one for everything
else, and a last one that says how many there were. It is written beside its place, made durable and then renamed, so
it is there whole or not at all. Dataclasses are maps of their fields: unknown fields are ignored and missing ones take
their default, and what is added to the state later is kept without a word here, if its kind is in `KINDS`. What the
state can derive is not written: who is unsettled, which batches are leased, whose a call is.

Invariant: ``read(write(state))`` is the state, shared parts included. What texts begin with in common, and a timeline's
turns, which are those of its calls, are in memory and on disk once.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack

from ajet_proxy.core.batches import LeasedBatch, ReadyQueues
from ajet_proxy.core.drift_rate import Drift
from ajet_proxy.core.episode import CallEntry, Chain, Episode, Given
from ajet_proxy.core.gate import Gate
from ajet_proxy.core.history import Mark
from ajet_proxy.core.ledger import Ledger
from ajet_proxy.core.lineage import Lineage
from ajet_proxy.core.state import Archive, LedgerSettings, Served, State
from ajet_proxy.core.tally import Curve, Point, Tally, TaskRewards
from ajet_proxy.core.texts import Text, Texts
from ajet_proxy.core.timeline import Turn
from ajet_proxy.io.codec import fields_of
from ajet_proxy.io.journal import MAGIC, JournalDamaged, folder_of, framed, read, snapshots, sync_folder

KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        CallEntry, Chain, Curve, Drift, Episode, Gate, Given, LeasedBatch, Lineage, Point, ReadyQueues, Served, Tally,
        TaskRewards, Text, Texts, Turn,
    )
}
HEADER = ("ajet-snapshot-2", sys.byteorder)
OBJECT, SET = 1, 2
DERIVED = frozenset((
    "settings", "archive", "episodes", "leaving", "leaving_batches", "unsettled", "leased", "episode_by_call",
    "_handlers",
))
"""What `State` holds besides what is written as it is."""


def load(data_dir: Path, settings: LedgerSettings, archive: Archive | None = None) -> Ledger:
    """The ledger as the latest snapshot has it; a new one if there is none."""
    ledger = Ledger(settings, archive)
    found = snapshots(data_dir)
    if found:
        unpack_state(found[-1], ledger)
    return ledger


def save(data_dir: Path, number: int, state: State) -> Path:
    """`state` as the snapshot behind segment `number`; durable when this returns."""
    folder = folder_of(data_dir)
    path, new = folder / f"{number:08d}.snapshot", folder / f"{number:08d}.snapshot.new"
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(MAGIC)
        for record in pack_state(state):
            file.write(framed([record]))
        file.flush()
        os.fsync(file.fileno())
    new.rename(path)
    sync_folder(folder)
    return path


def pack_state(state: State) -> Iterator[bytes]:
    """The records of a snapshot, without the journal's frame."""
    yield pack(HEADER)
    for episode in state.episodes.values():
        yield pack(episode)
    yield pack({name: value for name, value in vars(state).items() if name not in DERIVED})
    yield pack(len(state.episodes))


def unpack_state(path: Path, state: State) -> None:
    """Fill a new `state` from the snapshot in `path`, or `JournalDamaged`."""
    end, first, rest, last = 0, None, None, None
    for record, end in read(path):  # noqa: B007
        value = unpack(record)
        if isinstance(value, Episode):
            state.episodes[value.id] = value
        elif first is None:
            first = value
        elif rest is None:
            rest = value
        else:
            last = value
    if first != HEADER or last != len(state.episodes) or end != path.stat().st_size:
        raise JournalDamaged(f"{path} is damaged, or of another version or kind of machine: restore it from a copy")
    assert rest is not None
    for name, value in rest.items():
        if name in vars(state):
            setattr(state, name, _like(getattr(state, name), value))
    _derive(state)


def _derive(state: State) -> None:
    """What follows from the rest, and from settings that may have changed."""
    for episode in state.episodes.values():
        state.episode_by_call.update(dict.fromkeys(episode.calls, episode.id))
        if episode.state in ("open", "sealed"):
            state.unsettled[episode.id] = episode
    state.leased = {name: batch for name, batch in state.batches.items() if batch.state == "leased"}
    state.queues.regroup(state.settings.group_size)


def unpack(record: bytes) -> Any:
    """What a record holds."""
    return msgpack.unpackb(
        record, use_list=False, strict_map_key=False, unicode_errors="surrogatepass", ext_hook=_read
    )


def pack(value: Any) -> bytes:
    """A record that `unpack` reads."""
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass", default=_write)
    return packed


def _write(value: Any) -> Any:
    """What MessagePack knows nothing of."""
    if isinstance(value, deque):
        return list(value)
    if isinstance(value, set):
        return msgpack.ExtType(SET, pack(sorted(value)))
    if type(value).__name__ not in KINDS:
        raise TypeError(f"a snapshot cannot hold a {type(value).__name__}")
    return msgpack.ExtType(OBJECT, pack([type(value).__name__, _fields(value)]))


def _read(code: int, data: bytes) -> Any:
    if code == SET:
        return set(unpack(data))
    name, fields = unpack(data)
    return _built(KINDS[name], fields)


def _fields(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return dict(vars(value))
    fields = fields_of(value)
    if isinstance(value, Episode):
        fields["metadata"] = json.dumps(value.metadata)
        fields["chains"] = [
            dataclasses.replace(chain, turns=tuple(_named(turn, value) for turn in chain.turns))
            for chain in value.chains
        ]
    return fields


def _named(turn: Turn, episode: Episode) -> Any:
    """The name of the call whose turn this is; a turn that a merge has changed is written as it is."""
    return turn.call if episode.calls[turn.call].turn == turn else turn


def _built(kind: Any, fields: dict[str, Any]) -> Any:
    if not dataclasses.is_dataclass(kind):
        value = kind()
        for name, new in vars(value).items():
            vars(value)[name] = _like(new, fields.get(name, new))
        if kind is Lineage:
            for name, marks in vars(value)["_marks"].items():
                vars(value)["_marks"][name] = [Mark(*mark) for mark in marks]
        return value
    known = {field.name: field for field in dataclasses.fields(kind)}
    if kind is ReadyQueues:
        fields["_queues"] = {name: list(queue) for name, queue in fields["_queues"].items()}
    value = kind(**{name: _like(_new(known[name]), item) for name, item in fields.items() if name in known})
    if kind is Episode:
        _join(value)
    return value


def _new(field: dataclasses.Field[Any]) -> Any:
    """What a new object has there."""
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _like(new: Any, value: Any) -> Any:
    """`value`, which MessagePack may have made a tuple or a dict, as the same kind of container as `new`."""
    if isinstance(new, deque):
        return deque(value, new.maxlen)
    return type(new)(value) if isinstance(new, (list, Counter)) else value


def _join(episode: Episode) -> None:
    """Let calls and timelines share again what they shared."""
    episode.metadata = json.loads(str(episode.metadata))
    episode.chains = tuple(
        dataclasses.replace(chain, turns=tuple(_whose(turn, episode) for turn in chain.turns))
        for chain in episode.chains
    )


def _whose(turn: Turn | str, episode: Episode) -> Any:
    return episode.calls[turn].turn if isinstance(turn, str) else turn
