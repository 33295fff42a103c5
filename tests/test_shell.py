from __future__ import annotations

import subprocess
from pathlib import Path

from shell_lint import complaints

ROOT = Path(__file__).parents[1]


def test_shellcheck_has_nothing_to_say_of_the_project_s_own_scripts() -> None:
    folders = ("tools", "bench", "bench/faults", "bench/planner", "tests/cluster", "tests/cluster/machine")
    scripts = [ROOT / ".ci" / "run", *(path for folder in folders for path in sorted((ROOT / folder).glob("*.sh")))]
    assert len(scripts) > 10
    assert complaints(scripts) == ""


def test_a_mistake_is_found(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\ncd $1\nif [ $HOME == ]; then echo\n")
    assert "error" in complaints([script])


def test_commands_side_by_side_are_told_in_order_and_fail_where_one_does() -> None:
    both = [str(ROOT / "tools" / "side_by_side.sh"), "sleep 0.2; echo first", "echo second >&2"]
    ended = subprocess.run(both, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "first\nsecond\n")
    ended = subprocess.run([*both, "false"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "first\nsecond\n")
    shared = [both[0], *['mkdir "$SIDE_BY_SIDE/one" 2>/dev/null && echo mine'] * 2]
    assert subprocess.run(shared, capture_output=True, text=True, check=False).stdout == "mine\n"
