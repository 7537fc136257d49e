"""Pictures of rewards: one run (`reward.png`), and treatment against control (`proof.png`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

from integrations.quickstart.figures import ends, smoothed

LEARNS, CONTROL, QUIET = "#2563eb", "#9a6b1f", "#6b7280"


def reward_plot(
    rewards: Sequence[float], path: Path, subtitle: str, title: str = "Guess the number: mean reward per step"
) -> None:
    """The mean reward of each step as points, their moving mean as a line, and the level of the first third."""
    steps, level = range(1, len(rewards) + 1), fmean(ends(rewards)[0])
    with picture(len(rewards), path, title, subtitle) as axes:
        axes.axhline(level, color=QUIET, linewidth=1, linestyle=(0, (4, 4)), zorder=1)
        axes.annotate(
            "mean of the first third", (len(rewards), level), xytext=(0, 4), textcoords="offset points",
            ha="right", color=QUIET, fontsize=9,
        )  # fmt: skip
        axes.scatter(steps, rewards, s=22, color=LEARNS, alpha=0.45, linewidths=0, zorder=2, label="mean of a step")
        axes.plot(steps, smoothed(rewards), color=LEARNS, linewidth=2.4, zorder=3, label="moving mean of 5 steps")


def compared(arms: Mapping[str, Sequence[Sequence[float]]], path: Path, title: str, subtitle: str) -> None:
    """Two arms, by their names, with the moving means of their runs."""
    steps = max(len(run) for runs in arms.values() for run in runs)
    with picture(steps, path, title, subtitle) as axes:
        for (label, runs), color in zip(arms.items(), (CONTROL, LEARNS), strict=True):
            draw(axes, label, list(map(smoothed, runs)), color)


def draw(axes: Any, label: str, runs: Sequence[Sequence[float]], color: str) -> None:
    """Every run, thin, and their mean, thick."""
    for run in runs:
        axes.plot(range(1, len(run) + 1), run, color=color, alpha=0.35, linewidth=1.1)
    mean = list(map(fmean, zip(*runs, strict=False)))
    axes.plot(range(1, len(mean) + 1), mean, color=color, linewidth=2.6, label=f"{label} (mean of {len(runs)})")


@contextmanager
def picture(steps: int, path: Path, title: str, subtitle: str) -> Iterator[Any]:
    """The axes to draw on, which are then written to `path`."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import MaxNLocator

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=150)
    axes.set_xlim(0.5, steps + 0.5)
    axes.set_ylim(0, 1.02)
    yield axes
    if (lowest := axes.dataLim.y0) < 0:
        axes.set_ylim(lowest - 0.1, 1.02)
    axes.set_xlabel("training step", color=QUIET)
    axes.set_ylabel("mean reward", color=QUIET)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=QUIET, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#d1d5db")
    axes.legend(loc="upper left", frameon=False, fontsize=9)
    figure.text(0.055, 0.955, title, fontsize=13, fontweight="bold", color="#111827", va="top")
    figure.text(0.055, 0.892, subtitle, fontsize=9.5, color=QUIET, va="top")
    figure.subplots_adjust(left=0.09, right=0.97, top=0.82, bottom=0.12)
    figure.savefig(path, facecolor="white")
    plt.close(figure)
