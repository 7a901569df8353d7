"""Rehearse a training script's first step on this machine: one step, one save and one resume, without a GPU.

`start` runs the script in the sandbox for local jobs, with the script's interpreter and without a network, and returns
an `outcome`. The program in the sandbox, `child`, replaces the parts that need a GPU, weights or the Hub with
substitutes, and distinguishes errors in the script from limitations of the substitutes.
"""
