"""Trains a small network with Lightning.

    oomdiag run --device t4 -- python lightning_module.py --batch-size 4096
"""
import argparse

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
args = parser.parse_args()


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))

    def training_step(self, batch, _):
        images, labels = batch
        return nn.functional.cross_entropy(self.net(images), labels)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())


images = torch.zeros(3, 3, 64, 64).repeat(args.batch_size, 1, 1, 1)
data = DataLoader(TensorDataset(images, torch.zeros(len(images), dtype=torch.long)), batch_size=args.batch_size)
lightning.Trainer(max_epochs=1, accelerator="cuda", devices=1, logger=False, enable_checkpointing=False).fit(Classifier(), data)
