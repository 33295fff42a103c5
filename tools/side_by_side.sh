#!/bin/sh
# Runs commands at once and prints what each has to say when it is done, and how long all took; fails where one failed.
# usage: tools/side_by_side.sh COMMAND...      each in one word, for a shell; $SIDE_BY_SIDE is an empty folder of all
set -u
folder=$(mktemp -d)
export SIDE_BY_SIDE="$folder/shared"
mkdir "$SIDE_BY_SIDE"
trap 'rm -rf "$folder"' EXIT
trap 'kill $running 2>/dev/null; exit 130' INT TERM

running="" number=0 began=$(date +%s)
for command in "$@"; do
    number=$((number + 1))
    sh -c "$command" >"$folder/$number" 2>&1 &
    running="$running $!"
done
failed=0 number=0
for each in $running; do
    number=$((number + 1))
    wait "$each" || failed=1
    cat "$folder/$number"
done
echo "--- $(($(date +%s) - began)) s" >&2
exit $failed
