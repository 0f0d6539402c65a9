"""Programs after public threads: language and speech, vision and diffusion, graphs and science, ordinary training scripts."""
import copy

import numpy as np
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import Adafactor, GPT2Config, GPT2LMHeadModel

from expected import expected


# Summaries of news articles are made with beam search.

class Attention(nn.Module):
    def __init__(self, embed_dim, num_heads, encoder_decoder_attention=False):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, embed_dim // num_heads
        self.encoder_decoder_attention = encoder_decoder_attention
        self.q_proj, self.k_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)
        self.v_proj, self.out_proj = nn.Linear(embed_dim, embed_dim), nn.Linear(embed_dim, embed_dim)

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, query, key=None, cache=None):
        rows, length, dim = query.shape
        q = self.split(self.q_proj(query))
        if cache is not None and self.encoder_decoder_attention and "prev_key" in cache:
            k, v = cache["prev_key"], cache["prev_value"]
        else:
            source = key if self.encoder_decoder_attention else query
            k, v = self.split(self.k_proj(source)).contiguous(), self.split(self.v_proj(source)).contiguous()
            if cache is not None and "prev_key" in cache:
                k, v = torch.cat([cache["prev_key"], k], 2), torch.cat([cache["prev_value"], v], 2)
            if cache is not None:
                cache["prev_key"], cache["prev_value"] = k, v
        if k.shape[0] != rows:
            beams = rows // k.shape[0]
            q = q.view(-1, beams, self.num_heads, length, self.head_dim).transpose(1, 2).flatten(2, 3)
            out = F.scaled_dot_product_attention(q, k, v)
            out = out.view(-1, self.num_heads, beams, length, self.head_dim).transpose(1, 2).flatten(0, 1)
        else:
            out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).reshape(rows, length, dim))


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.self_attn, self.norm1, self.norm2 = Attention(dim, heads), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.fc1, self.fc2 = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class DecoderLayer(EncoderLayer):
    def __init__(self, dim, heads):
        super().__init__(dim, heads)
        self.encoder_attn, self.norm3 = Attention(dim, heads, True), nn.LayerNorm(dim)

    def forward(self, x, encoder_hidden_states, layer_state):
        x = self.norm1(x + self.self_attn(x, cache=layer_state["self"]))
        x = self.norm3(x + self.encoder_attn(x, encoder_hidden_states, layer_state["encoder_decoder"]))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Summarizer(nn.Module):
    def __init__(self, vocab=12000, dim=256, layers=6, heads=8):
        super().__init__()
        self.shared, self.positions = nn.Embedding(vocab, dim), nn.Embedding(1024, dim)
        self.encoder = nn.ModuleList(EncoderLayer(dim, heads) for _ in range(layers))
        self.decoder = nn.ModuleList(DecoderLayer(dim, heads) for _ in range(layers))

    def encode(self, input_ids):
        x = self.shared(input_ids) + self.positions.weight[:input_ids.shape[1]]
        for layer in self.encoder:
            x = layer(x)
        return x

    def decode(self, token, step, encoder_hidden_states, past):
        x = self.shared(token)[:, None] + self.positions.weight[step]
        for layer, layer_state in zip(self.decoder, past):
            x = layer(x, encoder_hidden_states, layer_state)
        return F.linear(x[:, -1], self.shared.weight)

    @torch.no_grad()
    def generate(self, input_ids, num_beams, max_length, share_source):
        batch_size = len(input_ids)
        encoder_hidden_states = self.encode(input_ids)
        if not share_source:
            expanded = torch.arange(batch_size, device=input_ids.device).repeat_interleave(num_beams)
            encoder_hidden_states = encoder_hidden_states.index_select(0, expanded)
        past = [{"self": {}, "encoder_decoder": {}} for _ in self.decoder]
        token = torch.zeros(batch_size * num_beams, dtype=torch.long, device=input_ids.device)
        beam_scores = torch.zeros(batch_size, num_beams, device=input_ids.device)
        offsets = torch.arange(batch_size, device=input_ids.device)[:, None] * num_beams
        decoded = token[:, None]
        for step in range(max_length):
            scores = self.decode(token, step, encoder_hidden_states, past).log_softmax(-1)
            vocab = scores.shape[1]
            scores = (scores.view(batch_size, num_beams, vocab) + beam_scores[..., None]).view(batch_size, -1)
            beam_scores, index = scores.topk(num_beams)
            beam_idx = (torch.div(index, vocab, rounding_mode="floor") + offsets).view(-1)
            token = (index % vocab).view(-1)
            decoded = torch.cat([decoded.index_select(0, beam_idx), token[:, None]], 1)
            for layer_state in past:
                for attn_key, attn_cache in layer_state.items():
                    if attn_key == "encoder_decoder" and share_source:
                        continue
                    for name, buffer in attn_cache.items():
                        attn_cache[name] = buffer.index_select(0, beam_idx)
        return decoded


@expected("kept_tensors", fix="num_beams|article", thread="microsoft/fastseq#6", memory=800, held_back=True)
def summarize_articles(fixed=False):
    """The cached keys and values of `encoder_attn` (`prev_key`, `prev_value`) are computed from encoder outputs that were repeated for
    every beam, so that the cache of the cross-attention holds the same content `num_beams` times. Cured by: The cross-attention cache has
    one row per article instead of one per beam (`beam_size` times smaller), queries of the beams of an article share it, and it is not
    reordered.
    """
    device = torch.device("cuda")
    model = Summarizer().to(device).eval()
    articles = torch.randint(0, 12000, (64, 640))
    summaries = []
    for batch in articles.split(32):
        decoded = model.generate(batch.to(device), num_beams=4, max_length=20, share_source=fixed)
        summaries.append(decoded.cpu())
    return torch.cat(summaries).shape


# Speech recognition with a transducer.

class _RNNT(torch.autograd.Function):
    @staticmethod
    def forward(ctx, acts, labels, blank):
        grads = acts.log_softmax(-1)
        emit = grads[:, :, :-1].gather(3, labels[:, None, :, None].expand(-1, acts.shape[1], -1, 1)).squeeze(3)
        costs = -(grads[:, :, -1, blank].sum(1) + emit.mean(1).sum(1))
        ctx.grads = grads.exp_()
        return costs.mean()

    @staticmethod
    def backward(ctx, grad_output):
        return ctx.grads.mul_(grad_output), None, None


class TransducerModel(nn.Module):
    def __init__(self, n_mels, vocab, hidden=256, joint=256):
        super().__init__()
        self.subsample = nn.Conv1d(n_mels, hidden, 5, stride=4, padding=2)
        self.encoder = nn.LSTM(hidden, hidden, 2, batch_first=True)
        self.embed, self.predictor = nn.Embedding(vocab, hidden), nn.LSTM(hidden, hidden, batch_first=True)
        self.lin_enc, self.lin_dec = nn.Linear(hidden, joint), nn.Linear(hidden, joint)
        self.lin_out = nn.Linear(joint, vocab)

    def forward(self, speech, text):
        enc, _ = self.encoder(F.relu(self.subsample(speech.transpose(1, 2))).transpose(1, 2))
        dec, _ = self.predictor(self.embed(F.pad(text, (1, 0))))
        joint = torch.tanh(self.lin_enc(enc)[:, :, None] + self.lin_dec(dec)[:, None])
        loss = _RNNT.apply(self.lin_out(joint), text, 0)
        stats = {"loss": loss.detach(), "frames": enc.shape[1]}
        return loss, stats, len(speech)


class Trainer:
    def __init__(self, model, optimizer, grad_clip=5.0, release=False):
        self.model, self.optimizer, self.grad_clip, self.release = model, optimizer, grad_clip, release
        self.reporter = []

    def train_one_epoch(self, iterator):
        self.model.train()
        for utt_id, batch in enumerate(iterator):
            batch = {name: value.cuda(non_blocking=True) for name, value in batch.items()}
            retval = self.model(**batch)
            loss, stats, weight = retval
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.reporter.append((float(stats["loss"]), weight))
            if self.release:
                del loss, retval, stats


@expected("outputs_of_earlier_step", fix=r"\bdel\b", thread="espnet/espnet#5921", memory=880, held_back=True)
def train_transducer(fixed=False):
    """`loss` (and `retval`) of the previous batch is still referenced while the forward pass of the next batch runs, so that what its graph
    holds (here `ctx.grads` of the transducer loss) stays in memory together with the new batch. Cured by: The reference to the loss is
    deleted at the end of each iteration.
    """
    model = TransducerModel(80, 2000).cuda()
    trainer = Trainer(model, torch.optim.Adam(model.parameters(), lr=1e-3), release=fixed)
    lengths = [(240, 12), (512, 26), (512, 26), (512, 26)]
    iterator = [{"speech": torch.randn(8, frames, 80), "text": torch.randint(1, 2000, (8, tokens))} for frames, tokens in lengths]
    for epoch in range(2):
        trainer.train_one_epoch(iterator)
    return len(trainer.reporter)


# Preference tuning of a language model.

def selective_logps(model, input_ids, completion_mask):
    logits = model(input_ids=input_ids).logits[:, :-1]
    logps = logits.log_softmax(-1).gather(2, input_ids[:, 1:, None]).squeeze(2)
    return (logps * completion_mask[:, 1:]).sum(1)


class PreferenceDataset:
    def __init__(self, pairs, length, vocab):
        self.input_ids = torch.randint(0, vocab, (pairs, 2, length))
        self.completion_mask = torch.ones(pairs, 2, length)
        self.completion_mask[:, :, :length // 3] = 0
        self.ref_logps = None

    def batches(self, size):
        for begin in range(0, len(self.input_ids), size):
            rows = slice(begin, begin + size)
            refs = None if self.ref_logps is None else self.ref_logps[rows].cuda()
            yield self.input_ids[rows].flatten(0, 1).cuda(), self.completion_mask[rows].flatten(0, 1).cuda(), refs


class DPOTrainer:
    def __init__(self, model, train_dataset, beta=0.1, precompute_ref_log_probs=True, keep_reference=True):
        self.model, self.train_dataset, self.beta = model.cuda(), train_dataset, beta
        self.precompute_ref_log_probs = precompute_ref_log_probs
        if keep_reference:
            self.ref_model = copy.deepcopy(self.model).eval().requires_grad_(False)
        else:
            self.ref_model = None
        self.optimizer = Adafactor(self.model.parameters(), lr=5e-7, scale_parameter=False, relative_step=False, warmup_init=False)
        if precompute_ref_log_probs:
            self._precompute_ref_logps()

    @torch.no_grad()
    def _precompute_ref_logps(self):
        reference = self.ref_model if self.ref_model is not None else self.model
        training = reference.training
        reference.eval()
        logps = [selective_logps(reference, ids, mask).view(-1, 2).cpu() for ids, mask, _ in self.train_dataset.batches(2)]
        reference.train(training)
        self.train_dataset.ref_logps = torch.cat(logps)

    def train(self):
        self.model.train()
        for input_ids, completion_mask, ref_logps in self.train_dataset.batches(2):
            if ref_logps is None:
                with torch.no_grad():
                    ref_logps = selective_logps(self.ref_model, input_ids, completion_mask).view(-1, 2)
            logps = selective_logps(self.model, input_ids, completion_mask).view(-1, 2)
            margin = (logps - ref_logps)[:, 0] - (logps - ref_logps)[:, 1]
            loss = -F.logsigmoid(self.beta * margin).mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@expected("several_models", fix=r"\bdel\b", thread="huggingface/trl#5542", memory=1050, held_back=True)
def train_dpo_again(fixed=False):
    """The trainer makes and keeps `ref_model`, a full copy of the model, although `precompute_ref_log_probs` is set and the copy is not
    needed once the reference log probabilities lie in the dataset. Cured by: With `precompute_ref_log_probs` no `ref_model` is loaded (it
    is `None`); the log probabilities are computed with the model itself before training.
    """
    config = GPT2Config(vocab_size=8000, n_positions=256, n_embd=768, n_layer=10, n_head=12, use_cache=False)
    trainer = DPOTrainer(GPT2LMHeadModel(config), PreferenceDataset(12, 96, 8000), keep_reference=not fixed)
    trainer.train()


# Audio from text: a latent transformer and the decoder of an audio autoencoder.

class Snake(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.zeros(1, channels, 1))

    def forward(self, x):
        alpha = self.alpha.exp()
        return x + (alpha * x).sin().pow(2) / (alpha + 1e-9)


class OobleckResidualUnit(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.snake1, self.snake2 = Snake(channels), Snake(channels)
        self.conv1 = nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation)
        self.conv2 = nn.Conv1d(channels, channels, 1)

    def forward(self, x):
        return x + self.conv2(self.snake2(self.conv1(self.snake1(x))))


class OobleckDecoder(nn.Module):
    def __init__(self, channels=16, latent=64, strides=(8, 8, 4, 4, 2), multiples=(16, 8, 4, 2, 1)):
        super().__init__()
        self.conv1 = nn.Conv1d(latent, channels * multiples[0], 7, padding=3)
        blocks, width = [], channels * multiples[0]
        for stride, multiple in zip(strides, multiples):
            out = channels * multiple
            blocks += [Snake(width), nn.ConvTranspose1d(width, out, 2 * stride, stride, padding=stride // 2)]
            blocks += [OobleckResidualUnit(out, dilation) for dilation in (1, 3, 9)]
            width = out
        self.block = nn.Sequential(*blocks)
        self.snake1, self.conv2 = Snake(width), nn.Conv1d(width, 2, 7, padding=3, bias=False)

    def forward(self, z):
        return self.conv2(self.snake1(self.block(self.conv1(z))))


class TangoTransformer(nn.Module):
    def __init__(self, latent=64, dim=512, layers=8):
        super().__init__()
        self.proj_in, self.proj_out = nn.Linear(latent, dim), nn.Linear(dim, latent)
        self.text = nn.Embedding(4000, dim)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(dim, 8, 4 * dim, 0.0, batch_first=True, norm_first=True) for _ in range(layers))

    @torch.no_grad()
    def sample(self, prompt, duration, num_inference_steps, num_samples):
        latents = torch.randn(num_samples, int(duration * 44100 / 2048), 64, device="cuda")
        text = self.text(prompt)[None].expand(num_samples, -1, -1)
        for _ in range(num_inference_steps):
            x = torch.cat([text, self.proj_in(latents)], 1)
            for layer in self.layers:
                x = layer(x)
            latents = latents - self.proj_out(x[:, text.shape[1]:]) / num_inference_steps
        return latents


class VAEDecodeAndPlay:
    @torch.no_grad()
    def decode(self, vae, latents):
        return torch.cat([vae(clip.t()[None]).cpu() for clip in latents])

    @torch.no_grad()
    def decode_tiled(self, vae, latents, tile_size=32):
        waves = []
        for clip in latents:
            waves.append(torch.cat([vae(tile.t()[None]).cpu() for tile in clip.split(tile_size)], 2))
        return torch.cat(waves)


@expected("batch_without_gradients", fix="split|windows", thread="LucipherDev/ComfyUI-TangoFlux#8", memory=420, held_back=True)
def generate_soundtrack(fixed=False):
    """`decode` passes the latents of the whole clip through the decoder of the VAE at once, and its activations at audio rate exceed the
    memory that is left. Cured by: Tiled decoding: `decode_tiled` decodes `tile_size` latent frames at a time and moves each piece to the
    CPU.
    """
    model, vae = TangoTransformer().cuda().eval(), OobleckDecoder().cuda().eval()
    prompt = torch.randint(0, 4000, (48,), device="cuda")
    latents = model.sample(prompt, duration=30, num_inference_steps=8, num_samples=2)
    node = VAEDecodeAndPlay()
    waves = node.decode_tiled(vae, latents) if fixed else node.decode(vae, latents)
    return [wave[:, :30 * 44100].shape for wave in waves]


# An image model is adapted with low-rank layers and validated at the resolution people want.

class LoraLinear(nn.Module):
    def __init__(self, dim_in, dim_out, rank=8):
        super().__init__()
        self.base = nn.Linear(dim_in, dim_out).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(dim_in, rank, bias=False), nn.Linear(rank, dim_out, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class LinearAttentionBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = LoraLinear(dim, 3 * dim), LoraLinear(dim, dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)).requires_grad_(False)

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k = F.relu(q), F.relu(k)
        x = x + self.out(q @ (k.transpose(1, 2) @ v) / x.shape[1])
        return x + self.ff(self.norm2(x))


class SanaTransformer(nn.Module):
    def __init__(self, channels=32, dim=512, depth=10):
        super().__init__()
        self.patch, self.time = nn.Linear(channels, dim), nn.Linear(1, dim)
        self.blocks = nn.ModuleList(LinearAttentionBlock(dim) for _ in range(depth))
        self.proj_out = nn.Linear(dim, channels)

    def forward(self, latents, timestep):
        b, c, h, w = latents.shape
        x = self.patch(latents.flatten(2).transpose(1, 2)) + self.time(timestep[:, None])[:, None]
        for block in self.blocks:
            x = block(x)
        return self.proj_out(x).transpose(1, 2).reshape(b, c, h, w)


class AutoencoderDC(nn.Module):
    def __init__(self, latent_channels=32, widths=(256, 192, 128, 64, 32, 16)):
        super().__init__()
        layers = [nn.Conv2d(latent_channels, widths[0], 3, padding=1)]
        for wide, narrow in zip(widths, widths[1:]):
            layers += [nn.SiLU(), nn.Conv2d(wide, narrow * 4, 3, padding=1), nn.PixelShuffle(2), nn.GroupNorm(8, narrow)]
        self.decoder = nn.Sequential(*layers, nn.SiLU(), nn.Conv2d(widths[-1], 3, 3, padding=1))
        self.use_tiling, self.tile, self.stride = False, 16, 14

    def enable_tiling(self):
        self.use_tiling = True

    def tiled_decode(self, z):
        rows, ratio = [], 32
        for i in range(0, z.shape[2], self.stride):
            row = [self.decoder(z[:, :, i:i + self.tile, j:j + self.tile]) for j in range(0, z.shape[3], self.stride)]
            rows.append(torch.cat([tile[:, :, :, :self.stride * ratio] for tile in row], 3)[:, :, :self.stride * ratio])
        return torch.cat(rows, 2)[:, :, :z.shape[2] * ratio, :z.shape[3] * ratio]

    def decode(self, z):
        return self.tiled_decode(z) if self.use_tiling else self.decoder(z)


@torch.no_grad()
def log_validation(transformer, vae, resolution, num_inference_steps=6):
    transformer.eval()
    latents = torch.randn(1, 32, resolution // 32, resolution // 32, device="cuda")
    for step in range(num_inference_steps):
        timestep = torch.full((1,), 1 - step / num_inference_steps, device="cuda")
        latents = latents - transformer(latents, timestep) / num_inference_steps
    image = vae.decode(latents)
    transformer.train()
    return (image / 2 + 0.5).clamp(0, 1).cpu()


@expected("batch_without_gradients", fix="tiles", thread="huggingface/diffusers#10583", memory=640, held_back=True)
def finetune_sana(fixed=False):
    """In the validation of the training script the VAE decodes the latents of the high-resolution image without tiling, beside the model
    being trained, and the activations of the decoder at full resolution do not fit. Cured by: `enable_tiling` of the VAE (option
    `--enable_vae_tiling`), so that it decodes tile by tile.
    """
    transformer = SanaTransformer().cuda()
    vae = AutoencoderDC().requires_grad_(False).cuda()
    if fixed:
        vae.enable_tiling()
    optimizer = torch.optim.AdamW([p for p in transformer.parameters() if p.requires_grad], lr=1e-4)
    latents_cache = torch.randn(8, 32, 32, 32)
    for step in range(8):
        model_input = latents_cache[step:step + 1].cuda()
        noise, sigma = torch.randn_like(model_input), torch.rand(1, device="cuda")
        noisy = (1 - sigma) * model_input + sigma * noise
        loss = F.mse_loss(transformer(noisy, sigma), noise - model_input)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 4 == 3:
            log_validation(transformer, vae, 2048)


# Super-resolution is tested on photographs.

class ResBlock(nn.Module):
    def __init__(self, n_feats, res_scale=1.0):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(n_feats, n_feats, 3, padding=1), nn.ReLU(True), nn.Conv2d(n_feats, n_feats, 3, padding=1))
        self.res_scale = res_scale

    def forward(self, x):
        return x + self.res_scale * self.body(x)


class EDSR(nn.Module):
    def __init__(self, scale, n_resblocks=16, n_feats=64):
        super().__init__()
        self.head = nn.Conv2d(3, n_feats, 3, padding=1)
        self.body = nn.Sequential(*[ResBlock(n_feats) for _ in range(n_resblocks)], nn.Conv2d(n_feats, n_feats, 3, padding=1))
        self.tail = nn.Sequential(nn.Conv2d(n_feats, n_feats * scale ** 2, 3, padding=1), nn.PixelShuffle(scale), nn.Conv2d(n_feats, 3, 3, padding=1))

    def forward(self, x):
        x = self.head(x)
        return self.tail(self.body(x) + x)


class SRModel(nn.Module):
    def __init__(self, scale, chop):
        super().__init__()
        self.model, self.scale, self.chop = EDSR(scale), scale, chop

    def forward(self, x):
        return self.forward_chop(x) if self.chop and not self.training else self.model(x)

    def forward_chop(self, x, shave=10, min_size=80000):
        height, width = x.shape[2:]
        top, left = height // 2, width // 2
        tall, wide = top + shave, left + shave
        run = self.model if tall * wide < min_size else lambda part: self.forward_chop(part, shave, min_size)
        s, output = self.scale, x.new_empty(len(x), 3, self.scale * height, self.scale * width)
        for lower in (False, True):
            rows = slice(height - tall, height) if lower else slice(0, tall)
            for right in (False, True):
                columns = slice(width - wide, width) if right else slice(0, wide)
                patch = run(x[:, :, rows, columns])
                patch = patch[:, :, s * (top - rows.start):] if lower else patch[:, :, :s * top]
                patch = patch[..., s * (left - columns.start):] if right else patch[..., :s * left]
                target = output[:, :, s * top:] if lower else output[:, :, :s * top]
                (target[..., s * left:] if right else target[..., :s * left]).copy_(patch)
        return output


@expected("batch_without_gradients", fix="tiles", thread="sanghyun-son/EDSR-PyTorch#6", memory=850, held_back=True)
def test_edsr(fixed=False):
    """At test time the whole image goes through the network in one forward pass, so that feature maps of all `n_feats` channels exist at
    full (and upscaled) size. Cured by: `forward_chop`: the image is cut into overlapping patches (`shave`), which are processed one after
    the other and merged.
    """
    model = SRModel(2, chop=fixed).cuda().eval()
    psnr = []
    for h, w in [(360, 480), (400, 600), (540, 960), (480, 640)]:
        hr = torch.rand(1, 3, 2 * h, 2 * w) * 255
        lr = F.interpolate(hr, scale_factor=0.5, mode="bilinear")
        with torch.no_grad():
            sr = model(lr.cuda())
        sr = sr.clamp(0, 255).round().cpu()
        psnr.append(-10 * torch.log10(((sr - hr) / 255).pow(2).mean() + 1e-9))
    return len(psnr)


# Representations of point clouds are learned from matching points of two views.

def pdist(A, B):
    difference = A[:, None] - B[None]
    return difference.square().sum(-1).add(1e-7).sqrt()


class PointBackbone(nn.Module):
    def __init__(self, out_dim=32):
        super().__init__()
        self.local = nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 128), nn.ReLU())
        self.head = nn.Sequential(nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, out_dim))

    def forward(self, points):
        x = self.local(points)
        x = torch.cat([x, x.amax(1, keepdim=True).expand_as(x)], 2)
        return F.normalize(self.head(x), dim=2).flatten(0, 1)


class ContrastiveLossTrainer:
    def __init__(self, model, npos):
        self.model, self.npos = model, npos
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.8, weight_decay=1e-4)

    def draw_positives(self, F0, F1, pos_pairs):
        chosen = pos_pairs[torch.randperm(len(pos_pairs))[:self.npos].cuda()]
        return F0[chosen[:, 0]], F1[chosen[:, 1]]

    def train_iter(self, data):
        F0, F1 = self.model(data["points0"].cuda()), self.model(data["points1"].cuda())
        pos_pairs = data["pairs"].cuda()
        loss = self.loss(F0, F1, pos_pairs)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


class HardestContrastiveLossTrainer(ContrastiveLossTrainer):
    num_hn_samples, pos_thresh, neg_thresh = 1024, 0.1, 1.4

    def loss(self, F0, F1, pos_pairs):
        posF0, posF1 = self.draw_positives(F0, F1, pos_pairs)
        negatives = [feats[torch.randperm(len(feats))[:self.num_hn_samples].cuda()] for feats in (F1, F0)]
        hardest = [pdist(feats, others).amin(1) for feats, others in zip((posF0, posF1), negatives)]
        pos_loss = ((posF0 - posF1).square().sum(1) - self.pos_thresh).clamp(min=0).mean()
        neg_loss = sum((self.neg_thresh - closest).clamp(min=0).square().mean() for closest in hardest)
        return pos_loss + neg_loss / 2


class PointNCELossTrainer(ContrastiveLossTrainer):
    T = 0.07

    def loss(self, F0, F1, pos_pairs):
        q, k = self.draw_positives(F0, F1, pos_pairs)
        return F.cross_entropy(q @ k.t() / self.T, torch.arange(self.npos, device=q.device))


@expected("all_pairs", fix="part|split", thread="facebookresearch/PointContrast#11", memory=1000, held_back=True)
def pretrain_pointcontrast(fixed=False):
    """`pdist` subtracts `A.unsqueeze(1)` and `B.unsqueeze(0)`, which materializes a tensor of points x points x channels. Cured by: Train
    with `PointNCELossTrainer` instead of the hardest-contrastive loss, which needs only the matrix of dot products.
    """
    model = PointBackbone().cuda()
    trainer_class = PointNCELossTrainer if fixed else HardestContrastiveLossTrainer
    trainer = trainer_class(model, npos=3072)
    for _ in range(6):
        index = torch.randint(0, 4 * 4096, (8192,))
        trainer.train_iter({"points0": torch.randn(4, 4096, 6), "points1": torch.randn(4, 4096, 6), "pairs": torch.stack([index, index], 1)})


# Detection of the many small objects in aerial images.

def pairwise_iou(boxes1, boxes2):
    overlap = torch.minimum(boxes1[:, None, 2:], boxes2[None, :, 2:]).sub_(torch.maximum(boxes1[:, None, :2], boxes2[None, :, :2]))
    inter = overlap.clamp_(min=0).prod(-1)
    del overlap
    area1, area2 = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (boxes1, boxes2)]
    union = area1[:, None] + area2 - inter
    return inter / union.clamp_(min=1e-6)


class Matcher:
    def __init__(self, low, high, streaming=False):
        self.low, self.high, self.streaming = low, high, streaming

    def __call__(self, gt_boxes, anchors):
        if self.streaming:
            matched_vals = torch.full((len(anchors),), -1.0, device=anchors.device)
            matches = torch.zeros(len(anchors), dtype=torch.long, device=anchors.device)
            best = torch.zeros(len(gt_boxes), device=anchors.device)
            for i in range(len(gt_boxes)):
                iou = pairwise_iou(gt_boxes[i:i + 1], anchors)[0]
                better = iou > matched_vals
                matched_vals, matches = torch.where(better, iou, matched_vals), torch.where(better, i, matches)
                best[i] = iou.max()
        else:
            match_quality_matrix = pairwise_iou(gt_boxes, anchors)
            matched_vals, matches = match_quality_matrix.max(dim=0)
            best = match_quality_matrix.max(dim=1).values
        labels = torch.where(matched_vals >= self.high, 1.0, torch.where(matched_vals < self.low, 0.0, -1.0))
        return matches, torch.where(matched_vals >= best[matches], torch.ones_like(labels), labels)


class RPN(nn.Module):
    def __init__(self, matcher, num_anchors=9, width=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 7, 4, 3), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.objectness, self.deltas = nn.Conv2d(width, num_anchors, 1), nn.Conv2d(width, 4 * num_anchors, 1)
        self.matcher = matcher

    def grid_anchors(self, h, w, device):
        y, x = torch.meshgrid(torch.arange(h, device=device) * 4.0, torch.arange(w, device=device) * 4.0, indexing="ij")
        sizes = torch.tensor([[s * r ** 0.5, s / r ** 0.5] for s in (8, 16, 32) for r in (0.5, 1.0, 2.0)], device=device)
        centers = torch.stack([x, y], 2)[:, :, None]
        return torch.cat([centers - sizes / 2, centers + sizes / 2], 3).view(-1, 4)

    @torch.no_grad()
    def label_anchors(self, anchors, gt_boxes):
        matches, labels = self.matcher(gt_boxes, anchors)
        keep = torch.rand(len(anchors), device=anchors.device).topk(512).indices
        return keep, labels[keep], gt_boxes[matches[keep]]

    def forward(self, image, gt_boxes):
        features = self.backbone(image)
        anchors = self.grid_anchors(*features.shape[2:], image.device)
        keep, labels, targets = self.label_anchors(anchors, gt_boxes)
        logits = self.objectness(features).permute(0, 2, 3, 1).flatten()[keep]
        deltas = self.deltas(features).permute(0, 2, 3, 1).reshape(-1, 4)[keep]
        positive = (labels > 0).float()
        loss_cls = F.binary_cross_entropy_with_logits(logits, positive, weight=(labels >= 0).float())
        loss_loc = (F.smooth_l1_loss(deltas, (targets - anchors[keep]) / 16, reduction="none").sum(1) * positive).mean()
        return loss_cls + loss_loc


@expected("all_pairs", fix="part|split", thread="facebookresearch/detectron2#3750", memory=1000, held_back=True)
def train_rpn_aerial_again(fixed=False):
    """`label_anchors` computes the IoU of every ground-truth box with every anchor (`pairwise_iou`), and this matrix of objects x anchors
    with its intermediate results does not fit for images with many objects. Cured by: The assignment reduces over the objects as it goes
    and never stores the full IoU matrix.
    """
    model = RPN(Matcher(0.3, 0.7, streaming=fixed)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for objects in (12, 60, 35, 420, 80):
        corner = torch.rand(objects, 2) * 750
        gt_boxes = torch.cat([corner, corner + 8 + torch.rand(objects, 2) * 20], 1)
        loss = model(torch.rand(1, 3, 800, 800, device="cuda"), gt_boxes.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Ratings are predicted by a graph convolution over users and movies.

class GCMCLayer(nn.Module):
    def __init__(self, ratings, num_users, num_movies, msg_units, out_units):
        super().__init__()
        share = msg_units // ratings
        self.user_weight = nn.ParameterList(nn.Parameter(torch.randn(num_users, share) * 0.05) for _ in range(ratings))
        self.movie_weight = nn.ParameterList(nn.Parameter(torch.randn(num_movies, share) * 0.05) for _ in range(ratings))
        self.ufc, self.ifc = nn.Linear(share * ratings, out_units), nn.Linear(share * ratings, out_units)

    def forward(self, adjacency):
        ufeat = torch.cat([torch.sparse.mm(adj, weight) for adj, weight in zip(adjacency, self.movie_weight)], 1)
        ifeat = torch.cat([torch.sparse.mm(adj.t(), weight) for adj, weight in zip(adjacency, self.user_weight)], 1)
        return self.ufc(F.leaky_relu(ufeat, 0.1)), self.ifc(F.leaky_relu(ifeat, 0.1))


class BiDecoder(nn.Module):
    def __init__(self, in_units, num_classes, num_basis, dropout_rate=0.3, loop_bases=False):
        super().__init__()
        self.num_basis, self.loop_bases = num_basis, loop_bases
        self.dropout = nn.Dropout(dropout_rate)
        self.P = nn.Parameter(torch.randn(num_basis, in_units, in_units) * 0.05)
        self.combine_basis = nn.Linear(num_basis, num_classes, bias=False)

    def forward(self, ufeat, ifeat):
        ufeat, ifeat = self.dropout(ufeat), self.dropout(ifeat)
        if self.loop_bases:
            scores = torch.stack([torch.einsum("ej,ej->e", ufeat @ basis, ifeat) for basis in self.P], 1)
        else:
            scores = torch.einsum("ei,kij,ej->ek", ufeat, self.P, ifeat)
        return self.combine_basis(scores)


@expected("large_intermediate", fix="part", thread="dmlc/dgl#1828", memory=1150, held_back=True)
def train_gcmc(fixed=False):
    """`BiDecoder.forward` computes all basis matrices in one `einsum('ai,bij,aj->ab')`, which materializes a tensor of edges x bases x
    features (and its gradient) at once. Cured by: Reverted to the loop over the bases, with one `ufeat @ P` per basis.
    """
    num_users, num_movies, num_ratings = 6000, 3700, 5
    edges_u, edges_m = torch.randint(0, num_users, (400000,)), torch.randint(0, num_movies, (400000,))
    rating = torch.randint(0, num_ratings, (400000,))
    adjacency = []
    for r in range(num_ratings):
        index = torch.stack([edges_u[rating == r], edges_m[rating == r]])
        adjacency.append(torch.sparse_coo_tensor(index, torch.ones(index.shape[1]), (num_users, num_movies)).coalesce().cuda())
    encoder = GCMCLayer(num_ratings, num_users, num_movies, 200, 64).cuda()
    decoder = BiDecoder(64, num_ratings, num_basis=8, loop_bases=fixed).cuda()
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()], lr=0.01)
    for iteration in range(4):
        for batch in torch.randperm(400000).split(200000):
            ufeat, ifeat = encoder(adjacency)
            pred = decoder(ufeat[edges_u[batch].cuda()], ifeat[edges_m[batch].cuda()])
            loss = F.cross_entropy(pred, rating[batch].cuda())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(encoder.parameters(), 1.0)
            optimizer.step()


# Papers of a citation graph are classified with graph attention.

class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, dropout, alpha, concat=True, pair_scores=False):
        super().__init__()
        self.out_features, self.dropout, self.concat, self.pair_scores = out_features, dropout, concat, pair_scores
        self.W = nn.Parameter(torch.empty(in_features, out_features))
        self.a = nn.Parameter(torch.empty(2 * out_features, 1))
        for weight in (self.W, self.a):
            nn.init.xavier_uniform_(weight, gain=2 ** 0.5)
        self.leakyrelu = nn.LeakyReLU(alpha)

    def forward(self, x, adj):
        h = x @ self.W
        nodes = len(h)
        if self.pair_scores:
            source, target = (h @ half for half in self.a.chunk(2))
            e = self.leakyrelu(source + target.t())
        else:
            sources, targets = h.repeat_interleave(nodes, 0), h.repeat(nodes, 1)
            a_input = torch.cat([sources, targets], 1)
            e = self.leakyrelu(a_input @ self.a).view(nodes, nodes)
        attention = e.masked_fill(adj == 0, -1e15).softmax(1)
        h = F.dropout(attention, self.dropout, self.training) @ h
        return F.elu(h) if self.concat else h


class GAT(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout, alpha, nheads, pair_scores):
        super().__init__()
        self.dropout = dropout
        self.attentions = nn.ModuleList(GraphAttentionLayer(nfeat, nhid, dropout, alpha, True, pair_scores) for _ in range(nheads))
        self.out_att = GraphAttentionLayer(nhid * nheads, nclass, dropout, alpha, False, pair_scores)

    def forward(self, x, adj):
        x = F.dropout(x, self.dropout, self.training)
        heads = [attention(x, adj) for attention in self.attentions]
        x = F.dropout(torch.cat(heads, 1), self.dropout, self.training)
        return F.elu(self.out_att(x, adj)).log_softmax(1)


def load_citations(papers, links, words, classes):
    edges = torch.randint(0, papers, (2, links))
    adj = torch.eye(papers)
    adj[edges[0], edges[1]] = 1
    adj = torch.maximum(adj, adj.t())
    features = (torch.rand(papers, words) < 0.01).float()
    return adj / adj.sum(1, keepdim=True), features, torch.randint(0, classes, (papers,))


@expected("all_pairs", fix="part|split", thread="diegoantognini/pyGAT#2", memory=650, held_back=True)
def train_gat(fixed=False):
    """The attention function of `GraphAttentionLayer` builds `a_input`, the concatenated features of every pair of nodes (N x N x 2 *
    out_features), for each head. Cured by: The other branch's attention function: the two halves of `a` are applied to the nodes, and the
    scores of pairs are a broadcast sum.
    """
    adj, features, labels = load_citations(1200, 2400, 1433, 7)
    idx_train = torch.arange(140)
    model = GAT(features.shape[1], 8, 7, 0.6, 0.2, 8, pair_scores=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    adj, features, labels, idx_train = adj.cuda(), features.cuda(), labels.cuda(), idx_train.cuda()
    for epoch in range(5):
        model.train()
        optimizer.zero_grad()
        logps = model(features, adj)[idx_train]
        F.nll_loss(logps, labels[idx_train]).backward()
        optimizer.step()


# Molecular dynamics of water with a learned potential.

class SchNetInteraction(nn.Module):
    def __init__(self, n_atom_basis, n_gaussians):
        super().__init__()
        self.filter_network = nn.Sequential(nn.Linear(n_gaussians, n_atom_basis), nn.Softplus(), nn.Linear(n_atom_basis, n_atom_basis))
        self.in2f, self.f2out = nn.Linear(n_atom_basis, n_atom_basis, bias=False), nn.Linear(n_atom_basis, n_atom_basis)

    def forward(self, x, f_ij, neighbors, neighbor_mask):
        W = self.filter_network(f_ij)
        y = self.in2f(x)[neighbors]
        return self.f2out((y * (W * neighbor_mask[..., None])).sum(1))


class SchNet(nn.Module):
    def __init__(self, cutoff, n_atom_basis=32, n_gaussians=20, n_interactions=3):
        super().__init__()
        self.embedding = nn.Embedding(20, n_atom_basis)
        self.register_buffer("offsets", torch.linspace(0, cutoff, n_gaussians))
        self.width, self.cutoff = cutoff / n_gaussians, cutoff
        self.interactions = nn.ModuleList(SchNetInteraction(n_atom_basis, n_gaussians) for _ in range(n_interactions))
        self.atomwise = nn.Sequential(nn.Linear(n_atom_basis, 16), nn.Softplus(), nn.Linear(16, 1))

    def forward(self, atomic_numbers, positions, neighbors, neighbor_mask):
        r_ij = (positions[neighbors] - positions[:, None] + 1e-6).norm(dim=2)
        f_ij = torch.exp(-0.5 * ((r_ij[..., None] - self.offsets) / self.width) ** 2)
        mask = neighbor_mask * (r_ij < self.cutoff)
        x = self.embedding(atomic_numbers)
        for interaction in self.interactions:
            x = x + interaction(x, f_ij, neighbors, mask)
        return self.atomwise(x).sum()


class SimpleNeighborList:
    def __init__(self, positions, cutoff):
        n_atoms = len(positions)
        index = torch.arange(n_atoms)
        self.neighbors = index.repeat(n_atoms, 1)[~torch.eye(n_atoms, dtype=torch.bool)].view(n_atoms, n_atoms - 1).cuda()
        self.mask = torch.ones(n_atoms, n_atoms - 1, device="cuda")


class CutoffNeighborList:
    def __init__(self, positions, cutoff):
        near = torch.cdist(positions, positions) < cutoff
        near.fill_diagonal_(False)
        most = int(near.sum(1).max())
        mask, neighbors = near.float().topk(most, dim=1)
        self.neighbors, self.mask = neighbors.cuda(), mask.cuda()


class Simulator:
    def __init__(self, positions, atomic_numbers, model, neighbor_list, time_step=0.5):
        self.positions, self.atomic_numbers = positions.cuda(), atomic_numbers.cuda()
        self.momenta = torch.zeros_like(self.positions)
        self.model, self.neighbor_list, self.time_step = model, neighbor_list, time_step

    def compute_forces(self):
        positions = self.positions.detach().requires_grad_()
        energy = self.model(self.atomic_numbers, positions, self.neighbor_list.neighbors, self.neighbor_list.mask)
        return -torch.autograd.grad(energy, positions)[0]

    def simulate(self, n_steps):
        forces = self.compute_forces()
        for _ in range(n_steps):
            self.momenta += 0.5 * self.time_step * forces
            self.positions += self.time_step * self.momenta
            forces = self.compute_forces()
            self.momenta += 0.5 * self.time_step * forces


@expected("all_pairs", fix="cutoff", thread="atomistic-machine-learning/schnetpack#252", memory=450, held_back=True)
def simulate_water_box(fixed=False):
    """`SimpleNeighborList` ignores the cutoff and lists all other atoms as neighbors of each atom, so that the model computes its filters
    for all pairs. Cured by: A neighbor list with only the pairs within the cutoff.
    """
    cutoff, side = 5.0, 6
    grid = np.stack(np.meshgrid(*[np.arange(side) * 3.1] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    water = grid + np.array([[0.0, 0.0, 0.0], [0.96, 0.0, 0.0], [-0.24, 0.93, 0.0]])
    positions = torch.from_numpy(water.reshape(-1, 3)).float()
    atomic_numbers = torch.tensor([8, 1, 1]).repeat(side ** 3)
    model = SchNet(cutoff).cuda().requires_grad_(False)
    neighbor_list = (CutoffNeighborList if fixed else SimpleNeighborList)(positions, cutoff)
    Simulator(positions, atomic_numbers, model, neighbor_list).simulate(10)


# A user trains an image translation network and writes samples now and then.

class ResidualBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1, bias=False), nn.InstanceNorm2d(dim, affine=True), nn.ReLU(True),
                                  nn.Conv2d(dim, dim, 3, padding=1, bias=False), nn.InstanceNorm2d(dim, affine=True))

    def forward(self, x):
        return x + self.main(x)


class Generator(nn.Module):
    def __init__(self, conv_dim=32, c_dim=8, repeat_num=4):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3 + c_dim, conv_dim, 7, padding=3), nn.InstanceNorm2d(conv_dim), nn.ReLU(True),
                                  nn.Conv2d(conv_dim, 2 * conv_dim, 4, 2, 1), nn.InstanceNorm2d(2 * conv_dim), nn.ReLU(True),
                                  *[ResidualBlock(2 * conv_dim) for _ in range(repeat_num)])
        self.up = nn.Sequential(nn.ConvTranspose2d(2 * conv_dim, conv_dim, 4, 2, 1), nn.InstanceNorm2d(conv_dim), nn.ReLU(True),
                                nn.Conv2d(conv_dim, 3, 7, padding=3), nn.Tanh())

    def forward(self, x, c):
        c = c[:, :, None, None].expand(-1, -1, x.shape[2], x.shape[3])
        feature = self.down(torch.cat([x, c], 1))
        return self.up(feature), feature


class Solver:
    def __init__(self, c_dim, detach_samples):
        self.c_dim, self.detach_samples = c_dim, detach_samples
        self.G = Generator(c_dim=c_dim).cuda()
        layers, dim = [nn.Conv2d(3, 32, 4, 2, 1), nn.LeakyReLU(0.01)], 32
        for _ in range(3):
            layers += [nn.Conv2d(dim, 2 * dim, 4, 2, 1), nn.LeakyReLU(0.01)]
            dim *= 2
        self.D = nn.Sequential(*layers, nn.Conv2d(dim, 1 + c_dim, 3, padding=1)).cuda()
        self.g_optimizer = torch.optim.Adam(self.G.parameters(), 1e-4, (0.5, 0.999))
        self.d_optimizer = torch.optim.Adam(self.D.parameters(), 1e-4, (0.5, 0.999))

    def classify(self, x):
        out = self.D(x).mean((2, 3))
        return out[:, 0].mean(), out[:, 1:]

    def train_step(self, real_x, label):
        target_c = F.one_hot(label.roll(1), self.c_dim).float()
        out_real, out_cls = self.classify(real_x)
        out_fake, _ = self.classify(self.G(real_x, target_c)[0].detach())
        d_loss = out_fake - out_real + F.cross_entropy(out_cls, label)
        self.d_optimizer.zero_grad()
        d_loss.backward()
        self.d_optimizer.step()
        fake_x, feature = self.G(real_x, target_c)
        out_fake, out_cls = self.classify(fake_x)
        g_loss = -out_fake + F.cross_entropy(out_cls, label.roll(1)) + 10 * (fake_x - real_x).abs().mean()
        self.g_optimizer.zero_grad()
        g_loss.backward()
        self.g_optimizer.step()

    def sample(self, real_x):
        fake_list = [real_x]
        for domain in range(self.c_dim):
            target_c = F.one_hot(torch.full((len(real_x),), domain, device="cuda"), self.c_dim).float()
            fake = self.G(real_x, target_c)[0]
            fake_list.append(fake.detach() if self.detach_samples else fake)
        fake_images = torch.cat(fake_list, dim=3)
        return ((fake_images.detach().cpu() + 1) / 2).clamp_(0, 1)


@expected("evaluation_keeps_graphs", fix="detach", thread="http://39.103.169.235/p/f1bd4ff84926", memory=850, held_back=True)
def train_cin(fixed=False):
    """When samples are made, `fake_list` keeps the images of `self.G(real_x, target_c)[0]` with their graphs, and the graphs of all target
    domains pile up. Cured by: `.detach()` after `self.G(real_x, target_c)[0]`.
    """
    solver = Solver(8, detach_samples=fixed)
    for step in range(12):
        real_x, label = torch.rand(6, 3, 128, 128) * 2 - 1, torch.randint(0, 8, (6,))
        solver.train_step(real_x.cuda(), label.cuda())
        if step % 4 == 3:
            solver.sample(real_x.cuda())


# A user compares loss values of a trained network on several data sets.

class ClassifierWithLoss(nn.Module):
    def __init__(self, num_classes):
        super().__init__()
        self.features = torchvision.models.resnet18(weights=None, num_classes=num_classes)
        self.criterion = nn.CrossEntropyLoss()

    def forward(self, image, target):
        return self.criterion(self.features(image), target)


class Photos(Dataset):
    def __init__(self, length, size):
        self.images, self.targets = torch.rand(16, 3, size, size), torch.randint(0, 10, (length,))

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.images[index % 16], self.targets[index]


@expected("evaluation_keeps_graphs", fix="no_grad",
          thread="https://discuss.pytorch.org/t/calling-loss-backward-reduce-memory-usage/2735", memory=720, held_back=True)
def measure_loss(fixed=False):
    """No backward is called and the name `loss` refers to the result of the previous iteration until the new one is complete, so that two
    graphs with all their buffers exist at the same time. Cured by: `del loss` at the end of each iteration.
    """
    model = ClassifierWithLoss(10).cuda().eval()
    for size in (96, 128):
        total, count = 0.0, 0
        for image, target in DataLoader(Photos(192, size), batch_size=48):
            loss = model(image.cuda(), target.cuda())
            total, count = total + float(loss) * len(image), count + len(image)
            if fixed:
                del loss
        print(f"{size}: {total / count:.3f}")


# A trained network predicts the right view of a stereo camera from the left one.

class ViewNet(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.conv_in = nn.Conv2d(1, width, 7, padding=3)
        self.down = nn.ModuleList(nn.Conv2d(width * 2 ** i, width * 2 ** (i + 1), 3, 2, 1) for i in range(2))
        self.bottleneck = nn.Sequential(nn.Conv2d(4 * width, 4 * width, 3, padding=1), nn.BatchNorm2d(4 * width), nn.ReLU())
        self.up = nn.ModuleList(nn.ConvTranspose2d(width * 2 ** (i + 1), width * 2 ** i, 4, 2, 1) for i in (1, 0))
        self.conv_out = nn.Conv2d(width, 1, 3, padding=1)

    def forward(self, x):
        x = F.relu(self.conv_in(x))
        skips = []
        for conv in self.down:
            skips.append(x)
            x = F.relu(conv(x))
        x = self.bottleneck(x)
        for conv, skip in zip(self.up, reversed(skips)):
            x = F.relu(conv(x)) + skip
        return torch.sigmoid(self.conv_out(x)).flatten(1)


class LeftViews(Dataset):
    def __len__(self):
        return 60

    def __getitem__(self, index):
        return torch.rand(1, 300, 300)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="http://www.kouhan.cn/en/article/00034093", memory=900, held_back=True)
def predict_right_views(fixed=False):
    """Predictions are made without `torch.no_grad()`, so each output in `right` keeps the graph with the intermediate results of its image,
    and they add up image after image. Cured by: `with torch.no_grad():` around the forward pass.
    """
    model = ViewNet().cuda().eval()
    dataloader = DataLoader(LeftViews(), batch_size=1)
    right = []
    for i, left in enumerate(dataloader):
        left = left.cuda()
        if fixed:
            with torch.no_grad():
                right.append(model(left).view(-1, 1, 300, 300))
        else:
            right.append(model(left).view(-1, 1, 300, 300))
        torch.cuda.empty_cache()
    return torch.cat(right).shape
