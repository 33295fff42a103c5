#!/bin/bash
# enter.sh HOST USER COMMAND...
# Run a command on a host of the cluster (ctl, login, n1, ...) as a user, with a login's plain environment.
# FOLDER=path is where it starts (else the user's home); variables come as `env X=1 COMMAND`.
set -euo pipefail
# What the cluster was brought up with comes first: nothing of it is worked out again for each command.
recorded=${ROOT:-/var/lib/shardway-cluster/${NAME:-lab}}/conf/settings
# shellcheck source=/dev/null
[ ! -e "$recorded" ] || . "$recorded"
. "${0%/*}/settings.sh"
[ -e "$recorded" ] || fail "cluster $NAME is not up ($ROOT); bring it up with $MACHINE/up.sh"
. "$MACHINE/inside.sh"
[ -n "${INSIDE:-}" ] || go_inside env ${FOLDER:+FOLDER="$FOLDER"} "$MACHINE/${0##*/}" "$@"

host=$1 user=$2
shift 2
if [ "$user" = root ]; then home=/tmp; else home=$ROOT/home/$user; fi
as_user=(setpriv --reuid "$user" --regid "$user" --init-groups env -i -C "${FOLDER:-$home}" HOME="$home" USER="$user"
    LOGNAME="$user" SHELL=/bin/bash LANG=C.UTF-8 PATH=/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin)
if [ "$host" = ctl ]; then exec "${as_user[@]}" "$@"; fi
process=$(process_in "$ROOT/run/host.$host.pid") || fail "host $host is not up"
enter "$process" "${NODE_SPACES[@]}" "${as_user[@]}" "$@"
