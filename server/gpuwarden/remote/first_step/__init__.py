"""Rehearsal of a training script's first step on this machine: one step, one save, one resume, without a GPU.

`start` runs the script in the sandbox of local jobs, with its own interpreter and without a network; `outcome` is what
came of it. The program inside, `child`, replaces what needs a GPU, weights or the Hub by substitutes, and reports apart
what a substitute stopped.
"""
