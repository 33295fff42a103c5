"""Plan pages in a browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from plan_pages import NAMES, page

from chromium import BROWSER, NO_BROWSER, browser, check_page


@pytest.mark.slow
@pytest.mark.skipif(not BROWSER, reason=NO_BROWSER)
def test_plan_pages_are_sound_at_every_width_in_both_themes(tmp_path: Path) -> None:
    with browser() as opened:
        for number, name in enumerate(NAMES[::2]):
            path = tmp_path / f"{number}.html"
            path.write_text(page(name).text, encoding="utf-8")
            check_page(opened, path)
