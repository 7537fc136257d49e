"""Helpers for the systemd units of daemon and trainer: the writing of words in them, and their place."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path


def escape(text: str) -> str:
    """`text` written so that systemd expands no specifiers and variables in it."""
    return text.replace("%", "%%").replace("$", "$$")


def command(words: Sequence[str]) -> str:
    """`words` as the command of an ``ExecStart``."""
    return " ".join(escape(shlex.quote(word)) for word in words)


def out_of_reach(program: Path) -> Path | None:
    """The nearest folder above `program` that other users cannot enter, if there is one."""
    return next((folder for folder in program.parents if not folder.stat().st_mode & stat.S_IXOTH), None)


def unit_path(name: str, *, user: bool, env: Mapping[str, str]) -> Path:
    """Where systemd looks for the unit called `name`."""
    return (users_config(env) / "systemd" / "user" if user else Path("/etc/systemd/system")) / name


def install(name: str, text: str, *, user: bool, env: Mapping[str, str]) -> tuple[Path, str]:
    """Writes a unit. Returns where it is, and what its user has to do for it to run."""
    path, scope = unit_path(name, user=user, env=env), " --user" if user else ""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path, f"now run: systemctl{scope} daemon-reload && systemctl{scope} enable --now {path.name}"


def users_config(env: Mapping[str, str]) -> Path:
    """The user's folder of configuration."""
    return Path(env.get("XDG_CONFIG_HOME") or os.path.join(os.path.expanduser("~"), ".config"))
