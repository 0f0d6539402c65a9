"""A training script as anybody has one: two blocks of convolutions, AdamW. Usage: train.py --batch-size N [--steps N]"""
import argparse
import json

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1)
        self.norm = nn.BatchNorm2d(64)
        self.conv2 = nn.Conv2d(64, 64, 3, padding=1)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv1(x)))
        x = torch.relu(self.conv2(x))
        return self.head(x.mean((2, 3)))


parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--steps", type=int, default=4)
args = parser.parse_args()

model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(args.steps):
    x = torch.randn(args.batch_size, 3, 64, 64, device="cuda")
    target = torch.randint(10, (args.batch_size,), device="cuda")
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(x), target)
    loss.backward()
    optimizer.step()
print(json.dumps({"torch": torch.__version__, "allocated": torch.cuda.max_memory_allocated(),
                  "reserved": torch.cuda.max_memory_reserved()}))
