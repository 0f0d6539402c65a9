"""Programs after public threads from all fields."""
import gc

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected
from programs.root_causes import no_grad_if


# Speech: batches of about as many frames, but for one.

def frames_of_batches(fixed):
    yield from [(7, 300), (23, 96), (6, 360), (24, 94), (7, 310), (23, 99)]
    yield (10, 210) if fixed else (20, 525)


# One batch of many long utterances, after batches of about equal frames.
@expected("larger_step", fix="batch|frames|bucket|length|sort", thread="wenet-e2e/wenet#724")
def uneven_frames(fixed=False):
    encoder = nn.Sequential(*[nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(4)]).cuda()
    head = nn.Linear(256, 500).cuda()
    optimizer = torch.optim.Adam([*encoder.parameters(), *head.parameters()], 1e-3)
    for utterances, frames in frames_of_batches(fixed):
        features = torch.randn(utterances, frames, 256).cuda()
        loss = head(encoder(features)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# A model that registers a hook which knows it.

class WatchedNet(nn.Module):
    def __init__(self, watch_itself):
        super().__init__()
        self.body = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
        self.calls = 0

        def count(module, inputs, output):
            self.calls += 1

        if watch_itself:
            self.register_forward_hook(count)

    def forward(self, x):
        return self.body(x)


@expected("reference_cycle", fix=r"gc\.collect|weakref|hook", thread="pytorch/pytorch#46386")
def candidates_one_by_one(fixed=False):
    gc.disable()  # the collector runs when enough objects have been made: here never
    best = 0.0
    for _ in range(30):
        candidate = WatchedNet(watch_itself=not fixed).cuda()
        with torch.no_grad():
            best = max(best, candidate(torch.randn(16, 2048).cuda()).mean().item())
        del candidate
    return best


# Attribution: hooks that leave what they saw on the modules.

def remember(module, inputs, output):
    module.seen_input, module.seen_output = inputs[0].detach(), output.detach()


def genome_net():
    return nn.Sequential(nn.Conv1d(4, 64, 21, padding=10), nn.ReLU(), nn.Conv1d(64, 64, 9, padding=4), nn.ReLU(),
                         nn.Conv1d(64, 64, 9, padding=4), nn.ReLU(), nn.Conv1d(64, 1, 9, padding=4)).cuda().eval()


def attribute(net, sequences, clean):
    handles = [layer.register_forward_hook(remember) for layer in net]
    sequences.requires_grad_()
    attribution = torch.autograd.grad(net(sequences).sum(), sequences)[0]
    for handle in handles:
        handle.remove()
    if clean:
        for layer in net:
            del layer.seen_input, layer.seen_output
    return attribution.detach().cpu()


@expected("kept_tensors", fix=r"\bdel\b|remove|None|\.cpu\(\)", thread="jmschrei/tangermeme#84", held_back=True)
def attributions_of_ensemble(fixed=False):
    nets = [genome_net() for _ in range(8)]
    sequences = torch.randn(64, 4, 2048).cuda()
    return [attribute(net, sequences.clone(), clean=fixed) for net in nets]


# Reconstruction of a film, window by window.

class PointMaps(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), nn.GELU(), nn.Conv2d(48, 48, 3, padding=1), nn.GELU(),
                                  nn.Conv2d(48, 4, 1))

    def forward(self, frames):
        points = self.body(frames)
        return {"points": points[:, :3], "confidence": points[:, 3:].exp()}


@expected("evaluation_keeps_graphs", fix="no_grad", thread="LiZizun/WinT3R#1")
def points_of_film(fixed=False):
    model = PointMaps().cuda().eval()
    film, parts = torch.randn(96, 3, 160, 256), []
    with no_grad_if(fixed):
        for start in range(0, len(film), 4):
            parts.append(model(film[start:start + 4].cuda()))
    return torch.cat([part["points"] for part in parts]).cpu()


# Segmentation of a whole scan by windows.

def stitch(volume, model, classes, edge, device):
    sums = torch.zeros(classes, *volume.shape, device=device)
    counts = torch.zeros(1, *volume.shape, device=device)
    depth, height, width = volume.shape
    for z in range(0, depth, edge):
        for y in range(0, height, edge):
            for x in range(0, width, edge):
                place = slice(z, z + edge), slice(y, y + edge), slice(x, x + edge)
                window = volume[place].cuda()[None, None]
                sums[(slice(None), *place)] += model(window)[0].to(device)
                counts[(slice(None), *place)] += 1
    return sums / counts


# The sum of all windows of all classes, and beside it what a division makes of it; no row was known to say so.
@expected("elementwise_copies", fix=r"\.cpu\(\)|device=|host|cpu", thread="Project-MONAI/MONAI#854")
def whole_scan(fixed=False):
    model = nn.Sequential(nn.Conv3d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv3d(8, 40, 1)).cuda().eval()
    with torch.no_grad():
        scan = torch.randn(96, 192, 192)
        labels = stitch(scan, model, 40, 48, "cpu" if fixed else "cuda").argmax(0)
    return labels.sum().item()


# All frames of a clip on the GPU, to segment them one by one.

@expected("data_on_gpu", fix=r"frame by frame|part|chunk|\.cuda\(\)|host|\.cpu\(\)|cpu", thread="hkchengrex/STCN#23", memory=800, held_back=True)
def mask_of_clip(fixed=False):
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 1, 3, padding=1)).cuda().eval()
    rgb = torch.randn(320, 3, 384, 512)
    if not fixed:
        rgb = rgb.cuda()
    covered = 0.0
    with torch.no_grad():
        for frame in rgb:
            covered += model(frame[None].cuda()).sigmoid().mean().item()
    return covered


# Twice as many frames, joined at the end.

def interpolate(frames, model, room):
    made = []
    for left, right in zip(frames[:-1], frames[1:]):
        made.append(left[None])
        made.append(model(torch.cat([left, right])[None]))
    if room is None:
        return torch.cat(made)
    for place, frame in enumerate(made):
        room[place] = frame[0].cpu()
    return room


# In the thread the frames are written into one tensor; here the screen names the list, and not what cat() adds to it.
@expected("joined_results", fix=r"\.cpu\(\)|preallocat|empty|write", thread="Fannovel16/ComfyUI-Frame-Interpolation#52", memory=700)
def smoother_film(fixed=False):
    model = nn.Sequential(nn.Conv2d(6, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)).cuda().eval()
    frames = torch.randn(60, 3, 360, 640).cuda()
    with torch.no_grad():
        room = torch.empty(118, 3, 360, 640) if fixed else None
        return interpolate(frames, model, room).mean().item()


# Relations between all bodies, by one-hot matrices.

class RelationNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.edge, self.node = nn.Linear(2 * width, width), nn.Linear(width, width)

    def forward(self, states, receivers, senders, one_hot):
        if one_hot:
            pairs = torch.cat([receivers @ states, senders @ states], -1)
            return self.node(receivers.T @ F.relu(self.edge(pairs)))
        messages = F.relu(self.edge(torch.cat([states[receivers], states[senders]], -1)))
        return self.node(torch.zeros_like(states).index_add(0, receivers, messages))


# The matrices come from the host: no op of the GPU made them.
@expected("one_hot", fix="index|sparse|scatter", thread="ethanfetaya/NRI#19")
def relations_of_bodies(fixed=False, bodies=600):
    rows, columns = torch.where(torch.rand(bodies, bodies) < (0.1 if fixed else 1.1))
    if fixed:
        receivers, senders = rows.cuda(), columns.cuda()
    else:
        receivers, senders = F.one_hot(rows, bodies).float().cuda(), F.one_hot(columns, bodies).float().cuda()
    model = RelationNet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(3):
        loss = model(torch.randn(bodies, 64).cuda(), receivers, senders, one_hot=not fixed).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Propagation before the layer that makes features narrow.

class SimpleGraphConv(nn.Module):
    def __init__(self, features, classes, hops, narrow_first):
        super().__init__()
        self.linear, self.hops, self.narrow_first = nn.Linear(features, classes), hops, narrow_first

    def propagate(self, x, edges):
        messages = x[edges[0]]
        return torch.zeros_like(x).index_add(0, edges[1], messages)

    def forward(self, x, edges):
        if self.narrow_first:
            x = self.linear(x)
        for _ in range(self.hops):
            x = self.propagate(x, edges)
        return x if self.narrow_first else self.linear(x)


# Features of edges before the layer that makes them narrow.
@expected("enlarged", fix="linear|narrow|sparse|split|chunk", thread="pyg-team/pytorch_geometric#404", memory=1400, held_back=True)
def coauthors(fixed=False):
    layer = SimpleGraphConv(3400, 15, hops=2, narrow_first=fixed).cuda()
    x, edges = torch.rand(9000, 3400).cuda(), torch.randint(9000, (2, 80000)).cuda()
    optimizer = torch.optim.Adam(layer.parameters(), 1e-2)
    for _ in range(3):
        loss = F.cross_entropy(layer(x, edges), torch.randint(15, (9000,)).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Privacy: a hook that keeps what each layer saw, for gradients of single samples.

class PerSampleGradients:
    def __init__(self, model):
        for layer in model.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(self.keep)

    @staticmethod
    def keep(layer, inputs, output):
        if layer.training:
            layer.__dict__.setdefault("activations", []).append(inputs[0].detach())


def accuracy(model, batches, evaluate):
    if evaluate:
        model.eval()
    right = 0
    with torch.no_grad():
        for _ in range(batches):
            right += (model(torch.randn(512, 1024).cuda()).argmax(1) == 0).sum().item()
    return right


@expected("kept_tensors", fix=r"\.eval\(\)|clear|\bdel\b|\.cpu\(\)", thread="meta-pytorch/opacus#176")
def private_accuracy(fixed=False):
    model = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
    PerSampleGradients(model)
    return accuracy(model, 60, evaluate=fixed)


# The weights of the best epochs, to choose among.

@expected("kept_tensors", fix=r"\.cpu\(\)", thread="facebookresearch/fairscale#790")
def best_of_epochs(fixed=False):
    model = nn.Sequential(*[nn.Linear(1536, 1536) for _ in range(8)]).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    states = []
    for _ in range(12):
        for _ in range(2):
            loss = model(torch.randn(32, 1536).cuda()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        states.append({name: value.cpu() for name, value in state.items()} if fixed else state)
    return len(states)


# Neighbours of points: an index for each coordinate.

def gather_neighbours(points, indices, plain):
    if plain:
        return points[indices]
    wide = indices.clone()[:, :, None].expand(-1, -1, points.shape[1]).contiguous()
    return points[:, None].expand(-1, indices.shape[1], -1).gather(0, wide)


@expected("wide_index", fix=r"split|chunk|part|int32|points\[", thread="lxxue/FRNN#6", held_back=True)
def features_of_neighbours(fixed=False):
    points = torch.randn(100_000, 32).cuda()
    indices = torch.randint(len(points), (len(points), 24)).cuda()
    with torch.no_grad():
        total = 0.0
        for part in indices.split(4000) if fixed else [indices]:
            total += gather_neighbours(points, part, plain=fixed).amax(1).sum().item()
    return total


# Diffusion: pictures from noise.

class Denoiser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.GELU(), nn.Conv2d(width, width, 3, padding=1),
                                  nn.GELU(), nn.Conv2d(width, 1, 3, padding=1))

    def forward(self, x, t):
        return self.body(x + t)


def sample(model, count, steps, detach):
    x = torch.randn(count, 1, 28, 28).cuda()
    for step in range(steps, 0, -1):
        noise = model(x, step / steps)
        x = x - 0.1 * noise + 0.01 * torch.randn_like(x)
        if detach:
            x = x.detach()
    return x


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="TeaPearce/Conditional_Diffusion_MNIST#12", memory=700)
def digits_after_each_epoch(fixed=False):
    model = Denoiser().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    for epoch in range(2):
        for _ in range(4):
            x, noise = torch.randn(64, 1, 28, 28).cuda(), torch.randn(64, 1, 28, 28).cuda()
            loss = F.mse_loss(model(x + noise, 0.5), noise)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        model.eval()
        pictures = sample(model, 64, 60, detach=fixed)
        model.train()
    return pictures.mean().item()


# A buffer of past trajectories, from which training takes some again.

class Trajectory:
    def __init__(self, states, log_probability):
        self.states, self.log_probability = states, log_probability


class Replay:
    def __init__(self, room, keep_plain):
        self.room, self.keep_plain, self.trajectories = room, keep_plain, []

    def push(self, trajectory):
        if self.keep_plain:
            trajectory = Trajectory(trajectory.states.detach().cpu(), trajectory.log_probability.detach().cpu())
        self.trajectories = [*self.trajectories, trajectory][-self.room:]


# Backward has freed what the graph had saved: what stays is the tensors of each trajectory.
@expected("kept_tensors", fix="detach", thread="recursionpharma/gflownet#130")
def flows_with_replay(fixed=False):
    policy = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 1024), nn.Tanh(), nn.Linear(1024, 256)).cuda()
    optimizer, replay = torch.optim.Adam(policy.parameters(), 1e-3), Replay(1000, keep_plain=fixed)
    for _ in range(500):
        states = torch.randn(2048, 256).cuda()
        log_probability = F.log_softmax(policy(states), -1).amax(-1)
        replay.push(Trajectory(states, log_probability))
        loss = (log_probability - 1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Distillation with an embedding of each sample of the data set.

class ContrastMemory(nn.Module):
    def __init__(self, samples, width):
        super().__init__()
        self.register_buffer("memory_of_student", torch.rand(samples, width))
        self.register_buffer("memory_of_teacher", torch.rand(samples, width))

    def forward(self, student, teacher, index):
        negatives = torch.randint(len(self.memory_of_student), (len(index), 256), device=index.device)
        loss = torch.einsum("bd,bnd->bn", student, self.memory_of_teacher[negatives]).exp().mean()
        with torch.no_grad():
            self.memory_of_student[index] = F.normalize(student, dim=1)
            self.memory_of_teacher[index] = F.normalize(teacher, dim=1)
        return loss


# An embedding of each sample of the data set, twice, as buffers.
@expected("large_buffers", fix=r"queue|fewer|host|\.cpu\(\)|half", thread="HobbitLong/RepDistiller#40", held_back=True)
def distilled_faces(fixed=False):
    student, teacher = nn.Linear(512, 128).cuda(), nn.Linear(512, 128).cuda()
    contrast = ContrastMemory(65_536 if fixed else 850_000, 128).cuda()
    optimizer = torch.optim.SGD(student.parameters(), 1e-2)
    for _ in range(3):
        faces, index = torch.randn(256, 512).cuda(), torch.randint(65_536, (256,)).cuda()
        with torch.no_grad():
            target = teacher(faces)
        loss = contrast(student(faces), target, index)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Radiance fields: trained on some rays, shown as whole pictures.

class Field(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(63, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, points):
        waves = [points] + [f(2 ** k * points) for k in range(10) for f in (torch.sin, torch.cos)]
        return self.body(torch.cat(waves, -1))


def render(field, rays, samples):
    depths = torch.linspace(2, 6, samples, device=rays.device)
    points = rays[:, None, :3] + rays[:, None, 3:] * depths[:, None]
    raw = field(points)
    alpha = 1 - torch.exp(-raw[..., 3].relu() * 0.05)
    weights = alpha * torch.cumprod(1 - alpha + 1e-10, -1)
    return (weights[..., None] * raw[..., :3].sigmoid()).sum(1)


@expected("batch_without_gradients", fix="chunk|split|part", thread="dunbar12138/DSNeRF#72")
def picture_of_scene(fixed=False):
    field = Field().cuda()
    optimizer = torch.optim.Adam(field.parameters(), 5e-4)
    for _ in range(4):
        loss = F.mse_loss(render(field, torch.randn(1024, 6).cuda(), 64), torch.rand(1024, 3).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        rays = torch.randn(120 * 160, 6).cuda()
        parts = [render(field, part, 64) for part in rays.split(2048 if fixed else len(rays))]
    return torch.cat(parts).mean().item()


# Detection: which anchor is for which of many boxes.

def iou(boxes, anchors):
    areas = lambda b: (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    low, high = torch.max(boxes[:, None, :2], anchors[:, :2]), torch.min(boxes[:, None, 2:], anchors[:, 2:])
    sides = (high - low).clamp(min=0)
    overlap = sides[..., 0] * sides[..., 1]
    return overlap / (areas(boxes)[:, None] + areas(anchors) - overlap)


@expected("all_pairs", fix="chunk|split|part|cpu", thread="facebookresearch/maskrcnn-benchmark#18", memory=500)
def boxes_of_crowd(fixed=False):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 15, 3, 2, 1)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(2):
        scores = model(torch.randn(1, 3, 512, 512).cuda()).flatten()
        anchors = (torch.rand(len(scores), 4) * 512).cuda()
        boxes = (torch.rand(300, 4) * 512).cuda()
        with torch.no_grad():
            if fixed:
                best = torch.stack([iou(part, anchors).amax(0) for part in boxes.split(20)]).amax(0)
            else:
                best = iou(boxes, anchors).amax(0)
        loss = F.binary_cross_entropy_with_logits(scores, (best > 0.5).float())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# A trainer that keeps what each step of validation returns, until the end of the epoch.

class Trainer:
    def __init__(self, model, keep):
        self.model, self.keep, self.outputs = model, keep, []

    def validation_step(self, batch):
        heat = self.model(batch)
        return {"heat": heat, "loss": heat.square().mean()}

    def validate(self, batches):
        self.model.eval()
        with torch.no_grad():
            for _ in range(batches):
                output = self.validation_step(torch.randn(4, 3, 256, 256).cuda())
                self.outputs.append(output if self.keep else {"loss": output["loss"]})
        return torch.stack([output["loss"] for output in self.outputs]).mean().item()


@expected("kept_tensors", fix=r"\.cpu\(\)|\.item\(\)|\bdel\b", thread="Lightning-AI/pytorch-lightning#8453", held_back=True)
def heat_maps_of_epoch(fixed=False):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 20, 1)).cuda()
    trainer, optimizer = Trainer(model, keep=not fixed), torch.optim.Adam(model.parameters(), 1e-3)
    for _ in range(3):
        loss = model(torch.randn(4, 3, 256, 256).cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return trainer.validate(60)


# Summaries: the encoder's states once for each beam.

class Summarizer(nn.Module):
    def __init__(self, width=512, layers=4):
        super().__init__()
        self.encoder = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.keys = nn.ModuleList(nn.Linear(width, 2 * width) for _ in range(layers))

    def encode(self, x):
        for layer in self.encoder:
            x = F.gelu(layer(x))
        return x


@expected("enlarged", fix="expand|view|later|repeat", thread="facebookresearch/fairseq#1957", memory=700)
def summaries_by_beams(fixed=False):
    model, beams = Summarizer().cuda().eval(), 5
    with torch.no_grad():
        states = model.encode(torch.randn(16, 1000, 512).cuda())
        if not fixed:
            states = states.index_select(0, torch.arange(16, device="cuda").repeat_interleave(beams))
        cached = [keys(states) for keys in model.keys]
    return sum(one.mean().item() for one in cached)


# A loss by features of a network that nobody trains.

class FeatureLoss(nn.Module):
    def __init__(self, plain):
        super().__init__()
        layers = []
        for channels in (3, 32, 32, 64, 64):
            layers += [nn.Conv2d(channels, 64 if channels >= 32 and len(layers) > 3 else 32, 3, padding=1), nn.ReLU()]
        self.features, self.plain = nn.Sequential(*layers), plain
        if plain:
            self.features.requires_grad_(False)

    def forward(self, made, target):
        with no_grad_if(self.plain):
            wanted = self.features(target)
        return F.l1_loss(self.features(made), wanted)


@expected("graph_without_use", fix="no_grad|requires_grad", thread="junyanz/pytorch-CycleGAN-and-pix2pix#822", memory=1100)
def sharper_pictures(fixed=False):
    model, perceptual = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 3, 3, padding=1)).cuda(), FeatureLoss(fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    for _ in range(2):
        blurred, sharp = torch.rand(6, 3, 256, 256).cuda(), torch.rand(6, 3, 256, 256).cuda()
        loss = perceptual(model(blurred), sharp)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Pong: the log-probability of each move, until the game is over.

@expected("several_forward_passes", fix="backward", thread="pytorch/pytorch#5353", held_back=True)
def episode_of_pong(fixed=False):
    policy = nn.Sequential(nn.Conv2d(1, 16, 8, 4), nn.ReLU(), nn.Conv2d(16, 32, 4, 2), nn.ReLU(), nn.Flatten(),
                           nn.Linear(2592, 256), nn.ReLU(), nn.Linear(256, 3)).cuda()
    optimizer = torch.optim.Adam(policy.parameters(), 1e-4)
    log_probabilities = []
    for move in range(900):
        frames = torch.randn(16, 1, 84, 84).cuda()
        scores = policy(frames).log_softmax(-1)
        log_probabilities.append(scores[:, 0])
        if fixed and len(log_probabilities) == 100:
            optimizer.zero_grad()
            (-torch.stack(log_probabilities)).mean().backward()
            optimizer.step()
            log_probabilities.clear()
    if log_probabilities:
        (-torch.stack(log_probabilities)).mean().backward()
        optimizer.step()


# Surfaces of a large scan, chunk by chunk.

class Reconstructor:
    def __init__(self, device):
        self.net, self.device, self.chunks = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 64)).cuda(), device, {}

    @torch.no_grad()
    def reconstruct(self, points, size):
        for number, part in enumerate(points.split(size)):
            features = self.net(part.cuda())
            self.chunks[number] = {"features": features.to(self.device), "occupied": (features > 0).to(self.device)}
        return len(self.chunks)


@expected("kept_tensors", fix=r"\.cpu\(\)|host", thread="nv-tlabs/NKSR#8")
def surface_of_scan(fixed=False):
    return Reconstructor("cpu" if fixed else "cuda").reconstruct(torch.randn(4_000_000, 3), 50_000)


# Optical flow between all frames, there and back.

class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(6, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 2, 3, padding=1))

    def forward(self, frames):
        there = self.body(torch.cat([frames[:-1], frames[1:]], 1))
        back = self.body(torch.cat([frames[1:], frames[:-1]], 1))
        return there, back


@expected("batch_without_gradients", fix="split|chunk|part", thread="sczhou/Upscale-A-Video#42", memory=900)
def flow_of_film(fixed=False):
    model = Flow().cuda().eval()
    frames = torch.rand(40, 3, 256, 448).cuda()
    with torch.no_grad():
        if fixed:
            return sum(model(frames[start:start + 5])[0].abs().mean().item() for start in range(0, 36, 4))
        there, back = model(frames)
        return there.abs().mean().item() + back.abs().mean().item()


# Masks of objects, each pasted into the whole picture.

def paste(masks, boxes, height, width, at_once):
    grid_y, grid_x = torch.arange(height).cuda() + 0.5, torch.arange(width).cuda() + 0.5
    result = torch.zeros(len(masks), height, width, dtype=torch.bool, device=masks.device)
    for part in torch.arange(len(masks)).split(len(masks) if at_once else 4):
        x0, y0, x1, y1 = boxes[part].T[..., None]
        y = (grid_y - y0) / (y1 - y0) * 2 - 1
        x = (grid_x - x0) / (x1 - x0) * 2 - 1
        grid = torch.stack([x[:, None].expand(-1, height, -1), y[:, :, None].expand(-1, -1, width)], -1)
        result[part] = F.grid_sample(masks[part], grid, align_corners=False)[:, 0] > 0.5
    return result


# Coordinates of each pixel of each mask: the screen names the grid beside what failed.
@expected("large_result", fix="split|chunk|part|cpu", thread="facebookresearch/maskrcnn-benchmark#18", held_back=True)
def masks_of_crowd(fixed=False):
    masks, corners = torch.rand(100, 1, 28, 28).cuda(), torch.rand(100, 2).cuda() * 400
    with torch.no_grad():
        boxes = torch.cat([corners, corners + 100], 1)
        return paste(masks, boxes, 800, 1000, at_once=not fixed).sum().item()


# A memory of each node of a graph, which the next batch reads.

class NodeMemory(nn.Module):
    def __init__(self, nodes, width, detach):
        super().__init__()
        self.state, self.update, self.detach = torch.zeros(nodes, width).cuda(), nn.GRUCell(width, width), detach

    def forward(self, nodes, messages):
        new = self.update(messages, self.state[nodes])
        self.state = self.state.index_put((nodes,), new)
        if self.detach:
            self.state = self.state.detach()
        return new


@expected("recurrent_state", fix="detach", thread="twitter-research/tgn#16")
def memory_of_nodes(fixed=False):
    memory = NodeMemory(60_000, 128, detach=fixed).cuda()
    optimizer = torch.optim.Adam(memory.parameters(), 1e-3)
    for _ in range(90):
        nodes, messages = torch.randint(60_000, (2000,)).cuda(), torch.randn(2000, 128).cuda()
        loss = memory(nodes, messages).square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=not fixed)
        optimizer.step() if fixed else None


# Federated averaging: what each client sends.

@expected("kept_tensors", fix=r"\.cpu\(\)|sum|\+=|running|host", thread="APPFL/APPFL#112")
def average_of_clients(fixed=False):
    server = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(10)]).cuda()
    total, updates = None, []
    for _ in range(24):
        update = [torch.randn_like(weight) * 1e-3 for weight in server.parameters()]
        if fixed:
            total = update if total is None else [a + b for a, b in zip(total, update)]
        else:
            updates.append(update)
    if not fixed:
        total = [torch.stack(parts).sum(0) for parts in zip(*updates)]
    with torch.no_grad():
        for weight, change in zip(server.parameters(), total):
            weight += change / 24


# Speech: all windows of a recording in one batch.

@expected("data_on_gpu", fix="split|chunk|part|batch", memory=700, held_back=True)
def words_of_recording(fixed=False):
    model = nn.Sequential(nn.Conv1d(80, 256, 3, padding=1), nn.GELU(), nn.Conv1d(256, 256, 3, 2, padding=1), nn.GELU()).cuda().eval()
    recording = torch.randn(80, 360_000)
    windows = recording.unfold(1, 3000, 1000).transpose(0, 1)
    with torch.no_grad():
        return [model(part.cuda()).mean().item() for part in windows.split(8 if fixed else len(windows))]
