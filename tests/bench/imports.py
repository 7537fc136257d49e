"""The time that an import and a ``--help`` take: fresh processes, medians, less what Python itself takes.

python -m tests.bench.imports
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

from tests.bench import table
from tests.kit.source import ROOT
from tests.kit.steps import processor_s

RUNS = 15
COMMANDS: dict[str, Sequence[str]] = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "import ajet_sdk": (sys.executable, "-c", "import ajet_sdk"),
    "ajet --help": (str(ROOT / ".venv/bin/ajet"), "--help"),
    "ajet-proxy --help": (str(ROOT / ".venv/bin/ajet-proxy"), "--help"),
    "ajet-trainer --help": (str(ROOT / ".venv-engine/bin/ajet-trainer"), "--help"),
}


def seconds(command: Sequence[str]) -> tuple[float, float]:
    """Wall time and CPU time of one process."""
    began = time.perf_counter()
    _, cpu = processor_s(lambda: subprocess.run(command, check=True, capture_output=True, cwd=ROOT))
    return time.perf_counter() - began, cpu


def main() -> None:
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            runs[name].append(seconds(command))
    wall = {name: statistics.median(run[0] for run in some) * 1e3 for name, some in runs.items()}
    cpu = {name: statistics.median(run[1] for run in some) * 1e3 for name, some in runs.items()}
    bare = cpu["python -c pass"]
    rows = [[name, f"{wall[name]:.0f}", f"{cpu[name]:.0f}", f"{cpu[name] - bare:.0f}"] for name in COMMANDS]
    table.show(f"Start-up, medians of {RUNS} runs", ["", "ms", "CPU ms", "CPU ms over bare Python"], rows)


if __name__ == "__main__":
    main()
