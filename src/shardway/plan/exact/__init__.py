"""What ranks of our own engine hold and send, to the byte, for the reference transformer.

Invariant: equal to what is counted on ranks of the CPU (docs/communication.md, docs/memory.md); the planner next door
estimates any model and engine.
"""
