"""Seconds and memory of training unmerged calls, strict timelines and trees, in one run.

    .venv-engine/bin/python -m tests.bench.training [--model DIR] [--scale X] [--limit TOKENS] [--rounds N]
        [--dtype bf16]

Each shape is a batch of calls as real agents make them. *off* has a row a call, *timeline* merges them strictly, and
*tree* computes the rows of *timeline* as a forest (``rows = "tree"``). A round is old logprobs and an update, by the
workers of a run, without Ray. On a GPU, if there is one, trees are computed by flex attention and rows by torch's own
(`sdpa`). All forms have the same limit of tokens a micro-batch. Where a row is longer, flat rows are alone, and a tree
has room for twice as much. The forms take turns; the first round of each warms up and is not counted. Without --model
it is a random one of 1 M parameters.

Two shapes are recorded (`tests.bench.sessions`): the quick start's first step, and opencode on a task of the coding
tutorial. Their tokens are drawn, their lengths and what they share are real. opencode's prompt is long, so this session
is made a tenth as long; ``--scale 10 --shapes "a session of opencode"`` is its real length.

Predicted is the cost by `ajet_trainer.forest.Prices`, of all micro-batches that a form makes. By it a tree is cut.
Goals:

1. The median of tree is never above the slowest round of timeline.
2. Where tree has less than half the tokens of timeline, time is within 1.3 of the ratio of tokens, or less.
3. On the shared prompt tree is at least 10 times as fast as off, and at least 1.5 times on each shape of several turns.
4. The peak of memory is no higher than timeline's. It counts what a round takes besides what was there before: the
   weights and the process itself.
5. The gradients of timeline and tree differ by less than 5e-6, in float32. Those of off and timeline stand next to it:
   they differ by rounding alone.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import random
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from tests.bench import sessions, table
from tests.bench.sessions import Call

FORMS = ("off", "timeline", "tree")
Row = tuple[list[int], list[int]]
"""Tokens, and 1 for those that are sampled."""
ROOM = {"off": 1, "timeline": 1, "tree": 2}
"""So many times the longest row, a micro-batch has room for in any case."""


def calls_of(shape: str, scale: float, vocabulary: int) -> list[list[Call]]:
    """The calls of each episode."""
    pick = random.Random(0)
    if shape in RECORDED:
        scale *= RECORDED[shape][1]

    def some(count: int) -> list[int]:
        return [pick.randrange(vocabulary) for _ in range(max(1, round(count * scale)))]

    if shape in RECORDED:
        return sessions.drawn(sessions.read(RECORDED[shape][0]), some)
    if shape == "chains of 12 turns":
        return [chain(some, some(60), 12, 24, 30) for _ in range(4)]
    if shape == "8 episodes, one prompt":
        prompt = some(6000)
        return [chain(some, [*prompt, *some(10)], 4, 12, 8) for _ in range(8)]
    if shape == "8 sub-agents, one history":
        history = some(700)
        return [[one for _ in range(8) for one in chain(some, [*history, *some(20)], 1, 50, 0)]]
    if shape == "8 long rows, one header":
        header = some(50)
        return [chain(some, [*header, *some(600)], 1, 400, 0) for _ in range(8)]
    out = []  # reasoning is stripped from the history
    for _ in range(2):
        history = some(100)
        mine = []
        for _ in range(12):
            thought, answer = some(40), some(20)
            mine.append(([*history, *thought, *answer], len(thought) + len(answer)))
            history = [*history, *answer, *some(30)]
        out.append(mine)
    return out


RECORDED = {"the quick start": ("quickstart", 1.0), "a session of opencode": ("opencode", 0.1)}
"""The file of each recorded shape, and how long it is made."""
TURNS = ("chains of 12 turns", "8 episodes, one prompt", "stripped reasoning", *RECORDED)
SHAPES = (*TURNS, "8 sub-agents, one history", "8 long rows, one header")


def chain(some: Callable[[int], list[int]], history: list[int], turns: int, answer: int, between: int) -> list[Call]:
    """Turns, each of which goes on from the one before."""
    out = []
    for _ in range(turns):
        said = some(answer)
        history = [*history, *said]
        out.append((history, len(said)))
        history = [*history, *some(between)] if between else history
    return out


def merged(calls: Sequence[Call]) -> list[Row]:
    """A row goes on as long as the next call begins with all of it."""
    rows: list[Row] = []
    for tokens, sampled in calls:
        start = len(tokens) - sampled
        if rows and tokens[: len(rows[-1][0])] == rows[-1][0]:
            before = rows.pop()
            rows.append((tokens, [*before[1], *[0] * (start - len(before[0])), *[1] * sampled]))
        else:
            rows.append((tokens, [0] * start + [1] * sampled))
    return rows


def data_of(episodes: Sequence[Sequence[Row]], limit: int) -> Any:
    """Rows as verl's workers get them."""
    import torch
    from verl.utils import tensordict_utils as tu
    from verl.utils.tensordict_utils import list_of_dict_to_tensordict

    from ajet_trainer import batch
    from ajet_trainer.backends.verl.rows import row_fields

    made, pick = [], random.Random(1)
    for number, rows in enumerate(episodes):
        advantage = pick.uniform(-1, 1)
        for index, (tokens, mask) in enumerate(rows):
            first = mask.index(1)
            bits = np.array(mask[first:])
            row = batch.Row("g", number, index, np.array(tokens[:first]), np.array(tokens[first:]), bits,
                            (-6.0 * bits).astype(np.float32), 1.0, 1, 0, 0)  # fmt: skip
            fields = row_fields(row)
            fields["old_log_probs"] = fields["rollout_log_probs"]
            fields["advantages"] = advantage * torch.from_numpy(bits).float()
            made.append(fields)
    data = list_of_dict_to_tensordict(made)
    for name in ("input_ids", "position_ids", "prompts", "responses", "response_mask", "loss_mask", "old_log_probs",
                 "advantages"):  # fmt: skip
        data[name] = torch.nested.as_nested_tensor(list(data[name].unbind()), layout=torch.jagged)
    tu.assign_non_tensor(
        data, temperature=1.0, pad_token_id=0, global_batch_size=len(made), use_remove_padding=True,
        use_dynamic_bsz=True, max_token_len_per_gpu=limit, use_fused_kernels=False, calculate_entropy=False,
    )  # fmt: skip
    return data


@dataclass
class Measured:
    """The figures of a shape in one form."""

    seconds: list[float] = field(default_factory=list)
    peak: float = 0.0  # MB
    tokens: int = 0
    cost: float = 0.0
    gradient: Any = None

    @property
    def time(self) -> float:
        return median(self.seconds)


class Worker:
    """A training worker that notes what its model computes."""

    def __init__(self, worker: Any) -> None:
        from functools import partial

        from verl.workers.config import FSDPActorConfig

        from ajet_trainer.backends.verl.forest_engine import prices_of
        from ajet_trainer.backends.verl.losses import session_loss

        config = FSDPActorConfig(strategy="fsdp2", rollout_n=1, use_dynamic_bsz=True, loss_scale_factor=4096)
        self.engine, self._loss = worker.engine, partial(session_loss, config=config)
        self._price, self.tokens, self.cost = prices_of(worker.engine.module), 0, 0.0
        self.engine.module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        """On a CPU torch computes all pairs of flat rows that are packed, and flex attention those that see."""
        import torch

        places, keep = kwargs["position_ids"], kwargs.get("logits_to_keep")
        count = places.numel()
        packed = keep is None and not torch.cuda.is_available() and int((places == 0).sum()) > 1
        pairs = count * count if packed else int(places.sum()) + count
        self.tokens += count
        self.cost += self._price.of(count, count if keep is None else len(keep), pairs)

    def round(self, data: Any) -> tuple[float, float]:
        """Seconds and MB of old logprobs and an update, whose gradient stays."""
        import torch
        from verl.utils import tensordict_utils as tu

        resting = forget_peak()
        again = tu.index_select_tensor_dict(data, list(range(len(data))))
        start = time.perf_counter()
        with self.engine.eval_mode():
            self.engine.infer_batch(again, loss_function=None)
        self.tokens, self.cost = 0, 0.0
        with self.engine.train_mode():
            self.engine.optimizer_zero_grad()
            self.engine.forward_backward_batch(data, self._loss)
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            took, memory = time.perf_counter() - start, peak() - resting
            self.gradient = flat(self.engine.module)
        return took, memory


def flat(module: Any) -> Any:
    """The gradient as one vector, in the host's memory: three of them would not fit a GPU beside a large model."""
    import torch

    parts = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in module.parameters()]
    return torch.cat([part.flatten().cpu() for part in parts])


def forget_peak() -> float:
    """The memory in use, in MB, once the heap has given back what is free."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        return peak()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak()


def peak() -> float:
    """The most memory since `forget_peak`, in MB: of the GPU, or of this process."""
    import torch

    if torch.cuda.is_available():
        return float(torch.cuda.max_memory_allocated()) / 1e6
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def measure(shape: str, workers: dict[str, Worker], scale: float, limit: int, rounds: int, vocabulary: int) -> Any:
    """The figures of a `shape` in each form."""
    episodes = calls_of(shape, scale, vocabulary)
    single = [[row for call in calls for row in merged([call])] for calls in episodes]
    strict = [merged(calls) for calls in episodes]
    found = {form: Measured() for form in FORMS}
    for number in range(rounds + 1):
        for form, rows in zip(FORMS, (single, strict, strict), strict=True):
            longest = max(len(tokens) for mine in rows for tokens, _ in mine)
            worker, one = workers["tree" if form == "tree" else "flat"], found[form]
            seconds, memory = worker.round(data_of(rows, max(limit, ROOM[form] * longest)))
            one.tokens, one.cost, one.gradient = worker.tokens, worker.cost, worker.gradient
            if number:
                one.seconds.append(seconds)
                one.peak = max(one.peak, memory)
            sys.stderr.write(f"{shape}, {form}: {seconds:.2f} s\n")
    return found


def lines_of(found: dict[str, Measured]) -> Iterator[list[str]]:
    tree = found["tree"]
    for form, one in found.items():
        yield [
            form, f"{one.tokens:,}", f"{one.time:.2f}", f"{min(one.seconds):.2f} - {max(one.seconds):.2f}",
            f"{one.peak:,.0f}", f"{one.tokens / tree.tokens:.2f}", f"{one.cost / tree.cost:.2f}",
            f"{one.time / tree.time:.2f}",
        ]  # fmt: skip


def goals(shape: str, found: dict[str, Measured]) -> Iterator[tuple[str, bool]]:
    """Each goal that the shape has, and whether it is met."""
    off, timeline, tree = (found[form] for form in FORMS)
    yield "1 not slower than timeline", tree.time <= max(timeline.seconds)
    if tree.tokens < timeline.tokens / 2:
        yield "2 time within 1.3 of tokens", timeline.time / tree.time >= timeline.tokens / tree.tokens / 1.3
    if shape == "8 episodes, one prompt":
        yield "3 at least 10 x off", off.time / tree.time >= 10
    elif shape in TURNS:
        yield "3 at least 1.5 x off", off.time / tree.time >= 1.5
    yield "4 peak no higher than timeline's", tree.peak <= timeline.peak
    exact = timeline.gradient.double()
    apart, rounding = (float((exact - one.gradient.double()).norm() / exact.norm()) for one in (tree, off))
    yield f"5 gradients {apart:.1e} apart, of off {rounding:.1e}", apart < 5e-6


def model_in(folder: Path) -> Path:
    """A random model, for which attention and layers are of about equal weight."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from tests.kit.tiny_model import build

    tiny = build(folder / "tiny")
    config = AutoConfig.from_pretrained(tiny)
    config.update({
        "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32768, "layer_types": ["full_attention"] * 4,
    })  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "small")
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder / "small")
    return folder / "small"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of another model than the small random one")
    parser.add_argument("--scale", type=float, default=1.0, help="so many times as long as here")
    parser.add_argument("--limit", type=int, default=2048, help="tokens of a micro-batch")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16"], help="what layers compute in")
    parser.add_argument("--rounds", type=int, default=3, help="so many are counted")
    parser.add_argument("--shapes", nargs="*", default=SHAPES, choices=SHAPES)
    given = parser.parse_args()
    import torch
    import torch._dynamo

    from tests.kit.learner import forest_worker, training_worker, verl_here

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch._dynamo.config.recompile_limit = 64  # past it flex attention computes all pairs; each form has its own sizes
    with tempfile.TemporaryDirectory() as name, verl_here(device):
        model, dtype = given.model or model_in(Path(name)), given.dtype
        flat = training_worker(model, "sdpa", dtype=dtype)
        tree = forest_worker(model, "flex_attention" if device == "cuda" else "sdpa", dtype=dtype)
        workers = {"flat": Worker(flat), "tree": Worker(tree)}
        vocabulary = workers["flat"].engine.model_config.hf_config.vocab_size
        said = []
        for shape in given.shapes:
            found = measure(shape, workers, given.scale, given.limit, given.rounds, vocabulary)
            head = ("form", "tokens", "seconds, median", "range", "peak, MB", "tokens / tree", "predicted", "measured")
            table.show(shape, head, list(lines_of(found)))
            said += [(shape, goal, met) for goal, met in goals(shape, found)]
    table.verdicts([(f"{shape}: {goal}", met) for shape, goal, met in said])


if __name__ == "__main__":
    main()
