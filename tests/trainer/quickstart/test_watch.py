from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from ajet_sdk import routes
from ajet_trainer.quickstart.machine import QuickstartError
from ajet_trainer.quickstart.watch import Proxy, TrainerFiles, identity_holds


def test_files_that_are_not_there_yet_or_half_written(tmp_path: Path) -> None:
    files = TrainerFiles(tmp_path / "none")
    assert (files.phase, files.metrics()) == ("starting", [])
    (tmp_path / "phase.json").write_text('{"pha')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"ste')
    files = TrainerFiles(tmp_path)
    assert files.phase == "starting"
    assert [record["step"] for record in files.metrics()] == [1, 2]
    (tmp_path / "phase.json").write_text('{"phase": "training", "step": 2, "of": 9}')
    assert files.phase == "training"


def counts(**given: int) -> dict[str, int]:
    return {"opened": sum(given.values()), **dict.fromkeys(routes.EPISODE_STATES, 0), **given}


def test_finished_counts_what_was_rewarded() -> None:
    states = counts(open=2, ready=3, leased=4, trained=5, discarded=6)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=json.dumps({"episodes": states})))
    proxy = Proxy("http://proxy", transport)
    assert proxy.finished() == 12
    assert identity_holds(states)
    assert not identity_holds({**states, "opened": 21})
    proxy.close()


def test_a_proxy_that_fails_is_one_clear_error() -> None:
    proxy = Proxy("http://proxy", httpx.MockTransport(lambda _: httpx.Response(500)))
    with pytest.raises(QuickstartError, match="http://proxy"):
        proxy.status()
    proxy.close()
