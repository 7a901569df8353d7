import argparse
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--out", type=Path, default=Path("out"))
given = parser.parse_args()

device = torch.device("cuda:0")
model = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 4)).to(device)
model = torch.compile(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")
rows = TensorDataset(torch.randn(4096, 16), torch.randint(0, 4, (4096,)))
loader = DataLoader(rows, batch_size=64, shuffle=True, num_workers=2, persistent_workers=True)


def train(epoch):
    total = 0.0
    for x, y in loader:
        loss = nn.functional.cross_entropy(model(x.cuda(non_blocking=True)), y.cuda(non_blocking=True))
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        total += loss.item()
    print(f"epoch {epoch}: {total / len(loader):.3f}")


for epoch in range(given.epochs):
    train(epoch)
given.out.mkdir(exist_ok=True)
torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, given.out / "last.pt")
