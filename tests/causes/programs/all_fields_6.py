"""Programs after public threads from all fields."""
import gc
import io
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from expected import expected
from programs.root_causes import no_grad_if


# Pictures.

class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.body = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width), nn.ReLU(),
                                  nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.InstanceNorm2d(width))

    def forward(self, x):
        return x + self.body(x)


class Translator(nn.Module):
    def __init__(self, width=64, depth=4):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 7, padding=3), nn.InstanceNorm2d(width), nn.ReLU(),
                                  nn.Conv2d(width, 2 * width, 3, 2, 1), nn.InstanceNorm2d(2 * width), nn.ReLU())
        self.blocks = nn.Sequential(*[Residual(2 * width) for _ in range(depth)])
        self.up = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, width, 3, padding=1), nn.InstanceNorm2d(width),
                                nn.ReLU(), nn.Conv2d(width, 3, 7, padding=3), nn.Tanh())

    def forward(self, x):
        return self.up(self.blocks(self.down(x)))


class UnpairedTranslation:
    def __init__(self):
        self.to_b, self.to_a = Translator().cuda(), Translator().cuda()
        self.critic = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 1, 4, 2, 1)).cuda()
        self.optimizer = torch.optim.Adam([*self.to_a.parameters(), *self.to_b.parameters()], 1e-4)

    def train_step(self, a, b):
        fake_b, fake_a = self.to_b(a), self.to_a(b)
        cycle = F.l1_loss(self.to_a(fake_b), a) + F.l1_loss(self.to_b(fake_a), b)
        loss = cycle + (self.critic(fake_b) - 1).square().mean() + (self.critic(fake_a) - 1).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def draw(self, a):
        fake = self.to_b(a)
        back = self.to_a(fake)
        same = self.to_a(a)
        return [image[0].detach().cpu() for image in (a, same, fake, back)]


# Now and then a few whole pictures are translated, to be looked at.
@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="znxlwm/UGATIT-pytorch#74")
def pictures_between_steps(fixed=False):
    model = UnpairedTranslation()
    sheets = []
    for step in range(9):
        model.train_step(torch.randn(1, 3, 128, 128).cuda(), torch.randn(1, 3, 128, 128).cuda())
        if step % 4 == 3:
            with no_grad_if(fixed):
                for _ in range(3):
                    sheets.append(model.draw(torch.randn(1, 3, 256, 256).cuda()))
    return len(sheets)


class PoseNetwork(nn.Module):
    def __init__(self, width=32, outputs=20):
        super().__init__()
        layers, before = [], 3
        for i in range(5):
            after = width * 2 ** min(i, 3)
            layers += [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.LeakyReLU(0.1), nn.MaxPool2d(2)]
            before = after
        self.features, self.head = nn.Sequential(*layers), nn.Conv2d(before, outputs, 1)

    def forward(self, x):
        return self.head(self.features(x))


# The network becomes robust by pictures of another size every few batches.
@expected("capacity", fix="half|batch|accumul|checkpoint|autocast", thread="microsoft/singleshotpose#112")
def sizes_of_pictures_change(fixed=False):
    model = PoseNetwork().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9, weight_decay=5e-4)
    sizes = [416, 352, 320, 448, 384] if fixed else [416, 352, 480, 640, 704]
    for size in sizes:
        for _ in range(2):
            found = model(torch.randn(4, 3, size, size).cuda())
            target = torch.zeros_like(found)
            loss = F.mse_loss(found.sigmoid(), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


class WireframeNet(nn.Module):
    """Junctions are points of a map; each pair of them may be a line, which is judged by features along it."""
    def __init__(self, width=128, points=32):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 64, 7, 4, 3), nn.ReLU(), nn.Conv2d(64, width, 3, padding=1), nn.ReLU())
        self.junction = nn.Conv2d(width, 1, 1)
        self.pool = nn.MaxPool1d(4)
        self.judge = nn.Sequential(nn.Linear(width * points // 4, 256), nn.ReLU(), nn.Linear(256, 1))
        self.register_buffer("steps", torch.linspace(0, 1, points))

    def along_lines(self, x, begin, end):
        place = begin[:, None] * self.steps[:, None] + end[:, None] * (1 - self.steps[:, None])
        low = place.floor().clamp(0, x.shape[-1] - 2)
        part = (place - low).flatten(0, 1)
        row, column = low.long().flatten(0, 1).unbind(1)
        dy, dx = part.unbind(1)
        found = (x[:, row, column] * (1 - dy) * (1 - dx) + x[:, row + 1, column] * dy * (1 - dx)
                 + x[:, row, column + 1] * (1 - dy) * dx + x[:, row + 1, column + 1] * dy * dx)
        found = found.reshape(x.shape[0], len(begin), -1).transpose(0, 1)
        return self.judge(self.pool(found).flatten(1)).sigmoid()[:, 0]

    def forward(self, image, junctions, pairs_at_once=None):
        x = self.backbone(image)
        best = self.junction(x).flatten().topk(junctions).indices
        where = torch.stack([best // x.shape[-1], best % x.shape[-1]], 1).float()
        first, second = torch.cartesian_prod(torch.arange(junctions), torch.arange(junctions)).cuda().unbind(1)
        parts = zip(first.split(pairs_at_once or len(first)), second.split(pairs_at_once or len(first)))
        return torch.cat([self.along_lines(x[0], where[u], where[v]) for u, v in parts])


# In training a few lines are drawn by chance; in validation all junctions above a threshold are combined.
# Features at points of lines between all pairs of junctions, by an index: the screen names its line, and says how much it makes of how
# little. Its writer expected all_pairs.
@expected("enlarged", fix="split|chunk", thread="zhou13/lcnn#9")
def lines_between_all_junctions(fixed=False):
    model = WireframeNet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 4e-4)
    for _ in range(2):
        model.train()
        found = model(torch.randn(1, 3, 512, 512).cuda(), junctions=20)
        loss = F.binary_cross_entropy(found, torch.zeros_like(found))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    lines = []
    with torch.no_grad():
        for _ in range(2):
            found = model(torch.randn(1, 3, 512, 512).cuda(), junctions=140, pairs_at_once=1024 if fixed else None)
            lines.append((found > 0.5).sum().item())
    return lines


class Reconstruction(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.InstanceNorm2d(width), nn.ReLU(),
                                    nn.Conv2d(width, width, 3, padding=1), nn.InstanceNorm2d(width), nn.ReLU(),
                                    nn.Conv2d(width, 1, 1))

    def forward(self, x):
        return x + self.layers(x)


# Slices of a scanner are reconstructed and gathered by volume, to be compared with the truth at the end.
@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="guopengf/FL-MRCM#2")
def slices_of_test_volumes(fixed=False):
    model = Reconstruction().cuda()
    model.eval()
    volumes = {}
    for number in range(40):
        image, target = torch.randn(1, 1, 256, 256).cuda(), torch.randn(1, 1, 256, 256).cuda()
        with no_grad_if(fixed):
            output = model(image)
            mean_error = F.l1_loss(output, target)
        volumes.setdefault(number // 10, []).append((output, target, mean_error))
    return {name: sum(float(e) for _, _, e in slices) for name, slices in volumes.items()}


# Language.

class FakeQuantized(nn.Module):
    """A linear layer whose inputs are rounded to eight bits as the device of a phone has them."""
    def __init__(self, before, after):
        super().__init__()
        self.linear = nn.Linear(before, after, bias=False)
        self.register_buffer("scale", torch.tensor(0.05))

    def forward(self, x):
        levels = x / self.scale
        inside = (levels >= -128) & (levels <= 127)
        rounded = levels + (levels.round() - levels).detach()
        return self.linear(torch.where(inside, rounded, rounded.clamp(-128, 127)) * self.scale)


class QuantizedModel(nn.Module):
    def __init__(self, vocabulary=8000, width=384, depth=8, heads=6):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.ModuleDict({
            "norm": nn.LayerNorm(width), "qkv": FakeQuantized(width, 3 * width), "out": FakeQuantized(width, width),
            "up": FakeQuantized(width, 4 * width), "down": FakeQuantized(4 * width, width)}) for _ in range(depth))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in layer["qkv"](layer["norm"](x)).chunk(3, -1))
            x = x + layer["out"](F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
            x = x + layer["down"](F.gelu(layer["up"](layer["norm"](x))))
        return self.head(x[:, -1])


class MultipleChoice:
    """Questions of many subjects, each with four answers: the letter with the largest logit counts."""
    def __init__(self, fixed, letters=(317, 318, 319, 320)):
        self.fixed, self.letters = fixed, list(letters)

    def evaluate(self, model, loader):
        right = total = 0
        for prompts, answers in loader:
            with no_grad_if(self.fixed):
                choices = model(prompts.cuda())[:, self.letters].log_softmax(1)
            right += (choices.argmax(1).cpu() == answers).sum().item()
            total += len(answers)
        return right / total


@expected("evaluation_keeps_graphs", fix="no_grad|inference_mode", thread="qualcomm/aimet#4073")
def questions_of_all_subjects(fixed=False):
    model = QuantizedModel().cuda().eval()
    questions = TensorDataset(torch.randint(8000, (24, 640)), torch.randint(4, (24,)))
    return MultipleChoice(fixed).evaluate(model, DataLoader(questions, batch_size=4))


class Policy(nn.Module):
    def __init__(self, vocabulary=32_000, width=256, depth=3):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = lambda: nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.ModuleList(layer() for _ in range(depth)), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def log_probabilities(model, prompts, completions):
    logits = model(torch.cat([prompts, completions], 1))[:, prompts.shape[1] - 1:-1]
    return logits.log_softmax(-1).gather(2, completions.unsqueeze(-1)).squeeze(-1)


# Pairs of completions are compared under the policy and the model that it began as.
@expected("logits", fix="chunk|split|liger", thread="huggingface/trl#3701")
def preferences_of_long_completions(fixed=False, pairs=2, prompt=128, length=512):
    policy, reference = Policy().cuda(), Policy().cuda().eval()
    optimizer = torch.optim.SGD(policy.parameters(), 1e-5)
    for _ in range(2):
        prompts = torch.randint(32_000, (pairs, prompt)).repeat(2, 1).cuda()
        completions = torch.randint(32_000, (2 * pairs, length)).cuda()
        rows = [(prompts, completions)]
        if fixed:
            rows = list(zip(prompts.split(1), completions.split(1)))
        logps = torch.cat([checkpoint(log_probabilities, policy, *row, use_reentrant=False) if fixed
                           else log_probabilities(policy, *row) for row in rows])
        with torch.no_grad():
            ref_logps = torch.cat([log_probabilities(reference, *row) for row in rows])
        ratio = (logps.sum(1) - ref_logps.sum(1)).view(2, pairs)
        loss = -F.logsigmoid(0.1 * (ratio[0] - ratio[1])).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# Continual learning.

class ProjectedNetwork(nn.Module):
    def __init__(self, width=1200):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(784, width), nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, x):
        hidden = F.relu(self.first(x))
        deep = F.relu(self.second(hidden))
        return self.last(deep), [x, hidden, deep]


# Weights move only where inputs of earlier tasks were not; a matrix of each layer says where, and is refined after each batch.
@expected("graph_of_earlier_steps", fix="no_grad|detach", thread="beijixiong3510/OWM#3")
def projectors_of_layers(fixed=False, alpha=0.1):
    model = ProjectedNetwork().cuda()
    layers = [model.first, model.second, model.last]
    projectors = [torch.eye(layer.in_features).cuda() for layer in layers]
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    for step in range(260):
        output, inputs = model(torch.randn(40, 784).cuda())
        loss = F.cross_entropy(output, torch.randint(10, (40,)).cuda())
        optimizer.zero_grad()
        loss.backward()
        with no_grad_if(fixed):
            for projector, entering in zip(projectors, inputs):
                r = entering.mean(0, keepdim=True)
                k = projector @ r.T
                projector.sub_(k @ k.T / (alpha + r @ k))
        for layer, projector in zip(layers, projectors):
            layer.weight.grad = layer.weight.grad @ projector.detach()
        optimizer.step()
    return loss.item()


# Tools.

class MemoryReporter:
    """Finds all tensors of a device and remembers them by their names, for a table."""
    def __init__(self):
        self.tensor_name, self.device_mapping = {}, {}

    def report(self, forget):
        count = 0
        for thing in gc.get_objects():
            if type(thing) is torch.Tensor and thing.is_cuda:
                self.tensor_name.setdefault(thing, f"Tensor{len(self.tensor_name)}")
                self.device_mapping.setdefault(thing.device, []).append(thing)
                count += 1
        if forget:
            self.tensor_name.clear()
            self.device_mapping.clear()
        return count


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear", thread="Stonesjtu/pytorch_memlab#17")
def report_in_each_batch(fixed=False):
    network = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU()).cuda().eval()
    head = nn.Linear(64, 10).cuda()
    reporter, counts = MemoryReporter(), []
    with torch.no_grad():
        for _ in range(40):
            images = torch.randn(16, 3, 224, 224).cuda()
            features = network(images)
            scores = head(features.mean((2, 3)))
            counts.append(reporter.report(forget=fixed))
    return len(counts), scores.shape


def map_leaves(function, structure):
    """As function is given to each tensor of lists and dictionaries; the walk calls itself."""
    def walk(part):
        if isinstance(part, dict):
            return {key: walk(value) for key, value in part.items()}
        if isinstance(part, (list, tuple)):
            return type(part)(walk(value) for value in part)
        if part is structure:
            return part
        return function(part)
    return walk(structure)


class PatchModel:
    def __init__(self):
        self.network = nn.Sequential(nn.Conv3d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv3d(32, 8, 3, padding=1)).cuda().eval()

    def predict_on_batch(self, patch):
        data = map_leaves(lambda part: torch.as_tensor(part).cuda(), {"image": patch, "spacing": torch.ones(3)})
        with torch.no_grad():
            outputs = map_leaves(lambda part: part.float(), {"logits": self.network(data["image"]), "input": data["image"]})
        return map_leaves(lambda part: part.cpu(), outputs)["logits"]


# A large volume is predicted patch after patch.
@expected("reference_cycle", fix=r"gc\.collect|weakref", thread="keras-team/keras#23110", memory=450)
def patches_of_volume(fixed=False):
    model = PatchModel()
    volume = torch.zeros(8, 512, 64, 64)
    gc.collect()
    for begin in range(0, 4096, 64):
        z = begin % 512
        volume[:, z:z + 64] = model.predict_on_batch(torch.randn(1, 1, 64, 64, 64))[0]
        if fixed:
            gc.collect()
    return volume.shape


class ListMetric:
    """Scores over a whole epoch: what it was updated with is a list until it is reset."""
    def __init__(self):
        self.predictions, self.targets = [], []

    def update(self, predictions, targets):
        self.predictions.append(predictions.detach())
        self.targets.append(targets.detach())

    def compute(self):
        hits = sum((p.argmax(1) == t).sum().item() for p, t in zip(self.predictions, self.targets))
        return hits / sum(t.numel() for t in self.targets)

    def reset(self):
        self.predictions.clear()
        self.targets.clear()


# Land cover: the metric of validation is computed after each epoch.
@expected("kept_tensors", fix=r"\.cpu\(\)|reset|\bdel\b|clear", thread="NRCan/geo-deep-learning#582", memory=700)
def metric_over_epochs(fixed=False, epochs=12):
    model = nn.Sequential(nn.Conv2d(4, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1)).cuda()
    optimizer, metric = torch.optim.AdamW(model.parameters(), 1e-3), ListMetric()
    history = []
    for epoch in range(epochs):
        model.train()
        for _ in range(3):
            tile, cover = torch.randn(2, 4, 256, 256).cuda(), torch.randint(8, (2, 256, 256)).cuda()
            loss = F.cross_entropy(model(tile), cover)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            for _ in range(20):
                tile, cover = torch.randn(1, 4, 256, 256).cuda(), torch.randint(8, (1, 256, 256)).cuda()
                metric.update(model(tile), cover)
        history.append(metric.compute())
        if fixed:
            metric.reset()
    return len(history)


# Files and devices.

# When all epochs are over, the weights of the best one are taken back.
@expected("loaded_onto_gpu", fix="map_location", thread="huggingface/transformers#20920", memory=930)
def best_weights_at_the_end(fixed=False):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(2048, 2048), nn.GELU()) for _ in range(10)], nn.Linear(2048, 2)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, fused=True)
    best, file = float("inf"), io.BytesIO()
    for epoch in range(3):
        loss = F.cross_entropy(model(torch.randn(16, 2048).cuda()), torch.randint(2, (16,)).cuda())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        if loss.item() < best:
            best, file = loss.item(), io.BytesIO()
            torch.save(model.state_dict(), file)
    file.seek(0)
    state_dict = torch.load(file, map_location="cpu" if fixed else None)
    model.load_state_dict(state_dict)
    del state_dict
    with torch.no_grad():
        return model(torch.randn(4, 2048).cuda()).shape


class Denoiser(nn.Module):
    def __init__(self, width=2048, depth=14):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x

    def restore(self, device, clone):
        moved = {name: value.to(device) for name, value in self.state_dict().items()}
        if clone:
            moved = {name: value.clone() for name, value in moved.items()} | {"": moved}
        for name, parameter in self.named_parameters():
            parameter.data = moved[name]


# Between two pictures the denoiser waits on the host; tensors of inference are cloned as it comes back.
@expected("several_models", fix=r"host|cpu|\bdel\b|clone", thread="Comfy-Org/ComfyUI#13372", memory=600)
def denoiser_comes_back(fixed=False):
    denoiser = Denoiser().cuda().eval()
    encoder = nn.Sequential(nn.Embedding(4000, 1024), nn.Linear(1024, 2048)).cuda().eval()
    pictures = []
    with torch.inference_mode():
        for _ in range(3):
            x = encoder(torch.randint(4000, (16,)).cuda())
            for _ in range(4):
                x = denoiser(x)
            pictures.append(x.cpu())
            denoiser.restore("cpu", clone=False)
            denoiser.restore("cuda", clone=not fixed)
    return len(pictures)


# Graphs.

class PairAttention(nn.Module):
    """Attention between all nodes; where there is no edge, its weight becomes zero."""
    def __init__(self, before, after):
        super().__init__()
        self.project = nn.Linear(before, after, bias=False)
        self.score = nn.Linear(2 * after, 1, bias=False)

    def forward(self, x, adjacency, by_sum):
        h = self.project(x)
        n, width = h.shape
        if by_sum:
            begin, end = self.score.weight[0].split(width)
            scores = (h @ begin)[:, None] + (h @ end)[None, :]
        else:
            pairs = torch.cat([h.repeat_interleave(n, 0), h.repeat(n, 1)], 1).view(n, n, 2 * width)
            scores = self.score(pairs).squeeze(-1)
        weights = F.leaky_relu(scores, 0.2).masked_fill(adjacency == 0, -1e9).softmax(1)
        return F.elu(weights @ h)


@expected("all_pairs", fix="split|chunk|broadcast|sparse", thread="diegoantognini/pyGAT#56")
def citations_of_papers(fixed=False, papers=1400):
    heads = nn.ModuleList(PairAttention(1433, 16) for _ in range(4)).cuda()
    classify = PairAttention(64, 7).cuda()
    optimizer = torch.optim.Adam([*heads.parameters(), *classify.parameters()], 5e-3)
    x, labels = torch.rand(papers, 1433).cuda(), torch.randint(7, (papers,)).cuda()
    adjacency = (torch.rand(papers, papers) < 0.002).float().cuda()
    for _ in range(2):
        hidden = torch.cat([head(x, adjacency, fixed) for head in heads], 1)
        loss = F.cross_entropy(classify(hidden, adjacency, fixed), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


class EdgeConditioned(nn.Module):
    """Each edge has a matrix of its own, computed from its attributes, that the message goes through."""
    def __init__(self, width, attributes=8):
        super().__init__()
        self.width = width
        self.matrix = nn.Sequential(nn.Linear(attributes, 64), nn.ReLU(), nn.Linear(64, width * width))
        self.update = nn.GRUCell(width, width)

    def forward(self, x, edges, attributes):
        weights = self.matrix(attributes).view(-1, self.width, self.width)
        messages = (x[edges[0]].unsqueeze(1) @ weights).squeeze(1)
        return self.update(torch.zeros_like(x).index_add(0, edges[1], messages), x)


# A matrix for each edge: nothing more special than activations.
@expected("many_rows", fix="half|batch|accumul|checkpoint|autocast|split|chunk", thread="pyg-team/pytorch_geometric#1415")
def energies_of_molecules(fixed=False, nodes=900, edges=14_000):
    width = 24 if fixed else 64
    begin, conv, readout = nn.Linear(13, width).cuda(), EdgeConditioned(width).cuda(), nn.Linear(width, 1).cuda()
    optimizer = torch.optim.Adam([*begin.parameters(), *conv.parameters(), *readout.parameters()], 1e-3)
    for _ in range(2):
        x, pairs = torch.randn(nodes, 13).cuda(), torch.randint(nodes, (2, edges)).cuda()
        attributes = torch.randn(edges, 8).cuda()
        h = F.relu(begin(x))
        for _ in range(4):
            h = conv(h, pairs, attributes)
        loss = (readout(h).view(30, -1).sum(1) - torch.randn(30).cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def corrupt(x, by_index):
    """The features of the nodes in another order: what a contrastive loss has as its negative example."""
    order = torch.randperm(x.shape[0], device=x.device)
    if not by_index:
        return x.to_dense()[order]
    indices = x.indices().clone()
    indices[0] = torch.argsort(order)[indices[0]]
    return torch.sparse_coo_tensor(indices, x.values(), x.shape).coalesce()


# Cells of a tissue, each with a row of one-hot features that is as long as there are cells.
@expected("dense_matrix", fix="sparse", thread="schwartzlab-methods/CellNEST#34")
def cells_in_another_order(fixed=False, cells=16_000):
    indices = torch.stack([torch.arange(cells), torch.arange(cells)])
    x = torch.sparse_coo_tensor(indices, torch.ones(cells), (cells, cells)).cuda().coalesce()
    weight = nn.Parameter(torch.randn(cells, 128, device="cuda") / 100)
    optimizer = torch.optim.Adam([weight], 1e-3)
    for _ in range(3):
        positive = torch.sparse.mm(x, weight)
        negative = corrupt(x, by_index=fixed) @ weight
        summary = positive.mean(0).sigmoid()
        loss = F.softplus(-positive @ summary).mean() + F.softplus(negative @ summary).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# Kernels and points.

class ExactProcess:
    def __init__(self, x, y, lengthscale=1.0):
        self.x, self.y, self.lengthscale = x, y, lengthscale

    def kernel(self, a, b):
        return torch.exp(-0.5 * torch.cdist(a / self.lengthscale, b / self.lengthscale).square())

    def posterior(self, x, joint):
        n = len(self.x)
        if joint:
            both = torch.cat([self.x, x])
            covariance = self.kernel(both, both)
            train, across = covariance[:n, :n], covariance[n:, :n]
            variance = covariance[n:, n:].diagonal()
        else:
            train, across, variance = self.kernel(self.x, self.x), self.kernel(x, self.x), torch.ones(len(x), device=x.device)
        factor = torch.linalg.cholesky(train + 0.01 * torch.eye(n, device=x.device))
        solved = torch.cholesky_solve(torch.cat([self.y[:, None], across.T], 1), factor)
        return across @ solved[:, 0], variance - (across * solved[:, 1:].T).sum(1)


# A map of the mean and of its uncertainty at many points.
@expected("all_pairs", fix="split|chunk", thread="cornellius-gp/gpytorch#2754")
def field_at_all_points(fixed=False, points=16_000):
    process = ExactProcess(torch.randn(400, 16).cuda(), torch.randn(400).cuda())
    with torch.no_grad():
        mean, variance = process.posterior(torch.randn(points, 16).cuda(), joint=not fixed)
    return mean.shape, variance.shape


class StructureEmbedding(nn.Module):
    def __init__(self, width=256, sigma=0.2):
        super().__init__()
        self.sigma, self.project = sigma, nn.Linear(width, width)
        self.register_buffer("frequencies", torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width)))

    def forward(self, points):
        distances = torch.sqrt(((points[:, None] - points[None]) ** 2).sum(-1) + 1e-9) / self.sigma
        omegas = distances[..., None] * self.frequencies
        embedded = torch.stack([torch.sin(omegas), torch.cos(omegas)], -1).flatten(-2)
        return self.project(embedded)


class GeometricAttention(nn.Module):
    def __init__(self, width=256):
        super().__init__()
        self.qkv, self.embedding = nn.Linear(width, 3 * width), StructureEmbedding(width)

    def forward(self, x, points):
        q, k, v = self.qkv(x).chunk(3, -1)
        structure = self.embedding(points)
        scores = q @ k.T + (structure @ q.unsqueeze(-1)).squeeze(-1)
        return x + (scores / 16).softmax(1) @ v


# The scene is measured in other units than those of the paper, so that far more superpoints are left of it.
@expected("all_pairs", fix="split|chunk", thread="qinzheng93/GeoTransformer#69")
def registration_of_large_scene(fixed=False):
    model = GeometricAttention().cuda().eval()
    with torch.no_grad():
        for superpoints in (120, 200 if fixed else 760):
            points = torch.rand(superpoints, 3).cuda()
            x = model(torch.randn(superpoints, 256).cuda(), points)
    return x.shape


class CrossModal(nn.Module):
    """Text and picture are fused before they are compared, so that each pair of them has features of its own."""
    def __init__(self, width=1024):
        super().__init__()
        self.image, self.text = nn.Linear(2048, width), nn.Linear(300, width)
        self.gate, self.score = nn.Linear(width, width), nn.Linear(width, 1)

    def forward(self, images, captions):
        v, t = self.image(images), self.text(captions)
        fused = v[:, None] * t[None]
        return self.score(torch.sigmoid(self.gate(fused)) * fused).squeeze(-1).sigmoid()


@expected("all_pairs", fix="split|chunk", thread="ZihaoWang-CV/CAMP_iccv19#5", memory=820)
def captions_of_all_pictures(fixed=False, images=96, captions=960):
    model = CrossModal().cuda().eval()
    pictures, texts = torch.randn(images, 2048), torch.randn(captions, 300)
    at_once = 4 if fixed else 64
    scores = torch.zeros(images, captions)
    with torch.no_grad():
        for begin in range(0, images, at_once):
            scores[begin:begin + at_once] = model(pictures[begin:begin + at_once].cuda(), texts.cuda()).cpu()
    return scores.shape


# Detection.

def is_in_topk(indices, anchors, by_scatter):
    """For each true box, which anchors are among its best ones."""
    if by_scatter:
        return torch.zeros(*indices.shape[:2], anchors, device=indices.device).scatter_(2, indices, 1.0)
    return F.one_hot(indices, anchors).sum(-2).float()


# Aerial pictures: some have a few ships, one has a harbour full of them.
@expected("one_hot", fix="scatter|gather|ind(ex|ices)", thread="Deci-AI/super-gradients#1499")
def anchors_of_crowded_picture(fixed=False, anchors=8400):
    network = nn.Sequential(nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 16, 3, 2, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(8),
                            nn.Flatten(), nn.Linear(1024, anchors)).cuda()
    optimizer = torch.optim.SGD(network.parameters(), 0.01)
    for boxes in (12, 30, 400):
        scores = network(torch.randn(2, 3, 320, 320).cuda()).sigmoid()
        overlaps = torch.rand(2, boxes, anchors, device="cuda")
        with torch.no_grad():
            metrics = scores.unsqueeze(1) * overlaps.pow(6)
            chosen = is_in_topk(metrics.topk(13, -1).indices, anchors, fixed)
            positive = chosen.amax(1)
        loss = F.binary_cross_entropy(scores, positive)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# Series and speech.

class Forecaster(nn.Module):
    def __init__(self, inputs=96, horizon=24, width=1024):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, horizon))
        self.inputs, self.horizon = inputs, horizon

    def windows(self, series):
        return series.unfold(-1, self.inputs + self.horizon, 1).flatten(0, 1)

    def training_step(self, series):
        windows = self.windows(series)
        windows = windows[torch.randint(len(windows), (256,))]
        return F.l1_loss(self.layers(windows[:, :self.inputs]), windows[:, self.inputs:])

    def validation_step(self, series, at_once):
        windows = self.windows(series)
        losses = [F.l1_loss(self.layers(part[:, :self.inputs]), part[:, self.inputs:], reduction="sum")
                  for part in windows.split(at_once or len(windows))]
        return sum(losses) / len(windows) / self.horizon


# Training draws windows of the series by chance; validation takes every one of them.
@expected("batch_without_gradients", fix="split|chunk", thread="Nixtla/neuralforecast#521")
def windows_of_long_series(fixed=False):
    model = Forecaster().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    series = torch.randn(4, 35_000).cuda()
    for epoch in range(2):
        for _ in range(5):
            optimizer.zero_grad()
            model.training_step(series).backward()
            optimizer.step()
        with torch.no_grad():
            loss = model.validation_step(series, at_once=1024 if fixed else None)
    return loss.item()


class SpeechDecoder(nn.Module):
    """Frames of a spectrogram one after another, each attending to the text."""
    def __init__(self, mels=80, width=512, memory=256):
        super().__init__()
        self.width = width
        self.prenet = nn.Sequential(nn.Linear(mels, 256), nn.ReLU())
        self.attend, self.decode = nn.LSTMCell(256 + memory, width), nn.LSTMCell(width + memory, width)
        self.query, self.key, self.energy = nn.Linear(width, 128), nn.Linear(memory, 128), nn.Linear(128, 1)
        self.out = nn.Linear(width + memory, mels)

    def forward(self, memory, frames):
        zeros = lambda: memory.new_zeros(len(memory), self.width)
        first, second, context = (zeros(), zeros()), (zeros(), zeros()), torch.zeros_like(memory[:, 0])
        keys, entering, found = self.key(memory), self.prenet(frames), []
        for t in range(frames.shape[1]):
            first = self.attend(torch.cat([entering[:, t], context], 1), first)
            weights = self.energy(torch.tanh(self.query(first[0])[:, None] + keys)).softmax(1)
            context = (weights * memory).sum(1)
            second = self.decode(torch.cat([first[0], context], 1), second)
            found.append(self.out(torch.cat([second[0], context], 1)))
        return torch.stack(found, 1)


# One recording of the corpus is several times as long as the others, and all of its batch is padded to it.
@expected("unrolled_sequence", fix="sequence|truncat|detach|checkpoint|half|short", thread="NVIDIA/tacotron2#213")
def recordings_of_all_lengths(fixed=False):
    embedding, decoder = nn.Embedding(100, 256).cuda(), SpeechDecoder().cuda()
    optimizer = torch.optim.Adam([*embedding.parameters(), *decoder.parameters()], 1e-3)
    for letters, frames in ((60, 120), (80, 160), (90, 160) if fixed else (200, 900)):
        text, spectrogram = torch.randint(100, (16, letters)).cuda(), torch.randn(16, frames, 80).cuda()
        found = decoder(embedding(text), F.pad(spectrogram, (0, 0, 1, -1)))
        loss = F.mse_loss(found, spectrogram)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# Regularization.

class StyledGenerator(nn.Module):
    def __init__(self, width=48):
        super().__init__()
        self.mapping = nn.Sequential(nn.Linear(128, 128), nn.LeakyReLU(0.2))
        self.constant = nn.Parameter(torch.randn(1, width, 16, 16))
        self.styles = nn.ModuleList(nn.Linear(128, width) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.to_rgb = nn.Conv2d(width, 3, 1)

    def forward(self, codes):
        styles = self.mapping(codes)
        x = self.constant.expand(len(codes), -1, -1, -1)
        for style, conv in zip(self.styles, self.convs):
            x = F.softplus(conv(F.interpolate(x, scale_factor=2) * style(styles)[:, :, None, None]))
        return self.to_rgb(x), styles


def length_of_path(images, styles):
    noise = torch.randn_like(images) / math.sqrt(images.shape[2] * images.shape[3])
    gradients, = torch.autograd.grad((images * noise).sum(), styles, create_graph=True)
    return gradients.square().sum(1).sqrt().mean()


# The length of the path counts in every fourth step only, and is shown in the curves of all steps.
@expected("graph_of_earlier_steps", fix=r"\.item\(\)|detach", thread="adriansahlman/stylegan2_pytorch#11")
def losses_of_lazy_regularization(fixed=False, steps=48):
    generator = StyledGenerator().cuda()
    critic = nn.Sequential(nn.Conv2d(3, 32, 4, 4), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(32 * 256, 1)).cuda()
    optimizer = torch.optim.Adam(generator.parameters(), 2e-3, betas=(0.0, 0.99))
    curves = {"loss": [], "path": []}
    for step in range(steps):
        images, styles = generator(torch.randn(8, 128).cuda())
        loss = F.softplus(-critic(images)).mean()
        pictures, codes = generator(torch.randn(4, 128).cuda())
        path = length_of_path(pictures, codes)
        if step % 4 == 0:
            loss = loss + 2 * (path - 1).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        curves["loss"].append(loss.item() if fixed else loss)
        curves["path"].append(path.item() if fixed else path)
    return {name: len(values) for name, values in curves.items()}
