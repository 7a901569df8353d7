# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "lightning>=2.5",
#   "torch>=2.8",
#   "torchvision>=0.20",
# ]
# ///
import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self, width: int = 64):
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 1))

    def training_step(self, batch, _):
        x, y = batch
        loss = nn.functional.mse_loss(self.net(x), y)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-3)


x = torch.randn(4096, 16)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=64, num_workers=2)
trainer = L.Trainer(max_epochs=5, callbacks=[ModelCheckpoint(dirpath="out", save_last=True)])
trainer.fit(Lit(), loader)
