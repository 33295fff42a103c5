#!/bin/bash
# able.sh
# Succeed where this machine can hold a cluster; else say why it cannot, and fail.
set -euo pipefail
cd "$(dirname "$0")"

refuse() { echo "$1"; exit 1; }

[ "$(uname)" = Linux ] || refuse "the cluster's hosts are Linux namespaces; this is $(uname)"
[ "$(id -u)" = 0 ] || refuse "the cluster needs root, for namespaces and daemons"
command -v apt-get >/dev/null || refuse "the cluster is made of Debian's packages, and there is no apt-get"
. machine/settings.sh
unshare "${ROOM_SPACES[@]}" --fork --kill-child mount -t tmpfs none /mnt 2>/dev/null ||
    refuse "the cluster needs namespaces and mounts of its own, and root may not make them here (a container?)"
