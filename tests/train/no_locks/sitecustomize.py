"""Makes every file system of this process one that knows no locks, as a Lustre that is mounted without them."""

from __future__ import annotations

import errno
import fcntl


def refuse(descriptor: object, operation: int) -> None:
    """What such a file system says."""
    raise OSError(errno.ENOSYS, "Function not implemented")


fcntl.flock = refuse
