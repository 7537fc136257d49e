"""Where recipes play: a scripted engine and the real proxy before it, and what is left of an episode to look at."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from tests.kit.engine_script import Rule
from tests.kit.environment import clean
from tests.kit.proxy_process import ProxyProcess
from tests.kit.rig import Rig
from tests.kit.source import ROOT
from tests.kit.stub_process import stub_process

FOLDER = ROOT / "integrations"
ENVIRONMENTS = ROOT / ".venv-integrations"
LOCKS = ROOT / ".ci" / "integrations"
AJET = (sys.executable, "-c", "from ajet_sdk.cli import main; main()")
INTERCEPT = ("--intercept", "127.0.0.1:0")


@dataclass(frozen=True, slots=True)
class Stage:
    """A running proxy, and the script that the engine behind it plays."""

    engine: str
    proxy: str

    def script(self, rules: Sequence[Rule]) -> None:
        httpx.post(f"{self.engine}/stub/script", json=[asdict(rule) for rule in rules], timeout=300).raise_for_status()

    def run(
        self, *command: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, limit_s: float = 600
    ) -> str:
        """The output of `command`, which must succeed. It knows the proxy by AJET_PROXY_URL alone."""
        own = clean(AJET_PROXY_URL=self.proxy) | dict(env or {})
        done = subprocess.run(command, env=own, cwd=cwd, capture_output=True, text=True, timeout=limit_s, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def listed(self) -> list[dict[str, Any]]:
        """All episodes, newest first, without their calls."""
        with Rig(self.proxy) as rig:
            found: list[dict[str, Any]] = rig.get("/episodes").json()["episodes"]
            return found

    def record(self, episode: str) -> dict[str, Any]:
        """An episode with its calls and timelines, and their token ids."""
        with Rig(self.proxy) as rig:
            return rig.record(episode)

    def episodes(self, task: str) -> list[dict[str, Any]]:
        """The records of the episodes of `task`, newest first."""
        return [self.record(item["episode"]) for item in self.listed() if item["task"] == task]


@contextmanager
def stage(folder: Path) -> Iterator[Stage]:
    """The engine drifts: it reads some words of a history as other tokens than it samples."""
    with stub_process("--drift") as engine, ProxyProcess(engine, folder / "data", options=INTERCEPT) as proxy:
        yield Stage(engine, proxy.url)


def python_of(environment: str) -> str:
    """The interpreter of an environment that `.ci/setup integrations` builds."""
    found = ENVIRONMENTS / environment / "bin" / "python"
    assert found.exists(), f"no {found.relative_to(ROOT)}: .ci/setup integrations {environment}"
    return str(found)
