"""Rewards that ride on requests as a header: on record before the request itself is handled, and once.

A request that makes no call rewards what its name last stood for. One that makes a call rewards the episode which the
call goes to, unless its reward is final: then it can only be meant for what is there already.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from ajet_proxy.core.conversation.history import History
from ajet_proxy.core.identity.headers import retries, retry_key
from ajet_proxy.core.identity.ladder import Identity
from ajet_proxy.io.http.audit import SUBJECT
from ajet_proxy.io.ledger_port.port import LedgerPort


class Rewards:
    """Records them at a ledger_port."""

    def __init__(self, ledger_port: LedgerPort) -> None:
        self._ledger_port = ledger_port

    async def record(
        self, http: web.Request, identity: Identity, body: bytes, history: History | None = None,
        sent: Mapping[str, Any] | None = None, *, call: bool = False,
    ) -> Identity:
        """`identity` with the episode that it stands for, which has the reward of the request now, if it brings one.
        `call`: the request makes a call. `history` and `sent` find the episode where nothing names it."""
        labels, reward = identity.labels, identity.labels.reward
        if identity.episode is not None or sent:
            open_still = call and reward is not None and not reward.final
            looking = replace(identity, labels=replace(labels, reward=None)) if open_still else identity
            identity = replace(await self._ledger_port.find(looking, history, sent or {}), labels=labels)
        if reward is not None:
            await self._give(http, identity, body)
        return identity

    async def _give(self, http: web.Request, identity: Identity, sent: bytes) -> None:
        """A request that is sent again with the body `sent`, by an equal ``Idempotency-Key`` or a count of retries,
        gives the same reward, or with a key is refused for another value."""
        if identity.episode is not None:
            http[SUBJECT] = identity.episode
        key = retry_key(http.headers)
        said = key or repr((http.method, identity.path, identity.labels.agent, identity.labels.reward))
        digest = hashlib.sha256(said.encode("utf-8", "surrogatepass") + sent).hexdigest()
        await self._ledger_port.reward(identity, f"rew-{digest[:32]}", None if key else retries(http.headers) > 0)
