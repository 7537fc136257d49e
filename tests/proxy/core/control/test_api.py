"""The control plane as a function: every route, its body, its answer, and what a caller's claims reach."""

from __future__ import annotations

from typing import Any

import pytest

from ajet_proxy.core.control import api
from ajet_proxy.core.identity.keys import EVERYTHING, Claims
from ajet_proxy.core.ledger.episode import wants
from ajet_sdk.errors import BadRequest, Conflict, Forbidden, NotFound
from ajet_sdk.routes import ROUTES
from tests.kit.control_rig import BASE, Caller
from tests.kit.ledger_rig import picture
from tests.kit.refused import refused


@pytest.fixture
def caller() -> Caller:
    return Caller()


def test_every_route_that_the_ledger_answers_has_a_handler() -> None:
    """The others are of who waits or what only the daemon knows (`ajet_proxy.io.control.routes`)."""
    assert {route.name for route in ROUTES} - api.HANDLERS.keys() == {
        "put_run", "change_run", "events", "ca", "lease_judgements",
    }


# ---- opening


def test_opening_an_episode(caller: Caller) -> None:
    caller.rig.announce("m", 7)
    answer = caller.post("/episodes", {"task": "gsm8k/17", "metadata": {"k": 1}}, claims=Claims("agent", "acme"))
    episode = answer["episode"]
    key = f"ajet-acme-{episode}"
    assert answer == {
        "episode": episode,
        "task": "gsm8k/17",
        "base_url": f"{BASE}/e/{episode}/v1",
        "api_key": key,
        "policy_version": 7,
        "env": {
            "OPENAI_BASE_URL": f"{BASE}/e/{episode}/v1",
            "OPENAI_API_BASE": f"{BASE}/e/{episode}/v1",
            "OPENAI_API_KEY": key,
            "ANTHROPIC_BASE_URL": f"{BASE}/e/{episode}",
            "ANTHROPIC_API_KEY": key,
            "AJET_PROXY_URL": BASE,
            "AJET_EPISODE": episode,
            "AJET_TASK": "gsm8k/17",
        },
    }
    assert caller.rig.state.episodes.known(episode).opening.tenant == "acme"


def test_opening_an_episode_over_several_models(caller: Caller) -> None:
    caller.rig.announce("m", 7)
    caller.rig.announce("n", 8)
    answer = caller.post("/episodes", {"members": {"solver": "m", "critic": "n"}})
    assert answer["members"] == {
        "solver": {"model": "m", "policy_version": 7}, "critic": {"model": "n", "policy_version": 8},
    }
    assert (answer["policy_version"], answer["env"]["AJET_TASK"]) == (0, "")
    assert caller.post("/episodes", {"model": "n"})["policy_version"] == 8


def test_opening_an_episode_with_a_teacher(caller: Caller) -> None:
    caller.rig.announce("m", 7)
    answer = caller.post("/episodes", {"members": {"solver": "m"}, "teachers": {"tutor": "t"}})
    assert answer["teachers"] == {"tutor": {"model": "t", "policy_version": 0}}
    assert caller.rig.state.episodes[answer["episode"]].opening.teachers == {"tutor": "t"}


@pytest.mark.parametrize(("method", "path", "body"), [
    ("POST", "/episodes", {}), ("GET", "/wanted", None), ("POST", "/plays", {"name": "d", "episodes": 2}),
    ("GET", "/plays/d", None), ("DELETE", "/plays/d", None), ("POST", "/clients", {"name": "host"}),
    ("GET", "/clients", None), ("POST", "/clients/host/beat", None), ("DELETE", "/clients/host", None),
])  # fmt: skip
def test_the_key_of_one_episode_is_none_of_its_tenant(caller: Caller, method: str, path: str, body: Any) -> None:
    caller.post("/plays", {"name": "d", "episodes": 2})
    caller.post("/clients", {"name": "host", "id": "host"})
    with refused(Forbidden, "foreign_episode"):
        caller.decide(method, path, body, claims=Claims("agent", "", "mine"))


# ---- what claims reach

ON_AN_EPISODE = [
    ("GET", "", None), ("POST", "/rewards", {"value": 1.0}), ("POST", "/seal", None), ("POST", "/abort", {}),
    ("POST", "/heartbeat", {}),
]


@pytest.mark.parametrize(("method", "action", "body"), ON_AN_EPISODE)
def test_what_an_agent_reaches(caller: Caller, method: str, action: str, body: Any) -> None:
    mine = caller.rig.open("mine", tenant="acme")
    other = caller.rig.open("other", tenant="else")
    for claims in (Claims("agent", "else"), Claims("agent", "acme", other), Claims("agent", "else", other)):
        with refused(Forbidden, "foreign_episode"):
            caller.decide(method, f"/episodes/{mine}{action}", body, claims=claims)
    with pytest.raises(NotFound):
        caller.decide(method, f"/episodes/nobody{action}", body)
    for claims in (Claims("agent", "acme"), Claims("agent", "acme", mine), EVERYTHING):
        assert caller.decide(method, f"/episodes/{mine}{action}", body, claims=claims).status == 200


# ---- bodies

WITH_BODY = [(route.method, route.path.replace("{id}", "thing")) for route in ROUTES if route.body is not None]


@pytest.mark.parametrize(("method", "path"), WITH_BODY)
def test_a_body_that_does_not_fit_is_refused_and_nothing_happens(caller: Caller, method: str, path: str) -> None:
    caller.rig.open("thing")
    before = picture(caller.rig.state)
    for body in ([], "text", 1, {"no_such_field": 1}):
        with pytest.raises(BadRequest):
            caller.decide(method, path, body)
    assert picture(caller.rig.state) == before


# ---- an episode's life


def test_rewarding(caller: Caller) -> None:
    episode = caller.rig.open(task="t")
    caller.rig.call(episode)
    path = f"/episodes/{episode}/rewards"
    first = caller.post(path, {"value": 0.5, "final": False})
    assert first == {"id": first["id"], "episode": episode, "state": "open", "reward": 0.5}
    sealed = {"id": "r1", "episode": episode, "state": "ready", "reward": 1.5}
    assert caller.post(path, {"value": 1, "id": "r1"}) == sealed
    assert caller.post(path, {"value": 1, "id": "r1"}) == sealed
    with refused(Conflict, "reward_exists"):
        caller.post(path, {"value": 2, "id": "r1"})


def test_rewarding_by_the_id_of_an_answer(caller: Caller) -> None:
    mine, other = caller.rig.open("mine", tenant="acme"), caller.rig.open("other", tenant="else")
    call = caller.rig.call(mine, tenant="acme")
    given = {"value": 1.0, "response": f"answer-{call}", "final": False}
    for claims in (Claims("agent", "else"), Claims("agent", "acme", other)):
        with refused(NotFound, "unknown_response"):
            caller.post("/rewards", given, claims=claims)
    for claims in (Claims("agent", "acme"), Claims("agent", "acme", mine), EVERYTHING):
        assert caller.post("/rewards", given, claims=claims)["episode"] == mine
    rewards = caller.rig.state.episodes.known(mine).rewards.values()
    assert [(one.call, one.value) for one in rewards] == [(call, 1.0)] * 3
    with refused(BadRequest, None):
        caller.post("/rewards", {"value": 1.0})


def test_sealing_aborting_and_living(caller: Caller) -> None:
    episode = caller.rig.open()
    assert caller.post(f"/episodes/{episode}/heartbeat")["state"] == "open"
    ended = {"episode": episode, "state": "discarded", "reward": None, "reason": "no_reward"}
    assert caller.post(f"/episodes/{episode}/seal") == ended
    other = caller.rig.open()
    assert caller.post(f"/episodes/{other}/abort", {"reason": "tired"})["reason"] == "aborted"
    assert caller.rig.state.episodes[other].detail == "tired"


def test_an_episode_without_a_whole_call_says_why_its_calls_were_lost(caller: Caller) -> None:
    episode = caller.rig.open()
    (call,) = caller.rig.begin(episode)
    assert wants(caller.rig.state.episodes.known(episode), call)
    caller.rig.lose(episode, call, "no_token_ids")
    ended = {"state": "discarded", "reason": "incomplete_call", "detail": "no_token_ids"}
    rewarded = caller.post(f"/episodes/{episode}/rewards", {"value": 1.0, "id": "r"})
    assert rewarded == {"id": "r", "episode": episode, "reward": 1.0, **ended}
    assert ended.items() <= caller.ask("GET", f"/episodes/{episode}").items()


def test_an_empty_name_is_none(caller: Caller) -> None:
    episode = caller.post("/episodes", {"task": "", "model": ""})["episode"]
    opened = caller.rig.state.episodes[episode]
    assert (opened.opening.task, opened.opening.model) == (None, None)


def test_reading_an_episode(caller: Caller) -> None:
    episode = caller.rig.open()
    caller.rig.call(episode)
    (plain,) = caller.ask("GET", f"/episodes/{episode}")["calls"]
    (whole,) = caller.ask("GET", f"/episodes/{episode}", query={"tokens": "1"})["calls"]
    assert (plain["sampled_tokens"], whole["token_ids"]) == (1, [3])
    with pytest.raises(BadRequest):
        caller.ask("GET", f"/episodes/{episode}", query={"tokens": "yes"})
    lean = caller.ask("GET", f"/episodes/{episode}", query={"tokens": "timelines"})
    assert "token_ids" in next(lean["timelines"])
    assert "token_ids" not in next(lean["calls"])


def test_the_overview_and_pages_of_episodes(caller: Caller) -> None:
    names = [caller.post("/episodes", {"task": "t"})["episode"] for _ in range(3)]
    shown = caller.ask("GET", "/episodes", query={"task": "t", "limit": "2"})
    assert [item["episode"] for item in shown["episodes"]] == [names[2], names[1]]
    rest = caller.ask("GET", "/episodes", query={"task": "t", "limit": "2", "before": shown["next"]})
    assert ([item["episode"] for item in rest["episodes"]], "next" in rest) == ([names[0]], False)
    assert len(caller.ask("GET", "/overview")["quiet"]) == 3


def test_what_cannot_be_listed(caller: Caller) -> None:
    limits = ({"limit": wrong} for wrong in ("", "0", "x", "²", "1001", "9" * 5000))
    for query in (*limits, {"state": "asleep"}):
        with refused(BadRequest, param=next(iter(query))):
            caller.ask("GET", "/episodes", query=query)


# ---- the trainer


def test_from_lease_to_acknowledgement(caller: Caller) -> None:
    empty = caller.decide("POST", "/batches/lease", {"group_size": 1})
    assert (empty.status, empty.events, empty.body()) == (204, (), None)
    caller.rig.ready()
    batch = caller.post("/batches/lease", {"group_size": 1, "lease_s": 60.0})["batch"]
    lease = {"batch": batch, "state": "leased", "lease_until": caller.rig.at + 60.0}
    assert caller.post(f"/batches/{batch}/extend", {"lease_s": 90.0}) == lease | {"lease_until": caller.rig.at + 90.0}
    assert caller.post(f"/batches/{batch}/nack")["state"] == "returned"
    batch = caller.post("/batches/lease", {"group_size": 1})["batch"]
    (episode,) = caller.rig.state.batches[batch].episodes()
    ack = {"policy_version": 1, "filtered": {episode: "too_long"}}
    assert caller.post(f"/batches/{batch}/ack", ack)["state"] == "trained"
    assert (caller.rig.state_of(episode), caller.rig.state.episodes[episode].reason) == ("discarded", "filtered")


def test_a_lease_that_only_discards_is_no_batch_but_has_events(caller: Caller) -> None:
    caller.rig.announce(version=5)
    caller.rig.ready(version=1)
    answer = caller.decide("POST", "/batches/lease", {"group_size": 1, "max_staleness": 1})
    assert answer.status == 204
    assert len(caller.rig.run(answer.events)) == 1


def test_the_gate_and_the_policy(caller: Caller) -> None:
    (episode,) = (caller.rig.open(),)
    caller.rig.begin(episode)
    assert caller.post("/gate/close", {"reason": "weights"}) == {"gate": "closing", "in_flight": 1}
    announced = {"model": "m", "policy_version": 3, "upstreams": ["http://e"]}
    assert caller.post("/policy", {"model": "m", "version": 3, "upstreams": ["http://e"]}) == announced
    assert caller.post("/gate/open", {"policy_version": 3}) == {"gate": "open", "in_flight": 1}
    assert caller.ask("GET", "/status")["models"]["m"]["gate"] == "open"


# ---- evaluations


def test_an_evaluation_is_wanted_played_and_told(caller: Caller) -> None:
    caller.rig.announce("m", 7)
    agent = Claims("agent", "acme")
    assert caller.ask("GET", "/wanted", claims=agent) == {"eval": {}, "next": {}}
    asked = caller.post("/evaluations", {"model": "m", "episodes": 2}, claims=Claims("trainer"))
    name = asked["evaluation"]
    assert asked == {"evaluation": name, "policy_version": 7} and name.startswith("eval-")
    assert caller.ask("GET", "/wanted", claims=agent) == {"eval": {"m": 2}, "next": {"m": 0}}
    episode = caller.post("/episodes", {"eval": True, "model": "m"}, claims=agent)["episode"]
    assert caller.ask("GET", f"/episodes/{episode}", claims=agent)["evaluation"] == name
    caller.rig.call(episode, tenant="acme")
    caller.post(f"/episodes/{episode}/rewards", {"value": 0.5}, claims=agent)
    assert caller.ask("GET", "/wanted", claims=agent) == {"eval": {"m": 1}, "next": {"m": 1}}
    task = caller.ask("GET", f"/episodes/{episode}", claims=agent)["task"]
    assert caller.ask("GET", f"/evaluations/{name}") == {
        "evaluation": name, "model": "m", "policy_version": 7, "wanted": 2, "opened": 1, "done": 1, "rewards": [0.5],
        "mean_reward": 0.5, "lost": 0, "played": [{"task": task, "reward": 0.5, "tokens": 1.0}],
    }  # fmt: skip


# ---- plays


def test_a_play_belongs_to_its_tenant(caller: Caller) -> None:
    one, other = Claims("agent", "acme"), Claims("agent", "others")
    begun = caller.post("/plays", {"name": "d", "episodes": 2}, claims=one)
    assert begun == caller.ask("GET", "/plays/d", claims=one)
    opened = caller.post("/episodes", {"play": "d", "place": 0, "id": "mine"}, claims=one)
    assert opened["episode"] == "mine"
    assert caller.post("/episodes", {"play": "d", "place": 0, "id": "mine"}, claims=one) == opened
    assert caller.ask("GET", "/plays/d", claims=one)["opened"] == 1
    for method, body in (("GET", None), ("DELETE", None)):
        with pytest.raises(NotFound):
            caller.ask(method, "/plays/d", body, claims=other)
    assert caller.post("/plays", {"name": "d", "episodes": 3}, claims=other)["opened"] == 0
    assert caller.ask("DELETE", "/plays/d", claims=one)["opened"] == 1
    with pytest.raises(NotFound):
        caller.ask("GET", "/plays/d", claims=one)


def test_asking_for_an_evaluation_again_changes_nothing(caller: Caller) -> None:
    caller.rig.announce("m", 7)
    body = {"model": "m", "episodes": 2, "id": "mine"}
    first = caller.post("/evaluations", body)
    caller.rig.announce("m", 8)
    assert caller.post("/evaluations", body) == first == {"evaluation": "mine", "policy_version": 7}
    assert len([event for event in caller.rig.events if type(event).__name__ == "EvaluationWanted"]) == 1


def test_only_the_latest_evaluation_of_a_model_is_known(caller: Caller) -> None:
    for name in ("one", "two"):
        caller.post("/evaluations", {"model": "m", "episodes": 1, "id": name})
    assert caller.ask("GET", "/evaluations/two")["wanted"] == 1
    with refused(NotFound, "unknown_evaluation", match="or there is a later one of its model"):
        caller.ask("GET", "/evaluations/one")


# ---- the mix


def test_the_mix_is_set_shown_and_dropped(caller: Caller) -> None:
    shares = {"math": 0.5, "code": 0.5}
    shown = caller.ask("PUT", "/mix", {"shares": shares, "ahead": 3, "group_size": 4})
    assert shown == caller.ask("GET", "/mix")
    assert shown | {"lanes": {}} == {
        "shares": shares, "ahead": 3, "group_size": 4, "lane_wait_s": 30.0, "lanes": {},
    }  # fmt: skip
    assert caller.ask("GET", "/wanted") == {"eval": {}, "next": {}, "lanes": {"code": 8, "math": 8}, "other": 0}
    assert caller.ask("DELETE", "/mix")["shares"] == {}
    assert caller.ask("GET", "/wanted") == {"eval": {}, "next": {}, "lanes": {}, "other": 12}


def test_groups_are_flushed(caller: Caller) -> None:
    caller.rig.ready("math/1")
    assert caller.post("/groups/flush", {"lane": "none"}) == {"tasks": 0}
    assert caller.post("/groups/flush", {"lane": "math", "task": "math/1"}) == {"tasks": 1}
    assert caller.post("/groups/flush") == {"tasks": 0}
    assert caller.rig.lease(min_group_size=1) is not None


# ---- clients


def test_a_client_joins_beats_and_leaves(caller: Caller) -> None:
    answer = caller.post("/clients", {"name": "host", "revision": "r1", "lane": "math"})
    client = answer["client"]
    assert client.startswith("client-")
    assert answer == {"client": client, "name": "host", "ttl_s": 30.0, "state": "joined"}
    episode = caller.post("/episodes", {"client": client})["episode"]
    caller.rig.at += 7.0
    assert caller.post(f"/clients/{client}/beat") == answer
    (shown,) = caller.ask("GET", "/clients")["clients"]
    assert (shown["client"], shown["heard_at"], shown["episodes"]["open"]) == (client, caller.rig.at, 1)
    for _ in range(2):
        assert caller.ask("DELETE", f"/clients/{client}") == answer | {"state": "gone"}
    assert caller.rig.state.episodes.known(episode).reason == "client_gone"
    with refused(Conflict, "client_gone"):
        caller.post(f"/clients/{client}/beat")


def test_which_clients_are_reached(caller: Caller) -> None:
    mine = caller.post("/clients", {"name": "host"}, claims=Claims("agent", "acme"))["client"]
    other = caller.post("/clients", {"name": "host"}, claims=Claims("agent", "else"))["client"]
    for method, path in (("POST", f"/clients/{mine}/beat"), ("DELETE", f"/clients/{mine}")):
        with refused(Forbidden, "foreign_client"):
            caller.decide(method, path, claims=Claims("agent", "else"))
        with refused(NotFound, "unknown_client"):
            caller.decide(method, path.replace(mine, "nobody"))
        for claims in (Claims("agent", "acme"), EVERYTHING):
            assert caller.decide(method, path, claims=claims).status == 200
    for claims, expected in (
        (Claims("agent", "acme"), [mine]), (Claims("agent", "else"), [other]), (EVERYTHING, [mine, other]),
    ):
        assert [one["client"] for one in caller.ask("GET", "/clients", claims=claims)["clients"]] == expected
    with refused(Forbidden, "foreign_client"):
        caller.post("/episodes", {"client": mine}, claims=Claims("agent", "else"))


# ---- a trainer's key that names its model

PLANNER = Claims("trainer", model="planner")


def of_two_models(caller: Caller) -> tuple[str, str]:
    """The batch of the planner, and that of the coder."""
    for model in ("planner", "coder"):
        caller.rig.announce(model, 1)
        for _ in range(2):
            caller.rig.ready(model=model)
    batches = [caller.rig.lease(model=model) for model in ("planner", "coder")]
    assert batches[0] is not None and batches[1] is not None
    return batches[0], batches[1]


def test_a_trainers_key_that_names_its_model_is_refused_for_others(caller: Caller) -> None:
    own, other = of_two_models(caller)
    evaluation = caller.rig.evaluate("coder")
    asks: list[tuple[str, str, Any]] = [
        ("POST", "/batches/lease", {"model": "coder"}), ("POST", f"/batches/{other}/nack", {}),
        ("POST", f"/batches/{other}/extend", {}), ("POST", f"/batches/{other}/ack", {"policy_version": 1}),
        ("POST", "/gate/close", {"model": "coder"}), ("POST", "/gate/open", {"policy_version": 1, "model": "coder"}),
        ("POST", "/policy", {"model": "coder", "version": 9}),
        ("POST", "/evaluations", {"model": "coder", "episodes": 1}), ("PUT", "/mix", {"model": "coder"}),
        ("GET", f"/evaluations/{evaluation}", None), ("POST", "/groups/flush", {}), ("POST", "/groups/flush", None),
    ]  # fmt: skip
    for method, path, body in asks:
        with refused(Forbidden, "foreign_model", match="this key is for model 'planner' alone"):
            caller.ask(method, path, body, claims=PLANNER)
    assert caller.post(f"/batches/{own}/extend", {}, claims=PLANNER)["state"] == "leased"
    assert caller.post(f"/batches/{own}/ack", {"policy_version": 2}, claims=PLANNER)["state"] == "trained"
    with pytest.raises(NotFound):
        caller.post("/batches/none/extend", {}, claims=PLANNER)


def test_a_trainers_key_says_which_model_is_meant_where_none_is_named(caller: Caller) -> None:
    of_two_models(caller)
    for model in ("coder", "coder", "planner", "planner"):
        caller.rig.ready(model=model)
    leased = caller.post("/batches/lease", {}, claims=PLANNER)
    assert caller.rig.state.batches[leased["batch"]].model == "planner"
    assert caller.post("/gate/close", None, claims=PLANNER) == {"gate": "closed", "in_flight": 0}
    assert caller.rig.state.gates.shut() == {"planner"}
    caller.post("/gate/open", {"policy_version": 2}, claims=PLANNER)
    caller.post("/policy", {"version": 3}, claims=PLANNER)
    assert [caller.rig.state.weights.policy_version(model) for model in ("planner", "coder")] == [3, 1]
    with pytest.raises(BadRequest, match="JSON object"):
        caller.post("/gate/close", [], claims=PLANNER)
    assert caller.ask("GET", "/status", claims=PLANNER)["models"].keys() == {"planner", "coder"}


def test_a_model_in_a_query_has_a_thousand_characters(caller: Caller) -> None:
    with pytest.raises(BadRequest, match="model must have 0 to 1000 characters"):
        caller.ask("DELETE", "/mix", query={"model": "m" * 1001})


def test_a_trainers_key_shows_and_changes_the_mix_of_its_model(caller: Caller) -> None:
    of_two_models(caller)
    assert caller.ask("PUT", "/mix", {"ahead": 3, "shares": {"a": 1.0}}, claims=PLANNER)["ahead"] == 3
    assert caller.ask("GET", "/mix", claims=PLANNER)["shares"] == {"a": 1.0}
    assert caller.ask("DELETE", "/mix", claims=PLANNER)["shares"] == {}
    trainer = Claims("trainer")
    assert [
        caller.ask("GET", "/mix", query={"model": name}, claims=trainer)["ahead"] for name in ("planner", "coder")
    ] == [3, 0]
    for method in ("GET", "DELETE"):
        with pytest.raises(Forbidden):
            caller.ask(method, "/mix", query={"model": "coder"}, claims=PLANNER)
    for method in ("GET", "PUT", "DELETE"):
        with refused(Conflict, "several_models"):
            caller.ask(method, "/mix", {} if method == "PUT" else None, claims=trainer)


def test_places_that_were_given_back_are_told_from_a_place_on(caller: Caller) -> None:
    caller.post("/plays", {"name": "d", "episodes": 3})
    assert caller.ask("GET", "/plays/d")["given_back"] == []
    for after in ("x", "-", "1" * 10, "\u00b2"):
        with refused(BadRequest, param="after"):
            caller.decide("GET", "/plays/d", query={"after": after})
