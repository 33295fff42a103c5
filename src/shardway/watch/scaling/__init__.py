"""Scaling studies: how much faster the steps of a run are on more ranks, with intervals, and what limits it.

Invariant: what is read are finished runs; nothing is started or submitted here. numpy is imported where numbers are
computed, torch never.
"""
