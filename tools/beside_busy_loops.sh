#!/bin/sh
# Runs a command beside busy loops that take processor time from it: beside_busy_loops.sh COUNT COMMAND [ARGUMENT …]
# Its exit status is that of the command. The loops end with it.
set -u
count=$1
shift
loops=
trap 'kill $loops 2>/dev/null' EXIT
trap 'exit 130' INT TERM
while [ "$count" -gt 0 ]; do
  (while :; do :; done) &
  loops="$loops $!"
  count=$((count - 1))
done
"$@"
