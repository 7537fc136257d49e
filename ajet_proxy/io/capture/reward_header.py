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


async def record_reward(
    ledger_port: LedgerPort, http: web.Request, identity: Identity, body: bytes, history: History | None = None,
    sent: Mapping[str, Any] | None = None, *, call: bool = False,
) -> Identity:
    """`identity` with the episode that it stands for, which has the reward of the request now, if it brings one.
    `call`: the request makes a call. `history` and `sent` find the episode where nothing names it.

    A request that is sent again with the same `body`, by an equal ``Idempotency-Key`` or a count of retries, gives the
    same reward, or with a key is refused for another value."""
    reward = identity.reward
    if identity.episode is not None or sent:
        looking = replace(identity, reward=None) if call and reward is not None and not reward.final else identity
        identity = replace(await ledger_port.find(looking, history, sent or {}), reward=reward)
    if reward is not None:
        if identity.episode is not None:
            http[SUBJECT] = identity.episode
        key = retry_key(http.headers)
        said = key or repr((http.method, identity.path, identity.agent, reward))
        digest = hashlib.sha256(said.encode("utf-8", "surrogatepass") + body).hexdigest()
        await ledger_port.reward(identity, f"rew-{digest[:32]}", None if key else retries(http.headers) > 0)
    return identity
