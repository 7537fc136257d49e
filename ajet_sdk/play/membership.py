"""A process that runs agents is a client of the proxy: it joins, shows that it is there, and leaves.

If it dies, the proxy discards what it had open within seconds, and nobody waits for it.

A client that the proxy has taken for gone, as after a network that was away, joins again under its name. It does so
without replacing anybody: another one may have taken the name in between, and then this one ends (`client_exists`).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from ajet_sdk import routes
from ajet_sdk.blocking import at_home
from ajet_sdk.client import DEADLINE_S, Client, Target
from ajet_sdk.errors import AjetError, Conflict, NotReady, ProxyUnreachable
from ajet_sdk.play.episode import Opened, aborting, new_episode_id, opening
from ajet_sdk.play.patience import Absence, warn

if TYPE_CHECKING:
    from asyncio import Task

LEAVE_DEADLINE_S = 2.0
BEATS = 3
"""So many in the time after which a silent client is gone."""
OPENINGS = 3
"""So often an episode is tried to be opened by a client that is gone each time that it has joined, or whose code has
changed each time."""
CHANGED = "the code changed while the episode was opened"
GONE = ("client_gone", "unknown_client")
"""Codes of the errors by which a client learns that it is gone."""
NAME_TAKEN = "client_exists"
"""The code by which it learns that another client has taken its name, which ends it."""

Revision = Callable[[], "str | None"]


def own_name(program: str) -> str:
    """The name of a client that was given none: the host, the `program`, and six digits that no other has."""
    import socket

    shown = os.path.basename(program).encode("utf-8", "replace").decode()[:80]  # a file's name may be no text
    return f"{socket.gethostname()[:80]}:{shown}-{uuid.uuid4().hex[:6]}"


def is_gone(error: BaseException) -> bool:
    """True if the proxy says that this client is gone."""
    return isinstance(error, AjetError) and error.code in GONE


class Membership:
    """A client's membership at the proxy `target`; use it with ``async with``, or call `leave` at the end. It beats
    from when it joins until it leaves. All that it does is carried out by the SDK's own event loop, so it beats also
    while an agent blocks the loop that it runs in.

    `body` says as what to join; `revision` is asked for each episode as it is opened. ``id`` is the client's id, None
    while it has not joined. `say` is called, in another thread, with words for a proxy that is away; ``fault`` is what
    it raised first.
    """

    def __init__(
        self, target: Target, body: routes.Join, revision: Revision | None = None, say: Callable[[str], None] = warn
    ) -> None:
        self._client = Client(target.url, target.key, deadline=target.deadline)
        self._body, self._revision, self._say = body, revision or (lambda: body.revision), say
        self._absence = Absence(target.url, target.deadline)
        self.fault: Exception | None = None
        self.id: str | None = None
        self._next = _new_id()
        self._joined = False
        self._joining: Task[None] | None = None
        """The attempt at joining for which all wait; or the last one of all, if another has taken the name."""
        self._beating: Task[None] | None = None

    @property
    def beat_s(self) -> float:
        """The time between two beats."""
        return self._body.ttl_s / BEATS

    @at_home
    async def join(self) -> str:
        """Joins, unless it has; the client's id."""
        from asyncio import CancelledError, ensure_future, get_running_loop, shield

        while self.id is None:
            known = self._joining
            if known is None or (not known.done() and known.get_loop() is not get_running_loop()):  # a parent's
                known = self._joining = ensure_future(self._try_to_join())
                known.add_done_callback(lambda task: task.cancelled() or task.exception())  # nobody may be left to ask
            try:
                await shield(known)
            except CancelledError:
                if known.cancelled():
                    raise Conflict("this client has left", code="client_gone") from None
                raise
        return self.id

    async def _try_to_join(self) -> None:
        """Joins, and beats from then on. It stays `_joining` if another has taken the name."""
        from asyncio import ensure_future

        taken = False
        try:
            await self._join()
            self.id = self._next
            self._beating = self._beating or ensure_future(self._beat_on())
        except AjetError as error:
            taken = error.code == NAME_TAKEN
            raise
        finally:
            if not taken:
                self._joining = None

    async def _join(self) -> None:
        """Asks to join, or to join again, as the next id."""
        body = replace(self._body, revision=self._revision(), replaces=self._body.replaces and not self._joined)
        try:
            await self._client.ask("join", replace(body, id=self._next))
        except Conflict as error:
            if not is_gone(error):
                raise
            self._next = _new_id()  # an answer was lost, and then its time was over
            await self._client.ask("join", replace(body, id=self._next))
        self._joined = True

    @at_home
    async def open(self, body: routes.OpenEpisode) -> Opened:
        """Opens an episode that this client plays, under the revision of now. That may take long. If the code has
        changed by then, the episode is given up, and another one is opened."""
        for left in reversed(range(OPENINGS)):
            known = await self.join()
            try:
                opened = await opening(self._client, replace(body, client=known, revision=self._revision()))
            except AjetError as error:
                if not is_gone(error) or not left:
                    raise
                self._lost(known)
                continue
            if not left or opened.revision == self._revision():
                return opened
            with suppress(AjetError):  # it idles out, if nothing else ends it
                await aborting(self._client, opened.id, CHANGED, "infra")
            if body.id is not None:
                body = replace(body, id=new_episode_id())
        raise AssertionError("the last opening returns or raises")

    @at_home
    async def beat(self) -> None:
        """Says that this client is there, and joins again if it is gone. It goes on trying until the next beat."""
        known = await self.join()
        try:
            await self._client.within(self.beat_s).ask("beat", routes.Empty(), id=known)
        except AjetError as error:
            if not is_gone(error):
                raise
            self._lost(known)
            await self.join()

    async def _beat_on(self) -> None:
        from asyncio import to_thread

        while True:
            await self._client.sleep(self.beat_s)
            away = False
            try:
                await self.beat()
            except (ProxyUnreachable, NotReady):
                away = True
            except AjetError:  # the next one may come through
                pass
            if (line := self._absence.seen(away=away)) is not None:
                try:
                    await to_thread(self._say, line)
                except Exception as error:  # beats go on
                    self.fault = self.fault or error

    @at_home
    async def leave(self) -> None:
        """Leaves, in little time and without an error: what it has open is discarded. A proxy that is away is not
        asked: it will hear no beat."""
        from asyncio import gather, get_running_loop

        for task in filter(None, (self._joining, self._beating)):
            if task.get_loop() is get_running_loop():  # and no parent's
                task.cancel()
                await gather(task, return_exceptions=True)
        async with self._client:
            if self.id is not None and not self._absence.away:
                with suppress(AjetError):
                    await self._client.within(LEAVE_DEADLINE_S).ask("leave", id=self.id)

    def _lost(self, known: str) -> None:
        """The client `known` is gone, unless that was known."""
        if self.id == known:
            self.id, self._next = None, _new_id()

    async def __aenter__(self) -> Membership:
        try:
            await self.join()
        except BaseException:
            await self.leave()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.leave()


def join(
    name: str | None = None, *, lane: str | None = None, revision: str | None = None, ttl_s: float = 30.0,
    replace_older: bool = False, proxy_url: str | None = None, api_key: str | None = None, deadline: float = DEADLINE_S,
) -> Membership:
    """Makes this process a client of the proxy, for as long as the block of the answer lasts; `run` does so by itself.
    Its ``id`` is what `episode` takes as ``client``.

    It says three times in `ttl_s` seconds that it is there. Once it has been silent for so long, or has left, what it
    has open is discarded. A client of the same `name` takes its place. `lane` is the kind of its tasks, and `revision`
    names the code with which it plays. With `replace_older`, what waits in the lane and was played under another
    revision is discarded.
    """
    body = routes.Join(name or own_name("python"), revision, lane, ttl_s, replaces_older=replace_older)
    return Membership(Target.resolve(proxy_url, api_key, deadline=deadline), body)


def _new_id() -> str:
    return f"client-{uuid.uuid4().hex}"
