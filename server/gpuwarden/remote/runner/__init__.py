"""gpuwarden's runner: starts, watches and reports one job on the machine that it was shipped to.

    python -I runner.py VERB [DIR]      one JSON object on stdin, one JSON object per line on stdout

Verbs: start, supervise (used by start), allot (in place of both inside an engine's allocation), keep (used by
supervise), poll, serve (many polls), logs, stop, list, manifest, read, bundle, disclose, examine, look, spool, relay
(used by supervise).
Python >= 3.8, standard library only. `DIR` is the run folder of one job:

    status.json        what is known, replaced atomically, padded so that it can be rewritten in place on a full disk
    lock               locked by the living supervisor; the kernel releases it, so no claim outlives its owner
    out.<base>.log     the log; <base> is the absolute offset of its first byte. `out.log` links to the newest
    metrics.jsonl      written by the job: one JSON object per line, `step` and numbers
    alerts.jsonl       written by the supervisor
    spool.*.jsonl      what the job posted and what the supervisor saw, until the server has it; `spool.sent.json`
    seals.jsonl        digests of finished checkpoints, written by the sealer right after their save; the job may write
                       here too, so each line carries a code (MAC) by which the key's owner verifies its author
    keep.json          state of the upload to an artifact store, and keep-sent.json what that upload has sent
    work/              the job's working folder; relative outputs live here

A job is known by (token, attempt) and is launched once: the process that gets the lock and finds no status of that
attempt launches, all others adopt. A process is identified by pid, start ticks and boot id, never by its pid alone.
Secrets travel over stdin into the job's environment and nowhere else; their values are masked in everything that is
written.

Its modules are shipped joined into one file (`runner_bundle.py`). A module imports its siblings and the standard
library, siblings at its top: a supervisor outlives the file that it was started from.

Signals to the supervisor: SIGUSR1 is gpuwarden's own stop (canceled); SIGTERM and SIGINT come from outside (preempted).
"""
