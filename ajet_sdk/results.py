"""What came of running an agent: one `RunResult` for each rollout, and the table of them.

A rollout ends in one of three ways. ``rewarded``: the proxy has acknowledged its reward. ``aborted``: it was given up,
by the agent's own wish or by its exception. ``failed``: it could not be opened or settled, so the proxy's timeouts will
end it. Only the first is a success, whatever the reward's value. It is not kept if there was nothing to keep of it, as
for a program that asked no model.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unicodedata import combining, east_asian_width


@dataclass(frozen=True, slots=True)
class RunResult:
    """One rollout: the `index`-th at `task`. `reason` says why it was not rewarded; `seconds` is its wall time.
    `untold` is set if it cannot be trained because its engine does not tell what it sampled: one of
    `ajet_sdk.untold.UNTOLD`. `discarded` is the proxy's own reason, if it discarded the episode by itself. `infra` is
    set if the world failed, and not the agent; `again`, if the run plays it again, and another result tells of that."""

    task: str
    index: int
    episode: str | None
    outcome: str
    reward: float | None
    reason: str | None
    seconds: float
    untold: str | None = None
    discarded: str | None = None
    infra: bool = False
    again: bool = False

    @property
    def ok(self) -> bool:
        return self.outcome == "rewarded"

    @property
    def kept(self) -> bool:
        """Whether the proxy keeps it: to be trained, or as an evaluation."""
        return self.ok and self.discarded is None

    @property
    def client_gone(self) -> bool:
        """Whether it failed because the proxy took this client for gone. Neither agent nor reward is at fault."""
        return self.discarded == "client_gone"


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
    def failures(self) -> list[RunResult]:
        """The rollouts that were aborted or failed, and are not played again."""
        return [item for item in self if not item.ok and not item.again]

    @property
    def untold(self) -> list[RunResult]:
        """The rewarded ones that have nothing to train because of their engine."""
        return [item for item in self if item.ok and item.untold is not None]

    @property
    def kept(self) -> list[RunResult]:
        """The rewarded ones that the proxy keeps: to be trained, or as an evaluation."""
        return [item for item in self if item.kept]

    def table(self) -> str:
        """A plain-text table, one rollout a line, and a line that sums up."""
        head = ("task", "#", "episode", "outcome", "reward", "seconds", "reason")
        rows: list[tuple[str, ...]] = [head]
        for item in self:
            rewarded = "" if item.reward is None else f"{item.reward:g}"
            reason = " ".join((item.reason or "").split())[:120]
            task = item.task.replace("\n", " ")
            row = (task, str(item.index), item.episode or "-", item.outcome, rewarded, f"{item.seconds:.1f}", reason)
            rows.append(tuple(map(plain, row)))
        return f"{align(rows)}\n{self.summary()}"

    def summary(self) -> str:
        """How many rollouts came to what, in a line. Failures of the world are counted apart."""
        counts = Counter(item.outcome for item in self if not item.infra)
        parts = [f"{counts[outcome]} {outcome}" for outcome in ("rewarded", "aborted", "failed") if counts[outcome]]
        if lost := Counter(item.discarded for item in self if item.ok and item.discarded and item.untold is None):
            reasons = ", ".join(f"{number} as {reason}" for reason, number in sorted(lost.items()))
            parts[0] += f" (the proxy discarded {reasons})"
        if world := [item for item in self if item.infra]:
            again = sum(item.again for item in world)
            parts.append(counted(world, "failure") + " of the world" + (f" ({again} played again)" if again else ""))
        mean = self.mean_reward
        if mean is not None:
            parts.append(f"mean reward {mean:.4g}")
        if untold := len(self.untold):
            parts.append(f"{untold} cannot be trained")
        return f"{counted(self, 'episode')}: {', '.join(parts) or 'none begun'}"


def counted(items: Sequence[Any], word: str) -> str:
    """How many there are: ``1 call``, ``2 calls``."""
    return f"{len(items)} {word}" if len(items) == 1 else f"{len(items)} {word}s"


def align(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as lines of padded columns."""
    widths = [max(columns(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = (
        "  ".join(cell + " " * (width - columns(cell)) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def plain(text: str) -> str:
    """`text` without what a terminal would obey: an agent chooses its own task and names."""
    return "".join(char if char.isprintable() or char == "\n" else repr(char)[1:-1] for char in text)


def columns(text: str) -> int:
    """How many columns of a terminal `text` takes: wide characters take two, what stands above others none."""
    if text.isascii():
        return len(text)
    return sum(0 if combining(char) else 2 if east_asian_width(char) in "WF" else 1 for char in text)
