"""Programs after threads about language, vision-language, diffusion and speech models."""
import collections
import gc
import types
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


# A small LoRA for a flow transformer: captions and pictures are encoded once, then the encoders go.

class EncoderBlock(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))
        return x + self.mlp(self.norm2(x))


class TextEncoder(nn.Module):
    def __init__(self, vocab=8000, dim=512, depth=8):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(EncoderBlock(dim, 8) for _ in range(depth))

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


class LoraLinear(nn.Module):
    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class FlowTransformer(nn.Module):
    def __init__(self, channels=16, text_dim=512, dim=384, depth=6):
        super().__init__()
        self.x_embedder, self.context_embedder = nn.Linear(channels, dim), nn.Linear(text_dim, dim)
        self.time = nn.Linear(1, dim)
        self.blocks = nn.ModuleList(EncoderBlock(dim, 6) for _ in range(depth))
        self.proj_out = nn.Linear(dim, channels)

    def forward(self, hidden_states, timestep, encoder_hidden_states):
        n = encoder_hidden_states.shape[1]
        x = torch.cat([self.context_embedder(encoder_hidden_states), self.x_embedder(hidden_states)], 1)
        x = x + self.time(timestep.view(-1, 1, 1))
        for block in self.blocks:
            x = block(x)
        return self.proj_out(x[:, n:])


class Flux2Pipeline:
    def __init__(self):
        self.text_encoder = TextEncoder()
        self.vae = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1),
                                 nn.SiLU(), nn.Conv2d(64, 16, 3, stride=2, padding=1))
        self.transformer = FlowTransformer()

    def tokenize(self, caption, length=512):
        return torch.tensor([[sum(word.encode()) % 8000 for word in (caption.split() * length)[:length]]])

    def encode_prompt(self, caption, device):
        input_ids = self.tokenize(caption).to(device)
        return self.text_encoder(input_ids), torch.zeros(input_ids.shape[1], 4, device=device)


def precompute(pipe, images, sample_prompt, device):
    pipe.text_encoder.to(device)
    embed_cache, examples = {}, []
    for entry in images + [{"caption": sample_prompt, "pixels": None}]:
        caption = entry["caption"]
        if caption not in embed_cache:
            encoded = pipe.encode_prompt(caption, device)
            embed_cache[caption] = tuple(part.to("cpu") for part in encoded)
    pipe.text_encoder.to("cpu")
    pipe.text_encoder = None
    gc.collect()
    torch.cuda.empty_cache()
    pipe.vae.to(device)
    for entry in images:
        latents = pipe.vae(entry["pixels"].to(device))
        examples.append((latents.flatten(2).transpose(1, 2).detach().to("cpu"), *embed_cache[entry["caption"]]))
    pipe.vae.to("cpu")
    gc.collect()
    torch.cuda.empty_cache()
    return examples, embed_cache[sample_prompt]


@expected("evaluation_keeps_graphs", fix="no_grad", thread="atomantic/PortOS#3598", memory=700, held_back=True)
def train_flux2_lora(fixed=False):
    """`precompute` calls `encode_prompt` without `no_grad` while the parameters of `pipe.text_encoder` still require gradients, so every
    caption builds an autograd graph; the copy `.to("cpu")` that `embed_cache` keeps has a `grad_fn` and holds all the activations of the
    text encoder for that caption on the GPU. Cured by: run the precompute under `torch.no_grad()`.
    """
    device = "cuda"
    pipe = Flux2Pipeline()
    images = [{"caption": f"sks person number {number} in front of a wall, soft light", "pixels": torch.rand(1, 3, 256, 256)} for number in range(16)]
    with torch.no_grad() if fixed else nullcontext():
        examples, sample_embeds = precompute(pipe, images, "sks portrait, neutral background", device)
    transformer = pipe.transformer.requires_grad_(False)
    for block in transformer.blocks:
        block.qkv = LoraLinear(block.qkv, 16)
    transformer.to(device)
    params = [p for p in transformer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    for step in range(20):
        latents, embeds, _ = examples[step % len(examples)]
        latents, embeds = latents.to(device), embeds.detach().to(device)
        noise, sigma = torch.randn_like(latents), torch.rand(1, device=device)
        noisy = (1 - sigma) * latents + sigma * noise
        loss = F.mse_loss(transformer(noisy, sigma, embeds), noise - latents)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"steps": step + 1, "text": tuple(sample_embeds[0].shape)}


# PPO: the log-probabilities of the sampled answers under the policy and under the reference.

class CausalLM(nn.Module):
    def __init__(self, vocab, dim, depth, heads):
        super().__init__()
        self.heads = heads
        self.embed_tokens = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(EncoderBlock(dim, heads) for _ in range(depth))
        self.norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def hidden(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def forward(self, input_ids):
        return {"logits": self.lm_head(self.hidden(input_ids))}


def log_probs_from_logits(logits, labels, fixed):
    if fixed:
        chosen = logits.gather(2, labels[..., None])[..., 0]
        return chosen - torch.stack([row.logsumexp(-1) for row in logits])
    log_probs = F.log_softmax(logits, -1)
    return log_probs.gather(2, labels[..., None])[..., 0]


class Actor(nn.Module):
    def __init__(self, model, fixed):
        super().__init__()
        self.model, self.fixed = model, fixed

    def forward(self, sequences, num_actions):
        output = self.model(sequences)
        output["logits"] = output["logits"].float()
        log_probs = log_probs_from_logits(output["logits"][:, :-1, :], sequences[:, 1:], self.fixed)
        return log_probs[:, -num_actions:]


class NaiveExperienceMaker:
    def __init__(self, actor, initial_model, critic):
        self.actor, self.initial_model, self.critic = actor, initial_model, critic

    @torch.no_grad()
    def make_experience(self, sequences, num_actions, kl_coef=0.02):
        action_log_probs = self.actor(sequences, num_actions)
        base_action_log_probs = self.initial_model(sequences, num_actions)
        values = self.critic(self.actor.model.hidden(sequences)).squeeze(-1)[:, -num_actions:].float()
        reward = -kl_coef * (action_log_probs - base_action_log_probs)
        reward[:, -1] += torch.rand(len(sequences), device=sequences.device)
        advantages = reward.flip(1).cumsum(1).flip(1) - values
        return [t.cpu() for t in (sequences, action_log_probs, values, advantages)]


@expected("logits", fix="logsumexp|part", thread="OpenRLHF/OpenRLHF#718", memory=1350, held_back=True)
def run_ppo_experience(fixed=False):
    """`log_probs_from_logits` takes `F.log_softmax` over the whole fp32 logits (batch, response, vocabulary) only to gather one value per
    token from it: a second tensor of the size of the logits. Cured by: gather the logits of the labels and subtract `logsumexp`, row by
    row.
    """
    device, vocab, num_actions = "cuda", 32000, 384
    build = lambda: CausalLM(vocab, 512, 4, 8).to(device, torch.bfloat16)
    actor, initial_model = Actor(build(), fixed), Actor(build().requires_grad_(False), fixed)
    critic = nn.Linear(512, 1).to(device, torch.bfloat16)
    maker = NaiveExperienceMaker(actor, initial_model, critic)
    optimizer = torch.optim.SGD(actor.parameters(), lr=1e-6)
    for episode in range(2):
        sequences = torch.randint(0, vocab, (8, 512), device=device)
        replay = maker.make_experience(sequences, num_actions)
        for seqs, old_log_probs, _, advantages in zip(*(t.split(1) for t in replay)):
            log_probs = actor(seqs.to(device), num_actions)
            ratio = (log_probs - old_log_probs.to(device)).exp()
            adv = advantages.to(device)
            loss = -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv).mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"episodes": episode + 1}


# A vision tower serves pictures of any size, packed into one row of patches.

class VisionSdpaAttention(nn.Module):
    def __init__(self, dim, heads, max_masks=None):
        super().__init__()
        self.heads, self.max_masks = heads, max_masks
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mask_cache = collections.OrderedDict()

    def generate_patch_attention_mask(self, s, cu_seqlens, device):
        key = (s, tuple(cu_seqlens))
        if key in self.mask_cache:
            self.mask_cache.move_to_end(key)
            return self.mask_cache[key]
        mask = torch.zeros([1, s, s], dtype=torch.bool, device=device)
        for start, end in zip(cu_seqlens[:-1], cu_seqlens[1:]):
            mask[..., start:end, start:end] = True
        self.mask_cache[key] = mask
        if self.max_masks is not None and len(self.mask_cache) > self.max_masks:
            self.mask_cache.popitem(last=False)
        return mask

    def forward(self, x, cu_seqlens):
        b, s, d = x.shape
        mask = self.generate_patch_attention_mask(s, cu_seqlens, x.device)
        q, k, v = self.qkv(x).view(b, s, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(0))
        return self.proj(out.transpose(1, 2).reshape(b, s, d))


class VisionBlock(nn.Module):
    def __init__(self, dim, heads, max_masks):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = VisionSdpaAttention(dim, heads, max_masks)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, cu_seqlens):
        x = x + self.attn(self.norm1(x), cu_seqlens)
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, dim, depth, max_masks, patch=14):
        super().__init__()
        self.patch = patch
        self.patch_embed = nn.Linear(3 * patch * patch, dim)
        self.blocks = nn.ModuleList(VisionBlock(dim, 4, max_masks) for _ in range(depth))
        self.merger = nn.Linear(4 * dim, 512)

    def forward(self, images):
        pixel_values = torch.cat([F.unfold(im[None], self.patch, stride=self.patch)[0].T for im in images])
        lengths = [(im.shape[1] // self.patch) * (im.shape[2] // self.patch) for im in images]
        cu_seqlens = np.cumsum([0] + lengths).tolist()
        x = self.patch_embed(pixel_values)[None]
        for block in self.blocks:
            x = block(x, cu_seqlens)
        return self.merger(x[0, :len(x[0]) // 4 * 4].reshape(-1, 4 * x.shape[-1]))


@expected("kept_tensors", fix="bound|popitem", thread="sgl-project/sglang#3651", memory=600, held_back=True)
@torch.inference_mode()
def serve_qwen_vl(fixed=False):
    """`VisionSdpaAttention` keeps every attention mask it makes in `mask_cache`, by the number and lengths of the patches; the pictures
    come at their own sizes, so nearly every request adds a mask [1, s, s] per layer and none is ever dropped. Cured by: a bound on the
    number of masks in the cache (least recently used goes).
    """
    visual = VisionTransformer(128, 4, 16 if fixed else None).cuda().half()
    rng = np.random.default_rng(5)
    answered = 0
    for request in range(110):
        sizes = rng.integers(8, 20, (rng.integers(1, 4), 2)) * 28
        images = [torch.rand(3, int(h), int(w)).half().cuda() for h, w in sizes]
        image_embeds = visual(images)
        answered += len(image_embeds)
    return {"tokens": answered}


# A LoRA is merged into a transformer whose weights are stored in fp8.

class Fp8Linear(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cout, cin, dtype=torch.float8_e4m3fn, device="cuda"), requires_grad=False)
        self.register_buffer("weight_scale", torch.ones((), device="cuda"))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.weight_scale.to(x.dtype))


class KreaBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim, elementwise_affine=False)
        self.wq, self.wo = Fp8Linear(dim, 2 * dim), Fp8Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.wo(F.silu(self.wq(self.norm(x))))


class KreaTransformer(nn.Module):
    def __init__(self, dim=2048, depth=6, time_dim=6144):
        super().__init__()
        self.first, self.time_dim = Fp8Linear(64, dim), time_dim
        self.tproj = Fp8Linear(time_dim, 9 * dim)
        self.blocks = nn.ModuleList(KreaBlock(dim) for _ in range(depth))
        self.last = Fp8Linear(dim, 64)

    def forward(self, latents, t):
        angles = t.view(-1, 1) * torch.arange(self.time_dim, device=t.device)
        shift = self.tproj(angles.to(latents.dtype)).chunk(9, -1)
        x = self.first(latents)
        for number, block in enumerate(self.blocks):
            x = block(x + shift[number][:, None])
        return self.last(x)


def lora_state_dict(model, rank=16):
    state = {}
    for name, module in model.named_modules():
        if isinstance(module, Fp8Linear):
            cout, cin = module.weight.shape
            state[name] = {"lora_down.weight": torch.randn(rank, cin) * 0.01, "lora_up.weight": torch.randn(cout, rank) * 0.01, "alpha": float(rank)}
    return state


def _apply_lora_delta(w16, tensors, strength, chunk_rows):
    mat1 = tensors["lora_up.weight"].to(w16.device, torch.float32)
    mat2 = tensors["lora_down.weight"].to(w16.device, torch.float32)
    scale = strength * tensors["alpha"] / len(mat2)
    if chunk_rows:
        for w_rows, up_rows in zip(w16.split(chunk_rows), mat1.split(chunk_rows)):
            lora_diff = up_rows @ mat2
            w_rows += (scale * lora_diff).to(w_rows.dtype)
    else:
        lora_diff = mat1 @ mat2
        w16 += (scale * lora_diff).to(w16.dtype)
    return w16


@torch.no_grad()
def merge_loras_into_fp8_model(model, sources, chunk_rows=None):
    backup = {}
    for name, module in model.named_modules():
        if not isinstance(module, Fp8Linear):
            continue
        backup[name] = (module.weight.cpu(), module.weight_scale.cpu())
        w16 = module.weight.to(torch.float16)
        w16 *= module.weight_scale.to(torch.float16)
        for tensors, strength in sources:
            w16 = _apply_lora_delta(w16, tensors[name], strength, chunk_rows)
        low, high = torch.aminmax(w16)
        new_scale = torch.maximum(low.abs(), high.abs()).float() / 448
        w16 *= (1 / new_scale).to(torch.float16)
        module.weight.data.copy_(w16.to(torch.float8_e4m3fn))
        module.weight_scale.fill_(0).add_(new_scale)
        del w16
        torch.cuda.empty_cache()
    return backup


@expected("elementwise_copies", fix="part|split", thread="WalkingMeatAxolotl/AnimaLoraStudio#455", memory=1100, held_back=True)
@torch.no_grad()
def generate_with_fp8_lora(fixed=False):
    """`_apply_lora_delta` makes the dense product of the two LoRA factors for a whole layer in fp32 (out x in, and its scaled copy) beside
    the fp16 copy of the weight; for the largest layer (`tproj`) this is the peak of the merge, above that of the sampling. Cured by:
    compute the delta by slices of 1024 output rows and add each at once.
    """
    model = KreaTransformer()
    sources = [(lora_state_dict(model), 0.8)]
    backup = merge_loras_into_fp8_model(model, sources, chunk_rows=1024 if fixed else None)
    latents = torch.randn(1, 4096, 64, device="cuda", dtype=torch.bfloat16)
    for t in torch.linspace(1, 0, 9)[:-1]:
        velocity = model(latents, t.cuda())
        latents = latents - velocity / 8
    return {"layers": len(backup)}


# A long text is spoken piece by piece with the voice of a reference recording.

hop_length, target_sample_rate = 256, 24000


class CFM(nn.Module):
    def __init__(self, mel=100, dim=256, depth=4):
        super().__init__()
        self.mel = mel
        self.text_embed = nn.Embedding(256, dim)
        self.input_embed, self.time = nn.Linear(2 * mel + dim, dim), nn.Linear(1, dim)
        self.transformer = nn.ModuleList(EncoderBlock(dim, 4) for _ in range(depth))
        self.proj_out = nn.Linear(dim, mel)
        self.to_mel = nn.Conv1d(1, mel, 1024, stride=hop_length, padding=512)

    def velocity(self, x, cond, text, t):
        h = self.input_embed(torch.cat([x, cond, text], -1)) + self.time(t.view(1, 1))
        for block in self.transformer:
            h = block(h)
        return self.proj_out(h)

    @torch.no_grad()
    def sample(self, cond, text, duration, steps, cfg_strength=2.0):
        device = cond.device
        cond = self.to_mel(cond[:, None]).transpose(1, 2)
        cond = F.pad(cond, (0, 0, 0, duration - cond.shape[1]))
        ids = torch.tensor([list(text.encode())[:duration]], device=device)
        text = F.pad(self.text_embed(ids), (0, 0, 0, duration - ids.shape[1]))
        y = torch.randn(1, duration, self.mel, device=device)
        trajectory = [y]
        for t in torch.linspace(0, 1, steps + 1, device=device)[:-1]:
            pred, null_pred = self.velocity(y, cond, text, t), self.velocity(y, torch.zeros_like(cond), torch.zeros_like(text), t)
            y = y + (pred + (pred - null_pred) * cfg_strength) / steps
            trajectory.append(y)
        trajectory = torch.stack(trajectory)
        return trajectory[-1], trajectory


class Vocoder(nn.Module):
    def __init__(self, mel=100, dim=192):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv1d(mel, dim, 7, padding=3), nn.GELU(), nn.Conv1d(dim, dim, 7, padding=3), nn.GELU())
        self.head = nn.Conv1d(dim, hop_length, 1)

    def decode(self, mel):
        return self.head(self.backbone(mel)).transpose(1, 2).flatten(1)


def infer_batch_process(ref_audio, ref_text, gen_text_batches, model_obj, vocoder, device, target_rms=0.1, nfe_step=32, cfg_strength=2.0, fixed=False):
    rms = float(ref_audio.square().mean().sqrt())
    if rms < target_rms:
        ref_audio = ref_audio * target_rms / rms
    audio = ref_audio.to(device)
    generated_waves, spectrograms = [], []

    def process_batch(gen_text):
        skip = audio.shape[-1] // hop_length
        duration = skip + skip * len(gen_text.encode()) // len(ref_text.encode())
        with torch.inference_mode():
            generated, _ = model_obj.sample(audio, ref_text + gen_text, duration, nfe_step, cfg_strength)
            if fixed:
                del _
            generated = generated.float()[:, skip:].transpose(1, 2)
            wave = vocoder.decode(generated)[0]
            if rms < target_rms:
                wave = wave * (rms / target_rms)
            wave, mel = wave.cpu().numpy(), generated[0].cpu().numpy()
            if fixed:
                del generated
            yield wave, mel

    with ThreadPoolExecutor(4) as pool:
        futures = [pool.submit(process_batch, text) for text in gen_text_batches]
        for future in futures:
            wave, mel = next(future.result())
            generated_waves.append(wave)
            spectrograms.append(mel)
    return np.concatenate(generated_waves), np.concatenate(spectrograms, axis=1)


@expected("kept_tensors", fix="yield", thread="SWivid/F5-TTS#851", memory=500, held_back=True)
def narrate_ebook(fixed=False):
    """`process_batch` is a generator, and `infer_batch_process` keeps one per text batch in `futures` and takes only its first value; its
    locals `_` (the trajectory of the sampler over all steps), `generated` and the views of it therefore stay on the GPU for every batch
    already spoken. Cured by: delete `_` and `generated` in `process_batch` before the `yield`.
    """
    model_obj, vocoder = CFM().cuda().eval(), Vocoder().cuda().eval()
    ref_audio, ref_text = torch.rand(1, 6 * target_sample_rate) * 0.05, "The post arrives at ten, unless it is snowing. "
    sentence = "The rain went on through the night, and nobody in the house slept. "
    gen_text_batches = [sentence * 2 + f"So ended the part numbered {number}." for number in range(36)]
    wave, spectrogram = infer_batch_process(ref_audio, ref_text, gen_text_batches, model_obj, vocoder, "cuda", fixed=fixed)
    return {"seconds": len(wave) / target_sample_rate, "frames": spectrogram.shape[1]}


# A language model of DNA is fine-tuned to tell promoters from other sequences.

class SupervisedDataset(Dataset):
    def __init__(self, size, length=128, vocab=4096):
        self.input_ids, self.labels = torch.randint(5, vocab, (size, length)), torch.randint(0, 2, (size,))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return {"input_ids": self.input_ids[index], "labels": self.labels[index]}


class BertForSequenceClassification(nn.Module):
    def __init__(self, vocab=4096, dim=256, depth=3, num_labels=2):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, dim)
        self.encoder = nn.ModuleList(EncoderBlock(dim, 4) for _ in range(depth))
        self.pooler, self.classifier = nn.Linear(dim, dim), nn.Linear(dim, num_labels)

    def forward(self, input_ids, labels=None):
        hidden_states = self.embeddings(input_ids)
        for layer in self.encoder:
            hidden_states = layer(hidden_states)
        logits = self.classifier(torch.tanh(self.pooler(hidden_states[:, 0])))
        loss = F.cross_entropy(logits, labels)
        return {"loss": loss, "logits": logits, "hidden_states": hidden_states}


def nested_concat(tensors, new_tensors):
    if isinstance(tensors, tuple):
        return tuple(nested_concat(t, n) for t, n in zip(tensors, new_tensors))
    return torch.cat((tensors, new_tensors), dim=0)


def nested_numpify(tensors):
    if isinstance(tensors, tuple):
        return tuple(nested_numpify(t) for t in tensors)
    return tensors.cpu().numpy()


class Trainer:
    def __init__(self, model, train_dataset, eval_dataset, compute_metrics, preprocess_logits_for_metrics=None, batch_size=32):
        self.model, self.train_dataset, self.eval_dataset = model.cuda(), train_dataset, eval_dataset
        self.compute_metrics, self.preprocess_logits_for_metrics = compute_metrics, preprocess_logits_for_metrics
        self.batch_size = batch_size
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-5)

    def prediction_step(self, inputs):
        with torch.no_grad():
            outputs = self.model(**inputs)
        logits = tuple(value.detach() for key, value in outputs.items() if key != "loss")
        return outputs["loss"].detach(), logits[0] if len(logits) == 1 else logits, inputs["labels"]

    def evaluation_loop(self, dataloader):
        self.model.eval()
        all_losses, all_preds, all_labels = [], None, None
        for inputs in dataloader:
            loss, logits, labels = self.prediction_step({key: value.cuda() for key, value in inputs.items()})
            if self.preprocess_logits_for_metrics:
                logits = self.preprocess_logits_for_metrics(logits, labels)
            all_losses.append(loss.cpu())
            all_preds = logits if all_preds is None else nested_concat(all_preds, logits)
            all_labels = labels if all_labels is None else nested_concat(all_labels, labels)
        metrics = self.compute_metrics((nested_numpify(all_preds), all_labels.cpu().numpy()))
        return {"eval_loss": float(torch.stack(all_losses).mean()), **metrics}

    def train(self, epochs):
        for epoch in range(epochs):
            self.model.train()
            for inputs in DataLoader(self.train_dataset, self.batch_size, shuffle=True):
                loss = self.model(**{key: value.cuda() for key, value in inputs.items()})["loss"]
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            metrics = self.evaluation_loop(DataLoader(self.eval_dataset, self.batch_size))
        return metrics


@expected("growing_buffer", fix=r"\.cpu\(\)|what is used", thread="MAGICS-LAB/DNABERT_2#109", memory=600, held_back=True)
def finetune_dnabert(fixed=False):
    """the evaluation collects the model's whole output for `compute_metrics` on the GPU: `evaluation_loop` concatenates for every batch the
    tuple `logits` (the logits and the hidden states of all tokens) into `all_preds`, though the metrics need only the argmax of the first.
    Cured by: `preprocess_logits_for_metrics`, which returns only the argmax of the first.
    """
    def preprocess_logits_for_metrics(logits, _):
        return (logits[0] if isinstance(logits, tuple) else logits).argmax(-1)

    def compute_metrics(eval_pred):
        predictions, labels = eval_pred
        if isinstance(predictions, tuple):
            predictions = predictions[0]
        if predictions.ndim == 2:
            predictions = predictions.argmax(-1)
        return {"accuracy": float((predictions == labels).mean())}

    trainer = Trainer(BertForSequenceClassification(), SupervisedDataset(320), SupervisedDataset(5900), compute_metrics,
                      preprocess_logits_for_metrics if fixed else None)
    return trainer.train(1)


# DreamBooth with the latents and the text embeddings of all pictures made before each epoch.

class Accelerator:
    def __init__(self):
        self.device = torch.device("cuda")
        self._models, self._optimizers, self._dataloaders = [], [], []

    def prepare_data_loader(self, dataloader):
        self._dataloaders.append(dataloader)
        return dataloader

    def prepare(self, *objects):
        for thing in objects:
            if isinstance(thing, DataLoader):
                self.prepare_data_loader(thing)
            elif isinstance(thing, nn.Module):
                self._models.append(thing.to(self.device))
            else:
                self._optimizers.append(thing)
        return objects[0] if len(objects) == 1 else objects

    def backward(self, loss):
        loss.backward()


class DiagonalGaussianDistribution:
    def __init__(self, parameters):
        self.parameters = parameters
        self.mean, self.logvar = torch.chunk(parameters, 2, dim=1)
        self.std = torch.exp(0.5 * self.logvar.clamp(-30, 20))

    def sample(self):
        return self.mean + self.std * torch.randn_like(self.mean)


class AutoencoderKL(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        layers, cin = [], 3
        for _ in range(3):
            layers += [nn.Conv2d(cin, width, 3, stride=2, padding=1), nn.GroupNorm(8, width), nn.SiLU()]
            cin = width
        self.encoder = nn.Sequential(*layers, nn.Conv2d(width, 8, 3, padding=1))

    def encode(self, pixel_values):
        return types.SimpleNamespace(latent_dist=DiagonalGaussianDistribution(self.encoder(pixel_values)))


class UNet(nn.Module):
    def __init__(self, width=64, cross=1024):
        super().__init__()
        self.conv_in, self.time, self.text = nn.Conv2d(4, width, 3, padding=1), nn.Linear(1, width), nn.Linear(cross, width)
        self.mid = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
        self.conv_out = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, sample, timesteps, encoder_hidden_states):
        h = self.conv_in(sample) + self.time(timesteps.float().view(-1, 1) / 1000)[:, :, None, None]
        q = h.flatten(2).transpose(1, 2)
        context = self.text(encoder_hidden_states)
        h = h + F.scaled_dot_product_attention(q, context, context).transpose(1, 2).reshape(h.shape)
        return self.conv_out(h + self.mid(h))


class SuperDataset(Dataset):
    def __init__(self, size, resolution, max_token_length):
        self.pixels, self.tokens = torch.rand(size, 3, resolution, resolution), torch.randint(0, 8000, (size, max_token_length))

    def __len__(self):
        return len(self.pixels)

    def __getitem__(self, index):
        return {"pixel_values": self.pixels[index], "input_ids": self.tokens[index]}


class LatentsDataset(Dataset):
    def __init__(self, latents_cache, text_encoder_cache):
        self.latents_cache, self.text_encoder_cache = latents_cache, text_encoder_cache

    def __len__(self):
        return len(self.latents_cache)

    def __getitem__(self, index):
        return tuple(cache[index] for cache in (self.latents_cache, self.text_encoder_cache))


@expected("kept_tensors", fix=r"\bdel\b|clear", thread="d8ahazard/sd_dreambooth_extension#598", memory=500, held_back=True)
def train_dreambooth(fixed=False):
    """`cache_latents` runs anew after every epoch and passes its new loader to `accelerator.prepare`; the accelerator keeps each loader in
    `_dataloaders`, and with it the `LatentsDataset` whose latents and text embeddings lie on the GPU. Cured by: empty
    `accelerator._dataloaders` before preparing the new loader.
    """
    accelerator = Accelerator()
    vae, text_encoder = AutoencoderKL().cuda().requires_grad_(False), TextEncoder(dim=1024, depth=2).cuda().requires_grad_(False)
    unet = UNet()
    unet = accelerator.prepare(unet)
    optimizer = accelerator.prepare(torch.optim.AdamW(unet.parameters(), lr=2e-6))
    alphas_cumprod = torch.linspace(0.999, 0.01, 1000, device=accelerator.device)
    gen_dataset = SuperDataset(40, 256, 231)

    def cache_latents():
        latents_cache, text_encoder_cache = [], []
        for d_batch in DataLoader(gen_dataset, batch_size=1, shuffle=True):
            with torch.no_grad():
                latents_cache.append(vae.encode(d_batch["pixel_values"].to(accelerator.device)).latent_dist)
                text_encoder_cache.append(text_encoder(d_batch["input_ids"].to(accelerator.device)))
        dataset = LatentsDataset(latents_cache, text_encoder_cache)
        dataloader = DataLoader(dataset, batch_size=1, collate_fn=lambda z: z, shuffle=True)
        if fixed:
            accelerator._dataloaders = []
            return dataset, accelerator.prepare_data_loader(dataloader)
        return dataset, accelerator.prepare(dataloader)

    train_dataset, train_dataloader = cache_latents()
    for epoch in range(10):
        for batch in train_dataloader:
            latent_dist, encoder_hidden_states = batch[0]
            latents = 0.18215 * latent_dist.sample()
            noise, timesteps = torch.randn_like(latents), torch.randint(0, 1000, (1,), device=latents.device)
            alpha = alphas_cumprod[timesteps].view(-1, 1, 1, 1)
            noise_pred = unet(alpha.sqrt() * latents + (1 - alpha).sqrt() * noise, timesteps, encoder_hidden_states)
            accelerator.backward(F.mse_loss(noise_pred, noise))
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        train_dataset, train_dataloader = cache_latents()
    return {"epochs": epoch + 1, "pictures": len(train_dataset)}


# Integrated gradients of a concept probe on the residual stream of a language model.

class LMClassification(nn.Module):
    def __init__(self, lm_model, concepts):
        super().__init__()
        self.lm_model = lm_model
        self.proj = nn.Linear(lm_model.config.hidden_size, concepts)


class IntegratedGradients:
    def __init__(self, model, layer, concepts, device, fixed):
        self.model, self.layer, self.device, self.fixed = model, layer, device, fixed
        self.ax = LMClassification(model, concepts).to(device)
        self.ax.requires_grad_(False)

    @torch.no_grad()
    def gather_residual_activations(self, inputs):
        kept = []
        handle = self.model.model.layers[self.layer].register_forward_hook(
            lambda mod, args, outputs: kept.append(outputs[0] if isinstance(outputs, tuple) else outputs))
        self.model.model(input_ids=inputs, use_cache=False)
        handle.remove()
        return kept[0]

    def predict_latent(self, rows, steps=10):
        space_embedding = self.model.get_input_embeddings()(torch.tensor([[29871]], device=self.device))
        all_acts = []
        for concept_id, tokens in rows:
            inputs = tokens.to(self.device)
            act_in = self.gather_residual_activations(inputs).detach()
            baseline = space_embedding.expand(*act_in.shape)
            alphas = torch.linspace(0, 1, steps).view(-1, 1, 1, 1).to(self.device)
            interpolated_acts = (baseline + alphas * (act_in - baseline)).squeeze(1).requires_grad_(True)
            expanded_inputs = inputs.repeat(steps, 1)

            def set_target_act_hook(mod, args, outputs):
                return (interpolated_acts,) + outputs[1:] if isinstance(outputs, tuple) else interpolated_acts

            handle = self.model.model.layers[self.layer].register_forward_hook(set_target_act_hook)
            if self.fixed:
                outputs = self.model.model(input_ids=expanded_inputs, output_hidden_states=False, use_cache=False)
                last_hidden_state = outputs.last_hidden_state
            else:
                outputs = self.model(input_ids=expanded_inputs, output_hidden_states=True, use_cache=False)
                last_hidden_state = outputs.hidden_states[-1]
            handle.remove()
            preds = torch.sigmoid(self.ax.proj(last_hidden_state[:, -1]))[..., concept_id]
            grads, = torch.autograd.grad(preds.sum(), interpolated_acts)
            ax_acts = torch.abs((act_in - baseline) * grads.mean(dim=0)).sum(dim=-1)
            all_acts.append(ax_acts.detach().flatten().cpu().numpy())
        return all_acts


@expected("logits", fix="logits_to_keep", thread="stanfordnlp/axbench#80", memory=680, held_back=True)
def score_concepts(fixed=False):
    """`predict_latent` runs the whole causal language model with `output_hidden_states=True` on all interpolation steps at once, although
    it needs only the last hidden state: the logits over the vocabulary for every position and the hidden states of all layers are made and
    kept in `outputs`. Cured by: call the inner model (`self.model.model`) with `output_hidden_states=False` and take `last_hidden_state`.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32000, hidden_size=256, intermediate_size=688, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=4)
    model = LlamaForCausalLM(config).cuda().eval()
    method = IntegratedGradients(model, 2, 16, torch.device("cuda"), fixed)
    rows = [(number % 16, torch.randint(0, 32000, (1, 320 + 8 * number))) for number in range(10)]
    return {"scored": len(method.predict_latent(rows))}


# Weights are quantized to four bits, layer after layer, on a model that lives in host memory.

class WQLinear(nn.Module):
    def __init__(self, w_bit, group_size, in_features, out_features, dev):
        super().__init__()
        self.in_features, self.out_features, self.w_bit, self.group_size = in_features, out_features, w_bit, group_size
        pack = 32 // w_bit
        self.register_buffer("qweight", torch.zeros((in_features, out_features // pack), dtype=torch.int32, device=dev))
        self.register_buffer("qzeros", torch.zeros((in_features // group_size, out_features // pack), dtype=torch.int32, device=dev))
        self.register_buffer("scales", torch.zeros((in_features // group_size, out_features), dtype=torch.float16, device=dev))

    @classmethod
    def from_linear(cls, linear, w_bit, group_size, scales, zeros):
        awq_linear = cls(w_bit, group_size, linear.in_features, linear.out_features, linear.weight.device)
        scale_zeros = zeros * scales
        awq_linear.scales = scales.to(torch.float16, copy=True)
        pack_num = 32 // w_bit
        intweight = []
        for group in range(linear.in_features // group_size):
            columns = linear.weight.data[:, group * group_size:(group + 1) * group_size]
            intweight.append(torch.round((columns + scale_zeros[group][:, None]) / scales[group][:, None]).to(torch.int))
        intweight = torch.cat(intweight, dim=1).t().contiguous()
        zeros = zeros.to(torch.int32)
        for source, target in ((intweight, awq_linear.qweight), (zeros, awq_linear.qzeros)):
            for i, position in enumerate([0, 2, 4, 6, 1, 3, 5, 7]):
                target |= source[:, position::pack_num] << (i * w_bit)
        return awq_linear


def pseudo_quantize_tensor(w, n_bit, q_group_size):
    org_w_shape = w.shape
    w = w.reshape(-1, q_group_size)
    max_val, min_val = w.amax(dim=1, keepdim=True), w.amin(dim=1, keepdim=True)
    max_int = 2 ** n_bit - 1
    scales = torch.clamp_min(max_val - min_val, 1e-5) / max_int
    zeros = torch.clamp(-(min_val / scales).round(), 0, max_int)
    w = (torch.clamp(torch.round(w / scales) + zeros, 0, max_int) - zeros) * scales
    return w.reshape(org_w_shape), scales.view(org_w_shape[0], -1), zeros.view(org_w_shape[0], -1)


class OPTDecoderLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        linear = lambda cin, cout: nn.utils.skip_init(nn.Linear, cin, cout, bias=False, dtype=torch.float16)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (linear(dim, dim) for _ in range(4))
        self.fc1, self.fc2 = linear(dim, 4 * dim), linear(4 * dim, dim)
        self.self_attn_layer_norm = nn.LayerNorm(dim, dtype=torch.float16)


@torch.no_grad()
def real_quantize_model_weight(model, w_bit, q_config, fixed):
    for layer in model:
        named_linears = {name: module for name, module in layer.named_modules() if isinstance(module, nn.Linear)}
        for name, module in list(named_linears.items()):
            module.cuda()
            module.weight.data, scales, zeros = pseudo_quantize_tensor(module.weight.data, w_bit, **q_config)
            scales, zeros = scales.t().contiguous(), zeros.t().contiguous()
            q_linear = WQLinear.from_linear(module, w_bit, q_config["q_group_size"], scales, zeros)
            module.cpu()
            if fixed:
                q_linear.to(layer.self_attn_layer_norm.weight.device)
            setattr(layer, name, q_linear)
            torch.cuda.empty_cache()
        gc.collect()
    return model


@expected("large_buffers", fix="cpu|host", thread="mit-han-lab/llm-awq#36", memory=400, held_back=True)
def quantize_with_awq(fixed=False):
    """`real_quantize_model_weight` moves each linear layer to the GPU, makes its `WQLinear` there and puts it into the model; the original
    goes back to the CPU, but the buffers of `WQLinear` (qweight, qzeros, scales) stay on the GPU and accumulate layer after layer. Cured
    by: move `q_linear` to the device of the layer's other parameters (the CPU).
    """
    model = nn.ModuleList(OPTDecoderLayer(1536) for _ in range(32))
    model = real_quantize_model_weight(model, 4, {"q_group_size": 128}, fixed)
    state = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    return {"tensors": len(state)}


# The experts of every layer are stacked into one weight before an engine is built.

class Expert(nn.Module):
    def __init__(self, hidden, inner):
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, inner, bias=False), nn.Linear(hidden, inner, bias=False)
        self.w2 = nn.Linear(inner, hidden, bias=False)


class SparseMoe(nn.Module):
    def __init__(self, hidden, inner, num_experts, top_k):
        super().__init__()
        self.gate, self.top_k = nn.Linear(hidden, num_experts, bias=False), top_k
        self.experts = nn.ModuleList(Expert(hidden, inner) for _ in range(num_experts))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight, chosen = self.gate(tokens).softmax(-1).topk(self.top_k)
        out = torch.zeros_like(tokens)
        for number in range(len(self.fused_w13)):
            share = (weight * (chosen == number)).sum(-1, keepdim=True)
            up, gate = F.linear(tokens, self.fused_w13[number]).chunk(2, -1)
            out += F.linear(F.silu(up) * gate, self.fused_w2[number]) * share
        return out.view_as(x)


class MoeLayer(nn.Module):
    def __init__(self, hidden, inner, num_experts):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = nn.MultiheadAttention(hidden, 8, batch_first=True)
        self.mlp = SparseMoe(hidden, inner, num_experts, 2)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


def delete_all_unused_submodules(model):
    for moe in model.modules():
        if isinstance(moe, SparseMoe) and hasattr(moe, "fused_w13") and hasattr(moe, "experts"):
            del moe.experts


@torch.no_grad()
def fuse_moe(model, fixed):
    fused_key_counter = 0
    for moe in [module for module in model.modules() if isinstance(module, SparseMoe)]:
        w13 = torch.stack([torch.cat([expert.w1.weight, expert.w3.weight]) for expert in moe.experts])
        w2 = torch.stack([expert.w2.weight for expert in moe.experts])
        moe.register_parameter("fused_w13", nn.Parameter(w13, requires_grad=False))
        moe.register_parameter("fused_w2", nn.Parameter(w2, requires_grad=False))
        fused_key_counter += 1
        if fixed:
            delete_all_unused_submodules(model)
            torch.cuda.empty_cache()
    delete_all_unused_submodules(model)
    return fused_key_counter


@expected("several_models", fix=r"\bdel\b", thread="NVIDIA/TensorRT-LLM#14477", memory=1550, held_back=True)
def build_moe_engine(fixed=False):
    """`fuse_moe` stacks the weights of the experts of every layer into new parameters, and the original weights of the experts are released
    only after all layers are done (`delete_all_unused_submodules`): weights of the experts lie twice on the GPU. Cured by: delete the
    experts' weights of a layer as soon as they are stacked.
    """
    with torch.device("meta"):
        model = nn.ModuleList(MoeLayer(1024, 5376, 4) for _ in range(6)).to(torch.bfloat16)
    model.to_empty(device="cuda")
    fused = fuse_moe(model, fixed)
    with torch.inference_mode():
        x = torch.randn(4, 256, 1024, device="cuda", dtype=torch.bfloat16)
        for layer in model:
            x = layer(x)
    return {"fused": fused, "out": tuple(x.shape)}


# Pictures and texts are matched with a sigmoid loss over a large batch.

class SigLipLoss(nn.Module):
    def __init__(self, chunk_size=0):
        super().__init__()
        self.chunk_size = chunk_size

    def get_ground_truth(self, features):
        ones = torch.ones(len(features), len(features), device=features.device)
        return 2 * torch.eye(len(features), device=features.device) - ones

    def get_logits(self, image_features, text_features, logit_scale, logit_bias):
        logits = (image_features * logit_scale) @ text_features.T
        return logits.add_(logit_bias)

    def _chunked_loss(self, image_features, text_features, *scale_and_bias):
        total_loss = 0.0
        for images, texts in zip(image_features.split(self.chunk_size), text_features.split(self.chunk_size)):
            logits = self.get_logits(images, text_features, *scale_and_bias)
            positive = (images * texts).sum(1) * scale_and_bias[0] + scale_and_bias[1]
            total_loss = total_loss + F.softplus(logits).sum() - positive.sum()
        return total_loss / len(image_features)

    def _loss(self, image_features, text_features, *scale_and_bias):
        if self.chunk_size:
            return self._chunked_loss(image_features, text_features, *scale_and_bias)
        logits = self.get_logits(image_features, text_features, *scale_and_bias)
        labels = self.get_ground_truth(image_features)
        return -F.logsigmoid(labels * logits).sum() / len(labels)

    def forward(self, image_features, text_features, logit_scale, logit_bias):
        return self._loss(image_features, text_features, logit_scale, logit_bias)


class CustomTextCLIP(nn.Module):
    def __init__(self, embed_dim=256):
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(3, 128, 8, stride=8), nn.GELU(), nn.Flatten(), nn.Linear(128 * 16, embed_dim))
        self.text = nn.Sequential(nn.EmbeddingBag(16000, embed_dim), nn.Linear(embed_dim, embed_dim))
        self.logit_scale, self.logit_bias = nn.Parameter(torch.tensor(2.3)), nn.Parameter(torch.tensor(-10.0))

    def forward(self, images, texts):
        return F.normalize(self.visual(images), dim=-1), F.normalize(self.text(texts), dim=-1), self.logit_scale.exp(), self.logit_bias


@expected("square_matrices", fix="blocks|chunk|split", thread="mlfoundations/open_clip#1145", memory=1200, held_back=True)
def train_siglip(fixed=False):
    """`SigLipLoss._loss` makes the full matrix of logits (batch x batch) and the labels of the same shape, their product and the logsigmoid
    of it: several tensors that grow with the square of the batch. Cured by: `chunk_size`: the loss by blocks of rows of the images, as
    softplus with a correction on the diagonal, no labels.
    """
    model, loss_fn = CustomTextCLIP().cuda(), SigLipLoss(chunk_size=512 if fixed else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(4):
        images, texts = torch.randn(8192, 3, 32, 32).cuda(), torch.randint(0, 16000, (8192, 16)).cuda()
        loss = loss_fn(*model(images, texts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {"steps": step + 1}


# Text to image on a small card: the parts of the model visit the GPU one after the other.

class CondStage(nn.Module):
    def __init__(self):
        super().__init__()
        self.cond_stage_model = TextEncoder(vocab=24000, dim=1024, depth=11)

    def get_learned_conditioning(self, prompts):
        device = self.cond_stage_model.embed.weight.device
        ids = torch.tensor([[sum(word.encode()) % 24000 for word in (prompt + " pad" * 77).split()[:77]] for prompt in prompts])
        return self.cond_stage_model(ids.to(device))


class ResBlock(nn.Module):
    def __init__(self, cin, cout, context=1024):
        super().__init__()
        self.inner = nn.Sequential(nn.GroupNorm(16, cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(16, cout), nn.SiLU(),
                                   nn.Conv2d(cout, cout, 3, padding=1))
        self.skip, self.context = nn.Conv2d(cin, cout, 1), nn.Linear(context, cout)

    def forward(self, x, context=None):
        h = self.inner(x)
        if context is not None:
            h = h + self.context(context.mean(1))[:, :, None, None]
        return self.skip(x) + h


class DiffusionUNet(nn.Module):
    def __init__(self, width=512, cdevice="cuda"):
        super().__init__()
        self.cdevice = cdevice
        self.model1 = nn.ModuleList([ResBlock(16, width)] + [ResBlock(width, width) for _ in range(7)])
        self.model2 = nn.ModuleList([ResBlock(width, width) for _ in range(7)] + [ResBlock(width, 16)])
        self.conv_in, self.conv_out = nn.Conv2d(4, 16, 1), nn.Conv2d(16, 4, 1)

    def apply_model(self, x, c):
        self.conv_in.to(self.cdevice), self.conv_out.to(self.cdevice)
        h = self.conv_in(x)
        for part in (self.model1, self.model2):
            part.to(self.cdevice)
            for block in part:
                h = block(h, c)
            part.to("cpu")
        return self.conv_out(h)

    def sample(self, steps, c, uc, shape, scale=7.5):
        x = torch.randn(shape, device=self.cdevice, dtype=c.dtype)
        for _ in range(steps):
            e_t_uncond, e_t = self.apply_model(torch.cat([x, x]), torch.cat([uc, c])).chunk(2)
            x = x - (e_t_uncond + scale * (e_t - e_t_uncond)) / steps
        return x


class FirstStage(nn.Module):
    def __init__(self, width=1024):
        super().__init__()
        self.post_quant_conv = nn.Conv2d(4, width, 3, padding=1)
        self.mid = nn.ModuleList(ResBlock(width, width) for _ in range(7))
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(width, 64, 3, padding=1), nn.SiLU(), nn.Upsample(scale_factor=4))
        self.out = nn.Conv2d(64, 3, 3, padding=1)

    def decode_first_stage(self, z):
        h = self.post_quant_conv(z / 0.18215)
        for block in self.mid:
            h = block(h)
        return self.out(self.up(h))


@torch.no_grad()
def process_images(model, modelCS, modelFS, prompt, n_iter, batch_size, steps, device, fixed):
    output_images = []
    for n in range(n_iter):
        prompts = [prompt] * batch_size
        modelCS.to(device)
        uc = modelCS.get_learned_conditioning(len(prompts) * [""])
        c = modelCS.get_learned_conditioning(prompts)
        modelCS.to("cpu")
        samples_ddim = model.sample(steps, c, uc, (batch_size, 4, 32, 32))
        modelFS.to(device)
        x_samples_ddim = modelFS.decode_first_stage(samples_ddim)
        x_samples_ddim = (x_samples_ddim / 2 + 0.5).clamp(0, 1)
        for x_sample in x_samples_ddim:
            output_images.append((255.0 * x_sample.permute(1, 2, 0)).cpu().numpy().astype(np.uint8))
        if fixed:
            modelFS.to("cpu")
    if not fixed:
        modelFS.to("cpu")
    return output_images


@expected("several_models", fix=r"cpu\(\)", thread="Sygil-Dev/sygil-webui#267", memory=640, held_back=True)
def txt2img_optimized(fixed=False):
    """with `optimized`, `process_images` moves the parts of the model to the GPU one by one, but `modelFS` goes back to the CPU only after
    the loop over the `n_iter` batches; from the second batch on `modelFS` is still on the GPU when `modelCS` is moved there. Cured by: move
    `modelFS` to the CPU at the end of each batch.
    """
    torch.manual_seed(1)
    model, modelCS, modelFS = DiffusionUNet().half(), CondStage().half(), FirstStage().half()
    images = process_images(model, modelCS, modelFS, "a lighthouse on a cliff, oil on canvas", 3, 2, 3, "cuda", fixed)
    return {"images": len(images)}


# A student learns from the most likely tokens of a teacher over long answers.

def distributed_vocab_topk(vocab_parallel_logits, k, chunk_size, fixed):
    logits = vocab_parallel_logits if fixed else vocab_parallel_logits.to(dtype=torch.float32)
    topk_vals, topk_idx = [], []
    for start in range(0, logits.shape[1], chunk_size):
        local = logits[:, start:start + chunk_size, :].to(dtype=torch.float32)
        vals, idx = torch.topk(local, k, dim=-1)
        topk_vals.append(vals - torch.logsumexp(local, dim=-1, keepdim=True))
        topk_idx.append(idx)
    return torch.cat(topk_vals, dim=1), torch.cat(topk_idx, dim=1)


class TeacherPolicy:
    def __init__(self, model, logprob_chunk_size, fixed):
        self.model, self.logprob_chunk_size, self.fixed = model.eval().requires_grad_(False), logprob_chunk_size, fixed

    @torch.no_grad()
    def get_topk_logits(self, input_ids, k):
        logits = self.model(input_ids)["logits"]
        vals, idx = distributed_vocab_topk(logits, k, self.logprob_chunk_size, self.fixed)
        return vals.cpu(), idx.cpu()


@expected("logits", fix="part|chunk|split", thread="NVIDIA-NeMo/RL#2882", memory=1400, held_back=True)
def distill_topk(fixed=False):
    """`distributed_vocab_topk` casts the whole bf16 logits of the teacher [B, S, V] to fp32 before its loop over chunks of the sequence, so
    `chunk_size` bounds nothing. Cured by: cast each chunk to fp32 within the loop.
    """
    device, vocab = torch.device("cuda"), 32000
    teacher = TeacherPolicy(CausalLM(vocab, 512, 6, 8).to(device, torch.bfloat16), 512, fixed)
    student = CausalLM(vocab, 256, 2, 4).to(device, torch.bfloat16)
    optimizer = torch.optim.AdamW(student.parameters(), lr=1e-5)
    for step in range(3):
        input_ids = torch.randint(0, vocab, (1, 8192), device=device)
        teacher_logprobs, indices = teacher.get_topk_logits(input_ids, k=64)
        for ids, logprobs, idx in zip(input_ids.split(1024, 1), teacher_logprobs.split(1024, 1), indices.split(1024, 1)):
            logits = student(ids)["logits"].float()
            student_logprobs = logits.gather(-1, idx.to(device)) - torch.logsumexp(logits, dim=-1, keepdim=True)
            target = logprobs.to(device)
            loss = (target.exp() * (target - student_logprobs)).sum(-1).mean() / 8
            loss.backward()
            del logits, student_logprobs
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"steps": step + 1}


# A chat model is tuned with low-rank adapters on conversations of full length.

class LazySupervisedDataset(Dataset):
    def __init__(self, size, model_max_length, vocab):
        self.input_ids = torch.randint(3, vocab, (size, model_max_length))

    def __len__(self):
        return len(self.input_ids)

    def __getitem__(self, index):
        labels = self.input_ids[index].clone()
        labels[:len(labels) // 3] = -100
        return {"input_ids": self.input_ids[index], "labels": labels}


def get_peft_model(model, target_modules, r):
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in target_modules:
            setattr(layer.self_attn, name, LoraLinear(getattr(layer.self_attn, name), r))
    return model


@expected("many_rows", fix="checkpoint", thread="lm-sys/FastChat#581", memory=1300, held_back=True)
def train_lora_vicuna(fixed=False):
    """LoRA is trained without gradient checkpointing (`training_args.gradient_checkpointing` off, because the frozen embedding gave the
    checkpointed layers inputs without gradient), so the activations of all layers are kept for the backward. Cured by:
    `model.enable_input_require_grads()` and gradient checkpointing on.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    training_args = types.SimpleNamespace(gradient_checkpointing=fixed, learning_rate=2e-5, per_device_train_batch_size=4, model_max_length=1024)
    config = LlamaConfig(vocab_size=8000, hidden_size=384, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=6, num_key_value_heads=6)
    config.use_cache = False
    model = get_peft_model(LlamaForCausalLM(config), ["q_proj", "v_proj"], r=8).cuda()
    if training_args.gradient_checkpointing:
        model.enable_input_require_grads()
        model.gradient_checkpointing_enable()
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=training_args.learning_rate)
    dataset = LazySupervisedDataset(16, training_args.model_max_length, config.vocab_size)
    for step, batch in enumerate(DataLoader(dataset, training_args.per_device_train_batch_size, shuffle=True)):
        loss = model(input_ids=batch["input_ids"].cuda(), labels=batch["labels"].cuda()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return {"steps": step + 1}
