"""One file a protocol: what to ask the engine for on the agent's behalf, and where the answer stands.

A dialect is stateless and knows field names only. `reading.Reading` holds what has been read of one answer, and
`exchange.Exchange` drives it. A protocol that is not the engine's own is translated on the way (`messages`).
"""

from __future__ import annotations

from ajet_proxy.core.protocol.anthropic.messages import MESSAGES
from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.completions import COMPLETIONS
from ajet_proxy.core.protocol.reading import Dialect
from ajet_proxy.core.protocol.responses import RESPONSES

CAPTURED: dict[str, Dialect] = {dialect.path: dialect for dialect in (CHAT, COMPLETIONS, MESSAGES, RESPONSES)}
"""The routes whose POST requests are captured."""
