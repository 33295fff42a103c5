"""From what a person asks for to an attempt that a scheduler has: the wish, what is wrong with it, the order, the job.

Invariant: all that can be known before the queue is told before the queue. This room must not judge how a run ended.
"""
