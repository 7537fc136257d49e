"""What an agent's author touches: an episode that is open, rewarded, and settled.

`EpisodeLife` knows the life of an episode and does no I/O: its methods are operations (see `ajet_sdk.operations`).
`Episode` carries them out with blocking calls; `ajet_sdk.aio.Episode` does the same with ``await``.

Invariant: leaving the ``with`` block settles the episode. A final reward, a seal or an abort is left as it is, even
one of another process or of a header that the agent sent. Rewards that are not final are sealed. No reward at all
aborts, and so does an exception, whose text becomes the reason. A failure to abort never hides that exception. Whether
the world failed then, and not the agent, `ajet_sdk.rewards` decides.
"""

from __future__ import annotations

import math
import os
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, Concatenate, ParamSpec

from ajet_sdk import routes
from ajet_sdk.client import Client
from ajet_sdk.errors import AjetError, BadRequest, Conflict, NotFound
from ajet_sdk.operations import DEADLINE_S, Reply, Sleep, T, Talk, Target, request
from ajet_sdk.rewards.blame import WorldFailed, of_the_world
from ajet_sdk.rewards.decision import (
    Earns,
    Fails,
    GaveUp,
    Number,
    Said,
    decide,
    given_to,
    lost_to_the_world,
    unanswered_in,
)

P = ParamSpec("P")

ABORT_DEADLINE_S, STOP_DEADLINE_S = 10.0, 3.0
"""How long an abort on the way out of an exception, or of an interrupt, may try to be acknowledged."""
REST_S, LOOK_S = 5.0, 0.1
"""A call whose client has left ends soon. It is waited for so long, since only then it is known who failed."""


@dataclass(frozen=True, slots=True)
class Opened:
    """The proxy's answer to ``POST episodes``."""

    episode: str
    base_url: str
    api_key: str
    policy_version: int
    task: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    revision: str | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an episode ended: its reward (None: none), or why it was given up (None: it was not).

    `discarded` is the proxy's reason for not keeping an episode that nobody aborted. ``incomplete_call`` says that it
    has its reward, and no whole call to a model; `lost` then says why its calls were lost. `infra` says that the world
    failed, and not the agent.
    """

    reward: float | None = None
    aborted: str | None = None
    discarded: str | None = None
    lost: str | None = None
    infra: bool = False


def new_episode_id() -> str:
    """An id by which an episode that is asked for again is opened once."""
    return f"ep-{uuid.uuid4().hex}"


def opening(target: Target, body: routes.OpenEpisode) -> Talk[Opened]:
    """Opens an episode, once, however often it is asked for."""
    if body.id is None:
        body = replace(body, id=new_episode_id())
    reply = yield from request(target, "open_episode", body)
    answer = reply.json()
    try:
        return Opened(
            episode=str(answer["episode"]),
            base_url=str(answer["base_url"]),
            api_key=str(answer["api_key"]),
            policy_version=int(answer["policy_version"]),
            task=body.task,
            env={str(name): str(value) for name, value in (answer.get("env") or {}).items()},
            revision=body.revision,
        )
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise AjetError(f"{target.url} is not an ajet proxy: it answered {repr(answer)[:120]}") from error


def wanting(target: Target, models: Collection[str], never: Collection[str] = ()) -> Talk[tuple[str, int] | None]:
    """A model that wants evaluation episodes now, with the next place of its evaluation; None if none does. It is one
    of `models` if there are any, and none of `never`."""
    answer = _told(target, (yield from request(target, "wanted")))
    wanted = (name for name, missing in answer["eval"].items() if missing > 0 and (not models or name in models))
    return next(((name, int(answer["next"][name])) for name in wanted if name not in never), None)


def place_taken(error: BaseException) -> bool:
    """Whether another program has opened the episode of an evaluation that this one wanted to."""
    return isinstance(error, Conflict) and error.code == "place_taken"


def rewarding(target: Target, episode: str, reward: routes.Reward) -> Talk[Outcome]:
    """Gives a reward under an id made here, so that it counts once, however often it is sent.

    Returns the reward that the episode now has, of all that it was given by any process; and the reason if the proxy
    discarded the episode nevertheless.
    """
    body = replace(reward, id=f"rew-{uuid.uuid4().hex}")
    reply = yield from request(target, "reward", body, id=episode)
    answer = _told(target, reply)
    if answer.get("state") != "discarded":
        return Outcome(reward=answer.get("reward"))
    return Outcome(reward=answer.get("reward"), discarded=str(answer.get("reason")), lost=answer.get("detail"))


def aborting(target: Target, episode: str, reason: str | None, cause: str | None = None) -> Talk[dict[str, Any]]:
    """Gives the episode up; an episode that was discarded before stays so. `cause` is one of `routes.ABORT_CAUSES`.
    Returns what the proxy says of it then."""
    return (yield from _settling(target, "abort", routes.Abort(reason, cause), episode))


def sealing(target: Target, episode: str) -> Talk[None]:
    """Says that no more will come; an episode that was sealed before stays so."""
    yield from _settling(target, "seal", routes.Empty(), episode)


def _settling(target: Target, name: str, body: Any, episode: str) -> Talk[dict[str, Any]]:
    """What the proxy says of the episode then."""
    try:
        return _told(target, (yield from request(target, name, body, id=episode)))
    except Conflict:
        record = yield from reading(target, episode, False)
        aborted = (record.get("state"), record.get("reason")) == ("discarded", "aborted")
        if not (aborted if name == "abort" else record.get("state") not in ("open", "discarded")):
            raise
        return record


def reading(target: Target, episode: str, tokens: bool) -> Talk[dict[str, Any]]:
    """The episode's record (contract §5.3), with token ids and logprobs if `tokens`."""
    query = {"tokens": 1} if tokens else None
    return _told(target, (yield from request(target, "get_episode", id=episode, query=query)))


def _told(target: Target, reply: Reply) -> dict[str, Any]:
    """The JSON object that acknowledges a request; `AjetError` if the answer is none."""
    answer = reply.json()
    if not isinstance(answer, dict):
        raise AjetError(f"{target.url} is not an ajet proxy: it answered {repr(answer)[:120]}")
    return answer


def finite(value: Any) -> float:
    """`value` (a number, or what converts to one, such as a numpy scalar or a bool) as a finite float."""
    try:
        number = float(value) if not isinstance(value, (str, bytes)) else math.nan
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= routes.MAX_REWARD:
        most = f"a finite number of at most {routes.MAX_REWARD:g}"
        raise BadRequest(f"a reward must be {most}, not {repr(value)[:80]}", param="value")
    return number


def reason_of(error: BaseException) -> str:
    """An exception as an abort's reason: its type and the first 500 characters of its text."""
    text = str(error).strip().encode("utf-8", "replace").decode()
    if text and isinstance(error, WorldFailed):
        return text[:500]
    return f"{type(error).__name__}: {text}"[:500] if text else type(error).__name__


class EpisodeLife:
    """The part of an episode that does no I/O. Both `Episode` classes carry out its operations, each by its client."""

    def __init__(self, client: Any, opened: Opened, *, owns_client: bool = False) -> None:
        self._client, self._added, self._owns_client = client, opened.env, owns_client
        self._target = replace(client.target, key=opened.api_key or client.target.key)
        self.infra: tuple[type[BaseException], ...] = ()
        """Exceptions of these are the world's failure too, and not the agent's."""
        self.outcome: Outcome | None = None
        """How the episode ended, as far as the proxy has acknowledged it to this object; None while it is open."""
        self.id, self.task = opened.episode, opened.task
        self.base_url = opened.base_url
        """What OpenAI clients call ``base_url``: ends in ``/v1``."""
        self.api_key = opened.api_key
        """The key of this one episode."""
        self.policy_version = opened.policy_version
        """The policy version that served when the episode was opened."""
        self.revision = opened.revision
        """The code with which it is played, as the proxy was told; None: it was not."""
        self.program_failed: str | None = None
        """How the program that played it failed, in words: ``exit code 3``."""

    def env(self) -> dict[str, str]:
        """The variables that let a program in any language find its model and its episode (contract §3.5)."""
        return {
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_BASE": self.base_url,
            "OPENAI_API_KEY": self.api_key,
            "ANTHROPIC_BASE_URL": self.base_url.removesuffix("/").removesuffix("/v1"),
            "ANTHROPIC_API_KEY": self.api_key,
            "AJET_PROXY_URL": self._target.url,
            "AJET_EPISODE": self.id,
            "AJET_TASK": self.task or "",
            **self._added,
        }

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} task={self.task!r} outcome={self.outcome}>"

    def _reward(
        self,
        value: float,
        *,
        call: str | None = None,
        agent: str | None = None,
        final: bool = True,
        note: str | None = None,
        state: str | None = None,
        model: str | None = None,
    ) -> Talk[None]:
        """Gives a finite reward, to the whole episode or to one `call`, `agent` or `model` of it; a `final` one seals
        it. `state` names the state in which `call` was made."""
        reward = routes.Reward(finite(value), call, agent, final, note=note, state=state, model=model)
        outcome = yield from rewarding(self._target, self.id, reward)
        if final or self.outcome is not None:
            self.outcome = outcome

    def _seal(self) -> Talk[None]:
        """Says that no more calls or rewards will come."""
        yield from sealing(self._target, self.id)
        self.outcome = self.outcome or Outcome()

    def _abort(self, reason: str | None = None, *, cause: str | None = None) -> Talk[None]:
        """Gives the episode up: none of it is trained. `cause` is ``agent``, or ``infra`` if the world has failed and
        not the agent."""
        yield from aborting(self._target, self.id, reason, cause)
        self.outcome = Outcome(aborted=reason or "aborted", infra=cause == "infra")

    def _heartbeat(self) -> Talk[None]:
        """Says that the agent is alive though it calls no model, so that the episode does not idle out."""
        yield from request(self._target, "heartbeat", routes.Empty(), id=self.id)

    def _record(self, *, tokens: bool = False) -> Talk[dict[str, Any]]:
        """The episode as the proxy has it, with its calls; with `tokens`, also their ids and logprobs."""
        return (yield from reading(self._target, self.id, tokens))

    def _leave(self, error: BaseException | None) -> Talk[None]:
        """Settles the episode; after an `error`, in little time and without raising another."""
        within_s = ABORT_DEADLINE_S if error is None or isinstance(error, Exception) else STOP_DEADLINE_S
        hurried = replace(self._target, deadline=min(within_s, self._target.deadline))
        if error is None and self.outcome in (None, Outcome()):
            yield from self.settling()
        elif self.outcome is None and error is not None:
            with suppress(AjetError):
                ended = GaveUp(reason_of(error), of_the_world(error, self.infra))
                waits = isinstance(error, Exception) and not ended.world  # for no call, if it was interrupted
                yield from self.settling(ended=ended, target=hurried, rest_s=REST_S if waits else 0.0)
        elif self.outcome is not None and self.outcome.discarded is not None:
            with suppress(AjetError):
                self.outcome = outcome_of((yield from reading(hurried, self.id, False)))

    def returned(self, value: Any) -> Talk[None]:
        """Settles the episode whose agent has returned `value` as its reward."""
        yield from self.settling(Number(finite(value)))

    def settling(
        self, said: Said | None = None, ended: GaveUp | None = None, target: Target | None = None,
        rest_s: float = REST_S,
    ) -> Talk[None]:
        """Has it decided what the episode earns (`ajet_sdk.rewards`), and tells the proxy. `said` is what the source of
        its reward says, and `ended` how the agent gave up. Calls in flight may take `rest_s` seconds to end."""
        target = target or self._target
        record = yield from self._at_rest(target, rest_s)
        unanswered = unanswered_in(record)
        if unanswered is not None and self.program_failed is not None and ended is None:
            unanswered = f"{self.program_failed}; {unanswered}"
        decision = decide(given_to(record), unanswered, ended, said)
        if isinstance(decision, Earns):
            yield from self._reward(decision.value)
            return
        if isinstance(decision, Fails):
            try:
                yield from aborting(target, self.id, decision.reason, "infra" if decision.world else None)
            except Conflict:  # it was settled meanwhile
                record = yield from reading(target, self.id, False)
            else:
                self.outcome = Outcome(aborted=decision.reason, infra=decision.world)
                return
        elif record.get("state") == "open":
            yield from sealing(target, self.id)
            record = yield from reading(target, self.id, False)
        outcome = outcome_of(record)
        told = ended is not None and outcome.aborted is not None
        self.outcome = replace(outcome, aborted=ended.reason) if told and ended is not None else outcome

    def _at_rest(self, target: Target, rest_s: float) -> Talk[dict[str, Any]]:
        """The record, once none of its calls runs. That a program has ended which waited for the model is known a
        moment later."""
        until, looked = target.clock() + rest_s, self.program_failed is None
        while True:
            record = yield from reading(target, self.id, False)
            known = looked or record.get("unanswered")
            if record.get("state") != "open" or target.clock() >= until or (known and not record.get("in_flight")):
                return record
            yield Sleep(LOOK_S)
            looked = True


def outcome_of(record: Mapping[str, Any]) -> Outcome:
    """How an episode with this record ended."""
    reason, reward, world = record.get("reason"), record.get("reward"), lost_to_the_world(record)
    if record.get("state") != "discarded":
        return Outcome(reward=reward)
    if reason == "aborted":
        return Outcome(aborted=record.get("detail") or "aborted", infra=world)
    lost = record.get("detail")
    if reason == "incomplete_call" and reward is not None and not world:
        return Outcome(reward=reward, discarded=reason, lost=lost)
    why = f" ({lost})" if lost else ""
    return Outcome(aborted=f"discarded by the proxy: {reason}{why}", discarded=reason, infra=world)


def shown_as(operation: Callable[..., Any], method: Callable[P, T], skipped: int = 0) -> Callable[P, T]:
    """`method` with the name, docstring and parameters of the `operation` that it carries out. The first `skipped`
    parameters are left out, and it returns what `operation` returns in the end."""
    found = signature(operation)
    returned = str(found.return_annotation).removeprefix("Talk[").removesuffix("]")
    parameters = list(found.parameters.values())[skipped:]
    method.__name__ = method.__qualname__ = operation.__name__.removeprefix("_").removesuffix("_own")
    method.__doc__ = operation.__doc__
    method.__signature__ = found.replace(parameters=parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return method


def blocking(operation: Callable[Concatenate[Any, P], Talk[T]]) -> Callable[Concatenate[Any, P], T]:
    """The method of `Episode` that carries out an operation of `EpisodeLife`."""

    def method(self: Episode, /, *args: P.args, **more: P.kwargs) -> T:
        return self._client.drive(operation(self, *args, **more))

    return shown_as(operation, method)


class Episode(EpisodeLife):
    """One run of an agent on one task. Use it as a context manager; make it with `ajet_sdk.episode`.

    Every method raises an `AjetError` when the proxy refuses, and `ProxyUnreachable` when none has acknowledged within
    the deadline.
    """

    _client: Client
    reward = blocking(EpisodeLife._reward)
    seal = blocking(EpisodeLife._seal)
    abort = blocking(EpisodeLife._abort)
    heartbeat = blocking(EpisodeLife._heartbeat)
    record = blocking(EpisodeLife._record)

    def close(self) -> None:
        """Lets go of the connections; the episode itself stays as it is."""
        if self._owns_client:
            self._client.close()

    def __enter__(self) -> Episode:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            self._client.drive(self._leave(error))
        finally:
            self.close()


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
    proxy_url: str | None = None,
    api_key: str | None = None,
    deadline: float = DEADLINE_S,
) -> Episode:
    """Opens an episode. Timeouts and `deadline` are in seconds; `wall_timeout` may be at most the proxy's own.

    `eval` episodes are recorded and never trained. Episodes of one `task` form the group that their advantages are
    relative to; without a task, the first prompt is the task. With `model` every call goes to that one, whatever name
    the agent asks for, unless the proxy serves that other model by name (a judge). `members` maps names of agents to
    models, and each model learns from the episode. `teachers` does too, and these learn nothing. An agent may ask for
    such a name as its model. `deadline` is how long an operation may try to be acknowledged. `client` is the id of the
    client that plays it, and `revision` names the code with which it does. `proxy_url` and `api_key` default to
    ``AJET_PROXY_URL`` and ``AJET_API_KEY``.
    """
    own = Client(proxy_url, api_key, deadline=deadline)
    body = routes.OpenEpisode(
        task, model, agent, eval, metadata or {}, idle_timeout, wall_timeout, members, client=client, revision=revision,
        teachers=teachers,
    )
    try:
        return Episode(own, own.drive(opening(own.target, body)), owns_client=True)
    except BaseException:
        own.close()
        raise


def current_episode(named: str | None = None, environ: Mapping[str, str] | None = None) -> str:
    """The episode that this process belongs to: the one `named`, or the one in ``AJET_EPISODE``."""
    found = named or (os.environ if environ is None else environ).get("AJET_EPISODE")
    if not found:
        raise NotFound(
            "no episode here: AJET_EPISODE is not set. Start the program with `ajet run`, pass Episode.env() on to it, "
            "or name the episode",
            code="no_episode",
            param="AJET_EPISODE",
        )
    return found


def reward_own(
    target: Target,
    value: float,
    *,
    call: str | None = None,
    agent: str | None = None,
    final: bool = True,
    note: str | None = None,
    state: str | None = None,
    model: str | None = None,
    episode: str | None = None,
    deadline: float = DEADLINE_S,
) -> Talk[None]:
    """Rewards the episode that this process belongs to (see `current_episode`); returns once the reward is on disk."""
    found = current_episode(episode)
    reward = routes.Reward(finite(value), call, agent, final, note=note, state=state, model=model)
    yield from rewarding(replace(target, deadline=deadline), found, reward)


def abort_own(
    target: Target, reason: str | None = None, *, cause: str | None = None, episode: str | None = None,
    deadline: float = DEADLINE_S,
) -> Talk[None]:
    """Gives up the episode that this process belongs to. `cause` is ``agent``, or ``infra`` if the world has failed and
    not the agent."""
    yield from aborting(replace(target, deadline=deadline), current_episode(episode), reason, cause)


def _once(operation: Callable[Concatenate[Target, P], Talk[T]]) -> Callable[P, T]:
    """The function that carries out an operation of this process's episode over connections of its own."""

    def function(*args: P.args, **more: P.kwargs) -> T:
        with Client() as client:
            return client.drive(operation(client.target, *args, **more))

    return shown_as(operation, function, skipped=1)


reward, abort = _once(reward_own), _once(abort_own)
