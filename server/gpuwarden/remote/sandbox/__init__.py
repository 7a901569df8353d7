"""Sandboxes for jobs on this machine: which one works here, and the words that start a command in it.

A job is code that an agent wrote. Without a sandbox it runs under the user's account and reads every key and file that
the user can read, gpuwarden's ledger and policy among them. In one it sees its run folder (only its working folder,
`metrics.jsonl` and a home of its own can be written), the system's programs, its interpreter, and the GPUs.

| kind | what it is | what it leaves open |
|---|---|---|
| `bubblewrap` | namespaces of its own, by `bwrap` | nothing known |
| `landlock` | the kernel's rules on files, TCP, signals, abstract sockets; not as root | UDP; sockets by path |
| `sandbox-exec` | macOS's own | not run by its authors; what Apple's profile language can't say |
| `none` | | everything |

A kind counts when the real words start Python here. Nothing is concluded from versions or settings.
"""
