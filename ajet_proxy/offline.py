"""`ajet-proxy merge` and `ajet-proxy replay`: the live code, over lines of a file or over the journal.

`replay` prints what leases delivered, batch by batch, and then what the ready episodes would deliver. Each sample went
through the wire's codec, as the delivered one did, so it equals that bit for bit. Reading a journal takes no lock and
changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from ajet_proxy.core import events as ev
from ajet_proxy.core.ledger import Ledger, LedgerSettings
from ajet_proxy.core.samples import merge_calls, tree_rows
from ajet_proxy.io.codec import UnknownRecord, decode
from ajet_proxy.io.journal import JournalDamaged, records
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


def replay_lines(data_dir: str | Path) -> Iterator[str]:
    """The samples of every batch delivered and of every ready episode, as JSON lines, from the journal alone."""
    folder = Path(data_dir)
    if not (folder / "journal").is_dir():
        raise BadRequest(f"{folder} holds no journal", param="DATA_DIR")
    ledger = Ledger(LedgerSettings())
    try:
        for record in records(folder):
            event = decode(record, ledger.episodes)
            ledger.apply(event)
            if isinstance(event, ev.BatchLeased):
                yield from _delivered(ledger.batch(event.batch))
    except UnknownRecord as error:
        raise JournalDamaged(f"the journal in {folder} was written by a newer version: {error}") from error
    ready = tuple(Group(episode.task, (episode,)) for episode in ledger.ready_episodes())
    yield from _delivered(Batch("", 0.0, 0, ready))


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
