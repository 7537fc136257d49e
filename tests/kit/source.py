"""The repository's own source as data, for the tests that hold it to its rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("ajet_sdk", "ajet_proxy", "ajet_trainer")
FOLDERS = (*PACKAGES, "integrations", "tests")


def modules(*folders: str) -> list[Path]:
    """Every Python file under `folders`, relative to the root, in order."""
    return [path.relative_to(ROOT) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def tree(module: Path) -> ast.Module:
    return ast.parse((ROOT / module).read_text(), str(module))


def name_of(module: Path) -> str:
    """``ajet_sdk/frame.py`` is ``ajet_sdk.frame``."""
    return ".".join(module.with_suffix("").parts).removesuffix(".__init__")


def imports(module: Path) -> Iterator[str]:
    """Every full name that `module` imports, in functions too; ``from a import b`` gives ``a`` and ``a.b``."""
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def tops(module: Path) -> set[str]:
    """The top-level packages that `module` imports."""
    return {name.split(".")[0] for name in imports(module)}


def under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")
