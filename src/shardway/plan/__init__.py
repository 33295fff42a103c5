"""What would happen: numbers about a run before it runs, from its layout and shapes alone.

Invariant: pure functions without torch; every formula cites its source and is held against what a run does. This room
must not read files or look at the machine.
"""
