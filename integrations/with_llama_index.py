"""A LlamaIndex agent with a tool. Nothing in it knows ajet.

    ajet run --task product/17x25 --repeat 8 --parallel 4 -- python integrations/with_llama_index.py 17 25

`OpenAILike` finds the proxy by OPENAI_API_BASE and its episode by OPENAI_API_KEY. The exit code becomes the reward.
(LlamaIndex's plain `OpenAI` takes only the names of OpenAI's own models.)
"""

import asyncio
import sys

from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def main(a: int, b: int) -> int:
    llm = OpenAILike(model="policy", is_chat_model=True, is_function_calling_model=True)
    agent = FunctionAgent(tools=[multiply], llm=llm, system_prompt="Use your tool, then answer with the number.")
    answer = str(await agent.run(f"What is {a} * {b}?"))
    print(answer)
    return 0 if str(a * b) in answer else 1


if __name__ == "__main__":
    sys.exit(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]))))
