"""Stands for ``ajet-trainer`` in a test of the quick start: leases and acknowledges over the real wire, trains nothing.

    python scripted_trainer.py ENGINE_URL run --config FILE
"""

from __future__ import annotations

import sys
import time

from ajet_sdk.routes import Lease
from ajet_trainer.config import load
from ajet_trainer.figures import batch_figures
from ajet_trainer.link import Link
from ajet_trainer.progress import Progress


def main(engine: str, config_file: str) -> None:
    from ajet_trainer.admission import admit
    from ajet_trainer.batch import to_rows

    config = load(config_file)
    progress = Progress(config.run_dir, config.total_steps, lambda line: None)
    progress.phase("importing nothing")
    link = Link(config.proxy_url)
    link.announce(config.model_name, 0, [engine])
    link.open_gate(0)
    progress.phase("training from step 0")
    ask = Lease(groups=config.groups, group_size=config.group_size, model=config.model_name, wait_s=2.0)
    for step in range(1, config.total_steps + 1):
        while (batch := link.lease(ask)) is None:
            pass
        link.close_gate("weights", 10.0)
        began = time.monotonic()
        time.sleep(0.2)
        link.open_gate(step)
        link.ack(batch.batch, step)
        admission = admit(batch, trained=frozenset(), max_tokens=config.max_tokens, no_signal="keep")
        figures = batch_figures([(batch, admission)], to_rows(batch.batch, admission.groups), None)
        progress.record({"step": step, **figures, "timing": {"train": time.monotonic() - began}})
    progress.phase("done")
    link.close()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[4])
