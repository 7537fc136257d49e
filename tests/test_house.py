"""The house's sizes (`.ci/lint` names the longest files), and that nothing here knows the machine it was written on."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

from ajet_proxy.core.ledger.episode import Episode
from tests.kit.source import FOLDERS, PACKAGES, ROOT, modules, name_of, tree

MACHINE = re.compile(r"(?<![\w.~{}])/(?:work|root|opt|home)/|\.pyenv/")


@pytest.mark.parametrize("module", modules(*FOLDERS), ids=str)
def test_functions_stay_small(module: Path) -> None:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length < 60, f"{node.name} has {length} lines"


@pytest.mark.parametrize("module", modules(*PACKAGES), ids=str)
def test_classes_stay_small(module: Path) -> None:
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.ClassDef):
            methods = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
            assert methods <= 25, f"{node.name} has {methods} methods"


@pytest.mark.parametrize("module", modules("ajet_proxy"), ids=str)
def test_an_episode_alone_changes_its_fields(module: Path) -> None:
    """An episode is told by its name, its annotation as a parameter, or the room in which it is looked up."""
    for function in ast.walk(tree(module)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef) and name_of(module) != Episode.__module__:
            given = map(ast.unparse, (one for one in ast.walk(function.args) if isinstance(one, ast.arg)))
            names = ["episode", *(one.partition(":")[0] for one in given if ": Episode" in one)]
            episode = rf"(?:{'|'.join(names)}|(?:self|\S*episodes)\[.*?\])"
            own = re.compile(rf"{episode}\.(?:{'|'.join(Episode.__slots__)})(?:\[.*\])?")
            stored = (one for one in ast.walk(function) if isinstance(getattr(one, "ctx", None), ast.Store | ast.Del))
            assert not [found for one in stored if own.fullmatch(found := ast.unparse(one))]


@pytest.mark.parametrize("module", modules(*PACKAGES, "integrations"), ids=str)
def test_every_module_says_what_it_is(module: Path) -> None:
    empty = not tree(module).body
    assert empty or ast.get_docstring(tree(module))


def test_no_file_names_this_machine() -> None:
    found = []
    for name in tracked():
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        found += [f"{name}:{n}: {line.strip()}" for n, line in enumerate(text.splitlines(), 1) if MACHINE.search(line)]
    assert not [line for line in found if not line.startswith("tests/test_house.py:")]


def test_no_large_file_is_tracked() -> None:
    large = [name for name in tracked() if (ROOT / name).exists() and (ROOT / name).stat().st_size > 1_000_000]
    assert not large


def tracked() -> list[str]:
    """The files of the repository, by git."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    return listed.stdout.split("\n")[:-1]
