"""Trains a policy by GRPO: log-probabilities of the rollout by the actor, then updates in micro-batches."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

VOCAB, DIM, LAYERS, HEADS = 151936, 512, 4, 8
SEQ, GROUP = 1024, 8


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.ln1(x)).chunk(3, dim=-1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.ffn(self.ln2(x))


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList([Block(DIM, HEADS) for _ in range(LAYERS)])
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        nn.init.normal_(self.embed.weight, std=0.02)

    def hidden(self, ids):
        x = self.embed(ids) + self.pos.weight[:ids.size(1)]
        for block in self.blocks:
            x = block(x)
        return self.norm(x)

    def forward(self, ids):
        return self.head(self.hidden(ids))


def gather_logprobs(logits, labels):
    logp = F.log_softmax(logits.float(), dim=-1)
    return logp.gather(-1, labels.unsqueeze(-1)).squeeze(-1)


class TrainingWorker:
    def __init__(self, device, fixed):
        self.device, self.fixed = device, fixed
        self.actor = Actor().to(device)
        self.optim = torch.optim.AdamW(self.actor.parameters(), lr=1e-6, weight_decay=0.01)
        self.sched = torch.optim.lr_scheduler.LambdaLR(self.optim, lambda s: min(1.0, (s + 1) / 10))

    @torch.no_grad()
    def compute_actor_logprobs(self, ids, labels):
        self.actor.eval()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            if self.fixed:
                hidden = self.actor.hidden(ids)
                parts = zip(hidden.split(128, dim=1), labels.split(128, dim=1))
                return torch.cat([gather_logprobs(self.actor.head(part), label) for part, label in parts], dim=1)
            logits = self.actor(ids)
        return gather_logprobs(logits, labels)

    def policy_loss(self, logp, old, adv, mask, clip=0.2):
        ratio = (logp - old).exp()
        surr = torch.min(ratio * adv, ratio.clamp(1 - clip, 1 + clip) * adv)
        return -(surr * mask).sum() / mask.sum().clamp(min=1)

    def fit(self, rollout):
        ids, labels = rollout["ids"].to(self.device), rollout["labels"].to(self.device)
        adv, mask = rollout["adv"].to(self.device), rollout["mask"].to(self.device)
        old = self.compute_actor_logprobs(ids, labels)
        self.actor.train()
        self.optim.zero_grad(set_to_none=True)
        total = 0.0
        for i in range(GROUP):
            sl = slice(i, i + 1)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                logits = self.actor(ids[sl])
            logp = gather_logprobs(logits, labels[sl])
            loss = self.policy_loss(logp, old[sl], adv[sl], mask[sl]) / GROUP
            loss.backward()
            total += loss.item()
        nn.utils.clip_grad_norm_(self.actor.parameters(), 1.0)
        self.optim.step()
        self.sched.step()
        return total


def make_rollout(seed):
    g = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (GROUP, SEQ), generator=g)
    labels = torch.roll(ids, -1, dims=1)
    reward = torch.randn(GROUP, 1, generator=g)
    adv = (reward - reward.mean()) / (reward.std() + 1e-6)
    mask = torch.zeros(GROUP, SEQ)
    mask[:, SEQ // 4:-1] = 1
    return {"ids": ids, "labels": labels, "adv": adv.expand(-1, SEQ), "mask": mask}


@expected("logits", fix="chunk|split", thread="InternLM/xtuner#1555", memory=8192)
def xtuner_logprob(fixed=False):
    worker = TrainingWorker(torch.device("cuda"), fixed)
    return [worker.fit(make_rollout(step)) for step in range(2)]
