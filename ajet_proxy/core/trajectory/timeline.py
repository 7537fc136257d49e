"""Merging: the calls of one episode become as few timelines as the laws of contract §6.3 allow.

Idea: write ``E(a)`` for a call's prompt and sampled tokens together and ``P(b)`` for a call's prompt. Call b can follow
call a if ``E(a)`` is a prefix of ``P(b)``. All ends that can precede b lie on one path of the prefix tree of ends. So
the fewest timelines are found greedily: each call, in the order of ``(started_at, call)``, takes the longest end on its
path that nobody has taken yet. (Exchange argument: whatever a longer end can serve, a shorter one on the same path can
serve too. So taking the longest never costs a timeline, in whatever order the calls are asked.)

Invariant: the result is a function of the set of calls. All ends are known before the first call is asked, so neither
the order of arrival nor clocks that disagree matter. Of ends with one text, those of calls that sampled nothing are
given out first, and then the earliest call's. Calls without samples at one prompt form one link, which cannot follow
itself.

The tree of ends is not built token by token. It is read off the sorted ends, in which every text stands right before
its extensions. So the cost is a sort of byte strings.

Next: ajet_trainer/step.py
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import itemgetter
from sys import intern
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from ajet_proxy.core.tokens import common_prefix, count, cut, is_long, pack_tokens, unpack_tokens
from ajet_proxy.core.trajectory.drift import DRIFTED, EDITED, VAGUE, broken_by
from ajet_sdk.sample import Call, PolicySpans, Sampling, call_json, canonical

Policy = Literal["strict", "repair", "off"]
POLICIES: tuple[Policy, ...] = ("strict", "repair", "off")
"""`strict` and `repair` make the same timelines; `core.trajectory.repair` joins them when samples are made of them."""


class Turn(Struct, frozen=True, gc=False):
    """A call without its tokens: it sampled ``[start, end)`` of the timeline (or of its own text) that holds it.

    ``logprobs`` are float64 in native byte order, one for each sampled token. ``sampling`` is the JSON text of how they
    were sampled, which is in memory once however many turns have it.
    """

    call: str
    model: str
    agent: str
    started_at: float
    start: int
    end: int
    logprobs: bytes
    finish_reason: str
    policy_versions: PolicySpans
    identified_by: str | None = None
    altered: tuple[str, ...] = ()
    continuity: str | None = None
    version_uncertain: bool = False
    same_text: tuple[str, int] | None = None
    sampling: str | None = None
    response: str | None = None

    def __post_init__(self) -> None:
        if self.sampling is not None:
            force_setattr(self, "sampling", intern(self.sampling))

    @property
    def rank(self) -> tuple[float, str]:
        """The key by which calls are ordered wherever an order matters."""
        return (self.started_at, self.call)

    @property
    def sampled(self) -> int:
        """The number of tokens it sampled."""
        return self.end - self.start

    def to_call(self, tokens: bytes, episode: str) -> Call:
        """The call again, given its text or the timeline that holds it."""
        return Call(
            episode=episode,
            prompt_token_ids=unpack_tokens(cut(tokens, 0, self.start)),
            token_ids=unpack_tokens(cut(tokens, self.start, self.end)),
            logprobs=self.logprob_values(),
            sampling=told(self.sampling),
            **{name: getattr(self, name) for name in _IN_BOTH},
        )

    def summary(self, episode: str) -> dict[str, Any]:
        """The call's JSON object with counts instead of ids and logprobs."""
        tokens = {"prompt_tokens": self.start, "sampled_tokens": self.sampled}
        return call_json(self, episode, tokens, told(self.sampling))

    def logprob_values(self) -> tuple[float, ...]:
        return tuple(memoryview(self.logprobs).cast("d"))


def told(sampling: str | None) -> Sampling | None:
    """Read the `sampling` of a turn."""
    said: Sampling | None = None if sampling is None else json.loads(sampling)
    return said


_IN_BOTH = tuple(name for name in Turn.__struct_fields__ if name not in ("start", "end", "logprobs", "sampling"))
"""The fields that a `Turn` shares with a `Call`."""


class Packed(Struct, frozen=True, gc=False):
    """A call as it is kept: its turn, and prompt and sampled tokens as one text."""

    turn: Turn
    text: bytes

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return unpack_tokens(cut(self.text, 0, self.turn.start))

    @property
    def is_whole(self) -> bool:
        """Tell whether there are as many tokens, and as many logprobs, as the turn says."""
        turn = self.turn
        return 0 <= turn.start <= turn.end and is_long(self.text, turn.end) and len(turn.logprobs) == 8 * turn.sampled


@dataclass(frozen=True, slots=True)
class Timeline:
    """A chain of calls: each turn's prompt begins with everything up to the end of the turn before it.

    ``broken_by`` names why the chain does not continue an earlier one; None for the first of its model and agent. With
    ``repaired_tokens`` it was joined by `core.trajectory.repair`. That many tokens of its prompts are other ones here,
    of the same text.
    """

    tokens: bytes
    turns: tuple[Turn, ...]
    broken_by: str | None
    repaired_tokens: int = 0

    @property
    def model(self) -> str:
        return self.turns[0].model

    @property
    def agent(self) -> str:
        return self.turns[0].agent

    def __len__(self) -> int:
        """Tokens, not turns."""
        return count(self.tokens)


def packed(prompt: Sequence[int], sampled: Sequence[int], logprobs: Sequence[float], **told: Any) -> Packed:
    """A call of these ids and logprobs; `told` is what else a `Turn` tells."""
    start = len(prompt)
    turn = Turn(start=start, end=start + len(sampled), logprobs=array("d", logprobs).tobytes(), **told)
    return Packed(turn, pack_tokens(prompt) + pack_tokens(sampled))


def pack(call: Call) -> Packed:
    """`call` as it is kept until its episode is merged."""
    same = {name: getattr(call, name) for name in _IN_BOTH}
    sampling = None if call.sampling is None else canonical(call.sampling)
    return packed(call.prompt_token_ids, call.token_ids, call.logprobs, sampling=sampling, **same)


def merge(calls: Iterable[Call], policy: Policy = "strict") -> tuple[Timeline, ...]:
    """The timelines of one episode's calls, in the order of their first calls."""
    return merge_packed([pack(call) for call in calls], policy)


def merge_packed(calls: Iterable[Packed], policy: Policy = "strict") -> tuple[Timeline, ...]:
    """`merge` for calls that are packed already. Calls of different models or agents never meet. What is known of their
    texts is left out unless the policy is ``repair``."""
    kinds: dict[tuple[str, str], list[Packed]] = {}
    if policy != "repair":
        calls = [
            call if call.turn.same_text is None else replace(call, turn=replace(call.turn, same_text=None))
            for call in calls
        ]
    for call in sorted(calls, key=lambda call: call.turn.rank):
        kinds.setdefault((call.turn.model, call.turn.agent), []).append(call)
    timelines = [timeline for kind in kinds.values() for timeline in _merge_kind(kind, policy)]
    return tuple(sorted(timelines, key=lambda timeline: timeline.turns[0].rank))


def _merge_kind(calls: list[Packed], policy: Policy) -> list[Timeline]:
    """`calls` are of one model and agent, in order of rank; a call is its index in them."""
    if policy == "off":
        return [Timeline(call.text, (call.turn,), None) for call in calls]
    tree = EndTree(calls)
    chains = _chains(_follow(calls, tree))
    number = {index: place for place, chain in enumerate(chains) for index in chain}
    nearest, asked = tree.nearest_earlier(), cache(lambda: tree.nearest_asked(calls))
    out = []
    for place, chain in enumerate(chains):
        first, near, reason = chain[0], nearest[chain[0]], None
        if near is not None and number[near] >= place:
            near = _nearest_before(calls, first, [index for index in range(first) if number[index] < place])
        if near is not None:
            reason, whole = _difference(calls, tree, first, chains[number[near]])
            if reason in VAGUE and not whole and (before := asked()[first]) is not None and number[before] < place:
                other, _ = _difference(calls, tree, first, chains[number[before]])
                reason = other if other in DRIFTED else reason
            if reason in DRIFTED and calls[first].turn.continuity in EDITED:
                reason = "history_edited"
        out.append(Timeline(calls[chain[-1]].text, tuple(calls[index].turn for index in chain), reason))
    return out


def _difference(calls: Sequence[Packed], tree: EndTree, first: int, chain: Sequence[int]) -> tuple[str, bool]:
    """The name of what parts `first` from `chain`, as it stood then; and whether its whole prompt stands there."""
    history = [index for index in chain if index < first]
    before = [index for index in tree.sampled_before(calls, history[0]) if index < first]
    spans = [(calls[index].turn.start, calls[index].turn.end) for index in (*before, *history)]
    prompt, told = cut(calls[first].text, 0, calls[first].turn.start), calls[history[-1]].text
    return broken_by(prompt, told, spans), told.startswith(prompt)


def _nearest_before(calls: Sequence[Packed], first: int, candidates: Sequence[int]) -> int | None:
    """`EndTree.nearest_earlier` among `candidates` alone; needed only if clocks contradict the texts."""
    text = calls[first].text
    return max(candidates, key=lambda index: (common_prefix(calls[index].text, text), index), default=None)


def _chains(follows: list[int | None]) -> list[list[int]]:
    """The chains whose links are in `follows`."""
    after = {before: index for index, before in enumerate(follows) if before is not None}
    chains = [[index] for index, before in enumerate(follows) if before is None]
    for chain in chains:
        while chain[-1] in after:
            chain.append(after[chain[-1]])
    return chains


def _follow(calls: list[Packed], tree: EndTree) -> list[int | None]:
    """For each call the one it follows; None if a timeline begins there."""
    follows: list[int | None] = [None] * len(calls)
    silent: dict[int, list[int]] = {}
    free: list[list[int]] = [[] for _ in tree.parent]
    for index in reversed(range(len(calls))):
        if calls[index].turn.start == calls[index].turn.end:
            silent.setdefault(tree.node[index], []).insert(0, index)
        else:
            free[tree.node[index]].append(index)
    for node, link in silent.items():
        free[node].append(link[-1])
        for before, behind in pairwise(link):
            follows[behind] = before
    own_end = {link[0]: link[-1] for link in silent.values()}
    linked = {index for link in silent.values() for index in link[1:]}
    up = list(tree.parent)
    for index, call in enumerate(calls):
        if index not in linked:
            follows[index] = _take(free, up, tree.at_or_above(index, call.turn.start), own_end.get(index))
    return follows


def _take(free: list[list[int]], up: list[int], node: int, own: int | None) -> int | None:
    """The longest free end at `node` or above it, now taken, but not a link's `own` end.

    ``up`` leads past nodes without free ends and is shortened on the way, so all searches together are nearly linear.
    """
    if own is not None and free[node][-1:] == [own]:
        if len(free[node]) > 1:
            return free[node].pop(-2)
        node = up[node]
    passed = []
    while node >= 0 and not free[node]:
        passed.append(node)
        node = up[node]
    for below in passed:
        up[below] = node
    return free[node].pop() if node >= 0 else None


class EndTree:
    """The prefix tree of the calls' ends: one node for each distinct text, its parent the longest proper prefix.

    ``node[call]``, ``parent[node]`` (-1 at a root). In sorted order a text stands before its extensions and all its
    extensions stand together, so a stack of open prefixes finds every parent.
    """

    def __init__(self, calls: Sequence[Packed]) -> None:
        self.order = sorted(range(len(calls)), key=lambda index: calls[index].text)
        self.shared: list[int] = []
        self.node = [0] * len(calls)
        self.parent: list[int] = []
        self._length: list[int] = []
        self._sampler: dict[int, int] = {}
        """The earliest call that sampled the end of a node's text."""
        open_nodes: list[int] = []
        before = None
        for index in self.order:
            text = calls[index].text
            shared = 0 if before is None else common_prefix(before, text)
            self.shared.append(shared)
            while open_nodes and self._length[open_nodes[-1]] > shared:
                open_nodes.pop()
            if text != before:
                self.parent.append(open_nodes[-1] if open_nodes else -1)
                self._length.append(count(text))
                open_nodes.append(len(self.parent) - 1)
            self.node[index] = open_nodes[-1]
            if calls[index].turn.start < calls[index].turn.end:
                self._sampler.setdefault(open_nodes[-1], index)
            before = text

    def at_or_above(self, call: int, length: int) -> int:
        """The node of the longest end that is a prefix of the first `length` tokens of `call`; -1 if there is none."""
        node = self.node[call]
        while node >= 0 and self._length[node] > length:
            node = self.parent[node]
        return node

    def sampled_before(self, calls: Sequence[Packed], call: int) -> list[int]:
        """The calls, in order of their texts, that sampled tokens of the prompt of `call`."""
        found = []
        node = self.at_or_above(call, calls[call].turn.start)
        while node >= 0:
            sampler = self._sampler.get(node)
            if sampler is not None:
                found.append(sampler)
                node = self.at_or_above(sampler, calls[sampler].turn.start)
            else:
                node = self.parent[node]
        return found[::-1]

    def nearest_asked(self, calls: Sequence[Packed]) -> list[int | None]:
        """For each call the earlier one that sampled after the longest beginning of its prompt; of several, one that
        shares the most with it."""
        found: list[int | None] = [None] * len(self.order)
        for walk in self._walks():
            opened: list[tuple[int, int]] = []
            for call, shared in walk:
                start = calls[call].turn.start
                del opened[bisect_right(opened, shared, key=itemgetter(0)) :]
                most = bisect_right(opened, start, key=itemgetter(0))
                near = next((index for _, index in reversed(opened[:most]) if index < call), None)
                both = [index for index in (near, found[call]) if index is not None]
                found[call] = max(both, default=None, key=lambda index: (
                    calls[index].turn.start, common_prefix(calls[index].text, calls[call].text)
                ))
                if start < calls[call].turn.end:
                    insort(opened, (start, call), key=itemgetter(0))
        return found

    def nearest_earlier(self) -> list[int | None]:
        """For each call the earlier one (of lower index) that shares the longest beginning with it, if there is any."""
        nearest: list[tuple[int, int] | None] = [None] * len(self.order)
        for walk in self._walks():
            stack: list[tuple[int, int]] = []
            for call, shared in walk:
                while stack and stack[-1][0] > call:
                    shared = min(shared, stack.pop()[1])
                if stack:
                    found = (shared, stack[-1][0])
                    known = nearest[call]
                    nearest[call] = found if known is None else max(found, known)
                stack.append((call, shared))
        return [None if found is None else found[1] for found in nearest]

    def _walks(self) -> tuple[Iterable[tuple[int, int]], ...]:
        """The calls in the order of their texts, and in reverse, each with what it shares with the one before it."""
        forth = zip(self.order, self.shared, strict=True)
        return forth, zip(reversed(self.order), [0, *reversed(self.shared[1:])], strict=True)
