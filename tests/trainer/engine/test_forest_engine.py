"""The engine over a forest against verl's own over flat rows: logprobs, entropies, and the gradient of every loss."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY
from verl.workers.config import PolicyLossConfig

from ajet_trainer.backends.verl.forest_attention import PIECE, block_mask, by_spans, spans_of
from ajet_trainer.backends.verl.refused import LOSSES
from ajet_trainer.batch import Row
from ajet_trainer.forest import forest_of, mask_mod
from tests.kit.forests import dense
from tests.kit.learner import forest_worker, old_logprobs, training_worker
from tests.trainer.engine.test_gradient import (
    DESCENT,
    FULL,
    MODES,
    VOCABULARY,
    close,
    gradient,
    loss_of,
    one_step,
    step_data,
)

LIMIT = 5e-6


def grown(seed: int, count: int, length: int = 60) -> list[Row]:
    """`count` rows, most of which go on from within an earlier one. Some are equal, and some are the start of others.
    What rows share may be trained by several of them."""
    pick = random.Random(seed)
    tokens: list[list[int]] = []
    for _ in range(count):
        start = list(pick.choice(tokens)) if tokens and pick.random() < 0.8 else []
        start = start[: pick.choice([len(start), pick.randint(0, len(start))])]
        more = [pick.randrange(VOCABULARY) for _ in range(pick.choice([0, 1, pick.randint(2, length)]))]
        tokens.append([*start, *more] if len(start) + len(more) > 1 else [7, *start, *more, 8])
    return [one_row(pick, number, ids) for number, ids in enumerate(tokens)]


def one_row(pick: random.Random, number: int, ids: list[int]) -> Row:
    first = pick.randint(1, len(ids) - 1)
    mask = np.array([*(int(pick.random() < 0.6) for _ in ids[first:-1]), 1])
    logprobs = ((-6.3 + 0.1 * np.array([pick.random() for _ in mask])) * mask).astype(np.float32)
    return Row(
        "g", number, 0, np.array(ids[:first]), np.array(ids[first:]), mask, logprobs, pick.random(), 1, 0, 0
    )  # fmt: skip


def advantages(rows: list[Row]) -> list[float]:
    pick = random.Random(len(rows))
    return [pick.uniform(-1, 1) for _ in rows]


class Seen:
    """Counts the tokens that the model of a worker has computed in each micro-batch."""

    def __init__(self, worker: Any) -> None:
        self.tokens: list[int] = []
        worker.engine.module.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: Any, args: Any, kwargs: Any) -> None:
        self.tokens.append(kwargs["input_ids"].numel())

    def since(self) -> list[int]:
        out, self.tokens = self.tokens, []
        return out


def saved(folder: Path, tiny: Path, family: str, **more: Any) -> Path:
    """A random model of another `family` with the vocabulary of the `tiny` one, and `more` in its configuration."""
    same = AutoConfig.from_pretrained(tiny)
    told = {name: getattr(same, name) for name in ("vocab_size", "eos_token_id", "pad_token_id")}
    told |= {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 4096,
        "tie_word_embeddings": family != "llama",
    }  # fmt: skip
    config = AutoConfig.for_model(family, **told | more)
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny).save_pretrained(folder)
    return folder


Pair = tuple[Any, Any, Seen]


@pytest.fixture(scope="session")
def both(tiny: Path, worker: Any) -> Pair:
    """A worker with flat rows, one with a forest, and what the latter computes."""
    forest = forest_worker(tiny)
    return worker, forest, Seen(forest)


@pytest.mark.parametrize("seed", range(4))
def test_logprobs_are_those_of_flat_rows(both: Pair, seed: int) -> None:
    flat, forest, seen = both
    rows = grown(seed, 12)
    one, other = old_logprobs(flat, rows), old_logprobs(forest, rows)
    nodes = len(forest_of([np.concatenate((row.prompt, row.response)) for row in rows]).ids)
    assert sum(seen.since()) == nodes, "cut, if at all, where nothing is shared"
    for row, expected, found in zip(rows, one, other, strict=True):
        assert len(found) == len(row.response)
        np.testing.assert_allclose(found, expected, atol=LIMIT)


def test_rows_have_their_own_temperatures(both: Pair) -> None:
    flat, forest, seen = both
    rows = [replace(row, temperature=(1.0, 0.7)[number % 2]) for number, row in enumerate(grown(5, 12))]
    one, other = old_logprobs(flat, rows), old_logprobs(forest, rows)
    for expected, found in zip(one, other, strict=True):
        np.testing.assert_allclose(found, expected, atol=LIMIT)
    assert seen.since() == [len(forest_of([np.concatenate((row.prompt, row.response)) for row in rows]).ids)]
    warm = [replace(row, temperature=0.7) for row in rows]
    for expected, found in zip(old_logprobs(flat, warm), old_logprobs(forest, warm), strict=True):
        np.testing.assert_allclose(found, expected, atol=LIMIT)


def test_the_head_is_asked_about_each_token_of_a_response_once(both: Pair) -> None:
    """Neither about prompts nor twice about what rows share: its logits are most of the memory of a small model."""
    _, forest, _ = both
    rows, asked = grown(11, 12), list[int]()
    head = forest.engine.module.lm_head.register_forward_hook(lambda _, __, logits: asked.append(logits.shape[-2]))
    old_logprobs(forest, rows)
    head.remove()
    paths = [(tuple(row.prompt), tuple(row.response)) for row in rows]
    wanted = {(*start, *more[:length]) for start, more in paths for length in range(1, len(more) + 1)}
    assert asked == [len(wanted)]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("terms", [{}, FULL], ids=["policy", "with KL and entropy"])
def test_the_gradient_is_that_of_flat_rows(both: Pair, mode: str, terms: dict[str, Any]) -> None:
    flat, forest, seen = both
    for seed, pack in ((1, 4096), (2, 150), (3, 90)):
        rows = grown(seed, 14)
        assert max(row.tokens for row in rows) < pack or seed == 3
        pack = max(pack, *(row.tokens for row in rows))
        given = advantages(rows)
        one = gradient(flat, step_data(rows, given, pack=pack, mean=mode), loss_agg_mode=mode, **terms)
        seen.since()
        other = gradient(forest, step_data(rows, given, pack=pack, mean=mode), loss_agg_mode=mode, **terms)
        computed = seen.since()
        assert max(computed) <= pack and sum(computed) < sum(row.tokens for row in rows)
        assert np.linalg.norm(one) > 1e-4 and close(one, other) < LIMIT


def test_every_loss_over_advantages_and_weights_of_single_tokens(both: Pair) -> None:
    """As credit by turn and importance correction make them. Two losses choose tokens by their micro-batch, which the
    forest packs otherwise."""
    flat, forest, _ = both
    rows = grown(9, 10)
    for loss in sorted(set(POLICY_LOSS_REGISTRY) - set(LOSSES) - {"clip_cov", "kl_cov"}):
        choice, found = PolicyLossConfig(loss_mode=loss, dro_beta=0.1), []
        for worker in (flat, forest):
            data, pick = step_data(rows, advantages(rows), pack=300), torch.Generator().manual_seed(1)
            for name in ("advantages", "rollout_is_weights"):
                values = torch.rand(data["advantages"].values().shape, generator=pick)
                if name == "advantages":
                    values = values - 0.5
                masked = values * data["response_mask"].values()
                data[name] = torch.nested.nested_tensor_from_jagged(masked, data["response_mask"].offsets())
            found.append(gradient(worker, data, policy_loss=choice, loss_agg_mode="seq-mean-token-mean"))
        assert np.linalg.norm(found[0]) > 1e-4 and close(*found) < LIMIT, loss


def plain(*shapes: tuple[list[int], list[int], list[int]]) -> list[Row]:
    """Rows of a prompt, a response and its mask."""
    bits = [np.array(mask) for _, _, mask in shapes]
    return [
        Row("g", number, 0, np.array(prompt), np.array(response), mask, (-6.0 * mask).astype(np.float32), 1.0, 1, 0, 0)
        for number, ((prompt, response, _), mask) in enumerate(zip(shapes, bits, strict=True))
    ]  # fmt: skip


@pytest.mark.parametrize(
    "rows",
    [
        plain(*[([5], [6], [1])] * 4),
        plain(([5, 6], [7], [0]), ([5, 6], [7], [0]), ([5, 6], [8, 9, 10], [1, 0, 1])),
        plain(([5], [6], [1]), ([5], [6, 7], [1, 1]), ([5], [6, 7, 8], [1, 1, 1])),
        plain(([5, 6, 7, 8], [9], [1]), ([5], [6, 7], [1, 1])),
    ],
    ids=["equal", "padding, of which nothing is trained", "one begins another", "a prompt that goes on in another"],
)
def test_rows_at_the_edge(both: Pair, rows: list[Row]) -> None:
    found = []
    for worker in both[:2]:
        data = step_data(rows, [0.3 * number - 0.5 for number in range(len(rows))], pack=64)
        for name in list(data.keys()):
            if isinstance(data[name], torch.Tensor) and not data[name].is_nested and data[name].dim() == 2:
                data[name] = torch.nested.as_nested_tensor(list(data[name].unbind()), layout=torch.jagged)
        found.append(gradient(worker, data, **FULL))
    assert np.linalg.norm(found[0]) > 1e-2 and close(*found) < LIMIT


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_other_families(tmp_path: Path, tiny: Path, family: str) -> None:
    folder = saved(tmp_path / family, tiny, family)
    flat, forest = training_worker(folder), forest_worker(folder)
    rows = grown(4, 12)
    found = [gradient(one, step_data(rows, advantages(rows), pack=200), **FULL) for one in (flat, forest)]
    assert np.linalg.norm(found[0]) > 1e-4 and close(*found) < LIMIT


def with_adapters(worker: Any) -> Any:
    """`worker`, the matrices of whose adapters are drawn: none is at zero."""
    pick = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weights in worker.engine.module.parameters():
            if weights.requires_grad:
                drawn = (0.05 * torch.randn(weights.shape, generator=pick)).to(weights.device)
                parts = torch.distributed.tensor.distribute_tensor(drawn, weights.device_mesh, weights.placements)
                weights.copy_(parts)
    return worker


def test_adapters(tiny: Path) -> None:
    """The model's own weights rest, and both matrices of each adapter learn."""
    rows, found = grown(4, 12), []
    for made in (training_worker, forest_worker):
        worker = with_adapters(made(tiny, lora=4))
        found.append(gradient(worker, step_data(rows, advantages(rows), pack=200), **FULL))
    assert np.linalg.norm(found[0]) > 1e-4 and close(*found) < LIMIT


def test_the_prices_of_a_model(both: Pair) -> None:
    """The table of a tied model is its head, which is asked about responses alone."""
    _, forest, _ = both
    config, price = forest.engine.model_config.hf_config, forest.engine.prices
    table = config.vocab_size * config.hidden_size
    assert price.logprob == 2 * table
    assert price.token == 2 * (sum(one.numel() for one in forest.engine.module.parameters()) - table)


def test_metrics_and_several_updates(tiny: Path) -> None:
    """Two updates of two micro-batches and more: the weights end where flat rows lead them."""
    rows, ends, told = grown(6, 16), [], []
    for made in (training_worker(tiny, **DESCENT), forest_worker(tiny, **DESCENT)):
        data = step_data(rows, advantages(rows), pack=max(150, *(row.tokens for row in rows)))
        loss = loss_of(loss_scale_factor=700, **FULL)
        change, metrics = one_step(made, data, loss, 8, epochs=2, seed=1, dataloader_kwargs={})
        ends.append(change)
        told.append(metrics)
    assert np.linalg.norm(ends[0]) > 1e-3 and close(*ends) < LIMIT
    counts = [told[1][name] for name in ("row_tokens", "computed_tokens")]
    assert sum(counts[0]) == 2 * sum(row.tokens for row in rows) and sum(counts[1]) < 0.9 * sum(counts[0])
    work = [sum(told[1][name]) for name in ("row_operations", "computed_operations")]
    assert 0 < work[1] < work[0]
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(told[1][name], told[0][name], rtol=1e-5, atol=1e-7)
        assert len(told[0][name]) == 4


@pytest.mark.parametrize("heads", [4, 2], ids=["as many keys as queries", "fewer"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_attention_by_spans_is_that_of_the_whole_mask(heads: int, kind: str) -> None:
    """With spans longer than one piece, on a path and from a root."""
    long, pick = [*range(2 * PIECE + 9)], np.random.default_rng(1)
    tree = [long, [*long[:300], 7, *long], [*long[:300], 7, 7], [5, *long[:PIECE]], long[:20]]
    others = [np.concatenate((row.prompt, row.response)) for row in grown(8, 30, length=90)]
    forest, number = forest_of([*map(np.array, tree), *others]), getattr(torch, kind)
    torch.manual_seed(0)
    shapes = [(1, count, len(forest.ids), 16) for count in (4, heads, heads)]
    query, key, value = (torch.randn(shape).to(number).requires_grad_() for shape in shapes)
    ours, _ = by_spans(
        SimpleNamespace(num_key_value_groups=4 // heads), query, key, value, None, scaling=0.3,
        forest_spans=spans_of(forest, "cpu", number),
    )  # fmt: skip
    mask = torch.from_numpy(dense(forest.exit))
    wanted = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=0.3, enable_gqa=True).transpose(1, 2)
    weights = torch.from_numpy(pick.standard_normal(wanted.shape)).to(number)
    grads = [torch.autograd.grad((found * weights).sum(), (query, key, value)) for found in (ours, wanted)]
    for found, expected in zip((ours, *grads[0]), (wanted, *grads[1]), strict=True):
        assert found.dtype == number and found.shape == expected.shape
        assert float((found - expected).norm() / expected.norm()) < (1e-6 if kind == "float32" else 0.02)


@pytest.mark.parametrize(
    ("prompt", "branch", "far"), [(400, 3, 39), (100, 100, 0)], ids=["much above", "little above"]
)
def test_no_copy_of_a_long_path_is_kept(prompt: int, branch: int, far: int) -> None:
    """Backward keeps a few times the forest's tokens, not those of all paths."""
    forest = forest_of([np.array([*range(prompt), 1000 + number, *range(branch - 1)]) for number in range(40)])
    nodes, kept = len(forest.ids), {}
    query, key, value = (torch.randn(1, 2, nodes, 16).requires_grad_() for _ in range(3))

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    spans = spans_of(forest, "cpu", torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out, _ = by_spans(SimpleNamespace(), query, key, value, None, forest_spans=spans)
    assert out.requires_grad and sum(one.far for one in spans.all) == far
    kept.pop(spans.bias.untyped_storage().data_ptr(), None)
    assert sum(kept.values()) < 8 * query.numel() * 4


def test_flex_attention_has_the_same_mask() -> None:
    rows = [np.concatenate((row.prompt, row.response)) for row in grown(8, 60, length=120)]
    exit_ = forest_of(rows).exit
    assert len(exit_) > 500
    exit_ = np.concatenate((exit_, np.arange(len(exit_), len(exit_) + -len(exit_) % 128) + 1))
    size = len(exit_)
    ours, whole = block_mask(exit_, "cpu"), torch.from_numpy(dense(exit_))
    theirs = create_block_mask(mask_mod(torch.from_numpy(exit_)), None, None, size, size, device="cpu")
    assert ours.to_dense().tolist() == theirs.to_dense().tolist()
    for name in ("kv_num_blocks", "full_kv_num_blocks"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist()
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, size, 16)
    with torch.no_grad():
        found = flex_attention(query, key, value, block_mask=ours)
        wanted = scaled_dot_product_attention(query, key, value, attn_mask=whole)
    assert (found - wanted).abs().max() < 1e-5


def test_logprobs_by_flex_attention(both: Pair, tiny: Path) -> None:
    """Its mask is one of blocks, and forests are filled up to whole blocks. On a CPU it computes no gradient."""
    rows = grown(8, 30, length=90)
    forest = forest_worker(tiny, "flex_attention")
    seen = Seen(forest)
    one, other = old_logprobs(both[0], rows), old_logprobs(forest, rows)
    (computed,) = seen.since()
    assert computed % 128 == 0 and computed < sum(row.tokens for row in rows)
    for expected, found in zip(one, other, strict=True):
        np.testing.assert_allclose(found, expected, atol=LIMIT)
