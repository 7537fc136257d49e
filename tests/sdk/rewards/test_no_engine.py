"""`ajet run` where no engine answers: none is there yet, or one that cannot be reached."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ajet_sdk.play import patience
from ajet_sdk.play import program as runner
from ajet_sdk.play.program import Program, run_program
from tests.kit.ports import free_port
from tests.kit.proxy_process import PROXY, ProxyProcess

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")
ASK = """
import httpx, os
httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", timeout=60, trust_env=False, headers={
    "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}, json={
    "model": "stub", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})
exit(%d)
"""


def test_a_run_without_any_engine_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until its requests have waited for so long that the daemon refuses them: the world's failure."""
    monkeypatch.setattr(patience, "LONG_S", 2.0)
    monkeypatch.setattr(runner, "ENGINE_S", 0.2)
    lines: list[str] = []
    with ProxyProcess(None, tmp_path / "data", options=("--gate-hold-s", "8")) as proxy:
        monkeypatch.setenv("AJET_PROXY_URL", proxy.url)
        began = time.monotonic()
        (item,) = run_program(Program((sys.executable, "-c", ASK % 0)), ["t"], retries=0, say=lines.append)
        assert time.monotonic() - began >= 7
    assert lines == [f"waiting: {runner.NO_ENGINE}"]
    assert (item.outcome, item.infra) == ("aborted", True)
    assert item.reason == "the model never answered (unserved)"


@pytest.mark.parametrize("code", [0, 1])
def test_a_run_whose_engine_cannot_be_reached_fails(tmp_path: Path, code: int) -> None:
    command = [sys.executable, "-c", "from ajet_sdk.cli import main; main()", "run", "--task", "t", "--retries", "1"]
    with ProxyProcess(f"http://127.0.0.1:{free_port()}", tmp_path / "data") as proxy:
        env = {**os.environ, "AJET_PROXY_URL": proxy.url}
        done = subprocess.run(
            [*command, "--", sys.executable, "-c", ASK % code], env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 1
        assert "2 episodes: 2 failures of the world (1 played again)" in done.stdout
        assert "rewarded" not in done.stdout
        assert proxy.report()["episodes"]["discarded"] == 2
