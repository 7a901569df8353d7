"""Sandboxes for jobs on this machine: detect the one that works, and build the command line that starts it.

A job is code that an agent wrote. Without a sandbox it runs under the user's account and can read every key and file of
the user, including gpuwarden's ledger and policy. In a sandbox it has access to its run folder (only its working
folder, `metrics.jsonl` and a private home are writable), the system's programs, its interpreter, and the GPUs.

| kind | mechanism | not covered |
|---|---|---|
| `bubblewrap` | separate namespaces, by `bwrap` | nothing known |
| `landlock` | the kernel's rules on files, TCP, signals, abstract sockets; not as root | UDP; sockets by path |
| `sandbox-exec` | the sandbox of macOS | untested; limits of Apple's profile language |
| `none` | | everything |

A kind is available if its real command line starts Python here, independent of versions or settings.
"""
