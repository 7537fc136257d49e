"""A box of Harbor without a container, for tests: a folder of this machine, in which commands run as they are."""

import asyncio
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from harbor.environments.base import BaseEnvironment, ExecResult


class Box(BaseEnvironment):
    def __init__(self, *args: Any, **more: Any) -> None:
        self.root = Path(tempfile.mkdtemp())
        super().__init__(*args, **more)

    @staticmethod
    def type() -> str:
        return "bare"

    def _validate_definition(self) -> None:
        """Needs no image."""

    def inside(self, text: object) -> str:
        """Moves the paths of a box under this one's folder, because Harbor names them from the root."""
        return re.sub(r"(?<!\w)/(logs|tests|app|solution)\b", rf"{self.root}/\1", str(text))

    async def start(self, force_build: bool) -> None:
        for folder in ("logs/agent", "logs/verifier", "logs/artifacts", "tests", "app"):
            (self.root / folder).mkdir(parents=True)

    async def stop(self, delete: bool) -> None:
        await self.exec("tmux kill-server")
        shutil.rmtree(self.root)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        shutil.copy(self.inside(source_path), self.inside(target_path))

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        shutil.copytree(self.inside(source_dir), self.inside(target_dir), dirs_exist_ok=True)

    download_file, download_dir = upload_file, upload_dir

    async def exec(
        self, command: str, cwd: str | None = None, env: dict[str, str] | None = None, timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:  # fmt: skip
        own = {**os.environ, **(env or {}), "TMUX_TMPDIR": str(self.root)}
        piped = asyncio.subprocess.PIPE
        told, where = ("bash", "-c", self.inside(command)), self.inside(cwd or "/app")
        run = await asyncio.create_subprocess_exec(*told, cwd=where, env=own, stdout=piped, stderr=piped)
        out, err = await run.communicate()
        return ExecResult(stdout=out.decode(), stderr=err.decode(), return_code=run.returncode or 0)
