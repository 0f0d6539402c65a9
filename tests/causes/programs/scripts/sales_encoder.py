"""Encodes the sales histories of shops with recurrent layers."""
import torch
import torch.nn as nn

from expected import expected

DEVICE = torch.device("cuda")
SHOPS, WEEKS, HIDDEN = 12000, 260, 256


class RnnEncoder(nn.Module):
    def __init__(self, features=4):
        super().__init__()
        self.encode = nn.GRU(features, HIDDEN, num_layers=2, batch_first=True)
        self.decode = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, features)

    def forward(self, x):
        states, last = self.encode(x)
        rebuilt, _ = self.decode(states)
        return self.out(rebuilt), last[-1]


def load_histories():
    base = torch.rand(SHOPS, 1, 4)
    season = torch.sin(torch.arange(WEEKS) / 52 * 6.283).view(1, -1, 1)
    return base + 0.3 * season + 0.05 * torch.randn(SHOPS, WEEKS, 4)


def get_batches(histories, batch_size, fixed=False):
    batch = []
    for number, series in enumerate(histories, 1):
        batch.append(series)
        if number % batch_size == 0:
            yield torch.stack(batch)
            if fixed:
                batch = []
    if number % batch_size:
        yield torch.stack(batch)


class TimeSeriesEncoder:
    def __init__(self, batch_size=256, epochs=1, fixed=False):
        self.net = RnnEncoder().to(DEVICE)
        self.batch_size, self.epochs, self.fixed = batch_size, epochs, fixed
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-3)
        self.criterion = nn.MSELoss()

    def train(self, histories):
        self.net.train()
        for _ in range(self.epochs):
            total = 0.0
            for batch in get_batches(histories, self.batch_size, self.fixed):
                batch = batch.to(DEVICE)
                rebuilt, _ = self.net(batch)
                loss = self.criterion(rebuilt, batch)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                total += loss.item()
        return total

    @torch.no_grad()
    def transform(self, histories):
        self.net.eval()
        parts = [self.net(part.to(DEVICE))[1].cpu() for part in histories.split(self.batch_size)]
        return torch.cat(parts)


@expected("growing_steps", fix=r"start:end|clear|= \[\]", thread="mindsdb/lightwood#386", memory=11900)
def sales_encoder(fixed=False):
    """`get_batches` does not begin a new list after a batch, so each batch has all those before in it. Cured by: `batch = []` after each
    batch.
    """
    data = load_histories()
    encoder = TimeSeriesEncoder(fixed=fixed)
    encoder.train(data)
    return encoder.transform(data).shape
