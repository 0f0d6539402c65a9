"""Trains a network that finds lesions on slides and measures precision and recall at 200 thresholds."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class LesionNet(nn.Module):
    def __init__(self, base=32):
        super().__init__()
        self.down1 = self._block(3, base)
        self.down2 = self._block(base, base * 2)
        self.mid = self._block(base * 2, base * 4)
        self.up2 = self._block(base * 6, base * 2)
        self.up1 = self._block(base * 3, base)
        self.head = nn.Conv2d(base, 1, 1)

    @staticmethod
    def _block(i, o):
        return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU(inplace=True))

    def forward(self, x):
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        c = self.mid(F.max_pool2d(b, 2))
        b = self.up2(torch.cat([F.interpolate(c, scale_factor=2), b], 1))
        a = self.up1(torch.cat([F.interpolate(b, scale_factor=2), a], 1))
        return self.head(a).squeeze(1)


class BinnedPrecisionRecall:
    def __init__(self, thresholds=200, device="cuda", fixed=False):
        self.fixed = fixed
        self.thresholds = torch.linspace(0, 1, thresholds, device=device)
        self.confmat = torch.zeros(thresholds, 2, 2, dtype=torch.long, device=device)

    def update(self, probs, target):
        probs, target = probs.flatten(), target.flatten().long()
        n = len(self.thresholds)
        if self.fixed:
            for i in range(n):
                mapping = (probs >= self.thresholds[i]).long() + 2 * target
                self.confmat[i] += torch.bincount(mapping, minlength=4).reshape(2, 2)
            return
        preds_t = (probs.unsqueeze(-1) >= self.thresholds).long()
        mapping = preds_t + 2 * target.unsqueeze(-1)
        mapping = mapping + 4 * torch.arange(n, device=probs.device)
        bins = torch.bincount(mapping.flatten(), minlength=4 * n)
        self.confmat += bins[:4 * n].reshape(n, 2, 2)

    def average_precision(self):
        tp, fp, fn = self.confmat[:, 1, 1], self.confmat[:, 0, 1], self.confmat[:, 1, 0]
        precision = tp / (tp + fp).clamp(min=1)
        recall = tp / (tp + fn).clamp(min=1)
        return -(recall.diff() * precision[:-1]).sum()


def slides(n, batch_size, size):
    for _ in range(n):
        yield torch.randn(batch_size, 3, size, size), (torch.rand(batch_size, size, size) > 0.9).float()


def train_epoch(net, opt, loader):
    net.train()
    for x, y in loader:
        loss = F.binary_cross_entropy_with_logits(net(x.cuda()), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()


@torch.inference_mode()
def validate(net, loader, fixed=False):
    net.eval()
    metric = BinnedPrecisionRecall(thresholds=200, fixed=fixed)
    for x, y in loader:
        metric.update(net(x.cuda()).sigmoid(), y.cuda())
    return metric.average_precision().item()


@expected("all_pairs", fix="split|loop|part", thread="Lightning-AI/torchmetrics#1492", memory=11900)
def seg_pr_curve(fixed=False):
    """The update of the binned precision-recall compares each pixel with each threshold at once: tensors of int64 of pixels x 200. Cured
    by: A loop over the thresholds.
    """
    net = LesionNet().cuda()
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(2):
        train_epoch(net, opt, slides(4, 8, 512))
        average_precision = validate(net, slides(4, 12, 512), fixed)
    return average_precision
