"""Programs after public threads from all fields."""
import copy
import functools
import io
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from expected import expected
from programs.root_causes import no_grad_if


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
@expected("small_view", fix=r"\.clone\(\)", thread="woongzip1/UniverSR#9")
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
# A cache of the standard library holds the models of earlier folds: del does not help.
@expected("several_models", fix="lru_cache|cache_clear", thread="meta-pytorch/torchtune#904")
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
# Gradients of weights that no optimizer changes.
@expected("gradients_of_frozen", fix="requires_grad", thread="TUDB-Labs/mLoRA#90")
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


# One buffer is larger than the GPU. The screen says that a tensor of this size is copied there as a whole, and at which line.
@expected("data_on_gpu", fix="diagonal|fewer|smaller", thread="BIT-DA/MetaSAug#4")
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


@expected("all_pairs", fix="split|chunk|cdist", thread="jindongwang/transferlearning#83")
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
@expected("all_pairs", fix="matmul|einsum|@|bmm", thread="rusty1s/deep-graph-matching-consensus#4")
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


# matmul copies the matrix of each component for each sample.
@expected("large_intermediate", fix="split|chunk|transpose|permute|one large product|einsum", thread="ldeecke/gmm-torch#23")
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
@expected("kept_tensors", fix=r"\.cpu\(\)", thread="yuval-alaluf/stylegan3-editing#37")
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


@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="msu-video-group/memfof#5")
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


# Every camera takes its picture to the GPU when the scene is read; each step looks at one of them.
@expected("data_on_gpu", fix=r"on the host|DataLoader|\.cpu\(\)|pin_memory", thread="graphdeco-inria/gaussian-splatting#723", memory=600)
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
# The order of the products makes an intermediate result far larger than what goes in and what comes out.
@expected("large_intermediate", fix="matmul|@|order|opt_einsum|two at a time", thread="pytorch/pytorch#114943")
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


@expected("all_pairs", fix="matmul|einsum|@|bmm", thread="huggingface/transformers#48978")
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
@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="pytorch/pytorch#31497")
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
@expected("several_models", fix="lru_cache|cache_clear", thread="facebookresearch/ParlAI#2487", memory=760)
def world_of_training_stays(fixed=False):
    build = lambda: nn.Sequential(nn.Embedding(20_000, 1024), *[nn.TransformerEncoderLayer(1024, 16, 4096, batch_first=True)
                                                                for _ in range(6)], nn.Linear(1024, 1000)).cuda()
    examples = torch.randint(20_000, (64, 32))
    world = DialogueWorld(build(), examples)
    for layer in world.agent[:5]:
        layer.requires_grad_(False)
    optimizer = torch.optim.SGD(world.agent[5:].parameters(), 0.01)
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
@expected("capacity", fix="half|batch|accumul|checkpoint|autocast", thread="Cranial-XIX/CAGrad#2")
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


# Explanations and influence.

def hessian_vector_product(loss, parameters, vectors):
    gradients = torch.autograd.grad(loss, parameters, create_graph=True)
    product = sum((g * v.detach()).sum() for g, v in zip(gradients, vectors))
    return torch.autograd.grad(product, parameters, create_graph=True)


# The estimate of the inverse Hessian times a vector is refined batch after batch.
@expected("graph_of_earlier_steps", fix="no_grad|detach", thread="nimarb/pytorch_influence_functions#6")
def estimate_of_influence(fixed=False, depth=60, damp=0.01, scale=25.0):
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Softplus(), nn.Conv2d(32, 32, 3, 2, 1), nn.Softplus(), nn.Flatten(),
                          nn.Linear(32 * 256, 10)).cuda()
    parameters = list(model.parameters())
    test_loss = F.cross_entropy(model(torch.randn(1, 3, 32, 32).cuda()), torch.tensor([3]).cuda())
    v = torch.autograd.grad(test_loss, parameters)
    estimate = list(v)
    loader = DataLoader(TensorDataset(torch.randn(depth * 32, 3, 32, 32), torch.randint(10, (depth * 32,))), batch_size=32)
    for images, labels in loader:
        loss = F.cross_entropy(model(images.cuda()), labels.cuda())
        product = hessian_vector_product(loss, parameters, estimate)
        with no_grad_if(fixed):
            estimate = [first + (1 - damp) * h - hv / scale for first, h, hv in zip(v, estimate, product)]
    return [h.shape for h in estimate]


# The gradients of all test samples, one row each, are put together when all are there.
# Concatenation needs the parts and the whole at once.
@expected("joined_results", fix=r"prealloc|torch\.empty|torch\.zeros|allocate|\.cpu\(\)", thread="aai-institute/pyDVL#374")
def gradients_of_test_samples(fixed=False, samples=384, batch=16):
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 100)).cuda()
    parameters = dict(model.named_parameters())
    size = sum(p.numel() for p in parameters.values())

    def loss_of(parameters, x, y):
        return F.cross_entropy(torch.func.functional_call(model, parameters, (x[None],)), y[None])

    split_grad = torch.func.vmap(torch.func.grad(loss_of), in_dims=(None, 0, 0))
    test_grads = torch.zeros(samples, size, device="cuda") if fixed else []
    loader = DataLoader(TensorDataset(torch.randn(samples, 512), torch.randint(100, (samples,))), batch_size=batch)
    for number, (x, y) in enumerate(loader):
        found = split_grad({name: p.detach() for name, p in parameters.items()}, x.cuda(), y.cuda())
        rows = torch.cat([g.flatten(1) for g in found.values()], 1)
        del found
        if fixed:
            test_grads[number * batch:(number + 1) * batch] = rows
        else:
            test_grads.append(rows)
    if not fixed:
        test_grads = torch.cat(test_grads)
    return (test_grads @ torch.randn(size, device="cuda")).shape


# All perturbed pictures that the explainer draws are given to the network at once.
@expected("batch_without_gradients", fix="split|chunk|batch", thread="shap/shap#1977")
def samples_of_explainer(fixed=False, samples=1200, segments=50):
    network = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                            nn.Flatten(), nn.Linear(64, 1000)).cuda().eval()
    image, of_segment = torch.rand(3, 112, 112), torch.randint(segments, (112, 112))

    def predict(coalitions):
        pictures = image * coalitions[:, of_segment].unsqueeze(1)
        with torch.no_grad():
            if fixed:
                return torch.cat([network(part.cuda()).softmax(1).cpu() for part in pictures.split(50)])
            return network(pictures.cuda()).softmax(1).cpu()

    coalitions = torch.randint(2, (samples, segments)).float()
    return torch.linalg.lstsq(coalitions, predict(coalitions)).solution.shape


class ActivationsAndGradients:
    def __init__(self, model, layer, to_host):
        self.model, self.to_host, self.activations, self.gradients = model, to_host, [], []
        layer.register_forward_hook(self.save_activation)
        layer.register_full_backward_hook(self.save_gradient)

    def save_activation(self, module, inputs, output):
        self.activations.append(output.detach().cpu() if self.to_host else output.detach())

    def save_gradient(self, module, before, after):
        self.gradients.insert(0, after[0].cpu() if self.to_host else after[0])


# Maps of the classes of all validation pictures, with one object that listens to the last block.
@expected("kept_tensors", fix=r"\.cpu\(\)|clear|\bdel\b", thread="jacobgil/pytorch-grad-cam#71")
def class_maps_of_validation(fixed=False):
    body = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.Conv2d(64, 256, 3, 1, 1), nn.ReLU()).cuda()
    model = nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)).cuda().eval()
    listener = ActivationsAndGradients(model, body, to_host=fixed)
    maps = []
    for (images,) in DataLoader(TensorDataset(torch.randn(160, 3, 112, 112)), batch_size=4):
        scores = model(images.cuda())
        model.zero_grad()
        scores.max(1).values.sum().backward()
        weights = listener.gradients[0].mean((2, 3), keepdim=True)
        maps.append((weights * listener.activations[-1]).sum(1).relu().cpu().numpy())
    return len(maps)


# Diffusion.

class TextEncoder(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embedding = nn.Embedding(8000, width)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 16, 4 * width, batch_first=True) for _ in range(depth))

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return x


def encode_prompt(text_encoders, tokens):
    with torch.no_grad():
        return torch.cat([encoder(tokens.cuda()) for encoder in text_encoders], -1)


# The encoders are not trained: the list of them is deleted once the prompt is encoded.
@expected("several_models", fix=r"\bdel\b", thread="huggingface/diffusers#8511")
def lists_of_encoders_deleted(fixed=False):
    text_encoder_one, text_encoder_two = TextEncoder(768, 4).cuda(), TextEncoder(1024, 4).cuda()
    text_encoder_three = TextEncoder(1024, 4).cuda()
    text_encoders = [text_encoder_one, text_encoder_two, text_encoder_three]
    prompt = encode_prompt(text_encoders, torch.randint(8000, (1, 77)))
    del text_encoders
    if fixed:
        del text_encoder_one, text_encoder_two, text_encoder_three
    torch.cuda.empty_cache()
    transformer = nn.TransformerEncoder(nn.TransformerEncoderLayer(768, 12, 3072, batch_first=True, norm_first=True), 4).cuda()
    to_context, out = nn.Linear(prompt.shape[-1], 768).cuda(), nn.Linear(768, 64).cuda()
    optimizer = torch.optim.AdamW([*transformer.parameters(), *to_context.parameters(), *out.parameters()], 1e-5)
    for _ in range(3):
        latents, target = torch.randn(2, 256, 768).cuda(), torch.randn(2, 256, 64).cuda()
        states = torch.cat([latents, to_context(prompt).expand(2, -1, -1)], 1)
        loss = F.mse_loss(out(transformer(states)[:, :256]), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


class AveragedModel(nn.Module):
    """An average that may be taken over several horizons."""
    def __init__(self, model, gamma):
        super().__init__()
        self.average, self.gamma, self.steps = copy.deepcopy(model), gamma, 0
        self.copy_or_average = self.copy_from

    @torch.no_grad()
    def copy_from(self, model):
        for mine, new in zip(self.average.parameters(), model.parameters()):
            mine.lerp_(new, 1 - self.gamma)


# Snapshots in half precision for an average that is made up afterwards.
# The copies refer to themselves.
@expected("reference_cycle", fix=r"gc\.collect|weakref|state_dict", thread="lucidrains/ema-pytorch#35")
def snapshots_of_average(fixed=False):
    model = nn.Sequential(nn.Linear(4096, 4096), nn.GELU(), nn.Linear(4096, 4096)).cuda()
    averages = [AveragedModel(model, gamma) for gamma in (0.9, 0.99)]
    for step in range(14):
        for number, average in enumerate(averages):
            average.copy_or_average(model)
            if fixed:
                state = {name: value.to("cpu", torch.float16, copy=True) for name, value in average.state_dict().items()}
            else:
                state = copy.deepcopy(average).to(torch.float16).state_dict()
            torch.save(state, io.BytesIO())
            del state
    return step


# Evaluation.

class Classifier(nn.Module):
    def __init__(self, width=512, depth=12):
        super().__init__()
        self.embedding, self.head = nn.Embedding(16_000, width), nn.Linear(width, 2)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 8, 2 * width, batch_first=True) for _ in range(depth))

    def forward(self, tokens, output_hidden_states=True):
        states = [self.embedding(tokens)]
        for layer in self.layers:
            states.append(layer(states[-1]))
        logits = self.head(states[-1][:, 0])
        return (logits, *states) if output_hidden_states else (logits,)


def nested_concat(old, new):
    return new if old is None else tuple(torch.cat((a, b)) for a, b in zip(old, new))


# The model was made with output_hidden_states, for another purpose; the loop gathers whatever it returns.
@expected("growing_buffer", fix=r"\.cpu\(\)|output_hidden_states", thread="huggingface/transformers#20887")
def states_of_all_layers_in_evaluation(fixed=False):
    model = Classifier().cuda().eval()
    gathered = None
    with torch.no_grad():
        for (tokens,) in DataLoader(TensorDataset(torch.randint(16_000, (400, 128))), batch_size=8):
            outputs = model(tokens.cuda(), output_hidden_states=not fixed)
            gathered = nested_concat(gathered, outputs)
    return gathered[0].argmax(1).shape


def logits_to_labels(logits, by_argmax_only):
    if by_argmax_only:
        return logits.argmax(1, keepdim=True).to(torch.uint8)
    return torch.softmax(logits, dim=1).argmax(1, keepdim=True).to(torch.uint8)


# A body of 117 organs: the windows' logits are gathered on the GPU.
# A softmax whose argmax is that of its operand. Its writer called it softmax_before_argmax; since then one row names any single op that makes
# as much.
@expected("large_result", fix="argmax|softmax", thread="lassoan/SlicerMONAIAuto3DSeg#98", memory=1300)
def labels_of_whole_body(fixed=False, classes=117, size=(128, 128, 96), window=32):
    network = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.InstanceNorm3d(16), nn.ReLU(), nn.Conv3d(16, classes, 1))
    network.cuda().eval()
    scan = torch.randn(1, 1, *size)
    with torch.no_grad():
        logits = torch.zeros(1, classes, *size, device="cuda")
        for z in range(0, size[0], window):
            for y in range(0, size[1], window):
                part = scan[:, :, z:z + window, y:y + window].cuda()
                logits[:, :, z:z + window, y:y + window] += network(part)
        labels = logits_to_labels(logits, fixed)
    return labels.shape


class Segmenter(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv3d(1, width, 3, padding=1), nn.ReLU(), nn.Conv3d(width, width, 3, padding=1), nn.ReLU(),
                                    nn.Conv3d(width, 3, 1))

    def forward(self, x):
        return self.layers(x)


# The plugin puts autocast around the steps of training only; validation sees whole volumes.
# The steps of training run in half precision, validation does not.
@expected("not_under_autocast", fix="autocast|half", thread="Lightning-AI/pytorch-lightning#6566")
def validation_without_autocast(fixed=False):
    model = Segmenter().cuda()
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.01), torch.amp.GradScaler("cuda")
    for epoch in range(2):
        model.train()
        for _ in range(2):
            patch, labels = torch.randn(2, 1, 64, 64, 48).cuda(), torch.randint(3, (2, 64, 64, 48)).cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(patch), labels)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        model.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16, enabled=fixed):
            volume = torch.randn(1, 1, 160, 160, 128).cuda()
            found = model(volume).argmax(1).cpu()
    return found.shape


# The predictor can decode what it predicted, and keeps each batch of inputs for that, wanted or not.
@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b", thread="muellerzr/fastinference#7")
def inputs_beside_predictions(fixed=False, items=2400, fully_decoded=False):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
                          nn.Flatten(), nn.Linear(32, 37)).cuda().eval()
    inps, outs, preds = [], [], []
    with torch.no_grad():
        for begin in range(0, items, 40):
            batch = torch.randn(40, 3, 192, 192).cuda()
            if fully_decoded or not fixed:
                inps.append(batch)
            out = model(batch).softmax(1)
            outs.append(out.cpu())
            preds.append(out.argmax(1).cpu())
    decoded = [t.cpu() for t in inps] if fully_decoded else None
    return torch.cat(outs).shape, decoded


class Token:
    def __init__(self, text):
        self.text, self.embeddings = text, {}


# Every token of the corpus remembers its vector.
@expected("kept_tensors", fix=r"\.cpu\(\)|clear|\bdel\b", thread="flairNLP/flair#1124")
def tokens_keep_embeddings(fixed=False):
    encoder = nn.Sequential(nn.Embedding(5000, 1024), nn.Linear(1024, 4096), nn.Tanh()).cuda().eval()
    tagger = nn.Linear(4096, 17).cuda().eval()
    corpus = [[Token(str(i)) for i in range(24)] for _ in range(3200)]
    tags = []
    with torch.no_grad():
        for begin in range(0, len(corpus), 16):
            sentences = corpus[begin:begin + 16]
            vectors = encoder(torch.randint(5000, (16, 24)).cuda())
            for sentence, rows in zip(sentences, vectors):
                for token, row in zip(sentence, rows):
                    token.embeddings["stacked"] = row
            tags.append(tagger(torch.stack([token.embeddings["stacked"] for s in sentences for token in s])).argmax(1).cpu())
            if fixed:
                for sentence in sentences:
                    for token in sentence:
                        token.embeddings.clear()
    return len(tags)


def trained_fold():
    network = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(5)]).cuda()
    momentum = {name: torch.zeros_like(value) for name, value in network.state_dict().items()}
    file = io.BytesIO()
    torch.save({"state_dict": network.state_dict(), "optimizer_state_dict": momentum, "epoch": 1000}, file)
    return file


# The parameters of all folds are read first; each case is then predicted with one after the other.
@expected("loaded_onto_gpu", fix="map_location", thread="MIC-DKFZ/nnUNet#34", memory=900)
def parameters_of_all_folds(fixed=False):
    files = [trained_fold() for _ in range(5)]
    network = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(5)]).cuda().eval()
    all_params = []
    for file in files:
        file.seek(0)
        all_params.append(torch.load(file, map_location="cpu" if fixed else None))
    softmax = 0
    with torch.no_grad():
        for params in all_params:
            network.load_state_dict(params["state_dict"])
            softmax = softmax + network(torch.randn(64, 2048).cuda()).softmax(1)
    return softmax.shape


# Masks and matrices.

class HookedAttention(nn.Module):
    def __init__(self, width, heads, n_ctx, own_mask):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        if own_mask:
            self.register_buffer("mask", torch.tril(torch.ones((n_ctx, n_ctx), dtype=torch.bool)))
        self.own_mask = own_mask

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        n = x.shape[1]
        mask = self.mask[:n, :n] if self.own_mask else torch.ones(n, n, dtype=torch.bool, device=x.device).tril()
        scores = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(~mask, float("-inf"))
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


# Each layer has a causal mask for the longest context that the model knows.
# A buffer for each layer where one, or none, would do.
@expected("same_buffer_in_layers", fix=r"is_causal|shared?\b|one mask|scaled_dot_product_attention|when it is needed",
          thread="TransformerLensOrg/TransformerLens#479", memory=700)
def mask_in_every_layer(fixed=False, layers=20, n_ctx=6144):
    model = nn.Sequential(*[HookedAttention(256, 8, n_ctx, not fixed) for _ in range(layers)])
    model = model.cuda()
    with torch.no_grad():
        return model(torch.randn(1, 128, 256).cuda()).shape


class LaplaceHead(nn.Module):
    def __init__(self, features=512, classes=10):
        super().__init__()
        self.register_buffer("weight", torch.randn(features, 256))
        self.register_buffer("covariance", torch.eye(features))
        self.out = nn.Linear(features, classes)

    def forward(self, x, only_diagonal):
        k = torch.cos(x @ self.weight.T)
        if only_diagonal:
            variance = ((k @ self.covariance) * k).sum(1)
        else:
            covariance = k @ (self.covariance @ k.T)
            variance = torch.diagonal(covariance)
        return self.out(k) / torch.sqrt(1 + variance[:, None] * math.pi / 8)


@expected("all_pairs", fix="diagonal|einsum|split|chunk", thread="mit-ll-responsible-ai/equine#181")
def uncertainty_of_all_rows(fixed=False, rows=18_000):
    head = LaplaceHead().cuda().eval()
    with torch.no_grad():
        logits = head(torch.randn(rows, 256).cuda(), only_diagonal=fixed)
    return logits.softmax(1).shape


# Control.

class Problem(nn.Module):
    """A policy that is trained through a model of the plant; its constraints need gradients when it is evaluated, too."""
    def __init__(self, states=64, horizon=40):
        super().__init__()
        self.horizon = horizon
        self.policy = nn.Sequential(nn.Linear(states, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 16))
        self.plant = nn.Linear(states + 16, states)

    def forward(self, data, name):
        states = [data]
        for _ in range(self.horizon):
            states.append(states[-1] + 0.1 * torch.tanh(self.plant(torch.cat([states[-1], self.policy(states[-1])], 1))))
        trajectory = torch.stack(states, 1)
        return {f"{name}_loss": trajectory.square().mean(), f"{name}_effort": self.policy(trajectory).abs().mean()}


@expected("graph_of_earlier_steps", fix=r"detach|\.item\(\)", thread="pnnl/neuromancer#292", memory=600)
def metrics_of_epochs(fixed=False, epochs=40):
    problem = Problem().cuda()
    optimizer = torch.optim.Adam(problem.parameters(), 1e-3)
    history, best = [], float("inf")
    for epoch in range(epochs):
        output = problem(torch.randn(64, 64).cuda(), "train")
        optimizer.zero_grad()
        output["train_loss"].backward()
        optimizer.step()
        losses = []
        for _ in range(2):
            output = problem(torch.randn(256, 64).cuda(), "dev")
            losses.append(output["dev_loss"])
        output["mean_dev_loss"] = torch.stack(losses).mean()
        best = min(best, output["mean_dev_loss"].item())
        if fixed:
            output = {name: value.detach() for name, value in output.items()}
        history.append(output)
    return len(history), best
