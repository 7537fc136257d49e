"""An AgentScope agent with a tool.

    ajet run --task product/17x25 --repeat 8 --parallel 4 -- python integrations/with_agentscope.py 17 25

Its client finds the proxy by OPENAI_BASE_URL. AgentScope takes the key, which names the episode, as an argument. The
exit code becomes the reward.
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


async def main(a: int, b: int) -> int:
    credential = OpenAICredential(api_key=os.environ["OPENAI_API_KEY"])
    agent = Agent(
        name="Calculator",
        system_prompt="Use your tool, then answer with the number.",
        model=OpenAIChatModel(credential, "policy"),
        toolkit=Toolkit(tools=[FunctionTool(multiply, is_read_only=True)]),
    )
    reply = await agent.reply(UserMsg("user", f"What is {a} * {b}?"))
    answer = reply.get_text_content()
    print(answer)
    return 0 if str(a * b) in answer else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]))))
