"""One episode: the table of its states, its calls and its rewards.

Idea: an episode moves only along `NEXT`; which command it still takes in which state is the table `TAKES`. Both are
data, so that tests go through every cell. What follows by itself is decided here too, in `Episode.outcome`: a sealed
episode whose last call in flight has ended becomes ready, recorded or discarded with no event of its own, since a
replay comes to the same decision.

Invariant: an episode is in exactly one state. Its calls in flight number ``running``; once it has left ``open`` and
``sealed`` its text is kept only as timelines, from which every call can be read back.

Next: ajet_proxy/core/samples.py
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ajet_proxy.core.timeline import Packed, Policy, Timeline, Turn, merge_packed
from ajet_proxy.core.tokens import common_prefix, count, cut
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
    """Whether `command` has something to do in this state; `Conflict` if the state refuses it. What a trainer has had
    and may yet acknowledge, or has trained in part, is as good as leased."""
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
    """`Conflict` for an episode with as many rewards, or notes, as it may have."""
    if len(episode.rewards) >= MAX_REWARDS:
        message = f"episode {episode.id} has {MAX_REWARDS} rewards, as many as it may: seal it"
        raise Conflict(message, code="too_many_rewards")
    if note and sum(len(given.note or "") for given in episode.rewards.values()) + len(note) > MAX_NOTES:
        message = f"the notes of episode {episode.id} have {MAX_NOTES} characters, as many as they may: leave this out"
        raise Conflict(message, code="too_many_notes")


@dataclass(frozen=True, slots=True)
class Given:
    """One reward as it was given. A `call` or an `agent` limits the samples it counts for."""

    id: str
    value: float
    call: str | None
    agent: str | None
    final: bool
    note: str | None
    at: float

    def to_json(self) -> dict[str, Any]:
        out = {"id": self.id, "value": self.value, "final": self.final, "at": self.at}
        scope = {"call": self.call, "agent": self.agent, "note": self.note}
        return out | {name: value for name, value in scope.items() if value is not None}


def total(rewards: Iterable[Given]) -> float | None:
    """The sum of `rewards`, of which a final one takes the place of earlier final ones: of those given to the same call
    or agent, or of all if it is the whole episode's. None for none."""
    rewards = list(rewards)
    finals: dict[tuple[str | None, str | None], float] = {}
    for reward in rewards:
        scope = (reward.call, reward.agent if reward.call is None else None)
        if reward.final and scope == (None, None):
            finals.clear()
        if reward.final:
            finals[scope] = reward.value
    return sum([reward.value for reward in rewards if not reward.final], sum(finals.values())) if rewards else None


@dataclass(slots=True)
class Text:
    """A text that several calls of one conversation begin with; each call knows how much of it is its own. The whole
    of it is that of `call`."""

    tokens: bytes
    call: str


SHARED_TEXTS = 8
"""A new call is compared with so many of its episode's texts, the latest first."""


@dataclass(slots=True)
class CallEntry:
    """A call as its episode knows it. ``state``: running, complete or lost (then with its ``reason``). ``siblings`` are
    the calls of one request, one for each choice. A complete call has its `turn`, and until it is merged its `text`, of
    which the first ``turn.end`` tokens are its own."""

    started_at: float
    model: str
    agent: str
    identified_by: str
    body_hash: str
    idempotency_key: str | None
    siblings: tuple[str, ...]
    state: str = "running"
    reason: str | None = None
    turn: Turn | None = None
    text: Text | None = None


@dataclass(slots=True)
class Episode:
    """The mutable state of one episode. Only `Ledger.apply` changes it, through the methods below."""

    id: str
    task: str | None
    model: str | None
    agent: str | None
    eval: bool
    opened_at: float
    idle_timeout: float
    wall_timeout: float
    tenant: str
    identified_by: str
    metadata: Mapping[str, Any]
    members: Mapping[str, str] | None
    state: str = "open"
    reason: str | None = None
    detail: str | None = None
    task_derived: bool = False
    active_at: float = 0.0
    sealed_at: float | None = None
    ended_at: float | None = None
    calls: dict[str, CallEntry] = field(default_factory=dict)
    texts: list[Text] = field(default_factory=list)
    running: int = 0
    rewards: dict[str, Given] = field(default_factory=dict)
    timelines: tuple[Timeline, ...] = ()
    shares: dict[str, str | None] = field(default_factory=dict)
    """Once ready: each model that it trains, with None (ready), a batch id (leased) or ``""`` (trained)."""
    taken: set[str] = field(default_factory=set)
    """The models whose trainer has had their share, and has not said that it trained nothing of it."""
    tallied: int | None = None
    """Its number among the rewarded ones, once it is settled and rewarded."""
    stored: str | None = None
    """``archive``: nothing happens to it any more. None: in memory."""

    def move(self, state: str, at: float, reason: str | None = None, detail: str | None = None) -> None:
        if state not in NEXT[self.state]:
            raise Conflict(f"episode {self.id} cannot go from {self.state} to {state}")
        self.state, self.reason, self.detail = state, reason, detail
        if not NEXT[state]:
            self.ended_at = at

    def finish(self, entry: CallEntry, packed: Packed) -> None:
        """Keep what a call generated. A conversation that goes on takes the place of its shorter past, so that an
        episode costs as much memory as its longest texts and not as the sum of its prompts."""
        entry.turn = packed.turn
        for text in self.texts[: -SHARED_TEXTS - 1 : -1]:
            if packed.text.startswith(text.tokens):
                text.tokens, text.call = packed.text, packed.turn.call
                entry.text = text
                return
        entry.text = Text(packed.text, packed.turn.call)
        self.texts.append(entry.text)

    def history(self, prompt: bytes) -> tuple[str, int]:
        """The complete call whose text shares most of its beginning with `prompt`, and how many tokens; ``("", 0)`` for
        none. A text may have outlived its call, which a retry replaced."""
        texts = [text for text in self.texts[-SHARED_TEXTS:] if self.calls[text.call].turn is not None]
        shared = [(common_prefix(text.tokens, prompt), text.call) for text in texts]
        length, call = max(shared, default=(0, ""))
        return call, length

    def text_of(self, call: str) -> bytes:
        """Prompt and sampled tokens of a complete call, while the episode is not merged."""
        entry = self.calls[call]
        assert entry.turn is not None
        assert entry.text is not None
        return cut(entry.text.tokens, 0, entry.turn.end)

    def packed(self, call: str) -> Packed | None:
        """A complete call with its text, while the episode is not merged."""
        entry = self.calls.get(call)
        if entry is None or entry.turn is None or entry.text is None:
            return None
        return Packed(entry.turn, self.text_of(call))

    def complete(self, model: str, agent: str) -> list[Packed]:
        """The complete calls of `agent` to `model`, while the episode is not merged."""
        kind = [name for name, entry in self.calls.items() if entry.turn is not None and entry.text is not None
                and (entry.turn.model, entry.turn.agent) == (model, agent)]  # fmt: skip
        return [call for name in kind if (call := self.packed(name)) is not None]

    def turns(self) -> list[Turn]:
        """Its complete calls in the order of their start."""
        turns = [entry.turn for entry in self.calls.values() if entry.turn is not None]
        return sorted(turns, key=lambda turn: turn.rank)

    def outcome(self) -> tuple[str, str | None]:
        """The state after ``sealed``, and the reason if it is ``discarded``."""
        if self.eval:
            return "recorded", None
        if not self.rewards:
            return "discarded", "no_reward"
        return ("ready", None) if self.trains() else ("discarded", "incomplete_call")

    def merged(self, policy: Policy) -> tuple[Timeline, ...]:
        """Its timelines as they are now."""
        if self.timelines or self.state not in ("open", "sealed"):
            return self.timelines
        return merge_packed(
            [
                Packed(entry.turn, cut(entry.text.tokens, 0, entry.turn.end))
                for entry in self.calls.values() if entry.turn is not None and entry.text is not None
            ],
            policy,
        )

    def keep_timelines(self, policy: Policy) -> None:
        """Keep the calls' text as timelines from now on."""
        self.timelines = self.merged(policy)
        self.texts.clear()
        for entry in self.calls.values():
            entry.text = None

    def trains(self) -> list[str]:
        """The models whose samples are leased: every member's, or the episode's own, which is its first call's unless
        it was named. Others that a plain episode asks, such as a judge, are nobody's policy."""
        models = list(dict.fromkeys(turn.model for turn in self.turns() if turn.start < turn.end))
        if self.members:
            return [model for model in models if model in self.members.values()]
        return [self.model] if self.model in models else models[:1]

    @property
    def named_task(self) -> str:
        """Its task; an episode with a complete call has one."""
        return self.task or ""

    def reward(self) -> float | None:
        """What it earned, whatever the rewards' scope."""
        return total(self.rewards.values())

    def size(self) -> int:
        """Bytes of token ids and logprobs in its timelines."""
        return sum(
            len(timeline.tokens) + sum(len(turn.logprobs) for turn in timeline.turns) for timeline in self.timelines
        )

    def head(self) -> Episode:
        """What a listing shows of it, archived: no calls, and no notes."""
        model = self.model or next((entry.model for entry in self.calls.values()), None)
        rewards = {name: replace(given, note=None) for name, given in self.rewards.items()}
        return replace(self, model=model, calls={}, texts=[], timelines=(), rewards=rewards, stored="archive")

    def share_state(self) -> str:
        """The state that its shares add up to: leased before ready before trained."""
        if any(self.shares.values()):
            return "leased"
        return "ready" if None in self.shares.values() else "trained"


def timeouts(asked: OpenEpisode, idle: float, wall: float) -> tuple[float, float]:
    """The idle and the wall timeout, in seconds, of an episode that is opened as `asked` where the proxy's own are
    `idle` and `wall`. No episode holds its memory for longer than `wall`."""
    for name in ("idle_timeout", "wall_timeout"):
        value = getattr(asked, name)
        if value is not None and value <= 0:
            raise BadRequest(f"{name} must be positive", param=name)
    if (asked.wall_timeout or 0) > wall:
        raise BadRequest(f"wall_timeout may be at most {wall:g} seconds, the proxy's own", param="wall_timeout")
    return asked.idle_timeout or idle, asked.wall_timeout or wall


def repeats(episode: Episode, body_hash: str, key: str | None, is_retry: bool) -> tuple[str, ...]:
    """The calls of the earlier request that a new one repeats: the latest of the same idempotency key, or, for a
    declared retry, of the same body, if possible one that was lost, else one in flight, else one that is complete and
    whose answer no later call goes on from."""
    if key is None and not is_retry:
        return ()
    entries = [entry for entry in episode.calls.values() if entry.reason != "retried"]
    earlier = [entry for entry in entries if key is not None and entry.idempotency_key == key]
    if not earlier and is_retry:
        earlier = [entry for entry in entries if entry.body_hash == body_hash and not _received(episode, entry)]
    order = ("complete", "running", "lost")
    latest = max(earlier, key=lambda entry: (order.index(entry.state), entry.started_at), default=None)
    return () if latest is None else latest.siblings


def _received(episode: Episode, entry: CallEntry) -> bool:
    """Whether a later call goes on from an answer of this request, so that its client must have had it."""
    choices = [episode.calls[name] for name in entry.siblings]
    return any(one.turn and one.text and count(one.text.tokens) > one.turn.end for one in choices)
