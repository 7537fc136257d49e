"""Documentation that repeats the code must repeat it exactly."""

from __future__ import annotations

from pathlib import Path

from ajet_proxy.config import table

ROOT = Path(__file__).parent.parent


def test_the_service_page_lists_every_setting() -> None:
    assert table() in (ROOT / "docs" / "service.md").read_text()
