from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from shardway.hardware.command import run_command, run_commands
from shardway.hardware.probe import NvidiaState, count_amd, has_device_files, parse_column, parse_list, read_nvidia

LIST = """\
GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
GPU 1: NVIDIA A100 (special) 40GB (UUID: GPU-6d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77)
"""
SLICED = """\
GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-c7c6e2b1)
  MIG 1g.10gb     Device  0: (UUID: MIG-c6d4f1ef)
  MIG 1g.10gb     Device  1: (UUID: MIG-cba663e8)
"""
SCRIPT = """#!/bin/sh
case "$1" in
 -L) {listed};;
 *driver_version) echo 535.104.05; echo 535.104.05;;
 *volatile.total) echo 0; echo 3;;
 *memory.used) echo 4; echo '[N/A]';;
 *throttle_reasons.active) echo 0x0000000000000048; echo 0x1;;
 *remapped_rows.pending) {pending};;
 *) echo 'Field is not a valid field to query.'; exit 2;;
esac
"""
TWO = f"cat <<'EOF'\n{LIST}EOF\n"
LIMITS = (0.3, 3.0, 30.0)
"""Seconds, ever more, until all is told but what hangs: a busy machine may not start a program in the first of them."""
SLACK_S = 30.0
"""How much longer a look may take than its limit; what hangs does so for minutes."""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Puts an nvidia-smi on PATH that answers so."""

    def put(listed: str, pending: str = "echo No; echo No") -> None:
        program = tmp_path / "nvidia-smi"
        program.write_text(SCRIPT.format(listed=listed, pending=pending))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return put


def test_lists() -> None:
    assert parse_list(LIST) == (("NVIDIA A100-SXM4-40GB", "NVIDIA A100 (special) 40GB"), 0)
    names, slices = parse_list(SLICED)
    assert (len(names), slices) == (1, 2)
    assert NvidiaState("ok", names=names, slices=slices).visible == 2
    assert parse_list("No devices were found\n") == ((), 0)


def test_columns_are_numbers_where_they_can_be() -> None:
    assert parse_column(" 1\n\n0x48 \n[N/A]\n") == ("1", "0x48", "[N/A]")
    assert NvidiaState("ok", columns={"a": ("1", "0x48", "[N/A]", "2.5")}).numbers("a") == [1.0, 72.0, 2.5]
    assert NvidiaState("ok").numbers("a") == []


def test_a_field_that_is_unknown_voids_no_other(install) -> None:  # type: ignore[no-untyped-def]
    install(TWO)
    state = read_nvidia(60.0)
    assert (state.answer, state.visible, state.columns["driver"]) == ("ok", 2, ("535.104.05", "535.104.05"))
    assert state.numbers("ecc_volatile") == [0.0, 3.0]
    assert state.numbers("memory_used_mib") == [4.0]
    assert "compute_mode" not in state.columns
    assert "throttle_now" not in state.columns


@pytest.mark.parametrize(
    ("listed", "pending", "answer", "said"),
    [
        ("sleep 300", "", "hung", "nvidia-smi -L did not answer within {} s"),
        (TWO, "sleep 300", "hung", "nvidia-smi lists the GPUs, but did not tell rows_pending within {} s"),
        (
            "echo 'NVML: Driver/library version mismatch'; exit 18",
            "",
            "failed",
            "NVML: Driver/library version mismatch",
        ),
        ("exit 9", "", "failed", "nvidia-smi -L ended with 9"),
        ("echo 'No devices were found'", "", "ok", "No devices were found"),
    ],
)
def test_a_driver_that_is_ill(install, listed: str, pending: str, answer: str, said: str) -> None:  # type: ignore[no-untyped-def]
    install(listed, pending or "echo No")
    for limit_s in LIMITS:
        start = time.monotonic()
        state, took_s = read_nvidia(limit_s), time.monotonic() - start
        if state.said == said.format(f"{limit_s:g}"):
            break
    assert (state.answer, state.said) == (answer, said.format(f"{limit_s:g}"))
    assert took_s < 2 * limit_s + SLACK_S


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert read_nvidia(1.0) == NvidiaState("absent")


def test_amd_devices_are_nodes_with_simd_units(tmp_path: Path) -> None:
    for index, simd in enumerate((0, 440, 440)):
        folder = tmp_path / f"sys/class/kfd/kfd/topology/nodes/{index}"
        folder.mkdir(parents=True)
        (folder / "properties").write_text(f"cpu_cores_count 0\nsimd_count {simd}\nmem_banks_count 1\n")
    assert count_amd(tmp_path) == 2
    assert count_amd(tmp_path / "none") == 0
    (tmp_path / "dev").mkdir()
    assert not has_device_files(tmp_path)
    (tmp_path / "dev/nvidia0").touch()
    assert has_device_files(tmp_path)


def test_commands_run_side_by_side_and_their_children_end_with_them(tmp_path: Path) -> None:
    child = tmp_path / "child"
    commands = [
        ("sh", "-c", f"sleep 300 & echo $! >{child}; sleep 300"),
        ("sh", "-c", "echo out; echo err >&2; exit 3"),
        ("no-such-program",),
    ]
    for limit_s in LIMITS:
        start = time.monotonic()
        (hung, done, gone), took_s = run_commands(commands, limit_s), time.monotonic() - start
        if not done.hung and child.exists() and child.read_text():
            break
    assert hung.hung
    assert not hung.ok
    assert (done.code, done.out, done.err, done.first_line, done.hung) == (3, "out\n", "err\n", "err", False)
    assert gone.missing
    assert took_s < limit_s + SLACK_S
    assert not is_alive(int(child.read_text()))
    assert run_command(("true",), 60.0).ok


def is_alive(pid: int) -> bool:
    """Whether a process still runs after a moment; one that nobody has waited for is dead."""
    for _ in range(3000):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        if state == "Z":
            return False
        time.sleep(0.01)
    return True
