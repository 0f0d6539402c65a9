"""Programs after public threads from all fields, most of them with elementwise layers."""
import gc
import io

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected
from loops import elementwise_net
from programs.root_causes import batch, no_grad_if


def conv_net(channels=32, depth=4):
    layers = [nn.Conv2d(3, channels, 3, padding=1), nn.ReLU()]
    for _ in range(depth):
        layers += [nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(channels, 3, 3, padding=1)).cuda()


def images(count, side=128):
    return torch.randn(count, 3, side, side, device="cuda")


# Objects that refer to themselves wait for Python's collector.
@expected("reference_cycle", fix=r"gc\.collect", thread="pytorch/pytorch#50185")
def rollout_refers_to_itself(fixed=False):
    class Rollout:
        def __init__(self, states):
            self.states, self.owner = states, self

    gc.disable()
    for _ in range(40):
        Rollout(batch(40))
        if fixed:
            gc.collect()


# The buffer of states is closed over by a callback that belongs to the object itself.
@expected("reference_cycle", fix=r"gc\.collect|detach", thread="NVlabs/GR00T-WholeBodyControl#220", held_back=True)
def episode_keeps_its_callback(fixed=False):
    class Episode:
        def __init__(self, model, states):
            self.loss = model(states).square().mean()
            self.on_end = lambda: self.loss

    gc.disable()
    model = elementwise_net(4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(30):
        episode = Episode(model, batch(16))
        optimizer.zero_grad()
        episode.loss.backward(retain_graph=True)
        optimizer.step()
        del episode
        if fixed:
            gc.collect()


# What was loaded stays for the whole training.
@expected("loaded_onto_gpu", fix="map_location", thread="karpathy/nanoGPT#236", memory=1800)
def checkpoint_stays_after_resume(fixed=False):
    def large():
        return nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(4)]).cuda()

    model = large()
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(8, 4096, device="cuda")).mean().backward()
    optimizer.step()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    optimizer.zero_grad()
    file.seek(0)
    checkpoint = torch.load(file, map_location="cpu" if fixed else "cuda")
    model.load_state_dict(checkpoint["model"])
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4096, 4096, device="cuda")).square().mean().backward()
        optimizer.step()


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="facebookresearch/SlowFast#411", memory=700)
def evaluation_collects_outputs_and_labels(fixed=False):
    model = elementwise_net(2)
    outputs, labels = [], []
    model.eval()
    with torch.no_grad():
        for _ in range(30):
            x, y = batch(24), torch.zeros(24, dtype=torch.long, device="cuda")
            scores = model(x)
            outputs.append(scores.cpu() if fixed else scores)
            labels.append(y)
    return len(outputs)


# A metric's state takes what it is given, with its graph.
@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="Lightning-AI/torchmetrics#2597")
def metric_is_given_a_graph(fixed=False):
    class Metric:
        def __init__(self):
            self.values = []

        def update(self, value):
            self.values.append(value)

    model, metric = elementwise_net(4), Metric()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(30):
        x = batch(16)
        out = model(x)
        loss = out.square().mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=not fixed)
        optimizer.step()
        metric.update(out.detach().abs().mean() if fixed else out.abs().mean())


@expected("evaluation_keeps_graphs", fix="no_grad", thread="facebookresearch/deepcluster#55", memory=1000)
def compute_features_without_no_grad(fixed=False):
    model = conv_net(48, 6)

    def compute_features():
        model.eval()
        features = []
        with no_grad_if(fixed):
            for _ in range(3):
                features.append(model(images(16, 192)).mean((2, 3)).detach().cpu())
        return torch.cat(features)

    return compute_features().shape


# One long sample among short ones.
# Capacity, until a row compared the step with the one before: one sentence is 43 times as long.
@expected("larger_step", fix="half|batch|checkpoint|autocast|sequence", thread="allenai/allennlp#2515")
def one_long_sequence(fixed=False):
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True), 2).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for length in (128, 160, 96, 512 if fixed else 4096):
        optimizer.zero_grad()
        model(torch.randn(16, length, 256, device="cuda")).square().mean().backward()
        optimizer.step()


# The discriminator's loss runs through the generator, too.
@expected("graph_without_use", fix="no_grad|detach", memory=900)
def generator_is_not_detached(fixed=False):
    generator, discriminator = elementwise_net(8), elementwise_net(2)
    optimizer = torch.optim.SGD(discriminator.parameters(), 0.1)
    for _ in range(2):
        fake = generator(batch(32))
        loss = discriminator(fake.detach() if fixed else fake).square().mean()
        if fixed:
            del fake
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# The target of Q-learning needs no gradient.
@expected("graph_without_use", fix="no_grad", memory=1000)
def target_network_with_graph(fixed=False):
    policy, target = elementwise_net(3), elementwise_net(10)
    optimizer = torch.optim.SGD(policy.parameters(), 0.1)
    for _ in range(2):
        with no_grad_if(fixed):
            wanted = target(batch(24)) * 0.99
        loss = F.mse_loss(policy(batch(24)), wanted.detach())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Messages of all edges of a graph at once.
@expected("enlarged", fix="half|batch|checkpoint|split|autocast")
def messages_of_all_edges(fixed=False):
    nodes, edges, width = 20_000, 400_000, 128
    x = torch.randn(nodes, width, device="cuda")
    source = torch.zeros(edges, dtype=torch.long, device="cuda")
    layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3)).cuda()

    def run(x, source):
        for layer in layers:
            message = torch.relu(layer(x[source]))
            x = x + torch.zeros_like(x).index_add(0, source, message)
        return x

    for part in source.split(50_000) if fixed else [source]:
        run(x, part).square().mean().backward()


# Scores of many classes are enlarged to the size of the image before the loss.
@expected("capacity", fix="half|batch|autocast|accumulation", memory=1600)
def logits_are_enlarged(fixed=False):
    head = nn.Conv2d(32, 150, 1).cuda()
    optimizer = torch.optim.SGD(head.parameters(), 0.1)
    for _ in range(2):
        scores = head(torch.randn(4, 32, 64, 64, device="cuda"))
        labels = torch.zeros(4, 64 if fixed else 512, 64 if fixed else 512, dtype=torch.long, device="cuda")
        enlarged = scores if fixed else F.interpolate(scores, size=(512, 512), mode="bilinear")
        loss = F.cross_entropy(enlarged, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Gradients are kept from step to step as a zero_grad that fills them.
@expected("kept_tensors", fix=r"\.cpu\(\)|item\(\)|mean", held_back=True)
def statistics_keep_activations(fixed=False):
    model, seen = elementwise_net(4), {}

    def hook(module, _, output):
        seen.setdefault(id(module), []).append(output.detach().mean() if fixed else output.detach())

    for module in model:
        module.register_forward_hook(hook)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(30):
        optimizer.zero_grad()
        model(batch(8)).square().mean().backward()
        optimizer.step()


# Every candidate is scored before the best is taken.
@expected("evaluation_keeps_graphs", fix="no_grad", thread="serend1p1ty/SeqNet#14", held_back=True)
def beams_without_no_grad(fixed=False):
    model = elementwise_net(4)

    @torch.set_grad_enabled(not fixed)
    def predict():
        scores = []
        for _ in range(20):
            scores.append(model(batch(12)).mean())
        return max(scores)

    predict()


# The validation set is one batch.
@expected("batch_without_gradients", fix="split|chunk", memory=1400, held_back=True)
def whole_validation_set_at_once(fixed=False):
    model = conv_net(32, 4).eval()
    with torch.no_grad():
        for part in images(96, 256).split(8) if fixed else [images(96, 256)]:
            model(part)
