"""Running under systemd: the unit, the datagrams that tell systemd how we are, and the socket that it may hand to us.

The unit gives the daemon its own dynamic user, one writable directory and nothing else of the machine. `notify` sends
datagrams to the socket named in ``NOTIFY_SOCKET``, by the protocol of sd_notify(3). So dependants start when the proxy
accepts requests, and a hung proxy is restarted.

Where systemd itself listens (a socket unit), connections that come while the daemon restarts wait instead of being
refused. The socket comes as descriptor 3, as sd_listen_fds(3) has it.

A configuration that `serve` refuses (exit 2) would be refused again, so systemd does not restart it. A drain may take
longer than when the unit was written: the daemon tells systemd how long.

Where memory runs out the kernel kills a process and the unit goes on. The compaction goes first, and is tried again. A
worker is replaced. If it was the daemon itself, that is a failure, and systemd restarts it.

``MemoryDenyWriteExecute`` is left out: the TLS library that interception uses writes its callbacks' code at run time.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

from ajet_sdk import systemd
from ajet_sdk.settings import ConfigError

HANDED = 3
WATCHDOG_S = 60
UNIT_NAME = "ajet-proxy.service"
ENVIRONMENT_FILE = "/etc/ajet/proxy.env"
STATE_DIRECTORY = "%S/ajet"
"""The service's data directory, in systemd's words."""
SYSTEMD_MARGIN_S = 30

_UNIT = """\
[Unit]
Description=ajet proxy: records LLM agents so that their model can be trained
Documentation=https://www.freedesktop.org/software/systemd/man/latest/systemd.exec.html
After=network-online.target time-sync.target
Wants=network-online.target

[Service]
Type=notify
ExecStart={command}
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2
TimeoutStartSec=300
TimeoutStopSec={stop_s}
WatchdogSec={watchdog_s}
StateDirectory=ajet
StateDirectoryMode=0700
UMask=0077
LimitNOFILE=65536
MemoryMax=80%
OOMPolicy=continue
{identity}{files}NoNewPrivileges=yes
ProtectSystem=strict
PrivateTmp=yes
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallFilter=~@privileged @resources
SystemCallErrorNumber=EPERM

[Install]
WantedBy={wanted_by}
"""
_SYSTEM_ONLY = f"""\
DynamicUser=yes
ProtectHome=read-only
PrivateDevices=yes
DevicePolicy=closed
PrivateMounts=yes
PrivateUsers=yes
ProtectProc=invisible
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
CapabilityBoundingSet=
EnvironmentFile=-{ENVIRONMENT_FILE}
"""
_USER_ONLY = """\
EnvironmentFile=-%E/ajet/proxy.env
"""


def unit(arguments: tuple[str, ...], *, user: bool, drain_s: float, files: Mapping[str, str] | None = None) -> str:
    """The unit's text; `arguments` follow ``ajet-proxy serve``. Settings and the admin secret (``AJET_ADMIN_SECRET``)
    go into the environment file that it names, which only its owner should read.

    `files` are files among the arguments that root may read and the service's own user may not, by a short name:
    systemd hands the service copies of them.
    """
    handed = {} if user else {path: name for name, path in (files or {}).items()}
    words = [word for item in arguments for word in (item.split("=", 1) if item.startswith("--") else [item])]
    program = [sys.executable, "-m", "ajet_proxy.cli", "serve", *words]
    words = [f"%d/{handed[item]}" if item in handed else systemd.escape(shlex.quote(item)) for item in program]
    return _UNIT.format(
        command=" ".join(words),
        files="".join(f"LoadCredential={name}:{systemd.escape(path)}\n" for path, name in handed.items()),
        stop_s=int(drain_s) + SYSTEMD_MARGIN_S,
        watchdog_s=WATCHDOG_S,
        identity=_USER_ONLY if user else _SYSTEM_ONLY,
        wanted_by="default.target" if user else "multi-user.target",
    )


def environment_file(*, user: bool, env: Mapping[str, str]) -> Path:
    """The file of settings that the unit names."""
    return systemd.users_config(env) / "ajet" / "proxy.env" if user else Path(ENVIRONMENT_FILE)


def environment(file: Path) -> dict[str, str]:
    """The variables of the service that `serve` heeds: systemd's state directory, and the lines of `file`, if there is
    one. None are this process's own. (EnvironmentFile in systemd.exec(5) says how the lines are written. Its
    backslashes are not read here.)"""
    found, text = {"STATE_DIRECTORY": STATE_DIRECTORY}, ""
    with contextlib.suppress(FileNotFoundError):
        text = file.read_text()
    for line in map(str.strip, text.splitlines()):
        name, sign, value = map(str.strip, line.partition("="))
        if sign and not line.startswith(("#", ";")):
            quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            found[name] = value[1:-1] if quoted else value
    return found


def handed_socket(env: Mapping[str, str], *, address: tuple[str, int]) -> socket.socket | None:
    """The socket on which systemd listens for this process, if there is one. It must listen at `address`, because what
    is allowed there depends on that. Otherwise, or for several, this raises `ConfigError`."""
    if env.get("LISTEN_PID") != str(os.getpid()) or env.get("LISTEN_FDS", "0") == "0":
        return None
    if env["LISTEN_FDS"] != "1":
        raise ConfigError(f"systemd hands us {env['LISTEN_FDS']} sockets: the socket unit must listen once")
    handed = socket.socket(fileno=HANDED)
    name = handed.getsockname()
    if not isinstance(name, tuple) or name[:2] != address:
        raise ConfigError(f"the socket unit listens at {name!r} and --listen says {address!r}: they must be the same")
    return handed


def hears_ipv4(handed: socket.socket) -> bool:
    """True if a socket at ``[::]`` hears IPv4 too, as those of systemd do unless their unit says otherwise."""
    if handed.family != socket.AF_INET6 or handed.getsockname()[0] != "::":
        return False
    return not handed.getsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)


def notify_stopping(drain_s: float, env: Mapping[str, str]) -> bool:
    """Tell systemd that the daemon stops, and to wait for its drain if that is longer than the unit says."""
    return notify(f"STOPPING=1\nEXTEND_TIMEOUT_USEC={(int(drain_s) + SYSTEMD_MARGIN_S) * 1_000_000}", env)


def notify(state: str, env: Mapping[str, str]) -> bool:
    """Tell systemd `state` (such as ``READY=1`` or ``WATCHDOG=1``); False when nobody listens."""
    address = env.get("NOTIFY_SOCKET", "")
    if not address.startswith(("/", "@")):
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as notifying:
        try:
            notifying.sendto(state.encode(), "\0" + address[1:] if address[0] == "@" else address)
        except OSError:
            return False
    return True
