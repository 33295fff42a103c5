"""The entry of the command `shardway` and of `python -m shardway`: `cli.main`, guarded from its first import on.

Invariant: nothing is imported here before Ctrl-C ends this process with a message and its exit code; the imports then
take a part of a second, and seconds on a slow file system.
"""

import sys


def main() -> None:
    """The command, as `shardway.cli.main.main`."""
    try:
        from shardway.cli.main import main as run

        run()
    except KeyboardInterrupt:
        print("shardway: ended at once by a signal", file=sys.stderr)
        sys.exit(130)  # cli.main.EXIT_KILLED
