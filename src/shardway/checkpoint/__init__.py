"""Checkpoints: the only room that writes tensors.

Invariant: a checkpoint exists only when it is complete (its manifest is written last and its folder appears by
rename), it is verified when it is read, and it is never overwritten. This room must not decide when to save.
"""
