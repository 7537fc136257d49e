"""One list of requests, asked of an engine directly and through the proxy, and what must be the same afterwards."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from tests.kit import compare, record_tapes, tapes, wire

Cases = Mapping[str, tuple[str, dict[str, Any]]]
Pair = tuple[wire.Answer, wire.Answer]
AGAIN = 4
"""So often is a stream asked for once more."""


def captured(cases: Cases) -> list[str]:
    """The cases that make calls: those that the engine did not refuse when the tapes were recorded."""
    told = tapes.load()
    return [name for name in cases if name not in record_tapes.PASSED and told[name, tapes.AGENT].status == 200]


def ask_all(url: str, prefix: str, cases: Cases) -> dict[str, wire.Answer]:
    """One request after another: the engine's numbers may depend on what else is in a batch."""

    async def asking() -> dict[str, wire.Answer]:
        return {
            name: await wire.send(url + prefix.format(name) + route, body=body) for name, (route, body) in cases.items()
        }

    return asyncio.run(asking())


def the_agent_sees(
    seen: wire.Answer, own: wire.Answer, *, named: bool, same: Callable[[bytes, bytes], None] = compare.same_answer
) -> None:
    """Fails unless `seen` is the engine's `own` answer; `named`: with the headers that name episode and calls. `same`
    compares two bodies of the route."""
    assert seen.status == own.status
    assert seen.headers["content-type"] == own.headers["content-type"]
    same(seen.body, own.body)
    ours = {header for header in seen.headers if header.startswith("x-ajet-")}
    assert ours == {"x-ajet-episode", "x-ajet-call"} or not named


def once_alike(check: Callable[[wire.Answer, wire.Answer], None], pair: Pair, again: Callable[[int], Pair]) -> None:
    """Fails unless `check` passes for what an agent saw and the engine's own answer, asked for `again` if need be.

    The engine may differ from itself: where it is busy it puts several tokens into one event, and its parsers then cut
    the text otherwise; which of two equal beams wins depends on what it has cached. But it does not do so every time.
    """
    for number in range(AGAIN):
        try:
            check(*pair)
            return
        except AssertionError:
            pair = again(number)
    check(*pair)


def both(name: str, number: int, proxy: str, engine: str, route: str, body: Any) -> Pair:
    """The case `name` asked of both once more, through the proxy in an episode of its own."""

    async def asking() -> Pair:
        through = f"{proxy}/e/{name}-again-{number}{route}"
        return await wire.send(through, body=body), await wire.send(engine + route, body=body)

    return asyncio.run(asking())


def stored_is_reported(name: str, cases: Cases, calls: list[dict[str, Any]], seen: wire.Answer, engine: str) -> None:
    """Fails unless `calls` hold what the engine reports to a direct question for ids and logprobs."""
    route, body = cases[name]
    plain = {key: value for key, value in body.items() if not key.startswith("stream")}
    reported = asyncio.run(wire.send(engine + route, body=record_tapes.as_proxy(name, route, plain))).json()
    assert [call["call"] for call in calls] == seen.headers["x-ajet-call"].split(",")
    assert len(calls) == len(reported["choices"])
    for call, choice in zip(calls, reported["choices"], strict=True):
        rows = compare.rows(choice["logprobs"])
        assert call["complete"] is True
        assert call["prompt_token_ids"] == (reported.get("prompt_token_ids") or choice["prompt_token_ids"])
        assert call["token_ids"] == choice["token_ids"]
        assert call["logprobs"] == pytest.approx(rows[len(rows) - len(choice["token_ids"]) :], abs=1e-5)
        assert call["finish_reason"] == choice["finish_reason"]
