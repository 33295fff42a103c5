"""A plan as a configuration of other training libraries.

Invariant: what a library cannot express is stated in sentences beside its files; no setting is dropped silently.
"""
