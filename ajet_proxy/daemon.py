"""The composition root: the only place that constructs the daemon's parts and connects them.

Order matters. The data directory's lock comes first, because two proxies on one journal would destroy it. Then the
journal is replayed, so that the state is whole before anyone can ask for it. Then come the sockets, and last the word
to systemd. On SIGTERM the same steps run backwards. Nobody new is let in, calls in flight finish, and the journal is
closed last. Requests held at the gate are answered 503: the trainer that would open it cannot reach us by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import logging
import os
import secrets
import socket
import ssl
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from aiohttp import web

from ajet_proxy import systemd as service
from ajet_proxy.core.identity.keys import SCOPES, Claims
from ajet_proxy.core.ledger.events import CandidateAnnounced, Event, GateOpened, PolicyAnnounced
from ajet_proxy.core.ledger.quotas import Quotas
from ajet_proxy.core.ledger.retention import to_archive
from ajet_proxy.core.ledger.state import LedgerSettings
from ajet_proxy.io.capture import front
from ajet_proxy.io.capture.front import HttpFront, headers_as_sent
from ajet_proxy.io.control.forwarding import forwarded
from ajet_proxy.io.control.routes import Control
from ajet_proxy.io.control.traces import Traces, exporting
from ajet_proxy.io.engines.upstream import Engines
from ajet_proxy.io.engines.watch import EngineWatch
from ajet_proxy.io.http import keyring, tls
from ajet_proxy.io.http.aiohttp_internals import Runner
from ajet_proxy.io.http.audit import AuditLog, audited
from ajet_proxy.io.http.errors import error_middleware, refuse_foreign_pages
from ajet_proxy.io.intercept import authority
from ajet_proxy.io.intercept.authority import AuthorityError
from ajet_proxy.io.intercept.tunnels import Interception, Tunnels
from ajet_proxy.io.ledger_port.gatekeeper import Gatekeeper
from ajet_proxy.io.ledger_port.local import LocalPort
from ajet_proxy.io.ledger_port.remote import Facts
from ajet_proxy.io.runtime.clock import Clock
from ajet_proxy.io.runtime.memory_budget import MemoryBudget
from ajet_proxy.io.runtime.metrics import Metrics
from ajet_proxy.io.runtime.process import (
    allow_many_connections,
    cannot_listen,
    end,
    endings,
    log_to_stderr,
    look_for_garbage_less,
    take_short_turns,
)
from ajet_proxy.io.storage.compactor import Compactor
from ajet_proxy.io.storage.limits import DaemonLimits, resident_bytes
from ajet_proxy.io.storage.store import Store
from ajet_proxy.io.workers.processes import Workers
from ajet_proxy.own_address import Address
from ajet_proxy.settings import Config, refuse_own
from ajet_sdk.errors import NotReady
from ajet_sdk.settings import ConfigError

logger = logging.getLogger(__name__)

TICK_S = 0.5
"""A client that is gone has its open episodes discarded within a second."""
STOP_MARGIN_S = 5.0
START_BYTES = 64 << 10
"""The least room that a start needs on the disk."""


class App:
    """The running daemon. `start` returns when it accepts requests; `stop` when everything is on disk."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.name = f"ajet_proxy-{secrets.token_hex(8)}"
        """A name that no other daemon has; its workers have it too."""
        self.url = ""
        self.interception: Interception | None = None
        self.listening: list[Address] = [address for address in config.listening if address[1]]
        """Where it listens, a port that was free included once it does."""
        self.ticker: asyncio.Task[None] | None = None
        self._runners: list[Runner] = []
        self.workers: Workers | None = None
        self._handed: socket.socket | None = None
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Bring everything up; an error leaves nothing behind."""
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def stop(self) -> None:
        """Take everything down in reverse order, letting calls in flight finish for up to ``drain_s``."""
        await self._stack.aclose()

    async def _start(self) -> None:
        config = self.config
        self._handed = service.handed_socket(os.environ, address=config.address)
        if self._handed is not None and config.workers > 1:
            raise ConfigError("worker processes listen for themselves: leave the socket unit out, or --workers 1")
        if self._handed is not None and service.hears_ipv4(self._handed):
            self.listening.append(("0.0.0.0", config.address[1]))
            refuse_own(config, self.listening)
        self._data_dir = data_dir = open_data_dir(config)
        refuse_unwritable(data_dir)
        self._clock, self._metrics = clock, metrics = Clock(), Metrics()
        self._budget = budget = MemoryBudget(metrics)
        self._store = store = await self._open_store()
        state = store.state
        waited = functools.partial(metrics.observe, "ajet_gate_wait_seconds")
        engines = Engines(config.upstreams, state.weights.upstreams, state.weights.models)
        is_open = functools.partial(engines.passes, state.gates.shut)
        self._gate = gate = Gatekeeper(is_open=is_open, hold_s=config.gate_hold_s, waited=waited)
        self._keys = keys = keyring.keys(
            data_dir, admin_secret=config.admin_secret, traffic=config.traffic
        )
        await self._withdraw(keys.ring.tenants)
        looking = EngineWatch(engines, store.trouble, shut=state.gates.shut, data_dir=data_dir, key=config.upstream_key)
        ledger_port = LocalPort(
            store=store, gate=gate, engines=engines, clock=clock, metrics=metrics, watch=looking,
            pauses=config.gate_mode == "pause",
        )
        self._stack.callback(ledger_port.close)
        make_front = functools.partial(
            HttpFront, config, self.name, ledger_port=ledger_port, engines=engines, keys=keys, clock=clock,
            metrics=metrics, budget=budget,
        )
        log = AuditLog(data_dir)
        self.workers = workers = self._crew(ledger_port, log) if config.workers > 1 else None
        self._look_after(looking)
        audit = functools.partial(audited, log.write, keys=keys, now=clock.now)
        if config.intercept:
            await self._intercept(make_front, audit)
        else:
            self._stack.push_async_callback(self._drain)
        control = Control(
            store=store, keys=keys, gate=gate, engines=engines, clock=clock, metrics=metrics, config=config,
            interception=self.interception, workers=workers, budget=budget, listening=self.listening,
        )
        secured, around = tls.listening(config), audit(headers=headers_as_sent)
        if workers is None:
            application = front.application(config, keys, around)
            control.add_routes(application)
            make_front().add_routes(application)
            host, port = await self._listen(application, config.address, secured)
        else:
            application = front.application(config, keys, forwarded, around)
            control.add_routes(application)
            host, port = await self._listen_with(workers, application)
        self._stack.callback(gate.stop)
        self._stack.callback(control.stop)
        scheme = "http" if config.tls_cert is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _open_store(self) -> Store:
        """The ledger as it was. What was in flight when it was left is lost."""
        provider = exporting(os.environ)
        traces = Traces(provider) if provider is not None else None
        if traces is not None:
            self._stack.push_async_callback(traces.close)
        config = self.config
        settings = LedgerSettings(
            idle_timeout=config.idle_timeout, wall_timeout=config.wall_timeout, merge_policy=config.merge_policy,
            group_size=config.group_size, member_wait=config.member_wait, traffic_sample=config.traffic_sample,
            traffic_holdout=config.traffic_holdout, traffic_idle=config.traffic_idle,
            traffic_backlog=config.traffic_backlog,
        )
        store = Store.open(self._data_dir, settings, metrics=self._metrics, patience_s=config.drain_s)
        self._stack.push_async_callback(store.close)
        if traces is not None:
            traces.follow(store)
        await store.commit(store.commands.restarted(self._clock.now()))
        return store

    def _look_after(self, looking: EngineWatch) -> None:
        """Start what is done at regular times: the tick, with limits, compaction and the watch on keys, and `looking`
        at engines."""
        config = self.config
        limits = self._limit()
        compactor = Compactor(
            self._store, self._data_dir, metrics=self._metrics, now=self._clock.now, max_age=config.archive_max_age,
            max_bytes=config.archive_max_bytes,
        )
        self._stack.push_async_callback(compactor.stop)
        watch = keyring.Watch(self._data_dir, self._keys)
        self.ticker = asyncio.get_running_loop().create_task(self._tick(limits, compactor, watch))
        self._stack.push_async_callback(end, self.ticker)
        self._stack.push_async_callback(end, asyncio.get_running_loop().create_task(looking.run()))

    async def _listen_with(self, workers: Workers, application: web.Application) -> tuple[str, int]:
        """Have `workers` listen, and bring `application` the requests that are for it."""
        self._stack.push_async_callback(workers.stop)
        runner = await self._runner(application)
        await web.SockSite(runner, workers.control_socket(), backlog=front.BACKLOG).start()
        host, port = await workers.start(self.config.address)
        self.listening.append((self.config.address[0], port))
        return host, port

    async def _listen(
        self, application: web.Application, address: tuple[str, int], tls: ssl.SSLContext | None = None
    ) -> tuple[str, int]:
        """Serve `application` at `address` and return the real one."""
        runner = await self._runner(application)
        if self._handed is not None and address == self.config.address:
            await web.SockSite(runner, self._handed, ssl_context=tls, backlog=front.BACKLOG).start()
        else:
            try:
                await web.TCPSite(runner, *address, ssl_context=tls, backlog=front.BACKLOG).start()
            except OSError as error:
                raise cannot_listen(*address, error) from error
        host, port, *_ = runner.addresses[0]
        self.listening.append((address[0], port))
        return host, port

    async def _runner(self, application: web.Application) -> Runner:
        runner = front.runner(self.config, application)
        self._runners.append(runner)
        await runner.setup()
        return runner

    def _crew(self, ledger_port: LocalPort, log: AuditLog) -> Workers:
        """The worker processes. They are told what the ledger says of weights and engines whenever that changes."""
        config, state, keys = self.config, self._store.state, self._keys
        settings = {field.name: getattr(config, field.name) for field in dataclasses.fields(config)}

        def facts() -> Facts:
            known = state.weights
            serving = known.default_version, known.policy_updates, known.merge_policy
            return Facts(dict(known.served), dict(known.candidates), *serving, keys.ring, self.name)

        def heard(events: Sequence[Event]) -> None:
            if any(isinstance(event, PolicyAnnounced | CandidateAnnounced | GateOpened) for event in events):
                workers.send_facts()

        workers = Workers(
            config.workers, settings | {"tenants": ()}, ledger_port=ledger_port, facts=facts, audit=log.write,
            metrics=self._metrics, data_dir=self._data_dir, drain_s=config.drain_s + STOP_MARGIN_S,
        )
        self._store.listen(heard)
        return workers

    def _limit(self) -> DaemonLimits:
        """Hold the store, and the memory of bodies, to what the operator allows."""
        config, store, metrics = self.config, self._store, self._metrics

        def measured(left: int) -> None:
            self._budget.look(left if self.workers is None else self.workers.share(left))

        def resident() -> int:
            pids = () if self.workers is None else self.workers.pids().values()
            return sum(resident_bytes(pid) for pid in ("self", *map(str, pids)))

        store.limits = limits = DaemonLimits(
            self._data_dir, max_disk=config.max_disk, max_memory=config.max_memory, metrics=metrics,
            resident=resident, measured=measured,
        )
        if config.tenants:
            store.quotas = Quotas(
                dict(config.tenants), store.state,
                lambda refusal: metrics.inc("ajet_refused_total", reason=refusal.code),
            )
        return limits

    async def _tick(self, limits: DaemonLimits, compactor: Compactor, watch: keyring.Watch) -> None:
        """Let timeouts and leases run out, and let what is over leave memory. Look for what an operator should know,
        and tell systemd's watchdog that the loop turns. If the loop stood still, nothing runs out before the next tick:
        what came meanwhile is read first."""
        store, clock, gate = self._store, self._clock, self._gate
        loop, on, stood_still = asyncio.get_running_loop(), set[str](), False
        revoked: Mapping[str, float] = {}
        while True:
            due = loop.time() + TICK_S
            await asyncio.sleep(TICK_S)
            stood_still = not stood_still and loop.time() > due + TICK_S
            with contextlib.suppress(NotReady):  # the disk may refuse between the question and the post: next time then
                tight, began = limits.tight, loop.time()
                while not stood_still and store.healthy and (
                    events := store.commands.expire(clock.now(), gate.held, tight=tight)
                ):
                    tight = False
                    store.post(events)
                    await asyncio.sleep(loop.time() - began)  # everybody else has as much of the time
                    began = loop.time()
                if revoked != (tenants := self._keys.ring.tenants) and store.healthy:
                    await self._withdraw(tenants)
                    revoked = tenants
                if store.healthy:
                    store.post(to_archive(store.state, clock.now(), self.config.archive_max_age))
            store.trouble.pop("judge", None)
            if store.state.episodes.awaiting:
                store.trouble |= store.commands.judging.alerts(clock.now())
            on = log_alerts(store.alerts(), on)
            limits.measure()
            compactor.tick()
            watch.tick()
            if self.workers is not None:
                self.workers.send_facts()
            service.notify("WATCHDOG=1", os.environ)

    async def _withdraw(self, tenants: Mapping[str, float]) -> None:
        """Learn nothing from what the keys of `tenants` have opened that were issued by those times."""
        self._store.presence.void = tenants
        while events := self._store.commands.judging.revoked(self._clock.now()):
            self._store.post(events)
            await asyncio.sleep(0)

    async def _drain(self) -> None:
        """Stop listening and let requests finish, on all listeners at once."""
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))

    async def _intercept(self, make_front: Callable[..., HttpFront], audit: Callable[..., Any]) -> None:
        """Start the interceptor, and the listener that it relays to: the front alone, without control routes."""
        from ajet_proxy.io.intercept.interceptor import Interceptor

        config = self.config
        tunnels = Tunnels(
            config.intercept_host, authenticate=lambda key: self._keys.authenticate(key, self._clock.now()),
            needs_key=config.intercept_needs_key,
        )
        guards = [audit(headers=tunnels.headers), error_middleware, refuse_foreign_pages(None), tunnels.guard()]
        application = web.Application(middlewares=guards)
        make_front(headers=tunnels.headers).add_routes(application)
        interceptor = Interceptor(
            directory=self._data_dir / "ca", modes=config.modes, tunnels=tunnels, metrics=self._metrics
        )
        self._stack.push_async_callback(interceptor.close)
        self._stack.push_async_callback(self._drain)
        relayed = await self._listen(application, ("127.0.0.1", 0))
        self._stack.push_async_callback(interceptor.stop)
        try:
            await interceptor.start(relayed)
        except AuthorityError as error:
            raise ConfigError(str(error)) from error
        self.listening += [on.address for on in interceptor.listening if on.address is not None]
        self.interception = Interception(
            hosts=tuple(sorted(tunnels.hosts)), listening=interceptor.listening,
            certificate=authority.certificate(interceptor.directory),
        )


def log_alerts(alerts: Mapping[str, str], on: set[str]) -> set[str]:
    """Log each of `alerts` when it begins, and each that was `on` when it is over. Returns which are on now."""
    for name in alerts.keys() - on:
        logger.warning("alert: %s", alerts[name])
    for name in on - alerts.keys():
        logger.info("alert over: %s", name)
    return set(alerts)


def main(config: Config, announce: Callable[[str], None]) -> None:
    """Run the daemon until one of `endings`; `announce` gets the URL once it accepts requests."""
    log_to_stderr()
    allow_many_connections()
    look_for_garbage_less()
    take_short_turns()
    asyncio.run(_run(App(config), announce))


async def _run(app: App, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in endings():
        loop.add_signal_handler(number, on_signal)
    await app.start()
    assert app.ticker is not None
    app.ticker.add_done_callback(lambda _: stop.set())
    announce(app.url)
    service.notify("READY=1", os.environ)
    await stop.wait()
    service.notify_stopping(app.config.drain_s, os.environ)
    failed = app.ticker.exception() if app.ticker.done() else None
    await app.stop()
    if failed is not None:
        raise failed


def open_data_dir(config: Config) -> Path:
    """The data directory, made for this user alone if it was not there."""
    path = Path(config.data_dir)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        advice = "make it for this user (mkdir -m 700, chown), or choose another --data-dir"
        raise ConfigError(f"cannot make data_dir {path}: {error.strerror}: {advice}") from error
    return path


def refuse_unwritable(data_dir: Path) -> None:
    """`OSError`, with what to do, if a start could write nothing there."""
    try:
        with tempfile.TemporaryFile(dir=data_dir) as probe:
            probe.write(bytes(START_BYTES))
    except OSError as error:
        advice = "free some space, make it writable for this user (chown, remount), or choose another --data-dir"
        raise OSError(error.errno, f"cannot write to data_dir {data_dir}: {error.strerror}: {advice}") from error


def issue_key(
    config: Config, scope: str, tenant: str, ttl_s: float, model: str = "", lanes: tuple[str, ...] = (),
    always: bool = False,
) -> str:
    """A signed key that the proxy on this data directory accepts for `ttl_s` seconds."""
    chosen, now = SCOPES[SCOPES.index(scope)], Clock().now()
    claims = Claims(chosen, tenant, None, now + ttl_s, now, model, lanes, always)
    return keyring.keys(open_data_dir(config)).issue(claims)
