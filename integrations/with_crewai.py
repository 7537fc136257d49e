"""A crew of one CrewAI agent with a tool. Nothing in it knows ajet.

    ajet run --task product/17x25 --repeat 8 --parallel 4 -- python integrations/with_crewai.py 17 25

CrewAI finds the proxy by OPENAI_BASE_URL and its episode by OPENAI_API_KEY. The exit code becomes the reward.
"""

import sys

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def main(a: int, b: int) -> int:
    calculator = Agent(
        role="Calculator",
        goal="Work out products",
        backstory="You trust your tool more than your head.",
        llm=LLM(model="policy", custom_openai=True),
        tools=[multiply],
    )
    question = Task(description=f"What is {a} * {b}?", expected_output="The number", agent=calculator)
    answer = Crew(agents=[calculator], tasks=[question]).kickoff().raw
    print(answer)
    return 0 if str(a * b) in answer else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
