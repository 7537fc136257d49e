"""Markdown pages as data: their headings, links and tables, for the tests that hold pages to the code."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

from ajet_proxy.io.control.gauges import READ
from ajet_proxy.io.runtime.metrics import METRICS
from ajet_sdk.routes import ROUTES
from ajet_sdk.settings import Settings
from tests.kit.readme import FENCE
from tests.kit.source import ROOT

PAGES = (
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")),
    ROOT / "integrations" / "README.md", *sorted((ROOT / "docs").rglob("*.md")),
)  # fmt: skip
CONTRACT = (ROOT / "docs/contract.md", *sorted((ROOT / "docs/contract").glob("*.md")))
CITATION = re.compile(r"\bcontract\b(?:[\s#]+§(\d+(?:\.\d+)*))?", re.IGNORECASE)
"""The word, and the section behind it, if there is one."""
_HEADING = re.compile(r"^(#+) +(.*?)(?: +#+)?$", re.MULTILINE)
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?: \"[^\"]*\")?\)")
_CODE = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")


def headings(text: str) -> list[str]:
    """The headings of a page, in order, as they are written."""
    return [match[2] for match in _HEADING.finditer(FENCE.sub("", text))]


def anchors(text: str) -> set[str]:
    """The anchors that a link to a place on the page may name: its headings as GitHub turns them into names."""
    seen: Counter[str] = Counter()
    out = set()
    for heading in headings(text):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        out.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return out


def broken_links(page: Path, text: str) -> Iterator[str]:
    """The relative links of `text`, which stands at `page`, that lead to no file or to no heading of it."""
    for target in _LINK.findall(_CODE.sub("", FENCE.sub("", text))):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = page if not name else (page.parent / name).resolve()
        if not there.exists():
            yield f"{target}: no such file"
        elif anchor and anchor not in anchors(text if there == page else there.read_text()):
            yield f"{target}: no such heading"


def contract() -> dict[str, str]:
    """The sections of the contract, by number: they are counted over all its pages."""
    return sections("".join(page.read_text() for page in CONTRACT))


def sections(text: str) -> dict[str, str]:
    """The text under each numbered heading, by its number, up to the next heading."""
    found: dict[str, str] = {}
    for part in re.split(r"^(?=#+ )", text, flags=re.MULTILINE):
        number = re.match(r"#+ (\d+(?:\.\d+)*)\.? ", part)
        if number is not None:
            assert number[1] not in found, f"two sections {number[1]}"
            found[number[1]] = part.partition("\n")[2]
    return found


def bad_citations(text: str, numbers: set[str]) -> list[str]:
    """Where `text` speaks of the contract and names none of its sections `numbers`."""
    return [match[0] for match in CITATION.finditer(text) if match[1] not in numbers]


def tables(text: str) -> list[list[list[str]]]:
    """The tables of `text`: rows of cells, without the head."""
    found: list[list[list[str]]] = []
    before = ""
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not before.startswith("|"):
                found.append([])
            found[-1].append(cells)
        before = line
    return [table[2:] for table in found]


def words(text: str) -> list[str]:
    """The words in backquotes, in order; blocks of code are left out."""
    return re.findall(r"`([^`]+)`", FENCE.sub("", text))


def table_of(settings: Settings) -> str:
    """Every setting as rows of a Markdown table, for the documentation."""
    rows = ["| key | default | meaning |", "|---|---|---|"]
    for name, found in settings.options.items():
        rows.append(f"| `{name}` | {f'`{found.shown}`' if found.shown else ''} | {found.doc} |")
    return "\n".join(rows)


def metrics_table() -> str:
    """Every metric as rows of a Markdown table."""
    rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
    for metric in (*METRICS, *READ):
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        rows.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    return "\n".join(rows)


def bounds_table() -> str:
    """The table of docs/reference/limits.md: the bounds of each number in a body. One that is over 0 has `>`."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for route in ROUTES:
        for one in fields(route.body) if route.body is not None else ():
            if (bounds := one.metadata.get("bounds")) is not None:
                least, most, above = bounds
                row = (f"`{one.name}`", f"{'> ' if above else ''}{least:.15g}", f"{most:.15g}")
                found.setdefault(row, []).append(f"`{route.name}`")
    rows = (f"| {' | '.join(row)} | {', '.join(names)} |" for row, names in sorted(found.items()))
    return "\n".join(["| field | least | most | route |", "|---|---|---|---|", *rows])
