"""The reward of an episode: the share of the task's tests that its copy of the repository passes.

The tests are those of the original, whatever became of the copy's. The last line of output is the reward.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    task = json.loads(os.environ["AJET_TASK_JSON"])
    work = Path(tempfile.gettempdir()) / "coding" / os.environ["AJET_EPISODE"]
    shutil.copy(Path(__file__).parent / "repo" / "test_stats.py", work)
    command = [sys.executable, "-m", "unittest", "-q"]
    done = [subprocess.run([*command, f"test_stats.{test}"], cwd=work, check=False) for test in task["tests"]]
    shutil.rmtree(work)
    print(sum(test.returncode == 0 for test in done) / len(done))
