#!/bin/bash
# room.sh
# Process 1 of the room in which the whole cluster stands; up.sh starts it. When it dies the kernel ends all the rest.
set -euo pipefail
. "${0%/*}/settings.sh"
. "$ROOT/conf/settings"
. "$MACHINE/places.sh"

hostname ctl
# A group that a hierarchy's root is bound to is the root for everyone inside.
[ "$CGROUPS" = 0 ] ||
    for kind in freezer memory cpuacct devices; do
        mount --bind "/sys/fs/cgroup/$kind/shardway-$NAME" "/sys/fs/cgroup/$kind"
    done
lay_over_system
give_own_places

ip link set lo up
ip link add br0 type bridge
ip addr add "$(ip_of ctl)/24" dev br0
ip link set br0 up
touch "$ROOT/run/room.ready"
until ip link set lap master br0 up 2>/dev/null; do sleep 0.02; done # the link to the laptop comes from outside

# bash reaps what daemons leave to process 1 whenever it wakes.
while :; do sleep 3600 & wait $!; done
