"""Trains a CTC speech recogniser on utterances, one of which is a whole chapter that was never cut."""
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

VOCAB = 60


def make_manifest(n=96, seed=3):
    rng = random.Random(seed)
    rows = []
    for i in range(n):
        frames = rng.randint(300, 1500)
        if i == 41:
            frames = 9400
        rows.append((f"utt{i:05d}", frames, max(8, frames // 14)))
    return rows


class SpeechSet(Dataset):
    def __init__(self, manifest):
        self.rows = manifest

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        _, frames, tokens = self.rows[i]
        g = torch.Generator().manual_seed(i)
        return torch.randn(frames, 80, generator=g), torch.randint(1, VOCAB, (tokens,), generator=g)


def pad_batch(items):
    feats, toks = zip(*items)
    flen = torch.tensor([f.size(0) for f in feats])
    tlen = torch.tensor([t.size(0) for t in toks])
    pad = nn.utils.rnn.pad_sequence
    return pad(feats, batch_first=True), flen, pad(toks, batch_first=True), tlen


class MHA(nn.Module):
    def __init__(self, d, h, p=0.1):
        super().__init__()
        self.h, self.dk = h, d // h
        self.q, self.k, self.v, self.o = (nn.Linear(d, d) for _ in range(4))
        self.drop = nn.Dropout(p)

    def forward(self, x, mask):
        b, t, _ = x.shape
        q, k, v = (m(x).view(b, t, self.h, self.dk).transpose(1, 2) for m in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / math.sqrt(self.dk)
        scores = scores.masked_fill(mask[:, None, None, :], -1e4)
        attn = self.drop(scores.softmax(-1))
        return self.o((attn @ v).transpose(1, 2).reshape(b, t, -1))


class Layer(nn.Module):
    def __init__(self, d, h, ff):
        super().__init__()
        self.att = MHA(d, h)
        self.ff = nn.Sequential(nn.Linear(d, ff), nn.SiLU(), nn.Dropout(0.1), nn.Linear(ff, d))
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)

    def forward(self, x, mask):
        x = x + self.att(self.n1(x), mask)
        return x + self.ff(self.n2(x))


class Recogniser(nn.Module):
    def __init__(self, d=256, h=4, layers=8):
        super().__init__()
        self.sub = nn.Sequential(nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU())
        self.proj = nn.Linear(32 * 20, d)
        self.enc = nn.ModuleList([Layer(d, h, 1024) for _ in range(layers)])
        self.out = nn.Linear(d, VOCAB)

    def forward(self, x, lens):
        y = self.sub(x[:, None])
        y = self.proj(y.permute(0, 2, 1, 3).flatten(2))
        lens = (lens + 3) // 4
        mask = (torch.arange(y.size(1))[None] >= lens[:, None]).to(y.device)
        for layer in self.enc:
            y = layer(y, mask)
        return self.out(y).log_softmax(-1), lens


def train(model, loader, device):
    opt = torch.optim.Adam(model.parameters(), lr=2e-4)
    warm = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / 400))
    ema = None
    for x, xl, y, yl in loader:
        logp, ol = model(x.to(device), xl)
        loss = F.ctc_loss(logp.transpose(0, 1), y.to(device), ol, yl, zero_infinity=True)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        warm.step()
        ema = loss.item() if ema is None else 0.9 * ema + 0.1 * loss.item()
    return ema


@expected("larger_step", fix="largest ones cut", thread="espnet/espnet#209", memory=5120)
def chapter_among_utterances(fixed=False):
    torch.manual_seed(0)
    manifest = make_manifest()
    if fixed:
        manifest = [row for row in manifest if row[1] <= 3000]
    loader = DataLoader(SpeechSet(manifest), batch_size=8, shuffle=True, collate_fn=pad_batch)
    return train(Recogniser().to("cuda"), loader, "cuda")
