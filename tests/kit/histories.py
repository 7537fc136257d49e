"""Random histories of a daemon: commands drawn one after another, refusals left out."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import astuple

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.events import Event
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.core.tokens import unpack_tokens
from ajet_proxy.io.storage.codec import encode
from ajet_proxy.io.storage.journal import MAGIC, folder_of, framed
from ajet_sdk.errors import AjetError
from ajet_sdk.routes import Flush, Judgement, Play
from tests.kit.ledger_rig import SETTINGS, LedgerRig

EPISODES = st.sampled_from(["a", "b", "c", "d"])
MODELS = st.sampled_from(["m", "m", "n"])
TASKS = st.sampled_from(["s", "t", "lane/t"])
SHORT = st.lists(st.integers(0, 2), max_size=4)
TEAMS: tuple[dict[str, Any], ...] = (
    {}, {}, {}, {"model": "m"}, {"model": "m", "teachers": {"z": "n"}}, {"teachers": {"z": "n"}},
    {"members": {"x": "m", "y": "n"}}, {"members": {"x": "m"}, "teachers": {"y": "n"}},
)


def _open(rig: LedgerRig, draw: Any) -> None:
    evaluates, team = draw(st.integers(0, 2)) == 0, draw(st.sampled_from(TEAMS))
    client = draw(st.sampled_from([None, *rig.state.clients.live]))
    revision = draw(st.sampled_from([None, "r1", "r2"]))
    rig.open(draw(EPISODES), task=draw(st.none() | TASKS), eval=evaluates, client=client, revision=revision, **team)


def _call(rig: LedgerRig, draw: Any) -> None:
    choices, evaluates, body = draw(st.integers(1, 2)), draw(st.integers(0, 9)) == 0, draw(st.sampled_from(["", "p"]))
    key, task = draw(st.sampled_from([None, None, "k"])), draw(st.sampled_from([None, None, "t"]))
    for call in rig.begin(
        draw(EPISODES), model=draw(MODELS), choices=choices, eval=evaluates, body=body, key=key, task=task,
        retry=draw(st.booleans()),
    ):
        if draw(st.integers(0, 3)):
            episode = rig.state.episodes.by_call.get(call, "")
            rig.finish(episode, call, (1, *draw(SHORT)), draw(SHORT))


def _running(rig: LedgerRig) -> list[tuple[str, str]]:
    return [
        (episode.id, call) for episode in rig.state.episodes.values()
        for call, entry in episode.transcript.calls.items() if entry.state == "running"
    ]


def _finish(rig: LedgerRig, draw: Any) -> None:
    """A call ends that may go on from what another one said."""
    if running := _running(rig):
        episode, call = draw(st.sampled_from(running))
        known = rig.state.episodes[episode].transcript
        said = [unpack_tokens(found.text) for name in known.calls if (found := known.packed(name)) is not None]
        rig.finish(episode, call, (*draw(st.sampled_from([(1,), *said])), *draw(SHORT)), draw(SHORT))


def _reward(rig: LedgerRig, draw: Any) -> None:
    fields = {"final": draw(st.booleans()), "id": draw(st.sampled_from([None, "r"]))}
    rig.reward(draw(EPISODES), draw(st.sampled_from([0.0, 0.5])), **fields)


def _ready(rig: LedgerRig, draw: Any) -> None:
    rig.ready(draw(TASKS), model=draw(MODELS))


def _lease(rig: LedgerRig, draw: Any) -> None:
    groups, size = draw(st.integers(1, 2)), draw(st.sampled_from([None, 1, 1, 3]))
    unit = draw(st.sampled_from(["groups", "groups", "episodes"]))
    batch = rig.lease(
        groups=groups, group_size=size, unit=unit, model=draw(st.sampled_from([None, "m"])),
        max_staleness=draw(st.sampled_from([None, None, 0, 1])), lease_s=draw(st.sampled_from([10.0, 500.0])),
        min_group_size=draw(st.sampled_from([None, None, 1])), group_wait_s=draw(st.sampled_from([0.0, 30.0])),
    )
    if batch is not None:
        leased = views.batch(rig.state, batch).groups
        sizes, held = [len(group.episodes) for group in leased], [item for group in leased for item in group.episodes]
        assert len(held) == len({item.episode for item in held})
        assert len(sizes) == groups if unit == "groups" else sum(sizes[:-1]) < groups <= sum(sizes)
        assert all(1 <= found <= (size or SETTINGS.group_size) for found in sizes)
        assert all(any(1 in sample.loss_mask for sample in item.samples) for item in held)


def _answer(rig: LedgerRig, draw: Any) -> None:
    if batches := {**rig.state.batches, **rig.state.batches.leaving}:
        getattr(rig, draw(st.sampled_from(["ack", "ack", "nack", "extend"])))(draw(st.sampled_from(sorted(batches))))


def _lose(rig: LedgerRig, draw: Any) -> None:
    if (running := _running(rig)) and draw(st.integers(0, 3)):
        rig.lose(*draw(st.sampled_from(running)))
    elif rig.state.episodes.by_call:
        call, episode = draw(st.sampled_from([*rig.state.episodes.by_call.items()]))
        rig.lose(episode, call, taken_back=True)


def _end(rig: LedgerRig, draw: Any) -> None:
    episode = draw(EPISODES | st.sampled_from(["a", *rig.state.episodes, *rig.state.episodes.leaving]))
    action = draw(st.sampled_from(["seal", "abort", "heartbeat"]))
    if action == "abort":
        rig.abort(episode, None, draw(st.sampled_from([None, "agent", "infra"])))
    else:
        getattr(rig, action)(episode)


def _weights(rig: LedgerRig, draw: Any) -> None:
    version = draw(st.integers(0, 3))
    rig.announce(draw(MODELS), version)
    if draw(st.integers(0, 3)) == 0:
        rig.stands(draw(st.sampled_from(["n", "o"])), version)
    shut, model = draw(st.booleans()), draw(st.sampled_from([None, "m", "n"]))
    if shut:
        rig.gate_close(model)
    else:
        rig.gate_open(version, model)


SHARES = (None, {"default": 1.0}, {"default": 0.5, "lane": 0.5}, {"lane": 0.25, "x": 0.75})


def _mix(rig: LedgerRig, draw: Any) -> None:
    model = draw(st.sampled_from([None, "m", "n"]))
    if draw(st.integers(0, 4)) == 0:
        rig.run(rig.commands.leases.drop_mix(model, at=rig.at))
        return
    ahead, size = draw(st.sampled_from([None, 0, 1, 2])), draw(st.sampled_from([None, 1, 3]))
    wait = draw(st.sampled_from([None, 0.0, 30.0]))
    rig.mix(draw(st.sampled_from(SHARES)), ahead=ahead, group_size=size, lane_wait_s=wait, model=model)


def _flush(rig: LedgerRig, draw: Any) -> None:
    lane, task = draw(st.sampled_from([None, "default", "lane"])), draw(st.sampled_from([None, "t"]))
    rig.run(rig.commands.leases.flush(Flush(lane, task), at=rig.at))


def _send(rig: LedgerRig, draw: Any) -> None:
    """The ends of some answers, and of some nobody knows."""
    calls, sent = sorted(rig.state.episodes.unsent), draw(st.integers(0, 3))
    rig.run(rig.commands.answers_sent(calls[:sent], calls[sent : sent + draw(st.integers(0, 1))], at=rig.at))


def _time(rig: LedgerRig, draw: Any) -> None:
    rig.at += draw(st.sampled_from([-50.0, 1.0, 20.0, 60.0, 600.0, 600.0, 90000.0]))
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
    if draw(st.booleans()):
        rig.evaluate(draw(MODELS), draw(st.integers(0, 2)), draw(st.sampled_from([None, None, "again"])))
    else:
        rig.ends(rig.open(eval=True, model="m"), draw(st.sampled_from([None, 0.0, 1.0])))


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


STEPS = (_open, _call, _call, _finish, _reward, _ready, _ready, _lease, _lease, _answer, _answer, _lose, _end, _weights,
         _mix, _flush, _send, _time, _evaluate, _evaluate, _play, _archive, _archive, _join, _leave, _chat, _chat,
         _sealed, _sealed, _sealed, _judge, _judge, _say, _withdraw)


@st.composite
def histories(draw: st.DrawFn, least: int = 0, begins: Callable[[], LedgerRig] = LedgerRig) -> LedgerRig:
    """A rig that has lived through anything, restarts included, in so many steps at `least`."""
    rig = begins()
    rig.restart()  # a journal begins so
    for step in draw(st.lists(st.sampled_from((*STEPS, None)), min_size=least, max_size=40)):
        if step is None:
            rig.restart()
            continue
        with suppress(AjetError):
            step(rig, draw)
    return rig


APART = ("archive", "leaving")
"""The parts of a room that are not in memory."""


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
