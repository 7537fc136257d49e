"""An agent that works out sums, with Python as its calculator. Nothing in it knows ajet.

It is written against the plain `openai` package. Where the model writes ``python(17 + 25)``, the agent works that out
and tells it the result. The small model of the quick start knows no tool calls, so the agent reads them in its text.
The last line of output is the reward: 1.0 if the model's last number is the answer, else 0.0, and 0.2 for a sum that
Python could work out.
"""

from __future__ import annotations

import ast
import json
import operator
import os
import re

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

EXAMPLES = (("5 + 2", 7), ("8 * 3", 24))
TURNS = 3
CALL = re.compile(r"python\((.*?)\)")
DOES = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}


def python(code: str) -> int:
    """Compute `code`, if it is a short sum of whole numbers; ValueError for anything else."""

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in DOES:
            return int(DOES[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(f"no sum: {code!r}")

    if len(code) > 40:
        raise ValueError("too long")
    try:
        return value(ast.parse(code.strip(), mode="eval").body)
    except SyntaxError as error:
        raise ValueError(f"no Python: {code!r}") from error


def play(question: str, answer: int) -> float:
    """The reward of one conversation."""
    client, bonus = OpenAI(), 0.0
    messages: list[ChatCompletionMessageParam] = [{"role": "system", "content": "Work out sums with python(SUM)."}]
    for code, result in EXAMPLES:
        messages += [
            {"role": "user", "content": f"{code} = ?"},
            {"role": "assistant", "content": f"python({code})"},
            {"role": "user", "content": f"Python says {result}."},
            {"role": "assistant", "content": str(result)},
        ]
    messages.append({"role": "user", "content": f"{question} = ?"})
    for _ in range(TURNS):
        answered = client.chat.completions.create(model="policy", messages=messages, max_tokens=16, temperature=1.0)
        said = answered.choices[0].message.content or ""
        called = CALL.search(said)
        if called is None:
            numbers = re.findall(r"-?\d+", said)
            return 1.0 if numbers and int(numbers[-1]) == answer else bonus
        try:
            told, bonus = f"Python says {python(called[1])}.", 0.2
        except ValueError as error:
            told = f"Python says: {error}."
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": told}]
    return bonus


if __name__ == "__main__":
    task = json.loads(os.environ["AJET_TASK_JSON"])
    print(play(task["question"], task["answer"]))
