"""DeepSpeed's ZeRO, stage 2 or 3."""
import sys

import deepspeed
import torch
from transformers import GPT2Config, GPT2LMHeadModel

stage, batch = map(int, sys.argv[1:3])
model = GPT2LMHeadModel(GPT2Config())
engine, *_ = deepspeed.initialize(model=model, config={
    "train_micro_batch_size_per_gpu": batch, "bf16": {"enabled": True}, "zero_optimization": {"stage": stage},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}})
for step in range(2):
    tokens = torch.randint(50000, (batch, 1024), device="cuda")
    engine.backward(engine(input_ids=tokens, labels=tokens).loss)
    engine.step()
