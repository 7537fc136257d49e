"""The deal of a step's rows into optimizer updates, and where the padding comes to stand; by verl's own hand."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
from transfer_queue import KVBatchMeta
from verl.trainer.ppo import padding_utils

from ajet_trainer.backends.verl import settings, trainer
from ajet_trainer.backends.verl.rows import row_tag
from ajet_trainer.batch import Row
from ajet_trainer.config import Config

SIZE = 4


def some_rows(number: int) -> list[Row]:
    """`number` rows of groups of four, of up to 2,000 tokens."""
    pick = random.Random(number)
    nothing, no_log = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.float32)
    lengths = [np.zeros(pick.randint(10, 2000), dtype=np.int64) for _ in range(number)]
    return [
        Row(f"g{n // SIZE}", n % SIZE, 0, prompt, nothing, nothing, no_log, 1.0, 1, 0, 0)
        for n, prompt in enumerate(lengths)
    ]


class Updates:
    """The updates of a step that wants `updates` of them on `processes`."""

    def __init__(self, tiny: Path, updates: int, processes: int, **ours: Any) -> None:
        made: Any = trainer.AjetTrainer.__new__(trainer.AjetTrainer)
        made.ours = Config(model=str(tiny), verl={"trainer.n_gpus_per_node": processes}, **ours)
        made.config = settings.compose(made.ours, "cpu", None)
        made.updates, made.use_critic, made.global_steps = updates, False, 1
        made.tokenizer = SimpleNamespace(eos_token_id=0)
        made.actor_rollout_wg = SimpleNamespace(_dispatch_info={"actor": list(range(processes))})
        self.trainer, self.processes = made, processes

    def of(self, rows: list[Row]) -> list[list[str]]:
        """The keys of each update's rows: each process has an equal part of the batch, and takes from its front."""
        self.trainer.begin(rows)
        tags = [row_tag(row, 1) for row in rows]
        batch = KVBatchMeta(keys=[row.key for row in rows], tags=tags, partition_id="train")
        with patch.object(padding_utils, "tq", Mock(kv_batch_get=lambda **_: [{}])):
            keys = self.trainer._balance_batch(batch, {}).keys
        share = self.trainer.config.actor_rollout_ref.actor.ppo_mini_batch_size // self.processes
        length = len(keys) // self.processes
        starts = [length * process for process in range(self.processes)]
        return [[key for start in starts for key in keys[start + at : start + at + share]]
                for at in range(0, length, share)]  # fmt: skip


def real(update: list[str]) -> list[str]:
    return [key for key in update if not key.startswith("pad")]


def counts(updates: list[list[str]]) -> list[tuple[int, int]]:
    """``(rows, real rows)`` of each update."""
    return [(len(update), len(real(update))) for update in updates]


def test_an_update_has_whole_groups_and_padding_of_its_own(tiny: Path) -> None:
    updates = Updates(tiny, 2, 1).of(some_rows(10))
    assert counts(updates) == [(6, 6), (6, 4)]
    assert [{key.split("_")[0] for key in real(update)} for update in updates] == [{"g0", "g2"}, {"g1"}]
    assert counts(Updates(tiny, 3, 8).of(some_rows(33))) == [(16, 12), (16, 12), (16, 9)]
    assert counts(Updates(tiny, 3, 8).of(some_rows(10))) == [(8, 4), (8, 4), (8, 2)]


@pytest.mark.parametrize("processes", [1, 2, 8])
def test_updates_are_equally_large_and_no_group_is_in_two(processes: int, tiny: Path) -> None:
    for wanted in (1, 2, 3, 4):
        made = Updates(tiny, wanted, processes)
        for number in range(1, 60):
            updates = made.of(some_rows(number))
            seen = counts(updates)
            groups = [{key.split("_")[0] for key in real(update)} for update in updates]
            assert len(seen) == min(wanted, -(-number // SIZE)) and len({rows for rows, _ in seen}) == 1
            assert sum(map(len, groups)) == len(set().union(*groups))
            assert sum(rows for _, rows in seen) == number and all(rows for _, rows in seen)


def test_each_process_gets_a_part_of_each_update(tiny: Path) -> None:
    """Of about equally many tokens, as verl balances them."""
    made = Updates(tiny, 2, 2)
    rows = some_rows(32)
    lengths = {row.key: row.tokens for row in rows}
    for update in made.of(rows):
        half = len(update) // 2
        loads = [sum(lengths[key] for key in part) for part in (update[:half], update[half:])]
        assert min(loads) > 0.9 * max(loads)


def test_a_process_gets_whole_groups_where_rows_are_trees(tiny: Path) -> None:
    made = Updates(tiny, 2, 2, rows="tree")
    rows = some_rows(32)
    random.Random(1).shuffle(rows)
    for update in made.of(rows):
        half = len(update) // 2
        first, second = ({key.split("_")[0] for key in part} for part in (update[:half], update[half:]))
        assert len(first) == len(second) == 2 and not first & second
    assert counts(made.of(some_rows(10))) == [(6, 6), (6, 4)]
