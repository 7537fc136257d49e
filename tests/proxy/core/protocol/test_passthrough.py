"""A request that is usually carried over another route goes out as it is, and is not captured."""

from __future__ import annotations

from ajet_proxy.core.protocol.anthropic.messages import MESSAGES
from ajet_proxy.core.protocol.exchange import Exchange
from ajet_proxy.core.protocol.passthrough import Uncarried
from ajet_proxy.core.protocol.request import Request

BODY = b'{ "model": "m", "messages": [{"role": "user", "content": [{"type": "document"}]}] }'


def test_nothing_is_changed_and_nothing_is_captured() -> None:
    dialect = Uncarried(MESSAGES)
    exchange = Exchange(dialect, dialect.translate(Request(BODY)))
    assert (dialect.name, dialect.path, exchange.target) == ("messages", "/v1/messages", "/v1/messages")
    assert (exchange.upstream_body, exchange.altered) == (BODY, ())
    assert exchange.keep_alive == MESSAGES.keep_alive
    exchange.on_headers(200, "application/json")
    assert [getattr(lost, "reason", "") for lost in exchange.outcomes] == ["no_chat_route"]
    assert exchange.feed(b'{"any": 1}') + exchange.finish() == [b'{"any": 1}']
