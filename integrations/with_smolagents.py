"""A smolagents agent that calls tools. Nothing in it knows ajet.

    ajet run --task product/17x25 --repeat 8 --parallel 4 -- python integrations/with_smolagents.py 17 25

`OpenAIModel` finds the proxy by OPENAI_BASE_URL and its episode by OPENAI_API_KEY. The exit code becomes the reward.
"""

import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the one
        b: the other
    """
    return a * b


def main(a: int, b: int) -> int:
    agent = ToolCallingAgent(tools=[multiply], model=OpenAIModel("policy"), max_steps=4)
    answer = str(agent.run(f"What is {a} * {b}?"))
    print(answer)
    return 0 if str(a * b) in answer else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
