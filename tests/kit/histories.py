"""Random histories of a daemon: commands drawn one after another, refusals left out."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import astuple

from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.io.storage.codec import encode
from ajet_proxy.io.storage.journal import MAGIC, folder_of, framed
from ajet_sdk.errors import AjetError
from ajet_sdk.routes import GateClose, GateOpen, Judgement, Play, SetMix
from tests.kit.ledger_rig import SETTINGS, LedgerRig

EPISODES = st.sampled_from(["a", "b", "c", "d"])
SHORT = st.lists(st.integers(0, 2), max_size=4)


def _open(rig: LedgerRig, draw: Any) -> None:
    members = {"x": "m", "y": "n"} if draw(st.integers(0, 4)) == 0 else None
    teachers = {"z": "n"} if members is None and draw(st.integers(0, 4)) == 0 else None
    evaluates, model = draw(st.integers(0, 2)) == 0, draw(st.sampled_from([None, "m"]))
    task = draw(st.sampled_from([None, "s", "t"]))
    client = draw(st.sampled_from([None, *rig.state.clients.live]))
    revision = draw(st.sampled_from([None, "r1", "r2"]))
    rig.open(
        draw(EPISODES), task=task, members=members, eval=evaluates, model=None if members else model, client=client,
        revision=revision, teachers=teachers,
    )


def _call(rig: LedgerRig, draw: Any) -> None:
    model = draw(st.sampled_from(["m", "m", "n"]))
    choices, evaluates = draw(st.integers(1, 2)), draw(st.integers(0, 9)) == 0
    for call in rig.begin(draw(EPISODES), model=model, choices=choices, eval=evaluates):
        if draw(st.integers(0, 3)):
            episode = rig.state.episodes.by_call.get(call, "")
            rig.finish(episode, call, (1, *draw(SHORT)), draw(SHORT))


def _reward(rig: LedgerRig, draw: Any) -> None:
    rig.reward(draw(EPISODES), draw(st.sampled_from([0.0, 0.5])), final=draw(st.booleans()))


def _ready(rig: LedgerRig, draw: Any) -> None:
    rig.ready(draw(st.sampled_from(["s", "t"])), model=draw(st.sampled_from(["m", "n"])))


def _lease(rig: LedgerRig, draw: Any) -> None:
    rig.lease(group_size=draw(st.integers(1, 2)), lease_s=draw(st.sampled_from([10.0, 500.0])))


def _answer(rig: LedgerRig, draw: Any) -> None:
    if rig.state.batches:
        getattr(rig, draw(st.sampled_from(["ack", "ack", "nack"])))(draw(st.sampled_from(sorted(rig.state.batches))))


def _lose(rig: LedgerRig, draw: Any) -> None:
    running = [
        (episode.id, call) for episode in rig.state.episodes.values()
        for call, entry in episode.transcript.calls.items() if entry.state == "running"
    ]
    if running:
        rig.lose(*draw(st.sampled_from(running)))
    elif rig.state.episodes.by_call:
        call, episode = draw(st.sampled_from([*rig.state.episodes.by_call.items()]))
        rig.lose(episode, call, taken_back=True)


def _end(rig: LedgerRig, draw: Any) -> None:
    episode, cause = draw(EPISODES), draw(st.sampled_from([None, "agent", "infra"]))
    if draw(st.booleans()):
        rig.seal(episode)
    else:
        rig.abort(episode, None, cause)


def _weights(rig: LedgerRig, draw: Any) -> None:
    commands, version = rig.commands, draw(st.integers(0, 3))
    rig.announce(draw(st.sampled_from(["m", "m", "n"])), version)
    if draw(st.integers(0, 3)) == 0:
        rig.stands(draw(st.sampled_from(["n", "o"])), version)
    shut, model = draw(st.booleans()), draw(st.sampled_from([None, "m", "n"]))
    if shut:
        rig.run(commands.trainers.gate_close(GateClose(model=model), at=rig.at))
    else:
        rig.run(commands.trainers.gate_open(GateOpen(version, model), at=rig.at))


def _mix(rig: LedgerRig, draw: Any) -> None:
    ahead, size = draw(st.sampled_from([0, 1, 2])), draw(st.sampled_from([None, 1, 3]))
    shares = draw(st.sampled_from([None, {"default": 1.0}, {"default": 0.5, "lane": 0.5}]))
    body = SetMix(shares, ahead, size, model=draw(st.sampled_from([None, "m", "n"])))
    rig.run(rig.commands.leases.set_mix(body, at=rig.at))


def _time(rig: LedgerRig, draw: Any) -> None:
    rig.at += draw(st.sampled_from([1.0, 20.0, 600.0, 600.0, 90000.0]))
    rig.run(rig.commands.expire(rig.at, tight=draw(st.integers(0, 9)) == 0))
    rig.tick()


def _chat(rig: LedgerRig, draw: Any) -> None:
    """A user calls, in the latest part of a chat, in the next one, or in a first one."""
    episode, way = draw(EPISODES), draw(st.sampled_from(["path", "body", "lineage"]))
    parts = [episode, *rig.state.episodes.parts.get(episode, ())]
    if draw(st.booleans()) and (known := rig.state.episodes.find(parts[-1])) is not None and known.state != "open":
        parts.append(f"{episode}.{len(parts) + 1}")
    first = "" if parts[-1] == episode else episode
    (call,) = rig.begin(
        parts[-1], traffic="chat", first=first, identified_by=way, judged=draw(st.integers(0, 4)) > 0,
        consents=draw(st.integers(0, 9)) > 0, withdraws=draw(st.integers(0, 9)) == 0,
    )
    if draw(st.integers(0, 5)):
        rig.finish(parts[-1], call, (1, *draw(SHORT)), (2,))


def _sealed(rig: LedgerRig, draw: Any) -> None:
    """A chat that awaits a judgement, or an episode of a group that is to be judged."""
    if draw(st.integers(0, 3)):
        episode = rig.id("chat")
        rig.call(episode, traffic="chat")
    else:
        rig.call(episode := rig.open(task=draw(st.sampled_from(["s", "t"])), judged=True))
    rig.seal(episode)


def _awaiting(rig: LedgerRig, draw: Any) -> str:
    return str(draw(st.sampled_from([*rig.state.episodes.awaiting, "a"])))


def _judge(rig: LedgerRig, draw: Any) -> None:
    episode, judge = _awaiting(rig, draw), draw(st.sampled_from(["j", "k"]))
    if draw(st.integers(0, 4)) == 0:
        rig.run(rig.commands.judging.judge(episode, Judgement(judge, withdraw=True), at=rig.at))
    else:
        rig.judge(episode, draw(st.sampled_from([None, -1.0, 0.5, 0.5])), judge)


def _say(rig: LedgerRig, draw: Any) -> None:
    episode = _awaiting(rig, draw)
    calls = rig.state.episodes.known(episode).transcript.calls
    rig.feedback(episode, draw(st.sampled_from([None, *calls])), value=draw(st.sampled_from([-1.0, 1.0])))


def _withdraw(rig: LedgerRig, draw: Any) -> None:
    if rig.state.episodes:
        episode = rig.state.episodes[draw(st.sampled_from([*rig.state.episodes]))]
        rig.withdraw(episode.opening.whole)


def _evaluate(rig: LedgerRig, draw: Any) -> None:
    rig.evaluate(draw(st.sampled_from(["m", "n"])), draw(st.integers(1, 2)))


def _play(rig: LedgerRig, draw: Any) -> None:
    name = draw(st.sampled_from(["p", "q"]))
    if draw(st.integers(0, 4)) == 0:
        rig.run(rig.commands.end_play(name, tenant="", at=rig.at))
        return
    rig.run(rig.commands.play(Play(name, 3), tenant="", at=rig.at))
    rig.open(draw(EPISODES), task="s", play=name, place=draw(st.integers(0, 3)))


def _archive(rig: LedgerRig, draw: Any) -> None:
    rig.archive(draw(st.integers(0, 3)))


def _join(rig: LedgerRig, draw: Any) -> None:
    older, ttl_s = draw(st.booleans()), draw(st.sampled_from([5.0, 500.0]))
    rig.join(draw(st.sampled_from(["one", "two"])), lane="lane", replaces_older=older, ttl_s=ttl_s, revision="r1")


def _leave(rig: LedgerRig, draw: Any) -> None:
    if rig.state.clients.live:
        rig.leave(draw(st.sampled_from([*rig.state.clients.live])))


STEPS = (_open, _call, _call, _reward, _ready, _ready, _lease, _lease, _answer, _answer, _lose, _end, _weights, _mix,
         _time, _evaluate, _play, _archive, _archive, _join, _leave, _chat, _chat, _sealed, _sealed,
         _sealed, _judge, _judge, _say, _withdraw)


@st.composite
def histories(draw: st.DrawFn, least: int = 0) -> LedgerRig:
    """A rig that has lived through anything, restarts included, in so many steps at `least`."""
    rig = LedgerRig()
    rig.restart()  # a journal begins so
    for step in draw(st.lists(st.sampled_from((*STEPS, None)), min_size=least, max_size=40)):
        if step is None:
            rig.restart()
            continue
        with suppress(AjetError):
            step(rig, draw)
    return rig


APART = ("archive", "leaving")
"""What of a room is not in memory."""


def everything(state: State) -> dict[str, Any]:
    """All that `state` holds, private parts and kinds of containers included, so that two of them can be compared."""
    rooms = {
        name: {field: _plain(value) for field, value in vars(room).items() if field[0] != "_" and field not in APART}
        for name, room in state.rooms().items() if name != "queues"
    }
    tables = {name: _plain(dict(getattr(state, name))) for name in ("episodes", "batches", "runs")}
    return {"now": state.now, **rooms, "tables": tables}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return type(value), {name: _plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return type(value), [_plain(item) for item in value], getattr(value, "maxlen", None)
    if isinstance(value, set):
        return type(value), frozenset(value)
    if isinstance(value, Struct):
        return type(value), [_plain(item) for item in astuple(value)]
    if dataclasses.is_dataclass(value):
        return type(value), [_plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return (type(value), _plain(vars(value))) if hasattr(value, "__dict__") else (type(value), value)


def folded(events: Iterable[Event], settings: LedgerSettings = SETTINGS) -> State:
    state = State(settings)
    for event in events:
        state.apply(event)
    return state


def encoded(events: Iterable[Event]) -> list[bytes]:
    """The records of `events`, each as the daemon writes it in its moment."""
    state, records = State(SETTINGS), []
    for event in events:
        records.append(encode(event, state.episodes))
        state.apply(event)
    return records


def write_segments(data_dir: Path, records: Sequence[bytes], ends: Iterable[int]) -> None:
    """A journal of `records` whose segments end behind these numbers of records, the last one with the last."""
    folder_of(data_dir).mkdir(parents=True)
    begin = 0
    for number, end in enumerate((*sorted(ends), len(records)), 1):
        (folder_of(data_dir) / f"{number:08d}.log").write_bytes(MAGIC + framed(records[begin:end]))
        begin = end
