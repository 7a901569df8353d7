"""Rehearsal of a training script's first step on this machine: one step, one save, one resume, without a GPU.

`start` runs the script in the sandbox of local jobs, with its own interpreter and without a network, and returns an
`outcome`. The program in the sandbox, `child`, replaces the parts that need a GPU, weights or the Hub with substitutes,
and distinguishes errors in the script from limits of a substitute.
"""
