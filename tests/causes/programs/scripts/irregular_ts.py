"""Trains a recurrent model on irregular time series, with metrics of forecast and imputation."""
import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset

from expected import expected

DEVICE = "cuda"


class Sensors(Dataset):
    def __init__(self, n, steps=300, dim=48):
        self.n, self.steps, self.dim = n, steps, dim

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        x = torch.randn(self.steps, self.dim)
        obs = torch.rand(self.steps, self.dim) > 0.5
        return x * obs, x, obs


class RecurrentModel(nn.Module):
    def __init__(self, dim, hidden=128):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, hidden), nn.ReLU(), nn.LayerNorm(hidden))
        self.cell = nn.GRU(hidden, hidden, batch_first=True)
        self.mean = nn.Linear(hidden, dim)
        self.logvar = nn.Linear(hidden, dim)

    def forward(self, x):
        h, _ = self.cell(self.encoder(x))
        return self.mean(h), self.logvar(h)


def gaussian_nll(target, mean, logvar, mask):
    nll = 0.5 * (logvar + (target - mean) ** 2 / logvar.exp())
    return (nll * mask).sum() / mask.sum()


def mse(target, mean, mask):
    return (((target - mean) ** 2) * mask).sum() / mask.sum()


class Runner:
    def __init__(self, dim=48, fixed=False):
        self.fixed = fixed
        self.model = RecurrentModel(dim).to(DEVICE)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.99)
        self.history = []

    def train_epoch(self, loader):
        epoch_ll, epoch_mse, epoch_imput = 0, 0, 0
        self.model.train()
        for x, target, obs in loader:
            x, target = x.to(DEVICE), target.to(DEVICE)
            obs = obs.to(DEVICE).float()
            self.optimizer.zero_grad()
            mean, logvar = self.model(x)
            loss = gaussian_nll(target, mean, logvar, obs)
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            if self.fixed:
                epoch_ll += loss.item()
                epoch_mse += mse(target, mean, obs).item()
                epoch_imput += mse(target, mean, 1 - obs).item()
            else:
                epoch_ll += loss
                epoch_mse += mse(target, mean, obs)
                epoch_imput += mse(target, mean, 1 - obs)
        n = len(loader)
        return epoch_ll / n, epoch_mse / n, epoch_imput / n

    @torch.no_grad()
    def eval_epoch(self, loader):
        self.model.eval()
        total = 0.0
        for x, target, obs in loader:
            mean, _ = self.model(x.to(DEVICE))
            total += mse(target.to(DEVICE), mean, 1 - obs.to(DEVICE).float()).item()
        return total / len(loader)

    def fit(self, epochs=2):
        train = DataLoader(Sensors(3200), batch_size=32, shuffle=True)
        valid = DataLoader(Sensors(128), batch_size=32)
        for _ in range(epochs):
            ll, err, imput = self.train_epoch(train)
            val = self.eval_epoch(valid)
            self.scheduler.step()
            self.history.append((ll, err, imput, val))
        return self.history


@expected("graph_of_earlier_steps", fix="epoch_mse", thread="boschresearch/Continuous-Recurrent-Units#4", memory=1024)
def irregular_ts(fixed=False):
    """`epoch_mse` and `epoch_imput` add tensors with the graphs that they came from, which no backward pass has run through. Cured by:
    `.item()` on all that is added.
    """
    return Runner(fixed=fixed).fit()
