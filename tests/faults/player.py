"""A client that plays data sets one after the other, by ajet's own SDK: it joins, beats, and asks what is missing.

Several play the same ones. A play is never ended here, so whoever starts again goes through it once more and finds what
is still missing of it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import openai

from ajet_sdk.blocking import Client, wait
from ajet_sdk.errors import AjetError, from_body
from ajet_sdk.play.blocking import Episode
from ajet_sdk.play.data_set import PlayedRollouts
from ajet_sdk.play.membership import Membership
from ajet_sdk.play.options import RunOptions
from ajet_sdk.play.results import Progress
from ajet_sdk.play.rollouts import Rollouts
from ajet_sdk.play.threads import ThreadHands
from ajet_sdk.rewards.blame import WorldFailed
from ajet_sdk.routes import Join
from tests.faults.agent import MEMBERS, PATIENCE_S, Agent
from tests.faults.notes import Notes

TTL_S = 2.0
GROUP = 3
TASKS = ("math/0", "math/1", "math/2", "math/3", "code/0", "code/1", "code/2", "word/0", "word/1")
REPEAT = GROUP
GONE = "episode_discarded"


class Stopped(Exception):
    """No more is to be played."""


class Player(Agent):
    """An agent whose episode may be discarded under it: its client was taken for gone."""

    def __call__(self, task: Any, episode: Episode) -> None:
        try:
            self.turns(episode.id, episode.base_url, episode.api_key, str(task))
        except openai.APIStatusError as error:
            if error.code == GONE:
                raise WorldFailed("its client was taken for gone") from error
            raise

    def reward(self, episode: str, reward: dict[str, Any]) -> None:
        answer = self.http.post(f"{self.url}/ajet/v1/episodes/{episode}/rewards", json=reward)
        if 400 <= answer.status_code < 500:
            error = from_body(answer.status_code, answer.json())
            if error.code == GONE:
                raise WorldFailed("its client was taken for gone")
        super().reward(episode, reward)

    def fail(self, error: Exception) -> None:
        if getattr(error, "code", None) == GONE:
            self.notes.add("gone")
        else:
            super().fail(error)


class Noted(Membership):
    """Notes each id under which it joins, before anybody can have heard of it."""

    notes: Notes

    async def _join(self) -> None:
        self.notes.add("joins", client=self._next, ttl_s=self._body.ttl_s)
        await super()._join()

    async def leave(self) -> None:
        """It goes on from one run to the next."""

    async def end(self) -> None:
        await super().leave()


class Kept(Rollouts):
    """A run through a play that does not end it."""

    source: PlayedRollouts

    def __init__(self, *plan: Any, **more: Any) -> None:
        super().__init__(*plan, **more)
        self.source.finish = self.source.begin  # type: ignore[method-assign]


def run(url: str, name: str, client_name: str, notes: Path, stop: Path, revision: Path, whole: Path) -> None:
    """Runs in the process until the file `stop` is there. The folder `whole` has a file for each play that is."""
    player = Player(url, name, notes, MEMBERS)

    def held() -> bool:
        if stop.exists():
            raise Stopped
        return False

    def told(number: int) -> Callable[[Progress], None]:
        def progress(found: Progress) -> None:
            if found.done == found.episodes:
                Path(whole, str(number)).touch()

        return progress

    with Client(url, deadline=PATIENCE_S) as client:
        member = Noted(client.core.target, Join(client_name, ttl_s=TTL_S), lambda: revision.read_text())
        member.notes = player.notes
        try:
            done = [int(path.name) for path in whole.iterdir()]
            for number in count(max(done, default=0)):
                for again in range(max(0, number - 1), number + 1):
                    options = RunOptions(
                        play=f"storm{again}", repeat=REPEAT, parallel=1, members=MEMBERS, on_progress=told(again)
                    )
                    run = Kept(client.core, player, TASKS, options, member, hands=ThreadHands, held=held)
                    wait(run.run())
        except Stopped:
            pass
        except AjetError as error:
            player.notes.add("failed", why=repr(error)[:500])
            sys.exit(1)
        finally:
            wait(member.end())
