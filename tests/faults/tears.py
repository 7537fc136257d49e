"""The journal's tail torn at every byte of its last record, for every kind of record that can be the last.

A real daemon writes the journal. Each prefix of it that ends with the last record of a kind is then torn at each byte
of that record, and spoiled at each byte, and opened as the daemon opens it (`Store.open`, in this process; a few of
them by a whole daemon): the state must be the one before that record, and the next open must find the same.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ajet_proxy.core.ledger.state import LedgerSettings, State
from ajet_proxy.io.storage.codec import decode
from ajet_proxy.io.storage.journal import MAGIC, framed, read, segments
from ajet_proxy.io.storage.store import Store
from ajet_sdk.frame import decode_batch
from tests.kit.ledger_rig import check, picture
from tests.kit.proxy_process import ProxyProcess
from tests.kit.rig import Rig
from tests.kit.stub_process import stub_process

SETTINGS = LedgerSettings(group_size=1)
DAEMONS = 8


def written(data_dir: Path, engine: str) -> list[bytes]:
    """The records of a daemon to which a bit of everything happened, and which was then killed."""
    with ProxyProcess(engine, data_dir, options=["--group-size", "1"]) as proxy:
        with Rig(proxy.url) as rig:
            for number in range(3):
                assert rig.chat(f"e{number}", f"task {number}", max_tokens=8).status_code == 200
            assert rig.chat("e0", "more", max_tokens=8, stream=True).status_code == 200
            assert rig.post(f"/episodes/{rig.open()}/abort").is_success
            for number in range(3):
                assert rig.reward(f"e{number}", id="r").is_success
            for action, body in (("extend", {"lease_s": 60}), ("nack", {}), ("ack", {"policy_version": 1})):
                lease = rig.post("/batches/lease", {"group_size": 1, "groups": 1})
                batch = decode_batch(lease.content).batch
                assert rig.post(f"/batches/{batch}/{action}", body).is_success
            assert rig.post("/gate/close", {"reason": "weights"}).is_success
            assert rig.post("/gate/open", {"policy_version": 2}).is_success
            assert rig.post("/policy", {"model": "stub", "version": 3}).is_success
        proxy.kill()
    (segment,) = segments(data_dir)
    return [record for record, _ in read(segment)]


async def state_of(data_dir: Path) -> str:
    """The state that would be shown by a daemon that opens `data_dir`, after a check that its ledger balances."""
    store = Store.open(data_dir, SETTINGS)
    try:
        check(store.state)
        return picture(store.state)
    finally:
        await store.close()


def ends(records: Sequence[bytes]) -> dict[str, int]:
    """For each kind of record the place of the last one."""
    state = State(SETTINGS)
    found: dict[str, int] = {}
    for place, record in enumerate(records):
        event = decode(record, state.episodes)
        state.apply(event)
        found[type(event).__name__] = place
    return found


def torn(last: bytes) -> list[bytes]:
    """`last`, a whole record, torn at every byte, and with every byte spoiled."""
    cut = [last[:size] for size in range(1, len(last))]
    return cut + [last[:at] + bytes([last[at] ^ 0x55]) + last[at + 1 :] for at in range(len(last))]


def run(root: Path, seed: int, most: int | None, told: Callable[..., None]) -> Counter[str]:
    """At most `most` tears, chosen by `seed`; all of them if None. What was counted."""
    dice, counts = random.Random(seed), Counter[str]()
    with stub_process("--model", "stub") as engine:
        records = written(root / "first", engine)
        places = ends(records)
        cases = [(kind, tail) for kind, at in places.items() for tail in torn(framed([records[at]]))]
        chosen = cases if most is None else dice.sample(cases, min(most, len(cases)))
        by_daemon = set(dice.sample(range(len(chosen)), min(DAEMONS, len(chosen))))
        expected: dict[str, str] = {}
        data_dir = root / "data"
        for number, (kind, tail) in enumerate(chosen):
            before = MAGIC + framed(records[: places[kind]])
            if kind not in expected:
                lay(data_dir, before)
                expected[kind] = asyncio.run(state_of(data_dir))
            segment = lay(data_dir, before + tail)
            assert asyncio.run(state_of(data_dir)) == expected[kind], f"{kind}: {len(tail)} bytes"
            assert segment.stat().st_size == len(before)
            counts["torn or spoiled tails, each cut at its last whole record"] += 1
            if number in by_daemon:
                lay(data_dir, before + tail)
                with ProxyProcess(engine, data_dir) as proxy, Rig(proxy.url) as rig:
                    rig.status()
                    assert "damaged" in proxy.errors()
                    assert rig.post("/gate/open", {"policy_version": 2}).is_success
                    assert rig.chat("new", "hello", max_tokens=4).status_code == 200
                counts["… opened by a whole daemon"] += 1
            told(f"{number + 1} of {len(chosen)} torn tails")
    counts["kinds of records that were the last"] = len({kind for kind, _ in chosen})
    told(f"{len(chosen)} torn tails", last=True)
    return counts


def lay(data_dir: Path, journal: bytes) -> Path:
    """A new `data_dir` with that for a journal."""
    shutil.rmtree(data_dir, ignore_errors=True)
    data_dir.with_suffix(".log").unlink(missing_ok=True)
    segment = data_dir / "journal/00000001.log"
    segment.parent.mkdir(parents=True)
    segment.write_bytes(journal)
    return segment


