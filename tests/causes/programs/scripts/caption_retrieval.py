"""Fine-tunes an image-text matcher on scraped captions."""
import math
import random

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

VOCAB, WIDTH, BATCH = 30522, 512, 32
device = "cuda"


class WordTokenizer:
    def __init__(self, vocab_size):
        self.vocab_size = vocab_size

    def encode(self, text):
        return [hash(w) % self.vocab_size for w in text.split()]

    def __call__(self, texts, padding="longest", max_length=30, truncation=False):
        ids = [self.encode(t) for t in texts]
        if truncation:
            ids = [i[:max_length] for i in ids]
        longest = max(len(i) for i in ids)
        batch = torch.zeros(len(ids), longest, dtype=torch.long)
        for row, i in enumerate(ids):
            batch[row, :len(i)] = torch.tensor(i)
        return batch


class TextEncoder(nn.Module):
    def __init__(self, layers=6):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 8, 4 * WIDTH, batch_first=True) for _ in range(layers))

    def positions(self, n, dev):
        pos = torch.arange(n, device=dev).unsqueeze(1)
        freq = torch.exp(torch.arange(0, WIDTH, 2, device=dev) * (-math.log(10000.0) / WIDTH))
        return torch.cat([torch.sin(pos * freq), torch.cos(pos * freq)], dim=1)

    def forward(self, ids):
        x = self.emb(ids) + self.positions(ids.size(1), ids.device)
        for block in self.blocks:
            x = block(x)
        return F.normalize(x[:, 0], dim=-1)


class ImageEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, WIDTH, 32, 32)
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, img):
        x = self.patch(img).flatten(2).mean(-1)
        return F.normalize(self.head(x), dim=-1)


def scraped_captions(n):
    words = ["a", "photo", "of", "two", "dogs", "on", "beach", "red", "car", "sunset", "city", "old"]
    texts = [" ".join(random.choices(words, k=random.randint(6, 24))) for _ in range(n)]
    texts[213] = " ".join(random.choices(words, k=3100))
    return texts


def contrastive(img, txt, temp=0.07):
    logits = img @ txt.t() / temp
    target = torch.arange(img.size(0), device=img.device)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target)) / 2


@expected("larger_step", fix=r"\bcut\b|truncat|shorter", thread="salesforce/ALBEF#6", memory=11900)
def caption_retrieval(fixed=False):
    """`padding="longest", max_length=30` does not cut: one caption of 3100 words makes its whole batch as long. Cured by:
    `truncation=True`.
    """
    random.seed(3)
    captions = scraped_captions(480)
    tokenizer = WordTokenizer(VOCAB)
    text_enc, image_enc = TextEncoder().to(device), ImageEncoder().to(device)
    params = list(text_enc.parameters()) + list(image_enc.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-5)
    for start in range(0, len(captions), BATCH):
        text = captions[start:start + BATCH]
        image = torch.rand(len(text), 3, 224, 224).to(device)
        text_input = tokenizer(text, padding="longest", max_length=30, truncation=fixed).to(device)
        loss = contrastive(image_enc(image), text_enc(text_input))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
