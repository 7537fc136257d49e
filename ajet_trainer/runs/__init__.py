"""Runs from afar: what may run on this host, who keeps it, and what is told of it. The command line alone asks here.
Other packages import what stands here, and none of its modules."""

from ajet_trainer.runs.supervisor import serve
from ajet_trainer.runs.systemd import install

__all__ = ["install", "serve"]
