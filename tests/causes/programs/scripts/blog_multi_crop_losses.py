"""Trains a classifier on several random crops of each picture, with one loss for each crop."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

CROPS = 6
device = torch.device("cuda")


class Pictures(Dataset):
    def __init__(self, n, classes=50):
        self.n, self.classes = n, classes

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.rand(3, 288, 288), i % self.classes


class Bottleneck(nn.Module):
    def __init__(self, cin, mid, stride):
        super().__init__()
        cout = mid * 4
        self.conv = nn.Sequential(
            nn.Conv2d(cin, mid, 1, bias=False), nn.BatchNorm2d(mid), nn.ReLU(inplace=True),
            nn.Conv2d(mid, mid, 3, stride, 1, bias=False), nn.BatchNorm2d(mid), nn.ReLU(inplace=True),
            nn.Conv2d(mid, cout, 1, bias=False), nn.BatchNorm2d(cout))
        self.skip = nn.Identity()
        if stride != 1 or cin != cout:
            self.skip = nn.Sequential(nn.Conv2d(cin, cout, 1, stride, bias=False), nn.BatchNorm2d(cout))

    def forward(self, x):
        return F.relu(self.conv(x) + self.skip(x))


class Net(nn.Module):
    def __init__(self, classes=50):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
        layers, cin = [], 64
        for mid, depth, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
            for k in range(depth):
                layers.append(Bottleneck(cin, mid, stride if k == 0 else 1))
                cin = mid * 4
        self.layers = nn.Sequential(*layers)
        self.fc = nn.Linear(cin, classes)

    def forward(self, x):
        return self.fc(self.layers(self.stem(x)).mean((2, 3)))


def random_crop(images, size=224):
    top = int(torch.randint(0, images.size(2) - size + 1, (1,)))
    left = int(torch.randint(0, images.size(3) - size + 1, (1,)))
    crop = images[:, :, top:top + size, left:left + size]
    return crop.flip(3) if torch.rand(1) < 0.5 else crop


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(1, self.count)


def train(model, loader, criterion, optimizer, scheduler, fixed):
    model.train()
    meter = AverageMeter()
    for images, target in loader:
        images, target = images.to(device), target.to(device)
        optimizer.zero_grad()
        total_loss = 0
        for _ in range(CROPS):
            output = model(random_crop(images))
            loss = criterion(output, target) / CROPS
            if fixed:
                loss.backward()
                loss = loss.detach()
            total_loss = total_loss + loss
        if not fixed:
            total_loss.backward()
        optimizer.step()
        scheduler.step()
        meter.update(total_loss.item(), images.size(0))
    return meter.avg


@expected("several_forward_passes", fix=r"backward\(\)", thread="texonom.com/torch-tensorbackward-6f2ca6cb8f0f481d9bc677d688fe856a", memory=4096)
def blog_multi_crop_losses(fixed=False):
    torch.manual_seed(0)
    loader = DataLoader(Pictures(16 * 3), batch_size=16, shuffle=True)
    model = Net().to(device)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    return train(model, loader, criterion, optimizer, scheduler, fixed)
