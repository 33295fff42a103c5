"""The command `shardway`: its verbs, the one place where errors become messages and exit codes, and text in any locale.

Invariants:
- A verb is imported when it is used: `shardway submit` imports nothing of `shardway plan`; a list of all imports all.
- The words after the first `--` are passed on one by one; none is taken for an option.
- No output ends in an encoding error; names are printed as their bytes if the terminal takes UTF-8.
- The garbage collector is as before once what trains is imported.
- Exit codes are 0 done, 1 a comparison found a difference, 2 user, 3 site, 4 job, 70 bug, 130 ended by a second signal.

Names of files are bytes. In UTF-8 mode (PEP 540) every name is read as text and written as the same bytes, also one
that is not UTF-8: such a byte is a lone surrogate in between (PEP 383). In another mode a name of a run file, which is
UTF-8, would be searched under other bytes, or could not be expressed.
"""

from __future__ import annotations

import codecs
import contextlib
import gc
import importlib
import io
import os
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_group

from shardway import __version__
from shardway.errors import Bug, JobError, ShardwayError, SiteError, UserError, legible
from shardway.installed import describe_missing, find_missing
from shardway.places import folder_is_gone
from shardway.ranks.outputs import Shutdown, flush_output, outputs_put_back
from shardway.refusals import FORBIDDEN, UNWRITABLE, find_remedy
from shardway.rundir.file_io import UNREADABLE, unanswered

# --- verbs with a program after `--`

_KEY = "shardway.program"


class CommandWithProgram(TyperCommand):
    """Puts the words after `--` aside before the options are read."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if "--" in args:
            cut = args.index("--")
            ctx.meta[_KEY] = tuple(args[cut + 1 :])
            args = args[:cut]
        return super().parse_args(ctx, args)


def read_program_words(ctx: Any) -> tuple[str, ...]:
    """The words after `--`; empty where there is no `--`. Raises UserError where nothing follows it."""
    words = ctx.meta.get(_KEY)
    if words == ():
        raise UserError(
            "no command stands after `--`.\n"
            "  To do: name one, such as `-- python train.py` (is a variable in it empty?), or leave out `--`."
        )
    return tuple(words or ())


# --- the verbs by name

VERBS = (
    *("plan", "train", "init", "config", "data", "prefetch", "checkpoint", "sites", "image", "plugins", "submit"),
    *("sweep", "scale", "shell", "exec", "stop", "resume", "status", "top", "logs", "report", "trace", "compare"),
    *("profile", "track"),
    *("generate", "chat", "evaluate", "doctor", "bench", "rehearse", "learn"),
    *("mcp", "completion"),
)
"""In the order in which a newcomer reads them; each has a function of its name, or an `app` of verbs of its own, in the
module of that name, if that is not another one:"""

_MODULES = {
    "init": "config",
    "exec": "shell",
    "stop": "submit",
    "resume": "submit",
    "compare": "report",
    "logs": "status",
    "rehearse": "doctor",
}

COMPUTING = ("train", "checkpoint", "rehearse", "profile", "bench", "generate", "chat", "evaluate")
"""These load torch, whose libraries end the process without a word of reason where the current folder was removed."""


class Verbs(TyperGroup):
    """The group of all verbs, each made at its first use."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: dict[str, Any] = dict.fromkeys(VERBS)  # typer suggests one of these names for a wrong one

    def list_commands(self, ctx: Any) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A verb, made as typer would have made it as one of many."""
        if cmd_name in VERBS and self.commands[cmd_name] is None:
            module = importlib.import_module(f"shardway.cli.{_MODULES.get(cmd_name, cmd_name)}")
            holder = typer.Typer(rich_markup_mode=None)
            if (function := getattr(module, cmd_name, None)) is None:
                holder.add_typer(module.app, name=cmd_name)
            else:
                holder.command(cmd_name, cls=getattr(module, "COMMANDS", {}).get(cmd_name))(function)
            self.commands[cmd_name] = get_group(holder).commands[cmd_name]
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The verb that is asked for. Raises UserError where it cannot work from here."""
        if args[0] in COMPUTING and folder_is_gone():
            raise UserError("the current folder is not there.")
        return super().resolve_command(ctx, args)


# --- file names and output in any locale


def ensure_utf8_mode() -> None:
    """Start this process again in UTF-8 mode, with all that it starts, where its locale is another one's."""
    if sys.getfilesystemencoding() == "utf-8" or os.environ.get("PYTHONUTF8") == "1":
        return
    os.environ["PYTHONUTF8"] = "1"
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


def print_anything() -> None:
    """Let stdout and stderr take every text: what they cannot express is written as its byte or its escape."""
    codecs.register_error("shardway", _express)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="shardway")


def _express(error: UnicodeError) -> tuple[str | bytes, int]:
    if isinstance(error, UnicodeEncodeError) and "\udc80" <= error.object[error.start] <= "\udcff":
        return bytes([ord(error.object[error.start]) - 0xDC00]), error.start + 1
    return codecs.backslashreplace_errors(error)


# --- the command, its errors and exit codes

EXIT_KILLED = 130

CLICK_ERROR: Any = typer.BadParameter.__mro__[2]
"""Base of typer's usage errors. Newer releases of typer carry a click of their own, whose classes are no others'."""

app = typer.Typer(
    name="shardway",
    cls=Verbs,
    help="Carries a PyTorch training job from a laptop to a supercomputer without rewriting it.",
    epilog="A first run: `shardway train`. A run file of your own: `shardway init my.toml`.",
    no_args_is_help=True,
    add_completion=False,  # `shardway completion` has scripts of its own
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """While entered, objects are made and no garbage is looked for; what is there at the end is never looked through.

    torch and what belongs to it are a million objects and no garbage, which Python would go through again and again: a
    seventh of the time of these imports, and then time of steps, one rank's at another moment than the others'.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@app.callback(invoke_without_command=True)
def _options(version: bool = typer.Option(False, "--version", help="Print the version and exit.")) -> None:
    if version:
        typer.echo(f"shardway {__version__}")
        raise typer.Exit


def main() -> None:
    """Entry point of the command `shardway`."""
    ensure_utf8_mode()
    print_anything()
    if sys.argv[1:4] == ["completion", "--answer", "--"]:
        from shardway.cli.completion import print_answer

        print_answer(sys.argv[4:])
        return
    last = Shutdown()
    is_short = bool(sys.argv[1:2]) and sys.argv[1] not in COMPUTING  # whose garbage may hold memory of a device
    if is_short:
        # Python's own threshold has a tenth of the time of a short verb go into looking for garbage in its imports.
        gc.set_threshold(50_000)
    code = run_guarded(lambda: app(standalone_mode=False))
    if is_short:
        gc.freeze()  # else all that was imported is looked through once more when the interpreter ends
    leave(code, last, at_once=any(thread.daemon for thread in threading.enumerate()))


def leave(code: int, last: Shutdown, *, at_once: bool = False) -> None:
    """End this process with a code, or return where all is well and was printed, unless it is to end `at_once`; then
    `last` ends it.

    Threads of a process group whose peer died can keep an interpreter from ending; output that goes to a full disk
    would change its exit code. So would a thread that was left waiting for another node in a store of torch: where the
    call comes back while the interpreter ends, C++ ends the process with SIGABRT.
    """
    try:
        flush_output()
    except OSError:
        os._exit(code)
    if code or at_once:
        os._exit(code)
    last.leave_with(code)


@outputs_put_back()
def run_guarded(work: Callable[[], object]) -> int:
    """Run a verb; the exit code of how it ended, its error printed."""
    trains = sys.argv[1:2] == ["train"]
    try:
        result = work()
        if not trains:
            with contextlib.suppress(BrokenPipeError):  # the reader has closed the pipe
                flush_output()  # an OSError where it cannot be written
        if result == EXIT_KILLED:  # what typer makes of a KeyboardInterrupt
            raise KeyboardInterrupt
    except CLICK_ERROR as error:
        error.show()
        return 2
    except ShardwayError as error:
        return report_error(error)
    except (KeyboardInterrupt, typer.Abort):
        heeds_the_first = trains or "shardway.train.run" in sys.modules
        print(f"shardway: ended at once by a {'second ' if heeds_the_first else ''}signal", file=sys.stderr)
        return EXIT_KILLED
    except SystemExit as error:
        if not isinstance(error.__context__, BrokenPipeError):
            raise
        return 0  # the reader has closed the pipe (`| head`); typer ends a verb so
    except Exception as error:
        from shardway.hardware.limits import explain_limit

        if why := explain_limit(error):
            return report_error(SiteError(why))
        if package := find_missing(error):
            verb = "".join(sys.argv[1:2])
            if verb in COMPUTING:
                package = "torch"  # which brings numpy
            return report_error(UserError(describe_missing(package, f"`shardway {verb}`")))
        if isinstance(error, OSError) and (refusal := _explain(error)):
            return report_error(refusal)
        with contextlib.suppress(OSError):
            traceback.print_exc()
        return report_error(Bug(f"{type(error).__name__}: {error}"))
    return result if isinstance(result, int) else 0


def _explain(error: OSError) -> ShardwayError | None:
    """A file system error as one of the place that it names, for the person responsible for it; None if it may be a
    defect."""
    if isinstance(error, FileNotFoundError) and folder_is_gone():
        return UserError("the current folder is not there.")
    path = Path(os.fsdecode(error.filename)) if isinstance(error.filename, str | bytes) else None
    writes = error.errno in UNWRITABLE
    if path is not None and error.errno in FORBIDDEN:
        with contextlib.suppress(OSError):  # what may be read there, or looked for, is forbidden to be written
            writes = os.access(path, os.R_OK) if os.path.lexists(path) else os.access(path.parent, os.X_OK)
    if writes:
        return JobError(
            f"{path or 'what this command writes or prints'} cannot be written: {error.strerror}.\n"
            f"  To do: {find_remedy(error, 'choose another place')}; then run the same command again."
        )
    if path is not None and error.errno in UNREADABLE:
        return unanswered(path, error)
    return None


_GONE = """
  The current folder was removed, or made anew since this shell entered it: no relative path leads anywhere from here.
  To do: `cd` to a folder that is there (`cd "$PWD"` where it was made anew), or name the run by its whole path."""


def report_error(error: ShardwayError) -> int:
    """Print an error for the person who can act, and return its exit code."""
    tail = "\n  This is a defect of Shardway: please report it with the lines above." if isinstance(error, Bug) else ""
    tail += _GONE if folder_is_gone() else ""
    with contextlib.suppress(OSError):  # stderr may be a file on a full disk
        print(f"shardway: {legible(str(error))}{tail}", file=sys.stderr)
    return error.exit_code
