"""Fine-tunes an encoder of sentences with the other passages of a batch as negatives, and with activation checkpointing."""
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel, get_linear_schedule_with_warmup

from expected import expected


@dataclass
class Arguments:
    batch_size: int = 16
    max_length: int = 256
    lr: float = 2e-5
    warmup: int = 2
    steps: int = 5
    gradient_checkpointing: bool = True


class QueryPassage(Dataset):
    def __init__(self, n, length, vocab=30522):
        self.n, self.length, self.vocab = n, length, vocab

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.randint(1, self.vocab, (self.length,)), torch.randint(1, self.vocab, (self.length,))


class Backbone(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.auto_model = BertModel(config, add_pooling_layer=False)

    def forward(self, ids):
        mask = (ids != 0).long()
        return self.auto_model(input_ids=ids, attention_mask=mask).last_hidden_state, mask


class MeanPooling(nn.Module):
    def forward(self, inputs):
        tokens, mask = inputs
        mask = mask.unsqueeze(-1).to(tokens.dtype)
        return (tokens * mask).sum(1) / mask.sum(1).clamp(min=1e-9)


class Normalize(nn.Module):
    def forward(self, x):
        return F.normalize(x, dim=-1)


class Embedder(nn.Sequential):
    """Looks like a model of transformers to the trainer."""

    def __init__(self, config, fixed=False):
        super().__init__(Backbone(config), MeanPooling(), Normalize())
        self.config, self.fixed = config, fixed
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self, kwargs=None):
        self.gradient_checkpointing = True
        if self.fixed:
            self[0].auto_model.gradient_checkpointing_enable(kwargs)


class RankingLoss(nn.Module):
    def __init__(self, model, scale=20.0):
        super().__init__()
        self.model, self.scale = model, scale

    def forward(self, queries, passages):
        q, p = self.model(queries), self.model(passages)
        scores = q @ p.T * self.scale
        return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


class Trainer:
    def __init__(self, model, args, dataset):
        self.model = model.cuda()
        if args.gradient_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.loss = RankingLoss(self.model)
        self.loader = DataLoader(dataset, batch_size=args.batch_size, shuffle=True, drop_last=True)
        decay = [p for n, p in model.named_parameters() if "bias" not in n and "LayerNorm" not in n]
        rest = [p for n, p in model.named_parameters() if "bias" in n or "LayerNorm" in n]
        self.optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}], lr=args.lr)
        self.scheduler = get_linear_schedule_with_warmup(self.optimizer, args.warmup, args.steps)

    def train(self):
        self.model.train()
        losses = []
        for q, p in self.loader:
            loss = self.loss(q.cuda(), p.cuda())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


@expected("checkpoints_without_effect", fix=r"auto_model\.gradient_checkpointing_enable",
          thread="huggingface/sentence-transformers#2717", memory=4096)
def st_gradient_checkpointing(fixed=False):
    args = Arguments()
    torch.manual_seed(42)
    data = QueryPassage(args.steps * args.batch_size, args.max_length)
    return Trainer(Embedder(BertConfig(), fixed), args, data).train()
