"""bitsandbytes: Adam with eight bits, paged, or weights of four bits; torchao: weights of eight bits, Adam with eight bits."""
import sys

import torch
from torch import nn

kind, batch = sys.argv[1], int(sys.argv[2])
model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(30)]).cuda()
if kind in ("adam8bit", "paged"):
    import bitsandbytes
    optimizer = {"adam8bit": bitsandbytes.optim.AdamW8bit, "paged": bitsandbytes.optim.PagedAdamW8bit}[kind](model.parameters())
elif kind == "linear4bit":
    import bitsandbytes
    model = nn.Sequential(*[bitsandbytes.nn.Linear4bit(2048, 2048) for _ in range(30)], nn.Linear(2048, 2048)).cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.is_floating_point()])
elif kind == "ao_adam8bit":
    from torchao.optim import AdamW8bit
    optimizer = AdamW8bit(model.parameters())
else:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_
    quantize_(model, Int8WeightOnlyConfig())
    with torch.no_grad():
        for step in range(3):
            model(torch.randn(batch, 2048, device="cuda"))
    sys.exit()
for step in range(3):
    model(torch.randn(batch, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
