"""Laws of the shares of models, after each fault and in the end.

Four who know nothing of each other are compared: the daemon's records, its own notes of what it leased and dropped,
what each trainer noted, and what is in the weights of each.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.faults.agent import ABSENT, MODELS
from tests.faults.notes import lines
from tests.faults.stage import Stage

LATE_S = 1.0
"""The machine's own delay: so late a request may pass its gate that is open."""
LIVE = ("open", "sealed", "ready", "leased")
WITH_SHARES = ("ready", "leased", "trained")
Record = Mapping[str, Any]
Share = tuple[str, str]
"""A model and an episode."""


def trains(record: Record) -> list[str]:
    """The models that learn from an episode: those of its members that have sampled something, else that of its first
    call."""
    models = list(dict.fromkeys(call["model"] for call in record["calls"] if call["complete"] and call["token_ids"]))
    members = record.get("members")
    return models[:1] if members is None else [model for model in models if model in members.values()]


def shares(record: Record) -> dict[str, str]:
    """Each share of an episode, as its record has it."""
    if record.get("members") is None:
        return {record["model"]: record["state"]} if record["state"] in WITH_SHARES else {}
    return dict(record.get("shares", {}))


def check_state(record: Record) -> None:
    """The state is what its shares add up to: it is trained only once all that are left are."""
    found, state = set(shares(record).values()), record["state"]
    if state in WITH_SHARES:
        added = "leased" if "leased" in found else "ready" if "ready" in found else "trained"
        assert found and state == added, f"an episode is {state}, and its shares are {record.get('shares')}"


@dataclass
class Team:
    """`get` asks the daemon."""

    stage: Stage
    get: Callable[[str], Any]
    counts: Counter[str]
    acked: dict[Share, str] = field(default_factory=dict)
    """The shares that were acknowledged as trained, and in which batch."""
    refused: dict[Share, str] = field(default_factory=dict)
    """The shares that a trainer did not train of a batch, and why; noted before the daemon heard of it."""
    acking: dict[str, str] = field(default_factory=dict)
    """The batch that the trainer of a model acknowledges at this moment."""
    acks: Counter[str] = field(default_factory=Counter)
    answers: Counter[str] = field(default_factory=Counter)
    """The number of acknowledgements that the trainer of each model noted, and of answers that the agents did."""

    def take(self, note: Mapping[str, Any], leased: Mapping[str, Mapping[str, Any]]) -> list[Share]:
        """A trainer's note about an acknowledgement. What of the batch was trained, if it is done."""
        model, batch = note["model"], note["batch"]
        if note["kind"] == "acks":
            self.acking[model] = batch
            self.refused.update({(model, episode): why for episode, why in note["filtered"].items()})
            return []
        self.acking.pop(model, None)
        self.acks[model] += 1
        episodes = leased[batch]["samples"] if batch in leased else ()
        found = [(model, episode) for episode in episodes if episode not in note["filtered"]]
        for one in found:
            assert self.acked.setdefault(one, batch) == batch, f"{one} was acknowledged in two batches"
        return found

    def live(self) -> list[Record]:
        """The episodes that are not at their end."""
        return [one for state in LIVE for one in self.get(f"/episodes?limit=1000&state={state}")["episodes"]]

    def check(self, records: Iterable[Record]) -> None:
        """These are as trainers, weights and the daemon's own notes say. `records` are older than what was noted."""
        weights = {model: self.stage.checkpoint(model)["weights"] for model in MODELS}
        for model, names in weights.items():
            assert len(names) == len(set(names)), f"an episode was trained twice by {model}"
        given = {(one["model"], episode) for one in lines(self.stage.leases) for episode in one["episodes"]}
        sets = {model: set(names) for model, names in weights.items()} | {ABSENT: set()}
        for record in records:
            check_state(record)
            for model, share in shares(record).items():
                name = record["episode"]
                assert share != "trained" or name in sets[model], f"{name} is trained by {model} in name alone"
                assert share != "leased" or (model, name) in given, f"nobody leased {name} to the trainer of {model}"

    def check_acked(self, acked: Iterable[Share], records: Mapping[str, Record]) -> None:
        """Checks that what a trainer says that it trained is trained for its model."""
        for model, episode in acked:
            assert shares(records[episode]).get(model) == "trained", f"{model} trained {episode}: {records[episode]}"

    def check_holds(self) -> None:
        """A request waits at its own model's gate, and at no other."""
        longest, held = 0.0, 0
        for note in lines(self.stage.holds):
            assert note["free_s"] < LATE_S, f"a request waited while its gate was open: {note}"
            longest, held = max(longest, note["free_s"]), held + 1
        self.counts["requests that were held at the gate of their own model"] = held
        self.counts["… longest that one waited while that was open, in ms"] = round(1000 * longest)

    def in_the_end(self, records: Mapping[str, Record]) -> None:
        """The shares of each model add up. Each that is gone was refused by its trainer, or dropped by the daemon."""
        self.check(records.values())
        self.check_acked(self.acked, records)
        self.check_holds()
        dropped = {(model, one["episode"]) for one in lines(self.stage.dropped) for model in one["models"]}
        sums, apart = {model: Counter[str]() for model in (*MODELS, ABSENT)}, 0
        trained: dict[str, set[str]] = {model: set() for model in sums}
        for name, record in records.items():
            for model in trains(record):
                share = shares(record).get(model, "gone" if record["state"] in WITH_SHARES else record["state"])
                sums[model][share] += 1
                if share == "trained":
                    trained[model].add(name)
                if share == "gone":
                    assert {(model, name)} <= self.refused.keys() | dropped, f"the share of {model} in {name} is lost"
                    apart += (model, name) in self.refused and "trained" in shares(record).values()
        for model in MODELS:
            self._check_weights(model, trained[model])
        leases = self.get("/overview")["leases"]
        for model, found in sums.items():
            leased = sum(one["episodes"] for one in leases if one["model"] == model)
            assert found["leased"] == leased, f"{found['leased']} shares of {model} are leased, and {leased} in batches"
            self.counts[f"shares of {model}"] = found.total()
            self.counts |= Counter({f"… of {model} {state}": number for state, number in sorted(found.items())})
        assert sums[ABSENT]["ready"] and not sums[ABSENT].keys() & {"leased", "trained", "gone"}, sums[ABSENT]
        assert apart, "no share was refused by one trainer and trained by the other"
        self.counts["shares that one trainer refused and the other trained"] = apart

    def _check_weights(self, model: str, trained: set[str]) -> None:
        """The weights hold exactly what the ledger calls trained, but for what the trainer would refuse to train again:
        what it lost, and what the checkpoint it would start from has to acknowledge first."""
        latest = self.stage.checkpoint(model)
        weights, history = set(latest["weights"]), latest["history"]
        refused = set(history["lost"]).union(*(batch["episodes"] for batch in history["saved"]))
        more = sorted(weights - trained - refused)
        assert not more, f"in the weights, but not trained: {more[:5]}"
        self.counts[f"episodes in the weights of {model}, each once"] = len(weights)
