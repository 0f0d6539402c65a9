"""GPT-2 generates in float16: a cache of keys and values that grows by a token."""
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel

batch, tokens = map(int, sys.argv[1:])
model = GPT2LMHeadModel(GPT2Config(n_positions=2048)).half().cuda().eval()
prompt = torch.randint(50000, (batch, 64), device="cuda")
print(model.generate(prompt, max_new_tokens=tokens, do_sample=True, pad_token_id=0).shape)
