"""A benchmark that Inspect plays and scores itself, while the model trains: each sample is an evaluation.

    AJET_BASE_URL=http://HOST:8484/v1 python integrations/with_inspect.py eval MY_TASK --model openai-api/ajet/policy

This is the command `inspect`, and needs an AJET_API_KEY. Its samples are the evaluations that a trainer of MODEL wants.
"""

import runpy
import sys
from contextvars import ContextVar
from importlib.metadata import version

if (here := version("inspect-ai")) != (tried := "0.3.285"):
    print(f"inspect-ai {here} is installed; this recipe was run with {tried}", file=sys.stderr)

from inspect_ai import hooks, model, scorer

from ajet_sdk import aio

OPEN, PLAYED = dict[str, aio.Episode](), ContextVar[str]("the episode that this sample is")


@hooks.hooks("ajet", "makes each sample an evaluation")
class Evaluations(hooks.Hooks):
    async def on_sample_attempt_start(self, data: hooks.SampleAttemptStart) -> None:
        if data.attempt == 1:
            name = model.get_model().name.split("/", 1)[1]  # openai-api/ajet/NAME
            OPEN[data.sample_id] = await aio.episode(f"{sys.argv[2]}/{data.summary.id}", model=name, eval=True)
        PLAYED.set(OPEN[data.sample_id].id)

    async def on_before_model_generate(self, data: hooks.BeforeModelGenerate) -> None:
        data.config.extra_headers = (data.config.extra_headers or {}) | {"X-AJet-Episode": PLAYED.get()}

    async def on_sample_end(self, data: hooks.SampleEnd) -> None:
        async with OPEN.pop(data.sample_id) as episode:  # one without a score is given up
            for score in list((data.sample.scores or {}).values())[:1]:
                await episode.reward(scorer.value_to_float()(score.value), note=str(score.value))


runpy.run_module("inspect_ai", run_name="__main__")
