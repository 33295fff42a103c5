from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import get_args

from pydantic import BaseModel

from shardway.sites.load import load_site
from shardway.sites.schema import SiteProfile

PAGE = (Path(__file__).parents[2] / "docs/sites.md").read_text(encoding="utf-8")
ALONE = {"format", "name", "title", "extends", "replaces", "scheduler", "launcher", "container"}


def test_the_page_names_every_field_of_the_schema() -> None:
    table = PAGE.split("<!-- the fields of a profile")[1].split("<!-- end")[0]
    rows = {match[1]: match[2] for match in re.finditer(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE)}
    assert set(rows) == set(SiteProfile.model_fields) - ALONE
    for name, words in rows.items():
        annotation = SiteProfile.model_fields[name].annotation
        for kind in (annotation, *get_args(annotation)):
            if isinstance(kind, type) and issubclass(kind, BaseModel) and name != "sources":
                assert [key for key in kind.model_fields if f"`{key}`" not in words] == []
    assert all(f"`{key}`" in PAGE or f"{key} = " in PAGE for key in ALONE)


def test_the_example_of_an_own_profile_loads(own_profiles: Path) -> None:
    [example] = re.findall(r"```toml\n# ~/\S+/my-juwels\.toml\n(.*?)```", PAGE, re.DOTALL)
    own_profiles.mkdir(parents=True)
    (own_profiles / "my-juwels.toml").write_text(example, encoding="utf-8")
    profile = load_site("my-juwels")
    assert profile.defaults == {"account": "myproject", "queue": "develbooster"}
    assert profile.storage.scratch == "/p/scratch/myproject"
    assert profile.network.host_suffix == "i"


def test_the_example_of_sources_is_toml() -> None:
    [example] = re.findall(r"```toml\n(\[sources\].*?)```", PAGE, re.DOTALL)
    assert len(tomllib.loads(example)["sources"]) == 3
