#!/bin/bash
# down.sh
# End the cluster of that NAME and remove what it left. Does nothing where there is none.
set -uo pipefail
. "${0%/*}/settings.sh"

if [ "${1:-}" != locked ]; then # up.sh holds the lock when it calls
    [ -d "$(dirname "$ROOT")" ] || exit 0
    exec 9>"$ROOT.lock"
    flock 9
fi

# end FILE WORD: kill the process whose number the file holds if it still is the one, told by a word of its command
end() {
    local pid
    pid=$(process_in "$1") || return 0
    tr '\0' ' ' <"/proc/$pid/cmdline" | grep -q -- "$2" && kill -KILL "$pid"
}

if [ "$(cat "$ROOT/run/guard.pid" 2>/dev/null)" != $$ ]; then # else it is the guard who calls
    guard=$(process_in "$ROOT/run/guard.pid") && tr '\0' ' ' <"/proc/$guard/cmdline" | grep -q "bash -c tail" &&
        kill -KILL -- "-$guard"
fi
end "$ROOM_PID" "$MACHINE/room.sh" # takes every process, mount and link inside along

gone() { ! ip link show "lap-$NAME" && ! groups_hold_processes; }
groups_hold_processes() { cat /sys/fs/cgroup/*/"shardway-$NAME"/{,**/}cgroup.procs 2>/dev/null | grep -q .; }
shopt -s globstar
wait_for 10 "the end of cluster $NAME" gone
find /sys/fs/cgroup/*/"shardway-$NAME" -depth -type d -exec rmdir {} + 2>/dev/null
rm -rf "$ROOT"
exec 9>&-
[ "${1:-}" = locked ] || rm -f "$ROOT.lock"
rmdir "$(dirname "$ROOT")" 2>/dev/null
exit 0
