"""The table of an episode's states, cell by cell, and what its rewards add up to."""

from __future__ import annotations

import pytest

from ajet_proxy.core.ledger.episode import NEXT, TAKES, Episode, Shares, models_played, takes, timeouts, wants
from ajet_proxy.core.ledger.transcript import Asked, CallEntry, Transcript
from ajet_sdk.errors import BadRequest, Conflict
from ajet_sdk.routes import DEFAULT_LANE, DISCARD_REASONS, EPISODE_STATES, OpenEpisode
from tests.kit.ledger_rig import LedgerRig, blank
from tests.kit.refused import refused
from tests.kit.strategies import make_call
from tests.proxy.core.ledger.test_transcript import told

#                    call      reward    seal      abort     heartbeat
EXPECTED = {
    "open":      ["do",     "do",     "do",     "do",     "do"],
    "sealed":    ["refuse", "do",     "done",   "do",     "done"],
    "ready":     ["refuse", "do",     "done",   "do",     "done"],
    "leased":    ["refuse", "refuse", "done",   "refuse", "done"],
    "trained":   ["refuse", "refuse", "done",   "refuse", "done"],
    "recorded":  ["refuse", "do",     "done",   "refuse", "done"],
    "discarded": ["refuse", "refuse", "refuse", "done",   "refuse"],
}  # fmt: skip
COMMANDS = ("call", "reward", "seal", "abort", "heartbeat")
CELLS = [(state, command, EXPECTED[state][COMMANDS.index(command)]) for state in EXPECTED for command in COMMANDS]


def test_the_tables_know_every_state() -> None:
    assert set(NEXT) == set(EXPECTED) == set(EPISODE_STATES)
    assert set(TAKES) == set(COMMANDS)
    assert all(set(row) == set(EPISODE_STATES) for row in TAKES.values())
    assert all(following <= set(EPISODE_STATES) for following in NEXT.values())


@pytest.mark.parametrize(("state", "command", "verdict"), CELLS)
def test_what_a_state_takes(rig: LedgerRig, state: str, command: str, verdict: str) -> None:
    episode = rig.state.episodes[rig.in_state(state)]
    if verdict == "refuse":
        with refused(Conflict, f"episode_{state}", match=f"is {state}"):
            takes(command, episode)
    else:
        assert takes(command, episode) == (verdict == "do")


@pytest.mark.parametrize("state", EPISODE_STATES)
@pytest.mark.parametrize("target", EPISODE_STATES)
def test_where_a_state_leads(rig: LedgerRig, state: str, target: str) -> None:
    episode = rig.state.episodes[rig.in_state(state)]
    if target in NEXT[state]:
        episode.move(target, 2000.0, "why" if target == "discarded" else None)
        assert episode.state == target
        assert (episode.ended_at == 2000.0) == (not NEXT[target])
    else:
        with pytest.raises(Conflict, match="cannot go"):
            episode.move(target, 2000.0)
        assert episode.state == state


def test_a_refusal_says_why_the_episode_ended(rig: LedgerRig) -> None:
    episode = rig.state.episodes[rig.in_state("discarded")]
    with pytest.raises(Conflict, match=r"discarded \(aborted\): too late for this reward; give or correct"):
        takes("reward", episode)


@pytest.mark.parametrize(("state", "command", "said"), [
    ("discarded", "call", r"\): too late for this call; open another, and give a final reward only after its last"),
    ("ready", "call", "is ready: too late for this call; open another"),
    ("trained", "reward", "too late for this reward; give or correct rewards before an episode is leased"),
    ("trained", "abort", r"is trained: too late for this abort$"),
])  # fmt: skip
def test_a_refusal_says_what_to_do_about_it(rig: LedgerRig, state: str, command: str, said: str) -> None:
    episode = rig.state.episodes[rig.in_state(state)]
    with pytest.raises(Conflict, match=said):
        takes(command, episode)


@pytest.mark.parametrize("id", ["r", "s"])
def test_a_second_final_reward_corrects_the_first_unless_it_has_its_id(rig: LedgerRig, id: str) -> None:
    episode = rig.open()
    rig.call(episode, (1,), (2,))
    rig.reward(episode, 1.0, id="r")
    if id == "r":
        with refused(Conflict, "reward_exists", match="a correction is a reward with another id"):
            rig.reward(episode, 0.5, id=id)
    else:
        rig.reward(episode, 0.5, id=id)
    assert rig.state.episodes[episode].reward() == (1.0 if id == "r" else 0.5)


def test_an_episode_takes_so_many_rewards_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.episode.MAX_REWARDS", 3)
    rig = LedgerRig(watch=True)
    episode = rig.open()
    for number in range(3):
        rig.reward(episode, 1.0, id=f"r{number}", final=False)
    with refused(Conflict, "too_many_rewards", match="as many as it may"):
        rig.reward(episode, 1.0, id="r3")
    assert rig.reward(episode, 1.0, id="r0", final=False) == ()
    with refused(Conflict, "reward_exists"):
        rig.reward(episode, 2.0, id="r0", final=False)
    assert rig.seal(episode)


def test_a_reward_counts_though_there_is_no_room_for_its_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ajet_proxy.core.ledger.episode.MAX_NOTES", 20)
    rig = LedgerRig(watch=True)
    episode = rig.open()
    notes = ["x" * 8, "y" * 20, None, "", "z", "zz"]
    for note in notes:
        rig.reward(episode, 1.0, note=note, final=note == "zz")
    known = rig.state.episodes[episode]
    assert known.reward() == 6.0 and known.sealed_at is not None
    assert [one.note for one in known.rewards.values()] == [
        "x" * 8, f"{'y' * 7}(cut)", None, "", "(cut)", "(cut)"
    ]


# ---- what a sealed episode becomes


def sealed(
    *, eval: bool = False, reward: bool = True, sampled: tuple[int, ...] | None = (3,), judged: bool = False
) -> Episode:
    rig = LedgerRig()
    episode = rig.open(eval=eval, judged=judged)
    if sampled is not None:
        rig.call(episode, (1, 2), sampled)
    if reward:
        rig.reward(episode, final=False)
    return rig.state.episodes[episode]


@pytest.mark.parametrize(
    ("episode", "outcome"),
    [
        (sealed(), ("ready", None)),
        (sealed(reward=False), ("discarded", "no_reward")),
        (sealed(sampled=None, reward=False, judged=True), ("discarded", "incomplete_call")),
        (sealed(sampled=None), ("discarded", "incomplete_call")),
        (sealed(sampled=()), ("discarded", "incomplete_call")),
        (sealed(sampled=None, reward=False), ("discarded", "no_reward")),
        (sealed(eval=True), ("recorded", None)),
        (sealed(eval=True, reward=False, sampled=None), ("recorded", None)),
    ],
)
def test_what_follows_sealing(episode: Episode, outcome: tuple[str, str | None]) -> None:
    assert episode.outcome() == outcome
    assert outcome[1] in (None, *DISCARD_REASONS)


def models(episode: Episode, *names: str) -> list[str]:
    for index, name in enumerate(names):
        told(episode.transcript, make_call(f"c{index}", [1], [2], at=float(index), model=name))
    return episode.trains()


def test_which_models_an_episode_trains() -> None:
    assert models(blank(), "a", "b") == ["a"]
    assert models(blank(model="b"), "a", "b") == ["b"]
    assert models(blank(model="c"), "a", "judge") == []
    assert models(blank(members={"x": "a", "y": "b"}), "b", "a", "judge") == ["b", "a"]
    assert models(blank(members={"x": "a"}), "judge") == []
    assert models(blank()) == []
    assert models(blank(teachers={"x": "a"}), "a", "b", "c") == ["b"]
    assert models(blank(teachers={"x": "a"}), "a") == []
    assert models(blank(members={"y": "b"}, teachers={"x": "a"}), "a", "b") == ["b"]


def test_whose_call_it_is_and_to_which_model() -> None:
    """The name of a member or teacher may be asked for as a model; what a call says of its agent comes first."""
    episode = blank(members={"plans": "p", "codes": "c"}, teachers={"tells": "t"}, agent="all", model="m")
    for said, asked, agent, model in (
        (None, "plans", "plans", "p"), (None, "tells", "tells", "t"), (None, "gpt-4o", "all", "m"),
        (None, "judge", "all", None), ("codes", "gpt-4o", "codes", "c"), ("codes", "plans", "codes", "c"),
        ("other", "plans", "other", "p"), ("other", "", "other", "m"),
    ):
        assert (found := episode.opening.agent_of(said, asked)) == agent
        assert episode.opening.model_for(found, asked, ("", "judge", "p", "c", "t")) == model
    assert blank().opening.agent_of(None, "x") == ""
    assert models_played(episode) == {"p", "c", "t", "m"}


def test_shares_add_up_to_a_state() -> None:
    for shares, state in [
        ({"a": None, "b": None}, "ready"), ({"a": "batch", "b": None}, "leased"), ({"a": "", "b": None}, "ready"),
        ({"a": "", "b": "batch"}, "leased"), ({"a": "", "b": ""}, "trained"),
    ]:
        assert Shares(dict(shares)).state == state


def test_a_head_has_no_calls() -> None:
    episode = blank()
    models(episode, "a", "b")
    head = episode.head()
    assert (head.transcript, head.stored, head.opening.model) == (Transcript(), "archive", "m")
    assert blank(model="named").head().opening.model == "named"
    assert episode.group_key.task == ""


def test_an_episode_may_ask_for_other_timeouts_but_not_to_stay_open_for_longer_than_any() -> None:
    assert timeouts(OpenEpisode(), 100.0, 1000.0) == (100.0, 1000.0)
    assert timeouts(OpenEpisode(idle_timeout=5000.0, wall_timeout=7.0), 100.0, 1000.0) == (5000.0, 7.0)
    assert timeouts(OpenEpisode(wall_timeout=1000.0), 100.0, 1000.0) == (100.0, 1000.0)
    with refused(BadRequest, param="wall_timeout", match="wall_timeout may be at most 1000 seconds"):
        timeouts(OpenEpisode(wall_timeout=1000.1), 100.0, 1000.0)


def test_what_a_trainer_has_had_is_as_good_as_leased(rig: LedgerRig) -> None:
    episode = rig.state.episodes[rig.in_state("ready")]
    assert takes("reward", episode) and takes("abort", episode)
    episode.shares.taken.add("m")
    for command in COMMANDS:
        if EXPECTED["leased"][COMMANDS.index(command)] == "refuse":
            with refused(Conflict, "episode_leased", match="a trainer has had it"):
                takes(command, episode)
        else:
            assert not takes(command, episode)


@pytest.mark.parametrize(("fields", "wanted"), [
    ({}, ["a"]), ({"model": "b"}, ["b"]), ({"eval": True}, []), ({"members": {"x": "b", "y": "c"}}, ["b", "c"]),
    ({"teachers": {"x": "a"}}, ["b"]), ({"teachers": {"x": "a", "y": "b", "z": "c"}}, []),
])  # fmt: skip
def test_which_calls_would_be_trained_if_they_were_whole(fields: dict[str, object], wanted: list[str]) -> None:
    calls = {name: CallEntry(Asked(0.0, name, "", "path", "", None)) for name in "abc"}
    episode = blank(calls, **fields)
    assert [name for name in "abcd" if wants(episode, name)] == wanted


@pytest.mark.parametrize(
    ("task", "given", "lane"),
    [
        ("math/17", None, "math"), ("math/17/b", None, "math"), ("17", None, DEFAULT_LANE), (None, None, DEFAULT_LANE),
        ("/17", None, DEFAULT_LANE), ("math/17", "terminal", "terminal"),
    ],
)  # fmt: skip
def test_the_lane_of_a_task(task: str | None, given: str | None, lane: str) -> None:
    assert blank(task=task, lane=given).group_key.lane == lane


def test_the_rewards_of_agents_where_they_differ_from_the_episode_s(rig: LedgerRig) -> None:
    def told(episode: str) -> dict[str, float]:
        return rig.state.episodes.known(episode).reward_by_agent()

    for game in ("even", "alone", "played"):
        rig.open(game)
    rig.reward("even", 1.0)
    assert told("even") == {}
    rig.reward("alone", 0.5, agent="white")
    assert told("alone") == {}
    black = rig.call("played", agent="black")
    rig.reward("played", 0.25, final=False)
    rig.reward("played", 1.0, agent="white", final=False)
    rig.reward("played", -1.0, call=black, final=False)
    rig.reward("played", -0.5, agent="black", final=False)
    assert told("played") == {"white": 1.25, "black": -1.25}
    assert rig.state.episodes.known("played").reward() == -0.25
    rig.reward("played", 4.0, call=rig.call("played"), final=False)
    assert told("played") == {"white": 1.25, "black": -1.25}, "a call of nobody's name is of no other agent"
    for game in ("even", "alone", "played"):
        head = rig.state.episodes.known(game).head()
        assert (head.reward_by_agent(), head.reward()) == (told(game), rig.state.episodes.known(game).reward())
        assert head.head().reward_by_agent() == told(game)
