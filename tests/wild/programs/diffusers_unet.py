"""The UNet of a diffusion model, trained."""
import sys

import torch
from diffusers import DDPMScheduler, UNet2DConditionModel

batch = int(sys.argv[1])
unet = UNet2DConditionModel(sample_size=64, cross_attention_dim=768).cuda()
scheduler = DDPMScheduler()
optimizer = torch.optim.AdamW(unet.parameters(), 1e-4)
for step in range(2):
    latents, noise = torch.randn(2, batch, 4, 64, 64, device="cuda")
    times = torch.randint(1000, (batch,), device="cuda")
    found = unet(scheduler.add_noise(latents, noise, times), times, torch.randn(batch, 77, 768, device="cuda")).sample
    torch.nn.functional.mse_loss(found, noise).backward()
    optimizer.step()
    optimizer.zero_grad()
