"""Two agents on one model: a proposer answers, and a critic says whether the answer is right.

The header `X-AJet-Agent` says who calls. Each is rewarded apart: the proposer for a right answer, the critic for a
right judgment. So the critic earns its reward from a wrong answer, too.
"""

from __future__ import annotations

import json
import os
import re

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

import ajet_sdk

EXAMPLES = {
    "proposer": (("4 - 1 = ?", "3"), ("6 + 1 = ?", "7")),
    "critic": (("4 - 1 = 3. Is that right?", "yes"), ("6 + 1 = 9. Is that right?", "no")),
}
client = OpenAI()


def ask(agent: str, question: str) -> str:
    """Ask the model in the part of `agent`."""
    messages: list[ChatCompletionMessageParam] = []
    for asked, answered in EXAMPLES[agent]:
        messages += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    answer = client.chat.completions.create(
        model="policy",
        messages=[*messages, {"role": "user", "content": question}],
        max_tokens=8,
        temperature=1.0,
        extra_headers={"X-AJet-Agent": agent},
    )
    return answer.choices[0].message.content or ""


if __name__ == "__main__":
    task = json.loads(os.environ["AJET_TASK_JSON"])
    proposed = (re.findall(r"\d+", ask("proposer", f"{task['sum']} = ?")) or ["nothing"])[-1]
    judged = ask("critic", f"{task['sum']} = {proposed}. Is that right?")

    right = proposed == task["answer"]
    verdict = re.findall(r"yes|no", judged.lower())[:1]
    ajet_sdk.reward(float(right), agent="proposer", final=False)  # the final reward ends the episode, so it comes last
    ajet_sdk.reward(float(verdict == ["yes" if right else "no"]), agent="critic")
