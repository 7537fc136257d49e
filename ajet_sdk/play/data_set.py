"""A data set that is played through, once or several times, and goes on where it was left.

Idea: the proxy's ledger is the cursor. Each lane of the data set is a *play* of its own there, with a place for each
episode. The places go epoch by epoch, and within an epoch task by task, so that groups complete early. A runner asks
which places are missing and opens one of them. So after ``kill -9`` of a runner, or of the proxy, the next start plays
exactly what is missing. Runners that play the same data set under one name share the work.

The name of a play ends in a digest of its tasks (their names, and what JSON can say of them) and of how often they are
played. So an edited data set, or another `repeat`, is another play.

An episode that is discarded gives its place back, for whatever reason. A run plays such a place again, so many
`retries` times, and then leaves it for the next start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ajet_sdk import bodies, routes
from ajet_sdk.client import Client
from ajet_sdk.errors import AjetError, BadRequest, NotFound
from ajet_sdk.play.episode import aborting, no_proxy
from ajet_sdk.play.options import RunOptions, said_by
from ajet_sdk.play.results import Progress, RunResult
from ajet_sdk.play.schedule import LATER, Call, Job, Later, Rollout, Source, pause_after, rollouts_at
from ajet_sdk.play.tasks import as_part, digest

LOOK_S = 1.0
"""An episode that was discarded elsewhere is seen after this time at the latest."""
SHOWN = 3
"""At most so many lanes are named in one line."""
MAX_NAME, MAX_LANE = 120, 60
"""Characters of a play's own name, and of the lane in it."""


@dataclass(slots=True)
class LanePlay:
    """The play of one lane, as the proxy last showed it: `seen`, at the time `seen_at`. `first` is the place from which
    on nothing had been played when this run, or its program, began. `opens` counts how often this run has opened what
    was given back, and `due` is when that may be played next. `full` says that it had no room when an episode was last
    asked for, by the id `asked`. While one `waits` for room, no other does; `waited` is when one began to."""

    lane: str
    play: str
    tasks: list[Any] = field(default_factory=list)
    seen: dict[str, Any] = field(default_factory=dict)
    seen_at: float = float("-inf")
    first: int = 0
    over: bool = False
    full: bool = False
    asked: str | None = None
    waits: bool = False
    waited: float = float("-inf")
    opens: Counter[int] = field(default_factory=Counter)
    due: dict[int, float] = field(default_factory=dict)


def no_room(lanes: Sequence[str]) -> str:
    """That `lanes` are full, in words."""
    named = ", ".join(lanes[:SHOWN]) + (" and others" if len(lanes) > SHOWN else "")
    has = f"lane {named} has" if len(lanes) == 1 else f"lanes {named} have"
    return f"{has} as many episodes open or ready as training wants; is a trainer running?"


class PlayedRollouts(Source):
    """The tasks of a data set, `epochs` times `repeat` times each, as far as the proxy says that they are missing."""

    def __init__(self, tasks: Iterable[Any], options: RunOptions) -> None:
        self._repeat, self._retries, self._epochs = options.repeat, options.retries, options.epochs
        self._paced = not options.eval
        """Lanes are played as the proxy wants them."""
        self._lanes: dict[str, LanePlay] = {}
        tasks = tuple(rollout.task for rollout in rollouts_at(tasks, 1))
        if not tasks:
            raise BadRequest("there is no task to play", param="tasks")
        names = [options.name(task) for task in tasks]
        parts = [str(self._repeat), str(self._epochs), *names, *map(said_by, tasks)]
        self.name = f"{as_part(options.play or '', MAX_NAME)}@{digest(parts)}"
        bodies.check_id(self.name, "play")
        for name, task in zip(names, tasks, strict=True):
            kind = options.lane_of(name)
            known = self._lanes.setdefault(kind, LanePlay(kind, f"{self.name}:{as_part(kind, MAX_LANE)}"))
            known.tasks.append(task)
        self._held: list[str] = []
        self._elsewhere = 0
        self._loose: list[str] = []
        self._open = 0

    async def begin(self, client: Client) -> Progress:
        """Begins to play, or goes on."""
        for lane in self._lanes.values():
            body = routes.Play(lane.play, len(lane.tasks) * self._repeat * self._epochs)
            self._hear(lane, (await client.ask("play", body)).json(), client)
            lane.first = lane.seen["next"] if lane.seen["next"] is not None else body.episodes
        return self.progress

    @property
    def progress(self) -> Progress:
        all_seen = [lane.seen for lane in self._lanes.values()]
        return Progress(sum(one["done"] for one in all_seen), sum(one["episodes"] for one in all_seen))

    async def take(self, client: Client, call: Call) -> Job | Later | None:
        """The place that is missing first, in the lane that is wanted most. If all such lanes are full, it waits in the
        one in which none has waited for longest. None once all are had, or have failed too often."""
        wanted, later = (await self._wanted(client)), False
        self._held, self._elsewhere = [], 0
        held: list[tuple[LanePlay, int]] = []
        for lane in self._in_order(wanted):
            place = await self._missing(lane, client)
            full, lane.full = lane.full or (wanted is not None and wanted[lane.lane] <= 0), False
            if isinstance(place, int) and (full or lane.waits):
                self._held.append(lane.lane)
                held += [] if lane.waits else [(lane, place)]
                place = LATER
            if isinstance(place, int):
                return self._job(lane, place)
            later = later or place is LATER
            self._elsewhere += 0 if lane.over else lane.seen["opened"] - lane.seen["done"]
        if held:
            lane, place = min(held, key=lambda one: one[0].waited)
            lane.waits, lane.waited = True, client.clock()
            return replace(self._job(lane, place), episode=lane.asked, waits=True)
        return LATER if later else None

    def waits_for(self) -> str | None:
        if self._open:
            return None
        if self._held:
            return no_room(self._held)
        return f"others have {self._elsewhere} episodes of it open" if self._elsewhere else None

    async def _wanted(self, client: Client) -> Mapping[str, int] | None:
        """The number of episodes that each lane wants now; None if no lane is held back."""
        if not self._paced:
            return None
        answer = (await client.ask("wanted")).json()
        if "lanes" not in answer:
            return None
        return {lane: int(answer["lanes"].get(lane, answer["other"])) for lane in self._lanes}

    def _in_order(self, wanted: Mapping[str, int] | None) -> Sequence[LanePlay]:
        """The lanes that are not over. If no lane is held back, the one that is furthest behind is first."""
        lanes = [lane for lane in self._lanes.values() if not lane.over]
        behind = {lane.lane: lane.seen["opened"] / lane.seen["episodes"] for lane in lanes}
        return sorted(lanes, key=lambda lane: (-wanted[lane.lane] if wanted else 0, behind[lane.lane]))

    async def _missing(self, lane: LanePlay, client: Client) -> int | Later | None:
        """A place to play now; None if there is none, nor will be one."""
        if lane.seen_at + LOOK_S <= client.clock():
            await self._look(lane, client)
        place = self._free(lane, client.clock())
        if place is None and lane.seen_at < client.clock():
            await self._look(lane, client)
            place = self._free(lane, client.clock())
        if place is not None or lane.over:
            return place
        if lane.seen["opened"] > lane.seen["done"]:
            if self._loose:
                await self._abort_loose(client)
            return LATER
        left = any(self._allowed(lane, one) for one in lane.seen["given_back"])
        return LATER if left else None

    def _free(self, lane: LanePlay, now: float) -> int | None:
        if lane.over:
            return None
        for place in lane.seen["given_back"]:
            if self._allowed(lane, place) and lane.due.get(place, 0.0) <= now:
                return int(place)
        return None if lane.seen["next"] is None else int(lane.seen["next"])

    def _allowed(self, lane: LanePlay, place: int) -> bool:
        """True if this run plays a place once more that was given back. What it has played itself has failed once."""
        return lane.opens[place] < self._retries + (place < lane.first)

    async def _look(self, lane: LanePlay, client: Client) -> None:
        """Asks how it stands. Of the places that were given back, some are listed at a time: those that this run may
        play are looked for behind those that it may not."""
        query: dict[str, Any] = {}
        while True:
            try:
                self._hear(lane, (await client.ask("get_play", id=lane.play, **query)).json(), client)
            except NotFound:  # another runner has finished it
                lane.over = True
                return
            listed = lane.seen["given_back"]
            if not listed or any(self._allowed(lane, place) for place in listed):
                return
            query = {"after": listed[-1]}

    def _hear(self, lane: LanePlay, answer: Any, client: Client) -> None:
        known = {"episodes", "opened", "done", "missing", "given_back", "next"}
        if not isinstance(answer, dict) or not known <= answer.keys():
            raise no_proxy(client.target, answer)
        lane.seen, lane.seen_at = answer, client.clock()

    def _job(self, lane: LanePlay, place: int) -> Job:
        task, index = divmod(place, self._repeat)
        epoch, task = divmod(task, len(lane.tasks))
        rollout = Rollout(place, lane.tasks[task], index + epoch * self._repeat)
        return Job(rollout, place=place, play=lane.play)

    def _lane(self, job: Job) -> LanePlay:
        return next(lane for lane in self._lanes.values() if lane.play == job.play)

    def put_back(self, job: Job, *, full: bool = False) -> None:
        """Another runner may have it: look again."""
        lane = self._lane(job)
        lane.seen_at, lane.full, lane.waits = float("-inf"), full, False
        lane.asked = job.episode if full else None

    def opened(self, job: Job) -> None:
        lane, place = self._lane(job), job.place or 0
        seen, lane.waits, lane.asked = lane.seen, False, None
        self._open += 1
        seen["opened"] += 1
        if place == seen["next"]:
            seen["next"] = place + 1 if place + 1 < seen["episodes"] else None
        else:
            lane.opens[place] += 1
            seen["given_back"] = [other for other in seen["given_back"] if other != place]

    def ended(self, job: Job, result: RunResult, now: float, *, changed: bool) -> bool:
        lane, place = self._lane(job), job.place or 0
        self._open -= result.episode is not None
        lane.seen_at = float("-inf")
        if result.kept:
            return False
        if result.outcome == "failed" and result.episode is not None:
            self._loose.append(result.episode)
        lane.due[place] = now if changed else now + pause_after(max(0, lane.opens[place]))
        lane.opens[place] -= changed
        return changed or self._allowed(lane, place)

    def forgive(self) -> None:
        for lane in self._lanes.values():
            lane.first = lane.seen["episodes"]
            lane.opens.clear()
            lane.due.clear()

    async def _abort_loose(self, client: Client) -> None:
        """Gives up episodes of this run that could not be settled when they ended."""
        loose, self._loose = self._loose, []
        for episode in loose:
            try:
                await aborting(client, episode, "its end could not be settled", "infra")
            except AjetError:  # settled after all, or the proxy is away: its timeouts will end it
                continue

    async def finish(self, client: Client) -> Progress:
        """Ends the plays that are whole, once nothing is open in them. Returns how far it has come."""
        for lane in self._lanes.values():
            await self._look(lane, client)
            if lane.over:
                lane.seen["done"] = lane.seen["episodes"]
            elif not lane.seen["missing"] and lane.seen["done"] == lane.seen["episodes"]:
                try:
                    await client.ask("end_play", id=lane.play)
                except NotFound:
                    continue
        return self.progress
