"""ConvNeXt of timm with AMP, channels last and an EMA copy."""
import sys

import timm
import torch
from timm.utils import ModelEmaV3

batch = int(sys.argv[1])
model = timm.create_model("convnext_base", pretrained=False).cuda().to(memory_format=torch.channels_last)
ema = ModelEmaV3(model)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
for step in range(2):
    images = torch.randn(batch, 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    with torch.autocast("cuda", torch.bfloat16):
        loss = torch.nn.functional.cross_entropy(model(images), torch.randint(1000, (batch,), device="cuda"))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    ema.update(model)
