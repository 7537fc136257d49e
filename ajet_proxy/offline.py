"""`ajet-proxy merge` and `ajet-proxy replay`: the live code, over lines of a file or over the journal.

`replay` prints what leases delivered, batch by batch, and then what the ready episodes would deliver. It finds them in
the journal or in the archive. Each sample goes through the wire's codec, as the delivered one did, so it equals that
bit for bit. Reading takes no lock and changes nothing.

Both print one sample a line, or with ``by`` one tree of an episode or of a group a line: what a group is on the wire.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from heapq import merge
from itertools import chain, groupby
from pathlib import Path
from typing import Any, Literal

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.core.trajectory.repair import Text, with_same_text
from ajet_proxy.core.trajectory.samples import merge_calls
from ajet_proxy.core.trajectory.timeline import Policy
from ajet_proxy.io.engines.engine import FAILED
from ajet_proxy.io.engines.upstream import base_url
from ajet_proxy.io.engines.vllm import over, session
from ajet_proxy.io.storage import snapshot
from ajet_proxy.io.storage.archive import ArchiveFile, refuse_missing
from ajet_proxy.io.storage.data_dir import refuse_lost
from ajet_proxy.io.storage.journal import JournalDamaged, folder_of, records, snapshots
from ajet_sdk.errors import AjetError, BadRequest
from ajet_sdk.frame import decode_batch, encode_batch, pack, pack_mask, sampled, unpack
from ajet_sdk.sample import Batch, BatchEpisode, Call, Group, Sample
from ajet_sdk.tree import tree_of

By = Literal["episode", "group"]
"""Whose samples share a tree: those of one episode, or of all episodes of a task."""


def merge_lines(
    lines: Iterable[str | bytes], policy: Policy = "strict", by: By | None = None, text: Text | None = None
) -> Iterator[str]:
    """The samples of the calls in `lines` (JSON, one a line), as JSON lines; or their trees.

    The policy `repair` joins by what the calls say of their texts (``same_text``), which a daemon with this policy has
    found out. Where they say nothing, `text` is asked: it gives the text of token ids under a model's name.

    Incomplete calls, as an episode's record lists them, have nothing to train and are passed over. Episodes come in the
    order of their first calls, their samples likewise, whatever the order of the lines. A call given twice counts once.
    Two different calls of one id are a `BadRequest`, as is everything that is not a call.
    """
    if by is not None and policy != "strict":
        raise BadRequest(f"--tree shares what is token for token the same, --policy {policy} does not: choose one",
                         param="tree")  # fmt: skip
    episodes: dict[str, dict[str, Call]] = {}
    for number, line in enumerate(lines, 1):
        call = _call(line, number) if line.strip() else None
        if call is None:
            continue
        known = episodes.setdefault(call.episode, {}).setdefault(call.call, call)
        if known is not call and repr(known) != repr(call):  # 0.0 equals -0.0 and is another sample
            raise BadRequest(f"line {number}: call {call.call} is in an earlier line with other contents", param="call")
    ordered = sorted(episodes.values(), key=lambda calls: min((c.started_at, c.episode) for c in calls.values()))
    yield from _lines((_merged(tuple(calls.values()), policy, text) for calls in ordered), by)


def _merged(calls: tuple[Call, ...], policy: Policy, text: Text | None) -> tuple[Sample, ...]:
    return merge_calls(with_same_text(calls, text) if policy == "repair" and text is not None else calls, policy)


def _lines(episodes: Iterable[Sequence[Sample]], by: By | None) -> Iterator[str]:
    """Samples, or their trees. A tree of a group waits for the last episode."""
    if by is None:
        yield from (_json(sample.to_json()) for sample in chain.from_iterable(episodes))
        return
    tasks: dict[str, list[Sample]] = {}
    for samples in filter(None, episodes):
        if by == "group":
            tasks.setdefault(samples[0].task, []).extend(samples)
        else:
            yield _json(tree_row(samples))
    yield from map(_json, map(tree_row, tasks.values()))


def tree_row(samples: Sequence[Sample]) -> dict[str, Any]:
    """The tree of `samples` of one task (at least one), as contract §6.6 has it."""
    tokens, runs, ends = tree_of([pack("i", sample.token_ids) for sample in samples])
    return {
        "task": samples[0].task,
        "episodes": list(dict.fromkeys(sample.episode for sample in samples)),
        "token_ids": list(unpack("i", tokens, "token_ids")),
        "parents": runs,
        "samples": list(map(_ended, samples, ends)),
    }


def _ended(sample: Sample, end: int) -> dict[str, Any]:
    """A sample that ends at node `end` of a tree."""
    told = sample.to_json() | {"loss_mask": pack_mask(sample.loss_mask), "logprobs": sampled(sample)}
    del told["token_ids"]
    return {"sample": told.pop("sample"), "end": end} | told


@contextmanager
def engine_text(url: str, key: str | None) -> Iterator[Text]:
    """The text of token ids, as the engine at `url` gives it."""

    async def text(model: str, ids: Sequence[int]) -> str:
        try:
            async with session(key, 60.0) as asking:
                return await over(asking, base_url(url)).detokenize(model, ids)
        except (*FAILED, ValueError) as error:
            raise AjetError(f"{url} gives no text for model {model!r}: {error or 'no answer in time'}") from error

    with asyncio.Runner() as runner:
        yield lambda model, ids: runner.run(text(model, ids))


def replay_lines(
    data_dir: str | Path, removed: Callable[[int], None] = lambda batches: None, by: By | None = None
) -> Iterator[str]:
    """The samples of every batch delivered and of every ready episode, as JSON lines; or the trees of each batch, and
    of what is ready. At the end `removed` is told how many batches retention has removed, whole or in part."""
    folder = Path(data_dir)
    with closing(ArchiveFile(folder)) as archive:
        state, whole = read_state(folder, archive), 0
        known = {batch.number: batch for batch in (*state.batches.values(), *state.batches.leaving.values())}
        archived = (batch for batch in archive.batches() if batch.number not in known)
        for batch in merge(archived, (known[number] for number in sorted(known)), key=lambda batch: batch.number):
            found = views.batch(state, batch.id)
            whole += sum(len(group.episodes) for group in found.groups) == len(tuple(batch.episodes()))
            for group in found.groups:
                yield from _lines(_delivered(group.episodes), by)
        for _, ready in groupby(views.ready_episodes(state), key=lambda one: (one.model, one.task)):
            yield from _lines(_delivered(ready), by)
        removed(state.batches.leases - whole)


def read_state(data_dir: Path, archive: ArchiveFile) -> State:
    """The state at the end of the journal. It is read again if a running daemon compacts it meanwhile."""
    if not folder_of(data_dir).is_dir():
        refuse_lost(data_dir)
        raise BadRequest(f"{data_dir} holds no journal", param="DATA_DIR")
    while True:
        before = snapshots(data_dir)[-1:]
        try:
            refuse_lost(data_dir)
            state = snapshot.load(data_dir, LedgerSettings(), archive)
            refuse_missing(data_dir, state)
            snapshot.replay(data_dir, records(data_dir), state)
        except (FileNotFoundError, JournalDamaged) as error:
            if isinstance(error, FileNotFoundError) or snapshots(data_dir)[-1:] != before:
                continue
            raise
        if snapshots(data_dir)[-1:] == before:
            return state


def _delivered(episodes: Iterable[BatchEpisode]) -> Iterator[tuple[Sample, ...]]:
    """The samples of each, as a trainer decodes them."""
    for one in episodes:
        frame = encode_batch(Batch("", 0.0, 0, (Group(one.task, (one,)),)))
        (group,) = decode_batch(frame, max_bytes=len(frame)).groups
        yield group.episodes[0].samples


def _call(line: str | bytes, number: int) -> Call | None:
    """The call in a line; None if the line says that it is incomplete."""
    try:
        record = json.loads(line if isinstance(line, str) else line.decode())
        if isinstance(record, dict) and record.get("complete") is False:
            return None
        return Call.from_json(record)
    except UnicodeDecodeError as error:
        raise BadRequest(f"line {number} is not UTF-8 text: {error}") from error
    except json.JSONDecodeError as error:
        raise BadRequest(f"line {number} is not JSON: {error.msg}, at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"line {number} is not JSON: {error}") from error
    except BadRequest as error:
        raise BadRequest(f"line {number}: {error.message}", param=error.param) from error


def _json(record: dict[str, Any]) -> str:
    return json.dumps(record, separators=(",", ":"))
