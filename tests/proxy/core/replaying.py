"""A recorded exchange once more: the agent's request, and the engine's answer in whatever pieces."""

from __future__ import annotations

import json
import random

from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.request import JsonBody
from ajet_proxy.core.protocol.routes import CAPTURED
from ajet_proxy.core.trajectory.call import Outcome
from tests.kit.tapes import Tape
from tests.proxy.core.streams import run


def exchange_of(asked: Tape) -> Exchange:
    return Exchange(CAPTURED[asked.route], JsonBody(json.dumps(asked.request).encode()))


def replay(asked: Tape, answered: Tape, parts: list[bytes]) -> tuple[bytes, bytes, tuple[Outcome, ...]]:
    """``(what the client gets before the calls are settled, everything it gets, the outcomes)``."""
    exchange = exchange_of(asked)
    exchange.on_headers(answered.status, answered.headers["content-type"])
    early, late, outcomes = run(parts, exchange)
    return early, early + late, outcomes


def pieces(body: bytes, dice: random.Random) -> list[bytes]:
    out = []
    while body:
        size = dice.choice((1, 2, 3, 5, 17, 100, 1000))
        out.append(body[:size])
        body = body[size:]
    return out
