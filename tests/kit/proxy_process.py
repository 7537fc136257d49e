"""The real proxy as a child process, as a user starts it: ``ajet-proxy serve`` from `.venv`, on a port of its own.

`ProxyProcess` can be killed as hard as the machine can and started again on the same data directory and port, which is
what the restart tests do.
"""

from __future__ import annotations

import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.kit.environment import clean
from tests.kit.ports import free_port
from tests.kit.source import ROOT

PROXY = ROOT / ".venv" / "bin" / "ajet-proxy"
READY = "ajet-proxy ready on "


class ProxyFailed(RuntimeError):
    """The proxy ended, or said nothing, before it was ready; the message ends with what it wrote."""


class ProxyProcess:
    """``with ProxyProcess(upstream, data_dir) as proxy: proxy.url``; its output is in `data_dir`'s sibling ``.log``.

    A later one of `options` wins over ours; `inside` begins the command, to run it in a namespace; `program` is the
    `ajet-proxy` of another environment.
    """

    def __init__(
        self,
        upstream: str | None,
        data_dir: Path,
        *,
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        port: int | None = None,
        inside: Sequence[str] = (),
        program: Path = PROXY,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.data_dir = data_dir
        self.log = data_dir.with_suffix(".log")
        upstreams = ["--upstream", upstream] if upstream else []
        listen = ["--listen", f"127.0.0.1:{self.port}"]
        self._command = [*inside, str(program), "serve", *upstreams, *listen, "--data-dir", str(data_dir), *options]
        self._env = clean(PYTHONUNBUFFERED="1", **(env or {}))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ProxyProcess:
        return self.start()

    def __exit__(self, *_: object) -> None:
        if self._process is not None and self._process.poll() is None:
            self.stop()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def status(self) -> int | None:
        """The exit status, if it has ended."""
        return None if self._process is None else self._process.poll()

    def start(self, ready_s: float = 300.0) -> ProxyProcess:
        """Returns once the proxy has said that it accepts requests."""
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, stderr=log, env=self._env)
        said = self._process.stdout
        assert said is not None
        line = said.readline().decode() if select.select([said], [], [], ready_s)[0] else ""
        if not line.startswith(READY):
            self.kill()
            raise ProxyFailed(f"instead of {READY!r} the proxy said {line!r} and wrote:\n{self.errors()}")
        return self

    def kill(self) -> None:
        """SIGKILL: no chance to write another byte."""
        self._end(signal.SIGKILL)

    def stop(self, timeout: float = 300.0) -> int:
        """SIGTERM and wait; the exit status."""
        return self._end(signal.SIGTERM, timeout)

    def wait(self, timeout: float = 300.0) -> int:
        """Until it ends by itself; the exit status."""
        return self._end(None, timeout)

    def key(self, scope: str) -> str:
        """A key as an operator issues it, who has the data directory."""
        command = [str(PROXY), "issue-key", "--scope", scope, "--data-dir", str(self.data_dir)]
        return subprocess.run(command, capture_output=True, check=True, text=True, env=self._env).stdout.strip()

    def report(self) -> dict[str, Any]:
        """The answer of ``GET /ajet/v1/status``, which takes its time where the machine trains a model meanwhile."""
        answer = httpx.get(f"{self.url}/ajet/v1/status", timeout=300, trust_env=False, verify=False)
        found: dict[str, Any] = answer.json()
        return found

    def errors(self) -> str:
        """The text that the proxy has written to its standard error, in all its lives."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def _end(self, number: signal.Signals | None, timeout: float = 300.0) -> int:
        with self.process as process:  # which closes its output
            if number is not None and process.poll() is None:
                process.send_signal(number)
            try:
                return process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                raise ProxyFailed(f"the proxy did not end in {timeout:.0f} s; it wrote:\n{self.errors()}") from None


def failed_start(
    command_options: Sequence[str], *, env: Mapping[str, str] | None = None, timeout: float = 300.0
) -> tuple[int, str]:
    """Exit status and standard error of an ``ajet-proxy serve`` that is expected not to come up."""
    command = [str(PROXY), "serve", *command_options]
    done = subprocess.run(command, capture_output=True, timeout=timeout, env=clean(**(env or {})), check=False)
    return done.returncode, done.stderr.decode()
