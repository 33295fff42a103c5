"""Watches over the ranks of a node: what each does, and which of them hangs.

    heartbeat       what a rank does now, in shared memory
    stacks          where the threads of a rank are, and its last collectives, both asked for
    flight_records  these collectives as values: in which ranks wait, and for which rank
    hang            which ranks hang by their heartbeats, and how long an activity may take
    watch           reads the heartbeats and ends ranks that hang

Invariant: `hang` and `flight_records` are pure; only `watch` touches processes, and only those that this process has
started. No clock of another host plays a part. This room must not import torch nor know what the ranks compute.
"""
