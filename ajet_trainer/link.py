"""The trainer's side of the wire: leases, acknowledgements, the gate and the policy, over HTTP.

A trainer has one daemon. Every request is safe to repeat. An ack, nack or extend names its batch. The gate and the
policy are set, not toggled. A lease whose answer got lost simply runs out. So whatever fails on the way (no connection,
429, 5xx) is tried again with growing pauses until `deadline_s` has passed, and only then raised. Three things are never
tried again: a connection that TLS refuses, a frame of another wire version (`WireVersion`), and an answer that is too
large. The last is not read to its end.

What the other side or the library says of a refused certificate is turned into the option that mends it. Some proxies,
ajet's among them, say nothing: asyncio's TLS hangs up on a certificate that it does not accept without telling why. So
a few hang-ups in a row on a trainer that shows a certificate count as a refusal too. A proxy that is starting again
refuses connections in between.

Next: ajet_proxy/core/trajectory/samples.py
"""

from __future__ import annotations

import copy
import json
import math
import ssl
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import quote, urlencode

import httpx

from ajet_sdk import routes
from ajet_sdk.bodies import to_json
from ajet_sdk.client import PASSING, Reply, refused
from ajet_sdk.errors import AjetError, NotFound, ProxyUnreachable, TooLarge
from ajet_sdk.frame import CONTENT_TYPE, MAX_FRAME_BYTES, VERSION, FrameError, decode_batch
from ajet_sdk.headers import HEADER_TRAINER, HEADER_WIRE
from ajet_sdk.sample import Batch
from ajet_sdk.settings import ConfigError
from ajet_sdk.sockets import watching
from ajet_trainer.config import Config

DEADLINE_S = 120.0
"""The wait for a proxy that does not answer, at the start and later."""
ANSWER_S, CONNECT_S = 30.0, 3.0
BUSY_ANSWER_S = 1.0
"""The wait for a figure that nothing depends on."""
HANG_UPS = 3
_RELEASES = "install the same ajet release on both sides"


class WireVersion(AjetError):
    """Proxy and trainer speak different versions of the batch frame."""

    status = 400
    type = "wire_version"


class TlsRefused(ProxyUnreachable):
    """One side does not accept the other's certificate, or one of them speaks no TLS."""


class Link:
    """The connection to the proxy, of the trainer of `model`. Times are in seconds; every method raises an `AjetError`
    when it has failed.

    `trainer` is who we are, for a proxy that lets one trainer of a model in. `answer_s` is how long a connection may
    take, and an answer beyond what the proxy was asked to wait. `certified` says that `tls` shows a certificate.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        key: str = "",
        trainer: routes.Attend | None = None,
        deadline_s: float = DEADLINE_S,
        answer_s: float = ANSWER_S,
        tls: ssl.SSLContext | None = None,
        certified: bool = False,
        transport: httpx.BaseTransport | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url, self._model, self._trainer = url.rstrip("/"), model or None, trainer
        headers = {"Accept": f"{CONTENT_TYPE}, application/json", HEADER_WIRE: str(VERSION)}
        if key.strip():
            headers["Authorization"] = f"Bearer {key.strip()}"
        if trainer is not None:
            headers[HEADER_TRAINER] = trainer.instance
        self._http = httpx.Client(
            base_url=self.url + routes.PREFIX,
            headers=headers,
            # the system gives up unsent data before we do: late, an old word would open a gate that was closed since
            transport=transport or httpx.HTTPTransport(verify=tls or True, socket_options=watching(0.8 * answer_s)),
            trust_env=False,
        )
        self.deadline_s = deadline_s
        self._answer_s, self._certified = answer_s, certified
        self._clock = clock
        self._sleep = sleep

    @classmethod
    def of(
        cls, config: Config, *, trainer: routes.Attend | None = None, deadline_s: float = DEADLINE_S,
        answer_s: float = ANSWER_S,
    ) -> Link:
        """The link to the daemon that `config` names; `trainer` is who we are."""
        return cls(
            config.proxy_url, model=config.model_name, key=config.key, trainer=trainer, tls=tls_context(config),
            certified=bool(config.tls_cert), deadline_s=deadline_s, answer_s=answer_s,
        )  # fmt: skip

    def within(self, deadline_s: float, answer_s: float = math.inf) -> Link:
        """The same connection, which gives up trying again after `deadline_s`; 0 tries once. An answer may take no more
        than `answer_s`."""
        other = copy.copy(self)
        other.deadline_s, other._answer_s = deadline_s, min(answer_s, self._answer_s)
        return other

    def lease(self, ask: routes.Lease) -> Batch | None:
        """The next batch, or None when nothing was ready within ``ask.wait_s``."""
        frame = self._send("/batches/lease", ask, wait_s=ask.wait_s)
        if frame is None:
            return None
        try:
            return decode_batch(frame, lenient=True)
        except FrameError as error:
            if error.code != "wire_version":
                raise
            said = f"{self.url} sends batches of another wire version than this trainer reads ({error.message})"
            raise WireVersion(f"{said}; {_RELEASES}", code="wire_version") from error

    def ack(self, batch: str, policy_version: int, filtered: Mapping[str, str] | None = None) -> None:
        """The step that trained `batch`, without the episodes `filtered`, is checkpointed. Raises `NotFound` or
        `Conflict` when the lease is gone."""
        self._send(f"/batches/{quote(batch, safe='')}/ack", routes.Ack(policy_version, filtered or {}))

    def nack(self, batch: str) -> None:
        """Gives `batch` back untrained."""
        self._send(f"/batches/{quote(batch, safe='')}/nack", routes.Empty())

    def extend(self, batch: str, lease_s: float) -> None:
        """The lease of `batch` now ends `lease_s` seconds from now."""
        self._send(f"/batches/{quote(batch, safe='')}/extend", routes.Extend(lease_s))

    def close_gate(self, reason: str, wait_s: float) -> None:
        """Returns once the proxy holds new requests for the model and no call of it is in flight."""
        self._send("/gate/close", routes.GateClose(reason, wait_s, self._model), wait_s=wait_s, deadline_s=wait_s)

    def open_gate(self, policy_version: int) -> Sequence[str]:
        """Lets requests through again, served by `policy_version`. Returns what is wrong with engines that stay
        frozen."""
        found: Sequence[str] = self._told("/gate/open", routes.GateOpen(policy_version, self._model)).get(
            "not_resumed", ()
        )
        return found

    def announce(
        self, model: str, version: int, upstreams: Sequence[str] | None = None, *, candidate_of: str | None = None
    ) -> dict[str, Any]:
        """`model` is at `version`; `upstreams`, if given, are its engines from now on. Returns what went of another
        run, as `says` does. Or it is a candidate, which has no run."""
        run = None if self._trainer is None or candidate_of is not None else self._trainer.run
        body = routes.Policy(model, version, None if upstreams is None else tuple(upstreams), run, candidate_of)
        return self._told("/policy", body)

    def says(self, word: str) -> dict[str, Any]:
        """Tells the proxy who we are and how we are, if it was said who: one of `routes.TRAINER_SAYS`. Raises
        `Conflict` with the code ``other_trainer`` where another trainer is at work. Returns how many episodes
        (``discarded``) and leases (``void``) of another run are gone with that."""
        if self._trainer is None:
            return {}
        return self._told("/trainers", replace(self._trainer, says=word))

    def direct(self, mix: routes.SetMix) -> None:
        """Says which share of the groups each lane has from now on, and how far ahead of training agents may play."""
        self._send("/mix", replace(mix, model=self._model), method="PUT")

    def let_go(self, ahead: int) -> None:
        """Nobody trains any more what agents would be held for. An `ahead` that somebody else has set stays."""
        query = f"?{urlencode({'model': self._model})}" if self._model else ""
        if self._told(f"/mix{query}").get("ahead") == ahead:
            self.direct(routes.SetMix(ahead=0))

    def knows(self, version: int, upstreams: Sequence[str] | None, *, is_open: bool = True) -> bool | None:
        """Tell whether the proxy knows the model as served at `version`, with `is_open` behind an open gate. If
        `upstreams` are given, they must be its engines. None if it does not tell at once."""
        if not (status := _glance(self)):
            return None
        told: dict[str, Any] = status.get("models", {}).get(self._model, {})
        serves = told.get("policy_version") == version and (told.get("gate") == "open" or not is_open)
        return serves and (upstreams is None or told.get("upstreams") == list(upstreams))

    def busy_s(self) -> float | None:
        """Seconds since the proxy's start in which an agent's request for the model was under way. None if the proxy
        does not tell at once."""
        found: float | None = _glance(self).get("models", {}).get(self._model, {}).get("busy_s")
        return found

    def waits_for(self) -> tuple[str, int] | None:
        """The model of the team that this one waits for, and how many updates it is behind. None if there is none, or
        the proxy does not tell at once."""
        teams: list[dict[str, Any]] = _glance(self).get("teams", [])
        model = self._model or ""
        team = next((team for team in teams if model in team), dict[str, Any]())
        slower = team.get(model, {}).get("waits_for")
        return None if slower is None else (slower, team[model]["updates"] - team[slower]["updates"])

    def played(self) -> tuple[int, int, Mapping[str, int]] | None:
        """The episodes of the model that are ready, and that are open. Where lanes have shares, those of the others are
        apart, by lane: no batch has them. None if the proxy does not tell at once."""
        told = _glance(self, f"/mix?{urlencode({'model': self._model or ''})}")
        if not told:
            return None
        lanes: Mapping[str, Mapping[str, Any]] = told["lanes"]
        counted = [one for one in lanes.values() if one["share"] or not told["shares"]]
        others = {lane: one["ready"] + one["open"] for lane, one in lanes.items() if one not in counted}
        return sum(one["ready"] for one in counted), sum(one["open"] for one in counted), others

    def evaluate(self, model: str, episodes: int, name: str) -> None:
        """So many evaluation episodes of `model` are wanted from now on, as the evaluation `name`."""
        self._send("/evaluations", routes.Evaluate(model, episodes, name))

    def evaluation(self, name: str) -> dict[str, Any]:
        """The state of the evaluation `name`. Raises `NotFound` when a later one has its place."""
        return self._told(f"/evaluations/{quote(name, safe='')}")

    def supervise(self, said: routes.Supervise) -> dict[str, Any]:
        """Tells the proxy how the runs of a supervisor are, and returns what it wants of them. Raises `Conflict` if
        another supervisor has its name."""
        return self._told("/supervisor", said, wait_s=said.wait_s)

    def meet(self) -> None:
        """Comes as the trainer of our model, to a proxy that answers and takes our key for a trainer's: it is asked
        about a batch that cannot exist."""
        try:
            self._told("/status")
            with suppress(NotFound):
                self.extend("none", 1.0)
            self.says("comes")
        except TlsRefused:
            raise
        except ProxyUnreachable as error:
            asked = "Is ajet-proxy running, and is proxy_url its address?"
            raise ProxyUnreachable(f"{error.message}. {asked}") from error
        except AjetError as error:
            raise type(error)(f"{self.url}: {error.message}", code=error.code) from error

    def check(self) -> None:
        """Raises `Conflict` if another trainer has taken our place: then nothing of ours may reach the engines."""
        self.says("beats")

    def close(self) -> None:
        self._http.close()

    def _told(self, path: str, body: Any = None, *, wait_s: float = 0.0) -> dict[str, Any]:
        """The JSON object of a good answer. Whatever else a good answer has is not of a proxy."""
        content = self._send(path, body, wait_s=wait_s) or b"{}"
        with suppress(ValueError, RecursionError):
            if isinstance(found := json.loads(content), dict):
                return found
        raise refused(Reply(200, {}, content))

    def _send(
        self, path: str, body: Any = None, *, method: str = "POST", wait_s: float = 0.0, deadline_s: float = 0.0
    ) -> bytes | None:
        """The body of a good answer to a `method` with `body`, or to a GET if that is None. None for a 204."""
        method, sent = ("GET", None) if body is None else (method, to_json(body))
        give_up = self._clock() + max(deadline_s, self.deadline_s)
        pause = 0.1
        hang_ups = 0
        timeout = httpx.Timeout(self._answer_s, connect=min(CONNECT_S, self._answer_s), read=wait_s + self._answer_s)
        while True:
            failure: AjetError
            try:
                with self._http.stream(method, path, json=sent, timeout=timeout) as answer:
                    content = content_of(answer, self.url)
            except httpx.TransportError as error:
                hung_up = self._certified and isinstance(error, (httpx.ReadError, httpx.RemoteProtocolError))
                hang_ups = hang_ups + 1 if hung_up else 0
                if (untrusted := refusal(self.url, error, hang_ups)) is not None:
                    raise untrusted from error
                failure = ProxyUnreachable(
                    f"no answer from {self.url}{routes.PREFIX}{path}: {error or type(error).__name__}"
                )
            else:
                if answer.is_success:
                    return None if answer.status_code == 204 else content
                failure = refused(Reply(answer.status_code, answer.headers, content))
                if answer.status_code not in PASSING:
                    raise failure
            wait = max(pause, failure.retry_after or 0.0)
            if self._clock() + wait > give_up:
                raise failure
            self._sleep(wait)
            pause = min(pause * 2, 5.0)


def _glance(link: Link, path: str = "/status") -> dict[str, Any]:
    """The answer of the proxy at `path`, asked once; empty without one. No figure is worth a wait, nor the end of a
    run."""
    once, found = link.within(0.0, BUSY_ANSWER_S), dict[str, Any]()
    with suppress(AjetError):
        found = once._told(path)
    return found


def content_of(answer: httpx.Response, url: str) -> bytes:
    """The body of an answer from `url`. `TooLarge` if it is more than a batch may have; the rest is then not read."""
    declared, size, pieces = int(answer.headers.get("Content-Length", "0")), 0, list[bytes]()
    stream = answer.iter_bytes()
    while max(declared, size) <= MAX_FRAME_BYTES:
        if (piece := next(stream, None)) is None:
            return b"".join(pieces)
        size += len(piece)
        pieces.append(piece)
    said = f"{url} answers with more than the {MAX_FRAME_BYTES} bytes that a batch may have; {_RELEASES}"
    raise TooLarge(said, code="frame_too_large")


def tls_context(config: Config) -> ssl.SSLContext | None:
    """The TLS of `config`; None if the proxy speaks none. Raises `ConfigError` for files that cannot be used."""
    if not config.proxy_url.startswith("https:"):
        return None
    try:
        made = httpx.create_ssl_context()
    except OSError as error:
        raise ConfigError(f"the file that SSL_CERT_FILE names cannot be used: {error}", param="SSL_CERT_FILE") from None
    try:
        if config.tls_cert:
            made.load_cert_chain(config.tls_cert, password="")  # never ask at the terminal
    except OSError as error:
        said = f"cannot use tls_cert {config.tls_cert}, which holds the certificate and its key: {error}"
        raise ConfigError(said, param="tls_cert") from None
    return made


def refusal(url: str, error: httpx.TransportError, hang_ups: int = 0) -> TlsRefused | None:
    """Reads what `error`, after so many `hang_ups` in a row, says about certificates; None if it says nothing of
    them."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    reason = (cause and cause.reason) or ""
    if isinstance(cause, ssl.SSLCertVerificationError) and "mismatch" in cause.verify_message:
        return TlsRefused(f"the certificate of {url} is for other names ({cause.verify_message}): use one in proxy_url")
    if isinstance(cause, ssl.SSLCertVerificationError):
        advice = "name the file of its CA in SSL_CERT_FILE"
        return TlsRefused(f"the certificate of {url} is not trusted ({cause.verify_message}): {advice}")
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        said = reason.partition("ALERT_")[2].replace("_", " ").lower()
        return TlsRefused(f"{url} refuses our certificate ({said}): its tls_client_ca must have signed tls_cert")
    if reason == "WRONG_VERSION_NUMBER":
        return TlsRefused(f"{url} does not speak TLS: use http://")
    if hang_ups == HANG_UPS:
        return TlsRefused(
            f"{url} closes our connections, as a proxy does with a certificate that it does not accept: "
            "its tls_client_ca must have signed tls_cert, which must be valid today (the proxy's log says more)"
        )
    return None
