"""Where the values of the configuration come from.

Later sources win: defaults, the TOML file, ``AJET_*`` variables, command-line flags. A key that no field has is an
error that names the nearest one, because a misspelt limit must not silently be no limit.

The admin secret comes from the environment or from a file and never from argv, which every user of the machine can
read.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ajet_proxy.core.ledger import quotas as quota
from ajet_proxy.settings import Config, ConfigError, check

ENV_PREFIX = "AJET_"
FOREIGN_ENV = ("AJET_PROXY_URL", "AJET_EPISODE", "AJET_TASK", "AJET_API_KEY", "AJET_REWARD_FILE")
"""Variables of the agent side, which may stand in the daemon's environment and are none of its own."""
FOREIGN_ENV_PREFIX = "AJET_TRAINER_"
PATHS = ("FILE", "DIR")
"""What `--help` calls a setting that is a path: ``~`` in one is a home directory."""


def load(file: str | None, env: Mapping[str, str], flags: Mapping[str, Any]) -> Config:
    """The configuration from all sources, checked; `flags` holds only what was given on the command line."""
    values: dict[str, Any] = {}
    if file is not None:
        values.update(_from_toml(file))
    values.update(_from_env(env))
    values.update({name: _convert(name, value, f"--{name.replace('_', '-')}") for name, value in flags.items()})
    if not values.get("data_dir"):
        values["data_dir"] = default_data_dir(env)
    if values.get("admin_secret") is None and values.get("admin_secret_file"):
        values["admin_secret"] = _read_secret(values["admin_secret_file"])
    config = Config(**values)
    check(config)
    return config


def default_data_dir(env: Mapping[str, str]) -> str:
    """systemd's STATE_DIRECTORY, else ``ajet`` under the XDG state directory."""
    state = env.get("STATE_DIRECTORY", "").split(":")[0]
    if state:
        return state
    base = env.get("XDG_STATE_HOME") or os.path.join(env.get("HOME") or os.path.expanduser("~"), ".local", "state")
    return os.path.join(base, "ajet")


def _from_toml(file: str) -> dict[str, Any]:
    import tomllib

    try:
        with open(os.path.expanduser(file), "rb") as stream:
            table = tomllib.load(stream)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error
    known = [f.name for f in dataclasses.fields(Config) if f.name not in ("admin_secret", "upstream_key")]
    for name in (name for name in table if name not in known):
        advice = ": settings stand in no table" if isinstance(table[name], dict) else _nearest(name, known)
        raise ConfigError(f"{file}: unknown key {name!r}{advice}")
    return {name: _convert(name, value, f"{file}: {name}") for name, value in table.items()}


def _from_env(env: Mapping[str, str]) -> dict[str, Any]:
    known = {ENV_PREFIX + f.name.upper(): f.name for f in dataclasses.fields(Config)}
    values = {}
    for variable, text in env.items():
        if not variable.startswith(ENV_PREFIX) or variable in FOREIGN_ENV or variable.startswith(FOREIGN_ENV_PREFIX):
            continue
        if variable not in known:
            raise ConfigError(f"unknown variable {variable}{_nearest(variable, [*known, *FOREIGN_ENV])}")
        values[known[variable]] = _convert(known[variable], text, variable)
    return values


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"


def _convert(name: str, value: Any, where: str) -> Any:
    """`value`, from TOML or as text, as the type of field `name`; text lists are separated by commas."""
    if name == "tenants":
        try:
            return tuple(quota.parse(value).items())
        except ValueError as error:
            raise ConfigError(f"{where} {error}") from error
    field = next(f for f in dataclasses.fields(Config) if f.name == name)
    kind = str(field.type).removesuffix(" | None")
    try:
        if kind == "tuple[str, ...]":
            items = [item for item in value.split(",") if item] if isinstance(value, str) else list(value)
            if all(isinstance(item, str) for item in items):
                return tuple(item.strip() for item in items)
        elif kind == "bool":
            words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
            return value if isinstance(value, bool) else words[value.lower()]
        elif kind == "int" and not isinstance(value, (bool, float)):
            return int(value)
        elif kind == "float" and not isinstance(value, bool):
            if (number := float(value)) < float("inf"):
                return number
        elif kind == "str" and isinstance(value, str):
            return os.path.expanduser(value) if field.metadata["metavar"] in PATHS else value
    except (ValueError, TypeError, KeyError, AttributeError):
        pass
    words_of = {"tuple[str, ...]": "a list of strings", "bool": "true or false", "int": "an integer",
                "float": "a number", "str": "text"}
    raise ConfigError(f"{where} must be {words_of[kind]}, not {value!r}")


def _read_secret(file: str) -> str:
    try:
        return Path(file).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"cannot read admin_secret_file {file}: {reason}") from error
