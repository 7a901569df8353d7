"""The teardown gate: verify the outputs, get the user's approval, stop or terminate the machine, and confirm its new
state.
"""
