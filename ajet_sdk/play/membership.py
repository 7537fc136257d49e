"""A process that runs agents is a client of the proxy: it joins, shows that it is there, and leaves.

If it dies, the proxy discards what it had open within seconds, and nobody waits for it. `MembershipLife` decides and
does no I/O. `Membership` carries that out with a thread, and `ajet_sdk.aio.Membership` with a task.

A client that the proxy has taken for gone, as after a network that was away, joins again under its name. It does so
without replacing anybody: another one may have taken the name in between, and then this one ends (`client_exists`).
"""

from __future__ import annotations

import logging
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ajet_sdk import routes
from ajet_sdk.client import Client
from ajet_sdk.errors import AjetError, BadRequest, Conflict, NotReady, ProxyUnreachable
from ajet_sdk.operations import DEADLINE_S, Talk, request
from ajet_sdk.play.episode import Opened, aborting, new_episode_id, opening
from ajet_sdk.play.patience import Absence

LOG = logging.getLogger("ajet")
LEAVE_DEADLINE_S = 2.0
BEATS = 3
"""So many in the time after which a silent client is gone."""
OPENINGS = 3
"""So often an episode is tried to be opened by a client that is gone each time that it has joined; or whose code has
changed each time."""
CHANGED = "the code changed while the episode was opened"
GONE = ("client_gone", "unknown_client")
"""Codes of the errors by which a client learns that it is gone."""

Revision = Callable[[], "str | None"]


def own_name(program: str) -> str:
    """The name of a client that was given none: the host, the `program`, and six digits that no other has."""
    shown = Path(program).name.encode("utf-8", "replace").decode()[:80]  # a file's name may be no text
    return f"{socket.gethostname()[:80]}:{shown}-{uuid.uuid4().hex[:6]}"


def is_gone(error: BaseException) -> bool:
    """Whether the proxy says that this client is gone."""
    return isinstance(error, AjetError) and error.code in GONE


def name_taken(error: BaseException) -> bool:
    """Whether another client has taken the name of this one, which ends it."""
    return isinstance(error, Conflict) and error.code == "client_exists"


class MembershipLife:
    """The part of a membership that does no I/O.

    `body` says as what to join; `revision` is asked for each episode as it is opened. ``id`` is the client's id, None
    while it has not joined.
    """

    def __init__(
        self, client: Any, body: routes.Join, revision: Revision | None = None, say: Callable[[str], None] = LOG.warning
    ) -> None:
        for name in ("name", "lane", "revision"):
            value = getattr(body, name)
            if value is not None and not 1 <= len(value) <= routes.MAX_CLIENT_TEXT:
                raise BadRequest(f"{name} must have 1 to {routes.MAX_CLIENT_TEXT} characters", param=name)
        if body.replaces_older and body.lane is None:
            raise BadRequest("to replace what is older takes the lane in which to do so", param="lane")
        self._client, self._body, self._revision = client, body, revision or (lambda: body.revision)
        self.id: str | None = None
        self._next = _new_id()
        self._tries = 0
        self._failure: AjetError | None = None
        self._joined = False
        self._absence = Absence(say, client.target.url, client.target.deadline)

    @property
    def beat_s(self) -> float:
        """The time between two beats."""
        return self._body.ttl_s / BEATS

    def _join(self) -> Talk[str]:
        """Joins, or joins again; the client's id."""
        body = replace(self._body, revision=self._revision(), replaces=self._body.replaces and not self._joined)
        try:
            yield from request(self._client.target, "join", replace(body, id=self._next))
        except Conflict as error:
            if not is_gone(error):
                raise
            self._next = _new_id()  # an answer was lost, and then its time was over
            yield from request(self._client.target, "join", replace(body, id=self._next))
        self._joined, self._failure = True, None
        return self._next

    def _beat(self, known: str) -> Talk[None]:
        """Says that this client is there; goes on trying until the next beat."""
        target = replace(self._client.target, deadline=min(self.beat_s, self._client.target.deadline))
        yield from request(target, "beat", routes.Empty(), id=known)

    def _leave(self) -> Talk[None]:
        """Leaves, in little time and without an error. A proxy that is away is not told: it will hear no beat."""
        if self.id is not None and not self._absence.away:
            target = replace(self._client.target, deadline=min(LEAVE_DEADLINE_S, self._client.target.deadline))
            with suppress(AjetError):
                yield from request(target, "leave", id=self.id)

    def _opening(self, known: str, body: routes.OpenEpisode) -> Talk[Opened]:
        """Opens an episode as the client `known`, and under the revision of now. That may take long. If the code has
        changed by then, the episode is given up, and another one is opened."""
        target = self._client.target
        for left in reversed(range(OPENINGS)):
            named = replace(body, client=known, revision=self._revision())
            opened = yield from opening(target, named)
            if not left or opened.revision == self._revision():
                break
            with suppress(AjetError):  # it idles out, if nothing else ends it
                yield from aborting(target, opened.episode, CHANGED, "infra")
            if body.id is not None:
                body = replace(body, id=new_episode_id())
        return opened

    def _lost(self, known: str) -> None:
        """The client `known` is gone, unless another thread knew it."""
        if self.id == known:
            self.id, self._next = None, _new_id()

    @contextmanager
    def _beaten(self) -> Iterator[None]:
        """A beat, which shows whether the proxy is away. If it fails, the next one may come through."""
        try:
            yield
        except (ProxyUnreachable, NotReady):
            self._absence.missed()
        except AjetError:
            self._absence.heard()
        else:
            self._absence.heard()

    @contextmanager
    def _trying(self, tries: int) -> Iterator[None]:
        """An attempt at joining. Raises what another one's ended with that came after so many `tries`; or that another
        has taken the name."""
        failure = self._failure
        if failure is not None and (name_taken(failure) or self._tries != tries):
            raise failure
        try:
            yield
        except AjetError as error:
            self._failure = error
            raise
        finally:
            self._tries += 1


class Membership(MembershipLife):
    """A client's membership; use it as a context manager. It joins when it is first needed. From then on a thread
    beats, until the block is left."""

    _client: Client

    def __init__(self, *args: Any, owns_client: bool = False) -> None:
        super().__init__(*args)
        self._owns_client = owns_client
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._beating: threading.Thread | None = None

    def join(self) -> str:
        """Joins, unless it has; the client's id."""
        tries, known = self._tries, self.id
        if known is not None:
            return known
        with self._lock:
            if self.id is None:
                with self._trying(tries):
                    self.id = self._client.drive(self._join())
            if self._beating is None:
                self._beating = threading.Thread(target=self._beat_on, daemon=True)
                self._beating.start()
            return self.id

    def open(self, body: routes.OpenEpisode) -> Opened:
        """Opens an episode that this client plays."""
        tries = 0
        while True:
            known, tries = self.join(), tries + 1
            try:
                return self._client.drive(self._opening(known, body))
            except AjetError as error:
                if not is_gone(error) or tries == OPENINGS:
                    raise
                with self._lock:
                    self._lost(known)

    def beat(self) -> None:
        """Says that this client is there, and joins again if it is gone."""
        known = self.join()
        try:
            self._client.drive(self._beat(known))
        except AjetError as error:
            if not is_gone(error):
                raise
            with self._lock:
                self._lost(known)
            self.join()

    def leave(self) -> None:
        """Leaves: what it has open is discarded."""
        self._stop.set()
        if self._beating is not None and not self._absence.away:
            self._beating.join(LEAVE_DEADLINE_S)
        self._client.drive(self._leave())
        if self._owns_client:
            self._client.close()

    def _beat_on(self) -> None:
        while not self._stop.wait(self.beat_s):
            with self._beaten():
                self.beat()

    def __enter__(self) -> Membership:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


def join(
    name: str | None = None, *, lane: str | None = None, revision: str | None = None, ttl_s: float = 30.0,
    replace_older: bool = False, proxy_url: str | None = None, api_key: str | None = None, deadline: float = DEADLINE_S,
) -> Membership:
    """Makes this process a client of the proxy, for as long as the answer's ``with`` block lasts; `run` does so by
    itself. Its ``id`` is what `episode` takes as ``client``.

    A thread says three times in `ttl_s` seconds that it is there. Once it has been silent for so long, or has left,
    what it has open is discarded. A client of the same `name` takes its place. `lane` is the kind of its tasks, and
    `revision` names the code with which it plays. With `replace_older`, what waits in the lane and was played under
    another revision is discarded.
    """
    member = Membership(
        Client(proxy_url, api_key, deadline=deadline),
        routes.Join(name or own_name("python"), revision, lane, ttl_s, replaces_older=replace_older), owns_client=True,
    )
    try:
        member.join()
    except BaseException:
        member.leave()
        raise
    return member


def membership(
    client: Any, kind: Callable[..., Any], *, program: str, name: str | None, lane: str | None,
    replace_older: bool, revision: Revision, say: Callable[[str], None] = LOG.warning,
) -> Any:
    """A membership of this `kind` for what runs `program`; `name` defaults to `own_name`."""
    body = routes.Join(own_name(program) if name is None else name, lane=lane, replaces_older=replace_older)
    return kind(client, body, revision, say)


def _new_id() -> str:
    return f"client-{uuid.uuid4().hex}"
