#!/bin/bash
# host.sh NAME
# Process 1 of one host; daemons.sh starts it inside the room. A login node has ssh only, a compute node slurmd as well.
set -euo pipefail
. "$(dirname "$0")/settings.sh"
. "$ROOT/conf/settings"
. "$MACHINE/places.sh"

hostname "$1"
give_own_places
ip link set lo up
until ip addr add "$(ip_of "$1")/24" dev eth0 2>/dev/null; do sleep 0.02; done # the link comes from outside
ip link set eth0 up
/usr/sbin/sshd -D -f "$ROOT/conf/sshd_config" &
[ "$1" = login ] || slurmd -D -N "$1" -d /usr/sbin/slurmstepd &
while :; do sleep 3600 & wait $!; done
