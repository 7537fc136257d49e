"""The trainer's part of the soak: leases batches and acknowledges them, and announces new weights through the gate.

    python -m tests.bench.consumer URL UPDATE_S

Works until standard input ends, then prints one JSON line with what it did.
"""

from __future__ import annotations

import json
import select
import sys
import time

from ajet_sdk.routes import Lease
from ajet_trainer.link import Link

GROUPS, COPY_S = 8, 0.2


def main() -> None:
    link, pause_s = Link(sys.argv[1]), float(sys.argv[2])
    version, due = 0, time.monotonic() + pause_s
    done = {"batches": 0, "episodes": 0, "samples": 0, "updates": 0}
    link.announce("stub", version)
    while not select.select([sys.stdin], [], [], 0)[0]:
        if time.monotonic() > due:
            link.close_gate("weights", 60.0)
            time.sleep(COPY_S)
            version, due = version + 1, time.monotonic() + pause_s
            link.open_gate(version)
            done["updates"] += 1
        batch = link.lease(Lease(groups=GROUPS, wait_s=0.5))
        if batch is not None:
            episodes = [episode for group in batch.groups for episode in group.episodes]
            done["batches"] += 1
            done["episodes"] += len(episodes)
            done["samples"] += sum(len(episode.samples) for episode in episodes)
            link.ack(batch.batch, version)
    sys.stdout.write(json.dumps(done) + "\n")


if __name__ == "__main__":
    main()
