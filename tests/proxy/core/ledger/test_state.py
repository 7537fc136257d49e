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
from ajet_proxy.core.ledger.commands import Commands
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


class Unchanging(Commands):
    """Sees of every command that it changes nothing, whether it decides or refuses."""

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
        self.rig.commands = Unchanging(self.rig.state)
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
        episode = self.rig.open(eval=True, model="m")
        self.rig.call(episode)
        if value is None:
            self.rig.seal(episode)
        else:
            self.rig.reward(episode, value)

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
        called = [(episode.id, call) for episode in self.rig.state.episodes.values() for call in episode.calls]
        if called:
            episode, call = data.draw(st.sampled_from(called))
            self.attempt(lambda: self.rig.lose(episode, call, taken_back=True))
            self.running = [one for one in self.running if one != (episode, call)]

    @rule(episode=EPISODES, value=st.sampled_from([0.0, 1.0]), final=st.booleans(), id=st.sampled_from([None, "r"]))
    def rewards(self, episode: str, **fields: Any) -> None:
        self.attempt(lambda: self.rig.reward(episode, **fields))

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
        self.attempt(lambda: self.rig.run(self.rig.commands.heartbeat(episode, at=self.rig.at)))

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
        self.rig.run(self.rig.commands.flush(Flush(**fields), at=self.rig.at))

    @rule(
        shares=st.sampled_from([None, {"default": 1.0}, {"default": 0.5, "lane": 0.5}, {"lane": 0.25, "x": 0.75}]),
        ahead=st.sampled_from([None, 0, 2]), lane_wait_s=st.sampled_from([None, 0.0, 30.0]), free=st.booleans(),
        model=st.one_of(st.none(), MODELS), group_size=st.sampled_from([None, 1, 3]),
    )
    def sets_the_mix(self, free: bool, model: str | None, **fields: Any) -> None:
        run, commands, at = self.rig.run, self.rig.commands, self.rig.at
        if free:
            self.attempt(lambda: run(commands.drop_mix(model, at=at)))
        else:
            self.attempt(lambda: run(commands.set_mix(SetMix(model=model, **fields), at=at)))

    @rule(model=MODELS, version=st.integers(0, 3))
    def trains(self, model: str, version: int) -> None:
        self.rig.announce(model, version)

    @rule(version=st.integers(0, 3), shut=st.booleans(), model=st.one_of(st.none(), MODELS))
    def moves_the_gate(self, version: int, shut: bool, model: str | None) -> None:
        run, commands, at = self.rig.run, self.rig.commands, self.rig.at
        if shut:
            self.attempt(lambda: run(commands.gate_close(GateClose(model=model), at=at)))
        else:
            self.attempt(lambda: run(commands.gate_open(GateOpen(version, model), at=at)))

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


def test_tokens_and_drift_are_counted_when_an_episode_seals() -> None:
    rig = LedgerRig()
    episode = rig.open(task="t")
    rig.call(episode, (1, 2), (3, 4))
    rig.call(episode, (1, 2, 3, 4, 5), (6,))
    rig.call(episode, (9,), (8,))
    assert rig.state.tallies.tokens == {"prompt": 0, "sampled": 0, "merged": 0, "generated": 4}
    rig.reward(episode)
    assert rig.state.tallies.tokens == {"prompt": 8, "sampled": 4, "merged": 4, "generated": 4}
    assert rig.state.tallies.drift == {"new_chain": 1}
    assert rig.state.tallies.drifts["m"].to_json() == {"turns": 2, "broken_by": {"new_chain": 1}, "rate": None}


def test_what_was_not_noted_as_sent_is_doubtful_after_a_start() -> None:
    rig = LedgerRig(watch=True)
    episode, ended = rig.open(), rig.in_state("recorded")
    sent = rig.call(episode)
    rig.run(rig.commands.answers_sent([sent], at=rig.at))
    unsent = rig.call(episode)
    rig.archive()
    rig.run(rig.commands.restarted(rig.at))
    calls = rig.state.episodes[episode].calls
    assert (calls[sent].doubtful, calls[unsent].doubtful, rig.state.episodes.unsent) == (False, True, set())
    assert ended not in rig.state.episodes


def test_archived_episodes_leave_the_state_and_are_still_found() -> None:
    rig = LedgerRig(watch=True)
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


def test_a_call_of_a_dead_episode_leaves_no_text() -> None:
    rig = LedgerRig(watch=True)
    episode = rig.open()
    rig.call(episode)
    (late,) = rig.begin(episode)
    rig.abort(episode)
    rig.finish(episode, late, (7,), (8,))
    known = rig.state.episodes[episode]
    assert (known.calls[late].state, known.calls[late].text) == ("lost", None)
    assert len(known.timelines) == 1


def test_small_facts() -> None:
    """A label, a sign of life, a longer lease."""
    rig = LedgerRig(watch=True)
    episode = rig.open()
    rig.begin(episode, eval=True)
    rig.at += 5
    rig.run(rig.commands.heartbeat(episode, at=rig.at))
    known = rig.state.episodes[episode]
    assert (known.eval, known.active_at) == (True, rig.at)
    rig.ready()
    batch = rig.lease(group_size=1)
    assert batch is not None
    rig.extend(batch, 7.0)
    assert rig.state.batches[batch].lease_until == rig.at + 7.0


def test_a_whole_call_that_is_repeated_is_lost() -> None:
    rig = LedgerRig(watch=True)
    episode = rig.open()
    rig.call(episode, body="same")
    (again,) = rig.begin(episode, body="same", retry=True)
    assert rig.state.tallies.calls == {"running": 1, "complete": 0, "lost": 1}
    assert rig.state.episodes[episode].running == 1
    rig.finish(episode, again)
    assert rig.state.tallies.calls == {"running": 0, "complete": 1, "lost": 1}
    assert rig.state.tallies.captures == {"complete": 2, "retried": 1}


def test_every_call_that_is_lost_is_counted_once_with_its_first_reason() -> None:
    rig = LedgerRig(watch=True)
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


def test_opening_the_gate_names_the_version_of_the_one_model() -> None:
    rig = LedgerRig(watch=True)
    rig.run(rig.commands.gate_open(GateOpen(7), at=rig.at))
    assert rig.state.weights.policy_version("other") == 7
    rig.announce("m", 1)
    rig.run(rig.commands.gate_open(GateOpen(8), at=rig.at))
    assert [rig.state.weights.policy_version(model) for model in ("m", "other")] == [8, 7]


def test_a_clock_set_back_over_a_stop_takes_leases_and_ages_with_it() -> None:
    rig = LedgerRig(watch=True)
    rig.ready()
    batch, episode = rig.lease(group_size=1, lease_s=60.0), rig.open()
    rig.at -= 400
    rig.restart()
    assert batch is not None
    assert rig.state.now == rig.at
    assert rig.state.batches[batch].lease_until == rig.at + 60.0
    assert rig.state.episodes[episode].opened_at == rig.at
    rig.at += 900
    rig.restart()
    assert rig.state.batches[batch].lease_until == rig.at - 840.0
    assert rig.state.episodes[episode].active_at == rig.at


def test_a_part_that_is_returned_leaves_the_rest_leased() -> None:
    rig = LedgerRig(watch=True)
    episode = rig.open(task="t", members={"a": "m", "b": "n"})
    for model in "mn":
        rig.call(episode, model=model)
    rig.reward(episode)
    first = rig.lease(model="m", group_size=1)
    rig.lease(model="n", group_size=1)
    assert first is not None
    rig.nack(first)
    assert rig.state_of(episode) == "leased"
    assert list(rig.state.seats.queues.ready()) == [("m", episode)]


def test_of_an_episode_that_a_model_has_trained_only_the_rest_is_dropped() -> None:
    rig = LedgerRig(watch=True)
    rig.announce("n", 9)
    episode = rig.open(task="t", members={"a": "m", "b": "n"})
    for model in "mn":
        rig.call(episode, model=model, version=1)
    rig.reward(episode)
    rig.ack(rig.lease(model="m", group_size=1) or "")
    assert rig.lease(model="n", group_size=1, max_staleness=1) is None
    assert (rig.state_of(episode), rig.state.episodes[episode].shares) == ("trained", {"m": ""})
    assert list(rig.state.seats.queues.ready()) == []


@pytest.mark.parametrize("why", [None, "too_long: 9 tokens"])
def test_a_batch_that_was_acknowledged_late_leaves_the_queue(why: str | None) -> None:
    rig = LedgerRig(watch=True)
    episode = rig.ready()
    batch = rig.lease(group_size=1, lease_s=1.0)
    assert batch is not None
    rig.at += 1.0
    rig.expire()
    rig.ack(batch, 1, **({} if why is None else {episode: why}))
    assert list(rig.state.seats.queues.ready()) == []


def test_what_the_trainer_did_not_train_is_discarded_with_its_words() -> None:
    rig = LedgerRig(watch=True)
    kept, dropped = rig.ready("a"), rig.ready("a")
    batch = rig.lease()
    assert batch is not None
    rig.ack(batch, 1, **{dropped: "too_long: 9 tokens"})
    assert (rig.state_of(kept), rig.state_of(dropped)) == ("trained", "discarded")
    assert (rig.state.episodes[dropped].detail, rig.state.tallies.discarded) == ("too_long: 9 tokens", {"filtered": 1})


@pytest.mark.parametrize(("dropped", "state"), [("m", "trained"), ("n", "trained"), ("mn", "discarded")])
def test_an_episode_that_one_of_its_models_learns_from_is_not_discarded(dropped: str, state: str) -> None:
    rig = LedgerRig(watch=True)
    episode = rig.open(task="t", members={"a": "m", "b": "n"})
    for model in "mn":
        rig.call(episode, model=model)
    rig.reward(episode)
    for model in "mn":
        batch = rig.lease(model=model, group_size=1)
        assert batch is not None
        rig.ack(batch, 1, **({episode: "why"} if model in dropped else {}))
    assert rig.state_of(episode) == state


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


def test_an_attempt_that_nothing_names_is_known_again() -> None:
    rig = LedgerRig()
    episode = rig.open()
    for way in ("path", "lineage"):
        rig.run([ev.CallStarted(rig.at, episode, (way,), "m", "", way, f"body by {way}")])
        rig.lose(episode, way)
    assert rig.state.episodes.lineage.repeated("body by path", None, rig.state.episodes.all_lost) is None
    assert rig.state.episodes.lineage.repeated("body by lineage", None, rig.state.episodes.all_lost) == episode


def test_a_settled_episode_is_tallied_with_its_first_reward_and_corrected_by_the_next() -> None:
    rig = LedgerRig()
    episode = rig.open(task="t", eval=True)
    rig.call(episode)
    rig.seal(episode)
    curve = rig.state.tallies.reward_curves.curves["eval"]
    assert (curve.count, rig.state.episodes[episode].reward_number) == (0, None)
    rig.reward(episode, 1.0)
    rig.reward(episode, 0.25)
    assert (curve.count, curve.points[0].total, rig.state.episodes[episode].reward_number) == (1, 0.25, 0)


def test_the_gate_is_open_until_it_is_shut() -> None:
    rig = LedgerRig()
    assert rig.state.gates.shut() == set()
    rig.run(rig.commands.gate_close(GateClose(), at=rig.at))
    assert rig.state.gates.shut() == {""}


def test_the_gate_is_closing_while_calls_are_in_flight() -> None:
    rig = LedgerRig(watch=True)
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


def test_a_derived_task_takes_the_place_of_no_other() -> None:
    rig = LedgerRig()
    episode = rig.open(task="given")
    rig.run([ev.TaskNamed(rig.at, episode, "prompt-0")])
    assert rig.state.episodes[episode].task == "given"
