"""Messages to the owner of a run: at its end, at a failure, and where ranks made no progress.

Rank 0 sends how the run ended; where an agent of Shardway started the ranks, the agent sends that they failed for good,
or that they hung. Mail goes through the site, by `sendmail` or `mail` of the node; a webhook takes JSON with a text, as
Slack, Mattermost and Rocket.Chat do, or is a topic of ntfy.

Invariants:
- One message an event, whichever process sees it first: a file in the run directory is its mark.
- Sending takes at most `MOST_S` seconds, in a thread, and never raises: a failure is returned as a line of text.
- The URL of a webhook is a secret. It is read from the environment when it is needed, and stands in no file, message
  or command line.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from shardway.errors import render_reason
from shardway.rundir.directory import RunDir

if TYPE_CHECKING:
    from shardway.runfile.schema import NotifySection

MOST_S = 8.0  # how long all messages of one event may take together
ANSWER_S = 5.0  # how long a server may be silent
MAILER_S = 7.0
_MAILERS = ("sendmail", "/usr/sbin/sendmail", "/usr/lib/sendmail")
_MAIL_COMMANDS = ("mail", "mailx")
_WORDS = {"end": "", "failure": "failed", "no_progress": "made no progress"}


@dataclass(frozen=True)
class RunMessage:
    """A subject in one line, and the text."""

    subject: str
    text: str


def notify(run: RunDir, section: NotifySection, kind: str, state: str, reason: str) -> list[str]:
    """Send one event of a run ("end", "failure", "no_progress") as its [notify] asks for, unless it was sent; returns a
    line for each way that failed."""
    if kind not in section.on or not (section.mail or section.webhook):
        return []
    failures: list[str] = []

    def work() -> None:
        try:
            if not _mark(run, kind):
                return
            message = render_message(run, kind, state, reason)
        except Exception as error:
            failures.append(f"the message about this run was not sent: {type(error).__name__}")
            return
        ways: tuple[tuple[str, str, Callable[..., None]], ...] = (
            ("mail", section.mail, send_mail),
            ("webhook", section.webhook, send_webhook),
        )
        for name, target, send in ways:
            if target:
                try:
                    send(message, target, section.form, os.environ)
                except Exception as error:  # whatever a mailer or a server does
                    failures.append(f"notify.{name}: not sent: {describe_failure(error)}")

    thread = threading.Thread(target=work, name="shardway-notify", daemon=True)
    thread.start()
    thread.join(MOST_S)
    if thread.is_alive():
        return [*failures, f"notify: not sent within {MOST_S:.0f} s"]
    return failures


def find_lacks(section: NotifySection, environ: Mapping[str, str]) -> list[str]:
    """What this process lacks to send what [notify] asks for, a line for each way; looked for when a run begins, since
    its end is too late to learn of it."""
    lacks = []
    if section.webhook and not environ.get(section.webhook, "").strip():
        remedy = f"`export {section.webhook}=URL`, or a line of it in ~/.config/shardway/secrets.env for jobs"
        what = f"notify.webhook: the variable {section.webhook} is not set here; no message can be sent"
        lacks.append(f"{what}. To do: {remedy}")
    if section.mail and not _find_program(*_MAILERS, *_MAIL_COMMANDS):
        lacks.append("notify.mail: this node has neither sendmail nor mail; no mail can be sent. To do: notify.webhook")
    return lacks


def render_message(run: RunDir, kind: str, state: str, reason: str) -> RunMessage:
    """What happened, how far the run is, and where to look."""
    status = run.read_status()
    step, total, loss = status.get("step", 0), status.get("total_steps"), status.get("loss")
    # The status of a rank that hung or was killed is older than its last step.
    last = next((event for event in reversed(run.last_events()) if event["event"] in ("step", "started")), {})
    if isinstance(last.get("step"), int) and isinstance(step, int) and last["step"] > step:
        step, loss = last["step"], last.get("loss", loss)
    place = f"step {step} of {total}" if isinstance(total, int) else f"step {step}"
    path = run.path.absolute()
    lines = [
        render_reason(reason) or "no reason is known",
        *([f"loss       {loss:.4f}"] if isinstance(loss, float) else []),
        f"directory  {path}",
        f"host       {socket.gethostname()}",
        f"look       shardway status {shlex.quote(str(path))}",
    ]
    return RunMessage(f"run {run.path.name} {_WORDS[kind] or state} at {place}", "\n".join(lines))


def send_mail(message: RunMessage, address: str, form: str, environ: Mapping[str, str]) -> None:
    """Send by the node's own mailer. Raises FileNotFoundError where it has none, and what the mailer does."""
    subject = "".join(char if char.isprintable() else " " for char in message.subject)
    if mailer := _find_program(*_MAILERS):
        head = f"To: {address}\nSubject: [shardway] {subject}\nContent-Type: text/plain; charset=utf-8\n\n"
        command, text = [mailer, "-i", "--", address], f"{head}{message.text}\n"
    elif mailer := _find_program(*_MAIL_COMMANDS):
        command, text = [mailer, "-s", f"[shardway] {subject}", "--", address], f"{message.text}\n"
    else:
        raise FileNotFoundError("this node has neither sendmail nor mail")
    subprocess.run(command, input=text.encode(), check=True, capture_output=True, timeout=MAILER_S)


def _find_program(*names: str) -> str:
    """The first of these programs that is here; "" for none."""
    return next((found for name in names if (found := shutil.which(name))), "")


def send_webhook(message: RunMessage, variable: str, form: str, environ: Mapping[str, str]) -> None:
    """Post to the URL in a variable. Raises LookupError where it is not set, and what the server does."""
    url = environ.get(variable, "").strip()
    if not url:
        raise LookupError(f"the variable {variable} is not set here")
    host = urlsplit(url).hostname or ""
    is_ntfy = form == "ntfy" or (form == "auto" and host.split(".")[0] == "ntfy")
    if is_ntfy:
        title = message.subject.encode("ascii", "replace").decode()
        body, headers = message.text.encode(), {"Title": f"shardway: {title}"}
    else:
        body = json.dumps({"text": f"shardway: {message.subject}\n{message.text}"}).encode()
        headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, body, headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=ANSWER_S) as answer:
            answer.read(1024)
    except urllib.error.HTTPError as error:
        error.close()
        raise


def describe_failure(error: Exception) -> str:
    """Why sending failed, in words that never hold the URL."""
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answered {error.code}"
    if isinstance(error, urllib.error.URLError):
        reason = error.reason
        return (os.strerror(reason.errno) if isinstance(reason, OSError) and reason.errno else "") or "no connection"
    if isinstance(error, subprocess.CalledProcessError):
        return f"the mailer ended with {error.returncode}"
    if isinstance(error, FileNotFoundError | LookupError):
        return str(error.args[0])
    return type(error).__name__


def _mark(run: RunDir, kind: str) -> bool:
    """Whether this process is the first to see this event of this start of the run."""
    started = [event for event in run.last_events() if event["event"] == "started"]
    started = started or list(run.all_events(names=("started",)))  # of a long run it is far from the end
    epoch = started[-1].get("epoch", 0) if started else 0
    name = "ended" if kind in ("end", "failure") else kind
    folder: Path = run.notified
    with contextlib.suppress(FileExistsError):
        folder.mkdir(exist_ok=True)
    try:
        (folder / f"epoch-{epoch:06d}-{name}").touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True  # a full disk is a reason to send
    return True
