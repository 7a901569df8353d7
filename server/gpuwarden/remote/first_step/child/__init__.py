"""The program that rehearses a script, inside its sandbox and with the script's interpreter.

Standard library until the script imports something; Python 3.9 and later. `main` runs the script, `imports` patches a
library right after its import, `loops` ends a training loop after its first step, and `verdict` distinguishes a fault
of the script from a stop by a substitute.
"""
