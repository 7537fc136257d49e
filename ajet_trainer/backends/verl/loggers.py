"""verl's loggers (``trainer.logger``): none of them can end a run.

A logger that cannot be made, or that raises, costs one line on the terminal and nothing else. Each has a `Tracking` of
its own, so that the others get every step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from omegaconf import DictConfig, OmegaConf
from verl.utils.tracking import Tracking


class Loggers:
    """The loggers that `config` names, made when there is something to log. `say` shows a line."""

    def __init__(self, config: DictConfig, say: Callable[[str], None]) -> None:
        self._config, self._say = config, say
        self._made: dict[str, Any] | None = None
        self._warned: set[str] = set()

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        if self._made is None:
            self._made = {}
            for name in names(self._config):
                self._try(name, "cannot be started", partial(self._make, name))
        for name, tracking in self._made.items():
            self._try(name, "failed", partial(tracking.log, data=metrics, step=step))

    def finish(self) -> None:
        """Has each write what it still holds: TensorBoard keeps up to two minutes of it."""
        for name, tracking in (self._made or {}).items():
            self._try(name, "failed at its end", tracking.finish)

    def _make(self, name: str) -> None:
        settings = self._config.trainer
        content = OmegaConf.to_container(self._config, resolve=True)
        made = Tracking(settings.project_name, settings.experiment_name, name, content)
        self._made = {**(self._made or {}), name: made}

    def _try(self, name: str, words: str, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:
            if name not in self._warned:
                self._warned.add(name)
                said = (str(error).strip().splitlines() or [""])[0]
                self._say(f"warning: the logger {name} {words}, training continues: {type(error).__name__}: {said}")


def names(config: DictConfig) -> list[str]:
    """The loggers that are asked for; verl takes one word for a list of one."""
    asked = config.trainer.logger or []
    return [asked] if isinstance(asked, str) else list(asked)
