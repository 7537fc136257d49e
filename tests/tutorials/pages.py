"""A tutorial's page, run as a reader runs it: its terminals first to last, on one machine or on hosts of their own.

A block marked ``sh terminal`` gets a terminal of its own and goes on until the page is through. The blocks marked
``sh tutorial`` are one more terminal, and each runs to its end; lines that set a variable hold for those after it too.
``on NAME`` behind that names the host. Everything is run from the root of a clone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from integrations.quickstart.programs import Children, ticks
from tests.kit.readme import blocks
from tests.kit.source import ROOT

KINDS = ("sh terminal", "sh tutorial")
NAMES = ("math", "cocktail", "live", "critic", "team", "coding", "laptop", "puzzles", "traffic")
READY_S, BLOCK_S = 300.0, 1500.0
SETTING = re.compile(r"^(?:export )?\w+=.*$", re.MULTILINE)

Edit = Callable[[str], str]
"""Changes a command before it is run."""


def page_of(name: str) -> Path:
    return ROOT / "docs" / "start" / f"{name}.md"


def hosts_of(name: str) -> tuple[str, ...]:
    """The hosts that the page speaks of, if it speaks of any."""
    kinds = [block.kind.partition(" on ") for block in blocks(page_of(name)) if block.kind.startswith(KINDS)]
    return tuple(dict.fromkeys(host for _, _, host in kinds if host))


def play(
    name: str, clone: Path, children: Children, env: Mapping[str, str], *, log: Path,
    inside: Mapping[str, tuple[str, ...]] | None = None, edit: Edit = lambda text: text,
) -> str:  # fmt: skip
    """Runs the page `name` in `clone`, and returns what its own terminal showed. `inside` has, for each host, what
    begins a command there. Raises `QuickstartError` with the last words of what failed."""
    settings: dict[str, list[str]] = {}
    shown = log / "reader.log"
    for number, block in enumerate(blocks(page_of(name)), 1):
        kind, _, host = block.kind.partition(" on ")
        if kind not in KINDS:
            continue
        text = edit(block.text)
        own = kind == "sh terminal"
        script = f"cd {clone}\n" + "".join(f"{line}\n" for line in ([] if own else settings.get(host, []))) + text
        prefix = (inside or {}).get(host, ())
        out = log / f"terminal-{number}.log" if own else shown
        started = children.start(
            f"{name}, line {block.line}", [*prefix, "bash", "-euo", "pipefail", "-c", script], out, env
        )
        if own:
            if "ajet-proxy serve" in text:
                wait(children, READY_S, lambda out=out: "ajet-proxy ready on " in out.read_text(errors="replace"))
            continue
        settings.setdefault(host, []).extend(SETTING.findall(text))
        wait(children, BLOCK_S, lambda started=started: started.status is not None)
        started.check()
        children.finished(started)
    return shown.read_text(errors="replace")


def wait(children: Children, limit_s: float, until: Callable[[], bool]) -> None:
    for _ in ticks(limit_s, "nothing more happened"):
        if until():
            return
        children.check()
