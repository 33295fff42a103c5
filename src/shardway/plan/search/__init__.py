"""Layouts that are legal for a model on a machine, the best of them, and why the others lost.

Invariant: what is returned was priced by the same functions that price a single plan.
"""
