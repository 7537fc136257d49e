"""Two AgentScope agents on two models: a solver with a tool, and a critic.

    ajet run --task product/17x25 --repeat 8 --agent-model solver=MODEL --agent-model critic=MODEL \\
        -- python integrations/with_agentscope_team.py 17 25

Each agent asks for its own name as its model, so its calls are its own, and go to the model that it was given. Each
model learns from its agent's calls. The exit code becomes the reward of both.
"""

import asyncio
import os
import sys

from agentscope.agent import Agent
from agentscope.credential import OpenAICredential
from agentscope.message import UserMsg
from agentscope.model import OpenAIChatModel
from agentscope.tool import FunctionTool, Toolkit


def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


def model(name: str) -> OpenAIChatModel:
    return OpenAIChatModel(OpenAICredential(api_key=os.environ["OPENAI_API_KEY"]), name)


async def main(a: int, b: int) -> int:
    tools = Toolkit(tools=[FunctionTool(multiply, is_read_only=True)])
    solver = Agent(name="Solver", system_prompt="Use your tool, then answer.", model=model("solver"), toolkit=tools)
    critic = Agent(name="Critic", system_prompt="Check it, then say the number.", model=model("critic"))
    question = f"What is {a} * {b}?"
    draft = await solver.reply(UserMsg("user", question))
    reply = await critic.reply(UserMsg("user", f"{question} Somebody says: {draft.get_text_content()}"))
    answer = reply.get_text_content()
    print(answer)
    return 0 if str(a * b) in answer else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]))))
