"""How long an import and a ``--help`` take: wall time of fresh processes, medians, less what Python itself takes.

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

RUNS = 15
COMMANDS: dict[str, Sequence[str]] = {
    "python -c pass": (sys.executable, "-c", "pass"),
    "import ajet_sdk": (sys.executable, "-c", "import ajet_sdk"),
    "ajet --help": (str(ROOT / ".venv/bin/ajet"), "--help"),
    "ajet-proxy --help": (str(ROOT / ".venv/bin/ajet-proxy"), "--help"),
    "ajet-trainer --help": (str(ROOT / ".venv-engine/bin/ajet-trainer"), "--help"),
}


def seconds(command: Sequence[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True, cwd=ROOT)
    return time.perf_counter() - began


def main() -> None:
    runs: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for _ in range(RUNS):
        for name, command in COMMANDS.items():
            runs[name].append(seconds(command) * 1e3)
    medians = {name: statistics.median(values) for name, values in runs.items()}
    bare = medians["python -c pass"]
    rows = [[name, f"{value:.0f}", f"{value - bare:.0f}"] for name, value in medians.items()]
    table.show(f"Start-up, medians of {RUNS} runs", ["", "ms", "ms over bare Python"], rows)


if __name__ == "__main__":
    main()
