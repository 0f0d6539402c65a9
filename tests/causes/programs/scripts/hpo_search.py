"""Searches at random for the hyperparameters of a text classifier, with a new model in each trial."""
import gc
import random

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, Dataset
from transformers import BertConfig, BertModel

from expected import expected

DEVICE = "cuda"


class Reviews(Dataset):
    def __init__(self, n=64, length=64):
        self.ids = torch.randint(0, 30000, (n, length))
        self.labels = torch.randint(0, 2, (n,))

    def __len__(self):
        return len(self.ids)

    def __getitem__(self, i):
        return {"input_ids": self.ids[i], "label": self.labels[i]}


class TextClassifier(nn.Module):
    def __init__(self, dropout):
        super().__init__()
        self.body = BertModel(BertConfig(hidden_dropout_prob=dropout))
        self.head = nn.Linear(self.body.config.hidden_size, 2)

    def forward(self, input_ids):
        return self.head(self.body(input_ids=input_ids).last_hidden_state[:, 0])


class Callback:
    def __init__(self, trainer):
        self.trainer = trainer

    def on_step_end(self, loss):
        pass


class ProgressCallback(Callback):
    line = ""

    def on_step_end(self, loss):
        if self.trainer.global_step % 4 == 0:
            self.line = f"   step {self.trainer.global_step} loss {loss:.4f}"


class EarlyStopping(Callback):
    best = None

    def on_step_end(self, loss):
        if self.best is None or loss < self.best:
            self.best = loss
            self.trainer.best_step = self.trainer.global_step


class Trainer:
    def __init__(self, model_init, params, train_set, eval_set):
        self.params = params
        self.model = model_init(params).to(DEVICE)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=params["learning_rate"])
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 16)
        self.train_loader = DataLoader(train_set, batch_size=params["batch_size"], shuffle=True)
        self.eval_loader = DataLoader(eval_set, batch_size=16)
        self.callbacks = [ProgressCallback(self), EarlyStopping(self)]
        self.global_step = 0

    def train(self):
        self.model.train()
        for batch in self.train_loader:
            logits = self.model(batch["input_ids"].to(DEVICE))
            loss = nn.functional.cross_entropy(logits, batch["label"].to(DEVICE))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.scheduler.step()
            self.global_step += 1
            for cb in self.callbacks:
                cb.on_step_end(loss.item())

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        right = total = 0
        for batch in self.eval_loader:
            pred = self.model(batch["input_ids"].to(DEVICE)).argmax(1).cpu()
            right += (pred == batch["label"]).sum().item()
            total += len(pred)
        return right / total


def model_init(params):
    return TextClassifier(params["dropout"])


def hp_space(rng):
    return {"learning_rate": 10 ** rng.uniform(-6, -4), "batch_size": rng.choice([8, 16]),
            "dropout": rng.choice([0.0, 0.1, 0.2])}


def objective(params, train_set, eval_set):
    trainer = Trainer(model_init, params, train_set, eval_set)
    trainer.train()
    return trainer.evaluate()


@expected("reference_cycle", fix=r"gc\.collect", thread="huggingface/setfit#311", memory=6144)
def hpo_search(fixed=False, n_trials=5):
    """Trainer and callbacks refer to each other, so that model and optimizer of a finished trial stay until the garbage collector runs.
    Cured by: `gc.collect()` after each trial.
    """
    rng = random.Random(1)
    train_set, eval_set = Reviews(), Reviews(32)
    best = None
    for _ in range(n_trials):
        params = hp_space(rng)
        score = objective(params, train_set, eval_set)
        if fixed:
            gc.collect()
        torch.cuda.empty_cache()
        if best is None or score > best[0]:
            best = (score, params)
    return best
