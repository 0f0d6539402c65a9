"""Trains a sentence encoder with a loss over all triplets of a batch of 1024 sentences."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import BertConfig, BertModel

from expected import expected


class SentenceEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        cfg = BertConfig(vocab_size=8000, hidden_size=256, num_hidden_layers=4, num_attention_heads=4,
                         intermediate_size=1024, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
        self.bert = BertModel(cfg, add_pooling_layer=False)

    def forward(self, ids, mask):
        h = self.bert(input_ids=ids, attention_mask=mask).last_hidden_state
        m = mask.unsqueeze(-1).float()
        return F.normalize((h * m).sum(1) / m.sum(1), dim=-1)


class BatchAllTripletLoss(nn.Module):
    def __init__(self, margin=0.3, fixed=False):
        super().__init__()
        self.margin, self.fixed = margin, fixed

    @staticmethod
    def distances(emb):
        sim = emb @ emb.t()
        return (2 - 2 * sim).clamp(min=0)

    @staticmethod
    def triplet_mask(labels):
        n = labels.shape[0]
        distinct = ~torch.eye(n, dtype=torch.bool, device=labels.device)
        distinct = distinct.unsqueeze(2) & distinct.unsqueeze(1) & distinct.unsqueeze(0)
        same = labels.unsqueeze(0) == labels.unsqueeze(1)
        return distinct & same.unsqueeze(2) & ~same.unsqueeze(1)

    def of_valid_pairs(self, d, labels):
        same = (labels.unsqueeze(0) == labels.unsqueeze(1)) & ~torch.eye(len(labels), dtype=torch.bool, device=labels.device)
        anchors, positives = same.nonzero().unbind(1)
        loss = d[anchors, positives].unsqueeze(1) - d[anchors] + self.margin
        return F.relu(loss * (labels[anchors].unsqueeze(1) != labels.unsqueeze(0)).float())

    def forward(self, emb, labels):
        d = self.distances(emb)
        if self.fixed:
            loss = self.of_valid_pairs(d, labels)
            return loss.sum() / ((loss > 1e-16).float().sum() + 1e-16)
        loss = d.unsqueeze(2) - d.unsqueeze(1) + self.margin
        mask = self.triplet_mask(labels)
        loss = F.relu(loss * mask.float())
        positive = (loss > 1e-16).float().sum()
        return loss.sum() / (positive + 1e-16)


def pairs(n_batches, n_labels, length=32):
    for _ in range(n_batches):
        labels = torch.arange(n_labels).repeat_interleave(2)
        ids = torch.randint(5, 8000, (2 * n_labels, length))
        yield ids, torch.ones_like(ids), labels


def train(model, loss_fn, opt, loader):
    for ids, mask, labels in loader:
        emb = model(ids.cuda(), mask.cuda())
        loss = loss_fn(emb, labels.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()


@expected("all_pairs", fix="nonzero|valid|checkpoint|smaller batch|half", thread="huggingface/sentence-transformers#4029", memory=11900)
def triplet_embed(fixed=False):
    """The loss makes tensors of all triplets (1024 x 1024 x 1024) before it masks them, although each anchor has one positive only. Cured
    by: Select the valid pairs of anchor and positive first, and compare these with all sentences; or smaller batches.
    """
    model = SentenceEncoder().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=2e-5)
    train(model, BatchAllTripletLoss(fixed=fixed), opt, pairs(5, n_labels=512))
