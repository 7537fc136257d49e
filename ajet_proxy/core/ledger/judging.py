"""Episodes that await a judgement: users' traffic and its parts, who judges it, what users say, and what is withdrawn.

Idea: an episode to be judged that is sealed without a reward awaits a judgement, and stays sealed. A judge leases it
for a while, and its one judgement has all of its rewards. Who judges is noted in memory alone
(`ajet_proxy.core.ledger.presence`). After a restart, or when a judge is dead, somebody else leases it: only the first
judgement counts.

A user never hears that an episode has ended. The next call opens another part of it, and what is withdrawn goes for all
parts, earlier and later ones.

Invariant: an episode is judged once. Whatever awaits is judged, rewarded, or discarded with a reason.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Any

from msgspec import Struct

from ajet_proxy.core.ledger import events as ev
from ajet_proxy.core.ledger.episode import Episode, awaits, awaits_since, fitting, lacks_a_judgement, to_judge
from ajet_proxy.core.ledger.events import Event, Events
from ajet_proxy.core.ledger.life import BY_JUDGE
from ajet_proxy.core.ledger.parts import AT_ONCE
from ajet_proxy.core.ledger.presence import Presence
from ajet_proxy.core.ledger.session_names import RUNGS
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.ledger.tallies import day_of
from ajet_proxy.core.tokens import cut
from ajet_proxy.core.trajectory.drift import behind
from ajet_proxy.core.trajectory.timeline import Policy, Timeline, Turn
from ajet_sdk.errors import Conflict, NotFound
from ajet_sdk.routes import Feedback, Judgement, LeaseJudgements, OpenEpisode

MOST_CALLS, MOST_AGE_S = 32, 3600.0
"""Traffic whose name outlives it is sealed after so many calls, or so long, and is trained while it is fresh."""
MOST_WAIT_S = 86400.0
"""Seconds after the seal. An episode that nobody has judged by then is discarded."""
SILENCE_S = 1200.0
"""A judge that lets something wait for so long is missed."""
GATHERS_S = 10.0
"""A group is whole once nothing of it has been open for so long: its episodes may be played one after another."""
BEFORE = 2000
"""Tokens before an answer that a judge sees."""
NEXT = 8
"""So many calls after an answer may be what the user said next."""


class Answered(Struct, frozen=True):
    """A call as a judge sees it: the tokens before the answer, the answer's, and those that came next, as text of
    ``core.tokens``. ``kind`` says what came: a ``reply``, the same question ``again``, or ``none``."""

    call: str
    agent: str
    model: str
    finish_reason: str
    before: bytes
    answer: bytes
    next: bytes
    kind: str


class JudgingCommands:
    """The decisions about what awaits a judgement, over `state`. They return events, as all commands do."""

    def __init__(self, state: State, presence: Presence) -> None:
        self.state, self.presence = state, presence

    # -- users

    def opens(self, body: OpenEpisode, name: str, *, judged: bool) -> OpenEpisode:
        """The opening of users' traffic whose first part is called `name`. If it is `judged`, shares of all names still
        are not, or are judged and recorded."""
        settings = self.state.settings
        return replace(
            body, idle_timeout=settings.traffic_idle, trial=_share(f"holdout {name}") < settings.traffic_holdout,
            judged=judged and _share(f"sample {name}") < settings.traffic_sample,
        )

    def withdraw(self, episode: str, at: float) -> Iterator[Event]:
        """Nothing more is learned from the parts of the first `episode`, wherever they are by now. '' has none."""
        if not episode:
            return
        episodes = self.state.episodes
        known = [*filter(None, map(episodes.get, (episode, *episodes.parts.get(episode, ()))))]
        yield from (ev.EpisodeWithdrawn(at, part.id) for part in known if not part.withdrawn)
        left = None if known or episode in episodes.withdrawn else episodes.find(episode)
        if left is not None and left.opening.traffic:
            yield ev.EpisodeWithdrawn(at, episode)

    def take_back(self, chats: Iterable[str], at: float) -> Events:
        """A user takes back these chats, called by their first parts."""
        at = self.state.time(at)
        return tuple(event for chat in dict.fromkeys(chats) for event in self.withdraw(chat, at))

    def revoked(self, at: float) -> Events:
        """Withdraws traffic that was opened with keys that are void now, some episodes at once."""
        at = self.state.time(at)
        gone = (
            ev.EpisodeWithdrawn(at, one.id) for one in self.state.episodes.values()
            if not one.withdrawn and self.is_revoked(one)
        )
        return tuple(islice(gone, AT_ONCE))

    def is_revoked(self, episode: Episode) -> bool:
        """Tell whether this is users' traffic that was opened with a key which is void now."""
        its = episode.opening
        return bool(its.traffic) and is_void(self.presence.void, its.tenant, its.issued, its.at)

    def feedback(self, episode: str, call: str | None, body: Feedback, *, at: float) -> Events:
        """The same again changes nothing."""
        known = self.state.episodes.known(episode)
        if known.stored is not None:
            raise Conflict(f"episode {episode} is archived: too late for this feedback", code="episode_archived")
        heard = known.feedback.get(call or "")
        if heard is not None and (heard.value, heard.text, heard.better) == (body.value, body.text, body.better):
            return ()
        return (ev.FeedbackGiven(self.state.time(at), episode, call, body.value, body.text, body.better),)

    # -- judges

    def waiting(
        self, body: LeaseJudgements, lanes: Collection[str] | None, at: float
    ) -> Iterator[tuple[Episode, ...]]:
        """Episodes that nobody is judging now, of these `lanes` (None: of any): evaluations first, since somebody waits
        for them; then those that users have said something of; then the newest. A group is all of its key, once it is
        whole. No more is looked at than is asked for."""
        newest = [*self.state.episodes.awaited()][::-1]
        ordered = chain.from_iterable((one for one in newest if _rank(one) == rank) for rank in range(3))
        fits = (
            one for one in ordered if self.is_free(one.id, at)
            and (lanes is None or one.group_key.lane in lanes) and body.lane in (None, one.group_key.lane)
            and (body.model is None or body.model in one.trains())
        )
        if body.unit == "episodes":
            return ((one,) for one in fits)
        playing, groups = {one.group_key for one in self.state.episodes.unsettled.values()}, dict[Any, list[Episode]]()
        for one in fits:
            groups.setdefault(one.group_key, []).append(one)
        return (
            tuple(reversed(found)) for key, found in groups.items()
            if key not in playing and at - max(map(awaits_since, found)) >= GATHERS_S
        )

    def is_free(self, episode: str, at: float) -> bool:
        """Tell whether `episode` awaits a judgement, and nobody judges it now."""
        return episode in self.state.episodes.awaiting and self.presence.judged.get(episode, at) <= at

    def judge(self, episode: str, body: Judgement, *, at: float) -> Events:
        """A judgement without a reward discards the episode."""
        known, at, by = self.state.episodes.known(episode), self.state.time(at), f"{BY_JUDGE}{body.judge!r}"
        given = body.scores
        notes = fitting(one.note for one in given)
        scores = tuple((one.call, one.agent, one.value, note) for one, note in zip(given, notes, strict=True))
        spent = (ev.JudgeSpent(at, body.judge, body.tokens),) if body.tokens else ()
        if body.withdraw:
            gone = tuple(self.withdraw(known.opening.whole, at))
            if gone or known.stored is None or self.state.episodes.is_withdrawn(known.opening.whole):
                return (*spent, *gone) if gone else ()
        if known.judgement is not None:
            if (known.judgement.judge, known.judgement.scores) == (body.judge, scores):
                return ()
            said = f"episode {episode} was judged by {known.judgement.judge!r} before"
            raise Conflict(said, code="already_judged")
        if not scores and (known.reason, known.detail) == ("not_judged", by):
            return ()
        if not awaits(known):
            raise Conflict(f"episode {episode} awaits no judgement: it is {known.state}", code=f"episode_{known.state}")
        if not scores:
            return (*spent, ev.EpisodeDiscarded(at, episode, "not_judged", by))
        for call, _, _, _ in scores:
            if call is not None and call not in known.transcript.calls:
                raise NotFound(f"episode {episode} has no call {call}", code="unknown_call", param="rewards")
        return (*spent, ev.EpisodeJudged(at, episode, body.judge, scores))

    # -- time

    def is_over(self, episode: Episode, at: float, idle: bool) -> bool:
        """Tell whether open traffic is sealed now: because it is `idle`, or for its age."""
        opening = episode.opening
        if episode.state != "open":
            return False
        age, outlived = at - opening.at, opening.identified_by in (*RUNGS, "lineage")
        aged = outlived and (len(episode.transcript.calls) >= MOST_CALLS or age >= MOST_AGE_S)
        return idle or aged or age >= opening.wall_timeout

    def expire(self, at: float, sealed: Iterable[Episode], *, tight: bool = False) -> Iterator[Event]:
        """Discard what has waited for too long, and the oldest of what is too much when these are `sealed` now, or when
        memory is `tight`."""
        episodes, come = self.state.episodes, [*filter(lacks_a_judgement, sealed)]
        surplus = len(episodes.awaiting) + len(come) - self.state.settings.traffic_backlog
        most = ROOM if tight else AT_ONCE
        surplus = most if tight else min(most, surplus)
        for place, one in enumerate(chain(episodes.awaited(), come)):
            late = one.state == "sealed" and at - awaits_since(one) >= MOST_WAIT_S
            if place == most or not (late or place < surplus):
                break
            yield ev.EpisodeDiscarded(at, one.id, "not_judged", "nobody judged it in a day" if late else FULL)

    # -- views

    def status(self, at: float) -> dict[str, Any]:
        """The figures of what is to be judged."""
        tallies, episodes = self.state.tallies, self.state.episodes
        oldest = next((at - (one.sealed_at or at) for one in episodes.awaited()), 0.0)
        counts = {name: tallies.judging[name] for name in COUNTED}
        leased = sum(name in episodes.awaiting and end > at for name, end in self.presence.judged.items())
        return counts | {
            "oldest_s": max(0.0, oldest), "leased": leased, "unjudged_calls": dict(+tallies.unjudged_calls),
            "holdout": tallies.holdouts.to_json(),
            "tokens_today": dict(tallies.spent) if day_of(at) == tallies.spent_on else {},
        }

    def alerts(self, at: float) -> dict[str, str]:
        """The line for an operator while nobody judges what waits."""
        first = next(self.state.episodes.awaited(), None)
        since = max(self.state.tallies.judged_at, 0.0 if first is None else awaits_since(first))
        if first is None or at - since < SILENCE_S:
            return {}
        waits = len(self.state.episodes.awaiting)
        said = "and none has come for 20 minutes that gives a reward: is `ajet judge` at work, and does it abstain?"
        return {"judge": f"{waits} episodes await a judgement, {said}"}


def is_void(revoked: Mapping[str, float], tenant: str, issued: float, at: float) -> bool:
    """Tell whether a chat's key is revoked, one of `tenant` that was `issued` then. A chat without a key counts
    by when it opened (`at`). `revoked` has the time until which each tenant's keys are void."""
    return (issued if tenant or issued else at) <= revoked.get(tenant, -1.0)


def _rank(episode: Episode) -> int:
    """The place in the order in which episodes are judged."""
    if episode.opening.eval and not episode.opening.traffic:
        return 0
    return 1 if episode.feedback else 2


COUNTED = ("sealed", "awaiting", "judged", "rewarded", "not_judged", "withdrawn", "lost")
"""All that was sealed is one of the others."""
ROOM = 250
"""So many episodes are discarded at once while memory is tight."""
FULL = "too much awaits a judgement"


def _share(name: str) -> float:
    """A number from 0 to 1 that `name` alone decides."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") / 2**64


def answers(episode: Episode, policy: Policy) -> Callable[[], list[Answered]]:
    """Makes what a judge sees of an episode that awaits a judgement, in any thread."""
    return partial(_answers, list(to_judge(episode)), episode.transcript.merging(policy))


def _answers(turns: Sequence[Turn], merged: Callable[[], Sequence[Timeline]]) -> list[Answered]:
    """The calls of `turns` as a judge sees them, in the order in which they began."""
    wanted, timelines = {turn.call for turn in turns}, merged()
    found, asked, prompts = dict[str, Answered](), dict[bytes, list[float]](), dict[str, bytes]()
    for timeline in timelines:
        for turn in timeline.turns:  # by a digest, because the prompts of a long episode would fill the memory
            prompt = prompts[turn.call] = hashlib.sha256(cut(timeline.tokens, 0, turn.start)).digest()
            asked.setdefault(prompt, []).append(turn.started_at)
    ordered = sorted(((turn, one.tokens) for one in timelines for turn in one.turns), key=lambda each: each[0].rank)
    places = {turn.call: place for place, (turn, _) in enumerate(ordered)}
    for timeline in timelines:
        for place, turn in enumerate(timeline.turns):
            if turn.call not in wanted:
                continue
            same = asked[prompts[turn.call]]
            later = next((one for one in timeline.turns[place + 1 :] if one.start > turn.end), None)
            came = b"" if later is None else cut(timeline.tokens, turn.end, later.start)
            if not came and len(same) == 1:
                came = _goes_on(turn, timeline.tokens, islice(ordered, places[turn.call] + 1, None))
            again = max(same) > turn.started_at
            found[turn.call] = Answered(
                turn.call, turn.agent, turn.model, turn.finish_reason,
                cut(timeline.tokens, max(0, turn.start - BEFORE), turn.start),
                cut(timeline.tokens, turn.start, turn.end), came, "reply" if came else "again" if again else "none",
            )
    return [found[turn.call] for turn in sorted(turns, key=lambda one: one.rank)]


def _goes_on(turn: Turn, tokens: bytes, later: Iterable[tuple[Turn, bytes]]) -> bytes:
    """The tokens that came behind the answer of `turn`, as one of the next calls has them: one whose history is written
    otherwise, so that it is of another timeline."""
    text = cut(tokens, 0, turn.end)
    of_the_same = ((one, held) for one, held in later if (one.model, one.agent) == (turn.model, turn.agent))
    for one, held in islice(of_the_same, NEXT):
        prompt = cut(held, 0, one.start)
        at = behind(prompt, text, turn.start)
        if at is not None:
            return cut(prompt, at, one.start)
    return b""
