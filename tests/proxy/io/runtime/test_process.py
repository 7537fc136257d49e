"""The questions of a process to its C library."""

from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from tests.kit.source import ROOT

PROGRAM = """
import ajet_proxy.io.runtime.process as process

def resident():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * 4096

blocks = [bytes(20_000) for _ in range(5_000)]
kept = blocks[::100]
del blocks
before = resident()
process.give_memory_back()
print(before - resident())
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_gaps_between_blocks_in_use_go_back() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(done.stdout) > 50_000_000
