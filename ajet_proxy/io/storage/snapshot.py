"""The state at the end of a segment, as a file: a start needs no segment up to there, and replays those behind it.

A snapshot is a header, each episode, everything else, and how many episodes there were: MessagePack values one after
the other, in records framed like the journal's. Where one record ends and the next begins means nothing, so no episode
is too large for one. The file is written next to its place, made durable, and read back as a start reads it. Then it is
renamed, so it is there whole and readable or not at all.

Objects are maps of their fields: unknown fields are ignored and missing ones take their default. What is added to the
state later is kept here without any change, if its kind is in `KINDS`. What the state can derive is not written: who is
unsettled, which batches are leased, whose a call is.

Invariant: ``read(write(state))`` is the state, shared parts included. Some things are in memory and on disk only once.
These are what texts begin with in common, what the calls of one request were asked, and a timeline's turns, which are
those of its calls.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgpack

from ajet_proxy.core.conversation.history import Lineage, Mark
from ajet_proxy.core.ledger.attempts import Attempt, Attempts
from ajet_proxy.core.ledger.births import Births, Branch
from ajet_proxy.core.ledger.clients import Client
from ajet_proxy.core.ledger.episode import Episode, Shares
from ajet_proxy.core.ledger.episodes import Archive
from ajet_proxy.core.ledger.events import EpisodeJudged, EpisodeOpened, FeedbackGiven, RunWanted, TrainerCame
from ajet_proxy.core.ledger.gates import Gate
from ajet_proxy.core.ledger.groups import Group, Seat
from ajet_proxy.core.ledger.holdouts import Holdouts, Span
from ajet_proxy.core.ledger.mix import Mix, QueueCredit
from ajet_proxy.core.ledger.mixes import LaneMix
from ajet_proxy.core.ledger.model_queue import ModelQueue
from ajet_proxy.core.ledger.plays import Evaluation, Play
from ajet_proxy.core.ledger.progress import GroupProgress, OpenCounts, Progress
from ajet_proxy.core.ledger.queues import LeasedBatch
from ajet_proxy.core.ledger.reward_curves import Curve, Point, RewardCurves, TaskRewards
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.core.ledger.transcript import Asked, CallEntry, Transcript
from ajet_proxy.core.ledger.weights import Candidate, Served, Trainer
from ajet_proxy.core.trajectory.drift_rate import Drift
from ajet_proxy.core.trajectory.rewards import EpisodeReward
from ajet_proxy.core.trajectory.texts import Text, Texts
from ajet_proxy.core.trajectory.timeline import Chain, Turn
from ajet_proxy.io.storage.codec import UnknownRecord, decode, fields_of, made_of
from ajet_proxy.io.storage.journal import MAGIC, JournalDamaged, folder_of, framed, read, snapshots, sync_folder

KINDS: dict[str, Any] = {
    "Asked": Asked, "Attempt": Attempt, "Attempts": Attempts, "Births": Births, "Branch": Branch,
    "CallEntry": CallEntry, "Chain": Chain, "Client": Client, "Curve": Curve, "LaneMix": LaneMix, "Drift": Drift,
    "Episode": Episode, "EpisodeOpened": EpisodeOpened, "EpisodeReward": EpisodeReward,
    "Evaluation": Evaluation, "Gate": Gate, "GroupProgress": GroupProgress, "Group": Group, "LeasedBatch": LeasedBatch,
    "Lineage": Lineage, "OpenCounts": OpenCounts, "Mix": Mix, "ModelQueue": ModelQueue, "Play": Play, "Point": Point,
    "Progress": Progress, "QueueCredit": QueueCredit, "RewardCurves": RewardCurves, "Seat": Seat, "Shares": Shares,
    "Served": Served, "TaskRewards": TaskRewards, "Text": Text, "Texts": Texts, "Trainer": Trainer, "Turn": Turn,
    "RunWanted": RunWanted, "TrainerCame": TrainerCame, "EpisodeJudged": EpisodeJudged, "FeedbackGiven": FeedbackGiven,
    "Holdouts": Holdouts, "Span": Span, "Candidate": Candidate,
}
"""The names of what a snapshot holds, on disk. They never change, whatever the classes are called."""
_NAMES = {kind: name for name, kind in KINDS.items()}
HEADER = ("ajet-snapshot-1", sys.byteorder)
OBJECT, SET = 1, 2
PIECE = 16 << 20
"""The longest record of a snapshot."""
TABLES = ("batches", "runs")
"""Rooms that are themselves what they keep, besides the episodes."""
HUGE = 1 << 40
"""More than any value that a machine holds: msgpack has a limit of its own otherwise."""
UNREADABLE = (ValueError, TypeError, KeyError, AttributeError, IndexError, msgpack.UnpackException)
"""Errors that reading may raise where the checksums fit and the values do not: it is another program's, or written
wrongly."""
READING: dict[str, Any] = {"use_list": False, "strict_map_key": False, "unicode_errors": "surrogatepass"}


def load(data_dir: Path, settings: LedgerSettings, archive: Archive | None = None) -> State:
    """The state as the latest snapshot has it; a new one if there is none."""
    state = State(settings, archive)
    found = snapshots(data_dir)
    if found:
        unpack_state(found[-1], state)
    return state


def replay(data_dir: Path, records: Iterable[bytes], state: State) -> State:
    """`state` after the events in `records`, which are the journal's in `data_dir`; or `JournalDamaged`."""
    try:
        for record in records:
            state.apply(decode(record, state.episodes))
    except UnknownRecord as error:
        raise JournalDamaged(f"the journal in {data_dir} was written by another version: {error}") from error
    except KeyError as error:  # about something that no record before it has made
        raise JournalDamaged(
            f"the files of the journal in {data_dir} do not fit together ({error} comes from nowhere): restore all of "
            "them from one copy", code="journal_damaged",
        ) from error
    return state


def save(data_dir: Path, number: int, state: State) -> Path:
    """`state` as the snapshot of segment `number`, durable and read back when this returns. If it cannot be made,
    nothing is left of it."""
    folder = folder_of(data_dir)
    path, new = folder / f"{number:08d}.snapshot", folder / f"{number:08d}.snapshot.new"
    try:
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(MAGIC)
            for value in pack_state(state):
                for start in range(0, len(value), PIECE):
                    file.write(framed([value[start : start + PIECE]]))
            file.flush()
            os.fsync(file.fileno())
        deque(values(new), maxlen=0)
    except BaseException:
        with contextlib.suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    new.rename(path)
    sync_folder(folder)
    return path


def pack_state(state: State) -> Iterator[bytes]:
    """The values of a snapshot."""
    yield pack(HEADER)
    for episode in state.episodes.values():
        yield pack(episode)
    kept = {name: {field: getattr(room, field) for field in room.KEPT} for name, room in state.rooms().items()}
    tables = {name: dict(getattr(state, name)) for name in TABLES}
    yield pack(kept | {"tables": tables, "now": state.now})
    yield pack(len(state.episodes))


def unpack_state(path: Path, state: State) -> None:
    """Fill a new `state` from the snapshot in `path`, or `JournalDamaged`."""
    for value in values(path):
        if isinstance(value, Episode):
            state.episodes[value.id] = value
            continue
        state.now = value["now"]
        for name, room in state.rooms().items():
            for field in room.KEPT:
                if field in value.get(name, ()):
                    setattr(room, field, _like(getattr(room, field), value[name][field]))
            if name in TABLES:
                room.update(value["tables"].get(name, {}))
    state.derive()


def values(path: Path) -> Iterator[Any]:
    """The episodes in a snapshot, then everything else by its name. `JournalDamaged` as soon as they prove not to be
    what was written."""
    damaged = f"{path} is damaged, or of another version or kind of machine: restore it from a copy"
    end, found, last = 0, -1, None
    unpacker = msgpack.Unpacker(max_buffer_size=HUGE, ext_hook=_read, **READING)
    try:
        for record, end in read(path):  # noqa: B007
            unpacker.feed(record)
            for last in map(_made, unpacker):
                found += 1
                if found == 0 and last != HEADER:
                    raise JournalDamaged(damaged)
                if isinstance(last, (Episode, dict)):
                    yield last
    except UNREADABLE as error:
        raise JournalDamaged(f"{damaged} ({error!r})") from error
    if last != found - 2 or end != path.stat().st_size:
        raise JournalDamaged(damaged)


def unpack(record: bytes) -> Any:
    """Return what `pack` has packed."""
    return _made(_unpacked(record))


def pack(value: Any) -> bytes:
    """Bytes that `unpack` reads. An object is its kind and its fields. Only within another one is it a MessagePack
    extension: those end at 4 GiB."""
    name = _NAMES.get(type(value))
    return _packed(value if name is None else [name, _fields(value)])


def _packed(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True, unicode_errors="surrogatepass", default=_write)
    return packed


def _unpacked(data: bytes) -> Any:
    return msgpack.unpackb(data, ext_hook=_read, **READING)


def _made(value: Any) -> Any:
    """The object that `value` describes by its kind and its fields, if it does; else `value`."""
    is_object = isinstance(value, tuple) and len(value) == 2 and value[0] in KINDS
    return _built(KINDS[value[0]], value[1]) if is_object else value


def _write(value: Any) -> Any:
    """A form for values that MessagePack knows nothing of."""
    if isinstance(value, deque):
        return list(value)
    if isinstance(value, set):
        return msgpack.ExtType(SET, _packed(sorted(value)))
    if type(value) not in _NAMES:
        raise TypeError(f"a snapshot cannot hold a {type(value).__name__}")
    return msgpack.ExtType(OBJECT, pack(value))


def _read(code: int, data: bytes) -> Any:
    return set(_unpacked(data)) if code == SET else unpack(data)


def _fields(value: Any) -> dict[str, Any]:
    if not made_of(value.__class__):
        return dict(vars(value))
    fields = fields_of(value)
    if isinstance(value, Episode):
        fields["transcript"] = _fields(value.transcript)  # no extension, which ends at 4 GiB
    if isinstance(value, Transcript):
        first: dict[Asked, Any] = {}  # which calls share, the first of them tells, and the others name that one
        fields["calls"] = {
            name: entry if first.setdefault(entry.asked, name) == name
            else dataclasses.replace(entry, asked=first[entry.asked])
            for name, entry in value.calls.items()
        }
        fields["chains"] = [
            dataclasses.replace(chain, turns=tuple(_named(turn, value) for turn in chain.turns))
            for chain in value.chains
        ]
    return fields


def _named(turn: Turn, known: Transcript) -> Any:
    """The name of the call whose turn this is. A turn that a merge has changed is written as it is."""
    return turn.call if known.calls[turn.call].turn == turn else turn


def _built(kind: Any, fields: dict[str, Any]) -> Any:
    if not (known := made_of(kind)):
        value = kind()
        for name, new in vars(value).items():
            vars(value)[name] = _like(new, fields.get(name, new))
        if kind is Lineage:
            for name, marks in vars(value)["_marks"].items():
                vars(value)["_marks"][name] = [Mark(*mark) for mark in marks]
        return value
    if "metadata" in fields:
        fields = fields | {"metadata": json.loads(fields["metadata"])}
    if kind is Episode:
        fields = fields | {"transcript": _built(Transcript, fields["transcript"])}
    made = {name: field.default_factory() for name, field in known.items() if callable(field.default_factory)}
    value = kind(**{name: _like(made.get(name), item) for name, item in fields.items() if name in known})
    if kind is Transcript:
        _join(value)
    return value


def _like(new: Any, value: Any) -> Any:
    """`value`, which MessagePack may have made a tuple or a dict, as the same kind of container as `new`."""
    if isinstance(new, deque):
        return deque(value, new.maxlen)
    return type(new)(value) if isinstance(new, (list, Counter)) else value


def _join(known: Transcript) -> None:
    """Let calls and timelines share again what they shared."""
    for entry in known.calls.values():
        if isinstance(entry.asked, str):
            entry.asked = known.calls[entry.asked].asked
    own: Mapping[Any, Any] = {name: entry.turn for name, entry in known.calls.items()}
    known.chains = tuple(
        dataclasses.replace(chain, turns=tuple(own[turn] if isinstance(turn, str) else turn for turn in chain.turns))
        for chain in known.chains
    )
