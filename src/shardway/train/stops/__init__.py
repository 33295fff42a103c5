"""How a run comes to its stop in time: who asks, when all agree, what is broken off for it.

Invariant: nothing ends on one rank alone; what was broken off leaves the state as if it had not begun. This room must
not save.
"""
