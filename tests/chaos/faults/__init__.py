"""What can happen to two ranks and their agent, each at a moment that a seed chooses."""

from faults import disks, machines, numbers, pauses, processes, saves, stops, tiers, worlds
from faults.strike import Fault

FAULTS: tuple[Fault, ...] = (
    *processes.FAULTS,
    *pauses.FAULTS,
    *stops.FAULTS,
    *disks.FAULTS,
    *saves.FAULTS,
    *tiers.FAULTS,
    *machines.FAULTS,
    *numbers.FAULTS,
    *worlds.FAULTS,
)
