"""The time that agents wait for new weights, beside the time that the weights take: updates under load, with real vLLM.

    .venv-engine/bin/python -m tests.bench.gate [--model DIR] [--updates N] [--agents N] [--tokens N]

Goal: an agent that a weight update blocks waits for the weight copy and at most 10 % more, and nothing in flight is
aborted.

vLLM serves a model behind the proxy, whose gate pauses engines. Agents stream call after call. Again and again
the gate is closed, the weights (really others each time) are written and loaded by the trainer's own code, and the gate
is opened. The copy is the writing and the engine's ``reload_weights``; all else, from closing the gate to opening it,
is ours. How long an agent was blocked is seen from outside: the longest silence between two events of its stream, or
before the first one, that the update falls into, less the usual time between two.

The model decides what can be shown: freezing vLLM takes a sleep of 20 ms of its own, and the tiny model of the tests is
copied in as much; the quick start's model (0.5 GB) is a fair one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

from tests.bench import table
from tests.kit import tiny_model
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.vllm_process import vllm_server

MODEL = "tiny"
BETWEEN_S = 0.3
SHARED = next((folder for folder in ("/dev/shm",) if Path(folder).is_dir()), None)
"""Where the trainer puts weights by default."""


@dataclass(frozen=True, slots=True)
class Update:
    """One weight update: when it began and ended, the seconds of its parts, and those of each request to the engine."""

    began: float
    ended: float
    close: float
    write: float
    load: float
    open: float
    asked: Mapping[str, float]

    @property
    def copy(self) -> float:
        return self.write + self.asked["/collective_rpc"]


def updates(proxy: str, engine: str, model: Path, folder: Path, count: int) -> list[Update]:
    """Gives the engine other weights `count` times, as the trainer does it with an attached engine."""
    import torch
    from safetensors.torch import load_file, save_file

    from ajet_trainer.engines import weights
    from ajet_trainer.link import Link

    link = Link(proxy)
    link.announce(MODEL, 0, None)
    tensors = load_file(model / "model.safetensors")
    if "lm_head.weight" not in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    made = []
    for version in range(1, count + 1):
        for tensor in (tensor for tensor in tensors.values() if tensor.numel() < 1 << 20):  # the rest takes seconds
            tensor.add_(torch.randn_like(tensor), alpha=1e-3)
        began = time.monotonic()
        link.close_gate("weights", 60.0)
        closed = time.monotonic()
        target = folder / str(version)
        target.mkdir()
        save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
        written = time.monotonic()
        with noted() as asked:
            weights.load_into([engine], target, version, 60.0)
        pushed = time.monotonic()
        link.open_gate(version)
        ended = time.monotonic()
        weights.forget(folder, version)
        parts = closed - began, written - closed, pushed - written, ended - pushed
        made.append(Update(began, ended, *parts, asked))
        time.sleep(BETWEEN_S)
    return made


@contextmanager
def noted() -> Iterator[dict[str, float]]:
    """The seconds of each request that the trainer's code makes to the engine, by path, while this is entered."""
    from ajet_trainer.engines.vllm import Vllm

    seconds: dict[str, float] = {}
    really = Vllm._ask

    def ask(engine: Vllm, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        began = time.monotonic()
        answer = really(engine, path, body, timeout_s)
        seconds[path] = time.monotonic() - began
        return answer

    with mock.patch.object(Vllm, "_ask", ask):
        yield seconds


Calls = Sequence[tuple[float, list[float], bool]]


def blocked(agents: Sequence[Calls], update: Update) -> list[float]:
    """The seconds for which `update` kept each agent waiting."""
    found = []
    for calls in agents:
        points = [[asked, *times] for asked, times, _ in calls]
        pairs = [pair for times in points for pair in pairwise(times)]
        usual = statistics.median(b - a for a, b in pairs)
        around = [b - a for a, b in pairs if a < update.ended and b > update.began]
        if around:
            found.append(max(around) - usual)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="How long agents wait for new weights.")
    parser.add_argument("--model", type=Path, help="the model's folder; the tests' tiny one without it")
    parser.add_argument("--updates", type=int, default=100)
    parser.add_argument("--agents", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=150, help="tokens of each call")
    options = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-")))
        model = options.model.resolve() if options.model else tiny_model.build(folder / "model")
        engine = stack.enter_context(vllm_server(model, folder / "vllm.log", name=MODEL))
        mode = ["--gate-mode=pause"]
        proxy = stack.enter_context(ProxyProcess(engine, folder / "data", options=mode))
        command = [sys.executable, "-m", "tests.bench.streamers", str(proxy.port), str(options.agents),
                   str(options.tokens), MODEL]  # fmt: skip
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT, text=True) as load:
            time.sleep(5)
            pushes = stack.enter_context(tempfile.TemporaryDirectory(prefix="ajet-bench-", dir=SHARED))
            made = updates(proxy.url, engine, model, Path(pushes), options.updates)
            time.sleep(1)
            said, _ = load.communicate()
    size = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    show(made, json.loads(said), f"{model.name}, {size / 1e6:,.0f} MB")


def show(made: Sequence[Update], agents: Sequence[Calls], what: str) -> None:
    waits = [blocked(agents, update) for update in made]
    more = [statistics.median(wait) / update.copy - 1 for wait, update in zip(waits, made, strict=True)]
    worst = [max(wait) / update.copy - 1 for wait, update in zip(waits, made, strict=True)]
    parts = {
        "closing the gate": [update.close for update in made],
        "writing the weights": [update.write for update in made],
        "loading them": [update.load for update in made],
        **{f"- {path}": [update.asked[path] for update in made] for path in made[0].asked},
        "opening the gate": [update.open for update in made],
        "an agent was blocked (median agent)": [statistics.median(wait) for wait in waits],
        "an agent was blocked (slowest agent)": [max(wait) for wait in waits],
    }
    found = {name: (statistics.median(some), max(some)) for name, some in parts.items()}
    rows = [[name, f"{median * 1e3:.1f}", f"{most * 1e3:.1f}"] for name, (median, most) in found.items()]
    table.show(f"{len(made)} weight updates of {what}; {len(agents)} agents", ["", "ms, median", "ms, worst"], rows)
    calls = [call for some in agents for call in some]
    broken = sum(not whole for *_, whole in calls)
    spanned = sum(call[0] < update.began and call[1][-1] > update.ended for call in calls for update in made)
    met = statistics.median(more) <= 0.1 and not broken
    lines = [
        f"calls: {len(calls)}, not whole: {broken}; in flight over an update: {spanned}",
        f"blocked beyond the copy: median agent {statistics.median(more):+.1%}, slowest {statistics.median(worst):+.1%}"
        f" (medians over updates); worst update {max(more):+.1%} and {max(worst):+.1%}",
        table.verdict(met, "blocked for the weight copy and at most 10 % more, nothing aborted"),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
