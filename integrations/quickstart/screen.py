"""The screen of a person who watches: finished lines, and below them, on a terminal, one live line.

Where the output is not a terminal the live line is left out, so a log holds the finished lines only.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import Any

import click

FULL, EMPTY = "█", "░"
EXPECTED_START_S = 100.0


class Screen:
    """`line` prints a line that stays; `live` replaces the last live line."""

    def __init__(self, tty: bool) -> None:
        self._tty = tty
        self._live = ""

    def line(self, text: str = "") -> None:
        self._wipe()
        click.echo(text)

    def live(self, text: str) -> None:
        if not self._tty or text == self._live:
            return
        self._wipe()
        self._live = text[: shutil.get_terminal_size().columns - 1]
        click.echo(self._live, nl=False)

    def _wipe(self) -> None:
        if self._live:
            click.echo("\r\x1b[2K", nl=False)
            self._live = ""


def bar(share: float, width: int = 24) -> str:
    """A bar of `width` characters, `share` (clipped to 0..1) of them full."""
    full = round(min(max(share, 0.0), 1.0) * width)
    return FULL * full + EMPTY * (width - full)


def starting(phase: str, seconds: float) -> str:
    """The live line of a start that takes about `EXPECTED_START_S`. Nothing tells that it is over before it is."""
    return f"  {bar(min(seconds / EXPECTED_START_S, 0.97))}  {seconds:4.0f} s  {phase}"


def running(done: int, steps: int, played: int, episodes: int, phase: str, seconds: float) -> str:
    """The live line between two steps: `played` of the `episodes` of the coming step are rewarded."""
    part = 0.6 * played / episodes
    left = f", about {seconds / done * (steps - done) / 60:.0f} min left" if done else ""
    return f"  {bar((done + part) / steps)}  step {done + 1}/{steps}: {played}/{episodes} episodes, {phase}{left}"


def step_line(metrics: Mapping[str, Any], steps: int, seconds: float) -> str:
    """The finished line of one step."""
    reward = metrics["reward_mean"]
    return (
        f"  step {metrics['step']:3d}/{steps}  reward {reward:.3f}  {bar(reward, 20)}  "
        f"{metrics['sampled_tokens']:5d} tokens  {seconds:5.1f} s"
    )
