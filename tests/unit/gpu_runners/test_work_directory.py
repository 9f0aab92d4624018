"""What runners leave on the disk: nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from gpu_runners.parent.work_directory import PREFIX, WorkDirectory

RUNNER = """
import signal, sys
from pathlib import Path
from gpu_runners.parent.work_directory import WorkDirectory
mine = WorkDirectory(Path(sys.argv[1]))
(mine.path / "rows.jsonl").write_text("rows")
print(mine.path, flush=True)
signal.pause()
"""


def test_a_killed_runners_files_are_removed_and_a_living_ones_are_not(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUNNER, str(tmp_path)]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as killed,
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as living,
    ):
        assert killed.stdout is not None
        assert living.stdout is not None
        left, kept = (Path(each.stdout.readline().strip()) for each in (killed, living))
        killed.kill()
        killed.wait()
        assert (left / "rows.jsonl").exists()

        mine = WorkDirectory(tmp_path)

        assert not left.exists()
        assert (kept / "rows.jsonl").exists()
        living.kill()
    mine.remove()
    assert list(tmp_path.iterdir()) == [kept]


def test_what_only_has_the_name_of_a_work_directory_is_left_alone(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lock").touch()
    (tmp_path / f"{PREFIX}link").symlink_to(elsewhere)
    (tmp_path / f"{PREFIX}unlocked").mkdir()

    WorkDirectory(tmp_path).remove()

    assert (elsewhere / "lock").exists()
    assert (tmp_path / f"{PREFIX}unlocked").exists()
