from __future__ import annotations

from pathlib import Path, PurePosixPath

import pytest

from shardway.hardware.mounts import find_mount, parse_mounts, read_mounts
from shardway.hardware.probe import list_interfaces, list_ports, parse_rate

MOUNTINFO = """\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw
30 22 0:25 / /p rw - gpfs project rw
31 30 0:26 / /p/scratch\\040one rw,nosuid master:3 - lustre 10.0.0.1@o2ib:/scratch rw
32 22 0:27 / /tmp rw - ext4 /dev/sdb1 rw
33 22 0:28 / /tmp rw - tmpfs tmpfs rw,size=4g
broken line
34 22 0:29 / /x rw -
"""


@pytest.mark.parametrize(
    ("path", "place", "kind", "shared"),
    [
        ("/home/a", "/", "ext4", False),
        ("/p", "/p", "gpfs", True),
        ("/p/scratch one/run", "/p/scratch one", "lustre", True),
        ("/p/scratch", "/p", "gpfs", True),
        ("/tmp/a", "/tmp", "tmpfs", False),  # the later of two on one place
        ("/tmpfile", "/", "ext4", False),
    ],
)
def test_a_path_lies_on_the_deepest_mount(path: str, place: str, kind: str, shared: bool) -> None:
    mount = find_mount(path, parse_mounts(MOUNTINFO))
    assert mount is not None
    assert (mount.place, mount.kind, mount.shared) == (PurePosixPath(place), kind, shared)


def test_lines_that_are_no_mounts_are_passed_over(tmp_path: Path) -> None:
    assert len(parse_mounts(MOUNTINFO)) == 5
    assert read_mounts(tmp_path) == ()
    assert find_mount("/a", ()) is None


def write_port(root: Path, device: str, state: str, rate: str, layer: str = "InfiniBand") -> None:
    folder = root / "sys/class/infiniband" / device / "ports/1"
    folder.mkdir(parents=True)
    (folder / "state").write_text(f"4: {state}\n")
    (folder / "rate").write_text(f"{rate}\n")
    (folder / "link_layer").write_text(f"{layer}\n")


def test_ports_are_read_from_sysfs(tmp_path: Path) -> None:
    write_port(tmp_path, "mlx5_1", "DOWN", "10 Gb/sec (4X SDR)")
    write_port(tmp_path, "mlx5_0", "ACTIVE", "200 Gb/sec (4X HDR)")
    first, second = list_ports(tmp_path)
    assert (first.device, first.port, first.state, first.rate_gbit_s, first.active) == (
        ("mlx5_0", "1", "ACTIVE", 200.0, True)
    )
    assert (second.device, second.active, second.link_layer) == ("mlx5_1", False, "InfiniBand")
    assert list_ports(tmp_path / "none") == ()


@pytest.mark.parametrize(("text", "rate"), [("2.5 Gb/sec (1X SDR)", 2.5), ("400 Gb/sec (4X NDR)", 400.0), ("", 0.0)])
def test_rates(text: str, rate: float) -> None:
    assert parse_rate(text) == rate


def test_this_machine_has_a_loopback() -> None:
    assert any(each.name.startswith("lo") and each.mtu > 1000 for each in list_interfaces())
