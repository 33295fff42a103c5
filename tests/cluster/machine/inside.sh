# shellcheck shell=bash
# How to get into the room and its hosts. To be sourced.

# go_inside COMMAND...: become that command in the room, with nothing of the caller's environment
go_inside() {
    local room
    room=$(process_in "$ROOM_PID") || fail "cluster $NAME is not up ($ROOT); bring it up with $MACHINE/up.sh"
    if [ "$CGROUPS" = 1 ]; then
        # Slurm looks a process up below the root of its view; the caller's group lies outside.
        for kind in freezer memory cpuacct devices; do
            echo $$ >"/sys/fs/cgroup/$kind/shardway-$NAME/cgroup.procs"
        done
    fi
    enter "$room" "${ROOM_SPACES[@]}" env -i INSIDE=1 LANG=C.UTF-8 HOME=/root \
        PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin NAME="$NAME" ROOT="$ROOT" "$@"
}

# enter PROCESS SPACE... COMMAND...: become the command in the namespaces that `unshare`, which is that process, made
enter() {
    local process=$1 spaces=()
    shift
    while [[ $1 == --* ]]; do
        # unshare itself stays among the processes outside; its children are inside.
        if [ "$1" = --pid ]; then spaces+=("--pid=/proc/$process/ns/pid_for_children"); else spaces+=("$1"); fi
        shift
    done
    exec nsenter --target="$process" "${spaces[@]}" "$@"
}
