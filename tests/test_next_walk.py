"""The walk from the agent's socket to the gradient: each module on the straight line names the next one."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.kit.source import ROOT, tree

LINE = (
    "ajet_proxy/io/capture/front.py",
    "ajet_proxy/core/identity/ladder.py",
    "ajet_proxy/core/protocol/chat.py",
    "ajet_proxy/core/continuity/memory.py",
    "ajet_proxy/core/continuity/splice.py",
    "ajet_proxy/core/protocol/exchange.py",
    "ajet_proxy/core/trajectory/timeline.py",
    "ajet_proxy/core/ledger/episode.py",
    "ajet_proxy/core/trajectory/samples.py",
    "ajet_proxy/core/ledger/commands.py",
    "ajet_sdk/frame.py",
    "ajet_trainer/link.py",
    "ajet_trainer/admission.py",
    "ajet_trainer/advantage.py",
    "ajet_trainer/batch.py",
    "ajet_trainer/step.py",
    "ajet_trainer/verl_backend/trainer.py",
)


def test_the_docstrings_lead_from_the_socket_to_the_gradient() -> None:
    walked = [LINE[0]]
    while (step := next_of(walked[-1])) != "the gradient.":
        assert (ROOT / step).is_file(), f"{walked[-1]} leads to {step}, which is not there"
        assert step not in walked, f"{walked[-1]} leads back to {step}"
        walked.append(step)
    assert tuple(walked) == LINE


def next_of(module: str) -> str:
    """Where the last line of the module's docstring leads."""
    text = ast.get_docstring(tree(Path(module))) or ""
    last = text.splitlines()[-1] if text else ""
    assert last.startswith("Next: "), f"the docstring of {module} does not end with 'Next: <path>'"
    return last.removeprefix("Next: ")
