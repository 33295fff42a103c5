"""A plan as one HTML file that a browser shows without a network.

Invariant: every number is one of the answer's, rounded; a picture has a table beside it that says the same. This room
must not write the file, nor decide anything.
"""
