"""Sandboxes for jobs on this machine: detect which one works, and build its command line.

A job is code that an agent wrote. Without a sandbox, it runs under the user's account and can read all of the user's
keys and files, including gpuwarden's ledger and policy. In a sandbox, it has access to its run folder, the system's
programs, its interpreter, and the GPUs. Within the run folder, only the working folder, `metrics.jsonl` and a private
home are writable.

| kind | mechanism | not covered |
|---|---|---|
| `bubblewrap` | separate namespaces, created by `bwrap` | nothing known |
| `landlock` | kernel rules for files, TCP, signals and abstract sockets; not for root | UDP; pathname sockets |
| `sandbox-exec` | the macOS sandbox | untested; rules that Apple's profile language can't express |
| `none` | | everything |

A kind is available if its command line starts Python on this machine; versions and settings are not checked.
"""
