"""Trains a speech recognizer on batches that are packed by the sum of the durations of their utterances."""
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class Utterance:
    def __init__(self, seconds):
        self.frames = int(seconds * 100)
        self.tokens = max(2, int(seconds * 4))


class MaxDurationSampler:
    """packs utterances until the sum of durations reaches max_duration seconds"""

    def __init__(self, utts, max_duration, fixed=False):
        self.utts, self.max_duration, self.fixed = utts, max_duration, fixed

    def __iter__(self):
        batch, total = [], 0.0
        for u in self.utts:
            padded = max(v.frames for v in [*batch, u]) / 100 * (len(batch) + 1)
            if batch and (padded if self.fixed else total + u.frames / 100) > self.max_duration:
                yield batch
                batch, total = [], 0.0
            batch.append(u)
            total += u.frames / 100
        yield batch


def collate(batch):
    batch = sorted(batch, key=lambda u: u.frames, reverse=True)
    feats = torch.nn.utils.rnn.pad_sequence([torch.randn(u.frames, 80) for u in batch], batch_first=True)
    targets = torch.nn.utils.rnn.pad_sequence(
        [torch.randint(1, 500, (u.tokens,)) for u in batch], batch_first=True)
    return feats, torch.tensor([u.frames for u in batch]), targets, torch.tensor([u.tokens for u in batch])


class Subsample(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.c1 = nn.Conv2d(1, 64, 3, stride=2)
        self.c2 = nn.Conv2d(64, 64, 3, stride=2)
        self.out = nn.Linear(64 * 19, d)

    def forward(self, x):
        x = F.relu(self.c2(F.relu(self.c1(x.unsqueeze(1)))))
        return self.out(x.transpose(1, 2).flatten(2))


class EncoderLayer(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2, self.n3 = nn.LayerNorm(d), nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.dw = nn.Conv1d(d, d, 31, padding=15, groups=d)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.SiLU(), nn.Linear(4 * d, d))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (t.view(B, T, self.heads, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, T, C))
        x = x + self.dw(self.n2(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ff(self.n3(x))


class CTCModel(nn.Module):
    def __init__(self, d=256, layers=8):
        super().__init__()
        self.front = Subsample(d)
        self.layers = nn.ModuleList(EncoderLayer(d, 4) for _ in range(layers))
        self.out = nn.Linear(d, 500)

    def forward(self, feats):
        x = self.front(feats)
        for layer in self.layers:
            x = layer(x)
        return self.out(x).log_softmax(-1)


def corpus():
    random.seed(1)
    utts = [Utterance(random.uniform(8, 14)) for _ in range(130)]
    utts += [Utterance(random.uniform(1.5, 2.5)) for _ in range(60)]
    utts += [Utterance(38.0)]
    utts += [Utterance(random.uniform(1.5, 2.5)) for _ in range(70)]
    utts += [Utterance(random.uniform(8, 14)) for _ in range(60)]
    return utts


@expected("larger_step", fix="as many|longest|padded|sizes|tokens", thread="k2-fsa/icefall#843", memory=11900)
def asr_uneven(fixed=False):
    """Batches are packed by the sum of durations: one utterance of 38 seconds gets together with many of two seconds, and all are padded to
    it. Cured by: Count the padded frames (how many utterances times the longest) against `max_duration`.
    """
    model = CTCModel().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in MaxDurationSampler(corpus(), max_duration=250, fixed=fixed):
        feats, flens, targets, tlens = collate(batch)
        logp = model(feats.cuda())
        olens = ((flens - 3) // 2 + 1 - 3) // 2 + 1
        loss = F.ctc_loss(logp.transpose(0, 1), targets.cuda(), olens.cuda(), tlens.cuda(), zero_infinity=True)
        opt.zero_grad()
        loss.backward()
        opt.step()
    return loss.item()
