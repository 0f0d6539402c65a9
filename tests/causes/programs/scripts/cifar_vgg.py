"""Trains a VGG-16 with batch normalization on images of the size of CIFAR-10."""
import torch
import torch.nn as nn

from expected import expected

CFG = [64, 64, "M", 128, 128, "M", 256, 256, 256, "M", 512, 512, 512, "M", 512, 512, 512, "M"]


def make_layers(cfg):
    layers, channels = [], 3
    for v in cfg:
        if v == "M":
            layers.append(nn.MaxPool2d(2, 2))
        else:
            layers += [nn.Conv2d(channels, v, 3, padding=1), nn.BatchNorm2d(v), nn.ReLU(inplace=True)]
            channels = v
    return nn.Sequential(*layers)


class VGG(nn.Module):
    def __init__(self, num_classes=10, fixed=False):
        super().__init__()
        self.features = make_layers(CFG)
        side = 1 if fixed else 7
        self.avgpool = nn.AdaptiveAvgPool2d((side, side))
        self.classifier = nn.Sequential(
            nn.Linear(512 * side * side, 4096), nn.ReLU(True), nn.Dropout(),
            nn.Linear(4096, 4096), nn.ReLU(True), nn.Dropout(), nn.Linear(4096, num_classes))

    def forward(self, x):
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def cifar_like(n, batch_size):
    for _ in range(n):
        yield torch.rand(batch_size, 3, 32, 32), torch.randint(0, 10, (batch_size,))


def accuracy(logits, labels):
    return (logits.argmax(1) == labels).float().mean().item()


def train_epoch(model, optimizer, criterion, steps=20, batch_size=128):
    model.train()
    for images, labels in cifar_like(steps, batch_size):
        images, labels = images.cuda(), labels.cuda()
        logits = model(images)
        loss = criterion(logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


@torch.no_grad()
def test(model, steps=5, batch_size=128):
    model.eval()
    scores = [accuracy(model(x.cuda()), y.cuda()) for x, y in cifar_like(steps, batch_size)]
    return sum(scores) / len(scores)


@expected("large_layer", fix=r"AdaptiveAvgPool2d\(1\)|\(1, 1\)", thread="huyvnphan/PyTorch_CIFAR10#9", memory=2048)
def cifar_vgg(fixed=False):
    """`AdaptiveAvgPool2d((7, 7))` repeats one value 49 times for images of 32 x 32 pixels, so `Linear(512 * 7 * 7, 4096)` has an enormous
    weight, with gradient and optimizer state. Cured by: Pool to (1, 1), and `Linear(512, 4096)`.
    """
    model = VGG(fixed=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=1e-2)
    criterion = nn.CrossEntropyLoss()
    for _ in range(3):
        train_epoch(model, optimizer, criterion)
        accuracy_of_epoch = test(model)
    return accuracy_of_epoch
