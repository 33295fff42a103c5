"""Plans that are quick to make, and a reader of the pages made of them."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any

from shardway.plan.case import Machine, machine_of_part, machine_of_site
from shardway.plan.huggingface import find_named
from shardway.plan.page import render_page
from shardway.plan.planner import PlanOptions, PlanResult, ScalingPoint, curve_around, make_plan, request_of
from shardway.sites.load import load_site

H100 = "h100-sxm5-80gb"


@dataclass(frozen=True)
class Page:
    """A plan with its page."""

    answer: PlanResult
    curve: tuple[ScalingPoint, ...]

    @cached_property
    def text(self) -> str:
        return render_page(self.answer, self.curve)

    @cached_property
    def root(self) -> ET.Element:
        """The page as a tree; it is written so that XML readers take it, but for what HTML leaves open."""
        body = self.text[self.text.index("<body>") : self.text.index("</html>")]
        return ET.fromstring(body)

    @cached_property
    def words(self) -> str:
        """Everything that is read, with single spaces."""
        return " ".join(" ".join(self.root.itertext()).split())

    def table(self, caption: str) -> dict[str, list[str]]:
        """Rows of a table by their first cell."""
        for table in self.root.iter("table"):
            if (table.findtext("caption") or "").startswith(caption):
                rows = [["".join(cell.itertext()) for cell in row] for row in table.findall("tbody/tr")]
                assert len({row[0] for row in rows}) == len(rows)
                return {row[0]: row[1:] for row in rows}
        raise LookupError(caption)

    def drawing(self, label: str) -> ET.Element:
        """A picture by the beginning of what it says of itself."""
        return next(each for each in self.root.iter("svg") if (each.get("aria-label") or "").startswith(label))

    def tiles(self) -> dict[str, list[str]]:
        """Facts in large type: label -> value and notes."""
        found = {}
        for tile in self.root.iter("div"):
            if "tile" in (tile.get("class") or "").split():
                label, *rest = ["".join(part.itertext()) for part in tile]
                found[label] = rest
        return found


def number(text: str) -> float:
    """The number that a cell begins with."""
    return float(text.split()[0].rstrip("%").replace(",", ""))


def machine(name: str = "") -> Machine:
    return machine_of_site(load_site(name)) if name else machine_of_part(H100)


def make(said: PlanOptions, model: str, on: Machine, **of_machine: Any) -> Page:
    found = make_plan(request_of(said, find_named(model), replace(on, **of_machine)))
    return Page(found, curve_around(found))


@cache
def page(name: str) -> Page:
    """A plan by name, made once."""
    if name == "one node":
        return make(PlanOptions(nodes=1, seq_len=2048), "llama3-8b", machine("leonardo-booster"))
    if name == "does not fit":
        return make(PlanOptions(nodes=1, layout={"pp": 4}, offload=False), "llama3-70b", machine("leonardo-booster"))
    if name == "large":
        said = PlanOptions(gpus=16384, global_batch=2048, seq_len=8192, layout={"tp": 8, "pp": 16})
        return make(said, "llama3-405b", machine())
    if name == "few micro-batches":
        said = PlanOptions(gpus=16, global_batch=8, layout={"pp": 8, "dp_shard": 2}, schedule="gpipe", micro_batch=1)
        return make(said, "llama3-8b", machine())
    raise LookupError(name)


NAMES = ("one node", "does not fit", "large", "few micro-batches")
