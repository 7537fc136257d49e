"""An agent on OpenAI's Agents SDK. Nothing in it knows ajet.

    ajet run --task product/17x25 --repeat 8 --parallel 4 -- python integrations/with_openai_agents.py 17 25

Its client finds the proxy by OPENAI_BASE_URL and its episode by OPENAI_API_KEY. The exit code becomes the reward.
It uses `/v1/responses`. Tracing is off, because it would report to OpenAI.
"""

import sys

from agents import Agent, Runner, function_tool, set_tracing_disabled

set_tracing_disabled(True)


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def main(a: int, b: int) -> int:
    agent = Agent(
        name="Calculator",
        instructions="Use your tool, then answer with the number.",
        model="policy",
        tools=[multiply],
    )
    answer = Runner.run_sync(agent, f"What is {a} * {b}?").final_output
    print(answer)
    return 0 if str(a * b) in answer else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
