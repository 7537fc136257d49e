"""The fold: whatever agents, trainers, clocks and crashes do, the ledger identity holds after every event and a replay
of the events, up to any of them, is what the live state was at that moment."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from ajet_proxy.core.conversation.history import Lineage, Mark
from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.gates import Gate
from ajet_proxy.core.ledger.state import State
from ajet_sdk.errors import AjetError, NotFound
from ajet_sdk.routes import Flush, GateClose, GateOpen, SetMix
from tests.kit.histories import everything
from tests.kit.ledger_rig import SETTINGS, LedgerRig, Shelf, check, picture
from tests.kit.strategies import EVENT_KINDS, packed_call

EPISODES = st.sampled_from(["a", "b", "c", "d", "e"])
MODELS = st.sampled_from(["m", "m", "n"])
SHORT = st.lists(st.integers(0, 2), max_size=4)


class Unchanging:
    """Sees of every command that it changes nothing, whether it decides or refuses."""

    state: State

    @classmethod
    def watch(cls, commands: Any) -> None:
        commands.__class__ = type(cls.__name__, (cls, type(commands)), {})

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name.startswith("_") or not callable(found):
            return found

        def seen(*values: Any, **named: Any) -> Any:
            before = everything(self.state)
            try:
                return found(*values, **named)
            finally:
                assert everything(self.state) == before

        return seen


class AnythingHappens(RuleBasedStateMachine):
    """Commands in any order. None changes anything; nor does any look at the state."""

    def __init__(self) -> None:
        super().__init__()
        self.rig = LedgerRig(watch=True)
        commands = self.rig.commands
        for part in (commands, commands.clients, commands.trainers, commands.leases, commands.judging):
            Unchanging.watch(part)
        self.running: list[tuple[str, str]] = []
        self.texts: list[tuple[int, ...]] = [()]

    def attempt(self, command: Any) -> Any:
        seen = len(self.rig.events)
        try:
            return command()
        except AjetError:
            assert len(self.rig.events) == seen
            assert picture(self.rig.state) == self.rig.pictures[-1]

    @rule(
        episode=EPISODES, task=st.sampled_from([None, "s", "t", "lane/s"]), eval=st.booleans(),
        team=st.sampled_from([
            {"members": {"x": "m", "y": "n"}}, {"members": {"x": "m"}, "teachers": {"y": "n"}},
            {"model": "m", "teachers": {"y": "n"}}, {"teachers": {"y": "n"}}, {"model": "m"}, {},
        ]),
    )  # fmt: skip
    def opens(self, episode: str, task: str | None, eval: bool, team: dict[str, Any]) -> None:
        fields = {"eval": eval, **team}
        self.attempt(lambda: self.rig.open(episode, task=task, **fields))

    @rule(model=MODELS, episodes=st.integers(0, 2), name=st.sampled_from([None, None, "again"]))
    def wants_an_evaluation(self, model: str, episodes: int, name: str | None) -> None:
        self.attempt(lambda: self.rig.evaluate(model, episodes, name))

    @rule(value=st.sampled_from([None, 0.0, 1.0]))
    def plays_an_evaluation(self, value: float | None) -> None:
        self.rig.ends(self.rig.open(eval=True, model="m"), value)

    @rule(
        episode=EPISODES, model=MODELS, choices=st.integers(1, 2), body=st.sampled_from(["p", "q"]),
        retry=st.booleans(), key=st.sampled_from([None, None, "k"]), task=st.sampled_from([None, None, "t"]),
        eval=st.sampled_from([False, False, False, True]),
    )
    def calls(self, episode: str, **options: Any) -> None:
        calls = self.attempt(lambda: self.rig.begin(episode, **options))
        self.running += [(episode, call) for call in calls or ()]

    @rule(episode=EPISODES, model=MODELS, news=SHORT, value=st.sampled_from([None, 0.0, 1.0]))
    def answers_whole(self, episode: str, model: str, news: list[int], value: float | None) -> None:
        """A whole call, and perhaps the reward at once: what mostly happens."""
        if self.attempt(lambda: self.rig.call(episode, (1, *news), (2,), model=model)) and value is not None:
            self.attempt(lambda: self.rig.reward(episode, value))

    @rule(data=st.data(), news=SHORT, sampled=SHORT)
    def finishes(self, data: st.DataObject, news: list[int], sampled: list[int]) -> None:
        if self.running:
            episode, call = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            prompt = (*data.draw(st.sampled_from(self.texts)), *news)
            self.texts.append((*prompt, *sampled))
            self.attempt(lambda: self.rig.finish(episode, call, prompt, sampled))

    @rule(data=st.data())
    def loses(self, data: st.DataObject) -> None:
        if self.running:
            episode, call = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
            self.attempt(lambda: self.rig.lose(episode, call))

    @rule(data=st.data())
    def is_not_sent_its_end(self, data: st.DataObject) -> None:
        called = [(one.id, call) for one in self.rig.state.episodes.values() for call in one.transcript.calls]
        if called:
            episode, call = data.draw(st.sampled_from(called))
            self.attempt(lambda: self.rig.lose(episode, call, taken_back=True))
            self.running = [one for one in self.running if one != (episode, call)]

    @rule(episode=EPISODES, value=st.sampled_from([0.0, 1.0]), final=st.booleans(), id=st.sampled_from([None, "r"]))
    def rewards(self, episode: str, **fields: Any) -> None:
        self.attempt(lambda: self.rig.reward(episode, **fields))

    @rule(
        episode=EPISODES, first=st.sampled_from(["", "", "a"]), withdraws=st.sampled_from([False, False, False, True]),
        model=MODELS, identified_by=st.sampled_from(["path", "body", "lineage"]),
    )  # fmt: skip
    def a_user_calls(self, episode: str, first: str, **options: Any) -> None:
        first = "" if first == episode else first
        self.attempt(lambda: self.rig.call(episode, traffic="chat", first=first, **options))

    @rule(episode=EPISODES, task=st.sampled_from(["s", "t"]))
    def opens_to_be_judged(self, episode: str, task: str) -> None:
        self.attempt(lambda: self.rig.open(episode, task=task, judged=True))

    @rule(episode=EPISODES, value=st.sampled_from([None, 0.0, 1.0]), judge=st.sampled_from(["j", "k"]))
    def judges(self, episode: str, value: float | None, judge: str) -> None:
        self.attempt(lambda: self.rig.judge(episode, value, judge))

    @rule(episode=EPISODES, value=st.sampled_from([-1.0, 1.0]))
    def says(self, episode: str, value: float) -> None:
        self.attempt(lambda: self.rig.feedback(episode, value=value))

    @rule(episode=EPISODES)
    def withdraws(self, episode: str) -> None:
        self.rig.withdraw(episode)

    @initialize()
    def some_are_ready(self) -> None:
        for task, model in (("s", "m"), ("t", "m"), ("s", "n")):
            self.rig.ready(task, model=model)

    @rule(task=st.sampled_from(["s", "t", "lane/t"]), model=MODELS)
    def becomes_ready(self, task: str, model: str) -> None:
        self.rig.ready(task, model=model)

    @rule(data=st.data())
    def aborts_late(self, data: st.DataObject) -> None:
        episode = data.draw(st.sampled_from(sorted({**self.rig.state.episodes, **self.rig.state.episodes.leaving})))
        self.attempt(lambda: self.rig.abort(episode))

    @rule(episode=EPISODES, action=st.sampled_from(["seal", "abort"]))
    def ends(self, episode: str, action: str) -> None:
        self.attempt(lambda: getattr(self.rig, action)(episode))

    @rule(episode=EPISODES)
    def touches(self, episode: str) -> None:
        self.attempt(lambda: self.rig.heartbeat(episode))

    @rule(
        groups=st.sampled_from([1, 1, 2]), size=st.sampled_from([None, 1, 1, 3]), model=st.sampled_from([None, "m"]),
        staleness=st.sampled_from([None, None, 0, 1]), lease_s=st.sampled_from([10.0, 500.0]),
        least=st.sampled_from([None, None, 1]), wait_s=st.sampled_from([0.0, 30.0]),
        unit=st.sampled_from(["groups", "groups", "episodes"]),
    )
    def leases(
        self, groups: int, size: int | None, model: str | None, staleness: int | None, lease_s: float,
        least: int | None, wait_s: float, unit: str,
    ) -> None:
        fields = {"groups": groups, "group_size": size, "model": model, "max_staleness": staleness}
        fields |= {"min_group_size": least, "group_wait_s": wait_s, "unit": unit}
        batch = self.rig.lease(lease_s=lease_s, **fields)
        if batch is not None:
            delivered = views.batch(self.rig.state, batch)
            sizes = [len(group.episodes) for group in delivered.groups]
            held = [item.episode for group in delivered.groups for item in group.episodes]
            assert len(held) == len(set(held))
            if unit == "groups":
                assert len(sizes) == groups
            else:
                assert sum(sizes[:-1]) < groups <= sum(sizes)
            assert all(1 <= found <= (size or SETTINGS.group_size) for found in sizes)
            for item in (item for group in delivered.groups for item in group.episodes):
                assert any(1 in sample.loss_mask for sample in item.samples)

    @rule(data=st.data(), action=st.sampled_from(["ack", "nack", "extend"]))
    def answers(self, data: st.DataObject, action: str) -> None:
        if self.rig.state.batches.leases:
            batch = data.draw(st.sampled_from(sorted({**self.rig.state.batches, **self.rig.state.batches.leaving})))
            self.attempt(lambda: getattr(self.rig, action)(batch))

    @rule(lane=st.sampled_from([None, "default", "lane"]), task=st.sampled_from([None, "t"]))
    def flushes(self, **fields: Any) -> None:
        self.rig.run(self.rig.commands.leases.flush(Flush(**fields), at=self.rig.at))

    @rule(
        shares=st.sampled_from([None, {"default": 1.0}, {"default": 0.5, "lane": 0.5}, {"lane": 0.25, "x": 0.75}]),
        ahead=st.sampled_from([None, 0, 2]), lane_wait_s=st.sampled_from([None, 0.0, 30.0]), free=st.booleans(),
        model=st.one_of(st.none(), MODELS), group_size=st.sampled_from([None, 1, 3]),
    )
    def sets_the_mix(self, free: bool, model: str | None, **fields: Any) -> None:
        run, commands, at = self.rig.run, self.rig.commands, self.rig.at
        if free:
            self.attempt(lambda: run(commands.leases.drop_mix(model, at=at)))
        else:
            self.attempt(lambda: run(commands.leases.set_mix(SetMix(model=model, **fields), at=at)))

    @rule(model=MODELS, version=st.integers(0, 3))
    def trains(self, model: str, version: int) -> None:
        self.rig.announce(model, version)

    @rule(version=st.integers(0, 3), shut=st.booleans(), model=st.one_of(st.none(), MODELS))
    def moves_the_gate(self, version: int, shut: bool, model: str | None) -> None:
        run, commands, at = self.rig.run, self.rig.commands, self.rig.at
        if shut:
            self.attempt(lambda: run(commands.trainers.gate_close(GateClose(model=model), at=at)))
        else:
            self.attempt(lambda: run(commands.trainers.gate_open(GateOpen(version, model), at=at)))

    @rule(seconds=st.sampled_from([-50.0, 1.0, 1.0, 20.0, 60.0, 600.0]))
    def time_passes(self, seconds: float) -> None:
        self.rig.at += seconds
        self.rig.expire()

    @rule(often=st.integers(0, 4))
    def is_killed(self, often: int) -> None:
        if often == 0:
            self.rig.restart()
            self.running.clear()

    @rule(sent=st.integers(0, 3), unknown=st.integers(0, 1))
    def answers_are_sent(self, sent: int, unknown: int) -> None:
        calls = sorted(self.rig.state.episodes.unsent)
        self.rig.run(self.rig.commands.answers_sent(calls[:sent], calls[sent : sent + unknown], at=self.rig.at))

    @rule(kept=st.sampled_from([0, 1, 3]))
    def archives(self, kept: int) -> None:
        self.rig.archive(kept)

    @invariant()
    def identity(self) -> None:
        before = everything(self.rig.state)
        check(self.rig.state)
        picture(self.rig.state)
        assert everything(self.rig.state) == before

    def teardown(self) -> None:
        replay = State(SETTINGS)
        for event, seen in zip(self.rig.events, self.rig.pictures, strict=True):
            replay.apply(event)
            assert picture(replay) == seen


TestAnythingHappens = AnythingHappens.TestCase
TestAnythingHappens.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


def test_every_event_is_understood() -> None:
    assert set(State(SETTINGS)._listeners) == set(EVENT_KINDS)


def test_tokens_and_drift_are_counted_when_an_episode_seals(rig: LedgerRig) -> None:
    episode = rig.open(task="t")
    rig.call(episode, (1, 2), (3, 4))
    rig.call(episode, (1, 2, 3, 4, 5), (6,))
    rig.call(episode, (9,), (8,))
    assert rig.state.tallies.tokens == {"prompt": 0, "sampled": 0, "merged": 0, "generated": 4}
    rig.reward(episode)
    assert rig.state.tallies.tokens == {"prompt": 8, "sampled": 4, "merged": 4, "generated": 4}
    assert rig.state.tallies.drift == {"new_chain": 1}
    assert rig.state.tallies.drifts["m"].to_json() == {"turns": 2, "broken_by": {"new_chain": 1}, "rate": None}


def test_archived_episodes_leave_the_state_and_are_still_found(rig: LedgerRig) -> None:
    old, new = rig.in_state("trained"), rig.in_state("recorded")
    before = views.record(rig.state, old, tokens="all")
    (batch,) = rig.state.batches
    rig.archive(kept=1)
    assert (old in rig.state.episodes, new in rig.state.episodes, rig.state.batches) == (False, True, {})
    assert views.record(rig.state, old, tokens="all") == before | {"stored": "archive"}
    assert views.status(rig.state)["archived"] == 1
    assert rig.state.batches.known(batch).state == "trained"
    rig.state.arrived([old], [batch])
    assert rig.state.episodes.find(old) is None
    with pytest.raises(NotFound):
        rig.state.batches.known(batch)
    assert [one["episode"] for one in views.records(rig.state, views.Wanted())["episodes"]] == [new]


def test_what_is_archived_is_read_from_the_archive() -> None:
    shelf = Shelf()
    rig = LedgerRig(archive=shelf)
    episode = rig.in_state("trained")
    (batch,) = rig.state.batches
    rig.archive()
    shelf.take(rig.state, 1)
    assert rig.state.episodes.leaving == rig.state.batches.leaving == {}
    assert rig.state.episodes.find(episode) is shelf.episodes[episode]
    assert rig.state.batches.known(batch) is shelf.batches[batch]
    assert rig.ack(batch) == ()


def test_every_call_that_is_lost_is_counted_once_with_its_first_reason(rig: LedgerRig) -> None:
    episode = rig.open()
    (gone,) = rig.begin(episode, body="same")
    rig.lose(episode, gone)
    rig.begin(episode, body="same", retry=True)
    (late,) = rig.begin(episode, model="other")
    rig.restart()
    rig.finish(episode, late)
    assert rig.state.tallies.captures == {"disconnected": 1, "restarted": 2}
    (dead,) = rig.begin(episode)
    rig.abort(episode)
    rig.finish(episode, dead)
    assert rig.state.tallies.captures == {"disconnected": 1, "restarted": 2, "episode_discarded": 1}


def test_marks_count_while_their_episode_is_open() -> None:
    mark = Mark("what was said")
    rig = LedgerRig()
    for end in ("seal", "abort"):
        episode = rig.open()
        one, two, late, later = rig.begin(episode, choices=4)
        rig.run([ev.CallFinished(rig.at, episode, packed_call(one, [1], [2]), (mark,))])
        rig.run([ev.CallLost(rig.at, episode, two, "no_token_ids", (mark._replace(key="lost"),))])
        assert [len(known) for known in vars(rig.state.episodes.lineage)["_episodes"].values()] == [1, 1]
        rig.seal(episode) if end == "seal" else rig.abort(episode)
        rig.run([ev.CallFinished(rig.at, episode, packed_call(late, [1], [2]), (mark,))])
        rig.run([ev.CallLost(rig.at, episode, later, "no_token_ids", (mark,))])
        assert vars(rig.state.episodes.lineage) == vars(Lineage())


def test_an_attempt_that_nothing_names_is_known_again(rig: LedgerRig) -> None:
    episode = rig.open()
    for way in ("path", "lineage"):
        rig.run([ev.CallStarted(rig.at, episode, (way,), "m", "", way, f"body by {way}")])
        rig.lose(episode, way)
    assert rig.state.episodes.lineage.repeated("body by path", None, rig.state.episodes.all_lost) is None
    assert rig.state.episodes.lineage.repeated("body by lineage", None, rig.state.episodes.all_lost) == episode


def test_the_gate_is_closing_while_calls_are_in_flight(rig: LedgerRig) -> None:
    episode = rig.open()
    assert not rig.state.gates.any().shut
    (call,) = rig.begin(episode)
    assert rig.state.gates.overall() == "open"
    rig.run([ev.GateClosed(5.0, "weights")])
    assert (rig.state.gates.overall(), rig.state.gates.any()) == ("closing", Gate(True, 5.0, "weights"))
    rig.finish(episode, call)
    assert rig.state.gates.overall() == "closed"
    rig.run([ev.GateClosed(9.0, "why")])
    assert rig.state.gates.any() == Gate(True, 5.0, "weights"), "closing a closed gate changes nothing"
    rig.run([ev.GateOpened(10.0, 1)])
    assert (rig.state.gates.overall(), rig.state.gates.any()) == ("open", Gate(False, 10.0, stood=5.0))
    rig.run([ev.GateOpened(11.0, 2)])
    assert rig.state.gates.any() == Gate(False, 10.0, stood=5.0), "nor does opening an open one"


def test_a_derived_task_takes_the_place_of_no_other(rig: LedgerRig) -> None:
    episode = rig.open(task="given")
    rig.run([ev.TaskNamed(rig.at, episode, "prompt-0")])
    assert rig.state.episodes[episode].opening.task == "given"
