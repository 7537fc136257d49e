"""The code blocks of a Markdown page, and what a test does with each.

The word after the language on a block's first line says it:

=================  =====================================================================================================
``python test``    run by `.venv`'s Python, in a fresh folder, with the environment of a running proxy
``sh test``        run by ``bash -euo pipefail``, likewise, with `.venv/bin` first on the path
``sh host``        shown for another machine: not run, but each ``ajet…`` command in it must know every flag it is given
``sh tutorial``    of a tutorial: run by `tests/tutorials`, in a terminal of its own if it is ``sh terminal``
``sh``             only ``make`` lines: each target must exist
other languages    not code (``text``, ``json``, ``toml``, ``mermaid``)
=================  =====================================================================================================

A block of Python or shell that says none of this is an error: nothing that looks runnable goes unread.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL)
NOT_CODE = ("", "text", "json", "toml", "yaml", "ini", "mermaid", "console", "http", "diff")
PROGRAMS = ("ajet", "ajet-proxy", "ajet-trainer")


@dataclass(frozen=True, slots=True)
class Block:
    """`line` is that of the opening fence; `kind` is ``python test``, ``sh host``, … (language and mark)."""

    line: int
    kind: str
    text: str

    @property
    def is_code(self) -> bool:
        return self.kind.split(" ")[0] not in NOT_CODE


def blocks(page: Path) -> list[Block]:
    text = page.read_text()
    found = []
    for match in FENCE.finditer(text):
        indent = len(match["indent"])
        body = "\n".join(line[indent:] for line in match["text"].splitlines())
        found.append(Block(text[: match.start()].count("\n") + 1, match["info"].strip(), body + "\n"))
    return found


def commands(text: str) -> Iterator[list[str]]:
    """Each shell command of `text` as words; comments and continued lines are dealt with."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def our_commands(text: str) -> Iterator[tuple[str, list[str], list[str]]]:
    """``(program, subcommands, flags)`` of each of our programs in `text`; what follows ``--`` is somebody else's."""
    for words in commands(text):
        names = [Path(word).name for word in words]
        at = next((index for index, name in enumerate(names) if name in PROGRAMS), None)
        if at is not None:  # what comes after is the program's, a folder of the same name too
            rest = words[at + 1 :]
            own = rest[: rest.index("--")] if "--" in rest else rest
            flags = [word.split("=")[0] for word in own if word.startswith("--")]
            plain = [word for word in own[: 2 if own[:1] == ["train"] else 1] if not word.startswith("-")]
            yield names[at], plain, flags
