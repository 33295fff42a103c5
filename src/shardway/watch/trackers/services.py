"""Weights & Biases, MLflow and Trackio, each through its own library, which the user installs.

Invariants:
- A key or a password comes from the environment or from the library's own login, never from a run file: a setting that
  holds one is refused.
- A service that takes no step twice keeps what it had of it: of steps that a run repeats, only what is new is sent.
- Data stay on this machine, in the run directory, unless the environment or a setting names a server: so a node without
  internet loses nothing.
"""

from __future__ import annotations

import contextlib
import math
import netrc
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from shardway.errors import UserError
from shardway.places import expand_place
from shardway.watch.trackers.base import Tracker


def flatten(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Nested tables as one, with names such as "train.steps"."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= flatten(value, f"{before}{name}.") if isinstance(value, Mapping) else {f"{before}{name}": value}
    return found


class WeightsAndBiases(Tracker):
    """A run in a project of W&B. Without internet: WANDB_MODE=offline, and `wandb sync RUN/wandb/offline-run-*` later,
    or `shardway track RUN --to wandb`."""

    requires = "wandb"
    settings = {"project": "shardway", "entity": "", "group": ""}  # noqa: RUF012

    @classmethod
    def check_ready(cls, given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        if environ.get("WANDB_MODE", "online") != "online" or environ.get("WANDB_API_KEY"):
            return
        host = urlsplit(environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
        path = environ.get("NETRC") or str(expand_place("~/.netrc"))
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            if netrc.netrc(path).authenticators(host) is not None:
                return
        raise UserError(
            f"the tracker wandb has no key for {host}: neither WANDB_API_KEY nor a login in {path}.\n"
            "  To do: run `wandb login` on this machine, or set WANDB_API_KEY; or WANDB_MODE=offline, and send the run "
            "later by `wandb sync` or `shardway track RUN --to wandb`."
        )

    def start(self, name: str, directory: Path, configuration: Mapping[str, Any], id: str | None) -> str:
        import wandb

        settings = wandb.Settings(console="off", silent=True, disable_git=True, disable_code=True)
        self._run = wandb.init(
            project=self.given["project"],
            entity=self.given["entity"] or None,
            group=self.given["group"] or None,
            name=name,
            id=id,
            resume="allow",
            dir=str(directory),
            config=dict(configuration),
            settings=settings,
        )
        self._next = int(self._run.step)  # a step that was sent before is not taken again
        return str(self._run.id)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        if step >= self._next:
            self._next = step
            self._run.log(dict(values), step=step)

    def finish(self, state: str) -> None:
        self._run.finish(exit_code=1 if state == "fault" else 0)


class MLflow(Tracker):
    """A run of an experiment of MLflow, at `uri`, MLFLOW_TRACKING_URI, or a database in the run directory."""

    requires = "mlflow"
    settings = {"uri": "", "experiment": "shardway"}  # noqa: RUF012

    @classmethod
    def check_ready(cls, given: Mapping[str, Any], environ: Mapping[str, str]) -> None:
        if urlsplit(given["uri"]).password is not None:
            raise UserError(
                "track.settings: the uri of mlflow holds a password, which would be written into files of the run.\n"
                "  To do: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or MLFLOW_TRACKING_TOKEN) in the "
                "environment, and leave them out of the uri."
            )

    def start(self, name: str, directory: Path, configuration: Mapping[str, Any], id: str | None) -> str:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        local = f"sqlite:///{(directory / 'mlflow.db').absolute()}"
        uri = self.given["uri"] or os.environ.get("MLFLOW_TRACKING_URI") or local
        self._client = MlflowClient(tracking_uri=uri)
        self._waiting: list[Any] = []
        self._sent_at, self._last = 0.0, dict[str, int]()
        if id is not None:
            with contextlib.suppress(MlflowException):
                found = self._client.get_run(id)
                self._id = id
                self._client.update_run(id, status="RUNNING")
                for metric in found.data.metrics:
                    steps = [each.step for each in self._client.get_metric_history(id, metric)]
                    self._last[metric] = max(steps, default=-1)
                return id
        experiment = self._client.get_experiment_by_name(self.given["experiment"])
        where = None if uri != local else (directory / "mlruns").absolute().as_uri()
        number = (
            experiment.experiment_id
            if experiment is not None
            else self._client.create_experiment(self.given["experiment"], artifact_location=where)
        )
        self._id = str(self._client.create_run(number, run_name=name).info.run_id)
        params = [Param(key, str(value)[:6000]) for key, value in flatten(configuration).items()]
        for first in range(0, len(params), 100):  # the most of one call
            self._client.log_batch(self._id, params=params[first : first + 100])
        return self._id

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        from mlflow.entities import Metric

        for name, value in values.items():
            key = "".join(char if char.isalnum() or char in "_-. :/" else "_" for char in name)
            if step > self._last.get(key, -1):
                self._last[key] = step
                self._waiting.append(Metric(key, value, 0 if math.isnan(time) else round(1000 * time), step))
        self._send(at_once=False)

    def _send(self, *, at_once: bool) -> None:
        """Send what waits, a second after the last time or when there is much of it."""
        if self._waiting and (at_once or len(self._waiting) >= 500 or time.monotonic() - self._sent_at > 1.0):
            for first in range(0, len(self._waiting), 1000):  # the most of one call
                self._client.log_batch(self._id, metrics=self._waiting[first : first + 1000])
            self._waiting, self._sent_at = [], time.monotonic()

    def finish(self, state: str) -> None:
        self._send(at_once=True)
        status = {"finished": "FINISHED", "fault": "FAILED"}.get(state, "KILLED")
        self._client.set_terminated(self._id, status)


class Trackio(Tracker):
    """A run in a project of Trackio: in its own folder (TRACKIO_DIR), or in a Space, if `space` names one."""

    requires = "trackio"
    settings = {"project": "shardway", "space": ""}  # noqa: RUF012

    def start(self, name: str, directory: Path, configuration: Mapping[str, Any], id: str | None) -> str:
        import trackio

        self._run = trackio.init(
            project=self.given["project"],
            name=id or name,
            space_id=self.given["space"] or None,
            config={key: value for key, value in flatten(configuration).items() if value is not None},
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self._last = dict[str, int]()
        if id is not None and not self.given["space"]:
            with contextlib.suppress(Exception):  # it has nothing of this run yet, or has no such interface
                for row in trackio.sqlite_storage.SQLiteStorage.get_logs(self.given["project"], id):
                    for key in row:
                        self._last[key] = max(self._last.get(key, -1), int(row["step"]))
        return str(self._run.name)

    def log(self, step: int, values: Mapping[str, float], time: float) -> None:
        new = {name: value for name, value in values.items() if step > self._last.get(name, -1)}
        self._last |= dict.fromkeys(new, step)
        if new:
            self._run.log(new, step=step)

    def finish(self, state: str) -> None:
        self._run.finish()
