"""A LangChain agent with a tool. Nothing in it knows ajet.

    ajet run --task product/17x25 --repeat 8 --parallel 4 -- python integrations/with_langchain.py 17 25

`ChatOpenAI` finds the proxy by OPENAI_API_BASE or OPENAI_BASE_URL and its episode by OPENAI_API_KEY. The exit code
becomes the reward.
"""

import sys

from langchain.agents import create_agent
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def main(a: int, b: int) -> int:
    agent = create_agent(
        ChatOpenAI(model="policy"), tools=[multiply], system_prompt="Use your tool, then answer with the number."
    )
    result = agent.invoke({"messages": [{"role": "user", "content": f"What is {a} * {b}?"}]})
    answer = result["messages"][-1].text
    print(answer)
    return 0 if str(a * b) in answer else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
