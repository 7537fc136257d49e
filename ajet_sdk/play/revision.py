"""Which code an episode is played with: by default a digest of the files that hold it.

The first is the script that an interpreter or another helper is given, or else the program itself. Further arguments
count where they look like code. So a file that is data, or that the program writes, does not. That of an agent function
is the one in which it is written. A program's files are read for each episode as that opens, because they may change
while others run. That of a function is read once, because what is loaded does not change. A file that has not changed
is not read again.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import re
import shlex
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from stat import S_ISREG
from typing import Any

DIGITS = 16
SHOWN = 4
"""At most so many files are named in a line."""
INTERPRETERS = re.compile(
    r"(python|pypy|perl|ruby|php|lua|node|bash|sh|dash|zsh|ksh|fish|deno|bun|julia|Rscript|java)[\d.]*\Z"
)
"""Programs that are given a script, or after ``-c`` its text."""
HELPERS = re.compile(
    r"(env|nice|ionice|timeout|time|stdbuf|taskset|numactl|chrt|nohup|setsid|xargs|sudo|uv|uvx|poetry|pipenv|coverage|"
    r"torchrun|accelerate|npx|go|make|gmake)\Z"
)
"""Programs that run another one, which stands behind them."""
TEXT = re.compile(r"-[A-Za-z]*c\Z")
"""The flag of an interpreter before the text of a script, which may stand together with others: ``-lc``."""
MODULE = re.compile(r"-[A-Za-ln-z]*m(.*)\Z")
"""The flag before the name of a module, or together with it: ``-mNAME``."""
CODE = frozenset(
    "bash c cc cfg cjs conf cpp cs cu dart ex exs fish go h hpp hs ini ipynb j2 jar java jinja jl js jsx kt lua mjs mk "
    "ml mts php pl pm ps1 py pyc pyz r rb rs scala sh swift toml ts tsx wasm yaml yml zsh".split()
)
"""How names of files end that hold code, or how it is set up."""
MOST_BYTES = 64 * 2**20
"""A larger file than this counts only if it is the first."""
MAKEFILES = ("GNUmakefile", "makefile", "Makefile")
MAKE, GO = re.compile("g?make"), re.compile("go")
STARTS, GO_FILES = ("__main__.py", "index.js", "index.mjs"), ("*.go",)
"""The files by which a folder is run."""


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
    """The code of a command that a shell runs: its text, and the files of code that it names, also after a ``cd``."""
    words = shlex.shlex(text, posix=True, punctuation_chars=True)
    words.whitespace_split, words.commenters = True, ""
    files: list[Path] = []
    before = ""
    with suppress(ValueError):  # a quote that nothing closes
        for word in words:
            if before == "cd" and (here / word).is_dir():
                here = here / word
            named = _module_named(before, word, here)
            script = _matches(INTERPRETERS, before) and (here / word).is_file()
            files += [named] if named is not None else [here / word] if script or _is_code(here / word) else []
            before = word
    return _once(files), [text]


def _code(argv: Sequence[str], here: Path) -> tuple[list[Path], list[str]]:
    """The files that hold the code of a command, the main one first, and the code that stands in the command itself."""
    files: list[Path] = []
    texts: list[str] = []
    own = shutil.which(argv[0])
    helped = _matches(HELPERS, argv[0]) or _matches(INTERPRETERS, argv[0])
    if own is not None and not helped and is_own(Path(own)):
        files.append(Path(own))
    script, before = _matches(INTERPRETERS, argv[0]), ""
    for word in argv[1:]:
        script = script or _matches(INTERPRETERS, word)
        if script and TEXT.match(before):
            found, more = _of_text(word, here)
            files, texts = files + found, texts + more
        elif (named := _module_named(before, word, here)) is not None:
            files.append(named)
        elif _matches(INTERPRETERS, word) or _matches(HELPERS, word):
            pass
        elif helped and not files and not texts:
            files += _first(word, here, GO_FILES if _matches(GO, argv[0]) else STARTS)
        elif _is_code(here / word):
            files.append(here / word)
        before = word
    if not files and not texts and _matches(MAKE, argv[0]):
        files = [here / name for name in MAKEFILES if (here / name).is_file()][:1]
    if not files and not texts and own is not None:
        files = [Path(own)]
    return _once(files), texts


def _matches(pattern: re.Pattern[str], word: str) -> bool:
    return pattern.fullmatch(Path(word).name) is not None


def _once(files: Iterable[Path]) -> list[Path]:
    return list(dict.fromkeys(files))


def _first(word: str, here: Path, starts: Sequence[str]) -> list[Path]:
    """The code that an interpreter or a helper runs, if this word of its arguments says which. `starts` are the files
    by which it runs a folder."""
    path = here / word
    if path.is_file():
        return [path]
    if path.is_dir():
        return [found for start in starts for found in sorted(path.glob(start))]
    program = None if "/" in word else shutil.which(word)
    return [Path(program)] if program is not None and is_own(Path(program)) else []


def _is_code(path: Path) -> bool:
    """Whether this is a file of moderate size that looks like code: by its name, or because it can be run."""
    try:
        stat = path.stat()
    except (OSError, ValueError):
        return False
    if not S_ISREG(stat.st_mode) or stat.st_size > MOST_BYTES:
        return False
    return path.suffix[1:].lower() in CODE or path.name in MAKEFILES or bool(stat.st_mode & 0o111)


def is_own(path: Path) -> bool:
    """Whether a file is the user's: in the home folder, or in the current one."""
    found = path.absolute()
    return any(found.is_relative_to(folder) for folder in (os.path.expanduser("~"), Path.cwd()))


def shown(files: Sequence[Path]) -> str:
    """What the files are called, in a line."""
    here = Path.cwd()
    names = [str(path.relative_to(here) if path.is_relative_to(here) else path) for path in files]
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def _module_named(before: str, word: str, here: Path) -> Path | None:
    """The file of the module that ``-m NAME`` or ``-mNAME`` starts."""
    after = MODULE.match(before)
    joined = MODULE.match(word)
    name = word if after and not after[1] else joined[1] if joined else ""
    return _module(name, here) if name else None


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
