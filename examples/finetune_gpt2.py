"""Fine-tunes GPT-2 on texts of 1024 tokens: an ordinary loop, with nothing of oomdiag in it.

    oomdiag run --device rtx3060 -- python finetune_gpt2.py --batch-size 8

The texts are random tokens and the weights are fresh, so that nothing is downloaded. Memory does not depend on them.
"""
import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--length", type=int, default=1024)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()

model = GPT2LMHeadModel(GPT2Config(use_cache=False)).cuda().train()
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
for step in range(args.steps):
    tokens = torch.randint(50257, (args.batch_size, args.length)).cuda()
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
