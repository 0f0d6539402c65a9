"""BERT-large in bfloat16 by accelerate."""
import sys

import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForSequenceClassification

batch = int(sys.argv[1])
accelerator = Accelerator(mixed_precision="bf16")
model = BertForSequenceClassification(BertConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16,
                                                 intermediate_size=4096))
data = torch.utils.data.TensorDataset(torch.randint(30000, (3 * batch, 512)), torch.randint(2, (3 * batch,)))
model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), 1e-5),
                                               torch.utils.data.DataLoader(data, batch))
for tokens, labels in loader:
    accelerator.backward(model(input_ids=tokens, labels=labels).loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
