"""The command line: one file a verb, or verbs of one subject. The only room that prints and exits.

Invariant: facts go to stdout, everything else to stderr; a user's mistake ends with a message and an exit code,
never with a traceback. Nothing in here imports torch before a verb needs it.
"""
