"""Signs that one name, or one derived task, stands for what are several.

A name of a body or a session is that of several runs if a conversation begins just as another one of the same agent in
its episode did. A request that is sent again is no such sign, nor one whose earlier attempt came to nothing, nor a
probe beside answers that are longer than a probe's. A body's name is, too, if a call goes on from an episode of the
name that is sealed. Until that is shown, conversations in one episode that do not go on from one another are an alert.
So are second conversations that differ, in episodes of one derived task.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Protocol

from ajet_proxy.core.conversation.history import PROBE, Beginnings
from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.session_names import NAME_RUNS, SessionNames

MOST_TASKS = 1000
"""Derived tasks that are compared, the latest."""
NAMES, TASKS = "names of several conversations", "derived tasks"


class Asked(Protocol):
    """A request, as far as it is looked at here (`ajet_proxy.io.ledger_port.port.CallRequest`)."""

    @property
    def history(self) -> Beginnings | None: ...
    @property
    def sent(self) -> Mapping[str, Any]: ...
    @property
    def said(self) -> str: ...
    @property
    def prompt(self) -> str: ...
    @property
    def begins(self) -> bool: ...
    @property
    def probe(self) -> bool: ...


class SharedNames:
    """`continued` tells the open episodes that a history goes on from; `alerts` has what an operator should see."""

    def __init__(
        self, names: SessionNames, continued: Callable[[Beginnings], Iterable[str]],
        alerts: MutableMapping[str, str], say: Callable[[str], object] = lambda told: None,
    ) -> None:
        """`say` is told each alert once, however soon it is over."""
        self._names, self._continued, self._alerts, self._say = names, continued, alerts, say
        self._several: set[str] = set()
        """Open episodes that a body names, with several conversations."""
        self._second: dict[str, tuple[str, str]] = {}
        """For each derived task, an episode and how its second conversation began."""

    def shows(self, way: str, known: Episode | None, episode: str, agent: str, request: Asked) -> bool:
        """Tell whether `request` of `agent`, which `way` puts into `episode` (`known`, if there is one), shows that its
        name is that of several runs."""
        history = request.history
        if history is None or episode in self._continued(history):
            return False
        if way == "body" and self._names.goes_on(episode, history):
            return True
        if known is None or known.state != "open":
            return False
        if request.probe and any(turn.sampled > PROBE for turn in known.transcript.turns()):
            return False
        calls = known.transcript.calls.values()
        entries = [entry for entry in calls if entry.asked.agent == agent]
        if any(entry.asked.said == request.said and entry.state != "lost" and not _again(entry, request)
               for entry in entries):  # fmt: skip
            return True
        differ = any(entry.asked.said != request.said for entry in entries)
        if way == "body" and request.begins and differ and episode not in self._several:
            self._several.add(episode)
            self._tell()
            self._say(self._alerts[NAMES])
        return False

    def may_be_again(self, known: Episode | None, request: Asked) -> bool:
        """Tell whether an equal request is in flight in `known`. This one may be the same again: its client has gone
        away, and nobody has said so yet."""
        body = request.sent["body_hash"]
        calls = () if known is None else known.transcript.calls.values()
        return any(entry.state == "running" and entry.asked.body_hash == body for entry in calls)

    def ended(self, episode: str) -> None:
        """`episode` takes no more calls."""
        if episode in self._several:
            self._several.discard(episode)
            self._tell()

    def derived(self, known: Episode | None, request: Asked) -> None:
        """A request comes in an episode whose task may be derived."""
        task = known.opening.task if known is not None and known.task_derived else None
        if known is None or not task or not request.begins or not request.prompt:
            return
        if request.probe or task == f"prompt-{request.prompt}":
            return
        episode, prompt = self._second.setdefault(task, (known.id, request.prompt))
        if len(self._second) > MOST_TASKS:
            del self._second[next(iter(self._second))]
        if episode != known.id and prompt != request.prompt:
            self._alerts[TASKS] = (
                f"task {task} is derived from a first prompt, after which {episode} and {known.id} differ: give "
                "each episode its task (X-AJet-Task, or task= as it is opened), or what differs makes one group"
            )

    def _tell(self) -> None:
        if self._several:
            names = ", ".join(sorted(self._several)[:3])
            self._alerts[NAMES] = (
                f"a name in a body (user, prompt_cache_key, metadata.user_id) stands for several conversations that do "
                f"not go on from one another ({names}), and one reward covers them all: if these are several runs, "
                f"{NAME_RUNS}"
            )
        else:
            self._alerts.pop(NAMES, None)


def _again(entry: Any, request: Asked) -> bool:
    """Tell whether `request` is one that was sent before: by the key that its client gave both, or by what its client
    counts and the same bytes."""
    key, body = request.sent["idempotency_key"], request.sent["body_hash"]
    if request.sent["retries"] and entry.asked.body_hash == body:
        return True
    return key is not None and entry.asked.idempotency_key == key
