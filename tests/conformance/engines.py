"""The engines that a suite runs against: the schema-checking mock, a real vLLM with the tiny model, the scripted stub,
or a URL.

The mock answers any request that its OpenAPI description allows with a made-up answer, and refuses all others. It notes
each request with its verdict, so that a run through the proxy can be held to a direct one from the engine's side too.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.kit.ports import free_port
from tests.kit.source import ROOT
from tests.kit.stub_process import stub_process

READY_S = 300.0
_FORMATS = [f"--validator-{part}-{kind}-format=brackets" for part in ("query", "form") for kind in ("array", "object")]


class EngineFailed(RuntimeError):
    """An engine did not come up; the message says what it wrote."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A running engine: its base URL (no ``/v1``), and the log of the requests that it received, if it keeps one."""

    url: str
    log: Path | None = None

    def received(self, offset: int = 0) -> Counter[str]:
        """Counts of the requests that were received since `offset` of the log: method, target, status, what was
        wrong."""
        if self.log is None:
            return Counter()
        with self.log.open("rb") as log:
            log.seek(offset)
            return Counter(filter(None, map(_request, log.read().splitlines())))

    @property
    def mark(self) -> int:
        """Where the log ends now."""
        return self.log.stat().st_size if self.log is not None else 0

    def model(self) -> str:
        """The name of the first model that it serves."""
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=300) as answer:
            return str(json.load(answer)["data"][0]["id"])


def _request(line: bytes) -> str | None:
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    if entry.get("type") != "request":
        return None
    request, wrong = entry["request"], sorted({item["code"] for item in entry.get("diagnostics", ())})
    target = request["path"] + request.get("query", "")
    return " ".join([request["method"], target, str(entry["response"]["status"]), *wrong])


def under_v1(spec: str) -> str:
    """An OpenAPI description in YAML whose paths begin with ``/v1``: where they do not, the server's address does."""
    head, start, rest = spec.partition("\npaths:\n")
    if not start:
        raise EngineFailed("the OpenAPI description has no line 'paths:'")
    if re.match(r"\s*\"?/v1/", rest):
        return spec
    end = re.search(r"^\S", rest, re.MULTILINE)
    paths, tail = (rest[: end.start()], rest[end.start() :]) if end else (rest, "")
    return head + start + re.sub(r"^  /", "  /v1/", paths, flags=re.MULTILINE) + tail


@contextmanager
def mock(spec: Path, version: str, folder: Path) -> Iterator[Engine]:
    """The mock server ``@stdy/cli`` of `version` over `spec`, started as openai-python's ``scripts/mock`` does."""
    program = _installed(version, folder)
    served, log, port = folder / "openapi.yml", folder / "requests.jsonl", free_port()
    served.write_text(under_v1(spec.read_text()))
    command = [str(program), "--host", "127.0.0.1", "-p", str(port), "--log-format", "json", *_FORMATS, str(served)]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, f"{url}/_x-steady/health", log)
        yield Engine(url, log)
    finally:
        process.terminate()
        process.wait(300)


def _installed(version: str, folder: Path) -> Path:
    """The mock's program, from npm."""
    program = folder / f"mock-{version}" / "node_modules" / ".bin" / "steady"
    if not program.exists():
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(program.parents[2])]
        subprocess.run([*command, f"@stdy/cli@{version}"], check=True)
    return program


def _wait(process: subprocess.Popen[bytes], health: str, log: Path) -> None:
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(health, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise EngineFailed(f"the mock did not come up; it wrote:\n{log.read_text(errors='replace')[-4000:]}")


@contextmanager
def vllm(folder: Path) -> Iterator[Engine]:
    """A real vLLM from `.venv-engine` with the tiny model."""
    from tests.kit.vllm_process import VLLM, vllm_server

    if not VLLM.exists():
        raise EngineFailed("vLLM is in .venv-engine, which is not there: make setup")
    python = VLLM.with_name("python")
    command = [str(python), "-m", "tests.kit.tiny_model", str(folder / "tiny")]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    with vllm_server(folder / "tiny", folder / "vllm.log") as url:
        yield Engine(url)


@contextmanager
def stub() -> Iterator[Engine]:
    """The scripted engine of our own tests."""
    with stub_process() as url:
        yield Engine(url)
