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

The tree of ends is not built token by token. It is read off the tree of the calls' texts (`core.trajectory.texts`), in
whose order every end stands right before its extensions. So the cost is the number of calls, however long they are.
Only what parts a new timeline from an earlier one is read in the tokens.

Next: ajet_trainer/step.py
"""

from __future__ import annotations

import json
from array import array
from bisect import bisect_right, insort
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from operator import itemgetter
from sys import intern
from typing import Any, Literal

from msgspec import Struct
from msgspec.structs import force_setattr, replace

from ajet_proxy.core.tokens import count, cut, is_long, pack_tokens, unpack_tokens
from ajet_proxy.core.trajectory.drift import DRIFTED, EDITED, VAGUE, broken_by
from ajet_proxy.core.trajectory.texts import Beginning, Reader, Texts
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


Placed = tuple[Turn, int]
"""A call, and the number of the text that begins with all that it read and sampled."""


@dataclass(frozen=True, slots=True)
class Chain:
    """A chain of calls: each turn's prompt begins with everything up to the end of the turn before it. Its tokens are
    the beginning of the text number `text`, up to the end of its last turn.

    ``broken_by`` names why the chain does not continue an earlier one; None for the first of its model and agent.
    """

    text: int
    turns: tuple[Turn, ...]
    broken_by: str | None

    @property
    def model(self) -> str:
        return self.turns[0].model

    @property
    def beginning(self) -> Beginning:
        return self.text, self.turns[-1].end


@dataclass(frozen=True, slots=True)
class Timeline:
    """A `Chain` with its tokens. With ``repaired_tokens`` it was joined by `core.trajectory.repair`. That many tokens
    of its prompts are other ones here, of the same text."""

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
    """`merge` for calls that are packed already."""
    texts = Texts()
    calls = list(calls)
    numbers = texts.add_all([(call.text, call.turn.call) for call in calls])
    placed = [(call.turn, number) for call, number in zip(calls, numbers, strict=True)]
    return with_tokens(merge_texts(placed, texts, policy), texts)


def with_tokens(chains: Iterable[Chain], texts: Texts) -> tuple[Timeline, ...]:
    """The timelines that `chains` stand for."""
    whole = Reader(texts).whole
    return tuple(Timeline(whole(*chain.beginning), chain.turns, chain.broken_by) for chain in chains)


def merge_texts(calls: Iterable[Placed], texts: Texts, policy: Policy) -> tuple[Chain, ...]:
    """`merge` for calls that are known by their `texts`. Calls of different models or agents never meet. What is known
    of their texts is left out unless the policy is ``repair``."""
    kinds: dict[tuple[str, str], list[Placed]] = {}
    if policy != "repair":
        calls = [
            (turn if turn.same_text is None else replace(turn, same_text=None), text) for turn, text in calls
        ]
    for call in sorted(calls, key=lambda call: call[0].rank):
        kinds.setdefault((call[0].model, call[0].agent), []).append(call)
    places = texts.places()
    chains = [chain for kind in kinds.values() for chain in _merge_kind(kind, texts, places, policy)]
    return tuple(sorted(chains, key=lambda chain: chain.turns[0].rank))


def _merge_kind(calls: list[Placed], texts: Texts, places: Mapping[int, int], policy: Policy) -> list[Chain]:
    """`calls` are of one model and agent, in order of rank; a call is its index in them."""
    if policy == "off":
        return [Chain(text, (turn,), None) for turn, text in calls]
    turns = [turn for turn, _ in calls]
    holders = texts.holders([(text, turn.end) for turn, text in calls])
    ends = [(holder, turn.end) for holder, turn in zip(holders, turns, strict=True)]
    tree = EndTree(turns, ends, texts, places)
    chains = _chains(_follow(turns, tree))
    number = {index: place for place, chain in enumerate(chains) for index in chain}
    nearest, asked = tree.nearest_earlier(), cache(tree.nearest_asked)
    out = []
    for place, chain in enumerate(chains):
        first, near, reason = chain[0], nearest[chain[0]], None
        if near is not None and number[near] >= place:
            near = tree.nearest_of(first, [index for index in range(first) if number[index] < place])
        if near is not None:
            reason, whole = _difference(tree, first, chains[number[near]])
            if reason in VAGUE and not whole and (before := asked()[first]) is not None and number[before] < place:
                other, _ = _difference(tree, first, chains[number[before]])
                reason = other if other in DRIFTED else reason
            if reason in DRIFTED and turns[first].continuity in EDITED:
                reason = "history_edited"
        out.append(Chain(calls[chain[-1]][1], tuple(turns[index] for index in chain), reason))
    return out


def _difference(tree: EndTree, first: int, chain: Sequence[int]) -> tuple[str, bool]:
    """The name of what parts `first` from `chain`, as it stood then; and whether its whole prompt stands there."""
    history = [index for index in chain if index < first]
    before = [index for index in tree.sampled_before(history[0]) if index < first]
    spans = [(tree.turns[index].start, tree.turns[index].end) for index in (*before, *history)]
    prompt, told = tree.prompt(first), tree.end(history[-1])
    return broken_by(prompt, told, spans), told.startswith(prompt)


def _chains(follows: list[int | None]) -> list[list[int]]:
    """The chains whose links are in `follows`."""
    after = {before: index for index, before in enumerate(follows) if before is not None}
    chains = [[index] for index, before in enumerate(follows) if before is None]
    for chain in chains:
        while chain[-1] in after:
            chain.append(after[chain[-1]])
    return chains


def _follow(turns: Sequence[Turn], tree: EndTree) -> list[int | None]:
    """For each call the one it follows; None if a timeline begins there."""
    follows: list[int | None] = [None] * len(turns)
    silent: dict[int, list[int]] = {}
    free: list[list[int]] = [[] for _ in tree.parent]
    for index in reversed(range(len(turns))):
        if turns[index].sampled:
            free[tree.node[index]].append(index)
        else:
            silent.setdefault(tree.node[index], []).insert(0, index)
    for node, link in silent.items():
        free[node].append(link[-1])
        for before, behind in pairwise(link):
            follows[behind] = before
    own_end = {link[0]: link[-1] for link in silent.values()}
    linked = {index for link in silent.values() for index in link[1:]}
    up = list(tree.parent)
    for index, turn in enumerate(turns):
        if index not in linked:
            follows[index] = _take(free, up, tree.at_or_above(index, turn.start), own_end.get(index))
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

    ``node[call]``, ``parent[node]`` (-1 at a root). `ends` are the beginnings that the calls of `turns` read and
    sampled, each named by the text that holds its last token. In the order of the texts an end stands before its
    extensions and all its extensions stand together, so a stack of open prefixes finds every parent.
    """

    def __init__(
        self, turns: Sequence[Turn], ends: Sequence[Beginning], texts: Texts, places: Mapping[int, int]
    ) -> None:
        self.turns, self._ends, self._texts = turns, ends, texts
        self._prompts, self._wholes = Reader(texts), Reader(texts)
        self.order = sorted(range(len(ends)), key=lambda index: (places[ends[index][0]], ends[index][1]))
        self.shared: list[int] = []
        self.node = [0] * len(ends)
        self.parent: list[int] = []
        self._length: list[int] = []
        self._sampler: dict[int, int] = {}
        """The earliest call that sampled the end of a node's text."""
        open_nodes: list[int] = []
        before = None
        for index in self.order:
            end = ends[index]
            shared = 0 if before is None else texts.common(before, end)
            self.shared.append(shared)
            while open_nodes and self._length[open_nodes[-1]] > shared:
                open_nodes.pop()
            if end != before:
                self.parent.append(open_nodes[-1] if open_nodes else -1)
                self._length.append(end[1])
                open_nodes.append(len(self.parent) - 1)
            self.node[index] = open_nodes[-1]
            if turns[index].sampled:
                self._sampler.setdefault(open_nodes[-1], index)
            before = end

    def prompt(self, call: int) -> bytes:
        """The tokens that `call` read."""
        return self._prompts.whole(self._ends[call][0], self.turns[call].start)

    def end(self, call: int) -> bytes:
        """The tokens that `call` read and sampled."""
        return self._wholes.whole(*self._ends[call])

    def at_or_above(self, call: int, length: int) -> int:
        """The node of the longest end that is a prefix of the first `length` tokens of `call`; -1 if there is none."""
        node = self.node[call]
        while node >= 0 and self._length[node] > length:
            node = self.parent[node]
        return node

    def sampled_before(self, call: int) -> list[int]:
        """The calls, in order of their texts, that sampled tokens of the prompt of `call`."""
        found = []
        node = self.at_or_above(call, self.turns[call].start)
        while node >= 0:
            sampler = self._sampler.get(node)
            if sampler is not None:
                found.append(sampler)
                node = self.at_or_above(sampler, self.turns[sampler].start)
            else:
                node = self.parent[node]
        return found[::-1]

    def nearest_of(self, call: int, candidates: Sequence[int]) -> int | None:
        """`nearest_earlier` among `candidates` alone; needed only if clocks contradict the texts."""
        return max(candidates, key=lambda index: (self._common(index, call), index), default=None)

    def nearest_asked(self) -> list[int | None]:
        """For each call the earlier one that sampled after the longest beginning of its prompt; of several, one that
        shares the most with it."""
        found: list[int | None] = [None] * len(self.order)
        for walk in self._walks():
            opened: list[tuple[int, int]] = []
            for call, shared in walk:
                start = self.turns[call].start
                del opened[bisect_right(opened, shared, key=itemgetter(0)) :]
                most = bisect_right(opened, start, key=itemgetter(0))
                near = next((index for _, index in reversed(opened[:most]) if index < call), None)
                found[call] = self._nearer(call, near, found[call])
                if self.turns[call].sampled:
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

    def _nearer(self, call: int, one: int | None, other: int | None) -> int | None:
        """The one of two that sampled later or, if both did at one place, shares more with `call`."""
        if one is None or other is None:
            return other if one is None else one
        at, place = self.turns[one].start, self.turns[other].start
        if at == place:
            at, place = self._common(one, call), self._common(other, call)
        return one if at >= place else other

    def _common(self, one: int, other: int) -> int:
        return self._texts.common(self._ends[one], self._ends[other])

    def _walks(self) -> tuple[Iterable[tuple[int, int]], ...]:
        """The calls in the order of their texts, and in reverse, each with what it shares with the one before it."""
        forth = zip(self.order, self.shared, strict=True)
        return forth, zip(reversed(self.order), [0, *reversed(self.shared[1:])], strict=True)
