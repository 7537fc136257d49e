"""The distance of a trainer's probabilities from those that tokens were sampled with, by how agents sample.

    .venv-engine/bin/python -m tests.bench.sampling [--model DIR] [--shapes N]

Two vLLMs serve the model, with raw and with processed logprobs. For each way to sample, a group of episodes is played
through the proxy and leased, and verl's engine computes its logprobs before any update. *Before* is a trainer that
takes every call for one at temperature 1. *After* is `sampling = "correct"`. All in float32 on a CPU; see
`tests/kit/shaped.py` for the ways, and `docs/reports/sampling.md` for a run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from ajet_trainer.link import Link
from ajet_trainer.sampling import Rule
from integrations.quickstart.packaged_model import unpack
from tests.bench import table
from tests.kit import learner
from tests.kit.proxy_process import ProxyProcess
from tests.kit.shaped import RAW, SHAPES, ByHand, leased, play
from tests.kit.truth import Truth, measure
from tests.kit.vllm_process import vllm_server

MODEL = "policy"
HEAD = (
    "sampled by", "becomes", "Δp before", "Δlogp before", "Δp after", "Δlogp after", "mean weight", "engine − q",
    "weight − p/q",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of the model; by default the quick start's")
    parser.add_argument("--shapes", type=int, default=len(SHAPES), help="so many ways to sample")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = given.model or folder / "smollm2"
        if not model.exists():
            unpack(model)
        with learner.verl_here():
            worker, by_hand = learner.training_worker(model), ByHand.of(model)
            for kind, shapes in (("processed", SHAPES), ("raw", RAW)):
                options = ("--logprobs-mode", f"{kind}_logprobs", "--generation-config", "vllm")
                with (
                    vllm_server(model, folder / f"{kind}.log", name=MODEL, options=options) as url,
                    ProxyProcess(url, folder / kind) as proxy,
                    closing(Link(proxy.url)) as link,
                ):
                    truths = {}
                    for shape in list(shapes)[: given.shapes]:
                        play(proxy.url, shape, model=MODEL)
                        truths[shape] = measure(worker, by_hand, leased(link, model=MODEL), Rule())
                        sys.stderr.write(" | ".join([kind, *row(shape, truths[shape])]) + "\n")
                table.show(f"{kind} logprobs", HEAD, [row(shape, truth) for shape, truth in truths.items()])


def row(shape: str, truth: Truth) -> list[str]:
    before = [f"{truth.before.probability:.1e}", f"{truth.before.logprob:.1e}"]
    if truth.after is None:
        return [shape, truth.verdict, *before, "", "", "", "", ""]
    after = [f"{truth.after.probability:.1e}", f"{truth.after.logprob:.1e}", f"{truth.mean_weight:.3f}"]
    return [shape, truth.verdict, *before, *after, f"{truth.engine_error:.0e}", f"{truth.weight_error:.0e}"]


if __name__ == "__main__":
    main()
