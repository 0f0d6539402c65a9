"""Trains a language model in several short jobs, each of which restores the last checkpoint and goes on."""
import os
import tempfile

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from expected import expected

DEVICE = torch.device("cuda:0")


class Tokens(Dataset):
    def __init__(self, n, length):
        self.n, self.length = n, length

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.randint(0, 50257, (self.length,))


def build(hparams):
    return GPT2LMHeadModel(GPT2Config(n_layer=hparams["layers"], n_embd=hparams["dim"], n_head=hparams["dim"] // 64))


def save(path, model, optimizer, scheduler, hparams, step):
    torch.save({"hparams": hparams, "step": step, "state_dict": model.state_dict(), "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict()}, path)


def make_optimizer(model, lr=3e-4):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 10))
    return optimizer, scheduler


def fit(model, optimizer, scheduler, first, steps, batch=2, length=256):
    model.train()
    step = first
    for ids in DataLoader(Tokens(steps * batch, length), batch_size=batch):
        ids = ids.to(DEVICE)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
    return step


def first_job(path, hparams):
    model = build(hparams).to(DEVICE)
    optimizer, scheduler = make_optimizer(model)
    step = fit(model, optimizer, scheduler, 0, 2)
    save(path, model, optimizer, scheduler, hparams, step)


def next_job(path, fixed):
    checkpoint = torch.load(path, map_location="cpu" if fixed else None, weights_only=False)
    model = build(checkpoint["hparams"]).to(DEVICE)
    model.load_state_dict(checkpoint["state_dict"])
    optimizer, scheduler = make_optimizer(model)
    optimizer.load_state_dict(checkpoint["optimizer"])
    scheduler.load_state_dict(checkpoint["scheduler"])
    return fit(model, optimizer, scheduler, checkpoint["step"], 3)


@expected("loaded_onto_gpu", fix="map_location", thread="Lightning-AI/pytorch-lightning#228", memory=1500)
def pl_restore_checkpoint(fixed=False):
    torch.manual_seed(7)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "last.ckpt")
        first_job(path, {"layers": 8, "dim": 512})
        torch.cuda.empty_cache()
        return next_job(path, fixed)
