"""Attacks a text classifier: each word is replaced by its neighbours, and the model scores all of these texts."""
import random

import torch
import torch.nn as nn
from transformers import BertConfig, BertForSequenceClassification

from expected import expected

MAXLEN, VOCAB = 128, 30522


class Victim(nn.Module):
    def __init__(self):
        super().__init__()
        self.bert = BertForSequenceClassification(BertConfig(vocab_size=VOCAB, num_labels=2, num_hidden_layers=6))

    def forward(self, ids, mask):
        return self.bert(input_ids=ids, attention_mask=mask).logits


class Neighbours:
    """A table of the nearest words of each word."""

    def __init__(self, k=20, seed=0):
        self.table = torch.randint(5, VOCAB, (VOCAB, k), generator=torch.Generator().manual_seed(seed))

    def __call__(self, token):
        return self.table[token].tolist()


class GreedyAttack:
    def __init__(self, model, neighbours, device, max_edits=4, fixed=False):
        self.model, self.neighbours, self.device = model, neighbours, device
        self.max_edits, self.fixed = max_edits, fixed

    def call_model(self, texts):
        if not texts:
            return torch.empty(0, 2)
        ids = torch.zeros(len(texts), MAXLEN, dtype=torch.long)
        mask = torch.zeros(len(texts), MAXLEN, dtype=torch.long)
        for i, t in enumerate(texts):
            ids[i, :len(t)] = torch.tensor(t)
            mask[i, :len(t)] = 1
        with torch.no_grad():
            if self.fixed:
                parts = zip(ids.split(32), mask.split(32))
                return torch.cat([self.model(i.to(self.device), m.to(self.device)).softmax(dim=1).cpu() for i, m in parts])
            scores = self.model(ids.to(self.device), mask.to(self.device))
        return scores.softmax(dim=1).cpu()

    def candidates(self, tokens, changed):
        out = []
        for pos in range(1, len(tokens) - 1):
            if pos in changed:
                continue
            for new in self.neighbours(tokens[pos]):
                t = list(tokens)
                t[pos] = new
                out.append((pos, t))
        return out

    def attack_one(self, tokens, label):
        changed = set()
        best = self.call_model([tokens])[0, label].item()
        for _ in range(self.max_edits):
            cands = self.candidates(tokens, changed)
            scores = self.call_model([c[1] for c in cands])[:, label]
            i = int(scores.argmin())
            if scores[i].item() > best:
                break
            best = scores[i].item()
            changed.add(cands[i][0])
            tokens = cands[i][1]
            if best < 0.5:
                return True, tokens
        return False, tokens


def load_examples(n=2):
    rng = random.Random(0)
    for _ in range(n):
        length = rng.randint(100, MAXLEN)
        yield [101] + [rng.randrange(1000, VOCAB) for _ in range(length - 2)] + [102], rng.randrange(2)


@expected("batch_without_gradients", fix="split|part", thread="QData/TextAttack#30", memory=4096)
def textattack_batch(fixed=False):
    device = torch.device("cuda")
    attack = GreedyAttack(Victim().to(device).eval(), Neighbours(), device, fixed=fixed)
    results = [attack.attack_one(tokens, label)[0] for tokens, label in load_examples()]
    return sum(results) / len(results)
