"""Programs after public threads from all fields."""
import functools
import gc
import os
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected
from programs.root_causes import no_grad_if


# Robots: a trained gait is played in many simulated worlds, whose motors are a network as well.

class LeggedWorlds:
    def __init__(self, worlds, frames=30):
        self.dof_pos, self.dof_vel = torch.zeros(worlds, 12).cuda(), torch.zeros(worlds, 12).cuda()
        self.last_pos_error = torch.zeros(worlds, 12).cuda()
        self.obs_history = torch.zeros(worlds, frames * 36).cuda()
        self.actuator = nn.Sequential(nn.Linear(36, 32), nn.Softsign(), nn.Linear(32, 32), nn.Softsign(),
                                      nn.Linear(32, 12)).cuda()

    def torques(self, actions):
        pos_error = self.dof_pos - 0.25 * actions
        torques = self.actuator(torch.cat([pos_error, self.last_pos_error, self.dof_vel], 1))
        self.last_pos_error = pos_error
        return torques.clip(-33, 33)

    def step(self, actions):
        actions = actions.clip(-10, 10)
        for _ in range(4):
            self.dof_vel = 0.98 * self.dof_vel + 0.005 * self.torques(actions)
            self.dof_pos = self.dof_pos + 0.005 * self.dof_vel
        obs = torch.cat([self.dof_pos, self.dof_vel, actions], 1)
        self.obs_history = torch.cat([self.obs_history[:, 36:], obs], 1)
        return self.obs_history


@expected("evaluation_keeps_graphs", fix="no_grad", thread="Improbable-AI/walk-these-ways#10", memory=1000)
def play_gait(fixed=False):
    """The simulator keeps `dof_pos`, `dof_vel`, `last_pos_error` and `obs_history` from step to step, and as `env.step` runs with gradients
    they carry the graphs of the policy and of the actuator network of every step played so far. Cured by: `with torch.no_grad()` in
    `step()` and `reset()`.
    """
    env = LeggedWorlds(worlds=4000)
    policy = nn.Sequential(nn.Linear(30 * 36, 512), nn.ELU(), nn.Linear(512, 256), nn.ELU(), nn.Linear(256, 128),
                           nn.ELU(), nn.Linear(128, 12)).cuda().eval()
    obs, speeds = env.obs_history, []
    for _ in range(50):
        actions = policy(obs)
        with no_grad_if(fixed):
            obs = env.step(actions)
        speeds.append(env.dof_vel.abs().mean().item())
    return speeds


# Segmentation: all predictions of a validation set, with their masks.

def to_detach(tensor, to_cpu):
    return tensor.detach().cpu() if to_cpu else tensor.detach()


def validation_batches(count, side=448):
    for _ in range(count):
        yield torch.randn(16, 3, side, side), torch.randint(0, 5, (16, side, side))


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="fastai/fastai#2337", memory=800)
def predictions_and_masks(fixed=False):
    """The loop over the validation set moves the predictions to the CPU, but only detaches the masks `yb`, so all masks of the set pile up
    on the GPU in `outputs`. Cured by: `to_detach(yb)`, which also moves them to the CPU, in place of `yb.detach()`.
    """
    unet = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1),
                         nn.ReLU(), nn.ConvTranspose2d(16, 5, 2, 2)).cuda().eval()
    outputs, losses = [], []
    with torch.no_grad():
        for xb, yb in validation_batches(36):
            xb, yb = xb.cuda(), yb.cuda()
            scores = unet(xb)
            losses.append(F.cross_entropy(scores, yb).cpu())
            outputs.append((to_detach(scores.argmax(1).byte(), True), to_detach(yb, to_cpu=fixed)))
    classes = torch.cat([classes for classes, _ in outputs])
    masks = torch.cat([mask.cpu() for _, mask in outputs])
    return (classes == masks).float().mean().item(), torch.stack(losses).mean().item()


# Detection in aerial images: a few of them show a whole car park.

def bbox_overlaps(gt_bboxes, bboxes):
    top_left = torch.max(gt_bboxes[:, None, :2], bboxes[None, :, :2])
    bottom_right = torch.min(gt_bboxes[:, None, 2:], bboxes[None, :, 2:])
    size = (bottom_right - top_left).clamp(min=0)
    overlap = size[..., 0] * size[..., 1]
    area = (gt_bboxes[:, 2:] - gt_bboxes[:, :2]).prod(1), (bboxes[:, 2:] - bboxes[:, :2]).prod(1)
    return overlap / (area[0][:, None] + area[1][None] - overlap).clamp(min=1e-6)


class MaxIoUAssigner:
    def __init__(self, gpu_assign_thr):
        self.gpu_assign_thr = gpu_assign_thr

    def assign(self, anchors, gt_bboxes, gt_labels):
        device = anchors.device
        if len(gt_bboxes) > self.gpu_assign_thr:
            anchors, gt_bboxes, gt_labels = anchors.cpu(), gt_bboxes.cpu(), gt_labels.cpu()
        best, index = bbox_overlaps(gt_bboxes, anchors).max(0)
        return torch.where(best > 0.5, gt_labels[index], 0).to(device)


def anchors_of_levels(height, width):
    anchors = []
    for stride in (8, 16, 32, 64):
        y, x = torch.meshgrid(torch.arange(0, height, stride), torch.arange(0, width, stride), indexing="ij")
        centres = torch.stack([x, y, x, y], -1).reshape(-1, 1, 4).float()
        shapes = stride * torch.tensor([[-2, -2, 2, 2], [-3, -1, 3, 1], [-1, -3, 1, 3.0]])
        anchors.append((centres + shapes).reshape(-1, 4))
    return torch.cat(anchors).cuda()


@expected("all_pairs", fix=r"\.cpu\(\)|split|chunk", thread="open-mmlab/mmdetection#1581", memory=1000)
def train_on_aerial_images(fixed=False):
    """One image has 650 boxes, and `bbox_overlaps` builds tensors of boxes times anchors (times two coordinates) on the GPU to assign
    targets. Cured by: assigning on the CPU where an image has many boxes (`gpu_assign_thr`).
    """
    neck = nn.Sequential(nn.Conv2d(3, 64, 7, 8, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()).cuda()
    heads = nn.ModuleList(nn.Conv2d(64, 3 * 16, 3, 2 ** level, 1) for level in range(4)).cuda()
    optimizer = torch.optim.SGD([*neck.parameters(), *heads.parameters()], 0.01, momentum=0.9)
    assigner, anchors = MaxIoUAssigner(gpu_assign_thr=200 if fixed else 1 << 30), anchors_of_levels(1024, 1024)
    for cars in (14, 31, 8, 57, 22, 650, 19):
        corners = torch.rand(cars, 2) * 1000
        gt_bboxes, gt_labels = torch.cat([corners, corners + 24], 1).cuda(), torch.randint(1, 16, (cars,)).cuda()
        features = neck(torch.randn(1, 3, 1024, 1024).cuda())
        scores = torch.cat([head(features).permute(0, 2, 3, 1).reshape(-1, 16) for head in heads])
        loss = F.cross_entropy(scores, assigner.assign(anchors, gt_bboxes, gt_labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# A GAN whose critic is held smooth by a penalty on its gradients.

class WassersteinLoss:
    def __init__(self, critic, by_grad):
        self.critic, self.by_grad = critic, by_grad

    def gradient_penalty(self, real, fake):
        epsilon = torch.rand(len(real), 1, 1, 1).cuda()
        merged = (epsilon * real + (1 - epsilon) * fake).requires_grad_()
        score = self.critic(merged)
        if self.by_grad:
            gradient = torch.autograd.grad(score, merged, torch.ones_like(score), create_graph=True)[0]
        else:
            score.backward(torch.ones_like(score), create_graph=True)
            gradient = merged.grad
        return ((gradient.flatten(1).norm(2, 1) - 1) ** 2).mean()

    def of_critic(self, real, fake):
        return self.critic(fake).mean() - self.critic(real).mean() + 10 * self.gradient_penalty(real, fake)


@expected("create_graph", fix=r"autograd\.grad", thread="akanimax/pro_gan_pytorch#12", memory=1200)
def train_critic(fixed=False):
    """The gradient penalty calls `score.backward(create_graph=True)` and reads `merged.grad`: `merged` holds its gradient, whose graph
    holds `merged` again, so the mixed images and their gradient of every iteration are never freed. Cured by: `torch.autograd.grad(...,
    create_graph=True)` in its place.
    """
    critic = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.LeakyReLU(0.2), nn.Conv2d(16, 32, 4, 4), nn.LeakyReLU(0.2),
                           nn.Flatten(), nn.Linear(32 * 16 * 16, 1)).cuda()
    generator = nn.Sequential(nn.Linear(128, 3 * 32 * 32), nn.Unflatten(1, (3, 32, 32)), nn.Upsample(scale_factor=8),
                              nn.Tanh()).cuda()
    optimizer = torch.optim.Adam(critic.parameters(), 1e-3, (0.0, 0.99))
    loss_of = WassersteinLoss(critic, by_grad=fixed)
    for _ in range(40):
        real = torch.randn(24, 3, 256, 256).cuda()
        fake = generator(torch.randn(24, 128).cuda()).detach()
        loss = loss_of.of_critic(real, fake)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# A detector whose position embeddings are made once for each size of image.

class SineDetector(nn.Module):
    def __init__(self, width, cache_of_its_own):
        super().__init__()
        self.width = width
        self.backbone = nn.Conv2d(3, width, 32, 32)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True), 3)
        self.boxes = nn.Linear(width, 4)
        self.positions = functools.lru_cache(8)(self.make_positions) if cache_of_its_own else self.cached_positions

    def make_positions(self, height, width):
        steps = torch.arange(height * width).cuda()[:, None] / 10000 ** torch.linspace(0, 1, self.width // 2).cuda()
        return torch.cat([steps.sin(), steps.cos()], 1)

    @functools.lru_cache(maxsize=32)
    def cached_positions(self, height, width):
        return self.make_positions(height, width)

    def forward(self, images):
        features = self.backbone(images)
        tokens = features.flatten(2).transpose(1, 2) + self.positions(*features.shape[2:])
        return self.boxes(self.encoder(tokens)).sigmoid()


@expected("kept_tensors", fix="cache_clear", thread="huggingface/transformers#45412", memory=800)
def compare_checkpoints(fixed=False):
    """`functools.lru_cache` on the method that makes the position embeddings has `self` in its keys, so the cache of the class keeps every
    model that ever ran, also after `del model` and `gc.collect()`. Cured by: a cache that does not hold the model (of each instance, or
    without `self`).
    """
    boxes_of = {}
    for checkpoint in range(14):
        model = SineDetector(768, cache_of_its_own=fixed).cuda().eval()
        with torch.no_grad():
            boxes_of[checkpoint] = model(torch.randn(2, 3, 640, 640).cuda()).cpu()
        del model
        gc.collect()
        torch.cuda.empty_cache()
    return boxes_of


# A chat backend: each instruction is answered, then the same model judges whether the answer meets the requirements.

class TinyDecoder(nn.Module):
    def __init__(self, width=512, layers=6, words=16000):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.projections = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.mixers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, ids, past):
        x, present = self.words(ids), []
        for projection, mixer, old in zip(self.projections, self.mixers, past or [None] * len(self.mixers)):
            query, key, value = projection(x).chunk(3, -1)
            if old is not None:
                key, value = torch.cat([old[0], key], 1), torch.cat([old[1], value], 1)
            x = x + mixer(F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])[:, 0])
            present.append((key, value))
        return x[:, -1] @ self.words.weight.T, present

    @torch.no_grad()
    def generate(self, ids, new_tokens):
        output, past = {"sequence": ids, "scores": []}, None
        for _ in range(new_tokens):
            logits, past = self(ids, past)
            ids = logits.argmax(-1, keepdim=True)
            output["scores"].append(logits)
            output["sequence"] = torch.cat([output["sequence"], ids], 1)
        return {**output, "past_key_values": past}


class LocalBackend:
    def __init__(self, keep_raw_output):
        self.model, self.keep_raw_output = TinyDecoder().cuda().eval(), keep_raw_output

    def generate_from_context(self, prompt):
        raw = self.model.generate(prompt.cuda(), new_tokens=5)
        thunk = {"value": raw["sequence"][:, prompt.shape[1]:].cpu(), "meta": {"length": raw["sequence"].shape[1]}}
        if self.keep_raw_output:
            thunk["meta"]["hf_output"] = raw
        return thunk


# The report names the list of answers, and not the key-value cache in each.
@expected("kept_tensors", fix=r"\bdel\b|\.cpu\(\)", thread="generative-computing/mellea#544", memory=1000)
def instruct_again_and_again(fixed=False):
    """Every answer and every verdict keeps the raw output of `generate` in `meta["hf_output"]`, with the KV cache and the scores, and the
    context keeps all of them. Cured by: the raw output (KV cache, scores) is dropped once the answer was read.
    """
    backend, context = LocalBackend(keep_raw_output=not fixed), []
    for _ in range(16):
        prompt = torch.randint(0, 16000, (1, 1100))
        answer = backend.generate_from_context(prompt)
        verdicts = [backend.generate_from_context(prompt) for _ in range(3)]
        context.append((answer, verdicts))
    return [answer["value"] for answer, _ in context]


# Speech: the sample of a voice is encoded once, before anything is spoken with it.

class Snake(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.alpha = nn.Parameter(torch.ones(1, channels, 1))

    def forward(self, x):
        return x + (self.alpha + 1e-9).reciprocal() * torch.sin(self.alpha * x).pow(2)


class CodecEncoder(nn.Module):
    def __init__(self, channels=32, strides=(2, 4, 5, 6)):
        super().__init__()
        blocks = [nn.Conv1d(1, channels, 7, padding=3)]
        for stride in strides:
            for dilation in (1, 3, 9):
                blocks += [Snake(channels), nn.Conv1d(channels, channels, 7, dilation=dilation, padding=3 * dilation)]
            blocks += [Snake(channels), nn.Conv1d(channels, 2 * channels, 2 * stride, stride)]
            channels *= 2
        self.blocks = nn.Sequential(*blocks)

    def forward(self, wave):
        return self.blocks(wave)


# Only a whole run shows that no backward pass comes (`run --complete`); these programs are run once.
@expected("evaluation_keeps_graphs", fix="no_grad", thread="jamiepine/voicebox#890", memory=1000)
def create_voice_prompt(fixed=False):
    """The sample is encoded in `eval()` but with gradients, so autograd keeps several tensors of full audio length for every Snake and
    convolution of the encoder. Cured by: `torch.inference_mode()` around the encoding.
    """
    encoder = CodecEncoder().cuda()
    encoder.eval()
    sample = torch.randn(1, 1, 12 * 24000).cuda()
    with no_grad_if(fixed):
        embedding = encoder(sample)
    return embedding.detach().cpu()


# Graphs: a sum over the edges that brings its own gradient.

class SumOfSources(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, sources, targets, tidy):
        output = torch.zeros_like(features).index_add_(0, targets, features[sources])
        if tidy:
            ctx.save_for_backward(sources, targets, output)
        else:
            ctx.backward_cache = sources, targets, output
        return output

    @staticmethod
    def backward(ctx, gradient):
        if ctx.saved_tensors:
            sources, targets, output = ctx.saved_tensors
        else:
            sources, targets, output = ctx.backward_cache
            ctx.backward_cache = None
        return torch.zeros_like(output).index_add_(0, sources, gradient[targets]), None, None, None


class GraphNet(nn.Module):
    def __init__(self, tidy):
        super().__init__()
        self.tidy = tidy
        self.layers = nn.ModuleList([nn.Linear(128, 256), nn.Linear(256, 64)])

    def forward(self, features, sources, targets):
        hidden = SumOfSources.apply(self.layers[0](features), sources, targets, self.tidy).relu()
        return SumOfSources.apply(self.layers[1](hidden), sources, targets, self.tidy)


@expected("output_on_ctx", fix="save_for_backward", thread="dmlc/dgl#1060", memory=1000)
def train_graph_net(fixed=False):
    """The custom function stores its own output on `ctx.backward_cache`, which only `backward` clears: the forward pass that measures
    accuracy has no backward, so output and context hold each other, and both sums of every epoch stay until the garbage collector runs.
    Cured by: `ctx.save_for_backward` (nothing left on the context).
    """
    gc.disable()  # the collector runs when enough objects have been made: here never
    net, nodes, edges = GraphNet(tidy=fixed).cuda(), 20000, 60000
    graph = torch.randn(nodes, 128).cuda(), *torch.randint(0, nodes, (2, edges)).cuda()
    labels = torch.randint(0, 64, (nodes,)).cuda()
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    best = 0.0
    for _ in range(50):
        loss = F.cross_entropy(net(*graph), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        logits = net(*graph)
        best = max(best, (logits.argmax(1) == labels).float().mean().item())
    return best


# A solver of routes that decodes stop by stop, in mixed precision.

class StepPrecision:
    def __init__(self, cache_enabled):
        self.cache_enabled = cache_enabled

    def autocast_context_manager(self):
        return torch.autocast("cuda", dtype=torch.float16, cache_enabled=self.cache_enabled)


class RouteDecoder(nn.Module):
    def __init__(self, width=1536):
        super().__init__()
        self.mix = nn.Sequential(nn.Linear(2 * width, width), nn.GELU(), nn.Linear(width, width), nn.GELU(),
                                 nn.Linear(width, width))

    def forward(self, stops, state):
        state = state + self.mix(torch.cat([stops.mean(1), state], 1))
        return (stops @ state[:, :, None])[..., 0].log_softmax(-1), state


@expected("repeated_casts", fix="cache_enabled=True", thread="Lightning-AI/pytorch-lightning#21611", memory=1200)
def train_route_decoder(fixed=False):
    """Autocast runs with `cache_enabled=False`, so every decoding step within one training step casts all weights to half precision anew,
    and autograd keeps each of these copies until the backward. Cured by: the autocast weight cache enabled again.
    """
    decoder = RouteDecoder().cuda()
    precision = StepPrecision(cache_enabled=fixed)
    optimizer = torch.optim.AdamW(decoder.parameters(), 1e-4)
    for _ in range(3):
        stops, state, log_likelihood = torch.randn(16, 50, 1536).cuda(), torch.zeros(16, 1536).cuda(), 0
        with precision.autocast_context_manager():
            for _ in range(50):
                log_probabilities, state = decoder(stops, state)
                log_likelihood = log_likelihood + log_probabilities.max(1).values
        optimizer.zero_grad()
        (-log_likelihood.mean()).backward()
        optimizer.step()


# Biosignals: the area under the curve over an epoch needs all scores of it.

class AreaUnderCurve:
    def __init__(self):
        self.preds, self.target = [], []

    def __call__(self, preds, target):
        self.preds.append(preds)
        self.target.append(target)

    def compute(self):
        order = torch.cat(self.preds).argsort(0)
        hits = torch.cat(self.target).gather(0, order).float()
        return (hits.cumsum(0) * (1 - hits)).sum(0) / (hits.sum(0) * (1 - hits).sum(0))


@expected("graph_of_earlier_steps", fix="detach", thread="Lightning-AI/torchmetrics#1461", memory=1000)
def train_on_signals(fixed=False):
    """The metric appends the predictions to its list `preds` with their graph, so the activations of the forward pass of every batch of the
    epoch stay. Cured by: `predictions.detach()` given to the metric.
    """
    model = nn.Sequential(nn.Conv1d(20, 128, 7, padding=3), nn.BatchNorm1d(128), nn.ReLU(),
                          nn.Conv1d(128, 128, 7, padding=3), nn.BatchNorm1d(128), nn.ReLU(), nn.AdaptiveAvgPool1d(1),
                          nn.Flatten(), nn.Linear(128, 9), nn.Sigmoid()).cuda()
    optimizer, auc = torch.optim.Adam(model.parameters(), 1e-3), AreaUnderCurve()
    for _ in range(40):
        signals, labels = torch.randn(32, 20, 991).cuda(), torch.randint(0, 2, (32, 9)).cuda()
        loss = F.binary_cross_entropy(model(signals + 0.1 * torch.randn(32, 20, 991).cuda()), labels.float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        predictions = model(signals)
        auc(predictions.detach() if fixed else predictions, labels)
    return auc.compute().mean().item()


# Reinforcement learning of a language model: how likely were the tokens of a rollout?

class Actor(nn.Module):
    def __init__(self, words, width=512):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.block = nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True)
        self.lm_head = nn.Linear(width, words, bias=False)

    def forward(self, tokens):
        return self.lm_head(self.block(self.words(tokens)))


def token_logprobs(logits, tokens, chunk_size):
    parts = []
    for logits, tokens in zip(logits.split(chunk_size, 1), tokens.split(chunk_size, 1)):
        parts.append(logits.float().log_softmax(-1).gather(-1, tokens[..., None])[..., 0])
    return torch.cat(parts, 1)


@expected("logits", fix="split|chunk", thread="NovaSky-AI/SkyRL#1610", memory=900)
def logprobs_of_rollouts(fixed=False):
    """The log probabilities of the tokens are computed for the whole rollout at once: a float32 copy of the logits and a float32
    `log_softmax`, each of length times vocabulary, to pick one number per token. Cured by: log probabilities in chunks of the sequence.
    """
    words, length = 60000, 1536
    actor = Actor(words).cuda().bfloat16().eval()
    logprobs = []
    with torch.no_grad():
        for _ in range(4):
            rollout = torch.randint(0, words, (1, length)).cuda()
            logits = actor(rollout)
            logprobs.append(token_logprobs(logits[:, :-1], rollout[:, 1:], 128 if fixed else length).cpu())
    return torch.cat(logprobs)


# Molecular dynamics: the long-range part of a potential, whose charges a network predicts.

class EwaldModel(nn.Module):
    def __init__(self, systems, detach_buffer):
        super().__init__()
        self.charges = nn.Sequential(nn.Embedding(100, 256), nn.Linear(256, 512), nn.SiLU(), nn.Linear(512, 512),
                                     nn.SiLU(), nn.Linear(512, 1))
        self.detach_buffer = detach_buffer
        self._energies = torch.zeros(systems).cuda()

    def forward(self, positions, numbers, batch_index):
        charges = self.charges(numbers)[:, 0]
        waves = torch.randn(3, 64).cuda()
        phases = positions @ waves
        per_atom = charges * (charges[:, None] * phases.cos()).mean(1)
        self._energies.zero_()
        self._energies.scatter_add_(0, batch_index, per_atom)
        energies = self._energies.clone()
        if self.detach_buffer:
            self._energies.detach_()
        return energies


@expected("graph_of_earlier_steps", fix=r"_energies\.detach", thread="NVIDIA/nvalchemi-toolkit#82", memory=800)
def run_dynamics(fixed=False):
    """The model reuses one buffer `_energies` with `zero_()` and `scatter_add_()`: these in-place operations chain the graph of each step
    to those of all steps before (with the activations of the charge network, which the forces' gradient does not free). Cured by:
    `detach_()` of the buffer after its clone was taken.
    """
    systems, atoms = 32, 5000
    model = EwaldModel(systems, detach_buffer=fixed).cuda()
    numbers, batch_index = torch.randint(1, 100, (atoms,)).cuda(), torch.randint(0, systems, (atoms,)).cuda()
    positions, velocities, trace = torch.randn(atoms, 3).cuda(), torch.zeros(atoms, 3).cuda(), []
    for _ in range(50):
        positions = positions.detach().requires_grad_()
        energies = model(positions, numbers, batch_index)
        forces = -torch.autograd.grad(energies.sum(), positions)[0]
        velocities = velocities + 0.001 * forces
        positions = positions + 0.001 * velocities
        trace.append(energies.detach().cpu())
    return torch.stack(trace)


# A radiance field that learns the poses of its cameras too.

def to_homogeneous(points):
    return torch.cat([points, torch.ones_like(points[..., :1])], -1)


def centers_and_rays(pose, grid):
    camera = torch.cat([grid, torch.ones_like(grid[..., :1])], -1)
    points = to_homogeneous(camera) @ pose.transpose(1, 2)
    centers = to_homogeneous(torch.zeros_like(camera)) @ pose.transpose(1, 2)
    return centers, points - centers


class BundleAdjustedField(nn.Module):
    def __init__(self, images, side, gather_first):
        super().__init__()
        self.side, self.gather_first = side, gather_first
        self.pose = nn.Parameter(torch.eye(3, 4).repeat(images, 1, 1))
        self.field = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))

    def forward(self, chosen):
        y, x = torch.meshgrid(*[torch.linspace(-1, 1, self.side).cuda()] * 2, indexing="ij")
        grid = torch.stack([x, y], -1).reshape(1, -1, 2)
        if self.gather_first:
            centers, rays = centers_and_rays(self.pose, grid[:, chosen].expand(len(self.pose), -1, -1))
        else:
            centers, rays = centers_and_rays(self.pose, grid.expand(len(self.pose), -1, -1))
            centers, rays = centers[:, chosen], rays[:, chosen]
        depths = torch.linspace(1, 6, 32).cuda()[:, None]
        samples = self.field(centers[:, :, None] + depths * rays[:, :, None])
        weights = samples[..., 3:].softmax(2)
        return (weights * samples[..., :3].sigmoid()).sum(2)


@expected("equal_rows", fix="chosen|index|first", thread="chenhsuanlin/bundle-adjusting-NeRF#41", memory=900)
def fit_field_and_poses(fixed=False):
    """Centres and rays are computed for every pixel of every image, and only then the few chosen rays are picked; so several tensors of
    images times all pixels are made for 40 rays per image. Cured by: picking the pixels first, then computing only their rays.
    """
    images, side, rays = 48, 480, 40
    pixels = torch.rand(images, side * side, 3)
    model = BundleAdjustedField(images, side, gather_first=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(5):
        chosen = torch.randperm(side * side)[:rays]
        loss = F.mse_loss(model(chosen.cuda()), pixels[:, chosen].cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# A GAN whose training goes on from a checkpoint.

def generator_net():
    return nn.Sequential(nn.Linear(512, 1536), nn.LeakyReLU(0.2), nn.Linear(1536, 3 * 64 * 64), nn.Tanh()).cuda()


def discriminator_net():
    return nn.Sequential(nn.Linear(3 * 64 * 64, 768), nn.LeakyReLU(0.2), nn.Linear(768, 1)).cuda()


class GanTrainer:
    def __init__(self):
        self.parts = {"g": generator_net(), "d": discriminator_net(), "g_ema": generator_net()}
        for name in ("g", "d"):
            self.parts[name + "_optim"] = torch.optim.Adam(self.parts[name].parameters(), 2e-3, (0.0, 0.99))

    def update(self, name, loss):
        self.parts[name + "_optim"].zero_grad()
        loss.backward()
        self.parts[name + "_optim"].step()

    def step(self):
        real, fake = torch.randn(64, 3 * 64 * 64).cuda(), self.parts["g"](torch.randn(64, 512).cuda())
        scores = self.parts["d"](real), self.parts["d"](fake.detach())
        self.update("d", F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean())
        self.update("g", F.softplus(-self.parts["d"](fake)).mean())
        with torch.no_grad():
            for average, parameter in zip(self.parts["g_ema"].parameters(), self.parts["g"].parameters()):
                average.lerp_(parameter, 0.001)


def save_first_run(path):
    trainer = GanTrainer()
    trainer.step()
    torch.save({name: part.state_dict() for name, part in trainer.parts.items()}, path)


@expected("loaded_onto_gpu", fix="map_location", thread="rosinality/stylegan2-pytorch#36", memory=920)
def resume_training(fixed=False):
    """`torch.load` puts the checkpoint back on the GPU it was saved from, and `ckpt` keeps its generator, discriminator and average there
    beside the trainer's own for the rest of the training. Cured by: `map_location=lambda storage, loc: storage` (to the CPU).
    """
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "000001.pt")
        save_first_run(path)
        gc.collect()
        torch.cuda.empty_cache()
        trainer = GanTrainer()
        ckpt = torch.load(path, map_location=(lambda storage, place: storage) if fixed else None)
    for name, part in trainer.parts.items():
        part.load_state_dict(ckpt[name])
    for _ in range(10):
        trainer.step()


# Graphs with many more edges than nodes.

class EdgeConv(nn.Module):
    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs))

    def forward(self, x, sources, targets, norm):
        x = x @ self.weight
        messages = norm[:, None] * x[sources]
        return torch.zeros_like(x).index_add(0, targets, messages)


class SparseConv(EdgeConv):
    def forward(self, x, adjacency):
        return adjacency @ (x @ self.weight)


@expected("enlarged", fix="sparse", thread="pyg-team/pytorch_geometric#459", memory=900)
def embed_nodes(fixed=False):
    """The convolution makes a message of full feature width for every edge (`x[sources]`, then times `norm`), and there are 50 times as
    many edges as nodes. Cured by: a sparse matrix product of the adjacency and `x @ weight`.
    """
    nodes, degree = 14000, 50
    sources, norm = torch.randint(0, nodes, (nodes, degree)).sort(1).values.flatten(), torch.rand(nodes * degree)
    x = torch.randn(nodes, 200).cuda()
    if fixed:
        starts = torch.arange(0, nodes * degree + 1, degree)
        graph = torch.sparse_csr_tensor(starts, sources, norm, (nodes, nodes)).cuda(),
    else:
        graph = sources.cuda(), torch.arange(nodes).repeat_interleave(degree).cuda(), norm.cuda()
    conv = SparseConv if fixed else EdgeConv
    layers = nn.ModuleList([conv(200, 200), conv(200, 64)]).cuda()
    with torch.no_grad():
        return layers[1](layers[0](x, *graph).relu(), *graph).cpu()
