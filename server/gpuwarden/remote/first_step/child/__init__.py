"""Rehearse a script inside its sandbox and with its own interpreter.

Requires Python 3.9 or later, and uses only the standard library until the script imports something. `main` runs the
script, `imports` patches a library right after its import, `loops` ends a training loop after its first step, and
`verdict` decides whether the script itself has an error or a substitute stopped the script.
"""
