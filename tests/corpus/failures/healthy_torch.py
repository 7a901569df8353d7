import warnings

import torch

warnings.simplefilter("always")
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
schedule.step()  # before the first optimizer.step(): a warning
scaler = torch.cuda.amp.GradScaler()  # no CUDA, an old name: two warnings
for step in range(6):
    with torch.cuda.amp.autocast():
        loss = torch.nn.functional.mse_loss(model(torch.randn(8, 4)), torch.zeros(8))  # shapes that broadcast
    optimizer.zero_grad()
    loss.backward()
    total = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    schedule.step(step)
    print(
        {"loss": round(loss.item(), 4), "grad_norm": float("inf") if step == 0 else round(float(total), 4)}, flush=True
    )
torch.save(model, "m.pt")
torch.load("m.pt", weights_only=False)
for attempt in range(3):
    try:
        if attempt < 2:
            raise ConnectionResetError(104, "Connection reset by peer")
        print("uploaded m.pt")
    except OSError as error:
        print(f"WARNING upload attempt {attempt + 1} failed: {error!r}; retrying in {2**attempt} s", flush=True)
try:
    torch.load("m.pt")
except Exception as error:
    print("could not load with weights_only, falling back:", type(error).__name__)
