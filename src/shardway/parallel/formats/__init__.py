"""Number formats: in which of them parameters are kept, products are taken and gradients travel.

Invariant: a format changes the rounding of a number, not the layout of it. A module here must not know of any axis.
"""
