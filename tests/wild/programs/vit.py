"""ViT-B in float16 with a GradScaler."""
import sys

import torch
from transformers import ViTConfig, ViTForImageClassification

batch = int(sys.argv[1])
model = ViTForImageClassification(ViTConfig(num_labels=1000)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
scaler = torch.amp.GradScaler()
for step in range(3):
    with torch.autocast("cuda", torch.float16):
        loss = model(torch.randn(batch, 3, 224, 224, device="cuda"), labels=torch.randint(1000, (batch,), device="cuda")).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
