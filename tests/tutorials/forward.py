"""Stands for ``ssh -L`` between two hosts of a test: whatever connects here is carried there, and back.

    python -m tests.tutorials.forward 127.0.0.1:8484 10.99.1.2:2222

ssh also encrypts, and asks who you are. This does neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys


def address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


async def main(here: str, there: str) -> None:
    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while piece := await reader.read(65536):
                writer.write(piece)
                await writer.drain()
            writer.write_eof()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            other_reader, other_writer = await asyncio.open_connection(*address(there))
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, other_writer), copy(other_reader, writer))
        for end in (writer, other_writer):
            end.close()

    server = await asyncio.start_server(carry, *address(here))
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
