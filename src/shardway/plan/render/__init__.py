"""A plan as text for a person and as facts for a program.

Invariant: every number is one of the answer's, rounded; nothing is computed here that decides anything. This room must
not print.
"""
