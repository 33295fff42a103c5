"""What is done about what a file system refuses: one remedy for each refusal, from an error or from its words."""

from __future__ import annotations

import errno
import os

import pytest

from shardway.refusals import find_remedy


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "make room there"),
        (errno.EDQUOT, "make room in your quota"),
        (errno.EROFS, "mount that file system to be written"),
        (errno.EACCES, "ask its owner for permission"),
        (errno.ENAMETOOLONG, "choose a shorter name"),
        (errno.ELOOP, "mend the link there"),
        (errno.ENOTDIR, "move away the file"),
        (errno.ESTALE, "look at the file system"),
        (errno.EMFILE, "raise `ulimit -n`"),
        (errno.EBUSY, "look what stands there"),
    ],
)
def test_each_refusal_has_its_remedy(number: int, remedy: str) -> None:
    error = OSError(number, os.strerror(number), "/place")
    assert find_remedy(error).startswith(remedy)
    assert find_remedy(f"mkdir: cannot create directory '/place': {os.strerror(number)}") == find_remedy(error)
    assert find_remedy(error, "choose another").endswith(", or choose another")


def test_a_reason_that_is_not_known_has_the_remedy_of_its_place() -> None:
    assert find_remedy("it needs 3 GiB", "choose another", "make room") == "make room, or choose another"
