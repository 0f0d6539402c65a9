"""Fine-tunes a network for image retrieval with tuples of a query, a positive and negatives."""
import os
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision
from torch.utils.data import DataLoader, Dataset

from expected import expected

DEVICE = "cuda"
NNEG = 5


class TuplesDataset(Dataset):
    def __init__(self, n=30, imsize=256):
        self.n, self.imsize = n, imsize

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        h = self.imsize - 32 * (i % 3)
        images = [torch.rand(1, 3, h, self.imsize) for _ in range(2 + NNEG)]
        target = torch.tensor([-1.0, 1.0] + [0.0] * NNEG)
        return images, target


def collate_tuples(batch):
    return [b[0] for b in batch], [b[1] for b in batch]


class GeM(nn.Module):
    def __init__(self, p=3.0, eps=1e-6):
        super().__init__()
        self.p, self.eps = nn.Parameter(torch.ones(1) * p), eps

    def forward(self, x):
        return F.avg_pool2d(x.clamp(min=self.eps).pow(self.p), x.shape[-2:]).pow(1.0 / self.p)


class RetrievalNet(nn.Module):
    def __init__(self):
        super().__init__()
        net = torchvision.models.resnet50(weights=None)
        self.features = nn.Sequential(*list(net.children())[:-2])
        self.pool = GeM()

    def forward(self, x):
        return F.normalize(self.pool(self.features(x)).flatten(1)).t()


class ContrastiveLoss(nn.Module):
    def __init__(self, margin=0.7):
        super().__init__()
        self.margin = margin

    def forward(self, x, label):
        q = x[:, :1]
        d = (q - x[:, 1:] + 1e-6).pow(2).sum(0).sqrt()
        y = label[1:]
        return (0.5 * y * d.pow(2) + 0.5 * (1 - y) * torch.clamp(self.margin - d, min=0).pow(2)).sum()


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, v, n=1):
        self.sum, self.count = self.sum + v * n, self.count + n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


def set_batchnorm_eval(m):
    if isinstance(m, nn.BatchNorm2d):
        m.eval()


def train(loader, model, criterion, optimizer, fixed):
    losses = AverageMeter()
    model.train()
    model.apply(set_batchnorm_eval)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = 0
        for images, target in zip(inputs, targets):
            output = torch.cat([model(im.to(DEVICE)) for im in images], dim=1)
            if fixed:
                loss = criterion(output, target.to(DEVICE))
                losses.update(loss.item())
                loss.backward()
            else:
                loss = loss + criterion(output, target.to(DEVICE))
        if not fixed:
            loss.backward()
            losses.update(loss.item(), len(inputs))
        optimizer.step()
    return losses.avg


@torch.no_grad()
def extract_vectors(model, n=10):
    model.eval()
    return torch.cat([model(torch.rand(1, 3, 256, 256, device=DEVICE)).cpu() for _ in range(n)], dim=1)


@expected("several_forward_passes", fix=r"backward\(\)", thread="filipradenovic/cnnimageretrieval-pytorch#20", memory=3072)
def tuple_retrieval(fixed=False):
    """The losses of all tuples of a batch are summed before the one backward pass, so that the graphs of all their images are alive at
    once. Cured by: `loss.backward()` for each tuple.
    """
    model = RetrievalNet().to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-6, weight_decay=1e-6)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.99)
    loader = DataLoader(TuplesDataset(), batch_size=5, shuffle=True, collate_fn=collate_tuples)
    with tempfile.TemporaryDirectory() as folder:
        for epoch in range(1):
            train(loader, model, ContrastiveLoss(), optimizer, fixed)
            scheduler.step()
            vecs = extract_vectors(model)
            torch.save({"epoch": epoch, "state_dict": model.state_dict()}, os.path.join(folder, "retrieval.pth"))
    return vecs
