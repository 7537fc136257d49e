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
from ajet_sdk.watched_files import WatchedFiles
from ajet_trainer.config import NAME, OF_THE_HOST, Config, check

OURS = tuple(key.partition(".")[2] for key in LIVE if key.startswith("trainer."))


class Live:
    """The file at `path`, which `read` reads; `say` shows a line."""

    def __init__(self, path: Path, read: Callable[[], Config], say: Callable[[str], None]) -> None:
        self._read, self._say = read, say
        self._file = WatchedFiles("the configuration stays as it is", [path], say)
        self._file.take(lambda: None)  # it was read a moment ago

    def __call__(self, config: Config) -> Config:
        """`config` with what has changed in the file and can change now; the same object if nothing has."""

        def read() -> tuple[Config, str]:
            wanted = self._read()
            if wanted.model_name == NAME:  # it names none: what the engines serve stays
                wanted = replace(wanted, model_name=config.model_name)
            found = taken_up(config, wanted)
            left = ", ".join(differing(found, wanted))
            try:
                return check(found), left
            except ConfigError as error:
                if not left:
                    raise
                raise ConfigError(f"{left}: a change of this takes a restart, and without it {error.message}") from None

        if (taken := self._file.take(read)) is None:
            return config
        found, left = taken
        if left:
            self._say(f"{left}: a change of this takes a restart")
        return config if found == config else found


def taken_up(config: Config, wanted: Config) -> Config:
    """`config` with the keys of `wanted` that change at the next step. A bound on staleness that may follow from
    another `overlap` waits with that for a restart."""
    verl = {name: value for name, value in config.verl.items() if name != LEARNING_RATE}
    if LEARNING_RATE in wanted.verl:
        verl[LEARNING_RATE] = wanted.verl[LEARNING_RATE]
    changes: dict[str, Any] = {name: getattr(wanted, name) for name in OURS}
    if config.overlap != wanted.overlap:
        del changes["max_staleness"]
    return replace(config, **changes, mix=wanted.mix, verl=verl)


def differing(one: Config, other: Config) -> list[str]:
    """The keys in which two configurations differ."""
    ours = [field.name for field in fields(Config) if field.name not in ("verl", *OF_THE_HOST)]
    found = [name for name in ours if getattr(one, name) != getattr(other, name)]
    theirs = one.verl.keys() | other.verl.keys()
    return found + sorted(name for name in theirs if one.verl.get(name, ...) != other.verl.get(name, ...))
