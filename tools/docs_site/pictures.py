"""Takes the pictures of the site by a headless Chromium: pages that Shardway writes, of a small run that is made here.

    python tools/docs_site/pictures.py docs/pictures      # writes the kept ones again

Invariant: where there is no Chromium the kept pictures of docs/pictures stay, and the site is whole. A picture has at
most `MOST_BYTES`.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from chromium import BROWSER, Browser, browser  # noqa: E402

MOST_BYTES = 80_000
WIDTH, HEIGHT = 1100, 720
COLOURS = 48


def take_all(folder: Path, run: Path | None = None) -> bool:
    """Write every picture into a folder; False, and nothing, where there is no Chromium. `run`: a finished run to show;
    without one a small one is trained here."""
    if not BROWSER:
        return False
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch, browser() as page:
        work = Path(scratch)
        if run is None:
            run = work / "runs" / "my"
            shardway(work, "train", "run.name=my", "train.steps=20", "model.dim=32")
        shardway(work, "report", str(run.absolute()), "--page", str(work / "report.html"))
        shardway(work, "plan", "llama3-8b", "--gpu", "h100-sxm5-80gb", "--gpus", "64", "--html", "plan.html")
        take(page, work / "report.html", folder / "report.png")
        take(page, work / "plan.html", folder / "plan.png")
    return True


def shardway(folder: Path, *words: str) -> None:
    """Run a verb of this environment in a folder. Raises CalledProcessError where it fails."""
    command = [sys.executable, "-m", "shardway", *words]
    env = {**os.environ, "OMP_WAIT_POLICY": "passive"}
    subprocess.run(command, cwd=folder, env=env, check=True, capture_output=True)


def take(page: Browser, source: Path, target: Path) -> None:
    """The upper part of a page, as a reader of light pages sees it."""
    page.show(source, WIDTH, "light")
    clip = {"x": 0, "y": 0, "width": WIDTH, "height": HEIGHT, "scale": 1}
    found = page.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
    picture = Image.open(io.BytesIO(base64.b64decode(found["data"]))).convert("RGB")
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(target, optimize=True)
    if target.stat().st_size > MOST_BYTES:
        sys.exit(f"{target} has {target.stat().st_size} bytes, more than {MOST_BYTES}")


def main() -> None:
    """Write the pictures that are kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of the pictures")
    if not take_all(parser.parse_args().folder):
        sys.exit("there is no Chromium here (Debian: apt-get install chromium)")


if __name__ == "__main__":
    main()
