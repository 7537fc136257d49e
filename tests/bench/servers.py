"""What the proxy is measured against: a canned engine that costs next to nothing, and two relays that only relay.

    python -m tests.bench.servers engine PORT
    python -m tests.bench.servers asyncio PORT ENGINE_PORT
    python -m tests.bench.servers aiohttp PORT ENGINE_PORT

The engine answers every POST with bytes made beforehand: one JSON document, or a stream of `CHUNKS` events when asked
for one. They carry token ids and logprobs, as the proxy asks for, whoever asks: all relays carry the same bytes.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import cache

from tests.kit.engine_dialect import Reply, chat_body, chat_events
from tests.kit.engine_tokens import Output

CHUNKS = 200


@cache
def canned() -> tuple[bytes, bytes]:
    """``(document, stream)`` as whole HTTP/1.1 responses; the stream is one event a chunk."""
    ids = tuple(97 + i % 26 for i in range(CHUNKS))
    output = Output(ids, tuple(-0.1 - i / 1000 for i in range(CHUNKS)), tuple(map(chr, ids)), "stop", None)
    body = {"model": "stub", "return_token_ids": True, "logprobs": True}
    reply = Reply("chatcmpl-0123456789abcdef", 1_795_000_000, body, [list(range(300))], [[output]])
    document = chat_body(reply)
    head = b"HTTP/1.1 200 OK\r\nserver: uvicorn\r\ncontent-type: "
    plain = head + b"application/json\r\ncontent-length: %d\r\n\r\n" % len(document) + document
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in chat_events(reply))
    return (
        plain,
        head + b"text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n",
    )


async def read_request(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """``(head, body)`` of the next request; empty at the end of the connection."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return b"", b""
    lower = head.lower()
    place = lower.find(b"content-length:")
    size = int(lower[place + 15 : lower.index(b"\r\n", place)]) if place >= 0 else 0
    return head, await reader.readexactly(size)


async def engine(port: int) -> asyncio.Server:
    plain, stream = canned()
    models = b'{"object":"list","data":[{"id":"stub","object":"model","owned_by":"vllm","max_model_len":100000}]}'
    listing = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(models) + models

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (request := await read_request(reader))[0]:
            head, body = request
            writer.write(listing if head.startswith(b"GET") else stream if b'"stream":true' in body else plain)
            await writer.drain()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", port, backlog=1000)


async def asyncio_relay(port: int, engine_port: int) -> asyncio.Server:
    """Parses nothing but the request's length; the answer is copied as it comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", engine_port)

        async def back() -> None:
            while data := await up_reader.read(65536):
                writer.write(data)
                await writer.drain()

        copying = asyncio.ensure_future(back())
        while (request := await read_request(reader))[0]:
            up_writer.write(b"".join(request))
        copying.cancel()
        up_writer.close()
        writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", port, backlog=1000)


async def aiohttp_relay(port: int, engine_port: int) -> object:
    """What a relay costs that is written in the proxy's own library and does nothing else."""
    from aiohttp import ClientSession, TCPConnector, web

    session = ClientSession(connector=TCPConnector(limit=0), auto_decompress=False)

    async def serve(request: web.Request) -> web.StreamResponse:
        url = f"http://127.0.0.1:{engine_port}{request.path_qs}"
        async with session.request(request.method, url, data=await request.read()) as answer:
            response = web.StreamResponse(
                status=answer.status, headers={"content-type": answer.headers["content-type"]}
            )
            await response.prepare(request)
            async for data in answer.content.iter_any():
                await response.write(data)
            await response.write_eof()
            return response

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", serve)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=1000).start()
    return runner


async def main() -> None:
    kind, *ports = sys.argv[1:]
    kinds: dict[str, Callable[..., Awaitable[object]]] = {
        "engine": engine, "asyncio": asyncio_relay, "aiohttp": aiohttp_relay,
    }  # fmt: skip
    start = kinds[kind]
    server = await start(*map(int, ports))
    sys.stdout.write(f"ready {type(server).__name__}\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
