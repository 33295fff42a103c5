#!/bin/bash
# host.sh NAME
# Process 1 of one host; daemons.sh starts it inside the room. A login node has ssh only, a compute node slurmd as well.
set -euo pipefail
. "${0%/*}/settings.sh"
. "$ROOT/conf/settings"
. "$MACHINE/places.sh"

hostname "$1"
give_own_places
ip link set lo up
until ip addr add "$(ip_of "$1")/24" dev eth0 2>/dev/null; do sleep 0.02; done # the link comes from outside
ip link set eth0 up
/usr/sbin/sshd -D -f "$ROOT/conf/sshd_config" &
# slurmd 22.05 was seen to abort by itself ("malloc(): unaligned tcache chunk"); a site's service manager starts it again
serve_jobs() { while :; do slurmd -D -N "$1" -d /usr/sbin/slurmstepd || true; sleep 0.5; done; }
[ "$1" = login ] || serve_jobs "$1" &
while :; do sleep 3600 & wait $!; done
