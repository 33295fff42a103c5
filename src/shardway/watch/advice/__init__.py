"""What to change in a run: its events and samples as evidence, rules over them, and what they find.

Invariant: a rule is silent where something that it needs is missing; advice never raises, and never reads what a run
does not hold in its directory.
"""
