"""`ajet-proxy merge` and `ajet-proxy replay`: the live code, over lines of a file or over the journal.

`replay` prints what leases delivered, batch by batch, and then what the ready episodes would deliver. It finds them in
the journal or in the archive. Each sample goes through the wire's codec, as the delivered one did, so it equals that
bit for bit. Reading takes no lock and changes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from heapq import merge
from pathlib import Path

import httpx

from ajet_proxy.core.ledger import views
from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.core.trajectory.repair import Text, with_same_text
from ajet_proxy.core.trajectory.samples import merge_calls, tree_rows
from ajet_proxy.core.trajectory.timeline import Policy
from ajet_proxy.io.engines.upstream import base_url
from ajet_proxy.io.storage import snapshot
from ajet_proxy.io.storage.archive import ArchiveFile, refuse_missing
from ajet_proxy.io.storage.data_dir import refuse_lost
from ajet_proxy.io.storage.journal import JournalDamaged, folder_of, records, snapshots
from ajet_sdk.errors import AjetError, BadRequest
from ajet_sdk.frame import decode_batch, encode_batch
from ajet_sdk.sample import Batch, Call, Group, Sample


def merge_lines(
    lines: Iterable[str | bytes], policy: Policy = "strict", tree: bool = False, text: Text | None = None
) -> Iterator[str]:
    """The samples of the calls in `lines` (JSON, one a line), as JSON lines.

    The policy `repair` joins by what the calls say of their texts (``same_text``), which a daemon with this policy has
    found out. Where they say nothing, `text` is asked: it gives the text of token ids under a model's name.

    Incomplete calls, as an episode's record lists them, have nothing to train and are passed over. Episodes come in the
    order of their first calls, their samples likewise, whatever the order of the lines. A call given twice counts once.
    Two different calls of one id are a `BadRequest`, as is everything that is not a call.
    """
    if tree and policy != "strict":
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
    for calls in ordered:
        members = tuple(calls.values())
        if policy == "repair" and text is not None:
            members = with_same_text(members, text)
        for sample in tree_rows(members) if tree else merge_calls(members, policy):
            yield _line(sample)


@contextmanager
def engine_text(url: str, key: str | None) -> Iterator[Text]:
    """The text of token ids, from the ``/detokenize`` of the engine at `url`."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    with httpx.Client(base_url=base_url(url), headers=headers, timeout=60.0) as http:

        def text(model: str, ids: Sequence[int]) -> str:
            try:
                told = http.post("/detokenize", json={"model": model, "tokens": ids}).raise_for_status().json()
                return str(told["prompt"])
            except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
                raise AjetError(f"{url}/detokenize gives no text for model {model!r}: {error}") from error

        yield text


def replay_lines(data_dir: str | Path, removed: Callable[[int], None] = lambda batches: None) -> Iterator[str]:
    """The samples of every batch delivered and of every ready episode, as JSON lines. At the end `removed` is told how
    many batches retention has removed, whole or in part."""
    folder = Path(data_dir)
    with closing(ArchiveFile(folder)) as archive:
        state, whole = read_state(folder, archive), 0
        known = {batch.number: batch for batch in (*state.batches.values(), *state.leaving_batches.values())}
        archived = (batch for batch in archive.batches() if batch.number not in known)
        for batch in merge(archived, (known[number] for number in sorted(known)), key=lambda batch: batch.number):
            found = views.batch(state, batch.id)
            whole += sum(len(group.episodes) for group in found.groups) == len(tuple(batch.episodes()))
            yield from _delivered(found)
        for episode in views.ready_episodes(state):
            yield from _delivered(Batch("", 0.0, 0, (Group(episode.task, (episode,)),)))
        removed(state.leases - whole)


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


def _delivered(batch: Batch) -> Iterator[str]:
    frame = encode_batch(batch)
    for group in decode_batch(frame, max_bytes=len(frame)).groups:
        for episode in group.episodes:
            yield from map(_line, episode.samples)


def _call(line: str | bytes, number: int) -> Call | None:
    """The call in a line; None if the line says that it is incomplete."""
    try:
        record = json.loads(line if isinstance(line, str) else line.decode())
        if isinstance(record, dict) and record.get("complete") is False:
            return None
        return Call.from_json(record)
    except UnicodeDecodeError as error:
        raise BadRequest(f"line {number} is not UTF-8 text: {error}") from error
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"line {number} is not JSON: {error}") from error
    except BadRequest as error:
        raise BadRequest(f"line {number}: {error.message}", param=error.param) from error


def _line(sample: Sample) -> str:
    return json.dumps(sample.to_json(), separators=(",", ":"))
