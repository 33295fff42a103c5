"""What to do when a file system refuses an operation: one table for all messages.

Invariant: the same refusal has the same remedy everywhere. Nothing here touches a file or raises.

Sources: errno(3), open(2), write(2); proc_sys_fs(5) "file-max".
"""

from __future__ import annotations

import errno
import os

AWAY = frozenset(
    (
        *(errno.ENOTCONN, errno.ESTALE, errno.ESHUTDOWN, errno.ETIMEDOUT, errno.EHOSTDOWN, errno.EHOSTUNREACH),
        *(errno.ENETUNREACH, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED, errno.EBADFD),
    )
)
"""Reasons of a file system whose server is away, or that has lost this host's state (GlusterFS, Lustre, NFS, FUSE).
They do not concern the file itself; EIO may, and counts as damage."""

FULL = frozenset((errno.ENOSPC, errno.EDQUOT))
"""Reasons of a file system that is full, or of a quota that is used up."""

UNWRITABLE = FULL | {errno.EROFS, errno.EFBIG}
"""Reasons why nothing more can be written, whatever the place."""

FORBIDDEN = frozenset((errno.EACCES, errno.EPERM))
"""Reasons of a lack of permission, to read or to write."""

ANOTHER_FOLDER = "choose another folder with --dir or run.root"
"""What helps where a run directory cannot be."""

_IN_ITS_PLACE = "move away the file that stands in place of a folder there"
_PERMISSION = "ask its owner for permission (`ls -ld` shows who may do what there)"
_REMEDIES = {
    errno.ENOSPC: "make room there (`df -h`; `df -i` where there is space)",
    errno.EDQUOT: "make room in your quota (`quota -s`, `lfs quota -h -u $USER FOLDER`, or the command of your site)",
    errno.EROFS: "mount that file system to be written (of a container: without `:ro`)",
    errno.EACCES: _PERMISSION,
    errno.EPERM: _PERMISSION,
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.ELOOP: "mend the link there, which leads back to itself (`ls -l`)",
    errno.ENOTDIR: _IN_ITS_PLACE,
    errno.EEXIST: _IN_ITS_PLACE,
    errno.EISDIR: "move away the folder that stands in place of a file there",
    errno.EMFILE: "raise `ulimit -n`",
    errno.ENFILE: "ask the site to raise fs.file-max",
    errno.EFBIG: "raise `ulimit -f`, or use a file system that takes larger files",
    errno.EIO: "look at the disk or its server (`dmesg`)",
    **dict.fromkeys(AWAY, "look at the file system (is it mounted, does its server answer)"),
}


def find_remedy(
    reason: OSError | str, instead: str = "", otherwise: str = "look what stands there, and who may write it"
) -> str:
    """The remedy for a refusal, as the start of a sentence. `reason`: an error, or words that hold the system's reason;
    `instead`: the way around the place, such as "choose another folder with --dir"; `otherwise`: the remedy for a
    reason that is not in the table."""
    if isinstance(reason, OSError):
        found = _REMEDIES.get(reason.errno or 0)
    else:
        found = next((remedy for number, remedy in _REMEDIES.items() if os.strerror(number) in reason), None)
    return f"{found or otherwise}, or {instead}" if instead else found or otherwise
