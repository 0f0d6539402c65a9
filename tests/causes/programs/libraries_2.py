"""Programs after issues and merged pull requests of maintained packages."""
import gc
import math
import os
import tempfile
import types

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torch.utils.checkpoint import checkpoint

from expected import expected


# Bayesian optimization: every round fits a new sparse Gaussian process, whose inducing points are chosen greedily.

class MaternKernel(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.raw_lengthscale = nn.Parameter(torch.zeros(1, dim))

    def forward(self, x1, x2):
        lengthscale = F.softplus(self.raw_lengthscale)
        distance = torch.cdist(x1 / lengthscale, x2 / lengthscale)
        scaled = math.sqrt(5) * distance
        return (1 + scaled + scaled ** 2 / 3) * torch.exp(-scaled)


class ScaleKernel(nn.Module):
    def __init__(self, base_kernel):
        super().__init__()
        self.base_kernel, self.raw_outputscale = base_kernel, nn.Parameter(torch.zeros(()))

    def forward(self, x1, x2):
        return F.softplus(self.raw_outputscale) * self.base_kernel(x1, x2)


def _pivoted_cholesky_init(train_inputs, kernel_matrix, max_length):
    item_size = kernel_matrix.shape[-2]
    cis = torch.zeros(max_length, item_size, device=kernel_matrix.device, dtype=kernel_matrix.dtype)
    di2s = kernel_matrix.diagonal().clone()
    selected_items = [int(torch.argmax(di2s)) % item_size]
    while len(selected_items) < max_length:
        k, selected_item = len(selected_items) - 1, selected_items[-1]
        ci_optimal = cis[:k, selected_item]
        di_optimal = torch.sqrt(di2s[selected_item])
        elements = kernel_matrix[..., selected_item, :]
        eis = (elements - torch.matmul(ci_optimal, cis[:k, :])) / di_optimal
        cis[k, :] = eis
        di2s = di2s - eis.pow(2.0)
        di2s[selected_item] = -torch.inf
        selected_items.append(int(torch.argmax(di2s)) % item_size)
    return train_inputs[selected_items]


class GreedyVarianceReduction:
    def __init__(self, track_gradients=True):
        self.track_gradients = track_gradients

    def allocate_inducing_points(self, inputs, covar_module, num_inducing):
        covar_module = covar_module.to(inputs.device)
        with torch.set_grad_enabled(self.track_gradients):
            train_train_kernel = covar_module(inputs, inputs)
        return _pivoted_cholesky_init(inputs, train_train_kernel, num_inducing)


class SingleTaskVariationalGP(nn.Module):
    def __init__(self, train_X, num_inducing, inducing_point_allocator):
        super().__init__()
        self.covar_module = ScaleKernel(MaternKernel(train_X.shape[-1]))
        points = inducing_point_allocator.allocate_inducing_points(train_X, self.covar_module, num_inducing)
        self.inducing_points = nn.Parameter(points.detach().clone())
        self.variational_mean = nn.Parameter(torch.zeros(num_inducing, device=train_X.device))

    def forward(self, X):
        return self.covar_module(X, self.inducing_points) @ self.variational_mean


@expected("reference_cycle", fix="no_grad", thread="meta-pytorch/botorch#1788", memory=600, held_back=True)
def optimize_black_box(fixed=False):
    """`GreedyVarianceReduction.allocate_inducing_points` hands `_pivoted_cholesky_init` a kernel matrix that requires grad; its in-place
    writes into `cis` and `di2s` build autograd graphs that refer to themselves and are never released, so every new
    `SingleTaskVariationalGP` leaves the kernel matrix of its inducing points and what autograd saved with it on the GPU, though the model
    is discarded. Cured by: evaluate the kernel for the allocation under `torch.no_grad()`.
    """
    device = torch.device("cuda")
    train_X = torch.rand(2048, 5, device=device)
    for iteration in range(12):
        train_Y = torch.sin(train_X).sum(dim=1)
        allocator = GreedyVarianceReduction(track_gradients=not fixed)
        model = SingleTaskVariationalGP(train_X, 24, allocator)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(3):
            optimizer.zero_grad()
            loss = F.mse_loss(model(train_X), train_Y)
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            candidates = torch.rand(256, 5, device=device)
            best = model(candidates).topk(16).indices
            train_X[iteration * 16:(iteration + 1) * 16] = candidates[best.clamp(0, 255)]
        del model, optimizer, loss
        gc.collect()
    return train_X


# Supervised fine-tuning of a Gemma model on question answering, recipe-driven.

class SQuAD(Dataset):
    def __init__(self, lengths, vocab_size, seed=0):
        random = np.random.default_rng(seed)
        self.samples = [random.integers(5, vocab_size, n) for n in lengths]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        ids = torch.from_numpy(self.samples[index])
        labels = ids.clone()
        labels[:-len(ids) // 8] = -100
        return {"input_ids": ids, "labels": labels}


def default_collater(samples):
    pad = lambda key, value: nn.utils.rnn.pad_sequence([s[key] for s in samples], batch_first=True, padding_value=value)
    return {"input_ids": pad("input_ids", 0), "labels": pad("labels", -100)}


class MaskedCrossEntropy:
    def __call__(self, logits, labels):
        logits, labels = logits[:, :-1].float(), labels[:, 1:]
        return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1), ignore_index=-100)


class TrainFinetuneRecipe:
    def __init__(self, cfg):
        from transformers import Gemma2Config, Gemma2ForCausalLM
        torch.manual_seed(0)
        config = Gemma2Config(vocab_size=4096, hidden_size=256, intermediate_size=512, num_hidden_layers=cfg.num_hidden_layers, num_attention_heads=8,
                              num_key_value_heads=4, head_dim=32, sliding_window=4096, attn_implementation=cfg.attn_implementation, use_cache=False)
        self.model = Gemma2ForCausalLM(config).to(torch.bfloat16).cuda()
        if cfg.activation_checkpointing:
            self.model.gradient_checkpointing_enable()
        self.model.train()
        self.loss_fn = MaskedCrossEntropy()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr)
        random = np.random.default_rng(1)
        lengths = random.integers(120, 260, cfg.num_samples)
        lengths[4 * 10 + 1] = 760
        self.dataloader = DataLoader(SQuAD(lengths, config.vocab_size), batch_size=cfg.local_batch_size, collate_fn=default_collater)

    def run_train_validation_loop(self):
        for step, batch in enumerate(self.dataloader):
            batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
            labels = batch.pop("labels")
            out = self.model(**batch)
            loss = self.loss_fn(out.logits, labels)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return step


@expected("attention_scores", fix="checkpoint", thread="NVIDIA-NeMo/Automodel#2585", memory=850, held_back=True)
def finetune_gemma_squad(fixed=False):
    """Eager attention makes the full matrix of attention scores (batch, heads, length, length) in every layer and keeps it for the backward
    pass of all layers at once, as activation checkpointing is off; the samples are padded to the longest without a cap, so the first batch
    with a long sample (step 10) runs out of memory. Cured by: `activation_checkpointing: true`.
    """
    cfg = types.SimpleNamespace(num_hidden_layers=6, attn_implementation="eager", activation_checkpointing=fixed, lr=1e-5, num_samples=56, local_batch_size=4)
    TrainFinetuneRecipe(cfg).run_train_validation_loop()


# A one-stage detector is trained on aerial images with custom annotations.

class AnchorGenerator:
    def __init__(self, strides=(8, 16, 32), scales=(4, 5, 6.3), ratios=(0.5, 1.0, 2.0)):
        self.strides, self.scales, self.ratios = strides, scales, ratios

    def grid_anchors(self, featmap_sizes, device):
        anchors = []
        for stride, (h, w) in zip(self.strides, featmap_sizes):
            y, x = torch.meshgrid(torch.arange(h, device=device) * stride, torch.arange(w, device=device) * stride, indexing="ij")
            centers = torch.stack([x, y, x, y], -1).reshape(-1, 1, 4).float()
            sizes = torch.tensor([[stride * s / math.sqrt(r), stride * s * math.sqrt(r)] for s in self.scales for r in self.ratios], device=device)
            anchors.append((centers + torch.cat([-sizes, sizes], 1) / 2).reshape(-1, 4))
        return torch.cat(anchors)


def bbox_overlaps(bboxes1, bboxes2, eps=1e-6):
    area1 = (bboxes1[:, 2] - bboxes1[:, 0]) * (bboxes1[:, 3] - bboxes1[:, 1])
    area2 = (bboxes2[:, 2] - bboxes2[:, 0]) * (bboxes2[:, 3] - bboxes2[:, 1])
    lt = torch.max(bboxes1[:, None, :2], bboxes2[None, :, :2])
    rb = torch.min(bboxes1[:, None, 2:], bboxes2[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    overlap = wh[..., 0] * wh[..., 1]
    union = area1[:, None] + area2[None] - overlap
    return overlap / union.clamp(min=eps)


class MaxIoUAssigner:
    def __init__(self, pos_iou_thr=0.5, neg_iou_thr=0.4, gpu_assign_thr=-1):
        self.pos_iou_thr, self.neg_iou_thr, self.gpu_assign_thr = pos_iou_thr, neg_iou_thr, gpu_assign_thr

    def assign(self, bboxes, gt_bboxes, gt_labels):
        device = bboxes.device
        if self.gpu_assign_thr > 0 and len(gt_bboxes) > self.gpu_assign_thr:
            bboxes, gt_bboxes, gt_labels = bboxes.cpu(), gt_bboxes.cpu(), gt_labels.cpu()
        overlaps = bbox_overlaps(gt_bboxes, bboxes)
        max_overlaps, argmax_overlaps = overlaps.max(dim=0)
        argmax_overlaps = argmax_overlaps.clamp(0, len(gt_bboxes) - 1)
        assigned_gt_inds = torch.where(max_overlaps < self.neg_iou_thr, 0, -1)
        assigned_gt_inds = torch.where(max_overlaps >= self.pos_iou_thr, argmax_overlaps + 1, assigned_gt_inds)
        return assigned_gt_inds.to(device), gt_bboxes[argmax_overlaps].to(device), gt_labels[argmax_overlaps].to(device)


class RetinaNet(nn.Module):
    def __init__(self, num_classes, assigner, num_anchors=9, width=32):
        super().__init__()
        self.num_classes, self.assigner, self.anchor_generator = num_classes, assigner, AnchorGenerator()
        layer = lambda i, o, s: nn.Sequential(nn.Conv2d(i, o, 3, s, 1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
        self.stem = nn.Sequential(layer(3, 16, 4), layer(16, width, 2))
        self.stages = nn.ModuleList([layer(width, width, 1), layer(width, width, 2), layer(width, width, 2)])
        self.retina_cls = nn.Conv2d(width, num_anchors * num_classes, 3, padding=1)
        self.retina_reg = nn.Conv2d(width, num_anchors * 4, 3, padding=1)

    def forward_train(self, img, gt_bboxes, gt_labels):
        x, cls_scores, bbox_preds, sizes = self.stem(img), [], [], []
        for stage in self.stages:
            x = stage(x)
            sizes.append(x.shape[-2:])
            cls_scores.append(self.retina_cls(x).permute(0, 2, 3, 1).reshape(len(img), -1, self.num_classes))
            bbox_preds.append(self.retina_reg(x).permute(0, 2, 3, 1).reshape(len(img), -1, 4))
        cls_scores, bbox_preds = torch.cat(cls_scores, 1), torch.cat(bbox_preds, 1)
        anchors = self.anchor_generator.grid_anchors(sizes, img.device)
        losses = []
        for score, pred, boxes, labels in zip(cls_scores, bbox_preds, gt_bboxes, gt_labels):
            assigned, target_boxes, target_labels = self.assigner.assign(anchors, boxes, labels)
            positive = (assigned > 0).float()
            targets = F.one_hot(target_labels.clamp(0, self.num_classes - 1), self.num_classes).float() * positive[:, None]
            losses.append(F.binary_cross_entropy_with_logits(score, targets, reduction="sum") / len(boxes))
            losses.append(((pred - (target_boxes - anchors) / 16).abs().sum(1) * positive).sum() / len(boxes))
        return sum(losses)


class AerialDataset(Dataset):
    def __init__(self, num_gts, size):
        self.num_gts, self.size = num_gts, size
        self.img = torch.rand(3, size, size)

    def __len__(self):
        return len(self.num_gts)

    def __getitem__(self, index):
        random = np.random.default_rng(index)
        top_left = random.uniform(0, self.size - 40, (self.num_gts[index], 2))
        boxes = np.concatenate([top_left, top_left + random.uniform(8, 40, top_left.shape)], 1)
        return self.img, torch.from_numpy(boxes).float(), torch.from_numpy(random.integers(0, 10, len(boxes)))


@expected("all_pairs", fix="part|split|chunk", thread="open-mmlab/mmdetection#3863", memory=700, held_back=True)
def train_aerial_detector(fixed=False):
    """One image has a very large number of ground truth boxes; `MaxIoUAssigner.assign` computes the overlaps of all of them with all
    anchors on the GPU (`bbox_overlaps`: ground truths x anchors), whose size grows with the number of ground truth boxes. Cured by:
    `gpu_assign_thr`: such images are assigned on the CPU.
    """
    assigner = MaxIoUAssigner(gpu_assign_thr=300 if fixed else -1)
    model = RetinaNet(10, assigner).cuda().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    dataset = AerialDataset([12, 40, 7, 63, 88, 21, 55, 31, 19, 90, 620, 44, 16, 70], 512)
    loader = DataLoader(dataset, batch_size=2, collate_fn=lambda samples: [list(column) for column in zip(*samples)])
    for img, gt_bboxes, gt_labels in loader:
        loss = model.forward_train(torch.stack(img).cuda(), [b.cuda() for b in gt_bboxes], [l.cuda() for l in gt_labels])
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 35)
        optimizer.step()


# Group-relative policy optimization with long completions.

class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.norm1, self.norm2 = heads, nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class CausalLM(nn.Module):
    def __init__(self, vocab_size, dim, depth, heads=4):
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.lm_head = nn.LayerNorm(dim), nn.Linear(dim, vocab_size, bias=False)

    def forward(self, input_ids):
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


def selective_log_softmax(logits, index):
    per_token_logps = []
    for row_logits, row_labels in zip(logits, index):
        row_logps = F.log_softmax(row_logits, dim=-1)
        per_token_logps.append(row_logps.gather(-1, row_labels.unsqueeze(-1)).squeeze(-1))
    return torch.stack(per_token_logps)


def entropy_from_logits(logits, chunk_size=1):
    per_token_entropies = []
    for logits_chunk in logits.split(chunk_size, dim=0):
        logps = F.log_softmax(logits_chunk, dim=-1)
        per_token_entropies.extend(-(torch.exp(logps) * logps).sum(-1))
    return torch.stack(per_token_entropies)


def entropy_of_tokens(logits, chunk_size=128):
    entropies = []
    for chunk in logits.reshape(-1, logits.shape[-1]).split(chunk_size):
        logps = F.log_softmax(chunk, dim=-1)
        entropies.append(-(torch.exp(logps) * logps).sum(-1))
    return torch.cat(entropies).reshape(logits.shape[:-1])


class GRPOTrainer:
    def __init__(self, model, entropy_fn, beta=0.0, top_entropy_quantile=0.2):
        self.model, self.entropy_fn, self.beta, self.top_entropy_quantile = model, entropy_fn, beta, top_entropy_quantile
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
        self._metrics = {"entropy": []}

    def _get_per_token_logps_and_entropies(self, input_ids, logits_to_keep):
        logits = self.model(input_ids)[:, :-1][:, -logits_to_keep:]
        completion_ids = input_ids[:, -logits_to_keep:]
        logps = selective_log_softmax(logits, completion_ids)
        with torch.no_grad():
            entropies = self.entropy_fn(logits)
        return logps, entropies

    def training_step(self, inputs):
        input_ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1)
        per_token_logps, entropies = self._get_per_token_logps_and_entropies(input_ids, inputs["completion_ids"].size(1))
        entropy_mask = (entropies >= entropies.quantile(1 - self.top_entropy_quantile)).float()
        ratio = torch.exp(per_token_logps - per_token_logps.detach())
        loss = -(ratio * inputs["advantages"].unsqueeze(1) * entropy_mask).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._metrics["entropy"].append(entropies.mean().item())


@expected("logits", fix="chunk|parts", thread="huggingface/trl#4013", memory=850, held_back=True)
def train_long_reasoning(fixed=False):
    """`entropy_from_logits` splits the logits along the batch only, so for a long completion each chunk is a whole sequence times the
    vocabulary, and `logps`, its exponential and their product are temporaries of the size of all logits: a spike for a metric. Cured by:
    flatten batch and sequence and compute the entropies in chunks of 128 tokens.
    """
    model = CausalLM(20000, 128, 2).cuda()
    trainer = GRPOTrainer(model, entropy_of_tokens if fixed else entropy_from_logits)
    for _ in range(3):
        inputs = {"prompt_ids": torch.randint(20000, (1, 64)).cuda(), "completion_ids": torch.randint(20000, (1, 2048)).cuda(),
                  "advantages": torch.randn(1).cuda()}
        trainer.training_step(inputs)
    return trainer._metrics


# Proximal policy optimization: the worker of the actor updates the policy in micro batches.

def vocab_entropy(logits):
    pd = F.softmax(logits, dim=-1)
    return torch.logsumexp(logits, dim=-1) - torch.sum(pd * logits, dim=-1)


def masked_mean(values, mask):
    return (values * mask).sum() / mask.sum().clamp(min=1)


def compute_policy_loss(old_log_prob, log_prob, advantages, eos_mask, cliprange):
    ratio = torch.exp(log_prob - old_log_prob)
    pg_losses = torch.max(-advantages * ratio, -advantages * ratio.clamp(1 - cliprange, 1 + cliprange))
    return masked_mean(pg_losses, eos_mask)


class DataParallelPPOActor:
    def __init__(self, config, actor_module, actor_optimizer):
        self.config, self.actor_module, self.actor_optimizer = config, actor_module, actor_optimizer

    def _forward_micro_batch(self, micro_batch, temperature, calculate_entropy):
        response_length = micro_batch["responses"].size(1)
        input_ids = torch.cat([micro_batch["prompts"], micro_batch["responses"]], 1)
        logits = self.actor_module(input_ids)[:, -response_length - 1:-1]
        logits = logits / temperature
        log_probs = -F.cross_entropy(logits.transpose(1, 2), micro_batch["responses"], reduction="none")
        entropy = vocab_entropy(logits) if calculate_entropy else None
        return entropy, log_probs

    @torch.no_grad()
    def compute_log_prob(self, batch):
        log_probs, entropies = [], []
        for micro_batch in self._split(batch):
            entropy, log_prob = self._forward_micro_batch(micro_batch, batch["temperature"], self.config.entropy_with_log_probs)
            log_probs.append(log_prob)
            if entropy is not None:
                entropies.append(entropy.mean().item())
        return torch.cat(log_probs), entropies

    def _split(self, batch):
        size = self.config.ppo_micro_batch_size
        keys = [k for k in batch if k != "temperature"]
        for begin in range(0, len(batch["responses"]), size):
            yield {k: batch[k][begin:begin + size] for k in keys}

    def update_policy(self, batch):
        entropy_coeff = self.config.entropy_coeff
        calculate_entropy = entropy_coeff != 0 if self.config.entropy_with_log_probs else True
        metrics = {}
        self.actor_optimizer.zero_grad()
        micro_batches = list(self._split(batch))
        for data in micro_batches:
            entropy, log_prob = self._forward_micro_batch(data, batch["temperature"], calculate_entropy)
            pg_loss = compute_policy_loss(data["old_log_probs"], log_prob, data["advantages"], data["mask"], self.config.clip_ratio)
            policy_loss = pg_loss
            if entropy is not None:
                entropy_loss = masked_mean(entropy, data["mask"])
                policy_loss = pg_loss - entropy_loss * entropy_coeff
                metrics["actor/entropy_loss"] = entropy_loss.detach().item()
            (policy_loss / len(micro_batches)).backward()
            metrics["actor/pg_loss"] = pg_loss.detach().item()
        self.actor_optimizer.step()
        return metrics


@expected("logits", fix="no_grad", thread="verl-project/verl#1100", memory=850, held_back=True)
def run_ppo_actor(fixed=False):
    """`update_policy` computes the entropy of the full vocabulary with gradients (`vocab_entropy` keeps softmax and product of the size of
    the logits for the backward pass) although `entropy_coeff` is 0, so it adds to the peak without any effect on the loss. Cured by: the
    actor does not compute the entropy in `update_policy` if `entropy_coeff == 0`; it is computed for the metrics in `compute_log_prob`,
    without gradients.
    """
    config = types.SimpleNamespace(ppo_micro_batch_size=2, entropy_coeff=0, clip_ratio=0.2, entropy_with_log_probs=fixed)
    actor_module = CausalLM(16000, 128, 3).cuda()
    actor = DataParallelPPOActor(config, actor_module, torch.optim.AdamW(actor_module.parameters(), lr=1e-6))
    for _ in range(2):
        prompts, responses = torch.randint(16000, (8, 128)).cuda(), torch.randint(16000, (8, 896)).cuda()
        batch = {"prompts": prompts, "responses": responses, "mask": torch.ones(8, 896).cuda(), "temperature": 0.7}
        batch["old_log_probs"], _ = actor.compute_log_prob(batch)
        batch["advantages"] = torch.randn(8, 896).cuda()
        actor.update_policy(batch)


# Stochastic variational inference with a deep generative model; the test set is evaluated after each epoch.

class Decoder(nn.Module):
    def __init__(self, z_dim, hidden_dim, image=784):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(z_dim, hidden_dim), nn.Softplus(), nn.Linear(hidden_dim, hidden_dim), nn.Softplus(),
                                 nn.Linear(hidden_dim, image), nn.Sigmoid())

    def forward(self, z):
        return self.net(z)


class Encoder(nn.Module):
    def __init__(self, z_dim, hidden_dim, image=784):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(image, hidden_dim), nn.Softplus(), nn.Linear(hidden_dim, hidden_dim), nn.Softplus())
        self.loc, self.scale = nn.Linear(hidden_dim, z_dim), nn.Linear(hidden_dim, z_dim)

    def forward(self, x):
        hidden = self.net(x)
        return self.loc(hidden), torch.exp(self.scale(hidden))


class VAE(nn.Module):
    def __init__(self, z_dim=50, hidden_dim=1024):
        super().__init__()
        self.encoder, self.decoder = Encoder(z_dim, hidden_dim), Decoder(z_dim, hidden_dim)

    def model(self, x, z):
        prior = torch.distributions.Normal(torch.zeros_like(z), torch.ones_like(z), validate_args=False)
        likelihood = torch.distributions.Bernoulli(self.decoder(z), validate_args=False)
        return prior.log_prob(z).sum(-1) + likelihood.log_prob(x).sum(-1)

    def guide(self, x, num_particles):
        q = torch.distributions.Normal(*self.encoder(x), validate_args=False)
        z = q.rsample((num_particles,))
        return z, q.log_prob(z).sum(-1)


class Trace_ELBO:
    def __init__(self, num_particles=1):
        self.num_particles = num_particles

    def differentiable_loss(self, model, guide, x):
        z, guide_log_prob = guide(x, self.num_particles)
        return -(model(x, z) - guide_log_prob).mean(0).sum()

    def loss(self, model, guide, x):
        return self.differentiable_loss(model, guide, x).item()

    def loss_and_grads(self, model, guide, x):
        loss = self.differentiable_loss(model, guide, x)
        loss.backward()
        return loss.item()


class SVI:
    def __init__(self, model, guide, optim, loss, no_grad_evaluation=False):
        self.model, self.guide, self.optim, self.elbo = model, guide, optim, loss
        self.no_grad_evaluation = no_grad_evaluation

    def evaluate_loss(self, *args):
        if self.no_grad_evaluation:
            with torch.no_grad():
                return self.elbo.loss(self.model, self.guide, *args)
        return self.elbo.loss(self.model, self.guide, *args)

    def step(self, *args):
        self.optim.zero_grad()
        loss = self.elbo.loss_and_grads(self.model, self.guide, *args)
        self.optim.step()
        return loss


@expected("evaluation_keeps_graphs", fix="no_grad", thread="pyro-ppl/pyro#1047", memory=1150, held_back=True)
def train_vae(fixed=False):
    """`SVI.evaluate_loss` computes the loss of the test set with gradients enabled, so autograd keeps all activations of model and guide
    although no backward pass follows. Cured by: `torch.no_grad()` in `evaluate_loss`.
    """
    vae = VAE().cuda()
    svi = SVI(vae.model, vae.guide, torch.optim.Adam(vae.parameters(), lr=1e-3), Trace_ELBO(num_particles=4), no_grad_evaluation=fixed)
    train, test = torch.rand(4096, 784).round(), torch.rand(10000, 784).round()
    for epoch in range(2):
        epoch_loss = 0.0
        for x in train.split(256):
            epoch_loss += svi.step(x.cuda())
        test_loss = svi.evaluate_loss(test.cuda()) / len(test)
    return epoch_loss / len(train), test_loss


# A weather model is validated: an observer gathers maps of the error for a figure at the end of the epoch.

class HalfUNet(nn.Module):
    def __init__(self, channels, width):
        super().__init__()
        conv = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU())
        self.encoder1, self.encoder2 = conv(channels, width), conv(width, width)
        self.decoder, self.outconv = conv(width, width), nn.Conv2d(width, channels, 1)

    def forward(self, x):
        skip = self.encoder1(x)
        deep = F.interpolate(self.encoder2(F.max_pool2d(skip, 2)), scale_factor=2)
        return self.outconv(self.decoder(skip + deep))


class ScaledLoss:
    def __init__(self, weights):
        self.weights = weights

    def __call__(self, prediction, target, reduce_spatial_dim=True):
        loss = ((prediction - target) ** 2 * self.weights).sum(2)
        return loss.mean((-2, -1)) if reduce_spatial_dim else loss


def gather(obj, tensor_to_gather):
    return tensor_to_gather.detach().clone().cpu()


class SpatialErrorPlot:
    def __init__(self, loss, gather_on_update):
        self.loss, self.gather_on_update = loss, gather_on_update
        self.spatial_loss_maps = []

    def update(self, obj, prediction, target):
        spatial_loss = self.loss(prediction, target, reduce_spatial_dim=False)
        self.spatial_loss_maps.append(gather(obj, spatial_loss) if self.gather_on_update else spatial_loss)

    def on_step_end(self, obj):
        maps = torch.cat(self.spatial_loss_maps, dim=0)
        if not self.gather_on_update:
            maps = gather(obj, maps)
        obj.figures.append(maps.mean(0).numpy())
        self.spatial_loss_maps.clear()


class AutoRegressiveLightning(nn.Module):
    def __init__(self, channels, num_pred_steps, gather_on_update):
        super().__init__()
        self.model, self.num_pred_steps, self.figures = HalfUNet(channels, 24), num_pred_steps, []
        self.loss = ScaledLoss(torch.ones(channels, 1, 1).cuda())
        self.valid_plotters = [SpatialErrorPlot(self.loss, gather_on_update)]

    def common_step(self, inputs):
        states, prev = [], inputs
        for _ in range(self.num_pred_steps):
            prev = prev + self.model(prev)
            states.append(prev)
        return torch.stack(states, 1)

    def validation_step(self, batch):
        with torch.no_grad():
            prediction = self.common_step(batch["inputs"])
            for plotter in self.valid_plotters:
                plotter.update(self, prediction, batch["outputs"])
            return self.loss(prediction, batch["outputs"]).mean()

    def on_validation_epoch_end(self):
        for plotter in self.valid_plotters:
            plotter.on_step_end(self)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="meteofrance/py4cast#29", memory=550, held_back=True)
def validate_weather_model(fixed=False):
    """The observer appends the errors of each validation batch to a list on the GPU (`SpatialErrorPlot.spatial_loss_maps`) and only gathers
    them to the CPU at the end of the epoch, so the list grows with the validation set. Cured by: gather (GPU to CPU) in the observer's
    `update`, after each batch.
    """
    lightning_module = AutoRegressiveLightning(8, 4, gather_on_update=fixed).cuda().eval()
    fields = torch.randn(4, 5, 8, 256, 256)
    for _ in range(120):
        batch = {"inputs": fields[:, 0].cuda(), "outputs": fields[:, 1:].cuda()}
        lightning_module.validation_step(batch)
    lightning_module.on_validation_epoch_end()
    return lightning_module.figures


# An image generator with small networks that change its attention, one of which the user may choose.

class HypernetworkModule(nn.Module):
    def __init__(self, dim, state_dict=None):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(dim, dim * 2), nn.Linear(dim * 2, dim)
        if state_dict is not None:
            self.load_state_dict(state_dict)
            self.to("cuda")

    def forward(self, x):
        return x + self.linear2(self.linear1(x))


class Hypernetwork:
    def __init__(self, filename):
        self.name = os.path.splitext(os.path.basename(filename))[0]
        self.layers = {}
        for size, sd in torch.load(filename, map_location="cpu").items():
            self.layers[size] = (HypernetworkModule(size, sd[0]), HypernetworkModule(size, sd[1]))


def load_hypernetworks(path):
    return {hn.name: hn for hn in (Hypernetwork(os.path.join(path, name)) for name in sorted(os.listdir(path)))}


def list_hypernetworks(path):
    return {os.path.splitext(name)[0]: os.path.join(path, name) for name in sorted(os.listdir(path))}


class CrossAttention(nn.Module):
    def __init__(self, dim, context_dim):
        super().__init__()
        self.context_dim = context_dim
        self.to_q, self.to_k, self.to_v = nn.Linear(dim, dim), nn.Linear(context_dim, dim), nn.Linear(context_dim, dim)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x, context, hypernetwork):
        layers = hypernetwork.layers.get(self.context_dim) if hypernetwork else None
        context_k, context_v = (layers[0](context), layers[1](context)) if layers else (context, context)
        return x + self.to_out(F.scaled_dot_product_attention(self.to_q(x), self.to_k(context_k), self.to_v(context_v)))


class UNetModel(nn.Module):
    def __init__(self, dim, context_dim):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, dim, 3, padding=1), nn.Conv2d(dim, 4, 3, padding=1)
        self.attn = nn.ModuleList(CrossAttention(dim, context_dim) for _ in range(4))

    def forward(self, x, context, hypernetwork):
        h = self.conv_in(x)
        tokens = h.flatten(2).transpose(1, 2)
        for attn in self.attn:
            tokens = attn(tokens, context, hypernetwork)
        return self.conv_out(tokens.transpose(1, 2).view_as(h))


def process_images(unet, hypernetwork, batch_size, steps):
    x, context = torch.randn(batch_size, 4, 64, 64).cuda(), torch.randn(batch_size, 77, 384).cuda()
    with torch.no_grad():
        for _ in range(steps):
            x = x - 0.1 * unet(x, context, hypernetwork)
    return x.cpu()


@expected("idle_model", fix="cpu|host", thread="AUTOMATIC1111/stable-diffusion-webui#2030", memory=560, held_back=True)
def txt2img(fixed=False):
    """All hypernetworks in the folder are loaded to the GPU at the start (`load_hypernetworks`) and stay there, even with "None" selected,
    so there is not enough left to generate an image. Cured by: keep a list of the files only, and load a hypernetwork when it is selected.
    """
    opts = types.SimpleNamespace(sd_hypernetwork="None")
    with tempfile.TemporaryDirectory() as hypernetwork_dir:
        for number in range(14):
            state_dict = {size: tuple(HypernetworkModule(size).state_dict() for _ in range(2)) for size in (160, 320, 384, 640)}
            torch.save(state_dict, os.path.join(hypernetwork_dir, f"style{number:02}.pt"))
        if fixed:
            hypernetworks = list_hypernetworks(hypernetwork_dir)
        else:
            hypernetworks = load_hypernetworks(hypernetwork_dir)
        unet = UNetModel(320, 384).cuda().eval()
        images = []
        for prompt in range(3):
            hypernetwork = hypernetworks.get(opts.sd_hypernetwork)
            if isinstance(hypernetwork, str):
                hypernetwork = Hypernetwork(hypernetwork)
            images.append(process_images(unet, hypernetwork, 8, 4))
            opts.sd_hypernetwork = "style03" if prompt == 1 else opts.sd_hypernetwork
    return images


# The same kind of service changes from one checkpoint to another with a different configuration.

class LatentDiffusion(nn.Module):
    def __init__(self, in_channels, width):
        super().__init__()
        block = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(8, o), nn.SiLU())
        self.model = nn.ModuleList([block(in_channels, width), block(width, width * 2), block(width * 2, width * 2), block(width * 2, width)])
        self.out = nn.Conv2d(width, 4, 3, padding=1)
        self.cond_stage_model = nn.Sequential(nn.Embedding(4096, 512), *[nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True) for _ in range(4)])
        self.cond_proj = nn.Linear(512, width)
        self.sd_checkpoint_info = None

    def apply_model(self, x, cond, c_concat=None):
        h = x if c_concat is None else torch.cat([x, c_concat], 1)
        for number, block in enumerate(self.model):
            h = block(h)
            if number == 0:
                h = h + self.cond_proj(cond.mean(1))[:, :, None, None]
        return self.out(h)


CheckpointInfo = types.SimpleNamespace
shared = types.SimpleNamespace(sd_model=None, device="cuda", unload_first=False)


def instantiate_from_config(config):
    return LatentDiffusion(**config)


def load_model(checkpoint_info):
    if shared.unload_first and shared.sd_model is not None:
        shared.sd_model = None
        gc.collect()
        torch.cuda.empty_cache()
    sd_model = instantiate_from_config(checkpoint_info.config)
    sd_model.to(shared.device)
    sd_model.eval()
    sd_model.sd_checkpoint_info = checkpoint_info
    shared.sd_model = sd_model


def reload_model_weights(info):
    if shared.sd_model.sd_checkpoint_info.config != info.config:
        load_model(info)
        return
    shared.sd_model.load_state_dict(info.state_dict)


def sample_images(batch_size, steps=3):
    with torch.no_grad():
        cond = shared.sd_model.cond_stage_model(torch.randint(4096, (batch_size, 77)).to(shared.device))
        x = torch.randn(batch_size, 4, 64, 64, device=shared.device)
        c_concat = torch.zeros(batch_size, 5, 64, 64, device=shared.device) if shared.sd_model.model[0][0].in_channels == 9 else None
        for _ in range(steps):
            x = x - 0.1 * shared.sd_model.apply_model(x, cond, c_concat)
    return x.cpu()


@expected("several_models", fix=r"\bdel\b|None", thread="AUTOMATIC1111/stable-diffusion-webui#4098", memory=540, held_back=True)
def img2img_session(fixed=False):
    """`load_model` puts the model of the other checkpoint on the GPU while `shared.sd_model` still refers to the old one, so for a change
    of checkpoint two models must fit. Cured by: drop the reference to the old `sd_model` and collect it before the other is loaded.
    """
    shared.sd_model, shared.unload_first = None, fixed
    v15 = CheckpointInfo(name="v1-5-pruned", config={"in_channels": 4, "width": 768})
    inpainting = CheckpointInfo(name="sd-v1-5-inpainting", config={"in_channels": 9, "width": 768})
    load_model(v15)
    images = [sample_images(1)]
    reload_model_weights(inpainting)
    images.append(sample_images(1))
    reload_model_weights(v15)
    images.append(sample_images(1))
    shared.sd_model = None
    return images


# Embeddings of a large corpus of short sentences for semantic search.

class SentenceTransformer(nn.Module):
    def __init__(self, vocab_size=8000, dim=768, hidden=128):
        super().__init__()
        self.embeddings = nn.Embedding(vocab_size, hidden)
        self.encoder = nn.TransformerEncoderLayer(hidden, 4, 256, batch_first=True, dropout=0.0)
        self.dense = nn.Linear(hidden, dim)

    def tokenize(self, sentences):
        longest = max(map(len, sentences))
        ids = np.zeros((len(sentences), longest), np.int64)
        for row, sentence in zip(ids, sentences):
            row[:len(sentence)] = sentence
        return torch.from_numpy(ids)

    def forward(self, input_ids):
        mask = (input_ids > 0).float().unsqueeze(-1)
        tokens = self.encoder(self.embeddings(input_ids)) * mask
        return self.dense(tokens.sum(1) / mask.sum(1).clamp(min=1))

    def encode(self, sentences, batch_size=32, convert_to_numpy=True, convert_to_tensor=False, device="cuda"):
        if convert_to_tensor:
            convert_to_numpy = False
        self.eval()
        all_embeddings = []
        length_sorted_idx = np.argsort([-len(sentence) for sentence in sentences])
        for start_index in range(0, len(sentences), batch_size):
            batch = [sentences[i] for i in length_sorted_idx[start_index:start_index + batch_size]]
            features = self.tokenize(batch).to(device)
            with torch.no_grad():
                embeddings = self.forward(features).detach()
                if convert_to_numpy:
                    embeddings = embeddings.cpu()
                all_embeddings.extend(embeddings)
        all_embeddings = [all_embeddings[i] for i in np.argsort(length_sorted_idx)]
        if convert_to_tensor:
            return torch.stack(all_embeddings)
        return np.asarray([embedding.numpy() for embedding in all_embeddings])


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="huggingface/sentence-transformers#1244", memory=400, held_back=True)
def index_corpus(fixed=False):
    """With `convert_to_tensor=True` `encode` keeps the embeddings of all sentences as tensors on the GPU (`all_embeddings`), which needs
    sentences x dimension x 4 bytes and runs out of memory with a large corpus. Cured by: `convert_to_numpy=True`, so that each batch's
    embeddings move to the CPU.
    """
    random = np.random.default_rng(0)
    words = random.integers(1, 8000, (130_000, 5))
    corpus = [row[:n] for row, n in zip(words, random.integers(3, 6, len(words)))]
    model = SentenceTransformer().cuda()
    if fixed:
        corpus_embeddings = model.encode(corpus, batch_size=1024, convert_to_numpy=True)
    else:
        corpus_embeddings = model.encode(corpus, batch_size=1024, convert_to_tensor=True)
    return corpus_embeddings.shape


# Speech recognition of parts of recordings that a manifest lists.

class EncDecCTCModel(nn.Module):
    def __init__(self, features=80, width=128, vocabulary=1024):
        super().__init__()
        self.mel = nn.Conv1d(1, features, 400, stride=160, padding=200)
        self.encoder = nn.Sequential(nn.Conv1d(features, width, 3, stride=2, padding=1), nn.ReLU(), nn.Conv1d(width, width, 3, stride=2, padding=1), nn.ReLU(),
                                     nn.Conv1d(width, width, 11, padding=5, groups=width), nn.Conv1d(width, width, 1), nn.ReLU())
        self.decoder = nn.Conv1d(width, vocabulary + 1, 1)

    def forward(self, input_signal, input_signal_length):
        encoded = self.encoder(self.mel(input_signal.unsqueeze(1)))
        logits = self.decoder(encoded).transpose(1, 2).log_softmax(-1)
        return logits, (input_signal_length // 640).clamp(1, logits.shape[1]), logits.argmax(-1)


class Hypothesis:
    def __init__(self, text):
        self.text, self.y_sequence = text, None


def ctc_decoder_predictions_tensor(decoder_outputs, decoder_lengths):
    return [Hypothesis(ids[:n].tolist()) for ids, n in zip(decoder_outputs.cpu(), decoder_lengths)]


class PartialAudio(Dataset):
    def __init__(self, durations, sample_rate=16000):
        self.durations, self.sample_rate = durations, sample_rate

    def __len__(self):
        return len(self.durations)

    def __getitem__(self, index):
        samples = int(self.durations[index] * self.sample_rate)
        return torch.randn(samples), samples


def collate_audio(samples):
    signals, lengths = zip(*samples)
    return nn.utils.rnn.pad_sequence(signals, batch_first=True), torch.tensor(lengths)


def transcribe_partial_audio(asr_model, manifest, batch_size=4, logprobs=False, return_hypotheses=False, logits_to_cpu=False):
    hypotheses = []
    device = next(asr_model.parameters()).device
    asr_model.eval()
    temporary_datalayer = DataLoader(manifest, batch_size=batch_size, collate_fn=collate_audio)
    with torch.no_grad():
        for test_batch in temporary_datalayer:
            logits, logits_len, greedy_predictions = asr_model(test_batch[0].to(device), test_batch[1])
            if logits_to_cpu:
                logits = logits.cpu()
            if logprobs:
                for idx in range(logits.shape[0]):
                    hypotheses.append(logits[idx][:logits_len[idx]].cpu().numpy())
            else:
                current_hypotheses = ctc_decoder_predictions_tensor(greedy_predictions, logits_len)
                if return_hypotheses:
                    for idx in range(logits.shape[0]):
                        current_hypotheses[idx].y_sequence = logits[idx][:logits_len[idx]]
                hypotheses += current_hypotheses
            del greedy_predictions, logits, test_batch
    return hypotheses


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="NVIDIA-NeMo/Speech#7249", memory=500, held_back=True)
def transcribe_speech(fixed=False):
    """`transcribe_partial_audio` stores the logits of every utterance in the results (`y_sequence`) as GPU tensors, so memory grows with
    each batch transcribed. Cured by: move the logits to the CPU before they are stored.
    """
    durations = np.random.default_rng(0).uniform(4, 16, 320)
    asr_model = EncDecCTCModel().cuda()
    hypotheses = transcribe_partial_audio(asr_model, PartialAudio(durations), batch_size=16, return_hypotheses=True, logits_to_cpu=fixed)
    return [h.text[:3] for h in hypotheses]


# Efficient policy optimization: the model hands out hidden states, and the head is applied chunk by chunk in the loss.

def hidden_states_forward(model, logits_to_keep):
    old_forward = model.forward

    def forward(input_ids, attention_mask=None, **kwargs):
        outputs = old_forward(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True, logits_to_keep=logits_to_keep, use_cache=False)
        outputs.logits = outputs.hidden_states[-1]
        outputs.hidden_states = None
        return outputs
    return forward


def chunked_selective_log_softmax(hidden_states, lm_head, index, chunks):
    def logps_of(hidden, ids):
        logits = (hidden @ lm_head.t()).float()
        return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - logits.logsumexp(-1)
    pieces = zip(hidden_states.reshape(-1, hidden_states.shape[-1]).chunk(chunks), index.reshape(-1).chunk(chunks))
    return torch.cat([checkpoint(logps_of, h, i, use_reentrant=False) for h, i in pieces]).view(index.shape)


def efficient_grpo_loss(model, lm_head, input_ids, attention_mask, advantages, logits_to_keep):
    new_hidden_states = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, :-1][:, -logits_to_keep:]
    completion_ids = input_ids[:, -logits_to_keep:]
    new_logps = chunked_selective_log_softmax(new_hidden_states, lm_head, completion_ids, chunks=16)
    ratio = torch.exp(new_logps - new_logps.detach())
    return -(ratio * advantages.unsqueeze(1)).mean()


@expected("logits", fix="logits_to_keep", thread="unslothai/unsloth#8576", memory=700, held_back=True)
def train_efficient_grpo(fixed=False):
    """The wrapper that returns hidden states in place of logits passes `logits_to_keep=0` on, which means all positions: the model projects
    the whole prompt and completion onto the vocabulary and the logits are thrown away, while the loss applies `lm_head` in chunks itself.
    Cured by: ask the model for the logits of one position only.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(vocab_size=48000, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2)
    model = LlamaForCausalLM(config).cuda()
    model.forward = hidden_states_forward(model, logits_to_keep=1 if fixed else 0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for _ in range(3):
        input_ids = torch.randint(config.vocab_size, (4, 768)).cuda()
        loss = efficient_grpo_loss(model, model.lm_head.weight, input_ids, torch.ones_like(input_ids), torch.randn(4).cuda(), 512)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


# Which prompt tokens does a language model rely on? Gradient times activation at a layer, for each token of the answer.

class LayerGradientXActivation:
    def __init__(self, forward_func, layer):
        self.forward_func, self.layer = forward_func, layer

    def attribute(self, inputs, additional_forward_args):
        saved = {}
        handle = self.layer.register_forward_hook(lambda module, args, output: saved.__setitem__("eval", output))
        output = self.forward_func(inputs, *additional_forward_args)
        handle.remove()
        layer_eval = saved["eval"]
        grads, = torch.autograd.grad(output.sum(), layer_eval)
        return grads * layer_eval


class LLMGradientAttribution:
    def __init__(self, model, layer, detach_attr):
        self.model, self.detach_attr = model, detach_attr
        self.attr_method = LayerGradientXActivation(self._forward_func, layer)

    def _forward_func(self, model_inp, target_tokens, cur_target_idx):
        if cur_target_idx:
            model_inp = torch.cat([model_inp, target_tokens[:, :cur_target_idx]], 1)
        log_probs = self.model(model_inp)[:, -1].log_softmax(-1)
        return log_probs.gather(-1, target_tokens[:, cur_target_idx:cur_target_idx + 1])[:, 0]

    def _generate(self, inp, max_new_tokens):
        tokens = inp
        for _ in range(max_new_tokens):
            next_token = self.model(tokens)[:, -1].argmax(-1, keepdim=True).clamp(0, self.model.embed_tokens.num_embeddings - 1)
            tokens = torch.cat([tokens, next_token], 1)
        return tokens[:, inp.shape[1]:]

    def attribute(self, inp, max_new_tokens):
        if self.detach_attr:
            with torch.no_grad():
                target_tokens = self._generate(inp, max_new_tokens)
        else:
            target_tokens = self._generate(inp, max_new_tokens)
        attr_list = []
        for cur_target_idx in range(target_tokens.shape[1]):
            attr = self.attr_method.attribute(inp, (target_tokens, cur_target_idx))
            if self.detach_attr:
                attr = attr.detach()
            attr = attr[:, :inp.shape[1]].sum(-1)
            attr_list.append(attr)
        attr = torch.cat(attr_list, 0)
        return attr.sum(0).detach().cpu(), attr.detach().cpu()


@expected("graph_of_earlier_steps", fix="detach", thread="meta-pytorch/captum#1347", memory=700, held_back=True)
def explain_answer(fixed=False):
    """The attributions that `LayerGradientXActivation` returns still have a `grad_fn`; `attr_list` keeps one for each target token and with
    it the autograd graph of that forward pass below the layer, so memory accumulates over the attribute calls. Cured by: detach the
    attributions so that the graph is freed between attribute calls, and generate under `no_grad`.
    """
    model = CausalLM(4000, 256, 6).cuda().eval()
    llm_attr = LLMGradientAttribution(model, model.layers[4], detach_attr=fixed)
    prompt = torch.randint(4000, (1, 512)).cuda()
    seq_attr, token_attr = llm_attr.attribute(prompt, max_new_tokens=32)
    return token_attr.shape


# A small trainer with an evaluation loop; the module returns predictions from its validation step.

class EvaluationLoop:
    def __init__(self, trainer):
        self.trainer, self.outputs = trainer, []

    def on_evaluation_epoch_start(self):
        self.outputs = []

    def evaluation_step(self, batch, batch_idx):
        output = self.trainer.model.validation_step([x.cuda() for x in batch], batch_idx)
        self.outputs.append(output)

    def evaluation_epoch_end(self, delete_outputs):
        outputs = self.outputs
        if delete_outputs:
            self.outputs = []
        self.trainer.model.validation_epoch_end(outputs)


class Trainer:
    def __init__(self, max_epochs, delete_outputs):
        self.max_epochs, self.delete_outputs = max_epochs, delete_outputs
        self.evaluation_loop = EvaluationLoop(self)

    def run_evaluation(self, dataloader):
        self.model.eval()
        self.evaluation_loop.on_evaluation_epoch_start()
        with torch.no_grad():
            for batch_idx, batch in enumerate(dataloader):
                self.evaluation_loop.evaluation_step(batch, batch_idx)
        self.evaluation_loop.evaluation_epoch_end(self.delete_outputs)
        self.model.train()

    def run_training_epoch(self, dataloader):
        for batch_idx, batch in enumerate(dataloader):
            self.optimizer.zero_grad()
            loss = self.model.training_step([x.cuda() for x in batch], batch_idx)
            loss.backward()
            self.optimizer.step()

    def fit(self, model, train_dataloader, val_dataloader):
        self.model, self.optimizer = model.cuda(), model.configure_optimizers()
        for _ in range(self.max_epochs):
            self.run_training_epoch(train_dataloader)
            self.run_evaluation(val_dataloader)


class LitSegmenter(nn.Module):
    def __init__(self, classes=21, width=32):
        super().__init__()
        conv = lambda i, o: nn.Sequential(nn.Conv2d(i, o, 3, padding=1, bias=False), nn.BatchNorm2d(o), nn.ReLU(inplace=True))
        self.net = nn.Sequential(conv(3, width), conv(width, width), conv(width, width), conv(width, width), nn.Conv2d(width, classes, 1))
        self.history = []

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        return {"val_loss": F.cross_entropy(logits, batch[1]), "preds": logits.softmax(1), "target": batch[1]}

    def validation_epoch_end(self, outputs):
        self.history.append(torch.stack([x["val_loss"] for x in outputs]).mean().item())
        correct = [(x["preds"].argmax(1) == x["target"]).float().mean() for x in outputs]
        self.history.append(torch.stack(correct).mean().item())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class RandomMasks(Dataset):
    def __init__(self, length, size=160):
        self.length, self.image, self.mask = length, torch.rand(3, size, size), torch.randint(21, (size, size))

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return self.image, self.mask


@expected("kept_tensors", fix=r"\bdel\b|clear|\.cpu\(\)", thread="Lightning-AI/pytorch-lightning#5735", memory=850, held_back=True)
def fit_segmenter(fixed=False):
    """`evaluation_loop.outputs` keeps what every validation step returned (here whole prediction maps on the GPU) until the next validation
    begins, so the training epoch after it has that much less memory. Cured by: delete `evaluation_loop.outputs` at the end of the
    validation epoch.
    """
    model = LitSegmenter()
    trainer = Trainer(max_epochs=3, delete_outputs=fixed)
    trainer.fit(model, DataLoader(RandomMasks(64), batch_size=16), DataLoader(RandomMasks(128), batch_size=16))
    return model.history
