"""``ajet-trainer serve`` whose trainers are scripted (`tests.kit.scripted_trainer`), and soon started again.

    python -m tests.kit.scripted_supervisor PROXY ALLOW
"""

from __future__ import annotations

import os
import sys
from functools import partial
from unittest.mock import patch

from ajet_sdk.output import say
from ajet_trainer.runs import kept_run, supervisor

BACKOFF_MAX_S = 8.0
"""A trainer that is killed before its first step, again and again, is away no longer than a harness waits for it."""
COMMAND = (sys.executable, "-m", "tests.kit.scripted_trainer")

if __name__ == "__main__":
    with (
        patch.object(supervisor, "Supervisor", partial(supervisor.Supervisor, command=COMMAND)),
        patch.object(kept_run, "BACKOFF_MAX_S", BACKOFF_MAX_S),
    ):
        supervisor.serve(sys.argv[1], sys.argv[2], "s", os.environ, say)
