"""gpuwarden's runner starts one job on the remote machine, watches it, and reports its state.

    python -I runner.py VERB [DIR]      reads one JSON object from stdin, prints one JSON object per line

Verbs: start, supervise (used by start), allot (replaces both inside an engine's allocation), keep (used by supervise),
relay (used by supervise), poll, serve (answers many polls), logs, stop, list, manifest, fetch, read, bundle, disclose,
examine, self_stop, self_stopper (used by self_stop), hold, look, spool.
Python >= 3.8, standard library only. `DIR` is the run folder of one job:

    status.json        status, replaced atomically; padded so that it can be rewritten in place on a full disk
    lock               locked by the running supervisor; the kernel releases the lock when the supervisor dies
    out.<base>.log     a segment of the log; <base> is the absolute offset of its first byte. `out.log` links to the
                       newest segment
    metrics.jsonl      written by the job: one JSON object per line, with `step` and metrics
    alerts.jsonl       written by the supervisor
    spool.*.jsonl      reports from the job and the supervisor; `spool.sent.json` contains the offset in each file up to
                       which the server has received the reports
    seals.jsonl        digests of finished checkpoints, written by the sealer right after each save. The job can write
                       to this file too, so each line has the sealer's MAC
    keep.json          state of the upload to an artifact store; keep-sent.json lists the uploaded files
    work/              the job's working folder, which contains the outputs with relative paths

A job is identified by (token, attempt) and is launched once: the process that gets the lock and finds no status for
that attempt launches the job; other processes adopt it. A process is identified by pid, start ticks and boot id, never
by its pid alone. Secrets arrive on stdin (for `allot`, in an environment variable) and are passed only to the job's
environment. Their values are masked in all text that the runner writes.

`runner_bundle.py` joins the modules into one file, which is sent to the machine. A module imports only its siblings and
the standard library. It imports its siblings at the top, because a supervisor outlives the file that it was started
from.

The supervisor stops the job when it receives a signal: SIGUSR1, which gpuwarden sends (canceled), or SIGTERM or SIGINT,
which other programs send (preempted).
"""
