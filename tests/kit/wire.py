"""HTTP/1.1 as bytes: a client that shows exactly what a server wrote, chunk by chunk, with nothing smoothed over."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class Answer:
    """`chunks` are the chunks of a chunked body as they were framed, or the one body of a plain one."""

    status: int
    headers: dict[str, str]
    chunks: list[bytes]

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)

    def json(self) -> Any:
        return json.loads(self.body)

    def events(self) -> list[Any]:
        """The JSON of each ``data:`` line of a stream; ``[DONE]`` stays a string."""
        data = [line.removeprefix(b"data: ") for line in self.body.splitlines() if line.startswith(b"data: ")]
        return [item.decode() if item == b"[DONE]" else json.loads(item) for item in data]


async def send(
    url: str, *, method: str = "POST", body: Any = None, headers: dict[str, str] | None = None, timeout: float = 300.0
) -> Answer:
    """One request on its own connection. `body` is sent as it is when bytes, as JSON otherwise; None sends none."""
    async with asyncio.timeout(timeout):
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            path = parts.path + (f"?{parts.query}" if parts.query else "")
            writer.write(_request(method, path, parts.netloc, body, headers))
            await writer.drain()
            return await _answer(reader)
        finally:
            writer.close()


def _request(method: str, path: str, host: str, body: Any, headers: dict[str, str] | None) -> bytes:
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"host": host, "connection": "close", "accept-encoding": "identity", "content-length": str(len(payload))}
    if payload:
        fields["content-type"] = "application/json"
    fields |= {name.lower(): value for name, value in (headers or {}).items()}
    head = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("utf-8", "surrogateescape") + payload


async def _answer(reader: asyncio.StreamReader) -> Answer:
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    status = int(head[0].split(" ")[1])
    pairs = (line.split(":", 1) for line in head[1:] if line)
    headers = {name.lower(): value.strip() for name, value in pairs}
    if headers.get("transfer-encoding") == "chunked":
        return Answer(status, headers, await _chunks(reader))
    if "content-length" in headers:
        return Answer(status, headers, [await reader.readexactly(int(headers["content-length"]))])
    return Answer(status, headers, [await reader.read()])


async def _chunks(reader: asyncio.StreamReader) -> list[bytes]:
    """The chunks of a chunked body; `asyncio.IncompleteReadError` when the server broke off."""
    chunks = []
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        chunks.append(await reader.readexactly(size))
        await reader.readexactly(2)
    await reader.readuntil(b"\r\n")
    return chunks
