"""The environment of a program that a test starts."""

from __future__ import annotations

import os


def clean(**more: str) -> dict[str, str]:
    """This process's, without what steers programs of ours or clients of models, and with `more`."""
    steers = ("AJET_", "VERL_", "OPENAI_", "ANTHROPIC_")
    return {name: value for name, value in os.environ.items() if not name.startswith(steers)} | more
