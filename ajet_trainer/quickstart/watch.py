"""Reads what the trainer and the proxy say of a run: `phase.json`, `metrics.jsonl`, and the proxy's control routes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from ajet_sdk import routes
from ajet_trainer.quickstart.machine import QuickstartError

GOOD_STATES = ("sealed", "ready", "leased", "trained")


class TrainerFiles:
    """The files in a trainer's run folder; both may not exist yet, and the last line may be half written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def phase(self) -> str:
        try:
            return str(json.loads((self.folder / "phase.json").read_text())["phase"])
        except (OSError, ValueError, KeyError):
            return "starting"

    def metrics(self) -> list[dict[str, Any]]:
        """One record a step, in order."""
        try:
            text = (self.folder / "metrics.jsonl").read_text()
        except OSError:
            return []
        whole = text[: text.rfind("\n") + 1]
        return [json.loads(line) for line in whole.splitlines()]


class Proxy:
    """A loopback proxy without secrets, as its administrator sees it."""

    def __init__(self, url: str, transport: httpx.BaseTransport | None = None) -> None:
        self.url = url
        self._http = httpx.Client(base_url=url + routes.PREFIX, transport=transport, timeout=30.0, trust_env=False)

    def close(self) -> None:
        self._http.close()

    def status(self) -> dict[str, Any]:
        return dict(self._get("/status"))

    def finished(self) -> int:
        """Episodes that were rewarded, whatever became of them since."""
        counts = self.status()["episodes"]
        return sum(int(counts[state]) for state in GOOD_STATES)

    def episodes(self, state: str) -> list[dict[str, Any]]:
        """The records in `state`, without token ids."""
        answer = self._get(f"/episodes?state={state}")
        return list(answer["episodes"] if isinstance(answer, dict) else answer)

    def episode(self, episode: str) -> dict[str, Any]:
        """One record with token ids and logprobs."""
        return dict(self._get(f"/episodes/{episode}?tokens=1"))

    def _get(self, path: str) -> Any:
        try:
            return self._http.get(path).raise_for_status().json()
        except httpx.HTTPError as error:
            raise QuickstartError(f"the proxy at {self.url} does not answer as it should: {error}") from None


def identity_holds(counts: dict[str, int]) -> bool:
    """Whether the ledger adds up: every opened episode is in exactly one state."""
    return counts["opened"] == sum(counts[state] for state in routes.EPISODE_STATES)
