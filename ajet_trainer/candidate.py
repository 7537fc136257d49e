"""The place of weights before users get them: a candidate, which is evaluated beside the weights that serve.

Each is played under a name of its own, so users wait for nothing. What serves is evaluated once for a version of a
model, and `incumbent.json` of the run folder keeps that. Where nobody plays, or the candidate's engine is away, this
waits: what was trained stays leased, and nothing is thrown away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from ajet_trainer.config import Config
from ajet_trainer.engines import EngineLost
from ajet_trainer.evaluation import Evaluation
from ajet_trainer.learner import Learner
from ajet_trainer.link import Link
from ajet_trainer.progress import Progress
from ajet_trainer.promotion import Played, Verdict, decide
from ajet_trainer.run_folder import put, read_json

AGAIN_S = 10.0
"""After so long an engine is asked again that did not take the candidate."""
REFUSED = "not_promoted"
"""Why episodes are not trained whose weights were thrown away."""


class NotPromoted(Exception):
    """The weights are thrown away: the run starts again from its last checkpoint."""


class Candidate:
    """The candidate of a run. `meanwhile` is done between two looks, and a wait ends when somebody is `stopping`."""

    def __init__(
        self, config: Config, link: Link, learner: Learner, progress: Progress, *, meanwhile: Callable[[], None],
        stopping: Callable[[], bool], clock: Callable[[], float], sleep: Callable[[float], None],
    ) -> None:
        self._config, self._link, self._learner, self._progress = config, link, learner, progress
        self._meanwhile, self._stopping, self._clock, self._sleep = meanwhile, stopping, clock, sleep
        self._path = progress.run_dir / "incumbent.json"
        self._played: Sequence[Played] = ()
        """The candidate's evaluation, by which the next one is compared if it is promoted."""
        self.figures: dict[str, Any] = {}
        """The figures of the latest verdict in `metrics.jsonl`."""

    def verdict(self, served: int) -> Verdict | None:
        """The verdict on the learner's weights beside those of version `served`. None if a stop came first."""
        self.figures = {}
        while not self._stopping():
            self._meanwhile()  # a daemon that has forgotten what serves takes no candidate of it
            self._announce()
            known = read_json(self._path)
            if not self._of(served).items() <= known.items():
                if (evaluation := self._evaluate(self._config.model_name)) is None:
                    continue
                self._keep(served, evaluation.played)
                known = read_json(self._path)
            if not self._propose() or (evaluation := self._evaluate(self._config.candidate)) is None:
                continue
            self._played = evaluation.played
            if (found := decide(self._played, known["played"], self._config.promote_margin)) is not None:
                self.figures = evaluation.figures() | {
                    "promoted": int(found.promoted), "promotion_difference": found.difference,
                    "promotion_lowest": found.lowest, "promotion_length": found.length,
                }  # fmt: skip
                return found
            self._progress.say("the evaluations of the candidate and of what serves have too few tasks in common that "
                               "both have a reward for: both are played again")  # fmt: skip
            self._path.unlink(missing_ok=True)
        return None

    def serves(self, version: int) -> None:
        """The candidate is what serves from now on, as `version`."""
        self._keep(version, self._played)

    def _keep(self, version: int, played: Sequence[Played]) -> None:
        put(self._path, json.dumps(self._of(version) | {"played": played}) + "\n")

    def _of(self, version: int) -> dict[str, Any]:
        """The fields that an evaluation must have to count as that of `version`, when it serves."""
        return {"version": version, "model": self._config.model, "eval_episodes": self._config.eval_episodes}

    def _announce(self) -> None:
        config, urls = self._config, self._config.candidate_urls or self._config.engine_urls
        self._link.announce(config.candidate, self._learner.version, urls, candidate_of=config.model_name)

    def _propose(self) -> bool:
        """Waits until the candidate's engines have the weights; False if a stop came first."""
        while not self._stopping():
            try:
                self._learner.propose()
            except EngineLost as error:
                self._progress.say_once(f"the candidate waits for its engine: {error}")
            else:
                return True
            self._meanwhile()
            self._sleep(AGAIN_S)
        return False

    def _evaluate(self, model: str) -> Evaluation | None:
        """The evaluation of `model` once it is whole. None if the daemon knows nothing of it any more, or a stop came
        first."""
        def meanwhile() -> None:
            self._meanwhile()
            if model == self._config.candidate:
                self._propose()

        assert self._config.eval_episodes is not None
        evaluation = Evaluation(self._link, model, self._config.eval_episodes, self._clock)
        say = self._progress.say_once
        return evaluation if evaluation.wait(meanwhile, self._stopping, self._sleep, say, however_long=True) else None
