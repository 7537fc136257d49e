"""A small environment of the API of verifiers before 0.4: the longest answer of a group earns one."""

import verifiers as vf
from datasets import Dataset


def longest(completions: list[vf.Messages]) -> list[float]:
    said = [len(str(completion[-1]["content"])) for completion in completions]
    return [float(length == max(said)) for length in said]


def load_environment() -> vf.Environment:
    rows = Dataset.from_list([{"question": "What is 17 + 25?", "answer": "42"}])
    return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[longest]))
