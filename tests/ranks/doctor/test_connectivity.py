"""Ranks that report to rank 0, and what is said when some do not."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made_machines import check, make, make_placement, make_site

from ports import free_port
from shardway.ranks.doctor import examine as visit
from shardway.ranks.doctor import world as wire_module
from shardway.ranks.doctor.examine import Diagnosis, examine_machine
from shardway.ranks.doctor.surroundings import CheckResult, MachineNeeds, MachineView, Report
from shardway.ranks.doctor.world import (
    Attendance,
    CheckPortTaken,
    ConnectivityCheck,
    MeetingPoint,
    Wire,
    attend,
    explain_error,
    find_point,
    judge_attendance,
    judge_meeting,
    list_ranks,
)
from shardway.sites.load import load_site

pytestmark = pytest.mark.usefixtures("warm_starts")


def at(port: int) -> MeetingPoint:
    return MeetingPoint("127.0.0.1", port, "launch")


@contextmanager
def alongside(*works: Callable[[], object]) -> Iterator[None]:
    """Do these in threads of their own, and wait for their end."""
    threads = [threading.Thread(target=work) for work in works]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60.0)
    assert not any(thread.is_alive() for thread in threads)


def test_ranks_report_answer_and_are_let_go() -> None:
    call, ended = ConnectivityCheck(at(free_port()), 3), []

    def follow(rank: int) -> None:
        hello = {"rank": rank, "host": f"n{rank}", "findings": []}
        ended.append(attend(call.point, hello, lambda question: {"twice": 2 * question["number"]}, 10.0))

    with alongside(lambda: follow(1), lambda: follow(2)):
        call.gather(10.0)
        assert (call.missing, call.here) == ([], [1, 2])
        assert call.reports[2]["host"] == "n2"
        clocks = call.compare_clocks([1, 2])
        meanwhile: list[int] = []
        answers = call.ask(
            {1: {"ask": "x", "number": 3}, 2: {"ask": "x", "number": 4}}, 5.0, lambda: meanwhile.append(1)
        )
        call.end()
    assert answers == {1: {"twice": 6}, 2: {"twice": 8}}
    assert meanwhile == [1]
    assert all(abs(clock.ahead_s) <= clock.error_s + 0.05 for clock in clocks.values())
    assert ended == [Attendance(True), Attendance(True)]


def test_a_clock_that_is_ahead_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    call = ConnectivityCheck(at(free_port()), 2)
    monkeypatch.setattr(call, "ask", lambda questions, limit: {1: {"time": time.time() + 7.0}})
    clock = call.compare_clocks([1])[1]
    assert clock.ahead_s == pytest.approx(7.0, abs=0.05)
    assert clock.error_s < 0.05


def test_the_rank_that_never_comes_is_named() -> None:
    point = at(free_port())
    call = ConnectivityCheck(point, 3)
    with alongside(lambda: attend(point, {"rank": 1, "host": "n1", "findings": []}, dict, 60.0)):
        while call.here != [1]:  # on a busy machine it may come after so short a wait
            call.gather(0.3)
        call.end()
    assert call.missing == [2]
    assert 0.3 <= call.took_s < 30.0
    around = make(placement=make_placement(world=3, per_node=1), environ={"SLURM_STEP_NODELIST": "n[0-2]"}, host="n0")
    reports = [Report(0, "n0.site", ()), Report(1, "n1", ())]
    check(
        judge_meeting(around, reports, call.missing, point, 0.3),
        "fail",
        f"rank 2 of 3 did not come to {point} within 300ms; came: 0 (n0.site), 1 (n1); no rank came from n2",
        "--exclude=n2",
        f"nc -zv 127.0.0.1 {point.port}",
    )


def test_a_rank_says_what_it_tried() -> None:
    point = at(free_port())
    attended = attend(point, {"rank": 1}, dict, 0.1)
    assert not attended.met
    assert list(attended.tries) == ["connection refused: nothing listens there"]
    around = make(placement=make_placement(rank=1, world=2, per_node=1))
    said = f"rank 1 on n1 could not reach rank 0 at {point} within 100ms: "
    check(judge_attendance(around, attended, point, 0.1), "fail", said, "x connection refused", "getent hosts")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (socket.gaierror(-2, "Name or service not known"), "the name is not known here"),
        (TimeoutError("timed out"), "no answer: a firewall"),
        (OSError(113, "No route to host"), "no route to that host"),
        (OSError(101, "Network is unreachable"), "no network leads there"),
        (ConnectionError("something else"), "something else"),
    ],
)
def test_what_errors_mean(error: OSError, words: str) -> None:
    assert explain_error(error).startswith(words)


STRANGERS = (
    b"GET / HTTP/1.1\n",
    b"[1]\n",
    b'{"launch": "launch", "rank": 5}\n',
    b'{"launch": "launch", "rank": "1"}\n',
)


def test_strangers_are_let_go_and_ranks_of_other_launches_too() -> None:
    """One after another, and the rank that is waited for comes last."""
    point = at(free_port())
    call = ConnectivityCheck(point, 2)

    def send(words: bytes) -> bytes:
        with socket.create_connection(("127.0.0.1", point.port), 60.0) as connection:
            connection.sendall(words)
            return connection.recv(10)

    def wait_for_listener() -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError):
                socket.create_connection(("127.0.0.1", point.port), 60.0).close()
                return
            time.sleep(0.02)

    other = MeetingPoint(point.address, point.port, "another launch")
    told: list[bytes] = []
    found: list[Attendance] = []

    def visit_in_turn() -> None:
        wait_for_listener()
        told.extend(map(send, STRANGERS))
        found.append(attend(other, {"rank": 1}, dict, 0.5))
        found.append(attend(point, {"rank": 1, "host": "expected"}, dict, 60.0))

    with alongside(visit_in_turn):
        call.gather(60.0)
        call.end()
    assert told == [b""] * len(STRANGERS)
    assert not found[0].met
    assert "something answered that is not rank 0 of this launch" in found[0].tries
    assert found[1] == Attendance(True)
    assert {rank: report["host"] for rank, report in call.reports.items()} == {1: "expected"}


def test_a_rank_that_is_lost_takes_nobody_along(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "MAX_BYTES", 1000)
    near, far = socket.socketpair()
    wire = Wire(near)
    far.close()
    with pytest.raises(OSError, match=r"closed|reset|Broken"):
        wire.receive(1.0)
    wire.close()
    near, far = socket.socketpair()
    wire = Wire(near)
    with pytest.raises(TimeoutError):
        wire.receive(0.05)
    far.sendall(b"x" * 1001)
    with pytest.raises(ConnectionError, match="no doctor sends"):
        wire.receive(5.0)
    wire.close()
    far.close()


def test_the_point_is_that_of_the_launch() -> None:
    placement = make_placement(rank=3)
    point = find_point(placement, "77")
    assert (point.address, point.port) == ("10.0.0.1", 15213)
    assert find_point(replace(placement, rank=0, local_rank=0), "77") == point
    assert find_point(placement, "78").launch != point.launch
    elastic = find_point(replace(placement, launcher="torchrun"), "77")
    assert elastic.port != 15213
    assert 15000 <= elastic.port < 30000
    assert elastic == find_point(replace(placement, launcher="torchrun", rank=1), "77")


def test_the_doctor_avoids_a_port_that_is_held_as_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire_module, "_HELLO_S", 0.3)  # a rank waits for twice of it on who holds the port and is mute
    point = replace(at(free_port()), further=(free_port(),))
    call, ended = ConnectivityCheck(point, 2), []
    with socket.create_server(("", point.port)):
        with alongside(lambda: ended.append(attend(point, {"rank": 1}, dict, 30.0))):
            call.gather(30.0)
            call.end()
        assert (call.point.port, call.missing, ended[0].met) == (point.further[0], [], True)
    with (
        socket.create_server(("", point.port)),
        socket.create_server(("", point.further[0])),
        pytest.raises(CheckPortTaken, match="in use"),
    ):
        ConnectivityCheck(point, 2).gather(5.0)


@pytest.mark.parametrize(("ranks", "text"), [([1], "1"), ([1, 2, 3, 7], "1-3, 7"), ([2, 4], "2, 4"), ([], "")])
def test_ranks_in_short(ranks: list[int], text: str) -> None:
    assert list_ranks(ranks) == text


# --- the whole visit


def rank_of(number: int, port: int, folder: Path | None, world: int = 2) -> MachineView:
    placement = make_placement(rank=number, world=world, per_node=1, master_addr="127.0.0.1", master_port=port)
    wanted = MachineNeeds(folder=folder, device="cpu")
    return make(make_site(), placement=placement, host=f"n{number}", wanted=wanted)


def together(diagnosis: Diagnosis) -> dict[str, CheckResult]:
    return {finding.check: finding for finding in diagnosis.together}


def visit_all(ranks: list[MachineView], **options: Any) -> list[Diagnosis]:
    found: dict[int, Diagnosis] = {}
    with alongside(
        *(lambda around=around: found.update({around.rank: examine_machine(around, **options)}) for around in ranks)
    ):
        pass
    return [found[around.rank] for around in ranks]


def test_two_ranks_visit(tmp_path: Path) -> None:
    port = free_port()
    first, second = visit_all([rank_of(0, port, tmp_path), rank_of(1, port, tmp_path)], quick=True, wait_s=10.0)
    found = together(first)
    assert [report.host for report in first.reports] == ["n0", "n1"]
    check(found["world.meeting"], "ok", "all 2 ranks on 2 nodes met at 127.0.0.1")
    check(found["world.visible"], "ok", str(tmp_path), "1 other node saw")
    check(found["world.clock"], "ok", "on 2 nodes")
    check(found["world.versions"], "ok", "equal on 2 nodes")
    assert "torch.start" not in found
    assert not second.speaks
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visit, "SEEN_WITHIN_S", 0.2)
    monkeypatch.setattr(visit, "_look_for", lambda path, token, limit: None)
    port = free_port()
    first, _ = visit_all([rank_of(0, port, tmp_path), rank_of(1, port, tmp_path)], quick=True, wait_s=10.0)
    check(together(first)["world.visible"], "fail", "is not there within 0.2 s on n1", "--dir")


def test_looking_for_a_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert visit._look_for(path, "token", 0.02) is None
    path.write_text("another")
    assert visit._look_for(path, "token", 0.02) is None
    path.write_text("token")
    assert visit._look_for(path, "token", 0.1) is not None


def test_a_port_that_is_taken() -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        first = examine_machine(rank_of(0, other.getsockname()[1], None), quick=True, wait_s=1.0)
    found = together(first)
    check(found["world.port"], "fail", "in use", "MASTER_PORT")
    check(found["world.meeting"], "n/a")
    assert first.missing == (1,)


def test_torch_is_tried_where_all_came(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = {"stage": "end", "import_s": 2.0, "torch": "2.9", "sum_s": 0.01, "sum_bytes": 4 * 2**20}
    monkeypatch.setattr(visit, "measure", lambda task, limit: {**probe, "device": task.device})
    port = free_port()
    first, _ = visit_all([rank_of(0, port, None), rank_of(1, port, None)], wait_s=10.0)
    check(together(first)["torch.allreduce"], "ok", "4 MiB over 2 ranks by gloo in 10.00 ms: 0.42 GB/s")
    lonely = examine_machine(rank_of(0, free_port(), None), wait_s=0.05)
    check(together(lonely)["torch.start"], "n/a", "ranks are missing")


@pytest.mark.parametrize("ranks", [(0,), (0, 1)])
def test_processes_of_which_one_may_never_come(ranks: tuple[int, ...], tmp_path: Path) -> None:
    """As a job starts them: each says who is missing, or all sum a tensor by torch."""
    port = free_port()
    shared = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "WORLD_SIZE": "2",
        "OMP_NUM_THREADS": "1",
    }
    words = [sys.executable, "-m", "shardway", "doctor", "--json", "--strict", "--dir", str(tmp_path)]
    words += ["--wait", "30s" if len(ranks) > 1 else "1s"]
    started = [
        subprocess.Popen(words, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in ranks
    ]
    printed = [process.communicate(timeout=120)[0] for process in started]
    answers = [json.loads(text) for text in printed if text]
    rows = {row["check"]: row for row in answers[0]["checks"]}
    assert len(answers) == 1
    if ranks == (0, 1):
        assert rows["torch.allreduce"]["verdict"] == "ok"
        assert answers[0]["missing"] == []
        return
    assert [process.returncode for process in started] == [3]
    assert rows["world.meeting"]["verdict"] == "fail"
    assert rows["world.meeting"]["found"].startswith("rank 1 of 2 did not come")
    assert answers[0]["missing"] == [1]


def test_the_doctor_compares_with_what_the_site_measured() -> None:
    """Half of the rated products of H100, 0.9 of their memory; a site without these, and one that no plan takes."""
    site = load_site("dgx-slurm")
    measured = site.model_copy(update={"measured": {"matmul": 0.5, "memory": 0.9}})
    tflops, copied = visit._find_measured(measured)
    assert tflops == pytest.approx(989.5 / 2, rel=1e-2)
    assert copied == pytest.approx(3350 * 0.9, rel=1e-2)
    assert visit._find_measured(site) == (None, None)
    assert visit._find_measured(site.model_copy(update={"measured": {"link": 0.5}})) == (None, None)
    assert visit._find_measured(load_site("generic-slurm").model_copy(update={"measured": {"matmul": 0.5}})) == (
        None,
        None,
    )
    probes = {0: {"tflops": 400.0, "format": "bf16", "copy_gbs": 3000.0}}
    verdicts = visit._judge_probes(make(site=measured, deep=True), probes, {0: "n0"}, "cuda")
    check(verdicts["torch.matmul"], "warn", "were measured on this site; rank 0 (n0) 400")
    check(verdicts["torch.copy"], "ok", "were measured on this site")
