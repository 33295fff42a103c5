"""A plan as a configuration of other training libraries, so that what was priced can be started where it is wanted.

Invariant: what a library has no word for is told in sentences beside its files; no wish is dropped or bent in silence.
"""
