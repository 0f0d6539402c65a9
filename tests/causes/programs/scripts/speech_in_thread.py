"""Streams synthetic speech: a thread makes latents with an autoregressive model, and a vocoder decodes them."""
import queue
import threading

import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected

DIM, LAYERS, HEADS = 1024, 12, 16
FRAME_RATE = 25


class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, cache):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        if cache:
            k = torch.cat([cache["k"], k], dim=2)
            v = torch.cat([cache["v"], v], dim=2)
        cache["k"], cache["v"] = k, v
        out = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        return self.proj(out.transpose(1, 2).reshape(b, t, d))


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, cache):
        x = x + self.attn(self.norm1(x), cache)
        return x + self.mlp(self.norm2(x))


class FlowLM(nn.Module):
    """Predicts the next audio latent from the text and the latents so far."""

    def __init__(self, vocab=4000):
        super().__init__()
        self.text = nn.Embedding(vocab, DIM)
        self.latent_in = nn.Linear(64, DIM)
        self.blocks = nn.ModuleList(Block(DIM, HEADS) for _ in range(LAYERS))
        self.head = nn.Linear(DIM, 64)

    def forward(self, x, caches):
        for block, cache in zip(self.blocks, caches):
            x = block(x, cache)
        return self.head(x[:, -1:])


class Vocoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Conv1d(64, 512, 3, padding=1), nn.GELU(),
                                 nn.ConvTranspose1d(512, 128, 16, stride=16), nn.GELU(),
                                 nn.ConvTranspose1d(128, 1, 60, stride=60))

    def forward(self, latent):
        return self.net(latent.transpose(1, 2))


class TTS:
    def __init__(self, device, fixed):
        self.device, self.fixed = device, fixed
        self.lm = FlowLM().to(device).eval()
        self.vocoder = Vocoder().to(device).eval()

    def _generate_latents(self, tokens, n_frames, out):
        caches = [{} for _ in range(LAYERS)]
        latent = self.lm(self.lm.text(tokens), caches)
        for _ in range(n_frames):
            out.put(latent)
            latent = self.lm(self.lm.latent_in(latent), caches)
        out.put(None)

    @torch.no_grad()
    def generate_stream(self, tokens, seconds):
        latents = queue.Queue(maxsize=8)
        target = torch.no_grad()(self._generate_latents) if self.fixed else self._generate_latents
        worker = threading.Thread(target=target, args=(tokens.to(self.device), int(seconds * FRAME_RATE), latents), daemon=True)
        worker.start()
        while True:
            latent = latents.get(timeout=15)
            if latent is None:
                break
            yield self.vocoder(latent).squeeze(1).cpu()
        worker.join()


@expected("evaluation_keeps_graphs", fix="no_grad.*thread", thread="kyutai-labs/pocket-tts#16", memory=4096)
def speech_in_thread(fixed=False):
    torch.manual_seed(0)
    tts = TTS(torch.device("cuda"), fixed)
    requests = [torch.randint(0, 4000, (8, 60)) for _ in range(2)]
    return [torch.cat(list(tts.generate_stream(tokens, seconds=8)), dim=1) for tokens in requests]
