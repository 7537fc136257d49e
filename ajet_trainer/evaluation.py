"""An evaluation while training: agents play episodes that are never trained, all under one version of the weights.

A trainer cannot play. So it tells its daemons how many evaluation episodes it wants, and those who run
``ajet run --eval --wanted`` play them. The next step waits for that, and no weights change in between.
With several daemons, each is asked for its part.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ajet_sdk.errors import NotFound
from ajet_trainer.daemons import Away, Daemons

LOOK_S = 2.0
"""How long a stop signal may go unnoticed, as while a trainer waits for a batch."""
EVAL_WAIT_S = 1800.0
"""How long an evaluation is waited for."""
EVAL_QUIET_S = 60.0
"""How long anyone may take to open the first of its episodes."""
NOBODY = (
    "nobody plays evaluations at {}, so training continues without: run "
    "`ajet run --eval --wanted --task … -- PROGRAM` next to the agents"
)
"""Of these daemons."""


class Evaluation:
    """`episodes` of `model` at the version that serves now, wanted from here on."""

    def __init__(self, daemons: Daemons, model: str, episodes: int, clock: Callable[[], float]) -> None:
        self._daemons, self._name, self._clock = daemons, f"eval-{uuid.uuid4().hex}", clock
        self._began, self._wanted = clock(), episodes
        self._told: dict[str, Mapping[str, Any]] = {
            url: {"wanted": part, "opened": 0, "done": 0, "rewards": []}
            for url, part in daemons.evaluate(model, episodes, self._name).items()
        }

    def wait(
        self, meanwhile: Callable[[], None], stopping: Callable[[], bool], sleep: Callable[[float], None]
    ) -> str | None:
        """Waits until all is played, or somebody is `stopping`; `meanwhile` is done between two looks. If it was not
        played in time, returns a line that says so."""
        while not stopping() and (left := self._look()):
            waited = self._clock() - self._began
            if waited >= EVAL_QUIET_S and not any(self._tried(url) for url in left):
                return NOBODY.format(", ".join(left))
            if waited >= EVAL_WAIT_S:
                done = self.figures()["eval_episodes"]
                lost = sum(told["lost"] for told in self._told.values())
                return (f"{done} of {self._wanted} evaluation episodes are done after {waited:.0f} s, and {lost} were "
                        "discarded; training continues")  # fmt: skip
            meanwhile()
            sleep(LOOK_S)
        return None

    def _tried(self, url: str) -> int:
        """How many episodes were opened at a daemon, those that were discarded among them."""
        told = self._told[url]
        return int(told["opened"] + told["lost"])

    @property
    def whole(self) -> bool:
        """Whether all that was wanted is played."""
        return self._wanted <= sum(int(told["done"]) for told in self._told.values())

    def _look(self) -> list[str]:
        """Asks how it stands; the daemons whose part is still waited for. One that is away, or knows nothing of it any
        more, is not. What it said before still counts."""
        left = []
        for url in self._told:
            with suppress(Away, NotFound):
                told = self._told[url] = self._daemons.evaluation(url, self._name)
                if told["done"] < told["wanted"]:
                    left.append(url)
        return left

    def figures(self) -> dict[str, Any]:
        """What `metrics.jsonl` says of it."""
        rewards = [reward for told in self._told.values() for reward in told["rewards"]]
        if not rewards:
            return {"eval_episodes": 0}
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        return {"eval_reward_mean": mean, "eval_reward_std": std, "eval_episodes": len(rewards)}
