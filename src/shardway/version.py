"""The version, where rooms that must not import the whole package find it.

Invariant: the same as in pyproject.toml, which a test compares. This module must not import anything.
"""

from __future__ import annotations

__version__ = "0.1.0"
