"""Programs after public threads about language models, text and diffusion, in which people ran out of GPU memory and said in the end
why.
"""
import gc
import io
import types

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from expected import expected
from programs.root_causes import no_grad_if


# A language model is validated, and its perplexity is kept by a metric.

class WordLM(nn.Module):
    def __init__(self, vocab_size, emb_dim, hidden_dim):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, emb_dim)
        self.fc_in = nn.Linear(emb_dim, hidden_dim)
        self.decoder = nn.Linear(hidden_dim, vocab_size)

    def forward(self, tokens):
        return self.decoder(torch.tanh(self.fc_in(self.embedding(tokens)).cumsum(1)))


class Perplexity:
    def __init__(self, ignore_index, patched):
        self.ignore_index, self.patched = ignore_index, patched
        self.total_log_probs = torch.zeros(1).cuda()
        self.count = torch.zeros(1).cuda()

    def update(self, preds, target):
        preds = preds.reshape(-1, preds.shape[-1])
        target = target.reshape(-1)
        probs = F.softmax(preds, dim=1)
        mask = target.ne(self.ignore_index)
        target = target.masked_fill(~mask, 0)
        if self.patched:
            probs = probs[torch.arange(target.numel(), device=target.device), target]
        else:
            probs = probs[:, target].diagonal()
        self.total_log_probs -= (probs.log() * mask).sum()
        self.count += mask.sum()

    def compute(self):
        return torch.exp(self.total_log_probs / self.count)


@expected("indexed_pairs", fix="arange", thread="Lightning-AI/torchmetrics#2337", memory=1000, held_back=True)
@torch.no_grad()
def validate_perplexity(fixed=False):
    """In `Perplexity.update`, `probs[:, target]` looks up every target for every position and so builds a matrix of tokens x tokens (16384
    x 16384), of which only the diagonal is used. Cured by: Indexing one probability per row: `probs[arange(n), target]`.
    """
    model = WordLM(2000, 128, 256).cuda().eval()
    metric = Perplexity(ignore_index=-100, patched=fixed)
    val_batches = torch.randint(0, 2000, (6, 32, 513))
    for batch in val_batches:
        batch = batch.cuda()
        logits = model(batch[:, :-1])
        metric.update(logits, batch[:, 1:])
    return metric.compute().item()


# A diffusion transformer is trained; the prompts for the images that are drawn on the way are encoded once at the start.

class T5Block(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.qkv, self.o = nn.Linear(d_model, 3 * d_model, False), nn.Linear(d_model, d_model, False)
        self.wi, self.wo = nn.Linear(d_model, d_ff, False), nn.Linear(d_ff, d_model, False)

    def forward(self, hidden_states):
        q, k, v = self.qkv(hidden_states).chunk(3, -1)
        hidden_states = hidden_states + self.o(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        return hidden_states + self.wo(torch.relu(self.wi(hidden_states)))


class T5EncoderModel(nn.Module):
    def __init__(self, d_model=1024, d_ff=4096, num_layers=9):
        super().__init__()
        self.shared = nn.Embedding(8000, d_model)
        self.block = nn.ModuleList(T5Block(d_model, d_ff) for _ in range(num_layers))

    def forward(self, input_ids):
        hidden_states = self.shared(input_ids)
        for block in self.block:
            hidden_states = block(hidden_states)
        return (hidden_states,)


class PixArtBlock(nn.Module):
    def __init__(self, hidden_size, caption_channels):
        super().__init__()
        self.cross_kv = nn.Linear(caption_channels, 2 * hidden_size)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size))

    def forward(self, x, y):
        k, v = self.cross_kv(y).chunk(2, -1)
        x = x + torch.softmax(x @ k.transpose(1, 2), -1) @ v
        return x + self.mlp(x)


class PixArt(nn.Module):
    def __init__(self, hidden_size=512, depth=8, caption_channels=1024):
        super().__init__()
        self.x_embedder = nn.Linear(16, hidden_size)
        self.blocks = nn.ModuleList(PixArtBlock(hidden_size, caption_channels) for _ in range(depth))
        self.final_layer = nn.Linear(hidden_size, 16)

    def forward(self, x, y):
        x = self.x_embedder(x)
        for block in self.blocks:
            x = block(x, y)
        return self.final_layer(x)


def flush():
    gc.collect()
    torch.cuda.empty_cache()


@expected("deleted_model", fix=r"detach|\bdel\b", thread="PixArt-alpha/PixArt-sigma#102", memory=1000, held_back=True)
def train_pixart(fixed=False):
    """After the validation prompts were encoded, `caption_emb` and `null_token_emb` still live in the training function; they were computed
    with gradients on, so their graph keeps the whole text encoder (and its activations) on the GPU although `del text_encoder` and
    `flush()` were called. Cured by: `del` of the tokens and embeddings once they are saved.
    """
    validation_prompts = torch.randint(0, 8000, (3, 120))
    text_encoder = T5EncoderModel().cuda()
    for prompt in validation_prompts:
        txt_tokens = prompt[None].cuda()
        caption_emb = text_encoder(txt_tokens)[0]
        torch.save({"caption_embeds": caption_emb}, io.BytesIO())
        if fixed:
            del txt_tokens, caption_emb
    null_tokens = torch.zeros(1, 120, dtype=torch.long).cuda()
    null_token_emb = text_encoder(null_tokens)[0]
    torch.save({"uncond_prompt_embeds": null_token_emb}, io.BytesIO())
    if fixed:
        del null_tokens, null_token_emb
    del text_encoder
    flush()

    model = PixArt().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 2e-5)
    for _ in range(4):
        z = torch.randn(2, 512, 16).cuda()
        y = torch.randn(2, 120, 1024).cuda()
        noise = torch.randn_like(z)
        loss = F.mse_loss(model(z + noise, y), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# A server with a draft model: the hidden states of the large model are handed to it for its next proposal.

class TargetModel(nn.Module):
    def __init__(self, vocab_size, hidden_size):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.mlp = nn.Linear(hidden_size, hidden_size)
        self.lm_head = nn.Linear(hidden_size, vocab_size)

    def forward(self, input_ids):
        hidden_states = torch.relu(self.mlp(self.embed_tokens(input_ids)))
        return self.lm_head(hidden_states).argmax(-1), hidden_states


class HiddenStates:
    def __init__(self, hidden_states, seq_ids):
        self.hidden_states, self.seq_ids = hidden_states, list(seq_ids)

    def update(self, hidden_states, seq_ids):
        self.seq_ids.extend(seq_ids)
        self.hidden_states = torch.cat([self.hidden_states, hidden_states])

    def prune(self, seq_ids):
        latest = {seq_id: row for row, seq_id in enumerate(self.seq_ids)}
        if self.seq_ids != list(seq_ids):
            self.hidden_states = self.hidden_states[[latest[seq_id] for seq_id in seq_ids]]
            self.seq_ids = list(seq_ids)


class SpecDecodeWorker:
    def __init__(self, scorer, proposer, disable_by_batch_size, patched):
        self.scorer, self.proposer = scorer, proposer
        self.disable_by_batch_size, self.patched = disable_by_batch_size, patched
        self.previous_hidden_states = None

    def _run_no_spec(self, seq_ids, input_ids):
        sampled, hidden_states = self.scorer(input_ids)
        if self.previous_hidden_states is None:
            self.previous_hidden_states = HiddenStates(hidden_states, seq_ids)
        else:
            self.previous_hidden_states.update(hidden_states, seq_ids)
            if self.patched:
                self.previous_hidden_states.prune(seq_ids)
        return sampled

    def _run_speculative_decoding_step(self, seq_ids, input_ids):
        self.previous_hidden_states.prune(seq_ids)
        proposal = self.proposer(self.previous_hidden_states.hidden_states).argmax(-1)
        sampled, hidden_states = self.scorer(proposal)
        self.previous_hidden_states = HiddenStates(hidden_states, seq_ids)
        return sampled

    @torch.inference_mode()
    def execute_model(self, seq_ids, input_ids):
        no_spec = self.previous_hidden_states is None or len(seq_ids) >= self.disable_by_batch_size
        if no_spec:
            return self._run_no_spec(seq_ids, input_ids)
        return self._run_speculative_decoding_step(seq_ids, input_ids)


@expected("growing_buffer", fix=r"limit|\.cpu\(\)", thread="vllm-project/vllm#15506", memory=1000, held_back=True)
def serve_speculative(fixed=False):
    """When speculation is switched off by batch size, `_run_no_spec` appends the hidden states of every step to `previous_hidden_states`
    and never drops those of earlier steps and finished sequences; only the speculative path prunes. Cured by:
    `previous_hidden_states.prune(...)` after the update in `_run_no_spec`.
    """
    scorer, proposer = TargetModel(2000, 3072).cuda(), nn.Linear(3072, 2000).cuda()
    worker = SpecDecodeWorker(scorer, proposer, disable_by_batch_size=32, patched=fixed)
    finished = 0
    for request in range(12):
        seq_ids = [f"{request}-{i}" for i in range(1024)]
        tokens = torch.randint(0, 2000, (1024,)).cuda()
        for _ in range(8):
            tokens = worker.execute_model(seq_ids, tokens)
        finished += len(tokens.cpu())
    return finished


# Fine-tuning a large language model with recomputed activations.

class LlamaDecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.gradient_checkpointing = False
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden_size, hidden_size, False) for _ in range(4))
        self.gate_proj, self.up_proj = nn.Linear(hidden_size, 3 * hidden_size, False), nn.Linear(hidden_size, 3 * hidden_size, False)
        self.down_proj = nn.Linear(3 * hidden_size, hidden_size, False)
        self.input_layernorm, self.post_attention_layernorm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)

    def forward(self, hidden_states, attention_mask):
        b, s, d = hidden_states.shape
        residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        query, key, value = (proj(hidden_states).view(b, s, self.num_heads, -1).transpose(1, 2)
                             for proj in (self.q_proj, self.k_proj, self.v_proj))
        attn_weights = query @ key.transpose(2, 3) / (d // self.num_heads) ** 0.5 + attention_mask
        attn_output = torch.softmax(attn_weights, -1) @ value
        hidden_states = residual + self.o_proj(attn_output.transpose(1, 2).reshape(b, s, d))
        residual, hidden_states = hidden_states, self.post_attention_layernorm(hidden_states)
        return residual + self.down_proj(F.silu(self.gate_proj(hidden_states)) * self.up_proj(hidden_states))


class LlamaModel(nn.Module):
    def __init__(self, vocab_size=4000, hidden_size=384, num_layers=12, num_heads=6):
        super().__init__()
        self.gradient_checkpointing = False
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(LlamaDecoderLayer(hidden_size, num_heads) for _ in range(num_layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, False)

    def set_gradient_checkpointing(self, module_class, value=True):
        for module in self.modules():
            if isinstance(module, module_class):
                module.gradient_checkpointing = value

    def forward(self, input_ids, output_hidden_states=False):
        s = input_ids.shape[1]
        attention_mask = torch.full((s, s), -1e4, device=input_ids.device).triu(1)
        hidden_states = self.embed_tokens(input_ids)
        all_hidden_states = (hidden_states,)
        for decoder_layer in self.layers:
            if self.gradient_checkpointing and self.training:
                hidden_states = checkpoint(decoder_layer, hidden_states, attention_mask, use_reentrant=False)
            else:
                hidden_states = decoder_layer(hidden_states, attention_mask)
            if output_hidden_states:
                all_hidden_states += (hidden_states,)
        return all_hidden_states if output_hidden_states else self.lm_head(hidden_states)


@expected("checkpoints_without_effect", fix="checkpoint", thread="huggingface/transformers#22270", memory=1000, held_back=True)
def finetune_alpaca(fixed=False):
    """Gradient checkpointing is asked for but has no effect: the flag is set on the `LlamaDecoderLayer`s, while `LlamaModel.forward` looks
    at its own flag; so the activations of all layers are kept for backward. Cured by: Setting/using the flag in `LlamaModel` (as in GPT-2),
    so that the layers really are checkpointed.
    """
    model = LlamaModel().cuda().train()
    model.set_gradient_checkpointing(LlamaModel if fixed else LlamaDecoderLayer)
    optimizer = torch.optim.SGD(model.parameters(), 2e-5)
    for _ in range(3):
        input_ids = torch.randint(0, 4000, (2, 768)).cuda()
        logits = model(input_ids)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), input_ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


# Before the training of a picture model the latents of all pictures are computed once.

class AutoencoderKL(nn.Module):
    def __init__(self, channels=48, latent_channels=4):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, channels, 3, 1, 1), nn.GroupNorm(8, channels), nn.SiLU(),
            nn.Conv2d(channels, channels, 3, 2, 1), nn.GroupNorm(8, channels), nn.SiLU(),
            nn.Conv2d(channels, 2 * channels, 3, 2, 1), nn.GroupNorm(8, 2 * channels), nn.SiLU(),
            nn.Conv2d(2 * channels, 2 * latent_channels, 3, 2, 1))

    def encode(self, x):
        mean, logvar = self.encoder(x).chunk(2, 1)
        return mean + torch.exp(0.5 * logvar.clamp(-30, 20)) * torch.randn_like(mean)


class ImageInfo:
    def __init__(self, image_key, image):
        self.image_key, self.image, self.latents = image_key, image, None


class DreamBoothDataset:
    def __init__(self, pictures, resolution):
        self.image_data = {f"{i:03}.png": ImageInfo(f"{i:03}.png", torch.rand(3, resolution, resolution)) for i in range(pictures)}

    def cache_latents(self, vae, vae_batch_size):
        batch, batches = [], []
        for info in self.image_data.values():
            batch.append(info)
            if len(batch) >= vae_batch_size:
                batches.append(batch)
                batch = []
        if batch:
            batches.append(batch)
        for batch in batches:
            images = torch.stack([info.image for info in batch]).cuda()
            latents = vae.encode(images).cpu()
            for info, latent in zip(batch, latents):
                info.latents = latent


@expected("batch_without_gradients", fix="split|part", thread="kohya-ss/sd-scripts#1243", memory=1000, held_back=True)
def train_network(fixed=False):
    """`cache_latents` sends `vae_batch_size` (6) full-resolution pictures through the VAE encoder at once; the encoder's feature maps at
    full resolution need too much memory. Cured by: `--vae_batch_size=1`.
    """
    dataset = DreamBoothDataset(12, resolution=768)
    vae = AutoencoderKL().cuda().eval().requires_grad_(False)
    with torch.no_grad():
        dataset.cache_latents(vae, vae_batch_size=1 if fixed else 6)
    vae.to("cpu")
    unet = nn.Sequential(nn.Conv2d(4, 128, 3, 1, 1), nn.SiLU(), nn.Conv2d(128, 4, 3, 1, 1)).cuda()
    optimizer = torch.optim.AdamW(unet.parameters(), 1e-4)
    for info in dataset.image_data.values():
        latents = info.latents[None].cuda()
        noise = torch.randn_like(latents)
        loss = F.mse_loss(unet(latents + noise), noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return loss.item()


# Reports about X-ray pictures are generated for the test set and compared with those of the doctors.

class BertLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.attention, self.output = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = self.attention(x).chunk(3, -1)
        return x + self.output(torch.softmax(q @ k.transpose(1, 2), -1) @ v)


class BERTScorer:
    def __init__(self, vocab_size=6000, dim=1024, num_layers=4):
        self._model = nn.Sequential(nn.Embedding(vocab_size, dim), *(BertLayer(dim) for _ in range(num_layers))).cuda().eval()

    @torch.no_grad()
    def score(self, cands, refs):
        cand, ref = (F.normalize(self._model(tokens.cuda()), dim=-1) for tokens in (cands, refs))
        sim = cand @ ref.transpose(1, 2)
        return (sim.max(2).values.mean(1) + sim.max(1).values.mean(1)).cpu()


class EvaluationModule:
    def __init__(self, name, description):
        self.name, self.description = name, description
        self.compute = types.MethodType(self.__class__.compute, self)
        self.cached_bertscorer = None

    def compute(self, predictions, references):
        if self.cached_bertscorer is None:
            self.cached_bertscorer = BERTScorer()
        return {"f1": self.cached_bertscorer.score(predictions, references)}


def load_metric(name):
    return EvaluationModule(name, f"{name} of predictions against references")


class ReportGenerator(nn.Module):
    def __init__(self, vocab_size=6000, dim=512):
        super().__init__()
        self.visual, self.lm_head = nn.Linear(1024, dim), nn.Linear(dim, vocab_size)

    @torch.no_grad()
    def generate(self, images, max_length):
        hidden, tokens = self.visual(images), []
        for _ in range(max_length):
            tokens.append(self.lm_head(hidden).argmax(-1))
            hidden = torch.tanh(hidden + hidden.roll(1, -1))
        return torch.stack(tokens, 1)


def get_generated_reports(output_ids, reference_ids, bert_score=None):
    if bert_score is None:
        bert_score = load_metric("bertscore")
    scores = bert_score.compute(predictions=output_ids.cpu(), references=reference_ids)["f1"]
    return list(zip(output_ids.tolist(), scores.tolist()))


@expected("reference_cycle", fix=r"gc\.collect", thread="ttanida/rgrg#27", memory=1000, held_back=True)
def evaluate_on_test_set(fixed=False):
    """`get_generated_reports` loads the bertscore metric anew for every batch, each with a BERT model of its own on the GPU; the old ones
    are not released (the module refers to itself through its bound `compute`), so memory climbs from batch to batch. Cured by: Loading
    bertscore once, before the loop.
    """
    model = ReportGenerator().cuda().eval()
    bert_score = load_metric("bertscore") if fixed else None
    test_loader = [(torch.randn(4, 1024), torch.randint(0, 6000, (4, 60))) for _ in range(40)]
    generated_reports = []
    for images, reference_reports in test_loader:
        output_ids = model.generate(images.cuda(), max_length=60)
        generated_reports += get_generated_reports(output_ids, reference_reports, bert_score)
    return len(generated_reports)


# A diffusion model outlines organs; several samples are drawn for each slice and averaged.

class SegUNet(nn.Module):
    def __init__(self, ch=16):
        super().__init__()
        self.inp = nn.Conv2d(5, ch, 3, 1, 1)
        self.mid = nn.Sequential(nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.SiLU(), nn.Conv2d(2 * ch, ch, 3, 1, 1))
        self.out = nn.Conv2d(ch, 1, 3, 1, 1)

    def forward(self, x, t):
        h = F.silu(self.inp(torch.cat((x, t.view(-1, 1, 1, 1).expand(-1, 1, *x.shape[2:]).expand(x.shape[0], -1, -1, -1)), 1)))
        return self.out(h + F.interpolate(self.mid(h), scale_factor=2.0))


class DPMSolver:
    def __init__(self, model_fn, timesteps):
        self.model_fn, self.timesteps = model_fn, timesteps

    def sample(self, x):
        for i in range(len(self.timesteps) - 1):
            t, s = self.timesteps[i:i + 1], self.timesteps[i + 1:i + 2]
            noise = self.model_fn(x, t)
            x = (1 - s) / (1 - t) * x - (t - s) * noise
        return x


class SpacedDiffusion:
    def __init__(self, num_timesteps, patched):
        self.patched = patched
        self.timesteps = torch.linspace(0.98, 0.0, num_timesteps + 1).cuda()

    def dpm_sample_known(self, model, shape, img):
        noise = torch.randn(shape).cuda()
        solver = DPMSolver(lambda x, t: model(torch.cat((img, x), 1), t), self.timesteps)
        sample = solver.sample(noise)
        if self.patched:
            sample = sample.detach()
        return sample


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="ImprintLab/MedSegDiff#158", memory=1000, held_back=True)
def sample_slices(fixed=False):
    """The DPM solver's sampling runs with gradients on, and each sample put into `enslist` carries the graph of all its solver steps, so
    memory grows with each member of the ensemble. Cured by: Detaching `sample` right after the DPM-Solver sampling.
    """
    model = SegUNet().cuda().eval()
    diffusion = SpacedDiffusion(num_timesteps=5, patched=fixed)
    slices = [torch.randn(1, 3, 256, 256) for _ in range(2)]
    num_ensemble, cal_outs = 20, []
    for img in slices:
        enslist = []
        for _ in range(num_ensemble):
            sample = diffusion.dpm_sample_known(model, (1, 1, 256, 256), img.cuda())
            enslist.append(sample)
        cal_outs.append(torch.stack(enslist).mean(0).detach().cpu())
    return len(cal_outs)


# A picture editor in the browser, in which the user can choose another model.

class InpaintModel:
    name, width, depth = "base", 512, 4

    def __init__(self, device):
        self.device = device
        self.init_model(device)

    def init_model(self, device):
        layers = []
        for _ in range(self.depth):
            layers += [nn.Conv2d(self.width, self.width, 3, padding=1), nn.SiLU()]
        self.model = nn.Sequential(nn.Conv2d(4, self.width, 3, padding=1), *layers, nn.Conv2d(self.width, 3, 3, padding=1))
        self.model = self.model.to(device).eval()

    @torch.no_grad()
    def __call__(self, image, mask):
        image, mask = image.to(self.device), mask.to(self.device)
        return (self.model(torch.cat((image * (1 - mask), mask), 1)) * mask + image * (1 - mask)).cpu()


class SD15(InpaintModel):
    name, width, depth = "sd1.5", 1152, 11


class SD2(InpaintModel):
    name, width, depth = "sd2", 1280, 9


models = {model.name: model for model in (SD15, SD2)}


class ModelManager:
    def __init__(self, name, device, patched):
        self.name, self.device, self.patched = name, device, patched
        self.model = models[name](device)

    def __call__(self, image, mask):
        return self.model(image, mask)

    def switch(self, new_name):
        if new_name == self.name:
            return
        if self.patched:
            del self.model
            gc.collect()
            torch.cuda.empty_cache()
        self.model = models[new_name](self.device)
        self.name = new_name


@expected("several_models", fix=r"None|\bdel\b", thread="Sanster/IOPaint#165", memory=1000, held_back=True)
def edit_pictures(fixed=False):
    """`ModelManager.switch` builds the new model on the GPU while `self.model` still holds the old one, so both are there at once. Cured
    by: Deleting `self.model` (gc, empty_cache) before the new model is loaded.
    """
    manager = ModelManager("sd1.5", torch.device("cuda"), patched=fixed)
    image, mask = torch.rand(1, 3, 64, 64), torch.zeros(1, 1, 64, 64)
    mask[..., 20:40, 20:40] = 1
    results = [manager(image, mask)]
    manager.switch("sd2")
    results.append(manager(image, mask))
    return len(results)


# A protein language model is loaded from the hub and run in half precision.

class UnifiedTransformerBlock(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.layernorm_qkv, self.out_proj = nn.Linear(d_model, 3 * d_model, bias=False), nn.Linear(d_model, d_model, bias=False)
        self.ffn_in, self.ffn_out = nn.Linear(d_model, 4 * d_model, bias=False), nn.Linear(4 * d_model, d_model, bias=False)

    def forward(self, x):
        q, k, v = self.layernorm_qkv(x).chunk(3, -1)
        x = x + self.out_proj(torch.softmax(q @ k.transpose(1, 2), -1) @ v)
        return x + self.ffn_out(F.gelu(self.ffn_in(x)))


class ESMC(nn.Module):
    def __init__(self, d_model, n_layers):
        super().__init__()
        self.embed = nn.Embedding(64, d_model)
        self.transformer = nn.ModuleList(UnifiedTransformerBlock(d_model) for _ in range(n_layers))
        self.sequence_head = nn.Linear(d_model, 64)

    def forward(self, sequence_tokens):
        x = self.embed(sequence_tokens)
        for block in self.transformer:
            x = block(x)
        return self.sequence_head(x)

    @classmethod
    def from_pretrained(cls, model_name, device, dtype, patched):
        d_model, n_layers = {"esmc_300m": (768, 8), "esmc_6b": (1280, 7)}[model_name]
        with torch.device("meta"):
            model = cls(d_model, n_layers)
        model = model.to_empty(device="cpu")
        if patched:
            return model.to(dtype).to(device).eval()
        model = model.to(device).eval()
        return model.to(dtype)


@expected("weights_do_not_fit", fix="bfloat16", thread="Biohub/esm#391", memory=500, held_back=True)
def embed_proteins(fixed=False):
    """`from_pretrained` moves the model to the GPU in float32 and converts it to bfloat16 only afterwards; so the weights need twice the
    memory while loading. Cured by: Converting the dtype first, then moving to the device.
    """
    client = ESMC.from_pretrained("esmc_6b", torch.device("cuda"), torch.bfloat16, patched=fixed)
    logits = []
    with torch.inference_mode():
        for protein in torch.randint(4, 24, (5, 300)):
            logits.append(client(protein[None].cuda()).float().cpu())
    return len(logits)


# A worker of a chat server gives the embeddings of texts.

class ModelWorker:
    def __init__(self, patched):
        self.patched = patched
        self.model = LlamaModel(hidden_size=512, num_layers=8, num_heads=8).cuda().eval()

    def get_embeddings(self, params):
        with no_grad_if(self.patched):
            ret = {"embedding": [], "token_num": 0}
            for text in params["input"]:
                input_ids = text[None].cuda()
                model_output = self.model(input_ids, output_hidden_states=True)
                data = model_output[-1][0]
                embedding = torch.mean(data, dim=0)
                ret["embedding"].append(embedding.tolist())
                ret["token_num"] += len(text)
        return ret


@expected("evaluation_keeps_graphs", fix="no_grad", thread="lm-sys/FastChat#1199", memory=1000, held_back=True)
def serve_embeddings(fixed=False):
    """`get_embeddings` runs the model with gradients enabled, so the activations (attention weights) of all layers are kept for a backward
    that never comes; a long text does not fit. Cured by: `torch.no_grad()` around it.
    """
    worker = ModelWorker(patched=fixed)
    texts = [torch.randint(0, 4000, (length,)) for length in (40, 300, 1600, 120)]
    answers = [worker.get_embeddings({"input": [text]}) for text in texts]
    return sum(answer["token_num"] for answer in answers)


# Which words of the input mattered for the words that a model wrote, for a list of texts.

class CausalLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x, past=None):
        q, k, v = self.q(x), self.k(x), self.v(x)
        if past is not None:
            k, v = torch.cat((past[0], k), 1), torch.cat((past[1], v), 1)
        return x + self.o(torch.softmax(q @ k.transpose(1, 2), -1) @ v), (k, v)


class CausalLM(nn.Module):
    def __init__(self, vocab_size=3000, dim=512, num_layers=4):
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(CausalLayer(dim) for _ in range(num_layers))
        self.lm_head = nn.Linear(dim, vocab_size)

    def forward(self, inputs_embeds, past_key_values=None):
        present = []
        for i, layer in enumerate(self.layers):
            inputs_embeds, kv = layer(inputs_embeds, past_key_values[i] if past_key_values else None)
            present.append(kv)
        return self.lm_head(inputs_embeds[:, -1]), present

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens):
        logits, past_key_values = self(self.embedding(input_ids))
        for _ in range(max_new_tokens):
            next_ids = logits.argmax(-1, keepdim=True)
            input_ids = torch.cat((input_ids, next_ids), 1)
            logits, past_key_values = self(self.embedding(next_ids), past_key_values)
        return input_ids


class AttributionModel:
    def __init__(self, model, patched):
        self.model, self.patched = model, patched

    def encode(self, texts):
        return nn.utils.rnn.pad_sequence(texts, batch_first=True).cuda()

    def generate(self, texts, batch_size, max_new_tokens=8):
        size = batch_size if self.patched else len(texts)
        generated = []
        for start in range(0, len(texts), size):
            generated += self.model.generate(self.encode(texts[start:start + size]), max_new_tokens).cpu()
        return generated

    def attribute_batch(self, ids):
        embeds = self.model.embedding(ids[:, :-1]).detach().requires_grad_()
        logits, _ = self.model(embeds)
        score = logits.gather(1, ids[:, -1:]).sum()
        return torch.autograd.grad(score, embeds)[0].norm(dim=-1).cpu()

    def attribute(self, input_texts, batch_size):
        sequences = self.generate(input_texts, batch_size)
        attributions = []
        for start in range(0, len(sequences), batch_size):
            attributions += self.attribute_batch(self.encode(sequences[start:start + batch_size]))
        return attributions


@expected("batch_without_gradients", fix="split|part", thread="inseq-team/inseq#183", memory=1000, held_back=True)
def attribute_texts(fixed=False):
    """`attribute` takes a `batch_size`, but the generation step runs over all input texts in one batch; the encoded inputs, activations and
    key/value caches of all 800 texts are on the GPU at once. Cured by: Batching the generate step with `batch_size` too.
    """
    model = AttributionModel(CausalLM().cuda().eval(), patched=fixed)
    texts = [torch.randint(1, 3000, (int(length),)) for length in torch.randint(40, 64, (800,))]
    return len(model.attribute(texts, batch_size=16))
