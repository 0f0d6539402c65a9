"""Programs after public threads from all fields."""
import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from expected import expected
from programs.all_fields_2 import encoder, saved, tokens, up_net
from programs.root_causes import no_grad_if
from programs.all_fields_1 import conv_net, images


def mlp(*widths):
    layers = [nn.Linear(widths[0], widths[1])]
    for before, after in zip(widths[1:], widths[2:]):
        layers += [nn.ReLU(), nn.Linear(before, after)]
    return nn.Sequential(*layers).cuda()


# What is kept from step to step.

@expected("kept_tensors", fix=r"item\(\)|detach|\.cpu\(\)", thread="TRI-ML/packnet-sfm#47")
def losses_and_depths_of_epoch(fixed=False):
    model = conv_net(16, 2)
    optimizer = torch.optim.Adam(model.parameters())
    outputs = []
    for _ in range(80):
        batch = images(32, 192)
        depth = model(batch)
        loss = (depth - batch).abs().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        outputs.append({"loss": loss.item()} if fixed else {"loss": loss, "depth": depth})
    return len(outputs)


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="alexhernandezgarcia/gflownet#133", memory=1300)
def average_of_losses_keeps_graph(fixed=False):
    policy = mlp(512, 2048, 2048, 64)
    optimizer = torch.optim.Adam(policy.parameters())
    average = torch.zeros((), device="cuda")
    for _ in range(60):
        of_terminal = policy(torch.randn(2048, 512, device="cuda")).square().mean()
        of_others = policy(torch.randn(2048, 512, device="cuda")).square().mean()
        average = 0.9 * average + 0.1 * (of_others.detach() if fixed else of_others)
        optimizer.zero_grad()
        of_terminal.backward()
        optimizer.step()
    return average.item()


@expected("graph_of_earlier_steps", fix="detach", thread="TorchSim/torch-sim#559", held_back=True)
def history_of_positions(fixed=False):
    force_field = mlp(3, 256, 256, 1)
    positions = torch.randn(12_000, 3, device="cuda")
    history = torch.zeros(0, 12_000, 3, device="cuda")
    for _ in range(80):
        positions.requires_grad_(True)
        energy = force_field(positions).sum()
        force, = torch.autograd.grad(energy, positions, create_graph=True)
        step = 0.01 * (force.detach() if fixed else force)
        history = torch.cat([history, step[None]])[-10:]
        positions = (positions + step.detach()).detach()
    return history.shape


@expected("evaluation_keeps_graphs", fix="no_grad", thread="TeaPearce/Conditional_Diffusion_MNIST#12")
def sample_by_denoising(fixed=False):
    model = conv_net(32, 3)

    def sample(count, steps):
        x = images(count, 64)
        with no_grad_if(fixed):
            for step in range(steps, 0, -1):
                noise = torch.randn_like(x) if step > 1 else 0
                x = 0.99 * (x - 0.01 * model(x)) + 0.1 * noise
        return x

    return sample(16, 100).shape


class Decoder(nn.Module):
    def __init__(self, words=5000, width=512):
        super().__init__()
        self.embedding, self.cell = nn.Embedding(words, width), nn.LSTMCell(2 * width, width)
        self.of_image, self.of_state, self.weight = (nn.Linear(width, out) for out in (width, width, 1))
        self.head = nn.Linear(width, words)

    def forward(self, previous, features, state):
        hidden = torch.relu(self.of_image(features) + self.of_state(state[0])[:, None])
        weights = self.weight(hidden).squeeze(-1).softmax(-1)
        seen = (features * weights[..., None]).sum(1)
        h, c = self.cell(torch.cat([self.embedding(previous), seen], 1), state)
        return self.head(h), (h, c)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="sgrvinod/a-PyTorch-Tutorial-to-Image-Captioning#43")
def captions_by_beams(fixed=False):
    decoder = Decoder().cuda().eval()
    with no_grad_if(fixed):
        features = torch.randn(64, 196, 512, device="cuda")
        state = features.mean(1), features.mean(1)
        words = torch.zeros(64, dtype=torch.long, device="cuda")
        for _ in range(50):
            scores, state = decoder(words, features, state)
            words = scores.argmax(-1)
    return words.shape


# A gradient of a gradient needs both graphs.
@expected("second_derivatives", fix="half|batch|checkpoint|autocast|part", thread="tamarott/SinGAN#141", held_back=True)
def penalty_on_large_images(fixed=False):
    critic = conv_net(64, 4)
    optimizer = torch.optim.Adam(critic.parameters())
    for _ in range(3):
        real = images(2 if fixed else 12, 160).requires_grad_()
        score = critic(real).mean()
        gradient, = torch.autograd.grad(score, real, create_graph=True)
        penalty = (gradient.flatten(1).norm(dim=1) - 1).square().mean()
        optimizer.zero_grad()
        (score + 10 * penalty).backward()
        optimizer.step()


# Evaluation of what is larger than in training.

@expected("batch_without_gradients", fix="tile|crop|patch", thread="IDKiro/CBDNet-pytorch#14")
def full_size_image(fixed=False):
    model = conv_net(64, 4)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        model(images(4, 96)).square().mean().backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        photo = torch.randn(1, 3, 1536, 2048, device="cuda")
        for part in photo.split(256, 2) if fixed else [photo]:
            model(part).cpu()


@expected("enlarged", fix="split|chunk|part", thread="tue-mps/eomt#12")
def masks_at_full_size(fixed=False):
    head = nn.Conv2d(256, 100, 1).cuda().eval()
    with torch.no_grad():
        small = head(torch.randn(1, 256, 128, 160, device="cuda"))
        scores = []
        for part in small.split(10, 1) if fixed else [small]:
            masks = F.interpolate(part, size=(1200, 1600), mode="bilinear")
            inside = masks > 0
            scores.append((masks.sigmoid() * inside).sum((2, 3)) / (inside.sum((2, 3)) + 1e-6))
    return torch.cat(scores, 1).shape


# All pairs.

@expected("all_pairs", fix="split|chunk", thread="open-mmlab/mmdetection#188", held_back=True)
def overlaps_of_boxes(fixed=False):
    def overlaps(boxes, others):
        top_left = torch.max(boxes[:, None, :2], others[None, :, :2])
        bottom_right = torch.min(boxes[:, None, 2:], others[None, :, 2:])
        inside = (bottom_right - top_left).clamp(min=0).prod(-1)
        area, area_of_others = ((b[:, 2:] - b[:, :2]).prod(-1) for b in (boxes, others))
        return inside / (area[:, None] + area_of_others - inside)

    anchors, truth = torch.rand(120_000, 4, device="cuda"), torch.rand(700, 4, device="cuda")
    best = [overlaps(part, truth).max(1).values for part in anchors.split(4096 if fixed else len(anchors))]
    return torch.cat(best).shape


@expected("all_pairs", fix="split|chunk", thread="winycg/CIRKD#23")
def contrast_of_pixels(fixed=False):
    student, teacher = conv_net(16, 1), conv_net(16, 1)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for _ in range(2):
        batch = images(4, 64)
        own = student(batch).permute(0, 2, 3, 1).flatten(0, 2)
        with torch.no_grad():
            wanted = teacher(batch).permute(0, 2, 3, 1).flatten(0, 2)
        if fixed:
            own, wanted = own[::8], wanted[::8]
        own, wanted = F.normalize(own, dim=1), F.normalize(wanted, dim=1)
        loss = F.kl_div((own @ own.T / 0.1).log_softmax(-1), (wanted @ wanted.T / 0.1).softmax(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("all_pairs", fix="split|chunk", thread="princeton-vl/RAFT#39")
def correlation_of_frames(fixed=False):
    first, second = torch.randn(2, 1, 256, 120, 160, device="cuda").unbind(0)

    def correlate(first, second):
        batch, width = first.shape[:2]
        all_pairs = first.flatten(2).transpose(1, 2) @ second.flatten(2)
        return (all_pairs / width ** 0.5).view(batch, *first.shape[2:], 1, *second.shape[2:])

    with torch.no_grad():
        for rows in first.split(4 if fixed else 120, 2):
            correlate(rows, second).amax((4, 5))


# Data on the GPU.

@expected("data_on_gpu", fix=r"on the host|DataLoader|\.cpu\(\)|pin_memory", thread="yenchenlin/nerf-pytorch#23", held_back=True)
def rays_of_all_images(fixed=False):
    pictures, rays = torch.randn(110, 400, 500, 3), torch.randn(110, 400, 500, 6)
    model = mlp(6, 256, 256, 3)
    optimizer = torch.optim.Adam(model.parameters())
    device = "cpu" if fixed else "cuda"
    pictures, rays = pictures.flatten(0, 2).to(device), rays.flatten(0, 2).to(device)
    for _ in range(3):
        chosen = torch.randint(len(rays), (65_536,), device=device)
        loss = F.mse_loss(model(rays[chosen].cuda()), pictures[chosen].cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("batch_without_gradients", fix="split|chunk", thread="dunbar12138/DSNeRF#72")
def view_at_once(fixed=False):
    field = mlp(63, 256, 256, 256, 256, 4).eval()
    with torch.no_grad():
        points = torch.randn(400 * 400, 8, 63)
        colours = []
        for part in points.split(4096 if fixed else len(points)):
            colours.append(field(part.cuda()).mean(1).cpu())
    return torch.cat(colours).shape


@expected("kept_tensors", fix=r"\bdel\b|\.cpu\(\)|clear", thread="meta-pytorch/opacus#176")
def hooks_without_backward(fixed=False):
    model = conv_net(32, 3)

    def keep_activation(layer, args, output):
        if layer.training:
            layer.__dict__.setdefault("activations", []).append(args[0].detach())

    for layer in model:
        if isinstance(layer, nn.Conv2d):
            layer.register_forward_hook(keep_activation)
    if fixed:
        model.eval()
    right = 0
    with torch.no_grad():
        for _ in range(40):
            right += int((model(images(8)).mean((1, 2, 3)) > 0).sum())
    return right


# More than one copy of a model.

@expected("several_models", fix=r"\bdel\b|host|cpu", thread="facebookresearch/pytext#1367", held_back=True)
def best_weights_beside_model(fixed=False):
    model = mlp(4096, 4096, 4096, 4096, 4096)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    best = None
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(64, 4096, device="cuda")).square().mean().backward()
        optimizer.step()
        best = {name: weight.cpu() for name, weight in model.state_dict().items()}
    if not fixed:
        best = {name: weight.cuda() for name, weight in best.items()}
    model.load_state_dict(best)
    final = copy.deepcopy(model).cpu() if fixed else copy.deepcopy(model)
    return sum(weight.numel() for weight in final.parameters())


@expected("several_models", fix="host|cpu", thread="rwightman/efficientdet-pytorch#38", memory=900)
def average_on_the_gpu(fixed=False):
    model = mlp(3072, 3072, 3072, 3072, 3072)
    average = copy.deepcopy(model).requires_grad_(False)
    average = average.cpu() if fixed else average
    optimizer = torch.optim.Adam(model.parameters(), fused=True)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(1024, 3072, device="cuda")).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for kept, now in zip(average.parameters(), model.parameters()):
                kept.lerp_(now.to(kept.device), 0.01)


# The step itself is too large.

@expected("unrolled_sequence", fix="sequence|truncat|detach|checkpoint|half", thread="salesforce/awd-lstm-lm#29")
def cell_over_long_sequence(fixed=False):
    embedding, cell, head = nn.Embedding(256, 512).cuda(), nn.GRUCell(512, 512).cuda(), nn.Linear(512, 256).cuda()
    optimizer = torch.optim.Adam([*embedding.parameters(), *cell.parameters(), *head.parameters()])
    text = torch.zeros(128, 600, dtype=torch.long, device="cuda")
    state = torch.zeros(128, 512, device="cuda")
    for part in text.split(60 if fixed else 600, 1):
        loss = 0
        for position in range(part.shape[1] - 1):
            state = cell(embedding(part[:, position]), state)
            loss = loss + F.cross_entropy(head(state), part[:, position + 1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        state = state.detach()


class Volumes(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        double = lambda a, b: nn.Sequential(nn.Conv3d(a, b, 3, padding=1), nn.InstanceNorm3d(b), nn.ReLU(),
                                            nn.Conv3d(b, b, 3, padding=1), nn.InstanceNorm3d(b), nn.ReLU())
        self.down1, self.down2 = double(1, channels), double(channels, 2 * channels)
        self.pool, self.up = nn.MaxPool3d(2), nn.ConvTranspose3d(2 * channels, channels, 2, 2)
        self.join, self.head = double(2 * channels, channels), nn.Conv3d(channels, 4, 1)

    def forward(self, x):
        first = self.down1(x)
        return self.head(self.join(torch.cat([first, self.up(self.down2(self.pool(first)))], 1)))


@expected("large_images", fix="half|crop|patch|checkpoint|autocast", thread="JuliaWolleb/Diffusion-based-Segmentation#29", held_back=True)
def volume_at_once(fixed=False):
    model = Volumes().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    side = 48 if fixed else 128
    for _ in range(2):
        labels = torch.zeros(1, side, side, side, dtype=torch.long, device="cuda")
        loss = F.cross_entropy(model(torch.randn(1, 1, side, side, side, device="cuda")), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("model_states", fix="8-?bit|SGD|offload|LoRA", thread="Alpha-VLLM/LLaMA2-Accessory#85")
def moments_of_large_model(fixed=False):
    model = encoder(12, 768)
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if fixed else torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(tokens(1, 64, 768)).square().mean().backward()
        optimizer.step()


@expected("all_pairs", fix="split|chunk", thread="huawei-noah/HEBO#13")
def strings_of_all_pairs(fixed=False):
    def similarity(first, second):
        first = first.unsqueeze(1).repeat_interleave(len(second), 1)
        second = second.unsqueeze(0).repeat_interleave(len(first), 0)
        return (first == second).float().mean(-1)

    strings = torch.randint(0, 4, (1000, 64), device="cuda")
    return torch.cat([similarity(part, strings) for part in strings.split(50 if fixed else 1000)]).shape


@expected("graph_without_use", fix="no_grad|requires_grad|detach", thread="KupynOrest/DeblurGAN#77", held_back=True)
def perceptual_target_with_graph(fixed=False):
    generator, vgg = up_net(16), conv_net(64, 5).eval()
    optimizer = torch.optim.Adam(generator.parameters())
    for _ in range(2):
        made = generator(torch.randn(16, 16, 16, 16, device="cuda"))
        with no_grad_if(fixed):
            wanted = vgg(images(16, 128))
        loss = F.l1_loss(vgg(made), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Lengths of sentences differ from batch to batch, and results of some are kept.
@expected("fragmentation", fix="expandable_segments", thread="sgl-project/SpecForge#739", memory=860)
def lengths_vary(fixed=False):
    model = encoder(2)
    kept = []
    with torch.no_grad():
        for step, length in enumerate([300, 700, 410, 880, 520, 990, 640, 1100, 760, 1210, 850, 1330, 930, 1450, 1020, 1560]):
            hidden = model(tokens(32, 256 if fixed else length))
            if step % 2 == 0:
                kept.append(hidden[:, 0].clone())
                kept.append(hidden[:, : length // 8].mean(-1).clone())
            kept.append(torch.zeros(1 << 19, device="cuda"))
    return len(kept)


@expected("logits", fix="split|chunk", thread="marcotcr/checklist#14")
def masked_sentences_at_once(fixed=False):
    words = nn.Embedding(30_522, 256).cuda()
    body = encoder(2).eval()
    with torch.no_grad():
        sentences = torch.zeros(96, 64, dtype=torch.long, device="cuda")
        for part in sentences.split(8 if fixed else 96):
            logits = body(words(part)) @ words.weight.T
            logits.softmax(-1).topk(5)


# Results of evaluation that stay on the GPU.

@expected("kept_tensors", fix=r"\.cpu\(\)", thread="Lightning-AI/torchmetrics#468", held_back=True)
def inception_features_of_all_images(fixed=False):
    class Distance:
        def __init__(self, network):
            self.network, self.real, self.fake = network, [], []

        def update(self, pictures, real):
            with torch.no_grad():
                features = self.network(pictures).flatten(1)
            (self.real if real else self.fake).append(features.cpu() if fixed else features)

    network = nn.Sequential(conv_net(32, 2), nn.AdaptiveAvgPool2d(64)).eval()
    distance = Distance(network)
    for _ in range(160):
        distance.update(images(64, 64), real=True)
        distance.update(images(64, 64), real=False)


@expected("graph_of_earlier_steps", fix="detach", thread="verl-project/verl#6699")
def outputs_of_micro_batches(fixed=False):
    model, head = encoder(2), nn.Linear(256, 2000).cuda()
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
    for _ in range(2):
        outputs = []
        optimizer.zero_grad()
        for _ in range(40):
            scores = head(model(tokens(4))).log_softmax(-1)
            log_probabilities, entropy = scores[..., 0], -(scores.exp() * scores).sum(-1)
            log_probabilities.mean().backward(retain_graph=not fixed)
            kept = {"log_probs": log_probabilities, "entropy": entropy}
            outputs.append({name: value.detach() for name, value in kept.items()} if fixed else kept)
            del scores, log_probabilities, entropy, kept
        optimizer.step()


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="chirag-agarwall/VOG#5")
def gradients_of_all_images(fixed=False):
    model = conv_net(16, 2).eval()
    gradients = {}
    for number in range(150):
        pictures = images(32, 128).requires_grad_()
        model(pictures).mean((1, 2, 3)).sum().backward()
        gradients[number] = pictures.grad.cpu() if fixed else pictures.grad
    return len(gradients)


# One op that makes much.

@expected("one_hot", fix="cross_entropy|gather|ind(ex|ices)", thread="microsoft/InnerEye-DeepLearning#338", held_back=True)
def labels_as_masks(fixed=False):
    model = nn.Conv3d(1, 16, 3, padding=1).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        scores = model(torch.randn(2, 1, 64, 64, 64, device="cuda")).softmax(1)
        labels = torch.zeros(2, 1, 64, 64, 64, dtype=torch.long, device="cuda")
        if fixed:
            loss = -scores.gather(1, labels).mean()
        else:
            masks = torch.zeros(2, 220, 64, 64, 64, device="cuda").scatter_(1, labels, 1)
            loss = 1 - (scores * masks[:, :16]).sum() / (scores.sum() + masks[:, :16].sum())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("all_pairs", fix="split|chunk", thread="meta-pytorch/botorch#798")
def kernel_of_all_samples(fixed=False):
    x, y = torch.randn(9000, 200, device="cuda"), torch.randn(9000, device="cuda")
    scale = torch.ones(200, device="cuda", requires_grad=True)
    optimizer = torch.optim.Adam([scale], 0.1)

    def rows_of_kernel(part, whole):
        distances = part.square().sum(1)[:, None] + whole.square().sum(1) - 2 * part @ whole.T
        return (-0.5 * distances.clamp(min=0)).exp() @ y

    for _ in range(2):
        whole = x / scale
        if fixed:
            fit = torch.cat([checkpoint(rows_of_kernel, part, whole, use_reentrant=False) for part in whole.split(500)])
        else:
            fit = rows_of_kernel(whole, whole)
        optimizer.zero_grad()
        F.mse_loss(fit, y).backward()
        optimizer.step()


@expected("all_pairs", fix="split|chunk", thread="SeldonIO/alibi-detect#213")
def distances_of_clouds(fixed=False):
    def nearest(a, b):
        products = torch.bmm(a, b.transpose(1, 2))
        return (a.square().sum(-1)[..., None] + b.square().sum(-1)[:, None] - 2 * products).min(-1).values

    made, scanned = torch.randn(4, 6000, 3, device="cuda"), torch.randn(4, 6000, 3, device="cuda")
    with torch.no_grad():
        return sum(nearest(part, scanned).sum() for part in made.split(300 if fixed else 6000, 1)).item()


class SpeechAttention(nn.Module):
    def __init__(self, fixed, width=256, heads=4):
        super().__init__()
        self.fixed, self.heads, self.width = fixed, heads, width
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x, mask):
        split = lambda t: t.view(*t.shape[:2], self.heads, -1).transpose(1, 2)
        q, k, v = split(self.q(x)), split(self.k(x)), split(self.v(x))
        if self.fixed:
            return x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        scores = torch.matmul(q, k.transpose(-2, -1)) / (self.width // self.heads) ** 0.5
        scores = scores.masked_fill(mask, -float("inf"))
        weights = torch.softmax(scores, dim=-1).masked_fill(mask, 0.0)
        return x + self.out(torch.matmul(weights, v).transpose(1, 2).flatten(2))


@expected("attention_scores", fix="scaled_dot_product_attention|SDPA", thread="wenet-e2e/wenet#1889", held_back=True)
def attention_without_subsampling(fixed=False):
    layers = nn.ModuleList(SpeechAttention(fixed) for _ in range(4)).cuda()
    optimizer = torch.optim.Adam(layers.parameters())
    for _ in range(2):
        x = tokens(4, 1500)
        mask = torch.zeros(4, 1, 1, 1500, dtype=torch.bool, device="cuda")
        for layer in layers:
            x = layer(x, mask)
        optimizer.zero_grad()
        x.square().mean().backward()
        optimizer.step()


@expected("dense_matrix", fix="sparse", thread="pyg-team/pytorch_geometric#5101")
def dense_adjacency(fixed=False):
    nodes, edges = 14_000, 60_000
    adjacency = torch.sparse_coo_tensor(torch.randint(nodes, (2, edges)), torch.ones(edges), (nodes, nodes)).cuda()
    layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2)).cuda()
    optimizer = torch.optim.Adam(layers.parameters())
    adjacency = adjacency if fixed else adjacency.to_dense()
    adjacency = adjacency if fixed else adjacency + torch.eye(nodes, device="cuda")
    for _ in range(2):
        x = torch.randn(nodes, 64, device="cuda")
        for layer in layers:
            x = torch.relu(adjacency @ layer(x))
        optimizer.zero_grad()
        x.mean().backward()
        optimizer.step()


@expected("data_on_gpu", fix=r"on the host|DataLoader|\.cpu\(\)|pin_memory", thread="pytorch/pytorch#22333", memory=1100)
def batches_on_the_gpu(fixed=False):
    data = torch.utils.data.TensorDataset(torch.randn(4000, 3, 128, 128), torch.zeros(4000, dtype=torch.long))
    loader = torch.utils.data.DataLoader(data, batch_size=128)
    model = conv_net(16, 2)
    optimizer = torch.optim.Adam(model.parameters())
    batches = loader if fixed else [(x.cuda(), y.cuda()) for x, y in loader]
    for x, y in batches:
        loss = F.cross_entropy(model(x.cuda()).mean((2, 3)), y.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("fraction_cap", fix="fraction", thread="predibase/lorax#94", held_back=True)
def share_of_the_gpu(fixed=False):
    torch.cuda.set_per_process_memory_fraction(0.9 if fixed else 0.3)
    adapters = [mlp(2048, 2048, 2048) for _ in range(12)]
    with torch.no_grad():
        x = torch.randn(4096, 2048, device="cuda")
        for adapter in adapters:
            x = adapter(x)


# Looked up, and written, when the rules for all programs above were known.

# In a loop behind training nothing says whether a backward pass is to come: the screen names the loop and its list.
@expected("evaluation_keeps_graphs", fix=r"backward\(\)|autograd\.grad", thread="kuc2477/pytorch-ewc#5")
def likelihoods_of_all_samples(fixed=False):
    model = nn.Sequential(*conv_net(32, 3), nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(48, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    labels = torch.zeros(8, dtype=torch.long, device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(images(8)), labels).backward()
        optimizer.step()
    likelihoods, fisher = [], [0] * len(list(model.parameters()))
    for _ in range(30):
        likelihood = model(images(8)).log_softmax(1)[:, 0].mean()
        if fixed:
            gradients = torch.autograd.grad(likelihood, list(model.parameters()))
            fisher = [old + new.square() for old, new in zip(fisher, gradients)]
        else:
            likelihoods.append(likelihood)
    if not fixed:
        fisher = torch.autograd.grad(torch.stack(likelihoods).mean(), list(model.parameters()))
    return len(fisher)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="RyanWangZf/MedCLIP#33")
def embeddings_of_notes(fixed=False):
    text, picture = encoder(3), nn.Sequential(*conv_net(32, 2), nn.AdaptiveAvgPool2d(8), nn.Flatten()).cuda()
    embeddings = []
    with no_grad_if(fixed):
        for _ in range(60):
            of_text = F.normalize(text(tokens(2)).mean(1), dim=-1)
            of_picture = F.normalize(picture(images(2)), dim=-1)
            embeddings.append((of_text, of_picture))
    return len(embeddings)


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b", thread="WuYichen-97/SD-Lora-CL#11", held_back=True)
def networks_of_earlier_tasks(fixed=False):
    network = mlp(1024, 2048, 2048, 100)
    earlier = []
    for task in range(40):
        optimizer = torch.optim.Adam(network.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            network(torch.randn(64, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
        optimizer.zero_grad()
        old = copy.deepcopy(network).requires_grad_(False)
        earlier.append(old.cpu() if fixed else old)


@expected("data_on_gpu", fix=r"on the host|DataLoader|\.cpu\(\)", thread="facebookresearch/co-tracker#126")
def video_on_the_gpu(fixed=False):
    network = conv_net(32, 3).eval()
    video = torch.randn(700, 3, 288, 288)
    video = video if fixed else video.cuda()
    features = []
    with torch.no_grad():
        for clip in video.split(16):
            features.append(network(clip.cuda()).mean((2, 3)).cpu())
    return torch.cat(features).shape


@expected("batch_without_gradients", fix="split|chunk", thread="jeanne-wang/svd_keyframe_interpolation#4")
def frames_decoded_at_once(fixed=False):
    decoder = up_net(128).eval()
    with torch.no_grad():
        latents = torch.randn(25, 128, 32, 32, device="cuda")
        frames = [decoder(part).cpu() for part in latents.split(2 if fixed else 25)]
    return torch.cat(frames).shape


@expected("all_pairs", fix="squeeze|view", thread="IntelLabs/matsciml#347", held_back=True)
def loss_of_a_column(fixed=False):
    model = mlp(16, 64, 64, 1)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        wanted = torch.randn(15_000, device="cuda")
        predicted = model(torch.randn(15_000, 16, device="cuda"))
        loss = ((predicted.squeeze(1) if fixed else predicted) - wanted).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("large_layer", fix="[Pp]ool", thread="huyvnphan/PyTorch_CIFAR10#9")
def classifier_of_flat_features(fixed=False):
    pool = nn.AdaptiveAvgPool2d(7) if fixed else nn.Identity()
    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), pool, nn.Flatten(),
                          nn.Linear(32 * (49 if fixed else 80 * 80), 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        loss = F.cross_entropy(model(images(4, 160)), torch.zeros(4, dtype=torch.long, device="cuda"))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("data_on_gpu", fix=r"on the host|DataLoader|\.cpu\(\)", thread="kimiyoung/transformer-xl#63")
def tokens_of_whole_corpus(fixed=False):
    corpus = torch.zeros(64, 2_400_000, dtype=torch.long)
    words = nn.Embedding(10_000, 64).cuda()
    corpus = corpus if fixed else corpus.to("cuda")
    for part in corpus[:, :256].split(128, 1):
        words(part.cuda()).square().mean().backward()


@expected("all_pairs", fix="split|chunk", thread="Xuanmeng-Zhang/gnn-re-ranking#2", held_back=True)
def ranks_of_all_images(fixed=False):
    features = F.normalize(torch.randn(16_000, 256, device="cuda"), dim=1)
    best = []
    for part in features.split(500 if fixed else 16_000):
        scores = part @ features.T
        best.append((scores.topk(20).indices if fixed else scores.argsort(1, descending=True)[:, :20]))
    return torch.cat(best).shape


@expected("all_pairs", fix="split|chunk", thread="subhadarship/kmeans_pytorch#13")
def clusters_of_all_points(fixed=False):
    points, centres = torch.randn(60_000, 32, device="cuda"), torch.randn(600, 32, device="cuda")
    nearest = []
    for part in points.split(1000 if fixed else 60_000):
        distances = ((part.unsqueeze(1) - centres.unsqueeze(0)) ** 2.0).sum(-1)
        nearest.append(distances.argmin(1))
    return torch.cat(nearest).shape


@expected("growing_buffer", fix=r"\.cpu\(\)|host", thread="hkchengrex/STCN#3")
def memory_of_all_frames(fixed=False):
    key_net, value_net = conv_net(32, 2).eval(), conv_net(32, 2).eval()
    keys, values = None, None
    with torch.no_grad():
        for _ in range(200):
            frame = images(2, 256)
            key, value = key_net(frame).flatten(2), value_net(frame).flatten(2)
            if fixed:
                key, value = key.cpu(), value.cpu()
            keys = key if keys is None else torch.cat([keys, key], 2)
            values = value if values is None else torch.cat([values, value], 2)
    return keys.shape


class Reaction(nn.Module):
    def __init__(self, channels=16):
        super().__init__()
        self.layers = nn.ModuleList(nn.Conv2d(2, channels, 5, padding=2) for _ in range(3))
        self.out = nn.Conv2d(channels, 2, 1)

    def forward(self, state):
        a, b, c = (layer(state) for layer in self.layers)
        return state + 0.1 * self.out(a * b * c)


@expected("graph_of_earlier_steps", fix="detach", thread="isds-neu/PeRCNN#3", held_back=True)
def solution_over_all_windows(fixed=False):
    model = Reaction().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    state = torch.randn(1, 2, 256, 256, device="cuda")
    for _ in range(2):
        optimizer.zero_grad()
        for _ in range(30):
            loss = 0
            for _ in range(5):
                state = model(state)
                loss = loss + state.diff(dim=2).square().mean()
            loss.backward(retain_graph=not fixed)
            state = state.detach() if fixed else state
        optimizer.step()
        state = state.detach()
