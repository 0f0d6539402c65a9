"""Programs after public threads, from all fields."""
import collections
import io
import types

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from expected import expected


# A causal language model answers a question about a long document.

def build_reader(vocab_size):
    config = transformers.LlamaConfig(vocab_size=vocab_size, hidden_size=256, intermediate_size=688, num_hidden_layers=4,
                                      num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=8192,
                                      tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=0)
    return transformers.LlamaForCausalLM(config).to(torch.bfloat16).cuda().eval()


class TemperatureWarper:
    def __init__(self, temperature):
        self.temperature = temperature

    def __call__(self, input_ids, scores):
        return scores / self.temperature


class TopKWarper:
    def __init__(self, top_k):
        self.top_k = top_k

    def __call__(self, input_ids, scores):
        worst = scores.topk(self.top_k).values[:, -1:]
        return scores.masked_fill(scores < worst, -float("inf"))


class Generator:
    def __init__(self, model, warpers, slice_before_copy):
        self.model, self.warpers, self.slice_before_copy = model, warpers, slice_before_copy

    def prepare_inputs_for_generation(self, input_ids, past_key_values):
        if past_key_values is not None and past_key_values.get_seq_length():
            input_ids = input_ids[:, -1:]
        return {"input_ids": input_ids, "past_key_values": past_key_values, "use_cache": True}

    def _sample(self, input_ids, max_new_tokens):
        past_key_values = transformers.DynamicCache()
        for _ in range(max_new_tokens):
            model_inputs = self.prepare_inputs_for_generation(input_ids, past_key_values)
            outputs = self.model(**model_inputs)
            past_key_values = outputs.past_key_values
            if self.slice_before_copy:
                next_token_logits = outputs.logits[:, -1, :].clone().float()
            else:
                next_token_logits = outputs.logits.clone()[:, -1, :].float()
            next_token_scores = next_token_logits
            for warper in self.warpers:
                next_token_scores = warper(input_ids, next_token_scores)
            next_tokens = torch.multinomial(next_token_scores.softmax(-1), num_samples=1)
            input_ids = torch.cat([input_ids, next_tokens], dim=-1)
            del outputs
        return input_ids

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens=32):
        prompt_length = input_ids.shape[1]
        return self._sample(input_ids, max_new_tokens)[:, prompt_length:]


@expected("logits", fix="logits_to_keep|view", thread="huggingface/transformers#34796", memory=1050, held_back=True)
def answer_from_document(fixed=False):
    """`_sample` copies the whole `outputs.logits` (batch, prompt length, vocabulary) before it takes the last position of it for
    `next_token_logits`; in the first step, where the whole prompt is run, the logits of all positions so exist twice. Cured by: slice
    first, then copy: `outputs.logits[:, -1, :].clone()`.
    """
    vocab_size = 128256
    model = build_reader(vocab_size)
    generator = Generator(model, [TemperatureWarper(0.7), TopKWarper(50)], slice_before_copy=fixed)
    rng = np.random.default_rng(0)
    answers = []
    for question in range(3):
        document = rng.integers(3, vocab_size, 2400)
        prompt = np.concatenate([document, rng.integers(3, vocab_size, 30)])
        input_ids = torch.from_numpy(prompt)[None].cuda()
        answers.append(generator.generate(input_ids, max_new_tokens=12).cpu())
    return {"answers": len(answers)}


# Speech to text with speakers: an audio encoder feeds a language model.

class AudioEncoder(nn.Module):
    def __init__(self, n_mels, dim):
        super().__init__()
        self.conv1 = nn.Conv1d(n_mels, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True, norm_first=True) for _ in range(2))
        self.window = 1500

    def forward(self, mel):
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2)
        pieces = []
        for piece in x.split(self.window, dim=1):
            for block in self.blocks:
                piece = block(piece)
            pieces.append(piece)
        return torch.cat(pieces, dim=1)


class TranscribeDiarize(nn.Module):
    def __init__(self, attn_implementation, dim=256, merge=8):
        super().__init__()
        config = transformers.Qwen3Config(vocab_size=16000, hidden_size=dim, intermediate_size=2 * dim, num_hidden_layers=4, num_attention_heads=8,
                                          num_key_value_heads=4, head_dim=32, max_position_embeddings=16384, attn_implementation=attn_implementation)
        self.audio, self.merge = AudioEncoder(80, 128), merge
        self.adaptor = nn.Sequential(nn.Linear(128 * merge, dim), nn.GELU(), nn.Linear(dim, dim))
        self.language = transformers.Qwen3ForCausalLM(config)

    def embed_audio(self, mel):
        features = self.audio(mel)
        length = features.shape[1] // self.merge * self.merge
        return self.adaptor(features[:, :length].reshape(1, -1, features.shape[2] * self.merge))

    def forward(self, mel, prompt_ids, max_new_tokens):
        words = self.language.get_input_embeddings()
        inputs_embeds = torch.cat([self.embed_audio(mel), words(prompt_ids)], dim=1)
        cache, transcript = transformers.DynamicCache(), []
        for _ in range(max_new_tokens):
            out = self.language(inputs_embeds=inputs_embeds, past_key_values=cache, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1].argmax(-1, keepdim=True)
            transcript.append(token)
            inputs_embeds, cache = words(token), out.past_key_values
        return torch.cat(transcript, 1)


def load_model(device, dtype, **kwargs):
    model = TranscribeDiarize(kwargs.get("attn_implementation", "eager"))
    return model.to(dtype=dtype).to(device).eval()


def log_mel(seconds, frames_per_second=50):
    return torch.randn(1, 80, seconds * frames_per_second)


@expected("attention_scores", fix="scaled_dot", thread="OpenMOSS/MOSS-Transcribe-Diarize#46", memory=600, held_back=True)
def transcribe_meeting(fixed=False):
    """The decoder is loaded with the eager attention (no `attn_implementation` that avoids it), which for the half hour of audio in the
    prompt builds the full matrix of attention scores, heads by length by length, in every layer. Cured by: load the model with
    `attn_implementation="sdpa"`.
    """
    device, dtype = torch.device("cuda"), torch.bfloat16
    options = {"attn_implementation": "sdpa"} if fixed else {}
    model = load_model(device, dtype, **options)
    prompt_ids = torch.randint(0, 16000, (1, 24)).to(device)
    transcripts = []
    with torch.inference_mode():
        for minutes in (2, 5, 8, 30):
            mel = log_mel(60 * minutes).to(device, dtype)
            transcripts.append(model(mel, prompt_ids, 8).cpu())
    return {"meetings": len(transcripts)}


# Speech enhancement on full-band audio with temporal convolutions and axial attention.

class TFCM(nn.Module):
    def __init__(self, channels, dilation):
        super().__init__()
        self.pointwise = nn.Sequential(nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels), nn.PReLU(channels))
        self.pad = 2 * dilation
        self.depthwise = nn.Sequential(nn.Conv2d(channels, channels, 3, dilation=(1, dilation), padding=(1, 0), groups=channels),
                                       nn.BatchNorm2d(channels), nn.PReLU(channels))
        self.out = nn.Conv2d(channels, channels, 1)

    def forward(self, x):
        y = F.pad(self.pointwise(x), (self.pad, 0))
        return self.out(self.depthwise(y)) + x


class ASA(nn.Module):
    def __init__(self, channels, over_time=True):
        super().__init__()
        self.inner, self.over_time = channels // 4, over_time
        self.to_f = self.projection(channels, 3 * self.inner)
        if over_time:
            self.to_t = self.projection(channels, 2 * self.inner)
        self.back = self.projection(self.inner, channels)

    @staticmethod
    def projection(inp, out):
        return nn.Sequential(nn.Conv2d(inp, out, 1, bias=False), nn.BatchNorm2d(out), nn.PReLU(out))

    def forward(self, x):
        q, k, v = [part.permute(0, 3, 2, 1) for part in self.to_f(x).chunk(3, dim=1)]
        f_score = torch.softmax(q @ k.transpose(2, 3) * self.inner ** -0.5, dim=-1)
        out = (f_score @ v).transpose(1, 2)
        if self.over_time:
            qt, kt = [part.permute(0, 2, 3, 1) for part in self.to_t(x).chunk(2, dim=1)]
            t_score = qt @ kt.transpose(2, 3) * self.inner ** -0.5
            frames = t_score.shape[-1]
            future = torch.ones(frames, frames, device=x.device, dtype=torch.bool).triu(1)
            t_score = torch.softmax(t_score.masked_fill_(future, -1e30), dim=-1)
            out = t_score @ out
        return self.back(out.permute(0, 3, 1, 2)) + x


class MTFAANet(nn.Module):
    def __init__(self, n_fft=1536, hop=768, bands=64, channels=24, over_time=True):
        super().__init__()
        self.n_fft, self.hop = n_fft, hop
        self.register_buffer("window", torch.hann_window(n_fft))
        self.merge = nn.Linear(n_fft // 2 + 1, bands, bias=False)
        self.phase_encoder = nn.Conv2d(2, channels, 3, stride=(4, 1), padding=1)
        self.stages = nn.Sequential(TFCM(channels, 1), TFCM(channels, 2), ASA(channels, over_time), TFCM(channels, 4), ASA(channels, over_time))
        self.mask = nn.ConvTranspose2d(channels, 2, (4, 1), stride=(4, 1))
        self.split = nn.Linear(bands, n_fft // 2 + 1, bias=False)

    def forward(self, wave):
        spec = torch.view_as_real(torch.stft(wave, self.n_fft, self.hop, window=self.window, return_complex=True))
        spec = spec.permute(0, 3, 1, 2)
        x = self.merge(spec.transpose(2, 3)).transpose(2, 3)
        mask = torch.tanh(self.mask(self.stages(self.phase_encoder(x))))
        mask = self.split(mask.transpose(2, 3)).transpose(2, 3)
        return spec * mask, spec


@expected("attention_scores", fix="half the length|scaled_dot", thread="echocatzh/MTFAA-Net#4", memory=900, held_back=True)
def train_enhancer(fixed=False):
    """The attention over time in `ASA` computes `t_score`, a score of every frame with every frame for every frequency band; with clips of
    30 seconds it (and its softmax, kept for the backward) grows with the square of the number of frames. Cured by: remove the attention
    over time, keep the one over frequency.
    """
    sample_rate, seconds = 48000, 30
    model = MTFAANet(over_time=not fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    for step in range(6):
        clean = torch.randn(1, sample_rate * seconds)
        noisy = clean + 0.3 * torch.randn_like(clean)
        enhanced, _ = model(noisy.cuda())
        with torch.no_grad():
            target = torch.view_as_real(torch.stft(clean.cuda(), model.n_fft, model.hop, window=model.window, return_complex=True)).permute(0, 3, 1, 2)
        loss = F.l1_loss(enhanced, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Reinforcement learning: a recurrent policy for a grid world with many agents.

class Experience:
    def __init__(self, total_agents, horizon, obs_shape, hidden_size, num_layers, device):
        self.obs = torch.zeros(horizon, total_agents, *obs_shape, dtype=torch.uint8, device=device)
        self.actions = torch.zeros(horizon, total_agents, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(horizon, total_agents, device=device)
        self.rewards = torch.zeros(horizon, total_agents, device=device)
        self.values = torch.zeros(horizon, total_agents, device=device)
        self.lstm_h = torch.zeros(num_layers, total_agents, hidden_size, device=device)
        self.lstm_c = torch.zeros(num_layers, total_agents, hidden_size, device=device)

    def store(self, t, env_id, obs, actions, logprobs, rewards, values, lstm_state):
        self.obs[t, env_id], self.actions[t, env_id] = obs, actions
        self.logprobs[t, env_id], self.rewards[t, env_id], self.values[t, env_id] = logprobs, rewards, values
        self.lstm_h[:, env_id] = lstm_state["lstm_h"]
        self.lstm_c[:, env_id] = lstm_state["lstm_c"]

    def get_lstm_state(self, env_id):
        return self.lstm_h[:, env_id].contiguous(), self.lstm_c[:, env_id].contiguous()


class RecurrentPolicy(nn.Module):
    def __init__(self, obs_shape, hidden_size, num_layers, num_actions):
        super().__init__()
        self.cnn = nn.Sequential(nn.Conv2d(obs_shape[0], 48, 3, padding=1), nn.ReLU(), nn.Conv2d(48, 48, 3, stride=2), nn.ReLU(), nn.Flatten())
        self.encoder = nn.LazyLinear(hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size, num_layers)
        self.actor, self.critic = nn.Linear(hidden_size, num_actions), nn.Linear(hidden_size, 1)

    def forward(self, obs, state=None):
        steps, agents = obs.shape[:2]
        x = self.cnn(obs.flatten(0, 1).float() / 255)
        x = F.relu(self.encoder(x)).view(steps, agents, -1)
        x, state = self.lstm(x, state)
        return self.actor(x), self.critic(x).squeeze(-1), state


class GridWorld:
    def __init__(self, agents, obs_shape):
        self.agents, self.obs_shape, self.rng = agents, obs_shape, np.random.default_rng(1)

    def recv(self):
        obs = self.rng.integers(0, 255, (self.agents, *self.obs_shape), dtype=np.uint8)
        return torch.from_numpy(obs), torch.from_numpy(self.rng.random(self.agents, dtype=np.float32))


@expected("several_forward_passes", fix="detach", thread="Metta-AI/metta#1139", memory=500, held_back=True)
def train_recurrent_agent(fixed=False):
    """The LSTM state that the policy returns is stored in the experience buffer (`lstm_h`, `lstm_c`) without being detached, so the
    computation graphs of the rollout steps stay alive with the buffer. Cured by: detach the LSTM state before storing it.
    """
    device, agents, horizon, obs_shape, hidden = torch.device("cuda"), 256, 32, (12, 11, 11), 128
    envs = [GridWorld(agents, obs_shape) for _ in range(2)]
    policy = RecurrentPolicy(obs_shape, hidden, 2, 9).to(device)
    experience = Experience(2 * agents, horizon, obs_shape, hidden, 2, device)
    policy(torch.zeros(1, 1, *obs_shape, device=device))
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-4)
    for epoch in range(2):
        for t in range(horizon):
            for index, env in enumerate(envs):
                env_id = slice(index * agents, (index + 1) * agents)
                obs, rewards = (x.to(device) for x in env.recv())
                logits, values, (lstm_h, lstm_c) = policy(obs[None], experience.get_lstm_state(env_id))
                dist = torch.distributions.Categorical(logits=logits[0].detach(), validate_args=False)
                actions = dist.sample()
                if fixed:
                    lstm_h, lstm_c = lstm_h.detach(), lstm_c.detach()
                experience.store(t, env_id, obs, actions, dist.log_prob(actions), rewards, values[0].detach(),
                                 {"lstm_h": lstm_h, "lstm_c": lstm_c})
        returns = experience.rewards.flip(0).cumsum(0).flip(0)
        advantages = returns - experience.values
        for ids in torch.arange(2 * agents, device=device).split(64):
            logits, values, _ = policy(experience.obs[:, ids])
            dist = torch.distributions.Categorical(logits=logits, validate_args=False)
            ratio = (dist.log_prob(experience.actions[:, ids]) - experience.logprobs[:, ids]).exp()
            clipped = ratio.clamp(0.9, 1.1)
            loss = -torch.min(ratio * advantages[:, ids], clipped * advantages[:, ids]).mean()
            loss = loss + 0.5 * F.mse_loss(values, returns[:, ids]) - 0.01 * dist.entropy().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


# Text to image with a second pass at a higher resolution.

class ResnetBlock(nn.Module):
    def __init__(self, inp, out):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inp), nn.Conv2d(inp, out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, out), nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(inp, out, 1) if inp != out else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(h))) + self.shortcut(x)


class AutoencoderKL(nn.Module):
    def __init__(self, widths=(48, 96, 96), latent=4):
        super().__init__()
        layers, inp = [nn.Conv2d(3, widths[0], 3, padding=1)], widths[0]
        for width in widths:
            layers += [ResnetBlock(inp, width), nn.Conv2d(width, width, 3, stride=2, padding=1)]
            inp = width
        self.encoder = nn.Sequential(*layers, nn.GroupNorm(8, inp), nn.SiLU(), nn.Conv2d(inp, 2 * latent, 3, padding=1))
        layers = [nn.Conv2d(latent, inp, 3, padding=1)]
        for width in reversed(widths):
            layers += [ResnetBlock(inp, width), nn.Upsample(scale_factor=2), nn.Conv2d(width, width, 3, padding=1)]
            inp = width
        self.decoder = nn.Sequential(*layers, nn.GroupNorm(8, inp), nn.SiLU(), nn.Conv2d(inp, 3, 3, padding=1))
        self.scaling_factor = 0.18215

    def encode(self, x):
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        return (mean + torch.randn_like(mean) * (0.5 * logvar).exp()) * self.scaling_factor

    def decode(self, latents):
        return torch.cat([self.decoder(sample / self.scaling_factor) for sample in latents.split(1)])


class UNet(nn.Module):
    def __init__(self, latent=4, width=64):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.conv_in, self.mid1, self.mid2 = nn.Conv2d(latent, width, 3, padding=1), ResnetBlock(width, width), ResnetBlock(width, width)
        self.conv_out = nn.Conv2d(width, latent, 3, padding=1)

    def forward(self, x, t):
        h = self.conv_in(x) + self.time(t)[:, :, None, None]
        return self.conv_out(self.mid2(self.mid1(h)))


class Processing:
    def __init__(self, vae, unet, batch_size, width, height, hr_scale, denoising_strength):
        self.vae, self.unet, self.batch_size = vae, unet, batch_size
        self.width, self.height, self.hr_scale, self.denoising_strength = width, height, hr_scale, denoising_strength
        self.encode_separately = False

    def sample_steps(self, x, steps):
        for i in reversed(range(steps)):
            t = torch.full((len(x), 1), (i + 1) / steps, device=x.device, dtype=x.dtype)
            x = x - self.unet(x, t) / steps
        return x

    def images_to_latents(self, images):
        pixels = images * 2 - 1
        if self.encode_separately:
            return torch.cat([self.vae.encode(image) for image in pixels.split(1)])
        return self.vae.encode(pixels)

    def sample(self):
        x = torch.randn(self.batch_size, 4, self.height // 8, self.width // 8, device="cuda", dtype=torch.float16)
        samples = self.sample_steps(x, 6)
        decoded = (self.vae.decode(samples) * 0.5 + 0.5).clamp(0, 1)
        upscaled = F.interpolate(decoded, scale_factor=self.hr_scale, mode="bicubic")
        del decoded, samples, x
        samples = self.images_to_latents(upscaled)
        del upscaled
        noise = torch.randn_like(samples)
        return self.sample_steps(samples + self.denoising_strength * noise, 4)


@expected("batch_without_gradients", fix="split", thread="vladmandic/sdnext#1277", memory=900, held_back=True)
@torch.no_grad()
def render_hires(fixed=False):
    """In the second pass the upscaled images of the whole batch are encoded by the VAE in one call (only the decoding is sliced), so the
    activations of the VAE encoder at the high resolution exist for all images at once. Cured by: encode the images one by one and
    concatenate the latents.
    """
    vae, unet = AutoencoderKL().half().cuda().eval(), UNet().half().cuda().eval()
    p = Processing(vae, unet, batch_size=6, width=384, height=384, hr_scale=2, denoising_strength=0.6)
    p.encode_separately = fixed
    for job in range(2):
        samples = p.sample()
        for sample in samples.split(1):
            image = vae.decode(sample)[0].clamp(-1, 1).cpu()


# Pretraining of a translation model is continued from a checkpoint.

class Seq2Seq(nn.Module):
    def __init__(self, vocab_size, d_model, layers):
        super().__init__()
        self.shared = nn.Embedding(vocab_size, d_model)
        self.transformer = nn.Transformer(d_model, 8, layers, layers, 4 * d_model, batch_first=True)
        self.lm_head = nn.Linear(d_model, vocab_size, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids, decoder_input_ids):
        size = decoder_input_ids.shape[1]
        mask = torch.full((size, size), float("-inf"), device=input_ids.device).triu(1)
        hidden = self.transformer(self.shared(input_ids), self.shared(decoder_input_ids), tgt_mask=mask)
        return self.lm_head(hidden)


def lr_lambda(step, warmup=400):
    return min((step + 1) / warmup, (warmup / (step + 1)) ** 0.5)


def train_step(model, optimizer, scheduler, batch):
    input_ids, labels = (part.cuda() for part in batch)
    logits = model(input_ids, labels[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()


def make_training(args):
    model = Seq2Seq(args.vocab_size, args.d_model, args.layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda)


def generate_batches(args, count):
    for _ in range(count):
        yield torch.randint(4, args.vocab_size, (args.batch_size, 48)), torch.randint(4, args.vocab_size, (args.batch_size, 48))


def pretrain_once(args):
    model, optimizer, scheduler = make_training(args)
    for batch in generate_batches(args, 2):
        train_step(model, optimizer, scheduler, batch)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict(), "ctr": 2}, file)
    file.seek(0)
    return file


@expected("loaded_onto_gpu", fix="del", thread="prajdabre/yanmtt#39", memory=950, held_back=True)
def continue_pretraining(fixed=False):
    """`checkpoint_dict`, loaded onto the GPU, is not deleted after `model.load_state_dict` (the `del` went with the part that was commented
    out), so its copy of the model's parameters (and of the optimizer's state) takes up GPU memory throughout training. Cured by: `del
    checkpoint_dict` after the loading.
    """
    args = types.SimpleNamespace(vocab_size=16000, d_model=512, layers=3, batch_size=8, lr=1e-3)
    pretrained_model = pretrain_once(args)
    torch.cuda.empty_cache()
    model, optimizer, scheduler = make_training(args)
    checkpoint_dict = torch.load(pretrained_model, map_location={"cuda:0": "cuda:0"})
    model.load_state_dict(checkpoint_dict["model"])
    print("Not reloading optimizer, counter and scheduler")
    ctr = 0
    if fixed:
        del checkpoint_dict
    for batch in generate_batches(args, 8):
        train_step(model, optimizer, scheduler, batch)
        ctr += 1
    return {"ctr": ctr}


# A sparse autoencoder explains the activations of a vision model.

class DictionaryLayer(nn.Module):
    def __init__(self, nb_concepts, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(nb_concepts, dim) / dim ** 0.5)

    def get_dictionary(self):
        return F.normalize(self.weight, dim=-1)

    def forward(self, z):
        return z @ self.get_dictionary()


class TopKSAE(nn.Module):
    def __init__(self, dim, nb_concepts, top_k):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(dim, nb_concepts), nn.BatchNorm1d(nb_concepts))
        self.dictionary, self.top_k = DictionaryLayer(nb_concepts, dim), top_k

    def get_dictionary(self):
        return self.dictionary.get_dictionary()

    def forward(self, x):
        z_pre = F.relu(self.encoder(x))
        top = z_pre.topk(self.top_k, dim=-1)
        z = torch.zeros_like(z_pre).scatter(-1, top.indices, top.values)
        return z_pre, z, self.dictionary(z)


def l2(v, dims=None):
    return v.square().mean(dims).sqrt() if dims is not None else v.square().mean().sqrt()


def l0_eps(v, threshold=1e-6):
    return (v.abs() < threshold).float().mean()


def criterion(x, x_hat, z_pre, z, dictionary):
    return (x - x_hat).square().mean() + 1e-4 * z_pre.abs().mean()


def _log_metrics(monitoring, logs, model, z, loss, optimizer, store):
    if monitoring > 0:
        logs["lr"].append(optimizer.param_groups[0]["lr"])
        logs["step_loss"].append(loss.item())
        logs["z_sparsity"].append(l0_eps(z).item())
    if monitoring > 1:
        logs["z"].append(store(z))
        logs["z_l2"].append(l2(z).item())
        logs["dictionary_norms"].append(l2(model.get_dictionary(), -1).mean().item())
        for name, param in model.named_parameters():
            if param.grad is not None:
                logs[f"params_norm_{name}"].append(l2(param).item())
                logs[f"params_grad_norm_{name}"].append(l2(param.grad).item())


def train_sae(model, dataloader, optimizer, nb_epochs, clip_grad, monitoring, device, store):
    logs = collections.defaultdict(list)
    for epoch in range(nb_epochs):
        model.train()
        for (batch,) in dataloader:
            x = batch.to(device, non_blocking=True)
            optimizer.zero_grad()
            z_pre, z, x_hat = model(x)
            loss = criterion(x, x_hat, z_pre, z, model.get_dictionary())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_grad)
            optimizer.step()
            _log_metrics(monitoring, logs, model, z, loss, optimizer, store)
    return logs


@expected("small_view", fix=r"\.cpu\(\)|clone", thread="KempnerInstitute/overcomplete#5", memory=550, held_back=True)
def train_autoencoder(fixed=False):
    """With `monitoring=2` `_log_metrics` appends `z.detach()[::10]` of every step to `logs['z']`, which stays on the GPU and grows with
    each step. Cured by: `logs['z'].append(z.detach().cpu()[::10])`.
    """
    activations = torch.randn(12288, 384)
    dataloader = DataLoader(TensorDataset(activations), batch_size=2048, shuffle=True)
    sae = TopKSAE(384, 4096, top_k=32).cuda()
    optimizer = torch.optim.Adam(sae.parameters(), lr=5e-4)
    store = (lambda z: z.detach().cpu()[::10]) if fixed else (lambda z: z.detach()[::10])
    logs = train_sae(sae, dataloader, optimizer, nb_epochs=4, clip_grad=1.0, monitoring=2, device="cuda", store=store)
    return {"steps": len(logs["step_loss"])}


# Contrastive training of images and captions, with retrieval metrics after each epoch.

class CLIP(nn.Module):
    def __init__(self, embed_dim, vocab_size, width=192):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 8, stride=8)
        self.visual = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True), 3)
        self.words = nn.Embedding(vocab_size, width)
        self.text = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True), 3)
        self.visual_projection, self.text_projection = nn.Linear(width, embed_dim), nn.Linear(width, embed_dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def forward(self, images, texts):
        x = self.visual(self.patches(images).flatten(2).transpose(1, 2)).mean(1)
        y = self.text(self.words(texts)).mean(1)
        return F.normalize(self.visual_projection(x), dim=-1), F.normalize(self.text_projection(y), dim=-1), self.logit_scale.exp()


class CsvDataset(Dataset):
    def __init__(self, size, seed):
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randint(0, 255, (64, 3, 48, 48), generator=generator, dtype=torch.uint8)
        self.texts = torch.randint(0, 8000, (size, 16), generator=generator)

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, index):
        return self.images[index % 64].float() / 127.5 - 1, self.texts[index]


def get_metrics(image_features, text_features, logit_scale, on_cpu):
    metrics = {}
    logits_per_image = (logit_scale * image_features) @ text_features.t()
    if on_cpu:
        logits_per_image = logits_per_image.detach().cpu()
    logits_per_text = logits_per_image.t()
    ground_truth = torch.arange(len(text_features), device=logits_per_image.device).view(-1, 1)
    for name, logit in {"image_to_text": logits_per_image, "text_to_image": logits_per_text}.items():
        ranking = torch.argsort(logit, descending=True)
        ranks = (ranking == ground_truth).int().argmax(1).cpu().numpy()
        metrics[f"{name}_median_rank"] = float(np.floor(np.median(ranks)) + 1)
        for k in (1, 5, 10):
            metrics[f"{name}_R@{k}"] = float(np.mean(ranks < k))
    return metrics


def evaluate(model, dataloader, on_cpu):
    model.eval()
    all_image_features, all_text_features = [], []
    with torch.no_grad():
        for images, texts in dataloader:
            image_features, text_features, logit_scale = model(images.cuda(), texts.cuda())
            all_image_features.append(image_features)
            all_text_features.append(text_features)
        return get_metrics(torch.cat(all_image_features), torch.cat(all_text_features), logit_scale, on_cpu)


@expected("sort_temporaries", fix="cpu", thread="mlfoundations/open_clip#26", memory=500, held_back=True)
def train_clip(fixed=False):
    """The validation ranks all captions for all images on the GPU: `get_metrics` has the similarity matrix of the whole validation set
    there and `torch.argsort` of it needs several times its size, on top of what training holds. Cured by: move the similarity matrix to the
    CPU (`.detach().cpu()`) before ranking.
    """
    model = CLIP(256, 8000).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4)
    train_loader = DataLoader(CsvDataset(512, 0), batch_size=64)
    val_loader = DataLoader(CsvDataset(4096, 1), batch_size=256)
    for epoch in range(2):
        model.train()
        for images, texts in train_loader:
            image_features, text_features, logit_scale = model(images.cuda(), texts.cuda())
            logits = logit_scale * image_features @ text_features.t()
            labels = torch.arange(len(logits), device=logits.device)
            loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if epoch == 1:
            metrics = evaluate(model, val_loader, on_cpu=fixed)


# Few-shot detection: support images of every class are turned into features before detection.

class Bottleneck(nn.Module):
    def __init__(self, inp, width, out, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inp, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.shortcut = nn.Sequential(nn.Conv2d(inp, out, 1, stride=stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        return F.relu(self.bn3(self.conv3(h)) + self.shortcut(x))


class Backbone(nn.Module):
    size_divisibility = 16

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        self.res2 = nn.Sequential(Bottleneck(64, 64, 256, 1), Bottleneck(256, 64, 256, 1))
        self.res3 = nn.Sequential(Bottleneck(256, 128, 512, 2), Bottleneck(512, 128, 512, 1))
        self.res4 = nn.Sequential(Bottleneck(512, 128, 512, 2))

    def forward(self, x):
        res2 = self.res2(self.stem(x))
        res3 = self.res3(res2)
        return {"res2": res2, "res3": res3, "res4": self.res4(res3)}


class FsodRCNN(nn.Module):
    def __init__(self, support_set, one_by_one):
        super().__init__()
        self.backbone, self.support_set, self.one_by_one = Backbone(), support_set, one_by_one
        self.register_buffer("pixel_mean", torch.tensor([103.5, 116.3, 123.7]).view(3, 1, 1))
        self.objectness = nn.Conv2d(512, 5, 1)
        self.support_dict = None

    def image_list(self, images):
        images = [image.to(self.pixel_mean.device).float() - self.pixel_mean for image in images]
        height, width = (max(image.shape[i] for image in images) for i in (1, 2))
        divisor = self.backbone.size_divisibility
        height, width = -(-height // divisor) * divisor, -(-width // divisor) * divisor
        return torch.stack([F.pad(image, (0, width - image.shape[2], 0, height - image.shape[1])) for image in images])

    def roi_pooling(self, features, boxes):
        pooled = {}
        for (key, value), stride in zip(features.items(), (4, 8, 16)):
            crops = [feature[:, y1 // stride:y2 // stride + 1, x1 // stride:x2 // stride + 1] for feature, (x1, y1, x2, y2) in zip(value, boxes)]
            pooled[key] = torch.stack([F.adaptive_avg_pool2d(crop, 8) for crop in crops])
        return pooled

    def support_features(self, images, boxes):
        features = self.backbone(self.image_list(images))
        return self.roi_pooling(features, boxes)

    def init_model(self):
        self.support_dict = {"res2_avg": {}, "res3_avg": {}, "res4_avg": {}}
        for cls, (images, boxes) in self.support_set.items():
            if self.one_by_one:
                single = [self.support_features([image], [box]) for image, box in zip(images, boxes)]
                pooled = {key: torch.cat([one[key] for one in single]) for key in single[0]}
            else:
                pooled = self.support_features(images, boxes)
            for key, value in pooled.items():
                self.support_dict[f"{key}_avg"][cls] = value.mean(0, True).mean(dim=[2, 3], keepdim=True)

    def inference(self, image):
        if self.support_dict is None:
            self.init_model()
        features, scores = self.backbone(self.image_list([image])), {}
        for cls, support in self.support_dict["res4_avg"].items():
            correlation = F.conv2d(features["res4"], support.permute(1, 0, 2, 3), groups=support.shape[1])
            scores[cls] = self.objectness(correlation).sigmoid()
        return scores


def read_support(classes, shots):
    rng, support_set = np.random.default_rng(0), {}
    for cls in range(classes):
        sizes = rng.integers(200, 320, (shots, 2))
        images = [torch.from_numpy(rng.integers(0, 255, (3, h, w), dtype=np.uint8)) for h, w in sizes]
        support_set[cls] = images, [(8, 8, int(w) - 16, int(h) - 16) for h, w in sizes]
    return support_set


@expected("batch_without_gradients", fix="split", thread="Jaraxxus-Me/AirDet#14", memory=500, held_back=True)
@torch.no_grad()
def detect_few_shot(fixed=False):
    """`init_model` moves all support images of a class to the GPU and runs the backbone on them as one batch, so with many support images
    its activations do not fit. Cured by: move the support images to the GPU one by one, extract their features one by one, and stack the
    features.
    """
    model = FsodRCNN(read_support(classes=3, shots=30), one_by_one=fixed).cuda().eval()
    for _ in range(4):
        scores = model.inference(torch.randint(0, 255, (3, 480, 640), dtype=torch.uint8))
        maps = {cls: score.cpu() for cls, score in scores.items()}
    return {"classes": len(maps)}


# Features for segmenting a scene of 3D Gaussians are learnt from masks of its images.

class Camera:
    def __init__(self, uid, height, width, num_masks, num_points, generator):
        masks = torch.rand(num_masks, height, width, generator=generator) > 0.6
        self.uid, self.image_height, self.image_width = uid, height, width
        self.original_masks = masks.float().cuda()
        self.original_features = torch.randn(64, height // 8, width // 8, generator=generator)
        self.nearest = torch.randint(0, num_points, (height * width,), generator=generator, dtype=torch.int32)


class Scene:
    def __init__(self, frames, num_points):
        generator = torch.Generator().manual_seed(0)
        self.train_cameras = [Camera(frame, 240, 320, 12 + frame % 17, num_points, generator) for frame in frames]

    def getTrainCameras(self):
        return self.train_cameras


class FeatureGaussianModel(nn.Module):
    def __init__(self, num_points, feature_dim):
        super().__init__()
        self.point_features = nn.Parameter(torch.randn(num_points, feature_dim) * 0.1)
        self.opacity = nn.Parameter(torch.zeros(num_points, 1))


def render_contrastive_feature(camera, gaussians, background):
    ids = camera.nearest.cuda()
    alpha = torch.sigmoid(gaussians.opacity[ids])
    colors = gaussians.point_features[ids] * alpha + background * (1 - alpha)
    return colors.t().reshape(-1, camera.image_height, camera.image_width)


@expected("data_on_gpu", fix="host", thread="Jumpat/SegAnyGAussians#9", memory=460, held_back=True)
def train_contrastive_feature(fixed=False):
    """The SAM masks of all images (`original_masks` of every `Camera`) are preloaded to the GPU, full resolution, one plane per mask, and
    so occupy memory in proportion to the number of images. Cured by: use only every fifth frame.
    """
    num_points, feature_dim, num_images = 20000, 32, 90
    frames = list(range(num_images))
    if fixed:
        frames = frames[::5]
    gaussians = FeatureGaussianModel(num_points, feature_dim).cuda()
    sam_proj = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.LeakyReLU(), nn.Linear(64, feature_dim)).cuda()
    optimizer = torch.optim.Adam([*gaussians.parameters(), *sam_proj.parameters()], lr=2.5e-3)
    scene = Scene(frames, num_points)
    background = torch.zeros(feature_dim, device="cuda")
    viewpoint_stack = None
    for iteration in range(20):
        if not viewpoint_stack:
            viewpoint_stack = scene.getTrainCameras().copy()
        viewpoint_cam = viewpoint_stack.pop()
        sam_features = viewpoint_cam.original_features.cuda()
        height, width = sam_features.shape[-2:]
        sam_masks = F.interpolate(viewpoint_cam.original_masks[None], size=(height, width), mode="nearest")[0]
        low_dim = sam_proj(sam_features.flatten(1).t()).t().view(feature_dim, height, width)
        prototypes = (sam_masks[:, None] * low_dim).sum((2, 3)) / (sam_masks.sum((1, 2))[:, None] + 1e-6)
        rendered = render_contrastive_feature(viewpoint_cam, gaussians, background)
        prob = torch.einsum("nc,chw->nhw", prototypes, rendered)
        bce_loss = F.binary_cross_entropy_with_logits(prob, viewpoint_cam.original_masks)
        low = F.normalize(F.interpolate(rendered[None], (height, width), mode="bilinear")[0].flatten(1), dim=0)
        planes = sam_masks.flatten(1)
        intersection = planes.t() @ planes
        union = planes.sum(0)[:, None] + planes.sum(0)[None] - intersection
        corr_loss = -((intersection / (union + 1e-5)) * F.relu(low.t() @ low)).mean()
        loss = bce_loss + corr_loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"cameras": len(scene.train_cameras)}


# Molecular dynamics with a machine-learned interatomic potential that predicts forces directly.

class SimState:
    def __init__(self, positions, masses, cell, atomic_numbers):
        self.positions, self.masses, self.cell, self.atomic_numbers = positions, masses, cell, atomic_numbers
        self.momenta = torch.zeros_like(positions)
        self.energy = self.forces = None


class DirectForcefield(nn.Module):
    def __init__(self, dim, layers, n_rbf=16):
        super().__init__()
        self.register_buffer("centers", torch.linspace(0, 6, n_rbf))
        self.atoms, self.edges = nn.Embedding(100, dim), nn.Linear(n_rbf + 3, dim)
        self.message = nn.ModuleList(nn.Sequential(nn.Linear(3 * dim, dim), nn.SiLU(), nn.Linear(dim, dim)) for _ in range(layers))
        self.update = nn.ModuleList(nn.Sequential(nn.Linear(2 * dim, dim), nn.SiLU(), nn.LayerNorm(dim)) for _ in range(layers))
        self.energy_head, self.force_head = nn.Linear(dim, 1), nn.Linear(dim, 3)

    def forward(self, atomic_numbers, vectors, senders, receivers):
        lengths = vectors.norm(dim=-1, keepdim=True)
        rbf = torch.exp(-4 * (lengths - self.centers) ** 2)
        nodes, edges = self.atoms(atomic_numbers), self.edges(torch.cat([rbf, vectors / (lengths + 1e-6)], -1))
        for message, update in zip(self.message, self.update):
            edges = edges + message(torch.cat([nodes[senders], nodes[receivers], edges], -1))
            gathered = torch.zeros_like(nodes).index_add(0, receivers, edges)
            nodes = nodes + update(torch.cat([nodes, gathered], -1))
        return {"energy": self.energy_head(nodes).sum(), "forces": self.force_head(nodes)}


class OrbModel:
    def __init__(self, model, dtype, detach_outputs):
        self.model, self.dtype, self.detach_outputs = model.to(dtype), dtype, detach_outputs

    def forward(self, state, senders, receivers, shifts):
        vectors = state.positions[receivers] - state.positions[senders] + shifts @ state.cell
        predictions = self.model(state.atomic_numbers, vectors.to(self.dtype), senders, receivers)
        results = {"energy": predictions["energy"].to(self.dtype), "forces": predictions["forces"].to(self.dtype).view(-1, 3)}
        if self.detach_outputs:
            results = {key: value.detach() for key, value in results.items()}
        return results


def nve_step(state, model, neighbors, dt):
    state.momenta = state.momenta + state.forces * dt / 2
    state.positions = state.positions + dt * state.momenta / state.masses
    results = model.forward(state, *neighbors)
    state.energy, state.forces = results["energy"], results["forces"]
    state.momenta = state.momenta + state.forces * dt / 2
    return state


def copper_supercell(repeats, spacing=3.6):
    basis = np.array([[0, 0, 0], [0, 0.5, 0.5], [0.5, 0, 0.5], [0.5, 0.5, 0]])
    grid = np.stack(np.meshgrid(*[np.arange(repeats)] * 3, indexing="ij"), -1).reshape(-1, 1, 3)
    fractional = ((grid + basis).reshape(-1, 3)) / repeats
    delta = fractional[None] - fractional[:, None]
    shifts = -np.round(delta)
    distance = np.linalg.norm(delta + shifts, axis=-1) * repeats * spacing
    senders, receivers = np.nonzero((distance < 4.0) & (distance > 0.1))
    return fractional * repeats * spacing, senders, receivers, shifts[senders, receivers]


@expected("evaluation_keeps_graphs", fix="detach|no_grad", thread="TorchSim/torch-sim#491", memory=500, held_back=True)
def run_molecular_dynamics(fixed=False):
    """The wrapper `OrbModel.forward` returns energy and forces still attached to the autograd graph; `nve_step` stores them into the state,
    and so the forward graphs are retained across simulation steps. Cured by: `.detach()` the outputs in the wrapper.
    """
    device, dtype, repeats = torch.device("cuda"), torch.float32, 6
    positions, senders, receivers, shifts = copper_supercell(repeats)
    neighbors = (torch.from_numpy(senders).to(device), torch.from_numpy(receivers).to(device), torch.from_numpy(shifts).to(device, dtype))
    state = SimState(torch.from_numpy(positions).to(device, dtype), torch.full((len(positions), 1), 63.5, device=device),
                     torch.eye(3, device=device) * repeats * 3.6, torch.full((len(positions),), 29, device=device))
    model = OrbModel(DirectForcefield(64, 3).to(device), dtype, detach_outputs=fixed)
    results = model.forward(state, *neighbors)
    state.energy, state.forces = results["energy"], results["forces"]
    trajectory = []
    for step in range(60):
        state = nve_step(state, model, neighbors, dt=0.002)
        if step % 10 == 0:
            trajectory.append(state.positions.detach().cpu())
    return {"frames": len(trajectory)}


# Policy optimization of a language model: a mini-batch is processed in micro-batches.

def logprobs_from_logits(logits, labels):
    return torch.gather(logits, -1, labels[..., None]).squeeze(-1) - torch.logsumexp(logits, dim=-1)


def entropy_from_logits(logits):
    pd = F.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(pd * logits, dim=-1)


def ppo_loss(config, model_output, data):
    ratio = (model_output["log_probs"] - data["old_log_probs"]).exp()
    clipped = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    pg_loss = -torch.min(ratio * data["advantages"], clipped * data["advantages"]).mean()
    metrics = {"pg_loss": pg_loss.detach().item()}
    if config.entropy_coeff:
        pg_loss = pg_loss - config.entropy_coeff * model_output["entropy"].mean()
    return pg_loss, metrics


class EngineWithLMHead:
    def __init__(self, config):
        self.config = config
        self.module = transformers.GPT2LMHeadModel(transformers.GPT2Config(
            vocab_size=config.vocab_size, n_positions=512, n_embd=128, n_layer=3, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)).cuda()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-6)

    def prepare_model_outputs(self, logits, data):
        logits = logits[:, :-1] / self.config.temperature
        return {"log_probs": logprobs_from_logits(logits, data["input_ids"][:, 1:]), "entropy": entropy_from_logits(logits)}

    def forward_step(self, data, loss_function):
        data = {key: value.cuda() for key, value in data.items()}
        logits = self.module(input_ids=data["input_ids"], use_cache=False).logits
        model_output = self.prepare_model_outputs(logits, data)
        loss, metrics = loss_function(self.config, model_output, data)
        if self.config.detach_outputs:
            model_output = {key: value.detach() for key, value in model_output.items()}
        return loss, {"model_output": model_output, "loss": loss.detach().item(), "metrics": metrics}

    def forward_backward_batch(self, batch, loss_function):
        micro = self.config.micro_batch_size
        output_lst, count = [], -(-len(batch["input_ids"]) // micro)
        for i in range(count):
            micro_batch = {key: value[i * micro:(i + 1) * micro] for key, value in batch.items()}
            loss, output = self.forward_step(micro_batch, loss_function)
            (loss / count).backward()
            output_lst.append(output)
        return {key: torch.cat([output["model_output"][key].detach() for output in output_lst]).mean() for key in ("log_probs", "entropy")}

    def train_batch(self, batch, loss_function):
        self.optimizer.zero_grad()
        outputs = self.forward_backward_batch(batch, loss_function)
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        self.optimizer.step()
        return outputs


@expected("kept_tensors", fix="detach", thread="verl-project/verl#7166", memory=650, held_back=True)
def update_actor(fixed=False):
    """`forward_step` returns `model_output` undetached and `forward_backward_batch` keeps it in `output_lst` until the last micro-batch;
    `entropy`, through which the loss does not go, keeps its graph and the tensors saved in it (of the size of the logits) for every
    micro-batch. Cured by: detach the tensors of `model_output`.
    """
    config = types.SimpleNamespace(vocab_size=32000, temperature=1.0, clip_ratio=0.2, entropy_coeff=0.0, micro_batch_size=2, detach_outputs=fixed)
    engine = EngineWithLMHead(config)
    for step in range(2):
        batch = {"input_ids": torch.randint(0, config.vocab_size, (16, 257)), "old_log_probs": torch.randn(16, 256), "advantages": torch.randn(16, 256)}
        outputs = engine.train_batch(batch, ppo_loss)


# A reversible network on volumes: the inputs of its blocks are recomputed from their outputs.

class InvertibleCheckpointFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input_t, fn, fn_inverse, release_input, *weights):
        ctx.fn, ctx.fn_inverse, ctx.weights, ctx.release_input = fn, fn_inverse, weights, release_input
        with torch.no_grad():
            output = fn(input_t.detach())
        output = output.detach_()
        input_t.untyped_storage().resize_(0)
        ctx.input_t = [input_t] if release_input else input_t
        ctx.output_t = [output]
        return output

    @staticmethod
    def backward(ctx, grad_output):
        input_t = ctx.input_t.pop() if ctx.release_input else ctx.input_t
        output = ctx.output_t.pop()
        with torch.no_grad():
            inverted = ctx.fn_inverse(output)
            input_t.untyped_storage().resize_(input_t.numel() * input_t.element_size())
            input_t.set_(inverted)
        with torch.enable_grad():
            detached_input = input_t.detach().requires_grad_()
            again = ctx.fn(detached_input)
        gradients = torch.autograd.grad(again, (detached_input, *ctx.weights), grad_output)
        input_t.grad = gradients[0]
        return gradients[0], None, None, None, *gradients[1:]


class AdditiveCoupling(nn.Module):
    def __init__(self, Fm, Gm):
        super().__init__()
        self.Fm, self.Gm = Fm, Gm

    def forward(self, x):
        x1, x2 = x.chunk(2, dim=1)
        y1 = x1 + self.Fm(x2)
        y2 = x2 + self.Gm(y1)
        return torch.cat([y1, y2], dim=1)

    def inverse(self, y):
        y1, y2 = y.chunk(2, dim=1)
        x2 = y2 - self.Gm(y1)
        x1 = y1 - self.Fm(x2)
        return torch.cat([x1, x2], dim=1)


class InvertibleModuleWrapper(nn.Module):
    def __init__(self, fn, release_input):
        super().__init__()
        self.fn, self.release_input = fn, release_input

    def forward(self, x):
        weights = [p for p in self.fn.parameters() if p.requires_grad]
        return InvertibleCheckpointFunction.apply(x, self.fn.forward, self.fn.inverse, self.release_input, *weights)


class ForwardOp(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.seq = nn.Sequential(nn.Conv3d(channels, channels, 3, padding=1), nn.ReLU(inplace=True))

    def forward(self, x):
        return self.seq(x)


@expected("kept_by_function", fix="ctx", thread="silvandeleemput/memcnn#41", memory=400, held_back=True)
def train_reversible_net(fixed=False):
    """`InvertibleCheckpointFunction.backward` leaves `ctx.input_t` on the context: the inputs that it reconstructs, and the gradients it
    puts on them, of all layers so stay until the whole backward is over, and the memory grows with the depth of the network. Cured by: take
    the input off the context in `backward` (`ctx.input_t` a list, `pop()`).
    """
    channels, size, n_modules = 16, 64, 20
    layers = [InvertibleModuleWrapper(AdditiveCoupling(ForwardOp(channels // 2), ForwardOp(channels // 2)), release_input=fixed)
              for _ in range(n_modules)]
    network = nn.Sequential(*layers).cuda()
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    for step in range(3):
        X = torch.rand(1, channels, size, size, size).cuda().requires_grad_()
        Y = network(X)
        loss = Y.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del X, Y, loss


# Photographs are enlarged by four with a cascading residual network.

class EResidualBlock(nn.Module):
    def __init__(self, channels, groups):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, groups=groups), nn.ReLU(inplace=True),
                                  nn.Conv2d(channels, channels, 3, padding=1, groups=groups), nn.ReLU(inplace=True), nn.Conv2d(channels, channels, 1))

    def forward(self, x):
        return F.relu(self.body(x) + x)


class CascadingBlock(nn.Module):
    def __init__(self, channels, make):
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(3))
        self.merges = nn.ModuleList(nn.Conv2d((i + 2) * channels, channels, 1) for i in range(3))

    def forward(self, x):
        cascade = out = x
        for block, merge in zip(self.blocks, self.merges):
            cascade = torch.cat([cascade, block(out)], dim=1)
            out = F.relu(merge(cascade))
        return out


class CARN(nn.Module):
    def __init__(self, channels=32, groups=4, scale=4):
        super().__init__()
        self.entry = nn.Conv2d(3, channels, 3, padding=1)
        self.body = CascadingBlock(channels, lambda: CascadingBlock(channels, lambda: EResidualBlock(channels, groups)))
        upsample = []
        for _ in range(scale // 2):
            upsample += [nn.Conv2d(channels, 4 * channels, 3, padding=1, groups=groups), nn.ReLU(inplace=True), nn.PixelShuffle(2)]
        self.upsample, self.exit = nn.Sequential(*upsample), nn.Conv2d(channels, 3, 3, padding=1)

    def forward(self, x):
        return self.exit(self.upsample(self.body(self.entry(x))))


def upscale_in_patches(net, lr, scale, shave, parts):
    h, w = lr.shape[1:]
    sr = torch.empty(3, h * scale, w * scale)
    for top, bottom in zip(np.linspace(0, h, parts + 1, dtype=int)[:-1], np.linspace(0, h, parts + 1, dtype=int)[1:]):
        for left, right in zip(np.linspace(0, w, parts + 1, dtype=int)[:-1], np.linspace(0, w, parts + 1, dtype=int)[1:]):
            y, x = max(top - shave, 0), max(left - shave, 0)
            patch = lr[:, y:min(bottom + shave, h), x:min(right + shave, w)].unsqueeze(0).cuda()
            out = net(patch)[0].cpu()
            out = out[:, (top - y) * scale:(bottom - y) * scale, (left - x) * scale:(right - x) * scale]
            sr[:, top * scale:bottom * scale, left * scale:right * scale] = out
    return sr


@expected("batch_without_gradients", fix="split|tiles", thread="nmhkahn/CARN-pytorch#25", memory=600, held_back=True)
def super_resolve(fixed=False):
    """The whole image is put through the network in one piece; the feature maps, at the upscaled resolution above all, do not fit. Cured
    by: split the image into patches with a margin (`shave`), upscale them one by one, and merge the outputs.
    """
    scale, net = 4, CARN().cuda().eval()
    sizes, psnr = [(339, 510), (320, 480), (510, 339)], []
    with torch.no_grad():
        for h, w in sizes:
            lr, hr = torch.rand(3, h, w), torch.rand(3, h * scale, w * scale)
            if fixed:
                sr = upscale_in_patches(net, lr, scale, shave=20, parts=4)
            else:
                sr = net(lr.unsqueeze(0).cuda())[0].cpu()
            error = (sr.clamp(0, 1)[:, scale:-scale, scale:-scale] - hr[:, scale:-scale, scale:-scale]).square().mean()
            psnr.append(-10 * torch.log10(error))
    return {"images": len(psnr)}
