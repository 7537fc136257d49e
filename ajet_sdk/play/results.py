"""The results of running an agent: one `RunResult` for each rollout, and the table of them.

A rollout ends in one of four ways. ``rewarded``: the proxy has acknowledged its reward. ``sealed``: it awaits a
judgement, which rewards it later. ``aborted``: it was given up, by the agent's own wish or by its exception.
``failed``: it could not be opened or settled, so the proxy's timeouts will end it. Only the first two are a success,
whatever the reward's value. It is not kept if there was nothing to keep of it, as for a program that asked no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import chain

from ajet_sdk.rounding import differ, slack
from ajet_sdk.text import align, counted, plain


@dataclass(frozen=True, slots=True)
class RunResult:
    """One rollout: the `index`-th at `task`. `reason` says why it was not rewarded; `seconds` is its wall time.
    `untrainable` is set if its engine does not report what it sampled: one of `ajet_sdk.untrainable.UNTRAINABLE`.
    `discarded` is the proxy's own reason, if it discarded the episode by itself. `infra` is set if the world failed,
    and not the agent; `again`, if the run plays it again, and another result says what came of that. `agents` has the
    rewards of its agents, where they differ from the episode's. Its `conversations` do not go on from one another, of
    one agent and model. `scoped` is set if a reward of it is only that of a call, an agent or a model."""

    task: str
    index: int
    episode: str | None
    outcome: str
    reward: float | None
    reason: str | None
    seconds: float
    untrainable: str | None = None
    discarded: str | None = None
    infra: bool = False
    again: bool = False
    agents: Mapping[str, float] = field(default_factory=dict)
    conversations: int = 1
    scoped: bool = False

    @property
    def earned(self) -> str:
        """The reward in words, with those of the agents; empty without one."""
        return "" if self.reward is None else f"{self.reward:g}{_by_agent(self.agents, 'g')}"

    @property
    def ok(self) -> bool:
        return self.outcome in ("rewarded", "sealed")

    @property
    def kept(self) -> bool:
        """True if the proxy keeps it: to be trained, to be judged, or as an evaluation."""
        return self.ok and self.discarded is None


def _by_agent(rewards: Mapping[str, float], form: str) -> str:
    said = ", ".join(f"{name} {reward:{form}}" for name, reward in rewards.items())
    return f" ({said})" if said else ""


@dataclass(frozen=True, slots=True)
class Progress:
    """Of how many `episodes` so many are `done`."""

    done: int
    episodes: int


class RunResults(tuple[RunResult, ...]):
    """All rollouts, in the order in which they were begun."""

    __slots__ = ()

    @property
    def rewards(self) -> list[float]:
        """The rewards of the rollouts that were rewarded."""
        return [item.reward for item in self if item.ok and item.reward is not None]

    @property
    def mean_reward(self) -> float | None:
        """Their mean; None when none was rewarded."""
        rewards = self.rewards
        return sum(rewards) / len(rewards) if rewards else None

    @property
    def mean_by_agent(self) -> dict[str, float]:
        """The mean reward of each agent whose reward ever differs from the episode's, over the rollouts that were
        rewarded. Where no agent's does, each has the episode's."""
        found = [(item.agents, item.reward) for item in self if item.ok and item.reward is not None]
        known = {
            name: [agents.get(name, reward) for agents, reward in found if name in agents or not agents]
            for name in dict.fromkeys(chain(*(agents for agents, _ in found)))
        }
        return {name: sum(rewards) / len(rewards) for name, rewards in known.items()}

    @property
    def failures(self) -> list[RunResult]:
        """The rollouts that were aborted or failed, and are not played again."""
        return [item for item in self if not item.ok and not item.again]

    @property
    def untrainable(self) -> list[RunResult]:
        """The results that have nothing to train because of their engine."""
        return [item for item in self if item.untrainable is not None]

    @property
    def kept(self) -> list[RunResult]:
        """The results that the proxy keeps: to be trained, to be judged, or as an evaluation."""
        return [item for item in self if item.kept]

    @property
    def without_signal(self) -> str | None:
        """Says how every task with several rewards fared, if the rewards of each are all equal; None if they are not,
        or if some are of calls, agents or models, which are compared apart."""
        if any(item.scoped for item in self):
            return None
        tasks: dict[str, list[float]] = {}
        for item in self:
            if item.kept and item.reward is not None:
                tasks.setdefault(item.task, []).append(item.reward)
        groups = [rewards for rewards in tasks.values() if len(rewards) > 1]
        if not groups or any(differ(rewards, slack(map(abs, rewards))) for rewards in groups):
            return None
        found = {rewards[0] for rewards in groups}
        return f"has the reward {found.pop():g} each time" if len(found) == 1 else "has one reward each time"

    def table(self) -> str:
        """A plain-text table, one rollout a line, and a line that sums up."""
        head = ("task", "#", "episode", "outcome", "reward", "seconds", "reason")
        rows: list[tuple[str, ...]] = [head]
        for item in self:
            reason = " ".join((item.reason or "").split())[:120]
            task = item.task.replace("\n", " ")
            row = (task, str(item.index), item.episode or "-", item.outcome, item.earned, f"{item.seconds:.1f}", reason)
            rows.append(tuple(map(plain, row)))
        return f"{align(rows)}\n{self.summary()}"

    def summary(self) -> str:
        """Counts the rollouts by their outcomes, in a line. Failures of the world are counted apart."""
        counts = Counter(item.outcome for item in self if not item.infra)
        words = {"rewarded": "rewarded", "sealed": "awaiting a judgement", "aborted": "aborted", "failed": "failed"}
        parts = [f"{counts[outcome]} {said}" for outcome, said in words.items() if counts[outcome]]
        if lost := Counter(item.discarded for item in self if item.ok and item.discarded and item.untrainable is None):
            reasons = ", ".join(f"{number} as {reason}" for reason, number in sorted(lost.items()))
            parts[0] += f" (the proxy discarded {reasons})"
        if world := [item for item in self if item.infra]:
            again = sum(item.again for item in world)
            parts.append(counted(world, "failure") + " of the world" + (f" ({again} played again)" if again else ""))
        mean = self.mean_reward
        if mean is not None:
            parts.append(f"mean reward {mean:.4g}{_by_agent(self.mean_by_agent, '.4g')}")
        if untrainable := len(self.untrainable):
            parts.append(f"{untrainable} cannot be trained")
        return f"{counted(self, 'episode')}: {', '.join(parts) or 'none begun'}"
