"""Computes retrieval metrics of a two-tower model on the validation captions."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

DIM, VAL, BATCH = 512, 28000, 256
dev = torch.device("cuda", 0)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 64, 7, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, DIM))
        self.words = nn.EmbeddingBag(49408, DIM)
        self.text = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def encode_image(self, x):
        return F.normalize(self.image(x), dim=-1)

    def encode_text(self, ids):
        return F.normalize(self.text(self.words(ids)), dim=-1)


def val_batches():
    for start in range(0, VAL, BATCH):
        n = min(BATCH, VAL - start)
        yield torch.rand(n, 3, 64, 64), torch.randint(0, 49408, (n, 32))


def ranks_of(logits, truth):
    return (torch.argsort(logits, descending=True) == truth).int().argmax(1)


def get_metrics(image_features, text_features, scale, fixed=False):
    metrics = {}
    logits_per_image = scale * image_features @ text_features.t()
    logits_per_text = logits_per_image.t()
    truth = torch.arange(len(text_features), device=dev).view(-1, 1)
    for name, logits in {"image_to_text": logits_per_image, "text_to_image": logits_per_text}.items():
        if fixed:
            preds = torch.cat([ranks_of(*parts) for parts in zip(logits.split(1000), truth.split(1000))])
        else:
            ranking = torch.argsort(logits, descending=True)
            preds = (ranking == truth).int().argmax(1)
        metrics[f"{name}_mean_rank"] = preds.float().mean().item() + 1
        for k in (1, 5, 10):
            metrics[f"{name}_R@{k}"] = (preds < k).float().mean().item()
    return metrics


def train_some(model, steps=5):
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _, (img, txt) in zip(range(steps), val_batches()):
        i, t = model.encode_image(img.to(dev)), model.encode_text(txt.to(dev))
        logits = model.logit_scale.exp() * i @ t.t()
        loss = F.cross_entropy(logits, torch.arange(len(i), device=dev))
        opt.zero_grad()
        loss.backward()
        opt.step()


@torch.no_grad()
def evaluate(model, fixed=False):
    model.eval()
    images, texts = [], []
    for img, txt in val_batches():
        images.append(model.encode_image(img.to(dev)))
        texts.append(model.encode_text(txt.to(dev)))
    return get_metrics(torch.cat(images), torch.cat(texts), model.logit_scale.exp(), fixed)


@expected("sort_temporaries", fix="cpu|split|part", thread="mlfoundations/open_clip#26", memory=11900)
def clip_retrieval_eval(fixed=False):
    """The validation multiplies all images with all captions and sorts the N x N matrix on the GPU. Cured by: The matrix on the CPU, or a
    part of its rows at a time.
    """
    net = Towers().to(dev)
    train_some(net)
    return evaluate(net, fixed)
