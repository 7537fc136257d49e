"""A headless Chromium driven over its own debugging protocol: what a page shows, asks for and complains about.

Debian calls the package ``chromium``. Nothing else is needed: the protocol is JSON over a WebSocket.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
MISSING = "no Chromium on PATH: apt-get install chromium, then make test-page"
START_S = 300.0


def find() -> str | None:
    """Where Chromium is, if it is installed."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab. `requests` are the URLs it asked for; `complaints` its console errors, exceptions and policy reports."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.requests: list[str] = []
        self.complaints: list[str] = []
        self._socket = socket
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.reader = asyncio.get_running_loop().create_task(self._read())

    async def send(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the protocol, and its result."""
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        return await asyncio.wait_for(self._waiting[number], 300)

    async def _read(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                waiting = self._waiting.pop(said["id"])
                if "error" in said:
                    waiting.set_exception(RuntimeError(said["error"]["message"]))
                else:
                    waiting.set_result(said["result"])
                continue
            params = said["params"]
            match said["method"]:
                case "Network.requestWillBeSent":
                    self.requests.append(params["request"]["url"])
                case "Runtime.exceptionThrown":
                    self.complaints.append(str(params["exceptionDetails"]))
                case "Log.entryAdded" if params["entry"]["level"] == "error":
                    self.complaints.append(str(params["entry"].get("text")) + " " + str(params["entry"].get("url")))

    async def open(self, url: str) -> None:
        for domain in ("Page", "Network", "Runtime", "Log"):
            await self.send(f"{domain}.enable")
        await self.send("Page.navigate", url=url)

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression."""
        said = await self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in said, said
        return said["result"].get("value")

    async def until(self, script: str, limit_s: float = 300.0) -> None:
        """Return once `script` is truthy."""
        deadline = asyncio.get_running_loop().time() + limit_s
        while not await self.run(f"!!({script})"):
            if asyncio.get_running_loop().time() > deadline:
                raise AssertionError(f"never true: {script}\n{await self.text()}\n{self.complaints}")
            await asyncio.sleep(0.05)

    async def text(self) -> str:
        return str(await self.run("document.body.innerText"))

    async def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Take this size and colour scheme."""
        await self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                        mobile=False)
        scheme = "dark" if dark else "light"
        await self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    async def picture(self, path: Path, *, whole: bool = True) -> None:
        """A PNG of the whole page, or of what is in view."""
        said = await self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        await asyncio.to_thread(path.write_bytes, base64.b64decode(said["data"]))


@contextlib.asynccontextmanager
async def browsing(profile: Path) -> AsyncIterator[Page]:
    """A new browser with one empty tab; it keeps what it keeps in `profile`."""
    program = find()
    assert program is not None, MISSING
    process = await asyncio.create_subprocess_exec(
        program, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--hide-scrollbars",
        "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with aiohttp.ClientSession() as session:
            port = await _port(profile / "DevToolsActivePort")
            async with session.get(f"http://127.0.0.1:{port}/json/list") as answer:
                tab = next(tab for tab in await answer.json(content_type=None) if tab["type"] == "page")
            async with session.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=0) as socket:
                page = Page(socket)
                try:
                    yield page
                finally:
                    page.reader.cancel()
                    await asyncio.gather(page.reader, return_exceptions=True)
    finally:
        process.terminate()
        await process.wait()


async def _port(file: Path) -> int:
    deadline = asyncio.get_running_loop().time() + START_S
    while asyncio.get_running_loop().time() < deadline:
        with contextlib.suppress(OSError, IndexError):
            return int((await asyncio.to_thread(file.read_text)).split("\n")[0])
        await asyncio.sleep(0.05)
    raise AssertionError("Chromium did not start")
