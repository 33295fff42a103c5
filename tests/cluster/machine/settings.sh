# shellcheck shell=bash disable=SC2034
# What every script of the pretended machine agrees on. To be sourced; each value can be set from outside.
#
# NAME   name of the cluster; all that exists of it outside its folder carries it, so that two can run at once
# ROOT   its folder: configuration, logs, spool, homes. Cluster and "laptop" see it under the same path
# CACHE  what install.sh made: kept between runs, shared by all clusters

MACHINE=${BASH_SOURCE[0]%/*}
[[ $MACHINE == /* ]] || MACHINE=$(cd "$MACHINE" && pwd)
NAME=${NAME:-lab}
ROOT=${ROOT:-/var/lib/shardway-cluster/$NAME}
CACHE=${CACHE:-/var/cache/shardway-cluster}

NODES=${NODES:-3}
CPUS=${CPUS:-4}                # pretended CPUs of a node
MEM=${MEM:-8000}               # pretended MiB of a node
GPUS=${GPUS:-0}                # pretended GPUs of a node
SLURM=${SLURM:-}               # a Slurm beside Debian's own: a folder of `install.sh slurm24`
NET=${NET:-10.$((96 + $(cksum <<<"$NAME" | cut -d' ' -f1) % 32)).7}      # three numbers of a private /24

ROOM_PID=$ROOT/run/room.pid    # the process whose end is the end of the whole cluster
ROOM_SPACES=(--mount --uts --net --pid --cgroup)
NODE_SPACES=(--mount --uts --net --pid)

ip_of() {
    case $1 in
    laptop) echo "$NET.1" ;;
    ctl) echo "$NET.2" ;;
    login) echo "$NET.10" ;;
    n*) echo "$NET.$((10 + ${1#n}))" ;;
    esac
}

# The address of a host's network card: made from that of the host, from the range that is free for local use.
mac_of() {
    local ip
    ip=$(ip_of "$1")
    printf '02:00:00:00:00:%02x' "${ip##*.}"
}

fail() { echo "${0##*/}: $*" >&2; exit 1; }

# process_in FILE: the process whose number the file holds, if it lives
process_in() { local pid; [ -e "$1" ] && pid=$(<"$1") && [ -n "$pid" ] && kill -0 "$pid" 2>/dev/null && echo "$pid"; }

# wait_for SECONDS WHAT FUNCTION...: until it succeeds
wait_for() {
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >/dev/null 2>&1; do
        [ $SECONDS -lt $end ] || fail "waited in vain for: $what"
        sleep 0.05
    done
}
