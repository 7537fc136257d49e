"""A LangGraph graph of two agents on two models, a solver and a critic, run for many tasks in one process.

    AJET_PROXY_URL=http://127.0.0.1:8484 python integrations/with_langgraph_team.py solver=MODEL critic=MODEL 17x25

Each agent asks for its own name as its model, so its calls are its own, and go to the model that it was given. Each has
a reward of its own, and each model learns from its agent's calls.
"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import ajet_sdk


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def agents(task: str, episode: ajet_sdk.Episode) -> None:
    a, b = map(int, task.split("x"))
    solver, critic = (
        ChatOpenAI(model=name, base_url=episode.base_url, api_key=episode.api_key) for name in ("solver", "critic")
    )

    def solve(state: MessagesState) -> MessagesState:
        return {"messages": [solver.bind_tools([multiply]).invoke(state["messages"])]}

    def check(state: MessagesState) -> MessagesState:
        question, draft = state["messages"][0].text, state["messages"][-1].text
        return {"messages": [critic.invoke(f"{question} Somebody says: {draft}")]}

    graph = StateGraph(MessagesState)
    for name, node in (("solve", solve), ("tools", ToolNode([multiply])), ("check", check)):
        graph.add_node(name, node)
    graph.add_edge(START, "solve")
    graph.add_conditional_edges("solve", tools_condition, {"tools": "tools", END: "check"})
    graph.add_edge("tools", "solve")
    end = graph.compile().invoke({"messages": [{"role": "user", "content": f"What is {a} * {b}?"}]})
    draft, answer = (message.text for message in end["messages"][-2:])
    episode.reward(1.0 if str(a * b) in draft else 0.0, agent="solver", final=False)
    episode.reward(1.0 if str(a * b) in answer else 0.0, agent="critic")


if __name__ == "__main__":
    members = dict(word.split("=", 1) for word in sys.argv[1:3])
    results = ajet_sdk.run(agents, sys.argv[3:], repeat=2, parallel=4, members=members)
    print(results.table())
    sys.exit(1 if results.failures else 0)
