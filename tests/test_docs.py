"""Documentation that repeats the code must repeat it exactly."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ajet_proxy.config import table
from ajet_proxy.core import drift
from ajet_proxy.core.continuity import OUTCOMES

ROOT = Path(__file__).parent.parent


def test_the_service_page_lists_every_setting() -> None:
    assert table() in (ROOT / "docs" / "service.md").read_text()


def test_the_page_on_continuity_explains_every_word() -> None:
    rows = "\n".join(f"| `{word}` | {meaning} |" for word, meaning in OUTCOMES.items())
    assert rows in (ROOT / "docs" / "continuity.md").read_text()


def test_each_name_of_a_break_is_explained_and_says_whether_it_is_drift() -> None:
    text = (ROOT / "docs" / "continuity.md").read_text().partition("`broken_by`\n")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \|.*\| (yes )?\|$", text.partition("What counts")[0], re.MULTILINE))
    assert set(rows) == set(re.findall(r"^`(\w+)`", drift.__doc__ or "", re.MULTILINE))
    assert {name for name, counts in rows.items() if counts} == set(drift.DRIFTED)


@pytest.mark.parametrize("page", ["service.md", "threat-model.md", "topology.md"])
def test_what_a_page_says_is_tested_somewhere_is_there(page: str) -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "docs" / page).read_text())
    assert named
    assert [path for path in named if not (ROOT / path).is_file()] == []


def test_what_the_threat_model_says_checks_a_threat_is_there() -> None:
    named = re.findall(r"`((?:core|io|ajet_sdk)/\w+\.py)`", (ROOT / "docs" / "threat-model.md").read_text())
    assert named
    assert [path for path in named if not ((ROOT / path).is_file() or (ROOT / "ajet_proxy" / path).is_file())] == []
