"""From what a person said to a plan: the question with what had to be assumed, and everything that answers it.

Invariant: what nobody said is assumed in one place and told. This room must not price, search or print.
"""
