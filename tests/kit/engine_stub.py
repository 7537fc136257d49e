"""A scripted inference engine: vLLM 0.31's HTTP dialect over a deterministic model, that can misbehave on demand.

    async with EngineStub(split_seed=1) as stub:
        ... f"{stub.url}/v1/chat/completions" ...

It says what vLLM would say (`engine_dialect`) from what a byte-level model would sample (`engine_tokens`). With
`split_seed` its bytes are cut at random places, in the middle of characters and of events, and written apart.
A `Fault` makes the next requests go wrong. In a program of its own (``python -m tests.kit.engine_stub --port P``)
faults are given as JSON to ``POST /stub/faults``, and one request can carry its own in the header ``x-stub-fault``;
``POST /stub/script`` takes the rules of a conversation (`engine_script`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from aiohttp import web

from tests.kit import engine_dialect as dialect
from tests.kit import engine_responses as responses
from tests.kit import engine_script
from tests.kit.engine_faults import Fault as Fault
from tests.kit.engine_faults import aborted, as_asked, finishes, refused, spoiled, without_ids
from tests.kit.engine_sampling import Sampling
from tests.kit.engine_tokens import MAX_MODEL_LEN, decode, encode, generate, render

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
WRITERS = {
    CHAT: (dialect.chat_body, dialect.chat_events),
    COMPLETIONS: (dialect.completion_body, dialect.completion_events),
    RESPONSES: (responses.body, responses.events),
}
Renderer = Callable[[Sequence[dict[str, Any]], Sequence[dict[str, Any]] | None], str]


@dataclass(slots=True)
class Received:
    """One request as the engine saw it. `cancelled`: the caller went away before the answer was complete."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any
    finished: bool = False
    cancelled: bool = False


@dataclass(slots=True)
class EngineStub:
    """`models` answer (empty: to any name); `delay_s` passes before each event; `group` tokens share an event. With
    `drift` the words of a history are read as other tokens than the model samples. `renderer` is the chat template;
    `label` is that of the weights, for an engine that can tell which of them sampled a token;
    `given_ids` is what happens to prompt ids: they are read, ignored or refused; `kept` are the messages behind each
    response, if the engine keeps any; `sampling` answers questions about its defaults; `deaf`: not even ``/health`` is
    answered."""

    models: Sequence[str] = ("stub",)
    split_seed: int | None = None
    delay_s: float = 0.0
    group: int = 1
    host: str = "127.0.0.1"
    port: int = 0
    keepalive_s: float = 5.0
    drift: bool = False
    renderer: Renderer = render
    given_ids: Literal["read", "ignored", "refused"] = "read"
    tokenizes: bool = True
    kept: dict[str, list[dict[str, Any]]] | None = None
    label: str | None = None
    sampling: Sampling = field(default_factory=Sampling)
    url: str = ""
    requests: list[Received] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    script: list[engine_script.Rule] = field(default_factory=list)
    paused: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    deaf: bool = False
    _count: int = 0
    _runner: web.AppRunner | None = None

    async def __aenter__(self) -> Self:
        self.paused.set()
        app = web.Application(client_max_size=1 << 30)
        for path in WRITERS:
            app.router.add_post(path, self._generate)
        for method, path, handler in self._plain_routes():
            app.router.add_route(method, path, handler)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, keepalive_timeout=self.keepalive_s, access_log=None, shutdown_timeout=0.1
        )
        await self._runner.setup()
        await web.TCPSite(self._runner, self.host, self.port).start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def llm_requests(self) -> list[Received]:
        """The requests to the generating routes, oldest first."""
        return [request for request in self.requests if request.path in WRITERS]

    async def stop_listening(self) -> Callable[[], int]:
        """Refuse new connections. Those that there are stay, and it tells how many they are."""
        runner: Any = self._runner
        await asyncio.gather(*(site.stop() for site in runner.sites))
        return lambda: len(runner.server.connections)

    # ---- generation

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        seen = await self._note(request)
        if self.sampling.concerns(request.path, seen.body):
            self.requests.pop()
            status, body = await self.sampling.answer(request.path, seen.body)
            return _json(body, status)
        fault = self._fault(request)
        try:
            if fault is not None and (answer := await self._broken(request, fault)) is not None:
                return answer
            await self.paused.wait()
            problem = self._refusal(seen.body, fault.kind if fault else "")
            response = problem or await self._answer(request, seen.body, fault)
            seen.finished = True
            return response
        except asyncio.CancelledError:
            seen.cancelled = True
            raise
        except ConnectionResetError:
            seen.cancelled = True
            return web.Response()  # goes nowhere: the connection is closed

    async def _note(self, request: web.Request) -> Received:
        raw = await request.read()
        try:
            body = json.loads(raw) if raw else None
        except ValueError:
            body = raw
        headers = {name.lower(): value for name, value in request.headers.items()}
        self.requests.append(Received(request.method, request.path, headers, body))
        return self.requests[-1]

    def _fault(self, request: web.Request) -> Fault | None:
        own = request.headers.get("x-stub-fault")
        if own:
            return Fault(**json.loads(own))
        if not self.faults:
            return None
        fault = self.faults[0]
        if fault.times <= 1:
            self.faults.pop(0)
        else:
            self.faults[0] = Fault(**(asdict(fault) | {"times": fault.times - 1}))
        return fault

    async def _broken(self, request: web.Request, fault: Fault) -> web.StreamResponse | None:
        """The answer of a fault that needs no generation, if `fault` is one."""
        if fault.kind == "silent_close":
            assert request.transport is not None
            request.transport.abort()
            raise ConnectionResetError
        if fault.kind == "hang":
            await asyncio.Event().wait()
        if fault.kind == "status":
            return _json(dialect.error(fault.status, "the engine is unwell", "InternalServerError"), fault.status)
        if fault.kind == "says":
            return web.Response(body=fault.body.encode(), content_type=fault.media)
        if fault.kind == "not_vllm":
            return web.Response(text="<html><body>It works!</body></html>", content_type="text/html")
        return None

    def _refusal(self, body: Any, kind: str) -> web.Response | None:
        if not isinstance(body, dict):
            message = "1 validation error:\n  {'type': 'json_invalid', 'loc': 'body.1', 'msg': 'JSON decode error'}"
            return _json(dialect.error(400, message, "Bad Request", "body.1"), 400)
        if (unknown := refused(body, kind)) is not None:
            return _json(dialect.error(400, f"Unknown parameter: {unknown}.", "BadRequestError", unknown), 400)
        model = body.get("model")
        if model is not None and self.models and model not in self.models:
            return _json(dialect.error(404, f"The model `{model}` does not exist.", "NotFoundError", "model"), 404)
        if body.get("kv_transfer_params") and self.given_ids == "refused":
            return _json(dialect.error(400, "Unknown parameter: kv_transfer_params.", "BadRequestError"), 400)
        for limit in ("max_tokens", "max_output_tokens"):
            if (body.get(limit) or 0) > MAX_MODEL_LEN:
                message = f"{limit}={body[limit]} cannot be greater than max_model_len={MAX_MODEL_LEN}."
                return _json(dialect.error(400, message, "BadRequestError", limit), 400)
        if (before := body.get("previous_response_id")) and before not in (self.kept or ()):
            message = f"Response with id '{before}' not found."
            return _json(dialect.error(404, message, "invalid_request_error", "response_id"), 404)
        return None

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: Fault | None) -> web.StreamResponse:
        kind = fault.kind if fault else ""
        asked = as_asked(body, kind)
        if request.path == RESPONSES:
            asked = responses.as_chat(asked, (self.kept or {}).get(body.get("previous_response_id") or "", ()))
        reply = self._reply(request.path, asked, kind)
        if request.path == RESPONSES and self.kept is not None and body.get("store") is not False:
            self.kept[reply.id] = responses.kept(reply)
        write_document, write_events = WRITERS[request.path]
        delay = fault.delay_s if fault and kind == "slow" else self.delay_s
        if not body.get("stream"):
            await asyncio.sleep(delay)
            whole = without_ids(write_document(reply), kind)
            return await self.write(request, [whole], fault, 0.0, "application/json", len(whole))
        events = spoiled(write_events(reply, self.group), kind, fault.after if fault else 0)
        return await self.write(request, events, fault, delay, "text/event-stream; charset=utf-8", None)

    def _reply(self, path: str, body: dict[str, Any], kind: str) -> dialect.Reply:
        self._count += 1
        exact = (body.get("kv_transfer_params") or {}).get("prompt_token_ids")
        if path == COMPLETIONS:
            prompts = prompts_of(body)
        else:
            prompts = [exact if exact and self.given_ids == "read" else self.rendered(body)]
        said = engine_script.reply(self.script, body)
        outputs = [[generate(prompt, body, i, said) for i in range(body.get("n") or 1)] for prompt in prompts]
        if kind == "abort":
            outputs = [[aborted(output) for output in choices] for choices in outputs]
        prefix = {CHAT: "chatcmpl-", COMPLETIONS: "cmpl-", RESPONSES: "resp_"}[path]
        name = f"{prefix}{self._count:016x}"
        return dialect.Reply(name, 1_795_000_000 + self._count, body, prompts, outputs, lambda: self.label)

    async def write(
        self, request: web.Request, parts: Sequence[bytes] | Iterator[bytes], fault: Fault | None, delay: float,
        content_type: str, length: int | None,
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": content_type, "server": "uvicorn"})
        if length is None:
            response.enable_chunked_encoding()
        else:
            response.content_length = length
        left = fault.after if fault and fault.kind in ("cut", "reset") else None
        await response.prepare(request)
        async for piece in self.pieces(parts, delay):
            if left is not None and len(piece) >= left:
                await response.write(piece[:left])
                assert request.transport is not None
                if fault and fault.kind == "reset":
                    never = struct.pack("ii", 1, 0)
                    request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, never)
                request.transport.close()
                raise ConnectionResetError
            left = left - len(piece) if left is not None else None
            await response.write(piece)
            if fault and fault.kind in ("late_done", "said_on") and finishes(piece):
                await self.go_on.wait()
        await response.write_eof()
        return response

    async def pieces(self, parts: Sequence[bytes] | Iterator[bytes], delay: float) -> AsyncIterator[bytes]:
        """`parts` with their delays, cut adversarially when the stub was told to."""
        dice = random.Random(f"{self.split_seed}/{self._count}")
        for part in parts:
            if delay:
                await asyncio.sleep(delay)
            if self.split_seed is None:
                yield part
                continue
            while part:
                size = dice.choice((1, 1, 2, 3, 7, 64, 1000))
                yield part[:size]
                part = part[size:]
                await asyncio.sleep(0)

    # ---- everything else that an engine serves

    def _plain_routes(self) -> Sequence[tuple[str, str, Any]]:
        return (
            ("GET", "/v1/models", self._models), ("GET", "/health", self._health), ("GET", "/version", self._version),
            ("POST", "/tokenize", self.tokenize), ("POST", "/detokenize", self._detokenize),
            ("POST", CHAT + "/render", self._generate), ("POST", COMPLETIONS + "/render", self._generate),
            ("POST", "/pause", self._pause), ("POST", "/resume", self.resume), ("GET", "/is_paused", self._is_paused),
            ("GET", "/weight_info", self._weight_info),
            ("POST", "/update_weight_version", self._label),
            ("POST", "/stub/faults", self._set_faults), ("POST", "/stub/script", self._set_script),
            ("GET", "/stub/requests", self._show_requests),
            ("POST", "/v1/embeddings", self._echo), ("POST", "/reset_prefix_cache", self._health),
        )  # fmt: skip

    async def _models(self, request: web.Request) -> web.Response:
        if request.headers.get("User-Agent") != "ajet-proxy":  # whose looks come when they come
            await self._note(request)
        card = {"object": "model", "created": 1_795_000_000, "owned_by": "vllm", "parent": None}
        names = self.models or ("stub",)
        cards = [{"id": name} | card | {"root": name, "max_model_len": MAX_MODEL_LEN} for name in names]
        return _json(dialect.dumps({"object": "list", "data": cards}))

    async def _health(self, request: web.Request) -> web.Response:
        if self.deaf:
            await asyncio.Event().wait()
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return _json(b'{"version":"0.31.0"}')

    async def tokenize(self, request: web.Request) -> web.Response:
        body = (await self._note(request)).body
        if not self.tokenizes:
            return _json(b'{"detail":"Not Found"}', 404)
        try:
            ids = self.rendered(body) if "messages" in body else encode(body["prompt"], merged=self.drift)
        except ValueError as error:
            return _json(dialect.error(400, str(error)), 400)
        known = {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": None}
        return _json(dialect.dumps(known))

    def rendered(self, body: dict[str, Any]) -> list[int]:
        return encode(self.renderer(body["messages"], body.get("tools")), merged=self.drift)

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = (await self._note(request)).body
        if not self.tokenizes:
            return _json(b'{"detail":"Not Found"}', 404)
        return _json(dialect.dumps({"prompt": decode(body["tokens"], skip_chat_marks=False)}))

    async def _echo(self, request: web.Request) -> web.Response:
        """A route under /v1/ that no proxy knows: the body comes back as it was received."""
        await self._note(request)
        return web.Response(body=await request.read(), content_type="application/json", headers={"x-engine": "stub"})

    async def _pause(self, request: web.Request) -> web.Response:
        await self._note(request)
        self.paused.clear()
        return _json(b'{"status":"paused"}')

    async def resume(self, request: web.Request) -> web.Response:
        await self._note(request)
        self.paused.set()
        return _json(b'{"status":"resumed"}')

    async def _is_paused(self, request: web.Request) -> web.Response:
        return _json(dialect.dumps({"is_paused": not self.paused.is_set()}))

    async def _weight_info(self, request: web.Request) -> web.Response:
        return _json(dialect.dumps({"weight_version": self.label or "default"}))

    async def _label(self, request: web.Request) -> web.Response:
        seen = await self._note(request)
        if self.label is not None:
            self.label = seen.body["new_version"]
        return _json(dialect.dumps({"success": True, "new_version": seen.body["new_version"]}))

    async def _set_faults(self, request: web.Request) -> web.Response:
        self.faults = [Fault(**item) for item in await request.json()]
        return _json(b"{}")

    async def _set_script(self, request: web.Request) -> web.Response:
        self.script = [engine_script.Rule(**item) for item in await request.json()]
        return _json(b"{}")

    async def _show_requests(self, request: web.Request) -> web.Response:
        return web.json_response([asdict(item) for item in self.requests if not isinstance(item.body, bytes)])


def prompts_of(body: dict[str, Any]) -> list[list[int]]:
    prompt = body.get("prompt") or ""
    if isinstance(prompt, str):
        return [encode(prompt)]
    if all(isinstance(item, int) for item in prompt):
        return [list(prompt)]
    return [encode(item) if isinstance(item, str) else list(item) for item in prompt]


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json", headers={"server": "uvicorn"})


async def _serve(arguments: argparse.Namespace) -> None:
    given = vars(arguments)
    async with EngineStub(given.pop("model") or (), delay_s=given.pop("delay"), **given) as stub:
        sys.stdout.write(f"engine stub ready on {stub.url}\n")
        sys.stdout.flush()
        await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="A scripted engine that speaks vLLM's dialect.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", action="append")
    parser.add_argument("--split-seed", type=int)
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each event")
    parser.add_argument("--drift", action="store_true", help="read some words as other tokens than it samples")
    asyncio.run(_serve(parser.parse_args()))


if __name__ == "__main__":
    main()
