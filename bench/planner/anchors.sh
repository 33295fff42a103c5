#!/bin/sh
# Makes a virtual environment with the estimators that bench/planner/anchors.py asks, and asks them. Their requirements
# are older than ours, hence an environment of its own and not one over .venv; Shardway is taken from src.
# usage: bench/planner/anchors.sh FOLDER ROWS.csv OUT.csv [PYTHON]
set -eu
folder=$1
rows=$2
out=$3
python=${4:-python3}
root=$(cd "$(dirname "$0")/../.." && pwd)
install="$folder/bin/python -m pip install --quiet --disable-pip-version-check"

"$python" -m venv "$folder"
$install torch==2.13.0 numpy pydantic setuptools
$install llm-analysis==0.2.2
# One file of it is asked; what the package requires besides is CUDA extensions.
$install --no-deps megatron-bridge==0.3.1
# DeepSpeed comes as source and looks for torch while it is built; none of its kernels is needed.
DS_BUILD_OPS=0 $install --no-build-isolation deepspeed==0.19.8 ||
    echo "DeepSpeed could not be built: it will be passed over" >&2

PYTHONPATH="$root/src" "$folder/bin/python" "$root/bench/planner/anchors.py" "$rows" "$out"
