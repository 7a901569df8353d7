"""Estimate a training run's memory and time from the model's shape and the script's settings, without a GPU.

`shape` reads a config.json, and `setup` reads the script; `memory` (from `parts`) and `time` use formulas. For a packed
run, `traced` measures the memory instead: it traces the model, and `replay` runs the trace through the `allocator`.
`static_analysis.pace` narrows the time interval based on the running job's steps. Each figure is an interval with its
derivation, and is compared with the published runs in `tests/corpus/published-runs.json`.
"""
