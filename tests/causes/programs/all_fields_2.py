"""Programs after public threads from all fields."""
import copy
import gc
import io

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected
from programs.root_causes import no_grad_if
from programs.all_fields_1 import conv_net, images


def encoder(layers=4, width=256):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True), layers).cuda()


def tokens(count, length=256, width=256):
    return torch.randn(count, length, width, device="cuda")


def up_net(channels=32):
    """A small generator: from 16 × 16 to 128 × 128."""
    layers = []
    for _ in range(3):
        layers += [nn.Upsample(scale_factor=2), nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()]
    return nn.Sequential(*layers, nn.Conv2d(channels, 3, 3, padding=1)).cuda()


# Graphs of forward passes that nothing runs backward through.

@expected("evaluation_keeps_graphs", fix="no_grad", thread="pytorch/pytorch#2302", memory=700)
def features_are_concatenated(fixed=False):
    model = conv_net(32, 4).eval()
    with no_grad_if(fixed):
        features = model(images(1, 224))
        for _ in range(40):
            features = torch.cat((features, model(images(1, 224))))
    return features.shape


@expected("evaluation_keeps_graphs", fix="no_grad", thread="IBM/low-resource-text-classification-framework#1", memory=900, held_back=True)
def score_corpus(fixed=False):
    """The output of the language model (positions x large vocabulary) takes more than half of the memory, and softmax makes a second tensor
    of the same size beside it. Cured by: Softmax computed in place (exp with out=, divide in place), so that no second copy is needed.
    """
    model = encoder().eval()

    def infer(texts):
        with no_grad_if(fixed):
            outputs = [model(text).mean((1, 2)) for text in texts]
        return torch.cat(outputs)

    return infer(tokens(4) for _ in range(60)).shape


@expected("evaluation_keeps_graphs", fix="no_grad", thread="ray-project/ray#6962", memory=380, held_back=True)
def values_of_rollout(fixed=False):
    policy, critic = conv_net(32, 3), conv_net(32, 3)
    optimizer = torch.optim.Adam([*policy.parameters(), *critic.parameters()])

    def compute_advantages(states):
        with no_grad_if(fixed):
            values = [critic(state).mean((1, 2, 3)) for state in states]
        return torch.stack(values).detach() - torch.stack(values).mean()

    for length in (3, 3, 20):
        states = [images(2) for _ in range(length)]
        advantages = compute_advantages(states)
        for state, advantage in zip(states, advantages.detach()):
            optimizer.zero_grad()
            (policy(state).mean((1, 2, 3)) * advantage).sum().backward()
            optimizer.step()


# Only a part of the model is trained.

@expected("graph_without_use", fix="no_grad|detach", thread="haitongli/knowledge-distillation-pytorch#25", memory=550, quick=True)
def teacher_keeps_graph(fixed=False):
    teacher, student = conv_net(48, 8).eval(), conv_net(16, 2)
    optimizer = torch.optim.SGD(student.parameters(), 0.1)
    for _ in range(3):
        x = images(16)
        with no_grad_if(fixed):
            wanted = teacher(x).log_softmax(1)
        loss = F.kl_div(student(x).log_softmax(1), wanted, log_target=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("graph_without_use", fix="no_grad|requires_grad|detach", thread="BINE022/EEGPT#18", memory=610)
def backbone_outside_optimizer(fixed=False):
    class Probe(nn.Module):
        def __init__(self):
            super().__init__()
            self.backbone, self.head = encoder(6), nn.Linear(256, 10)

        def forward(self, x):
            with no_grad_if(fixed):
                features = self.backbone(x)
            return self.head(features.mean(1))

    model = Probe().cuda()
    optimizer = torch.optim.AdamW(model.head.parameters())
    for _ in range(3):
        labels = torch.zeros(24, dtype=torch.long, device="cuda")
        loss = F.cross_entropy(model(tokens(24)), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("graph_without_use", fix="detach|no_grad", thread="znxlwm/pytorch-generative-model-collections#4", memory=600, held_back=True)
def critic_gets_generator_graph(fixed=False):
    generator, critic = up_net(64), conv_net(16, 2)
    of_critic = torch.optim.Adam(critic.parameters())
    real_or_fake = nn.BCEWithLogitsLoss()
    for _ in range(2):
        with no_grad_if(fixed):
            fake = generator(torch.randn(20, 64, 16, 16, device="cuda"))
        score = critic(fake).mean((1, 2, 3))
        loss = real_or_fake(score, torch.zeros_like(score))
        of_critic.zero_grad()
        loss.backward()
        of_critic.step()


# Graphs that grow from step to step.

@expected("graph_of_earlier_steps", fix="no_grad|detach", thread="BorealisAI/advertorch#73", memory=900)
def attack_keeps_forward_graphs(fixed=False):
    model, x = conv_net(24, 4).eval(), images(4, 160)
    change = torch.zeros_like(x, requires_grad=True)
    best = torch.full_like(x, -1e9)
    for _ in range(40):
        gradient, = torch.autograd.grad(model(x + change).square().mean(), change)
        change = (change - 0.1 * gradient).detach().requires_grad_()
        with no_grad_if(fixed):
            best = torch.maximum(best, model(x + change))
    return best.shape


@expected("graph_of_earlier_steps", fix="no_grad|detach", thread="growingnet/gromo#137", memory=900)
def statistics_of_inputs_keep_graph(fixed=False):
    model = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)).cuda()
    second_moment = torch.zeros(1024, 1024, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(40):
        hidden = model[:2](torch.randn(8192, 1024, device="cuda"))
        loss = model[2:](hidden).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if fixed:
            hidden = hidden.detach()
        second_moment = second_moment + hidden.T @ hidden
    return second_moment.shape


@expected("graph_of_earlier_steps", fix="no_grad|detach", thread="oxwhirl/pymarl#73", memory=1900)
def replay_keeps_graph_of_policy(fixed=False):
    policy = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 64)).cuda()
    optimizer = torch.optim.Adam(policy.parameters())
    memory = []
    for step in range(60):
        state = torch.randn(1024, 4096, device="cuda")
        action = policy(state)
        memory.append((action.detach() if fixed else action, float(step)))
        loss = policy(torch.randn(64, 4096, device="cuda")).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@expected("graph_of_earlier_steps", fix="detach", thread="lxuechen/BDMC#3", memory=1100, held_back=True)
def weights_of_samples_keep_graph(fixed=False):
    decoder = nn.Sequential(nn.Linear(64, 2048), nn.Tanh(), nn.Linear(2048, 2048), nn.Tanh(), nn.Linear(2048, 784)).cuda()
    latent = torch.randn(4096, 64, device="cuda")
    log_weight = torch.zeros(4096, device="cuda")
    for _ in range(40):
        latent = latent.detach().requires_grad_()
        log_likelihood = -decoder(latent).square().sum(1)
        gradient, = torch.autograd.grad(log_likelihood.sum(), latent, retain_graph=True)
        log_weight = log_weight + 0.01 * (log_likelihood.detach() if fixed else log_likelihood)
        latent = latent + 0.01 * gradient
    return log_weight.shape


@expected("several_forward_passes", fix=r"backward\(\)", thread="pytorch/pytorch#14936", memory=800)
def losses_of_all_queries(fixed=False):
    relation, embed = encoder(2), encoder(2)
    optimizer = torch.optim.Adam([*relation.parameters(), *embed.parameters()])
    for _ in range(2):
        total = 0
        for _ in range(16):
            support = embed(tokens(4)).mean(1, keepdim=True)
            loss = relation(tokens(4) + support).square().mean()
            if fixed:
                loss.backward()
            else:
                total = total + loss
        optimizer.zero_grad(set_to_none=True) if fixed else total.backward()
        optimizer.step()


# Objects that refer to themselves.

@expected("reference_cycle", fix=r"gc\.collect|weakref", thread="pytorch/pytorch#46386", memory=700)
def module_hook_refers_to_module(fixed=False):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)])
            self.layers[0].register_forward_hook(lambda module, args, output: self.note(output))

        def note(self, output):
            self.shape = output.shape

    gc.disable()
    for _ in range(20):
        net = Net().cuda()
        net.layers(torch.randn(8, 2048, device="cuda"))
        del net
        if fixed:
            gc.collect()


@expected("reference_cycle", fix=r"gc\.collect|weakref", thread="pytorch/pytorch#47589", memory=1500, held_back=True)
def schedule_refers_to_trainer(fixed=False):
    class Trainer:
        def __init__(self):
            self.rate, self.model = 1.0, nn.Linear(4096, 4096).cuda()
            self.optimizer = torch.optim.Adam(self.model.parameters())
            self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: self.rate)

        def run(self):
            self.model(torch.randn(32, 4096, device="cuda")).mean().backward()
            self.optimizer.step()
            self.schedule.step()

    gc.disable()
    for _ in range(12):
        Trainer().run()
        if fixed:
            gc.collect()


# Tensors that are kept.

@expected("kept_tensors", fix=r"\bdel\b|\.cpu\(\)", thread="jmschrei/tangermeme#84", memory=1100)
def attributions_stay_on_modules(fixed=False):
    def note(module, args, output):
        module.input, module.output = args[0].detach(), output.detach()

    models = [conv_net(32, 4).eval() for _ in range(12)]
    for model in models:
        hooks = [layer.register_forward_hook(note) for layer in model]
        x = images(8).requires_grad_()
        torch.autograd.grad(model(x).sum(), x)
        for hook in hooks:
            hook.remove()
        for layer in model if fixed else []:
            del layer.input, layer.output


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="facebookresearch/pytext#204", memory=930)
def weights_of_all_epochs(fixed=False):
    model = nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(4)]).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    snapshots = []
    for _ in range(16):
        optimizer.zero_grad()
        model(torch.randn(256, 2048, device="cuda")).square().mean().backward()
        optimizer.step()
        weights = copy.deepcopy(model.state_dict())
        snapshots.append({name: weight.cpu() for name, weight in weights.items()} if fixed else weights)


# Files onto the GPU.

def saved(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@expected("loaded_onto_gpu", fix="map_location", thread="rosinality/stylegan2-pytorch#31", memory=1590, held_back=True)
def resume_generator_and_average(fixed=False):
    def large():
        return nn.Sequential(*[nn.Linear(3072, 3072) for _ in range(4)]).cuda()

    generator, average, critic = large(), large(), large()
    file = saved({"g": generator.state_dict(), "g_ema": average.state_dict(), "d": critic.state_dict()})
    checkpoint = torch.load(file, map_location=lambda storage, _: storage) if fixed else torch.load(file)
    for name, model in (("g", generator), ("g_ema", average), ("d", critic)):
        model.load_state_dict(checkpoint[name])
    optimizer = torch.optim.Adam(generator.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        critic(generator(torch.randn(512, 3072, device="cuda"))).mean().backward()
        optimizer.step()


@expected("loaded_onto_gpu", fix="map_location", thread="Robbyant/lingbot-map#43", memory=900)
def file_and_model_at_once(fixed=False):
    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)])
    file = saved(model.cuda().state_dict())
    model.cpu()
    state = torch.load(file, map_location="cpu" if fixed else "cuda")
    model.load_state_dict(state)
    model.to("cuda").eval()
    with torch.no_grad():
        model(torch.randn(8, 4096, device="cuda"))


# One op, or one call, that makes much.

@expected("vectorized_over_all", fix="chunk_size", thread="pytorch/functorch#680", memory=900)
def gradients_of_each_sample(fixed=False):
    model = nn.Sequential(nn.Linear(256, 1024), nn.Tanh(), nn.Linear(1024, 512)).cuda()
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    loss = lambda weights, x: torch.func.functional_call(model, weights, (x,)).square().mean()
    norm = lambda weights, x: sum(g.square().sum() for g in torch.func.grad(loss)(weights, x).values())
    samples = torch.randn(512, 256, device="cuda")
    return torch.func.vmap(norm, in_dims=(None, 0), chunk_size=16 if fixed else None)(weights, samples).shape


@expected("capacity", fix="batch|split|chunk", thread="meta-pytorch/captum#538", memory=1500, held_back=True)
def gradients_of_all_steps_at_once(fixed=False):
    model, x = conv_net(32, 4).eval(), images(1)
    parts = torch.linspace(0, 1, 200, device="cuda").view(-1, 1, 1, 1).split(10 if fixed else 200)
    total = 0
    for part in parts:
        inputs = (part * x).requires_grad_()
        total = total + torch.autograd.grad(model(inputs).sum(), inputs)[0].sum(0)
    return total.shape


@expected("logits", fix="chunk|split", thread="inclusionAI/AReno#125", memory=620)
def score_log_probabilities(fixed=False):
    head, words = nn.Linear(256, 50_000, bias=False).cuda(), 50_000
    hidden, labels = torch.randn(2048, 256, device="cuda"), torch.zeros(2048, dtype=torch.long, device="cuda")
    total = 0
    with torch.no_grad():
        for h, y in zip(hidden.split(128 if fixed else 2048), labels.split(128 if fixed else 2048)):
            logits = head(h).float()
            logits = logits - logits.max(-1, keepdim=True).values
            chosen = logits.gather(-1, y[:, None]).squeeze(-1)
            total = total + (chosen - logits.exp().sum(-1).log()).sum()
    return total.shape, words
