"""The composition root: the only place that constructs the daemon's parts and connects them.

Order matters. The data directory's lock comes first, because two proxies on one journal would destroy it; then the
replay of the journal, so that the state is whole before anyone can ask for it; then the sockets; then the word to
systemd. On SIGTERM the same steps run backwards: nobody new is let in, requests held at the gate are answered 503 (the
trainer that would open it cannot reach us any more), calls in flight finish, and the journal is closed last.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import signal
import ssl
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from aiohttp import web

from ajet_proxy import service
from ajet_proxy.config import Config, ConfigError
from ajet_proxy.core.keys import SCOPES, Claims, Keys
from ajet_proxy.core.ledger import LedgerSettings
from ajet_proxy.core.quota import Quotas
from ajet_proxy.core.retention import to_archive
from ajet_proxy.io import authority, client_certificates, keyring
from ajet_proxy.io.alarm import Alarm
from ajet_proxy.io.audit import AuditLog, audited
from ajet_proxy.io.authority import AuthorityError
from ajet_proxy.io.clock import Clock
from ajet_proxy.io.compactor import Compactor
from ajet_proxy.io.control import Control, ControlSettings
from ajet_proxy.io.desk import LedgerDesk
from ajet_proxy.io.engine_control import EngineControl
from ajet_proxy.io.engines import Engines
from ajet_proxy.io.errors import error_middleware, http_logger, refuse_foreign_pages
from ajet_proxy.io.gatekeeper import Gatekeeper
from ajet_proxy.io.http_front import FrontSettings, HttpFront, headers_as_sent
from ajet_proxy.io.limits import DaemonLimits, TenantLimits
from ajet_proxy.io.metrics import Metrics
from ajet_proxy.io.server import Runner
from ajet_proxy.io.store import Store
from ajet_proxy.io.traces import Traces, exporting
from ajet_proxy.io.tunnels import Interception, Tunnels
from ajet_sdk.errors import NotReady

logger = logging.getLogger(__name__)

TICK_S = 1.0
BACKLOG = 4096
STOP_MARGIN_S = 5.0


class App:
    """The running daemon. `start` returns when it accepts requests; `stop` when everything is on disk."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.url = ""
        self.interception: Interception | None = None
        self.ticker: asyncio.Task[None] | None = None
        self._runners: list[Runner] = []
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
        data_dir = open_data_dir(config)
        clock, metrics = Clock(), Metrics()
        traces = Traces(exporting()) if config.traces else None
        if traces is not None:
            self._stack.push_async_callback(traces.close)
        store = Store.open(data_dir, _ledger_settings(config), metrics=metrics)
        self._stack.push_async_callback(store.close)
        if traces is not None:
            traces.follow(store)
        await store.commit(store.ledger.restarted(clock.now()))
        ledger = store.ledger
        gate = Gatekeeper(is_open=lambda: ledger.gate == "open", hold_s=config.gate_hold_s)
        engines = Engines(config.upstreams, ledger.upstreams, ledger.models)
        keys = keyring.keys(data_dir, admin_secret=config.admin_secret)
        desk = LedgerDesk(store=store, gate=gate, engines=engines, clock=clock, metrics=metrics)
        front = functools.partial(
            HttpFront, desk=desk, engines=engines, keys=keys, clock=clock, metrics=metrics,
            settings=_front_settings(config),
        )
        limits = _limit(store, data_dir, config, metrics)
        compactor = Compactor(
            store, data_dir, metrics=metrics, now=clock.now, max_age=config.archive_max_age,
            max_bytes=config.archive_max_bytes,
        )
        self._stack.push_async_callback(compactor.stop)
        audit = functools.partial(
            audited, AuditLog(data_dir, max_bytes=config.max_audit), keys=keys, now=clock.now
        )
        watch = keyring.Watch(data_dir, keys)
        self.ticker = asyncio.get_running_loop().create_task(_tick(store, clock, limits, compactor, watch))
        self._stack.push_async_callback(_end, self.ticker)
        if config.intercept:
            tunnels = Tunnels(
                config.intercept_host, authenticate=lambda key: keys.authenticate(key, clock.now()),
                needs_key=config.intercept_needs_key,
            )
            await self._intercept(
                front(headers=tunnels.headers), data_dir, tunnels, metrics, audit(headers=tunnels.headers)
            )
        else:
            self._stack.push_async_callback(self._drain)
        control = Control(
            store=store, keys=keys, gate=gate, engines=engines, clock=clock, metrics=metrics,
            engine_control=EngineControl(key=config.upstream_key), interception=self.interception,
            settings=_control_settings(config),
        )
        application = _application(config, keys, _own_names(config), audit(headers=headers_as_sent))
        control.add_routes(application)
        front().add_routes(application)
        host, port = await self._listen(application, config.address, _tls(config))
        self._stack.callback(gate.stop)
        self._stack.callback(control.stop)
        scheme = "http" if config.tls_cert is None else "https"
        self.url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"

    async def _listen(
        self, application: web.Application, address: tuple[str, int], tls: ssl.SSLContext | None = None
    ) -> tuple[str, int]:
        """Serve `application` at `address` and return the real one."""
        config = self.config
        runner = Runner(
            application, patience_s=config.client_timeout, handler_cancellation=True, access_log=None,
            shutdown_timeout=config.drain_s,
            max_line_size=config.max_header, max_field_size=config.max_header, keepalive_timeout=75.0,
            logger=http_logger,
        )
        self._runners.append(runner)
        await runner.setup()
        await web.TCPSite(runner, *address, ssl_context=tls, backlog=BACKLOG).start()
        host, port, *_ = runner.addresses[0]
        return host, port

    async def _drain(self) -> None:
        """Stop listening and let requests finish, on all listeners at once."""
        await asyncio.gather(*(runner.cleanup() for runner in self._runners))

    async def _intercept(
        self, front: HttpFront, data_dir: Path, tunnels: Tunnels, metrics: Metrics, audit: Any
    ) -> None:
        """The interceptor, and the listener that it relays to: the front alone, without control routes."""
        from ajet_proxy.io.intercept import Interceptor

        guards = [audit, error_middleware, refuse_foreign_pages(None), tunnels.guard()]
        application = web.Application(middlewares=guards, client_max_size=self.config.max_body)
        front.add_routes(application)
        interceptor = Interceptor(
            directory=data_dir / "ca", modes=self.config.modes, tunnels=tunnels, metrics=metrics
        )
        self._stack.push_async_callback(interceptor.close)
        self._stack.push_async_callback(self._drain)
        relayed = await self._listen(application, ("127.0.0.1", 0))
        self._stack.push_async_callback(interceptor.stop)
        try:
            await interceptor.start(relayed)
        except AuthorityError as error:
            raise ConfigError(str(error)) from error
        self.interception = Interception(
            hosts=tuple(sorted(tunnels.hosts)), listening=interceptor.listening,
            certificate=authority.certificate(interceptor.directory),
        )


def main(config: Config, announce: Callable[[str], None]) -> None:
    """Run the daemon until SIGTERM or SIGINT; `announce` gets the URL once it accepts requests."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logging.getLogger("ajet_proxy").setLevel(logging.INFO)
    allow_many_connections()
    asyncio.run(_run(App(config), announce))


async def _run(app: App, announce: Callable[[str], None]) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal() -> None:
        if stop.is_set():
            os._exit(1)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    await app.start()
    assert app.ticker is not None
    app.ticker.add_done_callback(lambda _: stop.set())
    announce(app.url)
    service.notify("READY=1", os.environ)
    await stop.wait()
    service.notify("STOPPING=1", os.environ)
    failed = app.ticker.exception() if app.ticker.done() else None
    await app.stop()
    if failed is not None:
        raise failed


async def _tick(
    store: Store, clock: Clock, limits: DaemonLimits, compactor: Compactor, watch: keyring.Watch
) -> None:
    """Let timeouts and leases run out and what is over leave memory, look for what an operator should know, and tell
    systemd's watchdog that the loop turns."""
    alarm = Alarm()
    while True:
        await asyncio.sleep(TICK_S)
        with contextlib.suppress(NotReady):  # the disk may refuse between the question and the post: then next time
            if store.healthy:
                store.post(store.ledger.expire(clock.now()))
                store.post(to_archive(store.ledger, clock.now()))
        alarm.look(store.ledger.alerts())
        limits.measure()
        compactor.tick()
        watch.tick()
        service.notify("WATCHDOG=1", os.environ)


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def allow_many_connections() -> None:
    """A held agent is an open file, and a thousand agents are usual: take as many as the machine lets us have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def open_data_dir(config: Config) -> Path:
    """The data directory, made for this user alone if it was not there."""
    path = Path(config.data_dir)
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make data_dir {path}: {error.strerror}") from error
    return path


def issue_key(config: Config, scope: str, tenant: str, ttl_s: float) -> str:
    """A signed key that the proxy on this data directory accepts for `ttl_s` seconds."""
    chosen, now = SCOPES[SCOPES.index(scope)], Clock().now()
    return keyring.keys(open_data_dir(config)).issue(Claims(chosen, tenant, None, now + ttl_s, now))


def _limit(store: Store, data_dir: Path, config: Config, metrics: Metrics) -> DaemonLimits:
    """Hold `store` to what the operator allows."""
    store.limits = limits = DaemonLimits(
        data_dir, max_disk=config.max_disk, max_memory=config.max_memory, metrics=metrics
    )
    if config.tenants:
        store.quotas = TenantLimits(Quotas(dict(config.tenants), store.ledger), metrics)
    return limits


def _own_names(config: Config) -> tuple[str, ...] | None:
    """What callers may call us besides our address; a trusted front answers for the names it has."""
    if config.trusted_front:
        return None
    name = urlsplit(config.public_url or "").hostname
    return () if name is None else (name,)


def _application(config: Config, keys: Keys, names: tuple[str, ...] | None, audit: Any) -> web.Application:
    guards = [refuse_foreign_pages(names)] if keys.is_open else []
    return web.Application(middlewares=[audit, error_middleware, *guards], client_max_size=config.max_body)


def _tls(config: Config) -> ssl.SSLContext | None:
    if config.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"cannot use tls_cert {config.tls_cert} with tls_key {config.tls_key}: {error}") from error
    if config.tls_client_ca is not None:
        try:
            client_certificates.ask_clients(context, config.tls_client_ca)
        except OSError as error:
            raise ConfigError(f"cannot use tls_client_ca {config.tls_client_ca}: {error}") from error
    return context


def _ledger_settings(config: Config) -> LedgerSettings:
    return LedgerSettings(
        idle_timeout=config.idle_timeout, wall_timeout=config.wall_timeout, merge_policy=config.merge_policy,
        group_size=config.group_size, drift_limit=config.drift_limit,
    )


def _front_settings(config: Config) -> FrontSettings:
    return FrontSettings(
        allow_routes=config.allow_route, upstream_key=config.upstream_key, connect_timeout=config.connect_timeout,
        read_timeout=config.read_timeout, keep_alive=config.keep_alive_s, max_body=config.max_body,
        continuity=config.continuity == "auto", client_timeout=config.client_timeout,
    )


def _control_settings(config: Config) -> ControlSettings:
    return ControlSettings(
        public_url=config.public_url, trusted_front=config.trusted_front, key_ttl_s=config.key_ttl_s,
        pauses=config.gate_mode == "pause", max_body=config.max_body, client_timeout=config.client_timeout,
        client_certificates=config.tls_client_ca is not None,
    )
