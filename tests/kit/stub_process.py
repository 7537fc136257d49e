"""The stub engine as a process of its own, for tests and examples that are not asynchronous themselves."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tests.kit.source import ROOT


@contextmanager
def stub_process(*options: str, inside: Sequence[str] = ()) -> Iterator[str]:
    """The base URL of a running stub engine; `options` are those of ``python -m tests.kit.engine_stub``.

    `inside` begins the command, to run it in a namespace.
    """
    command = [*inside, sys.executable, "-m", "tests.kit.engine_stub", *options]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}  # another namespace may be another folder
    process = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline().decode()
        assert line.startswith("engine stub ready on "), line
        yield line.split()[-1]
    finally:
        process.terminate()
        process.communicate()
