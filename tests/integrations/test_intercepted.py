"""Programs from npm that are given no base URL: ``ajet run --intercept`` catches them at their provider's address."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.integrations.stage import AJET, ENVIRONMENTS, FOLDER, Stage
from tests.integrations.test_frameworks import STORY
from tests.integrations.test_programs import DONE, environment
from tests.kit.engine_script import Rule

pytestmark = [pytest.mark.integrations, pytest.mark.slow]

PACKAGES = ENVIRONMENTS / "node"
CODEX = """
set -eu
cd "$(mktemp -d)"
CODEX_API_KEY=$OPENAI_API_KEY codex exec --skip-git-repo-check --dangerously-bypass-approvals-and-sandbox \
  --model policy "Write the word hello into greeting.txt" </dev/null
grep -qx hello greeting.txt
"""
PROGRAMS: dict[str, tuple[tuple[Rule, ...], str]] = {
    "openai": (STORY, 'node "$PACKAGES/with_openai_node.mjs" 17 25'),
    "openai on an older Node.js": (STORY, '"$OTHER_NODE" "$PACKAGES/with_openai_node.mjs" 17 25'),
    "claude": (DONE, 'sh "$FOLDER/with_claude_code.sh"'),
    "codex": (DONE, CODEX),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_program(theatre: Stage, tmp_path: Path, name: str) -> None:
    story, script = PROGRAMS[name]
    other = shutil.which("node") or ""
    if "OTHER_NODE" in script and not other:
        pytest.skip("needs a Node.js of the machine's own")
    shutil.copy(FOLDER / "with_openai_node.mjs", PACKAGES)  # Node.js looks for packages beside the program
    theatre.script(story)
    task = f"intercepted/{name}"
    env = environment(tmp_path) | {"FOLDER": str(FOLDER), "PACKAGES": str(PACKAGES), "OTHER_NODE": other}
    theatre.run(*AJET, "run", "--task", task, "--intercept", "--", "sh", "-c", script, env=env)
    [episode] = theatre.episodes(task)
    assert (episode["state"], episode["reward"]) == ("ready", 1.0)
    assert [(call["complete"], call["identified_by"]) for call in episode["calls"]] == [(True, "key")] * 2
