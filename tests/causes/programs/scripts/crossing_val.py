"""Trains a network that reads a traffic light and the end points of a zebra crossing from one photo."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import mobilenet_v2

from expected import expected

DEVICE = torch.device("cuda")
EPOCHS = 2
BATCH = 8


class CrossingNet(nn.Module):
    def __init__(self, num_classes=5):
        super().__init__()
        self.backbone = mobilenet_v2(weights=None).features
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.light = nn.Linear(1280, num_classes)
        self.points = nn.Linear(1280, 4)

    def forward(self, x):
        x = self.pool(self.backbone(x)).flatten(1)
        return self.light(x), self.points(x)


def make_loader(n, shuffle):
    images = torch.rand(n, 3, 432, 576)
    modes = torch.randint(0, 5, (n,))
    points = torch.rand(n, 4)
    return DataLoader(TensorDataset(images, modes, points), batch_size=BATCH, shuffle=shuffle)


def combined(ce, mse, out_light, out_points, mode, points):
    cross_entropy = ce(out_light, mode)
    distance = mse(out_points, points)
    return 0.6 * cross_entropy + 0.4 * distance, cross_entropy, distance


def train_epoch(net, loader, opt, ce, mse):
    net.train()
    running = 0.0
    for images, mode, points in loader:
        images, mode, points = images.to(DEVICE), mode.to(DEVICE), points.to(DEVICE)
        opt.zero_grad()
        out_light, out_points = net(images)
        loss, _, _ = combined(ce, mse, out_light, out_points, mode, points)
        loss.backward()
        opt.step()
        running += loss.item()
    return running / len(loader)


def validate(net, loader, ce, mse, fixed=False):
    net.eval()
    val_loss, val_ce, val_mse = 0, 0, 0
    for images, mode, points in loader:
        images, mode, points = images.to(DEVICE), mode.to(DEVICE), points.to(DEVICE)
        out_light, out_points = net(images)
        loss, cross_entropy, distance = combined(ce, mse, out_light, out_points, mode, points)
        if fixed:
            val_loss += loss.item()
            val_ce += cross_entropy.item()
            val_mse += distance.item()
        else:
            val_loss += loss
            val_ce += cross_entropy
            val_mse += distance
    n = len(loader)
    return val_loss / n, val_ce / n, val_mse / n


@expected("evaluation_keeps_graphs", fix=r"no_grad|item\(\)", thread="samuelyu2002/ImVisible#2", memory=11900)
def crossing_val(fixed=False):
    """The validation has no `torch.no_grad()` and sums its losses as tensors, which keep the graph of each batch. Cured by: `val_loss +=
    loss.item()`, or `torch.no_grad()`.
    """
    net = CrossingNet().to(DEVICE)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    ce, mse = nn.CrossEntropyLoss(), nn.MSELoss()
    train_loader, val_loader = make_loader(32, True), make_loader(64, False)
    for _ in range(EPOCHS):
        train_epoch(net, train_loader, opt, ce, mse)
        val_loss, val_ce, val_mse = validate(net, val_loader, ce, mse, fixed)
    return float(val_loss), float(val_ce), float(val_mse)
