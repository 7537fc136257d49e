"""The picture of the owner's page in the README: a kept run's own data, served again, before vLLM with the run's model.

::

    make quickstart        # the run; its folder is kept in runs/
    .venv/bin/python -m tests.kit.pictures [RUN]    # RUN is the newest folder of runs/ if it is left out
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
import tempfile
from pathlib import Path

import tomllib

from tests.kit.browser import MISSING, browsing, find
from tests.kit.proxy_process import ProxyProcess
from tests.kit.source import ROOT
from tests.kit.vllm_process import vllm_server

PICTURE = ROOT / "docs" / "reports" / "page.png"
WIDTH, HEIGHT = 1100, 742  # down to the end of the curve
SHOWN = "document.querySelector('svg .dot.train') && !document.querySelector('main').innerText.includes('…\\n')"
"""The curve, and figures in all cells: rates need a second look at the counts."""


async def take(url: str, folder: Path) -> None:
    async with browsing(folder / "profile") as page:
        await page.look(width=WIDTH, height=HEIGHT)
        await page.open(f"{url}/ajet/")
        await page.until(SHOWN)
        await page.picture(PICTURE, whole=False)
        assert not page.complaints, page.complaints


def newest() -> Path:
    runs = sorted((ROOT / "runs").glob("*/proxy"), key=lambda data: data.stat().st_mtime)
    if not runs:
        sys.exit("no run is kept in runs/: make quickstart")
    return runs[-1].parent


def main() -> None:
    run = Path(sys.argv[1]) if len(sys.argv) > 1 else newest()
    if find() is None:
        sys.exit(MISSING)
    trainer = tomllib.loads((run / "trainer.toml").read_text())["trainer"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(run / "proxy", folder / "data")  # the run stays as it is
        with (
            vllm_server(Path(trainer["model"]), folder / "vllm.log", name=trainer["model_name"]) as engine,
            ProxyProcess(f"{trainer['model_name']}={engine}", folder / "data") as proxy,
        ):
            asyncio.run(take(proxy.url, folder))
            counts = proxy.report()["episodes"]
    size = PICTURE.stat().st_size
    sys.stdout.write(f"{PICTURE.relative_to(ROOT)}: {size} bytes, of {run}: {json.dumps(counts)}\n")


if __name__ == "__main__":
    main()
