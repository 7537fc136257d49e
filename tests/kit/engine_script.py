"""The words of the stub engine when a test has a story to tell: rules from the words of a conversation to a reply.

The latest message that a rule's `when` occurs in decides, and of its rules the first that can be followed; a program's
own prompts around it do not matter, nor how often it asks. A rule that calls a tool can only be followed by a request
that offers the tool, so that side calls without tools (titles, summaries) are answered by another rule or none.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.kit.engine_tokens import message_text, tool_text


@dataclass(frozen=True, slots=True)
class Rule:
    """`when` is looked for in what users and tools have said; the reply is `text`, then a call of `tool` if named."""

    when: str
    text: str = ""
    tool: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)


def reply(rules: Sequence[Rule], body: Mapping[str, Any]) -> str | None:
    """The text, with its tool call as the model would write it, that `rules` give to a chat request; None: no rule."""
    offered = {tool["function"]["name"] for tool in body.get("tools") or ()}
    for message in reversed(body.get("messages") or ()):
        if message["role"] in ("user", "tool"):
            said = message_text(message)
            for rule in rules:
                if rule.when in said and (not rule.tool or rule.tool in offered):
                    return rule.text + (tool_text(rule.tool, json.dumps(rule.arguments)) if rule.tool else "")
    return None
