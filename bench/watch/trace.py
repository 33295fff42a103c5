"""Reading traces: `shardway trace`'s reader and whole analysis beside others on the same file, each in its own process.

    python bench/watch/trace.py FILE [--copies 8] [--python /venv/with/HTA/bin/python] [--rounds 3]
    python bench/watch/trace.py --totals FILE... --python /venv/with/HTA/bin/python

Prints CPU seconds, MB/s of JSON, the speed as a share of `orjson.loads`, and the peak of memory over the file's size
(with the interpreter and all imports, and without them). `--copies` repeats the events of a file, so that a small one
is measured like a large one. orjson and HolisticTraceAnalysis are looked for in the Python that is named; what it lacks
is left out. Rounds are interleaved; medians are printed with the range. `--totals` compares what is counted instead:
span, computing and idle time of each file, as differences from HTA's (without its rounding to microseconds) in percent
of the span.
"""

from __future__ import annotations

import argparse
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

_MEASURE = """
import sys, time
def peak():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmHWM"))
{imports}
base = peak()
begin = time.process_time()
{work}
spent = time.process_time() - begin
print(spent, base, peak())
"""

READERS = {
    "orjson.loads": ("import orjson", "orjson.loads(open(sys.argv[1], 'rb').read())", "other"),
    "json.load": ("import json", "json.load(open(sys.argv[1], 'rb'))", "ours"),
    "shardway read": (
        "from pathlib import Path; import numpy; from shardway.watch.trace.reader import read_trace",
        "read_trace(Path(sys.argv[1]))",
        "ours",
    ),
    "shardway trace": (
        "from pathlib import Path; import numpy; from shardway.watch.trace.analysis import analyse_trace",
        "analyse_trace(Path(sys.argv[1]))",
        "ours",
    ),
    "HTA breakdown": (
        "import warnings, logging; warnings.filterwarnings('ignore'); logging.disable(50)\n"
        "from hta.trace_analysis import TraceAnalysis",
        "TraceAnalysis(trace_files={0: sys.argv[1]}).get_temporal_breakdown(visualize=False)",
        "other",
    ),
}
"""Name -> imports, work, and whose Python."""


def repeat_events(path: Path, copies: int, folder: Path) -> Path:
    """The file's text, with its events so many times."""
    text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    found = json.loads(text)
    events = found["traceEvents"] * copies
    made = folder / "trace.json"
    made.write_text(json.dumps({**found, "traceEvents": events}, indent=1), encoding="utf-8")
    return made


def measure(name: str, path: Path, other: str) -> tuple[float, float, float] | None:
    """CPU seconds, memory before and at the peak; None where the reader is not installed or fails."""
    imports, work, whose = READERS[name]
    program = _MEASURE.format(imports=imports, work=work)
    python = sys.executable if whose == "ours" else other
    ended = subprocess.run([python, "-c", program, str(path)], capture_output=True, text=True, check=False)
    if ended.returncode:
        print(f"{name}: {ended.stderr.strip().splitlines()[-1][:100]}", file=sys.stderr)
        return None
    spent, base, peak = map(float, ended.stdout.split()[-3:])
    return spent, base, peak


_TOTALS = """
import json, logging, os, shutil, sys, tempfile, warnings
warnings.filterwarnings("ignore")
logging.disable(50)
os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
from hta.trace_analysis import TraceAnalysis
for path in sys.argv[1:]:
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copy(path, folder)
        found = TraceAnalysis(trace_files={0: copy}, include_last_profiler_step=True)
        row = found.get_temporal_breakdown(visualize=False).iloc[0]
        names = ("kernel_time(us)", "compute_time(us)", "idle_time(us)")
        print(json.dumps([float(row[name]) / 1e3 for name in names]), flush=True)
"""


def compare_totals(files: list[Path], other: str) -> None:
    """Print how far our totals of each file are from HTA's."""
    from shardway.watch.trace.analysis import analyse_trace

    print(f"{'percent of the span':60}{'span':>9}{'compute':>9}{'idle':>9}")
    for file in files:
        ended = subprocess.run([other, "-c", _TOTALS, str(file)], capture_output=True, text=True, check=False)
        if ended.returncode:
            print(f"{str(file)[-60:]:60} HTA: {ended.stderr.strip().splitlines()[-1][:60]}")
            continue
        theirs = json.loads(ended.stdout.splitlines()[-1])
        ours = [analyse_trace(file).capture[name] for name in ("span_ms", "compute_ms", "idle_ms")]
        apart = [100 * (mine - his) / theirs[0] for mine, his in zip(ours, theirs, strict=True)]
        print(f"{str(file)[-60:]:60}{''.join(f'{each:9.3f}' for each in apart)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--totals", type=Path, nargs="+", metavar="FILE", help="compare totals with HTA's")
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=sys.executable, help="one that has orjson and HolisticTraceAnalysis")
    options = parser.parse_args()
    if options.totals:
        compare_totals(options.totals, options.python)
        return
    if options.file is None:
        parser.error("name a file")
    with tempfile.TemporaryDirectory() as folder:
        path = options.file
        if options.copies > 1 or path.suffix == ".gz":
            path = repeat_events(path, options.copies, Path(folder))
        size = path.stat().st_size
        found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in READERS}
        for _ in range(options.rounds):
            for name, rows in found.items():
                if (row := measure(name, path, options.python)) is not None:
                    rows.append(row)
        print(f"{options.file.name}, {options.copies} copies: {size / 1e6:.1f} MB of JSON, {options.rounds} rounds")
        reference = statistics.median(row[0] for row in found["orjson.loads"]) if found["orjson.loads"] else None
        print(f"{'':16}{'CPU s':>8}{'range':>14}{'MB/s':>8}{'of orjson':>11}{'peak/file':>11}{'without base':>14}")
        for name, rows in found.items():
            if not rows:
                continue
            seconds = [row[0] for row in rows]
            middle = statistics.median(seconds)
            share = f"{reference / middle:.2f}" if reference else "n/a"
            peak, own = max(row[2] for row in rows) / size, max(row[2] - row[1] for row in rows) / size
            spread = f"{min(seconds):.2f}-{max(seconds):.2f}"
            print(f"{name:16}{middle:8.2f}{spread:>14}{size / middle / 1e6:8.0f}{share:>11}{peak:11.2f}{own:14.2f}")


if __name__ == "__main__":
    main()
