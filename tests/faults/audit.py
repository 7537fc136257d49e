"""Compares what everybody noted with what the proxy says, after each fault and once more in the end."""

from __future__ import annotations

import json
import subprocess
from array import array
from collections import Counter
from pathlib import Path
from typing import Any

from tests.faults.stage import Asking, Stage
from tests.faults.swarm import Leases, Swarm
from tests.faults.team import Share, Team
from tests.kit.proxy_process import PROXY
from tests.kit.rig import STATES


class Audit(Asking):
    """Every method raises `AssertionError` at the first thing that is not as it must be; nothing here forgives."""

    stage: Stage
    waits_for = (503,)

    def __init__(self, stage: Stage, counts: Counter[str]) -> None:
        super().__init__(stage, counts)
        self._calls: dict[str, tuple[str, list[int]]] = {}
        self._offers: dict[str, tuple[str, float]] = {}
        self._rewards: dict[str, tuple[str, float]] = {}
        self._began: set[str] = set()
        self._leased: dict[str, dict[str, Any]] = {}
        self.swarm = Swarm(self._get, Leases(stage.leases), counts)
        self.team = Team(stage, self._get, counts)

    def after_a_fault(self, *, wrote: bool = True) -> dict[str, Any]:
        """The identity, and all that was noted since the last look. `wrote` says that the daemon could write."""
        live = self.team.live()
        calls, rewards, acked = self._take_notes()
        status: dict[str, Any] = self._get("/status")
        episodes = status["episodes"]
        assert episodes["opened"] == sum(episodes[state] for state in STATES), episodes
        self.counts["times that the ledger balanced"] += 1
        trained = {episode for _, episode in acked}
        records = {name: self.record(name) for name in {*(self._calls[call][0] for call in calls), *rewards, *trained}}
        for call in calls:
            self._check_call(call, records)
        for episode in rewards:
            self._check_reward(episode, records[episode])
        self.team.check_acked(acked, records)
        self.team.check([*live, *records.values()])
        self.swarm.after_a_fault(wrote=wrote)
        return episodes  # type: ignore[no-any-return]

    def in_the_end(self) -> None:
        """Everything, once more; agents and trainer have ended by themselves."""
        self.after_a_fault()
        records = {name: self.record(name) for name in self.listed()}
        by_call = Counter(call["call"] for record in records.values() for call in record["calls"])
        assert set(by_call.values()) <= {1}, "a call is there twice"
        for call in self._calls:
            self._check_call(call, records)
        for episode, record in records.items():
            self._check_reward(episode, record)
        for batch in self._leased.values():
            self._check_delivery(batch, records)
        whole = self._get("/status")
        status = whole["episodes"]
        assert status == {"opened": len(records)} | {
            state: sum(record["state"] == state for record in records.values()) for state in STATES
        }
        assert all(name in self._offers for name, record in records.items() if record["state"] == "trained")
        self.team.in_the_end(records)
        self.swarm.in_the_end(records)
        self.counts["acknowledged calls, found once with their ids"] = len(self._calls)
        self.counts["acknowledged rewards, found once"] = len(self._rewards)
        self.counts["batches delivered"] = len(self._leased)
        self.counts["episodes opened"] = len(records)
        self.counts["… that left memory for the archive"] = whole["archived"]
        self.counts |= Counter({f"episodes {state}": status[state] for state in STATES if status[state]})

    def replayed(self, data_dir: Path) -> None:
        """The journal and the archive give again, bit for bit, what was delivered."""
        done = subprocess.run([PROXY, "replay", data_dir], capture_output=True, check=True)
        again = [json.loads(line) for line in done.stdout.splitlines()]
        found = {(item["sample"], tuple(item["token_ids"]), array("f", item["logprobs"]).tobytes()) for item in again}
        samples = [item for batch in self._leased.values() for some in batch["samples"].values() for item in some]
        for item in samples:
            assert (item["sample"], tuple(item["ids"]), array("f", item["logprobs"]).tobytes()) in found, item["sample"]
        self.counts["delivered samples, replayed bit for bit"] = len(samples)

    def record(self, episode: str) -> dict[str, Any]:
        found: dict[str, Any] = self._get(f"/episodes/{episode}?tokens=1")
        return found

    def half_acknowledged(self, model: str, other: str) -> bool:
        """Tell whether the other trainer has acknowledged an episode that the trainer of a model is about to."""
        held = self._leased.get(self.team.acking.get(model, ""), {"samples": ()})["samples"]
        acked, refused = self.team.acked, self.team.refused
        return any((other, episode) in acked and (model, episode) not in refused for episode in held)

    def _get(self, path: str) -> Any:
        return self.ask("GET", path)

    def _take_notes(self) -> tuple[list[str], list[str], list[Share]]:
        """The calls, the episodes rewarded and the shares trained, that are new."""
        calls, rewards, acked = [], [], list[Share]()
        for note in self.reader.new(*sorted(self.stage.notes.iterdir())):
            match note["kind"]:
                case "began":
                    self._began.add(note["episode"])
                case "call":
                    assert note["call"] not in self._calls, "two answers have one call"
                    self._calls[note["call"]] = (note["episode"], note["ids"])
                    calls.append(note["call"])
                    self.team.answers[note["model"]] += 1
                case "offer":
                    self._offers[note["episode"]] = (note["id"], note["value"])
                case "reward":
                    self._rewards[note["episode"]] = (note["id"], note["value"])
                    rewards.append(note["episode"])
                case "leased":
                    self._leased[note["batch"]] = note
                case "acks" | "acked":
                    acked += self.team.take(note, self._leased)
                case "gone":
                    self.counts["episodes that ended under a client that was taken for gone"] += 1
                case "failed":
                    raise AssertionError(f"an agent that retries failed: {note['why']}")
        return calls, rewards, acked

    def _check_call(self, call: str, records: dict[str, dict[str, Any]]) -> None:
        episode, ids = self._calls[call]
        found = [item for item in records[episode]["calls"] if item["call"] == call]
        assert len(found) == 1, f"{call} is there {len(found)} times"
        assert found[0]["complete"] is True, found[0]
        assert found[0]["token_ids"] == ids, call
        assert len(found[0]["logprobs"]) == len(ids)

    def _check_reward(self, episode: str, record: dict[str, Any]) -> None:
        given = [(item["id"], item["value"]) for item in record["rewards"]]
        offered = [self._offers[episode]] if episode in self._offers else []
        assert given == offered or (not given and episode not in self._rewards), (episode, given)

    def _check_delivery(self, batch: dict[str, Any], records: dict[str, dict[str, Any]]) -> None:
        for episode, samples in batch["samples"].items():
            own = [call for call in records[episode]["calls"] if call["model"] == batch["model"]]
            complete = {call["call"]: call for call in own if call["complete"]}
            taught: list[str] = []
            for sample in samples:
                for call, start, end in sample["spans"]:
                    assert sample["ids"][start:end] == complete[call]["token_ids"], call
                    assert set(sample["mask"][start:end]) <= {1}
                    taught.append(call)
                assert sum(sample["mask"]) == sum(end - start for _, start, end in sample["spans"])
            assert sorted(taught) == sorted(complete), "every complete call is trained once, and no other"
