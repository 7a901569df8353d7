import os, sys, torch

torch.set_num_threads(1)

m = torch.nn.Linear(2, 2).half()
o = torch.optim.SGD(m.parameters(), 1e-3)
s = torch.amp.GradScaler("cpu")
for p in m.parameters():
    p.grad = torch.zeros_like(p)
s.scale(torch.zeros(1))
s.unscale_(o)
