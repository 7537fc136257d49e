"""The page for coding assistants: it is in the package and in `integrations`, and its commands are ours."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import click
import pytest

from ajet_sdk import cli
from tests.kit.source import ROOT

PAGE = (ROOT / "ajet_sdk" / "SKILL.md").read_text()
COMMANDS = [
    line.partition("#")[0].strip()
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()
    if line.startswith("ajet ")
]


def test_the_page_is_the_same_wherever_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert (ROOT / "integrations" / "SKILL.md").read_text() == PAGE
    cli.ajet.main(["skill"], standalone_mode=False)
    assert capsys.readouterr().out == PAGE


def test_it_is_one_page() -> None:
    assert len(PAGE.splitlines()) < 130


@pytest.mark.parametrize("command", COMMANDS)
def test_its_commands_can_be_used_as_they_stand(command: str) -> None:
    context, group = click.Context(cli.ajet), cli.ajet
    words = shlex.split(command)[1:]
    while isinstance(group, click.Group):
        found = group.get_command(context, words.pop(0))
        assert found is not None
        group = found  # type: ignore[assignment]
    group.make_context("ajet", [word.replace("ep-...", "ep-1") for word in words])


def test_it_opens_plays_rewards_watches_edits_starts_and_stops() -> None:
    used = {" ".join(command.split()[1:3]) if " train " in command else command.split()[1] for command in COMMANDS}
    assert used >= {
        "run", "reward", "abort", "status", "show", "top", "train start", "train stop", "train set", "train status",
        "train log", "train metrics", "try", "clients", "mix", "flush",
    }
    for words in ("--tasks", "--watch", "abort --infra"):
        assert any(words in command for command in COMMANDS), words
    assert "Exit code 75" in PAGE and "mix.LANE" in PAGE
    assert Path(ROOT / "pyproject.toml").read_text().count('"*.md"') == 1
