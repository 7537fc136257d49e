"""`ajet-proxy export`: the samples of a data directory, live and archived, in the forms that other programs read.

Episodes are read one after another, so a large archive needs no more memory than a small one. Only pairs are planned
first, from a few words for each sample. Reading takes no lock and changes nothing.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO

from ajet_proxy.core.ledger.episode import Episode
from ajet_proxy.core.ledger.judging import is_void
from ajet_proxy.core.ledger.state import State
from ajet_proxy.core.trajectory.export import pairs, place, preference_row, sft_row
from ajet_proxy.core.trajectory.samples import samples_of
from ajet_proxy.io.http import keyring
from ajet_proxy.io.storage.archive import ArchiveFile
from ajet_proxy.offline import By, read_state, tree_row
from ajet_sdk.errors import BadRequest
from ajet_sdk.rounding import slack
from ajet_sdk.sample import Sample, canonical

FORMS = ("samples", "sft", "preferences")
VALUES_AT_ONCE = 1 << 20
"""Entries of lists, most of them tokens and what belongs to them: rows are short or long."""


@dataclasses.dataclass(frozen=True, slots=True)
class Choice:
    """Which samples: of episodes in one of ``states``, of ``task``, with at least ``min_reward`` but for the rounding
    of sums."""

    states: tuple[str, ...] = ("ready", "leased", "trained")
    task: str | None = None
    min_reward: float | None = None

    def takes(self, sample: Sample) -> bool:
        least, reward = self.min_reward, sample.reward
        return least is None or (reward is not None and least - reward <= slack((abs(least),)))


def rows(
    data_dir: Path, form: str, choice: Choice, removed: Callable[[int], None], by: By | None = None
) -> Iterator[dict[str, Any]]:
    """The rows of one of `FORMS`, or the trees of samples; `removed` is told how many episodes in these states
    retention has removed."""
    with closing(ArchiveFile(data_dir)) as archive:
        state = read_state(data_dir, archive)
        revoked = keyring.ring(data_dir).tenants if keyring.used(data_dir) else {}
        episodes = (
            one for one in _episodes(state, archive, choice, removed)
            if not ((its := one.opening).traffic and is_void(revoked, its.tenant, its.issued, its.at))
        )
        if form == "preferences":
            yield from _pairs(state, episodes, choice)
            return
        if by is not None:
            yield from _trees(state, episodes, choice, by)
            return
        for episode in episodes:
            answers = {turn.call: turn.response for turn in episode.transcript.turns()}
            for sample in filter(choice.takes, _of(episode)):
                row = sft_row(sample) if form == "sft" else sample.to_json()
                yield row | {"responses": [answers[call] for call in sample.calls], "feedback": _said(episode, sample)}


def _pairs(state: State, episodes: Iterable[Episode], choice: Choice) -> Iterator[dict[str, Any]]:
    places = [
        known for episode in episodes
        for number, sample in enumerate(_of(episode)) if choice.takes(sample)
        if (known := place(sample, number, (one.value for one in episode.rewards.values()))) is not None
    ]
    for better, worse in pairs(places):
        found = [(episode, _of(episode)) for episode in map(state.episodes.find, (better.episode, worse.episode))]
        (one, chosen), (other, rejected) = found
        if one and other and chosen and rejected:  # a running daemon may remove them meanwhile
            row = preference_row(sample := chosen[better.number], worst := rejected[worse.number])
            yield row | {"chosen_feedback": _said(one, sample), "rejected_feedback": _said(other, worst)}


def _trees(state: State, episodes: Iterable[Episode], choice: Choice, by: By) -> Iterator[dict[str, Any]]:
    """Groups are planned first, by the names of their episodes."""
    if by == "group":
        tasks: dict[str, list[str]] = {}
        for episode in episodes:
            tasks.setdefault(episode.group_key.task, []).append(episode.id)
        parts: Iterable[Iterable[Episode | None]] = (map(state.episodes.find, names) for names in tasks.values())
    else:
        parts = ((episode,) for episode in episodes)
    for part in parts:
        if samples := tuple(filter(choice.takes, chain.from_iterable(map(_of, part)))):
            yield tree_row(samples)


def _episodes(
    state: State, archive: ArchiveFile, choice: Choice, removed: Callable[[int], None]
) -> Iterator[Episode]:
    """The archived ones first, then those in memory, each once. Of what users took back there is none."""
    live = {**state.episodes.leaving, **state.episodes}
    gone = sum(state.episodes.archived[name] for name in choice.states)
    archived = (episode for episode in archive.episodes(choice.states) if episode.id not in live)
    for episode in chain(archived, live.values()):
        if episode.state in choice.states:
            gone -= episode.stored is not None
            withdrawn = episode.withdrawn or episode.opening.whole in state.episodes.withdrawn
            if choice.task in (None, episode.opening.task) and not withdrawn:
                yield episode
    removed(gone)


def _of(episode: Episode | None) -> tuple[Sample, ...]:
    """The samples that a lease delivers or delivered. Of other episodes: those of every model. Of no episode: none."""
    if episode is None:
        return ()
    samples = samples_of(
        episode.transcript.timelines, episode=episode.id, task=episode.group_key.task, rewards=episode.rewards.values()
    )
    return tuple(sample for sample in samples if not episode.shares.by_model or sample.model in episode.shares.by_model)


def _said(episode: Episode, sample: Sample) -> list[dict[str, Any]]:
    """The words of users on a sample's calls, and on its whole episode."""
    return [one.to_json() for about, one in episode.feedback.items() if about in ("", *sample.calls)]


def write_jsonl(found: Iterable[Mapping[str, Any]], out: BinaryIO) -> None:
    """One JSON object a line."""
    for row in found:
        out.write(json.dumps(row, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "replace") + b"\n")
    out.write(b"")  # a file that is opened when it is written holds nothing else where there are no rows


def write_parquet(found: Iterable[dict[str, Any]], out: BinaryIO, form: str) -> None:
    """A Parquet file of the same columns. Pairs and triples are lists of structs; what a JSON line leaves out is
    null."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise BadRequest("Parquet needs pyarrow, which is missing here: pip install pyarrow", param="format") from error
    schema, parts = _schema(pyarrow, form), _parts(found)
    first = list(islice(parts, 1))  # before anything is written: there may be nothing to read
    with parquet.ParquetWriter(out, schema) as writer:
        for part in chain(first, parts):
            writer.write_table(pyarrow.Table.from_pylist(part, schema=schema))


def _parts(found: Iterable[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """The rows that are in memory together."""
    part: list[dict[str, Any]] = []
    size = 0
    for row in found:
        part.append(_columns(row))
        size += sum(len(value) for value in row.values() if isinstance(value, list))
        if size >= VALUES_AT_ONCE:
            yield part
            part, size = [], 0
    if part:
        yield part


def _schema(arrow: Any, form: str) -> Any:
    text, ids, mask, number = arrow.string(), arrow.list_(arrow.int32()), arrow.list_(arrow.int8()), arrow.float64()
    words = arrow.struct([("at", number), ("call", text), ("value", number), ("text", text), ("better", text)])
    said = {"responses": arrow.list_(text), "feedback": arrow.list_(words)}
    if form == "sft":
        own = {"reward": number, "input_ids": ids, "labels": ids, **said}
    elif form == "preferences":
        own = {
            "rejected_sample": text, "prompt_ids": ids, "chosen_ids": ids, "chosen_mask": mask,
            "chosen_reward": number, "rejected_ids": ids, "rejected_mask": mask, "rejected_reward": number,
            "chosen_feedback": said["feedback"], "rejected_feedback": said["feedback"],
        }
    else:
        versions = arrow.struct([("version", arrow.int64()), ("count", arrow.int64())])
        span = arrow.struct([("call", text), ("start", arrow.int64()), ("end", arrow.int64())])
        own = {
            "episode": text, "token_ids": ids, "loss_mask": mask, "logprobs": arrow.list_(number),
            "policy_versions": arrow.list_(versions), "calls": arrow.list_(text), "spans": arrow.list_(span),
            "reward": number, "broken_by": text, "repaired_tokens": arrow.int64(), "uncertain_tokens": arrow.int64(),
            "sampling": arrow.list_(arrow.struct([("sampling", text), ("count", arrow.int64())])),
            "finish_reasons": arrow.list_(text), "turns": arrow.list_(arrow.int64()), **said,
        }
    return arrow.schema(list({"sample": text, "task": text, "model": text, "agent": text, **own}.items()))


def _columns(row: dict[str, Any]) -> dict[str, Any]:
    """`row` with pairs and triples as structs. How tokens were sampled is JSON text, since its names differ."""
    structs = {"policy_versions": ("version", "count"), "spans": ("call", "start", "end")}
    if "sampling" in row:
        told = [(None if sampling is None else canonical(sampling), count) for sampling, count in row["sampling"]]
        row = row | {"sampling": [{"sampling": text, "count": count} for text, count in told]}
    found = {name: [dict(zip(structs[name], item, strict=True)) for item in row[name]] for name in structs & row.keys()}
    return {name: _text(value) for name, value in (row | found).items()}


def _text(value: Any) -> Any:
    """`value` with all text in it as UTF-8 can hold it, as in a line of JSON."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, dict):
        return {name: _text(item) for name, item in value.items()}
    numbers = not isinstance(value, list | tuple) or isinstance(next(iter(value), 0), int | float)
    return value if numbers else [_text(item) for item in value]
