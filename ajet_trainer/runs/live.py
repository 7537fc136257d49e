"""Changes of a configuration while a run goes on: between two steps its file is looked at again.

The keys of `ajet_sdk.runs.LIVE` and the shares of lanes hold from the next step on. All others take a restart: a line
says so, and the run goes on as it was. So it does with a file that cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from ajet_sdk.runs import LEARNING_RATE, LIVE
from ajet_sdk.settings import ConfigError
from ajet_trainer.config import NAME, OF_THE_HOST, Config, check

OURS = tuple(key.partition(".")[2] for key in LIVE if key.startswith("trainer."))


class Live:
    """The file at `path`, which `read` reads; `say` shows a line."""

    def __init__(self, path: Path, read: Callable[[], Config], say: Callable[[str], None]) -> None:
        self._path, self._read, self._say = path, read, say
        self._seen, self._fault = self._stamp(), ""

    def __call__(self, config: Config) -> Config:
        """`config` with what has changed in the file and can change now; the same object if nothing has."""
        stamp = self._stamp()
        if stamp == self._seen:
            return config
        try:
            wanted = self._read()
            if wanted.model_name == NAME:  # it names none: what the engines serve stays
                wanted = replace(wanted, model_name=config.model_name)
            found = check(taken_up(config, wanted))
        except ConfigError as error:
            if str(error) != self._fault:
                self._say(f"the configuration stays as it is: {error}")
            self._fault = str(error)  # and it is read again at the next look, since the disk may have failed
            return config
        self._seen, self._fault = stamp, ""
        if left := differing(found, wanted):
            self._say(f"{', '.join(left)}: a change of this takes a restart")
        return config if found == config else found

    def _stamp(self) -> tuple[int, ...] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_size, found.st_mtime_ns


def taken_up(config: Config, wanted: Config) -> Config:
    """`config` with the keys of `wanted` that change at the next step."""
    verl = {name: value for name, value in config.verl.items() if name != LEARNING_RATE}
    if LEARNING_RATE in wanted.verl:
        verl[LEARNING_RATE] = wanted.verl[LEARNING_RATE]
    changes: dict[str, Any] = {name: getattr(wanted, name) for name in OURS}
    return replace(config, **changes, mix=wanted.mix, verl=verl)


def differing(one: Config, other: Config) -> list[str]:
    """The keys in which two configurations differ."""
    ours = [field.name for field in fields(Config) if field.name not in ("verl", *OF_THE_HOST)]
    found = [name for name in ours if getattr(one, name) != getattr(other, name)]
    theirs = one.verl.keys() | other.verl.keys()
    return found + sorted(name for name in theirs if one.verl.get(name, ...) != other.verl.get(name, ...))
