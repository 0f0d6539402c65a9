"""Programs after public threads whose causes the people in them confirmed: text, language models, images and video."""

import gc
from collections import deque

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from expected import expected

# A small language model is trained with group-relative rewards, which a larger model gives.


class MiniMindBlock(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.input_norm, self.post_norm = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.qkv_proj, self.o_proj = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.SiLU(), nn.Linear(4 * hidden_size, hidden_size))

    def forward(self, hidden_states):
        bsz, seq_len, dim = hidden_states.shape
        xq, xk, xv = (
            self.qkv_proj(self.input_norm(hidden_states)).view(bsz, seq_len, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        )
        scores = xq @ xk.transpose(-1, -2) / (dim // self.num_heads) ** 0.5
        output = (scores.softmax(-1) @ xv).transpose(1, 2).reshape(bsz, seq_len, dim)
        hidden_states = hidden_states + self.o_proj(output)
        return hidden_states + self.mlp(self.post_norm(hidden_states))


class MiniMindForCausalLM(nn.Module):
    def __init__(self, vocab_size=6400, hidden_size=256, num_layers=4, num_heads=4, num_outputs=None):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.Sequential(*(MiniMindBlock(hidden_size, num_heads) for _ in range(num_layers)))
        self.lm_head = nn.Linear(hidden_size, num_outputs or vocab_size, bias=False)

    def forward(self, input_ids):
        return self.lm_head(self.layers(self.embed_tokens(input_ids)))


@torch.no_grad()
def rollout(model, prompt_ids, num_generations, max_gen_len):
    output_ids = prompt_ids.repeat_interleave(num_generations, 0)
    for _ in range(max_gen_len):
        next_token = model(output_ids)[:, -1].argmax(-1, keepdim=True)
        output_ids = torch.cat((output_ids, next_token), 1)
    return output_ids


def get_per_token_logps(model, output_ids, n_keep):
    logits = model(output_ids)[:, -n_keep - 1 : -1]
    return logits.log_softmax(-1).gather(2, output_ids[:, -n_keep:, None]).squeeze(-1)


@torch.no_grad()
def calculate_rewards(reward_model, output_ids, template_len=144):
    template_ids = torch.randint(0, 6400, (1, template_len)).cuda().expand(len(output_ids), -1)
    return reward_model(torch.cat((template_ids, output_ids), 1))[:, -1, 0]


@expected("order_of_passes", fix="before", thread="jingyaogong/minimind#758", memory=1000, held_back=True)
def grpo_train_epoch(fixed=False, num_generations=8, max_gen_len=16):
    """`calculate_rewards` runs the big reward model only after the policy's forward (`per_token_logps`), so its temporary memory comes on
    top of all the activations that the policy keeps for `loss.backward()`; the two peaks overlap although the rewards don't need the
    policy's forward at all. Cured by: The rewards are calculated before the policy's and the reference's forward passes, so the two peaks
    no longer overlap.
    """
    model, ref_model = MiniMindForCausalLM().cuda(), MiniMindForCausalLM().cuda().eval().requires_grad_(False)
    reward_model = (
        MiniMindForCausalLM(hidden_size=768, num_layers=5, num_heads=12, num_outputs=1).cuda().eval().requires_grad_(False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-7)
    for _ in range(3):
        prompt_ids = torch.randint(0, 6400, (2, 240)).cuda()
        output_ids = rollout(model, prompt_ids, num_generations, max_gen_len)
        if fixed:
            rewards = calculate_rewards(reward_model, output_ids)
        per_token_logps = get_per_token_logps(model, output_ids, max_gen_len)
        with torch.no_grad():
            ref_per_token_logps = get_per_token_logps(ref_model, output_ids, max_gen_len)
        if not fixed:
            rewards = calculate_rewards(reward_model, output_ids)
        grouped_rewards = rewards.view(-1, num_generations)
        advantages = (grouped_rewards - grouped_rewards.mean(1, keepdim=True)) / (grouped_rewards.std(1, keepdim=True) + 1e-4)
        kl_div = ref_per_token_logps - per_token_logps
        per_token_kl = torch.exp(kl_div) - kl_div - 1
        per_token_loss = -(
            torch.exp(per_token_logps - per_token_logps.detach()) * advantages.view(-1, 1) - 0.02 * per_token_kl
        )
        loss = per_token_loss.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del per_token_logps, per_token_loss, per_token_kl, kl_div, loss


# Log-probabilities of the sampled tokens over a large vocabulary, some rows at a time.


def chunk_log_probs(logits, labels):
    logits = logits.float()
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)


def log_probs_from_logits(logits, labels, chunk_rows, fixed):
    log_probs = []
    for rows, targets in zip(logits.split(chunk_rows), labels.split(chunk_rows)):
        if fixed:
            log_probs.append(checkpoint(chunk_log_probs, rows, targets, use_reentrant=False))
        else:
            log_probs.append(chunk_log_probs(rows, targets))
    return torch.cat(log_probs)


class Actor(nn.Module):
    def __init__(self, vocab_size, hidden_size, fixed):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.LayerNorm(hidden_size), nn.Linear(hidden_size, hidden_size), nn.GELU()) for _ in range(2))
        )
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.fixed = fixed

    def forward(self, sequences):
        hidden = self.blocks(self.embed(sequences[:, :-1]))
        logits = self.lm_head(hidden).flatten(0, 1)
        return log_probs_from_logits(logits, sequences[:, 1:].flatten(), 128, self.fixed)


@expected("logits", fix="chunk|split", thread="NVIDIA-NeMo/labs-molt#121", memory=1200, held_back=True)
def actor_train_step(fixed=False, vocab_size=32768):
    """`log_probs_from_logits` works through the logits in chunks to save memory, but with gradients on, autograd keeps the float32 copy
    that every chunk makes (`logits.float()`, saved for `logsumexp`) until the backward pass, so in the end a whole float32 copy of the rows
    x vocabulary logits is there after all. Cured by: Each chunk in `torch.utils.checkpoint`, so the cast, gather and logsumexp are computed
    again in the backward pass.
    """
    actor = Actor(vocab_size, 256, fixed).cuda().bfloat16()
    optimizer = torch.optim.SGD(actor.parameters(), lr=1e-3)
    for _ in range(3):
        sequences, advantages = torch.randint(0, vocab_size, (4, 1537)).cuda(), torch.randn(4 * 1536).cuda()
        old_log_probs = torch.randn(4 * 1536).cuda()
        ratio = (actor(sequences) - old_log_probs).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# Text generation in half precision from long prompts.


class DecoderLayer(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.out = nn.Linear(hidden_size, 3 * hidden_size), nn.Linear(hidden_size, hidden_size)
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size), nn.LayerNorm(hidden_size)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(), nn.Linear(4 * hidden_size, hidden_size))

    def forward(self, x, past_key_value):
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        if past_key_value is not None:
            k, v = torch.cat((past_key_value[0], k), 2), torch.cat((past_key_value[1], v), 2)
        attn = (q @ k.transpose(-1, -2) * (c // self.num_heads) ** -0.5).softmax(-1) @ v
        x = x + self.out(attn.transpose(1, 2).reshape(b, t, c))
        return x + self.mlp(self.norm2(x)), (k, v)


class LlamaForCausalLM(nn.Module):
    def __init__(self, vocab_size=64000, hidden_size=256, num_layers=4, fixed=False):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(hidden_size, 4) for _ in range(num_layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False)
        self.fixed = fixed

    def forward(self, input_ids, past_key_values=None):
        hidden_states, presents = self.embed_tokens(input_ids), []
        for i, layer in enumerate(self.layers):
            hidden_states, present = layer(hidden_states, past_key_values and past_key_values[i])
            presents.append(present)
        logits = self.lm_head(hidden_states)
        if not self.fixed:
            logits = logits.float()
        return logits, presents

    @torch.no_grad()
    def generate(self, input_ids, max_new_tokens):
        past_key_values, model_inputs = None, input_ids
        for _ in range(max_new_tokens):
            logits, past_key_values = self(model_inputs, past_key_values)
            next_token_logits = logits[:, -1, :].clone().float()
            del logits
            model_inputs = next_token_logits.argmax(-1, keepdim=True)
            input_ids = torch.cat((input_ids, model_inputs), -1)
        return input_ids


@expected("logits", fix="chunk|split", thread="huggingface/transformers#30860", memory=1000, held_back=True)
def generate_from_documents(fixed=False):
    """`forward` turns the half-precision logits of all prompt positions into float32 (`logits = logits.float()`), twice their size again
    for 4 x 760 x 64000 values, though `generate` uses only those of the last position. Cured by: Removing the cast in `forward`; `generate`
    casts only the last token's logits.
    """
    model = LlamaForCausalLM(fixed=fixed).half().cuda().eval()
    input_ids = torch.randint(0, 64000, (4, 760)).cuda()
    return model.generate(input_ids, max_new_tokens=12).cpu()


# Dense passage retrieval: the embeddings of all passages of a document store.


class PassageEncoder(nn.Module):
    def __init__(self, vocab_size=30522, hidden_size=128, embedding_dim=768):
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden_size)
        self.dense, self.pooler = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, embedding_dim)

    def forward(self, input_ids):
        return self.pooler(torch.tanh(self.dense(self.embeddings(input_ids))).mean(1))


class DensePassageRetriever:
    def __init__(self, batch_size, fixed):
        self.passage_encoder, self.batch_size, self.fixed = PassageEncoder().cuda().eval(), batch_size, fixed

    def _get_predictions(self, input_ids):
        all_embeddings = {"query": [], "passages": []}
        for batch in input_ids.split(self.batch_size):
            with torch.no_grad():
                passage_embeddings = self.passage_encoder(batch.cuda())
            all_embeddings["passages"].append(passage_embeddings.cpu() if self.fixed else passage_embeddings)
        all_embeddings["passages"] = torch.cat(all_embeddings["passages"])
        return all_embeddings

    def embed_passages(self, docs):
        return self._get_predictions(docs)["passages"].cpu().numpy()


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="deepset-ai/haystack#618", memory=500, held_back=True)
def update_embeddings(fixed=False, number_of_documents=150_000):
    """`_get_predictions` keeps the embeddings of all passages on the GPU in `all_embeddings["passages"]` until the end of the loop; with
    many documents they fill it. Cured by: Moving each batch's embeddings to the CPU straight away.
    """
    retriever = DensePassageRetriever(batch_size=4096, fixed=fixed)
    docs = torch.randint(0, 30522, (number_of_documents, 16))
    return {"documents": len(retriever.embed_passages(docs))}


# The latents of a generated video are decoded to frames, one latent step at a time.


class Decoder3d(nn.Module):
    def __init__(self, z_dim=16, dim=16):
        super().__init__()
        self.conv1 = nn.Conv3d(z_dim, dim, (1, 3, 3), padding=(0, 1, 1))
        self.upsample = nn.ConvTranspose3d(dim, 4, (4, 8, 8), stride=(4, 8, 8))
        self.head = nn.Conv3d(4, 3, (1, 3, 3), padding=(0, 1, 1))

    def forward(self, x, feat_cache):
        x = self.conv1(x)
        if feat_cache[0] is not None:
            x = x + feat_cache[0]
        feat_cache[0] = x
        return self.head(F.silu(self.upsample(x)))


class WanVideoVAE:
    def __init__(self):
        self.decoder = Decoder3d().cuda().eval()

    def decode(self, z, fixed):
        feat_cache = [None]
        out = None
        if fixed:
            out = torch.empty(z.shape[0], 3, 4 * z.shape[2], 8 * z.shape[3], 8 * z.shape[4])
        for i in range(z.shape[2]):
            out_ = self.decoder(z[:, :, i : i + 1], feat_cache)
            if fixed:
                out[:, :, 4 * i : 4 * i + 4].copy_(out_)
            elif out is None:
                out = out_
            else:
                out = torch.cat([out, out_], 2)
        return out


@expected("growing_buffer", fix=r"\.cpu\(\)", thread="kijai/ComfyUI-WanVideoWrapper#2042", memory=1000, held_back=True)
@torch.no_grad()
def decode_video(fixed=False, latent_frames=30):
    """`WanVideoVAE.decode` collects all decoded frames on the GPU by `out = torch.cat([out, out_], 2)` in each step, so the video grows
    there (and old and new copy exist together during the cat), only to be moved to the CPU afterwards. Cured by: The result is allocated
    once on the CPU and each decoded part is copied into its place.
    """
    vae = WanVideoVAE()
    samples = torch.randn(1, 16, latent_frames, 60, 104).cuda()
    images = vae.decode(samples, fixed)
    images = images.cpu().float().clamp_(-1, 1).add_(1).div_(2)
    return {"frames": images.shape[2]}


# Instance segmentation: the masks of the detections at the size of the photo.


def crop_mask(masks, boxes):
    n, h, w = masks.shape
    x1, y1, x2, y2 = torch.chunk(boxes[:, :, None], 4, 1)
    r = torch.arange(w, device=masks.device, dtype=x1.dtype)[None, None, :]
    c = torch.arange(h, device=masks.device, dtype=x1.dtype)[None, :, None]
    return masks * ((r >= x1) * (r < x2) * (c >= y1) * (c < y2))


def crop_mask_separable(masks, boxes):
    n, h, w = masks.shape
    x1, y1, x2, y2 = torch.chunk(boxes[:, :, None], 4, 1)
    r = torch.arange(w, device=masks.device, dtype=x1.dtype)[None, None, :]
    c = torch.arange(h, device=masks.device, dtype=x1.dtype)[None, :, None]
    masks.mul_((r >= x1) & (r < x2))
    return masks.mul_((c >= y1) & (c < y2))


def process_mask_native(protos, masks_in, bboxes, shape, fixed):
    c, mh, mw = protos.shape
    masks = (masks_in @ protos.view(c, -1)).view(-1, mh, mw)
    if not fixed:
        masks = F.interpolate(masks[None], shape, mode="bilinear", align_corners=False)[0]
        masks = crop_mask(masks, bboxes)
        return masks.gt_(0.0).byte()
    step = max(1, (1 << 25) // (shape[0] * shape[1]))
    out = torch.empty(len(masks), *shape, dtype=torch.uint8, device=masks.device)
    for i in range(0, len(masks), step):
        out[i : i + step] = F.interpolate(masks[None, i : i + step], shape, mode="bilinear", align_corners=False)[0] > 0.0
    return crop_mask_separable(out, bboxes)


class SegmentationModel(nn.Module):
    def __init__(self, nm=32):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.SiLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.SiLU())
        self.proto, self.detect = nn.Conv2d(32, nm, 1), nn.Conv2d(32, 5 + nm, 8, 8)

    def forward(self, im):
        features = self.backbone(im)
        return self.detect(features).flatten(2).transpose(1, 2), self.proto(features)


@expected("enlarged", fix="split|part|chunk", thread="ultralytics/ultralytics#24988", memory=1000, held_back=True)
@torch.inference_mode()
def predict_retina_masks(fixed=False, max_det=150):
    """`process_mask_native` scales the masks of all 150 detections to the photo's full size at once, as float32: detections x height x
    width (890 MiB), just to threshold them to bytes. Cured by: Scaling some masks at a time and thresholding these to uint8 at once; a crop
    in place, without the full grid.
    """
    model = SegmentationModel().cuda().eval()
    orig_img = torch.randint(0, 256, (1, 3, 1080, 1440), dtype=torch.uint8)
    im = F.interpolate(orig_img.cuda().float() / 255, (480, 640))
    preds, protos = model(im)
    pred = preds[0][preds[0][:, 4].topk(max_det).indices]
    boxes = pred[:, :4] * pred.new_tensor([1440, 1080, 1440, 1080])
    masks = process_mask_native(protos[0], pred[:, 5:], boxes, (1080, 1440), fixed)
    return {"masks": len(masks.cpu())}


# Validation of a segmentation network for volumes, with the rates of the confusion matrix.


class UNet3d(nn.Module):
    def __init__(self, out_channels):
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, 8, 3, 2, 1), nn.PReLU(), nn.Conv3d(8, 16, 3, 2, 1), nn.PReLU())
        self.up = nn.Sequential(nn.ConvTranspose3d(16, 8, 2, 2), nn.PReLU(), nn.ConvTranspose3d(8, out_channels, 2, 2))

    def forward(self, x):
        return self.up(self.down(x))


def get_confusion_matrix(y_pred, y):
    y_pred, y = y_pred.flatten(2), y.flatten(2)
    tp = (y_pred * y).sum(-1)
    fp, fn = y_pred.sum(-1) - tp, y.sum(-1) - tp
    return torch.stack((tp, fp, y.shape[-1] - tp - fp - fn, fn), -1)


class ConfusionMatrix:
    def __init__(self, fixed):
        self.fixed = fixed
        self._predictions, self._targets, self._counts = [], [], []

    def update(self, output):
        y_pred, y = output
        if self.fixed:
            self._counts.append(get_confusion_matrix(y_pred, y))
        else:
            self._predictions.append(y_pred)
            self._targets.append(y)

    def compute(self):
        if not self.fixed:
            self._counts = [get_confusion_matrix(torch.cat(self._predictions), torch.cat(self._targets))]
        tp, fp, tn, fn = torch.cat(self._counts).sum(0).unbind(-1)
        return tp / (tp + fn)


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="Project-MONAI/MONAI#1130", memory=1000, held_back=True)
def evaluate_spleen(fixed=False):
    """`ConfusionMatrix.update` keeps the one-hot predictions and labels of every volume of the epoch on the GPU (`_predictions`,
    `_targets`) and counts only in `compute` at the end. Cured by: The confusion matrix's four counts are computed in every iteration, and
    only they are kept.
    """
    net = UNet3d(4).cuda().eval()
    val_metric = ConfusionMatrix(fixed)
    post_pred = lambda x: F.one_hot(x.argmax(1), 4).movedim(-1, 1).float()
    post_label = lambda x: F.one_hot(x, 4).movedim(-1, 1).float()
    with torch.no_grad():
        for _ in range(40):
            inputs, labels = torch.randn(1, 1, 96, 96, 96).cuda(), torch.randint(0, 4, (1, 96, 96, 96)).cuda()
            val_metric.update((post_pred(net(inputs)), post_label(labels)))
    return val_metric.compute().cpu()


# Fine-tuning of a text-to-image model through low-rank layers beside its attention.


class LoRALinearLayer(nn.Module):
    def __init__(self, features, rank=4):
        super().__init__()
        self.down, self.up = nn.Linear(features, rank, bias=False), nn.Linear(rank, features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, hidden_states):
        return self.up(self.down(hidden_states))


class CrossAttention(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        self.heads = heads
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(dim, dim) for _ in range(4))
        self.processor = None

    def forward(self, x, encoder_hidden_states):
        b, t, c = x.shape
        lora = self.processor
        q = self.to_q(x) + lora["q"](x)
        k, v = (
            to(encoder_hidden_states) + lora[name](encoder_hidden_states) for name, to in (("k", self.to_k), ("v", self.to_v))
        )
        q, k, v = (z.view(b, -1, self.heads, c // self.heads).transpose(1, 2) for z in (q, k, v))
        out = ((q @ k.transpose(-1, -2) * (c // self.heads) ** -0.5).softmax(-1) @ v).transpose(1, 2).reshape(b, t, c)
        return self.to_out(out) + lora["out"](out)


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = CrossAttention(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, encoder_hidden_states):
        x = x + self.attn(self.norm1(x), encoder_hidden_states)
        return x + self.ff(self.norm2(x))


class UNet2DConditionModel(nn.Module):
    def __init__(self, dim=1280, layers=6):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, dim, 3, 1, 1), nn.Conv2d(dim, 4, 3, 1, 1)
        self.blocks = nn.ModuleList(BasicTransformerBlock(dim) for _ in range(layers))

    def set_attn_processor(self, lora_attn_procs):
        for block, processor in zip(self.blocks, lora_attn_procs):
            block.attn.processor = processor

    def forward(self, noisy_latents, encoder_hidden_states):
        x = self.conv_in(noisy_latents)
        b, c, h, w = x.shape
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, encoder_hidden_states)
        return self.conv_out(x.transpose(1, 2).view(b, c, h, w))


@expected("gradients_of_frozen", fix="requires_grad", thread="huggingface/diffusers#2245", memory=1000, held_back=True)
def train_text_to_image_lora(fixed=False):
    """The weights of `unet` aren't frozen; only the LoRA layers are in the optimizer, but backward computes and keeps gradients as large as
    all the unet's weights, which nobody uses. Cured by: `unet.requires_grad_(False)`.
    """
    unet = UNet2DConditionModel()
    if fixed:
        unet.requires_grad_(False)
    unet.cuda()
    lora_layers = nn.ModuleList(
        nn.ModuleDict({n: LoRALinearLayer(1280) for n in ("q", "k", "v", "out")}) for _ in range(6)
    ).cuda()
    unet.set_attn_processor(lora_layers)
    optimizer = torch.optim.AdamW(lora_layers.parameters(), lr=1e-4)
    for _ in range(3):
        latents, noise = torch.randn(2, 1, 4, 16, 16).cuda().unbind(0)
        encoder_hidden_states = torch.randn(1, 77, 1280).cuda()
        model_pred = unet(latents + noise, encoder_hidden_states)
        loss = F.mse_loss(model_pred, noise)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# Fine-tuning of a language model from a configuration, on one of two ways.


class LoraLinear(nn.Module):
    def __init__(self, in_features, out_features, r=16):
        super().__init__()
        self.base = nn.Linear(in_features, out_features, bias=False).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(in_features, r, bias=False), nn.Linear(r, out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.lora_B(self.lora_A(x))


class GemmaDecoderLayer(nn.Module):
    def __init__(self, hidden_size, intermediate_size):
        super().__init__()
        self.norm = nn.LayerNorm(hidden_size)
        self.gate_proj, self.up_proj = LoraLinear(hidden_size, intermediate_size), LoraLinear(hidden_size, intermediate_size)
        self.down_proj = LoraLinear(intermediate_size, hidden_size)

    def forward(self, hidden_states):
        x = self.norm(hidden_states)
        return hidden_states + self.down_proj(F.gelu(self.gate_proj(x)) * self.up_proj(x))


class GemmaForCausalLM(nn.Module):
    def __init__(self, vocab_size=8000, hidden_size=512, num_layers=12):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, hidden_size).requires_grad_(False)
        self.layers = nn.ModuleList(GemmaDecoderLayer(hidden_size, 2048) for _ in range(num_layers))
        self.lm_head = nn.Linear(hidden_size, vocab_size, bias=False).requires_grad_(False)
        self.gradient_checkpointing = False

    def gradient_checkpointing_enable(self):
        self.gradient_checkpointing = True

    def forward(self, input_ids):
        hidden_states = self.embed_tokens(input_ids)
        for layer in self.layers:
            if self.gradient_checkpointing and self.training:
                hidden_states = checkpoint(layer, hidden_states, use_reentrant=False)
            else:
                hidden_states = layer(hidden_states)
        return self.lm_head(hidden_states[:, -1])


def load_for_finetuning(config, fixed):
    model = GemmaForCausalLM().cuda()
    if config["finetune_use_unsloth"]:
        if config["finetune_gradient_checkpointing"]:
            model.gradient_checkpointing_enable()
    elif fixed and config["finetune_gradient_checkpointing"]:
        model.gradient_checkpointing_enable()
    return model.train()


@expected("many_rows", fix="checkpoint", thread="sam-paech/auto-antislop#3", memory=1000, held_back=True)
def run_antislop_finetune(fixed=False):
    """The setting `finetune_gradient_checkpointing` is read only on the unsloth way of `load_for_finetuning`, so on the other way
    checkpointing stays off though the configuration asks for it, and the activations of all layers are kept. Cured by: Calling
    `gradient_checkpointing_enable()` on the transformers way too.
    """
    config = {
        "finetune_use_unsloth": False,
        "finetune_gradient_checkpointing": True,
        "finetune_batch_size": 4,
        "finetune_max_seq_length": 640,
    }
    model = load_for_finetuning(config, fixed)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    for _ in range(3):
        prompt_ids = torch.randint(0, 8000, (config["finetune_batch_size"], config["finetune_max_seq_length"])).cuda()
        chosen, rejected = torch.randint(0, 8000, (2, config["finetune_batch_size"])).cuda()
        logits = model(prompt_ids)
        margin = logits.gather(1, chosen[:, None]) - logits.gather(1, rejected[:, None])
        loss = -F.logsigmoid(margin).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# A user interface for a text-to-image model, in which another checkpoint is chosen between two pictures.


class LatentDiffusion(nn.Module):
    def __init__(self, in_channels, dim=1024, layers=12):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(in_channels, dim, 1), nn.Conv2d(dim, 4, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(dim, dim, 3, 1, 1), nn.SiLU()) for _ in range(layers))

    def apply_model(self, x, sigma):
        x = self.conv_in(x) / (1 + sigma)
        for block in self.blocks:
            x = x + block(x)
        return self.conv_out(x)


class k_sampling:
    torch = torch

    @staticmethod
    def sample_euler_ancestral(denoiser, x, sigmas):
        for sigma in sigmas:
            x = denoiser(x, sigma) + k_sampling.torch.randn_like(x) * sigma
        return x


class TorchHijack:
    def __init__(self, kdiff_sampler=None, sampler_noises=None):
        self.kdiff_sampler, self.sampler_noises = kdiff_sampler, sampler_noises

    def randn_like(self, x):
        if self.kdiff_sampler is not None:
            return self.kdiff_sampler.randn_like(x)
        noise = self.sampler_noises.popleft() if self.sampler_noises else None
        return noise if noise is not None and noise.shape == x.shape else torch.randn_like(x)


class KDiffusionSampler:
    def __init__(self, sd_model, fixed):
        self.model_wrap, self.fixed = sd_model, fixed
        self.sampler_noises, self.sampler_noise_index = None, 0

    def randn_like(self, x):
        index, self.sampler_noise_index = self.sampler_noise_index, self.sampler_noise_index + 1
        return self.sampler_noises[index] if index < len(self.sampler_noises) else torch.randn_like(x)

    def initialize(self, x, steps):
        self.sampler_noises = [torch.randn_like(x) for _ in range(steps)]
        if len(x) > 1:
            k_sampling.torch = TorchHijack(sampler_noises=deque(self.sampler_noises)) if self.fixed else TorchHijack(self)

    def sample(self, x, steps):
        self.initialize(x, steps)
        return k_sampling.sample_euler_ancestral(self.model_wrap.apply_model, x, torch.linspace(14, 0.03, steps).tolist())


class shared:
    sd_model = None


def load_model(in_channels):
    shared.sd_model = None
    gc.collect()
    torch.cuda.empty_cache()
    shared.sd_model = LatentDiffusion(in_channels).cuda().eval().requires_grad_(False)


def process_images(in_channels, batch_size, steps, fixed):
    sampler = KDiffusionSampler(shared.sd_model, fixed)
    x = torch.randn(batch_size, 4, 32, 32).cuda()
    if in_channels > 4:
        masked = torch.randn(batch_size, in_channels - 4, 32, 32).cuda()
        return sampler.model_wrap.apply_model(torch.cat((x, masked), 1), 1.0).cpu()
    return sampler.sample(x, steps).cpu()


@expected("several_models", fix=r"\bdel\b|\.cpu\(\)", thread="AUTOMATIC1111/stable-diffusion-webui#5065", memory=1000, held_back=True)
def switch_to_inpainting(fixed=False):
    """After pictures with batch size 2, the global `k_sampling.torch` is a `TorchHijack` that holds the sampler, which holds the old
    checkpoint's model (`model_wrap`); so `load_model` can't free the old model, and the new one is loaded beside it. Cured by:
    `TorchHijack` gets only the noises it needs, in a deque, instead of the sampler.
    """
    load_model(in_channels=4)
    process_images(4, batch_size=2, steps=8, fixed=fixed)
    load_model(in_channels=9)
    return process_images(9, batch_size=1, steps=8, fixed=fixed)


# Tracking of an object through a video, frame by frame, after its frames were prepared.


def load_video_frames(video, image_size, img_mean, img_std):
    images = torch.zeros(len(video), 3, image_size, image_size)
    for n, frame in enumerate(video):
        images[n] = frame.float() / 255
    images = images.cuda()
    images -= img_mean
    images /= img_std
    return images


class LazyVideoFrameLoader:
    def __init__(self, video, img_mean, img_std):
        self.video, self.img_mean, self.img_std = video, img_mean, img_std

    def __getitem__(self, index):
        return (self.video[index].cuda().float() / 255 - self.img_mean) / self.img_std

    def __len__(self):
        return len(self.video)


class SAM2VideoPredictor(nn.Module):
    def __init__(self, image_size=512, num_maskmem=7):
        super().__init__()
        self.image_size, self.num_maskmem = image_size, num_maskmem
        self.image_encoder = nn.Sequential(nn.Conv2d(3, 32, 7, 4, 3), nn.GELU(), nn.Conv2d(32, 64, 4, 4))
        self.memory_encoder, self.mask_decoder = nn.Conv2d(65, 64, 1), nn.Conv2d(64, 1, 1)

    def init_state(self, video, fixed):
        img_mean, img_std = (torch.tensor(v).view(3, 1, 1).cuda() for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
        images = (
            LazyVideoFrameLoader(video, img_mean, img_std)
            if fixed
            else load_video_frames(video, self.image_size, img_mean, img_std)
        )
        return {"images": images, "num_frames": len(images), "output_dict": {}, "maskmem": deque(maxlen=self.num_maskmem)}

    def propagate_in_video(self, inference_state):
        for frame_idx in range(inference_state["num_frames"]):
            features = self.image_encoder(inference_state["images"][frame_idx][None])
            for maskmem in inference_state["maskmem"]:
                query, memory = features.flatten(2), maskmem.flatten(2)
                features = features + (memory @ (memory.transpose(1, 2) @ query).softmax(1)).view_as(features)
            pred_masks = self.mask_decoder(features)
            inference_state["maskmem"].append(self.memory_encoder(torch.cat((features, pred_masks), 1)))
            inference_state["output_dict"][frame_idx] = pred_masks
            yield frame_idx, F.interpolate(pred_masks, (self.image_size, self.image_size), mode="bilinear") > 0


@expected("data_on_gpu", fix=r"on the host|\.cpu\(\)|DataLoader|part", thread="facebookresearch/sam2#264", memory=600, held_back=True)
@torch.inference_mode()
def track_in_video(fixed=False, num_frames=190):
    """`init_state` prepares all frames of the video and puts them on the GPU as one float32 tensor (`images.cuda()`), which for 190 frames
    is larger than the free memory, though one frame is needed at a time. Cured by: A lazy loader (`LazyVideoFrameLoader`) that gives one
    frame at a time.
    """
    predictor = SAM2VideoPredictor().cuda().eval()
    video = torch.randint(0, 256, (num_frames, 3, 512, 512), dtype=torch.uint8)
    inference_state = predictor.init_state(video, fixed)
    area = 0
    for frame_idx, video_res_masks in predictor.propagate_in_video(inference_state):
        area += int(video_res_masks.cpu().sum())
    return {"area": area}


# Segmentation of streets with a loss that compares centre lines.


def soft_erode(img):
    p1 = -F.max_pool2d(-img, (3, 1), (1, 1), (1, 0))
    p2 = -F.max_pool2d(-img, (1, 3), (1, 1), (0, 1))
    return torch.min(p1, p2)


def soft_dilate(img):
    return F.max_pool2d(img, (3, 3), (1, 1), (1, 1))


def soft_open(img):
    return soft_dilate(soft_erode(img))


def soft_skel(img, iter_):
    skel = F.relu(img - soft_open(img))
    for _ in range(iter_):
        img = soft_erode(img)
        delta = F.relu(img - soft_open(img))
        skel = skel + F.relu(delta - skel * delta)
    return skel


class soft_cldice(nn.Module):
    def __init__(self, iter_=3, smooth=1.0):
        super().__init__()
        self.iter, self.smooth = iter_, smooth

    def forward(self, y_true, y_pred):
        skel_pred, skel_true = soft_skel(y_pred, self.iter), soft_skel(y_true, self.iter)
        tprec = ((skel_pred * y_true).sum() + self.smooth) / (skel_pred.sum() + self.smooth)
        tsens = ((skel_true * y_pred).sum() + self.smooth) / (skel_true.sum() + self.smooth)
        return 1.0 - 2.0 * (tprec * tsens) / (tprec + tsens)


@expected("unrolled_sequence", fix="shorter|sequence|detach|truncat", thread="jocpae/clDice#13", memory=1000, held_back=True)
def train_road_segmentation(fixed=False):
    """`soft_skel` on the prediction runs 40 rounds of erosion and opening at the full 512 x 1024, and each round's maps (pooling inputs and
    indices) are kept for the backward pass, so the loss needs memory per round. Cured by: Fewer iterations of the skeletonization, as the
    roads are thin.
    """
    net = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.ReLU(), nn.Conv2d(8, 1, 1)).cuda()
    criterion = soft_cldice(iter_=8 if fixed else 40)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for _ in range(3):
        image, label = torch.rand(1, 3, 512, 1024).cuda(), torch.randint(0, 2, (1, 1, 512, 1024)).float().cuda()
        y_pred = net(image).sigmoid()
        loss = F.binary_cross_entropy(y_pred, label) + criterion(label, y_pred)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Skeletons of objects in photos of different sizes, whose gradients are averaged over some photos.


class SkeletonNetwork(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.stages = nn.ModuleList(
            (nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, 2 * width, 3, 1, 1), nn.Conv2d(2 * width, 4 * width, 3, 1, 1))
        )
        self.sides = nn.ModuleList(nn.Conv2d(width << i, 1, 1) for i in range(3))
        self.fuse = nn.Conv2d(3, 1, 1)

    def forward(self, data, target):
        outputs, x = [], data
        for i, (stage, side) in enumerate(zip(self.stages, self.sides)):
            x = F.relu(stage(F.max_pool2d(x, 2) if i else x))
            outputs.append(F.interpolate(side(x), data.shape[-2:], mode="bilinear", align_corners=False))
        fuse_loss = F.binary_cross_entropy_with_logits(self.fuse(torch.cat(outputs, 1)), target).view(1)
        return fuse_loss + sum(F.binary_cross_entropy_with_logits(output, target) for output in outputs), fuse_loss


class Trainer:
    def __init__(self, network, optimizer, dataloader, iter_size, max_step):
        self.network, self.optimizer, self.dataloader = network, optimizer, dataloader
        self.iter_size, self.max_step = iter_size, max_step

    def next_pair(self):
        data, target = next(self.dataloader)
        return data.cuda(), target.cuda()

    def train(self, fixed):
        lossAcc = lossFuse = 0.0
        self.network.eval()
        for step in range(self.max_step):
            self.optimizer.zero_grad()
            losses = []
            for _ in range(self.iter_size):
                loss, fuse_loss = self.network(*self.next_pair())
                lossAcc += loss.item()
                lossFuse += fuse_loss.item()
                if fixed:
                    (loss / self.iter_size).backward()
                else:
                    losses.append(loss)
            if not fixed:
                bLoss = torch.mean(torch.cat(losses))
                bLoss.backward()
            self.optimizer.step()
        return lossAcc / (self.max_step * self.iter_size), lossFuse / (self.max_step * self.iter_size)


def sk_pairs():
    for i in range(1000):
        size = 200 + 24 * (i * 7 % 8), 240 + 32 * (i * 3 % 5)
        yield torch.rand(1, 3, *size), torch.randint(0, 2, (1, 1, *size)).float()


@expected("several_forward_passes", fix=r"backward\(\)", thread="sunsmarterjie/SDL-Skeleton#7", memory=1000, held_back=True)
def train_adalsn(fixed=False):
    """`Trainer.train` collects the losses of `iter_size` = 50 photos in `losses` and calls backward once on their mean, so the graphs and
    activations of all the photos are alive at the same time. Cured by: `loss.backward()` after each photo, with the loss divided by
    `iter_size`; a step after `iter_size` of them.
    """
    network = SkeletonNetwork().cuda()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-6)
    loss, fuse_loss = Trainer(network, optimizer, sk_pairs(), iter_size=50, max_step=2).train(fixed)


# A check of the data of a vision model: its performance on segments of the images by brightness or size.


class CarPlateClassifier(nn.Module):
    def __init__(self, num_classes=10):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()
        )
        self.classifier = nn.Linear(32, num_classes)

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


class Batch:
    def __init__(self, model, images, labels, fixed):
        self.images, self.labels = images.cuda(), labels.cuda()
        self._model, self._fixed, self._predictions = model, fixed, None

    @property
    def predictions(self):
        if self._predictions is None:
            self._predictions = self._model(self.images).softmax(-1)
            if self._fixed:
                self._predictions = self._predictions.detach()
        return self._predictions


class ImageSegmentPerformance:
    def __init__(self, number_of_samples_to_infer_bins=1000, number_of_bins=5):
        self.number_of_samples_to_infer_bins, self.number_of_bins = number_of_samples_to_infer_bins, number_of_bins
        self._samples_for_binning, self._bins = [], None

    def update(self, batch):
        brightness = batch.images.mean((1, 2, 3)).tolist()
        samples = list(zip(brightness, batch.labels, batch.predictions))
        if self._bins is None:
            self._samples_for_binning.extend(samples)
            if len(self._samples_for_binning) >= self.number_of_samples_to_infer_bins:
                self.divide_to_bins()
        else:
            self.add_to_bins(samples)

    def divide_to_bins(self):
        self._bins = [[] for _ in range(self.number_of_bins)]
        self.add_to_bins(self._samples_for_binning)
        self._samples_for_binning = []

    def add_to_bins(self, samples):
        for n, (_, label, prediction) in enumerate(samples):
            self._bins[n % self.number_of_bins].append((label.item(), prediction.argmax().item()))

    def compute(self):
        return [len(b) for b in self._bins]


@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="deepchecks/deepchecks#1341", memory=1000, held_back=True)
def run_segment_check(fixed=False):
    """`ImageSegmentPerformance` keeps the predictions of up to 1000 samples in `_samples_for_binning`, and these still hang on their
    graphs, since the model ran with gradients; so the activations of every batch stay. Cured by: Detaching the predictions that are kept.
    """
    model, check = CarPlateClassifier().cuda().eval(), ImageSegmentPerformance()
    for _ in range(56):
        check.update(Batch(model, torch.rand(20, 3, 224, 224), torch.randint(0, 10, (20,)), fixed))
    return {"bins": check.compute()}
