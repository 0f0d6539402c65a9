"""Fits a detector of data out of the distribution on features of a ResNet."""
import torch
import torchvision
from torch.utils.data import ConcatDataset, DataLoader, TensorDataset

from expected import expected


class Buffer:
    def __init__(self):
        self.items = {}

    def append(self, name, t):
        self.items.setdefault(name, []).append(t)

    def get(self, name):
        return torch.cat(self.items[name])


def extract_features(loader, model, device, fixed):
    buf = Buffer()
    with torch.no_grad():
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            z = model(x)
            if fixed:
                buf.append("embedding", z.flatten(1).cpu())
                buf.append("label", y.cpu())
            else:
                buf.append("embedding", z.flatten(1))
                buf.append("label", y)
    return buf.get("embedding"), buf.get("label")


class Mahalanobis:
    def __init__(self, model, fixed):
        self.model, self.fixed = model, fixed

    def fit(self, loader, device="cuda"):
        z, y = extract_features(loader, self.model, device, self.fixed)
        self.mu = torch.stack([z[y == c].float().mean(0).cpu() for c in range(3)])
        return self


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="kkirchheim/pytorch-ood#93", memory=2048)
def ood_fit(fixed=False):
    """The buffer keeps the feature maps of all batches on the GPU until the class means are computed. Cured by: `.cpu()` before they go
    into the buffer.
    """
    backbone = torchvision.models.resnet50(weights=None)
    backbone = torch.nn.Sequential(*list(backbone.children())[:-2]).cuda().eval()
    data = TensorDataset(torch.rand(320, 3, 224, 224), torch.arange(320) % 3)
    data = ConcatDataset([data] * 12)
    det = Mahalanobis(backbone, fixed).fit(DataLoader(data, batch_size=64))
    return det.mu
