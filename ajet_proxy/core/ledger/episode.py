"""One episode: the table of its states, and its rewards.

Idea: an episode moves only along `NEXT`. The table `TAKES` says which command it still takes in which state. Both are
data, so that tests go through every cell. What follows by itself is decided in `Episode.outcome`: a sealed episode
becomes ready, recorded or discarded when its last call in flight has ended. That needs no event of its own, since a
replay comes to the same decision.

Invariant: an episode is in exactly one state. Once it has left ``open`` and ``sealed``, it is merged
(`ajet_proxy.core.ledger.transcript`).

Next: ajet_proxy/io/storage/store.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice

from msgspec import structs

from ajet_proxy.core.ledger.attempts import AWAY, Attempt, Attempts
from ajet_proxy.core.ledger.events import EpisodeJudged, EpisodeOpened, FeedbackGiven
from ajet_proxy.core.ledger.progress import GroupKey
from ajet_proxy.core.ledger.transcript import Transcript
from ajet_proxy.core.trajectory.rewards import EpisodeReward, total
from ajet_proxy.core.trajectory.timeline import Turn
from ajet_sdk.bodies import cut
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


INSTEAD = {
    "call": "; open another, and give a final reward only after its last call",
    "reward": "; give or correct rewards before an episode is leased or discarded",
}
"""Advice on what to do instead of what comes too late."""


def takes(command: str, episode: Episode) -> bool:
    """Tell whether `command` has something to do in this state; `Conflict` if the state refuses it. An episode that a
    trainer has had and may yet acknowledge, or has trained in part, counts as leased."""
    state = "leased" if episode.state == "ready" and episode.shares.taken else episode.state
    verdict = TAKES[command][state]
    if verdict == REFUSE:
        why = f" ({episode.reason})" if episode.reason else ""
        message = f"episode {episode.id} is {episode.state}{why}: too late for this {command}"
        if state != episode.state:
            message += ", since a trainer has had it"
        raise Conflict(message + INSTEAD.get(command, ""), code=f"episode_{state}")
    if verdict == DO and episode.stored is not None:
        raise Conflict(f"episode {episode.id} is archived: too late for this {command}", code="episode_archived")
    return verdict == DO


MAX_REWARDS = 10_000
"""An episode takes no more: what quotas and limits keep out is new episodes and calls, and rewards stay in memory."""


MAX_NOTES = 100_000
"""Characters of all notes of an episode, but for the words that some were cut."""


def has_room(episode: Episode) -> None:
    """`Conflict` if the episode has no room for another reward."""
    if len(episode.rewards) >= MAX_REWARDS:
        message = f"episode {episode.id} has {MAX_REWARDS} rewards, as many as it may: seal it"
        raise Conflict(message, code="too_many_rewards")


def fitting(notes: Iterable[str | None], episode: Episode | None = None) -> list[str | None]:
    """`notes` as far as there is room for them, beside those of an `episode`."""
    rewards = () if episode is None else episode.rewards.values()
    found, room = list[str | None](), MAX_NOTES - sum(len(one.note or "") for one in rewards)
    for note in notes:
        found.append(note and cut(note, room))
        room -= len(note or "")
    return found


@dataclass(slots=True)
class Shares:
    """The models that train an episode, and what came of each; none before it is ready. A share goes its own way: it is
    ready, leased, or trained. The shares add up to the state of the episode."""

    by_model: dict[str, str | None] = field(default_factory=dict)
    """Each model that it trains, with None (ready), a batch id (leased) or ``""`` (trained)."""
    taken: set[str] = field(default_factory=set)
    """The models whose trainer has had their share, and has not said that it trained nothing of it."""
    learned: dict[str, int | str] = field(default_factory=dict)
    """The outcome of a model's share: the policy version that learned from it, or why none does."""

    def share_among(self, models: Collection[str], others: Mapping[str, str]) -> None:
        """Each of `models` has a share, which is ready. `others` learn nothing, each for a reason."""
        self.by_model = dict.fromkeys(models)
        self.learned |= others

    def set(self, model: str, share: str | None) -> None:
        """The share of a model is ready (None), leased (the batch), or trained (``""``)."""
        self.by_model[model] = share
        if share is not None:
            self.taken.add(model)

    def untake(self, model: str) -> None:
        """The trainer of a model says that it trained nothing of its share."""
        self.taken.discard(model)

    def drop(self, model: str) -> None:
        """A model learns nothing from it."""
        del self.by_model[model]
        self.taken.discard(model)

    def learn(self, model: str, came: int | str) -> None:
        """This came of a model's share: the version that learned from it, or why none does."""
        self.learned[model] = came

    @property
    def state(self) -> str:
        """The state that they add up to: leased if any is, else ready if any is, else trained."""
        if any(self.by_model.values()):
            return "leased"
        return "ready" if None in self.by_model.values() else "trained"


@dataclass(slots=True)
class Episode:
    """The mutable state of one episode. Only `State.apply` changes it, through the methods below."""

    opening: EpisodeOpened
    """As it was opened, by the clock that runs now; with the task that it got later."""
    play_number: int | None = None
    state: str = "open"
    reason: str | None = None
    detail: str | None = None
    cause: str | None = None
    task_derived: bool = False
    active_at: float = 0.0
    sealed_at: float | None = None
    ended_at: float | None = None
    transcript: Transcript = field(default_factory=Transcript)
    attempts: Attempts = field(default_factory=Attempts)
    rewards: dict[str, EpisodeReward] = field(default_factory=dict)
    shares: Shares = field(default_factory=Shares)
    may_train: tuple[str, ...] = ()
    """The models that it may train, as far as that is known while it is open."""
    number: int = 0
    """The number of others that were opened before it."""
    late: bool = False
    """True if its group waits for it no longer, though it is still open or sealed."""
    reward_number: int | None = None
    """Its number among the rewarded ones, once it is settled and rewarded."""
    judgement: EpisodeJudged | None = None
    feedback: dict[str, FeedbackGiven] = field(default_factory=dict)
    """By the call that it is of; "" is the whole episode."""
    withdrawn: bool = False
    stored: str | None = None
    """``archive``: nothing happens to it any more; ``removed``: archived without its calls. None: in memory."""

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
        self.sealed_at = None if self.sealed_at is None else self.sealed_at + back
        if self.state == "open":
            self.attempts.lose(Attempt(None, "", self.attempts.begun, at, reason=AWAY, since=stopped_at))

    def wait_through(self, away: float, back: float) -> None:
        """It awaits a judgement, and the proxy did not run for `away` seconds, by a clock that went `back` so many."""
        self.active_at = awaits_since(self) + away + back
        self.sealed_at = None if self.sealed_at is None else self.sealed_at + back

    def name_task(self, task: str, derived: bool) -> None:
        """It is of this task; ``derived`` says that nobody has named that."""
        self.opening, self.task_derived = structs.replace(self.opening, task=task), derived

    def train_else(self, models: tuple[str, ...]) -> None:
        """It may train these models, which nothing had said before."""
        self.may_train = models

    def give_up_waiting(self) -> None:
        """Its group waits for it no longer."""
        self.late = True

    def earn(self, reward: EpisodeReward) -> None:
        """It has a reward more."""
        self.rewards[reward.id] = reward
        self.active_at = reward.at

    def judge(self, judgement: EpisodeJudged) -> None:
        """It is judged, and has the rewards of that: all count, because that of the whole comes first."""
        self.judgement = judgement
        whole_first = sorted(judgement.scores, key=lambda one: (one[0] is not None, one[1] is not None))
        for call, agent, value, note in whole_first:
            name = f"judge-{call}" if call is not None else "judge" if agent is None else f"judge@{agent}"
            self.earn(EpisodeReward(name, value, call, agent, True, note, judgement.at))

    def hear(self, said: FeedbackGiven) -> None:
        """A user has said this of it."""
        self.feedback[said.call or ""] = said

    def withdraw(self) -> None:
        """Nothing is learned from it."""
        self.withdrawn = True

    def count_reward(self, number: int) -> None:
        """It is that `number` among the rewarded ones."""
        self.reward_number = number

    def archive(self) -> None:
        """Nothing happens to it any more."""
        self.stored = "archive"

    def outcome(self) -> tuple[str, str | None]:
        """The state after ``sealed``, and the reason if it is ``discarded``."""
        if self.withdrawn:
            return "discarded", "withdrawn"
        if self.opening.eval:
            return "recorded", None
        if not self.rewards:
            return "discarded", "incomplete_call" if self.opening.judged else "no_reward"
        return ("ready", None) if self.trains() else ("discarded", "incomplete_call")

    def rewarded(self, model: str) -> bool:
        """Tell whether a reward concerns anything that `model` sampled in this merged episode."""
        turns = [turn for chain in self.transcript.chains_of(model) for turn in chain.turns]
        known = {(call, agent) for turn in turns for call in (None, turn.call) for agent in (None, turn.agent)}
        return any((one.call, one.agent) in known for one in self.rewards_of(model))

    def rewards_of(self, model: str, first: int | None = None) -> list[EpisodeReward]:
        """The rewards, or the `first` of them, that may concern what `model` sampled. Those of other models do not, nor
        those of calls and agents that have asked only others."""
        found = [one for one in islice(self.rewards.values(), first) if one.model in (None, model)]
        if all(one.call is None and one.agent is None for one in found):
            return found
        asked = {call: entry.turn or entry.asked for call, entry in self.transcript.calls.items()}
        others = {call for call, one in asked.items() if one.model != model}
        agents = {asked[call].agent for call in others} - {one.agent for one in asked.values() if one.model == model}
        return [one for one in found if one.call not in others and one.agent not in agents]

    def earned(self, model: str) -> dict[str, float]:
        """The rewards of the agents that sampled with `model` in this merged episode. Those of the whole episode are in
        them, those of single calls are not."""
        agents = {chain.turns[0].agent for chain in self.transcript.chains_of(model)}
        rewards = [one for one in self.rewards_of(model) if one.call is None]
        found = {agent: total(one for one in rewards if one.agent in (None, agent)) for agent in agents}
        return {agent: reward for agent, reward in found.items() if reward is not None}

    def trains(self) -> list[str]:
        """The models whose samples are leased: those of all members, or the episode's own. That is its first call's,
        unless it was named. Other models that a plain episode asks, such as a judge, are nobody's policy. So are those
        of teachers."""
        taught, named = self.opening.teaching, self.opening.to_train
        turns = (turn for turn in self.transcript.turns() if turn.start < turn.end)
        models = list(dict.fromkeys(turn.model for turn in turns if turn.model not in taught))
        return [model for model in models if model in named] if named else models[:1]

    def named_to_train(self) -> tuple[str, ...]:
        """The models that it may train, by what was said when it was opened, or by its first call."""
        first = None if (named := self.opening.to_train) else self.transcript.first_model(self.opening.teaching)
        return named if first is None else (first,)

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

    def reward_by_agent(self) -> dict[str, float]:
        """The rewards of the agents that any reward names, where one of them is not that of the episode. Those of the
        whole episode are in each, and those of calls in that of the agent who asked."""
        given = {name: _agent_of(self, one) for name, one in self.rewards.items()}
        found = {
            agent: total(one for name, one in self.rewards.items() if given[name] in (None, agent)) or 0.0
            for agent in dict.fromkeys(filter(None, given.values()))
        }
        return found if found and set(found.values()) != {self.reward()} else {}

    def head(self) -> Episode:
        """Return the part that a listing shows of it once archived: no calls and no notes."""
        opening = structs.replace(self.opening, model=self.opening.model or self.transcript.first_model())
        rewards = {name: replace(one, note=None, agent=_agent_of(self, one)) for name, one in self.rewards.items()}
        return replace(
            self, opening=opening, transcript=Transcript(), attempts=Attempts(), rewards=rewards, stored="archive",
        )


def _agent_of(episode: Episode, reward: EpisodeReward) -> str | None:
    """The agent that `reward` is of: if it is a call's, the one who asked, or "" for one without a name."""
    entry = episode.transcript.calls.get(reward.call or "")
    return (reward.agent if entry is None else entry.asked.agent) or ("" if reward.call is not None else None)


def models_played(episode: Episode) -> set[str]:
    """The models that it was opened for, and those that it has asked."""
    named = {*filter(None, (episode.opening.model,)), *episode.opening.to_train, *episode.opening.teaching}
    return {entry.asked.model for entry in episode.transcript.calls.values()} | named


def wants(episode: Episode, call: str) -> bool:
    """Tell whether `call` would be trained if it were whole. It would not in an evaluation, nor if it asks another
    model than the episode's (`Episode.trains`). As long as no model is named, that is the first call's."""
    if episode.opening.eval or (entry := episode.transcript.calls.get(call)) is None:
        return False
    return entry.asked.model not in episode.opening.teaching and entry.asked.model in episode.named_to_train()


def awaits(episode: Episode) -> bool:
    """Tell whether a judgement is all that a sealed episode with nothing in flight lacks."""
    return episode.state == "sealed" and lacks_a_judgement(episode)


def lacks_a_judgement(episode: Episode) -> bool:
    """Tell whether an episode awaits a judgement once it is sealed."""
    if not episode.opening.judged or episode.transcript.running:
        return False
    return not (episode.rewards or episode.withdrawn) and any(to_judge(episode))


def awaits_since(episode: Episode) -> float:
    """The time from which it has awaited a judgement, without what the daemon was away."""
    return max(episode.sealed_at or 0.0, episode.active_at)


def to_judge(episode: Episode) -> Iterator[Turn]:
    """The calls that a judgement is about: those that would be trained, in an evaluation too."""
    models = episode.trains()
    return (turn for turn in episode.transcript.turns() if turn.sampled and turn.model in models)


def judging(episode: Episode) -> str | None:
    """Tell what became of an episode to be judged once it was sealed; None before, and of any other."""
    if episode.sealed_at is None or not episode.opening.judged:
        return None
    if episode.state == "sealed":
        return "awaiting"
    if episode.reason in ("withdrawn", "not_judged"):
        return episode.reason
    return "judged" if episode.judgement is not None else "rewarded" if episode.rewards else "lost"


def timeouts(asked: OpenEpisode, idle: float, wall: float) -> tuple[float, float]:
    """The idle and the wall timeout, in seconds, of an episode that is opened as `asked`. `idle` and `wall` are the
    proxy's own. No episode holds its memory for longer than `wall`."""
    if (asked.wall_timeout or 0) > wall:
        raise BadRequest(f"wall_timeout may be at most {wall:g} seconds, the proxy's own", param="wall_timeout")
    return asked.idle_timeout or idle, asked.wall_timeout or wall
