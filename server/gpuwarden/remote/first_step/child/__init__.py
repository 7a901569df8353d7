"""Rehearse a script inside the sandbox, with the script's interpreter.

Requires Python 3.9 or later, and uses only the standard library until the script imports something. `main` runs the
script, `imports` patches a library right after its import, `loops` ends a training loop after its first step, and
`verdict` decides whether an error in the script or a substitute ended the rehearsal.
"""
