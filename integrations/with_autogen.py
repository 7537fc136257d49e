"""An AutoGen assistant with a tool. Nothing in it knows ajet.

    ajet run --task product/17x25 --repeat 8 --parallel 4 -- python integrations/with_autogen.py 17 25

Its client finds the proxy by OPENAI_BASE_URL and its episode by OPENAI_API_KEY. The exit code becomes the reward.
AutoGen knows OpenAI's models by name. For any other model the program must say what it can do.
"""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

ABLE = ModelInfo(
    vision=False, function_calling=True, json_output=True, structured_output=True, family=ModelFamily.UNKNOWN
)


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main(a: int, b: int) -> int:
    agent = AssistantAgent(
        "calculator",
        model_client=OpenAIChatCompletionClient(model="policy", model_info=ABLE),
        tools=[multiply],
        max_tool_iterations=4,
    )
    result = await agent.run(task=f"What is {a} * {b}?")
    answer = result.messages[-1].to_text()
    print(answer)
    return 0 if str(a * b) in answer else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]))))
