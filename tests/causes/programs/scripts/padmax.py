"""Fine-tunes a BERT classifier on short messages."""
import random

import torch
from transformers import BertConfig, BertForSequenceClassification

from expected import expected

MAX_LEN = 512


def encode(texts, fixed=False):
    # like tokenizer(texts, padding="max_length", max_length=MAX_LEN)
    max_len = min(MAX_LEN, max(len(t) for t in texts)) if fixed else MAX_LEN
    ids = torch.zeros(len(texts), max_len, dtype=torch.long)
    mask = torch.zeros(len(texts), max_len, dtype=torch.long)
    for row, t in enumerate(texts):
        t = t[:max_len]
        ids[row, :len(t)] = torch.tensor(t)
        mask[row, :len(t)] = 1
    return ids, mask


@expected("padding", fix=r"\bpad(ded|ding)?\b", thread="allenai/allennlp#3850", memory=8192)
def padmax(fixed=False):
    device = "cuda"
    random.seed(0)
    # 8 to 40 tokens each
    tweets = [[random.randint(1000, 30000) for _ in range(random.randint(8, 40))] for _ in range(256)]
    labels = torch.randint(0, 3, (256,))
    model = BertForSequenceClassification(BertConfig(num_labels=3)).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5)
    model.train()
    for i in range(0, len(tweets), 32):
        ids, mask = encode(tweets[i:i + 32], fixed)
        out = model(input_ids=ids.to(device), attention_mask=mask.to(device), labels=labels[i:i + 32].to(device))
        optimizer.zero_grad()
        out.loss.backward()
        optimizer.step()
    return out.loss.item()
