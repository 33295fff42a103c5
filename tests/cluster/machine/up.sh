#!/bin/bash
# up.sh
# Bring up a real Slurm of several hosts on this one machine: a controller with accounting, compute nodes n1, n2, ...,
# and a login node. Where the cluster is up already, only the nodes that are gone are booted again.
#
#   NAME=lab NODES=3 ./up.sh             settings.sh tells the rest
#   SLURM=/var/cache/.../slurm24 ./up.sh the same with another Slurm
#   OWNER=PID                            take the cluster down when that process ends, however it ends
#   PUBLISH=DIR:DIR                      folders that every host must see (the checkout and its Python always are)
#
# How it stands: one "room" (network, host name, mounts, process numbers and control groups of its own) holds the
# controller's daemons and a bridge; each host is a room inside the room. All that exists outside is the folder, one
# network link to this machine, the "laptop" (NET.1), and an empty group in each control group hierarchy.
set -euo pipefail
. "${0%/*}/settings.sh"

GROUPS_USED=(freezer memory cpuacct devices)
HIERARCHY=/sys/fs/cgroup

# Whether this machine has the control groups that Slurm's limits need; else jobs run without limits on memory.
has_control_groups() {
    local kind
    [ "$GPUS" = 0 ] || [ -d $HIERARCHY/devices ] || return 1
    for kind in "${GROUPS_USED[@]}"; do mkdir -p "$HIERARCHY/$kind/shardway-$NAME" 2>/dev/null || return 1; done
}

list_published() {
    local repository=${MACHINE%/tests/cluster/machine}
    printf '%s\n' "$repository" "$ROOT" "$CACHE"
    # A virtual environment is no use without the Python that it was made from.
    if [ -x "$repository/.venv/bin/python" ]; then
        "$repository/.venv/bin/python" -c 'import sys; print(sys.prefix, sys.base_prefix, sep="\n")'
    fi
    tr ':' '\n' <<<"${PUBLISH:-}"
}

write_files() {
    mkdir -p "$ROOT"/{run,log,state,spool,db,home,conf}
    chmod 755 "$ROOT" "$ROOT"/{run,conf,home}
    list_published | grep . | sort -u >"$ROOT/conf/published"
    declare -p NAME ROOT CACHE NODES CPUS MEM GPUS SLURM NET CGROUPS >"$ROOT/conf/settings"
    . "$MACHINE/files.sh"
    write_etc
    write_slurm_conf
    write_slurmdbd_conf
    write_ssh
    write_podman
    write_fuse
    write_modules
}

open_room() {
    # What a process is in when its view of the groups is made is the root of that view.
    [ "$CGROUPS" = 0 ] ||
        for kind in "${GROUPS_USED[@]}"; do echo $BASHPID >"$HIERARCHY/$kind/shardway-$NAME/cgroup.procs"; done
    exec setsid unshare "${ROOM_SPACES[@]}" --fork --kill-child --mount-proc "$MACHINE/room.sh" </dev/null
}

start_room() {
    (open_room) >"$ROOT/log/room.log" 2>&1 9>&- &
    echo $! >"$ROOM_PID"
    wait_for 10 "the room" test -e "$ROOT/run/room.ready"
    ip link add "lap-$NAME" type veth peer name lap netns "$(cat "$ROOM_PID")"
    ip addr add "$(ip_of laptop)/24" dev "lap-$NAME"
    ip link set "lap-$NAME" up
}

# A process that ends cannot be relied on to clean up: it may be killed.
watch_owner() {
    setsid bash -c 'tail --pid="$1" -f /dev/null; exec "$2"' guard "$OWNER" "$MACHINE/down.sh" \
        </dev/null >"$ROOT/log/guard.log" 2>&1 9>&- &
    echo $! >"$ROOT/run/guard.pid"
}

[ "$(id -u)" = 0 ] || fail "needs root: it makes namespaces and starts daemons"
[ ${#NAME} -le 11 ] || fail "NAME=$NAME has over 11 letters: no network link can be called lap-$NAME"
for program in slurmctld slurmd slurmdbd munged mariadbd sshd ip; do
    command -v $program >/dev/null || fail "no $program on this machine: run tests/cluster/install.sh first"
done
mkdir -p "$(dirname "$ROOT")"
exec 9>"$ROOT.lock"
flock 9

export NAME ROOT
if process_in "$ROOM_PID" >/dev/null && [ -e "$ROOT/run/up" ]; then
    [ -z "${OWNER:-}" ] || fail "cluster $NAME is up already, and not for process $OWNER: end it with NAME=$NAME" \
        "$MACHINE/down.sh, use it (SHARDWAY_CLUSTER=keep) or take another name (SHARDWAY_CLUSTER_NAME=...)"
    "$MACHINE/daemons.sh" heal 9>&-
    echo "up already: $ROOT"
    exit
fi

# Whatever comes between, an error or an interrupt, nothing half made stays.
abandon() {
    local code=$?
    [ -e "$ROOT/run/up" ] && return
    tail -n 5 "$ROOT"/log/*.log >&2
    "$MACHINE/down.sh" locked 9>&-
    rm -f "$ROOT.lock"
    exit $code
}
trap abandon EXIT

"$MACHINE/down.sh" locked 9>&-
if has_control_groups; then CGROUPS=1; else CGROUPS=0; fi
write_files
[ -z "${OWNER:-}" ] || watch_owner
start_room
"$MACHINE/daemons.sh" start 9>&-
touch "$ROOT/run/up"
echo "up: $NODES nodes, login node at $(ip_of login), $ROOT ($SECONDS s)"
