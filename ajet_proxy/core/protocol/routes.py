"""The engine's routes that agents may use, and the dialects of those that are captured. No control route is among them,
however it is spelled.
"""

from __future__ import annotations

from urllib.parse import unquote

from ajet_proxy.core.protocol.anthropic.messages import MESSAGES
from ajet_proxy.core.protocol.chat import CHAT
from ajet_proxy.core.protocol.completions import COMPLETIONS
from ajet_proxy.core.protocol.dialect import Dialect
from ajet_proxy.core.protocol.responses.dialect import RESPONSES

CAPTURED: dict[str, Dialect] = {dialect.path: dialect for dialect in (CHAT, COMPLETIONS, MESSAGES, RESPONSES)}
"""The routes whose POST requests are captured."""
COPIED = (*CAPTURED, "/v1/models", "/chat/completions")
"""The routes that may stand behind a base URL that was copied from a request."""
RENAMED = frozenset((
    "/tokenize", "/detokenize", MESSAGES.path + "/count_tokens", RESPONSES.path + "/input_tokens",
    CHAT.path + "/render", COMPLETIONS.path + "/render",
))  # fmt: skip
"""The routes that say something of a model's tokens: within an episode, of the model that its calls go to."""
GENERATING = {
    "/inference/v1/generate": f"{COMPLETIONS.path}, which takes a list of token ids as prompt",
    "/generate": f"{COMPLETIONS.path}, which takes a list of token ids as prompt",
    "/v1/chat/completions/batch": f"{CHAT.path}, once for each conversation",
    "/cohere/v2/chat": CHAT.path,
    "/invocations": f"{CHAT.path} or {COMPLETIONS.path}",
}
"""Other routes that generate, and what agents use in their place: these would pass without a record of what was
sampled."""
OPEN_ROUTES = frozenset(("/health", "/tokenize", "/detokenize", "/version"))
CONTROL_ROUTES = frozenset((
    "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/pause", "/resume", "/sleep", "/wake_up", "/abort_requests",
    "/collective_rpc", "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache", "/release_kv_cache_memory",
    "/init_weight_transfer_engine", "/start_weight_update", "/start_draft_weight_update", "/update_weights",
    "/finish_weight_update", "/update_weight_version", "/start_profile", "/stop_profile", "/scale_elastic_ep",
    "/fault_tolerance/apply",
))  # fmt: skip
"""Routes of vLLM 0.31 that change the engine (those of ``vllm/entrypoints/serve``), which nobody can allow."""


def open_route(written: str, allowed: tuple[str, ...] = ()) -> str | None:
    """The engine's route that a path as `written` means, without a slash at its end; None if agents may not use it.
    They may also use what is `allowed`."""
    path = unquote(written)
    plain = _plain(path)
    passes = path.startswith("/v1/") and plain not in GENERATING
    is_open = (plain in OPEN_ROUTES or plain in allowed or passes) and plain not in CONTROL_ROUTES
    disguised = any(part in (".", "..") for part in path.split("/")) or "//" in path or "\\" in path
    return plain if is_open and not disguised and path.isprintable() else None


def described(written: str) -> str:
    """A path as `written`, for an error that says there is no such route, and what was most likely meant."""
    path = unquote(written)
    if not path:
        return "/e/EPISODE" + _IN_V1  # in whose place a key may stand
    plain = _plain(path)
    if plain in GENERATING:
        return f"{path[:200]}, whose calls would not be recorded: use {GENERATING[plain]}"
    if f"/v1{plain}" in (*CAPTURED, "/v1/models"):
        return path[:200] + _IN_V1
    return path[:200] + (": the owner's page is /ajet/" if plain == "/" else "")


_IN_V1 = ": the base URL of an OpenAI client ends in /v1"


def _plain(path: str) -> str:
    return path.rstrip("/") or "/"
