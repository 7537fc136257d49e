"""The import arrows of the design: a star with the SDK in its middle, a pure core, heavy libraries in one folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kit.source import PACKAGES, ROOT, imports, modules, name_of, tops, tree, under

EFFECTS = {
    "aiohttp", "asyncio", "concurrent", "click", "datetime", "httpx", "logging", "mitmproxy", "multiprocessing", "os",
    "pathlib", "random", "secrets", "select", "shutil", "signal", "socket", "ssl", "subprocess", "tempfile",
    "threading", "time", "urllib.request", "uuid",
}  # fmt: skip
HEAVY = {"ray", "safetensors", "tensordict", "torch", "transfer_queue", "transformers", "verl", "vllm"}
PURE = modules("ajet_proxy/core")


def ids(module: Path) -> str:
    return name_of(module)


def test_there_is_something_to_check() -> None:
    assert len(PURE) > 5
    assert all(modules(package) for package in PACKAGES)


@pytest.mark.parametrize("module", modules(*PACKAGES), ids=ids)
def test_the_star(module: Path) -> None:
    own = module.parts[0]
    others = tops(module) & {*PACKAGES, "integrations", "tests"}
    assert others <= ({own} if own == "ajet_sdk" else {own, "ajet_sdk"})


@pytest.mark.parametrize("module", PURE, ids=ids)
def test_the_core_has_no_effects(module: Path) -> None:
    assert not [name for name in imports(module) if any(under(name, effect) for effect in EFFECTS)]
    outside = {name for name in imports(module) if under(name, "ajet_proxy") and not under(name, "ajet_proxy.core")}
    assert outside <= {"ajet_proxy"}


@pytest.mark.parametrize("module", modules("ajet_proxy/io"), ids=ids)
def test_effects_do_not_reach_for_the_composition_root(module: Path) -> None:
    above = [name for name in imports(module) if under(name, "ajet_proxy.daemon") or under(name, "ajet_proxy.cli")]
    assert not above


@pytest.mark.parametrize("module", modules("ajet_sdk"), ids=ids)
def test_the_sdk_needs_httpx_alone(module: Path) -> None:
    standard = set(sys.stdlib_module_names)
    extra = {"cli.py": {"click"}, "frame.py": {"msgpack"}, "certificates.py": {"certifi"}}.get(module.name, set())
    assert tops(module) - standard <= {"ajet_sdk", "httpx"} | extra


@pytest.mark.parametrize("module", modules("ajet_trainer"), ids=ids)
def test_heavy_libraries_stay_in_one_folder(module: Path) -> None:
    if "verl_backend" in module.parts:
        return
    assert not tops(module) & HEAVY


@pytest.mark.parametrize("module", modules(*PACKAGES), ids=ids)
def test_banned_calls(module: Path) -> None:
    assert not tops(module) & {"pickle", "dill", "cloudpickle"}, "what is unpickled can run anything"
    for node in ast.walk(tree(module)):
        assert not isinstance(node, ast.Global), f"line {node.lineno}: state belongs to an object"
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            assert called not in ("print", "eval", "exec", "os.system"), f"line {node.lineno}: {called}"
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = ast.unparse(node.value.func)
            assert not called.endswith(("create_task", "ensure_future")), f"line {node.lineno}: keep the task's handle"


def test_importing_the_sdk_loads_nothing_heavy() -> None:
    code = "import ajet_sdk, sys; print(*sorted({'httpx', 'click', 'msgpack', 'ssl', 'asyncio'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == []
