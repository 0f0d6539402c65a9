"""Trains networks with different hyperparameters on photos of birds, and has the best of them vote."""
import copy

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from torchvision import models

from expected import expected

DEVICE = torch.device("cuda")
CONFIGS = {"a": {"lr": 1e-4, "dropout": 0.5}, "b": {"lr": 3e-4, "dropout": 0.5}, "c": {"lr": 1e-4, "dropout": 0.2},
           "d": {"lr": 3e-4, "dropout": 0.2}}


class Birds(Dataset):
    def __init__(self, n, classes=20, seed=0):
        self.n, self.classes = n, classes
        self.gen = torch.Generator().manual_seed(seed)

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.rand(3, 224, 224, generator=self.gen), i % self.classes


def make_network(dropout):
    net = models.alexnet(weights=None, dropout=dropout)
    net.classifier[6] = nn.Linear(4096, 20)
    return net


def run_epoch(net, loader, criterion, optimizer):
    net.train()
    running, seen = 0.0, 0
    for x, y in loader:
        x, y = x.to(DEVICE), y.to(DEVICE)
        optimizer.zero_grad()
        loss = criterion(net(x), y)
        loss.backward()
        optimizer.step()
        running += loss.item() * x.size(0)
        seen += x.size(0)
    return running / seen


@torch.no_grad()
def validate(net, loader):
    net.eval()
    hits = 0
    for x, y in loader:
        hits += (net(x.to(DEVICE)).argmax(1).cpu() == y).sum().item()
    return hits / len(loader.dataset)


def experiment(cfg, train_dl, val_dl, fixed, epochs=1):
    net = make_network(cfg["dropout"]).to(DEVICE)
    criterion = nn.CrossEntropyLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=cfg["lr"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(epochs):
        run_epoch(net, train_dl, criterion, optimizer)
        scheduler.step()
    acc = validate(net, val_dl)
    if fixed:
        return acc, net.to("cpu")
    return acc, copy.deepcopy(net)


def vote(networks, loader):
    hits = 0
    with torch.no_grad():
        for x, y in loader:
            total = 0
            for net in networks:
                net.to(DEVICE)
                total = total + net(x.to(DEVICE)).softmax(1).cpu()
                net.to("cpu")
            hits += (total.argmax(1) == y).sum().item()
    return hits / len(loader.dataset)


@expected("several_models", fix=r"\.cpu\(\)", thread="bot.dharman.net/reports.php?id=1953130", memory=1600)
def so_ensemble_deepcopy(fixed=False):
    torch.manual_seed(1)
    train_dl = DataLoader(Birds(24), batch_size=8, shuffle=True)
    val_dl = DataLoader(Birds(8, seed=5), batch_size=8)
    trained, scores = {}, {}
    for name, cfg in CONFIGS.items():
        scores[name], trained[name] = experiment(cfg, train_dl, val_dl, fixed)
        torch.cuda.empty_cache()
    best = sorted(scores, key=scores.get, reverse=True)[:3]
    return vote([trained[name] for name in best], val_dl)
