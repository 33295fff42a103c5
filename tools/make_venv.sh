#!/bin/sh
# Makes a virtual environment with pip in it, also on a bare Debian or Ubuntu whose python3 comes without venv.
# usage: tools/make_venv.sh PYTHON FOLDER
set -eu
python=$1
folder=$2

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "shardway needs Python 3.11 or newer; $python is $("$python" -V 2>&1). Name another: make PYTHON=python3.12" >&2
    exit 2
}
if "$python" -m venv "$folder" >/dev/null 2>&1; then
    exit 0
fi
rm -rf "$folder"
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    echo "this python3 has no venv module: installing python3-venv"
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y python3-venv >/dev/null
    exec "$python" -m venv "$folder"
fi
echo "this $python has no venv module. Install it (Debian, Ubuntu: sudo apt install python3-venv) and run make again." >&2
exit 2
