"""Trains a language model by PPO with the log-probabilities of its answers and those of a frozen reference."""
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from expected import expected


def build(vocab, frozen=False):
    cfg = LlamaConfig(vocab_size=vocab, hidden_size=512, intermediate_size=1376, num_hidden_layers=8,
                      num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=2048)
    with torch.device("cuda"):
        model = LlamaForCausalLM(cfg)
    if frozen:
        model.eval().requires_grad_(False)
    return model


def log_probs_from_logits(logits, labels, fixed=False):
    if fixed:
        rows = [row.gather(dim=-1, index=label.unsqueeze(-1)).squeeze(-1) - row.logsumexp(dim=-1)
                for row, label in zip(logits, labels)]
        return torch.stack(rows)
    log_probs = F.log_softmax(logits, dim=-1)
    return log_probs.gather(dim=-1, index=labels.unsqueeze(-1)).squeeze(-1)


class Actor:
    def __init__(self, model, fixed=False):
        self.model, self.fixed = model, fixed

    def action_log_probs(self, sequences, num_actions):
        if self.fixed:
            logits = self.model(sequences, use_cache=False, logits_to_keep=num_actions + 1).logits
            return log_probs_from_logits(logits[:, :-1, :], sequences[:, -num_actions:], fixed=True)
        logits = self.model(sequences, use_cache=False).logits
        logp = log_probs_from_logits(logits[:, :-1, :], sequences[:, 1:])
        return logp[:, -num_actions:]


class PolicyLoss:
    def __init__(self, eps=0.2):
        self.eps = eps

    def __call__(self, logp, old_logp, adv):
        ratio = (logp - old_logp).exp()
        return -torch.min(ratio * adv, ratio.clamp(1 - self.eps, 1 + self.eps) * adv).mean()


def compute_kl(logp, ref_logp):
    return (logp - ref_logp).mean()


def make_experience(actor, ref, prompts, num_actions):
    with torch.no_grad():
        old = actor.action_log_probs(prompts, num_actions)
        base = ref.action_log_probs(prompts, num_actions)
    adv = torch.randn(old.shape).cuda()
    return old, base, adv


@expected("logits", fix="logsumexp|logits_to_keep|part", thread="OpenRLHF/OpenRLHF#718", memory=11900)
def rlhf_logprobs(fixed=False):
    """`log_softmax` over a vocabulary of 64000 at each position makes a second tensor of the size of the logits, only to gather one value
    of each. Cured by: Gather the logits and subtract `logsumexp`, row by row; also only the logits of the answers.
    """
    vocab, batch, seq, num_actions = 64000, 10, 1024, 768
    actor, ref = Actor(build(vocab), fixed), Actor(build(vocab, frozen=True), fixed)
    opt = torch.optim.AdamW(actor.model.parameters(), lr=1e-6)
    loss_fn = PolicyLoss()
    for _ in range(5):
        seqs = torch.randint(0, vocab, (batch, seq)).cuda()
        old, base, adv = make_experience(actor, ref, seqs, num_actions)
        logp = actor.action_log_probs(seqs, num_actions)
        loss = loss_fn(logp, old, adv) + 0.05 * compute_kl(logp, base)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(actor.model.parameters(), 1.0)
        opt.step()
        opt.zero_grad()
    return loss.item()
