"""Programs after public threads of everyday users: vision, speech, language models, diffusion, graphs, reinforcement learning."""
import contextlib
import copy
import math
from types import SimpleNamespace

import numpy as np
import torch
import torchvision
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


# Music separation: a recording is split into vocals, drums, bass and other.

class OpenUnmix(nn.Module):
    def __init__(self, nb_bins, nb_channels, hidden_size, max_bin):
        super().__init__()
        self.nb_bins, self.max_bin = nb_bins, max_bin
        self.fc1 = nn.Linear(max_bin * nb_channels, hidden_size, bias=False)
        self.bn1 = nn.BatchNorm1d(hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size // 2, num_layers=2, bidirectional=True)
        self.fc2 = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.fc3 = nn.Linear(hidden_size, nb_bins * nb_channels, bias=False)
        self.input_scale = nn.Parameter(torch.ones(max_bin))
        self.output_scale = nn.Parameter(torch.ones(nb_bins))

    def forward(self, spectrogram):
        x = spectrogram.permute(3, 0, 1, 2)
        frames, samples, channels, bins = x.shape
        mix = x
        x = x[..., :self.max_bin] * self.input_scale
        x = self.fc1(x.reshape(frames * samples, -1))
        x = torch.tanh(self.bn1(x)).reshape(frames, samples, -1)
        x = torch.cat([x, self.lstm(x)[0]], -1)
        x = F.relu(self.fc2(x.reshape(frames * samples, -1)))
        x = self.fc3(x).reshape(frames, samples, channels, bins) * self.output_scale
        return (F.relu(x) * mix).permute(1, 2, 3, 0)


def wiener(targets_spectrograms, mix_stft, eps=1e-10):
    power = targets_spectrograms ** 2
    gain = power / (power.sum(-1, keepdim=True) + eps)
    return gain * mix_stft.unsqueeze(-1)


class Separator(nn.Module):
    def __init__(self, target_models, n_fft=2048, n_hop=512):
        super().__init__()
        self.target_models = nn.ModuleDict(target_models)
        self.n_fft, self.n_hop = n_fft, n_hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def stft(self, audio):
        samples, channels, length = audio.shape
        out = torch.stft(audio.reshape(-1, length), self.n_fft, self.n_hop, window=self.window, center=True, return_complex=True)
        return out.reshape(samples, channels, *out.shape[1:])

    def istft(self, spectra, length):
        samples, channels, bins, frames = spectra.shape
        pieces = torch.fft.irfft(spectra.reshape(-1, bins, frames), n=self.n_fft, dim=1) * self.window[:, None]
        total = self.n_fft + self.n_hop * (frames - 1)
        wave = F.fold(pieces, (1, total), (1, self.n_fft), stride=(1, self.n_hop))[:, 0, 0]
        start = self.n_fft // 2
        return wave[:, start:start + length].reshape(samples, channels, -1)

    def forward(self, audio):
        mix_stft = self.stft(audio)
        magnitude = mix_stft.abs()
        spectrograms = torch.zeros(*magnitude.shape, len(self.target_models), device=audio.device)
        for j, model in enumerate(self.target_models.values()):
            spectrograms[..., j] = model(magnitude)
        targets_stft = wiener(spectrograms, mix_stft)
        return torch.stack([self.istft(targets_stft[..., j], audio.shape[-1]) for j in range(len(self.target_models))], 1)


def separate(audio, separator, device):
    with torch.no_grad():
        return separator(audio.to(device)).cpu()


@expected("batch_without_gradients", fix="tiles|pieces|split", thread="sigsep/open-unmix-pytorch#132", memory=1000, held_back=True)
def separate_recording(fixed=False):
    """`separate` hands the whole ten-minute recording `audio` to `Separator` in one call, so the complex spectrogram, the spectrogram of
    each target and the Wiener-filtered estimates all exist on the GPU for the full length of the recording; the separator is meant for
    songs of a few minutes. Cured by: Cut the recording into pieces of about a minute, separate them one after the other and join the
    results on the CPU.
    """
    device, rate = torch.device("cuda"), 22050
    separator = Separator({name: OpenUnmix(1025, 2, 256, 700) for name in ("vocals", "drums", "bass", "other")}).to(device).eval()
    audio = torch.zeros(1, 2, 600 * rate)
    if fixed:
        estimates = [separate(part, separator, device) for part in audio.split(60 * rate, -1)]
        estimates = torch.cat(estimates, -1)
    else:
        estimates = separate(audio, separator, device)
    return [(name, wave.shape) for name, wave in zip(separator.target_models, estimates[0])]


# Instruction tuning of an int8 language model with LoRA; checkpoints have the adapter only.

def to_tiles(rows):
    return rows.reshape(rows.shape[0] // 32, 32, rows.shape[1] // 32, 32).transpose(1, 2).contiguous()


def undo_layout(tiles, shape):
    return tiles.transpose(1, 2).reshape(shape)


class MatMul8bitLt(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, state):
        ctx.state = state
        weight = undo_layout(state.CxB, state.shape).to(x.dtype) * state.SCB[:, None]
        return x @ weight.T

    @staticmethod
    def backward(ctx, grad):
        weight = undo_layout(ctx.state.CxB, ctx.state.shape).to(grad.dtype) * ctx.state.SCB[:, None]
        return grad @ weight, None


class Linear8bit(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (out_features, in_features), dtype=torch.int8), requires_grad=False)
        self.state = SimpleNamespace(CxB=None, SCB=None, shape=(out_features, in_features))

    def forward(self, x):
        if self.state.CxB is None:
            self.state.CxB = to_tiles(self.weight.data)
            self.state.SCB = torch.full((self.state.shape[0],), 1e-3, device=x.device, dtype=x.dtype)
            self.weight.data = self.state.CxB
        return MatMul8bitLt.apply(x, self.state)


class Linear8bitLt(Linear8bit):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        reorder = self.state.CxB is not None
        if reorder:
            weight_clone = self.weight.data.clone()
            self.weight.data = undo_layout(self.state.CxB, self.state.shape)
        try:
            super()._save_to_state_dict(destination, prefix, keep_vars)
            if self.state.SCB is not None:
                destination[prefix + "SCB"] = self.state.SCB
        finally:
            if reorder:
                self.weight.data = weight_clone


class LoraLinear(nn.Module):
    def __init__(self, base, in_features, out_features, r=8):
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(in_features, r, bias=False)
        self.lora_B = nn.Linear(r, out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x.float())).to(x.dtype)


class LlamaLayer(nn.Module):
    def __init__(self, linear, dim, hidden, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.v_proj = (LoraLinear(linear(dim, dim), dim, dim) for _ in range(2))
        self.k_proj, self.o_proj = linear(dim, dim), linear(dim, dim)
        self.gate_proj, self.up_proj, self.down_proj = linear(dim, hidden), linear(dim, hidden), linear(hidden, dim)
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)

    def forward(self, x):
        y = self.norm1(x)
        q, k, v = (p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(attention.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))


class LlamaForCausalLM8bit(nn.Module):
    def __init__(self, linear, vocab=8000, dim=1024, hidden=2816, layers=14, heads=16):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(LlamaLayer(linear, dim, hidden, heads) for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, labels):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def get_peft_model_state_dict(state_dict):
    return {key: value.cpu() for key, value in state_dict.items() if "lora_" in key}


@expected("copies_of_state_dict", fix="cpu|only", thread="tloen/alpaca-lora#350", memory=540, held_back=True)
def tune_alpaca(fixed=False):
    """Training fits, saving the checkpoint does not: `old_state_dict()` collects every weight of the base model although only the LoRA keys
    are kept, and `Linear8bitLt._save_to_state_dict` (new in bitsandbytes 0.38.0) converts the int8 weight of every layer into a fresh
    row-major copy (`undo_layout`) and clones the weight, so the int8 model lies on the GPU several times. Cured by: Go back to bitsandbytes
    0.37.2, which has no such method: the state dict then only refers to the weights that are there.
    """
    model = LlamaForCausalLM8bit(Linear8bit if fixed else Linear8bitLt)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
        if "lora_" not in name and parameter.dtype == torch.float32:
            parameter.data = parameter.data.half()
    model.cuda()
    old_state_dict = model.state_dict
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-4)
    checkpoints = []
    for step in range(1, 5):
        input_ids = torch.randint(0, 8000, (1, 96)).cuda()
        loss = model(input_ids, input_ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2 == 0:
            checkpoints.append(get_peft_model_state_dict(old_state_dict()))
    return len(checkpoints)


# LoRA training of a latent diffusion model, then the adapter is saved.

class LoRAAttnProcessor(nn.Module):
    def __init__(self, hidden_size, rank=4):
        super().__init__()
        names = ("to_q_lora", "to_k_lora", "to_v_lora", "to_out_lora")
        self.down = nn.ModuleDict({name: nn.Linear(hidden_size, rank, bias=False) for name in names})
        self.up = nn.ModuleDict({name: nn.Linear(rank, hidden_size, bias=False) for name in names})

    def delta(self, name, x):
        return self.up[name](self.down[name](x.to(self.down[name].weight.dtype))).to(x.dtype)


class AttnBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(dim)
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        self.ff_norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.processor = None

    def forward(self, x):
        y, lora = self.norm(x), self.processor
        q = self.to_q(y) + lora.delta("to_q_lora", y)
        k = self.to_k(y) + lora.delta("to_k_lora", y)
        v = self.to_v(y) + lora.delta("to_v_lora", y)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.to_out(y) + lora.delta("to_out_lora", y)
        return x + self.ff(self.ff_norm(x))


class UNet2DConditionModel(nn.Module):
    def __init__(self, dim=1024, layers=14):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, dim, 2, stride=2), nn.ConvTranspose2d(dim, 4, 2, stride=2)
        self.time_embedding = nn.Sequential(nn.Linear(256, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(AttnBlock(dim, 16) for _ in range(layers))

    def forward(self, sample, timestep, encoder_hidden_states):
        freqs = torch.exp(-math.log(1e4) * torch.arange(128, device=sample.device) / 128)
        angles = timestep[:, None] * freqs
        emb = self.time_embedding(torch.cat([angles.sin(), angles.cos()], -1).to(sample.dtype))
        h = self.conv_in(sample)
        x = torch.cat([h.flatten(2).transpose(1, 2) + emb[:, None], encoder_hidden_states], 1)
        for block in self.blocks:
            x = block(x)
        return self.conv_out(x[:, :h[0, 0].numel()].transpose(1, 2).reshape(h.shape))


def unet_attn_processors_state_dict(unet):
    found = {}
    for name, module in unet.named_modules():
        if isinstance(module, LoRAAttnProcessor):
            found.update({f"{name}.{key}": value.cpu() for key, value in module.state_dict().items()})
    return found


def save_lora_weights(unet, convert):
    if convert:
        unet = unet.to(torch.float32)
    return unet_attn_processors_state_dict(unet)


@expected("widened_weights", fix="cast|type", thread="huggingface/diffusers#4736", memory=680, held_back=True)
def save_sdxl_adapter(fixed=False):
    """When training is over `save_lora_weights` converts the whole frozen fp16 `unet` to float32 (`unet.to(torch.float32)`) only to take
    the small LoRA layers out of it, which doubles the memory of the U-Net. Cured by: Save without converting the U-Net to float32.
    """
    weight_dtype, device = torch.float16, torch.device("cuda")
    unet = UNet2DConditionModel()
    unet.requires_grad_(False)
    unet.to(device, dtype=weight_dtype)
    for block in unet.blocks:
        block.processor = LoRAAttnProcessor(1024).to(device)
    params_to_optimize = [p for p in unet.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params_to_optimize, lr=1e-4)
    alphas_cumprod = torch.linspace(0.999, 0.01, 1000, device=device)
    for _ in range(4):
        latents = torch.randn(1, 4, 16, 16, device=device, dtype=weight_dtype)
        prompt_embeds = torch.randn(1, 77, 1024, device=device, dtype=weight_dtype)
        timesteps = torch.randint(0, 1000, (1,)).to(device)
        noise = torch.randn_like(latents)
        alpha = alphas_cumprod[timesteps].view(-1, 1, 1, 1).to(weight_dtype)
        noisy = alpha.sqrt() * latents + (1 - alpha).sqrt() * noise
        model_pred = unet(noisy, timesteps, prompt_embeds)
        loss = F.mse_loss(model_pred.float(), noise.float())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params_to_optimize, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return len(save_lora_weights(unet, convert=not fixed))


# The hidden states of all but the last layer of DistilBERT are computed once, a head is tuned on them later.

class Reviews(Dataset):
    def __init__(self, size, length):
        self.input_ids = torch.randint(1000, 20000, (size, length))
        self.lengths = torch.randint(length // 2, length + 1, (size,))

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, index):
        mask = (torch.arange(self.input_ids.shape[1]) < self.lengths[index]).long()
        return {"input_ids": self.input_ids[index] * mask, "attention_mask": mask}


@expected("kept_tensors", fix="cpu", thread="huggingface/transformers#24315", memory=500, held_back=True)
def collect_hidden_states(fixed=False):
    """`hidden_states_list.append(hidden_states)` keeps the hidden states of every batch on the GPU, so they pile up over the data set
    although each batch is small. Cured by: Move the hidden states of a batch to the CPU before they are appended.
    """
    device = torch.device("cuda")
    config = transformers.DistilBertConfig(vocab_size=20000, n_layers=3)
    model = transformers.DistilBertModel(config).to(device).eval()
    loader = DataLoader(Reviews(1600, 128), batch_size=8)
    hidden_states_list, masks = [], []
    with torch.no_grad():
        for batch in loader:
            attention_mask = batch["attention_mask"].to(device)
            output = model(input_ids=batch["input_ids"].to(device), attention_mask=attention_mask)
            hidden_states = output.last_hidden_state
            if fixed:
                hidden_states = hidden_states.cpu()
            hidden_states_list.append(hidden_states)
            masks.append(batch["attention_mask"])
    features = torch.cat([states[:, 0] for states in hidden_states_list])
    return features.shape, len(masks)


# Voice cloning: the synthesizer is a Tacotron which learns mel spectrograms from text and a speaker embedding.

class SynthesizerDataset(Dataset):
    def __init__(self, metadata, num_mels):
        self.metadata, self.num_mels = metadata, num_mels

    def __len__(self):
        return len(self.metadata)

    def __getitem__(self, index):
        mel_frames, text_length = self.metadata[index]
        rng = np.random.default_rng(index)
        return (rng.integers(1, 60, text_length), rng.random((self.num_mels, mel_frames), dtype=np.float32),
                rng.random(64, dtype=np.float32), index)


def collate_synthesizer(batch, r):
    max_x_len = max(len(text) for text, _, _, _ in batch)
    chars = np.stack([np.pad(text, (0, max_x_len - len(text))) for text, _, _, _ in batch])
    max_spec_len = max(mel.shape[-1] for _, mel, _, _ in batch) + 1
    max_spec_len += -max_spec_len % r
    mel = np.stack([np.pad(m, ((0, 0), (0, max_spec_len - m.shape[-1])), constant_values=-4) for _, m, _, _ in batch])
    embeds = np.stack([embed for _, _, embed, _ in batch])
    return torch.tensor(chars), torch.tensor(mel), torch.tensor(embeds), [index for _, _, _, index in batch]


class Tacotron(nn.Module):
    def __init__(self, n_mels, r, dims=192, embedding=64):
        super().__init__()
        self.n_mels, self.r, self.dims = n_mels, r, dims
        self.embedding = nn.Embedding(60, dims)
        self.encoder = nn.GRU(dims, dims // 2, batch_first=True, bidirectional=True)
        self.encoder_proj = nn.Linear(dims + embedding, dims)
        self.prenet = nn.Sequential(nn.Linear(n_mels, dims), nn.ReLU(), nn.Dropout(), nn.Linear(dims, dims), nn.ReLU())
        self.attn_rnn, self.res_rnn = nn.LSTMCell(2 * dims, dims), nn.LSTMCell(2 * dims, dims)
        self.attn_query, self.attn_loc, self.attn_v = nn.Linear(dims, dims), nn.Conv1d(1, dims, 31, padding=15), nn.Linear(dims, 1)
        self.mel_proj, self.stop_proj = nn.Linear(dims, n_mels * r), nn.Linear(2 * dims, 1)
        self.postnet = nn.Sequential(nn.Conv1d(n_mels, dims, 5, padding=2), nn.BatchNorm1d(dims), nn.Tanh(), nn.Conv1d(dims, n_mels, 5, padding=2))

    def forward(self, texts, mels, embeds):
        batch, _, steps = mels.shape
        encoded, _ = self.encoder(self.embedding(texts))
        encoded = self.encoder_proj(torch.cat([encoded, embeds[:, None].expand(-1, texts.shape[1], -1)], -1))
        zeros = lambda: torch.zeros(batch, self.dims, device=mels.device)
        attn_h, attn_c, res_h, res_c, context = zeros(), zeros(), zeros(), zeros(), zeros()
        cumulative = torch.zeros(batch, texts.shape[1], device=mels.device)
        mel_outputs, stop_outputs = [], []
        for t in range(0, steps, self.r):
            previous = mels[:, :, t - 1] if t > 0 else torch.zeros_like(mels[:, :, 0])
            attn_h, attn_c = self.attn_rnn(torch.cat([context, self.prenet(previous)], -1), (attn_h, attn_c))
            location = self.attn_loc(cumulative[:, None]).transpose(1, 2)
            scores = self.attn_v(torch.tanh(self.attn_query(attn_h)[:, None] + encoded + location)).squeeze(-1)
            weights = scores.softmax(-1)
            cumulative = cumulative + weights
            context = (weights[:, None] @ encoded).squeeze(1)
            x = torch.cat([context, attn_h], -1)
            res_h, res_c = self.res_rnn(x, (res_h, res_c))
            mel_outputs.append(self.mel_proj(res_h).view(batch, self.n_mels, self.r))
            stop_outputs.append(torch.sigmoid(self.stop_proj(torch.cat([context, res_h], -1))).expand(-1, self.r))
        m1_hat = torch.cat(mel_outputs, 2)
        return m1_hat, m1_hat + self.postnet(m1_hat), torch.cat(stop_outputs, 1)


@expected("larger_step", fix="shorter|as large", thread="CorentinJ/Real-Time-Voice-Cloning#587", memory=500, held_back=True)
def train_synthesizer(fixed=False):
    """`collate_synthesizer` pads every utterance of a batch to the longest one of the batch, so a batch that has one of the few very long
    utterances makes the decoder run for all of them over its length and needs far more memory than the others. Cured by: Leave utterances
    of more than `max_mel_frames` = 500 frames out of the training data.
    """
    r, num_mels, device = 5, 80, torch.device("cuda")
    rng = np.random.default_rng(7)
    frames = rng.integers(180, 480, 160)
    frames[[45, 77, 130]] = 880, 900, 860
    metadata = [(int(n), int(n) // 6) for n in frames]
    max_mel_frames = 500 if fixed else 900
    metadata = [row for row in metadata if row[0] <= max_mel_frames]
    loader = DataLoader(SynthesizerDataset(metadata, num_mels), 16, collate_fn=lambda batch: collate_synthesizer(batch, r))
    model = Tacotron(num_mels, r).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    for texts, mels, embeds, idx in loader:
        ends = torch.tensor([metadata[number][0] for number in idx])
        stop = (torch.arange(mels.shape[2])[None] >= ends[:, None] - 1).float()
        texts, mels, embeds, stop = texts.to(device), mels.to(device), embeds.to(device), stop.to(device)
        m1_hat, m2_hat, stop_pred = model(texts, mels, embeds)
        loss = F.mse_loss(m1_hat, mels) + F.l1_loss(m1_hat, mels) + F.mse_loss(m2_hat, mels)
        loss = loss + F.binary_cross_entropy(stop_pred.clamp(0, 1), stop)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


# A hierarchical VAE reconstructs a photo of a face.

class ResidualCell(nn.Module):
    def __init__(self, channels, expand):
        super().__init__()
        hidden = channels * expand
        self.body = nn.Sequential(nn.BatchNorm2d(channels), nn.Conv2d(channels, hidden, 1, bias=False), nn.BatchNorm2d(hidden), nn.SiLU(),
                                  nn.Conv2d(hidden, hidden, 5, padding=2, groups=hidden, bias=False), nn.BatchNorm2d(hidden), nn.SiLU(),
                                  nn.Conv2d(hidden, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x):
        return x + 0.1 * self.body(x)


class Normal:
    def __init__(self, mu, log_sigma):
        self.mu, self.sigma = mu, log_sigma.clamp(-5, 5).exp() + 1e-2

    def sample(self):
        return self.mu + torch.randn_like(self.mu) * self.sigma

    def log_p(self, z):
        return -0.5 * ((z - self.mu) / self.sigma) ** 2 - 0.5 * math.log(2 * math.pi) - self.sigma.log()


class AutoEncoder(nn.Module):
    def __init__(self, channels=24, num_groups=6, num_latent=20, cells=2):
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.pre_process = nn.Sequential(*[ResidualCell(channels, 2) for _ in range(2)], nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1))
        width = 2 * channels
        self.enc_tower = nn.ModuleList(nn.Sequential(*[ResidualCell(width, 2) for _ in range(cells)]) for _ in range(num_groups))
        self.dec_tower = nn.ModuleList(nn.Sequential(*[ResidualCell(width, 4) for _ in range(cells)]) for _ in range(num_groups))
        self.enc_combiner = nn.ModuleList(nn.Conv2d(width, width, 1) for _ in range(num_groups))
        self.enc_sampler = nn.ModuleList(nn.Conv2d(width, 2 * num_latent, 3, padding=1) for _ in range(num_groups))
        self.dec_sampler = nn.ModuleList(nn.Conv2d(width, 2 * num_latent, 1) for _ in range(num_groups))
        self.dec_combiner = nn.ModuleList(nn.Conv2d(width + num_latent, width, 1) for _ in range(num_groups))
        self.prior_ftr0 = nn.Parameter(torch.randn(width, 1, 1))
        self.post_process = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, channels, 3, padding=1), ResidualCell(channels, 4), ResidualCell(channels, 4))
        self.image_conditional = nn.Sequential(nn.ELU(), nn.Conv2d(channels, 3 * 10, 3, padding=1))

    def forward(self, x):
        s = self.pre_process(self.stem(2 * x - 1))
        combiner_cells_s = []
        for cell in self.enc_tower:
            s = cell(s)
            combiner_cells_s.append(s)
        combiner_cells_s.reverse()
        s = self.prior_ftr0.expand(x.shape[0], -1, *combiner_cells_s[0].shape[2:])
        log_q, log_p = 0, 0
        for idx_dec, cell in enumerate(self.dec_tower):
            mu_p, log_sig_p = self.dec_sampler[idx_dec](s).chunk(2, 1)
            ftr = self.enc_combiner[idx_dec](combiner_cells_s[idx_dec]) + s
            mu_q, log_sig_q = self.enc_sampler[idx_dec](F.elu(ftr)).chunk(2, 1)
            dist = Normal(mu_p + mu_q, log_sig_p + log_sig_q)
            z = dist.sample()
            log_q = log_q + dist.log_p(z).sum((1, 2, 3))
            log_p = log_p + Normal(mu_p, log_sig_p).log_p(z).sum((1, 2, 3))
            s = cell(self.dec_combiner[idx_dec](torch.cat([s, z], 1)))
        return self.image_conditional(self.post_process(s)), log_q, log_p


@expected("evaluation_keeps_graphs", fix="no_grad", thread="NVlabs/NVAE#24", memory=1000, held_back=True)
def reconstruct_faces(fixed=False):
    """`model.eval()` does not turn gradient tracking off, so the forward pass of even a single image through the encoder and decoder towers
    of `AutoEncoder` keeps all intermediate results of all cells for a backward pass that never comes. Cured by: Run the forward pass under
    `torch.no_grad()`.
    """
    checkpoint = copy.deepcopy(AutoEncoder().state_dict())
    model = AutoEncoder()
    model.load_state_dict(checkpoint)
    model = model.cuda().eval()
    images = torch.rand(3, 3, 256, 256)
    reconstructions = []
    for image in images:
        with torch.no_grad() if fixed else contextlib.nullcontext():
            logits, log_q, log_p = model(image[None].cuda())
        mean = logits[:, :3].sigmoid()
        reconstructions.append(mean.detach().cpu())
        del logits, log_q, log_p, mean
    return torch.cat(reconstructions).shape


# Near-duplicate search in an image folder by the embeddings of a MobileNet.

class ImgFolder(Dataset):
    def __init__(self, image_dir, count):
        self.image_dir, self.image_files = image_dir, [f"{image_dir}/IMG_{n:04}.jpg" for n in range(count)]
        self.pixels = torch.rand(3, 232, 232)

    def __len__(self):
        return len(self.image_files)

    def __getitem__(self, item):
        shift = item % 8
        return self.pixels[:, shift:shift + 224, shift:shift + 224], self.image_files[item]


class CNN:
    def __init__(self, gradients):
        self.batch_size, self.gradients = 32, gradients
        self.device = torch.device("cuda")
        mobilenet = torchvision.models.mobilenet_v3_small(weights=None)
        self.model = nn.Sequential(mobilenet.features, mobilenet.avgpool, nn.Flatten()).to(self.device).eval()

    def _get_cnn_features_batch(self, folder):
        dataloader = DataLoader(folder, batch_size=self.batch_size)
        feat_arr, names = [], []
        with torch.set_grad_enabled(self.gradients):
            for pixels, files in dataloader:
                feat_arr += list(self.model(pixels.to(self.device)))
                names += files
        feat_vec = torch.stack(feat_arr).detach().cpu().numpy()
        return {name: feat_vec[i] for i, name in enumerate(names)}

    def encode_images(self, folder):
        encoding_map = self._get_cnn_features_batch(folder)
        return encoding_map

    def find_duplicates(self, folder):
        encoding_map = self.encode_images(folder)
        features = np.nan_to_num(np.stack(list(encoding_map.values())))
        features = features / (np.linalg.norm(features, axis=1, keepdims=True) + 1e-8)
        scores = features @ features.T
        return {name: int((row > 0.9).sum()) for name, row in zip(encoding_map, scores)}


@expected("evaluation_keeps_graphs", fix="no_grad", thread="idealo/imagededup#192", memory=600, held_back=True)
def encode_image_folder(fixed=False):
    """`CNN._get_cnn_features_batch` runs the model with gradients on and collects the rows of its outputs in `feat_arr`; each row keeps the
    graph of its batch, so the activations of all batches of the folder stay on the GPU. Cured by: Wrap the loop over the batches in
    `torch.no_grad()`.
    """
    encoder = CNN(gradients=not fixed)
    return len(encoder.find_duplicates(ImgFolder("holiday", 480)))


# Node classification on a co-purchase graph.

class GCNConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(out_channels))

    def forward(self, x, adj_t):
        return torch.sparse.mm(adj_t, self.lin(x)) + self.bias


class GCN(nn.Module):
    def __init__(self, in_channels, hidden_channels, out_channels, num_layers, dropout):
        super().__init__()
        widths = [in_channels] + [hidden_channels] * (num_layers - 1) + [out_channels]
        self.convs = nn.ModuleList(GCNConv(a, b) for a, b in zip(widths[:-1], widths[1:]))
        self.dropout = dropout

    def forward(self, x, adj_t):
        for conv in self.convs[:-1]:
            x = F.dropout(F.relu(conv(x, adj_t)), p=self.dropout, training=self.training)
        return torch.log_softmax(self.convs[-1](x, adj_t), -1)


class Products:
    def __init__(self, num_nodes, degree, num_classes):
        rng = np.random.default_rng(3)
        self.row = np.repeat(np.arange(num_nodes), degree)
        self.col = (self.row + rng.integers(-600, 600, len(self.row))) % num_nodes
        self.x = torch.zeros(num_nodes, 100)
        self.y = torch.from_numpy(rng.integers(0, num_classes, num_nodes))
        self.train_mask = torch.from_numpy(rng.random(num_nodes) < 0.1)
        self.num_nodes = num_nodes

    def subgraph(self, start, stop):
        keep = (self.row >= start) & (self.row < stop) & (self.col >= start) & (self.col < stop)
        row, col = self.row[keep] - start, self.col[keep] - start
        size = stop - start
        degree = np.bincount(row, minlength=size).clip(1)
        value = 1 / np.sqrt(degree[row] * degree[col])
        index = torch.from_numpy(np.stack([row, col]))
        adj_t = torch.sparse_coo_tensor(index, torch.from_numpy(value).float(), (size, size), check_invariants=False)
        return SimpleNamespace(x=self.x[start:stop], adj_t=adj_t.coalesce(), y=self.y[start:stop], train_idx=self.train_mask[start:stop].nonzero()[:, 0])


def train_on(model, data, optimizer, device):
    model.train()
    optimizer.zero_grad()
    train_idx = data.train_idx.to(device)
    out = model(data.x.to(device), data.adj_t.to(device))[train_idx]
    loss = F.nll_loss(out, data.y.to(device)[train_idx])
    loss.backward()
    optimizer.step()
    return loss.item()


@expected("whole_step", fix="part|sampl", thread="snap-stanford/ogb#16", memory=450, held_back=True)
def train_products_full(fixed=False):
    """The GCN is trained full-batch: `model(data.x, data.adj_t)` computes and keeps the hidden features of every node of the graph for
    every layer, which is more than the card has; that is to be expected for a graph of this size. Cured by: Use the training with sampling:
    train on partitions of the graph, one batch of clusters at a time.
    """
    device, num_nodes = torch.device("cuda"), 100000
    dataset = Products(num_nodes, 12, 47)
    model = GCN(100, 256, 47, 3, 0.5).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    parts = np.linspace(0, num_nodes, 11 if fixed else 2).astype(int)
    batches = [dataset.subgraph(a, b) for a, b in zip(parts[:-1], parts[1:])]
    for epoch in range(2):
        total = [train_on(model, data, optimizer, device) for data in batches]
    return len(total)


# Supervised fine-tuning of a small causal language model.

def setup_model(dtype):
    config = transformers.LlamaConfig(vocab_size=48000, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
                                      num_key_value_heads=2, max_position_embeddings=2048, tie_word_embeddings=True)
    model = transformers.LlamaForCausalLM(config).to(dtype).cuda()
    model.config.use_cache = False
    return model


def forward(model, input_ids, position_ids, upcast):
    logits = model(input_ids=input_ids, position_ids=position_ids).logits
    return logits.float().contiguous() if upcast else logits


def fake_batches(micro_batches, seq_len, vocab):
    for _ in range(micro_batches):
        tokens = torch.randint(0, vocab, (1, seq_len + 1))
        loss_mask = torch.ones(1, seq_len, dtype=torch.bool)
        loss_mask[:, :100] = False
        yield {"input_ids": tokens[:, :-1], "target_ids": tokens[:, 1:], "loss_mask": loss_mask,
               "position_ids": torch.arange(seq_len)[None]}


@expected("logits", fix="float|bf16", thread="PrimeIntellect-ai/prime-rl#899", memory=1250, held_back=True)
def run_sft_trainer(fixed=False):
    """`forward` casts the bf16 logits (batch x sequence x vocabulary) to float32, so the logits, their log-softmax in the cross entropy and
    the gradients of both are in float32, twice as large as they need to be for SFT. Cured by: Do not cast: `forward` returns the logits in
    bf16.
    """
    model = setup_model(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    grad_accum_steps, losses = 2, []
    for step in range(2):
        for micro_batch in fake_batches(grad_accum_steps, 2048, 48000):
            micro_batch = {key: value.cuda() for key, value in micro_batch.items()}
            logits = forward(model, micro_batch["input_ids"], micro_batch["position_ids"], upcast=not fixed)
            token_loss = F.cross_entropy(logits.flatten(0, 1), micro_batch["target_ids"].flatten(), reduction="none")
            losses.append(token_loss.detach().cpu())
            loss = (token_loss * micro_batch["loss_mask"].flatten()).sum() / (1948 * grad_accum_steps)
            del logits
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return len(losses)


# Driving agents in many simulated worlds learn with PPO.

class MaskedRolloutBuffer:
    def __init__(self, buffer_size, n_envs, obs_dim, device, storage_device):
        self.buffer_size, self.n_envs, self.obs_dim = buffer_size, n_envs, obs_dim
        self.device, self.storage_device = device, storage_device
        self.reset()

    def reset(self):
        empty = lambda *shape: torch.zeros(self.buffer_size, self.n_envs, *shape, device=self.storage_device)
        self.observations = empty(self.obs_dim)
        self.actions, self.rewards, self.episode_starts = empty(1), empty(), empty()
        self.values, self.log_probs, self.advantages, self.returns = empty(), empty(), empty(), empty()
        self.pos = 0

    def add(self, obs, action, reward, episode_start, value, log_prob):
        columns = [(self.observations, obs), (self.actions, action), (self.rewards, reward),
                   (self.episode_starts, episode_start), (self.values, value), (self.log_probs, log_prob)]
        for column, entry in columns:
            column[self.pos].copy_(entry.reshape(column.shape[1:]))
        self.pos += 1

    def compute_returns_and_advantage(self, last_values, gamma=0.99, gae_lambda=0.95):
        last_gae_lam, next_values = 0, last_values.flatten().to(self.storage_device)
        for step in reversed(range(self.buffer_size)):
            delta = self.rewards[step] + gamma * next_values - self.values[step]
            last_gae_lam = delta + gamma * gae_lambda * last_gae_lam * (1 - self.episode_starts[step])
            self.advantages[step] = last_gae_lam
            next_values = self.values[step]
        self.returns = self.advantages + self.values

    def get(self, batch_size):
        total = self.buffer_size * self.n_envs
        fields = [t.reshape(total, *t.shape[2:]) for t in (self.observations, self.actions, self.log_probs, self.advantages, self.returns)]
        for indices in torch.randperm(total)[:8 * batch_size].split(batch_size):
            indices = indices.to(self.storage_device)
            yield [field[indices].to(self.device) for field in fields]


class MultiAgentEnv:
    def __init__(self, num_worlds, agents_per_world, obs_dim, device):
        self.num_envs, self.obs_dim, self.device = num_worlds * agents_per_world, obs_dim, device

    def observe(self):
        return torch.rand(self.num_envs, self.obs_dim, device=self.device)

    def step(self, actions):
        return self.observe(), torch.rand(self.num_envs, device=self.device), torch.zeros(self.num_envs, device=self.device)


class DrivingPolicy(nn.Module):
    def __init__(self, obs_dim, num_actions, width=128):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(obs_dim, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.action_net, self.value_net = nn.Linear(width, num_actions), nn.Linear(width, 1)

    def forward(self, obs):
        latent = self.body(obs)
        return self.action_net(latent).log_softmax(-1), self.value_net(latent)


@expected("large_result", fix="host", thread="Emerge-Lab/gpudrive#110", memory=600, held_back=True)
def learn_from_rollouts(fixed=False):
    """`MaskedRolloutBuffer.reset` allocates the buffer for all steps, all agents and their observations on the compute device, so the
    rollout storage alone fills the GPU. Cured by: Separate storage and compute device: the buffer lies on the CPU (`storage_device="cpu"`),
    and minibatches go to the GPU.
    """
    device, n_steps, obs_dim = torch.device("cuda"), 91, 620
    env = MultiAgentEnv(50, 64, obs_dim, device)
    policy = DrivingPolicy(obs_dim, 21).to(device)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    rollout_buffer = MaskedRolloutBuffer(n_steps, env.num_envs, obs_dim, device, "cpu" if fixed else device)
    obs, starts = env.observe(), torch.ones(env.num_envs, device=device)
    with torch.no_grad():
        for _ in range(n_steps):
            log_probs, values = policy(obs)
            actions = torch.randint(0, 21, (env.num_envs, 1)).to(device)
            new_obs, rewards, dones = env.step(actions)
            rollout_buffer.add(obs, actions, rewards, starts, values, log_probs.gather(1, actions)[:, 0])
            obs, starts = new_obs, dones
        rollout_buffer.compute_returns_and_advantage(policy(obs)[1])
    for batch_obs, actions, old_log_prob, advantages, returns in rollout_buffer.get(2048):
        log_probs, values = policy(batch_obs)
        ratio = (log_probs.gather(1, actions.long().clamp(0, 20))[:, 0] - old_log_prob).exp()
        policy_loss = -torch.min(advantages * ratio, advantages * ratio.clamp(0.8, 1.2)).mean()
        loss = policy_loss + 0.5 * F.mse_loss(values.flatten(), returns)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# Moments of a video are located by a sentence, at several temporal scales.

class MultiScaleTAN(nn.Module):
    def __init__(self, vocab_dim, video_dim, hidden, num_clips, num_anchors):
        super().__init__()
        self.num_clips, self.num_anchors = num_clips, num_anchors
        self.textual_encoder = nn.LSTM(vocab_dim, hidden, batch_first=True)
        self.vis_conv = nn.Conv1d(video_dim, hidden, 1)
        self.fusion = nn.Linear(hidden, hidden)
        self.predict = nn.ModuleList(nn.Sequential(nn.Conv2d(hidden, hidden, 3, padding=1), nn.ReLU(), nn.Conv2d(hidden, 1, 1)) for _ in num_clips)

    def forward(self, textual_input, visual_input):
        _, (text, _) = self.textual_encoder(textual_input)
        video = self.vis_conv(visual_input)
        predictions, map_masks = [], []
        for clips, head in zip(self.num_clips, self.predict):
            pooled = F.adaptive_max_pool1d(video, clips)
            anchors = torch.stack([pooled.roll(-shift, -1) for shift in range(self.num_anchors)], -1)
            fused = F.normalize(anchors * self.fusion(text[-1])[:, :, None, None], dim=1)
            predictions.append(head(fused).sigmoid())
            valid = torch.ones(clips, self.num_anchors).triu().flip(0).cuda()
            map_masks.append(valid.expand(len(video), 1, -1, -1))
        return predictions, map_masks


def recover_to_single_map(joint_probs, copy_slice):
    map_size = joint_probs[0].shape[2]
    score_map = torch.zeros(len(joint_probs[0]), 1, map_size, map_size, device="cuda")
    for prob in joint_probs:
        dilation = map_size // prob.shape[2]
        span = prob.shape[2] * dilation
        for i in range(prob.shape[3]):
            end = (i + 1) * dilation - 1
            current = score_map[..., :span:dilation, end]
            score_map[..., :span:dilation, end] = torch.max(current.clone() if copy_slice else current, prob[..., i])
    return score_map


def bce_rescale_loss(scores, masks, targets):
    return (F.binary_cross_entropy(scores.clamp(0, 1), targets, reduction="none") * masks).sum() / masks.sum()


def network(sample, model, optimizer, copy_slice):
    predictions, map_masks = model(sample["word_vectors"].cuda(), sample["video_features"].cuda())
    loss_value = 0
    for prediction, map_mask in zip(predictions, map_masks):
        loss_value = loss_value + bce_rescale_loss(prediction, map_mask, torch.rand(prediction.shape).cuda())
    joint_prob = recover_to_single_map(predictions, copy_slice)
    mask = recover_to_single_map(map_masks, copy_slice)
    scores, order = torch.topk((joint_prob.detach().cpu() * mask.cpu()).flatten(1), 5, dim=1)
    if model.training:
        optimizer.zero_grad()
        loss_value.backward()
        optimizer.step()
    return loss_value, order


@expected("reference_cycle", fix="clone", thread="microsoft/VideoX#47", memory=450, held_back=True)
def localize_moments(fixed=False):
    """`recover_to_single_map` assigns `torch.max(score_map[slice], prob)` back into the same slice of `score_map`: autograd saves the
    slice, a view of `score_map`, in the graph that `score_map` itself then owns, a cycle which is never freed as no backward runs through
    `joint_prob`; so the maps and predictions of every training step stay on the GPU. Cured by: Clone the slice before `torch.max` takes it
    (`score_map[slice].clone()`).
    """
    model = MultiScaleTAN(50, 128, 16, (128, 64, 32, 16), 8).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    model.train()
    loss_sum, sorted_times = 0.0, {}
    for cur_iter in range(60):
        sample = {"word_vectors": torch.rand(96, 12, 50), "video_features": torch.rand(96, 128, 128)}
        loss_value, times = network(sample, model, optimizer, copy_slice=fixed)
        loss_sum += loss_value.item()
        sorted_times[cur_iter] = times
    return loss_sum, len(sorted_times)


# Captioning: a Q-Former reads image features and feeds a frozen language model.

class VisionTransformer(nn.Module):
    def __init__(self, img_size=224, patch=14, dim=640, depth=10, heads=10):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, patch, stride=patch)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, (img_size // patch) ** 2 + 1, dim))
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.0, activation="gelu", batch_first=True, norm_first=True) for _ in range(depth))
        self.num_features = dim

    def forward(self, image):
        x = self.patch_embed(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return x


class Blip2OPT(nn.Module):
    def __init__(self, freeze_vit, num_query_token=32, dim=256, vocab=6000):
        super().__init__()
        self.visual_encoder = VisionTransformer()
        if freeze_vit:
            for parameter in self.visual_encoder.parameters():
                parameter.requires_grad = False
            self.visual_encoder.eval()
        self.freeze_vit = freeze_vit
        self.ln_vision = nn.LayerNorm(self.visual_encoder.num_features)
        self.query_tokens = nn.Parameter(torch.zeros(1, num_query_token, dim))
        self.vision_proj = nn.Linear(self.visual_encoder.num_features, dim)
        self.Qformer = nn.TransformerDecoder(nn.TransformerDecoderLayer(dim, 4, 4 * dim, batch_first=True), 4)
        self.opt_model = transformers.OPTForCausalLM(transformers.OPTConfig(vocab_size=vocab, hidden_size=512, word_embed_proj_dim=512, ffn_dim=2048, num_hidden_layers=6, num_attention_heads=8))
        for parameter in self.opt_model.parameters():
            parameter.requires_grad = False
        self.opt_proj = nn.Linear(dim, 512)

    def train(self, mode=True):
        super().train(mode)
        if self.freeze_vit:
            self.visual_encoder.eval()
        return self

    def forward(self, samples):
        image_embeds = self.ln_vision(self.visual_encoder(samples["image"]))
        query = self.query_tokens.expand(len(image_embeds), -1, -1)
        inputs_opt = self.opt_proj(self.Qformer(query, self.vision_proj(image_embeds)))
        text = samples["text_input"]
        inputs_embeds = torch.cat([inputs_opt, self.opt_model.get_input_embeddings()(text)], 1)
        ignored = torch.full(inputs_opt.shape[:2], -100, device=text.device)
        mask = torch.ones(inputs_embeds.shape[:2], dtype=torch.long, device=text.device)
        return self.opt_model(inputs_embeds=inputs_embeds, attention_mask=mask, labels=torch.cat([ignored, text], 1)).loss


@expected("model_states", fix="freeze|requires_grad|frozen", thread="salesforce/LAVIS#147", memory=700, held_back=True)
def tune_captioner(fixed=False):
    """`freeze_vit` is False, so the large image encoder `visual_encoder` is trained too: its activations are kept for backward and it gets
    gradients and two AdamW states per weight, which does not fit even with batch size 1. Cured by: Set `freeze_vit` to True.
    """
    model = Blip2OPT(freeze_vit=fixed).cuda()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, weight_decay=0.05)
    for _ in range(3):
        samples = {"image": torch.rand(4, 3, 224, 224).cuda(), "text_input": torch.randint(5, 6000, (4, 24)).cuda()}
        loss = model(samples)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


# Knowledge graph embeddings for link prediction.

class DistMult(nn.Module):
    def __init__(self, num_entities, num_relations, embedding_dim):
        super().__init__()
        self.entity_embeddings = nn.Embedding(num_entities, embedding_dim)
        self.relation_embeddings = nn.Embedding(num_relations, embedding_dim)

    def interaction(self, h, r, t):
        return (h * r * t).sum(-1)

    def score_hrt(self, hrt_batch):
        return self.interaction(self.entity_embeddings(hrt_batch[:, 0]), self.relation_embeddings(hrt_batch[:, 1]), self.entity_embeddings(hrt_batch[:, 2]))

    def score_t(self, hr_batch):
        h, r = self.entity_embeddings(hr_batch[:, :1]), self.relation_embeddings(hr_batch[:, 1:])
        return self.interaction(h, r, self.entity_embeddings.weight[None])

    def score_h(self, rt_batch):
        r, t = self.relation_embeddings(rt_batch[:, :1]), self.entity_embeddings(rt_batch[:, 1:])
        return self.interaction(self.entity_embeddings.weight[None], r, t)


class RankBasedEvaluator:
    def __init__(self):
        self.ranks = []

    def process_scores(self, scores, true_ids):
        true_scores = scores.gather(1, true_ids[:, None])
        self.ranks.append(((scores > true_scores).sum(1) + 1).cpu())

    @torch.no_grad()
    def evaluate(self, model, mapped_triples, batch_size):
        model.eval()
        for batch in mapped_triples.split(batch_size):
            batch = batch.cuda()
            self.process_scores(model.score_t(batch[:, :2]), batch[:, 2])
            self.process_scores(model.score_h(batch[:, 1:]), batch[:, 0])
        return torch.cat(self.ranks).double().mean().item()


def train_slcwa(model, mapped_triples, batch_size, num_entities):
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()
    for positives in mapped_triples.split(batch_size):
        negatives = positives.clone()
        negatives[:, 2] = torch.randint(0, num_entities, (len(positives),))
        loss = F.softplus(model.score_hrt(negatives.cuda()) - model.score_hrt(positives.cuda()) + 1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("all_pairs", fix="split", thread="pykeen/pykeen#596", memory=500, held_back=True)
def evaluate_link_prediction(fixed=False):
    """The evaluation scores each triple of the batch against all entities (`score_t` / `score_h`: `h * r * t` is batch x entities x dim),
    while training scores only one negative per triple, so evaluation needs far more memory than training although its batch (128) is
    smaller than that of training (512). Cured by: A smaller evaluation batch (32).
    """
    num_entities, num_relations = 14500, 237
    triples = torch.stack([torch.randint(0, num_entities, (24000,)), torch.randint(0, num_relations, (24000,)), torch.randint(0, num_entities, (24000,))], 1)
    training, validation = triples[:22000], triples[22000:]
    model = DistMult(num_entities, num_relations, 64).cuda()
    train_slcwa(model, training, 512, num_entities)
    evaluator = RankBasedEvaluator()
    return evaluator.evaluate(model, validation, batch_size=32 if fixed else 128)


# A camera photo goes from sRGB to CIE XYZ and is rendered back.

def conv_stack(depth, width, last):
    layers = [nn.Conv2d(3, width, 3, padding=1), nn.LeakyReLU()]
    for _ in range(depth - 2):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.LeakyReLU()]
    return nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1), last)


class GlobalSubNet(nn.Module):
    def __init__(self, width=64, in_img_sz=128):
        super().__init__()
        self.in_img_sz = in_img_sz
        blocks = []
        for i in range(5):
            blocks += [nn.Conv2d(3 if i == 0 else width, width, 3, padding=1), nn.LeakyReLU(), nn.MaxPool2d(2)]
        self.net = nn.Sequential(*blocks, nn.Flatten(), nn.Linear(width * 16, 1024), nn.Dropout(0.5), nn.Linear(1024, 18))

    def forward(self, x):
        rows, columns = (torch.linspace(0, size - 1, self.in_img_sz).long().to(x.device) for size in x.shape[2:])
        return self.net(x.index_select(2, rows).index_select(3, columns))


class CIEXYZNet(nn.Module):
    def __init__(self, local_depth=16, local_width=32, scale=0.25):
        super().__init__()
        self.scale = scale
        self.local_nets = nn.ModuleDict({target: conv_stack(local_depth, local_width, nn.Tanh()) for target in ("xyz", "srgb")})
        self.global_nets = nn.ModuleDict({target: GlobalSubNet() for target in ("xyz", "srgb")})

    def forward_local(self, x, target):
        return self.local_nets[target](x) * self.scale

    def forward_global(self, x, target):
        matrix = self.global_nets[target](x).view(-1, 3, 6)
        flat = x.flatten(2)
        return (matrix @ torch.cat([flat, flat * flat], 1)).view_as(x)

    def forward(self, srgb):
        xyz = self.forward_global(srgb - self.forward_local(srgb, "xyz"), "xyz")
        rendered = self.forward_global(xyz, "srgb")
        return xyz, rendered + self.forward_local(rendered, "srgb")


def from_tensor_to_image(tensor):
    return tensor.detach().squeeze(0).permute(1, 2, 0).cpu().numpy().clip(0, 1)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="mahmoudnafifi/CIE_XYZ_NET#2", memory=1200, held_back=True)
def render_xyz_photo(fixed=False):
    """The demo calls `ciexyzNet(in_img_tensor)` on a large photo without `torch.no_grad()`, so the activations of all convolutions of both
    local networks at full resolution are kept for a backward pass nobody runs. Cured by: Wrap the call of the network in `torch.no_grad()`.
    """
    device = torch.device("cuda")
    ciexyzNet = CIEXYZNet().to(device)
    ciexyzNet.eval()
    photos = [np.random.default_rng(n).random((768, 1024, 3), dtype=np.float32) for n in range(2)]
    shapes = []
    for in_img in photos:
        in_img_tensor = torch.from_numpy(in_img).permute(2, 0, 1)[None].to(device)
        if fixed:
            with torch.no_grad():
                results = ciexyzNet(in_img_tensor)
        else:
            results = ciexyzNet(in_img_tensor)
        shapes.append([from_tensor_to_image(image).shape for image in results])
    return shapes
