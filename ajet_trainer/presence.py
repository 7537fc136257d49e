"""A trainer shows its daemon every few seconds that it is at work, from a thread of its own.

The daemon lets one trainer of a model in, and takes one that is silent for 30 s for dead. A step may take an hour, and
so may loading a model. So neither leases nor steps are signs of life: this thread is. If another trainer has taken our
place in the meantime, the daemon refuses whatever we ask next, which ends the run.
"""

from __future__ import annotations

import platform
import uuid
from contextlib import suppress
from pathlib import Path

from ajet_sdk.errors import AjetError
from ajet_sdk.routes import Attend
from ajet_trainer.config import Config
from ajet_trainer.link import Link
from ajet_trainer.repeating import Repeating
from ajet_trainer.run_folder import word_in

BEAT_S = ANSWER_S = 5.0
"""Between two signs of life, and for the answer to one. So even where answers are lost, the daemon hears from us three
times in the 30 s."""


def trainer_of(config: Config) -> Attend:
    """This process as a trainer, once it holds the folder of its run."""
    folder = Path(config.run_dir).absolute()
    run = word_in(folder / "run")
    return Attend(config.model_name, run, uuid.uuid4().hex, host=platform.node(), folder=str(folder))


class Presence(Repeating):
    """Beats from the start of the block to its end, and then leaves. A word that does not arrive is not repeated."""

    def __init__(self, link: Link, every_s: float = BEAT_S) -> None:
        super().__init__("presence", every_s)
        self._link = link.within(0.0, ANSWER_S)

    def __exit__(self, *_: object) -> None:
        super().__exit__()
        self._say("leaves")

    def turn(self) -> None:
        self._say("beats")

    def _say(self, word: str) -> None:
        with suppress(AjetError):
            self._link.says(word)
