"""What tests of reports read from a page."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest


def page_data(html: str) -> dict[str, Any]:
    """The data of a page's script; they must be strict JSON."""
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', html, flags=re.DOTALL)
    assert found
    data: dict[str, Any] = json.loads(found[1], parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    return data


def figure_of(html: str, name: str) -> dict[str, Any]:
    [figure] = [figure for figure in page_data(html)["figures"] if figure["name"] == name]
    return dict(figure)
