"""Training: one loop, as explicit states, shared by every recipe and by scripts that own their loop.

Invariant: which samples a step sees, and what it does with them, follows from the resolved run and the step's number
alone. This room must not print or depend on how a model is made parallel.
"""
