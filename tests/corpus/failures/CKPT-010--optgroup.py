import os, sys, torch

torch.set_num_threads(1)

a = torch.optim.Adam(torch.nn.Linear(2, 2).parameters())
b = torch.optim.Adam(torch.nn.Linear(2, 2, bias=False).parameters())
b.load_state_dict(a.state_dict())
