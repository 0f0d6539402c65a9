"""Trains a segmentation of several labels, and computes F1 and the precision-recall curve once for each epoch."""
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.models.segmentation import fcn_resnet50

from expected import expected

CLASSES = 21
device = torch.device("cuda")


class Scenes(Dataset):
    def __init__(self, n, side=256):
        self.n, self.side = n, side

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = torch.rand(3, self.side, self.side)
        y = torch.rand(CLASSES, 1, 1).gt(0.8).float().expand(CLASSES, self.side, self.side)
        return x, y.clone()


def f1_score(logits, labels, threshold=0.0):
    pred = logits > threshold
    tp = (pred & labels.bool()).sum().item()
    fp = (pred & ~labels.bool()).sum().item()
    fn = (~pred & labels.bool()).sum().item()
    return 2 * tp / max(1, 2 * tp + fp + fn)


def pr_curve(logits, labels, points=5):
    curve = []
    for q in torch.linspace(-2, 2, points).tolist():
        pred = logits > q
        tp = (pred & labels.bool()).sum().item()
        curve.append((tp / max(1, pred.sum().item()), tp / max(1, labels.sum().item())))
    return curve


def train_epoch(net, loader, optimizer, scheduler, fixed):
    net.train()
    logits_buf, labels_buf, loss_hist = [], [], []
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad(set_to_none=True)
        logits = net(images)["out"]
        loss = F.binary_cross_entropy_with_logits(logits, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 5.0)
        optimizer.step()
        scheduler.step()
        if fixed:
            logits, labels, loss = logits.detach().cpu(), labels.cpu(), loss.item()
        logits_buf.append(logits)
        labels_buf.append(labels)
        loss_hist.append(loss)
    f1 = sum(f1_score(a, b) for a, b in zip(logits_buf, labels_buf)) / len(logits_buf)
    curve = pr_curve(logits_buf[-1], labels_buf[-1])
    return sum(float(v) for v in loss_hist) / len(loss_hist), f1, curve


@expected("kept_tensors", fix=r"labels_buf\.append\(.*\.cpu\(\)", thread="cloud.tencent.com/developer/article/2565125", memory=4096)
def blog_epoch_metrics(fixed=False, epochs=1):
    torch.manual_seed(0)
    loader = DataLoader(Scenes(8 * 20), batch_size=8, shuffle=True)
    net = fcn_resnet50(weights=None, weights_backbone=None, num_classes=CLASSES).to(device)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.PolynomialLR(optimizer, total_iters=60, power=0.9)
    return [train_epoch(net, loader, optimizer, scheduler, fixed) for _ in range(epochs)]
