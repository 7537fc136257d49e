"""The blocking face of episodes and memberships, over the asynchronous core (see `ajet_sdk.blocking`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec

from ajet_sdk.blocking import blocking, shown_as, wait
from ajet_sdk.play import episode as core
from ajet_sdk.play import membership
from ajet_sdk.play.episode import EpisodeLife

P = ParamSpec("P")


class Episode(EpisodeLife):
    """One run of an agent on one task. Use it as a context manager; make it with `ajet_sdk.episode`.

    Every method raises an `AjetError` when the proxy refuses, and `ProxyUnreachable` when none has acknowledged within
    the deadline.
    """

    reward = blocking(EpisodeLife._reward)
    seal = blocking(EpisodeLife._seal)
    abort = blocking(EpisodeLife._abort)
    heartbeat = blocking(EpisodeLife._heartbeat)
    record = blocking(EpisodeLife._record)
    close = blocking(EpisodeLife._close)

    def __enter__(self) -> Episode:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            wait(self.leave(error))
        finally:
            self.close()


def _opened(opening: Callable[P, core.Opening]) -> Callable[P, Episode]:
    """The function that opens what `opening` makes, and waits for that."""

    def function(*args: P.args, **more: P.kwargs) -> Episode:
        return wait(opening(*args, **more).opened(Episode))

    return shown_as(opening, function)


episode = _opened(core.episode)
reward, abort = blocking(core.reward), blocking(core.abort)


class Membership:
    """A client's membership; use it as a context manager. It beats until the block is left."""

    def __init__(self, its: membership.Membership) -> None:
        self._core = its

    @property
    def id(self) -> str | None:
        """The client's id; None while it has not joined."""
        return self._core.id

    def beat(self) -> None:
        """Says that this client is there, and joins again if it is gone."""
        wait(self._core.beat())

    def leave(self) -> None:
        """Leaves: what it has open is discarded."""
        wait(self._core.leave())

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def _joined(joining: Callable[P, membership.Membership]) -> Callable[P, Membership]:
    """The function that joins as what `joining` makes, and waits for that."""

    def function(*args: P.args, **more: P.kwargs) -> Membership:
        return Membership(wait(joining(*args, **more).__aenter__()))

    return shown_as(joining, function)


join = _joined(membership.join)
