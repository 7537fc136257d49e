"""The systemd unit of a supervisor: what trains keeps its devices, and little else of the machine.

A trainer needs GPUs, much memory, and the system calls of numeric libraries. So this unit forbids less than the
daemon's. It runs as the user that owns the folder of runs. There it may write, into temporary files, and into the
folders of the host's file.

``KillMode=process``: if the supervisor alone dies, trainers go on, and the next one takes them over. ``PrivateTmp`` and
``DynamicUser`` are left out, since either would remove a trainer's temporary files at that moment. ``ProtectClock`` is
left out, because it hides devices.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ajet_sdk import systemd
from ajet_sdk.settings import ConfigError
from ajet_trainer.runs.allowed import Allowed, read

UNIT_NAME = "ajet-trainer.service"
ENVIRONMENT_FILE = "/etc/ajet/trainer.env"
STOP_S = 2100
"""A step that is under way ends, and is saved."""

_UNIT = """\
[Unit]
Description=ajet trainer: keeps the runs that are wanted from afar
After=network-online.target time-sync.target
Wants=network-online.target

[Service]
Type=exec
ExecStart={command}
Restart=on-failure
RestartSec=2
RestartPreventExitStatus=2
KillMode=process
TimeoutStopSec={stop_s}
UMask=0077
LimitNOFILE=65536
OOMPolicy=continue
Environment=XDG_CACHE_HOME={cache}
{identity}NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={writable}
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
RestrictAddressFamilies=AF_INET AF_INET6 AF_UNIX AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM

[Install]
WantedBy={wanted_by}
"""
_SYSTEM_ONLY = f"""\
User={{owner}}
ProtectHome=read-only
ProtectProc=invisible
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectHostname=yes
PrivateMounts=yes
CapabilityBoundingSet=
LimitMEMLOCK=infinity
EnvironmentFile=-{ENVIRONMENT_FILE}
"""
_USER_ONLY = """\
EnvironmentFile=-%E/ajet/trainer.env
"""


def unit(arguments: Mapping[str, Any], allowed: Allowed, *, user: bool, owner: str = "") -> str:
    """The unit's text; `arguments` are the options of ``ajet-trainer serve``. The key (``AJET_TRAINER_KEY``) goes into
    the environment file that it names, which only its owner should read."""
    options = [word for name, value in arguments.items() if value is not None for word in (f"--{name}", str(value))]
    writable = ["/tmp", str(allowed.runs), *allowed.folders.values()]
    return _UNIT.format(
        command=systemd.command([sys.executable, "-m", "ajet_trainer.cli", "serve", *options]),
        stop_s=STOP_S, cache=systemd.escape(f'"{allowed.runs / ".cache"}"'),
        identity=_USER_ONLY if user else _SYSTEM_ONLY.format(owner=owner),
        writable=" ".join(systemd.escape(f'"-{folder}"') for folder in writable),
        wanted_by="default.target" if user else "multi-user.target",
    )


def owner_of(runs: Path) -> str:
    """The user that owns the folder of runs. Raises `ConfigError`."""
    try:
        owner = runs.owner()
    except (OSError, KeyError):
        said = f"there is no folder {runs}: make it, owned by the user that should train"
        raise ConfigError(said, param="runs") from None
    if owner == "root":
        raise ConfigError(f"{runs} belongs to root: give it to the user that should train", param="runs")
    return owner


def install(
    given: Mapping[str, Any], *, user: bool, only_print: bool, env: Mapping[str, str], say: Callable[[str], None]
) -> None:
    """Writes the unit for the options `given` to `serve`, or prints it. Raises `ConfigError`."""
    if not Path(given["allow"]).is_absolute():
        raise ConfigError("a service has no working directory: give the absolute path of --allow", param="allow")
    allowed = read(given["allow"])
    text = unit(given, allowed, user=user, owner="" if user else owner_of(allowed.runs))
    if only_print:
        say(text.rstrip("\n"))
        return
    path, then = systemd.install(UNIT_NAME, text, user=user, env=env)
    file = "~/.config/ajet/trainer.env" if user else ENVIRONMENT_FILE
    say(f"wrote {path}\nput AJET_TRAINER_KEY=... into {file}, for its owner's eyes alone\n{then}")
