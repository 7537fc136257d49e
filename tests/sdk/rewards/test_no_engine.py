"""`ajet run` where no engine is there yet."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ajet_sdk.play import patience, program
from ajet_sdk.play.program import Program, run_program
from tests.kit.proxy_process import PROXY, ProxyProcess

pytestmark = pytest.mark.skipif(not PROXY.exists(), reason="needs ajet-proxy in .venv: .ci/setup daemon")
ASK = """
import httpx, os, sys
while not os.path.exists(sys.argv[1]):
    httpx.post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", timeout=None, trust_env=False, headers={
        "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}, json={
        "model": "stub", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})
"""


def test_a_run_without_any_engine_waits_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its requests wait for so long that the daemon refuses them: the world's failure."""
    monkeypatch.setattr(patience, "LONG_S", 0.0)
    for name in ("ENGINE_S", "TICK_S"):
        monkeypatch.setattr(program, name, 0.1)
    lines, heard = list[str](), tmp_path / "heard"

    def say(line: str) -> None:
        lines.append(line)
        heard.touch()

    with ProxyProcess(None, tmp_path / "data", options=("--gate-hold-s", "1")) as proxy:
        monkeypatch.setenv("AJET_PROXY_URL", proxy.url)
        (item,) = run_program(Program((sys.executable, "-c", ASK, str(heard))), ["t"], retries=0, say=say)
    assert lines == [f"waiting: {program.NO_ENGINE}"]
    assert (item.outcome, item.infra) == ("aborted", True)
    assert item.reason == "the model never answered (unserved: gate_closed)"
