"""Calls of a Python function in other processes: the program that calls it in a job or a rank of a notebook, and how a
call and what came of it are files.

Invariant: what a file holds comes from the user's own run directory: a pickle runs code when it is read.
"""
