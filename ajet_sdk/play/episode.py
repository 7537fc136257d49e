"""An episode: opened, rewarded, and settled. It is what an agent's author touches.

`EpisodeLife` is the life of an episode. `Episode` shows it to asynchronous agents, and `ajet_sdk.play.blocking.Episode`
to those that block.

Invariant: leaving the ``with`` block settles the episode. A final reward, a seal or an abort is left as it is, even
one of another process or of a header that the agent sent. Rewards that are not final are sealed. No reward at all
aborts, unless the episode is to be judged: that is sealed. So does an exception, whose text becomes the reason. A
failure to abort never hides that exception. `ajet_sdk.rewards` decides if the world failed then, and not the agent.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ajet_sdk import routes
from ajet_sdk.client import DEADLINE_S, Client, Reply, Target
from ajet_sdk.errors import AjetError, Conflict, NotFound
from ajet_sdk.rewards.blame import of_the_world
from ajet_sdk.rewards.decision import Earns, Ended, Fails, Source, Stands, decided, lost_to_the_world
from ajet_sdk.rewards.numbers import finite

E = TypeVar("E", bound="EpisodeLife")
PLAYED = Ended()
"""An agent came to its end, and said no more of it."""
ABORT_DEADLINE_S, STOP_DEADLINE_S = 10.0, 3.0
"""An abort on the way out of an exception, or of an interrupt, may try so long to be acknowledged."""
REST_S, LOOK_S = 5.0, 0.1
"""Seconds to wait for calls whose client has left, because only their end shows who failed; and between two looks."""


@dataclass(eq=False)
class Opened:
    """An episode as the proxy opened it."""

    id: str
    base_url: str
    """The ``base_url`` of OpenAI clients, which ends in ``/v1``."""
    api_key: str
    """The key of this one episode."""
    policy_version: int
    """The policy version that served when the episode was opened."""
    task: str | None = None
    _added: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None
    """The code with which it is played, as the proxy knows it; None if it does not."""
    judged: bool = False
    """Without a reward of its own, it is left to a judge."""
    graded: bool = False
    """Rewards of its own do not seal it: it has a grader."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of an episode: its reward (None: none), or why it was given up (None: it was not). `agents` has the
    rewards of its agents, where they differ from that.

    `discarded` is the proxy's reason for not keeping an episode that nobody aborted. ``incomplete_call`` says that it
    has no whole call to a model, though all else that it needs; `lost` then says why its calls were lost. `infra` says
    that the world failed, and not the agent. One that `awaits` a judgement is sealed, and will be rewarded by that.
    """

    reward: float | None = None
    aborted: str | None = None
    discarded: str | None = None
    lost: str | None = None
    infra: bool = False
    awaits: bool = False
    agents: Mapping[str, float] = field(default_factory=dict)


def new_episode_id() -> str:
    """An id by which an episode that is asked for again is opened once."""
    return f"ep-{uuid.uuid4().hex}"


async def opening(client: Client, body: routes.OpenEpisode) -> Opened:
    """Opens an episode, once, however often it is asked for."""
    if body.id is None:
        body = replace(body, id=new_episode_id())
    answer = (await client.ask("open_episode", body)).json()
    try:
        return Opened(
            id=str(answer["episode"]),
            base_url=str(answer["base_url"]),
            api_key=str(answer["api_key"]),
            policy_version=int(answer["policy_version"]),
            task=body.task,
            _added={str(name): str(value) for name, value in (answer.get("env") or {}).items()},
            revision=body.revision,
            judged=body.judged,
            graded=body.graded,
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise no_proxy(client.target, answer) from error


async def wanting(client: Client, models: Collection[str], never: Collection[str] = ()) -> tuple[str, int] | None:
    """A model that wants evaluation episodes now, with the next place of its evaluation; None if none does. It is one
    of `models` if there are any, and none of `never`."""
    answer = _object(client.target, await client.ask("wanted"))
    wanted = (name for name, missing in answer["eval"].items() if missing > 0 and (not models or name in models))
    return next(((name, int(answer["next"][name])) for name in wanted if name not in never), None)


async def rewarding(client: Client, episode: str | None, reward: routes.Reward) -> Outcome:
    """Gives a reward under an id made here, so that it counts once, however often it is sent. Without an `episode`, the
    proxy finds it by the answer that the reward names.

    Returns the reward that the episode now has, of all that it was given by any process; and the reason if the proxy
    discarded the episode nevertheless.
    """
    body = replace(reward, id=f"rew-{uuid.uuid4().hex}")
    name = "reward_answer" if episode is None else "reward"
    answer = _object(client.target, await client.ask(name, body, id=episode))
    outcome = Outcome(reward=answer.get("reward"), agents=answer.get("reward_by_agent") or {})
    if answer.get("state") != "discarded":
        return outcome
    return replace(outcome, discarded=str(answer.get("reason")), lost=answer.get("detail"))


async def aborting(client: Client, episode: str, reason: str | None, cause: str | None = None) -> dict[str, Any]:
    """Gives the episode up; an episode that was discarded before stays so. `cause` is one of `routes.ABORT_CAUSES`.
    Returns what the proxy says of it then."""
    return await _settling(client, "abort", routes.Abort(reason, cause), episode)


async def sealing(client: Client, episode: str) -> None:
    """Says that no more will come; an episode that was sealed before stays so."""
    await _settling(client, "seal", routes.Empty(), episode)


async def _settling(client: Client, name: str, body: Any, episode: str) -> dict[str, Any]:
    try:
        return _object(client.target, await client.ask(name, body, id=episode))
    except Conflict:
        record = await reading(client, episode)
        aborted = (record.get("state"), record.get("reason")) == ("discarded", "aborted")
        if not (aborted if name == "abort" else record.get("state") not in ("open", "discarded")):
            raise
        return record


async def reading(client: Client, episode: str, tokens: bool = False) -> dict[str, Any]:
    """The episode's record (contract §5.3), with token ids and logprobs if `tokens`."""
    return _object(client.target, await client.ask("get_episode", id=episode, **({"tokens": 1} if tokens else {})))


def _object(target: Target, reply: Reply) -> dict[str, Any]:
    """The JSON object that acknowledges a request."""
    answer = reply.json()
    if not isinstance(answer, dict):
        raise no_proxy(target, answer)
    return answer


def no_proxy(target: Target, answer: Any) -> AjetError:
    """The error that an answer is which no proxy gives."""
    return AjetError(f"{target.url} is not an ajet proxy: it answered {repr(answer)[:120]}")


class EpisodeLife(Opened):
    """The life of an episode, which the `Episode` of each face shows: each method that begins with ``_`` is public
    there."""

    def __init__(self, client: Client, opened: Opened, *, owns_client: bool = False) -> None:
        super().__init__(**vars(opened))
        self._client, self._owns_client = client.but(key=opened.api_key or client.target.key), owns_client
        self.infra: tuple[type[BaseException], ...] = ()
        """Exceptions of these are the world's failure too, and not the agent's."""
        self.outcome: Outcome | None = None
        """The end of the episode, as far as the proxy has acknowledged it to this object; None while it is open."""
        self.program_failed: str | None = None
        """The failure of the program that played it, in words: ``exit code 3``."""
        self.conversations = 1
        """The conversations that it held as it was settled, if they do not go on from one another."""
        self.scoped = False
        """A reward is known of it that is only that of a call, an agent or a model."""

    def env(self) -> dict[str, str]:
        """The variables that let a program in any language find its model and its episode (contract §3.5)."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/").removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "AJET_PROXY_URL": self._client.target.url,
            "AJET_EPISODE": self.id,
            "AJET_TASK": self.task or "",
            **self._added,
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} task={self.task!r} outcome={self.outcome}>"

    async def _reward(
        self,
        value: float,
        *,
        call: str | None = None,
        agent: str | None = None,
        final: bool = True,
        note: str | None = None,
        state: str | None = None,
        model: str | None = None,
        response: str | None = None,
    ) -> None:
        """Gives a finite reward, to the whole episode or to one `call`, `agent` or `model` of it; a `final` one seals
        it. `state` names the state in which `call` was made. `response` names a call by the id of its answer, and
        `note` is kept beside the reward."""
        reward = routes.Reward(
            finite(value), call, agent, final, note=note, state=state, model=model, response=response
        )
        outcome = await rewarding(self._client, self.id, reward)
        self.scoped |= {call, agent, model, response} != {None}
        if final or self.outcome is not None:
            self.outcome = outcome

    async def _seal(self) -> None:
        """Says that no more calls or rewards will come."""
        await sealing(self._client, self.id)
        self.outcome = self.outcome or Outcome()

    async def _abort(self, reason: str | None = None, *, cause: str | None = None) -> None:
        """Gives the episode up: none of it is trained. `cause` is ``agent``, or ``infra`` if the world has failed and
        not the agent."""
        await aborting(self._client, self.id, reason, cause)
        self.outcome = Outcome(aborted=reason or "aborted", infra=cause == "infra")

    async def _heartbeat(self) -> None:
        """Says that the agent is alive though it calls no model, so that the episode does not idle out."""
        await self._client.ask("heartbeat", routes.Empty(), id=self.id)

    async def _record(self, *, tokens: bool = False) -> dict[str, Any]:
        """The episode as the proxy has it, with its calls; with `tokens`, also their ids and logprobs."""
        return await reading(self._client, self.id, tokens)

    async def _close(self) -> None:
        """Lets go of the connections; the episode itself stays as it is."""
        if self._owns_client:
            await self._client.aclose()

    async def leave(self, error: BaseException | None) -> None:
        """Settles the episode; after an `error`, in little time and without raising another."""
        if error is None and self.outcome in (None, Outcome()):
            await self.settle()
        elif self.outcome is None and error is not None:
            with suppress(AjetError):
                waits = isinstance(error, Exception) and not of_the_world(error, self.infra)
                await self.settle(
                    ended=Ended(error=error, infra=self.infra),
                    within_s=ABORT_DEADLINE_S if isinstance(error, Exception) else STOP_DEADLINE_S,
                    rests=waits,  # for no call, if it was interrupted
                )
        elif self.outcome is not None and self.outcome.discarded is not None:
            with suppress(AjetError):
                self.outcome = outcome_of(await reading(self._client.within(ABORT_DEADLINE_S), self.id))

    async def settle(
        self, source: Source | None = None, ended: Ended = PLAYED, within_s: float | None = None, *, rests: bool = True
    ) -> Earns | Stands | Fails:
        """Has it decided what the episode earns (`ajet_sdk.rewards`), and says so to the proxy. `source` is where its
        reward comes from, and `ended` how it was played. Calls in flight may take a moment to end, if it `rests`."""
        client = self._client if within_s is None else self._client.within(within_s)
        record = await self._at_rest(client, REST_S if rests else 0.0)
        ended = replace(ended, record=record)
        self.conversations = 1 + sum(one.get("broken_by") == "new_chain" for one in record.get("timelines") or ())
        scopes = [one.get(of) for one in record.get("rewards") or () for of in ("call", "agent", "model")]
        self.scoped |= any(scopes)
        decision = decided(source, ended, self.program_failed, judged=self.judged)
        if isinstance(decision, Earns):
            await self._reward(decision.value, note=decision.note)
            if not self.graded or record.get("state") != "open":
                return decision
        if isinstance(decision, Fails):
            try:
                await aborting(client, self.id, decision.reason, "infra" if decision.world else None)
            except Conflict:  # it was settled meanwhile
                record = await reading(client, self.id)
            else:
                self.outcome = Outcome(aborted=decision.reason, infra=decision.world)
                return decision
        elif record.get("state") == "open":
            await sealing(client, self.id)
            record = await reading(client, self.id)
        outcome, gave_up = outcome_of(record), ended.gave_up
        awaits = self.judged and record.get("state") == "sealed" and outcome.reward is None
        outcome = replace(outcome, awaits=awaits)
        known = gave_up is not None and outcome.aborted is not None
        self.outcome = replace(outcome, aborted=gave_up.reason) if known and gave_up is not None else outcome
        return decision

    async def _at_rest(self, client: Client, rest_s: float) -> dict[str, Any]:
        """The record, once none of its calls runs. That a program has ended which waited for the model is known a
        moment later."""
        until, looked = client.clock() + rest_s, self.program_failed is None
        while True:
            record = await reading(client, self.id)
            known = looked or record.get("unanswered")
            if record.get("state") != "open" or client.clock() >= until or (known and not record.get("in_flight")):
                return record
            await client.sleep(LOOK_S)
            looked = True


class Episode(EpisodeLife):
    """One run of an agent on one task, for asynchronous agents; make it with `ajet_sdk.aio.episode`.

    Every method raises an `AjetError` when the proxy refuses, and `ProxyUnreachable` when none has acknowledged within
    the deadline.
    """

    reward = EpisodeLife._reward
    seal = EpisodeLife._seal
    abort = EpisodeLife._abort
    heartbeat = EpisodeLife._heartbeat
    record = EpisodeLife._record
    aclose = EpisodeLife._close

    async def __aenter__(self) -> Episode:
        return self

    async def __aexit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            await self.leave(error)
        finally:
            await self.aclose()


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """The end of an episode with this record."""
    reason, reward, world = record.get("reason"), record.get("reward"), lost_to_the_world(record)
    agents = record.get("reward_by_agent") or {}
    if record.get("state") != "discarded":
        return Outcome(reward=reward, agents=agents)
    if reason == "aborted":
        return Outcome(aborted=record.get("detail") or "aborted", infra=world)
    lost = record.get("detail")
    if reason == "incomplete_call" and reward is not None and not world:
        return Outcome(reward=reward, discarded=reason, lost=lost, agents=agents)
    why = f" ({lost})" if lost else ""
    return Outcome(aborted=f"discarded by the proxy: {reason}{why}", discarded=reason, lost=lost, infra=world)


class Opening:
    """An episode about to be opened: ``await`` it, or enter it with ``async with``."""

    def __init__(self, client: Client, body: routes.OpenEpisode) -> None:
        self._client, self._body = client, body

    def __await__(self) -> Generator[Any, None, Episode]:
        return self.opened(Episode).__await__()

    async def opened(self, kind: type[E]) -> E:
        """The episode, once it is open, as one of this `kind`."""
        try:
            return kind(self._client, await opening(self._client, self._body), owns_client=True)
        except BaseException:
            await self._client.aclose()
            raise

    async def __aenter__(self) -> Episode:
        self._episode = await self
        return self._episode

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self._episode.__aexit__(kind, error, trace)


def episode(
    task: str | None = None,
    *,
    model: str | None = None,
    agent: str | None = None,
    eval: bool = False,
    metadata: Mapping[str, Any] | None = None,
    idle_timeout: float | None = None,
    wall_timeout: float | None = None,
    members: Mapping[str, str] | None = None,
    teachers: Mapping[str, str] | None = None,
    client: str | None = None,
    revision: str | None = None,
    judged: bool = False,
    proxy_url: str | None = None,
    api_key: str | None = None,
    deadline: float = DEADLINE_S,
) -> Opening:
    """Opens an episode. Timeouts and `deadline` are in seconds; `wall_timeout` may be at most the proxy's own.

    `eval` episodes are recorded and never trained. While a trainer wants some of `model` (unset: of the only one that
    is trained), they are those. Episodes of one `task` form the group that their advantages are relative to; without a
    task, the first prompt is the task. With `model` every call goes to that one, whatever name the agent asks for,
    unless the proxy serves that other model by name (a judge). `members` maps names of agents to models, and each model
    learns from the episode. `teachers` does too, and these learn nothing. An agent may ask for such a name as its
    model. `deadline` is how long an operation may try to be acknowledged. `client` is the id of the client that plays
    it, and `revision` names the code with which it does. One that is to be `judged` is left to a judge (``ajet judge``)
    if nobody has rewarded it by its end. `proxy_url` and `api_key` default to ``AJET_PROXY_URL`` and
    ``AJET_API_KEY``.
    """
    body = routes.OpenEpisode(
        task, model, agent, eval, metadata or {}, idle_timeout, wall_timeout, members, client=client, revision=revision,
        teachers=teachers, judged=judged,
    )
    return Opening(Client(proxy_url, api_key, deadline=deadline), body)


def current_episode(named: str | None = None) -> str:
    """The episode that this process belongs to: the one `named`, or the one in ``AJET_EPISODE``."""
    found = named or os.environ.get("AJET_EPISODE")
    if not found:
        raise NotFound(
            "no episode here: AJET_EPISODE is not set. Start the program with `ajet run`, pass Episode.env() on to it, "
            "or name the episode",
            code="no_episode",
            param="AJET_EPISODE",
        )
    return found


async def reward(
    value: float,
    *,
    call: str | None = None,
    agent: str | None = None,
    final: bool = True,
    note: str | None = None,
    state: str | None = None,
    model: str | None = None,
    response: str | None = None,
    episode: str | None = None,
    deadline: float = DEADLINE_S,
) -> None:
    """Rewards the episode that this process belongs to (see `current_episode`), or the one in which a model gave the
    answer `response`; returns once the reward is on disk."""
    found = episode if response is not None else current_episode(episode)
    body = routes.Reward(finite(value), call, agent, final, note=note, state=state, model=model, response=response)
    async with Client(deadline=deadline) as client:
        await rewarding(client, found, body)


async def abort(
    reason: str | None = None, *, cause: str | None = None, episode: str | None = None, deadline: float = DEADLINE_S
) -> None:
    """Gives up the episode that this process belongs to. `cause` is ``agent``, or ``infra`` if the world has failed and
    not the agent."""
    async with Client(deadline=deadline) as client:
        await aborting(client, current_episode(episode), reason, cause)
