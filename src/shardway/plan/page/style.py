"""The style sheet of a plan's page: colours by role for light, dark and paper.

Invariant: a picture names a colour by the role of what it shows, so that an item has one colour wherever it is. This
module must not hold markup.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MEMORY_ROLES: Mapping[str, str] = MappingProxyType(
    {
        "weights": "blue",
        "gradients": "sky",
        "optimizer": "navy",
        "activations": "orange",
        "working": "amber",
        "gathered": "teal",
        "messages": "rose",
        "fragmentation": "stone",
        "context": "slate",
    }
)
"""Colours of what lies in a device's memory: states are blue, what comes and goes is warm."""

TIME_ROLES: Mapping[str, str] = MappingProxyType(
    {
        "products": "blue",
        "attention": "navy",
        "other operators": "sky",
        "waiting for the host": "slate",
        "tensor messages": "orange",
        "context messages": "amber",
        "expert messages": "brown",
        "shard messages": "rose",
        "stage messages": "plum",
        "bubble": "stone",
        "gradient messages": "red",
        "weight messages": "pink",
        "optimizer": "teal",
        "rest of the step": "grey",
    }
)
"""Colours of what a step goes to: computation is blue, messages are warm, waiting is grey."""

OTHER_ROLE = "green"
"""Of an item that has no colour of its own."""

_LIGHT: Mapping[str, str] = MappingProxyType(
    {
        "page": "#f6f6f4",
        "card": "#ffffff",
        "ink": "#1d2329",
        "soft": "#5b656e",
        "line": "#dcdedb",
        "head": "#f1f1ee",
        "good": "#17763f",
        "bad": "#bb2d28",
        "warn": "#96600d",
        "blue": "#3b78d0",
        "sky": "#86b6ee",
        "navy": "#274b8f",
        "orange": "#e08325",
        "amber": "#efbf4d",
        "brown": "#9a6330",
        "teal": "#239a8b",
        "rose": "#d2587f",
        "plum": "#8d5bb0",
        "red": "#c4473f",
        "pink": "#e99ab2",
        "green": "#6f9a3b",
        "stone": "#c3c2ba",
        "slate": "#77818b",
        "grey": "#a5adb4",
    }
)
_DARK: Mapping[str, str] = MappingProxyType(
    {
        "page": "#14171a",
        "card": "#1c2024",
        "ink": "#e4e7ea",
        "soft": "#a3adb6",
        "line": "#343b41",
        "head": "#23282d",
        "good": "#4fca83",
        "bad": "#ff7b74",
        "warn": "#e7b45a",
        "blue": "#4f8ae0",
        "sky": "#8fbdf2",
        "navy": "#3a5fa8",
        "orange": "#e58f38",
        "amber": "#e6bd5a",
        "brown": "#a97446",
        "teal": "#33ab9b",
        "rose": "#d9688d",
        "plum": "#a175c4",
        "red": "#d0584f",
        "pink": "#d98fa7",
        "green": "#86b04f",
        "stone": "#5c625f",
        "slate": "#8a949e",
        "grey": "#727b83",
    }
)

_RULES = """
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 26px; line-height: 1.25; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 8px; }
h3 { font-size: 14px; margin: 18px 0 6px; }
p { margin: 4px 0 10px; max-width: 84ch; overflow-wrap: anywhere; }
ul { margin: 4px 0; padding-left: 20px; max-width: 84ch; }
li { margin: 3px 0; overflow-wrap: anywhere; }
.soft { color: var(--soft); }
.verdict { font-weight: 600; } .verdict.good { color: var(--good); } .verdict.bad { color: var(--bad); }
.verdict.unsure { color: var(--warn); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(210px, 1fr)); gap: 10px; margin-top: 16px; }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 8px; }
.tile { padding: 10px 14px; min-width: 0; }
.tile b { display: block; font-size: 21px; line-height: 1.3; font-weight: 600; font-variant-numeric: tabular-nums; }
.tile span { display: block; color: var(--soft); font-size: 13px; line-height: 1.4; overflow-wrap: anywhere; }
figure { margin: 10px 0; padding: 12px 14px; } figcaption { font-size: 13px; margin-top: 8px; }
.scroll { overflow-x: auto; }
svg { display: block; width: 100%; height: auto; }
svg text { fill: var(--ink); font: 12px system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
svg .soft { fill: var(--soft); } svg .small { font-size: 10px; } svg .bold { font-weight: 600; }
svg .grid { stroke: var(--line); stroke-width: 1; fill: none; }
svg .axis { stroke: var(--soft); stroke-width: 1; fill: none; }
svg .usable { stroke: var(--good); stroke-width: 2; stroke-dasharray: 5 3; }
svg .physical { stroke: var(--bad); stroke-width: 2; }
svg .curve { stroke: var(--blue); stroke-width: 2.2; fill: none; }
svg .ideal { stroke: var(--soft); stroke-width: 1.4; stroke-dasharray: 4 4; fill: none; }
svg .dot { fill: var(--blue); } svg .asked { fill: var(--card); stroke: var(--blue); stroke-width: 2.5; }
svg .cross { stroke: var(--bad); stroke-width: 2; fill: none; }
svg .whisker { stroke: var(--ink); stroke-width: 1.5; fill: none; }
svg .lane { fill: var(--head); stroke: var(--line); stroke-width: 0.6; }
svg .box { stroke: var(--card); stroke-width: 0.6; }
svg text.on { fill: #ffffff; font-size: 10px; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; color: var(--soft); margin: 8px 0 0; padding: 0;
  list-style: none; max-width: none; }
.key li { margin: 0; white-space: nowrap; }
.swatch { display: inline-block; width: 11px; height: 11px; margin-right: 6px; vertical-align: -1px; }
.swatch svg { width: 11px; height: 11px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
caption { text-align: left; padding: 9px 12px; font-weight: 600; }
th, td { text-align: left; padding: 5px 12px; border-top: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--soft); font-weight: 500; background: var(--head); white-space: nowrap; }
tbody th { font-weight: 400; white-space: nowrap; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.words { min-width: 190px; }
tr.sum td, tr.sum th { font-weight: 600; border-top: 2px solid var(--soft); }
tr.chosen, tr.chosen th { font-weight: 600; }
.table { margin: 10px 0; }
.two { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; }
footer { margin-top: 40px; font-size: 13px; color: var(--soft); }
@media (max-width: 760px) {
  main { padding: 18px 12px 40px; }
  .two { grid-template-columns: minmax(0, 1fr); }
  .tiles { grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); }
  h1 { font-size: 22px; } .tile b { font-size: 18px; }
}
@media print {
  main { max-width: none; padding: 0; } body { font-size: 11pt; background: none; } p { break-after: avoid; }
  .card { break-inside: avoid; } h2, h3, caption { break-after: avoid; }
  .scroll { overflow: visible; } .scroll svg { min-width: 0 !important; }
  table { font-size: 9pt; } th, td { padding: 3px 6px; } td.words { min-width: 0; }
  svg *, .swatch, .swatch * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""


def render_style() -> str:
    """The whole sheet: light, dark where the reader's system is dark and the page is on a screen, and paper."""
    fills = "\n".join(f"svg .{role} {{ fill: var(--{role}); }}" for role in sorted({*_roles()}))
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_variables(_DARK)} }} }}"
    return f":root {{ color-scheme: light dark; {_variables(_LIGHT)} }}\n{dark}\n{_RULES}{fills}\n"


def _roles() -> list[str]:
    return [*MEMORY_ROLES.values(), *TIME_ROLES.values(), OTHER_ROLE]


def _variables(colours: Mapping[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in colours.items())
