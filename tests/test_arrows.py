"""The import arrows of the design: a star with the SDK in its middle, a pure core, heavy libraries in one folder."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

from ajet_proxy.core.protocol.routes import CAPTURED, CONTROL_ROUTES, OPEN_ROUTES
from tests.kit.source import PACKAGES, ROOT, imports, modules, name_of, tops, tree, under

EFFECTS = {
    "aiohttp", "asyncio", "concurrent", "click", "datetime", "httpx", "logging", "mitmproxy", "multiprocessing", "os",
    "pathlib", "random", "secrets", "select", "shutil", "signal", "socket", "ssl", "subprocess", "tempfile",
    "threading", "time", "urllib.request", "uuid",
}  # fmt: skip
BACKENDS = "ajet_trainer.backends"
HEAVY = {"ray", "safetensors", "tensordict", "torch", "transfer_queue", "transformers", "verl", "vllm"}
PURE = modules("ajet_proxy/core")
VLLMS = {*CAPTURED, *OPEN_ROUTES, *CONTROL_ROUTES, "/v1/models", "/is_paused", "/weight_info", "/server_info"}
KNOW_VLLM = {
    "ajet_proxy.core.protocol": "what agents ask", "ajet_proxy.io.capture.models": "a route of agents",
    "ajet_proxy.io.engines.upstream": "signs of life", "ajet_proxy.io.engines.vllm": "all else",
    "ajet_trainer.engines.vllm": "all of it",
}
DOOR_TO_AIOHTTP = Path("ajet_proxy/io/http/aiohttp_internals.py")
PUBLIC_AIOHTTP = {"aiohttp", "aiohttp.web", "aiohttp.abc", "aiohttp.http_exceptions"}
NOT_TO_BE_SUBCLASSED = {
    "aiohttp.TCPConnector", "aiohttp.ClientSession", "web.AppRunner", "web.Server", "web.RequestHandler",
}  # fmt: skip


CORE = {
    "tokens": set(),
    "identity": set(),
    "trajectory": {"tokens"},
    "conversation": {"tokens", "trajectory"},
    "continuity": {"tokens", "trajectory", "conversation"},
    "protocol": {"tokens", "identity", "trajectory", "conversation", "continuity"},
    "ledger": {"tokens", "trajectory", "conversation"},
    "control": {"identity", "ledger"},
}
"""The rooms of the core, and which others each of them knows."""
IO = {
    "runtime": set(),
    "http": {"runtime"},
    "engines": {"runtime", "http"},
    "storage": {"runtime"},
    "ledger_port": {"runtime", "engines", "storage"},
    "capture": {"runtime", "http", "engines", "ledger_port"},
    "intercept": {"runtime", "http", "engines"},
    "workers": {"runtime", "ledger_port"},
    "control": {"runtime", "http", "engines", "storage", "ledger_port", "capture", "intercept", "workers"},
}
"""The rooms of io. Each may know all of the core."""


def ids(module: Path) -> str:
    return name_of(module)


def room_of(name: str, package: str) -> str | None:
    """The room of `package` in which the module `name` stands."""
    return name.split(".")[2] if name.startswith(package + ".") else None


@pytest.mark.parametrize(("package", "rooms"), [("ajet_proxy.core", CORE), ("ajet_proxy.io", IO)])
def test_each_room_knows_those_that_it_may_and_no_others(package: str, rooms: dict[str, set[str]]) -> None:
    """The lists are no longer than they have to be, and there is no way back."""
    known: dict[str, set[str]] = {room: set() for room in rooms}
    for module in modules(package.replace(".", "/")):
        if (room := room_of(name_of(module), package)) is not None:
            known[room] |= {other for name in imports(module) if (other := room_of(name, package)) not in (None, room)}
    assert known == rooms
    done: set[str] = set()
    while ready := {room for room, others in rooms.items() if room not in done and others <= done}:
        done |= ready
    assert done == set(rooms)


@pytest.mark.parametrize("package", PACKAGES)
def test_no_package_has_an_import_circle(package: str) -> None:
    """Imports in functions count, too, but not the package's own door."""
    names = {name_of(module): module for module in modules(package)}
    known = {
        name: {other for other in imports(module) if other in names} - {name, package}
        for name, module in names.items()
    }
    done: set[str] = set()
    while ready := {name for name, others in known.items() if name not in done and others <= done}:
        done |= ready
    assert not {name: known[name] - done for name in known if name not in done}


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
    extra = {"cli.py": {"click"}, "output.py": {"click"}, "commands.py": {"click"}, "frame.py": {"msgpack"},
             "interception.py": {"certifi"}, "settings.py": {"tomli"}}.get(module.name, set())
    assert tops(module) - standard <= {"ajet_sdk", "httpx"} | extra


@pytest.mark.parametrize("module", modules("ajet_trainer"), ids=ids)
def test_heavy_libraries_stay_with_the_backends(module: Path) -> None:
    if "backends" in module.parts:
        return
    assert not tops(module) & HEAVY


@pytest.mark.parametrize("module", modules("ajet_proxy", "ajet_trainer"), ids=ids)
def test_few_modules_name_a_route_of_vllm(module: Path) -> None:
    words = (node.value for node in ast.walk(tree(module)) if isinstance(node, ast.Constant))
    named = {route for word in words if isinstance(word, str) and (route := word.partition("?")[0]) in VLLMS}
    assert not named or any(under(name_of(module), one) for one in KNOW_VLLM)


@pytest.mark.parametrize("module", modules("ajet_trainer", "integrations"), ids=ids)
def test_runs_from_afar_are_asked_at_their_door_by_the_command_line_alone(module: Path) -> None:
    if "runs" not in module.parts:
        door = {"ajet_trainer.runs"} if module == Path("ajet_trainer/cli.py") else set()
        assert {name for name in imports(module) if under(name, "ajet_trainer.runs")} <= door


@pytest.mark.parametrize("module", modules("ajet_trainer"), ids=ids)
def test_backends_stand_behind_one_door(module: Path) -> None:
    """Nothing names one but the door, and none of them names another."""
    own = name_of(module).split(".")[2] if under(name_of(module), BACKENDS) and module.parent.name != "backends" else ""
    named = {name.removeprefix(f"{BACKENDS}.").split(".")[0] for name in imports(module) if under(name, BACKENDS)}
    backends = {path.name for path in (ROOT / "ajet_trainer" / "backends").iterdir() if path.is_dir()}
    if module != Path("ajet_trainer/backends/__init__.py"):
        assert named & backends <= {own}


@pytest.mark.parametrize("module", [module for module in modules("ajet_proxy") if module != DOOR_TO_AIOHTTP], ids=ids)
def test_what_aiohttp_does_not_promise_is_used_in_one_module(module: Path) -> None:
    """As far as the source tells: a private attribute is one that its own module, or the standard library, defines."""
    if "aiohttp" not in tops(module):
        return
    found, used = {"_exit", "_replace", "_asdict"}, dict[str, int]()
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)  # in __slots__
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.endswith("__"):
            used[node.attr] = node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiohttp"):
            assert node.module in PUBLIC_AIOHTTP, f"line {node.lineno}"
            assert not any(alias.name.startswith("_") for alias in node.names), f"line {node.lineno}"
    assert not {name: line for name, line in used.items() if name not in found}, f"these belong in {DOOR_TO_AIOHTTP}"
    bases = {ast.unparse(b) for node in ast.walk(tree(module)) if isinstance(node, ast.ClassDef) for b in node.bases}
    assert not bases & NOT_TO_BE_SUBCLASSED, f"such classes belong in {DOOR_TO_AIOHTTP}"
