"""The mean reward of each step of a run, as a table on the screen and as ``curve.png`` in the run's folder.

    .venv-engine/bin/python -m integrations.tutorials.curve runs/tutorials/math
"""

from __future__ import annotations

import sys
from pathlib import Path

from integrations.quickstart.loop import metrics_in
from integrations.quickstart.plot import reward_plot

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    steps = metrics_in(folder)
    print("step  episodes  reward")
    for step in steps:
        print(f"{step['step']:4}  {step['episodes']:8}  {step['reward_mean']:6.3f}")
    reward_plot([step["reward_mean"] for step in steps], folder / "curve.png", str(folder), "Mean reward per step")
    print(folder / "curve.png")
