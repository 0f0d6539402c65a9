"""A Llama of 0.44 billion parameters in bfloat16 by transformers' Trainer."""
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

batch, extra = int(sys.argv[1]), sys.argv[2:]
model = LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=22, num_attention_heads=16,
                                     vocab_size=32000)).to(torch.bfloat16)
rows = [{"input_ids": torch.randint(32000, (1024,)), "labels": torch.randint(32000, (1024,))} for _ in range(3 * batch)]
arguments = TrainingArguments("out", per_device_train_batch_size=batch, max_steps=3, report_to=[], save_strategy="no",
                              gradient_checkpointing="checkpoint" in extra, disable_tqdm=True, dataloader_num_workers=0)
Trainer(model, arguments, train_dataset=rows).train()
