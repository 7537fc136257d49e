"""Two AutoGen agents on two models: a solver with a tool, and a critic. Nothing in it knows ajet.

    ajet run --task product/17x25 --repeat 8 --agent-model solver=MODEL --agent-model critic=MODEL \\
        -- python integrations/with_autogen_team.py 17 25

Each agent asks for its own name as its model, so its calls are its own, and go to the model that it was given. Each
model learns from its agent's calls. The exit code becomes the reward of both.
"""

import asyncio
import sys

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_core.models import ModelFamily, ModelInfo
from autogen_ext.models.openai import OpenAIChatCompletionClient

ABLE = ModelInfo(
    vision=False, function_calling=True, json_output=True, structured_output=True, family=ModelFamily.UNKNOWN
)


async def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def model(name: str) -> OpenAIChatCompletionClient:
    return OpenAIChatCompletionClient(model=name, model_info=ABLE)


async def main(a: int, b: int) -> int:
    solver = AssistantAgent("solver", model_client=model("solver"), tools=[multiply], max_tool_iterations=4)
    critic = AssistantAgent("critic", model_client=model("critic"), system_message="Check it, then say the number.")
    team = RoundRobinGroupChat([solver, critic], max_turns=2)
    result = await team.run(task=f"What is {a} * {b}?")
    answer = result.messages[-1].to_text()
    print(answer)
    return 0 if str(a * b) in answer else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]))))
