"""Text that goes into and out of the command: names of files and what is printed, whatever the locale is.

Names of files are bytes. In UTF-8 mode (PEP 540) every name comes in as text and goes out as the same bytes, also one
that is not UTF-8: such a byte is a lone surrogate in between (PEP 383). In another mode a name of a run file, which is
UTF-8, is looked for under other bytes, or cannot be expressed.

Invariant: nothing that is printed ends in an error of encoding, and names are printed as their bytes where the terminal
takes UTF-8. This module must not know verbs.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

_HANDLER = "shardway"


def ensure_utf8_mode() -> None:
    """Start this process again in UTF-8 mode, with all that it starts, where its locale is another one's."""
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def print_anything() -> None:
    """Let stdout and stderr take every text: what they cannot express is written as its byte or its escape."""
    codecs.register_error(_HANDLER, _express)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=_HANDLER)


def _express(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError) and "\udc80" <= error.object[error.start] <= "\udcff":
        return bytes([ord(error.object[error.start]) - 0xDC00]), error.start + 1
    return codecs.backslashreplace_errors(error)
