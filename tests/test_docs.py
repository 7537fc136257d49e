"""Documentation that repeats the code must repeat it exactly."""

from __future__ import annotations

from pathlib import Path

from ajet_proxy.config import table
from ajet_proxy.core.continuity import OUTCOMES

ROOT = Path(__file__).parent.parent


def test_the_service_page_lists_every_setting() -> None:
    assert table() in (ROOT / "docs" / "service.md").read_text()


def test_the_page_on_continuity_explains_every_word() -> None:
    rows = "\n".join(f"| `{word}` | {meaning} |" for word, meaning in OUTCOMES.items())
    assert rows in (ROOT / "docs" / "continuity.md").read_text()
