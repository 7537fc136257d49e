"""The blocks of the README and of the pages that say what to type are true: run, or checked (`tests.kit.readme`)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kit.environment import clean
from tests.kit.proxy_process import ProxyProcess
from tests.kit.readme import Block, blocks, commands, our_commands
from tests.kit.source import ROOT
from tests.kit.stub_process import stub_process
from tests.tutorials.pages import KINDS, NAMES

PAGE = ROOT / "README.md"
PAGES = (PAGE, *sorted((ROOT / "docs/start").glob("*.md")), *sorted((ROOT / "docs/guide").glob("*.md")))
CODE = [(page, block) for page in PAGES for block in blocks(page) if block.is_code]
OPTIONS = ("--group-size", "2", "--intercept", "127.0.0.1:0")
BIN = {"ajet": ".venv", "ajet-proxy": ".venv", "ajet-trainer": ".venv-engine"}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of a reader who has started an engine and the proxy."""
    folder = tmp_path_factory.mktemp("readme")
    with stub_process() as engine, ProxyProcess(engine, folder / "data", options=OPTIONS) as proxy:
        yield clean(
            AJET_PROXY_URL=proxy.url, OPENAI_BASE_URL=f"{proxy.url}/v1", OPENAI_API_KEY="EMPTY", ENGINE_URL=engine,
            PATH=f"{ROOT / '.venv/bin'}{os.pathsep}{os.environ['PATH']}",
        )  # fmt: skip


@pytest.mark.parametrize(
    ("page", "block"),
    [
        pytest.param(page, block, id=f"{page.stem}-line{block.line}-{block.kind.replace(' ', '-')}")
        for page, block in CODE
    ],
)
def test_block(page: Path, block: Block, environment: dict[str, str], tmp_path: Path) -> None:
    if block.kind == "python test":
        run([sys.executable, "-c", block.text], environment, tmp_path)
    elif block.kind == "sh test":
        run(["bash", "-euo", "pipefail", "-c", block.text], environment, tmp_path)
    elif block.kind == "sh host" or (block.kind.startswith(KINDS) and page.stem in NAMES):
        for program, plain, flags in our_commands(block.text):
            check_flags(program, plain, flags)
    elif block.kind == "sh":
        for words in commands(block.text):
            assert words[0] == "make", (
                f"{words}: mark the block 'sh test' to run it or 'sh host' to have its flags checked"
            )
            subprocess.run([*words, "-n"], cwd=ROOT, check=True, capture_output=True)
    else:
        pytest.fail(f"line {block.line}: {block.kind!r} says not what to do with it; see tests/kit/readme.py")


def run(command: list[str], environment: dict[str, str], folder: Path) -> None:
    done = subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=900, check=False
    )
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"


def check_flags(program: str, plain: list[str], flags: list[str]) -> None:
    command = [str(ROOT / BIN[program] / "bin" / program), *plain, "--help"]
    if not Path(command[0]).exists():
        pytest.skip(f"{BIN[program]} is not built: make setup")
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: {done.stderr}"
    known = set(re.findall(r"--[a-z][a-z-]*", done.stdout))
    assert set(flags) <= known, f"{program} {' '.join(plain)} does not know {sorted(set(flags) - known)}"


def test_the_page_has_what_it_must() -> None:
    text = PAGE.read_text()
    assert "```mermaid" in text or ".svg" in text
    assert "make quickstart" in text
    assert "make test" in text
    assert [page for page, block in CODE if (page, block.kind) == (PAGE, "python test")], "no Python example that runs"
