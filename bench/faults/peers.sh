#!/bin/sh
# Makes a virtual environment with what bench/faults/peers.py compares with: torchrun (of torch), ft_launcher and
# torchft, for Python 3.11 and without a GPU. Nothing is added to .venv.
# usage: bench/faults/peers.sh FOLDER [PYTHON]
set -eu
folder=$1
python=${2:-python3.11}

"$python" -m venv "$folder"
install() {
    "$folder/bin/python" -m pip install --quiet --disable-pip-version-check "$@"
}
install -c constraints.txt torch numpy psutil nvidia-ml-py
# On their own these two would bring the torch for CUDA.
install --no-deps nvidia-resiliency-ext==0.4.1 torchft-nightly==2026.10.26
install defusedxml packaging pyyaml pynvml opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp-proto-http
