"""The daemon's one configuration object: every setting, and which values go together.

Both programs read settings in the same way: `ajet_sdk.settings`. What nobody would change is not a setting, but a
constant of the code that keeps to it; docs/reference/limits.md lists these.
"""

from __future__ import annotations

import ipaddress
import os
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ajet_proxy.own_address import Address, leads_here
from ajet_sdk.address import is_key, server
from ajet_sdk.play.guardian import MARK
from ajet_sdk.settings import COMMAND_LINE, ENVIRONMENT, FILE, ConfigError, Settings, option, read_toml

if TYPE_CHECKING:
    from ajet_proxy.core.ledger.quotas import Quota

NO_KEY = "AJET_UPSTREAM_KEY holds characters that no key has: the end of a line, perhaps"
MIN_SECRET = 16
MAX_WORKERS = 64
OF_WORKERS = (3, 12)
"""The first Python whose tasks can begin at once, as answers to a worker do (``eager_start``)."""
OF_AGENTS = ("AJET_PROXY_URL", "AJET_EPISODE", "AJET_TASK", "AJET_TASK_JSON", "AJET_API_KEY", "AJET_REWARD_FILE")
"""Variables of the agent side, which may stand in the daemon's environment and are none of its own."""
OTHERS = ("AJET_TRAINER_", MARK)
"""The beginnings of variables of the trainer, and of `ajet run`, whose programs may start a daemon."""
HOST = re.compile(r"[\w-]+(\.[\w-]+)*\.?|[0-9a-f:]+:[0-9a-f.]*", re.ASCII | re.IGNORECASE)
"""A name or an address."""
LISTENING_MODES = ("regular", "socks5", "transparent")


@dataclass(frozen=True, slots=True)
class Mode:
    """A way of interception. The kind ``local`` has no address; it catches ``programs``, separated by commas."""

    kind: str
    address: tuple[str, int] | None
    programs: str = ""


@dataclass(frozen=True, slots=True)
class Config:
    """Everything that can be set. Times are in seconds, sizes in bytes."""

    upstream: tuple[str, ...] = option(
        (), "Base URL of an inference engine, for one model if NAME is given; repeatable. Without one, requests wait "
        "until a trainer announces its engines.", metavar="[NAME=]URL",
    )
    listen: str = option("127.0.0.1:8484", "Address of the HTTP front; port 0 takes a free one.", metavar="HOST:PORT")
    workers: int = option(
        1, "Processes that take connections on that address, for more than one core; with more than one, the ledger "
        "has a process of its own.", most=MAX_WORKERS,
    )
    intercept: tuple[str, ...] = option(
        (), "Also catch programs that hard-code a provider's address: as their HTTPS proxy at HOST:PORT, as "
        "socks5@HOST:PORT, as transparent@HOST:PORT behind a redirecting firewall, or as local:PROGRAM; repeatable.",
        metavar="[KIND@]HOST:PORT",
    )
    intercept_host: tuple[str, ...] = option(
        ("api.openai.com", "api.anthropic.com"), "Host whose TLS --intercept ends; repeatable. All others pass "
        "through unread.", metavar="HOST",
    )
    data_dir: str = option(
        "", "Journal, keys and CA; by default the user's or systemd's state directory.", metavar="DIR"
    )
    admin_secret: str | None = option(
        None, "The admin key, for a daemon that others can reach. From the environment only.", secret=True,
        places=(ENVIRONMENT,),
    )
    upstream_key: str | None = option(
        None, "API key for engines that ask for one. From the environment only.", secret=True, places=(ENVIRONMENT,)
    )
    tls_cert: str | None = option(None, "Certificate chain (PEM); the front then speaks HTTPS.", metavar="FILE")
    tls_key: str | None = option(None, "Private key of the certificate (PEM).", metavar="FILE")
    tls_client_ca: str | None = option(
        None, "CA (PEM) of client certificates: a trainer then needs one in addition to its key; agents need none.",
        metavar="FILE",
    )
    trusted_front: bool = option(False, "A reverse proxy of yours terminates TLS and is the only one to reach us.")
    insecure: bool = option(False, "Serve a non-loopback address without TLS.")
    public_url: str | None = option(
        None, "Base URL under which agents reach the proxy; by default the address they asked at.", metavar="URL"
    )
    allow_route: tuple[str, ...] = option(
        (), "Further engine route that agents may call, such as /v2/rerank; repeatable. None that changes the engine.",
        metavar="PATH",
    )
    group_size: int = option(
        8, "Episodes of one task that count as a complete group where no trainer says otherwise: in the status, and in "
        "a lease that names no size."
    )
    member_wait: float = option(
        4.0, "A group waits for an open episode until that took so many times as long as the slowest other of the "
        "group, and a minute at least. Then it ends early."
    )
    idle_timeout: float = option(
        1800.0, "An open episode silent for this long is discarded, unless it asked otherwise."
    )
    wall_timeout: float = option(86400.0, "An open episode older than this is discarded; it may ask for less.")
    traffic: str = option(
        "", "Lane in which what opens without a key is users' traffic, to be judged and learned from; empty: none is. "
        "For a daemon that asks for keys, give a key the lane.", metavar="LANE",
    )
    traffic_sample: float = option(1.0, "Share of users' traffic that is judged.", most=1, zero=True)
    traffic_holdout: float = option(
        0.1, "Share of it that is judged and recorded, and never trained.", most=1, zero=True
    )
    traffic_idle: float = option(900.0, "Users' traffic silent for this long is sealed, and awaits a judgement.")
    traffic_backlog: int = option(10_000, "So many episodes may await a judgement; then the oldest are discarded.")
    merge_policy: str = option(
        "strict", "How calls become samples: strict, repair (joins one text in other tokens, too) or off.",
        choices=("strict", "repair", "off"),
    )
    body_names: str = option(
        "auto", 'Episodes by names in bodies, such as user. "auto": until one names several runs; "off": never.',
        choices=("auto", "off"),
    )
    continuity: str = option(
        "auto", "Send a turn's history as the exact ids that were sampled: auto (where the engine proves that it takes "
        "them) or off.", choices=("auto", "off"),
    )
    gate_mode: str = option(
        "drain", "While weights change, drain waits for calls in flight: each is sampled by one version. pause freezes "
        "them in the engine, and they continue under the new version, from what the old one computed. An engine of "
        "several models always drains.",
        choices=("drain", "pause"),
    )
    gate_hold_s: float = option(1800.0, "A request that waited this long for the gate, or for an engine, gets a 503.")
    read_timeout: float = option(0.0, "Limit for an engine's silence within one answer; 0 is none.", zero=True)
    keep_alive_s: float = option(
        15.0, "A stream whose client heard nothing for this long gets an event of its protocol that changes nothing; 0 "
        "sends none.", zero=True,
    )
    drain_s: float = option(
        60.0, "Requests in flight have this long to finish after SIGTERM. So do whole answers whose disk is full or "
        "fails; then they get a 503."
    )
    archive_max_age: float = option(
        0.0, "Ended episodes are removed this long after their end; 0 keeps them.", zero=True
    )
    archive_max_bytes: int = option(
        0, "The archive may take so much disk, then its oldest episodes go; 0 is no limit.", zero=True
    )
    max_disk: int = option(
        0, "Size of journal and archive at which new episodes, and then new calls, get a 503; 0 is none.", zero=True
    )
    max_memory: int = option(
        0, "Memory of all processes at which new episodes, and then calls and large bodies, get a 503; 0 is none.",
        zero=True,
    )
    max_body: int = option(64 << 20, "Largest request body: more for agents that send many images.")
    tenants: tuple[tuple[str, Quota], ...] = option(
        (), "Quotas of tenants, as tables [tenants.NAME]; in the TOML file only.", places=(FILE,),
        convert=lambda given: quotas_of(given),
    )

    @property
    def address(self) -> tuple[str, int]:
        return split_address(self.listen, "listen")

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The ways of interception that were asked for."""
        return tuple(split_mode(text) for text in self.intercept)

    @property
    def intercept_needs_key(self) -> bool:
        """True if a program must show a key to be intercepted: if one on another machine could."""
        return any(mode.address is not None and not is_loopback(mode.address[0]) for mode in self.modes)

    @property
    def listening(self) -> tuple[tuple[str, int], ...]:
        """Every address at which the daemon will listen; port 0 stands for a free one."""
        return (self.address, *(mode.address for mode in self.modes if mode.address is not None))

    @property
    def upstreams(self) -> Mapping[str, tuple[str, ...]]:
        """Model name (``""``: any) to base URLs."""
        found: dict[str, tuple[str, ...]] = {}
        for item in self.upstream:
            name, url = split_upstream(item)
            found[name] = (*found.get(name, ()), url)
        return found


SETTINGS = Settings(Config, prefix="AJET_")


def load(file: str | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """The configuration from all places, checked; `flags` holds only what was given on the command line."""
    values = {} if file is None else SETTINGS.read(read_toml(file), FILE, f"{file}: ")
    values |= SETTINGS.in_environment({n: env[n] for n in env if not n.startswith(OTHERS)}, OF_AGENTS)
    values |= SETTINGS.read(flags, COMMAND_LINE, "", flag)
    if not values.setdefault("data_dir", default_data_dir(env)):
        raise ConfigError("data_dir is empty: name a folder, or leave it out", param="data_dir")
    config = Config(**SETTINGS.with_secrets(values))
    check(config)
    return config


def flag(name: str) -> str:
    """A setting as it is written on the command line."""
    return f"--{name.replace('_', '-')}"


def default_data_dir(env: Mapping[str, str]) -> str:
    """systemd's STATE_DIRECTORY, else ``ajet`` under the XDG state directory."""
    state = env.get("STATE_DIRECTORY", "").split(":")[0]
    if state:
        return state
    base = env.get("XDG_STATE_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "ajet")


def refuse_own(config: Config, listening: Iterable[Address]) -> None:
    """Raise `ConfigError` for an upstream that leads to an address where the daemon is `listening`."""
    for item in config.upstream:
        if leads_here(split_upstream(item)[1], listening, config.public_url):
            raise ConfigError(f"upstream {item!r} is the proxy's own address: give that of the engine")


def check(config: Config) -> None:
    """Raise `ConfigError` for values that are wrong by themselves or together (contract §11.5)."""
    host, _ = config.address
    refuse_own(config, config.listening)
    if config.upstream_key is not None and not is_key(config.upstream_key):
        raise ConfigError(NO_KEY)
    if config.public_url is not None and server(config.public_url) is None:
        raise ConfigError(f"public_url must be http://HOST:PORT or https://HOST, not {config.public_url!r}")
    if config.workers > 1 and not sys.platform.startswith("linux"):
        raise ConfigError("workers share a port as Linux lets them: elsewhere there can be 1")
    if config.workers > 1 and sys.version_info < OF_WORKERS:
        raise ConfigError("workers need Python {}.{}: before it there can be 1".format(*OF_WORKERS))
    from ajet_proxy.core.protocol.routes import (
        CONTROL_ROUTES,  # with the dialects behind it, which --help need not load
    )

    for path in config.allow_route:
        if not path.startswith("/"):
            raise ConfigError(f"allow_route must begin with '/', not {path!r}")
        if path.rstrip("/") in CONTROL_ROUTES:
            raise ConfigError(f"allow_route: {path} changes the engine, and is no agent's")
    if (config.tls_cert is None) != (config.tls_key is None):
        raise ConfigError("tls_cert and tls_key belong together: give both or neither")
    if config.tls_client_ca is not None and config.tls_cert is None:
        raise ConfigError("tls_client_ca needs tls_cert and tls_key: without TLS nobody shows a certificate")
    if config.admin_secret is not None and len(config.admin_secret) < MIN_SECRET:
        raise ConfigError(f"the admin secret must have at least {MIN_SECRET} characters")
    if config.traffic and config.admin_secret is not None:
        raise ConfigError("traffic is that of requests without a key: with an admin secret, issue-key --traffic LANE")
    if "/" in config.traffic:
        raise ConfigError("traffic is a lane, which has no '/'")
    exposed = not is_loopback(host)
    if exposed and config.admin_secret is None:
        raise ConfigError(
            f"listening on {host} (not loopback) needs an admin secret: set AJET_ADMIN_SECRET or --admin-secret-file"
        )
    if exposed and config.tls_cert is None and not config.trusted_front and not config.insecure:
        raise ConfigError(
            f"listening on {host} (not loopback) needs --tls-cert and --tls-key, --trusted-front, or --insecure"
        )
    _check_modes(config)


def _check_modes(config: Config) -> None:
    modes = config.modes
    if len({mode.address for mode in modes if mode.address}) < sum(mode.address is not None for mode in modes):
        raise ConfigError("each intercept needs an address of its own")
    if sum(mode.kind == "local" for mode in modes) > 1:
        raise ConfigError("intercept local can be given once; separate its programs by commas")
    for host in config.intercept_host:
        if not HOST.fullmatch(host):
            raise ConfigError(f"intercept_host must be a host's name alone, such as api.openai.com, not {host!r}")
    if config.intercept_needs_key and config.admin_secret is None:
        raise ConfigError("intercept off loopback would be an open proxy: set AJET_ADMIN_SECRET, to ask for keys")
    if config.intercept_needs_key and not config.insecure:
        raise ConfigError("intercept off loopback takes keys over plain HTTP: use a loopback address, or --insecure")


def quotas_of(tables: Any) -> tuple[tuple[str, Quota], ...]:
    """The tables ``[tenants.NAME]`` as pairs of tenant and quota. Raises `ValueError`."""
    from ajet_proxy.core.ledger.quotas import parse  # with all that the ledger needs: only a few files have quotas

    return tuple(parse(tables).items())


def split_mode(text: str) -> Mode:
    """``[KIND@]HOST:PORT`` or ``local[:PROGRAM,…]`` as a mode."""
    kind, at, address = text.partition("@")
    if text.startswith("local:") and all(one.strip(" !") for one in text.removeprefix("local:").split(",")):
        return Mode("local", None, text.removeprefix("local:"))
    if not at and text.partition(":")[0] not in (*LISTENING_MODES, "local"):
        return Mode("regular", split_address(text, "intercept"))
    if not at or kind not in LISTENING_MODES:
        known = ", ".join(f"{name}@HOST:PORT" for name in LISTENING_MODES[1:])
        raise ConfigError(f"intercept must be HOST:PORT, {known} or local:PROGRAM, not {text!r}")
    return Mode(kind, split_address(address, "intercept"))


def split_address(text: str, name: str) -> tuple[str, int]:
    """``HOST:PORT`` (IPv6 in brackets) as its parts."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if host.startswith("[") else host
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{name} must be HOST:PORT, not {text!r}")
    return host, int(port)


def split_upstream(text: str) -> tuple[str, str]:
    """``[NAME=]URL`` as (name or ``""``, base URL without ``/v1``)."""
    name, sign, url = text.partition("=")
    if not sign or "://" in name:
        name, url = "", text
    if "@" in url:  # addresses are shown to all, and passwords must not be
        raise ConfigError("upstream must be an address without a name and password: set AJET_UPSTREAM_KEY")
    if server(url) is None:
        raise ConfigError(f"upstream must be [NAME=]http://HOST:PORT, not {text!r}")
    from ajet_proxy.core.protocol.routes import COPIED

    if (route := next(filter(url.rstrip("/").endswith, COPIED), None)) is not None:
        base = text.rstrip("/").removesuffix(route)
        raise ConfigError(f"upstream must be a base URL, without a route: {base!r}, not {text!r}")
    return name, url


def is_address(host: str) -> bool:
    """True if `host` is an address and no name."""
    try:
        return bool(ipaddress.ip_address(host))
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """True if `host` (a name or an address) can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
