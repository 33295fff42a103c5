#!/bin/bash
# daemons.sh VERB [NAME]
# What happens inside the room of the cluster that is up; called from outside it goes in.
#
# start               every daemon of the controller, then every host
# heal                cancel jobs, boot hosts that are gone, start the controller, mend links, resume nodes
# boot|crash HOST     crash: every process of the host dies at once, as without power
# cut|mend HOST       its network link
# stop|run slurmctld  the controller, in order; jobs go on meanwhile
set -euo pipefail
. "${0%/*}/settings.sh"
. "$ROOT/conf/settings"
. "$MACHINE/inside.sh"
[ -n "${INSIDE:-}" ] || go_inside "$MACHINE/${0##*/}" "$@"

hosts() { echo login; for number in $(seq "$NODES"); do echo "n$number"; done; }

ask_database() { mariadb --no-defaults --socket="$ROOT/run/mysql.sock" -u root -e "$1"; }

start_accounting() {
    [ -d "$ROOT/db/mysql" ] || mariadb-install-db --no-defaults --user=root --datadir="$ROOT/db" --skip-test-db \
        --auth-root-authentication-method=normal --innodb-log-file-size=8M >"$ROOT/log/mariadb-install.log" 2>&1
    mariadbd --no-defaults --user=root --datadir="$ROOT/db" --socket="$ROOT/run/mysql.sock" --bind-address=127.0.0.1 \
        --innodb-buffer-pool-size=64M --innodb-log-file-size=8M --innodb-flush-log-at-trx-commit=0 \
        --innodb-lock-wait-timeout=900 --skip-name-resolve </dev/null >"$ROOT/log/mariadbd.log" 2>&1 &
    wait_for 60 mariadbd ask_database "select 1"
    ask_database "
        create database if not exists slurm_acct_db;
        create user if not exists 'slurm'@'127.0.0.1' identified by 'slurm';
        grant all on slurm_acct_db.* to 'slurm'@'127.0.0.1';"
    slurmdbd
    wait_for 60 slurmdbd sacctmgr -n list cluster
}

# Two accounts that alice may use and one that she may not; eve may use none. A QOS with a short limit.
add_accounts() {
    manage() { sacctmgr -i "$@" >"$ROOT/log/sacctmgr.log" 2>&1 || { cat "$ROOT/log/sacctmgr.log" >&2; return 1; }; }
    manage add cluster "$NAME"
    manage add qos short MaxWall=2 Flags=DenyOnLimit
    manage add qos waits MaxWall=2
    manage add account physics,chemistry,staff Description=test Organization=test
    manage add user root Account=staff
    manage add user alice Account=physics,chemistry DefaultAccount=physics
    manage modify user alice set qos+=short,waits
}

start_controller() {
    slurmctld
    wait_for 60 slurmctld answers
}
answers() { scontrol ping | grep -q 'is UP'; }

stop_controller() {
    scontrol shutdown slurmctld
    wait_for 20 "slurmctld's end" no_controller
}
no_controller() { ! pgrep -x slurmctld; }

start_all() {
    munged --force --key-file="$ROOT/conf/munge.key" --pid-file="$ROOT/run/munged.pid" --num-threads=4 \
        --log-file="$ROOT/log/munged.log" --seed-file="$ROOT/run/munge.seed"
    start_accounting
    add_accounts
    start_controller
    for host in $(hosts); do boot "$host"; done
    wait_for 60 "all nodes idle" ready
}

lives() { process_in "$ROOT/run/host.$1.pid" >/dev/null; }

boot() {
    lives "$1" && return
    mkdir -p "$ROOT/spool/$1"
    setsid unshare "${NODE_SPACES[@]}" --fork --kill-child --mount-proc "$MACHINE/host.sh" "$1" \
        </dev/null >"$ROOT/log/host.$1.log" 2>&1 &
    echo $! >"$ROOT/run/host.$1.pid"
    # The process is in the host's namespaces as soon as it left ours.
    wait_for 10 "namespaces of $1" own_network $!
    # Always of the same address, as a card has: after a boot the others would look for the old one for a while.
    ip link add "$1" type veth peer name eth0 address "$(mac_of "$1")" netns $!
    ip link set "$1" master br0 up
}
own_network() { [ "$(readlink "/proc/$1/ns/net")" != "$(readlink /proc/self/ns/net)" ]; }

crash() {
    kill -KILL "$(process_in "$ROOT/run/host.$1.pid")"
    wait_for 10 "the end of $1" no_link "$1"
}
no_link() { ! ip link show "$1"; }

ready() { [ "$(sinfo -h -N -p batch -o '%N %T' | grep -cE ' (idle|allocated|mixed|completing)$')" = "$NODES" ]; }

heal() {
    answers || start_controller
    scancel --quiet --user=alice
    for host in $(hosts); do
        boot "$host"
        ip link set "$host" up
    done
    # A drained node stays so until somebody says otherwise; one that was down comes back by itself.
    if [ -n "$(sinfo -h -N -t drain -o %N)" ]; then scontrol update "nodename=n[1-$NODES]" state=resume; fi
    wait_for 60 "all nodes idle" ready
}

case $1 in
start) start_all ;;
heal) heal ;;
boot | crash) "$1" "$2" ;;
cut) ip link set "$2" down ;;
mend) ip link set "$2" up ;;
stop) stop_controller ;;
run) start_controller ;;
*) fail "no verb $1" ;;
esac
