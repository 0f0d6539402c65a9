"""A GPT block compiled in one of torch.compile's modes; or flex_attention."""
import sys

import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

mode, batch = sys.argv[1], int(sys.argv[2])
if mode == "flex":
    q, k, v = (torch.randn(batch, 16, 1024, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, 1024, 1024)
    attend = torch.compile(flex_attention)
    for step in range(2):
        attend(q, k, v, block_mask=mask).square().mean().backward()
    sys.exit()
model = nn.Sequential(*[nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0) for _ in range(4)]).cuda()
model = torch.compile(model, mode=None if mode == "inductor" else mode)
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
for step in range(3):
    model(torch.randn(batch, 256, 512, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
