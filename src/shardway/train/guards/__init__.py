"""The parts of the guard (`train.guard`): passes that are run again, spikes, and what is said.

Invariant: nothing here changes what a step comes to. This room must not decide what follows from what it finds.
"""
