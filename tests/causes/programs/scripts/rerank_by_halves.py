"""Reranks documents with a cross-encoder that halves its batch size when the GPU is too small for it."""
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

VOCAB, DIM, HEADS, DEPTH, LENGTH = 30522, 768, 12, 6, 512


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d)
        x = x + self.proj(attended)
        hidden = F.gelu(self.up(self.norm2(x)))
        return x + self.down(hidden)


class CrossEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(DEPTH))
        self.score = nn.Linear(DIM, 1)

    def forward(self, ids):
        x = self.embed(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.score(x[:, 0]).squeeze(-1)


class Reranker:
    def __init__(self, device, batch_size=512, min_batch_size=16, fixed=False):
        self.device, self.fixed = device, fixed
        self.model = CrossEncoder().to(device).eval()
        self.batch_size = batch_size
        self.min_batch_size = min_batch_size

    def _score_all(self, pairs, batch_size):
        scores = []
        for chunk in pairs.split(batch_size):
            ids = chunk.to(self.device)
            scores.append(self.model(ids).float().cpu())
        return torch.cat(scores)

    def _score_in_halves(self, pairs, batch_size):
        torch.cuda.empty_cache()
        self.batch_size = batch_size // 2
        return self.score(pairs, self.batch_size)

    @torch.inference_mode()
    def score(self, pairs, batch_size=None):
        batch_size = batch_size or self.batch_size
        try:
            return self._score_all(pairs, batch_size)
        except torch.cuda.OutOfMemoryError:
            if batch_size // 2 < self.min_batch_size:
                raise
            if not self.fixed:
                return self._score_in_halves(pairs, batch_size)
        return self._score_in_halves(pairs, batch_size)

    def rerank(self, query, documents, top_k=10):
        pairs = torch.cat([query.expand(len(documents), -1), documents], dim=1)[:, :LENGTH]
        scores = self.score(pairs)
        return scores.topk(min(top_k, len(scores))).indices.tolist()


def retrieve(n, length):
    return torch.randint(0, VOCAB, (n, length))


@expected("caught_traceback", fix="after the except", thread="pytorch/pytorch#18853", memory=4096)
def rerank_by_halves(fixed=False):
    torch.manual_seed(0)
    reranker = Reranker(torch.device("cuda"), fixed=fixed)
    best = []
    for _ in range(3):
        query = torch.randint(0, VOCAB, (1, 32))
        candidates = retrieve(600, LENGTH - 32)
        best.append(reranker.rerank(query, candidates))
    return best
