"""Separates music recordings into stems with a recurrent spectrogram model."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

RATE, N_FFT, HOP = 44100, 4096, 1024
STEMS = ("vocals", "drums", "bass", "other")
device = torch.device("cuda")


class Stem(nn.Module):
    def __init__(self, bins=N_FFT // 2 + 1, max_bin=1487, hidden=512):
        super().__init__()
        self.max_bin, self.bins = max_bin, bins
        self.fc1 = nn.Linear(max_bin * 2, hidden, bias=False)
        self.lstm = nn.LSTM(hidden, hidden // 2, 3, bidirectional=True)
        self.fc2 = nn.Linear(2 * hidden, hidden, bias=False)
        self.fc3 = nn.Linear(hidden, bins * 2, bias=False)

    def forward(self, mag):
        frames = mag.shape[-1]
        x = mag.permute(2, 0, 1)
        h = torch.tanh(self.fc1(x[..., :self.max_bin].reshape(frames, 1, -1)))
        h = torch.cat([h, self.lstm(h)[0]], -1)
        mask = torch.relu(self.fc3(torch.relu(self.fc2(h)))).view(frames, 2, self.bins)
        return (mask * x).permute(1, 2, 0)


def to_wave(spec, window, length):
    frames = torch.fft.irfft(spec, n=N_FFT, dim=1) * window.view(1, -1, 1)
    size = N_FFT + HOP * (spec.shape[-1] - 1)
    wave = F.fold(frames, (1, size), (1, N_FFT), stride=(1, HOP))[:, 0, 0]
    return wave[:, N_FFT // 2:N_FFT // 2 + length] / 1.5


class Separator(nn.Module):
    def __init__(self):
        super().__init__()
        self.stems = nn.ModuleDict({name: Stem() for name in STEMS})
        self.register_buffer("window", torch.hann_window(N_FFT))

    def forward(self, audio):
        spec = torch.stft(audio, N_FFT, HOP, window=self.window, return_complex=True)
        mag = spec.abs()
        estimates = {name: net(mag) for name, net in self.stems.items()}
        total = sum(estimates.values()) + 1e-10
        stems = {}
        for name, est in estimates.items():
            stems[name] = to_wave(spec * (est / total), self.window, audio.shape[-1])
        return stems


def load_recording(minutes):
    return torch.rand(2, int(minutes * 60 * RATE)) * 2 - 1


@torch.no_grad()
def separate(separator, audio, fixed=False):
    separator.eval()
    if fixed:
        parts = [{name: wave.cpu() for name, wave in separator(part.to(device)).items()}
                 for part in audio.split(60 * RATE, dim=-1)]
        return {name: torch.cat([part[name] for part in parts], dim=-1) for name in STEMS}
    return {name: wave.cpu() for name, wave in separator(audio.to(device)).items()}


@expected("batch_without_gradients", fix="pieces|windows|dim=-1", thread="sigsep/open-unmix-pytorch#132", memory=11900)
def unmix_track(fixed=False):
    """The whole recording of 24 minutes is separated in one call, and memory grows with its length. Cured by: Pieces of about a minute, one
    after the other, joined on the CPU.
    """
    separator = Separator().to(device)
    for minutes in (3.5, 24):
        stems = separate(separator, load_recording(minutes), fixed)
    return {name: tuple(wave.shape) for name, wave in stems.items()}
