"""The held-out items of `puzzles` as a benchmark of Inspect: the file of the variable PUZZLES has them."""

import json
import os
from pathlib import Path

from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.model import ChatMessageAssistant, ChatMessageUser, GenerateConfig
from inspect_ai.scorer import exact
from inspect_ai.solver import generate

SPEAKERS = {"user": ChatMessageUser, "assistant": ChatMessageAssistant}


@task  # type: ignore[untyped-decorator]
def puzzles() -> Task:
    told = json.loads(Path(os.environ["PUZZLES"]).read_text())
    shots = [SPEAKERS[one["role"]](content=one["content"]) for one in told["examples"]]
    rows = [
        Sample(id=place, input=[*shots, ChatMessageUser(content=item["question"])], target=item["answer"])
        for place, item in enumerate(told["items"])
    ]
    return Task(dataset=rows, solver=generate(), scorer=exact(), config=GenerateConfig(temperature=1.0, max_tokens=32))
