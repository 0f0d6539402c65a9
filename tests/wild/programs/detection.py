"""Mask R-CNN of torchvision."""
import sys

import torch
import torchvision

batch = int(sys.argv[1])
model = torchvision.models.detection.maskrcnn_resnet50_fpn(weights=None, weights_backbone=None).cuda()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for step in range(2):
    images = [torch.rand(3, 800, 800, device="cuda") for _ in range(batch)]
    targets = [{"boxes": torch.tensor([[10.0, 10, 200, 300], [50, 60, 400, 500]], device="cuda"),
                "labels": torch.tensor([1, 2], device="cuda"),
                "masks": torch.zeros(2, 800, 800, dtype=torch.uint8, device="cuda")} for _ in range(batch)]
    sum(model(images, targets).values()).backward()
    optimizer.step()
    optimizer.zero_grad()
