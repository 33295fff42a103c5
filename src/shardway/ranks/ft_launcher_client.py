"""The client of the monitor that NVIDIA's ft_launcher keeps for a rank: heartbeats, and how long it may be silent.

A heartbeat follows a change of activity, in the loop of steps one a second at most: it goes over a socket and is
answered. The monitor knows one limit, which the rank sets anew where its activity has another (`ranks.hang`),
so that a save may take longer than a step.

Invariant: a rank whose monitor is gone, silent or refuses trains on, and reports once that it is not watched. No
heartbeat comes from anywhere but a change of activity, so that a rank that hangs is silent. This is the only module
that imports nvidia_resiliency_ext, and only where ft_launcher has started the rank.

Sources: `RankMonitorClient` of nvidia-resiliency-ext 0.4.1, its `load_state_dict`, which "can be called at any moment".
"""

from __future__ import annotations

import contextlib
import logging
import math
from typing import Any

from shardway.errors import SiteError
from shardway.ranks.hang import ActivitySpan, HangTimeout
from shardway.telemetry.activity import Activity

BEAT_S = 1.0
"""The least time between two heartbeats in the loop of steps; limits are longer than the hang timeout by it."""

ANSWER_S = 10.0  # how long the monitor may take to answer before the rank goes on without it
_LOOP = frozenset((Activity.DATA, Activity.STEP, Activity.REPEAT, Activity.SCRIPT))
"""Activities that change too often to report each one: they share one limit, the longest."""


class MonitorHeartbeat:
    """A `HeartbeatSink` that the monitor of this rank reads; `client` is a `RankMonitorClient` that is connected. Until
    `watch` is called the monitor uses ft_launcher's own limit for the first heartbeat."""

    def __init__(self, client: Any) -> None:
        self._client: Any | None = client
        self._start_s: float | None = client.hb_timeouts.initial
        self._hang_timeout: HangTimeout | None = None
        self._activity, self._step, self._since = Activity.START, 0, 0.0
        self._first_step: int | None = None
        self._seen: set[Activity] = set()
        self._beat_at = -math.inf
        self._reported_s: float | None = -math.inf
        # A heartbeat at once: a rank that is lost before its first one is a failed restart to the monitor, which then
        # hears no further rank (RankMonitorState.ABORTED).
        self._beat()

    def watch(self, hang_timeout: HangTimeout | None) -> None:
        """From now on these limits count; None: the search for hangs is off."""
        self._hang_timeout = hang_timeout
        if hang_timeout is None:
            self._leave()
        self._beat()

    def write(self, activity: Activity, step: int, now: float) -> None:
        """Report that the rank is alive, if it is time to, and how long the activity may take."""
        if self._client is None:
            return
        before = self._activity
        if self._hang_timeout is not None and self._since:
            self._hang_timeout.observe(self._span(before), now - self._since)
        self._activity, self._step, self._since = activity, step, now
        self._seen.add(activity)
        if self._first_step is None and activity in _LOOP:
            self._first_step = step
        if not {before, activity} <= _LOOP or now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._beat()

    def _span(self, activity: Activity) -> ActivitySpan:
        """An activity now; the first step of a start and the one after it are its first."""
        early = self._first_step is None or self._step <= self._first_step + 1
        return ActivitySpan(activity, is_first=early and activity in _LOOP)

    def _limit_s(self) -> float | None:
        if self._hang_timeout is None:
            return self._start_s
        together = self._seen & _LOOP if self._activity in _LOOP else {self._activity}
        return BEAT_S + max(self._hang_timeout.limit_s(self._span(each), stopped=False) for each in together)

    def _beat(self) -> None:
        if self._client is None:
            return
        try:
            self._client.send_heartbeat()  # first: a limit that falls would be past already
            limit_s, reported = self._limit_s(), self._reported_s
            # A limit that falls a little is not reported again.
            unchanged = limit_s is not None and reported is not None and 0.8 * reported <= limit_s <= reported
            if limit_s != reported and not unchanged:
                limits = {"initial": limit_s, "subsequent": limit_s, "were_calculated": True}
                self._client.load_state_dict({"current_timeouts": {"heartbeat": limits}})
                self._reported_s = limit_s
        except Exception as error:  # of any class: a watch must not end its rank
            _report_unwatched(error)
            self._leave()

    def _leave(self) -> None:
        """The monitor does not miss a rank that has left; one that was only slow must not miss it either."""
        client, self._client = self._client, None
        with contextlib.suppress(Exception):
            if client is not None:
                client.shutdown_workload_monitoring()


def open_monitor() -> MonitorHeartbeat | None:
    """The heartbeat of a rank that ft_launcher has started; None if its monitor does not answer. Raises SiteError where
    nvidia_resiliency_ext cannot be imported."""
    try:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient
    except ImportError as error:
        raise SiteError(
            f"ft_launcher has started this rank, and its Python has no nvidia_resiliency_ext: {error}\n"
            "  To do: `pip install nvidia-resiliency-ext` in the environment of the ranks, or start them otherwise "
            "(site.launcher)."
        ) from error
    client = RankMonitorClient()
    try:
        client.init_workload_monitoring()
        client.rank_monitor_socket.settimeout(ANSWER_S)
        return MonitorHeartbeat(client)
    except Exception as error:  # of any class: a watch must not end its rank
        _report_unwatched(error)
        return None


def _report_unwatched(error: Exception) -> None:
    why = str(error).strip().partition("\n")[0] or type(error).__name__
    logging.getLogger("shardway").warning(
        "the monitor of ft_launcher does not answer, this rank is not watched: %s", why
    )
