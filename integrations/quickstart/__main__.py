"""The command of the quick start: options in, a trained model and its figures out.

    .venv-engine/bin/python -m integrations.quickstart --help
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import click

from ajet_sdk.output import run_command
from integrations.quickstart.plan import LEARNING_RATE, Plan
from integrations.quickstart.programs import QuickstartError
from integrations.quickstart.screen import Screen

STEPS, PROOF_STEPS = 30, 12


@click.command(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--steps", type=click.IntRange(min=6), help=f"Training steps. [default: {STEPS}, for a proof {PROOF_STEPS}]"
)
@click.option("--seed", type=int, default=0, show_default=True, help="Choose the secrets. A proof uses --seeds.")
@click.option("--lr", type=click.FloatRange(min=0), default=LEARNING_RATE, show_default=True, help="Learning rate.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True,
              help="Where to train and to serve: cuda is one GPU for both, with GPU builds of torch and vLLM.")
@click.option("--model", type=click.Path(exists=True, path_type=Path, file_okay=False),
              help="Folder of another chat model. [default: SmolLM2-135M-Instruct, which is downloaded]")
@click.option("--run-dir", type=click.Path(path_type=Path, file_okay=False),
              help="Folder for all output. [default: a new folder in runs/; for a proof runs/proof]")  # fmt: skip
@click.option("--keep", is_flag=True, help="Keep the last checkpoint (1.6 GB; of MODEL six times its size).")
@click.option("--proof", is_flag=True, help="Repeat with several seeds, and compare with a control that cannot learn.")
@click.option("--seeds", default="3", show_default=True, help="Number of seeds of a proof, or a list such as 0,1,2.")
def quickstart(
    steps: int | None, seed: int, lr: float, device: str, model: Path | None, run_dir: Path | None, keep: bool,
    proof: bool, seeds: str,
) -> None:
    """Train a small model on this machine.

    An unmodified agent plays guess-the-number with SmolLM2-135M-Instruct, through ajet-proxy and vLLM. verl trains on
    the games. It takes about ten minutes on two cores without a GPU, and writes reward.png, episodes.html and
    summary.json. With --proof it takes about half an hour. An interrupted proof repeats no finished run.
    """
    screen = Screen(sys.stdout.isatty())
    plan = Plan(
        steps=steps or (PROOF_STEPS if proof else STEPS), seed=0 if proof else seed, lr=lr, device=device,
        model=str(model.absolute()) if model else "",
    )
    if proof:
        _prove(plan, seeds, run_dir or Path("runs/proof"), keep, screen)
    else:
        folder = run_dir or Path("runs") / time.strftime("quickstart-%Y%m%d-%H%M%S")
        _run(plan, folder, keep, screen)


def _run(plan: Plan, folder: Path, keep: bool, screen: Screen) -> None:
    from integrations.quickstart import figures, session

    if folder.exists() and any(folder.iterdir()):
        raise QuickstartError(f"{folder} is not empty: give a new --run-dir")
    screen.line(f"Quick start in {folder}: {plan.steps} steps of {plan.episodes_per_step} episodes, seed {plan.seed}")
    summary = session.one_run(plan, folder, keep=keep, screen=screen)
    screen.line()
    screen.line("What this run shows:")
    for line in figures.lines(summary):
        screen.line(line)
    screen.line()
    screen.line(f"  {folder / 'reward.png'}\n  {folder / 'episodes.html'}\n  {folder / 'summary.json'}")


def _prove(plan: Plan, seeds: str, folder: Path, keep: bool, screen: Screen) -> None:
    from integrations.quickstart import proof

    numbers = proof.parse_seeds(seeds)
    screen.line(
        f"Proof in {folder}: {len(numbers)} seeds, each with learning rate {plan.lr:g} and 0, {plan.steps} steps"
    )
    found = proof.prove(plan, numbers, folder, keep=keep, screen=screen)
    screen.line()
    screen.line((folder / "proof.md").read_text(encoding="utf-8"))
    screen.line(f"  {folder / 'proof.md'}\n  {folder / 'proof.png'}")
    if not found.holds:
        raise click.exceptions.Exit(1)


if __name__ == "__main__":
    run_command(quickstart, "quickstart", "`make setup` installs it", interrupted=("stopped", 0))
