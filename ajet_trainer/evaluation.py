"""An evaluation while training: agents play episodes that are never trained, all under one version of the weights.

A trainer cannot play. So it tells the daemon how many evaluation episodes it wants, and those who run
``ajet run --eval --wanted`` play them. The next step waits for that, and no weights change in between.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ajet_sdk.errors import NotFound
from ajet_trainer.link import Link
from ajet_trainer.promotion import Played

LOOK_S = 2.0
"""Seconds for which a stop signal may go unnoticed, as while a trainer waits for a batch."""
EVAL_WAIT_S = 1800.0
"""Seconds for which an evaluation is waited for."""
EVAL_QUIET_S = 60.0
"""Seconds that anyone may take to open the first of its episodes."""
NOBODY = (
    "nobody plays evaluations, so training continues without: run "
    "`ajet run --eval --wanted --task … -- PROGRAM` next to the agents"
)
WAITS = NOBODY.replace("training continues without", "the candidate waits")


class Evaluation:
    """`episodes` of `model` at the version that serves now, wanted from here on."""

    def __init__(self, link: Link, model: str, episodes: int, clock: Callable[[], float]) -> None:
        self._link, self._name, self._clock = link, f"eval-{uuid.uuid4().hex}", clock
        self._began, self._wanted = clock(), episodes
        self._told: Mapping[str, Any] = {"opened": 0, "done": 0, "lost": 0, "rewards": []}
        link.evaluate(model, episodes, self._name)

    def wait(
        self, meanwhile: Callable[[], None], stopping: Callable[[], bool], sleep: Callable[[float], None],
        say: Callable[[str], None], *, however_long: bool = False,
    ) -> bool:
        """Waits until all is played, and returns whether it is. It is not if somebody is `stopping`, the daemon knows
        nothing of it any more, or it was not played in time, `however_long` that may take. `say` hears why;
        `meanwhile` is done between two looks."""
        while not stopping() and self._look():
            waited, lost = self._clock() - self._began, self._told["lost"]
            said = ""
            if waited >= EVAL_QUIET_S and not self._told["opened"] + lost:
                said = WAITS if however_long else NOBODY
            elif waited >= EVAL_WAIT_S and not however_long:
                said = (f"{len(self._told['rewards'])} of {self._wanted} evaluation episodes are done after "
                        f"{waited:.0f} s, and {lost} were discarded; training continues")  # fmt: skip
            if said:
                say(said)
                if not however_long:
                    break
            meanwhile()
            sleep(LOOK_S)
        return self.whole

    @property
    def played(self) -> Sequence[Played]:
        """The episodes that were played, in the order of their places."""
        found: Sequence[Played] = self._told["played"]
        return found

    @property
    def whole(self) -> bool:
        """Tell whether all that was wanted is played."""
        return bool(self._wanted <= self._told["done"])

    def _look(self) -> bool:
        """Asks how it stands; whether it is still waited for. It is not if the daemon knows nothing of it any more, and
        what it said before still counts."""
        try:
            self._told = self._link.evaluation(self._name)
        except NotFound:
            return False
        return not self.whole

    def figures(self) -> dict[str, Any]:
        """Return what `metrics.jsonl` says of it."""
        rewards = self._told["rewards"]
        if not rewards:
            return {"eval_episodes": 0}
        mean = math.fsum(rewards) / len(rewards)
        std = math.sqrt(math.fsum((reward - mean) ** 2 for reward in rewards) / len(rewards))
        return {"eval_reward_mean": mean, "eval_reward_std": std, "eval_episodes": len(rewards)}
