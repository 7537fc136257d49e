"""The routes of judges, and what users say of answers."""

from __future__ import annotations

from functools import partial

from ajet_proxy.core.control.asked import Answer, Asked, Body
from ajet_proxy.core.control.episodes import own, reaches, shown
from ajet_proxy.core.ledger.episode import Episode
from ajet_sdk.errors import Forbidden, NotFound


def feedback(asked: Asked) -> Answer:
    body = asked.body

    def meant(episode: Episode) -> bool:
        return body.episode in (None, episode.id) and reaches(asked.claims, episode)

    call = body.call
    if body.response is not None:
        known, call = asked.state.episodes.part_of(body.response, call, meant)
    elif call is not None:
        found = asked.state.episodes.get(asked.state.episodes.by_call.get(call, ""))
        if found is None or not meant(found):
            raise NotFound(f"no call {call}: it is another tenant's, or is archived by now", code="unknown_call")
        known = found
    else:
        known = asked.state.episodes.known(own(asked, body.episode))
    events = asked.commands.judging.feedback(known.id, call, body, at=asked.at)
    return Answer(partial(_heard, known, call), events)


def _heard(known: Episode, call: str | None) -> Body:
    return {"episode": known.id, "state": known.state} | ({} if call is None else {"call": call})


def judge(asked: Asked) -> Answer:
    check_lane(asked, asked.state.episodes.known(asked.id).group_key.lane)
    return Answer(partial(shown, asked), asked.commands.judging.judge(asked.id, asked.body, at=asked.at))


def check_lane(asked: Asked, lane: str) -> None:
    """Raise `Forbidden` if the key of a judge does not reach `lane`."""
    if asked.claims.scope == "judge" and lane not in asked.claims.lanes:
        raise Forbidden(f"this key judges lane {', '.join(asked.claims.lanes)}, not {lane!r}", code="foreign_lane")
