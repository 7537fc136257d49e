from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ajet_trainer import cli
from tests.kit.steps import processor_s
from tests.trainer.test_checkpoints import checkpoint


def status(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        cli.main(list(words))
    return int(exit_.value.code or 0)


def test_help_lists_every_key_and_imports_nothing_heavy() -> None:
    script = (
        "import sys\nfrom ajet_trainer.cli import main\ntry: main(['run', '--help'])\nexcept SystemExit: pass\n"
        "print([m for m in ('torch', 'verl', 'ray', 'numpy', 'httpx') if m in sys.modules], file=sys.stderr)"
    )
    runs = [
        processor_s(lambda: subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True))
        for _ in range(3)
    ]
    done, _ = runs[0]
    assert "no_signal" in done.stdout
    assert done.stderr.strip() == "[]"
    assert min(worked for _, worked in runs) < 0.5


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert status("--version") == 0
    assert capsys.readouterr().out.startswith("ajet-trainer 0.")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ((), 2, "ajet-trainer: Missing command. (see 'ajet-trainer --help')"),
        (("run",), 2, "ajet-trainer run: Missing option '--config'. (see 'ajet-trainer run --help')"),
        (("walk",), 2, "ajet-trainer: No such command 'walk'"),
        (("run", "--config", "/nowhere.toml"), 2, "ajet-trainer: cannot read /nowhere.toml: No such file or directory"),
    ],
)
def test_bad_usage_is_one_line_and_status_2(
    words: tuple[str, ...], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status(*words) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.parametrize("full", [(".phase.json.new",), (".phase.json.new", "verl.log")])
def test_a_disk_that_is_full_is_one_line(full: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "run").mkdir()
    for name in full:
        (tmp_path / "run" / name).symlink_to("/dev/full")
    (tmp_path / "c.toml").write_text(f'[trainer]\nrun_dir = "{tmp_path}/run"\nmodel = "{tmp_path}/model"\n')
    argv = [sys.executable, "-m", "ajet_trainer.cli", "run", "--config", str(tmp_path / "c.toml")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "ajet-trainer: [Errno 28] No space left on device" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_rollback_is_of_a_run_that_has_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for step in (2, 4, 6):
        checkpoint(tmp_path / "checkpoints", step)
    holder = subprocess.Popen(
        [sys.executable, "-c", "import sys, pathlib\nfrom ajet_trainer.run_folder import hold\n"
         f"held = hold(pathlib.Path({str(tmp_path)!r}))\nprint('held', flush=True)\nsys.stdin.read()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert holder.stdout is not None and holder.stdin is not None and holder.stdout.readline()
    assert status("rollback", str(tmp_path), "--step", "2") == 2
    assert f"a trainer is at work in {tmp_path}: stop it first" in capsys.readouterr().err
    holder.communicate()
    assert status("rollback", str(tmp_path), "--step", "3") == 2
    assert "those that are: 2, 4, 6" in capsys.readouterr().err
    assert status("rollback", str(tmp_path), "--step", "2") == 0
    assert capsys.readouterr().out == f"{tmp_path} goes on from step 2; set aside in {tmp_path}/set_aside_1: 4 and 6\n"
    assert (tmp_path / "set_aside_1" / "global_step_6").is_dir()
    assert status("rollback", str(tmp_path), "--step", "2") == 0
    assert capsys.readouterr().out == f"{tmp_path} goes on from step 2; it is the last\n"


def test_what_is_set_aside_never_meets_what_was_before(tmp_path: Path) -> None:
    """Also where somebody has removed an earlier folder, or has made one of another name."""
    (tmp_path / "set_aside_2_copy").mkdir()
    checkpoint(tmp_path / "checkpoints", 2)
    for number in (1, 2, 3):
        checkpoint(tmp_path / "checkpoints", 4)
        assert status("rollback", str(tmp_path), "--step", "2") == 0
        assert (tmp_path / f"set_aside_{number}" / "global_step_4").is_dir()
        if number == 2:
            shutil.rmtree(tmp_path / "set_aside_1")
