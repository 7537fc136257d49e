"""The code that an episode is played with: by default a digest of the program's own file.

That of an agent function is the file in which it is written. It is read once, because what is loaded does not change.
A program's own file is the first that its command names, and that is not known to run another one, as interpreters do.
It is read for each episode as that opens, because it may change while others run. A file that has not changed is not
read again.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

DIGITS = 16
HELPERS = re.compile(
    r"(python|pypy|perl|ruby|php|lua|node|bash|sh|dash|zsh|ksh|fish|deno|bun|julia|Rscript|java|uv|uvx|poetry|pipenv|"
    r"coverage|torchrun|accelerate|npx|go|make|env|nice|nohup|setsid|stdbuf|sudo|taskset|time|timeout|xargs)[\d.]*\Z"
)
"""Programs that run another one, or a script."""


class Digest:
    """The digest of a `file`; call it for the one of now. It is None where no file can be read."""

    def __init__(self, file: Path | None) -> None:
        self.file = file
        self.name = "agent" if file is None else file.name
        """Its file's name, or another word for it."""
        self._seen: Any = None
        self._digest: str | None = None

    def __call__(self) -> str | None:
        if self.file is None:
            return None
        try:
            stat = os.stat(self.file)
            seen = (stat.st_mtime_ns, stat.st_size, stat.st_ino)
            if seen != self._seen:
                self._digest = hashlib.sha256(self.file.read_bytes()).hexdigest()[:DIGITS]
                self._seen = seen
        except OSError:
            self._seen = None
            return None
        return self._digest


class Changes:
    """Sees changes of the code that `digest` tells (None: not now, as while an editor puts another in its place). It
    has changed once it is another one at two looks in a row, because it may be looked at while it is written."""

    def __init__(self, digest: Callable[[], str | None]) -> None:
        self._digest = digest
        self._seen = self._last = digest()

    def look(self) -> bool:
        """True if the code has changed, once for each change."""
        before, self._last = self._last, self._digest()
        if self._last in (None, self._seen) or self._last != before:
            return False
        self._seen = self._last
        return True


def of_program(argv: Sequence[str], cwd: str | None = None) -> Digest:
    """The code of a program that is started by `argv`. It has a name, though it may have no file of its own."""
    here, before = Path(cwd or "."), ""
    for number, word in enumerate(argv):
        module = _module(word, here) if re.match("-[A-Za-ln-z]*m$", before) else None
        installed = shutil.which(word) if number == 0 and "/" not in word else None
        found = Path(module or installed or here / word)
        own = (os.path.expanduser("~"), Path.cwd())
        if _is_file(found) and (installed is None or any(found.absolute().is_relative_to(folder) for folder in own)):
            return Digest(found)
        before = word
    digest = Digest(None)
    digest.name = Path(argv[0]).name
    return digest


def of_agent(agent: Any) -> Digest:
    """The code of an agent function, or of another object that is called."""
    while isinstance(agent, partial):
        agent = agent.func
    agent = inspect.unwrap(agent) if inspect.isroutine(agent) else type(agent)
    try:
        found = inspect.getsourcefile(agent)
    except TypeError:  # of something that is not written in Python
        found = None
    return Digest(Path(found) if found is not None else None)


def _is_file(path: Path) -> bool:
    """True for a file that runs no other."""
    try:
        return path.is_file() and HELPERS.match(path.name) is None
    except (OSError, ValueError):
        return False


def _module(name: str, here: Path) -> str | None:
    """The file of a module that ``-m NAME`` starts, where it stands among the user's own files."""
    for folder in (str(here), *os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        stem = str(Path(folder or here, *name.split(".")))
        for file in (f"{stem}/__main__.py", f"{stem}.py"):
            if Path(file).is_file():
                return file
    return None
