"""The trainer's side of the wire: leases, acknowledgements, the gate and the policy, over HTTP.

Every request is safe to repeat: an ack, nack or extend names its batch, the gate and the policy are set and not
toggled, and a lease whose answer got lost simply runs out. So whatever fails on the way (no connection, 429, 5xx) is
tried again with growing pauses until `deadline_s` has passed, and only then raised. Three things are never tried again:
a connection that TLS refuses (`ajet_trainer.tls`), a frame of another wire version, which raises `WireVersion`, and an
answer that is too large, which is not read to its end.

Next: ajet_proxy/core/trajectory/samples.py
"""

from __future__ import annotations

import copy
import json
import socket
import ssl
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import quote

import httpx

from ajet_sdk import routes
from ajet_sdk.errors import AjetError, NotFound, ProxyUnreachable, TooLarge, from_body
from ajet_sdk.frame import CONTENT_TYPE, MAX_FRAME_BYTES, VERSION, FrameError, decode_batch
from ajet_sdk.protocol import PASSING
from ajet_sdk.sample import Batch
from ajet_trainer.tls import Judge

ANSWER_S, CONNECT_S = 30.0, 3.0
_RELEASES = "install the same ajet release on both sides"


class WireVersion(AjetError):
    """Proxy and trainer speak different versions of the batch frame."""

    status = 400
    type = "wire_version"


class Link:
    """A connection to one proxy. Times are in seconds; every method raises an `AjetError` when it fails for good.

    `answer_s` is how long a connection may take, and an answer beyond what the proxy was asked to wait. `certified`
    says that `tls` shows a certificate.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str = "",
        deadline_s: float = 120.0,
        answer_s: float = ANSWER_S,
        tls: ssl.SSLContext | None = None,
        certified: bool = False,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url.rstrip("/")
        headers = {"Accept": f"{CONTENT_TYPE}, application/json", routes.HEADER_WIRE: f"{VERSION}, {VERSION - 1}"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.Client(
            base_url=self.url + routes.PREFIX,
            headers=headers,
            transport=transport or _transport(tls, answer_s),
            trust_env=False,
        )
        self.deadline_s = deadline_s
        self._answer_s, self._certified = answer_s, certified
        self._clock = clock
        self._sleep = sleep

    def within(self, deadline_s: float) -> Link:
        """The same connection, which gives up trying again after `deadline_s`; 0 tries once."""
        other = copy.copy(self)
        other.deadline_s = deadline_s
        return other

    def lease(self, ask: routes.Lease) -> Batch | None:
        """The next batch, or None when nothing was ready within ``ask.wait_s``."""
        frame = self._post("/batches/lease", ask, wait_s=ask.wait_s)
        if frame is None:
            return None
        try:
            return decode_batch(frame)
        except FrameError as error:
            if error.code == "wire_version":
                raise WireVersion(
                    f"{self.url} sends batches of another wire version than this trainer reads ({error.message}); "
                    + _RELEASES,
                    code="wire_version",
                ) from error
            raise

    def ack(self, batch: str, policy_version: int, filtered: Mapping[str, str] | None = None) -> None:
        """The step that trained `batch`, without the episodes `filtered`, is checkpointed. Raises `NotFound` or
        `Conflict` when the lease is gone."""
        self._post(f"/batches/{quote(batch, safe='')}/ack", routes.Ack(policy_version, filtered or {}))

    def nack(self, batch: str) -> None:
        """Gives `batch` back untrained."""
        self._post(f"/batches/{quote(batch, safe='')}/nack", routes.Empty())

    def extend(self, batch: str, lease_s: float) -> None:
        """The lease of `batch` now ends `lease_s` seconds from now."""
        self._post(f"/batches/{quote(batch, safe='')}/extend", routes.Extend(lease_s))

    def close_gate(self, reason: str, wait_s: float) -> None:
        """Returns once the proxy holds new requests and no call is in flight any more."""
        self._post("/gate/close", routes.GateClose(reason, wait_s), wait_s=wait_s, deadline_s=wait_s)

    def open_gate(self, policy_version: int) -> None:
        """Lets requests through again, served by `policy_version`."""
        self._post("/gate/open", routes.GateOpen(policy_version))

    def announce(self, model: str, version: int, upstreams: Sequence[str] | None = None) -> None:
        """`model` is at `version`; `upstreams`, if given, are its engines from now on."""
        self._post("/policy", routes.Policy(model, version, None if upstreams is None else tuple(upstreams)))

    def meet(self) -> None:
        """The proxy answers, and lets us do what a trainer may: it is asked about a batch that there cannot be."""
        self._send("GET", "/status", None)
        with suppress(NotFound):
            self.extend("none", 1.0)

    def close(self) -> None:
        self._http.close()

    def _post(self, path: str, body: Any, *, wait_s: float = 0.0, deadline_s: float = 0.0) -> bytes | None:
        return self._send("POST", path, routes.to_json(body), wait_s, deadline_s)

    def _send(self, method: str, path: str, body: Any, wait_s: float = 0.0, deadline_s: float = 0.0) -> bytes | None:
        """The body of a good answer; None for one that has none."""
        give_up = self._clock() + max(deadline_s, self.deadline_s)
        pause = 0.1
        judge = Judge(self.url, self._certified)
        timeout = httpx.Timeout(self._answer_s, connect=min(CONNECT_S, self._answer_s), read=wait_s + self._answer_s)
        while True:
            failure: AjetError
            try:
                with self._http.stream(method, path, json=body, timeout=timeout) as answer:
                    content = self._read(answer)
            except httpx.TransportError as error:
                refused = judge.refused(error)
                if refused is not None:
                    raise refused from error
                failure = ProxyUnreachable(
                    f"no answer from {self.url}{routes.PREFIX}{path}: {error or type(error).__name__}"
                )
            else:
                if answer.is_success:
                    return None if answer.status_code == 204 else content
                failure = from_body(answer.status_code, _json(content), retry_after=_retry_after(answer))
                if answer.status_code not in PASSING:
                    raise failure
            wait = max(pause, failure.retry_after or 0.0)
            if self._clock() + wait > give_up:
                raise failure
            self._sleep(wait)
            pause = min(pause * 2, 5.0)

    def _read(self, answer: httpx.Response) -> bytes:
        """The body, no more of which is read than a batch may have."""
        pieces, size = list[bytes](), 0
        self._check(int(answer.headers.get("Content-Length", "0")))
        for piece in answer.iter_bytes():
            size += len(piece)
            self._check(size)
            pieces.append(piece)
        return b"".join(pieces)

    def _check(self, size: int) -> None:
        if size > MAX_FRAME_BYTES:
            raise TooLarge(
                f"{self.url} answers with more than the {MAX_FRAME_BYTES} bytes that a batch may have; {_RELEASES}",
                code="frame_too_large",
            )


def _transport(tls: ssl.SSLContext | None, answer_s: float) -> httpx.HTTPTransport:
    """Connections whose system gives up what it could not send before we do: after an outage of the network it would
    deliver it minutes late, and an old word would open a gate that was closed since."""
    options = [(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(800 * answer_s))] if sys.platform == "linux" else []
    return httpx.HTTPTransport(verify=tls or True, socket_options=options)


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode(errors="replace")


def _retry_after(answer: httpx.Response) -> float | None:
    try:
        return float(answer.headers.get("Retry-After", ""))
    except ValueError:
        return None
