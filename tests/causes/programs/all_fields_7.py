"""Programs after public threads from all fields."""
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from expected import expected
from programs.root_causes import no_grad_if


# Molecules.

class PairEnergies(nn.Module):
    """The energy of atoms as a sum over pairs, by a network of their distances."""
    def __init__(self, width=128, basis=32):
        super().__init__()
        self.register_buffer("centres", torch.linspace(0, 4, basis))
        self.pairs = nn.Sequential(nn.Linear(basis, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU(), nn.Linear(width, 1))

    def forward(self, positions):
        apart = positions[:, None] - positions[None]
        distances = (apart.square().sum(-1) + 1e-6).sqrt()
        return self.pairs(torch.exp(-(distances[..., None] - self.centres) ** 2)).sum()


def hessian_by_rows(forces, positions, training):
    rows = [torch.autograd.grad(-force, positions, retain_graph=True, create_graph=training)[0].flatten()
            for force in forces.flatten()]
    return torch.stack(rows)


# The second derivatives of a molecule, row after row so that they take little memory.
# create_graph=True in the backward pass of each row, of which no further derivative is taken.
@expected("create_graph", fix="create_graph=(training|False)|create_graph", thread="facebookresearch/fairchem#2099")
def hessian_of_molecule(fixed=False, atoms=40):
    model = PairEnergies().cuda().eval()
    spectra = []
    for _ in range(2):
        positions = torch.randn(atoms, 3, device="cuda", requires_grad=True)
        energy = model(positions)
        forces = -torch.autograd.grad(energy, positions, create_graph=True)[0]
        hessian = hessian_by_rows(forces, positions, training=not fixed).detach()
        spectra.append(torch.linalg.eigvalsh(hessian + hessian.T).cpu())
    return len(spectra)


# Metrics.

class BinnedCurve:
    """How many are found at each threshold."""
    def __init__(self, thresholds, one_by_one):
        self.thresholds, self.one_by_one = torch.linspace(0, 1, thresholds).cuda(), one_by_one
        self.counts = torch.zeros(thresholds, 2, 2, dtype=torch.long).cuda()

    def update(self, scores, labels):
        scores, labels = scores.flatten(), labels.flatten()
        if self.one_by_one:
            for number, threshold in enumerate(self.thresholds):
                self.counts[number] += torch.bincount((scores >= threshold) + 2 * labels, minlength=4).view(2, 2)
            return
        found = (scores[:, None] >= self.thresholds[None]).long()
        places = found + 2 * labels[:, None] + 4 * torch.arange(len(self.thresholds), device=scores.device)
        self.counts += torch.bincount(places.flatten(), minlength=4 * len(self.thresholds)).view(-1, 2, 2)


# Each pixel is a sample of the curve.
@expected("all_pairs", fix="split|chunk|loop|part", thread="Lightning-AI/torchmetrics#1492")
def curve_over_pixels(fixed=False):
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)).cuda()
    optimizer, curve = torch.optim.Adam(model.parameters(), 1e-3), BinnedCurve(200, one_by_one=fixed)
    for epoch in range(2):
        for _ in range(3):
            images, masks = torch.randn(8, 3, 256, 256).cuda(), torch.randint(2, (8, 1, 256, 256)).cuda()
            loss = F.binary_cross_entropy_with_logits(model(images), masks.float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            for _ in range(2):
                images, masks = torch.randn(8, 3, 256, 256).cuda(), torch.randint(2, (8, 1, 256, 256)).cuda()
                curve.update(model(images).sigmoid(), masks)
    return curve.counts.shape


# Language.

class Decoder(nn.Module):
    def __init__(self, vocabulary=48_000, width=512, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        layer = lambda: nn.TransformerEncoderLayer(width, 8, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.layers, self.norm = nn.ModuleList(layer() for _ in range(depth)), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def hidden(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


class Server:
    """Generates the next token; on demand also says how likely each token of the prompt was."""
    def __init__(self, model, chunk):
        self.model, self.chunk = model, chunk

    def score(self, logits, tokens):
        likely = logits.float().log_softmax(-1)
        return likely.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), likely.topk(5, -1).values

    @torch.inference_mode()
    def prefill(self, prompt, scores):
        hidden = self.model.hidden(prompt)
        if not scores:
            return self.model.head(hidden[:, -1:]).argmax(-1)
        logits = self.model.head(hidden)
        rows = self.chunk or logits.shape[1]
        return [self.score(*part) for part in zip(logits[:, :-1].split(rows, 1), prompt[:, 1:].split(rows, 1))]


@expected("logits", fix="split|chunk", thread="ModelTC/LightLLM#1435", held_back=True)
def likelihood_of_prompt(fixed=False):
    server = Server(Decoder().cuda().bfloat16().eval(), chunk=128 if fixed else None)
    server.prefill(torch.randint(48_000, (1, 3000)).cuda(), scores=False)
    return len(server.prefill(torch.randint(48_000, (1, 3000)).cuda(), scores=True))


def likelihood_of_tokens(logits, tokens):
    return logits.float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


# A policy is trained on long answers; their likelihood is computed chunk after chunk.
# Autograd keeps the float32 result of each chunk: chunks alone save nothing.
@expected("logits", fix="checkpoint", thread="NVIDIA-NeMo/RL#4222")
def policy_in_chunks(fixed=False, chunk=256):
    model = Decoder(width=256, depth=2).cuda().bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    for _ in range(3):
        tokens = torch.randint(48_000, (1, 2049)).cuda()
        advantages = torch.randn(1, 2048).cuda()
        logits = model.head(model.hidden(tokens[:, :-1]))
        parts = zip(logits.split(chunk, 1), tokens[:, 1:].split(chunk, 1))
        likely = torch.cat([checkpoint(likelihood_of_tokens, *part, use_reentrant=False) if fixed else likelihood_of_tokens(*part)
                            for part in parts], 1)
        loss = -(likely * advantages).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def to_float8(x, scale, in_place):
    if in_place:
        return x.to(torch.float32, copy=True).div_(scale).clamp_(-448, 448).to(torch.float8_e4m3fn)
    wide = x.to(torch.float32)
    divided = wide / scale
    clamped = divided.clamp(-448, 448)
    return clamped.to(torch.float8_e4m3fn)


class Float8Linear(nn.Module):
    def __init__(self, before, after, in_place):
        super().__init__()
        self.linear, self.in_place = nn.Linear(before, after, bias=False), in_place
        self.register_buffer("scale", torch.tensor(0.02))

    def forward(self, x):
        rounded = to_float8(x, self.scale, self.in_place)
        return self.linear(rounded.to(x.dtype) * self.scale.to(x.dtype))


# The inputs of each layer are rounded to eight bits; the batch of tokens is large.
# Float32 copies of a large tensor, three at a time.
@expected("elementwise_copies", fix="in.place|div_|clamp_", thread="pytorch/ao#4068")
def rounded_activations(fixed=False, tokens=12_288):
    model = nn.Sequential(Float8Linear(1024, 6144, fixed), nn.GELU(), Float8Linear(6144, 1024, fixed)).cuda().bfloat16().eval()
    with torch.no_grad():
        for _ in range(2):
            found = model(torch.randn(tokens, 1024, dtype=torch.bfloat16, device="cuda"))
    return found.shape


# Speech.

class Speakers(nn.Module):
    def __init__(self, mels=80, width=192):
        super().__init__()
        self.layers = nn.Sequential(nn.Conv1d(mels, 256, 5, padding=2), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten(),
                                    nn.Linear(256, width))

    def forward(self, x):
        return F.normalize(self.layers(x), dim=1)


def cosine_affinity(embeddings):
    affinity = embeddings @ embeddings.T
    low, high = affinity.aminmax()
    return (affinity - low) / (high - low)


def fused_affinity(scales, weights):
    """That of windows of several lengths, each repeated as often as the finest has windows in it."""
    finest = max(len(one) for one in scales)
    total = torch.zeros(finest, finest, device=scales[0].device)
    for embeddings, weight in zip(scales, weights):
        times = torch.full((len(embeddings),), finest // len(embeddings), device=embeddings.device)
        rows = cosine_affinity(embeddings).repeat_interleave(times, 0)
        total += weight * rows.repeat_interleave(times, 1)
    return total


# Who speaks when, in a recording of hours: windows of three lengths are compared.
@expected("all_pairs", fix="split|chunk|part", thread="NVIDIA-NeMo/Speech#7691", held_back=True)
def speakers_of_long_recording(fixed=False, windows=8000):
    model = Speakers().cuda().eval()
    labels = []
    with torch.no_grad():
        scales = [torch.cat([model(torch.randn(500, 80, 50).cuda()) for _ in range(windows // every // 500)])
                  for every in (4, 2, 1)]
        parts = 8 if fixed else 1
        for part in zip(*[one.chunk(parts) for one in scales]):
            affinity = fused_affinity(part, (0.5, 0.3, 0.2))
            labels.append(affinity.topk(8, 1).indices.cpu())
    return torch.cat(labels).shape


# Pictures.

class PictureEncoder(nn.Module):
    def __init__(self, width=96):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1), nn.SiLU(),
                                  nn.Conv2d(width, 2 * width, 3, 2, 1), nn.SiLU(), nn.Conv2d(2 * width, 8, 3, 4, 1))

    def forward(self, x):
        return self.down(x)


class Denoiser(nn.Module):
    def __init__(self, width=1024, depth=10):
        super().__init__()
        layer = lambda: nn.TransformerEncoderLayer(width, 16, 4 * width, 0.0, batch_first=True, norm_first=True)
        self.before, self.after = nn.Linear(8, width), nn.Linear(width, 8)
        self.layers = nn.ModuleList(layer() for _ in range(depth))

    def forward(self, latents):
        x = self.before(latents.flatten(2).transpose(1, 2))
        for layer in self.layers:
            x = layer(x)
        return self.after(x).transpose(1, 2).view_as(latents)


class Benchmark:
    """All parts of a pipeline go to the GPU, then the pictures are encoded, then an adapter of the denoiser is trained."""
    def __init__(self, late):
        self.encoder, self.denoiser = PictureEncoder().cuda(), Denoiser().bfloat16()
        if not late:
            self.denoiser.cuda()

    @torch.no_grad()
    def encode(self, pictures):
        return [self.encoder(part.cuda()).cpu() for part in pictures.split(8)]

    def train(self, latents):
        self.denoiser.cuda()
        for p in self.denoiser.layers.parameters():
            p.requires_grad_(False)
        optimizer = torch.optim.AdamW([*self.denoiser.before.parameters(), *self.denoiser.after.parameters()], 1e-4)
        for latent in latents:
            x = latent[:1].cuda().bfloat16()[..., :16, :16]
            loss = F.mse_loss(self.denoiser(x), x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss.item()


# A model that nothing has called yet holds most of the memory.
@expected("idle_model", fix=r"\.cpu\(\)|before it is|until|later|host", thread="huggingface/peft#3395")
def latents_before_training(fixed=False):
    benchmark = Benchmark(late=fixed)
    latents = benchmark.encode(torch.randn(16, 3, 320, 320))
    if fixed:
        benchmark.encoder.cpu()
    return benchmark.train(latents)


def losses_of(model, tokens):
    x = model.hidden(tokens[:, :-1])
    return F.cross_entropy(model.head(x).flatten(0, 1), tokens[:, 1:].flatten())


# Which examples of the training mattered for a query: training adds up gradients of parts of a batch.
# Training runs parts of a batch, and this the whole of it. No row of kReasons said so, and its writer expected capacity.
@expected("larger_step", fix="chunk|split|accumul|batch", thread="EleutherAI/bergson#400")
def gradients_of_query(fixed=False, batch=32, parts=8):
    model = Decoder(vocabulary=4000, width=384, depth=4).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        for part in torch.randint(4000, (batch, 257)).split(batch // parts):
            (losses_of(model, part.cuda()) / parts).backward()
        optimizer.step()
    optimizer.zero_grad()
    query = torch.randint(4000, (batch, 257))
    for part in query.split(batch // parts if fixed else batch):
        (losses_of(model, part.cuda()) * len(part) / batch).backward()
    return sum(p.grad.square().sum().item() for p in model.parameters())


class SmallUNet(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.into = nn.Conv2d(4, width, 3, padding=1)
        self.downs = nn.ModuleList([nn.Conv2d(width, 2 * width, 3, 2, 1), nn.Conv2d(2 * width, 4 * width, 3, 2, 1)])
        self.ups = nn.ModuleList([nn.ConvTranspose2d(4 * width, 2 * width, 2, 2), nn.ConvTranspose2d(2 * width, width, 2, 2)])
        self.out = nn.Conv2d(width, 4, 3, padding=1)

    def forward(self, x):
        x, skips = self.into(x), []
        for down in self.downs:
            skips.append(x)
            x = F.silu(down(x))
        for up in self.ups:
            x = F.silu(up(x)) + skips.pop()
        return self.out(x)


class HookedUNet:
    """Remembers what the layers found, for a guidance that reads and clears it. Not every picture is guided."""
    def __init__(self, unet):
        self.unet, self.features = unet, []
        for layer in [*unet.downs, *unet.ups]:
            layer.register_forward_hook(lambda module, inputs, output: self.features.append(output))

    def guide(self, noise):
        while self.features:
            noise = noise - 1e-3 * self.features.pop().mean()
        return noise


# A picture from noise, with or without a sketch.
@expected("kept_tensors", fix=r"clear|\bdel\b|\.cpu\(\)|remove", thread="Mikubill/sketch2img#7", held_back=True)
def pictures_without_sketch(fixed=False, steps=60):
    hooked = HookedUNet(SmallUNet().cuda().eval())
    with torch.no_grad():
        for _ in range(2):
            latents = torch.randn(4, 4, 96, 96, device="cuda")
            for _ in range(steps):
                noise = hooked.unet(latents)
                if fixed:
                    noise = hooked.guide(noise)
                latents = latents - 0.01 * noise
    return latents.shape


class Track:
    def __init__(self, number, box, state):
        self.number, self.boxes, self.state = number, [box], state


class Tracker:
    """Objects of a video. Those that have left stay, as they may come back."""
    def __init__(self, model, on_host):
        self.model, self.on_host, self.active, self.gone = model, on_host, [], []

    @torch.no_grad()
    def step(self, frame):
        states = self.model(frame).flatten(2).transpose(1, 2)[0]
        boxes = states[:, :4].sigmoid()
        found = states.norm(dim=1).topk(6).indices.tolist()
        self.gone += self.active
        self.active = []
        for i in found:
            box, state = boxes[i], states[i]
            self.active.append(Track(i, box.cpu() if self.on_host else box, state.cpu() if self.on_host else state))


# Its writer expected kept_tensors; what is kept are small parts, each of which keeps the states of a whole frame.
@expected("small_view", fix=r"\.cpu\(\)|clone|\bdel\b", thread="timmeinhardt/trackformer#101")
def people_of_long_video(fixed=False, frames=400):
    tracker = Tracker(nn.Sequential(nn.Conv2d(3, 64, 7, 4, 3), nn.ReLU(), nn.Conv2d(64, 256, 3, 2, 1)).cuda().eval(), fixed)
    for _ in range(frames):
        tracker.step(torch.randn(1, 3, 512, 512, device="cuda"))
    return len(tracker.gone)


# Federated learning.

class FederatedServer:
    def __init__(self, model, on_host):
        self.model, self.on_host, self.primal_states = model, on_host, {}

    def recover(self, number, state):
        kept = copy.deepcopy(state)
        self.primal_states[number] = {name: value.cpu() for name, value in kept.items()} if self.on_host else kept

    def update(self):
        with torch.no_grad():
            for name, value in self.model.state_dict().items():
                value.copy_(sum(state[name] for state in self.primal_states.values()) / len(self.primal_states))


class FederatedClient:
    def __init__(self, model):
        self.model = model

    def update(self, state):
        self.model.load_state_dict(state)
        optimizer = torch.optim.SGD(self.model.parameters(), 0.01)
        for _ in range(2):
            loss = F.cross_entropy(self.model(torch.randn(16, 1, 28, 28).cuda()), torch.randint(62, (16,)).cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return self.model.state_dict()


# Copies of the weights, one for each client. Its writer expected several_models; the screen says that the dictionary keeps tensors as large
# as weights, and which one, which is as true and says more.
@expected("kept_tensors", fix=r"\.cpu\(\)|host", thread="APPFL/APPFL#112")
def letters_of_clients(fixed=False, clients=30):
    make = lambda: nn.Sequential(nn.Conv2d(1, 32, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
                                 nn.Conv2d(32, 64, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                                 nn.Linear(3136, 2048), nn.ReLU(), nn.Linear(2048, 62)).cuda()
    server, client = FederatedServer(make(), fixed), FederatedClient(make())
    for _ in range(2):
        for number in range(clients):
            server.recover(number, client.update(server.model.state_dict()))
        server.update()
    return len(server.primal_states)


# Games.

class FrameStack:
    """The last four pictures of a game, as one state."""
    def __init__(self):
        self.frames = []

    def push(self, frame):
        self.frames = [*self.frames, frame][-4:]
        return torch.stack([self.frames[0]] * (4 - len(self.frames)) + self.frames)


class ReplayMemory:
    def __init__(self, capacity, device):
        self.capacity, self.device, self.states, self.actions = capacity, device, [], []

    def store(self, state, action):
        self.states.append(state.to(self.device))
        self.actions.append(action)
        del self.states[:-self.capacity], self.actions[:-self.capacity]

    def sample(self, count):
        chosen = torch.randint(len(self.states), (count,)).tolist()
        return torch.stack([self.states[i] for i in chosen]).cuda(), torch.tensor([self.actions[i] for i in chosen]).cuda()


# Breakout, with as many states to learn from as the paper had.
@expected("kept_tensors", fix=r"\.cpu\(\)|host|smaller", thread="cpnota/autonomous-learning-library#144", memory=500, held_back=True)
def states_of_breakout(fixed=False, steps=6000):
    policy = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Flatten(),
                           nn.Linear(5184, 4)).cuda()
    optimizer = torch.optim.RMSprop(policy.parameters(), 1e-4)
    memory, stack = ReplayMemory(100_000, "cpu" if fixed else "cuda"), FrameStack()
    for step in range(steps):
        state = stack.push(torch.rand(84, 84, device="cuda"))
        with torch.no_grad():
            action = policy(state[None]).argmax().item()
        memory.store(state, action)
        if step % 20 == 19:
            states, actions = memory.sample(32)
            values = policy(states).gather(1, actions[:, None])
            loss = (values - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return len(memory.states)
