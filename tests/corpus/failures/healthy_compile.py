import torch
import torch._dynamo

torch._dynamo.config.suppress_errors = True
torch._logging.set_logs(recompiles=True, graph_breaks=True)


@torch.compile(backend="eager")
def f(x):
    if x.sum() > 0:
        return x * 2
    print("a graph break")
    return x


for n in range(2, 14):
    f(torch.randn(n))
