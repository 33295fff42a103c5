"""What the planner is asked about a run: its case, the fastest layout that fits, the fastest micro-batch that fits.

Invariant: what is chosen is what the rules of a run take as if the person had written it. This room must not read
files nor look at the machine: both come with the circumstances.
"""

from shardway.resolve.planned_case import ASSUMED_VOCAB, case_of, list_assumptions, shape_of_run

__all__ = ["ASSUMED_VOCAB", "case_of", "list_assumptions", "shape_of_run"]
