"""Trains a policy for short tours by REINFORCE and validates it greedily on long ones."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads, ff):
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, ff), nn.ReLU(), nn.Linear(ff, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = (z.view(b, n, self.heads, -1).transpose(1, 2) for z in self.qkv(x).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = self.n1(x + self.out(a))
        return self.n2(x + self.ff(x))


class DecodingStrategy:
    """Collects the actions of a tour and their log-probabilities."""

    def __init__(self, kind, fixed):
        self.kind, self.fixed = kind, fixed
        self.actions, self.logprobs = [], []

    def step(self, logits, mask):
        logits = logits.masked_fill(mask, float("-inf"))
        logprobs = F.log_softmax(logits, dim=-1)
        if self.kind == "greedy":
            action = logprobs.argmax(dim=-1)
        else:
            gumbel = -torch.log(-torch.log(torch.rand_like(logprobs).clamp(1e-9, 1 - 1e-6)))
            action = (logprobs + gumbel).argmax(dim=-1)
        self.actions.append(action)
        self.logprobs.append(logprobs.gather(-1, action[:, None]) if self.fixed else logprobs)
        return action

    def finish(self):
        return torch.stack(self.logprobs, 1), torch.stack(self.actions, 1)


def sequence_loglik(logprobs, actions):
    if logprobs.size(-1) > 1:
        logprobs = logprobs.gather(-1, actions.unsqueeze(-1))
    return logprobs.squeeze(-1).sum(1)


class Policy(nn.Module):
    def __init__(self, dim=128, heads=8, layers=3, ff=256, fixed=False):
        super().__init__()
        self.init = nn.Linear(2, dim)
        self.encoder = nn.Sequential(*[EncoderLayer(dim, heads, ff) for _ in range(layers)])
        self.context = nn.Linear(3 * dim, dim)
        self.key = nn.Linear(dim, dim, bias=False)
        self.dim, self.fixed = dim, fixed

    def forward(self, locs, decode="sampling"):
        b, n, _ = locs.shape
        h = self.encoder(self.init(locs))
        key = self.key(h)
        graph = h.mean(1)
        rows = torch.arange(b, device=locs.device)
        mask = torch.zeros(b, n, dtype=torch.bool, device=locs.device)
        first = last = torch.zeros(b, dtype=torch.long, device=locs.device)
        strategy = DecodingStrategy(decode, self.fixed)
        for t in range(n):
            q = self.context(torch.cat([graph, h[rows, first], h[rows, last]], -1))
            logits = 10 * torch.tanh(torch.einsum("bd,bnd->bn", q, key) / self.dim ** 0.5)
            last = strategy.step(logits, mask)
            if t == 0:
                first = last
            mask = mask.scatter(1, last[:, None], True)
        logprobs, actions = strategy.finish()
        return {"reward": -tour_length(locs, actions), "log_likelihood": sequence_loglik(logprobs, actions)}


def tour_length(locs, actions):
    tour = locs.gather(1, actions.unsqueeze(-1).expand(-1, -1, 2))
    return (tour - tour.roll(-1, dims=1)).norm(dim=-1).sum(1)


class REINFORCE:
    def __init__(self, policy, lr=1e-4):
        self.policy = policy
        self.opt = torch.optim.Adam(policy.parameters(), lr=lr)
        self.baseline = None

    def training_step(self, locs):
        out = self.policy(locs)
        r = out["reward"].detach()
        mean = r.mean().item()
        self.baseline = mean if self.baseline is None else 0.8 * self.baseline + 0.2 * mean
        loss = -((r - self.baseline) * out["log_likelihood"]).mean()
        self.opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.opt.step()
        return loss.item()

    @torch.no_grad()
    def validation_step(self, locs):
        self.policy.eval()
        out = self.policy(locs, decode="greedy")
        self.policy.train()
        return out["reward"].mean().item(), out["log_likelihood"].mean().item()


@expected("joined_results", fix="gather", thread="ai4co/rl4co#180", memory=2048)
def rl4co_logp(fixed=False):
    device = torch.device("cuda")
    algo = REINFORCE(Policy(fixed=fixed).to(device))
    for _ in range(6):
        algo.training_step(torch.rand(256, 20, 2).to(device))
    return [algo.validation_step(torch.rand(256, n, 2).to(device)) for n in (50, 200, 1000)]
