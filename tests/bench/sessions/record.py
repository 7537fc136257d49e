"""Records the sessions of this folder again.

    .venv-engine/bin/python -m tests.bench.sessions.record quickstart
    .venv-engine/bin/python -m tests.bench.sessions.record opencode     needs `.ci/setup integrations node`
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from integrations.quickstart.guess import play
from integrations.quickstart.packaged_model import END_OF_TURN, FILE, packaged_weights
from integrations.quickstart.plan import Plan
from tests.bench.sessions import FOLDER, Call, blocks_of
from tests.integrations.stage import AJET, ENVIRONMENTS, Stage, python_of
from tests.kit.engine_script import Rule
from tests.kit.engine_tokens import decode
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.stub_process import stub_process

TUTORIAL = ROOT / "integrations/tutorials/coding"
TEST = "python3 -m unittest 2>&1 | tail -25"
WRONG = r"sed -i 's/    return ordered.*/    return sum(ordered) \/ len(ordered)/' stats.py"
MEND = (
    r"sed -i 's/    return ordered.*/    middle = len(ordered) \/\/ 2\n"
    r"    return (ordered[middle] + ordered[-middle - 1]) \/ 2/' stats.py"
)
LOOK = ("I'll start with a look at the repository.", "ls -la && cat stats.py")
BELIEVE = ("Let me read the tests, to see what is expected of an even number of values.", "cat test_stats.py")
REPRODUCE = ("I'll run the tests before I change anything, so that I know which ones fail today.", TEST)
REPAIR = ("For an even number of values the two in the middle count: position n // 2 and its mirror image.", MEND)
AGAIN = ("Now the tests again.", TEST)
SHOW = ("Only `median` should have changed. Let me look at the file once more.", "cat -n stats.py")
MISTAKE = ("The mean of the values should do for an even number of them.", WRONG)
REGRET = ("That is the mean of all values, which is not the median. I take the two in the middle instead.", MEND)
STORIES = (
    (LOOK, REPRODUCE, REPAIR, AGAIN, SHOW),
    (LOOK, BELIEVE, MISTAKE, AGAIN, REGRET, AGAIN),
    (REPRODUCE, LOOK, REPAIR, AGAIN),
    (BELIEVE, LOOK, REPAIR, SHOW, AGAIN),
)
"""What the model says and runs in each turn of an episode, before it says that it is done."""


def rules_of(story: tuple[tuple[str, str], ...]) -> list[Rule]:
    """What a command prints at its end tells the scripted engine how far it is."""
    marks = ["Mend it.", *(f"turn {turn} over" for turn in range(1, len(story) + 1))]
    turns = [
        Rule(mark, said, "bash", {"command": f"{command}; echo {after}", "description": "Works on stats.py"})
        for mark, after, (said, command) in zip(marks, marks[1:], story, strict=False)
    ]
    return [Rule(marks[-1], "`median` now takes the mean of the two values in the middle."), *reversed(turns)]


def opencode(tokenizer: Any) -> tuple[str, list[list[Call]]]:
    with (
        tempfile.TemporaryDirectory() as name,
        stub_process("--model", "policy") as engine,
        ProxyProcess(engine, Path(name) / "proxy") as proxy,
    ):
        theatre, tasks = Stage(engine, proxy.url), Path(name) / "tasks.jsonl"
        line = (TUTORIAL / "tasks.jsonl").read_text().splitlines()[0]
        tasks.write_text(f"{line}\n")
        path = f"{Path(python_of('node')).parent}:{ENVIRONMENTS}/node/node_modules/.bin:{os.environ['PATH']}"
        env = {"PATH": path, "HOME": name, "XDG_CONFIG_HOME": f"{name}/.config", "TMPDIR": name}
        for story in STORIES:
            theatre.script(rules_of(story))
            play_it = (*AJET, "run", "--tasks", str(tasks), "--", "sh", str(TUTORIAL / "agent.sh"))
            theatre.run(*play_it, env=env, limit_s=1800)
        records = reversed(theatre.episodes(json.loads(line)["id"]))
        episodes = [[counted(call, tokenizer) for call in record["calls"]] for record in records]
    package = ENVIRONMENTS / "node/node_modules/opencode-ai/package.json"
    return f"opencode {json.loads(package.read_text())['version']}", episodes


def counted(call: dict[str, Any], tokenizer: Any) -> Call:
    """A call in the tokens of `tokenizer`, instead of the scripted engine's, which are bytes."""
    prompt, sampled = (
        tokenizer.encode(decode(call[name], skip_chat_marks=False), add_special_tokens=False)
        for name in ("prompt_token_ids", "token_ids")
    )
    return [*prompt, *sampled], len(sampled)


def quickstart(tokenizer: Any) -> tuple[str, list[list[Call]]]:
    """The first step: the model has learned nothing yet."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(packaged_weights(), gguf_file=FILE, dtype=torch.float32)
    plan, episodes = Plan(), []
    torch.set_num_threads(1)
    torch.manual_seed(plan.seed)
    end = tokenizer.convert_tokens_to_ids(END_OF_TURN)
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": 6}

    def game(secret: int) -> list[Call]:
        calls: list[Call] = []

        def ask(messages: list[dict[str, str]]) -> str:
            prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
            ids = torch.tensor([prompt])
            [tokens] = model.generate(
                ids, attention_mask=torch.ones_like(ids), eos_token_id=end, pad_token_id=end, **how
            ).tolist()
            calls.append((tokens, len(tokens) - len(prompt)))
            said = [token for token in tokens[len(prompt) :] if token != end]
            return str(tokenizer.decode(said, clean_up_tokenization_spaces=False))

        play(secret, ask)
        return calls

    for secret in plan.secrets()[0]:
        episodes += [game(secret) for _ in range(plan.group_size)]
    return "integrations.quickstart.guess", episodes


def main(name: str) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(packaged_weights(), gguf_file=FILE)
    program, episodes = opencode(tokenizer) if name == "opencode" else quickstart(tokenizer)
    found = {"program": program, "tokenizer": "SmolLM2-135M-Instruct", "episodes": blocks_of(episodes)}
    (FOLDER / f"{name}.json").write_text(f"{json.dumps(found, separators=(',', ':'))}\n")


if __name__ == "__main__":
    main(sys.argv[1])
