"""How the accelerators and network adapters of one node are joined: the data model, and its reader of recorded text.

A path is the label that nvidia-smi prints: NV12 (12 NVLinks), or what PCIe traffic crosses, from near to far: PIX one
switch, PXB several, PHB a host bridge (usually the CPU), NODE several host bridges of one NUMA node, SYS the link
between sockets. XGMI is AMD's link between accelerators.

Invariants:
- Without torch and without a driver. What a text does not state is None, empty or absent, never guessed.
- A pair is stored once, with the lower index first. If the rows of its two ends differ, the farther path holds, and
  `notes` has both.

Sources: nvidia-smi(1), "topo -m" and its legend; `nvidia-smi nvlink -h`, `nvidia-smi topo -p2p`; rocm-smi --help,
"showtopo"; ROCm, "MI200 system optimization", on hops (2: over one CPU socket, 3: over two) and on weights (15 for one
link).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

# --- the data model

NVLINK, XGMI, SYS = "NV", "XGMI", "SYS"
PATHS = (NVLINK, XGMI, "PIX", "PXB", "PHB", "NODE", SYS)
"""Every kind of path, nearest first."""

P2P_REASONS = {
    "OK": "on",
    "CNS": "chipset not supported",
    "GNS": "GPU not supported",
    "TNS": "topology not supported",
    "NS": "not supported",
    "DR": "disabled by a driver option",
    "U": "unknown",
}
"""What the codes of `nvidia-smi topo -p2p` mean."""

_GIGATRANSFERS = {1: 2.5, 2: 5.0, 3: 8.0, 4: 16.0, 5: 32.0}


@dataclass(frozen=True)
class PcieLink:
    """Generation and number of lanes of a PCIe link."""

    generation: int
    lanes: int

    @property
    def bytes_per_s(self) -> float | None:
        """One direction, after the line code (8b/10b up to generation 2, 128b/130b from 3 on); None for a generation
        that is not known."""
        rate, code = _GIGATRANSFERS.get(self.generation), 0.8 if self.generation < 3 else 128 / 130
        return None if rate is None else rate * code * self.lanes / 8 * 1e9

    def __str__(self) -> str:
        return f"PCIe {self.generation} x{self.lanes}"


@dataclass(frozen=True)
class TopologyDevice:
    """One accelerator. `numa` is the NUMA node of its CPUs `cpus` ("0-7,16-23"); `nvlinks` are its active NVLinks,
    `inactive` the numbers of those that are not, `link_rate` bytes per second of one in one direction. `fabric` is the
    state of its registration at the NVSwitches ("" if there is none to register at), `slices` its MIG slices."""

    index: int
    name: str = ""
    bus: str = ""
    numa: int | None = None
    cpus: str = ""
    pcie: PcieLink | None = None
    pcie_most: PcieLink | None = None
    busy: bool = False
    nvlinks: int | None = None
    inactive: tuple[int, ...] = ()
    link_rate: float | None = None
    fabric: str = ""
    slices: int = 0
    uuid: str = ""

    @property
    def label(self) -> str:
        return f"GPU{self.index}"

    @property
    def place(self) -> str:
        """Its NUMA node, or where that is not stated the CPUs next to it; "" for neither."""
        return f"NUMA {self.numa}" if self.numa is not None else f"CPUs {self.cpus}" if self.cpus else ""


@dataclass(frozen=True)
class PairPath:
    """What joins two devices: a kind of `PATHS`, the number of NVLinks, the XGMI links in a row (`hops`), and whether
    they reach each other's memory (`p2p`, a code of `P2P_REASONS`; "" where it is not stated)."""

    kind: str
    links: int = 0
    hops: int = 1
    p2p: str = ""

    @property
    def label(self) -> str:
        if self.kind == NVLINK:
            return f"NV{self.links}"
        return f"{self.kind}{self.hops}" if self.hops > 1 else self.kind

    @property
    def distance(self) -> tuple[int, int, int]:
        """Larger is farther."""
        return PATHS.index(self.kind), -self.links, self.hops


@dataclass(frozen=True)
class AdapterPlace:
    """A network adapter: its driver's name, NUMA node, the state and rate (one direction; 0 for unknown) of its fastest
    port, the kind of the path to each device by index, and whether it has RDMA, so that NCCL_IB_HCA may name it."""

    name: str
    numa: int | None = None
    state: str = ""
    layer: str = ""
    rate_gbit_s: float = 0.0
    paths: Mapping[int, str] = field(default_factory=dict)
    has_rdma: bool = True

    @property
    def nearest(self) -> tuple[str, tuple[int, ...]]:
        """The nearest kind of path, and the devices at its end; "" for none."""
        if not self.paths:
            return "", ()
        kind = min(self.paths.values(), key=PATHS.index)
        return kind, tuple(index for index, each in sorted(self.paths.items()) if each == kind)


@dataclass(frozen=True)
class NodeTopology:
    """One node. `numa` are its NUMA nodes with CPUs, and these CPUs. `bound` are the CPUs that this process may use,
    None where it may use all; `own` is the device of this rank. `hidden` are accelerators on the PCI bus (their
    addresses) that the driver does not list. `pcie_alone`: recorded with `topo -mp`, which leaves NVLink out."""

    title: str
    devices: tuple[TopologyDevice, ...] = ()
    pairs: Mapping[tuple[int, int], PairPath] = field(default_factory=dict)
    adapters: tuple[AdapterPlace, ...] = ()
    numa: Mapping[int, str] = field(default_factory=dict)
    bound: frozenset[int] | None = None
    own: int | None = None
    hidden: tuple[str, ...] = ()
    pcie_alone: bool = False
    notes: tuple[str, ...] = ()

    def device(self, index: int) -> TopologyDevice:
        """Raises StopIteration for an index that is none."""
        return next(each for each in self.devices if each.index == index)

    def pair(self, first: int, second: int) -> PairPath | None:
        return self.pairs.get((min(first, second), max(first, second)))


def parse_cpus(text: str) -> frozenset[int]:
    """The numbers of "0-3,8"; empty for anything else."""
    found: set[int] = set()
    for part in text.split(","):
        if match := re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip()):
            found.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(found)


# --- recorded text

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_NAME = re.compile(r"GPU\d+|NIC\d+|[a-z][a-z0-9]*[_a-z0-9]*\d[a-z0-9_]*")
_MERGED_NAMES = re.compile(r"(?<=\d)(?=GPU\d|NIC\d|mlx\d|CPU Affinity|NUMA Affinity)")
_PATH = r"NV\d+|XGMI|PCIE|SYS|SOC|NODE|PHB|PXB|PIX|X"
_MERGED_PATHS = re.compile(rf"(?:{_PATH}){{2,}}")
_STATUS = ("OK", "CNS", "GNS", "TNS", "NS", "DR", "U")
_TRAILERS = ("CPU Affinity", "NUMA Affinity", "GPU NUMA ID")
_COMMAND = re.compile(r"nvidia-smi topo -m(p?)(?= |$)")
_TITLE = re.compile(r"=+ (.+?) =+")
_LISTED = re.compile(r"GPU (\d+(?:,\d+)*): (.+?)(?: \(UUID: .*\))?")
_LINK_STATE = re.compile(r"Link (\d+): (.+)")
_ROCM_NUMA = re.compile(r"GPU ?\[?(\d+)\]?\s*: \(Topology\) Numa Node: (\d+)")
_ROCM_NAME = re.compile(r"GPU ?\[?(\d+)\]?\s*: Card [Ss]eries:\s*(.+)")
_NIC_NAME = re.compile(r"(NIC\d+):\s*(\S+)")


def read_recorded(texts: Mapping[str, str], device: str = "") -> list[NodeTopology]:
    """The nodes that recorded texts describe, by name of the text: output of `nvidia-smi topo -m`, `nvidia-smi nvlink
    -s`, `nvidia-smi topo -p2p r`, `nvidia-smi -L`, `rocm-smi --showtopo --showproductname`, in any order, also with
    other text around. Several texts are one node, unless more than one has a matrix of paths. `device` is the driver's
    name of the devices where no text has it. Raises ValueError with a sentence for a text in which nothing is
    recognised."""
    read = {name: _RecordedText(name, text) for name, text in texts.items()}
    for name, each in read.items():
        if not each.is_known:
            raise ValueError(f"{name} has no topology")
    with_matrix = [each for each in read.values() if each.has_matrix]
    if len(with_matrix) < 2:
        first, *others = sorted(read.values(), key=lambda each: not each.has_matrix)
        for other in others:
            first.add(other)
        return [first.make(" + ".join(read), device)]
    return [each.make(name, device) for name, each in read.items()]


class _RecordedText:
    """What one text says, line by line."""

    def __init__(self, name: str, text: str) -> None:
        self.columns: list[str] = []
        self.cells: dict[tuple[str, str], str] = {}
        self.p2p: dict[tuple[str, str], str] = {}
        self.weights: dict[tuple[str, str], str] = {}
        self.hops: dict[tuple[str, str], str] = {}
        self.places: dict[str, tuple[str, int | None]] = {}
        self.names: dict[int, str] = {}
        self.adapter_names: dict[str, str] = {}
        self.states: dict[int, dict[int, str]] = {}
        self.slices: dict[int, int] = {}
        self.notes: list[str] = []
        self._header: list[str] = []
        self._trailers: list[str] = []
        self._section = ""
        self._listed: list[int] = []
        self._rows: set[str] = set()  # of the present matrix
        self._seen: set[str] = set()  # of any
        self._ended = False
        self._is_mp = self.pcie_alone = False
        for raw in text.splitlines():
            self._read(_clean(raw))
        if self._ended:
            self.notes.append(f"{name} has a second matrix of paths, which is left out")

    @property
    def has_matrix(self) -> bool:
        return bool(self.columns)

    @property
    def is_known(self) -> bool:
        return bool(self.columns or self.states or self.p2p or self.names)

    def add(self, other: _RecordedText) -> None:
        """Take in what another text says of the same node."""
        self.p2p |= other.p2p
        self.places |= {name: place for name, place in other.places.items() if name not in self.places}
        self.names |= other.names
        self.adapter_names |= other.adapter_names
        self.states |= other.states
        self.slices |= other.slices
        self.notes += other.notes

    # --- one line

    def _read(self, line: str) -> None:
        if match := _COMMAND.search(line):
            self._is_mp = bool(match[1])
        elif match := _TITLE.fullmatch(line):
            self._section, self._header = match[1].lower(), []
        elif match := _LISTED.fullmatch(line):
            self._listed = [int(index) for index in match[1].split(",")]
            self.names |= dict.fromkeys(self._listed, match[2])
        elif match := _LINK_STATE.fullmatch(line):
            for index in self._listed:
                self.states.setdefault(index, {})[int(match[1])] = match[2]
        elif "all links are inactive" in line.lower():
            for index in self._listed:
                self.states.setdefault(index, {})
        elif re.match(r"MIG \S+ +Device", line):
            for index in self._listed:
                self.slices[index] = self.slices.get(index, 0) + 1
        elif match := _ROCM_NUMA.fullmatch(line):
            self.places[f"GPU{match[1]}"] = ("", int(match[2]))
        elif match := _ROCM_NAME.fullmatch(line):
            self.names[int(match[1])] = match[2].strip()
        elif match := _NIC_NAME.fullmatch(line):
            self.adapter_names[match[1]] = match[2]
        elif not self._read_header(line):
            self._read_row(line)

    def _read_header(self, line: str) -> bool:
        """A line of column names, of which one is GPU0 or another GPU."""
        trailers = [name for name in _TRAILERS if name in line]
        named = line
        for name in trailers:
            named = named.partition(name)[0]
        words = _MERGED_NAMES.sub(" ", named).split()
        if not words or not any(re.fullmatch(r"GPU\d+", word) for word in words):
            return False
        if not all(_NAME.fullmatch(word) for word in words):
            return False
        self._header, self._trailers, self._rows = words, trailers, set()
        return True

    def _read_row(self, line: str) -> None:
        name, *words = line.split() or [""]
        if name not in self._header:
            return
        kinds: list[str] = []
        while words and len(kinds) < len(self._header):
            found = re.findall(_PATH, words[0]) if _MERGED_PATHS.fullmatch(words[0]) else [words[0]]
            if not all(_is_cell(cell) for cell in found):
                break
            kinds += found
            del words[0]
        cells = {(name, column): kind for column, kind in zip(self._header, kinds, strict=False) if column != name}
        if "weight" in self._section or "hops" in self._section:
            (self.weights if "weight" in self._section else self.hops).update(cells)
        elif any(cell in _STATUS for cell in cells.values()):
            self.p2p |= cells
        elif kinds:
            self._take_row(name, cells, words)

    def _take_row(self, name: str, cells: Mapping[tuple[str, str], str], rest: Sequence[str]) -> None:
        if not self._rows and name in self._seen:
            self._ended = True  # another machine
        self._rows.add(name)
        self._seen.add(name)
        if self._ended:
            return
        if not self.columns:
            self.columns, self.pcie_alone = self._header, self._is_mp
        self.cells |= cells
        if rest and self._trailers and name.startswith("GPU"):
            self.places[name] = _read_place(rest, self._trailers)

    # --- the node

    def make(self, title: str, device: str) -> NodeTopology:
        """The node of this text."""
        gpus = sorted(
            {int(name[3:]) for name in self.columns if name.startswith("GPU")} | set(self.names) | set(self.states)
        )
        notes, pairs = list(self.notes), {}
        for place, first in enumerate(gpus):
            for second in gpus[place + 1 :]:
                path = self._find_path(f"GPU{first}", f"GPU{second}", notes)
                if path is not None:
                    pairs[first, second] = path
        adapters = [self._make_adapter(name, gpus) for name in self.columns if not name.startswith("GPU")]
        devices = [self._make_device(index, device) for index in gpus]
        if self.pcie_alone:
            notes.append("recorded with nvidia-smi topo -mp, which leaves NVLink out: record nvidia-smi topo -m")
        return NodeTopology(
            title, tuple(devices), pairs, tuple(adapters), pcie_alone=self.pcie_alone, notes=tuple(notes)
        )

    def _make_device(self, index: int, device: str) -> TopologyDevice:
        cpus, numa = self.places.get(f"GPU{index}", ("", None))
        made = TopologyDevice(
            index, self.names.get(index, device), numa=numa, cpus=cpus, slices=self.slices.get(index, 0)
        )
        states = self.states.get(index)
        if states is None:
            return made
        rates = [float(match[1]) * 1e9 for said in states.values() if (match := re.match(r"([\d.]+) GB/s", said))]
        inactive = tuple(number for number, said in states.items() if "inactive" in said.lower())
        rate = max(rates, default=None)
        return replace(made, nvlinks=len(states) - len(inactive), inactive=inactive, link_rate=rate)

    def _find_path(self, first: str, second: str, notes: list[str]) -> PairPath | None:
        ends = [
            path
            for pair in ((first, second), (second, first))
            if (path := self._parse_path(self.cells.get(pair, ""), pair)) is not None
        ]
        if not ends:
            return None
        if ends[0] != ends[-1]:
            notes.append(f"{first} and {second}: one row has {ends[0].label}, the other {ends[-1].label}")
        path = max(ends, key=lambda each: each.distance)
        status = [code for pair in ((first, second), (second, first)) if (code := self.p2p.get(pair))]
        return replace(path, p2p=next((code for code in status if code != "OK"), "OK" if status else ""))

    def _parse_path(self, cell: str, pair: tuple[str, str]) -> PairPath | None:
        if match := re.fullmatch(r"NV(\d+)", cell):
            return PairPath(NVLINK, int(match[1]))
        if cell == XGMI:
            weight = self.weights.get(pair, "")
            return PairPath(XGMI, hops=max(1, int(weight) // _WEIGHT_OF_A_LINK) if weight.isdecimal() else 1)
        if cell == "PCIE":
            return PairPath({"2": "NODE", "3": SYS}.get(self.hops.get(pair, ""), "PHB"))
        kind = {"SOC": SYS}.get(cell, cell)  # its name before driver 384
        return PairPath(kind) if kind in PATHS else None

    def _make_adapter(self, name: str, gpus: Iterable[int]) -> AdapterPlace:
        paths = {}
        for index in gpus:
            for pair in ((f"GPU{index}", name), (name, f"GPU{index}")):
                if (path := self._parse_path(self.cells.get(pair, ""), pair)) is not None:
                    paths[index] = path.kind
        return AdapterPlace(self.adapter_names.get(name, name), paths=paths)


_WEIGHT_OF_A_LINK = 15


def _clean(raw: str) -> str:
    """A line without colours, marks of quotation and comments, and spaces around it; written-out tabs are spaces."""
    line = _ESCAPES.sub("", raw).replace("\\t", " ").replace("\xa0", " ")
    return line.strip().lstrip("#>|").strip()


def _is_cell(word: str) -> bool:
    return bool(re.fullmatch(rf"{_PATH}|\d+|N/A", word)) or word in _STATUS


def _read_place(words: Sequence[str], trailers: Sequence[str]) -> tuple[str, int | None]:
    """CPUs and NUMA node from what follows the cells of a row; any of the values may be absent."""
    values = list(words)
    if len(values) < len(trailers) and "-" not in values[0] and "," not in values[0]:
        values.insert(0, "")  # no CPU is next to it that this process may use
    of = dict(zip(trailers, values, strict=False))
    numa, memory = of.get("NUMA Affinity", ""), of.get("GPU NUMA ID", "")
    first = numa.partition(",")[0] if memory.isdecimal() else numa  # Grace: its memory and that of GPUs
    cpus = of.get("CPU Affinity", "")
    return ("" if cpus == "N/A" else cpus), int(first) if first.isdecimal() else None


def list_pairs(topology: NodeTopology) -> Iterator[tuple[tuple[int, int], PairPath]]:
    """The pairs in the order of their devices."""
    yield from sorted(topology.pairs.items())
