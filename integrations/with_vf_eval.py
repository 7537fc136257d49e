"""`vf-eval` of verifiers 1.x as it is: it plays and scores, and each of its rollouts becomes an episode.

    AJET_PROXY_URL=http://127.0.0.1:8484 python integrations/with_vf_eval.py my-taskset-v1 -n 64 -r 8

The calls of a rollout announce its id as their session, which names the episode. As it ends, its score is in a file.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import ajet_sdk

if (here := version("verifiers")) != (tried := "0.4.0"):
    print(f"verifiers {here} is installed; this recipe was run with {tried}", file=sys.stderr)

folder = Path(tempfile.mkdtemp())
(written := folder / "run" / "traces.jsonl").parent.mkdir()
written.touch()
proxy = os.environ.get("AJET_PROXY_URL", "http://127.0.0.1:8484")
told = ["-m", "policy", "--client.base-url", f"{proxy}/v1", "--client.api-key-var", "AJET_API_KEY"]
told += ["--no-push", "--no-rich", "-o", str(folder), "--run.dir", "run"]
program = subprocess.Popen(["vf-eval", *sys.argv[1:], *told], stdout=subprocess.DEVNULL)
running, begun, log = True, "", written.open()
while running:
    running = program.poll() is None
    *lines, begun = (begun + log.read()).split("\n")
    for trace in (trace for line in lines for trace in json.loads(line)["traces"]):
        if trace["ok"]:
            score = sum(one["score"] * one["weight"] for one in trace["rewards"].values())
            ajet_sdk.reward(score, episode=trace["id"], note=json.dumps(trace["metrics"]))
        else:
            ajet_sdk.abort("the rollout failed", episode=trace["id"])
    time.sleep(0.5)
sys.exit(program.returncode)
