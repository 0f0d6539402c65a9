"""T5-base, a loop of its own."""
import sys

import torch
from transformers import T5Config, T5ForConditionalGeneration

batch = int(sys.argv[1])
model = T5ForConditionalGeneration(T5Config(d_model=768, d_ff=3072, num_layers=12, num_heads=12, decoder_start_token_id=0)).cuda()
optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
for step in range(3):
    tokens = torch.randint(32000, (batch, 512), device="cuda")
    loss = model(input_ids=tokens, labels=tokens[:, :128].contiguous()).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
