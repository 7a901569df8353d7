"""Estimate the memory and the time of a training run from the model's shape and the script's settings, without a GPU.

`shape` reads a config.json, `setup` the script; `memory`, from its `parts`, and `time` count by formula. `traced`
measures a packed run's memory instead, by a trace of the model that `replay` takes through the `allocator`. What a run
does narrows the time: `scripts.pace`. Each figure is an interval with its derivation, compared with the published runs
of `published`.
"""
