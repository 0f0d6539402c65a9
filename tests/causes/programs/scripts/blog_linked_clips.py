"""Scores videos that are cut into clips; clips are linked, as a smoothness term compares neighbours."""
import weakref

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

DEVICE = "cuda"


class Videos(Dataset):
    def __init__(self, count, frames=24, side=96):
        self.count, self.frames, self.side = count, frames, side

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.rand(3, self.frames, self.side, self.side), torch.rand(1)


class ClipEncoder(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv3d(3, 32, 3, 1, 1), nn.BatchNorm3d(32), nn.ReLU(inplace=True))
        self.mid = nn.Sequential(nn.Conv3d(32, 64, 3, (1, 2, 2), 1), nn.BatchNorm3d(64), nn.ReLU(inplace=True))
        self.last = nn.Conv3d(64, dim, 3, 1, 1)

    def forward(self, clip):
        return self.last(self.mid(self.stem(clip)))


class Clip:
    """One piece of a video, its features and its neighbours."""

    def __init__(self, start, features, fixed):
        self.start, self.features, self.fixed = start, features, fixed
        self.before = None
        self.after = None

    def link(self, other):
        self.after = other
        other.before = weakref.proxy(self) if self.fixed else self

    def neighbours(self):
        return [c for c in (self.before, self.after) if c is not None]


class Regressor(nn.Module):
    def __init__(self, dim=128, fixed=False):
        super().__init__()
        self.encoder = ClipEncoder(dim)
        self.head = nn.Linear(dim, 1)
        self.fixed = fixed

    def cut(self, video, length=6):
        clips = []
        for start in range(0, video.size(2), length):
            clip = Clip(start, self.encoder(video[:, :, start:start + length]), self.fixed)
            if clips:
                clips[-1].link(clip)
            clips.append(clip)
        return clips

    def forward(self, video):
        clips = self.cut(video)
        pooled = torch.stack([c.features.mean((2, 3, 4)) for c in clips]).mean(0)
        return self.head(pooled).squeeze(1), clips


def smoothness(clips):
    terms = []
    for clip in clips:
        for other in clip.neighbours():
            terms.append(F.mse_loss(clip.features.mean((2, 3, 4)), other.features.mean((2, 3, 4))))
    return torch.stack(terms).mean()


def train_step(model, optimizer, video, score):
    prediction, clips = model(video)
    loss = F.mse_loss(prediction, score) + 0.1 * smoothness(clips)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


@expected("reference_cycle", fix="weakref", thread="pytorch.org/blog/understanding-gpu-memory-2", memory=1536)
def blog_linked_clips(fixed=False):
    torch.manual_seed(0)
    loader = DataLoader(Videos(80), batch_size=2, shuffle=True)
    model = Regressor(fixed=fixed).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(loader))
    losses = []
    for video, score in loader:
        losses.append(train_step(model, optimizer, video.to(DEVICE), score.squeeze(1).to(DEVICE)))
        schedule.step()
    return losses
