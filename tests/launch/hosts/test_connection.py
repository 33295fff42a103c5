from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

import pytest
from fake_ssh import FakeSsh, make_fake, says
from hypothesis import given, settings
from hypothesis import strategies as st

from shardway.errors import SiteError
from shardway.launch.hosts.base import HostUnreachable
from shardway.launch.hosts.ssh import (
    GAP_S,
    LONGEST_GAP_S,
    Budget,
    Connection,
    ConnectionContext,
    SshHost,
    parse_refusal,
    read_budget,
    write_budget,
)

ODD = ["", "a b", "'\"", "$(id)`id`$HOME", "\\", "a\n\nb\n", "\t*~!x", "é ☃", "\x1b[0m", "&;|", "-n"]


@pytest.fixture(autouse=True)
def _empty_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


def reach(fake: FakeSsh) -> str:
    return SshHost("there", fake.surroundings).run(["printf", "%s", "reached"]).out


def fail(fake: FakeSsh) -> str:
    with pytest.raises(HostUnreachable) as told:
        reach(fake)
    return str(told.value)


# --- one connection


def test_all_calls_ride_one_connection(tmp_path: Path) -> None:
    fake = make_fake(tmp_path / "fake")
    host = SshHost("there", fake.surroundings)
    assert [host.run(["echo", "secret-word"]).out for _ in range(2)] == ["secret-word\n"] * 2
    assert reach(fake) == "reached"  # another process
    assert len(fake.calls("ControlMaster=auto")) == 1
    riding = fake.calls("exec bash")
    assert len(riding) == 3
    for line in riding:
        # It never becomes a connection of its own, and what is asked there is on no command line.
        assert "ControlMaster=no" in line
        assert "BatchMode=yes" in line
        assert "ProxyCommand=false" in line
    assert fake.calls("secret-word") == []
    host.connection.close()
    assert not (fake.folder / "open").exists()


@pytest.mark.parametrize(
    ("paths", "exchanges"), [(["/a", "/b/~"], 0), (["runs", "~/x", "$SCRATCH/y"], 1), (["/a", "/$SCRATCH"], 1), ([], 0)]
)
def test_paths_are_expanded_in_one_exchange(
    paths: list[str], exchanges: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch")
    fake = make_fake(tmp_path / "fake")
    (fake.folder / "calls").touch()
    home = f"{tmp_path}/home"
    expected = {"runs": f"{home}/runs", "~/x": f"{home}/x", "$SCRATCH/y": "/scratch/y", "/$SCRATCH": "/scratch"}
    found = SshHost("there", fake.surroundings).expand_many(paths)
    assert found == [PurePosixPath(expected.get(path, path)) for path in paths]
    assert len(fake.calls("exec bash")) == exchanges


def test_the_user_s_own_shared_connection_is_ridden(tmp_path: Path) -> None:
    fake = make_fake(tmp_path / "fake", controlpath="/run/mine/100%-there")
    (fake.folder / "open").touch()
    assert reach(fake) == "reached"
    assert fake.calls("ControlMaster=auto") == []
    assert "ControlPath=/run/mine/100%%-there" in fake.calls("exec bash")[0]


def test_a_connection_that_went_is_made_again_after_a_pause(tmp_path: Path) -> None:
    fake = make_fake(tmp_path / "fake")
    reach(fake)
    fake.hang_up()
    assert reach(fake) == "reached"
    assert fake.clock.slept == [GAP_S]
    assert len(fake.calls("ControlMaster=auto")) == 2


def test_failures_are_tried_again_more_and_more_slowly(tmp_path: Path) -> None:
    fake = make_fake(tmp_path / "fake", connect=says("ssh: connect to host there port 22: Connection refused"))
    for _ in range(3):
        assert "refuses connections" in fail(fake)
    assert fake.clock.slept == [10.0, 20.0]
    assert "the next is tried in 40 s at the earliest" in fail(fake)
    assert len(fake.calls("ControlMaster=auto")) == 3
    fake.clock.now += 41
    assert "refuses connections" in fail(fake)


def test_nobody_is_asked_where_there_is_no_terminal(tmp_path: Path) -> None:
    message = "alice@there: Permission denied (publickey,password,keyboard-interactive)."
    fake = make_fake(tmp_path / "fake", connect=says(message))
    told = fail(fake)
    assert message in told
    [command] = [line.strip() for line in told.splitlines() if " -MNf " in line]
    program = fake.surroundings.program[0]
    socket = fake.calls("-O check")[0].split("ControlPath=")[1].split()[0]
    assert command == f"{program} -MNf -o ControlPath={socket} -o ControlPersist=12h there"
    assert "BatchMode=yes" in fake.calls("ControlMaster=auto")[0]


def test_ssh_asks_where_there_is_a_terminal(tmp_path: Path) -> None:
    fake = make_fake(tmp_path / "fake", connect=says("Permission denied (password)."), terminal=lambda: True)
    assert "check your user name, key and password" in fail(fake)
    assert "BatchMode=no" in fake.calls("ControlMaster=auto")[0]


@pytest.mark.parametrize("spoilt", ["open to others", "a link"])
def test_a_folder_that_others_can_reach_keeps_no_connection(tmp_path: Path, spoilt: str) -> None:
    fake = make_fake(tmp_path / "fake")
    private = fake.folder / "private"
    if spoilt == "a link":
        private.symlink_to(tmp_path)
    else:
        private.mkdir()
        private.chmod(0o777)
    with pytest.raises(SiteError, match="chmod 700"):
        reach(fake)


def test_a_machine_without_ssh_is_told(tmp_path: Path) -> None:
    with pytest.raises(SiteError, match="no program '/none/ssh'"):
        SshHost("there", ConnectionContext(("/none/ssh",), tmp_path / "private")).run(["true"])


def test_the_path_of_a_socket_is_short_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """sun_path holds 104 bytes on BSD; ssh binds a name that is 17 longer for a moment."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / ("deep" * 20)))
    fake = make_fake(tmp_path / "f")
    connection = Connection("a" * 200 + ".example.org", ConnectionContext(fake.surroundings.program))
    assert not connection.is_open()
    socket = fake.calls("-O check")[0].split("ControlPath=")[1].split()[0]
    assert len(socket) + 17 < 104
    assert os.stat(Path(socket).parent).st_mode & 0o077 == 0


# --- what goes wrong


REFUSALS = {
    "ssh: Could not resolve hostname there: Name or service not known": "no such host",
    "ssh: connect to host there port 22: Connection refused": "refuses connections",
    "ssh: connect to host there port 22: Connection timed out": "does not answer",
    "ssh: connect to host there port 22: Operation timed out": "does not answer",
    "ssh: connect to host there port 22: No route to host": "does not answer",
    "kex_exchange_identification: Connection closed by remote host": "closed the connection at once",
    "kex_exchange_identification: read: Connection reset by peer": "closed the connection at once",
    "Received disconnect from 1.2.3.4 port 22:2: Too many authentication failures": "too many keys",
    "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.": "is not the one",
    "No ED25519 host key is known for there.\nHost key verification failed.": "host key is not known yet",
    "alice@there: Permission denied (publickey).": "does not let you in",
    "/home/a/.ssh/config: line 3: Bad configuration option: prot": "cannot read its configuration",
    "something new": "ssh failed",
}


@pytest.mark.parametrize(("said", "sentence"), REFUSALS.items())
def test_refusals_are_explained(said: str, sentence: str) -> None:
    found, remedy = parse_refusal(said)
    assert sentence in found
    needs_person = sentence in ("host key is not known yet", "does not let you in")
    assert bool(remedy) != needs_person


def test_what_ssh_said_is_never_lost(tmp_path: Path) -> None:
    told = fail(make_fake(tmp_path / "fake", connect=says("strange\r\nthings happen")))
    assert "    ssh: strange\n    ssh: things happen\n  To do: try the same with `ssh -v`" in told


def test_a_login_without_a_shell_is_told(tmp_path: Path) -> None:
    told = fail(make_fake(tmp_path / "fake", serve="echo 'Only file transfers here' >&2; exit 1"))
    assert "did not start bash (code 1)" in told
    assert "Only file transfers here" in told


CUT = 'sh -c "$*" >$here/out 2>/dev/null; head -c {bytes} $here/out; echo "Connection reset" >&2; exit 255'
BEGUN = 60
"""Bytes that hold the first mark of an answer and not the second."""


@pytest.mark.parametrize(("length", "what"), [(20, "before it answered"), (BEGUN, "in the middle of an answer")])
def test_a_cut_answer_is_never_a_code_of_the_command(tmp_path: Path, length: int, what: str) -> None:
    fake = make_fake(tmp_path / "fake", serve=CUT.format(bytes=length))
    host = SshHost("there", fake.surroundings)
    with pytest.raises(HostUnreachable, match=what) as told:
        host.run(["sbatch", "job.sh"])
    assert "What it did there is not known" in str(told.value)
    with pytest.raises(HostUnreachable, match=what):
        host.write_files({PurePosixPath(tmp_path / "x"): "text"})


def test_a_follower_that_is_cut_off_says_so(tmp_path: Path) -> None:
    fake = make_fake(tmp_path / "fake", serve=CUT.format(bytes=BEGUN))
    lines = SshHost("there", fake.surroundings).follow(["printf", "0123456789abcdef\\n%.0s", "1", "2", "3"])
    with pytest.raises(HostUnreachable, match="broke while it was followed"):
        list(lines)


def test_what_login_shells_and_profiles_print_is_no_output(tmp_path: Path) -> None:
    """A profile that prints, reads the input, sets a variable, and hands over to another program."""
    profile = "echo 'Welcome!'; printf 'no newline'; cat; export SCRATCH='/scratch/it'\\''s $(id)'\n"
    (tmp_path / "home" / ".bash_profile").write_text(profile)
    noisy = make_fake(tmp_path / "fake", serve='echo motd; echo motd >&2; sh -c "$*"; c=$?; echo bye; exit $c')
    host = SshHost("there", noisy.surroundings)
    odd, *done = host.run_many(
        [["printf", "%s\\0", *ODD], ["printf", "%s", "out"], ["sh", "-c", "echo err >&2; exit 255"]]
    )
    assert odd.out.split("\0")[:-1] == ODD
    assert [(one.code, one.out, one.err) for one in done] == [(0, "out", ""), (255, "", "err\n")]
    assert list(host.follow(["echo", "line"])) == ["line"]
    assert host.expand("$SCRATCH/x") == PurePosixPath("/scratch/it's $(id)/x")
    (tmp_path / "home" / ".bash_profile").write_text("exec false\n")
    assert host.run(["echo", "still"]).out == "still\n"


# --- the budget


def test_a_budget_is_kept_for_the_next_process(tmp_path: Path) -> None:
    write_budget(tmp_path / "b", Budget(2, 5.0))
    assert read_budget(tmp_path / "b") == Budget(2, 5.0)
    odd = ("NaN", "-Infinity", "9" * 400)
    unreadable = ("", "[]", '{"failures": "x", "last": 1}', '{"last": 1}', "null", "[" * 9999)
    for text in (*unreadable, *(f'{{"failures": 1, "last": {last}}}' for last in odd)):
        (tmp_path / "b").write_text(text)
        assert read_budget(tmp_path / "b") == Budget()


@settings(settings.get_profile("brief"))
@given(st.lists(st.tuples(st.floats(0, 1000), st.booleans()), max_size=40))
def test_connections_keep_their_distance(tries: list[tuple[float, bool]]) -> None:
    """However callers come, two connections are GAP_S apart, and after a failure more."""
    budget, now, last, failures = Budget(), 1e9, None, 0
    for pause, ok in tries:
        now += pause
        now += budget.wait_s(now)
        if last is not None:
            assert now - last >= min(GAP_S * 2**failures, LONGEST_GAP_S) - 1e-5
        assert budget.wait_s(now) <= 1e-5
        budget, last, failures = budget.after(now, ok), now, 0 if ok else failures + 1


def test_a_clock_that_was_set_back_does_not_lock_out() -> None:
    assert Budget(0, 1e9).wait_s(5.0) == GAP_S
    assert Budget(99, 1e9).wait_s(5.0) == LONGEST_GAP_S
