"""Programs of ordinary users, after none in particular: distillation, chat models, pictures, a search for sizes."""
import collections
import random

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig, LlamaForCausalLM, ViTConfig, ViTModel

from expected import expected


# A small vision transformer learns from a large one.

class FeedForward(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, dim, heads=8):
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(dim), heads
        self.to_qkv, self.to_out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.to_qkv(self.norm(x)).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        return self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, d))


class Transformer(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.ModuleList([Attention(dim), FeedForward(dim)]) for _ in range(depth))

    def forward(self, x):
        for attention, feed_forward in self.layers:
            x = attention(x) + x
            x = feed_forward(x) + x
        return x


class Classifier(nn.Module):
    def __init__(self, dim, depth, classes=100):
        super().__init__()
        self.to_patches = nn.Conv2d(3, dim, 16, stride=16)
        self.transformer, self.head = Transformer(dim, depth), nn.Linear(dim, classes)

    def forward(self, images):
        return self.head(self.transformer(self.to_patches(images).flatten(2).transpose(1, 2)).mean(1))


@expected("graph_without_use", fix="no_grad", memory=900)
def distil_classifier(fixed=False):
    """The teacher is called with gradients: autograd keeps the activations of its 20 layers for a backward pass that none of its weights
    needs. Cured by: `with torch.no_grad()` around the call of the teacher.
    """
    teacher, student = Classifier(512, 20).cuda().eval(), Classifier(128, 4).cuda()
    optimizer = torch.optim.AdamW(student.parameters(), 1e-4)
    for _ in range(3):
        images, labels = torch.rand(24, 3, 224, 224).cuda(), torch.randint(0, 100, (24,)).cuda()
        if fixed:
            with torch.no_grad():
                soft = teacher(images)
        else:
            soft = teacher(images)
        logits = student(images)
        loss = F.cross_entropy(logits, labels) + F.kl_div(logits.log_softmax(-1), soft.softmax(-1), reduction="batchmean")
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.shape


# A chat model is made on the GPU, in the default type.

@expected("weights_do_not_fit", fix="bfloat16", memory=900)
def chat_with_model(fixed=False):
    """The weights are made on the GPU as float32, and do not fit. Cured by: `dtype=torch.bfloat16`."""
    config = LlamaConfig(vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=24,
                         num_attention_heads=16)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if fixed else torch.float32)
    model.eval()
    prompt = torch.randint(0, 8192, (1, 20)).cuda()
    return model.generate(prompt, max_new_tokens=4, do_sample=False).shape


# One large picture in a vision tower whose attention multiplies.

@expected("attention_scores", fix="sdpa", memory=900)
def describe_picture(fixed=False):
    """A picture of 1024 x 1024 pixels is 5330 patches, and the eager attention makes scores of patches times patches for each head. Cured
    by: `attn_implementation="sdpa"`.
    """
    config = ViTConfig(hidden_size=256, intermediate_size=1024, num_hidden_layers=4, num_attention_heads=4, image_size=1024,
                       patch_size=14)
    config._attn_implementation = "sdpa" if fixed else "eager"
    tower = ViTModel(config, add_pooling_layer=False).cuda().eval()
    with torch.no_grad():
        return tower(torch.rand(1, 3, 1024, 1024).cuda()).last_hidden_state.shape


# A server keeps the key-value cache of each visitor.

@expected("kept_tensors", fix=r"sessions\.pop", memory=900)
def chat_with_visitors(fixed=False):
    """The dictionary `sessions` keeps a key-value cache for each visitor, and none is ever removed. Cured by: removing those of visitors
    that have left.
    """
    config = LlamaConfig(vocab_size=8192, hidden_size=512, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8)
    model, sessions = LlamaForCausalLM(config).cuda().eval(), {}

    @torch.inference_mode()
    def respond(user, message):
        cache = sessions.setdefault(user, DynamicCache(config=config))
        return model(input_ids=message, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)

    for visit in range(40):
        answer = respond(f"visitor{visit}", torch.randint(0, 8192, (1, 1200)).cuda())
        if fixed and len(sessions) > 4:
            sessions.pop(next(iter(sessions)))
    return answer.shape


# A search for sizes: each trial keeps its network among its attributes.

class Trial:
    def __init__(self, number):
        self.number, self.user_attrs = number, {}


class Study:
    def __init__(self):
        self.trials = []

    def optimize(self, objective, n_trials):
        for number in range(n_trials):
            trial = Trial(number)
            self.trials.append(trial)
            trial.value = objective(trial)


@expected("kept_tensors", fix=r"clear|\.cpu\(\)", memory=500)
def search_sizes(fixed=False):
    """Each trial keeps its network in `user_attrs`, and the study keeps all trials. Cured by: numbers in place of networks, or the best one
    only.
    """
    study = Study()

    def objective(trial):
        width = 1024 + 128 * (trial.number % 4)
        model = nn.Sequential(nn.Linear(256, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 1e-3)
        for _ in range(4):
            x, y = torch.rand(64, 256).cuda(), torch.randint(0, 10, (64,)).cuda()
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        trial.user_attrs["model"] = None if fixed else model
        return float(trial.number)

    study.optimize(objective, n_trials=60)
    return len(study.trials)


# A network of point clouds looks for the nearest neighbours of each point in every layer, by all distances.

def nearest(x, count):
    inner = -2 * x.transpose(2, 1) @ x
    square = (x ** 2).sum(1, keepdim=True)
    return (-square - inner - square.transpose(2, 1)).topk(count, -1)[1]


def nearest_by_part(x, count):
    return torch.cat([torch.cdist(part, x.transpose(2, 1)).topk(count, -1, largest=False)[1]
                      for part in x.transpose(2, 1).split(128, 1)], 1)


class PointNetwork(nn.Module):
    def __init__(self, find, count=20):
        super().__init__()
        self.find, self.count = find, count
        self.layers = nn.ModuleList(nn.Conv2d(2 * wide, 96, 1, bias=False) for wide in (3, 96))
        self.head = nn.Linear(96, 40)

    def gather(self, x):
        b, c, n = x.shape
        with torch.no_grad():
            chosen = self.find(x, self.count) + torch.arange(b, device=x.device).view(-1, 1, 1) * n
        points = x.transpose(2, 1).reshape(b * n, c)
        around = points[chosen.view(-1)].view(b, n, self.count, c)
        points = points.view(b, n, 1, c).expand_as(around)
        return torch.cat((around - points, points), 3).permute(0, 3, 1, 2)

    def forward(self, x):
        for layer in self.layers:
            x = F.relu(layer(self.gather(x))).max(-1)[0]
        return self.head(x.max(-1)[0])


@expected("all_pairs", fix="split|chunk", memory=1150)
def train_point_clouds(fixed=False):
    model = PointNetwork(nearest_by_part if fixed else nearest).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        points, labels = torch.randn(2, 3, 6000).cuda(), torch.randint(0, 40, (2,)).cuda()
        loss = F.cross_entropy(model(points), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.shape


# A picture is optimized; the features that it shall have keep the graph of the network that made them.

@expected("kept_tensors", fix="no_grad", memory=900)
def transfer_style(fixed=False):
    widths = (3, 32, 32, 64, 64)
    network = nn.Sequential(*[layer for a, b in zip(widths, widths[1:])
                              for layer in (nn.Conv2d(a, b, 3, padding=1), nn.ReLU())]).cuda().eval()

    def features(x):
        kept = []
        for layer in network:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                kept.append(x)
        return kept

    with torch.set_grad_enabled(not fixed):
        content = features(torch.rand(1, 3, 608, 608).cuda())
    picture = torch.rand(1, 3, 608, 608).cuda().requires_grad_()
    optimizer = torch.optim.Adam([picture], 0.01)
    for _ in range(3):
        loss = sum(F.mse_loss(a, b) for a, b in zip(features(picture), content))
        optimizer.zero_grad()
        loss.backward(retain_graph=True)
        optimizer.step()
    return loss.shape


# A buffer of frames to learn from lies on the GPU.

@expected("kept_tensors", fix=r"frames\.append\(.*\.cpu\(\)", memory=1600)
def fill_replay_buffer(fixed=False):
    network = nn.Sequential(nn.Conv2d(4, 16, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(6400, 6)).cuda()
    optimizer, frames = torch.optim.Adam(network.parameters()), collections.deque(maxlen=100_000)
    frame = torch.rand(1, 4, 84, 84).cuda()
    for number in range(20_000):
        following = torch.rand(1, 4, 84, 84, device="cuda")
        frames.append((frame.cpu() if fixed else frame, number % 6, following.cpu() if fixed else following))
        frame = following
        if number % 200 == 199:
            batch = random.sample(frames, 32)
            chosen = torch.tensor([action for _, action, _ in batch]).cuda()
            states = torch.cat([before for before, _, _ in batch]).cuda()
            loss = F.smooth_l1_loss(network(states).gather(1, chosen[:, None])[:, 0], torch.rand(32).cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.shape


# After an epoch the decoder makes as many pictures as training never has at once.

@expected("larger_step", fix="no_grad", memory=900)
def show_samples(fixed=False):
    def up(a, b):
        return nn.Sequential(nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(a, b, 3, 1, 1))

    encoder = nn.Sequential(nn.Conv2d(3, 16, 4, 4), nn.SiLU(), nn.Conv2d(16, 32, 4, 4)).cuda()
    decoder = nn.Sequential(up(32, 64), up(64, 32), up(32, 16), up(16, 3)).cuda()
    optimizer = torch.optim.Adam([*encoder.parameters(), *decoder.parameters()])
    for _ in range(3):
        pictures = torch.rand(2, 3, 256, 256).cuda()
        loss = F.mse_loss(decoder(encoder(pictures)), pictures)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.set_grad_enabled(not fixed):
        return decoder(torch.randn(96, 32, 16, 16).cuda()).shape
