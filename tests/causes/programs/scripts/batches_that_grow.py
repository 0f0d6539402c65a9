"""Trains a recurrent auto-encoder, which turns each time series into a vector, on mini batches that it cuts itself."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


def make_series(n=12000, steps=80, features=6, seed=0):
    g = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 6.28, steps)[None, :, None]
    phase = torch.rand(n, 1, features, generator=g) * 6.28
    return torch.sin(t * 3 + phase) + 0.1 * torch.randn(n, steps, features, generator=g)


class Encoder(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.rnn = nn.GRU(features, hidden, num_layers=2, batch_first=True)
        self.norm = nn.LayerNorm(hidden)

    def forward(self, x):
        out, h = self.rnn(x)
        return self.norm(out), h


class Decoder(nn.Module):
    def __init__(self, features, hidden):
        super().__init__()
        self.rnn = nn.GRU(features, hidden, num_layers=2, batch_first=True)
        self.mid = nn.Linear(hidden, hidden)
        self.out = nn.Linear(hidden, features)

    def forward(self, x, h):
        y, _ = self.rnn(x, h)
        return self.out(F.gelu(self.mid(y)))


class TimeSeriesEncoder:
    def __init__(self, features=6, hidden=256, batch_size=256, device="cuda", fixed=False):
        self.device, self.batch_size, self.fixed = device, batch_size, fixed
        self.enc, self.dec = Encoder(features, hidden).to(device), Decoder(features, hidden).to(device)
        self.params = list(self.enc.parameters()) + list(self.dec.parameters())
        self.opt = torch.optim.AdamW(self.params, lr=1e-3)
        self.mean = self.std = None

    def _normalise(self, data):
        if self.mean is None:
            self.mean, self.std = data.mean((0, 1)), data.std((0, 1))
        return (data - self.mean) / self.std

    def _batches(self, data):
        start = 0
        while start < len(data):
            end = start + self.batch_size
            yield data[start:end] if self.fixed else data[start:start + end]
            start = end

    def _loss(self, x):
        ctx, h = self.enc(x)
        shifted = F.pad(x[:, :-1], (0, 0, 1, 0))
        return F.mse_loss(self.dec(shifted, h), x) + 1e-4 * ctx.pow(2).mean()

    def fit(self, data, epochs=2):
        data = self._normalise(data)
        losses = []
        for _ in range(epochs):
            total, count = 0.0, 0
            self.enc.train()
            for batch in self._batches(data):
                loss = self._loss(batch.to(self.device))
                self.opt.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(self.params, 1.0)
                self.opt.step()
                total, count = total + loss.item(), count + 1
            losses.append(total / count)
        return losses

    @torch.no_grad()
    def encode(self, data):
        self.enc.eval()
        data = self._normalise(data)
        return torch.cat([self.enc(data[i:i + 512].to(self.device))[1][-1].cpu() for i in range(0, len(data), 512)])


@expected("growing_steps", fix=r"data\[start:end\]", thread="mindsdb/lightwood#386", memory=4096)
def batches_that_grow(fixed=False):
    torch.manual_seed(0)
    data = make_series()
    model = TimeSeriesEncoder(fixed=fixed)
    model.fit(data[:10000])
    return model.encode(data[10000:])
