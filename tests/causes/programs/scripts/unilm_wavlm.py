"""Extracts vectors of recordings with a WavLM model, and trains a classifier of speakers on their statistics."""
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from transformers import WavLMConfig, WavLMModel

from expected import expected

SR = 16000


class Recordings(Dataset):
    def __init__(self, n=60, n_speakers=10):
        rng = random.Random(1)
        self.items = [(i, rng.uniform(3.0, 8.0), rng.randrange(n_speakers)) for i in range(n)]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, idx):
        seed, seconds, speaker = self.items[idx]
        g = torch.Generator().manual_seed(seed)
        return {"wav": torch.randn(int(seconds * SR), generator=g) * 0.05, "speaker": speaker}


def normalize(wav):
    return (wav - wav.mean()) / (wav.std() + 1e-7)


def extract_features(model, dataset, device, fixed):
    feats, speakers = [], []
    for i in range(len(dataset)):
        item = dataset[i]
        wav = normalize(item["wav"]).unsqueeze(0).to(device)
        if fixed:
            with torch.no_grad():
                rep = model(wav).last_hidden_state[0]
        else:
            rep = model(wav).last_hidden_state[0]
        feats.append(rep)
        speakers.append(item["speaker"])
    return feats, torch.tensor(speakers)


class SpeakerHead(nn.Module):
    def __init__(self, dim=768, n_speakers=10):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2 * dim, 256), nn.ReLU(), nn.Linear(256, n_speakers))

    def forward(self, pooled):
        return self.net(pooled)


def train_head(pooled, labels, device, epochs=3):
    head = SpeakerHead().to(device)
    opt = torch.optim.Adam(head.parameters(), lr=1e-3)
    loader = DataLoader(list(zip(pooled, labels)), batch_size=16, shuffle=True)
    for _ in range(epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(head(x.to(device)), y.to(device))
            opt.zero_grad()
            loss.backward()
            opt.step()
    return loss.item()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="microsoft/unilm#596", memory=4096)
def unilm_wavlm(fixed=False):
    device = torch.device("cuda")
    model = WavLMModel(WavLMConfig(num_hidden_layers=12)).to(device)
    model.eval()
    feats, speakers = extract_features(model, Recordings(), device, fixed)
    pooled = [torch.cat([f.mean(0), f.std(0)]).detach().cpu() for f in feats]
    del model, feats
    return train_head(pooled, speakers, device)
