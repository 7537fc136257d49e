"""What a trainer tells its daemon every few seconds, from a thread of its own, whatever the step in progress is at.

The daemon lets one trainer of a model in, and takes one that is silent for 30 s for dead. A step may take an hour, and
so may loading a model. So neither leases nor steps are signs of life: this thread is. If another trainer has taken our
place in the meantime, the daemon refuses whatever we ask next, which ends the run.

It also keeps the leases of the batches in hand alive, while they are trained or wait for their checkpoint: it extends
all of them three times per lease length. A refusal is not raised: the batch may be in the weights already, and
`TrainedBatches` knows what to do when its acknowledgement is refused too.
"""

from __future__ import annotations

import logging
import platform
import threading
import time
import uuid
from contextlib import suppress
from pathlib import Path

from ajet_sdk.errors import AjetError, Conflict, NotFound
from ajet_sdk.routes import Attend
from ajet_trainer.config import Config
from ajet_trainer.link import Link
from ajet_trainer.run_folder import run_of

logger = logging.getLogger(__name__)

BEAT_S = 5.0
LEASE_S = 300.0
"""The length of a lease that is not extended. It outlives two rounds that fail."""


def trainer_of(config: Config) -> Attend:
    """This process as a trainer, once it holds the folder of its run."""
    folder = Path(config.run_dir).absolute()
    return Attend(config.model_name, run_of(folder), uuid.uuid4().hex, host=platform.node(), folder=str(folder))


class Keeper:
    """Beats from the start of the block to its end, and then leaves. Extends each lease from `hold` to `release`. What
    does not arrive is said again with the next beat."""

    def __init__(self, link: Link, lease_s: float = LEASE_S) -> None:
        self._link, self.lease_s = link.within(0.0), lease_s
        self._held: dict[str, None] = {}
        self._lock = threading.Lock()
        self._due = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="keeper", daemon=True)

    def hold(self, batch: str) -> None:
        with self._lock:
            self._held[batch] = None

    def release(self, batch: str) -> None:
        with self._lock:
            self._held.pop(batch, None)

    @property
    def held(self) -> tuple[str, ...]:
        """The batches in hand, oldest first."""
        with self._lock:
            return tuple(self._held)

    def turn(self) -> None:
        """A sign of life and, when it is time, one round over everything held. A refusal leaves the rest untouched. A
        proxy that does not answer ends the round: it would answer for no other batch."""
        with suppress(NotFound, Conflict):  # the next question ends the run, whose weights may hold these batches
            self._link.says("beats")
        if time.monotonic() < self._due:
            return
        for batch in self.held:
            with suppress(NotFound, Conflict):
                self._link.extend(batch, self.lease_s)
        self._due = time.monotonic() + self.lease_s / 3

    def _run(self) -> None:
        while not self._stop.wait(min(BEAT_S, self.lease_s / 3)):
            try:
                self.turn()
            except AjetError:
                continue
            except Exception:
                logger.warning("a sign of life has failed", exc_info=True)

    def __enter__(self) -> Keeper:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=5.0)
        with suppress(AjetError):
            self._link.says("leaves")
