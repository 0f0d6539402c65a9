"""LoRA by peft on a Llama of 1.1 billion parameters in bfloat16."""
import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

batch = int(sys.argv[1])
with torch.device("cuda"):
    model = LlamaForCausalLM(LlamaConfig(hidden_size=2048, intermediate_size=5632, num_hidden_layers=22, num_attention_heads=32,
                                         num_key_value_heads=4, dtype="bfloat16"))
model = get_peft_model(model.to(torch.bfloat16), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-4)
for step in range(2):
    tokens = torch.randint(32000, (batch, 1024), device="cuda")
    model(input_ids=tokens, labels=tokens).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
