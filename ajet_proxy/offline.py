"""`ajet-proxy merge` and `ajet-proxy replay`: the live code, over lines of a file or over the journal.

`replay` prints what leases delivered, batch by batch, and then what the ready episodes would deliver, wherever they
are by now: in the journal or in the archive. Each sample went through the wire's codec, as the delivered one did, so it
equals that bit for bit. Reading takes no lock and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from heapq import merge
from pathlib import Path

from ajet_proxy.core.ledger import Ledger, LedgerSettings
from ajet_proxy.core.samples import merge_calls, tree_rows
from ajet_proxy.io import snapshot
from ajet_proxy.io.archive import ArchiveFile
from ajet_proxy.io.codec import UnknownRecord, decode
from ajet_proxy.io.journal import JournalDamaged, folder_of, records, snapshots
from ajet_sdk.errors import BadRequest
from ajet_sdk.frame import decode_batch, encode_batch
from ajet_sdk.sample import Batch, Call, Group, Sample


def merge_lines(lines: Iterable[str], policy: str = "strict", tree: bool = False) -> Iterator[str]:
    """The samples of the calls in `lines` (JSON, one a line), as JSON lines.

    Episodes come in the order of their first calls, their samples likewise, whatever the order of the lines. A call
    given twice counts once; two different calls of one id are a `BadRequest`, as is everything that is no call.
    """
    if policy not in ("strict", "off"):
        raise BadRequest(
            f"--policy {policy} compares texts and so needs the model's tokenizer, which calls do not carry: "
            "use strict or off", param="policy",
        )
    if tree and policy == "off":
        raise BadRequest("--tree joins calls and --policy off keeps them apart: choose one", param="tree")
    episodes: dict[str, dict[str, Call]] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            call = _call(line, number)
            if episodes.setdefault(call.episode, {}).setdefault(call.call, call) != call:
                raise BadRequest(f"line {number}: call {call.call} stands before with other contents", param="call")
    ordered = sorted(episodes.values(), key=lambda calls: min((c.started_at, c.episode) for c in calls.values()))
    for calls in ordered:
        members = tuple(calls.values())
        for sample in tree_rows(members) if tree else merge_calls(members, "off" if policy == "off" else "strict"):
            yield _line(sample)


def replay_lines(data_dir: str | Path, removed: Callable[[str], None] = lambda episode: None) -> Iterator[str]:
    """The samples of every batch delivered and of every ready episode, as JSON lines; `removed` is told of delivered
    episodes whose calls the archive keeps no longer."""
    folder = Path(data_dir)
    with closing(ArchiveFile(folder)) as archive:
        ledger = read_state(folder, archive)
        known = {batch.number: batch for batch in (*ledger.batches.values(), *ledger.leaving_batches.values())}
        archived = (batch for batch in archive.batches() if batch.number not in known)
        for batch in merge(archived, (known[number] for number in sorted(known)), key=lambda batch: batch.number):
            whole = ledger.batch(batch.id)
            for episode in (episode for group in whole.groups for episode in group.episodes if not episode.samples):
                removed(episode.episode)
            yield from _delivered(whole)
        yield from _delivered(Batch("", 0.0, 0, tuple(Group(e.task, (e,)) for e in ledger.ready_episodes())))


def read_state(data_dir: Path, archive: ArchiveFile) -> Ledger:
    """The state at the end of the journal. A running daemon may compact it meanwhile: then it is read again."""
    if not folder_of(data_dir).is_dir():
        raise BadRequest(f"{data_dir} holds no journal", param="DATA_DIR")
    while True:
        before = snapshots(data_dir)[-1:]
        try:
            ledger = snapshot.load(data_dir, LedgerSettings(), archive)
            for record in records(data_dir):
                ledger.apply(decode(record, ledger.episodes))
        except UnknownRecord as error:
            raise JournalDamaged(f"the journal in {data_dir} was written by a newer version: {error}") from error
        except FileNotFoundError:
            continue
        if snapshots(data_dir)[-1:] == before:
            return ledger


def _delivered(batch: Batch) -> Iterator[str]:
    for group in decode_batch(encode_batch(batch)).groups:
        for episode in group.episodes:
            yield from map(_line, episode.samples)


def _call(line: str, number: int) -> Call:
    try:
        return Call.from_json(json.loads(line))
    except ValueError as error:
        raise BadRequest(f"line {number} is not JSON: {error}") from error
    except BadRequest as error:
        raise BadRequest(f"line {number}: {error.message}", param=error.param) from error


def _line(sample: Sample) -> str:
    return json.dumps(sample.to_json(), ensure_ascii=False, separators=(",", ":"))
