#!/bin/sh
# One cell of the matrix of a release (docs/release.md): the wheel in dist/ with one Python and one PyTorch, in a new
# environment and a folder outside of this repository: installed, checked, and used to plan, train, resume and report.
# usage: tools/try_wheel.sh PYTHON TORCH     TORCH: a version of PyPI (2.13.0), or none for a login node
#        KEEP=FOLDER: the environment is made there and kept, or used if it is there already
set -eu
here=$(cd "$(dirname "$0")/.." && pwd)
wheel=$(ls "$here"/dist/shardway-*.whl)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
folder=${KEEP:-$work/venv}
[ -x "$folder/bin/python" ] || "$1" -m venv "$folder"
python=$folder/bin/python
if [ "$2" = none ]; then
    "$python" -m pip --disable-pip-version-check install -q "$wheel"
else
    "$python" -m pip --disable-pip-version-check install -q "torch==$2" "${wheel}[torch]"
fi
"$python" -m pip check
export PATH="$folder/bin:$PATH" OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive
unset PYTHONPATH
mkdir "$work/there"
cd "$work/there"
began=$(date +%s)

quiet() { # quiet COMMAND...: shows what a command printed only if it failed
    "$@" >"$work/said" 2>&1 || { echo "FAILED: $*" >&2; cat "$work/said" >&2; exit 1; }
}

quiet shardway init my.toml
quiet shardway plan my.toml --gpu a100-sxm4-80gb --gpus 8
quiet shardway submit my.toml --on leonardo-booster --nodes 2 site.account=ABC --dry-run
if [ "$2" = none ]; then
    code=0
    shardway train my.toml >"$work/said" 2>&1 || code=$?
    [ "$code" = 2 ]
    grep -q 'pip install "shardway\[torch\]"' "$work/said"
    has="without torch"
else
    cat "$here"/src/shardway/*.py >"$work/text"
    train() { # train DIRECTORY WORD...
        place=$1
        shift
        quiet shardway train my.toml --dir "runs/$place" train.steps=20 model.dim=32 run.display=off data.path="$work/text" "$@"
    }
    train my
    train shards --nproc 2 parallel.dp_shard=2
    train tensor --nproc 2 parallel.tp=2
    train pipeline --nproc 2 parallel.pp=2 model.tied=false
    train context --nproc 2 parallel.cp=2
    train tensor train.steps=30 # goes on with it on one rank
    quiet shardway checkpoint verify runs/tensor
    quiet shardway report runs/tensor
    quiet shardway compare runs/my runs/tensor
    quiet shardway generate runs/my --prompt "def " --max-tokens 8
    has="torch $("$python" -c 'import torch; print(torch.__version__)')"
fi
echo "$(shardway --version), Python $("$python" -c 'import platform; print(platform.python_version())'), $has: ok," \
    "$(($(date +%s) - began)) s"
