"""Programs after public threads, each as its asker had it: a model of its own, its loader, its loop and the mistake. What is wrong
with each, and what cured it in the thread, was written down in other_rows.py before the first run, by someone who had not read the
rules. The form is that of patterns.py.
"""
import functools
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from patterns import no_grad_if


# Flow matching for speech.

class VectorField(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Linear(1, width)
        self.begin, self.end = nn.Conv2d(2, width, 3, padding=1), nn.Conv2d(width, 2, 3, padding=1)

    def forward(self, t, x):
        return self.end(F.silu(self.begin(x) + self.time(t.view(1, 1))[:, :, None, None]))


class Solver:
    def __init__(self, field, steps=16):
        self.field, self.steps = field, steps

    def simulate(self, x):
        times = torch.linspace(0, 1, self.steps + 1, device="cuda")
        trajectory = [x]
        for begin, end in zip(times[:-1], times[1:]):
            trajectory.append(trajectory[-1] + (end - begin) * self.field(begin, trajectory[-1]))
        return torch.stack(trajectory)


# The solver hands back the states of all times; the last one is the enhanced recording.
def last_of_trajectory(fixed=False):
    solver = Solver(VectorField().cuda().eval())
    enhanced = {}
    with torch.no_grad():
        for number in range(180):
            spectrogram = torch.randn(1, 2, 256, 320).cuda()
            states = solver.simulate(spectrogram)
            enhanced[f"{number:04}.wav"] = states[-1].clone() if fixed else states[-1]
            del states
    return len(enhanced)


# Adapters.

class LoRALinear(nn.Module):
    def __init__(self, before, after, rank=8):
        super().__init__()
        self.base = nn.Linear(before, after, bias=False)
        self.lora_a, self.lora_b = nn.Linear(before, rank, bias=False), nn.Linear(rank, after, bias=False)

    def adapter_params(self):
        return ["lora_a.weight", "lora_b.weight"]

    def forward(self, x):
        return self.base(x) + self.lora_b(self.lora_a(x))


class AdaptedMixer(nn.Module):
    def __init__(self, width=1024, depth=6, classes=4):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.LayerNorm(width), LoRALinear(width, 4 * width), nn.GELU(),
                                                  LoRALinear(4 * width, width)) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x.mean(1))


@functools.lru_cache()
def adapter_parameters(model):
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, "adapter_params"):
            found.update({f"{name}.{key}": module.get_parameter(key) for key in module.adapter_params()})
    return found


# Ten folds, each with a new model; the function that finds its adapters remembers what it was asked.
def adapters_of_folds(fixed=False, folds=10):
    scores = []
    for fold in range(folds):
        model = AdaptedMixer().cuda()
        find = adapter_parameters.__wrapped__ if fixed else adapter_parameters
        trained = find(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in trained)
        optimizer = torch.optim.AdamW(trained.values(), lr=1e-4)
        loss = F.cross_entropy(model(torch.randn(8, 64, 1024).cuda()), torch.randint(4, (8,)).cuda())
        loss.backward()
        optimizer.step()
        scores.append(loss.item())
        del model, optimizer, trained, parameter, loss
        torch.cuda.empty_cache()
    return len(scores)


class LlamaLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm, self.norm_mlp = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv, self.out = LoRALinear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.silu(self.up(self.norm_mlp(x))))


# Only the adapters are given to the optimizer, but gradients are computed for the whole model.
def base_model_not_frozen(fixed=False, width=1024, vocabulary=4000):
    embedding, head = nn.Embedding(vocabulary, width).cuda(), nn.Linear(width, vocabulary, bias=False).cuda()
    layers = nn.Sequential(*[LlamaLayer(width, 16) for _ in range(10)]).cuda()
    if fixed:
        for module in (embedding, head, layers):
            module.requires_grad_(False)
    adapters = [p for name, p in layers.named_parameters() if "lora_" in name]
    for parameter in adapters:
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(adapters, lr=3e-4)
    for _ in range(3):
        tokens = torch.randint(vocabulary, (2, 129)).cuda()
        logits = head(layers(embedding(tokens[:, :-1])))
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return len(adapters)


# Long tails and domain adaptation.

class Estimator:
    """Running covariance of the features of each class."""
    def __init__(self, features, classes, diagonal):
        self.diagonal = diagonal
        self.covariance = torch.zeros(classes, features, *([] if diagonal else [features])).cuda()
        self.mean, self.amount = torch.zeros(classes, features).cuda(), torch.zeros(classes).cuda()

    def update(self, features, labels):
        for label in labels.unique().tolist():
            chosen = features[labels == label]
            centred = chosen - chosen.mean(0)
            now = centred.square().mean(0) if self.diagonal else centred.T @ centred / len(chosen)
            self.covariance[label].lerp_(now, 0.1)
            self.mean[label].lerp_(chosen.mean(0), 0.1)


def covariance_of_each_class(fixed=False, classes=100, features=2048):
    backbone = nn.Sequential(nn.Conv2d(3, 64, 7, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(1024, features))
    backbone.cuda()
    estimator = Estimator(features, classes, diagonal=fixed)
    for _ in range(2):
        with torch.no_grad():
            found = backbone(torch.randn(32, 3, 64, 64).cuda())
        estimator.update(found, torch.randint(classes, (32,)).cuda())
    return estimator.mean.shape


def gaussian_kernels(source, target, by_cdist, multiplier=2.0, kernels=5):
    total = torch.cat([source, target])
    if by_cdist:
        distances = torch.cdist(total, total).square()
    else:
        rows = total.unsqueeze(0).expand(len(total), len(total), total.shape[1])
        columns = total.unsqueeze(1).expand(len(total), len(total), total.shape[1])
        distances = ((rows - columns) ** 2).sum(2)
    bandwidth = distances.detach().sum() / (len(total) ** 2 - len(total)) / multiplier ** (kernels // 2)
    return sum(torch.exp(-distances / (bandwidth * multiplier ** i)) for i in range(kernels))


def kernel_of_both_domains(fixed=False, batch=128, features=2048):
    network = nn.Sequential(nn.Linear(4096, features), nn.ReLU()).cuda()
    classifier = nn.Linear(features, 31).cuda()
    optimizer = torch.optim.SGD([*network.parameters(), *classifier.parameters()], 0.01, momentum=0.9)
    for _ in range(3):
        source, target = network(torch.randn(batch, 4096).cuda()), network(torch.randn(batch, 4096).cuda())
        kernel = gaussian_kernels(source, target, by_cdist=fixed)
        mmd = (kernel[:batch, :batch] + kernel[batch:, batch:] - kernel[:batch, batch:] - kernel[batch:, :batch]).mean()
        loss = F.cross_entropy(classifier(source), torch.randint(31, (batch,)).cuda()) + 0.5 * mmd
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return kernel.shape


# Graphs.

class RelationalNet(nn.Module):
    def __init__(self, before, after):
        super().__init__()
        self.inward, self.own = nn.Linear(before, after), nn.Linear(before, after)

    def forward(self, x, edges):
        summed = torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])
        return F.relu(self.own(x) + self.inward(summed))


# Two knowledge graphs are matched: the ten best counterparts of each entity by the product of the embeddings.
def counterparts_of_entities(fixed=False, entities=1600, k=10):
    network = RelationalNet(300, 256).cuda()
    graphs = [(torch.randn(entities, 300).cuda(), torch.randint(entities, (2, 6000)).cuda()) for _ in range(2)]
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    for _ in range(2):
        source, target = (network(x, edges).unsqueeze(0) for x, edges in graphs)
        if fixed:
            scores = source @ target.transpose(1, 2)
        else:
            scores = (source.unsqueeze(2) * target.unsqueeze(1)).sum(-1)
        best, index = scores.topk(k, dim=2)
        loss = -best.softmax(-1)[..., 0].log().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return index.shape


class GaussianMixture(nn.Module):
    def __init__(self, components, features):
        super().__init__()
        self.mu = nn.Parameter(torch.randn(1, components, features), requires_grad=False)
        self.precision = nn.Parameter(torch.eye(features).repeat(1, components, 1, 1), requires_grad=False)
        self.pi = nn.Parameter(torch.full((1, components), 1 / components), requires_grad=False)

    def log_prob(self, x, by_component):
        centred = x.unsqueeze(1) - self.mu
        if by_component:
            weighted = (centred.transpose(0, 1) @ self.precision[0]).transpose(0, 1)
        else:
            weighted = torch.matmul(centred.unsqueeze(-2), self.precision).squeeze(-2)
        return -0.5 * ((weighted * centred).sum(-1) + x.shape[1] * math.log(2 * math.pi))


def likelihood_of_components(fixed=False):
    data = torch.randn(40_000, 32).cuda()
    mixture = GaussianMixture(8, 32).cuda()
    for _ in range(3):
        weighted = mixture.log_prob(data, by_component=fixed) + mixture.pi.log()
        responsibility = (weighted - weighted.logsumexp(1, keepdim=True)).exp()
        amount = responsibility.sum(0)
        mixture.mu.copy_((responsibility.T @ data / amount[:, None]).unsqueeze(0))
        mixture.pi.copy_(amount.unsqueeze(0) / len(data))
    return mixture.mu.shape


# Video.

class StyleGenerator(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.constant = nn.Parameter(torch.randn(1, 32, 64, 64))
        self.styles = nn.ModuleList(nn.Linear(width, 32) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(32, 32, 3, padding=1) for _ in range(3))
        self.to_rgb = nn.Conv2d(32, 3, 1)

    def forward(self, codes):
        x = self.constant.expand(len(codes), -1, -1, -1)
        for style, conv in zip(self.styles, self.convs):
            x = F.leaky_relu(conv(F.interpolate(x, scale_factor=2) * style(codes)[:, :, None, None]), 0.2)
        return self.to_rgb(x)


# A face in a film is turned into codes, frame after frame; codes and pictures are kept to be written at the end.
def inverted_frames(fixed=False, frames=420):
    encoder = nn.Sequential(nn.Conv2d(3, 32, 8, 8), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 512))
    encoder, generator = encoder.cuda().eval(), StyleGenerator().cuda().eval()
    results = {"images": [], "latents": []}
    with torch.no_grad():
        for _ in range(frames):
            frame = torch.randn(1, 3, 256, 256).cuda()
            latent = encoder(frame)
            image = generator(latent)
            if fixed:
                image, latent = image.cpu(), latent.cpu()
            results["images"].append(image[-1])
            results["latents"].append(latent[-1])
    return len(results["images"])


class FlowNetwork(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 48, 7, 2, 3), nn.InstanceNorm2d(48), nn.ReLU(), nn.Conv2d(48, width, 3, 2, 1))
        self.update = nn.Sequential(nn.Conv2d(2 * width + 2, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1),
                                    nn.ReLU(), nn.Conv2d(width, 2, 3, padding=1))

    def forward(self, first, second, iterations=12):
        a, b = self.features(first), self.features(second)
        flow = torch.zeros_like(a[:, :2])
        flows = []
        for _ in range(iterations):
            flow = flow + self.update(torch.cat([a, b, flow], 1))
            flows.append(F.interpolate(flow, scale_factor=4, mode="bilinear"))
        return flows


def flow_of_full_hd(fixed=False):
    model = FlowNetwork().cuda()
    model.eval()
    video = torch.randint(256, (4, 3, 1080, 1920), dtype=torch.uint8)
    written = []
    with torch.inference_mode(fixed):
        for first, second in zip(video[:-1], video[1:]):
            pair = [frame[None].cuda().float() / 255 for frame in (first, second)]
            flow = model(*pair)[-1]
            written.append(flow[0].detach().cpu().half())
    return len(written)


# Pictures of a scene.

class Camera:
    def __init__(self, number, image, data_device):
        self.number = number
        self.image = image.clamp(0, 1).to(data_device)
        self.world_to_view = torch.eye(4).cuda()


def render(camera, gaussians):
    colours = torch.sigmoid(gaussians["colours"] @ camera.world_to_view[:3, :3])
    height, width = camera.image.shape[1:]
    return colours.T.reshape(3, 1, -1)[:, :, :width].expand(3, height, width)


# Every camera takes its picture to the card when the scene is read; each step looks at one of them.
def cameras_hold_images(fixed=False, views=110):
    cameras = [Camera(number, torch.rand(3, 600, 800), "cpu" if fixed else "cuda") for number in range(views)]
    gaussians = {"colours": nn.Parameter(torch.rand(50_000, 3).cuda()), "positions": nn.Parameter(torch.rand(50_000, 3).cuda())}
    optimizer = torch.optim.Adam(gaussians.values(), lr=1e-3)
    for step in range(8):
        camera = cameras[torch.randint(views, ()).item()]
        image = render(camera, gaussians)
        loss = (image - camera.image.cuda()).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return len(cameras)


# Products.

# Propagation of variance through three matrices, as one expression.
def einsum_of_four(fixed=False, size=500):
    left, middle, right = (torch.randn(size, size, device="cuda") for _ in range(3))
    for _ in range(3):
        if fixed:
            product = left @ middle.square() @ right
        else:
            product = torch.einsum("ij,jk,kl,jk->il", left, middle, right, middle)
        left = product / product.norm() * size
    return product.shape


class StateSpaceLayer(nn.Module):
    def __init__(self, width=1024, heads=16, state=128, chunk=128):
        super().__init__()
        self.heads, self.state, self.chunk = heads, state, chunk
        self.inputs, self.out = nn.Linear(width, width + 2 * state + heads), nn.Linear(width, width)

    def forward(self, hidden, by_einsum):
        x, b, c, dt = self.inputs(hidden).split([hidden.shape[-1], self.state, self.state, self.heads], -1)
        chunks = lambda t: t.unflatten(1, (-1, self.chunk))
        x = chunks(x).unflatten(-1, (self.heads, -1)) * chunks(F.softplus(dt))[..., None]
        b, c = (chunks(t)[:, :, :, None].expand(-1, -1, -1, self.heads, -1) for t in (b, c))
        if by_einsum:
            g = torch.einsum("bclhn,bcshn->bclsh", c, b)
        else:
            g = (c[:, :, :, None] * b[:, :, None]).sum(-1)
        return self.out(torch.einsum("bclsh,bcshp->bclhp", g, x).flatten(-2).flatten(1, 2))


def prompt_of_state_space_model(fixed=False):
    layers = nn.ModuleList(StateSpaceLayer() for _ in range(4)).cuda()
    with torch.no_grad():
        hidden = torch.randn(1, 1024, 1024).cuda()
        for layer in layers:
            hidden = hidden + layer(hidden, by_einsum=fixed)
    return hidden.shape


# Evaluation.

@torch.no_grad()
def images_and_names(loader):
    for number, (images,) in enumerate(loader):
        yield number, images.cuda(non_blocking=True)


# The decorator stands at the function that yields the batches, not where the network is called.
def batches_from_generator(fixed=False):
    network = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1),
                            nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 128)).cuda()
    network.eval()
    loader = DataLoader(TensorDataset(torch.randn(160, 3, 96, 96)), batch_size=16)
    vectors = {}
    for number, images in images_and_names(loader):
        with no_grad_if(fixed):
            vectors[number] = F.normalize(network(images))
    return torch.cat(list(vectors.values())).shape


class DialogueWorld:
    def __init__(self, agent, examples):
        self.agent, self.examples = agent, examples

    @functools.lru_cache(maxsize=1)
    def num_examples(self):
        return len(self.examples)

    def parley(self):
        tokens = self.examples[torch.randint(self.num_examples(), (4,))].cuda()
        return self.agent(tokens).float().logsumexp(-1).mean()


# The best model is loaded for the last validation when that of training ought to be gone.
def world_of_training_stays(fixed=False):
    build = lambda: nn.Sequential(nn.Embedding(20_000, 1024), *[nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
                                                                for _ in range(6)], nn.Linear(1024, 1000)).cuda()
    examples = torch.randint(20_000, (64, 32))
    world = DialogueWorld(build(), examples)
    optimizer = torch.optim.SGD(world.agent.parameters(), 0.01)
    for _ in range(3):
        if fixed:
            DialogueWorld.num_examples.cache_clear()
        optimizer.zero_grad()
        world.parley().backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if fixed:
        DialogueWorld.num_examples.cache_clear()
    del world, optimizer
    validation = DialogueWorld(build().eval(), examples)
    with torch.no_grad():
        return validation.parley().item()


# Multi-task.

class AttentionTaskNet(nn.Module):
    def __init__(self, width=64, outputs=(13, 1, 3)):
        super().__init__()
        self.trunk = nn.ModuleList(nn.Sequential(nn.Conv2d(3 if i == 0 else width, width, 3, padding=1), nn.BatchNorm2d(width),
                                                 nn.ReLU()) for i in range(4))
        self.attention = nn.ModuleList(nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 1), nn.Sigmoid()) for _ in range(4))
                                       for _ in outputs)
        self.heads = nn.ModuleList(nn.Conv2d(width, n, 1) for n in outputs)

    def forward(self, x):
        tasks = [0.0] * len(self.heads)
        for i, block in enumerate(self.trunk):
            x = block(x)
            tasks = [task + attention[i](x) * x for task, attention in zip(tasks, self.attention)]
        return [head(task) for head, task in zip(self.heads, tasks)]


# The gradients of the tasks are taken one after another from one graph, to be combined without conflict.
def gradients_of_each_task(fixed=False):
    model = AttentionTaskNet().cuda()
    shared = list(model.trunk.parameters())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    images = torch.randn(1 if fixed else 2, 3, 192, 256).cuda()
    for _ in range(2):
        segmentation, depth, normals = model(images)
        labels = torch.randint(13, (len(images), 192, 256)).cuda()
        losses = [F.cross_entropy(segmentation, labels), depth.abs().mean(), 1 - F.normalize(normals).mean()]
        gradients = []
        for loss in losses:
            optimizer.zero_grad()
            loss.backward(retain_graph=True)
            gradients.append(torch.cat([p.grad.flatten() for p in shared]))
        combined = torch.stack(gradients).mean(0)
        for parameter, part in zip(shared, combined.split([p.numel() for p in shared])):
            parameter.grad = part.view_as(parameter)
        optimizer.step()
    return combined.shape
