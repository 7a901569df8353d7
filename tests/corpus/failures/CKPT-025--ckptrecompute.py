import os, sys, torch

torch.set_num_threads(1)

from torch.utils.checkpoint import checkpoint

n = [0]


def f(x):
    n[0] += 1
    return (x[: n[0]] * 2).sin()


x = torch.ones(4, requires_grad=True)
checkpoint(f, x, use_reentrant=False).sum().backward()
