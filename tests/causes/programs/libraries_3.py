"""Programs after public threads about model libraries, their trainers, and serving."""
import copy
import functools
import gc
from collections import OrderedDict

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from expected import expected


# Fine-tuning an image generator: latents and prompt embeddings are computed once, before training.

class TextEncoder(nn.Module):
    def __init__(self, vocab_size, hidden_size, num_layers):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden_size, 8, 4 * hidden_size, batch_first=True) for _ in range(num_layers))

    def forward(self, input_ids):
        hidden_states = self.embed(input_ids)
        for layer in self.layers:
            hidden_states = layer(hidden_states)
        return hidden_states


class AutoencoderKL(nn.Module):
    def __init__(self, channels=256):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, channels, 8, 8), nn.SiLU(), nn.Conv2d(channels, channels, 3, 1, 1),
                                     nn.SiLU(), nn.Conv2d(channels, 4, 1))

    def encode(self, pixel_values):
        return self.encoder(pixel_values)


class UNet2DConditionModel(nn.Module):
    def __init__(self, width=768, depth=4):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, width, 2, 2), nn.ConvTranspose2d(width, 4, 2, 2)
        self.blocks = nn.ModuleList(
            nn.TransformerDecoderLayer(width, 12, 4 * width, dropout=0.0, batch_first=True) for _ in range(depth))

    def forward(self, sample, encoder_hidden_states):
        h = self.conv_in(sample)
        tokens = h.flatten(2).transpose(1, 2)
        for block in self.blocks:
            tokens = block(tokens, encoder_hidden_states)
        return self.conv_out(tokens.transpose(1, 2).reshape(h.shape))


class MappedDataset:
    """Applies a function to slices of the rows, as `Dataset.map(batched=True)` does."""

    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def map(self, function, batch_size=8):
        pieces = [function({k: v[i:i + batch_size] for k, v in self.columns.items()})
                  for i in range(0, len(self), batch_size)]
        new = {k: torch.cat([p[k] for p in pieces]) for k in pieces[0]}
        return MappedDataset({**self.columns, **new})


def encode_prompt(batch, text_encoders):
    with torch.no_grad():
        embeds = [encoder(batch["input_ids"].cuda()) for encoder in text_encoders]
    return {"prompt_embeds": torch.cat(embeds, dim=-1).cpu()}


def compute_vae_encodings(batch, vae):
    with torch.no_grad():
        model_input = vae.encode(batch["pixel_values"].cuda())
    return {"model_input": model_input.cpu()}


@expected("idle_model", fix=r"\bdel\b|\.cpu\(\)", thread="huggingface/diffusers#6693", memory=1100)
def train_text_to_image_sdxl(fixed=False):
    """The script deletes `text_encoders`, the two encoders and `vae` after the embeddings and latents are precomputed, but they stay on the
    GPU through training: the `functools.partial` objects `compute_embeddings_fn` and `compute_vae_encodings_fn` still hold them as bound
    arguments. Cured by: Deleting the two partials too, before training starts.
    """
    text_encoder_one = TextEncoder(16000, 256, 6).cuda().requires_grad_(False)
    text_encoder_two = TextEncoder(16000, 512, 20).cuda().requires_grad_(False)
    vae = AutoencoderKL().cuda().requires_grad_(False)
    unet = UNet2DConditionModel().cuda()
    train_dataset = MappedDataset({"pixel_values": torch.rand(16, 3, 256, 256),
                                   "input_ids": torch.randint(0, 16000, (16, 77))})

    text_encoders = [text_encoder_one, text_encoder_two]
    compute_embeddings_fn = functools.partial(encode_prompt, text_encoders=text_encoders)
    compute_vae_encodings_fn = functools.partial(compute_vae_encodings, vae=vae)
    train_dataset = train_dataset.map(compute_embeddings_fn).map(compute_vae_encodings_fn)

    del text_encoder_one, text_encoder_two, text_encoders, vae
    if fixed:
        del compute_embeddings_fn, compute_vae_encodings_fn
    gc.collect()
    torch.cuda.empty_cache()

    optimizer = torch.optim.AdamW(unet.parameters(), lr=1e-5)
    for step in range(3):
        rows = slice(4 * step, 4 * step + 4)
        latents = train_dataset.columns["model_input"][rows].cuda()
        prompt_embeds = train_dataset.columns["prompt_embeds"][rows].cuda()
        noise = torch.randn_like(latents)
        loss = F.mse_loss(unet(latents + noise, prompt_embeds), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# A causal language model with a cache of keys and values, for the programs that generate.

class CausalSelfAttention(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.num_heads = hidden_size // 64
        self.qkv_proj, self.o_proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)

    def forward(self, x, layer_idx, cache):
        b, t, _ = x.shape
        q, k, v = (p.view(b, t, self.num_heads, 64).transpose(1, 2) for p in self.qkv_proj(x).chunk(3, -1))
        if cache is not None:
            k, v = cache.update(k, v, layer_idx)
        attn_output = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        return self.o_proj(attn_output.transpose(1, 2).reshape(b, t, -1))


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.self_attn = CausalSelfAttention(hidden_size)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(),
                                 nn.Linear(4 * hidden_size, hidden_size))
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)

    def forward(self, x, layer_idx, cache=None):
        x = x + self.self_attn(self.input_layernorm(x), layer_idx, cache)
        return x + self.mlp(self.post_attention_layernorm(x))


class CausalLM(nn.Module):
    def __init__(self, vocab_size=8000, hidden_size=512, num_layers=8):
        super().__init__()
        self.hidden_size, self.num_layers = hidden_size, num_layers
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(hidden_size) for _ in range(num_layers))
        self.norm, self.lm_head = nn.LayerNorm(hidden_size), nn.Linear(hidden_size, vocab_size, bias=False)

    def model(self, input_ids, cache=None):
        x = self.embed_tokens(input_ids)
        for layer_idx, layer in enumerate(self.layers):
            x = layer(x, layer_idx, cache)
        return self.norm(x)

    def forward(self, input_ids, cache=None, num_logits_to_keep=0):
        return self.lm_head(self.model(input_ids, cache)[:, -num_logits_to_keep:])


class StaticCache:
    def __init__(self, model, max_batch_size, max_cache_len):
        shape = (max_batch_size, model.hidden_size // 64, max_cache_len, 64)
        self.key_cache = [torch.zeros(shape, device="cuda") for _ in range(model.num_layers)]
        self.value_cache = [torch.zeros(shape, device="cuda") for _ in range(model.num_layers)]
        self.max_cache_len, self.seen = max_cache_len, [0] * model.num_layers

    def reset(self):
        self.seen = [0] * len(self.seen)

    def update(self, k, v, layer_idx):
        start = self.seen[layer_idx]
        end = self.seen[layer_idx] = start + k.shape[2]
        self.key_cache[layer_idx][:, :, start:end] = k
        self.value_cache[layer_idx][:, :, start:end] = v
        return self.key_cache[layer_idx][:, :, :end], self.value_cache[layer_idx][:, :, :end]


class GenerationMixin:
    def get_static_cache(self, batch_size, max_cache_len):
        if fixed_cache_length := getattr(self, "_max_cache_len", None):
            max_cache_len = max(max_cache_len, fixed_cache_length)
        cache = getattr(self, "_cache", None)
        if cache is None or cache.max_cache_len < max_cache_len or cache.key_cache[0].shape[0] != batch_size:
            cache = StaticCache(self, batch_size, max_cache_len)
            if self.cache_on_model:
                self._cache = cache
            else:
                self._max_cache_len = max_cache_len
        else:
            cache.reset()
        return cache

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens):
        cache = self.get_static_cache(input_ids.shape[0], input_ids.shape[1] + max_new_tokens)
        next_input = input_ids
        for _ in range(max_new_tokens):
            next_input = self(next_input, cache, num_logits_to_keep=1).argmax(-1)
            input_ids = torch.cat([input_ids, next_input], dim=-1)
        return input_ids


class LlamaForCausalLM(GenerationMixin, CausalLM):
    cache_on_model = True


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="huggingface/transformers#47731", memory=1350)
def sample_then_finetune(fixed=False):
    """`generate` with a static cache stores the `StaticCache` on the model as `self._cache`, so the whole key/value cache (about 540 MB)
    remains on the GPU after generation, when the model is used for something else (here training). Cured by: The cache is no longer set as
    an attribute; only its length is remembered in `_max_cache_len`.
    """
    model = LlamaForCausalLM(num_layers=8).cuda()
    model.cache_on_model = not fixed
    prompts = torch.randint(0, 8000, (8, 2048)).cuda()
    for completion in model.generate(prompts, max_new_tokens=8).cpu():
        print(len(completion), "tokens")

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(4):
        input_ids = torch.randint(0, 8000, (4, 512)).cuda()
        logits = model(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


# Generation that weighs each of the likeliest tokens by how far its hidden state is from those before it.

class DynamicCache:
    def __init__(self, pairs=()):
        self.pairs = dict(enumerate(pairs))

    def update(self, k, v, layer_idx):
        if layer_idx in self.pairs:
            past_k, past_v = self.pairs[layer_idx]
            k, v = torch.cat([past_k, k], 2), torch.cat([past_v, v], 2)
        self.pairs[layer_idx] = k, v
        return k, v

    def batch_repeat_interleave(self, repeats):
        return DynamicCache([tuple(t.repeat_interleave(repeats, dim=0) for t in self.pairs[i]) for i in self.pairs])

    def batch_select_indices(self, indices):
        return DynamicCache([tuple(t[indices] for t in self.pairs[i]) for i in self.pairs])


def ranking(context_hidden, next_hidden, next_top_k_probs, alpha):
    norm_context = context_hidden / context_hidden.norm(dim=-1, keepdim=True)
    norm_next = next_hidden / next_hidden.norm(dim=-1, keepdim=True)
    degeneration_penalty = (norm_next @ norm_context.transpose(-1, -2)).max(-1).values
    return ((1 - alpha) * next_top_k_probs - alpha * degeneration_penalty).argmax(-1)


@torch.no_grad()
def contrastive_search(model, input_ids, top_k, penalty_alpha, max_new_tokens, low_memory=False):
    past_key_values = DynamicCache()
    last_hidden_states = model.model(input_ids, past_key_values)
    logits = model.lm_head(last_hidden_states[:, -1])
    for _ in range(max_new_tokens):
        top_k_probs, top_k_ids = logits.softmax(-1).topk(top_k)
        if low_memory:
            all_hidden = []
            for i in range(top_k):
                candidate = DynamicCache([past_key_values.pairs[n] for n in past_key_values.pairs])
                all_hidden.append(model.model(top_k_ids[:, i:i + 1], candidate))
                del candidate
            next_hidden = torch.stack(all_hidden, dim=1)[:, :, 0]
        else:
            candidates = past_key_values.batch_repeat_interleave(top_k)
            next_hidden = model.model(top_k_ids.view(-1, 1), candidates).view(len(input_ids), top_k, -1)
        selected_idx = ranking(last_hidden_states, next_hidden, top_k_probs, penalty_alpha)
        next_tokens = top_k_ids.gather(1, selected_idx[:, None])
        if low_memory:
            model.model(next_tokens, past_key_values)
        else:
            rows = torch.arange(len(input_ids), device="cuda") * top_k + selected_idx
            past_key_values = candidates.batch_select_indices(rows)
            del candidates
        chosen = next_hidden.gather(1, selected_idx[:, None, None].expand(-1, 1, next_hidden.shape[-1]))
        last_hidden_states = torch.cat([last_hidden_states, chosen], dim=1)
        logits = model.lm_head(chosen[:, 0])
        input_ids = torch.cat([input_ids, next_tokens], dim=-1)
    return input_ids


@expected("repeated_copies", fix="part|expand|after|later", thread="huggingface/transformers#24120", memory=800)
def write_story(fixed=False):
    """`contrastive_search` runs the `top_k` candidate tokens in parallel, for which the long prompt's `past_key_values` are copied `top_k`
    times (`batch_repeat_interleave`). Cured by: `low_memory=True`: the candidates' hidden states are computed one after another, with the
    one shared cache.
    """
    model = CausalLM().cuda().eval()
    prompt = torch.randint(0, 8000, (1, 2000)).cuda()
    story = contrastive_search(model, prompt, top_k=8, penalty_alpha=0.6, max_new_tokens=12, low_memory=fixed)
    return story.cpu()


# A mixture of experts, whose routing is kept balanced by an auxiliary loss.

class SparseMoeBlock(nn.Module):
    def __init__(self, hidden_size, num_experts, top_k, intermediate=32):
        super().__init__()
        self.num_experts, self.top_k = num_experts, top_k
        self.gate = nn.Linear(hidden_size, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, hidden_size, intermediate) * 0.02)
        self.down = nn.Parameter(torch.randn(num_experts, intermediate, hidden_size) * 0.02)
        self.norm = nn.LayerNorm(hidden_size)

    def forward(self, hidden_states):
        x = self.norm(hidden_states)
        router_logits = self.gate(x)
        routing_weights, selected_experts = router_logits.softmax(-1).topk(self.top_k, dim=-1)
        order = selected_experts.flatten().argsort()
        dispatched = x[order // self.top_k].view(self.num_experts, -1, x.shape[-1])
        expert_out = F.silu(dispatched @ self.up) @ self.down
        weighted = expert_out.flatten(0, 1) * routing_weights.flatten()[order, None]
        return hidden_states.index_add(0, order // self.top_k, weighted), router_logits


def load_balancing_loss_func(gate_logits, num_experts, top_k, per_layer=False):
    if per_layer:
        return sum(load_balancing_loss_func((g,), num_experts, top_k) for g in gate_logits) / len(gate_logits)
    concatenated_gate_logits = torch.cat(gate_logits, dim=0)
    routing_weights = concatenated_gate_logits.softmax(-1)
    _, selected_experts = torch.topk(routing_weights, top_k, dim=-1)
    expert_mask = F.one_hot(selected_experts, num_experts)
    tokens_per_expert = torch.mean(expert_mask.float(), dim=0)
    router_prob_per_expert = torch.mean(routing_weights, dim=0)
    return torch.sum(tokens_per_expert * router_prob_per_expert[None]) * num_experts


class MoeForCausalLM(nn.Module):
    def __init__(self, vocab_size=2000, hidden_size=64, num_layers=24, num_experts=128, top_k=8, per_layer=False):
        super().__init__()
        self.num_experts, self.top_k, self.per_layer = num_experts, top_k, per_layer
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(SparseMoeBlock(hidden_size, num_experts, top_k) for _ in range(num_layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids, labels, output_router_logits=True):
        hidden_states, all_router_logits = self.embed_tokens(input_ids), ()
        for layer in self.layers:
            hidden_states, router_logits = checkpoint(layer, hidden_states, use_reentrant=False)
            all_router_logits += (router_logits,)
        loss = F.cross_entropy(self.lm_head(hidden_states), labels)
        if output_router_logits:
            loss = loss + 0.001 * load_balancing_loss_func(all_router_logits, self.num_experts, self.top_k,
                                                           self.per_layer)
        return loss


@expected("one_hot", fix="indices|gather|layer", thread="huggingface/transformers#48131", memory=1000)
def finetune_moe(fixed=False):
    """`load_balancing_loss_func` concatenates the gate logits of all layers and then makes `one_hot` over the concatenation, an int64
    tensor of [layers x tokens, top_k, num_experts] (about 770 MiB), and its float copy: temporaries far bigger than the model. Cured by:
    The balancing loss is computed per layer.
    """
    model = MoeForCausalLM(per_layer=fixed).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        input_ids = torch.randint(0, 2000, (4097,)).cuda()
        loss = model(input_ids[:-1], input_ids[1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Adding a trained adapter to a model that's already on the GPU.

class LoraLinear(nn.Module):
    def __init__(self, base_layer, r):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, r, bias=False, device="meta", dtype=base_layer.weight.dtype)
        self.lora_B = nn.Linear(r, base_layer.out_features, bias=False, device="meta", dtype=base_layer.weight.dtype)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def caching_allocator_warmup(model, expected_keys, device):
    parameters = dict(model.named_parameters())
    byte_count = sum(parameters[key].numel() * parameters[key].element_size() for key in expected_keys)
    _ = torch.empty(byte_count // 2, dtype=torch.float16, device=device, requires_grad=False)


def load_pretrained_weights(model, state_dict, expected_keys, device):
    caching_allocator_warmup(model, expected_keys, device)
    missing = [key for key in expected_keys if key not in state_dict]
    for key, tensor in state_dict.items():
        module_name, _, name = key.rpartition(".")
        setattr(model.get_submodule(module_name), name, nn.Parameter(tensor.to(device), requires_grad=False))
    return missing


class Gemma(nn.Module):
    def __init__(self, hidden_size=1024, num_layers=30):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleDict({
            "up_proj": nn.Linear(hidden_size, 4 * hidden_size, bias=False),
            "down_proj": nn.Linear(4 * hidden_size, hidden_size, bias=False)}) for _ in range(num_layers))

    def forward(self, x):
        for layer in self.layers:
            x = x + layer["down_proj"](F.gelu(layer["up_proj"](x)))
        return x

    def load_adapter(self, adapter_state_dict, r, only_adapter_keys):
        for layer in self.layers:
            for name in ("up_proj", "down_proj"):
                layer[name] = LoraLinear(layer[name], r)
        expected_keys = [name for name, _ in self.named_parameters()]
        if only_adapter_keys:
            expected_keys = [key for key in expected_keys if ".lora_" in key]
        missing = load_pretrained_weights(self, adapter_state_dict, expected_keys, "cuda")
        return [key for key in missing if ".lora_" in key]


@expected("large_result", fix="parts|smaller|fewer", thread="huggingface/transformers#46145", memory=800)
def serve_with_adapter(fixed=False):
    """`load_adapter` passes every named parameter of the model, the base model's included, as `expected_keys`, so
    `caching_allocator_warmup` tries to allocate one tensor the size of the whole base model, which is already on the GPU, though only a few
    MB of adapter weights are loaded. Cured by: `expected_keys` is filtered to the adapter's keys, so the warm-up is sized from the adapter
    only.
    """
    model = Gemma().half().cuda().requires_grad_(False)
    adapter = {}
    for n in range(30):
        for name, (fan_in, fan_out) in {"up_proj": (1024, 4096), "down_proj": (4096, 1024)}.items():
            adapter[f"layers.{n}.{name}.lora_A.weight"] = torch.randn(16, fan_in).half()
            adapter[f"layers.{n}.{name}.lora_B.weight"] = torch.zeros(fan_out, 16).half()
    missing = model.load_adapter(adapter, r=16, only_adapter_keys=fixed)
    assert not missing
    with torch.no_grad():
        for _ in range(4):
            model(torch.randn(512, 1024).half().cuda())


# Detection on a folder of pictures, whose paths are passed as a list.

class LoadPilAndNumpy:
    def __init__(self, im0):
        self.im0 = im0
        self.bs = len(im0)
        self.count = 0

    def __iter__(self):
        self.count = 0
        return self

    def __next__(self):
        if self.count == 1:
            raise StopIteration
        self.count += 1
        return self.im0


class LoadImages:
    def __init__(self, files, batch):
        self.files, self.bs = files, batch

    def __iter__(self):
        for i in range(0, len(self.files), self.bs):
            yield [imread(f) for f in self.files[i:i + self.bs]]


def imread(path, size=416):
    return np.zeros((size, size, 3), dtype=np.uint8)


def load_inference_source(source, batch, lazy_paths):
    if isinstance(source, (list, tuple)):
        if lazy_paths and all(isinstance(s, str) for s in source):
            return LoadImages(source, batch)
        return LoadPilAndNumpy([imread(s) if isinstance(s, str) else s for s in source])
    return LoadImages([source], batch)


class YOLO:
    def __init__(self, lazy_paths):
        widths = [3, 16, 32, 64, 128]
        layers = [m for a, b in zip(widths, widths[1:])
                  for m in (nn.Conv2d(a, b, 3, 2, 1), nn.BatchNorm2d(b), nn.SiLU())]
        self.model = nn.Sequential(*layers, nn.Conv2d(128, 84, 1)).cuda().eval()
        self.lazy_paths = lazy_paths

    def preprocess(self, im):
        im = np.stack(im)[..., ::-1].transpose(0, 3, 1, 2)
        return torch.from_numpy(np.ascontiguousarray(im)).cuda().float() / 255

    @torch.inference_mode()
    def predict(self, source, batch=1):
        results = []
        for im0s in load_inference_source(source, batch, self.lazy_paths):
            preds = self.model(self.preprocess(im0s))
            results.extend(p[:, ::4, ::4].cpu() for p in preds)
        return results


@expected("data_on_gpu", fix="part|DataLoader|on the host", thread="ultralytics/ultralytics#24866", memory=800)
def detect_in_folder(fixed=False):
    """A list of paths given to `predict` is turned into images at once and goes to `LoadPilAndNumpy`, whose `bs = len(im0)`: the entire
    list of 200 images is one giant batch, and `batch=1` is ignored. Cured by: Lists of paths go to the loader that respects `batch`, so
    images are processed one at a time.
    """
    model = YOLO(lazy_paths=fixed)
    images = [f"frames/{n:05d}.jpg" for n in range(200)]
    results = model.predict(source=images, batch=1)
    return len(results)


# A multimodal server: the vision tower's output for a picture is kept for the next turn of its conversation.

class MultimodalCache:
    def __init__(self, max_size, copy_slices):
        self.max_size, self.current_size, self.copy_slices = max_size, 0, copy_slices
        self.mm_cache = OrderedDict()

    def get(self, mm_hash):
        if mm_hash not in self.mm_cache:
            return None
        self.mm_cache.move_to_end(mm_hash)
        return self.mm_cache[mm_hash]

    def set(self, mm_hash, embedding):
        data_size = embedding.numel() * embedding.element_size()
        while self.current_size + data_size > self.max_size:
            if not self.mm_cache:
                return False
            _, old = self.mm_cache.popitem(last=False)
            self.current_size -= old.numel() * old.element_size()
        if self.copy_slices and embedding.untyped_storage().nbytes() > data_size:
            embedding = embedding.clone()
        self.mm_cache[mm_hash] = embedding
        self.current_size += data_size
        return True


class VisionTower(nn.Module):
    def __init__(self, hidden_size=1024):
        super().__init__()
        self.patch_embed = nn.Linear(588, hidden_size)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(hidden_size), nn.Linear(hidden_size, hidden_size))
                                    for _ in range(4))

    def forward(self, patches):
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = x + block(x)
        return x


class MultimodalServer:
    def __init__(self, copy_slices):
        self.visual = VisionTower().cuda().eval()
        self.embedding_cache = MultimodalCache(64 << 20, copy_slices)

    @torch.no_grad()
    def embed(self, items):
        missing = [(h, n) for h, n in items if self.embedding_cache.get(h) is None]
        if missing:
            lengths = [n for _, n in missing]
            embeddings = self.visual(torch.randn(sum(lengths), 588).cuda())
            for (h, _), embedding in zip(missing, torch.split(embeddings, lengths)):
                self.embedding_cache.set(h, embedding)
        return [self.embedding_cache.get(h) for h, _ in items]


@expected("small_view", fix=r"\.clone\(\)", thread="sgl-project/sglang#39120", memory=700)
def serve_chats(fixed=False):
    """The embedding cache stores `torch.split` views of the vision tower's batch output: one small cached thumbnail keeps the whole batch's
    storage alive, while `current_size` counts only the slice's bytes, so the cache holds much more than its `max_size`. Cured by: `set`
    clones an admitted tensor whose storage is bigger than its payload.
    """
    server = MultimodalServer(copy_slices=fixed)
    open_chats = []
    for request in range(48):
        thumbnail = (f"thumbnail-{request}", 64)
        pages = [(f"page-{request}-{n}", 1024) for n in range(4)]
        server.embed([thumbnail] + pages)
        open_chats.append(thumbnail)
        server.embed(open_chats)


# Speech recognition: the beam searches of several utterances advance together.

class Hypothesis:
    def __init__(self, yseq, score, states):
        self.yseq, self.score, self.states = yseq, score, states


class CachedDecoder(nn.Module):
    def __init__(self, odim=500, attention_dim=256, num_blocks=6):
        super().__init__()
        self.embed = nn.Embedding(odim, attention_dim)
        self.decoders = nn.ModuleList(nn.TransformerEncoderLayer(attention_dim, 4, 512, batch_first=True)
                                      for _ in range(num_blocks))
        self.output_layer = nn.Linear(attention_dim, odim)

    def batch_score(self, ys, states):
        x, new_states = self.embed(ys), []
        for n, decoder in enumerate(self.decoders):
            y = decoder(x)[:, -1:]
            if states[0] is not None:
                y = torch.cat([torch.stack([s[n] for s in states]), y], dim=1)
            x = y
            new_states.append(y)
        logp = self.output_layer(x[:, -1]).log_softmax(-1)
        return logp, [[layer[b] for layer in new_states] for b in range(len(ys))]


class UttBatchBeamSearch:
    def __init__(self, decoder, beam_size, eos, own_ended_states):
        self.decoder, self.beam_size, self.eos = decoder, beam_size, eos
        self.own_ended_states = own_ended_states

    def search(self, running):
        ys = torch.tensor([h.yseq for h in running]).cuda()
        logp, states = self.decoder.batch_score(ys, [h.states for h in running])
        scores, tokens = logp.max(-1)
        scores, tokens = scores.tolist(), (tokens % 499).tolist()
        return [Hypothesis(h.yseq + [t], h.score + s, st) for h, s, t, st in zip(running, scores, tokens, states)]

    def post_process(self, i, maxlen, running, ended):
        for n, hyp in enumerate(running):
            if (i + n) % 16 == 0 or i == maxlen - 1:
                states = [s.clone() for s in hyp.states] if self.own_ended_states else hyp.states
                ended.append(Hypothesis(hyp.yseq + [self.eos], hyp.score, states))

    @torch.no_grad()
    def forward(self, n_utt, maxlen):
        running = [Hypothesis([self.eos], 0.0, None) for _ in range(n_utt * self.beam_size)]
        ended = []
        for i in range(maxlen):
            running = self.search(running)
            self.post_process(i, maxlen, running, ended)
        return sorted(ended, key=lambda h: h.score, reverse=True)[:n_utt]


@expected("small_view", fix=r"\.clone\(\)", thread="espnet/espnet#6599", memory=800)
def decode_utterances(fixed=False):
    """The states of a hypothesis are views into the tensors of the whole running batch (n_utt x beam). A hypothesis that has ended is held
    in `ended` until the whole batch is finished, and pins that step's full batch storage. Cured by: The states of ended hypotheses are
    cloned, so that they own their memory.
    """
    decoder = CachedDecoder().cuda().eval()
    beam_search = UttBatchBeamSearch(decoder, beam_size=10, eos=499, own_ended_states=fixed)
    for _ in range(2):
        nbest = beam_search.forward(n_utt=8, maxlen=50)
    return [h.yseq for h in nbest]


# Embedding a corpus of passages of very different lengths.

class SortedSeqLoader:
    def __init__(self, lengths, batch_size, longest_first):
        self.lengths, self.batch_size = np.sort(lengths), batch_size
        if longest_first:
            self.lengths = self.lengths[::-1]

    def __iter__(self):
        for i in range(0, len(self.lengths), self.batch_size):
            batch = self.lengths[i:i + self.batch_size]
            yield torch.zeros(len(batch), int(batch.max()), dtype=torch.long).cuda()


class MiniLM(nn.Module):
    def __init__(self, hidden_size=384, num_layers=2):
        super().__init__()
        self.embeddings = nn.Embedding(4000, hidden_size)
        self.query = nn.ModuleList(nn.Linear(hidden_size, hidden_size) for _ in range(num_layers))
        self.intermediate = nn.ModuleList(nn.Linear(hidden_size, 2 * hidden_size) for _ in range(num_layers))
        self.output = nn.ModuleList(nn.Linear(2 * hidden_size, hidden_size) for _ in range(num_layers))

    def forward(self, input_ids):
        x = self.embeddings(input_ids)
        for query, intermediate, output in zip(self.query, self.intermediate, self.output):
            q = query(x)
            x = x + (q @ q.transpose(1, 2)).softmax(-1) @ x
            x = x + output(F.gelu(intermediate(x)))
        return x[:, 0] * 1.0


# Its writer expected fragmentation, which steps that need more and more lead to: the screen says "why" and "because".
@expected("growing_steps", fix="longest first", thread="rapidsai/crossfit#18", memory=1200)
@torch.no_grad()
def embed_corpus(fixed=False):
    """`SortedSeqLoader` yields short sequences first: each batch is larger than the ones before, so it can't use the blocks allocated for
    them; memory reserved but unallocated piles up (fragmentation; the small embeddings that are kept lie in the old segments) until a
    bigger batch fails. Cured by: Batches with the longest sequences come first, and the later ones reuse their memory.
    """
    model = MiniLM().cuda().eval()
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(3.0, 0.6, 65536).astype(int), 4, 64)
    embeddings = [model(input_ids) for input_ids in SortedSeqLoader(lengths, 1024, longest_first=fixed)]
    return torch.cat(embeddings).cpu()


# A server records a graph of the decoding step for each batch size that it will meet.

class DecodeModel(nn.Module):
    def __init__(self, hidden_size=1024, num_layers=4, vocab_size=32000):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.SiLU(),
                                                  nn.Linear(4 * hidden_size, hidden_size)) for _ in range(num_layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.lm_head(x).float().softmax(-1).argmax(-1)


class CudaGraphRunner:
    def __init__(self, model, capture_bs):
        self.model, self.capture_bs = model, capture_bs
        self.graphs, self.output_buffers = {}, {}
        self.input_ids = torch.zeros(max(capture_bs), dtype=torch.long, device="cuda")
        self.graph_memory_pool = None

    @torch.no_grad()
    def capture(self):
        for bs in self.capture_bs:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self.graph_memory_pool):
                out = self.model(self.input_ids[:bs])
            self.graph_memory_pool = graph.pool()
            self.graphs[bs], self.output_buffers[bs] = graph, out

    def replay(self, input_ids):
        bs = min(b for b in self.capture_bs if b >= len(input_ids))
        self.input_ids[:len(input_ids)].copy_(input_ids)
        self.graphs[bs].replay()
        return self.output_buffers[bs][:len(input_ids)]


@expected("private_pools", fix="largest first", thread="lightseekorg/tokenspeed#1065", memory=700)
def start_decode_server(fixed=False):
    """CUDA graphs are captured for batch sizes in ascending order (`capture_bs`): a block in the graph memory pool can be reused only if a
    later capture fits in it, and every capture is larger than the one before, so the pool holds the sum of all buckets. Cured by: Capturing
    the largest batch size first; the smaller ones reuse its memory.
    """
    model = DecodeModel().half().cuda().eval()
    capture_bs = [1, 2, 4] + list(range(8, 513, 24))
    if fixed:
        capture_bs = list(reversed(capture_bs))
    runner = CudaGraphRunner(model, capture_bs)
    runner.capture()
    for n in (3, 40, 500):
        runner.replay(torch.zeros(n, dtype=torch.long, device="cuda"))


# Training the same network in several rounds, each with a fresh optimizer.

class Engine:
    def __init__(self):
        self.event_handlers = []

    def add_event_handler(self, handler):
        self.event_handlers.append((handler, self))

    def fire(self):
        for handler, engine in self.event_handlers:
            handler(engine)


class SupervisedTrainer(Engine):
    def __init__(self, device, max_epochs, train_data_loader, network, optimizer, loss_function):
        super().__init__()
        self.device, self.max_epochs, self.data_loader = device, max_epochs, train_data_loader
        self.network, self.optimizer, self.loss_function = network, optimizer, loss_function
        self.add_event_handler(self.log_iteration)

    def log_iteration(self, engine):
        self.iteration = getattr(engine, "iteration", 0) + 1

    def run(self):
        self.network.train()
        for _ in range(self.max_epochs):
            for x, y in self.data_loader:
                x, y = x.to(self.device), y.to(self.device)
                self.optimizer.zero_grad()
                loss = self.loss_function(self.network(x), y)
                loss.backward()
                self.optimizer.step()
                self.fire()


@expected("reference_cycle", fix=r"gc\.collect", thread="Project-MONAI/MONAI#3423", memory=800)
def train_rounds(fixed=False):
    """A new `SupervisedTrainer` and Adam are made in every loop iteration; the old trainer isn't freed when the variable is overwritten,
    because trainer and its event handlers refer to each other (a reference cycle, left for the garbage collector), and it keeps the old
    `optimizer` with its states on the GPU. Cured by: `gc.collect()` after each round (with the trainer and optimizer dropped).
    """
    network = nn.Sequential(nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(),
                            nn.Flatten(), nn.Linear(128 * 8 * 8, 1024), nn.ReLU(), nn.Linear(1024, 1024)).cuda()
    x, y = torch.rand(16, 1, 32, 32), torch.rand(16, 1024)
    train_loader = list(zip(x.split(8), y.split(8)))
    for i in range(20):
        optimizer = torch.optim.Adam(network.parameters())
        trainer = SupervisedTrainer("cuda", 1, train_loader, network, optimizer, nn.MSELoss())
        trainer.run()
        if fixed:
            del trainer, optimizer
            gc.collect()


# Reinforcement learning from several sampled answers to each prompt.

class GRPOTrainer:
    def __init__(self, model, prompt_length, num_logits_only_for_completion):
        self.model, self.prompt_length = model, prompt_length
        self.keep_completion = num_logits_only_for_completion
        self.ref_model = copy.deepcopy(model).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)

    def get_per_token_logps(self, model, input_ids, num_logits_to_keep):
        if self.keep_completion:
            logits = model(input_ids, num_logits_to_keep=num_logits_to_keep + 1)
            input_ids = input_ids[:, -num_logits_to_keep:]
        else:
            logits = model(input_ids)
            input_ids = input_ids[:, 1:]
        logits = logits[:, :-1]
        per_token_logps = []
        for logits_row, input_ids_row in zip(logits, input_ids):
            log_probs = logits_row.log_softmax(dim=-1)
            per_token_logps.append(torch.gather(log_probs, 1, input_ids_row.unsqueeze(1)).squeeze(1))
        return torch.stack(per_token_logps)[:, -num_logits_to_keep:]

    def compute_loss(self, prompt_completion_ids, advantages):
        completion_length = prompt_completion_ids.shape[1] - self.prompt_length
        per_token_logps = self.get_per_token_logps(self.model, prompt_completion_ids, completion_length)
        with torch.no_grad():
            ref_per_token_logps = self.get_per_token_logps(self.ref_model, prompt_completion_ids, completion_length)
        diff = ref_per_token_logps - per_token_logps
        per_token_kl = diff.exp() - diff - 1
        per_token_loss = -((per_token_logps - per_token_logps.detach()).exp() * advantages[:, None])
        return (per_token_loss + 0.04 * per_token_kl).mean()

    def train(self, steps, num_generations):
        for _ in range(steps):
            prompt = torch.randint(0, 32000, (1, self.prompt_length)).expand(num_generations, -1)
            completions = torch.randint(0, 32000, (num_generations, 48))
            ids = torch.cat([prompt, completions], dim=1).cuda()
            loss = self.compute_loss(ids, torch.randn(num_generations).cuda())
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()


@expected("logits", fix="chunk|split|part", thread="huggingface/trl#2683", memory=1500)
def train_grpo(fixed=False):
    """`get_per_token_logps` computes logits (and log-softmax) over the vocabulary for prompt and completion, 448 tokens x 32000 for each of
    8 generations, though only the 48 completion tokens' log-probabilities are used. Cured by: `num_logits_to_keep`: the logits of the
    prompt aren't computed.
    """
    model = CausalLM(vocab_size=32000, hidden_size=256, num_layers=4).cuda()
    GRPOTrainer(model, prompt_length=400, num_logits_only_for_completion=fixed).train(3, num_generations=8)
