"""Trains two convolutions with a batch normalization that is written by hand."""
import torch
import torch.nn as nn

from expected import expected


class MyBatchNorm2d(nn.Module):
    def __init__(self, channels, eps=1e-5, momentum=0.1, fixed=False):
        super().__init__()
        self.eps, self.momentum, self.fixed = eps, momentum, fixed
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        if self.training:
            mean = x.mean([0, 2, 3])
            var = x.var([0, 2, 3], unbiased=False)
            m = self.momentum
            if self.fixed:
                self.running_mean = (1 - m) * self.running_mean + m * mean.detach()
                self.running_var = (1 - m) * self.running_var + m * x.var([0, 2, 3]).detach()
            else:
                self.running_mean = (1 - m) * self.running_mean + m * mean
                self.running_var = (1 - m) * self.running_var + m * x.var([0, 2, 3])
        else:
            mean, var = self.running_mean, self.running_var
        x = (x - mean[None, :, None, None]) / torch.sqrt(var[None, :, None, None] + self.eps)
        return x * self.weight[None, :, None, None] + self.bias[None, :, None, None]


@expected("graph_of_earlier_steps", fix="no_grad|detach", thread="pytorch/pytorch#20275", memory=2048)
def mybn(fixed=False):
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), MyBatchNorm2d(32, fixed=fixed), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), MyBatchNorm2d(64, fixed=fixed), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(60):
        images = torch.randn(64, 3, 64, 64).cuda()
        target = torch.randint(0, 10, (64,)).cuda()
        optimizer.zero_grad()
        loss = criterion(model(images), target)
        loss.backward()
        optimizer.step()
    return loss.item()
