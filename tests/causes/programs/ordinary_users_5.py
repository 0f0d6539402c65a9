"""Programs after public threads of ordinary users: street scenes, agents, a pendulum, speech, depth, resumed runs, pairs, heat maps."""
import collections
import io
import itertools

import numpy as np
import torch
from torch import nn
from torch.distributions import Categorical
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.ops import batched_nms

from expected import expected
from programs.root_causes import no_grad_if


# Street scenes: trained on crops, validated on whole images.

class Scenes(Dataset):
    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.rand(3, *self.size), torch.randint(0, 19, self.size)


class ConvBN(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(cin, cout, 3, padding=1, bias=False), nn.BatchNorm2d(cout)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)))


def conv_block(cin, cout):
    return nn.Sequential(ConvBN(cin, cout), ConvBN(cout, cout))


class SmallUNet(nn.Module):
    def __init__(self, classes, base=16):
        super().__init__()
        self.d1, self.d2 = conv_block(3, base), conv_block(base, 2 * base)
        self.mid = conv_block(2 * base, 4 * base)
        self.u2, self.u1 = conv_block(6 * base, 2 * base), conv_block(3 * base, base)
        self.head = nn.Conv2d(base, classes, 1)

    def forward(self, x):
        x1 = self.d1(x)
        x2 = self.d2(F.max_pool2d(x1, 2))
        y = self.mid(F.max_pool2d(x2, 2))
        y = self.u2(torch.cat([F.interpolate(y, scale_factor=2, mode="bilinear"), x2], 1))
        y = self.u1(torch.cat([F.interpolate(y, scale_factor=2, mode="bilinear"), x1], 1))
        return self.head(y)


def train_on_crops(loader, model, criterion, optimizer):
    model.train()
    epoch_loss = []
    for images, labels in loader:
        output = model(images.cuda())
        loss = criterion(output, labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        epoch_loss.append(loss.item())
    return sum(epoch_loss) / len(epoch_loss)


def validate_whole_images(loader, model, fixed):
    model.eval()
    right = total = 0
    for image, label in loader:
        with torch.no_grad():
            image_var = image.cuda()
            if fixed:
                output = model(image_var)
        if not fixed:
            output = model(image_var)
        pred = output.cpu().data[0].argmax(0)
        right += (pred == label[0]).sum().item()
        total += label.numel()
    return right / total


@expected("evaluation_keeps_graphs", fix="no_grad", thread="xiaoyufenfei/Efficient-Segmentation-Networks#5", memory=740)
def segment_street_scenes(fixed=False):
    """In `validate_whole_images`, `with torch.no_grad()` covers only the copy of the image to the GPU, and the model is called after it:
    the activations of all layers stay. Cured by: the call of the model within the `with`.
    """
    model = SmallUNet(19).cuda()
    criterion = nn.CrossEntropyLoss(ignore_index=255)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4, weight_decay=1e-4)
    train_loader = DataLoader(Scenes(8, (256, 256)), batch_size=4, shuffle=True, drop_last=True)
    val_loader = DataLoader(Scenes(2, (512, 1024)), batch_size=1)
    for _ in range(2):
        train_on_crops(train_loader, model, criterion, optimizer)
        accuracy = validate_whole_images(val_loader, model, fixed)
    return accuracy


# Two agents see an image each, and learn by counterfactual policy gradients.

def agent_encoder(channels=16):
    return nn.Sequential(nn.Conv2d(3, channels, 3), nn.ReLU(), nn.Conv2d(channels, channels, 3, stride=2), nn.ReLU(), nn.Flatten())


class AgentActor(nn.Module):
    def __init__(self, n_action):
        super().__init__()
        self.enc = agent_encoder()
        self.fc1, self.fc2 = nn.Linear(16 * 19 * 19, 64), nn.Linear(64, n_action)

    def act(self, obs):
        pi = F.softmax(self.fc2(F.relu(self.fc1(self.enc(obs)))), dim=1)
        p = pi.squeeze(0).detach().cpu() + 0.1
        return Categorical(p / p.sum()).sample().item(), pi


class AgentCritic(nn.Module):
    def __init__(self, n_action):
        super().__init__()
        self.enc1, self.enc2 = agent_encoder(), agent_encoder()
        self.fc1, self.fc2 = nn.Linear(2 * 16 * 19 * 19, 64), nn.Linear(64, n_action * n_action)

    def forward(self, s1, s2):
        return self.fc2(F.relu(self.fc1(torch.cat([self.enc1(s1), self.enc2(s2)], 1))))


class CounterfactualAgents:
    def __init__(self, n_action, fixed, gamma=0.95):
        self.n, self.fixed, self.gamma = n_action, fixed, gamma
        self.actor1, self.actor2 = AgentActor(n_action).cuda(), AgentActor(n_action).cuda()
        self.critic = AgentCritic(n_action).cuda()
        self.opt1 = torch.optim.Adam(self.actor1.parameters(), lr=3e-4)
        self.opt2 = torch.optim.Adam(self.actor2.parameters(), lr=3e-4)
        self.opt_c = torch.optim.Adam(self.critic.parameters(), lr=1e-3)

    def cross_prod(self, pi1, pi2):
        joint = torch.zeros(1, self.n * self.n, device="cuda")
        for i in range(self.n):
            for j in range(self.n):
                joint[0, i * self.n + j] = pi1[0, i] * pi2[0, j]
        return joint

    def update(self, ep):
        T = len(ep["r"])
        Q = self.critic(torch.cat(ep["o1"]).cuda(), torch.cat(ep["o2"]).cuda())
        target = Q.clone()
        for t in range(T - 1):
            with no_grad_if(self.fixed):
                joint = self.cross_prod(ep["pi1"][t + 1], ep["pi2"][t + 1])
                target[t][ep["a1"][t] * self.n + ep["a2"][t]] = ep["r"][t] + self.gamma * torch.sum(joint * target[t + 1, :])
        c_loss = F.mse_loss(Q, target.detach())
        self.opt_c.zero_grad()
        c_loss.backward()
        self.opt_c.step()
        Qd = Q.detach().view(T, self.n, self.n)
        for who, opt in (("1", self.opt1), ("2", self.opt2)):
            loss = torch.zeros(1, device="cuda")
            for t in range(T):
                pi, a = ep["pi" + who][t], ep["a" + who][t]
                q = Qd[t][:, ep["a2"][t]] if who == "1" else Qd[t][ep["a1"][t]]
                loss = loss - (q[a] - torch.sum(pi * q)).item() * torch.log(pi[0, a])
            opt.zero_grad()
            loss.backward()
            opt.step()
        return c_loss.item()


@expected("reference_cycle", fix=r"no_grad|clone\(\)",
          thread="Bigpig4396/PyTorch-Counterfactual-Multi-Agent-Policy-Gradients-COMA#4", memory=600)
def play_counterfactual_agents(fixed=False):
    """`target[t][i] = … joint * target[t + 1, :]` is recorded by autograd, though only `target.detach()` is used: a write in place into a
    tensor a view of which its own graph has saved, a cycle that nothing frees, so that each episode leaves its graph. Cured by:
    `torch.no_grad()` around the target.
    """
    agents = CounterfactualAgents(5, fixed)
    for _ in range(12):
        ep = collections.defaultdict(list)
        for _ in range(20):
            o1, o2 = torch.rand(1, 3, 42, 42), torch.rand(1, 3, 42, 42)
            (a1, pi1), (a2, pi2) = agents.actor1.act(o1.cuda()), agents.actor2.act(o2.cuda())
            for key, value in zip(("o1", "o2", "a1", "a2", "pi1", "pi2", "r"), (o1, o2, a1, a2, pi1, pi2, 0.1)):
                ep[key].append(value)
        loss = agents.update(ep)
    return loss


# A neural Lyapunov function of a pendulum, by steepest descent with a line search.

class LyapunovNet(nn.Module):
    def __init__(self, width=256, depth=4):
        super().__init__()
        widths = [2] + [width] * depth
        self.net = nn.Sequential(*[layer for pair in zip(widths, widths[1:]) for layer in (nn.Linear(*pair), nn.Tanh())],
                                 nn.Linear(width, 1))
        self.R = nn.Parameter(torch.eye(2))

    def forward(self, x):
        return self.net(x) - self.net(torch.zeros_like(x[:1])) + (x @ self.R).abs().sum(1, keepdim=True)


class LineSearchSD(torch.optim.Optimizer):
    """The step is halved until the Armijo condition holds."""

    def __init__(self, params, lr):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def move(self, dirs, step):
        for p, d in dirs:
            p.add_(d, alpha=-step)

    def step(self, closure, current):
        dirs = [(p, p.grad.clone()) for group in self.param_groups for p in group["params"] if p.grad is not None]
        slope, step = sum((d * d).sum() for _, d in dirs).item(), self.param_groups[0]["lr"]
        for _ in range(4):
            self.move(dirs, step)
            new = closure()
            if new[0].item() <= current[0].item() - 1e-4 * step * slope:
                break
            self.move(dirs, -step)
            step *= 0.5
        return new


def lyapunov_loss(V, controller, x):
    x = x.requires_grad_(True)
    v, u = V(x), controller(x)
    dvdx = torch.autograd.grad(v.sum(), x, create_graph=True)[0]
    dynamics = torch.cat([x[:, 1:], 4 * u - 0.4 * x[:, 1:] - 19.6 * torch.sin(x[:, :1])], 1)
    positivity = torch.relu(0.01 * x.abs().sum(1, keepdim=True) - v).mean()
    derivative = torch.relu((dvdx * dynamics).sum(1, keepdim=True) + 0.1 * v).mean()
    return positivity + derivative, positivity, derivative


@expected("graph_of_earlier_steps", fix=r"derivative_losses.*(item\(\)|detach)|(item\(\)|detach).*derivative_losses",
          thread="StanfordASL/neural-network-lyapunov#140", memory=800)
def train_lyapunov(fixed=False):
    """The lists `losses`, `positivity_losses` and `derivative_losses` keep what the closure returned in the line search, which no backward
    pass ever frees: a graph for each iteration, that all three of them hold. Cured by: numbers in all three, by `.item()`.
    """
    V, controller = LyapunovNet().cuda(), nn.Sequential(nn.Linear(2, 32), nn.LeakyReLU(0.1), nn.Linear(32, 1)).cuda()
    optimizer = LineSearchSD([*V.parameters(), *controller.parameters()], lr=0.1)
    max_iterations = 30
    losses, positivity_losses, derivative_losses = [None] * max_iterations, [None] * max_iterations, [None] * max_iterations
    for it in range(max_iterations):
        x = ((torch.rand(3000, 2) * 2 - 1) * torch.tensor([3.1, 5.0])).cuda()

        def closure():
            return lyapunov_loss(V, controller, x.detach())

        optimizer.zero_grad()
        current = closure()
        current[0].backward()
        loss, positivity, derivative = optimizer.step(closure, current)
        if fixed:
            loss, positivity, derivative = loss.item(), positivity.item(), derivative.item()
        losses[it], positivity_losses[it], derivative_losses[it] = loss, positivity, derivative
    return [float(loss) for loss in losses]


# Speech enhancement: a trained model goes over a folder of recordings.

class SpeechBlock(nn.Module):
    def __init__(self, d, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.attention = nn.MultiheadAttention(d, heads, batch_first=True)
        self.gru, self.linear = nn.GRU(d, d, bidirectional=True, batch_first=True), nn.Linear(2 * d, d)

    def forward(self, x):
        h = self.norm1(x)
        h, _ = self.attention(h, h, h)
        x = x + h
        return x + self.linear(F.leaky_relu(self.gru(self.norm2(x))[0]))


class SpeechEnhancer(nn.Module):
    """Attention along time for every frequency, then along frequency for every frame."""

    def __init__(self, d=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(2, d, (1, 3), (1, 2)), nn.InstanceNorm2d(d, affine=True), nn.PReLU(d))
        self.time, self.freq = SpeechBlock(d), SpeechBlock(d)
        self.mask, self.phase = nn.ConvTranspose2d(d, 1, (1, 3), (1, 2)), nn.ConvTranspose2d(d, 2, (1, 3), (1, 2))

    def forward(self, mag, pha):
        x = self.encoder(torch.stack([mag, pha], dim=1).transpose(2, 3))
        b, c, t, f = x.shape
        x = self.time(x.permute(0, 3, 2, 1).reshape(b * f, t, c))
        x = self.freq(x.view(b, f, t, c).permute(0, 2, 1, 3).reshape(b * t, f, c))
        x = x.view(b, t, f, c).permute(0, 3, 1, 2)
        re, im = self.phase(x).transpose(2, 3).unbind(1)
        return torch.sigmoid(self.mask(x)).squeeze(1).transpose(1, 2) * mag, torch.atan2(im, re)


def enhance_recording(model, noisy):
    noisy = noisy.cuda()
    norm = torch.sqrt(len(noisy) / torch.sum(noisy ** 2.0))
    window = torch.hann_window(400, device=noisy.device)
    spec = torch.stft((noisy * norm).unsqueeze(0), 400, 100, 400, window, return_complex=True)
    mag, pha = model(spec.abs() ** 0.3, torch.angle(spec))
    audio = torch.istft(torch.polar(mag ** (1 / 0.3), pha), 400, 100, 400, window) / norm
    return audio.squeeze(0).cpu().numpy()


@expected("larger_step", fix="split|as large as|need_weights", thread="yxlu-0102/MP-SENet#53", memory=1000)
def enhance_recordings(fixed=False):
    """One recording of 30 seconds goes whole through attention along time, whose scores grow with the square of its length. Cured by: parts
    of 2 seconds, joined after. As good: `need_weights=False`, without which `nn.MultiheadAttention` makes all scores.
    """
    model = SpeechEnhancer().cuda().eval()
    lengths = []
    with torch.no_grad():
        for seconds in (2, 3, 4, 30, 3):
            noisy = torch.randn(seconds * 16000) * 0.05
            if fixed:
                audio = np.concatenate([enhance_recording(model, part) for part in noisy.split(2 * 16000)])
            else:
                audio = enhance_recording(model, noisy)
            lengths.append(len(audio))
    return lengths


# Depth from one picture: a latent diffusion network is fine-tuned.

class LatentRes(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.a = nn.Sequential(nn.GroupNorm(8, cin), nn.SiLU(), nn.Conv2d(cin, cout, 3, padding=1))
        self.b = nn.Sequential(nn.GroupNorm(8, cout), nn.SiLU(), nn.Conv2d(cout, cout, 3, padding=1))
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x):
        return self.skip(x) + self.b(self.a(x))


class PictureVAE(nn.Module):
    def __init__(self, c=32, z=4):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, c, 3, padding=1), LatentRes(c, c), nn.Conv2d(c, c, 3, 2, 1), LatentRes(c, 2 * c),
            nn.Conv2d(2 * c, 2 * c, 3, 2, 1), LatentRes(2 * c, 4 * c), nn.Conv2d(4 * c, 2 * z, 3, 2, 1))
        self.quant_conv, self.post_quant_conv = nn.Conv2d(2 * z, 2 * z, 1), nn.Conv2d(z, z, 1)
        self.decoder = nn.Sequential(
            nn.Conv2d(z, 4 * c, 3, padding=1), nn.Upsample(scale_factor=2), LatentRes(4 * c, 2 * c), nn.Upsample(scale_factor=2),
            LatentRes(2 * c, c), nn.Upsample(scale_factor=2), nn.Conv2d(c, 3, 3, padding=1))


class DepthUNet(nn.Module):
    def __init__(self, c=128):
        super().__init__()
        self.time, self.inp = nn.Linear(1, c), nn.Conv2d(4, c, 3, padding=1)
        self.d1, self.down1 = LatentRes(c, c), nn.Conv2d(c, 2 * c, 3, 2, 1)
        self.mid, self.u1, self.out = LatentRes(2 * c, 2 * c), LatentRes(3 * c, c), nn.Conv2d(c, 4, 3, padding=1)

    def forward(self, x, t):
        x0 = self.d1(self.inp(x) + self.time(t[:, None].float())[:, :, None, None])
        y = self.mid(self.down1(x0))
        return self.out(self.u1(torch.cat([F.interpolate(y, scale_factor=2), x0], 1)))


def encode_picture(vae, image):
    h = vae.encoder(image)
    mean, _ = torch.chunk(vae.quant_conv(h), 2, dim=1)
    return mean * 0.18215


@expected("graph_without_use", fix="no_grad", thread="VisualComputingInstitute/diffusion-e2e-ft#21", memory=600)
def finetune_depth(fixed=False):
    """Only `unet` is trained, and `vae` encodes the picture and the target with autograd on: the activations of its large images stay for a
    backward pass that trains nothing of it. Cured by: `@torch.no_grad()` on `encode_picture`.
    """
    encode = torch.no_grad()(encode_picture) if fixed else encode_picture
    vae, unet = PictureVAE().cuda().eval(), DepthUNet().cuda().train()
    optimizer = torch.optim.AdamW(unet.parameters(), lr=3e-5, weight_decay=1e-2)
    for step in range(4):
        rgb, depth = (torch.rand(2, 3, 320, 320) * 2 - 1).cuda(), (torch.rand(2, 1, 320, 320) * 2 - 1).repeat(1, 3, 1, 1).cuda()
        rgb_latent = encode(vae, rgb)
        target = encode(vae, depth)
        pred = unet(rgb_latent, torch.full((2,), 999, device="cuda"))
        loss = F.mse_loss(pred, target) / 2
        loss.backward()
        if step % 2 == 1:
            nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return loss.item()


# A transformer of street images goes on with its training from a checkpoint.

class WindowBlock(nn.Module):
    def __init__(self, d, window=8):
        super().__init__()
        self.w, self.heads, self.n1, self.n2 = window, d // 32, nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.proj = nn.Linear(d, 3 * d), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def attention(self, x):
        b, h, w, d = x.shape
        k = self.w
        x = x.view(b, h // k, k, w // k, k, d).permute(0, 1, 3, 2, 4, 5).reshape(-1, k * k, d)
        q, key, v = self.qkv(x).view(-1, k * k, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = self.proj(F.scaled_dot_product_attention(q, key, v).transpose(1, 2).reshape(-1, k * k, d))
        return x.view(b, h // k, w // k, k, k, d).permute(0, 1, 3, 2, 4, 5).reshape(b, h, w, d)

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class StreetTransformer(nn.Module):
    def __init__(self, classes=19, dim=384, depth=6):
        super().__init__()
        self.stem, self.head = nn.Conv2d(3, dim, 16, 16), nn.Conv2d(dim, classes, 1)
        self.stage = nn.Sequential(*[WindowBlock(dim) for _ in range(depth)])

    def forward(self, x):
        y = self.stage(self.stem(x).permute(0, 2, 3, 1).contiguous()).permute(0, 3, 1, 2)
        return F.interpolate(self.head(y), size=x.shape[2:], mode="bilinear", align_corners=False)


def train_streets(epochs, resume=None, map_location=None):
    seg_net = StreetTransformer().cuda()
    optimizer = torch.optim.AdamW(seg_net.parameters(), lr=1e-4, weight_decay=0.01)
    start_epoch = 0
    if resume:
        resume_dict = torch.load(resume, map_location=map_location)
        seg_net.load_state_dict(resume_dict["state_dict"])
        optimizer.load_state_dict(resume_dict["optimizer"])
        start_epoch = resume_dict["epoch"]
    for epoch in range(start_epoch, epochs):
        for _ in range(3):
            img, labelmap = torch.rand(2, 3, 256, 256).cuda(), torch.randint(0, 19, (2, 256, 256)).cuda()
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = F.cross_entropy(seg_net(img).float(), labelmap)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    saved = io.BytesIO()
    torch.save({"state_dict": seg_net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch + 1}, saved)
    saved.seek(0)
    return saved


@expected("loaded_onto_gpu", fix="map_location", thread="HRNet/HRFormer#1", memory=480)
def resume_streets(fixed=False):
    """On resuming, `torch.load` puts the checkpoint back on the GPU, and `resume_dict` keeps its weights there for as long as it trains,
    beside those of the model. Cured by: `map_location="cpu"`.
    """
    saved = train_streets(epochs=1)
    torch.cuda.empty_cache()
    train_streets(epochs=2, resume=saved, map_location="cpu" if fixed else None)


# Images of an attribute and an object: scores of all pairs, also of those never seen.

class PairScores(nn.Module):
    def __init__(self, pairs, attrs, objs, dim=128):
        super().__init__()
        self.attr_emb, self.obj_emb = nn.Embedding(attrs, dim), nn.Embedding(objs, dim)
        self.image = nn.Sequential(nn.Linear(256, 384), nn.LayerNorm(384), nn.ReLU(), nn.Linear(384, dim))
        self.compose = nn.Linear(2 * dim, dim)
        self.register_buffer("pairs", torch.tensor(pairs))

    def forward(self, x, rows=slice(None)):
        a, o = self.pairs[rows].unbind(1)
        pairs = F.normalize(self.compose(torch.cat([self.attr_emb(a), self.obj_emb(o)], 1)), dim=1)
        return 20 * F.normalize(self.image(x), dim=1) @ pairs.t()


def evaluate_pairs(scores, seen_mask, target, bias=1e3, topk=10):
    mask = seen_mask.to(scores.device).repeat(scores.shape[0], 1)
    results = {"open": scores.topk(topk, dim=1)[1]}
    biased = scores.clone()
    biased[~mask] += bias
    results["unseen_first"] = biased.topk(topk, dim=1)[1]
    closed = scores.clone()
    closed[~mask] = -1e10
    results["closed"] = closed.topk(topk, dim=1)[1]
    return {name: (top.cpu() == target[:, None]).any(1).float().mean().item() for name, top in results.items()}


@expected("kept_tensors", fix=r"\.cpu\(\)|torch\.where", thread="ExplainableML/czsl#7", memory=700)
def recognize_pairs(fixed=False):
    """The list `all_pred` keeps the scores of all test images for all pairs on the GPU, and what the metrics make of them is made there:
    their `torch.cat`, a copy, and the 64-bit indices that `biased[~mask] += bias` needs. Cured by: `scores.cpu()` in the list, so that
    the evaluation is on the host.
    """
    pairs = list(itertools.product(range(100), range(200)))
    seen_mask = torch.rand(len(pairs)) < 0.1
    seen_rows = seen_mask.nonzero().squeeze(1).cuda()
    model = PairScores(pairs, 100, 200).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-5, weight_decay=5e-5)
    for _ in range(6):
        loss = F.cross_entropy(model(torch.randn(128, 256).cuda(), seen_rows), torch.randint(0, 1000, (128,)).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    all_pred, target = [], []
    with torch.no_grad():
        for _ in range(16):
            scores = model(torch.randn(64, 256).cuda())
            all_pred.append(scores.cpu() if fixed else scores)
            target.append(torch.randint(0, len(pairs), (64,)))
    return evaluate_pairs(torch.cat(all_pred), seen_mask, torch.cat(target))


# Heat maps of what a detector found, over a folder of pictures.

def conv_silu(cin, cout, k=3, s=1):
    return nn.Sequential(nn.Conv2d(cin, cout, k, s, k // 2, bias=False), nn.BatchNorm2d(cout), nn.SiLU())


class PictureDetector(nn.Module):
    def __init__(self, nc=80, c=16, na=3):
        super().__init__()
        self.nc, self.na, self.no = nc, na, nc + 5
        self.stem = nn.Sequential(conv_silu(3, c, 6, 2), conv_silu(c, 2 * c, 3, 2), conv_silu(2 * c, 2 * c))
        self.p3 = nn.Sequential(conv_silu(2 * c, 4 * c, 3, 2), conv_silu(4 * c, 4 * c))
        self.p4 = nn.Sequential(conv_silu(4 * c, 8 * c, 3, 2), conv_silu(8 * c, 8 * c))
        self.heads = nn.ModuleList([nn.Conv2d(k * c, na * self.no, 1) for k in (4, 8)])

    def forward(self, x):
        p3 = self.p3(self.stem(x))
        boxes, logits = [], []
        for head, f in zip(self.heads, (p3, self.p4(p3))):
            b, _, h, w = f.shape
            y = head(f).view(b, self.na, self.no, h, w).permute(0, 1, 3, 4, 2).reshape(b, -1, self.no)
            logits.append(y[..., 5:])
            y = y.sigmoid()
            boxes.append(torch.cat([y[..., :4] * x.shape[-1], y[..., 4:]], 2))
        return torch.cat(boxes, 1), torch.cat(logits, 1)


def suppress_boxes(prediction, logits, fixed, candidates=300, max_det=5):
    best = prediction[:, 4].topk(candidates)[1]
    x, logits = prediction[best], logits[best]
    if fixed:
        conf = x[:, 5:] * x[:, 4:5]
        score, cls = conf.max(1)
    else:
        x[:, 5:] *= x[:, 4:5]
        score, cls = x[:, 5:].max(1)
    half = x[:, 2:4] / 2
    boxes = torch.cat([x[:, :2] - half, x[:, :2] + half], 1)
    keep = batched_nms(boxes.detach().cpu(), score.detach().cpu(), cls.cpu(), 0.45)[:max_det].to(x.device)
    return torch.cat([boxes[keep], score[keep, None], cls[keep, None].float()], 1).detach().cpu(), logits[keep]


class BoxGradCAM:
    def __init__(self, model, layer, fixed):
        self.model, self.fixed, self.gradients, self.activations = model, fixed, {}, {}
        layer.register_forward_hook(lambda m, i, o: self.activations.__setitem__("value", o))
        layer.register_full_backward_hook(lambda m, gi, go: self.gradients.__setitem__("value", go[0]))

    def __call__(self, img):
        prediction, logits = self.model(img)
        preds, logits = suppress_boxes(prediction[0], logits[0], self.fixed)
        maps = []
        for det, logit in zip(preds, logits):
            self.model.zero_grad()
            cls = min(max(int(det[5]), 0), self.model.nc - 1)
            logit[cls].backward(retain_graph=True)
            g, a = self.gradients["value"], self.activations["value"].detach()
            cam = F.relu((g.mean((2, 3), keepdim=True) * a).sum(1, keepdim=True))
            cam = F.interpolate(cam, size=img.shape[2:], mode="bilinear", align_corners=False)
            maps.append((cam / (cam.max() + 1e-7)).detach().cpu())
        return maps


@expected("reference_cycle", fix=r"no_grad|clone\(\)|out of place", thread="pooya-mohammadi/yolov5-gradcam#36", memory=600)
def map_heat_of_boxes(fixed=False):
    """`x[:, 5:] *= x[:, 4:5]` writes the product of two views of x back into x, in a graph: a cycle within autograd that nothing frees, and
    that keeps the activations of each picture. The hooks are innocent. Cured by: out of place, `conf = x[:, 5:] * x[:, 4:5]`.
    """
    model = PictureDetector().cuda().eval()
    cam = BoxGradCAM(model, model.p4[-1], fixed)
    for _ in range(16):
        maps = cam(torch.rand(1, 3, 416, 416).cuda())
    return len(maps)
