"""A Pydantic AI agent with a tool and a typed result. Nothing in it knows ajet.

    ajet run --task product/17x25 --repeat 8 --reward-from stdout -- python integrations/with_pydantic_ai.py 17 25

Its client finds the proxy by OPENAI_BASE_URL and its episode by OPENAI_API_KEY. It prints how close the answer came,
and `--reward-from stdout` takes the last number that a program prints.
"""

import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel

agent = Agent(OpenAIChatModel("policy"), instructions="Use your tool, then answer with the number.", output_type=int)


@agent.tool_plain
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def main(a: int, b: int) -> float:
    answer = agent.run_sync(f"What is {a} * {b}?").output
    return max(0.0, 1.0 - abs(answer - a * b) / (a * b))


if __name__ == "__main__":
    print(main(int(sys.argv[1]), int(sys.argv[2])))
