"""One episode: the table of its states, its calls and its rewards.

Idea: an episode moves only along `NEXT`. The table `TAKES` says which command it still takes in which state. Both are
data, so that tests go through every cell. What follows by itself is decided in `Episode.outcome`: a sealed episode
becomes ready, recorded or discarded when its last call in flight has ended. That needs no event of its own, since a
replay comes to the same decision.

Invariant: an episode is in exactly one state. ``running`` is the number of its calls in flight. Once it has left
``open`` and ``sealed``, its calls are known by their timelines, from which each can be read back. A beginning that
several calls or timelines have in common is kept once (`ajet_proxy.core.ledger.texts`).

Next: ajet_proxy/io/storage/store.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from msgspec import structs

from ajet_proxy.core.ledger.attempts import AWAY, Attempt, Attempts
from ajet_proxy.core.ledger.call_entry import Asked, CallEntry, Chain
from ajet_proxy.core.ledger.events import EpisodeOpened
from ajet_proxy.core.ledger.progress import GroupKey
from ajet_proxy.core.ledger.texts import Texts
from ajet_proxy.core.trajectory.rewards import EpisodeReward, total
from ajet_proxy.core.trajectory.timeline import Packed, Policy, Timeline, Turn, merge_packed
from ajet_sdk.errors import BadRequest, Conflict
from ajet_sdk.routes import OpenEpisode

NEXT: Mapping[str, frozenset[str]] = {
    "open": frozenset({"sealed", "discarded"}),
    "sealed": frozenset({"ready", "recorded", "discarded"}),
    "ready": frozenset({"leased", "trained", "discarded"}),
    "leased": frozenset({"ready", "trained", "discarded"}),
    "trained": frozenset(),
    "recorded": frozenset(),
    "discarded": frozenset(),
}
"""``ready → trained``: an acknowledgement after the lease had run out and before anyone else took the episode, or the
share that was left of a trained one is dropped as stale.
``leased → discarded``: the trainer acknowledges a batch and says that it did not train this episode of it."""

DO, DONE, REFUSE = "do", "done", "refuse"
_SEALED_ON = {"sealed": DONE, "ready": DONE, "leased": DONE, "trained": DONE, "recorded": DONE, "discarded": REFUSE}
TAKES: Mapping[str, Mapping[str, str]] = {
    "call": {**dict.fromkeys(NEXT, REFUSE), "open": DO},
    "reward": {**dict.fromkeys(NEXT, REFUSE), "open": DO, "sealed": DO, "ready": DO, "recorded": DO},
    "seal": {**_SEALED_ON, "open": DO},
    "abort": {**dict.fromkeys(NEXT, REFUSE), "open": DO, "sealed": DO, "ready": DO, "discarded": DONE},
    "heartbeat": {**_SEALED_ON, "open": DO},
}
"""``done``: the command has nothing to do and is answered as if it had, because a client may not have heard the first
answer. ``refuse``: 409."""


def takes(command: str, episode: Episode) -> bool:
    """Tell whether `command` has something to do in this state; `Conflict` if the state refuses it. An episode that a
    trainer has had and may yet acknowledge, or has trained in part, counts as leased."""
    state = "leased" if episode.state == "ready" and episode.taken else episode.state
    verdict = TAKES[command][state]
    if verdict == REFUSE:
        why = f" ({episode.reason})" if episode.reason else ""
        message = f"episode {episode.id} is {episode.state}{why}: too late for this {command}"
        if state != episode.state:
            message += ", since a trainer has had it"
        raise Conflict(message, code=f"episode_{state}")
    if verdict == DO and episode.stored is not None:
        raise Conflict(f"episode {episode.id} is archived: too late for this {command}", code="episode_archived")
    return verdict == DO


MAX_REWARDS = 10_000
"""An episode takes no more: what quotas and limits keep out is new episodes and calls, and rewards stay in memory."""


MAX_NOTES = 100_000
"""Characters of all notes of an episode."""


def has_room(episode: Episode, note: str | None) -> None:
    """`Conflict` if the episode has no room for another reward, or for this `note`."""
    if len(episode.rewards) >= MAX_REWARDS:
        message = f"episode {episode.id} has {MAX_REWARDS} rewards, as many as it may: seal it"
        raise Conflict(message, code="too_many_rewards")
    if note and sum(len(one.note or "") for one in episode.rewards.values()) + len(note) > MAX_NOTES:
        message = f"the notes of episode {episode.id} have {MAX_NOTES} characters, as many as they may: leave this out"
        raise Conflict(message, code="too_many_notes")


@dataclass(frozen=True, slots=True)
class Shown:
    """The part of a record without tokens that shows the timelines of an episode whose calls have these `turns`. So who
    looks again does not have them merged again."""

    turns: Sequence[Turn | None]
    drift: Mapping[str, Any]
    timelines: Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class Episode:
    """The mutable state of one episode. Only `State.apply` changes it, through the methods below."""

    opening: EpisodeOpened
    """As it was opened, by the clock that runs now; with the task that it got later, and as an evaluation if it turned
    out to be one."""
    play_number: int | None = None
    state: str = "open"
    reason: str | None = None
    detail: str | None = None
    cause: str | None = None
    task_derived: bool = False
    active_at: float = 0.0
    sealed_at: float | None = None
    ended_at: float | None = None
    calls: dict[str, CallEntry] = field(default_factory=dict)
    texts: Texts = field(default_factory=Texts)
    running: int = 0
    attempts: Attempts = field(default_factory=Attempts)
    rewards: dict[str, EpisodeReward] = field(default_factory=dict)
    chains: tuple[Chain, ...] = ()
    shares: dict[str, str | None] = field(default_factory=dict)
    """Once ready: each model that it trains, with None (ready), a batch id (leased) or ``""`` (trained)."""
    taken: set[str] = field(default_factory=set)
    """The models whose trainer has had their share, and has not said that it trained nothing of it."""
    learned: dict[str, int | str] = field(default_factory=dict)
    """What came of a model's share: the policy version that learned from it, or why none does."""
    may_train: tuple[str, ...] = ()
    """The models that it may train, as far as that is known while it is open."""
    number: int = 0
    """How many others were opened before it."""
    late: bool = False
    """Whether its group waits for it no longer, though it is still open or sealed."""
    reward_number: int | None = None
    """Its number among the rewarded ones, once it is settled and rewarded."""
    stored: str | None = None
    """``archive``: nothing happens to it any more; ``removed``: archived without its calls. None: in memory."""
    shown: Shown | None = field(default=None, init=False, compare=False)
    """How its timelines were shown last."""

    @property
    def id(self) -> str:
        return self.opening.episode

    def move(
        self, state: str, at: float, reason: str | None = None, detail: str | None = None, cause: str | None = None
    ) -> None:
        if state not in NEXT[self.state]:
            raise Conflict(f"episode {self.id} cannot go from {self.state} to {state}")
        self.state, self.reason, self.detail, self.cause = state, reason, detail, cause
        if state == "sealed":
            self.sealed_at = at
        if not NEXT[state]:
            self.ended_at = at

    def touch(self, at: float) -> None:
        """It gives a sign of life."""
        self.active_at = at

    def restart(self, at: float, back: float, stopped_at: float) -> None:
        """The proxy runs again since `at`, by a clock that went `back` so many seconds (0 or below). Nobody knows who
        has asked since it `stopped_at`."""
        self.active_at, self.opening = at, structs.replace(self.opening, at=self.opening.at + back)
        if self.state == "open":
            self.attempts.lose(Attempt(None, "", self.attempts.begun, at, reason=AWAY, since=stopped_at))

    def name_task(self, task: str, derived: bool) -> None:
        """It is of this task; ``derived`` says that nobody has named that."""
        self.opening, self.task_derived = structs.replace(self.opening, task=task), derived

    def mark_eval(self) -> None:
        """It will not be trained."""
        self.opening = structs.replace(self.opening, eval=True)

    def train_else(self, models: tuple[str, ...]) -> None:
        """It may train these models, which nothing had said before."""
        self.may_train = models

    def give_up_waiting(self) -> None:
        """Its group waits for it no longer."""
        self.late = True

    def begin(self, calls: Collection[str], asked: Asked) -> None:
        """`calls` are in flight, one for each choice of a request."""
        self.calls.update((call, CallEntry(asked)) for call in calls)
        self.running += len(calls)
        self.active_at = asked.started_at

    def finish(self, entry: CallEntry, packed: Packed, branches: tuple[int, int], ahead: bool) -> None:
        """Keep what a call generated: an episode costs as much memory as its distinct tokens."""
        entry.turn, entry.text = packed.turn, self.texts.add(packed.text, packed.turn.call)
        entry.branches, entry.ahead = branches, ahead

    def lose(self, entry: CallEntry, reason: str) -> None:
        """A call will never be trained."""
        entry.turn, entry.reason = None, reason

    def end(self, entry: CallEntry, state: str, at: float) -> None:
        """A call has come to `state`."""
        self.running -= entry.state == "running"
        entry.state, self.active_at = state, at

    def earn(self, reward: EpisodeReward) -> None:
        """It has a reward more."""
        self.rewards[reward.id] = reward
        self.active_at = reward.at

    def count_reward(self, number: int) -> None:
        """It is that `number` among the rewarded ones."""
        self.reward_number = number

    def share_among(self, models: Collection[str], others: Mapping[str, str]) -> None:
        """Each of `models` has a share, which is ready. `others` learn nothing, each for a reason."""
        self.shares = dict.fromkeys(models)
        self.learned |= others

    def set_share(self, model: str, share: str | None) -> None:
        """The share of a model is ready (None), leased (the batch), or trained (``""``)."""
        self.shares[model] = share
        if share is not None:
            self.taken.add(model)

    def untake(self, model: str) -> None:
        """The trainer of a model says that it trained nothing of its share."""
        self.taken.discard(model)

    def drop_share(self, model: str) -> None:
        """A model learns nothing from it."""
        del self.shares[model]
        self.taken.discard(model)

    def learn(self, model: str, came: int | str) -> None:
        """This came of a model's share: the version that learned from it, or why none does."""
        self.learned[model] = came

    def archive(self) -> None:
        """Nothing happens to it any more."""
        self.stored = "archive"

    def beginning(self, call: str, length: int) -> bytes:
        """The first tokens of a call that is or was complete, as long as the episode is not merged; else `KeyError`."""
        text = self.calls[call].text
        if text is None:
            raise KeyError(call)
        return self.texts.whole(text, length)

    def packed(self, call: str) -> Packed | None:
        """A complete call with its text, as long as the episode is not merged."""
        entry = self.calls.get(call)
        if entry is None or entry.turn is None or entry.text is None:
            return None
        return Packed(entry.turn, self.texts.whole(entry.text, entry.turn.end))

    def complete(self, model: str, agent: str) -> list[Packed]:
        """The complete calls of `agent` to `model`, as long as the episode is not merged."""
        mine = [one for one in self._with_texts() if (one[0].model, one[0].agent) == (model, agent)]
        return _packed(mine, self.texts)

    def _with_texts(self) -> list[tuple[Turn, int]]:
        """The complete calls, each with the number of its text, as long as the episode is not merged."""
        return [
            (entry.turn, entry.text) for entry in self.calls.values()
            if entry.turn is not None and entry.text is not None
        ]

    def turns(self) -> list[Turn]:
        """Its complete calls in the order of their start."""
        turns = [entry.turn for entry in self.calls.values() if entry.turn is not None]
        return sorted(turns, key=lambda turn: turn.rank)

    def outcome(self) -> tuple[str, str | None]:
        """The state after ``sealed``, and the reason if it is ``discarded``."""
        if self.opening.eval:
            return "recorded", None
        if not self.rewards:
            return "discarded", "no_reward"
        return ("ready", None) if self.trains() else ("discarded", "incomplete_call")

    def rewarded(self, model: str) -> bool:
        """Tell whether a reward concerns anything that `model` sampled in this merged episode."""
        turns = [turn for chain in self._sampled(model) for turn in chain.turns]
        known = {(call, agent) for turn in turns for call in (None, turn.call) for agent in (None, turn.agent)}
        return any((one.call, one.agent) in known for one in self.rewards_of(model))

    def rewards_of(self, model: str, first: int | None = None) -> list[EpisodeReward]:
        """The rewards, or the `first` of them, that may concern what `model` sampled. Those of other models do not, nor
        those of calls and agents that have asked only others."""
        found = [one for one in islice(self.rewards.values(), first) if one.model in (None, model)]
        if all(one.call is None and one.agent is None for one in found):
            return found
        others = {call for call, entry in self.calls.items() if entry.asked.model != model}
        agents = {self.calls[call].asked.agent for call in others}
        agents -= {entry.asked.agent for entry in self.calls.values() if entry.asked.model == model}
        return [one for one in found if one.call not in others and one.agent not in agents]

    def _sampled(self, model: str) -> list[Chain]:
        """The timelines in which `model` sampled anything."""
        mine = (chain for chain in self.chains if chain.turns[0].model == model)
        return [chain for chain in mine if any(turn.sampled for turn in chain.turns)]

    def earned(self, model: str) -> dict[str, float]:
        """The rewards of the agents that sampled with `model` in this merged episode. Those of the whole episode are in
        them, those of single calls are not."""
        agents = {chain.turns[0].agent for chain in self._sampled(model)}
        rewards = [one for one in self.rewards_of(model) if one.call is None]
        found = {agent: total(one for one in rewards if one.agent in (None, agent)) for agent in agents}
        return {agent: reward for agent, reward in found.items() if reward is not None}

    @property
    def timelines(self) -> tuple[Timeline, ...]:
        """Its timelines, once it is merged."""
        return _timelines(self.chains, self.texts)

    def distinct(self, chains: Sequence[Chain]) -> int:
        """Count the tokens that some of its timelines have together at most, if what they share from their first token
        on counts once. One that may be joined to another text shares nothing."""
        alone = sum(chain.turns[-1].end for chain in chains if chain.turns[0].same_text is not None)
        return alone + self.texts.distinct(
            (chain.text, chain.turns[-1].end) for chain in chains if chain.turns[0].same_text is None
        )

    def merged(self, policy: Policy) -> tuple[Timeline, ...]:
        """Its timelines as they are now."""
        return self.merging(policy)()

    def merging(self, policy: Policy) -> Callable[[], tuple[Timeline, ...]]:
        """Makes its timelines as they are now, at any time and in any thread."""
        if self.chains or self.state not in ("open", "sealed"):
            return partial(_timelines, self.chains, self.texts)
        complete, texts = self._with_texts(), Texts(list(map(copy, self.texts.texts)))
        return lambda: merge_packed(_packed(complete, texts), policy)

    def keep_timelines(self, policy: Policy) -> tuple[Timeline, ...]:
        """From now on, know its calls by their timelines alone."""
        timelines, text = self.merged(policy), {turn.call: number for turn, number in self._with_texts()}
        self.chains = self.chains or tuple(
            Chain(text[timeline.turns[-1].call], timeline.turns, timeline.broken_by) for timeline in timelines
        )
        for entry in self.calls.values():
            entry.text = None
        return timelines

    def trains(self) -> list[str]:
        """The models whose samples are leased: those of all members, or the episode's own. That is its first call's,
        unless it was named. Other models that a plain episode asks, such as a judge, are nobody's policy. So are those
        of teachers."""
        taught, named = self.opening.teaching, self.opening.to_train
        turns = (turn for turn in self.turns() if turn.start < turn.end)
        models = list(dict.fromkeys(turn.model for turn in turns if turn.model not in taught))
        return [model for model in models if model in named] if named else models[:1]

    def named_to_train(self) -> tuple[str, ...]:
        """The models that it may train, by what was said when it was opened, or by its first call."""
        first = None if (named := self.opening.to_train) else self.first_model(self.opening.teaching)
        return named if first is None else (first,)

    def first_model(self, but: Collection[str] = ()) -> str | None:
        """The model of its first call to none of the models `but`."""
        return next((one.asked.model for one in self.calls.values() if one.asked.model not in but), None)

    def plays_models(self) -> set[str]:
        """The models that it was opened for, and those that it has asked."""
        named = {*filter(None, (self.opening.model,)), *self.opening.to_train, *self.opening.teaching}
        return {entry.asked.model for entry in self.calls.values()} | named

    def wants(self, call: str) -> bool:
        """Tell whether `call` would be trained if it were whole. It would not in an evaluation, nor if it asks another
        model than the episode's (`trains`). As long as no model is named, that is the first call's."""
        if self.opening.eval or call not in self.calls:
            return False
        model = self.calls[call].asked.model
        return model not in self.opening.teaching and model in self.named_to_train()

    def losses(self) -> str | None:
        """Why its calls were lost, the most frequent reason first; None if none was."""
        reasons = Counter(entry.reason for entry in self.calls.values() if entry.reason not in (None, "retried"))
        return ", ".join(str(reason) for reason, _ in reasons.most_common()) or None

    def sampled_by(self, model: str) -> dict[str, CallEntry]:
        """Its complete calls in which `model` sampled anything."""
        return {
            name: entry for name, entry in self.calls.items()
            if entry.turn is not None and entry.turn.model == model and entry.turn.sampled
        }

    @property
    def awaited(self) -> bool:
        """Tell whether a group waits for it, as long as it is open or sealed."""
        return not (self.opening.eval or self.late)

    @property
    def group_key(self) -> GroupKey:
        """The group key of its seats. An episode with a complete call has a task there."""
        return GroupKey.of(self.opening)

    def reward(self) -> float | None:
        """Sum up what it earned, whatever the scopes of its rewards."""
        return total(self.rewards.values())

    def size(self) -> int:
        """Bytes of token ids and logprobs, each distinct beginning counted once."""
        logprobs = sum(len(entry.turn.logprobs) for entry in self.calls.values() if entry.turn is not None)
        return self.texts.size() + logprobs

    def head(self) -> Episode:
        """Return the part that a listing shows of it once archived: no calls and no notes."""
        opening = structs.replace(self.opening, model=self.opening.model or self.first_model())
        rewards = {name: replace(one, note=None) for name, one in self.rewards.items()}
        return replace(
            self, opening=opening, calls={}, texts=Texts(), chains=(), attempts=Attempts(), rewards=rewards,
            stored="archive",
        )

    def share_state(self) -> str:
        """The state that its shares add up to: leased if any is, else ready if any is, else trained."""
        if any(self.shares.values()):
            return "leased"
        return "ready" if None in self.shares.values() else "trained"


def _packed(complete: Sequence[tuple[Turn, int]], texts: Texts) -> list[Packed]:
    """Calls with their texts, given by number."""
    wholes = texts.wholes((text, turn.end) for turn, text in complete)
    return [Packed(turn, whole) for (turn, _), whole in zip(complete, wholes, strict=True)]


def _timelines(chains: Sequence[Chain], texts: Texts) -> tuple[Timeline, ...]:
    """Timelines with their tokens."""
    wholes = texts.wholes((chain.text, chain.turns[-1].end) for chain in chains)
    return tuple(Timeline(whole, chain.turns, chain.broken_by) for chain, whole in zip(chains, wholes, strict=True))


def timeouts(asked: OpenEpisode, idle: float, wall: float) -> tuple[float, float]:
    """The idle and the wall timeout, in seconds, of an episode that is opened as `asked`. `idle` and `wall` are the
    proxy's own. No episode holds its memory for longer than `wall`."""
    if (asked.wall_timeout or 0) > wall:
        raise BadRequest(f"wall_timeout may be at most {wall:g} seconds, the proxy's own", param="wall_timeout")
    return asked.idle_timeout or idle, asked.wall_timeout or wall
