"""Programs after merged pull requests of open-source libraries that lower GPU memory."""
import math
import os
import tempfile

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


# Pretraining of a small Llama on packed text.

class RMSNorm(nn.Module):
    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class TransformerBlock(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm, self.ffn_norm = RMSNorm(dim), RMSNorm(dim)
        self.wqkv, self.wo = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.w1, self.w3 = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, 3 * dim, bias=False)
        self.w2 = nn.Linear(3 * dim, dim, bias=False)

    def forward(self, x):
        bs, seqlen, dim = x.shape
        q, k, v = self.wqkv(self.attention_norm(x)).view(bs, seqlen, 3, self.n_heads, -1).permute(2, 0, 3, 1, 4)
        attn = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        h = x + self.wo(attn.transpose(1, 2).reshape(bs, seqlen, dim))
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


class Transformer(nn.Module):
    def __init__(self, vocab_size, dim, n_layers, n_heads):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(TransformerBlock(dim, n_heads) for _ in range(n_layers))
        self.norm = RMSNorm(dim)
        self.output = nn.Linear(dim, vocab_size, bias=False)

    def hidden(self, tokens):
        h = self.tok_embeddings(tokens)
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)

    def forward(self, tokens):
        return self.output(self.hidden(tokens))


def cross_entropy_loss(pred, labels):
    return F.cross_entropy(pred.flatten(0, 1).float(), labels.flatten(0, 1))


def chunked_cross_entropy_loss(pred, labels, num_chunks=8):
    total = pred.new_zeros((), dtype=torch.float32)
    for pred_chunk, labels_chunk in zip(pred.chunk(num_chunks, dim=1), labels.chunk(num_chunks, dim=1)):
        total = total + F.cross_entropy(pred_chunk.flatten(0, 1).float(), labels_chunk.flatten(0, 1), reduction="sum")
    return total / labels.numel()


class HuggingFaceDataset(Dataset):
    def __init__(self, vocab_size, seq_len, samples):
        self.tokens, self.seq_len = torch.randint(vocab_size, (samples, seq_len + 1)), seq_len

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, index):
        return self.tokens[index, :-1], self.tokens[index, 1:]


@expected("logits", fix="chunk", thread="pytorch/torchtitan#996", memory=1650, held_back=True)
def pretrain_llama(fixed=False):
    """The peak is made by the loss: `cross_entropy_loss` takes the bf16 logits `pred` of all tokens at once, casts them to float32 and runs
    the log-softmax on them, so that several float32 tensors of batch x sequence x vocabulary (the cast, the log-softmax and, in the
    backward pass, their gradients) exist together. Cured by: `pred` and the labels are cut into chunks along the sequence, the cross
    entropy of each chunk is computed for itself and the sums are added.
    """
    vocab_size, seq_len = 32000, 1024
    loss_fn = chunked_cross_entropy_loss if fixed else cross_entropy_loss
    model = Transformer(vocab_size, 256, 2, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-4, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 200))
    loader = DataLoader(HuggingFaceDataset(vocab_size, seq_len, 16), batch_size=4)
    for inputs, labels in loader:
        inputs, labels = inputs.cuda(), labels.cuda()
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            pred = model(inputs)
        loss = loss_fn(pred, labels)
        del pred
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
        optimizer.step()
        scheduler.step()
    return float(loss)


# Reinforcement learning of a language model: log-probabilities of the taken tokens, chunk by chunk.

class ChunkedLogprob(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, chunk_size, preallocate):
        log_probs = []
        for start in range(0, logits.shape[1], chunk_size):
            chunk = logits[:, start:start + chunk_size].float().log_softmax(-1)
            log_probs.append(chunk.gather(-1, target[:, start:start + chunk_size, None]).squeeze(-1))
        ctx.save_for_backward(logits, target)
        ctx.chunk_size, ctx.preallocate = chunk_size, preallocate
        return torch.cat(log_probs, dim=1)

    @staticmethod
    def chunk_gradient(logits, target, grad_output):
        softmax = logits.float().softmax(-1)
        grad_input = softmax.neg_().mul_(grad_output.unsqueeze(-1))
        return grad_input.scatter_add_(-1, target.unsqueeze(-1), grad_output.unsqueeze(-1))

    @staticmethod
    def backward(ctx, grad_output):
        logits, target = ctx.saved_tensors
        if ctx.preallocate:
            grad_input = torch.empty_like(logits, dtype=torch.float32)
        all_grad_input = []
        for start in range(0, logits.shape[1], ctx.chunk_size):
            part = slice(start, start + ctx.chunk_size)
            grad_chunk = ChunkedLogprob.chunk_gradient(logits[:, part], target[:, part], grad_output[:, part])
            if ctx.preallocate:
                grad_input[:, part].copy_(grad_chunk)
            else:
                all_grad_input.append(grad_chunk)
        if not ctx.preallocate:
            grad_input = torch.cat(all_grad_input, dim=1)
        return grad_input, None, None, None


class ClippedPGLossFn:
    def __init__(self, ratio_clip_min=0.2, ratio_clip_max=0.2, chunk_size=32, preallocate=False):
        self.ratio_clip_min, self.ratio_clip_max = ratio_clip_min, ratio_clip_max
        self.chunk_size, self.preallocate = chunk_size, preallocate

    def __call__(self, next_token_logits, data):
        next_token_logits = next_token_logits.to(torch.float32)
        next_tokens = data["input_ids"].roll(-1, dims=1)
        logprobs = ChunkedLogprob.apply(next_token_logits, next_tokens, self.chunk_size, self.preallocate)[:, :-1]
        mask = data["token_mask"][:, 1:]
        ratios = (logprobs - data["prev_logprobs"][:, 1:]).exp()
        clipped = ratios.clamp(1 - self.ratio_clip_min, 1 + self.ratio_clip_max)
        advantages = data["advantages"][:, None]
        loss = torch.max(-advantages * ratios, -advantages * clipped)
        return (loss * mask).sum() / mask.sum().clamp(min=1)


@expected("joined_results", fix=r"torch\.empty", thread="NVIDIA-NeMo/RL#1895", memory=1330, held_back=True)
def train_policy(fixed=False):
    """`ChunkedLogprob.backward` puts the float32 gradient of every chunk in the list `all_grad_input` and joins them by `torch.cat` at the
    end, so that two whole copies of the gradient of the logits exist at the peak, next to the saved logits. Cured by: One gradient tensor
    is allocated ahead and the gradient of each chunk is copied into it in place.
    """
    vocab_size, seq_len, micro_batch = 48000, 1024, 2
    policy = Transformer(vocab_size, 64, 2, 4).cuda()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-6)
    loss_fn = ClippedPGLossFn(preallocate=fixed)
    for step in range(2):
        rollout = {"input_ids": torch.randint(vocab_size, (4, seq_len)), "advantages": torch.randn(4),
                   "prev_logprobs": torch.randn(4, seq_len), "token_mask": torch.ones(4, seq_len)}
        rollout["token_mask"][:, :128] = 0
        for begin in range(0, 4, micro_batch):
            data = {key: value[begin:begin + micro_batch].cuda() for key, value in rollout.items()}
            with torch.autocast("cuda", torch.bfloat16):
                loss = loss_fn(policy(data["input_ids"]), data)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss)


# Facial animation from speech for several kinds of face meshes.

class UniTalker(nn.Module):
    def __init__(self, dataset_config, num_styles=32, hidden=128):
        super().__init__()
        self.feature_extractor = nn.Sequential(
            nn.Conv1d(1, 64, 10, 5), nn.GELU(), nn.Conv1d(64, 64, 8, 4), nn.GELU(),
            nn.Conv1d(64, hidden, 8, 4), nn.GELU(), nn.Conv1d(hidden, hidden, 4, 4), nn.GELU())
        self.style = nn.Embedding(num_styles, hidden)
        self.decoder = nn.GRU(hidden, hidden, batch_first=True)
        self.out_heads = nn.ModuleDict({name: nn.Linear(hidden, 3 * verts) for name, verts in dataset_config.items()})

    def forward(self, audio, template, style_idx, annot_type, fps):
        frames = int(audio.shape[1] / 16000 * fps)
        x = self.feature_extractor(audio.unsqueeze(1))
        x = F.interpolate(x, size=frames, mode="linear").transpose(1, 2)
        x, _ = self.decoder(x + self.style(style_idx)[:, None])
        return self.out_heads[annot_type](x) + template


def split_audio(audio, seconds=10, sample_rate=16000):
    return [audio[i:i + seconds * sample_rate] for i in range(0, len(audio), seconds * sample_rate)]


def save_npz(path, out_dict):
    arrays = {}
    for wav_f, outs in out_dict.items():
        for name, out in outs.items():
            arrays[f"{wav_f}/{name}"] = out[:, :4].cpu().numpy()
    np.savez(path, **arrays)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="X-niper/UniTalker#7", memory=600, held_back=True)
def animate_faces_again(fixed=False):
    """The predicted vertices of every audio file are put into `out_dict` as GPU tensors and stay there until all are saved at the end, so
    GPU memory grows with the number of files. Cured by: `out_dict[wav_f][dataset_name] = out.cpu()`.
    """
    dataset_config = {"BIWI": 23370, "vocaset": 5023}
    model = UniTalker(dataset_config).cuda().eval()
    templates = {name: torch.rand(3 * verts).cuda() for name, verts in dataset_config.items()}
    wavs = {f"speech_{i:02d}.wav": np.random.randn(16000 * 12).astype(np.float32) for i in range(16)}
    out_dict = {}
    with torch.no_grad():
        for wav_f, wav in wavs.items():
            out_dict[wav_f] = {}
            for dataset_name in dataset_config:
                fps = 25 if dataset_name == "BIWI" else 30
                condition_id = torch.zeros(1, dtype=torch.long, device="cuda")
                out_list = []
                for audio_data in split_audio(wav):
                    audio_data = torch.from_numpy(audio_data[None]).cuda()
                    out_list.append(model(audio_data, templates[dataset_name], condition_id, dataset_name, fps)[0])
                out = torch.cat(out_list)
                out_dict[wav_f][dataset_name] = out.cpu() if fixed else out
    with tempfile.TemporaryDirectory() as folder:
        save_npz(os.path.join(folder, "result.npz"), out_dict)
    return len(out_dict)


# Fine-tuning with a long context: layers of linear attention between layers of full attention.

class GatedDeltaNet(nn.Module):
    def __init__(self, dim, reduce_as_bool):
        super().__init__()
        self.in_proj, self.gate, self.out_proj = nn.Linear(dim, 2 * dim), nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.conv1d = nn.Conv1d(dim, dim, 4, groups=dim, padding=3)
        self.reduce_as_bool = reduce_as_bool

    def padding_mask(self, attention_mask):
        if self.reduce_as_bool:
            return ~attention_mask.all(dim=(1, 2))
        return (~attention_mask).sum(dim=(1, 2)) > 0

    def forward(self, hidden_states, attention_mask):
        hidden_states = hidden_states * self.padding_mask(attention_mask).unsqueeze(-1)
        key, value = self.in_proj(hidden_states).chunk(2, dim=-1)
        key = F.silu(self.conv1d(key.transpose(1, 2))[..., :key.shape[1]]).transpose(1, 2)
        state = torch.cumsum(key * value, dim=1) / key.shape[1]
        return self.out_proj(state * torch.sigmoid(self.gate(hidden_states)))


class FullAttention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.qkv, self.proj = heads, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, hidden_states, attention_mask):
        b, s, d = hidden_states.shape
        q, k, v = self.qkv(hidden_states).view(b, s, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=~attention_mask)
        return self.proj(out.transpose(1, 2).reshape(b, s, d))


class GPTModel(nn.Module):
    def __init__(self, vocab, dim, reduce_as_bool):
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([GatedDeltaNet(dim, reduce_as_bool), GatedDeltaNet(dim, reduce_as_bool),
                                     GatedDeltaNet(dim, reduce_as_bool), FullAttention(dim, 2)])
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in self.layers)
        self.output_layer = nn.Linear(dim, vocab, bias=False)

    def forward(self, input_ids, attention_mask, labels):
        hidden_states = self.embedding(input_ids)
        for norm, layer in zip(self.norms, self.layers):
            hidden_states = hidden_states + layer(norm(hidden_states), attention_mask)
        return F.cross_entropy(self.output_layer(hidden_states).flatten(0, 1).float(), labels.flatten())


def get_batch(length, seq_length, vocab):
    input_ids = torch.randint(vocab, (1, seq_length), device="cuda")
    attention_mask = torch.ones(seq_length, seq_length, dtype=torch.bool, device="cuda").triu_(1)[None, None]
    attention_mask[..., length:] = True
    attention_mask[..., length:, :] = True
    return input_ids, attention_mask, input_ids.roll(-1, 1)


@expected("large_cast", fix=r"\.all\(", thread="modelscope/mcore-bridge#167", memory=600, held_back=True)
def finetune_long_context(fixed=False):
    """`.sum()` on the boolean 4D `attention_mask` (to find the padded positions) promotes it to int64: a temporary tensor of eight times
    the size of the mask, quadratic in the sequence length. Cured by: The equivalent `Tensor.all()`, which reduces booleans as they are.
    """
    seq_length, vocab = 8192, 1024
    model = GPTModel(vocab, 64, reduce_as_bool=fixed).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    for length in (8000, 7200, 8192):
        input_ids, attention_mask, labels = get_batch(length, seq_length, vocab)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids, attention_mask, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


# A classification head on a frozen backbone that is initialized from a checkpoint of earlier training.

class Bottleneck(nn.Module):
    def __init__(self, inplanes, planes, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inplanes, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride=stride, padding=1, bias=False)
        self.bn2, self.conv3 = nn.BatchNorm2d(planes), nn.Conv2d(planes, 4 * planes, 1, bias=False)
        self.downsample = nn.Conv2d(inplanes, 4 * planes, 1, stride=stride, bias=False)

    def forward(self, x):
        out = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.conv3(F.relu(self.bn2(self.conv2(out)))) + self.downsample(x))


class ResNet(nn.Module):
    def __init__(self, init_cfg=None, blocks=(2, 2, 4, 4)):
        super().__init__()
        self.init_cfg = init_cfg
        self.stem, inplanes, layers = nn.Conv2d(3, 64, 7, 4, 3), 64, []
        for stage, depth in enumerate(blocks):
            for i in range(depth):
                layers.append(Bottleneck(inplanes, 64 << stage, 2 if i == 0 and stage else 1))
                inplanes = 4 * (64 << stage)
        self.layers = nn.Sequential(*layers)

    def init_weights(self):
        PretrainedInit(self.init_cfg["checkpoint"], self.init_cfg["map_location"])(self)

    def forward(self, x):
        return self.layers(self.stem(x)).mean((2, 3))


class PretrainedInit:
    def __init__(self, checkpoint, map_location):
        self.checkpoint, self.map_location = checkpoint, map_location

    def __call__(self, module):
        checkpoint = torch.load(self.checkpoint, map_location=self.map_location)
        module.load_state_dict(checkpoint["state_dict"])


class ImageClassifier(nn.Module):
    def __init__(self, backbone, num_classes):
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(2048, num_classes)
        for param in self.backbone.parameters():
            param.requires_grad = False

    def forward(self, inputs, labels):
        return F.cross_entropy(self.head(self.backbone(inputs)), labels)


def write_earlier_run(path):
    backbone = ResNet()
    exp_avg = {name: torch.zeros_like(p) for name, p in backbone.named_parameters()}
    exp_avg_sq = {name: torch.zeros_like(p) for name, p in backbone.named_parameters()}
    torch.save({"meta": {"epoch": 300, "iter": 375300}, "state_dict": backbone.state_dict(),
                "optimizer": {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}}, path)


@expected("loaded_onto_gpu", fix="map_location", thread="open-mmlab/mmengine#665", memory=480, held_back=True)
def finetune_head(fixed=False):
    """`PretrainedInit` loads the whole checkpoint to `cuda:0` (`map_location`) and then copies its parameters into the model, which lies on
    the GPU already, so that the checkpoint's tensors come on top of the model's. Cured by: The checkpoint is loaded to the CPU by default.
    """
    with tempfile.TemporaryDirectory() as work_dir:
        path = os.path.join(work_dir, "epoch_300.pth")
        write_earlier_run(path)
        backbone = ResNet(init_cfg=dict(type="Pretrained", checkpoint=path, map_location="cpu" if fixed else "cuda:0"))
        model = ImageClassifier(backbone, 20).cuda()
        model.backbone.init_weights()
    model.backbone.eval()
    optim_wrapper = torch.optim.SGD(model.head.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        inputs, labels = torch.rand(16, 3, 128, 128).cuda(), torch.randint(20, (16,)).cuda()
        loss = model(inputs, labels)
        optim_wrapper.zero_grad()
        loss.backward()
        optim_wrapper.step()
    return float(loss)


# Policy optimization with long prompts and short completions.

class CausalLM(nn.Module):
    def __init__(self, vocab_size, dim, layers, heads):
        super().__init__()
        self.model = Transformer(vocab_size, dim, layers, heads)
        self.lm_head = self.model.output

    def forward(self, input_ids):
        return self.lm_head(self.model.hidden(input_ids))


def forward_masked_logits(model, input_ids, positions):
    hidden_states = model.model.hidden(input_ids).flatten(0, 1)
    return model.lm_head(hidden_states[positions])


def selective_log_softmax(logits, index):
    if logits.dtype in (torch.float32, torch.float64):
        selected_logits = torch.gather(logits, dim=-1, index=index.unsqueeze(-1)).squeeze(-1)
        logsumexp_values = torch.stack([torch.logsumexp(lg, dim=-1) for lg in logits])
        return selected_logits - logsumexp_values
    per_token_logps = []
    for row_logits, row_labels in zip(logits, index):
        row_logps = F.log_softmax(row_logits, dim=-1)
        per_token_logps.append(row_logps.gather(dim=-1, index=row_labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(per_token_logps)


class GRPOBatch:
    def __init__(self, num_generations, prompt_length, completion_length, vocab_size):
        self.prompt_ids = torch.randint(vocab_size, (num_generations, prompt_length))
        self.completion_ids = torch.randint(vocab_size, (num_generations, completion_length))
        lengths = torch.randint(completion_length // 2, completion_length, (num_generations,))
        self.completion_mask = torch.arange(completion_length) < lengths[:, None]
        rewards = torch.rand(num_generations)
        self.advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)

    def inputs(self):
        input_ids = torch.cat([self.prompt_ids, self.completion_ids], dim=1)
        mask = torch.cat([torch.zeros_like(self.prompt_ids, dtype=torch.bool), self.completion_mask], dim=1)
        return input_ids[:, :-1], input_ids[:, 1:], mask[:, 1:]


@expected("logits", fix="logits_to_keep|fused", thread="huggingface/trl#4729", memory=1350, held_back=True)
def train_grpo_step(fixed=False):
    """The model computes logits (lm_head) for every position of the sequence, though only those of the completion are used; those of the
    prompt are masked afterwards. Cured by: `forward_masked_logits`: the lm_head is run only on the hidden states that `completion_mask`
    selects.
    """
    torch.manual_seed(0)
    vocab_size = 50000
    model = CausalLM(vocab_size, 128, 2, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for _ in range(2):
        batch = GRPOBatch(8, 384, 128, vocab_size)
        input_ids, labels, mask = batch.inputs()
        input_ids = input_ids.cuda()
        with torch.autocast("cuda", torch.bfloat16):
            if fixed:
                positions = mask.flatten().nonzero().squeeze(1)
                logits = forward_masked_logits(model, input_ids, positions.cuda())
                logps = selective_log_softmax(logits[None], labels.flatten()[positions].cuda()[None])[0]
                weights = batch.advantages[positions // mask.shape[1]].cuda()
                loss = -((logps - logps.detach()).exp() * weights).mean()
            else:
                logits = model(input_ids)
                logps = selective_log_softmax(logits, labels.cuda())
                per_token_loss = -(logps - logps.detach()).exp() * batch.advantages[:, None].cuda()
                mask = mask.cuda()
                loss = (per_token_loss * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


# The latents of a data set of large images are computed ahead of the training of a diffusion model.

class ResnetBlock2D(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(16, in_channels), nn.Conv2d(in_channels, out_channels, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(16, out_channels), nn.Conv2d(out_channels, out_channels, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(in_channels, out_channels, 1) if in_channels != out_channels else nn.Identity()

    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = self.conv1(F.silu(self.norm1(hidden_states)))
        hidden_states = self.conv2(F.silu(self.norm2(hidden_states)))
        return self.conv_shortcut(residual) + hidden_states


class AutoencoderKL(nn.Module):
    def __init__(self, slicing_first, block_out_channels=(32, 64, 128), latent_channels=4, tile_sample_min_size=512):
        super().__init__()
        self.slicing_first = slicing_first
        self.use_slicing = self.use_tiling = False
        self.tile_sample_min_size, self.tile_overlap_factor = tile_sample_min_size, 0.25
        layers, channels = [nn.Conv2d(3, block_out_channels[0], 3, padding=1)], block_out_channels[0]
        for width in block_out_channels:
            layers += [ResnetBlock2D(channels, width), nn.Conv2d(width, width, 3, stride=2, padding=1)]
            channels = width
        self.encoder = nn.Sequential(*layers, nn.GroupNorm(16, channels), nn.SiLU(), nn.Conv2d(channels, 2 * latent_channels, 3, padding=1))

    def enable_slicing(self):
        self.use_slicing = True

    def enable_tiling(self):
        self.use_tiling = True

    def too_large(self, x):
        return x.shape[-1] > self.tile_sample_min_size or x.shape[-2] > self.tile_sample_min_size

    def tiled_encode(self, x):
        size = self.tile_sample_min_size
        stride = int(size * (1 - self.tile_overlap_factor))
        keep = stride // 8
        rows = []
        for i in range(0, x.shape[2], stride):
            row = [self.encoder(x[:, :, i:i + size, j:j + size])[:, :, :keep, :keep] for j in range(0, x.shape[3], stride)]
            rows.append(torch.cat(row, dim=3))
        return torch.cat(rows, dim=2)

    def _encode(self, x):
        if self.use_tiling and self.too_large(x):
            return self.tiled_encode(x)
        return self.encoder(x)

    def encode(self, x):
        if not self.slicing_first and self.use_tiling and self.too_large(x):
            return self.tiled_encode(x)
        if self.use_slicing and x.shape[0] > 1:
            return torch.cat([self._encode(x_slice) for x_slice in x.split(1)])
        return self._encode(x)


@expected("batch_without_gradients", fix="split", thread="huggingface/diffusers#9342", memory=700, held_back=True)
@torch.no_grad()
def encode_dataset(fixed=False):
    """`AutoencoderKL.encode` looks at `use_tiling` first and hands the whole batch to `tiled_encode`, so that `use_slicing` has no effect
    when both are on and every tile is encoded for all images of the batch at once. Cured by: Slicing comes first: the batch is split into
    single images, and each is encoded with tiling.
    """
    vae = AutoencoderKL(slicing_first=fixed).to("cuda", torch.float16).eval()
    vae.enable_slicing()
    vae.enable_tiling()
    latents = []
    for _ in range(2):
        pixel_values = torch.rand(12, 3, 1024, 1024).to("cuda", torch.float16)
        moments = vae.encode(pixel_values * 2 - 1)
        mean, logvar = moments.chunk(2, dim=1)
        sample = mean + (0.5 * logvar.clamp(-30, 20)).exp() * torch.randn_like(mean)
        latents.append((sample * 0.18215).cpu())
    return torch.cat(latents).shape


# Weights are rounded block by block after the inputs of each decoder layer were captured.

class DecoderLayer(nn.Module):
    def __init__(self, hidden_size):
        super().__init__()
        self.input_layernorm = RMSNorm(hidden_size)
        self.gate_proj, self.up_proj = nn.Linear(hidden_size, hidden_size, bias=False), nn.Linear(hidden_size, hidden_size, bias=False)
        self.down_proj = nn.Linear(hidden_size, hidden_size, bias=False)

    def forward(self, hidden_states, position_bias=None):
        x = self.input_layernorm(hidden_states)
        return hidden_states + position_bias + self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AutoRoundModifier:
    def __init__(self, iters, batch_size, offload):
        self.iters, self.batch_size, self.offload = iters, batch_size, offload
        self._all_module_input = {}

    def input_capture_hook(self, module, args, kwargs):
        if self.offload:
            args = tuple(arg.to("cpu") for arg in args)
            kwargs = {key: value.to("cpu") for key, value in kwargs.items()}
        self._all_module_input.setdefault(module._tmp_name, []).append((args, kwargs))

    def start_calibration(self, name, module):
        module._tmp_name = name
        return module.register_forward_pre_hook(self.input_capture_hook, with_kwargs=True)

    def block_forward(self, block, inputs):
        args, kwargs = inputs
        return block(*[arg.to("cuda") for arg in args], **{key: value.to("cuda") for key, value in kwargs.items()})

    def apply_autoround(self, name, block):
        cur_inputs = self._all_module_input.pop(name)
        with torch.no_grad():
            fp_outputs = []
            for inputs in cur_inputs:
                output = self.block_forward(block, inputs)
                fp_outputs.append(output.cpu() if self.offload else output)
        rounding = {n: nn.Parameter(torch.zeros_like(p)) for n, p in block.named_parameters() if "proj" in n}
        optimizer = torch.optim.SGD(rounding.values(), lr=5e-3)
        for _ in range(self.iters):
            optimizer.zero_grad()
            for index in np.random.choice(len(cur_inputs), self.batch_size, replace=False):
                args, kwargs = cur_inputs[index]
                quantized = {n: p.detach() + rounding[n].clamp(-0.5, 0.5) for n, p in block.named_parameters() if n in rounding}
                output = torch.func.functional_call(block, quantized, tuple(a.cuda() for a in args), {k: v.cuda() for k, v in kwargs.items()})
                F.mse_loss(output.float(), fp_outputs[index].cuda().float()).backward()
            optimizer.step()


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="vllm-project/llm-compressor#3055", memory=700, held_back=True)
def quantize_model(fixed=False):
    """`input_capture_hook` appends the inputs of the decoder layer to `_all_module_input` as they are, on the GPU, for every calibration
    sample, and they stay there for the whole calibration pass (and the block's reference outputs after them). Cured by: The hook moves the
    inputs to the CPU at once; the optimization takes them to the GPU batch by batch, and the reference outputs are kept on the CPU
    (`low_gpu_mem_usage=True`).
    """
    hidden_size, seq_length, num_calibration_samples = 1024, 2048, 160
    embed_tokens = nn.Embedding(4000, hidden_size).to(torch.bfloat16)
    layers = [DecoderLayer(hidden_size).to(torch.bfloat16).requires_grad_(False) for _ in range(2)]
    position_bias = torch.randn(hidden_size, dtype=torch.bfloat16).cuda()
    cache = embed_tokens(torch.randint(4000, (num_calibration_samples, 1, seq_length))).detach()
    modifier = AutoRoundModifier(iters=3, batch_size=4, offload=fixed)
    for number, layer in enumerate(layers):
        layer.cuda()
        handle = modifier.start_calibration(f"layers.{number}", layer)
        with torch.no_grad():
            for sample in range(num_calibration_samples):
                cache[sample] = layer(cache[sample].cuda(), position_bias=position_bias).cpu()
        handle.remove()
        modifier.apply_autoround(f"layers.{number}", layer)
        layer.cpu()
    return len(layers)


# Text-to-image sampling without fused attention.

class Attention(nn.Module):
    def __init__(self, query_dim, heads, cross_dim=None, release=False):
        super().__init__()
        self.heads, self.scale, self.release = heads, (query_dim // heads) ** -0.5, release
        self.to_q = nn.Linear(query_dim, query_dim, bias=False)
        self.to_k = nn.Linear(cross_dim or query_dim, query_dim, bias=False)
        self.to_v = nn.Linear(cross_dim or query_dim, query_dim, bias=False)
        self.to_out = nn.Linear(query_dim, query_dim)

    def head_to_batch_dim(self, tensor):
        batch_size, seq_len, dim = tensor.shape
        tensor = tensor.reshape(batch_size, seq_len, self.heads, dim // self.heads)
        return tensor.permute(0, 2, 1, 3).reshape(batch_size * self.heads, seq_len, dim // self.heads)

    def get_attention_scores(self, query, key):
        baddbmm_input = torch.empty(query.shape[0], query.shape[1], key.shape[1], dtype=query.dtype, device=query.device)
        attention_scores = torch.baddbmm(baddbmm_input, query, key.transpose(-1, -2), beta=0, alpha=self.scale)
        if self.release:
            del baddbmm_input
        attention_probs = attention_scores.softmax(dim=-1)
        if self.release:
            del attention_scores
        return attention_probs.to(query.dtype)

    def forward(self, hidden_states, encoder_hidden_states=None):
        context = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        query, key, value = (self.head_to_batch_dim(t) for t in (self.to_q(hidden_states), self.to_k(context), self.to_v(context)))
        attention_probs = self.get_attention_scores(query, key)
        hidden = torch.bmm(attention_probs, value)
        batch_size = hidden.shape[0] // self.heads
        hidden = hidden.reshape(batch_size, self.heads, hidden.shape[1], -1).transpose(1, 2).flatten(2)
        return self.to_out(hidden)


class BasicTransformerBlock(nn.Module):
    def __init__(self, dim, heads, cross_dim, release):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(dim), nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn1, self.attn2 = Attention(dim, heads, release=release), Attention(dim, heads, cross_dim, release)
        self.ff = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, hidden_states, encoder_hidden_states):
        hidden_states = hidden_states + self.attn1(self.norm1(hidden_states))
        hidden_states = hidden_states + self.attn2(self.norm2(hidden_states), encoder_hidden_states)
        return hidden_states + self.ff(self.norm3(hidden_states))


class UNet2DConditionModel(nn.Module):
    def __init__(self, release, dim=160, heads=5, cross_dim=768):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, dim, 3, padding=1), nn.Conv2d(dim, 4, 3, padding=1)
        self.blocks = nn.ModuleList(BasicTransformerBlock(dim, heads, cross_dim, release) for _ in range(2))

    def forward(self, sample, timestep, encoder_hidden_states):
        x = self.conv_in(sample)
        height, width = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x, encoder_hidden_states)
        return self.conv_out(x.transpose(1, 2).unflatten(2, (height, width)))


@expected("attention_scores", fix=r"\bdel\b", thread="huggingface/diffusers#3463", memory=920, held_back=True)
@torch.no_grad()
def generate_image(fixed=False):
    """In `get_attention_scores` the names `baddbmm_input` and `attention_scores` keep their tensors (batch*heads x tokens x tokens) until
    the function ends, although they are needed no more, so that `attention_probs` is allocated as a third tensor of that size. Cured by:
    `del baddbmm_input` after the product and `del attention_scores` after the softmax.
    """
    unet = UNet2DConditionModel(release=fixed).to("cuda", torch.float16).eval()
    prompt_embeds = torch.randn(2, 77, 768).to("cuda", torch.float16)
    latents = torch.randn(1, 4, 64, 64).to("cuda", torch.float16)
    alphas_cumprod = torch.cumprod(1 - torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000) ** 2, 0)
    for t in range(980, 0, -140):
        noise_pred = unet(torch.cat([latents] * 2), t, prompt_embeds)
        uncond, text = noise_pred.chunk(2)
        noise_pred = uncond + 7.5 * (text - uncond)
        alpha, prev = float(alphas_cumprod[t]), float(alphas_cumprod[max(t - 140, 0)])
        x0 = (latents - (1 - alpha) ** 0.5 * noise_pred) / alpha ** 0.5
        latents = prev ** 0.5 * x0 + (1 - prev) ** 0.5 * noise_pred
    return latents.shape


# Directions of refusal: the difference of the mean residuals of two sets of prompts.

class Settings:
    batch_size = 128
    max_length = 32

    def __init__(self, offload_outputs_to_cpu):
        self.offload_outputs_to_cpu = offload_outputs_to_cpu


class Model:
    def __init__(self, settings):
        from transformers import LlamaConfig, LlamaModel
        self.settings = settings
        config = LlamaConfig(vocab_size=8000, hidden_size=512, intermediate_size=1024, num_hidden_layers=24,
                             num_attention_heads=8, num_key_value_heads=2)
        self.model = LlamaModel(config).to("cuda", torch.bfloat16).eval()

    @torch.no_grad()
    def get_residuals(self, prompts):
        outputs = self.model(input_ids=prompts.cuda(), output_hidden_states=True, use_cache=False)
        residuals = torch.stack([hidden[:, -1, :] for hidden in outputs.hidden_states], dim=1).to(torch.float32)
        if self.settings.offload_outputs_to_cpu:
            residuals = residuals.cpu()
        return residuals

    def get_residuals_batched(self, prompts):
        residuals = []
        for batch in prompts.split(self.settings.batch_size):
            residuals.append(self.get_residuals(batch))
        return torch.cat(residuals, dim=0)

    def ablate(self, refusal_directions):
        for layer, direction in zip(self.model.layers, refusal_directions[1:]):
            weight = layer.mlp.down_proj.weight.data
            direction = direction.to(weight.device, weight.dtype)
            weight.sub_(torch.outer(direction, direction @ weight))


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="p-e-w/heretic#239", memory=700, held_back=True)
def find_refusal_directions(fixed=False):
    """The residuals of all prompts (float32, all layers) stay in GPU memory: those of every batch are collected and concatenated there, and
    the good ones are still there while the bad ones are gathered. Cured by: `offload_outputs_to_cpu`: the residuals of each batch are moved
    to the CPU after they are computed.
    """
    settings = Settings(offload_outputs_to_cpu=fixed)
    model = Model(settings)
    good_prompts = torch.randint(8000, (6000, settings.max_length))
    bad_prompts = torch.randint(8000, (6000, settings.max_length))
    good_residuals = model.get_residuals_batched(good_prompts)
    bad_residuals = model.get_residuals_batched(bad_prompts)
    refusal_directions = F.normalize(bad_residuals.mean(dim=0) - good_residuals.mean(dim=0), p=2, dim=1)
    del good_residuals, bad_residuals
    model.ablate(refusal_directions)
    return refusal_directions.shape


# Constrained Bayesian optimization with trust regions: Thompson samples of an objective and several constraints.

class SingleTaskGP:
    def __init__(self, train_X, train_Y, lengthscale):
        self.train_X, self.train_Y, self.lengthscale = train_X, train_Y, lengthscale
        K = self.kernel(train_X, train_X)
        self.K_inv = torch.linalg.solve_ex(K + 1e-2 * torch.eye(len(K), dtype=K.dtype, device=K.device), torch.eye(len(K), dtype=K.dtype, device=K.device))[0]

    def kernel(self, A, B):
        return torch.cdist(A / self.lengthscale, B / self.lengthscale).square_().mul_(-0.5).exp_()

    def posterior(self, X):
        Kx = self.kernel(X, self.train_X)
        solved = Kx @ self.K_inv
        covar = self.kernel(X, X)
        covar.addmm_(solved, Kx.T, alpha=-1)
        return GPyTorchPosterior((solved @ self.train_Y).squeeze(-1), covar)


class GPyTorchPosterior:
    def __init__(self, mean, covar):
        self.mean, self.covar = mean, covar

    def rsample(self, num_samples):
        rank = 64
        sketch = self.covar @ torch.randn(self.covar.shape[0], rank, dtype=self.covar.dtype, device=self.covar.device)
        root = sketch / sketch.norm(dim=0, keepdim=True)
        return self.mean + (torch.randn(num_samples, rank, dtype=root.dtype, device=root.device) @ root.T)


class ModelListGP:
    def __init__(self, *models):
        self.models = models

    def posterior(self, X):
        return PosteriorList(*[model.posterior(X) for model in self.models])


class PosteriorList:
    def __init__(self, *posteriors):
        self.posteriors = posteriors

    def rsample(self, num_samples):
        return torch.stack([p.rsample(num_samples) for p in self.posteriors], dim=-1)


class ConstrainedMaxPosteriorSampling:
    def __init__(self, model, constraint_model, one_at_a_time):
        self.model, self.constraint_model, self.one_at_a_time = model, constraint_model, one_at_a_time

    def __call__(self, X, num_samples):
        samples = self.model.posterior(X).rsample(num_samples)
        if self.one_at_a_time:
            constraint_samples = torch.stack([m.posterior(X).rsample(num_samples) for m in self.constraint_model.models], dim=-1)
        else:
            constraint_samples = self.constraint_model.posterior(X).rsample(num_samples)
        violation = constraint_samples.clamp(min=0).sum(-1)
        score = torch.where(violation > 0, -1e6 - violation, samples)
        return score.argmax(dim=-1).cpu()


@expected("all_pairs", fix="one after the other", thread="meta-pytorch/botorch#2622", memory=600, held_back=True)
@torch.no_grad()
def suggest_candidates(fixed=False):
    """`ConstrainedMaxPosteriorSampling` takes the joint posterior of the whole `ModelListGP` of constraints at all candidates, so the
    covariance matrices (candidates x candidates) of all its models exist at the same time. Cured by: It loops over the sub-models and draws
    the samples of one after the other.
    """
    dim, n_candidates, batch_size, num_constraints = 20, 4000, 4, 8
    tkwargs = {"dtype": torch.double, "device": "cuda"}
    train_X = torch.rand(200, dim).to(**tkwargs)
    for _ in range(3):
        train_Y, train_C = torch.randn(len(train_X), 1).to(**tkwargs), torch.randn(len(train_X), num_constraints).to(**tkwargs)
        model = SingleTaskGP(train_X, train_Y, 0.8)
        constraint_model = ModelListGP(*[SingleTaskGP(train_X, train_C[:, i:i + 1], 0.5 + 0.1 * i) for i in range(num_constraints)])
        X_cand = torch.rand(n_candidates, dim).to(**tkwargs)
        sampler = ConstrainedMaxPosteriorSampling(model, constraint_model, one_at_a_time=fixed)
        chosen = sampler(X_cand, batch_size).clamp(0, n_candidates - 1)
        train_X = torch.cat([train_X, X_cand.cpu()[chosen].to(**tkwargs)])
    return train_X.shape


# A detection transformer with groups of queries on images with many objects.

def box_cxcywh_to_xyxy(x):
    cx, cy, w, h = x.unbind(-1)
    return torch.stack([cx - w / 2, cy - h / 2, cx + w / 2, cy + h / 2], dim=-1)


def box_area(boxes):
    return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])


def box_iou(boxes1, boxes2):
    lt = torch.max(boxes1[:, None, :2], boxes2[:, :2])
    rb = torch.min(boxes1[:, None, 2:], boxes2[:, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[:, :, 0] * wh[:, :, 1]
    union = box_area(boxes1)[:, None] + box_area(boxes2) - inter
    return inter / union, union


def generalized_box_iou(boxes1, boxes2):
    iou, union = box_iou(boxes1, boxes2)
    lt = torch.min(boxes1[:, None, :2], boxes2[:, :2])
    rb = torch.max(boxes1[:, None, 2:], boxes2[:, 2:])
    wh = (rb - lt).clamp(min=0)
    area = wh[:, :, 0] * wh[:, :, 1]
    return iou - (area - union) / area


def matched_box_iou(boxes1, boxes2, eps=1e-7):
    wh = (torch.min(boxes1[:, 2:], boxes2[:, 2:]) - torch.max(boxes1[:, :2], boxes2[:, :2])).clamp(min=0)
    inter = wh[:, 0] * wh[:, 1]
    union = box_area(boxes1) + box_area(boxes2) - inter
    return inter / (union + eps), union


def matched_generalized_box_iou(boxes1, boxes2, eps=1e-7):
    iou, union = matched_box_iou(boxes1, boxes2)
    wh = (torch.max(boxes1[:, 2:], boxes2[:, 2:]) - torch.min(boxes1[:, :2], boxes2[:, :2])).clamp(min=0)
    area = wh[:, 0] * wh[:, 1]
    return iou - (area - union) / (area + eps)


class LWDETR(nn.Module):
    def __init__(self, num_classes, dim=128, num_queries=300, group_detr=13, layers=3):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 64, 16, 16), nn.GELU(), nn.Conv2d(64, dim, 3, padding=1))
        self.query = nn.Embedding(num_queries * group_detr, dim)
        self.layers = nn.ModuleList(nn.MultiheadAttention(dim, 4, batch_first=True) for _ in range(layers))
        self.class_embed, self.bbox_embed = nn.Linear(dim, num_classes), nn.Linear(dim, 4)

    def forward(self, images):
        memory = self.backbone(images).flatten(2).transpose(1, 2)
        hs = self.query.weight.expand(len(images), -1, -1)
        outputs = []
        for layer in self.layers:
            hs = hs + layer(hs, memory, memory, need_weights=False)[0]
            outputs.append({"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()})
        return outputs


class HungarianMatcher:
    def __init__(self, group_detr):
        self.group_detr = group_detr

    @torch.no_grad()
    def __call__(self, outputs, targets):
        indices = []
        for boxes, target in zip(outputs["pred_boxes"], targets):
            cost = torch.cdist(boxes, target["boxes"], p=1).cpu().numpy()
            src, tgt = [], []
            for offset, part in enumerate(np.split(cost, self.group_detr)):
                order = np.argsort(part.min(1), kind="stable")[:len(target["boxes"])]
                src.append(order + offset * len(part))
                tgt.append(np.arange(len(order)))
            indices.append((torch.from_numpy(np.concatenate(src)), torch.from_numpy(np.concatenate(tgt))))
        return indices


class SetCriterion:
    def __init__(self, matcher, elementwise):
        self.matcher, self.elementwise = matcher, elementwise

    def loss_labels(self, outputs, idx, src_boxes, target_boxes, labels):
        if self.elementwise:
            iou_targets = matched_box_iou(src_boxes.detach(), target_boxes)[0]
        else:
            iou_targets = torch.diag(box_iou(src_boxes.detach(), target_boxes)[0])
        logits = outputs["pred_logits"]
        target = torch.zeros_like(logits)
        target[idx[0], idx[1], labels] = iou_targets.to(target.dtype)
        return F.binary_cross_entropy_with_logits(logits, target)

    def loss_boxes(self, src_boxes, target_boxes):
        if self.elementwise:
            giou = matched_generalized_box_iou(src_boxes, target_boxes)
        else:
            giou = torch.diag(generalized_box_iou(src_boxes, target_boxes))
        return (1 - giou).mean()

    def __call__(self, all_outputs, targets):
        losses = {}
        for number, outputs in enumerate(all_outputs):
            indices = self.matcher(outputs, targets)
            idx = (torch.cat([torch.full_like(src, i) for i, (src, _) in enumerate(indices)]).cuda(), torch.cat([src for src, _ in indices]).cuda())
            src_boxes = box_cxcywh_to_xyxy(outputs["pred_boxes"][idx])
            target_boxes = box_cxcywh_to_xyxy(torch.cat([t["boxes"][j.cuda()] for t, (_, j) in zip(targets, indices)]))
            labels = torch.cat([t["labels"][j] for t, (_, j) in zip(targets, indices)]).cuda()
            losses[f"loss_ce_{number}"] = self.loss_labels(outputs, idx, src_boxes, target_boxes, labels)
            losses[f"loss_giou_{number}"] = self.loss_boxes(src_boxes, target_boxes)
        return losses


@expected("all_pairs", fix="diagonal", thread="roboflow/rf-detr#1245", memory=800, held_back=True)
def train_rfdetr(fixed=False):
    """The loss of the matched boxes computes the IoU and GIoU of all pairs (N x N, N the number of all matched boxes of the batch) only to
    take the diagonal, for the encoder and every decoder layer. Cured by: The IoU/GIoU are computed elementwise for the matched pairs only.
    """
    model = LWDETR(num_classes=90).cuda()
    criterion = SetCriterion(HungarianMatcher(13), elementwise=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(3):
        samples = torch.rand(4, 3, 384, 384).cuda()
        targets = [{"boxes": torch.rand(n, 4).cuda(), "labels": torch.randint(90, (n,))} for n in (40, 65, 80, 55)]
        losses = criterion(model(samples), targets)
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss)


# Preference optimization against a frozen reference model.

class DPOTrainer:
    def __init__(self, model, ref_model, beta=0.1, views=False):
        self.model, self.ref_model, self.beta, self.views = model, ref_model, beta, views
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def shift(self, logits):
        shift_logits = logits[..., :-1, :]
        return shift_logits if self.views else shift_logits.contiguous()

    def _compute_loss(self, inputs):
        input_ids, completion_mask = inputs["input_ids"], inputs["completion_mask"]
        outputs = {"logits": self.model(input_ids)}
        shift_logits = self.shift(outputs["logits"])
        shift_labels = input_ids[..., 1:]
        shift_completion_mask = completion_mask[..., 1:]
        per_token_logps = selective_log_softmax(shift_logits, shift_labels)
        logps = (per_token_logps * shift_completion_mask).sum(dim=1)
        chosen_logps, rejected_logps = logps.chunk(2)
        with torch.no_grad():
            ref_outputs = {"logits": self.ref_model(input_ids)}
            ref_shift_logits = self.shift(ref_outputs["logits"])
            ref_per_token_logps = selective_log_softmax(ref_shift_logits, shift_labels)
            ref_chosen_logps, ref_rejected_logps = (ref_per_token_logps * shift_completion_mask).sum(dim=1).chunk(2)
        delta = (chosen_logps - ref_chosen_logps) - (rejected_logps - ref_rejected_logps)
        return -F.logsigmoid(self.beta * delta).mean()

    def training_step(self, inputs):
        inputs = {key: value.cuda() for key, value in inputs.items()}
        loss = self._compute_loss(inputs)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def data_collator(pairs, length, vocab_size):
    prompt = torch.randint(vocab_size, (pairs, length // 2)).repeat(2, 1)
    completion = torch.randint(vocab_size, (2 * pairs, length - length // 2))
    mask = torch.cat([torch.zeros_like(prompt), torch.ones_like(completion)], dim=1)
    return {"input_ids": torch.cat([prompt, completion], dim=1), "completion_mask": mask}


@expected("logits", fix="view", thread="huggingface/trl#5926", memory=1250, held_back=True)
def train_dpo_on_views(fixed=False):
    """In `_compute_loss`, `.contiguous()` on the shifted logits (`outputs.logits[..., :-1, :]`) of the policy and of the reference model
    copies each whole logits tensor, while the originals are still alive. Cured by: Without `.contiguous()`: `selective_log_softmax` takes
    views.
    """
    vocab_size = 64000
    model = CausalLM(vocab_size, 128, 2, 4).to("cuda", torch.bfloat16)
    ref_model = CausalLM(vocab_size, 128, 2, 4).to("cuda", torch.bfloat16).requires_grad_(False).eval()
    ref_model.load_state_dict(model.state_dict())
    trainer = DPOTrainer(model, ref_model, views=fixed)
    losses = [trainer.training_step(data_collator(4, 256, vocab_size)) for _ in range(3)]
    return float(torch.stack(losses).mean())


# Prediction of protein structures: the stack of blocks over the pair representation.

def chunk_layer(layer, x, chunk_size):
    return torch.cat([layer(part) for part in x.split(chunk_size, dim=-3)], dim=-3)


class TriangleMultiplication(nn.Module):
    def __init__(self, d_pair, d_hid, lean):
        super().__init__()
        self.lean = lean
        self.layer_norm_in, self.layer_norm_out = nn.LayerNorm(d_pair), nn.LayerNorm(d_hid)
        self.linear_ab, self.linear_ab_g = nn.Linear(d_pair, 2 * d_hid), nn.Linear(d_pair, 2 * d_hid)
        self.linear_g, self.linear_z = nn.Linear(d_pair, d_pair), nn.Linear(d_hid, d_pair)

    def project(self, z):
        z = self.layer_norm_in(z)
        ab = self.linear_ab(z) * torch.sigmoid(self.linear_ab_g(z))
        return ab.chunk(2, dim=-1)

    def forward(self, z, chunk_size):
        if self.lean:
            return self.chunk_2d(z, chunk_size)
        a, b = self.project(z)
        x = torch.einsum("ikc,jkc->ijc", a, b)
        return self.linear_z(self.layer_norm_out(x)) * torch.sigmoid(self.linear_g(self.layer_norm_in(z)))

    def chunk_2d(self, z, chunk_size):
        new_z = torch.empty_like(z)
        for i in range(0, z.shape[0], chunk_size):
            a = self.project(z[i:i + chunk_size])[0]
            gate = torch.sigmoid(self.linear_g(self.layer_norm_in(z[i:i + chunk_size])))
            for j in range(0, z.shape[0], chunk_size):
                b = self.project(z[j:j + chunk_size])[1]
                x = torch.einsum("ikc,jkc->ijc", a, b)
                new_z[i:i + chunk_size, j:j + chunk_size] = self.linear_z(self.layer_norm_out(x)) * gate[:, j:j + chunk_size]
        return new_z


class TriangleAttention(nn.Module):
    def __init__(self, d_pair, heads, lean):
        super().__init__()
        self.lean, self.heads = lean, heads
        self.layer_norm, self.linear = nn.LayerNorm(d_pair), nn.Linear(d_pair, heads, bias=False)
        self.qkv, self.out = nn.Linear(d_pair, 3 * d_pair), nn.Linear(d_pair, d_pair)

    def attend(self, x, bias):
        x = self.layer_norm(x) if self.lean else x
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        out = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]) + bias, -1) @ v
        return self.out(out.transpose(1, 2).flatten(2))

    def forward(self, z, chunk_size):
        if self.lean:
            bias = torch.cat([self.linear(self.layer_norm(part)) for part in z.split(chunk_size)]).permute(2, 0, 1)
        else:
            z = self.layer_norm(z)
            bias = self.linear(z).permute(2, 0, 1)
        return chunk_layer(lambda part: self.attend(part, bias), z, chunk_size)


class Transition(nn.Module):
    def __init__(self, d_in, n, lean):
        super().__init__()
        self.lean, self.layer_norm = lean, nn.LayerNorm(d_in)
        self.linear_1, self.linear_2 = nn.Linear(d_in, n * d_in), nn.Linear(n * d_in, d_in)

    def forward(self, x, chunk_size):
        if self.lean:
            return chunk_layer(lambda part: self.linear_2(F.relu(self.linear_1(self.layer_norm(part)))), x, chunk_size)
        return chunk_layer(lambda part: self.linear_2(F.relu(self.linear_1(part))), self.layer_norm(x), chunk_size)


class PairStack(nn.Module):
    def __init__(self, d_pair, lean):
        super().__init__()
        self.lean = lean
        self.tri_mul_out, self.tri_mul_in = TriangleMultiplication(d_pair, 128, lean), TriangleMultiplication(d_pair, 128, lean)
        self.tri_att_start, self.pair_transition = TriangleAttention(d_pair, 4, lean), Transition(d_pair, 4, lean)

    def residual(self, z, update):
        if self.lean:
            z += update
            return z
        return z + update

    def forward(self, z, chunk_size):
        for module in (self.tri_mul_out, self.tri_mul_in, self.tri_att_start, self.pair_transition):
            z = self.residual(z, module(z, chunk_size))
        return z


@expected("batch_without_gradients", fix="in place|split", thread="dptech-corp/Uni-Fold#27", memory=680, held_back=True)
@torch.no_grad()
def predict_structure(fixed=False):
    """In inference with `chunk_size` the residual additions, layer norms over the whole pair representation and the triangle multiplication
    (not chunked) still allocate several full pair tensors (residues x residues x channels) at a time. Cured by: In-place residuals, layer
    norm inside the chunks, and a chunked (2D) triangle multiplication in inference.
    """
    blocks = nn.ModuleList(PairStack(128, lean=fixed) for _ in range(2)).cuda().eval()
    head = nn.Linear(128, 64).cuda()
    for num_res in (128, 448):
        relpos = (torch.arange(num_res)[:, None] - torch.arange(num_res)).clamp(-32, 32) + 32
        z = F.embedding(relpos.cuda(), torch.randn(65, 128).cuda())
        for block in blocks:
            z = block(z, chunk_size=16)
        distogram = chunk_layer(head, z, 16).cpu()
    return distogram.shape
