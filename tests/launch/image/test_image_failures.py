from __future__ import annotations

import pytest
from image_cases import make_order

from golden_files import Golden
from shardway.launch.image.make import parse_failure

# As the programs printed them, Apptainer 1.4.5 among them on a machine without a network; names are changed.
PRINTED = {
    "apptainer, no network": "FATAL:   While making image from oci registry: pinging container registry nvcr.io: Get "
    '"https://nvcr.io/v2/": dial tcp: lookup nvcr.io on 10.255.255.53:53: no such host',
    "apptainer, no user IDs": "INFO:    If error was from fakeroot, try --ignore-fakeroot-command and",
    "apptainer, no capabilities": "ERROR  : Requesting capability set 0x000001ffffffffff while permitted capability "
    "set is 0x000001fffeffffff",
    "apptainer, denied": "FATAL:   While making image from oci registry: reading manifest 1 in nvcr.io/org/private: "
    "unauthorized: authentication required",
    "apptainer, no tag": "FATAL:   reading manifest 99 in nvcr.io/nvidia/pytorch: manifest unknown: manifest unknown",
    "enroot, denied": "[ERROR] URL https://nvcr.io/v2/org/private/manifests/1 returned error code: 401 Unauthorized",
    "enroot, no tag": "[ERROR] URL https://nvcr.io/v2/nvidia/pytorch/manifests/99 returned error code: 404 Not Found",
    "curl": "curl: (28) Failed to connect to nvcr.io port 443 after 130000 ms: Connection timed out",
    "disk": "FATAL ERROR: Failed to write to output filesystem: No space left on device",
    "quota": "tar: usr/lib/x: Cannot write: Disk quota exceeded",
    "architecture": "sh: exec /usr/bin/apt-get: Exec format error",
    "apt": "E: Unable to locate package libaoi-dev",
    "pip": "ERROR: No matching distribution found for torhc",
    "no pip": "/usr/bin/python3: No module named pip",
    "hub": "toomanyrequests: You have reached your pull rate limit.",
    "something else": "Segmentation fault",
}


def test_failures_are_explained(golden: Golden) -> None:
    order = make_order("enroot", "docker://nvcr.io#org/private:1")
    said = []
    for name, line in PRINTED.items():
        sentence, remedy = parse_failure(["INFO: fine so far", line, "FATAL:   exit status 255"], order)
        said.append(f"--- {name}\n{sentence}\n{remedy}\n")
    golden("".join(said), "images/failures.txt")


@pytest.mark.parametrize("line", ["Step 401 of 404", "sha256:401403", "copied 404 files"])
def test_a_number_is_no_refusal(line: str) -> None:
    assert parse_failure([line], make_order("enroot"))[0] == "a command failed"


def test_the_last_reason_counts() -> None:
    lines = ["curl: (28) Connection timed out, trying again", "write: No space left on device"]
    assert parse_failure(lines, make_order("enroot"))[0] == "the disk is full"
