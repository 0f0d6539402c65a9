"""Computes the Fréchet distance of two sets of images from the features of a ResNet."""
import torch
import torchvision
from torch.utils.data import DataLoader, Dataset

from expected import expected


class Images(Dataset):
    def __len__(self):
        return 600

    def __getitem__(self, i):
        return {"images": torch.rand(3, 299, 299)}


class FeatureMetric(torch.nn.Module):
    def compute_feats(self, loader, extractor):
        feats = []
        for batch in loader:
            images = batch["images"].float().cuda()
            f = extractor(images).squeeze(-1).squeeze(-1)
            feats.append(f)
        return torch.cat(feats, dim=0)


def frechet(a, b):
    mu = (a.mean(0) - b.mean(0)).pow(2).sum()
    return mu + torch.trace(torch.cov(a.T) + torch.cov(b.T))


@expected("evaluation_keeps_graphs", fix="no_grad", thread="photosynthesis-team/piq#147", memory=6144)
def fid_feats(fixed=False):
    """The features are computed without `torch.no_grad()`, and the list of them keeps the graphs of all batches. Cured by:
    `@torch.no_grad()` on `compute_feats`.
    """
    net = torchvision.models.resnet34(weights=None)
    extractor = torch.nn.Sequential(*list(net.children())[:-1]).cuda().eval()
    fid = FeatureMetric()
    compute_feats = torch.no_grad()(fid.compute_feats) if fixed else fid.compute_feats
    first = compute_feats(DataLoader(Images(), batch_size=20), extractor)
    second = compute_feats(DataLoader(Images(), batch_size=20), extractor)
    return float(frechet(first, second))
