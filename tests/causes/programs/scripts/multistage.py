"""Fine-tunes a GPT-2 in several stages, each with a model and a data set of its own."""
import gc
import tempfile
from dataclasses import dataclass

import torch
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from expected import expected

DEVICE = "cuda"


@dataclass
class Stage:
    name: str
    lr: float
    block_size: int
    batch_size: int
    samples: int


STAGES = [Stage("domain", 5e-5, 256, 2, 12), Stage("instructions", 2e-5, 256, 2, 12), Stage("dialogue", 1e-5, 256, 2, 12)]


class Blocks(Dataset):
    def __init__(self, n, block_size, vocab=50257):
        self.data = torch.randint(0, vocab, (n, block_size))

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return {"input_ids": self.data[i], "labels": self.data[i].clone()}


def get_model():
    """In the real script: from_pretrained of the checkpoint for this stage."""
    cfg = GPT2Config(n_embd=1024, n_layer=16, n_head=16)
    model = GPT2LMHeadModel(cfg)
    return model.to(DEVICE)


class Finetuner:
    def __init__(self, stage, output):
        self.stage, self.output = stage, output

    def decay_groups(self, model):
        decay = [p for n, p in model.named_parameters() if p.dim() > 1]
        rest = [p for n, p in model.named_parameters() if p.dim() <= 1]
        return [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]

    def tune(self, model, dataset):
        loader = DataLoader(dataset, batch_size=self.stage.batch_size, shuffle=True)
        optimizer = torch.optim.AdamW(self.decay_groups(model), lr=self.stage.lr)
        scheduler = get_linear_schedule_with_warmup(optimizer, 1, len(loader))
        model.train()
        for batch in loader:
            batch = {k: v.to(DEVICE) for k, v in batch.items()}
            loss = model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=False)
        self.save(model)
        return model

    def save(self, model):
        torch.save(model.transformer.ln_f.state_dict(), f"{self.output}/{self.stage.name}.pt")


@torch.no_grad()
def perplexity(model, dataset):
    model.eval()
    losses = [model(input_ids=b["input_ids"].to(DEVICE), labels=b["labels"].to(DEVICE)).loss.item()
              for b in DataLoader(dataset, batch_size=2)]
    return sum(losses) / len(losses)


@expected("several_models", fix="del tuned_model", thread="OptimalScale/LMFlow#346", memory=6144)
def multistage(fixed=False):
    """`tuned_model` keeps the model of the last stage, and its gradients, while that of the next one is trained. Cured by:
    `del model, tuned_model` and `gc.collect()` after each stage.
    """
    losses = []
    with tempfile.TemporaryDirectory() as folder:
        for stage in STAGES:
            dataset = Blocks(stage.samples, stage.block_size)
            finetuner = Finetuner(stage, folder)
            model = get_model()
            tuned_model = finetuner.tune(model=model, dataset=dataset)
            losses.append(perplexity(tuned_model, Blocks(4, stage.block_size)))
            if fixed:
                del model, tuned_model
                gc.collect()
    return losses
