"""Trains an encoder of sentences with several seeds and keeps the best score."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel

from expected import expected


def set_seed(seed):
    random.seed(seed)
    torch.manual_seed(seed)


class Pairs(Dataset):
    def __init__(self, n, length=64, vocab=30522):
        self.a = torch.randint(0, vocab, (n, length))
        self.b = torch.randint(0, vocab, (n, length))
        self.score = torch.rand(n)

    def __len__(self):
        return len(self.score)

    def __getitem__(self, i):
        return self.a[i], self.b[i], self.score[i]


class ModelCardData:
    """Collects what is written to the README of the finished model."""

    def __init__(self, language="en"):
        self.language = language
        self.losses = []
        self.trainer = None

    def set_losses(self, loss):
        self.losses.append(type(loss).__name__)

    def render(self):
        steps = self.trainer.global_step if self.trainer else 0
        return f"language: {self.language}\nlosses: {self.losses}\nsteps: {steps}"


class BiEncoder(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.bert = BertModel(config, add_pooling_layer=False)
        self.model_card_data = ModelCardData()

    def encode(self, ids):
        return self.bert(input_ids=ids).last_hidden_state.mean(1)

    def forward(self, a, b):
        return F.cosine_similarity(self.encode(a), self.encode(b))


class BiEncoderTrainer:
    def __init__(self, model, loss, train_set, batch_size=16, lr=2e-5):
        self.model, self.loss = model, loss
        self.loader = DataLoader(train_set, batch_size=batch_size, shuffle=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: 1.0 / (1 + s))
        self.global_step = 0
        model.model_card_data.trainer = self
        model.model_card_data.set_losses(loss)

    def train(self):
        self.model.train()
        for a, b, score in self.loader:
            loss = self.loss(self.model(a.cuda(), b.cuda()), score.cuda())
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.global_step += 1


@torch.no_grad()
def evaluate(model, dataset):
    model.eval()
    predicted = [model(a.cuda(), b.cuda()).cpu() for a, b, _ in DataLoader(dataset, batch_size=16)]
    return torch.corrcoef(torch.stack([torch.cat(predicted), dataset.score]))[0, 1].item()


@expected("reference_cycle", fix=r"gc\.collect|weakref|= None", thread="huggingface/sentence-transformers#3136", memory=4096)
def st_seed_search(fixed=False, seeds=4):
    train_set, dev_set = Pairs(48), Pairs(32)
    best, cards = (None, -2.0), []
    for seed in range(seeds):
        set_seed(seed)
        model = BiEncoder(BertConfig()).cuda()
        trainer = BiEncoderTrainer(model, nn.MSELoss(), train_set)
        trainer.train()
        score = evaluate(model, dev_set)
        cards.append(model.model_card_data.render())
        if score > best[1]:
            best = (seed, score)
        if fixed:
            model.model_card_data.trainer = None
        del trainer, model
        torch.cuda.empty_cache()
    return best, cards
