"""Your own LangGraph graph, run for many tasks in one process, each time as an episode.

    AJET_PROXY_URL=http://127.0.0.1:8484 python integrations/with_langgraph.py 17x25 12x12

One process has many episodes, so the environment cannot name them. The model gets the episode's address and key
instead. The reward is what `agent` returns. An exception aborts only its own episode.
"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

import ajet_sdk


@tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def agent(task: str, episode: ajet_sdk.Episode) -> float:
    a, b = map(int, task.split("x"))
    model = ChatOpenAI(model="policy", base_url=episode.base_url, api_key=episode.api_key).bind_tools([multiply])

    def think(state: MessagesState) -> MessagesState:
        return {"messages": [model.invoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("think", think)
    graph.add_node("tools", ToolNode([multiply]))
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", tools_condition)
    graph.add_edge("tools", "think")
    end = graph.compile().invoke({"messages": [{"role": "user", "content": f"What is {a} * {b}?"}]})
    return 1.0 if str(a * b) in end["messages"][-1].text else 0.0


if __name__ == "__main__":
    results = ajet_sdk.run(agent, sys.argv[1:], repeat=2, parallel=4)
    print(results.table())
    sys.exit(1 if results.failures else 0)
