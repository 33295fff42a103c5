"""Benchmarks of a machine: what its links reach, and what they should reach.

Invariant: nothing here is imported by what trains; nothing is printed here.
"""
