"""The distributions that `make dist` builds: their contents, and their programs in fresh environments, installed as
a user does."""

from __future__ import annotations

import os
import re
import subprocess
import tarfile
import zipfile
from collections.abc import Sequence
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import PACKAGES, ROOT, modules, tops
from tests.kit.stub_process import stub_process

DAEMON, ENGINE = ROOT / ".ci" / "daemon.lock", ROOT / ".ci" / "engine.lock"
PROGRAMS = ("ajet", "ajet-proxy", "ajet-trainer")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run([ROOT / ".ci" / "dist", folder], folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [found] = built.glob("*.whl")
    return found


def run(command: list[str | Path], cwd: Path) -> str:
    """Outside the checkout, and without what this environment says of itself."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AJET_", "PYTHONPATH"))}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked(*folders: str) -> set[str]:
    listed = run(["git", "ls-files", "--", *folders], ROOT)
    return {name for name in listed.split("\n")[:-1] if (ROOT / name).exists()}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_the_wheel_holds_the_three_packages_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert held == tracked(*PACKAGES)
    assert {"ajet_sdk/py.typed", "ajet_sdk/intercepted.cjs", "ajet_sdk/page/page.html", "ajet_sdk/page/main.js"} <= held


def test_the_source_distribution_builds_the_same_wheel_again(built: Path, wheel: Path, tmp_path: Path) -> None:
    [source] = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        archive.extractall(tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    held = {str(path.relative_to(unpacked)) for path in unpacked.rglob("*") if path.is_file()}
    assert held >= tracked(*PACKAGES, "docs") | {"README.md", "CHANGELOG.md", "LICENSE", "pyproject.toml"}
    assert [name for name in held if name.startswith(("tests/", ".ci/"))] == []
    when = str(int(run(["git", "log", "-1", "--format=%ct"], ROOT)))
    build = [ROOT / ".venv/bin/python", "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, unpacked]
    run(["env", f"SOURCE_DATE_EPOCH={when}", *build], tmp_path)
    assert (tmp_path / wheel.name).read_bytes() == wheel.read_bytes()


def test_an_index_is_told_what_it_shows(wheel: Path) -> None:
    said = metadata(wheel)
    for name in ("Summary", "Keywords", "License-Expression", "Requires-Python", "Classifier"):
        assert said[name], name
    assert said["Description-Content-Type"] == "text/markdown"
    text = str(said.get_payload())
    assert [name for name in PROGRAMS if f"`{name}`" not in text] == []
    assert [link for link in re.findall(r"\]\(([^)]*)\)", text) if not link.startswith("https://")] == []


def install(wheel: Path, extras: str, lock: Path, versions: list[str], folder: Path) -> Path:
    """The programs' folder of an environment in `folder`. Versions are those of `lock`, then those of the other one."""
    lines = lock.read_text().split()
    pinned = {line.partition("==")[0]: line for line in [*DAEMON.read_text().split(), *ENGINE.read_text().split()]}
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join((pinned | {line.partition("==")[0]: line for line in lines}).values()))
    requirement = f"ajet{extras} @ {wheel.as_uri()}"
    run([ROOT / ".ci" / "setup", "trial", folder / "env", constraints, requirement, *versions], folder)
    return folder / "env" / "bin"


def check(there: Path, package: str, wheel: Path, without: Sequence[str] = ()) -> None:
    """The program of `package` says its version and its help, and there is all that the package imports anywhere."""
    program = package.replace("_", "-").replace("ajet-sdk", "ajet")
    assert run([there / program, "--version"], there) == f"{program} {metadata(wheel)['Version']}\n"
    assert f"Usage: {program}" in run([there / program, "--help"], there)
    names = sorted(set().union(*map(tops, modules(package))) - {*PACKAGES, *without})
    code = "import sys; from importlib.util import find_spec; print(*(n for n in sys.argv[1:] if find_spec(n) is None))"
    assert run([there / "python", "-c", code, *names], there) == "\n"


def test_the_wheel_alone_is_the_sdk_and_its_command(wheel: Path, tmp_path: Path) -> None:
    there = install(wheel, "", DAEMON, ["3.10", "3.11", "3.12"], tmp_path)
    check(there, "ajet_sdk", wheel, without=["msgpack", "tomli", "tomllib"])  # for frames and settings: the extras'
    for program, extra in (("ajet-proxy", "proxy"), ("ajet-trainer", "trainer")):
        done = subprocess.run([there / program, "run"], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert done.stderr.startswith(program)
        assert extra in done.stderr


def test_the_proxy_runs_from_the_wheel_and_traces_are_added(wheel: Path, tmp_path: Path) -> None:
    there = install(wheel, "[proxy]", DAEMON, ["3.12", "3.13"], tmp_path)
    check(there, "ajet_proxy", wheel, without=["opentelemetry", "pyarrow", "tomli"])
    serve(there, wheel, tmp_path / "plain")
    install(wheel, "[proxy,traces]", DAEMON, ["3.12", "3.13"], tmp_path)
    check(there, "ajet_proxy", wheel, without=["pyarrow", "tomli"])
    serve(there, wheel, tmp_path / "traced")


def serve(there: Path, wheel: Path, data: Path, *options: str) -> None:
    """Start the daemon, ask how it is, and stop it."""
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
    intercepting = ["--intercept", "127.0.0.1:0", *options]
    with (
        stub_process() as engine,
        ProxyProcess(engine, data, options=intercepting, env=environment, program=there / "ajet-proxy") as proxy,
    ):
        assert metadata(wheel)["Version"] == proxy.report()["version"]
        assert run([there / "ajet", "status", "--proxy", proxy.url], there)
        assert proxy.stop() == 0, proxy.errors()


def test_the_trainer_finds_all_that_it_imports(wheel: Path, tmp_path: Path) -> None:
    there = install(wheel, "[trainer]", ENGINE, ["3.11", "3.12"], tmp_path)
    check(there, "ajet_trainer", wheel, without=["tomli", "vllm"])
