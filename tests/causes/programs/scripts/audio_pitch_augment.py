"""Trains a network that spots words, with changes of the pitch on the GPU."""
import math
from fractions import Fraction

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected

SAMPLE_RATE = 16000


class Words(Dataset):
    def __init__(self, n, seconds=1):
        self.wave = torch.randn(n, SAMPLE_RATE * seconds) * 0.1
        self.label = torch.randint(0, 35, (n,))

    def __len__(self):
        return len(self.label)

    def __getitem__(self, i):
        return self.wave[i], self.label[i]


def sinc_filters(orig, new, device, zeros=6, rolloff=0.99):
    """Windowed sinc filters, one for each phase of the output."""
    base = min(orig, new) * rolloff
    width = math.ceil(zeros * orig / base)
    idx = torch.arange(-width, width + orig, dtype=torch.float32, device=device)[None, None] / orig
    t = torch.arange(0, -new, -1, dtype=torch.float32, device=device)[:, None, None] / new + idx
    t = (t * base).clamp(-zeros, zeros)
    window = torch.cos(t * math.pi / zeros / 2) ** 2
    t = t * math.pi
    filters = torch.where(t == 0, torch.ones_like(t), t.sin() / t)
    return filters * window * (base / orig), width


def resample(wave, orig, new, fixed):
    if fixed:
        ratio = Fraction(orig, new).limit_denominator(320)
        orig, new = ratio.numerator, ratio.denominator
    g = math.gcd(orig, new)
    orig, new = orig // g, new // g
    filters, width = sinc_filters(orig, new, wave.device)
    length = wave.size(-1)
    padded = F.pad(wave, (width, width + orig))
    out = F.conv1d(padded[:, None], filters, stride=orig)
    out = out.transpose(1, 2).reshape(wave.size(0), -1)
    return out[:, :math.ceil(new * length / orig)]


def stretch(wave, rate):
    window = torch.hann_window(512, device=wave.device)
    spec = torch.stft(wave, 512, 128, window=window, return_complex=True)
    frames = torch.arange(0, spec.size(-1) - 1, rate, device=wave.device).long()
    return torch.istft(spec[..., frames], 512, 128, window=window)


class PitchShift(nn.Module):
    def __init__(self, sample_rate, max_steps, fixed):
        super().__init__()
        self.sample_rate, self.max_steps, self.fixed = sample_rate, max_steps, fixed

    def forward(self, wave):
        steps = int(torch.randint(-self.max_steps, self.max_steps + 1, (1,)))
        if steps == 0:
            return wave
        rate = 2.0 ** (-steps / 12)
        shifted = resample(stretch(wave, rate), int(self.sample_rate / rate), self.sample_rate, self.fixed)
        n = wave.size(-1)
        return F.pad(shifted[:, :n], (0, max(0, n - shifted.size(-1))))


class Spotter(nn.Module):
    def __init__(self, classes=35):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv1d(1, 64, 80, 4), nn.BatchNorm1d(64), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(64, 128, 3), nn.BatchNorm1d(128), nn.ReLU(), nn.MaxPool1d(4),
            nn.Conv1d(128, 256, 3), nn.BatchNorm1d(256), nn.ReLU(), nn.AdaptiveAvgPool1d(1))
        self.fc = nn.Linear(256, classes)

    def forward(self, wave):
        return self.fc(self.net(wave[:, None]).flatten(1))


@expected("all_pairs", fix=r"gcd|\bratio\b|limit_denominator|divisor", thread="pytorch/audio#3447", memory=4096)
def audio_pitch_augment(fixed=False, epochs=2):
    torch.manual_seed(3)
    device = torch.device("cuda")
    loader = DataLoader(Words(256), batch_size=32, shuffle=True)
    augment = PitchShift(SAMPLE_RATE, 4, fixed).to(device)
    model = Spotter().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    for _ in range(epochs):
        correct = 0
        for wave, label in loader:
            wave, label = wave.to(device), label.to(device)
            with torch.no_grad():
                wave = augment(wave)
            logits = model(wave)
            loss = F.cross_entropy(logits, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            correct += (logits.argmax(1) == label).sum().item()
    return loss.item(), correct
