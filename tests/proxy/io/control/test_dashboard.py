"""Who gets the owner's page, and with which headers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.trajectory import drift
from ajet_sdk.page import FOLDER, live_page
from tests.proxy.serving import Client, serving

SECRET = "a secret of sixteen and more"


async def test_an_open_daemon_serves_the_page(tmp_path: Path) -> None:
    async with serving(tmp_path) as client:
        answer = await client.ask("GET", "/ajet/")
        assert (answer.status, answer.body.decode()) == (200, live_page()[0])
        assert answer.headers["Content-Type"].startswith("text/html")
        assert "frame-ancestors 'none'" in answer.headers["Content-Security-Policy"]
        assert answer.headers["Cache-Control"] == "no-store"
        assert (await client.ask("GET", "/ajet")).status == 200  # by way of a redirect
        assert (await client.ask("GET", "/ajet/nothing")).status == 404
        assert (await client.ask("GET", "/ajet/", Origin="http://evil.example")).status == 403


@pytest.mark.parametrize(
    ("scope", "status"), [("admin", 200), ("trainer", 403), ("agent", 403), (None, 401), ("forged", 401)]
)
async def test_with_keys_on_it_needs_an_admins(tmp_path: Path, scope: str | None, status: int) -> None:
    async with serving(tmp_path, admin_secret=SECRET) as client:
        answer = await client.ask("GET", "/ajet/", key=key_of(client, scope))
        assert answer.status == status
        if status != 200:
            assert set(answer.json["error"]) == {"message", "type", "code", "param"}


async def test_a_browser_without_a_key_gets_the_page_that_asks_for_one_and_holds_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path, admin_secret=SECRET) as client:
        await client.control("POST", "/episodes", {"task": "a task that is nobody's business"}, key=SECRET)
        answer = await client.ask("GET", "/ajet/", Accept="text/html,application/xhtml+xml")
        assert (answer.status, answer.body.decode()) == (401, live_page()[0])
        assert answer.headers.get("WWW-Authenticate") is None  # or the browser asks for a name and a password itself


def test_every_reason_of_a_broken_chain_is_explained() -> None:
    script = (FOLDER / "tokens.js").read_text()
    table = script[script.index("const REASONS") :].partition("};")[0]
    assert set(re.findall(r"^  (\w+):", table, re.MULTILINE)) == set(re.findall(r"^`(\w+)`", drift.__doc__ or "", re.M))


def key_of(client: Client, scope: str | None) -> str | None:
    if scope in ("admin", "trainer", "agent"):
        return client.key(Claims(scope))  # type: ignore[arg-type]
    return None if scope is None else "ajet-forged.key"
