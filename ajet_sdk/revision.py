"""Which code an episode is played with: by default a digest of the file that holds it.

The file of a program is the script that its interpreter is given, or the program itself. That of an agent function is
the one in which it is written. A program's file is read for each episode as that opens, because it may change while others
run. That of a function is read once, because what is loaded does not change. A file that has not changed is not read
again.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DIGITS = 16
RUNNERS = re.compile(
    r"(python|pypy|perl|ruby|php|lua|node|bash|sh|dash|zsh|deno|bun|julia|Rscript|env|nice|timeout|uv|poetry|pipenv)"
    r"[\d.]*\Z"
)
"""Programs that run another one, which stands behind them."""


class Digest:
    """The digest of some files and texts; call it for the one of now. It is None where no file can be read."""

    def __init__(self, files: Sequence[Path], texts: Sequence[str] = ()) -> None:
        self.files, self._texts = tuple(files), tuple(texts)
        self.name = self.files[0].name if self.files else "agent"
        """What it is the digest of, in short."""
        self._seen: Any = None
        self._digest: str | None = None

    def __call__(self) -> str | None:
        try:
            seen = [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in map(os.stat, self.files)]
            if seen != self._seen:
                self._digest, self._seen = self._read(), seen
        except OSError:
            self._seen = None
            return None
        return self._digest

    def _read(self) -> str | None:
        found = hashlib.sha256()
        for text in self._texts:
            found.update(text.encode("utf-8", "surrogateescape") + b"\0")
        for file in self.files:
            found.update(hashlib.sha256(file.read_bytes()).digest())
        return found.hexdigest()[:DIGITS] if self.files or self._texts else None


def of_program(argv: Sequence[str], reward_cmd: str | None = None, cwd: str | None = None) -> Digest:
    """The code of a program, and of the command that rewards it."""
    here = Path(cwd or ".")
    files, texts = _code(argv, here)
    if reward_cmd is not None:
        more, text = _of_text(reward_cmd, here)
        files, texts = files + more, texts + text
    return Digest(files, texts)


def of_agent(agent: Any) -> Digest:
    """The code of an agent function, or of another object that is called."""
    while isinstance(agent, partial):
        agent = agent.func
    agent = inspect.unwrap(agent) if inspect.isroutine(agent) else type(agent)
    try:
        found = inspect.getsourcefile(agent)
    except TypeError:  # of something that is not written in Python
        found = None
    return Digest([Path(found)] if found is not None else [])


def _of_text(text: str, here: Path) -> tuple[list[Path], list[str]]:
    """The code of a command that a shell runs: its text, and the files that it names."""
    try:
        words = shlex.split(text)
    except ValueError:
        words = []
    return [here / word for word in words if (here / word).is_file()], [text]


def _code(argv: Sequence[str], here: Path) -> tuple[list[Path], list[str]]:
    """The file that holds the code of a command. If the code stands in the command, that is its text."""
    words = list(argv)
    if RUNNERS.match(Path(words[0]).name):
        for place, word in enumerate(words[1:], 1):
            behind = words[place + 1] if place + 1 < len(words) else ""
            if word == "-c" and behind:
                return _of_text(behind, here)
            if word == "-m" and behind and (module := _module(behind, here)) is not None:
                return [module], []
            if (here / word).is_file():
                return [here / word], []
    program = shutil.which(words[0])
    return ([Path(program)] if program is not None else []), []


def _module(name: str, here: Path) -> Path | None:
    """The file of a module that is started by its `name`, where it stands among the user's own files."""
    for folder in (str(here), *os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        stem = str(Path(folder or here, *name.split(".")))
        for file in map(Path, (f"{stem}/__main__.py", f"{stem}.py")):
            if file.is_file():
                return file
    return None


def told(revision: str | None, found: Callable[[], str | None]) -> Callable[[], str | None]:
    """The `revision` that was named, else what is `found`."""
    return found if revision is None else lambda: revision
