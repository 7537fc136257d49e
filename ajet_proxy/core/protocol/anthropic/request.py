"""A request of Anthropic's Messages API as the request of the engine's chat route that vLLM would make of it.

vLLM answers ``/v1/messages`` by such a translation of its own. The two must agree field by field, because the prompt's
tokens depend on it. Billing lines that Claude Code puts into system prompts are left out. The results of tools become
messages before the rest of their message. Arguments are written as Python's ``json.dumps`` writes them. Fields that
vLLM does not know (``metadata``, ``service_tier``, ``context_management``, ``cache_control``) mean nothing to it, nor
does ``is_error`` of a tool's result.

Some things the engine would drop without a word, although the model should see or use them. They are refused, with the
place they stand at: documents, files, search results, tools that Anthropic's servers run, and anything but text in a
system prompt.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NoReturn

from ajet_proxy.core.protocol.anthropic.template import EFFORTS, Template
from ajet_proxy.core.protocol.request import flag, integer, unread
from ajet_sdk.errors import BadRequest

BILLING = "x-anthropic-billing-header"
_AS_THEY_ARE = (
    "temperature", "top_p", "top_k", "cache_salt", "kv_transfer_params", "ec_transfer_params", "vllm_xargs",
    "chat_template_kwargs",
)
_NOWHERE = ("mcp_servers", "container", "output_format")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_MIN_BUDGET = 1024

Message = dict[str, Any]


def to_chat(asked: Mapping[str, Any], template: Template) -> dict[str, Any]:
    """The fields of the chat request; `BadRequest` for what cannot be carried."""
    for name in _NOWHERE:
        if asked.get(name):
            _refuse(name, "the engine has nothing of this kind")
    limit = integer(asked, "max_tokens")
    if limit is None or limit <= 0:
        _refuse("max_tokens", "must be a whole number above 0")
    model = _is(asked.get("model"), str, "model", "a text")
    if not model:
        _refuse("model", "must not be empty")
    chat = {
        "model": model, "messages": _messages(asked, template), "max_tokens": limit, "max_completion_tokens": limit
    }  # fmt: skip
    chat |= {name: asked[name] for name in _AS_THEY_ARE if asked.get(name) is not None}
    if (stops := asked.get("stop_sequences")) is not None:
        chat["stop"] = _is(stops, list, "stop_sequences", "a list of texts")
    if unread(asked, "stream"):
        _refuse("stream", "must be true or false")
    if flag(asked, "stream"):
        chat |= {"stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    return chat | _output(asked) | _thinking(asked, limit, template) | _tools(asked)


# --- messages


def _messages(asked: Mapping[str, Any], template: Template) -> list[Message]:
    messages = _is(asked.get("messages"), list, "messages", "a list")
    front = _system_texts(asked["system"], "system") if asked.get("system") else []
    out: list[Message] = []
    for place, message in enumerate(messages):
        where = f"messages.{place}"
        _is(message, dict, where, "an object")
        role, content = message.get("role"), message.get("content")
        if role not in ("user", "assistant", "system"):
            _refuse(f"{where}.role", "must be user, assistant or system")
        if role == "system":
            text = "".join(_system_texts(content, f"{where}.content", inline=True))
            if text and template.merges_system:
                front.append(text)
            elif text:
                out.append({"role": "system", "content": text})
        elif isinstance(content, str):
            out.append({"role": role, "content": content})
        else:
            blocks = _is(content, list, f"{where}.content", "a text or a list of blocks")
            said = _Said(role, out)
            for number, block in enumerate(blocks):
                said.add(block, f"{where}.content.{number}")
            out += said.message()
    return [{"role": "system", "content": "".join(front)}, *out] if front else out


def _system_texts(content: Any, where: str, *, inline: bool = False) -> list[str]:
    """The texts of a system prompt, without billing lines. In a prompt that is a single text these are looked for only
    if it is `inline`."""
    if isinstance(content, str):
        return [] if inline and content.startswith(BILLING) else [content]
    texts = []
    for place, block in enumerate(_is(content, list, where, "a text or a list of blocks")):
        at = f"{where}.{place}"
        if _is(block, dict, at, "an object").get("type") != "text":
            _refuse(at, f"a system prompt is text, and blocks of type {block.get('type')!r} are not")
        text = _optional(block, "text", at) or ""
        texts += [text] if text and not text.startswith(BILLING) else []
    return texts


class _Said:
    """Makes one message from a list of blocks, block by block. What tools gave goes into `out` at once."""

    def __init__(self, role: str, out: list[Message]) -> None:
        self._role = role
        self._out = out
        self._parts: list[Message] = []
        self._calls: list[Message] = []
        self._thoughts: list[str] = []

    def add(self, block: Any, where: str) -> None:
        kind = _is(block, dict, where, "an object").get("type")
        if kind == "text":
            text = _optional(block, "text", where)
            self._parts += [{"type": "text", "text": text}] if text else []
        elif kind == "image":
            self._parts.append(_image(block, where))
        elif kind == "tool_result":
            self._result(block, where)
        elif self._role == "assistant" and kind == "tool_use":
            self._calls.append(_call(block, len(self._calls), where))
        elif self._role == "assistant" and kind == "thinking":
            thought = _optional(block, "thinking", where)
            self._thoughts += [] if thought is None else [thought]
        elif self._role != "assistant" or kind != "redacted_thinking":
            _refuse(where, f"blocks of type {kind!r} cannot be carried to the engine in a message of the {self._role}")

    def message(self) -> list[Message]:
        """The message, if there is one."""
        message: Message = {"role": self._role}
        if self._thoughts:
            message["reasoning"] = "".join(self._thoughts)
        if self._calls:
            message["tool_calls"] = self._calls
        if self._parts:
            alone = self._parts[0]["text"] if len(self._parts) == 1 and self._parts[0]["type"] == "text" else None
            message["content"] = self._parts if alone is None else alone
        return [] if self._role == "user" and not self._parts else [message]

    def _result(self, block: Mapping[str, Any], where: str) -> None:
        content = block.get("content")
        if content is not None and not isinstance(content, str | list):
            _refuse(f"{where}.content", "must be a text or a list of blocks")
        if self._role == "assistant":
            self._parts.append({"type": "text", "text": f"Tool result: {content or ''}"})
            return
        answers = {"role": "tool", "tool_call_id": _optional(block, "tool_use_id", where) or ""}
        texts, images, references = _result_parts(content, f"{where}.content")
        self._out.append({**answers, "content": texts})
        if images:
            self._out.append({"role": "user", "content": images})
        if references:
            self._out.append({**answers, "content": references})


def _result_parts(content: str | list[Any] | None, where: str) -> tuple[str, list[Message], list[Message]]:
    """The texts, images and tool references that a tool gave."""
    if content is None or isinstance(content, str):
        return content or "", [], []
    texts, images, references = [], [], []
    for place, item in enumerate(content):
        at = f"{where}.{place}"
        kind = _is(item, dict, at, "an object").get("type")
        if kind == "text":
            texts.append(_is(item.get("text", ""), str, f"{at}.text", "a text"))
        elif kind == "image":
            images.append(_image(item, at))
        elif kind == "tool_reference":
            name = _optional(item, "tool_name", at) or _optional(item, "name", at)
            references += [{"type": "tool_reference", "name": name}] if name else []
        else:
            _refuse(at, f"results of type {kind!r} cannot be carried to the engine")
    return "\n".join(texts), images, references


def _image(block: Mapping[str, Any], where: str) -> Message:
    source = _is(block.get("source"), dict, f"{where}.source", "an object")
    kind = source.get("type", "base64")
    if kind == "url":
        url = _is(source.get("url"), str, f"{where}.source.url", "a text")
    elif kind == "base64":
        data = _is(source.get("data"), str, f"{where}.source.data", "a text")
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{data}"
    else:
        _refuse(f"{where}.source", f"images from a source of type {kind!r} cannot be carried to the engine")
    return {"type": "image_url", "image_url": {"url": url}}


def _call(block: Mapping[str, Any], place: int, where: str) -> Message:
    given = block.get("input")
    if given is not None:
        _is(given, dict, f"{where}.input", "an object")
    name = _optional(block, "name", where) or ""
    function = {"name": name, "arguments": json.dumps(given or {})}
    return {"id": _optional(block, "id", where) or f"call_{place}", "type": "function", "function": function}


# --- what the answer is to be


def _output(asked: Mapping[str, Any]) -> dict[str, Any]:
    """``output_config``: a schema to keep to, and how much effort to spend."""
    config = _is(asked.get("output_config") or {}, dict, "output_config", "an object")
    if config.get("task_budget"):
        _refuse("output_config.task_budget", "the engine has nothing of this kind")
    form = _is(config.get("format") or {}, dict, "output_config.format", "an object")
    out: dict[str, Any] = {}
    if form.get("type", "json_schema") != "json_schema":
        _refuse("output_config.format", f"answers of type {form['type']!r} cannot be asked of the engine")
    if schema := form.get("schema"):
        out["response_format"] = {"type": "json_schema", "json_schema": {"name": "json_schema", "schema": schema}}
    if (effort := config.get("effort")) is not None:
        if effort not in EFFORTS:
            _refuse("output_config.effort", f"must be one of {', '.join(EFFORTS)}")
        out["reasoning_effort"] = effort
    return out


def _thinking(asked: Mapping[str, Any], limit: int, template: Template) -> dict[str, Any]:
    thinking = asked.get("thinking")
    if thinking is None:
        return {}
    kind = _is(thinking, dict, "thinking", "an object").get("type")
    if kind == "disabled":
        return {"reasoning_effort": template.disabled_effort}
    if kind == "adaptive":
        return {}
    if kind != "enabled":
        _refuse("thinking.type", "must be enabled, disabled or adaptive")
    budget = thinking.get("budget_tokens")
    if type(budget) is not int or budget < _MIN_BUDGET:
        _refuse("thinking.budget_tokens", f"must be a whole number, at least {_MIN_BUDGET}")
    if budget >= limit:
        _refuse("thinking.budget_tokens", "must be less than max_tokens")
    return {"thinking_token_budget": budget}


def _tools(asked: Mapping[str, Any]) -> dict[str, Any]:
    """``tools`` and ``tool_choice``; vLLM's chat route takes no empty list of tools, and no choice without tools."""
    given = _is(asked.get("tools") or [], list, "tools", "a list")
    tools = [_tool(tool, f"tools.{place}") for place, tool in enumerate(given)]
    out: dict[str, Any] = {"tools": tools} if tools else {}
    choice = asked.get("tool_choice")
    if choice is None:
        return out | {"tool_choice": "auto" if given else None}
    kind = _is(choice, dict, "tool_choice", "an object").get("type")
    parallel = not choice.get("disable_parallel_tool_use")
    if kind == "tool":
        name = _is(choice.get("name"), str, "tool_choice.name", "the name of a tool")
        return out | {"tool_choice": {"type": "function", "function": {"name": name}}, "parallel_tool_calls": parallel}
    if kind not in (*_CHOICES,):
        _refuse("tool_choice.type", "must be auto, any, tool or none")
    told = None if kind == "auto" and not given else _CHOICES[kind]
    return out | {"tool_choice": told, "parallel_tool_calls": parallel}


def _tool(tool: Any, where: str) -> Message:
    _is(tool, dict, where, "an object")
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        kind = tool.get("type") or "custom"
        _refuse(where, f"a tool needs an input_schema; tools of type {kind!r} without one cannot run on this engine")
    function = {"name": _is(tool.get("name"), str, f"{where}.name", "a text"), "description": tool.get("description")}
    function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    function |= {name: tool[name] for name in ("strict", "defer_loading") if tool.get(name) is not None}
    return {"type": "function", "function": function}


# --- checks


def _refuse(where: str, what: str) -> NoReturn:
    raise BadRequest(f"{where}: {what}", code="invalid_field", param=where)


def _is(value: Any, kind: type, where: str, what: str) -> Any:
    """`value`, if it is of this `kind`; else `BadRequest`."""
    if not isinstance(value, kind):
        _refuse(where, f"must be {what}")
    return value


def _optional(block: Mapping[str, Any], name: str, where: str) -> str | None:
    """The text under `name`, if there is one."""
    value = block.get(name)
    return None if value is None else _is(value, str, f"{where}.{name}", "a text")
