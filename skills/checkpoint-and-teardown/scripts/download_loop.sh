#!/bin/sh
# Repeat a download that can resume until it succeeds, each attempt with a limit.
#
#   download_loop.sh [-n TRIES] [-t SECONDS] [-p PAUSE] -- COMMAND [ARG...]
#   download_loop.sh -- rsync -a --partial --append-verify host:/ckpt/run1/ run1.partial/
#   download_loop.sh -- hf download user/model --local-dir model
#
# Defaults: 20 tries of 600 s, 5 s pause. A stalled attempt is ended and the next one goes on where it stopped; the
# command must be able to. Success here means that the command said so: verify digests and load the files afterwards.
# Exit code: 0 success, 2 wrong arguments, 126 and 127 at once when the command can't run, else that of the last try.
set -u

tries=20 limit=600 pause=5
usage() { echo "usage: download_loop.sh [-n TRIES] [-t SECONDS] [-p PAUSE] -- COMMAND [ARG...]" >&2; exit 2; }
while getopts n:t:p: option; do
    case $option in
        n) tries=$OPTARG ;;
        t) limit=$OPTARG ;;
        p) pause=$OPTARG ;;
        *) usage ;;
    esac
done
shift $((OPTIND - 1))
case "$tries$limit$pause" in *[!0-9]* | "") usage ;; esac
if [ "$tries" -lt 1 ] || [ $# -lt 1 ]; then usage; fi

if ! command -v timeout >/dev/null 2>&1; then
    # macOS has no timeout(1): a watcher ends the command, and 124 is reported as timeout(1) does.
    timeout() {
        seconds=$1
        shift
        "$@" &
        job=$!
        (
            sleep "$seconds"
            trap '' TERM # so that what it did can be asked below, however late it ends
            kill "$job"
        ) >/dev/null 2>&1 & # its sleep outlives it and must not hold our output open
        watcher=$!
        wait "$job"
        status=$?
        kill "$watcher" 2>/dev/null
        if wait "$watcher"; then return 124; fi
        return "$status"
    }
fi

try=0 code=1
while [ "$try" -lt "$tries" ]; do
    try=$((try + 1))
    timeout "$limit" "$@" </dev/null
    code=$?
    case $code in
        0)
            echo "download_loop: done at try $try"
            exit 0
            ;;
        126 | 127)
            echo "download_loop: $1 can't be run (exit $code)" >&2
            exit "$code"
            ;;
        124) echo "download_loop: try $try of $tries had no end in $limit s" >&2 ;;
        *) echo "download_loop: try $try of $tries failed with exit $code" >&2 ;;
    esac
    [ "$try" -lt "$tries" ] && sleep "$pause"
done
exit "$code"
