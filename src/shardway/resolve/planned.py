"""The planner's answers about a run: its case, the fastest layout that fits, the fastest micro-batch that fits.

Invariant: a choice passes the rules of a run as if the user had written it. No files are read and the machine is not
looked at: both come with the circumstances.
"""

from shardway.resolve.planned_case import ASSUMED_VOCAB, case_of, list_assumptions, shape_of_run

__all__ = ["ASSUMED_VOCAB", "case_of", "list_assumptions", "shape_of_run"]
