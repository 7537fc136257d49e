"""Patience with a machine that stands still now and then: nobody is given up who is only slow."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LONG_S = 600.0
LIMITS = {
    "ajet_sdk.client.LEAST_ATTEMPT_S": 30.0, "ajet_sdk.play.episode.REST_S": LONG_S,
    "ajet_sdk.play.program.QUICK_S": LONG_S, "ajet_sdk.play.rollouts.STOP_DEADLINE_S": LONG_S,
}  # fmt: skip
"""Constants of the SDK, by name, with the seconds that they are in tests."""
PATIENT = "".join(f"import {name.rpartition('.')[0]}; {name} = {value}; " for name, value in LIMITS.items())
AJET = (sys.executable, "-c", f"{PATIENT}from ajet_sdk.cli import main; main()")
"""The command, as a program that is patient."""


def until(condition: Callable[[], object]) -> bool:
    """Waits until `condition` holds; False if it takes too long on any machine."""
    end = time.monotonic() + LONG_S
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return bool(condition())


@contextmanager
def turns_of_others() -> Iterator[Callable[[], int]]:
    """Tells how many turns others have had on the event loop since the block began."""
    turns = [0]

    async def others() -> None:
        while True:
            turns[0] += 1
            await asyncio.sleep(0)

    waiting = asyncio.ensure_future(others())
    try:
        yield lambda: turns[0]
    finally:
        waiting.cancel()


async def reached(condition: Callable[[], object]) -> None:
    """Waits until `condition` holds, while the event loop goes on."""
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
