"""A plan as one HTML file that a browser shows without a network.

Invariant: every number is one of the answer's, rounded; each picture has a table beside it with the same values. This
package writes no file and decides nothing.
"""
