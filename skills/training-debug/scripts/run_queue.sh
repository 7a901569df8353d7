#!/bin/sh
# Run the cells of a queue one after the other, each in a folder of its own.
#
#   run_queue.sh QUEUE OUT [FIRST_LINE] -- COMMAND [ARG...]
#
# A line of QUEUE is `config task [epochs]`; empty lines and lines with # are skipped. COMMAND gets, for each cell, the
# words of the line after its own arguments, and CELL_DIR and CELL_NAME in the environment; it must write below
# CELL_DIR only. The name of a cell is its configuration's file name and its task; two equal names are refused before anything starts.
# A cell that has its DONE file is skipped, so the same command resumes; FIRST_LINE resumes at a line of the file.
# Append to the queue while it runs, never insert or remove: lines are found by number. This script runs from a private
# copy, so that replacing the file can't hurt a live queue. MIN_FREE_GB (default 5) is asked for before each cell.
# Exit code: 0 all cells done, 1 some failed or missing, 2 the arguments or the queue are wrong, 3 the disk is too full.
set -u

die() { echo "run_queue: $2" >&2; exit "$1"; }

if [ "${RUN_QUEUE_COPY:-}" = "" ]; then
    RUN_QUEUE_COPY=$(mktemp "${TMPDIR:-/tmp}/run_queue.XXXXXX") || die 2 "no temporary file"
    cp "$0" "$RUN_QUEUE_COPY" || die 2 "can't copy $0"
    export RUN_QUEUE_COPY
    exec sh "$RUN_QUEUE_COPY" "$@"
fi
trap 'rm -f "$RUN_QUEUE_COPY"' EXIT
trap 'exit 143' TERM INT HUP

[ $# -ge 4 ] || die 2 "usage: run_queue.sh QUEUE OUT [FIRST_LINE] -- COMMAND [ARG...]"
queue=$1 out=$2 first=1
shift 2
if [ "$1" != "--" ]; then first=$1; shift; fi
[ "${1:-}" = "--" ] || die 2 "-- is missing before the command"
shift
[ $# -ge 1 ] || die 2 "the command is missing"
case $first in *[!0-9]* | "") die 2 "FIRST_LINE is not a number: $first" ;; esac
[ -r "$queue" ] || die 2 "can't read $queue"
mkdir -p "$out" || die 2 "can't create $out"

# The cell's name from its configuration and task, or nothing for a line without a cell.
name_of() {
    printf '%s\n' "$1" | awk 'NF >= 2 && $1 !~ /^#/ { n = $1; sub(/.*\//, "", n); sub(/\.[^.]*$/, "", n); print n "-" $2 }'
}
names() { awk 'NF && $1 !~ /^#/ { if (NF < 2) { print "!" NR; next } n = $1; sub(/.*\//, "", n); sub(/\.[^.]*$/, "", n); print n "-" $2 }' "$queue"; }
free_gb() { df -Pk "$out" | awk 'NR == 2 { print int($4 / 1048576) }'; }

bad=$(names | grep '^!' | head -n 1)
[ -z "$bad" ] || die 2 "line ${bad#!} of $queue has no task"
twice=$(names | sort | uniq -d | head -n 1)
[ -z "$twice" ] || die 2 "two cells are called $twice; their outputs would mix"

line=$((first - 1))
while :; do
    line=$((line + 1))
    total=$(awk 'END { print NR }' "$queue") # counts a last line without newline too
    [ "$line" -le "$total" ] || break
    text=$(sed -n "${line}p" "$queue" | tr -d '\r')
    name=$(name_of "$text")
    [ -n "$name" ] || continue
    case $name in */* | .* | *[!A-Za-z0-9._=+-]*) die 2 "line $line: $name is no safe folder name" ;; esac
    dir=$out/$name
    mkdir -p "$dir" || die 2 "can't create $dir"
    if [ -e "$dir/DONE" ]; then echo "SKIP $line $name"; continue; fi
    [ "$(free_gb)" -ge "${MIN_FREE_GB:-5}" ] || die 3 "less than ${MIN_FREE_GB:-5} GB free below $out; cell $name not started"
    if ! mkdir "$dir/.running" 2>/dev/null; then
        echo "TAKEN $line $name (remove $dir/.running if its run is surely dead)"
        continue
    fi
    echo "START $line $name $(date -u +%Y-%m-%dT%H:%M:%SZ)"
    # shellcheck disable=SC2086 # the words of the line are arguments
    CELL_DIR=$dir CELL_NAME=$name "$@" $text </dev/null >>"$dir/run.log" 2>&1
    code=$?
    if [ "$code" -eq 0 ]; then : >"$dir/DONE"; fi
    rmdir "$dir/.running"
    echo "END $line $name exit $code"
done

missing=0
for name in $(names); do
    [ -e "$out/$name/DONE" ] || { echo "MISSING $name"; missing=$((missing + 1)); }
done
total=$(names | grep -c .)
[ "$total" -gt 0 ] || die 1 "the queue holds no cell"
echo "QUEUE END: $((total - missing)) of $total cells done"
[ "$missing" -eq 0 ]
