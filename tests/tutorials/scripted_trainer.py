"""Stands for ``ajet-trainer`` in tests of tutorials and quick start: the real run, with a learner that learns nothing.

    python -m tests.tutorials.scripted_trainer MODEL=ENGINE… run --config FILE

Configuration, mix, leases, admission, the gate, acknowledgements and metrics are the trainer's own.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing

from ajet_trainer.batch import Row
from ajet_trainer.config import Config, digest, load
from ajet_trainer.keeper import Keeper
from ajet_trainer.link import Link
from ajet_trainer.progress import Progress
from ajet_trainer.sampling import Rule
from ajet_trainer.step import Run
from tests.kit.still_learner import StillLearner

TRAIN_S = 0.5


class Learner(StillLearner):
    """Takes its time. `engine` is the base URL of the scripted engine."""

    colocated = True

    def __init__(self, engine: str, config: Config) -> None:
        self.engine = engine
        self.rule = Rule(max_tokens=config.max_tokens, compares=config.group_size > 1)

    def train(self, rows: Sequence[Row]) -> dict[str, float]:
        time.sleep(TRAIN_S)
        return super().train(rows)

    def upstreams(self) -> Sequence[str]:
        return (self.engine,)


def main(engines: Mapping[str, str], config_file: str) -> None:
    """Trains the model of its configuration, on the one of `engines` that serves it."""

    def say(line: str) -> None:
        sys.stdout.write(f"{line}\n")

    config = load(config_file, (), os.environ)
    progress = Progress(config.run_dir, config.total_steps, say, digest(config))
    link = Link.of(config)
    link.meet()
    with closing(link), Keeper(link) as keeper:
        learner = Learner(engines[config.model_name], config)
        run = Run(config, link, learner, keeper, progress)
        try:
            run.start()
            run.loop()
            progress.phase("done")
        finally:
            run.close()


if __name__ == "__main__":
    *words, _, _, config_file = sys.argv[1:]
    main(dict(word.split("=", 1) for word in words), config_file)
