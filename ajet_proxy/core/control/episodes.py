"""The routes of episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from ajet_proxy.core.control.asked import Answer, Asked, Body
from ajet_proxy.core.identity.keys import Claims
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.views import Tokens, Wanted, parts, records
from ajet_sdk.errors import BadRequest, Forbidden
from ajet_sdk.routes import OpenEpisode

MAX_RECORDS = 1000
_TOKENS: Mapping[str, Tokens] = {"0": "none", "1": "all", "timelines": "timelines"}


def open_episode(asked: Asked) -> Answer:
    tenant, body = asked.whole_tenant("it opens no other"), asked.body
    episode = asked.name("ep")
    events = asked.commands.open_episode(body, episode=episode, at=asked.at, tenant=tenant)
    return Answer(partial(_opened, asked, episode, asked.issue(tenant, episode), body), events)


def _opened(asked: Asked, episode: str, key: str, body: OpenEpisode) -> Body:
    version = asked.state.weights.policy_version
    teams = {
        kind: {name: {"model": model, "policy_version": version(model)} for name, model in given.items()}
        for kind, given in (("members", body.members), ("teachers", body.teachers)) if given
    }
    return {
        "episode": episode, "task": body.task, "base_url": f"{asked.base}/e/{episode}/v1", "api_key": key,
        "policy_version": version(body.model or asked.state.weights.only_model()),
        "env": environment(asked.base, episode, key, body.task), **teams,
    }


def environment(base: str, episode: str, key: str, task: str | None) -> dict[str, str]:
    """The variables that a program of this episode is given (contract §3.5)."""
    root = f"{base}/e/{episode}"
    return {
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_BASE": f"{root}/v1",
        "OPENAI_API_KEY": key,
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": key,
        "AJET_PROXY_URL": base,
        "AJET_EPISODE": episode,
        "AJET_TASK": task or "",
    }


def list_episodes(asked: Asked) -> Answer:
    query, limit = asked.query, asked.number("limit", 100, 1, MAX_RECORDS)
    wanted = Wanted(limit, query.get("state"), query.get("task"), query.get("before"))
    return Answer(lambda: records(asked.state, wanted))


def get_episode(asked: Asked) -> Answer:
    tokens = _TOKENS.get(asked.query.get("tokens", "0"))
    if tokens is None:
        raise BadRequest("tokens must be 0, 1 or timelines", param="tokens")
    episode = own(asked, asked.id)
    return Answer(lambda: parts(asked.state, episode, tokens=tokens))


def reward(asked: Asked) -> Answer:
    episode, name = own(asked, asked.id), asked.name("rew")
    events = asked.commands.reward(episode, asked.body, reward_id=name, at=asked.at)
    return Answer(lambda: {"id": name, **shown(asked)}, events)


def reward_answer(asked: Asked) -> Answer:
    """A reward whose episode is found by the id of an answer."""
    body = asked.body
    if body.response is None:
        raise BadRequest("name the answer as response, or the episode in the path", param="response")
    episode, call = asked.state.episodes.part_of(body.response, body.call, partial(reaches, asked.claims))
    return reward(replace(asked, id=episode.id, body=replace(body, call=call, response=None)))


def seal(asked: Asked) -> Answer:
    return Answer(partial(shown, asked), asked.commands.seal(own(asked, asked.id), at=asked.at))


def abort(asked: Asked) -> Answer:
    return Answer(partial(shown, asked), asked.commands.abort(own(asked, asked.id), asked.body, at=asked.at))


def heartbeat(asked: Asked) -> Answer:
    return Answer(partial(shown, asked), asked.commands.heartbeat(own(asked, asked.id), at=asked.at))


def own(asked: Asked, episode: str) -> str:
    """`episode`, if it exists and the caller may reach it."""
    claims = asked.claims
    if claims.episode not in (None, episode):
        raise Forbidden(f"this key is for episode {claims.episode} alone", code="foreign_episode")
    if not reaches(claims, asked.state.episodes.known(episode)):
        raise Forbidden(f"episode {episode} belongs to another tenant", code="foreign_episode")
    return episode


def reaches(claims: Claims, episode: Episode) -> bool:
    """Tell whether the caller may see and change `episode`."""
    own = claims.episode in (None, episode.id) and claims.tenant == episode.opening.tenant
    return own or claims.scope == "admin"


def shown(asked: Asked) -> dict[str, Any]:
    """The episode in the path, as most routes answer with it."""
    known = asked.state.episodes.known(asked.id)
    out = {"episode": known.id, "state": known.state, "reward": known.reward()}
    more = {
        "reason": known.reason, "detail": known.detail, "reward_by_agent": known.reward_by_agent() or None,
    }
    return out | {name: value for name, value in more.items() if value is not None}
