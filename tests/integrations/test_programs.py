"""The coding agents that npm installs, each in an empty folder: asked to write a file, they run a command and are done.

Each is run twice over: by ``ajet run``, whose key names the episode, and on its own, told nothing but where the proxy
is; then the session that it announces by itself names the episode or, where it announces none, its history does.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integrations.stage import AJET, ENVIRONMENTS, FOLDER, Stage, python_of
from tests.integrations.test_frameworks import EXACT, check, check_calls
from tests.kit.engine_script import Rule

pytestmark = [pytest.mark.integrations, pytest.mark.slow]

COMMAND = "echo hello > greeting.txt && echo finished"
ASKED = "hello into greeting.txt"
DONE = (
    Rule("finished", "Done."),
    Rule(ASKED, tool="Bash", arguments={"command": COMMAND, "description": "Writes the file"}),
    Rule(ASKED, tool="bash", arguments={"command": COMMAND, "description": "Writes the file"}),
    Rule(ASKED, tool="exec_command", arguments={"cmd": COMMAND}),
    Rule(ASKED, tool="run_shell_command", arguments={"command": COMMAND, "is_background": False}),
)
GIVEN_UP = (Rule(ASKED, "I would rather not."),)


PROGRAMS = {
    "with_claude_code.sh": "harness", "with_codex.sh": "harness", "with_opencode.sh": "harness",
    "with_qwen_code.sh": "lineage",
}  # fmt: skip
"""The recipes, with the way in which a program that nobody named is told apart."""
each = pytest.mark.parametrize("recipe", PROGRAMS, ids=lambda recipe: recipe[5:-3])


def environment(home: Path) -> dict[str, str]:
    """The programs on the path, and a home in which they find no settings or login of the person who runs this."""
    node = Path(python_of("node")).parent
    path = f"{node}:{ENVIRONMENTS / 'node' / 'node_modules' / '.bin'}:/usr/local/bin:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config")}


@each
@pytest.mark.parametrize(
    ("story", "calls", "reward"), [(DONE, 2, 1.0), (GIVEN_UP, 1, 0.0)], ids=["solved", "given-up"]
)
def test_program(
    theatre: Stage, tmp_path: Path, recipe: str, story: tuple[Rule, ...], calls: int, reward: float
) -> None:
    theatre.script(story)
    task = f"{recipe}/{reward:g}"
    theatre.run(*AJET, "run", "--task", task, "--", "sh", str(FOLDER / recipe), env=environment(tmp_path))
    [episode] = theatre.episodes(task)
    check(episode, reward, EXACT[:calls])


@each
def test_program_that_names_its_own_session(theatre: Stage, tmp_path: Path, recipe: str) -> None:
    theatre.script(DONE)
    episode = unnamed_run(theatre, tmp_path, FOLDER / recipe)
    assert (episode["state"], episode["identified_by"]) == ("open", PROGRAMS[recipe])
    check_calls(episode, PROGRAMS[recipe], EXACT, None)


def test_a_call_beside_the_conversation_is_a_timeline_of_its_own(theatre: Stage, tmp_path: Path) -> None:
    """opencode asks for a title of the conversation at the moment at which it asks for its first answer."""
    theatre.script(DONE)
    recipe = (FOLDER / "with_opencode.sh").read_text()
    assert " --title greeting " in recipe
    untitled = tmp_path / "untitled.sh"
    untitled.write_text(recipe.replace(" --title greeting ", " "))
    episode = unnamed_run(theatre, tmp_path, untitled)
    assert [call["identified_by"] for call in episode["calls"]] == ["harness"] * 3
    assert sorted(len(line["calls"]) for line in episode["timelines"]) == [1, 2]


def unnamed_run(theatre: Stage, home: Path, recipe: Path) -> dict[str, Any]:
    """The one episode that appears when a program is told nothing but where the proxy is."""
    told = {"OPENAI_BASE_URL": f"{theatre.proxy}/v1", "ANTHROPIC_BASE_URL": theatre.proxy}
    keys = {"OPENAI_API_KEY": "none", "ANTHROPIC_API_KEY": "none"}
    before = {episode["episode"] for episode in theatre.listed()}
    theatre.run("sh", str(recipe), env=environment(home) | told | keys)
    [opened] = [episode["episode"] for episode in theatre.listed() if episode["episode"] not in before]
    return theatre.record(opened)
