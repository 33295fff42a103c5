"""The version, for modules that must not import the whole package.

Invariant: equal to the version in pyproject.toml, which a test compares. This module imports nothing.
"""

from __future__ import annotations

__version__ = "0.2.0"
