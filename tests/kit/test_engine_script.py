"""A script's rules against requests as agents send them."""

from __future__ import annotations

from typing import Any

from tests.kit import wire
from tests.kit.engine_script import Rule, reply
from tests.kit.engine_stub import CHAT, EngineStub

RULES = (
    Rule("sunny", tool="done", arguments={"ok": True}),
    Rule("sunny", "It is sunny."),
    Rule("weather", "Let me see. ", "look", {"at": "Paris"}),
)


def request(*messages: tuple[str, Any], tools: tuple[str, ...] = ()) -> dict[str, Any]:
    offered = [{"type": "function", "function": {"name": name, "parameters": {}}} for name in tools]
    return {"messages": [{"role": role, "content": said} for role, said in messages], "tools": offered}


def test_the_latest_message_that_a_rule_speaks_of_decides() -> None:
    asked = ("user", [{"type": "text", "text": "What is the weather?"}])
    assert reply(RULES, request(asked, ("user", "hurry"), tools=("look",))) == (
        'Let me see. <tool_call>\n{"name": "look", "arguments": {"at": "Paris"}}\n</tool_call>'
    )
    answered = request(asked, ("assistant", "sunny?"), ("tool", "sunny, 21"), ("user", "hurry"), tools=("look",))
    assert reply(RULES, answered) == "It is sunny."


def test_a_tool_that_is_not_offered_is_not_called() -> None:
    assert reply(RULES, request(("user", "weather"))) is None
    assert reply(RULES, request(("tool", "sunny"), tools=("done",))) is not None
    assert reply(RULES, request(("system", "weather"), ("assistant", "weather"), tools=("look",))) is None


async def test_the_stub_plays_it() -> None:
    async with EngineStub() as stub:
        script = [{"when": "weather", "tool": "look", "arguments": {"at": "Paris"}}]
        assert (await wire.send(f"{stub.url}/stub/script", body=script)).status == 200
        answer = await wire.send(stub.url + CHAT, body=request(("user", "weather"), tools=("look",)))
        call = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]
        assert call == {"name": "look", "arguments": '{"at": "Paris"}'}
