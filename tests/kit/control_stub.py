"""The control routes an agent uses, in memory, on a thread: what the SDK is tested against without a proxy.

`ControlStub.evaluations` are what is wanted, one after the other: the next begins when somebody asks and nothing is
wanted any more. After the last, asking is a 404, which ends a run that waits.

`ControlStub.clients` are those that have joined. Requests about them are heard and have faults if `hears_clients`.

`ControlStub.plays` are the data sets that are being played, and `lanes` what is wanted of each lane (under ``""`` of
any other). It is None where no lane is held back.

`ControlStub.faults` holds what happens to coming requests before or instead of being served, one each: an HTTP answer
(`Say`), a connection closed before (`drop`) or after (`lose`) the request took effect. `ControlStub.says` is asked for
one of these for each request, and `ControlStub.on_open` is called with each episode that is opened.
"""

from __future__ import annotations

import ssl
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ajet_proxy.core.ledger.plays import Play
from ajet_proxy.core.trajectory.rewards import EpisodeReward, total
from ajet_sdk import routes
from ajet_sdk.bodies import parse, to_json
from ajet_sdk.errors import AjetError, Conflict, Forbidden, NotFound
from tests.kit.http_server import Heard, JsonServer
from tests.kit.http_server import Say as Say

DROP = "drop"
LOSE = "lose"


class ControlStub:
    """``with ControlStub() as stub: stub.url``; `port` lets one come up late, or again, where another was."""

    def __init__(self, port: int = 0) -> None:
        self.faults: deque[str | Say] = deque()
        self.says: Callable[[Heard], str | Say | None] = lambda heard: None
        self.on_open: Callable[[dict[str, Any]], object] = lambda record: None
        self.heard: list[Heard] = []
        self.episodes: dict[str, dict[str, Any]] = {}
        self.evaluations: deque[dict[str, int]] = deque()
        self.wanted: dict[str, int] = {}
        self.clients: dict[str, dict[str, Any]] = {}
        self.hears_clients = False
        self.next: dict[str, int] = {}
        self.plays: dict[str, Play] = {}
        self.lanes: dict[str, int] | None = None
        self._lock = threading.Lock()
        self._server = JsonServer(self._respond, port)
        self.url = self._server.url

    def __enter__(self) -> ControlStub:
        self._server.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.__exit__()

    def speak_tls(self, context: ssl.SSLContext) -> None:
        """HTTPS from the next connection on. A handshake that fails is nobody's error."""
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def count(self, method: str, ending: str) -> int:
        """The number of requests that came to a path with this ending."""
        return sum(heard.method == method and heard.path.split("?")[0].endswith(ending) for heard in self.heard)

    def _respond(self, heard: Heard) -> Say | None:
        fault = self._next_fault(heard)
        if fault == LOSE:
            self.answer(heard)
        return None if isinstance(fault, str) else fault or self.answer(heard)

    def _next_fault(self, heard: Heard) -> str | Say | None:
        with self._lock:
            if not self.hears_clients and heard.path.startswith(f"{routes.PREFIX}/clients"):
                return None
            self.heard.append(heard)
            return self.faults.popleft() if self.faults else self.says(heard)

    def answer(self, heard: Heard) -> Say:
        try:
            with self._lock:
                return Say(200, self._serve(heard))
        except AjetError as error:
            return Say(error.status, error.to_body())

    def _serve(self, heard: Heard) -> Any:
        path = heard.path.split("?")[0].removeprefix(routes.PREFIX)
        parts = path.strip("/").split("/")
        if path == "/status":
            return self.status()
        if path == "/overview":
            raise Forbidden("an admin's key is needed")
        if path == "/wanted":
            return self._wanted()
        if parts[0] == "clients":
            return self._of_clients(heard, parts)
        if parts[0] == "plays":
            return self._of_plays(heard, parts)
        if path == "/episodes":
            return self.open_episode(parse(routes.OpenEpisode, heard.body))
        if parts[0] != "episodes" or parts[1] not in self.episodes:
            raise NotFound(f"no such episode: {parts[1:2]}", code="episode_not_found")
        record = self.episodes[parts[1]]
        if heard.method == "GET":
            return record
        return getattr(self, f"_{parts[2]}")(record, heard.body)

    def status(self) -> dict[str, Any]:
        states = [record["state"] for record in self.episodes.values()]
        counts = {state: states.count(state) for state in routes.EPISODE_STATES}
        model = {"policy_version": 3, "gate": "open", "upstreams": ["http://127.0.0.1:1"]}
        episodes = {"opened": len(states), **counts}
        return {"version": "0", "models": {"stub": model}, "episodes": episodes, "groups": {"ready": 0}}

    def _of_clients(self, heard: Heard, parts: list[str]) -> dict[str, Any]:
        if parts == ["clients"] and heard.method == "GET":
            return {"clients": list(self.clients.values())}
        if parts == ["clients"]:
            body = parse(routes.Join, heard.body)
            same = [one for one in self.clients.values() if (one["name"], one["state"]) == (body.name, "joined")]
            name = body.id or f"client-{len(self.clients)}"
            if name not in self.clients:
                if same and not body.replaces:
                    raise Conflict("there is one of this name", code="client_exists")
                for one in same:
                    one["state"] = "gone"
                self.clients[name] = {"client": name, "state": "joined", "beats": 0, **to_json(body)}
        else:
            name = parts[1]
        known = self.live(name) if heard.method == "POST" else self.clients[name]
        known["beats"] += parts[-1] == "beat"
        known["state"] = "gone" if heard.method == "DELETE" else "joined"
        return known

    def live(self, name: str) -> dict[str, Any]:
        """The client of this name, or what one hears that is gone."""
        if name not in self.clients:
            raise NotFound(f"no client {name}", code="unknown_client")
        if self.clients[name]["state"] == "gone":
            raise Conflict(f"client {name} is gone", code="client_gone")
        return self.clients[name]

    def _of_plays(self, heard: Heard, parts: list[str]) -> dict[str, Any]:
        if heard.method == "POST":
            body = parse(routes.Play, heard.body)
            return self.plays.setdefault(body.name, Play("", body.name, body.episodes, 0)).to_json()
        if parts[1] not in self.plays:
            raise NotFound(f"no play {parts[1]}", code="unknown_play")
        told = self.plays[parts[1]].to_json(int(heard.path.partition("?after=")[2] or -1))
        if heard.method == "DELETE":
            del self.plays[parts[1]]
        return told

    def _wanted(self) -> dict[str, Any]:
        if self.plays or self.lanes is not None:
            lanes = dict(self.lanes or {})
            told = {} if self.lanes is None else {"other": lanes.pop("", 1), "lanes": lanes}
            return {"eval": {}, "next": {}} | told
        answer = {model: missing for model, missing in self.wanted.items() if missing > 0}
        if not answer:
            if not self.evaluations:
                raise NotFound("no more is wanted")
            self.wanted = self.evaluations.popleft()
            self.next = dict.fromkeys(self.wanted, 0)
        return {"eval": answer, "next": {model: self.next[model] for model in answer}}

    def open_episode(self, body: routes.OpenEpisode) -> dict[str, Any]:
        if body.client is not None:
            self.live(body.client)
        if body.play is not None:
            if body.play not in self.plays:
                raise NotFound(f"no play {body.play}", code="unknown_play")
            play, place = self.plays[body.play], body.place or 0
            if not play.has_free(place):
                raise Conflict("another has that place", code="place_taken")
            play.begin(place)
        elif body.place is not None and body.place != self.next.get(body.model or ""):
            raise Conflict("another has that place", code="place_taken")
        if body.eval and body.model in self.wanted:
            self.wanted[body.model] -= 1
            self.next[body.model] += 1
        name = f"ep-{len(self.episodes)}"
        self.episodes[name] = {
            "episode": name, "task": body.task, "state": "open", "model": body.model, "eval": body.eval,
            "agent": body.agent, "rewards": [], "reward": None, "identified_by": "key", "opened_at": 0.0, "calls": [],
            "client": body.client, "revision": body.revision, "play": body.play, "place": body.place,
            "judged": body.judged, "graded": body.graded,
        }
        self.on_open(self.episodes[name])
        base_url = f"{self.url}/v1"
        env = {"OPENAI_BASE_URL": base_url, "AJET_EXTRA": "from-the-proxy"}
        return {"episode": name, "base_url": base_url, "api_key": f"ajet-{name}", "policy_version": 3, "env": env}

    def _rewards(self, record: dict[str, Any], body: Any) -> dict[str, Any]:
        reward = parse(routes.Reward, body)
        for earlier in record["rewards"]:
            if earlier["id"] == reward.id:
                if earlier["value"] != reward.value:
                    raise Conflict("another reward has this id")
                return record
        if record["state"] == "discarded":
            raise Conflict(f"the episode is discarded: {record['reason']}")
        scope = {"call": reward.call, "agent": reward.agent, "model": reward.model}
        record["rewards"].append({"id": reward.id, "value": reward.value, "final": reward.final} | scope)
        record["reward"] = total(
            EpisodeReward(note=None, at=0.0, **{"call": None, "agent": None, **item}) for item in record["rewards"]
        )
        if reward.final and not record["graded"]:
            self.move(record, "ready")
        return record

    def _seal(self, record: dict[str, Any], _body: Any) -> dict[str, Any]:
        if record["state"] != "open":
            raise Conflict(f"the episode is {record['state']}")
        if record["judged"] and not record["rewards"]:
            self.move(record, "sealed")
        else:
            self._end(record, None if record["rewards"] else "no_reward")
        return record

    def _abort(self, record: dict[str, Any], body: Any) -> dict[str, Any]:
        abort = parse(routes.Abort, body)
        if record["state"] != "open":
            raise Conflict(f"the episode is {record['state']}")
        self._end(record, "aborted")
        record["detail"] = abort.reason
        record["cause"] = abort.cause
        return record

    def _heartbeat(self, record: dict[str, Any], _body: Any) -> dict[str, Any]:
        if record["state"] != "open":
            raise Conflict(f"the episode is {record['state']}")
        return record

    def _end(self, record: dict[str, Any], reason: str | None) -> None:
        self.move(record, "discarded" if reason else "ready", reason)

    def discard(self, episode: str, reason: str) -> None:
        """The proxy discards an episode by itself."""
        with self._lock:
            self.move(self.episodes[episode], "discarded", reason)

    def move(self, record: dict[str, Any], state: str, reason: str | None = None) -> None:
        if record.get("play") in self.plays and record["state"] != state:
            awaits = "awaiting" if state == "sealed" else state
            self.plays[record["play"]].moved(record["place"], record["state"], awaits, reason)
        record["state"], record["reason"] = state, reason
