"""Orders of every kind, a machine to make them on, and a folder of fake runtimes that note their words.

Invariant: a fake writes what its namesake would write, so that a script that goes on without a file fails. This module
must not compare anything.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path, PurePosixPath

from shardway.launch.image.request import BuildFolder, Ground, ImageRequest, parse_recipe, parse_uri
from shardway.sites.schema import Internet

GB = 10**9
PYTORCH = "docker://nvcr.io#nvidia/pytorch:25.04-py3"
DIGEST = f"sha256:{'0123456789abcdef' * 4}"
PROXY = Internet(login="proxy", proxy="http://proxy.example.org:3128", no_proxy="localhost,.example.org")
RECIPE = parse_recipe(
    ["libaio-dev", "git=1:2.39.5-0+deb12u2"],
    ["deepspeed==0.16.4", "torch >= 2.7, <3", "flash-attn --no-build-isolation"],
    "# pinned\nnumpy>=1.26 # for the data\n\nuvloop ; python_version < '3.13'\n",
)
GROUND = Ground(
    target=PurePosixPath("/project/images/torch.sqsh"),
    target_place=BuildFolder(PurePosixPath("/project/images"), 900 * GB, "lustre"),
    scratch_places=(BuildFolder(PurePosixPath("/tmp"), 200 * GB, "ext4"),),
    architecture="x86_64",
)


def make_order(runtime: str, uri: str = PYTORCH, adds: bool = False, **changes: object) -> ImageRequest:
    """An order without a person's target, whose token is always the same."""
    order = ImageRequest(parse_uri(uri), runtime, token="a1b2c3d4", **({"recipe": RECIPE} if adds else {}))
    return replace(order, **changes)  # type: ignore[arg-type]


def ground_for(order: ImageRequest, **changes: object) -> Ground:
    """The machine, with a target of the runtime's kind."""
    suffix = {"enroot": "sqsh", "apptainer": "sif"}[order.runtime]
    target = PurePosixPath(f"/project/images/torch.{suffix}")
    return replace(GROUND, target=target, **changes)  # type: ignore[arg-type]


_FAKE = r"""#!/bin/bash
# Notes its words, then leaves what its namesake would leave. $FAKES/fail: the command that fails, and what it prints.
me=${0##*/}
printf '%s\0' "$me" "$@" >"$(mktemp "$FAKES/calls/$(date +%s%N).XXXX")"
printf '%s\0' "${http_proxy-}" "${ENROOT_CACHE_PATH-}" "${APPTAINER_TMPDIR-}" >"$FAKES/variables"
if [ -e "$FAKES/fail" ] && [[ "$me $1" == "$(head -n 1 "$FAKES/fail")"* ]]; then
  tail -n +2 "$FAKES/fail"
  exit 9
fi
[ ! -e "$FAKES/wait" ] || { touch "$FAKES/waiting"; exec sleep 300; }
inside() { PATH=$FAKES/inside:$PATH sh "$1" || exit 8; }
case "$me $1" in
  "enroot import")
    while [ "$1" != --output ]; do shift; done
    echo layers >"$ENROOT_CACHE_PATH/layer" && echo fetched >"$2"
    ;;
  "enroot create") test -s "${*: -1}" && mkdir -p "$ENROOT_DATA_PATH/image" && chmod 555 "$ENROOT_DATA_PATH/image" ;;
  "enroot start")
    while [ "$1" != --mount ]; do shift; done
    inside "${2%%:/mnt:*}/recipe.sh"
    ;;
  "enroot export") test -d "$ENROOT_DATA_PATH/image" && echo built >"$3" ;;
  "apptainer pull") echo fetched >"${*: -2:1}" ;;
  "apptainer build")
    spec=${*: -1}
    [[ $spec != *.def ]] || { sed '1,/^%post/d' "$spec" >"$APPTAINER_TMPDIR/post" && inside "$APPTAINER_TMPDIR/post"; }
    echo built >"${*: -2:1}"
    ;;
esac
"""
_DF = """#!/bin/sh
# As `df -P -k -T`, with the room that $FAKES/free_kb says.
echo "Filesystem Type 1024-blocks Used Available Capacity Mounted on"
echo "/dev/fake ext4 4000000000 0 $(cat "$FAKES/free_kb") 0% /"
"""
_INSIDE = """#!/bin/sh
{ printf '%s\\0' "${0##*/}" "$@"; printf '\\n'; } >>"$FAKES/installed"
"""


class Fakes:
    """A folder of fakes. `calls` are the words of each runtime's call, `installed` of each program inside."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "calls").mkdir(parents=True)
        for name in ("enroot", "apptainer"):
            _write(folder / "bin" / name, _FAKE)
        for name in ("apt-get", "python3"):
            _write(folder / "inside" / name, _INSIDE)
        # The recipe clears what apt left, which on this machine is the system's own.
        _write(folder / "inside" / "rm", '#!/bin/sh\ncase "$*" in */var/lib/apt/*) ;; *) exec /bin/rm "$@" ;; esac\n')
        self.variables = {"FAKES": str(folder), "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def have_room(self, free_bytes: int) -> None:
        """Let every disk have this much room, whatever the machine's have."""
        _write(self.folder / "bin" / "df", _DF)
        (self.folder / "free_kb").write_text(f"{free_bytes // 1024}\n", encoding="utf-8")

    def fail(self, call: str, said: str) -> None:
        """Let one call fail, such as "enroot start", after it has printed something."""
        (self.folder / "fail").write_text(f"{call}\n{said}\n", encoding="utf-8")

    @property
    def calls(self) -> list[list[str]]:
        """In the order in which they came."""
        files = sorted((self.folder / "calls").iterdir())
        return [file.read_text(encoding="utf-8").split("\0")[:-1] for file in files]

    @property
    def installed(self) -> list[list[str]]:
        """Words of apt-get and python3."""
        path = self.folder / "installed"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        return [line.split("\0") for line in text.split("\0\n")[:-1]]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)
