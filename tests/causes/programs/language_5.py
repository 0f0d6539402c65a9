"""Programs after public threads: fine-tuning, post-training and evaluation of language models, text classification, retrieval, speech and audio."""
import gc
import math
import os
import tempfile
from collections import defaultdict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from expected import expected


# A summarization model is trained, and its best checkpoint writes the summaries of the test set.

class CrossCacheLayer(nn.Module):
    def __init__(self, d_model, num_heads, ffn_dim):
        super().__init__()
        self.heads = num_heads
        self.q, self.kv, self.out = nn.Linear(d_model, d_model), nn.Linear(d_model, 2 * d_model), nn.Linear(d_model, d_model)
        self.cross_q, self.cross_kv, self.cross_out = nn.Linear(d_model, d_model), nn.Linear(d_model, 2 * d_model), nn.Linear(d_model, d_model)
        self.fc1, self.fc2 = nn.Linear(d_model, ffn_dim), nn.Linear(ffn_dim, d_model)
        self.norms = nn.ModuleList(nn.LayerNorm(d_model) for _ in range(3))

    def split(self, x):
        return x.view(x.size(0), x.size(1), self.heads, -1).transpose(1, 2)

    def merge(self, x):
        return x.transpose(1, 2).flatten(2)

    def forward(self, x, source, past=None):
        key, value = map(self.split, self.kv(x).chunk(2, -1))
        if past is None:
            cross_key, cross_value = map(self.split, self.cross_kv(source).chunk(2, -1))
        else:
            key, value = torch.cat([past[0], key], 2), torch.cat([past[1], value], 2)
            cross_key, cross_value = past[2], past[3]
        attended = F.scaled_dot_product_attention(self.split(self.q(x)), key, value, is_causal=past is None)
        x = self.norms[0](x + self.out(self.merge(attended)))
        attended = F.scaled_dot_product_attention(self.split(self.cross_q(x)), cross_key, cross_value)
        x = self.norms[1](x + self.cross_out(self.merge(attended)))
        return self.norms[2](x + self.fc2(F.gelu(self.fc1(x)))), (key, value, cross_key, cross_value)


class SummaryModel(nn.Module):
    def __init__(self, vocab_size=12000, d_model=384, num_layers=4):
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(d_model, 6, 4 * d_model, batch_first=True), num_layers, enable_nested_tensor=False)
        self.decoder = nn.ModuleList(CrossCacheLayer(d_model, 6, 4 * d_model) for _ in range(num_layers))

    def decode(self, ids, source, past_key_values):
        x, cache = self.shared(ids), []
        for layer, past in zip(self.decoder, past_key_values):
            x, present = layer(x, source, past)
            cache.append(present)
        return F.linear(x, self.shared.weight), cache

    def forward(self, batch):
        source = self.encoder(self.shared(batch["source_ids"]))
        logits, _ = self.decode(batch["target_ids"][:, :-1], source, [None] * len(self.decoder))
        return F.cross_entropy(logits.flatten(0, 1), batch["target_ids"][:, 1:].flatten())

    def generate(self, batch, num_beams=4, max_length=160):
        source = self.encoder(self.shared(batch["source_ids"])).repeat_interleave(num_beams, 0)
        ids = torch.zeros(len(source), 1, dtype=torch.long, device=source.device)
        past, scores = [None] * len(self.decoder), torch.zeros(len(source), 1, device=source.device)
        for _ in range(max_length):
            logits, past = self.decode(ids[:, -1:], source, past)
            score, token = (scores + logits[:, -1].log_softmax(-1)).topk(1)
            ids, scores = torch.cat([ids, token], 1), score
        return ids


class TextBoxTrainer:
    def __init__(self, model, checkpoint_dir, device):
        self.model, self.device = model.to(device), device
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-5)
        self.saved_model_filename = os.path.join(checkpoint_dir, "summary")

    def batch(self, size, source_length, target_length):
        return {"source_ids": torch.randint(0, 12000, (size, source_length)).to(self.device),
                "target_ids": torch.randint(0, 12000, (size, target_length)).to(self.device)}

    def fit(self, steps):
        self.model.train()
        for _ in range(steps):
            self.optimizer.zero_grad()
            loss = self.model(self.batch(2, 200, 40))
            loss.backward()
            self.optimizer.step()
        torch.save({"state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": 0}, self.saved_model_filename + ".pth")

    @torch.no_grad()
    def evaluate(self, eval_batches, release):
        checkpoint = torch.load(self.saved_model_filename + ".pth", map_location=self.device)
        self.model.load_state_dict(checkpoint["state_dict"])
        if release:
            del checkpoint
        self.model.eval()
        generate_corpus = []
        for _ in range(eval_batches):
            generate_corpus.extend(self.model.generate(self.batch(12, 200, 1)).cpu().tolist())
        return generate_corpus


@expected("loaded_onto_gpu", fix=r"map_location|\bdel\b", thread="RUCAIBox/TextBox#265", memory=940, held_back=True)
def generate_best_summary(fixed=False):
    """`Trainer.evaluate` loads the best checkpoint with `map_location=self.device`, and its local variable `checkpoint` (weights and
    optimizer state) stays on the GPU all the while `model.generate` runs over the evaluation data. Cured by: `del checkpoint` after
    `load_state_dict`.
    """
    with tempfile.TemporaryDirectory() as checkpoint_dir:
        trainer = TextBoxTrainer(SummaryModel(), checkpoint_dir, torch.device("cuda"))
        trainer.fit(3)
        return len(trainer.evaluate(2, release=fixed))


# The pages of a PDF are embedded for visual retrieval.

class VisionAttention(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(embed_dim, 3 * embed_dim), nn.Linear(embed_dim, embed_dim)

    def forward(self, hidden_states, attention_mask):
        seq_length = hidden_states.shape[0]
        q, k, v = self.qkv(hidden_states).view(seq_length, 3, self.num_heads, -1).permute(1, 2, 0, 3)
        attn_weights = q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])
        attn_weights = (attn_weights + attention_mask).softmax(-1)
        return self.proj((attn_weights @ v).transpose(0, 1).reshape(seq_length, -1))


class VisionBlock(nn.Module):
    def __init__(self, embed_dim, num_heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.attn = VisionAttention(embed_dim, num_heads)
        self.mlp = nn.Sequential(nn.Linear(embed_dim, 4 * embed_dim), nn.GELU(), nn.Linear(4 * embed_dim, embed_dim))

    def forward(self, hidden_states, attention_mask):
        hidden_states = hidden_states + self.attn(self.norm1(hidden_states), attention_mask)
        return hidden_states + self.mlp(self.norm2(hidden_states))


class ColQwen2(nn.Module):
    def __init__(self, embed_dim=128, depth=4, dim=64):
        super().__init__()
        self.patch_embed = nn.Linear(3 * 14 * 14, embed_dim)
        self.blocks = nn.ModuleList(VisionBlock(embed_dim, 4) for _ in range(depth))
        self.custom_text_proj = nn.Linear(embed_dim, dim)

    def forward(self, pixel_values, image_grid_thw):
        hidden_states = self.patch_embed(pixel_values)
        lengths = [h * w for _, h, w in image_grid_thw]
        attention_mask = torch.full((len(hidden_states), len(hidden_states)), float("-inf"), device=hidden_states.device)
        start = 0
        for length in lengths:
            attention_mask[start:start + length, start:start + length] = 0
            start += length
        for block in self.blocks:
            hidden_states = block(hidden_states, attention_mask)
        return [F.normalize(page, dim=-1) for page in self.custom_text_proj(hidden_states).split(lengths)]


class ColQwen2Processor:
    def process_images(self, images):
        grids = [(1, image.shape[1] // 14, image.shape[2] // 14) for image in images]
        patches = [F.unfold(image[None], 14, stride=14)[0].T for image in images]
        return {"pixel_values": torch.cat(patches), "image_grid_thw": grids}


@expected("batch_without_gradients", fix="part", thread="illuin-tech/colpali#87", memory=700, held_back=True)
def embed_pdf_pages(fixed=False):
    """All pages of the PDF are passed to the model as one batch (`batch_images`), so that attention of the vision tower runs over the
    patches of all pages at once. Cured by: Pages go through a `DataLoader` four at a time, and the embeddings of each batch are moved to
    the CPU.
    """
    model, processor = ColQwen2().cuda().eval(), ColQwen2Processor()
    images = [torch.rand(3, 20 * 14, 18 * 14) for _ in range(15)]
    ds = []
    with torch.no_grad():
        if fixed:
            dataloader = DataLoader(images, batch_size=4, shuffle=False, collate_fn=processor.process_images)
            for batch_doc in dataloader:
                embeddings_doc = model(batch_doc["pixel_values"].cuda(), batch_doc["image_grid_thw"])
                ds.extend(page.to("cpu") for page in embeddings_doc)
        else:
            batch_images = processor.process_images(images)
            ds = model(batch_images["pixel_values"].cuda(), batch_images["image_grid_thw"])
    return {"pages": len(ds), "vectors": len(ds[0])}


# Speech enhancement with conformers over time and frequency is evaluated track by track.

class ConformerAttention(nn.Module):
    def __init__(self, dim, heads, dim_head, max_pos_emb=512):
        super().__init__()
        self.heads, self.scale, self.max_pos_emb = heads, dim_head ** -0.5, max_pos_emb
        self.to_q, self.to_kv = nn.Linear(dim, heads * dim_head, bias=False), nn.Linear(dim, 2 * heads * dim_head, bias=False)
        self.to_out, self.rel_pos_emb = nn.Linear(heads * dim_head, dim), nn.Embedding(2 * max_pos_emb + 1, dim_head)

    def forward(self, x):
        n = x.shape[1]
        q, k, v = (t.view(len(x), n, self.heads, -1).transpose(1, 2) for t in (self.to_q(x), *self.to_kv(x).chunk(2, -1)))
        dots = torch.einsum("bhid,bhjd->bhij", q, k) * self.scale
        seq = torch.arange(n, device=x.device)
        dist = (seq[:, None] - seq[None]).clamp(-self.max_pos_emb, self.max_pos_emb) + self.max_pos_emb
        pos_attn = torch.einsum("bhnd,nrd->bhnr", q, self.rel_pos_emb(dist)) * self.scale
        attn = (dots + pos_attn).softmax(-1)
        return self.to_out((attn @ v).transpose(1, 2).flatten(2))


class ConformerBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.ff = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.SiLU(), nn.Linear(4 * dim, dim))
        self.attn_norm, self.attn = nn.LayerNorm(dim), ConformerAttention(dim, heads, dim // heads)
        self.conv = nn.Conv1d(dim, dim, 31, padding=15, groups=dim)

    def forward(self, x):
        x = x + 0.5 * self.ff(x)
        x = x + self.attn(self.attn_norm(x))
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2)


class TSCNet(nn.Module):
    def __init__(self, num_channel=16, heads=2, blocks=2):
        super().__init__()
        self.dense_encoder = nn.Sequential(nn.Conv2d(3, num_channel, 1), nn.PReLU(), nn.Conv2d(num_channel, num_channel, (1, 3), (1, 2), padding=(0, 1)))
        self.time = nn.ModuleList(ConformerBlock(num_channel, heads) for _ in range(blocks))
        self.freq = nn.ModuleList(ConformerBlock(num_channel, heads) for _ in range(blocks))
        self.decoder = nn.ConvTranspose2d(num_channel, 2, (1, 3), (1, 2), padding=(0, 1))

    def forward(self, x):
        mag = (x ** 2).sum(1, keepdim=True).sqrt()
        h = self.dense_encoder(torch.cat([mag, x], 1))
        b, c, t, f = h.shape
        for time_conformer, freq_conformer in zip(self.time, self.freq):
            h_t = h.permute(0, 3, 2, 1).reshape(b * f, t, c)
            h_t = time_conformer(h_t) + h_t
            h_f = h_t.view(b, f, t, c).permute(0, 2, 1, 3).reshape(b * t, f, c)
            h = (freq_conformer(h_f) + h_f).view(b, t, f, c).permute(0, 3, 1, 2)
        return self.decoder(h).chunk(2, 1)


def overlap_add(spec, n_fft, hop, window):
    frames = torch.fft.irfft(spec, n_fft, dim=1) * window[:, None]
    length = n_fft + hop * (frames.shape[-1] - 1)
    audio = F.fold(frames, (1, length), (1, n_fft), stride=(1, hop)).flatten(1)
    weight = F.fold((window ** 2)[None, :, None].expand(1, -1, frames.shape[-1]), (1, length), (1, n_fft), stride=(1, hop)).flatten(1)
    return (audio / weight.clamp(min=1e-8))[:, n_fft // 2:length - n_fft // 2]


@torch.no_grad()
def enhance_one_track(model, noisy, cut_len, n_fft=400, hop=100):
    noisy = noisy.cuda()
    c = torch.sqrt(noisy.size(-1) / torch.sum(noisy ** 2.0, dim=-1))
    noisy = (noisy.T * c).T
    length = noisy.size(-1)
    padded_len = int(np.ceil(length / hop)) * hop
    noisy = torch.cat([noisy, noisy[:, :padded_len - length]], -1)
    if padded_len > cut_len:
        batch_size = int(np.ceil(padded_len / cut_len))
        while 100 % batch_size != 0:
            batch_size += 1
        noisy = noisy.reshape(batch_size, -1)
    window = torch.hamming_window(n_fft, device="cuda")
    noisy_spec = torch.view_as_real(torch.stft(noisy, n_fft, hop, window=window, return_complex=True))
    est_real, est_imag = model(noisy_spec.permute(0, 3, 2, 1))
    est_spec = torch.complex(est_real, est_imag).squeeze(1).transpose(1, 2)
    est_audio = overlap_add(est_spec, n_fft, hop, window) / c
    return est_audio.flatten()[:length].cpu().numpy()


@expected("attention_scores", fix="as large as in the steps before|split", thread="ruizhecao96/CMGAN#3", memory=1500, held_back=True)
def evaluate_enhancement(fixed=False):
    """With `cut_len` of 16 s `enhance_one_track` passes the track uncut, and the attention of the conformers over time needs memory
    quadratic in the length of the track. Cured by: A smaller `cut_len`, so that the track is reshaped to several shorter rows.
    """
    model = TSCNet().cuda().eval()
    cut_len = 16000 * 2 if fixed else 16000 * 16
    lengths = []
    for seconds in (1.5, 2.5, 6.0, 2.0):
        noisy = torch.randn(1, int(16000 * seconds))
        lengths.append(len(enhance_one_track(model, noisy, cut_len)))
    return {"samples": sum(lengths)}


# A neural codec compresses long recordings.

class Snake1d(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x):
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


class ResidualUnit(nn.Module):
    def __init__(self, dim, dilation):
        super().__init__()
        self.block = nn.Sequential(Snake1d(dim), nn.Conv1d(dim, dim, 7, dilation=dilation, padding=3 * dilation), Snake1d(dim), nn.Conv1d(dim, dim, 1))

    def forward(self, x):
        return x + self.block(x)


class DAC(nn.Module):
    def __init__(self, encoder_dim=24, encoder_rates=(2, 4, 8), codebooks=4, codebook_size=256, sample_rate=16000):
        super().__init__()
        self.sample_rate, self.hop_length = sample_rate, int(np.prod(encoder_rates))
        dim, layers = encoder_dim, [nn.Conv1d(1, encoder_dim, 7, padding=3)]
        for stride in encoder_rates:
            layers += [ResidualUnit(dim, 1), ResidualUnit(dim, 3), Snake1d(dim), nn.Conv1d(dim, 2 * dim, 2 * stride, stride, padding=stride // 2)]
            dim *= 2
        self.encoder = nn.Sequential(*layers)
        self.codebooks = nn.ModuleList(nn.Embedding(codebook_size, dim) for _ in range(codebooks))
        layers = []
        for stride in reversed(encoder_rates):
            layers += [Snake1d(dim), nn.ConvTranspose1d(dim, dim // 2, 2 * stride, stride, padding=stride // 2), ResidualUnit(dim // 2, 1), ResidualUnit(dim // 2, 3)]
            dim //= 2
        self.decoder = nn.Sequential(*layers, nn.Conv1d(dim, 1, 7, padding=3), nn.Tanh())

    def preprocess(self, audio_data):
        right_pad = math.ceil(audio_data.shape[-1] / self.hop_length) * self.hop_length - audio_data.shape[-1]
        return F.pad(audio_data, (0, right_pad))

    def encode(self, audio_data):
        residual, codes = self.encoder(self.preprocess(audio_data)), []
        for codebook in self.codebooks:
            indices = (residual.transpose(1, 2) @ codebook.weight.T).argmax(-1)
            residual = residual - codebook(indices).transpose(1, 2)
            codes.append(indices)
        return torch.stack(codes, 1)

    def decode(self, codes):
        z = sum(codebook(codes[:, i]) for i, codebook in enumerate(self.codebooks))
        return self.decoder(z.transpose(1, 2))

    @torch.no_grad()
    def compress(self, signal, win_duration=None):
        n_samples = signal.shape[-1] if win_duration is None else int(win_duration * self.sample_rate)
        codes = []
        for i in range(0, signal.shape[-1], n_samples):
            audio_data = signal[..., i:i + n_samples].cuda()
            codes.append(self.encode(audio_data).cpu())
        return codes

    @torch.no_grad()
    def decompress(self, chunks):
        return torch.cat([self.decode(c.cuda()).cpu() for c in chunks], -1)


@expected("batch_without_gradients", fix="windows", thread="descriptinc/descript-audio-codec#22", memory=450, held_back=True)
def compress_recording(fixed=False):
    """The codec encodes and decodes the whole recording in one piece, so that the activations of its convolutions grow with the length of
    the file. Cured by: Chunked inference: `compress` and `decompress` work on windows of `win_duration`, and results go back to the CPU.
    """
    model = DAC().cuda().eval()
    samples = 0
    for minutes in (0.05, 1.6):
        signal = torch.rand(1, 1, int(minutes * 60 * model.sample_rate)) * 2 - 1
        codes = model.compress(signal, win_duration=5.0 if fixed else None)
        samples += model.decompress(codes).shape[-1]
    return {"samples": samples}


# Before a policy update the log probabilities of all rollouts are computed anew.

class DecoderLayer(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv_proj, self.o_proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)
        self.up_proj, self.down_proj = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(3 * hidden, hidden, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv_proj(self.input_layernorm(x)).chunk(3, -1))
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down_proj(F.silu(self.up_proj(self.post_attention_layernorm(x))))


class CausalLM(nn.Module):
    def __init__(self, vocab_size, hidden, num_layers, heads=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden)
        self.layers = nn.ModuleList(DecoderLayer(hidden, heads) for _ in range(num_layers))
        self.norm, self.lm_head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class PolicyWorker:
    def __init__(self, cfg):
        self.cfg = cfg
        self.model = CausalLM(cfg["vocab_size"], cfg["hidden_size"], cfg["num_layers"]).cuda().bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-6)

    def token_logprobs(self, logits, input_ids):
        log_probs = F.log_softmax(logits.to(torch.float32), dim=-1)
        return torch.gather(log_probs, -1, input_ids.unsqueeze(-1)).squeeze(-1)

    def get_logprobs(self, data):
        self.model.eval()
        all_log_probs, chunk_size = [], self.cfg["logprob_chunk_size"]
        with torch.no_grad():
            for input_ids in data.split(self.cfg["logprob_batch_size"]):
                input_ids = input_ids.cuda()
                logits, next_tokens = self.model(input_ids)[:, :-1], input_ids[:, 1:]
                if chunk_size is None:
                    token_logprobs = self.token_logprobs(logits, next_tokens)
                else:
                    token_logprobs = torch.cat([self.token_logprobs(logits[:, begin:begin + chunk_size], next_tokens[:, begin:begin + chunk_size])
                                                for begin in range(0, logits.shape[1], chunk_size)], 1)
                all_log_probs.append(F.pad(token_logprobs, (1, 0)).cpu())
        return torch.cat(all_log_probs)


@expected("logits", fix="part|chunk", thread="NVIDIA-NeMo/RL#918", memory=800, held_back=True)
def refresh_policy_logprobs(fixed=False):
    """`get_logprobs` casts the logits of the whole sequence to float32 at once before the log-softmax, a tensor of batch x sequence x
    vocabulary. Cured by: `logprob_chunk_size`: log probabilities are computed in chunks of the sequence, and the cast to float32 is made
    within the chunk.
    """
    cfg = {"vocab_size": 24000, "hidden_size": 256, "num_layers": 4, "logprob_batch_size": 4, "logprob_chunk_size": 128 if fixed else None}
    policy = PolicyWorker(cfg)
    rollouts = torch.randint(0, cfg["vocab_size"], (16, 1024))
    prev_logprobs = policy.get_logprobs(rollouts)
    return {"tokens": prev_logprobs.numel()}


# The stems of a whole concert are separated.

class BandSplitRoformer(nn.Module):
    def __init__(self, num_stems, n_fft=2048, hop=512, dim=96, depth=2):
        super().__init__()
        self.num_stems, self.n_fft, self.hop = num_stems, n_fft, hop
        self.band_split = nn.Linear(4 * (n_fft // 2 + 1), dim)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(dim, 4, 2 * dim, batch_first=True), depth, enable_nested_tensor=False)
        self.mask_estimators = nn.ModuleList(nn.Linear(dim, 4 * (n_fft // 2 + 1)) for _ in range(num_stems))

    def forward(self, raw_audio):
        batch, channels, length = raw_audio.shape
        window = torch.hann_window(self.n_fft, device=raw_audio.device)
        stft = torch.stft(raw_audio.flatten(0, 1), self.n_fft, self.hop, window=window, return_complex=True)
        stft = stft.view(batch, channels, *stft.shape[1:])
        x = torch.view_as_real(stft).permute(0, 3, 1, 2, 4).flatten(2)
        x = self.layers(self.band_split(x))
        stems = []
        for estimator in self.mask_estimators:
            mask = estimator(x).view(batch, x.shape[1], channels, stft.shape[2], 2).permute(0, 2, 3, 1, 4).contiguous()
            masked = stft * torch.view_as_complex(mask)
            audio = overlap_add(masked.flatten(0, 1), self.n_fft, self.hop, window)
            stems.append(F.pad(audio, (0, length - audio.shape[-1])).view(batch, channels, length))
        return torch.stack(stems, 1)


class MDXCSeparator:
    def __init__(self, instruments, keep_on_cpu):
        self.instruments, self.keep_on_cpu = instruments, keep_on_cpu
        self.model_run = BandSplitRoformer(len(instruments)).cuda().eval()
        self.chunk_size, self.step = 512 * 400, 512 * 400 - 22050

    def overlap_add(self, result, x, weights, start, length):
        x, weights = x.to(result.device), weights.to(result.device)
        result[..., start:start + length] += x[..., :length] * weights[:length]
        return result

    def demix(self, mix):
        mix = torch.tensor(mix, dtype=torch.float32)
        device = next(self.model_run.parameters()).device
        buffers = torch.device("cpu") if self.keep_on_cpu else device
        window = torch.hamming_window(self.chunk_size).to(buffers)
        with torch.no_grad():
            req_shape = (len(self.instruments),) + tuple(mix.shape)
            result = torch.zeros(req_shape, dtype=torch.float32).to(buffers)
            counter = torch.zeros(req_shape, dtype=torch.float32).to(buffers)
            for i in range(0, mix.shape[1], self.step):
                part = mix[:, i:i + self.chunk_size]
                length = part.shape[-1]
                if i + self.chunk_size > mix.shape[1]:
                    part, length = mix[:, -self.chunk_size:], self.chunk_size
                x = self.model_run(part.to(device).unsqueeze(0))[0]
                if self.keep_on_cpu:
                    x = x.cpu()
                start = min(i, mix.shape[1] - self.chunk_size)
                result = self.overlap_add(result, x, window, start, length)
                counter[..., start:start + length] += window[:length]
        inferenced_outputs = result / counter.clamp(min=1e-10)
        return dict(zip(self.instruments, inferenced_outputs.cpu().numpy()))


@expected("data_on_gpu", fix="host", thread="nomadkaraoke/python-audio-separator#148", memory=400, held_back=True)
def separate_long_concert(fixed=False):
    """`demix` keeps `result` and `counter`, one value per stem, channel and sample of the whole mix, on the GPU. Cured by: `result`,
    `counter` and the overlap-add stay on the CPU; each `x` is moved there.
    """
    separator = MDXCSeparator(["vocals", "drums", "bass", "other"], keep_on_cpu=fixed)
    sources = separator.demix(np.zeros((2, 5_500_000), np.float32))
    return {"stems": len(sources)}


# A visual document retriever with multi-vector embeddings is scored on a benchmark.

class MultiVectorEncoder(nn.Module):
    def __init__(self, vocab_size=4000, hidden=128, dim=64):
        super().__init__()
        self.words, self.patches = nn.Embedding(vocab_size, hidden), nn.Linear(3 * 16 * 16, hidden)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(hidden, 4, 2 * hidden, batch_first=True), 2, enable_nested_tensor=False)
        self.multi_vector_projector = nn.Linear(hidden, dim)

    def forward(self, embeds):
        return F.normalize(self.multi_vector_projector(self.encoder(embeds)), dim=-1)


class JinaV4Retriever:
    def __init__(self, device, forward_batch_size):
        self.device, self.forward_batch_size = device, forward_batch_size
        self.model = MultiVectorEncoder().to(device).eval()

    @torch.no_grad()
    def forward_queries(self, queries, batch_size):
        outputs = [self.model(self.model.words(ids.to(self.device))).cpu() for ids in queries.split(batch_size)]
        return [query for output in outputs for query in output]

    @torch.no_grad()
    def forward_passages(self, pages, batch_size):
        outputs = [self.model(self.model.patches(patches.to(self.device))).cpu() for patches in pages.split(batch_size)]
        return [page for output in outputs for page in output]

    def get_scores(self, query_embeddings, passage_embeddings, batch_size=128):
        if self.forward_batch_size:
            return self.score_multi_vector(query_embeddings, passage_embeddings, device=self.device, batch_size=batch_size)
        return self.score_multi_vector(query_embeddings, passage_embeddings, device=self.device)

    @staticmethod
    def score_multi_vector(qs, ps, batch_size=128, device=None):
        scores_list = []
        for i in range(0, len(qs), batch_size):
            scores_batch = []
            qs_batch = nn.utils.rnn.pad_sequence(qs[i:i + batch_size], batch_first=True).to(device)
            for j in range(0, len(ps), batch_size):
                ps_batch = nn.utils.rnn.pad_sequence(ps[j:j + batch_size], batch_first=True).to(device)
                scores_batch.append(torch.einsum("bnd,csd->bcns", qs_batch, ps_batch).max(dim=3)[0].sum(dim=2))
            scores_list.append(torch.cat(scores_batch, dim=1).cpu())
        return torch.cat(scores_list, dim=0).float()


@expected("all_pairs", fix="part|split", thread="jina-ai/jina-vdr#4", memory=500, held_back=True)
def evaluate_visual_retriever(fixed=False):
    """`get_scores` does not pass its `batch_size` (the `batch_score` of the command line) on to `score_multi_vector`, which therefore
    compares 128 queries with 128 passages at once in its default batch size. Cured by: `batch_size=batch_size` is passed on.
    """
    batch_query, batch_passage, batch_score = 8, 4, 4
    vision_retriever = JinaV4Retriever(torch.device("cuda"), forward_batch_size=fixed)
    query_embeddings = vision_retriever.forward_queries(torch.randint(0, 4000, (130, 24)), batch_query)
    passage_embeddings = vision_retriever.forward_passages(torch.rand(140, 500, 3 * 16 * 16), batch_passage)
    scores = vision_retriever.get_scores(query_embeddings, passage_embeddings, batch_size=batch_score)
    return {"queries": len(scores), "passages": scores.shape[1]}


# A language model is trained by reinforcement learning on micro-batches of rollouts.

def selective_log_softmax(logits, index):
    selected_logits = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
    logsumexp_values = torch.stack([torch.logsumexp(lg, dim=-1) for lg in logits])
    return selected_logits - logsumexp_values


def entropy_from_logits(logits, chunk_size=128):
    flat_logits = logits.reshape(-1, logits.shape[-1])
    entropies = []
    for chunk in flat_logits.split(chunk_size, dim=0):
        logps = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(entropies).reshape(logits.shape[:-1])


class RLTrainer:
    def __init__(self, model, temperature, mask_ratio_low, mask_ratio_high, track_entropy):
        self.model, self.temperature, self.track_entropy = model, temperature, track_entropy
        self.mask_ratio_low, self.mask_ratio_high = mask_ratio_low, mask_ratio_high
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
        self.metrics = defaultdict(list)

    def get_logprobs(self, input_ids):
        logits = self.model(input_ids)
        logits = logits[:, :-1, :] / self.temperature
        logprobs = selective_log_softmax(logits, input_ids[:, 1:])
        entropies = entropy_from_logits(logits if self.track_entropy else logits.detach())
        return logprobs, entropies

    def compute_loss(self, inputs):
        log_importance_ratio = inputs["trainer_logprobs"] - inputs["inference_logprobs"]
        importance_ratio = torch.exp(log_importance_ratio)
        is_masked = (importance_ratio < self.mask_ratio_low) | (importance_ratio > self.mask_ratio_high)
        keep_mask = ~is_masked & inputs["loss_mask"]
        loss = (-importance_ratio * inputs["advantages"] * keep_mask).sum()
        with torch.no_grad():
            summary = {"importance_sampling": (importance_ratio * inputs["loss_mask"]).mean(), "entropy": (inputs["entropies"] * inputs["loss_mask"]).mean()}
        return loss, summary

    def training_step(self, microbatches):
        total_loss = torch.zeros((), device="cuda")
        for microbatch in microbatches:
            input_ids = microbatch["input_ids"].cuda()
            trainer_logprobs, entropies = self.get_logprobs(input_ids)
            mb_inputs = {"loss_mask": microbatch["loss_mask"].cuda()[:, 1:], "inference_logprobs": microbatch["logprobs"].cuda()[:, 1:],
                         "advantages": microbatch["advantages"].cuda()[:, 1:], "trainer_logprobs": trainer_logprobs, "entropies": entropies}
            loss, summary = self.compute_loss(mb_inputs)
            loss.backward()
            total_loss = total_loss + loss.detach()
            for name, value in summary.items():
                self.metrics[name].append(value.cpu())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total_loss


@expected("logits", fix="no_grad", thread="PrimeIntellect-ai/verifiers#662", memory=740, held_back=True)
def train_rl_microbatches(fixed=False):
    """`entropies` are only logged, but `entropy_from_logits(logits)` is computed with gradient tracking, so the graph keeps its log-softmax
    and exponential of all tokens and the whole vocabulary. Cured by: `entropy_from_logits(logits.detach())`.
    """
    vocab_size = 16000
    trainer = RLTrainer(CausalLM(vocab_size, 192, 3).cuda(), 1.0, 0.1, 10.0, track_entropy=not fixed)
    for step in range(2):
        microbatches = [{"input_ids": torch.randint(0, vocab_size, (6, length)), "loss_mask": torch.rand(6, length) > 0.3,
                         "logprobs": -torch.rand(6, length), "advantages": torch.randn(6, length)} for length in (96, 256, 256)]
        loss = trainer.training_step(microbatches)
    return {"steps": len(trainer.metrics["entropy"]), "loss": float(loss)}


# Supervised fine-tuning logs the entropy and the accuracy of the predicted tokens.

class SFTTrainer:
    def __init__(self, model, separate_metrics, lr=2e-5):
        self.model, self.separate_metrics = model, separate_metrics
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self._metrics = {"train": defaultdict(list)}

    def token_accuracy(self, shift_logits, shift_labels):
        predictions = shift_logits.argmax(dim=-1)
        mask = shift_labels != -100
        return ((predictions == shift_labels) & mask).sum() / mask.sum()

    def compute_loss(self, inputs):
        logits = self.model(inputs["input_ids"])
        labels = F.pad(inputs["labels"], (0, 1), value=-100)[:, 1:]
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
        mode = "train"
        with torch.no_grad():
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = inputs["labels"][..., 1:].contiguous()
            per_token_entropy = entropy_from_logits(shift_logits)
            self._metrics[mode]["entropy"].append(per_token_entropy.mean().cpu())
            if not self.separate_metrics:
                self._metrics[mode]["mean_token_accuracy"].append(self.token_accuracy(shift_logits, shift_labels).cpu())
        if self.separate_metrics:
            with torch.no_grad():
                shift_logits = logits[..., :-1, :].contiguous()
                shift_labels = inputs["labels"][..., 1:].contiguous()
                self._metrics[mode]["mean_token_accuracy"].append(self.token_accuracy(shift_logits, shift_labels).cpu())
        return loss

    def train(self, batches):
        for inputs in batches:
            inputs = {name: tensor.cuda() for name, tensor in inputs.items()}
            loss = self.compute_loss(inputs)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
        return loss


@expected("logits", fix="chunk", thread="huggingface/trl#5897", memory=1650, held_back=True)
def train_sft(fixed=False):
    """`compute_loss` makes the contiguous copy `shift_logits` of the logits twice, once for the entropy and once for the accuracy; the
    second copy is redundant. Cured by: Accuracy is computed in the same block as the entropy, from the same `shift_logits`.
    """
    model = CausalLM(12000, 64, 2).cuda()
    trainer = SFTTrainer(model, separate_metrics=not fixed)
    batches = []
    for length in (256, 1600, 2180, 1900):
        input_ids = torch.randint(0, 12000, (4, length))
        labels = input_ids.clone()
        labels[:, :length // 4] = -100
        batches.append({"input_ids": input_ids, "labels": labels})
    return {"loss": float(trainer.train(batches)), "steps": len(trainer._metrics["train"]["entropy"])}


# A quantized model is fine-tuned with DoRA adapters on all linear layers.

class Linear4bit(nn.Module):
    def __init__(self, in_features, out_features, r, lora_alpha, keep_dtype):
        super().__init__()
        self.in_features, self.out_features, self.scaling, self.keep_dtype = in_features, out_features, lora_alpha / r, keep_dtype
        self.register_buffer("weight", torch.randint(0, 256, (out_features, in_features // 2), dtype=torch.uint8))
        self.register_buffer("absmax", torch.rand(out_features, 1, dtype=torch.bfloat16))
        self.lora_A, self.lora_B = nn.Linear(in_features, r, bias=False), nn.Linear(r, out_features, bias=False)
        self.lora_magnitude_vector = nn.Parameter(torch.ones(out_features))

    def dequantize(self):
        nibbles = torch.stack([self.weight >> 4, self.weight & 15], -1).flatten(1)
        return (nibbles.to(torch.bfloat16) - 8) * self.absmax

    def _get_weight_norm(self, weight, lora_weight):
        return torch.linalg.norm(weight + self.scaling * lora_weight, dim=1).to(weight.dtype)

    def _apply_dora(self, x):
        weight = self.dequantize().to(x.dtype)
        with torch.no_grad():
            weight_norm = self._get_weight_norm(weight, self.lora_B.weight @ self.lora_A.weight)
        mag_norm_scale = (self.lora_magnitude_vector / weight_norm).view(1, -1)
        result_dora = (mag_norm_scale - 1) * F.linear(x, weight) + mag_norm_scale * self.lora_B(self.lora_A(x)) * self.scaling
        return result_dora.to(x.dtype) if self.keep_dtype else result_dora

    def forward(self, x):
        with torch.no_grad():
            weight = self.dequantize()
        result = F.linear(x, weight)
        return result + self._apply_dora(x)


class MistralRMSNorm(nn.Module):
    def __init__(self, hidden_size, eps=1e-6):
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(hidden_size, dtype=torch.bfloat16), requires_grad=False), eps

    def forward(self, hidden_states):
        input_dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(input_dtype)


class MistralLayer(nn.Module):
    def __init__(self, hidden, intermediate, heads, **lora):
        super().__init__()
        self.heads = heads
        self.input_layernorm, self.post_attention_layernorm = MistralRMSNorm(hidden), MistralRMSNorm(hidden)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear4bit(hidden, hidden, **lora) for _ in range(4))
        self.gate_proj, self.up_proj = Linear4bit(hidden, intermediate, **lora), Linear4bit(hidden, intermediate, **lora)
        self.down_proj = Linear4bit(intermediate, hidden, **lora)

    def forward(self, hidden_states):
        x = self.input_layernorm(hidden_states)
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        hidden_states = hidden_states + self.o_proj(x)
        x = self.post_attention_layernorm(hidden_states)
        return hidden_states + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class QuantizedMistral(nn.Module):
    def __init__(self, vocab_size, hidden, intermediate, num_layers, **lora):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden, dtype=torch.bfloat16)
        self.layers = nn.ModuleList(MistralLayer(hidden, intermediate, 8, **lora) for _ in range(num_layers))
        self.lm_head = nn.Linear(hidden, vocab_size, bias=False, dtype=torch.bfloat16)
        for module in (self.embed_tokens, self.lm_head):
            module.requires_grad_(False)

    def forward(self, input_ids, labels):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.lm_head(x).float().flatten(0, 1), labels.flatten())


@expected("wider_results", fix="type|half|bfloat16", thread="huggingface/peft#1692", memory=1030, held_back=True)
def finetune_dora(fixed=False):
    """The magnitude vector of DoRA is float32, so `_apply_dora` returns a float32 `result_dora`; the output of the layer, the input of the
    next adapted layers and their dequantized weights become float32 as well. Cured by: `_apply_dora` returns `result_dora.to(x.dtype)`.
    """
    model = QuantizedMistral(1000, 256, 704, 40, r=12, lora_alpha=24, keep_dtype=fixed).cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for step in range(2):
        input_ids = torch.randint(0, 1000, (24, 512)).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids, input_ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"loss": float(loss)}


# Filter bank features of a corpus are computed on the GPU.

class Fbank:
    def __init__(self, device, num_bins=80, window=400, shift=160, n_fft=512):
        self.device, self.window, self.shift, self.n_fft = torch.device(device), window, shift, n_fft
        self.window_function = torch.hann_window(window, device=device)
        self.mel_banks = torch.rand(n_fft // 2 + 1, num_bins, device=device)

    def get_frames(self, wave):
        return wave.unfold(0, self.window, self.shift)

    def compute_features(self, frames):
        frames = frames.to(self.device)
        frames = (frames - frames.mean(1, keepdim=True)) * self.window_function
        power_spectrum = torch.fft.rfft(frames, self.n_fft).abs().pow(2)
        return (power_spectrum @ self.mel_banks).clamp(min=1e-10).log()

    def __call__(self, waves, chunk_size):
        strided = [self.get_frames(wave) for wave in waves]
        frames = torch.cat(strided, dim=0)
        features = torch.cat([self.compute_features(chunk).cpu() for chunk in frames.split(chunk_size)])
        return features.split([len(s) for s in strided])


class KaldifeatFbank:
    def __init__(self, device, waves_to_device, chunk_size=1000):
        self.device, self.waves_to_device, self.chunk_size = device, waves_to_device, chunk_size
        self.extractor = Fbank(device)

    def extract_batch(self, samples):
        samples = [torch.from_numpy(sample).squeeze() for sample in samples]
        if self.waves_to_device:
            samples = [sample.to(self.device) for sample in samples]
        return [feats.numpy() for feats in self.extractor(samples, self.chunk_size)]


class CutSet:
    def __init__(self, durations, sampling_rate=16000):
        self.durations, self.sampling_rate = durations, sampling_rate

    def batches(self, batch_duration):
        batch, total = [], 0
        for duration in self.durations:
            if batch and total + duration > batch_duration:
                yield batch
                batch, total = [], 0
            batch.append(np.zeros((1, int(duration * self.sampling_rate)), np.float32))
            total += duration
        yield batch


@expected("large_result", fix="host|part", thread="lhotse-speech/lhotse#498", memory=450, held_back=True)
def compute_fbank_gigaspeech(fixed=False):
    """`extract` moves whole utterances to the GPU, and one of them is a recording of great length. Cured by: The extractor leaves the waves
    on the CPU and moves frames to the GPU chunk by chunk.
    """
    extractor = KaldifeatFbank("cuda", waves_to_device=not fixed)
    cut_set = CutSet([12.5, 8.0, 31.0, 90.0, 14.0, 45 * 60.0, 21.0, 6.5])
    num_frames = 0
    with torch.no_grad():
        for samples in cut_set.batches(batch_duration=600.0):
            num_frames += sum(len(feats) for feats in extractor.extract_batch(samples))
    return {"frames": num_frames}


# Question and answer pairs are generated from the passages of a knowledge base.

class CachedLayer(DecoderLayer):
    def forward(self, x, past=None):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv_proj(self.input_layernorm(x)).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        x = x + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=past is None).transpose(1, 2).flatten(2))
        return x + self.down_proj(F.silu(self.up_proj(self.post_attention_layernorm(x)))), (k, v)


class QAGenerator(nn.Module):
    def __init__(self, vocab_size=16000, hidden=256, num_layers=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden)
        self.layers = nn.ModuleList(CachedLayer(hidden, 4) for _ in range(num_layers))
        self.norm, self.lm_head = nn.RMSNorm(hidden), nn.Linear(hidden, vocab_size, bias=False)

    def forward(self, input_ids, past_key_values):
        x, cache = self.embed_tokens(input_ids), []
        for layer, past in zip(self.layers, past_key_values):
            x, present = layer(x, past)
            cache.append(present)
        return self.lm_head(self.norm(x)).float(), cache

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens):
        past, tokens = [None] * len(self.layers), input_ids
        for _ in range(max_new_tokens):
            logits, past = self(tokens, past)
            tokens = logits[:, -1].argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, tokens], 1)
        return input_ids


class QATokenizer:
    model_max_length = int(1e30)

    def __call__(self, texts, padding=True, truncation=True, max_length=None):
        limit = min(max_length or self.model_max_length, self.model_max_length)
        rows = [[hash(word) % 16000 for word in text.split()][:limit] for text in texts]
        longest = max(map(len, rows))
        return torch.tensor([[0] * (longest - len(row)) + row for row in rows])


def generate_question_answer_pairs(documents, model, tokenizer, max_input_tokens=None):
    batch_texts = [f"Write one question and its answer about this passage : {passage}" for passage in documents]
    model_inputs = tokenizer(batch_texts, padding=True, truncation=True, max_length=max_input_tokens).cuda()
    generated_ids = model.generate(model_inputs, max_new_tokens=24)
    return generated_ids[:, model_inputs.shape[1]:].tolist()


@expected("larger_step", fix="half the length|as large as", thread="arcee-ai/DALM#99", memory=1100, held_back=True)
def generate_qa_from_dataset(fixed=False):
    """`tokenizer(..., truncation=True)` has no `max_length`, so a single long passage of a batch of eight is not truncated and all of the
    batch is padded to it in `model.generate`. Cured by: `max_length=max_input_tokens` of 512 in the call of the tokenizer.
    """
    model, tokenizer = QAGenerator().cuda().half().eval(), QATokenizer()
    rng = np.random.default_rng(0)
    lengths = rng.integers(120, 420, 32)
    lengths[21] = 2600
    passages = [" ".join(f"w{word}" for word in rng.integers(0, 5000, length)) for length in lengths]
    pairs = []
    for begin in range(0, len(passages), 8):
        pairs += generate_question_answer_pairs(passages[begin:begin + 8], model, tokenizer, max_input_tokens=512 if fixed else None)
    return {"pairs": len(pairs)}


# A chat model is rated by an emotional intelligence benchmark, in several iterations.

def load_model(model_path, device="cuda"):
    sizes = {"openchat-gemma": (16000, 768, 8), "hermes-solar": (16000, 640, 10)}
    vocab_size, hidden, num_layers = sizes[model_path]
    with torch.device(device):
        model = CausalLM(vocab_size, hidden, num_layers, heads=8)
    return model.eval(), QATokenizer()


def run_query(model, tokenizer, prompt, completion_tokens):
    input_ids = tokenizer([prompt]).cuda()
    with torch.no_grad():
        for _ in range(completion_tokens):
            next_token = model(input_ids)[:, -1].argmax(-1, keepdim=True)
            input_ids = torch.cat([input_ids, next_token], 1)
    return input_ids[0].tolist()


def process_question(question, model, tokenizer, results, run_iter):
    answer = run_query(model, tokenizer, question, completion_tokens=6)
    results[run_iter].append(len(answer))


def cleanup(model, tokenizer):
    del model
    del tokenizer
    gc.collect()
    torch.cuda.empty_cache()


def run_generic_benchmark(model_path, n_iterations, questions, delete_each_iteration):
    results = defaultdict(list)
    model = tokenizer = None
    for run_iter in range(1, n_iterations + 1):
        model, tokenizer = load_model(model_path)
        for question in questions:
            process_question(question, model, tokenizer, results, run_iter)
        if delete_each_iteration:
            del model, tokenizer
            model = tokenizer = None
            gc.collect()
            torch.cuda.empty_cache()
    cleanup(model, tokenizer)
    return results


@expected("several_models", fix=r"\bdel\b", thread="EQ-bench/EQ-Bench#29", memory=600, held_back=True)
def run_emotion_benchmark(fixed=False):
    """`load_model` is called in every iteration, but the model is only deleted once per run (`cleanup`), so the model of the previous
    iteration is still held by `model` while the next one is loaded. Cured by: The model is deleted at the end of each iteration.
    """
    questions = [" ".join(["feeling"] * length) for length in (60, 85, 40)]
    answers = 0
    for model_path, n_iterations in (("openchat-gemma", 2), ("hermes-solar", 1)):
        results = run_generic_benchmark(model_path, n_iterations, questions, delete_each_iteration=fixed)
        answers += sum(len(run) for run in results.values())
    return {"answers": answers}


# Reviews are scored with a trained text classifier.

class ParallelCNN(nn.Module):
    def __init__(self, vocab_size, embedding_size, num_filters, output_size):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, embedding_size)
        self.parallel_conv1d = nn.ModuleList(nn.Conv1d(embedding_size, num_filters, width, padding="same") for width in (2, 3, 4, 5))
        self.fc_stack = nn.Sequential(nn.Linear(4 * num_filters, output_size), nn.ReLU(), nn.Linear(output_size, output_size), nn.ReLU())

    def forward(self, inputs):
        embedded_sequence = self.embedding(inputs).transpose(1, 2)
        hidden = [F.relu(conv(embedded_sequence)).amax(-1) for conv in self.parallel_conv1d]
        return self.fc_stack(torch.cat(hidden, -1))


class ECD(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.input_features = nn.ModuleDict({"review": ParallelCNN(10000, 128, 128, 256)})
        self.output_features = nn.ModuleDict({"stars": nn.Linear(256, num_classes)})

    def predict_step(self, inputs):
        combined = sum(encoder(inputs[name]) for name, encoder in self.input_features.items())
        predictions = {}
        for name, decoder in self.output_features.items():
            logits = decoder(combined)
            predictions[name] = {"predictions": logits.argmax(-1), "probabilities": logits.softmax(-1), "logits": logits}
        return predictions


class Batcher:
    def __init__(self, dataset, batch_size):
        self.dataset, self.batch_size, self.index = dataset, batch_size, 0

    def last_batch(self):
        return self.index >= len(self.dataset["review"])

    def next_batch(self):
        batch = {column: values[self.index:self.index + self.batch_size] for column, values in self.dataset.items()}
        self.index += self.batch_size
        return batch


class Predictor:
    def __init__(self, model, batch_size=128, device="cuda"):
        self.model, self.batch_size, self.device = model.to(device), batch_size, device

    def batch_predict(self, dataset):
        self.model.eval()
        batcher, predictions = Batcher(dataset, self.batch_size), defaultdict(list)
        while not batcher.last_batch():
            batch = batcher.next_batch()
            inputs = {name: torch.from_numpy(batch[name]).to(self.device) for name in self.model.input_features}
            self._accumulate_preds(self.model.predict_step(inputs), predictions)
        return {key: torch.cat(values).clone().detach().cpu().numpy() for key, values in predictions.items()}

    def _accumulate_preds(self, preds, predictions):
        for of_name, of_preds in preds.items():
            for pred_name, pred_values in of_preds.items():
                if pred_name != "logits":
                    predictions[f"{of_name}_{pred_name}"].append(pred_values)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="ludwig-ai/ludwig#1739", memory=800, held_back=True)
def predict_review_scores(fixed=False):
    """`Predictor.batch_predict` runs without `torch.no_grad`, and the values collected in `predictions` keep the graph of every batch.
    Cured by: `torch.no_grad()` around the prediction loop.
    """
    predictor = Predictor(ECD(num_classes=5))
    dataset = {"review": np.random.randint(0, 10000, (128 * 16, 200))}
    if fixed:
        with torch.no_grad():
            predictions = predictor.batch_predict(dataset)
    else:
        predictions = predictor.batch_predict(dataset)
    return {"reviews": len(predictions["stars_probabilities"])}
