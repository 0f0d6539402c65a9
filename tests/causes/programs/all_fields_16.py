"""Programs after public threads: vision, video, medical images, 3D, diffusion, speech, vision-language, post-training, quantisation, serving."""
import gc
import math
import os
import tempfile
import types
from collections import OrderedDict

import numpy as np
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from expected import expected


# Text-to-image: LoRA weights of a latent diffusion UNet are trained on captioned pictures.

class LoRALinear(nn.Module):
    def __init__(self, features, out_features, rank=4):
        super().__init__()
        self.base = nn.Linear(features, out_features)
        self.down, self.up = nn.Linear(features, rank, bias=False), nn.Linear(rank, out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


class Attention(nn.Module):
    def __init__(self, dim, context_dim, heads):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k = LoRALinear(dim, dim), LoRALinear(context_dim, dim)
        self.to_v, self.to_out = LoRALinear(context_dim, dim), LoRALinear(dim, dim)

    def forward(self, x, context):
        split = lambda t: t.unflatten(-1, (self.heads, -1)).transpose(1, 2)
        out = F.scaled_dot_product_attention(split(self.to_q(x)), split(self.to_k(context)), split(self.to_v(context)))
        return self.to_out(out.transpose(1, 2).flatten(2))


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim, cross_attention_dim, heads):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn1, self.attn2 = Attention(dim, dim, heads), Attention(dim, cross_attention_dim, heads)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, hidden_states, encoder_hidden_states):
        normed = self.norm1(hidden_states)
        hidden_states = hidden_states + self.attn1(normed, normed)
        hidden_states = hidden_states + self.attn2(self.norm2(hidden_states), encoder_hidden_states)
        return hidden_states + self.ff(self.norm3(hidden_states))


class UNet2DConditionModel(nn.Module):
    def __init__(self, width=256, cross_attention_dim=256, layers=8):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, width, 3, stride=2, padding=1), nn.ConvTranspose2d(width, 4, 4, stride=2, padding=1)
        self.time_embedding = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.transformer_blocks = nn.ModuleList(BasicTransformerBlock(width, cross_attention_dim, 8) for _ in range(layers))
        self.gradient_checkpointing = False
        self.width = width

    def enable_gradient_checkpointing(self):
        self.gradient_checkpointing = True

    def forward(self, sample, timesteps, encoder_hidden_states):
        frequencies = torch.exp(-torch.arange(self.width // 2, device=sample.device) * (math.log(10000) / (self.width // 2)))
        angles = timesteps[:, None] * frequencies
        hidden = self.conv_in(sample) + self.time_embedding(torch.cat([angles.sin(), angles.cos()], 1))[:, :, None, None]
        shape, hidden = hidden.shape, hidden.flatten(2).transpose(1, 2)
        for block in self.transformer_blocks:
            if self.training and self.gradient_checkpointing:
                hidden = checkpoint(block, hidden, encoder_hidden_states, use_reentrant=False)
            else:
                hidden = block(hidden, encoder_hidden_states)
        return self.conv_out(hidden.transpose(1, 2).reshape(shape))


class DDPMScheduler:
    def __init__(self, num_train_timesteps=1000):
        self.num_train_timesteps = num_train_timesteps
        self.alphas_cumprod = (1 - torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, num_train_timesteps) ** 2).cumprod(0)

    def add_noise(self, latents, noise, timesteps):
        alphas = self.alphas_cumprod.to(latents.device)[timesteps][:, None, None, None]
        return alphas.sqrt() * latents + (1 - alphas).sqrt() * noise


@expected("many_rows", fix="checkpoint", thread="huggingface/diffusers#6402", memory=480, held_back=True)
def train_sdxl_lora(fixed=False):
    """`args.gradient_checkpointing` is set, but the training script never acts on it: `unet.enable_gradient_checkpointing()` is not called
    anywhere, so every block of the `unet` keeps all its activations for the backward although only the LoRA weights are trained. Cured by:
    call `unet.enable_gradient_checkpointing()` when `args.gradient_checkpointing` is set.
    """
    args = types.SimpleNamespace(resolution=512, train_batch_size=4, rank=4, learning_rate=1e-4, max_train_steps=4, gradient_checkpointing=True)
    device = torch.device("cuda")
    noise_scheduler = DDPMScheduler()
    unet = UNet2DConditionModel()
    unet.requires_grad_(False)
    unet.to(device)
    for name, parameter in unet.named_parameters():
        if ".down." in name or ".up." in name:
            parameter.requires_grad_(True)
    if fixed and args.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    params_to_optimize = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(params_to_optimize, lr=args.learning_rate)
    unet.train()
    for global_step in range(args.max_train_steps):
        model_input = torch.randn(args.train_batch_size, 4, args.resolution // 8, args.resolution // 8).to(device)
        prompt_embeds = torch.randn(args.train_batch_size, 77, 256).to(device)
        noise = torch.randn_like(model_input)
        timesteps = torch.randint(0, noise_scheduler.num_train_timesteps, (args.train_batch_size,), device=device)
        noisy_model_input = noise_scheduler.add_noise(model_input, noise, timesteps)
        model_pred = unet(noisy_model_input, timesteps, prompt_embeds)
        loss = (model_pred - noise).float().square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(params_to_optimize, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


# Serving a vision-language model: the worker measures what a full multimodal batch needs before it sizes the cache.

class VisionBlock(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.num_heads, -1)).permute(1, 2, 0, 3).unsqueeze(1)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1).flatten(1))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    def __init__(self, patch_dim=1536, dim=384, depth=12, out_dim=512):
        super().__init__()
        self.patch_embed = nn.Linear(patch_dim, dim)
        self.blocks = nn.ModuleList(VisionBlock(dim, 6) for _ in range(depth))
        self.merger = nn.Sequential(nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, out_dim))

    def forward(self, pixel_values, grid_thw):
        x = self.patch_embed(pixel_values)
        for block in self.blocks:
            x = block(x)
        return self.merger(x.unflatten(0, (-1, 4)).flatten(1))


class MultimodalModel(nn.Module):
    def __init__(self, hidden=512, vocab=32000, layers=4):
        super().__init__()
        self.visual = VisionTransformer(out_dim=hidden)
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList(VisionBlock(hidden, 8) for _ in range(layers))

    def embed_multimodal(self, pixel_values, image_grid_thw):
        return self.visual(pixel_values, image_grid_thw)

    def forward(self, input_ids, inputs_embeds=None):
        hidden = self.embed_tokens(input_ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden


class GPUModelRunner:
    def __init__(self, model, max_num_tokens, mm_budget):
        self.model, self.max_num_tokens, self.mm_budget = model, max_num_tokens, mm_budget
        self.encoder_cache = {}

    def profile_run(self):
        dummy = torch.zeros(self.mm_budget, 1536, dtype=torch.bfloat16, device="cuda")
        dummy_encoder_outputs = self.model.embed_multimodal(pixel_values=dummy, image_grid_thw=[(1, 64, self.mm_budget // 64)])
        self.encoder_cache["tmp"] = dict(enumerate(dummy_encoder_outputs.split(self.mm_budget // 16)))
        self.model(torch.zeros(self.max_num_tokens, dtype=torch.long, device="cuda"))
        self.encoder_cache.clear()


class GPUWorker:
    def __init__(self, model_runner, gpu_memory_utilization):
        self.model_runner, self.gpu_memory_utilization = model_runner, gpu_memory_utilization

    @torch.inference_mode()
    def determine_available_memory(self):
        torch.cuda.reset_peak_memory_stats()
        self.model_runner.profile_run()
        total = torch.cuda.mem_get_info()[1]
        return int(total * self.gpu_memory_utilization) - torch.cuda.max_memory_allocated()


def patch_worker(worker_class, keep_mode):
    def _patched_determine_available_memory(self):
        torch.cuda.reset_peak_memory_stats()
        self.model_runner.profile_run()
        weights = sum(parameter.nbytes for parameter in self.model_runner.model.parameters())
        self.virtual_kv_capacity = torch.cuda.mem_get_info()[1] - weights
        return self.virtual_kv_capacity

    if keep_mode:
        _patched_determine_available_memory = torch.inference_mode()(_patched_determine_available_memory)
    return type(worker_class.__name__, (worker_class,), {"determine_available_memory": _patched_determine_available_memory})


@expected("evaluation_keeps_graphs", fix="no_grad", thread="ovg-project/kvcached#461", memory=600, held_back=True)
def start_vision_worker(fixed=False):
    """`patch_worker` replaces `GPUWorker.determine_available_memory` by a function without the original's `@torch.inference_mode()`, on
    which `profile_run` relies; so the dummy multimodal profile runs with autograd on and the vision encoder keeps its backward graph with
    all intermediate activations. Cured by: put `@torch.inference_mode()` on the replacement.
    """
    model = MultimodalModel().to("cuda", torch.bfloat16).eval()
    worker_class = patch_worker(GPUWorker, keep_mode=fixed)
    worker = worker_class(GPUModelRunner(model, max_num_tokens=2048, mm_budget=8192), gpu_memory_utilization=0.9)
    available = worker.determine_available_memory()
    num_blocks = min(available // (4 << 20), 16)
    kv_cache = [torch.empty(num_blocks, 2, 16, 8, 64, dtype=torch.bfloat16, device="cuda") for _ in model.layers]
    return len(kv_cache)


# Online preference optimisation: a reward model scores completions of the policy and of the reference.

class DecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.input_norm, self.post_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.gate_proj, self.up_proj = nn.Linear(dim, 2 * dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.down_proj = nn.Linear(2 * dim, dim, bias=False)

    def forward(self, hidden):
        normed = self.input_norm(hidden)
        q, k, v = (proj(normed).unflatten(-1, (self.heads, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        hidden = hidden + self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        normed = self.post_norm(hidden)
        return hidden + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))


class DecoderModel(nn.Module):
    def __init__(self, vocab, dim, num_layers, heads=8):
        super().__init__()
        self.embed_tokens, self.norm = nn.Embedding(vocab, dim), nn.RMSNorm(dim)
        self.layers = nn.ModuleList(DecoderLayer(dim, heads) for _ in range(num_layers))

    def forward(self, input_ids, attention_mask=None, output_hidden_states=False):
        hidden = self.embed_tokens(input_ids)
        if attention_mask is not None:
            hidden = hidden * attention_mask.unsqueeze(-1)
        all_hidden_states = () if output_hidden_states else None
        for layer in self.layers:
            if output_hidden_states:
                all_hidden_states += (hidden,)
            hidden = layer(hidden)
        hidden = self.norm(hidden)
        if output_hidden_states:
            all_hidden_states += (hidden,)
        return types.SimpleNamespace(last_hidden_state=hidden, hidden_states=all_hidden_states)


class CausalLM(nn.Module):
    def __init__(self, vocab, dim, num_layers):
        super().__init__()
        self.model, self.lm_head = DecoderModel(vocab, dim, num_layers), nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, logits_to_keep=0):
        hidden = self.model(input_ids).last_hidden_state
        return self.lm_head(hidden[:, -logits_to_keep:] if logits_to_keep else hidden)


class RewardModel(nn.Module):
    base_model_prefix = "model"

    def __init__(self, vocab, dim, num_layers):
        super().__init__()
        self.model, self.score = DecoderModel(vocab, dim, num_layers), nn.Linear(dim, 1, bias=False)


def first_true_indices(bools):
    positions = torch.arange(bools.size(-1), device=bools.device).expand_as(bools)
    return torch.where(bools, positions, bools.size(-1)).amin(-1)


def get_reward(model, query_responses, pad_token_id, context_length, all_layers=True):
    attention_mask = query_responses != pad_token_id
    lm_backbone = getattr(model, model.base_model_prefix)
    output = lm_backbone(torch.masked_fill(query_responses, ~attention_mask, 0), attention_mask, output_hidden_states=all_layers)
    last_hidden = output.hidden_states[-1] if all_layers else output.last_hidden_state
    reward_logits = model.score(last_hidden)
    padded = query_responses[:, context_length:].eq(pad_token_id)
    last_token = context_length + first_true_indices(padded) - 1
    return reward_logits, reward_logits[..., 0].gather(1, last_token[:, None])[:, 0], last_token


class XPOTrainer:
    def __init__(self, model, ref_model, reward_model, beta, alpha, stored_layers):
        self.model, self.ref_model, self.reward_model = model, ref_model, reward_model
        self.beta, self.alpha, self.stored_layers, self.pad_token_id = beta, alpha, stored_layers, 0
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=5e-7)

    def _compute_rewards(self, model_data, ref_data, context_length):
        with torch.no_grad():
            _, model_scores, _ = get_reward(self.reward_model, model_data, self.pad_token_id, context_length, self.stored_layers)
            _, ref_scores, _ = get_reward(self.reward_model, ref_data, self.pad_token_id, context_length, self.stored_layers)
        return model_scores, ref_scores

    def _compute_logprobs(self, model, data, context_length):
        keep = data.size(1) - context_length
        logits = model(data, logits_to_keep=keep + 1)[:, :-1]
        labels = data[:, context_length:].unsqueeze(-1)
        return logits.gather(2, labels).squeeze(-1) - logits.logsumexp(-1)

    def training_step(self, prompts, model_completions, ref_completions):
        context_length = prompts.size(1)
        model_data, ref_data = torch.cat([prompts, model_completions], 1), torch.cat([prompts, ref_completions], 1)
        model_scores, ref_scores = self._compute_rewards(model_data, ref_data, context_length)
        chosen_mask = (model_scores >= ref_scores).unsqueeze(-1)
        on_model, on_ref = (self._compute_logprobs(self.model, data, context_length) for data in (model_data, ref_data))
        with torch.no_grad():
            reference = self._compute_logprobs(self.ref_model, model_data, context_length)
            reference_on_ref = self._compute_logprobs(self.ref_model, ref_data, context_length)
        margin = (on_model - reference).sum(1) - (on_ref - reference_on_ref).sum(1)
        loss = (-F.logsigmoid(self.beta * torch.where(chosen_mask.squeeze(1), margin, -margin)) + self.alpha * on_ref.sum(1)).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


@expected("results_of_each_layer", fix="output_hidden_states", thread="huggingface/trl#4755", memory=650, held_back=True)
def train_xpo(fixed=False):
    """`get_reward` asks the backbone of the reward model for `output_hidden_states=True` although it uses only the last one, so the hidden
    states of all layers are stored during the forward. Cured by: ask for `output_hidden_states=False` and use `last_hidden_state`.
    """
    vocab, batch, prompt_length, completion_length = 2000, 16, 448, 64
    model, ref_model = CausalLM(vocab, 64, 2).cuda(), CausalLM(vocab, 64, 2).cuda().eval().requires_grad_(False)
    reward_model = RewardModel(vocab, 384, 24).to("cuda").eval()
    trainer = XPOTrainer(model, ref_model, reward_model, beta=0.1, alpha=1e-5, stored_layers=not fixed)
    for _ in range(3):
        prompts = torch.randint(1, vocab, (batch, prompt_length)).cuda()
        completions = [torch.randint(1, vocab, (batch, completion_length)).cuda() for _ in range(2)]
        loss = trainer.training_step(prompts, *completions)
    return loss


# Text generation with a cache of keys and values that grows by a token a step.

class DynamicCache:
    def __init__(self):
        self.key_cache, self.value_cache = [], []

    @classmethod
    def from_legacy_cache(cls, past_key_values):
        cache = cls()
        for keys, values in past_key_values or ():
            cache.key_cache.append(keys)
            cache.value_cache.append(values)
        return cache

    def to_legacy_cache(self):
        return tuple(zip(self.key_cache, self.value_cache))

    def update(self, key_states, value_states, layer_idx):
        if len(self.key_cache) <= layer_idx:
            self.key_cache.append(key_states)
            self.value_cache.append(value_states)
        else:
            for stored, states in ((self.key_cache, key_states), (self.value_cache, value_states)):
                stored[layer_idx] = torch.cat((stored[layer_idx], states), 2)
        return self.key_cache[layer_idx], self.value_cache[layer_idx]


class ListedCache(DynamicCache):
    max_parts = 50

    def update(self, key_states, value_states, layer_idx):
        if len(self.key_cache) <= layer_idx:
            self.key_cache.append([])
            self.value_cache.append([])
        merged = []
        for parts, states in ((self.key_cache[layer_idx], key_states), (self.value_cache[layer_idx], value_states)):
            parts.append(states)
            whole = torch.cat(parts, dim=-2) if len(parts) > 1 else states
            if len(parts) > self.max_parts:
                parts[:] = [whole]
            merged.append(whole)
        return merged


class CachedBlock(nn.Module):
    def __init__(self, layer_idx, dim, heads):
        super().__init__()
        self.layer_idx, self.heads = layer_idx, heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, hidden, cache):
        q, k, v = self.c_attn(self.ln_1(hidden)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2).contiguous() for t in (q, k, v))
        keys, values = cache.update(k, v, self.layer_idx)
        attended = F.scaled_dot_product_attention(q, keys, values, is_causal=q.size(-2) > 1)
        hidden = hidden + self.c_proj(attended.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.ln_2(hidden))


class CachedLM(nn.Module):
    def __init__(self, vocab, dim, num_layers, heads, cache_class):
        super().__init__()
        self.cache_class = cache_class
        self.wte, self.ln_f = nn.Embedding(vocab, dim), nn.LayerNorm(dim)
        self.h = nn.ModuleList(CachedBlock(i, dim, heads) for i in range(num_layers))

    def forward(self, input_ids, past_key_values=None):
        cache = self.cache_class.from_legacy_cache(past_key_values)
        hidden = self.wte(input_ids)
        for block in self.h:
            hidden = block(hidden, cache)
        logits = F.linear(self.ln_f(hidden[:, -1:]), self.wte.weight)
        return types.SimpleNamespace(logits=logits, past_key_values=cache.to_legacy_cache())

    def prepare_inputs_for_generation(self, input_ids, past_key_values=None):
        return {"input_ids": input_ids if past_key_values is None else input_ids[:, -1:], "past_key_values": past_key_values}

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens):
        model_kwargs = {}
        for _ in range(max_new_tokens):
            model_inputs = self.prepare_inputs_for_generation(input_ids, **model_kwargs)
            outputs = self(**model_inputs)
            next_tokens = outputs.logits[:, -1].argmax(-1)
            input_ids = torch.cat([input_ids, next_tokens[:, None]], dim=-1)
            model_kwargs["past_key_values"] = outputs.past_key_values
        return input_ids


@expected("copied_cache", fix="let each layer", thread="huggingface/transformers#30536", memory=1180, held_back=True)
def generate_replies(fixed=False):
    """`DynamicCache.update` makes a new tensor with `torch.cat` for every layer while the inputs of the step (`past_key_values`) still hold
    the tensors of the step before, so that in every step of `generate` the full key-value cache exists twice. Cured by: keep per layer a
    list of tensors, append the new token's, and concatenate only for the attention of that layer (and now and then in place).
    """
    model = CachedLM(8000, 512, 12, 8, ListedCache if fixed else DynamicCache).half().cuda().eval()
    prompts = torch.randint(0, 8000, (16, 1024)).cuda()
    return model.generate(prompts, max_new_tokens=64)


# A video model is set up from a checkpoint file and samples a clip.

class Modulation(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.lin = nn.Linear(dim, 3 * dim)

    def forward(self, vec):
        return self.lin(F.silu(vec))[:, None].chunk(3, -1)


class SingleStreamBlock(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.hidden_size, self.num_heads = hidden_size, num_heads
        self.linear1, self.linear2 = nn.Linear(hidden_size, 7 * hidden_size), nn.Linear(5 * hidden_size, hidden_size)
        self.pre_norm, self.modulation = nn.LayerNorm(hidden_size, elementwise_affine=False), Modulation(hidden_size)

    def forward(self, x, vec):
        shift, scale, gate = self.modulation(vec)
        qkv, mlp = self.linear1((1 + scale) * self.pre_norm(x) + shift).split([3 * self.hidden_size, 4 * self.hidden_size], -1)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        attn = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + gate * self.linear2(torch.cat([attn, F.gelu(mlp, approximate="tanh")], -1))


class MMDiTModel(nn.Module):
    def __init__(self, in_channels=64, hidden_size=1024, depth=8, num_heads=16, context_in_dim=512):
        super().__init__()
        self.img_in, self.txt_in = nn.Linear(in_channels, hidden_size), nn.Linear(context_in_dim, hidden_size)
        self.time_in = nn.Sequential(nn.Linear(256, hidden_size), nn.SiLU(), nn.Linear(hidden_size, hidden_size))
        self.single_blocks = nn.ModuleList(SingleStreamBlock(hidden_size, num_heads) for _ in range(depth))
        self.final_layer = nn.Linear(hidden_size, in_channels)

    def forward(self, img, txt, timesteps):
        angles = timesteps[:, None] * torch.arange(1, 129, device=img.device, dtype=img.dtype)
        vec, x = self.time_in(torch.cat([angles.cos(), angles.sin()], -1)), torch.cat([self.txt_in(txt), self.img_in(img)], 1)
        for block in self.single_blocks:
            x = block(x, vec)
        return self.final_layer(x[:, txt.shape[1]:])


def load_checkpoint(model, path, device_map):
    ckpt = torch.load(path, map_location=device_map)
    missing, unexpected = model.load_state_dict(ckpt, strict=False)
    return model, missing + unexpected


def prepare_models(ckpt_path, device, dtype, device_map):
    model = MMDiTModel().to(device, dtype).eval()
    model, odd = load_checkpoint(model, ckpt_path, device_map)
    return model


@torch.inference_mode()
def denoise(model, img, txt, num_steps):
    for step in range(num_steps):
        time = img.new_full((len(img),), 1 - step / num_steps)
        img = img - model(img, txt, time) / num_steps
    return img


@expected("loaded_onto_gpu", fix="map_location|host", thread="hpcaitech/Open-Sora#841", memory=580, held_back=True)
def sample_video(fixed=False):
    """`load_checkpoint` reads the whole checkpoint onto the GPU (`device` the current CUDA device) where the model's own weights already
    are, so that the weights exist twice while `load_state_dict` copies them. Cured by: read the checkpoint onto the CPU.
    """
    dtype = torch.bfloat16
    with tempfile.TemporaryDirectory() as folder:
        ckpt_path = os.path.join(folder, "Open_Sora_v2.pth")
        with torch.device("meta"):
            layout = MMDiTModel().state_dict()
        torch.save({name: torch.zeros(tensor.shape, dtype=dtype) for name, tensor in layout.items()}, ckpt_path)
        model = prepare_models(ckpt_path, torch.device("cuda"), dtype, "cpu" if fixed else torch.device("cuda", torch.cuda.current_device()))
    img, txt = torch.randn(1, 1536, 64).to("cuda", dtype), torch.randn(1, 128, 512).to("cuda", dtype)
    return denoise(model, img, txt, num_steps=10)


# A chat service with one base model and several adapters, selected by the request.

class QuantLinear:
    def __init__(self, key, in_features, out_features):
        self.key, self.in_features, self.out_features = key, in_features, out_features
        self.weight = torch.zeros(out_features, in_features, dtype=torch.half, device="cuda")
        self.lora_a_tensors, self.lora_b_tensors = {}, {}

    def forward(self, hidden_states, loras=()):
        hidden_states_out = F.linear(hidden_states, self.weight)
        for lora in loras:
            lora_a, lora_b = self.lora_a_tensors.get(lora), self.lora_b_tensors.get(lora)
            if lora_a is not None:
                hidden_states_out += torch.matmul(torch.matmul(hidden_states, lora_a), lora_b)
        return hidden_states_out


class BaseModel:
    def __init__(self, hidden_size=1024, intermediate_size=2816, num_layers=6, vocab_size=8000):
        self.num_layers, self.modules_dict = num_layers, {}
        self.embed_tokens = torch.zeros(vocab_size, hidden_size, dtype=torch.half, device="cuda")
        shapes = {"self_attn.q_proj": (hidden_size, hidden_size), "self_attn.o_proj": (hidden_size, hidden_size),
                  "mlp.gate_proj": (hidden_size, intermediate_size), "mlp.up_proj": (hidden_size, intermediate_size),
                  "mlp.down_proj": (intermediate_size, hidden_size)}
        for i in range(num_layers):
            for part, (in_features, out_features) in shapes.items():
                key = f"model.layers.{i}.{part}"
                self.modules_dict[key] = QuantLinear(key, in_features, out_features)

    @torch.inference_mode()
    def forward(self, input_ids, loras):
        hidden = F.embedding(input_ids, self.embed_tokens)
        for i in range(self.num_layers):
            run = lambda part, x: self.modules_dict[f"model.layers.{i}.{part}"].forward(x, loras)
            normed = F.layer_norm(hidden, hidden.shape[-1:])
            hidden = hidden + run("self_attn.o_proj", run("self_attn.q_proj", normed))
            normed = F.layer_norm(hidden, hidden.shape[-1:])
            hidden = hidden + run("mlp.down_proj", F.silu(run("mlp.gate_proj", normed)) * run("mlp.up_proj", normed))
        return hidden[:, -1] @ self.embed_tokens.T


class Lora:
    def __init__(self, model, state_dict, lora_alpha, careful):
        self.model, self.careful = model, careful
        self.tensors, self.target_modules = {}, {}
        for name, value in state_dict.items():
            _, _, target_key = name.partition("base_model.model.")
            module_key, lora_half, _ = target_key.rsplit(".", 2)
            target_module, transposed = model.modules_dict[module_key], value.t().contiguous()
            if lora_half == "lora_B":
                transposed *= lora_alpha / len(transposed)
            on_device = transposed.to(target_module.weight.device, torch.half)
            (target_module.lora_a_tensors if lora_half == "lora_A" else target_module.lora_b_tensors)[self] = on_device
            self.tensors[target_key], self.target_modules[target_key] = on_device, target_module

    def unload(self):
        for target_module in self.target_modules.values():
            if not self.careful or self in target_module.lora_a_tensors:
                target_module.lora_a_tensors.pop(self)
            if not self.careful or self in target_module.lora_b_tensors:
                target_module.lora_b_tensors.pop(self)
        self.tensors, self.target_modules = {}, {}


class AdapterStore:
    def __init__(self, model, rank):
        self.shapes, self.rank = {key: (m.in_features, m.out_features) for key, m in model.modules_dict.items()}, rank

    def read(self, name):
        tensors = OrderedDict()
        for key, (in_features, out_features) in self.shapes.items():
            tensors[f"base_model.model.{key}.lora_A.weight"] = torch.full((self.rank, in_features), 0.01, dtype=torch.half)
            tensors[f"base_model.model.{key}.lora_B.weight"] = torch.zeros(out_features, self.rank, dtype=torch.half)
        return tensors


class ChatService:
    def __init__(self, model, store, careful):
        self.model, self.store, self.careful = model, store, careful
        self.lora, self.lora_name = None, None

    def select_lora(self, name):
        if name == self.lora_name:
            return
        if self.lora is not None:
            try:
                self.lora.unload()
            except KeyError:
                print(f"could not unload {self.lora_name}")
        self.lora = None
        torch.cuda.empty_cache()
        self.lora, self.lora_name = Lora(self.model, self.store.read(name), lora_alpha=32.0, careful=self.careful), name

    def reply(self, lora_name, input_ids, max_new_tokens=4):
        self.select_lora(lora_name)
        for _ in range(max_new_tokens):
            logits = self.model.forward(input_ids, [self.lora])
            input_ids = torch.cat([input_ids, logits.argmax(-1, keepdim=True)], 1)
        return input_ids


@expected("kept_tensors", fix="del|clear", thread="turboderp-org/exllamav2#100", memory=520, held_back=True)
def serve_with_adapters(fixed=False):
    """A `Lora` stays attached to the model: every target module holds its tensors in `lora_a_tensors` and `lora_b_tensors`, and `unload`
    breaks off with a `KeyError` at its second key (it deletes both halves of a module at each half's key), so the tensors of every adapter
    that was ever selected remain on the GPU. Cured by: in `unload` delete an entry only if it is there, so that all are deleted.
    """
    model = BaseModel()
    service = ChatService(model, AdapterStore(model, rank=256), careful=fixed)
    names = ["storyteller", "coder", "lawyer", "poet", "translator", "tutor", "critic", "planner"]
    requests = [(name, torch.randint(0, 8000, (1, 256)).cuda()) for name in names + names[:2]]
    return [service.reply(name, input_ids) for name, input_ids in requests]


# A pipeline for pictures and text: a language engine with a paged cache and a vision encoder of its own.

class EngineLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attn, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w2 = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x):
        q, k, v = self.attn(F.rms_norm(x, x.shape[-1:])).unflatten(-1, (3, 16, -1)).permute(1, 2, 0, 3).unsqueeze(1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)[0].transpose(0, 1).flatten(1))
        return x + self.w2(F.silu(self.w1(F.rms_norm(x, x.shape[-1:])))), k, v


class CacheManager:
    def __init__(self, num_layers, dim, block_size=64, cache_max_entry_count=0.8):
        free, _ = torch.cuda.mem_get_info()
        self.block_bytes = 2 * num_layers * block_size * dim * 2
        self.num_blocks = int(free * cache_max_entry_count) // self.block_bytes
        self.blocks = torch.empty(self.num_blocks, num_layers, 2, block_size, dim, dtype=torch.half, device="cuda")
        self.used = 0

    def store(self, layer_idx, keys, values):
        length = min(keys.shape[-2], self.blocks.shape[3])
        self.blocks[self.used, layer_idx, 0, :length] = keys[0].transpose(0, 1).flatten(1)[:length]
        self.blocks[self.used, layer_idx, 1, :length] = values[0].transpose(0, 1).flatten(1)[:length]


class AsyncEngine:
    def __init__(self, model_path, dim=1024, num_layers=10, vocab=8000):
        self.model_path, self.embed = model_path, nn.Embedding(vocab, dim).half().cuda()
        self.layers = nn.ModuleList(EngineLayer(dim) for _ in range(num_layers)).half().cuda().eval()
        self.cache = CacheManager(num_layers, dim)

    @torch.inference_mode()
    def infer(self, input_ids, features):
        x = torch.cat([features, self.embed(input_ids)])
        for layer_idx, layer in enumerate(self.layers):
            x, keys, values = layer(x)
            self.cache.store(layer_idx, keys, values)
        self.cache.used += 1
        return (x[-1] @ self.embed.weight.T).argmax(-1)


class ImageEncoder:
    def __init__(self, model_path, width=1024, depth=12, out_dim=1024):
        self.model_path = model_path
        self.vit = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 16, 4 * width, activation="gelu", batch_first=True, norm_first=True),
                                         depth, enable_nested_tensor=False)
        self.patches, self.projector = nn.Conv2d(3, width, 14, stride=14), nn.Linear(width, out_dim)
        for part in (self.patches, self.vit, self.projector):
            part.half().cuda().eval()

    @torch.inference_mode()
    def infer(self, images):
        return [self.projector(self.vit(self.patches(image[None].half()).flatten(2).transpose(1, 2)))[0] for image in images]


class VLAsyncEngine(AsyncEngine):
    def __init__(self, model_path, vision_first):
        vl_encoder = ImageEncoder(model_path) if vision_first else None
        AsyncEngine.__init__(self, model_path)
        self.vl_encoder = vl_encoder or ImageEncoder(model_path)

    def generate(self, prompt, images):
        features = self.vl_encoder.infer([image.cuda() for image in images])
        return self.infer(prompt.cuda(), torch.cat(features))


@expected("order_of_models", fix="before|later", thread="InternLM/lmdeploy#1434", memory=1400, held_back=True)
def build_vl_pipeline(fixed=False):
    """`VLAsyncEngine` first starts the language engine, whose key-value cache takes a fixed share of the memory that is free at that
    moment, and only then loads the vision encoder `vl_encoder`, for which too little is left. Cured by: create `vl_encoder` before the
    language engine.
    """
    pipe = VLAsyncEngine("llava-v1.5", vision_first=fixed)
    return [pipe.generate(torch.randint(0, 8000, (48,)), [torch.rand(3, 336, 336)]) for _ in range(3)]


# Weight quantisation with activation-aware scales: each layer's inputs are recorded, then the best scales are searched.

class EagerAttention(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.q_proj, self.k_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.v_proj, self.o_proj = nn.Linear(dim, dim, bias=False), nn.Linear(dim, dim, bias=False)

    def forward(self, hidden_states):
        query, key, value = (proj(hidden_states).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
                             for proj in (self.q_proj, self.k_proj, self.v_proj))
        attn_weights = query @ key.mT / math.sqrt(query.shape[-1])
        return self.o_proj((attn_weights.softmax(-1) @ value).transpose(-3, -2).flatten(-2))


class FlatDecoderLayer(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(dim), EagerAttention(dim, num_heads)
        self.post_attention_layernorm = nn.RMSNorm(dim)
        self.mlp = nn.Sequential(OrderedDict(up_proj=nn.Linear(dim, 3 * dim, bias=False), act_fn=nn.SiLU(), down_proj=nn.Linear(3 * dim, dim, bias=False)))

    def forward(self, hidden_states):
        hidden_states = hidden_states + self.self_attn(self.input_layernorm(hidden_states))
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


class AWQProcessor:
    def __init__(self, group_size, n_grid, quant_batch_size, sample_axis):
        self.group_size, self.n_grid, self.quant_batch_size, self.sample_axis = group_size, n_grid, quant_batch_size, sample_axis
        self.tasks = {}

    def _record_input_feature(self, module_name, feature):
        if self.sample_axis:
            feature = feature.reshape(-1, *feature.shape[-2:])
        self.tasks.setdefault(module_name, []).append(feature.detach().cpu())

    def pre_process_fwd_hook(self, name):
        return lambda module, inputs, output: self._record_input_feature(name, inputs[0])

    def _module_forward(self, x, module):
        if not self.sample_axis or x.shape[0] <= self.quant_batch_size:
            return module(x)
        return torch.cat([module(part) for part in x.split(self.quant_batch_size)])

    def pseudo_quantize_tensor(self, w):
        grouped = w.reshape(-1, self.group_size)
        highest, lowest = grouped.amax(1, keepdim=True), grouped.amin(1, keepdim=True)
        scales = (highest - lowest).clamp(min=1e-5) / 15
        zeros = -(lowest / scales).round()
        return (((grouped / scales).round() + zeros).clamp(0, 15) - zeros).mul(scales).reshape(w.shape)

    def _search_best_scale(self, inp, linears, module2inspect):
        inp = inp.to(linears[0].weight.device)
        x_mean = inp.abs().flatten(0, -2).mean(0)
        fp16_output = self._module_forward(inp, module2inspect)
        original, losses, candidates = [linear.weight.clone() for linear in linears], [], []
        for step in range(self.n_grid):
            scales = x_mean.pow(step / self.n_grid).clamp(min=1e-4)
            for linear, weight in zip(linears, original):
                linear.weight.copy_(self.pseudo_quantize_tensor(weight * scales) / scales)
            int_w_output = self._module_forward(inp, module2inspect)
            losses.append((fp16_output - int_w_output).float().pow(2).mean())
            candidates.append(scales)
            for linear, weight in zip(linears, original):
                linear.weight.copy_(weight)
        return torch.stack(candidates).index_select(0, torch.stack(losses).argmin().view(1))[0]

    def process(self, layer):
        inp = torch.cat(self.tasks["self_attn.q_proj"], dim=0)
        attn = layer.self_attn
        scales = self._search_best_scale(inp, [attn.q_proj, attn.k_proj, attn.v_proj], attn)
        layer.input_layernorm.weight.div_(scales)
        for linear in (attn.q_proj, attn.k_proj, attn.v_proj):
            linear.weight.copy_(self.pseudo_quantize_tensor(linear.weight * scales))
        self.tasks.clear()


@expected("attention_scores", fix="parts", thread="ModelCloud/GPTQModel#2458", memory=700, held_back=True)
@torch.no_grad()
def quantize_with_awq_again(fixed=False):
    """`_record_input_feature` records flattened `[tokens, hidden]` inputs without a sample axis, so that their concatenation is one giant
    sequence of all calibration samples, on which `_module_forward` runs the attention at once: the attention scores grow with the square of
    the total number of tokens. Cured by: give the recorded inputs a leading sample axis, so that they concatenate to `[samples, tokens,
    hidden]`, and run in parts of `quant_batch_size` samples.
    """
    dim, seqlen, samples = 512, 256, 32
    layers = nn.ModuleList(FlatDecoderLayer(dim, 8) for _ in range(3)).half().cuda()
    hidden = [torch.randn(seqlen, dim).half() for _ in range(samples)]
    processor = AWQProcessor(group_size=128, n_grid=6, quant_batch_size=1, sample_axis=fixed)
    for layer in layers:
        handle = layer.self_attn.q_proj.register_forward_hook(processor.pre_process_fwd_hook("self_attn.q_proj"))
        hidden = [layer(states.cuda()).cpu() for states in hidden]
        handle.remove()
        processor.process(layer)
    return len(layers)


# Reinforcement learning of a language model on graded completions that a client sends in groups.

class GRPOModel(nn.Module):
    def __init__(self, vocab, dim, num_layers, rank):
        super().__init__()
        self.model, self.lm_head = DecoderModel(vocab, dim, num_layers), nn.Linear(dim, vocab, bias=False)
        self.requires_grad_(False)
        self.lora_down, self.lora_up = nn.Linear(dim, rank, bias=False), nn.Linear(rank, dim, bias=False)
        self.adapter_enabled = True

    def forward(self, input_ids, attention_mask, logits_to_keep):
        hidden = self.model(input_ids, attention_mask).last_hidden_state[:, -logits_to_keep:]
        if self.adapter_enabled:
            hidden = hidden + self.lora_up(self.lora_down(hidden))
        return self.lm_head(hidden)


class BlockingQueueDataset(Dataset):
    def __init__(self, vocab, num_generations, prompt_length, completion_length, size):
        self.vocab, self.num_generations, self.size = vocab, num_generations, size
        self.prompt_length, self.completion_length = prompt_length, completion_length

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index // self.num_generations)
        prompt = torch.randint(1, self.vocab, (self.prompt_length,), generator=generator)
        return {"messages": prompt, "completion": torch.randint(1, self.vocab, (self.completion_length,)), "reward": -float(index % 7)}


class ArborGRPOTrainer:
    def __init__(self, model, args, train_dataset):
        self.model, self.args, self.train_dataset = model, args, train_dataset
        if args.generation_batch_size is None:
            args.generation_batch_size = args.per_device_train_batch_size * args.gradient_accumulation_steps
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=args.learning_rate)

    def _get_per_token_logps(self, model, input_ids, attention_mask, logits_to_keep):
        logits = model(input_ids, attention_mask, logits_to_keep + 1)[:, :-1]
        logits = logits / self.args.temperature
        selected = logits.gather(-1, input_ids[:, -logits_to_keep:].unsqueeze(-1)).squeeze(-1)
        return selected - torch.stack([torch.logsumexp(row, dim=-1) for row in logits])

    def _generate_and_score_completions(self, batch):
        prompt_ids, completion_ids = batch["messages"].cuda(), batch["completion"].cuda()
        prompt_completion_ids = torch.hstack((prompt_ids, completion_ids))
        attention_mask, logits_to_keep = prompt_completion_ids.ne(0), completion_ids.shape[1]
        with torch.no_grad():
            ref_per_token_logps = None
            if self.args.beta != 0.0:
                self.model.adapter_enabled = False
                ref_per_token_logps = self._get_per_token_logps(self.model, prompt_completion_ids, attention_mask, logits_to_keep)
                self.model.adapter_enabled = True
        rewards = batch["reward"].float().cuda().view(-1, self.args.num_generations)
        advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)
        return {"prompt_completion_ids": prompt_completion_ids, "attention_mask": attention_mask, "logits_to_keep": logits_to_keep,
                "ref_per_token_logps": ref_per_token_logps, "advantages": advantages.flatten()}

    def _compute_loss(self, inputs, part):
        ids, mask = inputs["prompt_completion_ids"][part], inputs["attention_mask"][part]
        per_token_logps = self._get_per_token_logps(self.model, ids, mask, inputs["logits_to_keep"])
        ratio = torch.exp(per_token_logps - per_token_logps.detach())
        per_token_loss = -ratio * inputs["advantages"][part, None]
        if inputs["ref_per_token_logps"] is not None:
            difference = inputs["ref_per_token_logps"][part] - per_token_logps
            per_token_loss = per_token_loss + self.args.beta * (difference.exp() - difference - 1)
        return per_token_loss.mean()

    def train(self):
        args, micro_step = self.args, 0
        for batch in DataLoader(self.train_dataset, batch_size=args.generation_batch_size):
            inputs = self._generate_and_score_completions(batch)
            for start in range(0, args.generation_batch_size, args.per_device_train_batch_size):
                loss = self._compute_loss(inputs, slice(start, start + args.per_device_train_batch_size))
                (loss / args.gradient_accumulation_steps).backward()
                micro_step += 1
                if micro_step % args.gradient_accumulation_steps == 0:
                    self.optimizer.step()
                    self.optimizer.zero_grad()
        return loss.detach()


@expected("logits", fix="some rows", thread="Ziems/arbor#60", memory=550, held_back=True)
def run_grpo_manager(fixed=False):
    """`generation_batch_size` is not set (and cannot be passed on), so it is `per_device_train_batch_size` times
    `gradient_accumulation_steps`: `_generate_and_score_completions` gets the samples of all accumulation steps at once and computes the
    reference log-probabilities, with logits over the whole vocabulary, for all of them in one forward. Cured by: pass
    `generation_batch_size = num_generations`.
    """
    config = {"num_generations": 4, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 40, "temperature": 0.9, "beta": 0.04,
              "learning_rate": 1e-5, "report_to": None, "generation_batch_size": None}
    if fixed:
        config["generation_batch_size"] = config["num_generations"]
    args = types.SimpleNamespace(**config)
    vocab = 16000
    model = GRPOModel(vocab, 256, 4, rank=16).to("cuda", torch.bfloat16)
    dataset = BlockingQueueDataset(vocab, args.num_generations, prompt_length=128, completion_length=256, size=80)
    return ArborGRPOTrainer(model, args, dataset).train()


# Speech: a vocoder that generates a waveform sample by sample from a mel spectrogram.

class IncrementalConv1d(nn.Conv1d):
    input_buffer = linearized_weight = None

    def clear_buffer(self):
        self.input_buffer = self.linearized_weight = None

    def incremental_forward(self, x):
        kernel, dilation = self.kernel_size[0], self.dilation[0]
        if self.linearized_weight is None:
            self.linearized_weight = self.weight.transpose(1, 2).reshape(self.out_channels, -1)
        if kernel > 1:
            x = x.detach()
            if self.input_buffer is None:
                self.input_buffer = x.new_zeros(len(x), dilation * (kernel - 1) + 1, x.shape[2])
            else:
                self.input_buffer[:, :-1] = self.input_buffer[:, 1:].clone()
            self.input_buffer[:, -1] = x[:, 0]
            x = self.input_buffer[:, ::dilation].contiguous()
        return F.linear(x.reshape(x.size(0), -1), self.linearized_weight, self.bias).unsqueeze(1)


class ResidualConv1dGLU(nn.Module):
    def __init__(self, residual_channels, gate_channels, kernel_size, skip_out_channels, cin_channels, dilation):
        super().__init__()
        self.conv = IncrementalConv1d(residual_channels, gate_channels, kernel_size, dilation=dilation)
        self.conv1x1c = IncrementalConv1d(cin_channels, gate_channels, 1, bias=False)
        self.conv1x1_out = IncrementalConv1d(gate_channels // 2, residual_channels, 1)
        self.conv1x1_skip = IncrementalConv1d(gate_channels // 2, skip_out_channels, 1)

    def incremental_forward(self, x, c):
        residual = x
        a, b = (self.conv.incremental_forward(x) + self.conv1x1c.incremental_forward(c)).chunk(2, -1)
        x = torch.tanh(a) * torch.sigmoid(b)
        return (self.conv1x1_out.incremental_forward(x) + residual) * math.sqrt(0.5), self.conv1x1_skip.incremental_forward(x)


class WaveNet(nn.Module):
    def __init__(self, out_channels=256, layers=20, stacks=2, residual_channels=512, gate_channels=512, skip_out_channels=256, cin_channels=80):
        super().__init__()
        self.out_channels = out_channels
        self.first_conv = IncrementalConv1d(out_channels, residual_channels, 1)
        self.conv_layers = nn.ModuleList(
            ResidualConv1dGLU(residual_channels, gate_channels, 3, skip_out_channels, cin_channels, 2 ** (layer % (layers // stacks)))
            for layer in range(layers))
        self.last_conv_layers = nn.ModuleList([IncrementalConv1d(skip_out_channels, skip_out_channels, 1), IncrementalConv1d(skip_out_channels, out_channels, 1)])

    def clear_buffer(self):
        for module in self.modules():
            if isinstance(module, IncrementalConv1d):
                module.clear_buffer()

    def incremental_forward(self, initial_input, c, T):
        self.clear_buffer()
        c, outputs, current_input = c.mT.contiguous(), [], initial_input
        for t in range(T):
            x, skips = self.first_conv.incremental_forward(outputs[-1] if outputs else current_input), 0
            for layer in self.conv_layers:
                x, h = layer.incremental_forward(x, c[:, t:t + 1])
                skips = math.sqrt(0.5) * (h + skips)
            for layer in self.last_conv_layers:
                skips = layer.incremental_forward(skips.relu())
            x = skips.softmax(-1)
            outputs.append(x)
        self.clear_buffer()
        return torch.cat(outputs, 1).transpose(1, 2).contiguous()


def wavegen(model, c, hop_size, initial_value=127):
    model.eval()
    c = np.repeat(c, hop_size, axis=1)
    c = torch.from_numpy(c).transpose(1, 2).cuda()
    initial_input = torch.zeros(c.size(0), 1, model.out_channels)
    initial_input[:, :, initial_value] = 1
    y_hat = model.incremental_forward(initial_input.cuda(), c, T=c.size(2))
    return y_hat.max(1)[1].cpu().numpy()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="r9y9/wavenet_vocoder#18", memory=560, held_back=True)
def synthesize_speech(fixed=False):
    """`wavegen` (as the evaluation in training) calls `model.incremental_forward` with autograd on: each generated sample `x` is kept in
    `outputs` with its graph and is the input of the next step, so the activations of all time steps stay until the end. Cured by: run
    `incremental_forward` under `torch.no_grad()`.
    """
    model = WaveNet().cuda()
    mel = np.random.rand(8, 8, 80).astype(np.float32)
    if fixed:
        with torch.no_grad():
            return wavegen(model, mel, hop_size=32)
    return wavegen(model, mel, hop_size=32)


# Gaussians are fitted to photographs of a scene with an L1 and a structural similarity loss.

class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self._defaults = {}

    def add_state(self, name, default):
        self._defaults[name] = default
        setattr(self, name, list(default) if isinstance(default, list) else default)

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, list(default) if isinstance(default, list) else default)

    def forward(self, *args):
        self.update(*args)
        cache = {name: getattr(self, name) for name in self._defaults}
        self.reset()
        self.update(*args)
        value = self.compute()
        for name, state in cache.items():
            setattr(self, name, state)
        return value


def _ssim_update(preds, target, kernel, data_range):
    channels = preds.size(1)
    stacked = torch.cat([preds, target, preds * preds, target * target, preds * target])
    mu_p, mu_t, pp, tt, pt = F.conv2d(stacked, kernel.expand(channels, 1, -1, -1), groups=channels).chunk(5)
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    upper = (2 * mu_p * mu_t + c1) * (2 * (pt - mu_p * mu_t) + c2)
    return (upper / ((mu_p ** 2 + mu_t ** 2 + c1) * (pp - mu_p ** 2 + tt - mu_t ** 2 + c2))).flatten(1).mean(1)


class StructuralSimilarityIndexMeasure(Metric):
    def __init__(self, data_range, kernel_size=11, sigma=1.5):
        super().__init__()
        window = torch.exp(-(torch.arange(kernel_size) - kernel_size // 2) ** 2 / (2 * sigma ** 2))
        self.register_buffer("kernel", torch.outer(window, window)[None, None] / window.sum() ** 2)
        self.data_range = data_range
        self.add_state("preds", [])
        self.add_state("target", [])

    def update(self, preds, target):
        self.preds.append(preds)
        self.target.append(target)

    def compute(self):
        return _ssim_update(torch.cat(self.preds), torch.cat(self.target), self.kernel, self.data_range).mean()


class StructuralSimilarityOfSums(StructuralSimilarityIndexMeasure):
    def __init__(self, data_range):
        super().__init__(data_range)
        self._defaults = {}
        self.add_state("similarity", 0.0)
        self.add_state("total", 0)

    def update(self, preds, target):
        similarity = _ssim_update(preds, target, self.kernel, self.data_range)
        self.similarity = self.similarity + similarity.sum()
        self.total = self.total + preds.size(0)

    def compute(self):
        return self.similarity / self.total

    def forward(self, *args):
        kept, seen = self.similarity, self.total
        self.reset()
        self.update(*args)
        value = self.compute()
        self.similarity, self.total = kept + self.similarity.detach(), seen + self.total
        return value


class Splatter(nn.Module):
    def __init__(self, n_gaussians, n_cameras, height, width):
        super().__init__()
        self.pos, self.scale = nn.Parameter(torch.rand(n_gaussians, 3)), nn.Parameter(torch.full((n_gaussians, 2), 0.05))
        self.rgb, self.opa = nn.Parameter(torch.rand(n_gaussians, 3)), nn.Parameter(torch.zeros(n_gaussians))
        self.height, self.width, self.device = height, width, torch.device("cuda")
        self.images = torch.randint(0, 255, (n_cameras, height, width, 3), dtype=torch.uint8)
        self.rotations = torch.linalg.qr(torch.randn(n_cameras, 3, 3))[0]
        self.ground_truth = None

    def set_camera(self, camera_id):
        self.ground_truth = self.images[camera_id].to(self.device).float() / 255
        self.rotation = self.rotations[camera_id].to(self.device)

    def forward(self, camera_id):
        self.set_camera(camera_id)
        centre = self.pos @ self.rotation.T
        ys, xs = torch.linspace(0, 1, self.height, device=self.device), torch.linspace(0, 1, self.width, device=self.device)
        column = torch.exp(-((ys - centre[:, :1]) / self.scale[:, :1]) ** 2)
        row = torch.exp(-((xs - centre[:, 1:2]) / self.scale[:, 1:]) ** 2)
        weighted = torch.sigmoid(self.opa)[:, None] * torch.sigmoid(self.rgb)
        return torch.stack([(column * weighted[:, c:c + 1]).T @ row for c in range(3)], dim=-1)


class Trainer:
    def __init__(self, gaussian_splatter, opt, ssim_criterion):
        self.gaussian_splatter, self.opt, self.ssim_criterion = gaussian_splatter, opt, ssim_criterion
        self.optimizer = torch.optim.Adam(gaussian_splatter.parameters(), lr=opt.lr)
        self.l1_losses = np.zeros(opt.n_history_track)

    def train_step(self, i_iter):
        rendered_img = self.gaussian_splatter(i_iter % len(self.gaussian_splatter.images))
        l1_loss = (rendered_img - self.gaussian_splatter.ground_truth).abs().mean()
        as_batch = lambda image: image.movedim(-1, 0)[None]
        ssim_loss = 1 - self.ssim_criterion(as_batch(rendered_img), as_batch(self.gaussian_splatter.ground_truth))
        loss = (1 - self.opt.ssim_weight) * l1_loss + self.opt.ssim_weight * ssim_loss
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.l1_losses[i_iter % len(self.l1_losses)] = float(l1_loss)
        return float(self.l1_losses.mean())


@expected("kept_tensors", fix="clear", thread="WangFeng18/3d-gaussian-splatting#5", memory=600, held_back=True)
def fit_gaussians(fixed=False):
    """The SSIM used as a loss, the metric `StructuralSimilarityIndexMeasure` of an old torchmetrics, accumulates: with every iteration's
    call its state lists `preds` and `target` get another rendered image and ground truth, which are never reset. Cured by: a newer
    torchmetrics, whose SSIM keeps only sums as state.
    """
    opt = types.SimpleNamespace(lr=0.002, ssim_weight=0.1, n_iters=80, n_history_track=20)
    splatter = Splatter(n_gaussians=400, n_cameras=12, height=520, width=780).cuda()
    criterion = (StructuralSimilarityOfSums if fixed else StructuralSimilarityIndexMeasure)(data_range=1.0).to(splatter.device)
    trainer = Trainer(splatter, opt, criterion)
    for i_iter in range(opt.n_iters):
        mean_loss = trainer.train_step(i_iter)
    return mean_loss


# Pathology: a tissue classifier is run over the tiles of a whole-slide image.

class TileDataset(Dataset):
    def __init__(self, slide, transform):
        self.slide, self.transform = slide, transform
        self.suitable_tile_addresses = slide.suitable_tile_addresses()

    def __len__(self):
        return len(self.suitable_tile_addresses)

    def __getitem__(self, index):
        address = self.suitable_tile_addresses[index]
        return {"image": self.transform(self.slide.tile(address)), "tile_address": address}


class Slide:
    def __init__(self, columns, rows, tile_size):
        self.tile_size = tile_size
        self.tile_dictionary = {(x, y): {"x": x * tile_size, "y": y * tile_size, "foreground_level": (7 * x + 3 * y) % 100}
                                for x in range(columns) for y in range(rows)}
        self.pixels = np.random.randint(0, 255, (2 * tile_size, 2 * tile_size, 3), dtype=np.uint8)

    def suitable_tile_addresses(self, foreground_level_threshold=90):
        return [address for address, tile in self.tile_dictionary.items() if tile["foreground_level"] <= foreground_level_threshold]

    def tile(self, address):
        left, top = (13 * address[0]) % self.tile_size, (29 * address[1]) % self.tile_size
        return self.pixels[top:top + self.tile_size, left:left + self.tile_size]

    def append_tag(self, address, key, value):
        self.tile_dictionary[address][key] = value

    def infer_classifier(self, trained_model, class_names, data_transforms, batch_size=30):
        device = torch.device("cuda:0")
        trained_model.to(device)
        trained_model.eval()
        loader = DataLoader(TileDataset(self, data_transforms), batch_size=batch_size, shuffle=False)
        for inputs in loader:
            input_tile = inputs["image"].to(device)
            output = trained_model(input_tile)
            batch_prediction = output.softmax(1).detach().cpu().tolist()
            for column, row, scores in zip(*inputs["tile_address"], batch_prediction):
                self.append_tag((int(column), int(row)), "classifier_inference_prediction", dict(zip(class_names, scores)))


def to_tensor(pixels):
    image = torch.from_numpy(np.ascontiguousarray(pixels)).permute(2, 0, 1).float() / 255
    return (image - 0.5) / 0.25


@expected("evaluation_keeps_graphs", fix="no_grad", thread="markowetzlab/slidl#1", memory=1500, held_back=True)
def classify_slide(fixed=False):
    """`infer_classifier` runs the trained model over the tiles without `torch.no_grad()`, so every forward keeps the activations for a
    backward that never comes (and those of the last batch remain while the next one runs). Cured by: wrap the inference loop in
    `torch.no_grad()`.
    """
    class_names = ["artifact", "background", "tissue"]
    trained_model = torchvision.models.densenet121(weights=None, num_classes=len(class_names))
    slide = Slide(columns=8, rows=10, tile_size=128)
    with torch.set_grad_enabled(not fixed):
        slide.infer_classifier(trained_model, class_names, to_tensor, batch_size=24)
    return sum("classifier_inference_prediction" in tile for tile in slide.tile_dictionary.values())


# Class activation maps are made for the pictures of a whole data set.

class BaseWrapper:
    def __init__(self, model):
        self.device = next(model.parameters()).device
        self.model, self.handlers = model, []

    def _encode_one_hot(self, ids):
        return torch.zeros_like(self.logits).scatter_(1, ids, 1.0)

    def forward(self, image):
        self.image_shape = image.shape[2:]
        self.logits = self.model(image)
        self.probs = self.logits.softmax(1)
        return torch.sort(self.probs, 1, descending=True)

    def backward(self, ids):
        self.model.zero_grad()
        torch.autograd.backward(self.logits, self._encode_one_hot(ids), retain_graph=True)

    def remove_hook(self):
        for handle in self.handlers:
            handle.remove()


class GradCAM(BaseWrapper):
    def __init__(self, model, candidate_layers):
        super().__init__(model)
        self.fmap_pool, self.grad_pool = {}, {}

        for name in candidate_layers:
            module = model.get_submodule(name)
            self.handlers += [module.register_forward_hook(self.save_fmaps(name)), module.register_full_backward_hook(self.save_grads(name))]

    def save_fmaps(self, key):
        return lambda module, inputs, output: self.fmap_pool.__setitem__(key, output.detach())

    def save_grads(self, key):
        return lambda module, grad_in, grad_out: self.grad_pool.__setitem__(key, grad_out[0].detach())

    def generate(self, target_layer):
        fmaps, grads = self.fmap_pool[target_layer], self.grad_pool[target_layer]
        gcam = F.relu((fmaps * F.adaptive_avg_pool2d(grads, 1)).sum(dim=1, keepdim=True))
        gcam = F.interpolate(gcam, self.image_shape, mode="bilinear", align_corners=False)
        flat = gcam.flatten(1)
        flat = flat - flat.amin(1, keepdim=True)
        return (flat / flat.amax(1, keepdim=True)).view_as(gcam)


class Photos(Dataset):
    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(3, self.size, self.size), f"photo_{index:04d}"


@expected("graph_of_earlier_steps", fix=r"remove\(\)", thread="kazuto1011/grad-cam-pytorch#36", memory=620, held_back=True)
def explain_predictions_again(fixed=False):
    """For every batch a new `GradCAM` wrapper is made whose hooks stay registered on the model and thus keep the wrapper alive; it holds
    `logits` of its batch, whose graph was kept by `backward(retain_graph=True)`, so the activations of all batches pile up. Cured by:
    remove the hooks and delete the wrapper after every batch, and clear the memory.
    """
    model = torchvision.models.resnet18(weights=None, num_classes=100).cuda().eval()
    loader, topk, heatmaps = DataLoader(Photos(64, 160), batch_size=8), 2, {}
    for images, names in loader:
        gcam = GradCAM(model, candidate_layers=["layer4"])
        probs, ids = gcam.forward(images.to(gcam.device))
        for i in range(topk):
            gcam.backward(ids=ids[:, [i]])
            regions = gcam.generate(target_layer="layer4").cpu().numpy()
            for name, region in zip(names, regions):
                heatmaps[name, i] = region[0]
        if fixed:
            gcam.remove_hook()
            vars(gcam).clear()
            del gcam, probs, ids
            gc.collect()
            torch.cuda.empty_cache()
    return len(heatmaps)


# Objects are detected in the frames of a folder, one at a time.

class Conv(nn.Module):
    def __init__(self, c1, c2, k=1, s=1):
        super().__init__()
        self.conv, self.bn, self.act = nn.Conv2d(c1, c2, k, s, k // 2, bias=False), nn.BatchNorm2d(c2), nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class ELAN(nn.Module):
    def __init__(self, c1, c2):
        super().__init__()
        self.cv1, self.cv2 = Conv(c1, c2 // 2), Conv(c1, c2 // 2)
        self.m = nn.ModuleList(Conv(c2 // 2, c2 // 2, 3) for _ in range(4))
        self.cv3 = Conv(2 * c2, c2)

    def forward(self, x):
        y = [self.cv1(x), self.cv2(x)]
        for i, m in enumerate(self.m):
            out = m(y[-1] if i == 0 else out)
            if i % 2:
                y.append(out)
        return self.cv3(torch.cat(y, 1))


class IDetect(nn.Module):
    def __init__(self, nc, ch, stride):
        super().__init__()
        self.nc, self.no, self.na, self.stride = nc, nc + 5, 3, stride
        self.m = nn.ModuleList(nn.Conv2d(c, self.no * self.na, 1) for c in ch)

    def forward(self, x):
        z = []
        for features, m, stride in zip(x, self.m, self.stride):
            y = m(features).unflatten(1, (self.na, self.no)).permute(0, 1, 3, 4, 2).sigmoid()
            ny, nx = y.shape[2:4]
            grid = torch.stack(torch.meshgrid(torch.arange(ny), torch.arange(nx), indexing="ij")[::-1], -1).to(y)
            xy, wh, conf = (y[..., :2] * 2 - 0.5 + grid) * stride, (y[..., 2:4] * 2) ** 2 * 4 * stride, y[..., 4:]
            z.append(torch.cat([xy, wh, conf], -1).flatten(1, 3))
        return torch.cat(z, 1), x


class Model(nn.Module):
    def __init__(self, nc=80, width=32):
        super().__init__()
        self.stem = nn.Sequential(Conv(3, width, 3, 2), Conv(width, 2 * width, 3, 2), ELAN(2 * width, 4 * width))
        self.p3 = nn.Sequential(Conv(4 * width, 4 * width, 3, 2), ELAN(4 * width, 8 * width))
        self.p4 = nn.Sequential(Conv(8 * width, 8 * width, 3, 2), ELAN(8 * width, 8 * width))
        self.detect = IDetect(nc, (8 * width, 8 * width), (8, 16))

    def forward(self, x, augment=False):
        p3 = self.p3(self.stem(x))
        return self.detect([p3, self.p4(p3)])


class LoadImages:
    def __init__(self, count, img_size):
        self.count, self.img_size = count, img_size

    def __iter__(self):
        for number in range(self.count):
            yield f"frame_{number}.jpg", np.random.randint(0, 255, (3, self.img_size, self.img_size), dtype=np.uint8)


def top_boxes(prediction, max_det=100):
    x = prediction[0]
    scores, classes = (x[:, 5:] * x[:, 4:5]).max(1)
    order = scores.argsort(descending=True)[:max_det]
    half = x[:, 2:4] / 2
    boxes = torch.cat([x[:, :2] - half, x[:, :2] + half, scores[:, None], classes[:, None].to(x)], 1)
    return boxes.index_select(0, order)


def detect(model, dataset, opt):
    device, half, results = torch.device("cuda"), True, {}
    if half:
        model.half()
    model(torch.zeros((1, 3, opt.img_size, opt.img_size), dtype=torch.half if half else torch.float, device=device))
    for path, img in dataset:
        img = torch.from_numpy(img)[None].to(device).to(torch.half if half else torch.float) / 255
        pred, _ = model(img, opt.augment)
        det = top_boxes(pred)
        results[path] = det.detach().cpu().numpy()
    return results


@expected("evaluation_keeps_graphs", fix="no_grad", thread="WongKinYiu/yolov7#900", memory=400, held_back=True)
def detect_objects(fixed=False):
    """The inference loop of `detect` calls the model with gradients on, so that every forward keeps the activations of all layers, and
    those of the image before are still held by `pred` while the next one is computed. Cured by: run the inference under `torch.no_grad()`.
    """
    opt = types.SimpleNamespace(img_size=640, augment=False)
    model = Model().to("cuda").eval()
    dataset = LoadImages(6, opt.img_size)
    if fixed:
        with torch.no_grad():
            return len(detect(model, dataset, opt))
    return len(detect(model, dataset, opt))
