"""A small taskset of verifiers 1.x, as a user would write it: sums, with a reward and a metric."""

from collections.abc import Iterator

import verifiers.v1 as vf

__all__ = ["Sums"]


class SumData(vf.TaskData):
    answer: str


class Sum(vf.Task[SumData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(self.data.answer in trace.last_reply)

    @vf.metric
    async def words(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply.split()))


class Sums(vf.Taskset[Sum, vf.TasksetConfig]):
    def load(self) -> Iterator[Sum]:
        for a, b in ((17, 25), (3, 4)):
            yield Sum(SumData(name=f"{a}+{b}", prompt=f"What is {a} + {b}?", answer=str(a + b)), self.config.task)
