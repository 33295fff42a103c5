#!/bin/bash
# bench/gpu.sh [tests] [device] [steps] [faults] [figures] [roofline]
# What a machine with a CUDA device can show, part by part, and all of it where no part is named; each part says how
# long it took. PYTHON (python3) has torch and what Shardway needs; nothing is installed.
#
# ONLY   faults whose names fit this expression (pytest -k)
# JOBS   so many faults at a time (6); they share the device
# JSON   file for the rows of `steps` in full; those of `device` are beside it in device-NAME, of `roofline` with -roofline
#        in its name
# LIMIT  seconds that one command may take (550)
set -uo pipefail
cd "$(dirname "$0")/.." || exit
PYTHON=${PYTHON:-python3}
export PYTHONPATH=$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1

try() {
    echo "== $*"
    local began=$SECONDS
    timeout "${LIMIT:-550}" "$@"
    echo "-- exit code $?, $((SECONDS - began)) s"
}

tests() {
    try "$PYTHON" -m pytest tests/gpu -rs
}

device() {
    local file=
    [ -n "${JSON:-}" ] && file=$(dirname "$JSON")/device-$(basename "$JSON")
    try "$PYTHON" -m shardway bench device --disk "${TMPDIR:-/tmp}" ${file:+--json "$file"}
}

faults() {
    export SHARDWAY_CHAOS_DEVICE=cuda
    try "$PYTHON" -m pytest -p no:benchmark tests/chaos/test_faults.py -k "${ONLY:-}" -n "${JOBS:-6}" -rs
}

steps() {
    try "$PYTHON" bench/device_step.py --profile ${JSON:+--json "$JSON"}
}

figures() {
    local plain=(precision.compute=fp32 precision.tf32=false train.compile=off)
    local small=("${plain[@]}" model.dim=768 model.layers=12 model.heads=12 data.kind=synthetic data.samples=4096 model.vocab=50304
        data.seq_len=1024 train.global_batch=16 precision.compute=bf16)
    try "$PYTHON" bench/checkpoint/save.py --device cuda --mib 512 --rounds 3
    try "$PYTHON" bench/planner/own_runs.py
    try "$PYTHON" bench/guard.py --rounds 60 run.device=cuda "${small[@]}"
    try "$PYTHON" bench/loop_overhead.py --pairs 100 run.device=cuda "${plain[@]}"
    try "$PYTHON" bench/loop_overhead.py --pairs 60 run.device=cuda "${small[@]}"
    try "$PYTHON" bench/vigilance.py --agent-seconds 10 --agent-ranks 1 run.device=cuda "${small[@]}"
}

roofline() {
    local place
    place=$(mktemp -d)
    try "$PYTHON" -m shardway bench step run.device=cuda model.dim=768 model.layers=12 model.heads=12 model.vocab=50304 \
        data.kind=synthetic data.samples=4096 data.seq_len=1024 train.global_batch=16 --dir "$place/124m" \
        ${JSON:+--json "${JSON%.json}-roofline.json"}
    rm -r "$place"
}

for part in "${@:-tests device steps faults figures roofline}"; do
    for each in $part; do "$each"; done
done
