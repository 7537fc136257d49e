"""``ajet-trainer serve`` whose trainers are scripted (`tests.kit.scripted_trainer`).

    python -m tests.kit.scripted_supervisor PROXY ALLOW
"""

from __future__ import annotations

import os
import sys
from functools import partial
from unittest.mock import patch

from ajet_sdk.output import say
from ajet_trainer import serving
from ajet_trainer.supervisor import Supervisor

COMMAND = (sys.executable, "-m", "tests.kit.scripted_trainer")

if __name__ == "__main__":
    with patch.object(serving, "Supervisor", partial(Supervisor, command=COMMAND)):
        serving.serve(sys.argv[1], sys.argv[2], "s", os.environ, say)
