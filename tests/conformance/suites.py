"""The suites that can be run: how a checkout is recognised, its environment built, and its tests told where to go.

An environment is made by uv under `.venv-conformance`, from the versions that the suite itself locks or, where it locks
none for what we need, from those pinned here. A checkout is only read: nothing is written into it.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.conformance import engines
from tests.conformance.engines import Engine
from tests.kit.source import ROOT

LANGCHAIN = ("langchain-openai==1.7.3", "langchain-anthropic==1.7.7")
"""The packages that langchain-tests is run on: the chat models, which are not part of it."""
MOCKED = ("openai", "anthropic")
"""The suites of SDKs, which run against a mock of their API."""
HERE = Path(__file__).parent


class SuiteFailed(RuntimeError):
    """A suite could not be run; the message says why."""


@dataclass(frozen=True, slots=True)
class Suite:
    """A checkout of one of the suites, and the folder for all that is made for it."""

    checkout: Path
    name: str
    version: str
    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "env" / "bin" / "python"

    @property
    def tests(self) -> list[str]:
        """The arguments of pytest; it runs in the checkout, with the suite's own configuration."""
        if self.name in MOCKED:
            return ["tests/api_resources"]
        session = ["-o", "asyncio_default_test_loop_scope=session", "-o", "asyncio_default_fixture_loop_scope=session"]
        config = ["-c", str(self.checkout / "pyproject.toml"), "--rootdir", str(HERE), "--confcutdir", str(HERE)]
        return [*config, *session, str(HERE / "langchain_chat.py")]

    def build(self) -> None:
        """Make the environment; quick when it is there."""
        env = self.folder / "env"
        environment = {**os.environ, "UV_PROJECT_ENVIRONMENT": str(env)}
        environment.pop("VIRTUAL_ENV", None)
        if os.environ.get("PIP_FIND_LINKS"):
            environment.setdefault("UV_FIND_LINKS", os.environ["PIP_FIND_LINKS"])
        for command in self._installs(env):
            done = subprocess.run([_uv(), *command], cwd=self.checkout, env=environment, check=False)
            if done.returncode:
                raise SuiteFailed(f"uv {' '.join(command)} failed in {self.checkout}")

    def _installs(self, env: Path) -> Iterator[list[str]]:
        base = getattr(sys, "_base_executable", sys.executable)
        if self.name in MOCKED:
            yield ["sync", "--quiet", "--frozen", "--all-extras", "--python", base]
            return
        if not self.python.exists():
            yield ["venv", "--quiet", "--no-project", "--python", base, str(env)]
        into = ["--quiet", "--no-sources", "--python", str(self.python)]
        yield ["pip", "install", *into, str(self.checkout), *LANGCHAIN]

    @contextmanager
    def engine(self, wanted: str | None) -> Iterator[Engine]:
        """The engine that was asked for (``vllm``, ``stub``, a URL, an OpenAPI description), or the one that suits."""
        if wanted is not None and wanted.startswith(("http://", "https://")):
            yield Engine(wanted.rstrip("/").removesuffix("/v1"))
        elif wanted == "stub":
            with engines.stub() as engine:
                yield engine
        elif wanted == "vllm" or (wanted is None and self.name not in MOCKED):
            with engines.vllm(self.folder) as engine:
                yield engine
        else:
            with engines.mock(self._description(wanted), self.mock_version(), self.folder) as engine:
                yield engine

    def _description(self, wanted: str | None) -> Path:
        """The OpenAPI description for the mock."""
        own = self.checkout / "api_reference" / "openapi.transformed.yml"
        found = own if wanted is None else Path(wanted)
        if not found.is_file():
            raise SuiteFailed(f"there is no OpenAPI description {found}: name one as the engine")
        return found

    def mock_version(self) -> str:
        """Of ``@stdy/cli``, as the suite's own ``package.json`` or script says."""
        for place in ("package.json", "scripts/mock"):
            named = self.checkout / place
            found = re.search(r'@stdy/cli(?:@|": *")([\d.]+)', named.read_text()) if named.is_file() else None
            if found is not None:
                return found[1]
        raise SuiteFailed(f"neither package.json nor scripts/mock of {self.checkout} names the mock's version")

    def addresses(self, root: str, model: str) -> dict[str, str]:
        """The environment that sends the tests to the engine or proxy at `root`."""
        told = root if self.name == "anthropic" else f"{root}/v1"
        return {
            "TEST_API_BASE_URL": told, "OPENAI_BASE_URL": f"{root}/v1", "ANTHROPIC_BASE_URL": root,
            "OPENAI_API_KEY": "conformance", "ANTHROPIC_API_KEY": "conformance", "CONFORMANCE_MODEL": model,
        }  # fmt: skip


def recognise(checkout: Path, within: Path = ROOT / ".venv-conformance") -> Suite:
    """The suite whose checkout (or unpacked source distribution) this is; all that is made for it lies in `within`."""
    project = checkout / "pyproject.toml"
    if not project.is_file():
        raise SuiteFailed(f"{checkout} is no checkout of a suite: it has no pyproject.toml")
    text = project.read_text()
    name = re.search(r'^name = "([^"]+)"', text, re.MULTILINE)
    if name is None or name[1] not in (*MOCKED, "langchain-tests"):
        raise SuiteFailed(f"{checkout} is none of openai-python, anthropic-sdk-python and langchain-tests")
    version = re.search(r'^version = "([^"]+)"', text, re.MULTILINE)
    return Suite(checkout.resolve(), name[1], version[1] if version else "unknown", within / name[1])


def _uv() -> str:
    found = shutil.which("uv") or str(ROOT / ".venv-uv" / "bin" / "uv")
    if not Path(found).exists():
        raise SuiteFailed("there is no uv: .ci/setup makes one when it builds an environment")
    return found
