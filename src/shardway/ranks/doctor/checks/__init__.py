"""The checks, one module a part of the machine."""
