"""Estimate the memory and the time of a training run from the model's shape and the script's settings, without a GPU.

`shape` reads a config.json, `setup` the script; `memory` (from `parts`) and `time` count by formula. For a packed run,
`traced` measures the memory instead: it traces the model, and `replay` runs the trace through the `allocator`. The
steps of a running job narrow the time: `static_analysis.pace`. Each figure is an interval with its derivation, and is
compared with the published runs of `published`.
"""
