"""An agent on MetaGPT: its DataInterpreter writes Python, runs it in a notebook, and looks at the result.

    ajet run --task product/17x25 --repeat 8 --parallel 4 -- python integrations/with_metagpt.py 17 25

MetaGPT reads its configuration from a file when it is imported. This program writes that file from OPENAI_BASE_URL
(the proxy) and OPENAI_API_KEY (the episode). The exit code becomes the reward. The model's code runs here, so use a
container.
"""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path


def configure(root: Path) -> None:
    """Usage is not counted: it would be, with a tokenizer of another model that is fetched from the network."""
    llm = {
        "api_type": "openai",
        "base_url": os.environ["OPENAI_BASE_URL"],
        "api_key": os.environ["OPENAI_API_KEY"],
        "model": "policy",
        "temperature": 1.0,
        "calc_usage": False,
    }
    (root / "config").mkdir()
    (root / "config" / "config2.yaml").write_text(json.dumps({"llm": llm}))  # JSON is YAML
    os.environ["METAGPT_PROJECT_ROOT"] = str(root)


async def main(a: int, b: int) -> int:
    from metagpt.roles.di.data_interpreter import DataInterpreter, ExecuteNbCode

    agent = DataInterpreter(react_mode="react", max_react_loop=3)
    try:
        await agent.run(f"What is {a} * {b}? Print the number.")
    finally:
        await agent.execute_code.terminate()
    printed = [message.content for message in agent.working_memory.get_by_action(ExecuteNbCode)]
    return 0 if printed and str(a * b) in printed[-1] else 1


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as root:
        configure(Path(root))
        sys.exit(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]))))
