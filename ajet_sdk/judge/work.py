"""Leases what awaits a judgement, has it judged, and posts the verdicts.

It keeps nothing that matters: whatever was leased and not posted awaits a judgement again once its lease has run out.
To be interrupted is to end well: what is being judged then is judged and posted, and nothing more is leased.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ajet_sdk.bodies import cut
from ajet_sdk.client import Client
from ajet_sdk.errors import AjetError, BadRequest, Conflict, NotFound, TooLarge
from ajet_sdk.judge.judges import CALL_S, LEASE_S, Away, Episode, Failed, Judge, Model, Rest, Verdicts, called
from ajet_sdk.limits import MAX_JUDGEMENTS, MAX_WORDS
from ajet_sdk.rewards.judging import FAKES, PROBE_EVERY, Budget, Probes, agreement, is_value, seen, thumb, with_thumb
from ajet_sdk.routes import Judgement, LeaseJudgements

WAIT_S = 20.0
"""A lease waits so long for something to judge."""
TRIES = 2
"""The most attempts at a judgement. What could not be judged so often is not judged here again."""
MOST_FAILED = 10_000
DAY_S = 86400
LENGTHS = 1000
"""Of so many latest verdicts it is told how they go with the length of the answer."""


@dataclass(frozen=True, slots=True)
class Options:
    """The options of a judge. ``redact`` is a function of an episode that returns it without what nobody may see, or
    None to withdraw it, within ``timeout`` seconds. A user's thumb counts with ``feedback_weight`` beside the judge."""

    name: str = "judge"
    lane: str | None = None
    parallel: int = 1
    relative: bool = False
    feedback_weight: float = 0.5
    redact: Callable[[Any], Any] | None = None
    timeout: float = CALL_S


class Work:
    """Judges until it is interrupted. `show` gets a line for each judgement, `say` whatever else there is to say."""

    day = staticmethod(lambda: int(time.time() // DAY_S))

    def __init__(
        self, client: Client, judge: Judge, options: Options, *, budget: Budget, rest: Rest,
        show: Callable[[str], None], say: Callable[[str], None],
    ) -> None:
        self.judge, self.budget, self.counts = judge, budget, Counter[str]()
        self._client, self._options, self._show, self._say = client, options, show, say
        self._rest, self._spent = rest, False
        self._failed, self._in_hand = Counter[str](), set[str]()
        self._ended: list[set[str]] = []
        """The episodes that were judged here while a worker asked for more, for each that does."""
        self._probes, self._seen = Probes(), 0
        self._other: Mapping[str, Any] | None = None
        self._values = deque[tuple[float, int]](maxlen=LENGTHS)

    async def run(self) -> None:
        """Judges until this is cancelled, or something is wrong for which no waiting helps."""
        workers = [asyncio.create_task(self._worker()) for _ in range(self._options.parallel)]
        try:
            await asyncio.wait(workers, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            self._rest.end()
            for error in await asyncio.gather(*workers, return_exceptions=True):
                if isinstance(error, Exception):
                    raise error

    async def _worker(self) -> None:
        body = LeaseJudgements(
            lane=self._options.lane, unit="groups" if self._options.relative else "episodes", wait_s=WAIT_S,
            lease_s=LEASE_S,
        )
        while not self._rest.ending:
            with self._rest():
                await self._until_affordable()
                self._ended.append(ended := set[str]())
                try:
                    found = await self._client.ask("lease_judgements", body)
                finally:
                    self._ended = [one for one in self._ended if one is not ended]
            if found.status == 200:
                await self._unless_in_hand(found.json()["judgements"], ended)

    async def _unless_in_hand(self, episodes: Sequence[Episode], ended: set[str]) -> None:
        """Whose lease has run out while it is judged here is not judged beside that, nor if that has ended since the
        lease was asked for."""
        if (self._in_hand | ended).isdisjoint(names := {one["episode"] for one in episodes}):
            self._in_hand |= names
            try:
                await self._unit(episodes)
            finally:
                self._in_hand -= names
                for one in self._ended:
                    one |= names

    async def _until_affordable(self) -> None:
        while spent := self.budget.is_spent(self.day(), await self._counted()):
            if not self._spent:
                self._say(f"the budget of {self.budget.tokens:,} tokens is used up: what awaits waits for the next day")
            self._spent = spent
            await asyncio.sleep(60.0)
        self._spent = False

    async def _counted(self) -> int:
        """The tokens that judges of this name have used today, as far as the proxy knows."""
        if self.budget.tokens is None:
            return 0
        status = (await self._client.ask("status")).json()
        return int(status["traffic"]["tokens_today"].get(self._options.name, 0))

    async def _unit(self, episodes: Sequence[Episode]) -> None:
        """Judges and posts an episode, or a group. If a group cannot be judged, none of it is."""
        names = [one["episode"] for one in episodes]
        if any(self._failed[name] >= TRIES for name in names):
            return
        episodes = [{**one, "calls": one["calls"][-MAX_JUDGEMENTS:]} for one in episodes]
        try:
            episodes = [one for one in [await self._redacted(one) for one in episodes] if one is not None]
            found: list[Verdicts] = []
            if self._options.relative:
                compared = await self.judge.compare(episodes) if episodes else {}
                given = [compared.get(one["episode"]) for one in episodes]
                found = [{} if verdict is None else {None: verdict} for verdict in given]
            else:
                found = [await self.judge.judge(one) for one in episodes]
        except Failed as failure:
            if not isinstance(failure, Away):
                self._fail(names, 1)
            self.counts["left"] += len(names)
            self._say(f"{', '.join(names)}: not judged, and left: {failure}")
            return
        for episode, verdicts in zip(episodes, found, strict=True):
            await self._post(episode, verdicts)
        for episode in episodes:
            if isinstance(self.judge, Model) and episode["calls"]:
                await self._probe(self.judge, episode["calls"][-1])

    def _fail(self, names: Sequence[str], times: int) -> None:
        """So often these could not be judged now. The latest that failed are remembered."""
        for name in names:
            self._failed[name] = self._failed.pop(name, 0) + times
        for name in [*islice(self._failed, max(0, len(self._failed) - MOST_FAILED))]:
            del self._failed[name]

    async def _redacted(self, episode: Episode) -> Episode | None:
        """The episode as its judge may see it; None if it was withdrawn."""
        redact = self._options.redact
        if redact is None:
            return episode

        def redacted(given: Any) -> Episode | None:
            found = redact(given)
            if found is None:
                return None
            if not _is_of(episode, found):
                raise Failed("the hook of --redact must return the episode with calls of it and their words, or None")
            return {**found, "calls": [dict(one) for one in found["calls"]]}

        found = await called(redacted, episode, self._options.timeout)
        if found is None:
            await self._send(episode["episode"], "withdrawn", withdraw=True)
        return found

    async def _post(self, episode: Episode, verdicts: Verdicts) -> None:
        weight, name = self._options.feedback_weight, self._options.name
        calls = {call["call"]: call for call in episode["calls"]}
        rewards, values = list[dict[str, Any]](), list[float]()
        for call, verdict in verdicts.items():
            final = with_thumb(verdict, thumb(episode, call), weight)
            if final.value is None:
                self.counts["abstained"] += 1
                continue
            of = {} if call is None else {"call": call}
            values.append(final.value)
            rewards.append({**of, "value": final.value, "note": cut(f"{name}: {final.note}", MAX_WORDS)})
            answers = calls.values() if call is None else [calls[call]]
            self._values.append((final.value, sum(len(one["answer"]) for one in answers)))
        if await self._send(episode["episode"], "judged" if rewards else "without a verdict", rewards):
            mean = f"{statistics.fmean(values):+.2f}" if values else "no verdict"
            self._show(f"{episode['episode']}  {episode['lane']}  {mean}  {len(rewards)} of {len(verdicts)} rewarded")

    async def _send(
        self, episode: str, outcome: str, rewards: Sequence[Mapping[str, Any]] = (), *, withdraw: bool = False
    ) -> bool:
        """Posts a judgement; False if it comes too late, or cannot be taken: then it is not judged here again."""
        tokens = self.budget.pay()
        try:
            body = Judgement(self._options.name, tuple(rewards), withdraw, tokens)
            await self._client.ask("judge", body, id=episode)
            tokens = 0
        except (BadRequest, Conflict, NotFound, TooLarge) as error:
            self._fail([episode], TRIES)
            late = "judged by another" if error.code == "already_judged" else "too late"
            outcome = late if isinstance(error, Conflict) else "not taken"
            if outcome == "not taken":
                self._say(f"{episode}: its judgement is not taken: {error.message}")
        self.budget.owed += tokens  # what it has not taken, it hears of with the next
        self.counts[outcome] += 1
        return outcome in ("judged", "without a verdict", "withdrawn")

    async def _probe(self, judge: Model, call: Mapping[str, Any]) -> None:
        """Now and then has a model judge fake answers in place of the real one to a `call`. They are shown without what
        came next, which was said of the real one."""
        other, self._other, self._seen = self._other, call, self._seen + 1
        if self._seen % PROBE_EVERY:
            return
        fakes = list(FAKES)
        if other is not None and other["before"] != call["before"] and other["answer"] != call["answer"]:
            fakes.append(other["answer"])
        try:
            shown = [seen({**call, "answer": one}, words=False, after=False) for one in (call["answer"], *fakes)]
            real, *values = [(await judge.ask({"": one}))[""].value for one in shown]
            for value in values:
                if real is not None and value is not None:
                    self._probes.add(real, value)
        except Failed:
            return
        if self._probes.fooled:
            raise AjetError(
                f"{sum(self._probes.last)} of {len(self._probes.last)} fake answers (empty, a colon, of another chat) "
                "scored as well as the real one: this judge cannot be believed. Change its rubric or its model"
            )

    async def check(self, gold: Sequence[Mapping[str, Any]]) -> str:
        """The agreement of the judge with labelled answers, in a line. It judges them one after the other, as the
        budget allows."""
        pairs = []
        for line in gold:
            call = {"call": "gold", "before": line["question"], "answer": line["answer"], "next": line.get("next", "")}
            episode = {"episode": "gold", "task": None, "lane": "gold", "eval": True, "calls": [call]}
            await self._until_affordable()
            try:
                verdict = (await self.judge.judge(episode)).get("gold")
            except Failed:
                continue
            if verdict is not None and verdict.value is not None:
                pairs.append((float(line["value"]), verdict.value))
        share, ordered = agreement(pairs)
        return f"{len(pairs)} of {len(gold)} labelled answers judged; of {ordered} pairs {share:.0%} in the same order"

    def summary(self) -> str:
        """All that was done, in a line."""
        counts = [f"{number} {name}" for name, number in sorted(self.counts.items())]
        tokens = [f"{self.budget.used:,} tokens"] if self.budget.used else []
        return "; ".join([", ".join(counts) or "nothing was judged", *tokens, *self._lengths()])

    def _lengths(self) -> list[str]:
        values, lengths = [one for one, _ in self._values], [one for _, one in self._values]
        if len(set(values)) < 2 or len(set(lengths)) < 2:
            return []
        mean = statistics.fmean(values)
        return [f"mean {mean:+.2f}", f"correlation with length {statistics.correlation(values, lengths):+.2f}"]


def _is_of(episode: Episode, found: Any) -> bool:
    """Tell whether a hook returned the episode, with all that is read of it."""
    if not isinstance(found, Mapping) or not episode.keys() - {"feedback"} <= found.keys():
        return False
    known, calls = {one["call"]: one.keys() - {"feedback"} for one in episode["calls"]}, found["calls"]
    if found["episode"] != episode["episode"] or not isinstance(calls, Sequence):
        return False
    return all(isinstance(one, Mapping) for one in calls) and all(_is_feedback(one) for one in (found, *calls)) and all(
        all(isinstance(one.get(name), str) for name in known.get(str(one.get("call")), {""})) for one in calls
    )


def _is_feedback(of: Mapping[str, Any]) -> bool:
    """Tell whether what a hook left of the feedback on something is feedback, or nothing."""
    said = of.get("feedback") or {}
    if not isinstance(said, Mapping) or not all(isinstance(said.get(name) or "", str) for name in ("text", "better")):
        return False
    return said.get("value") is None or is_value(said["value"])
