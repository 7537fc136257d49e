"""One stub of a vLLM, as far as a trainer asks it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.kit.http_server import Heard, JsonServer, Say

UNLOAD, LOAD = "/v1/unload_lora_adapter", "/v1/load_lora_adapter"
RANK = "LoRA rank 16 is greater than max_lora_rank 8."


class StubEngine:
    """It serves the model `base`, and `adapters` by their names and folders. What it was asked stands in `asked`.

    A path in `status` is answered so, with -1 never. It `lacks` some routes. After a 500 it closes its connection
    without a word, as uvicorn does. The first `deaf` wishes to go on get an error, and the first `busy` wishes to
    forget find a call in flight. It takes no adapter of a folder that it `refuses`. Before each request it lets `watch`
    look.
    """

    def __init__(self, base: str = "policy", root: str = "m") -> None:
        self.base, self.root, self.length, self.version = base, root, 2048, "default"
        self.asked: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        """The requests for completions."""
        self.status: dict[str, int] = {}
        self.lacks: set[str] = set()
        self.key = ""
        self.frozen, self.deaf, self.busy = False, 0, 0
        self.adapters: dict[str, str] = {}
        self.refuses: Callable[[str], bool] = lambda folder: False
        self.watch: Callable[[], None] = lambda: None
        self.meet: threading.Barrier | None = None
        self.dtype: str | None = None
        self.quantization: str | None = None
        self.ids: tuple[int, ...] = (8, 9, 10)
        self.logprobs = (-1.0, -2.0, -3.0)
        self.server = JsonServer(self._respond)
        self.url = self.server.url

    def _respond(self, heard: Heard) -> Say | None:
        status, answer = self.heard(heard.path, heard.body or {}, heard.headers.get("authorization"))
        if status < 0:
            time.sleep(60)
            return None
        return Say(status, answer, breaks=status == 500)

    def heard(self, path: str, body: dict[str, Any], shown: str | None) -> tuple[int, Any]:
        """The status and the answer of a request that has `shown` a key."""
        self.watch()
        self.asked.append(path)
        path = path.partition("?")[0]
        if self.key and shown != f"Bearer {self.key}":
            return 401, {"error": "Unauthorized"}
        if path in self.lacks:
            return 404, {"detail": "Not Found"}
        if self.meet is not None and path == "/collective_rpc":
            self.meet.wait()
        if (status := self.status.get(path, 200)) != 200:
            return status, None
        return self.answer(path, body)

    def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/pause":
            self.frozen = True
        elif path == "/resume":
            self.deaf -= 1
            if self.deaf >= 0:
                return 500, {"error": "not now"}
            self.frozen = False
        elif path == "/is_paused":
            return 200, {"is_paused": self.frozen}
        elif path == "/reset_prefix_cache":
            self.busy -= 1
            return 200, {"success": self.busy < 0}
        elif path == "/v1/models":
            own = {"id": self.base, "root": self.root, "parent": None, "max_model_len": self.length}
            adapters = [{"id": name, "root": root, "parent": self.base} for name, root in self.adapters.items()]
            return 200, {"data": [own, *adapters]}
        elif path == "/update_weight_version":
            self.version = body["new_version"]
        elif path == "/weight_info":
            return 200, {"weight_version": self.version}
        elif path == "/server_info":
            told = {"vllm_config": {"model_config": {"dtype": self.dtype, "quantization": self.quantization}}}
            return (500, {"error": {"message": "no"}}) if self.dtype is None else (200, told)
        elif path == "/v1/completions":
            return self.complete(body)
        elif path in (LOAD, UNLOAD):
            return self.take(path, body)
        return 200, {}

    def complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        self.bodies.append(body)
        if body["model"] not in (self.base, *self.adapters):
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        told = {"token_logprobs": list(self.logprobs)}
        return 200, {"choices": [{"token_ids": list(self.ids), "logprobs": told}]}

    def take(self, path: str, body: dict[str, str]) -> tuple[int, Any]:
        if "lora_name" not in body or (path == LOAD and body["lora_name"] in self.adapters):
            return 400, {"error": {"message": "no"}}
        if path == UNLOAD:
            del self.adapters[body["lora_name"]]
        elif self.refuses(body["lora_path"]):
            return 500, {"error": {"message": RANK}}
        else:
            self.adapters[body["lora_name"]] = body["lora_path"]
        return 200, "done"


@contextmanager
def stub_engine(base: str = "policy", root: str = "m") -> Iterator[StubEngine]:
    made = StubEngine(base, root)
    with made.server:
        yield made
