#!/bin/sh
# Makes a virtual environment with the libraries that bench/peers.py compares with, over the one of `make`: the same
# torch serves all of them, and nothing is added to .venv.
# usage: bench/peers.sh FOLDER [PYTHON OF THE ENVIRONMENT BELOW]
set -eu
folder=$1
below=${2:-.venv/bin/python}

"$below" -m venv "$folder"
# `addsitedir` follows the links in that folder as well, and Shardway is one of them.
"$below" -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
    > "$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/below.pth"
"$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
    accelerate lightning-fabric pytorch-lightning
# DeepSpeed comes as source and looks for torch while it is built; its kernels are compiled when they are first used.
DS_BUILD_OPS=0 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
    --no-build-isolation deepspeed || echo "DeepSpeed could not be built: it will be passed over" >&2
