"""The gate of the model that is trained, and the weights that serve behind it.

Invariant: the gate opens with the version that the engines took last, whatever the learner has reached since.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ajet_trainer.learner import Learner
from ajet_trainer.link import Link
from ajet_trainer.progress import Progress

DRAIN_S = 1800.0
"""The wait of a closing gate for calls in flight: as long as a request at the gate waits for it to open."""


class Gate:
    """The gate of `model`. `told` hears what the daemon says of another run of it. `forgotten` is called where the
    daemon knows no more what was announced: it has come back empty, or as an older copy."""

    def __init__(
        self, model: str, link: Link, learner: Learner, progress: Progress,
        told: Callable[[Mapping[str, Any]], None], forgotten: Callable[[], None],
    ) -> None:
        self._model, self._link, self._learner, self._told = model, link, learner, told
        self._part: Callable[[str, str], AbstractContextManager[None]] = progress.part
        self._forgotten = forgotten
        self.served = self._announced = learner.version
        self.closed = False
        self._frozen: Sequence[str] = ()
        """The faults of engines that did not go on when it was opened."""

    def close(self) -> None:
        """No call is in flight and none starts until `open`."""
        self.closed = True
        with self._part("drain", "draining calls in flight"):
            self._link.close_gate("weights", DRAIN_S)

    def push(self) -> None:
        """The engines take the learner's weights, unless another trainer has taken our place."""
        self._link.check()
        with self._part("push", "pushing weights"):
            self._learner.push()
        self.served = self._learner.version

    def open(self) -> None:
        """Calls pass again, served by the version that the engines last took. The daemon is told which, whatever it
        knows: it may have come back with an empty data directory."""
        upstreams = self._learner.upstreams()
        knows = self._link.knows(self._announced, upstreams, is_open=False)
        self.announce(upstreams)
        if knows is False:
            self._forgotten()
        self.open_as_it_was()

    def open_if_unknown(self) -> None:
        """Tells the daemon what serves behind the open gate, if it does not know: it may have come back empty. Where
        engines stay frozen, it has them told again to go on."""
        if self._frozen or not self._link.knows(self.served, self._learner.upstreams()):
            self.open()

    def open_as_it_was(self) -> None:
        """Calls pass again, to engines that are known."""
        self._frozen = self._link.open_gate(self.served)
        self.closed = False

    def announce(self, upstreams: Sequence[str] | None) -> None:
        """Says which version the engines serve, and which engines these are, unless others look after them."""
        self._told(self._link.announce(self._model, self.served, upstreams))
        self._announced = self.served
