"""What the hardware of a job does, sampled on each node and kept in the run directory.

Invariant: only the standard library and the accelerator's own library are imported where samples are taken, so that the
sampling process starts fast and costs little. This room reads no events and judges nothing.
"""
