"""Programs after public threads from all fields."""
import collections
import copy
import io
import pickle
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from expected import expected
from programs.root_causes import no_grad_if


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU(inplace=True))


# Evaluation.

class ChestNet(nn.Module):
    def __init__(self, classes=14):
        super().__init__()
        self.features = nn.Sequential(block(3, 32), nn.MaxPool2d(2), block(32, 64), nn.MaxPool2d(2), block(64, 128))
        self.classifier = nn.Sequential(nn.Linear(128, classes), nn.Sigmoid())

    def forward(self, x):
        return self.classifier(self.features(x).mean((2, 3)))


# Ten crops of each radiograph are averaged; predictions are joined to those of earlier batches.
@expected("evaluation_keeps_graphs", fix="no_grad", thread="arnoweng/CheXNet#39")
def ten_crop_test(fixed=False):
    model = ChestNet().cuda()
    data = TensorDataset(torch.randn(96, 10, 3, 64, 64), torch.zeros(96, 14))
    loader = DataLoader(data, batch_size=8)
    truth, predictions = torch.zeros(0, 14).cuda(), torch.zeros(0, 14).cuda()
    model.eval()
    for crops, target in loader:
        target = target.cuda()
        truth = torch.cat((truth, target), 0)
        batch, n_crops, channels, height, width = crops.size()
        with no_grad_if(fixed):
            output = model(crops.view(-1, channels, height, width).cuda())
        output_mean = output.view(batch, n_crops, -1).mean(1)
        predictions = torch.cat((predictions, output_mean), 0)
    return predictions.shape


class EEGNet(nn.Module):
    def __init__(self, channels=64, targets=4):
        super().__init__()
        self.temporal = nn.Conv1d(channels, 64, 15, padding=7)
        self.spatial = nn.Conv1d(64, 64, 1)
        self.head = nn.Conv1d(64, targets, 1)

    def forward(self, x):
        return self.head(F.elu(self.spatial(F.elu(self.temporal(x)))))


# The process hands back outputs, inputs and targets of all sessions.
@expected("kept_tensors", fix=r"\.cpu\(\)", thread="SPOClab-ca/dn3#38", memory=700)
def predictions_of_all_sessions(fixed=False):
    process = EEGNet().cuda()
    dataset = TensorDataset(torch.randn(1200, 64, 2048), torch.zeros(1200, 2048, dtype=torch.long))

    def predict():
        process.eval()
        inputs, outputs, labels = [], [], []
        with torch.no_grad():
            for x, y in DataLoader(dataset, batch_size=32):
                x, y = x.cuda(), y.cuda()
                prediction = process(x)
                if fixed:
                    x, y, prediction = x.cpu(), y.cpu(), prediction.cpu()
                inputs.append(x)
                labels.append(y)
                outputs.append(prediction)
        return torch.cat(inputs), torch.cat(outputs), torch.cat(labels)

    return len(predict())


# Overlapping windows of a volume; the predictor's outputs are kept until all can be stitched.
@expected("kept_tensors", fix=r"\.cpu\(\)", thread="Project-MONAI/MONAI#854")
def windows_stay_on_gpu(fixed=False, classes=24, size=48, step=24):
    network = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), nn.InstanceNorm3d(16), nn.LeakyReLU(), nn.Conv3d(16, classes, 1))
    network.cuda().eval()
    scan = torch.randn(1, 1, 144, 144, 96)
    starts = [(z, y, x) for z in range(0, 97, step) for y in range(0, 97, step) for x in range(0, 49, step)]
    window = lambda at: tuple([slice(None), slice(None)] + [slice(s, s + size) for s in at])
    with torch.no_grad():
        rois = []
        for at in starts:
            probability = network(scan[window(at)].cuda()).softmax(1)
            rois.append(probability.cpu() if fixed else probability)
        stitched = torch.zeros(1, classes, 144, 144, 96, device=rois[0].device)
        count = torch.zeros_like(stitched[:, :1])
        for at, roi in zip(starts, rois):
            stitched[window(at)] += roi
            count[window(at)] += 1
        stitched /= count
    return stitched.shape


class DualPath(nn.Module):
    """Attention within chunks of the signal, then across them."""
    def __init__(self, width=128, chunk=250):
        super().__init__()
        self.chunk = chunk
        self.encoder, self.decoder = nn.Conv1d(1, width, 16, 8), nn.ConvTranspose1d(width, 2, 16, 8)
        layer = lambda: nn.TransformerEncoderLayer(width, 4, 512, batch_first=True, norm_first=True)
        self.intra, self.inter = layer(), layer()

    def forward(self, mixture):
        encoded = self.encoder(mixture[:, None]).transpose(1, 2)
        encoded = F.pad(encoded, (0, 0, 0, -encoded.shape[1] % self.chunk))
        chunks = encoded.unflatten(1, (-1, self.chunk))
        chunks = self.intra(chunks.flatten(0, 1)).view_as(chunks)
        chunks = self.inter(chunks.transpose(1, 2).flatten(0, 1)).unflatten(0, (-1, self.chunk)).transpose(1, 2)
        return self.decoder(chunks.flatten(1, 2).transpose(1, 2))


@expected("batch_without_gradients", fix="split|chunk|shorter|part", thread="speechbrain/speechbrain#1255")
def separation_of_long_recording(fixed=False):
    model = DualPath().cuda().eval()
    minutes_of_audio = torch.randn(1, 16_000 * 136)
    sources = []
    with torch.no_grad():
        for part in minutes_of_audio.split(16_000 * 20 if fixed else minutes_of_audio.shape[1], 1):
            sources.append(model(part.cuda()).cpu())
    return torch.cat(sources, 2).shape


class Decoder(nn.Module):
    def __init__(self, width=128):
        super().__init__()
        self.begin = nn.Conv2d(4, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, width, 3, padding=1))
                                    for _ in range(6))
        self.end = nn.Conv2d(width, 3, 3, padding=1)

    def forward(self, z):
        x = self.begin(z)
        for number, layer in enumerate(self.blocks):
            x = x + layer(x)
            if number % 2:
                x = F.interpolate(x, scale_factor=2.0)
        return self.end(x)


# Tiling was switched on against a lack of memory.
@expected("evaluation_keeps_graphs", fix="no_grad", thread="huggingface/diffusers#9648")
def tiles_decoded_with_graph(fixed=False, tile=32):
    class AutoencoderKL(nn.Module):
        def __init__(self):
            super().__init__()
            self.decoder = Decoder()

        def tiled_decode(self, z):
            rows = []
            for i in range(0, z.shape[2], tile):
                row = []
                for j in range(0, z.shape[3], tile):
                    row.append(self.decoder(z[:, :, i:i + tile, j:j + tile]))
                rows.append(torch.cat(row, 3))
            return torch.cat(rows, 2)

    vae = AutoencoderKL().to("cuda")
    vae.eval()
    latents = torch.randn(1, 4, 160, 96, device="cuda")
    with no_grad_if(fixed):
        video = vae.tiled_decode(latents / 0.18215)
    return video.detach().cpu().shape


# Training that keeps something.

class PointCompletion(nn.Module):
    def __init__(self, points=2048):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(3, 128), nn.ReLU(), nn.Linear(128, 1024))
        self.coarse = nn.Sequential(nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 3 * points))
        self.refine = nn.Sequential(nn.Linear(3, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 3))

    def forward(self, partial):
        code = self.encode(partial).amax(1)
        coarse = self.coarse(code).unflatten(1, (-1, 3))
        return coarse, coarse + self.refine(coarse)


class AverageMeter:
    def __init__(self):
        self.values, self.total, self.count = 0, 0, 0

    def update(self, value):
        self.values = value
        self.total = self.total + value
        self.count += 1


# The expansion penalty is for the plots only.
@expected("graph_of_earlier_steps", fix=r"\.item\(\)|detach", thread="microsoft/SpareNet#12")
def losses_for_visualization(fixed=False):
    network = PointCompletion().cuda()
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-4)
    meters = {name: AverageMeter() for name in ("coarse", "refined", "expansion")}
    for epoch in range(3):
        for _ in range(20):
            partial, complete = torch.randn(8, 1024, 3).cuda(), torch.randn(8, 2048, 3).cuda()
            coarse, refined = network(partial)
            losses = {"coarse": F.smooth_l1_loss(coarse, complete), "refined": F.smooth_l1_loss(refined, complete),
                      "expansion": (network.refine(refined) - refined).norm(dim=-1).mean()}
            optimizer.zero_grad()
            (losses["coarse"] + losses["refined"]).backward(retain_graph=not fixed)
            optimizer.step()
            for name, loss in losses.items():
                meters[name].update(loss.item() * 1000 if fixed else loss * 1000)
    return epoch


# Everything that a step hands back lives until the end of the epoch.
@expected("kept_tensors", fix=r"\bdel\b|\.cpu\(\)|\bpop\b", thread="microsoft/hi-ml#293", memory=400)
def results_hold_images(fixed=False):
    class DeepMIL(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = nn.Sequential(block(3, 16), nn.MaxPool2d(4), block(16, 32))
            self.pool, self.classifier = nn.Linear(32, 1), nn.Linear(32, 2)

        def shared_step(self, bags, labels):
            features = self.encoder(bags.flatten(0, 1)).mean((2, 3)).unflatten(0, bags.shape[:2])
            attention = self.pool(features).softmax(1)
            logits = self.classifier((attention * features).sum(1))
            results = {"loss": F.cross_entropy(logits, labels), "prob": logits.softmax(-1).detach(), "label": labels}
            if not fixed:
                results["image"] = bags
            return results

    module = DeepMIL().cuda()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-4)
    loader = DataLoader(TensorDataset(torch.randn(160, 8, 3, 112, 112), torch.zeros(160, dtype=torch.long)), batch_size=4)
    training_step_outputs = []
    for bags, labels in loader:
        results = module.shared_step(bags.cuda(), labels.cuda())
        optimizer.zero_grad()
        results["loss"].backward()
        optimizer.step()
        results["loss"] = results["loss"].detach()
        training_step_outputs.append(results)
    return torch.stack([output["loss"] for output in training_step_outputs]).mean().item()


# Transitions are put into the agent's memory as they come from the game: on the GPU.
@expected("kept_tensors", fix=r"\.cpu\(\)", thread="pytorch/tutorials#1620", memory=600)
def memory_of_agent(fixed=False):
    class Agent:
        def __init__(self):
            self.net = nn.Sequential(nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Flatten(),
                                     nn.Linear(64 * 81, 512), nn.ReLU(), nn.Linear(512, 2)).cuda()
            self.memory = collections.deque(maxlen=100_000)
            self.optimizer = torch.optim.Adam(self.net.parameters(), lr=0.00025)

        def cache(self, state, next_state, action, reward):
            transition = torch.tensor(state), torch.tensor(next_state), torch.tensor([action]), torch.tensor([reward])
            self.memory.append(transition if fixed else tuple(part.cuda() for part in transition))

        def learn(self):
            batch = random.sample(self.memory, 32)
            state, next_state, action, reward = (torch.stack(parts).cuda() for parts in zip(*batch))
            with torch.no_grad():
                target = reward.squeeze(1) + 0.9 * self.net(next_state).max(1).values
            estimate = self.net(state).gather(1, action).squeeze(1)
            self.optimizer.zero_grad()
            F.smooth_l1_loss(estimate, target).backward()
            self.optimizer.step()

    agent = Agent()
    frame = torch.rand(4, 84, 84).numpy()
    for step in range(3000):
        agent.cache(frame, frame, step % 2, 0.0)
        if step > 100 and step % 50 == 0:
            agent.learn()


# A batch norm for flows, which keeps the statistics itself.
@expected("graph_of_earlier_steps", fix="detach|no_grad", thread="bayesiains/nflows#11")
def running_mean_of_flow(fixed=False):
    class BatchNormTransform(nn.Module):
        def __init__(self, features, momentum=0.1):
            super().__init__()
            self.momentum = momentum
            self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
            self.register_buffer("running_mean", torch.zeros(features))
            self.register_buffer("running_var", torch.zeros(features))

        def forward(self, inputs):
            mean, var = inputs.mean(0), inputs.var(0)
            for running, now in ((self.running_mean, mean), (self.running_var, var)):
                running.mul_(1 - self.momentum).add_((now.detach() if fixed else now) * self.momentum)
            return self.weight * (inputs - mean) / torch.sqrt(var + 1e-5) + self.bias

    flow = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), BatchNormTransform(512), nn.Linear(512, 512), nn.Tanh(),
                         BatchNormTransform(512), nn.Linear(512, 64)).cuda()
    optimizer = torch.optim.Adam(flow.parameters())
    for iteration in range(60):
        x = torch.randn(4096, 64, device="cuda")
        loss = 0.5 * flow(x).square().sum(1).mean()
        optimizer.zero_grad()
        loss.backward(retain_graph=not fixed)
        optimizer.step()
    return iteration


# Each step of the inner loop is differentiated through.
@expected("create_graph", fix="create_graph|first.order|fewer|detach", thread="tristandeleu/pytorch-maml#21")
def adaptation_steps(fixed=False, num_adaptation_steps=25, step_size=0.4):
    widths = [(3, 32), (32, 32), (32, 32), (32, 32)]
    params = {}
    for number, (before, after) in enumerate(widths):
        params[f"conv{number}"] = torch.randn(after, before, 3, 3, device="cuda", requires_grad=True)
    params["linear"] = torch.randn(5, 32 * 25, device="cuda", requires_grad=True)
    meta_optimizer = torch.optim.Adam(params.values(), lr=1e-3)

    def logits_of(x, weights):
        for number in range(len(widths)):
            x = F.max_pool2d(F.relu(F.instance_norm(F.conv2d(x, weights[f"conv{number}"], padding=1))), 2)
        return x.flatten(1) @ weights["linear"].T

    def adapt(inputs, targets):
        adapted = dict(params)
        for _ in range(num_adaptation_steps):
            loss = F.cross_entropy(logits_of(inputs, adapted), targets)
            grads = torch.autograd.grad(loss, list(adapted.values()), create_graph=not fixed)
            adapted = {name: weight - step_size * grad for (name, weight), grad in zip(adapted.items(), grads)}
        return adapted

    for _ in range(2):
        inputs, targets = torch.randn(25, 3, 84, 84).cuda(), torch.zeros(25, dtype=torch.long).cuda()
        outer_loss = F.cross_entropy(logits_of(inputs, adapt(inputs, targets)), targets)
        meta_optimizer.zero_grad()
        outer_loss.backward()
        meta_optimizer.step()


# More than one model, or more than one copy of what a model has learned.

def language_model(width=768, layers=8):
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(width, 8, 4 * width, batch_first=True), layers)


@expected("several_models", fix=r"\bdel\b|\.cpu\(\)|host", thread="PrunaAI/pruna#78", memory=800)
def metric_loads_second_model(fixed=False):
    class GPUMemoryMetric:
        def compute(self, model):
            self.save_path = io.BytesIO()
            torch.save(model.state_dict(), self.save_path)
            if fixed:
                model.cpu()
            self.save_path.seek(0)
            loaded = language_model(1024)
            loaded.load_state_dict(torch.load(self.save_path, map_location="cpu"))
            loaded.to("cuda").eval()
            with torch.no_grad():
                loaded(torch.randn(1, 64, 1024, device="cuda"))
            return torch.cuda.max_memory_allocated()

    pipeline = language_model(1024).to("cuda").eval()
    with torch.no_grad():
        pipeline(torch.randn(1, 64, 1024, device="cuda"))
    return GPUMemoryMetric().compute(pipeline)


# The pickle of the earlier run holds whole modules, as they were: on the GPU.
@expected("loaded_onto_gpu", fix=r"\bdel\b", thread="autonomousvision/projected-gan#47", memory=1450)
def pickle_stays_loaded(fixed=False):
    def networks():
        mlp = lambda a, b, c: nn.Sequential(nn.Linear(a, b), nn.LeakyReLU(), nn.Linear(b, b), nn.LeakyReLU(), nn.Linear(b, c))
        up, down = mlp(256, 4096, 3 * 32 * 32), mlp(3 * 32 * 32, 4096, 1)
        return {"G": up.cuda(), "D": down.cuda(), "G_ema": copy.deepcopy(up).cuda()}

    snapshot = pickle.dumps(networks())
    new = networks()
    resume_data = pickle.loads(snapshot)
    for name, module in new.items():
        module.load_state_dict(resume_data[name].state_dict())
    if fixed:
        del resume_data
    G, D, G_ema = new["G"], new["D"], new["G_ema"].requires_grad_(False)
    G_opt, D_opt = torch.optim.Adam(G.parameters(), lr=2e-4), torch.optim.Adam(D.parameters(), lr=2e-4)
    for _ in range(3):
        real, z = torch.randn(64, 3 * 32 * 32).cuda(), torch.randn(64, 256).cuda()
        D_opt.zero_grad()
        (F.softplus(D(G(z).detach())) + F.softplus(-D(real))).mean().backward()
        D_opt.step()
        G_opt.zero_grad()
        F.softplus(-D(G(z))).mean().backward()
        G_opt.step()
        with torch.no_grad():
            for average, now in zip(G_ema.parameters(), G.parameters()):
                average.lerp_(now, 0.001)


# Each trial gets a model of its own from model_init.
@expected("several_models", fix=r"\bdel\b|None", thread="huggingface/transformers#35440", memory=1200)
def trials_of_search(fixed=False):
    class Trainer:
        def __init__(self, model_init):
            self.model_init, self.model, self.optimizer = model_init, None, None

        def train(self, learning_rate):
            self.model = self.model_init().to("cuda")
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate, fused=True)
            for _ in range(3):
                loss = self.model(torch.randn(2, 64, 768).cuda()).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            return loss.item()

        def hyperparameter_search(self, rates):
            best = None
            for rate in rates:
                if fixed:
                    self.model = self.optimizer = None
                objective = self.train(rate)
                best = min(best or objective, objective)
            return best

    return Trainer(language_model).hyperparameter_search([1e-5, 5e-5, 1e-4])


# Resuming takes more than training from scratch.
@expected("loaded_onto_gpu", fix=r"\bdel\b|map_location", thread="cavalleria/cavaface#4")
def checkpoint_of_face_network(fixed=False):
    class ArcFace(nn.Module):
        def __init__(self, people=50_000, width=512):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(people, width) * 0.01)

        def forward(self, embedding, label):
            cosine = F.linear(F.normalize(embedding), F.normalize(self.weight))
            return 64 * (cosine - 0.5 * F.one_hot(label, len(self.weight)))

    def build():
        layers = nn.Linear(3 * 56 * 56, 1024), nn.PReLU(), nn.Linear(1024, 512), nn.BatchNorm1d(512)
        backbone = nn.Sequential(nn.Flatten(), *layers)
        head = ArcFace()
        optimizer = torch.optim.SGD([*backbone.cuda().parameters(), *head.cuda().parameters()], lr=0.1, momentum=0.9)
        return backbone, head, optimizer

    def train(backbone, head, optimizer, steps):
        for _ in range(steps):
            images, labels = torch.randn(64, 3, 56, 56).cuda(), torch.zeros(64, dtype=torch.long).cuda()
            loss = F.cross_entropy(head(backbone(images), labels), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

    backbone, head, optimizer = build()
    train(backbone, head, optimizer, 1)
    file = io.BytesIO()
    torch.save({"backbone": backbone.state_dict(), "head": head.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    del optimizer
    backbone, head, optimizer = build()
    checkpoint = torch.load(file)
    backbone.load_state_dict(checkpoint["backbone"])
    head.load_state_dict(checkpoint["head"])
    optimizer.load_state_dict(checkpoint["optimizer"])
    if fixed:
        del checkpoint
    train(backbone, head, optimizer, 2)


# What was predicted in a fold is not needed in the next.
@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b", thread="deepset-ai/FARM#544", memory=900)
def results_of_folds(fixed=False):
    class Evaluator:
        def __init__(self, loader):
            self.loader = loader

        def eval(self, model):
            model.eval()
            result = {"preds": [], "labels": []}
            for passages, labels in self.loader:
                with torch.no_grad():
                    logits = model(passages.cuda())
                result["preds"].append(logits.cpu() if fixed else logits)
                result["labels"].append(labels)
            return result

    class QuestionAnswering(nn.Module):
        def __init__(self, words=5000, width=64, length=384):
            super().__init__()
            self.embedding, self.start, self.end = nn.Embedding(words, width), nn.Linear(width, 64), nn.Linear(width, 64)

        def forward(self, passages):
            hidden = torch.tanh(self.embedding(passages))
            return self.start(hidden) @ self.end(hidden).transpose(1, 2)

    passages, answers = torch.zeros(128, 384, dtype=torch.long), torch.zeros(128, 2, dtype=torch.long)
    test = DataLoader(TensorDataset(passages, answers), batch_size=16)
    results = []
    for fold in range(16):
        model = QuestionAnswering().cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(4):
            loss = model(torch.zeros(16, 384, dtype=torch.long).cuda()).logsumexp((1, 2)).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        results.append(Evaluator(test).eval(model))
    return len(results)


# The schedule is given a method of its own as function of the step.
@expected("reference_cycle", fix=r"gc\.collect|weakref", thread="huggingface/transformers#1134")
def schedules_of_folds(fixed=False):
    import gc

    class WarmupLinearSchedule(torch.optim.lr_scheduler.LambdaLR):
        def __init__(self, optimizer, warmup_steps, t_total):
            self.warmup_steps, self.t_total = warmup_steps, t_total
            super().__init__(optimizer, self.lr_lambda)

        def lr_lambda(self, step):
            return step / max(1, self.warmup_steps) if step < self.warmup_steps else max(0.0, 1 - step / self.t_total)

    for fold in range(16):
        net = nn.Sequential(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)).cuda()
        optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
        scheduler = WarmupLinearSchedule(optimizer, 1, 1000)
        for _ in range(2):
            loss = F.cross_entropy(net(torch.randn(32, 4096).cuda()), torch.zeros(32, dtype=torch.long).cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()
        del net, optimizer, scheduler, loss
        if fixed:
            gc.collect()


# One op that makes much.

@expected("all_pairs", fix="split|chunk", thread="mlfoundations/open_clip#11")
def recall_of_all_pairs(fixed=False):
    class CLIP(nn.Module):
        def __init__(self):
            super().__init__()
            self.visual, self.text = nn.Linear(2048, 512), nn.Linear(768, 512)
            self.logit_scale = nn.Parameter(torch.tensor(2.66))

    def ranks(scale, first, second, chunk):
        found = []
        for start in range(0, len(first), chunk):
            logits = scale * first[start:start + chunk] @ second.t()
            truth = torch.arange(start, start + len(logits), device="cuda").view(-1, 1)
            own = logits.gather(1, truth)
            found.append((logits > own).sum(1).cpu())
        return torch.cat(found)

    model = CLIP().cuda().eval()
    images, texts = [], []
    with torch.no_grad():
        for _ in range(30):
            images.append(F.normalize(model.visual(torch.randn(512, 2048).cuda()), dim=-1))
            texts.append(F.normalize(model.text(torch.randn(512, 768).cuda()), dim=-1))
        images, texts, scale = torch.cat(images), torch.cat(texts), model.logit_scale.exp()
        if fixed:
            return ranks(scale, images, texts, 512).shape
        logits_per_image = (scale * images @ texts.t()).detach()
        logits_per_text = logits_per_image.t().detach()
        for logits in (logits_per_image, logits_per_text):
            ranking = torch.argsort(logits, descending=True)
            place = torch.where(ranking == torch.arange(len(texts), device="cuda").view(-1, 1), 1, 0).argmax(1)
    return place.shape


# Bins of the piecewise linear embeddings are the quantiles of each column.
# A sort of all columns at once: its values, its indices in int64 and its scratch, for a few numbers.
@expected("sort_temporaries", fix=r"\.cpu\(\)|on the host|split|chunk|sample|column", thread="yandex-research/rtdl-num-embeddings#18")
def bins_by_quantile(fixed=False, n_bins=48):
    def compute_bins(X):
        edges = torch.linspace(0.0, 1.0, n_bins + 1, device=X.device)
        return [column.unique() for column in torch.quantile(X, edges, dim=0).T]

    X_train = torch.randn(400_000, 100)
    bins = compute_bins(X_train if fixed else X_train.to("cuda"))
    model = nn.Sequential(nn.Linear(100, 256), nn.ReLU(), nn.Linear(256, 1)).cuda()
    model(X_train[:256].cuda()).mean().backward()
    return len(bins)


# Both have one number for each sample, in different shapes.
@expected("all_pairs", fix="squeeze|view", thread="pytorch/pytorch#2225")
def sum_of_wrong_shapes(fixed=False):
    class FactorizationMachine(nn.Module):
        def __init__(self, users=20_000, items=5_000, width=16):
            super().__init__()
            self.user, self.item = nn.Embedding(users, width), nn.Embedding(items, width)
            self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)

        def forward(self, user, item):
            interaction = torch.bmm(self.user(user)[:, None], self.item(item)[:, :, None])
            bias = self.user_bias(user) + self.item_bias(item)
            return (interaction.squeeze(2) if fixed else interaction) + bias

    model = FactorizationMachine().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    users, items, ratings = torch.zeros(100_000, dtype=torch.long), torch.zeros(100_000, dtype=torch.long), torch.zeros(100_000)
    for user, item, rating in DataLoader(TensorDataset(users, items, ratings), batch_size=20_000):
        predicted = model(user.cuda(), item.cuda()).squeeze()
        loss = (predicted - rating.cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# For each anchor and positive, the nearest negative that is farther away.
# Three of a batch at once: memory with the third power of the batch.
@expected("all_pairs", fix="split|chunk|batch", thread="huggingface/sentence-transformers#4026")
def semi_hard_triplets(fixed=False):
    class BatchSemiHardTripletLoss(nn.Module):
        def forward(self, embeddings, labels, margin=5.0):
            dist = torch.cdist(embeddings, embeddings)
            adjacent = labels[:, None] == labels
            n = len(labels)
            if fixed:
                farthest = dist.masked_fill(adjacent, 0).amax(1, keepdim=True)
                return F.relu(dist - farthest + margin).mean()
            tile = dist.repeat([n, 1])
            mask = ~adjacent.repeat([n, 1]) & (tile > dist.t().reshape(-1, 1))
            outside = tile.masked_fill(~mask, 1e9).amin(1).reshape(n, n).t()
            return F.relu(dist - outside + margin)[:1].mean()

    encoder = nn.Sequential(nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 256)).cuda()
    optimizer = torch.optim.AdamW(encoder.parameters(), lr=2e-5)
    loss_of = BatchSemiHardTripletLoss()
    sentences = DataLoader(TensorDataset(torch.randn(2048, 768), torch.arange(2048) // 4), batch_size=512)
    for features, labels in sentences:
        loss = loss_of(encoder(features.cuda()), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# The second twenty.

# A trial that fails is noted, and the search goes on.
@expected("caught_traceback", fix=r"outside|after the except|\bdel\b|str\(|traceback", thread="pytorch/pytorch#10348", memory=900)
def errors_of_trials(fixed=False):
    class NeuralNetClassifier:
        def fit(self, width, X, y):
            module = nn.Sequential(nn.Linear(1024, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10))
            module.cuda()
            optimizer = torch.optim.Adam(module.parameters())
            for batch, labels in DataLoader(TensorDataset(X, y), batch_size=1024):
                scores = module(batch.cuda())
                loss = F.cross_entropy(scores, labels.cuda())
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                if labels.max() >= 10 or width > 1000:
                    raise ValueError(f"no convergence with {width}")

    X, y = torch.randn(4096, 1024), torch.zeros(4096, dtype=torch.long)
    failed = {}
    for number, width in enumerate([2048, 2304, 2560, 2816, 3072, 3328, 3584, 3840, 4096]):
        try:
            NeuralNetClassifier().fit(width, X, y)
        except ValueError as error:
            failed[number] = str(error) if fixed else error
    return len(failed)


# Who sends and who receives is told to the network by two matrices, a row for each edge of a fully connected graph.
class InteractionNetwork(nn.Module):
    def __init__(self, nodes, width=32, by_index=False):
        super().__init__()
        self.node, self.edge, self.out = nn.Linear(4, width), nn.Linear(2 * width, width), nn.Linear(width, 4)
        pairs = (torch.ones(nodes, nodes) - torch.eye(nodes)).nonzero()
        self.nodes, self.by_index = nodes, by_index
        self.register_buffer("receivers", pairs[:, 0] if by_index else F.one_hot(pairs[:, 0], nodes).float())
        self.register_buffer("senders", pairs[:, 1] if by_index else F.one_hot(pairs[:, 1], nodes).float())

    def forward(self, x):
        x = torch.relu(self.node(x))
        if self.by_index:
            edges = torch.relu(self.edge(torch.cat([x[self.senders], x[self.receivers]], 1)))
            return self.out(x.new_zeros(self.nodes, x.shape[1]).index_add(0, self.receivers, edges))
        edges = torch.relu(self.edge(torch.cat([self.senders @ x, self.receivers @ x], 1)))
        return self.out(self.receivers.t() @ edges)


@expected("large_buffers", fix="sparse|index|scatter", thread="ethanfetaya/NRI#19", memory=900)
def edges_as_one_hot(fixed=False, nodes=450):
    model = InteractionNetwork(nodes, by_index=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(2):
        state = torch.randn(nodes, 4).cuda()
        loss = F.mse_loss(model(state), state)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Every head with every relation and every tail.
@expected("kept_tensors", fix="split|chunk|top|batch", thread="pykeen/pykeen#96")
def scores_of_all_triples(fixed=False):
    class DistMult(nn.Module):
        def __init__(self, entities=4000, relations=18, width=64):
            super().__init__()
            self.entity, self.relation = nn.Embedding(entities, width), nn.Embedding(relations, width)

        def score_t(self, relation):
            return (self.entity.weight * self.relation.weight[relation]) @ self.entity.weight.t()

        def score_all_triples(self, k=None):
            scores = []
            with torch.no_grad():
                for relation in range(self.relation.num_embeddings):
                    found = self.score_t(relation)
                    scores.append(found.flatten().topk(k).values if k else found)
            return torch.stack(scores)

    model = DistMult().cuda()
    model.eval()
    return model.score_all_triples(k=1000 if fixed else None).shape


# The picture is what is trained, and it is a large one.
class StyleLoss(nn.Module):
    def __init__(self, layers, content, style):
        super().__init__()
        self.layers = layers
        with torch.no_grad():
            self.content, self.grams = self.features(content)[2], [self.gram(f) for f in self.features(style)]

    def features(self, x):
        found = []
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.ReLU):
                found.append(x)
        return found

    def gram(self, features):
        flat = features.flatten(2)
        return flat @ flat.transpose(1, 2) / flat.shape[1] / flat.shape[2]

    def forward(self, picture):
        features = self.features(picture)
        style = sum(F.mse_loss(self.gram(f), gram) for f, gram in zip(features, self.grams))
        return F.mse_loss(features[2], self.content) + 1e6 * style


@expected("many_rows", fix="half|small|crop|checkpoint|autocast", thread="ray075hl/DeepPhotoStyle_pytorch#1")
def style_of_large_image(fixed=False):
    before, layers = 3, []
    for after in (64, 64, "M", 128, 128, "M", 256, 256):
        layers += [nn.MaxPool2d(2)] if after == "M" else [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
        before = before if after == "M" else after
    vgg = nn.Sequential(*layers).cuda().eval().requires_grad_(False)
    side = 256 if fixed else 768
    content, style = torch.rand(1, 3, side, side).cuda(), torch.rand(1, 3, side, side).cuda()
    loss_of = StyleLoss(vgg, content, style)
    picture = content.clone().requires_grad_()
    optimizer = torch.optim.Adam([picture], lr=0.02)
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(picture)
        loss.backward()
        optimizer.step()


# What is logged at the end of the epoch is put aside in each step.
@expected("graph_of_earlier_steps", fix="detach", thread="sktime/pytorch-forecasting#1924")
def step_outputs_with_graph(fixed=False):
    class TemporalNetwork(nn.Module):
        def __init__(self, width=128):
            super().__init__()
            self.embed, self.encoder = nn.Linear(8, width), nn.LSTM(width, width, batch_first=True)
            self.attention, self.output = nn.MultiheadAttention(width, 4, batch_first=True), nn.Linear(width, 7)
            self.validation_step_outputs = []

        def forward(self, x):
            hidden, _ = self.encoder(self.embed(x))
            attended, _ = self.attention(hidden, hidden, hidden, need_weights=False)
            return self.output(attended + hidden)

        def step(self, x, y):
            prediction = self(x)
            loss = torch.maximum(0.5 * (y[..., None] - prediction), -0.5 * (y[..., None] - prediction)).mean()
            log = {"loss": loss, "prediction": prediction, "n_samples": len(x)}
            self.validation_step_outputs.append({k: v.detach() if fixed and torch.is_tensor(v) else v for k, v in log.items()})
            return loss

    model = TemporalNetwork().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.03)
    loader = DataLoader(TensorDataset(torch.randn(2560, 120, 8), torch.zeros(2560, 120)), batch_size=64)
    for x, y in loader:
        loss = model.step(x.cuda(), y.cuda())
        optimizer.zero_grad()
        (loss / 1).backward(retain_graph=not fixed)
        optimizer.step()
    return len(model.validation_step_outputs)


# Beside the loss, a metric with a network of its own is updated in training.
@expected("graph_of_earlier_steps", fix="no_grad|detach", thread="Lightning-AI/torchmetrics#2093")
def perceptual_metric_in_training(fixed=False):
    class PerceptualSimilarity(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(block(3, 32), block(32, 32), nn.MaxPool2d(2), block(32, 64)).eval()
            self.register_buffer("sum_scores", torch.zeros(()))
            self.total = 0

        def update(self, first, second):
            distance = (self.net(first) - self.net(second)).square().mean((1, 2, 3))
            self.sum_scores = self.sum_scores + distance.sum()
            self.total += len(first)

    restorer = nn.Sequential(block(3, 24), nn.Conv2d(24, 3, 3, padding=1)).cuda()
    lpips = PerceptualSimilarity().cuda()
    optimizer = torch.optim.Adam(restorer.parameters())
    for noisy, clean in DataLoader(TensorDataset(torch.randn(240, 3, 64, 64), torch.randn(240, 3, 64, 64)), batch_size=8):
        noisy, clean = noisy.cuda(), clean.cuda()
        restored = restorer(noisy)
        loss = F.l1_loss(restored, clean)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with no_grad_if(fixed):
            lpips.update(restored.detach().clamp(-1, 1), clean)
    return (lpips.sum_scores / lpips.total).item()


# Training takes mini-batches of graphs; validation is one forward pass over the large one.
@expected("evaluation_keeps_graphs", fix="no_grad", thread="dmlc/dgl#745")
def validation_of_large_graph(fixed=False):
    class GraphSAGE(nn.Module):
        def __init__(self, width=256):
            super().__init__()
            widths = (64, width), (width, width), (width, 16)
            self.layers = nn.ModuleList(nn.Linear(2 * before, after) for before, after in widths)

        def forward(self, x, source, target):
            for number, layer in enumerate(self.layers):
                degree = torch.ones(len(x), 1, device=x.device)
                mean = torch.zeros_like(x).index_add(0, target, x[source]) / degree
                x = layer(torch.cat([x, mean], 1))
                x = F.dropout(F.relu(x), 0.5, self.training) if number < 2 else x
            return x

    def graph(nodes, edges):
        ends = torch.randint(nodes, (2, edges)).cuda()
        return torch.randn(nodes, 64).cuda(), ends[0], ends[1], torch.zeros(nodes, dtype=torch.long).cuda()

    model = GraphSAGE().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x, source, target, labels = graph(10_000, 40_000)
    for _ in range(4):
        loss = F.cross_entropy(model(x, source, target), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    x, source, target, labels = graph(110_000, 160_000)
    model.eval()
    with no_grad_if(fixed):
        logits = model(x, source, target)
        return (logits.argmax(1) == labels).float().mean().item()


# Latents of all images of a batch are decoded in one call, at the very end.
@expected("batch_without_gradients", fix="split|chunk|one at a time|batch", thread="AUTOMATIC1111/stable-diffusion-webui#5165")
def images_decoded_as_batch(fixed=False):
    unet = nn.Sequential(nn.Conv2d(4, 64, 3, padding=1), nn.SiLU(), nn.Conv2d(64, 4, 3, padding=1)).cuda().half().eval()
    first_stage = Decoder(64).cuda().half().eval()

    @torch.no_grad()
    def txt2img(batch_size, steps=10):
        x = torch.randn(batch_size, 4, 48, 48, device="cuda", dtype=torch.half)
        for _ in range(steps):
            conditioned, unconditioned = unet(torch.cat([x, x])).chunk(2)
            x = x - 0.1 * (unconditioned + 7.5 * (conditioned - unconditioned))
        if fixed:
            samples = torch.cat([first_stage(part).cpu() for part in x.split(1)])
        else:
            samples = first_stage(x)
        samples = torch.clamp((samples.float() + 1) / 2, 0, 1)
        return [255 * sample.cpu() for sample in samples]

    return len(txt2img(48))


# The layer computes its backward from its output, and puts that on the context.
# The node holds what holds the node; no collector sees through it.
@expected("output_on_ctx", fix="save_for_backward", thread="pytorch/pytorch#25340", memory=400)
def output_saved_on_ctx(fixed=False):
    class Exponential(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            if fixed:
                ctx.save_for_backward(y)
            else:
                ctx.y = y
            return y

        @staticmethod
        def backward(ctx, grad):
            y, = ctx.saved_tensors if fixed else (ctx.y,)
            return grad * y

    class Flow(nn.Module):
        def __init__(self, width=1024):
            super().__init__()
            self.scale, self.shift = nn.Linear(width, width), nn.Linear(width, width)

        def forward(self, x):
            return x * Exponential.apply(torch.tanh(self.scale(x))) + self.shift(x)

    model = nn.Sequential(Flow(), Flow()).cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for (x,) in DataLoader(TensorDataset(torch.randn(40_000, 1024)), batch_size=1000):
        loss = model(x.cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# A non-local block right after the first convolutions.
class NonLocalBlock(nn.Module):
    def __init__(self, channels, subsample=1):
        super().__init__()
        self.theta, self.phi, self.g = (nn.Conv2d(channels, channels // 2, 1) for _ in range(3))
        self.out, self.pool = nn.Conv2d(channels // 2, channels, 1), nn.MaxPool2d(subsample)

    def forward(self, x):
        theta = self.theta(x).flatten(2).transpose(1, 2)
        phi, g = (self.pool(layer(x)).flatten(2) for layer in (self.phi, self.g))
        weights = F.softmax(torch.matmul(theta, phi), dim=-1)
        y = torch.matmul(weights, g.transpose(1, 2)).transpose(1, 2)
        return x + self.out(y.unflatten(2, x.shape[2:]))


@expected("attention_scores", fix="scaled_dot_product_attention|SDPA|pool|subsampl", thread="AlexHex7/Non-local_pytorch#46")
def non_local_on_low_level(fixed=False):
    model = nn.Sequential(block(3, 32), nn.MaxPool2d(2), block(32, 64), NonLocalBlock(64, 8 if fixed else 1), nn.MaxPool2d(2),
                          block(64, 64), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(torch.randn(16, 3, 144, 144), torch.zeros(16, dtype=torch.long))
    for images, labels in DataLoader(data, batch_size=4):
        loss = F.cross_entropy(model(images.cuda()), labels.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Costs of all queries of the batch to all targets of the batch, though each image is matched by itself.
@expected("all_pairs", fix="split|chunk", thread="facebookresearch/detr#606")
def matcher_of_all_targets(fixed=False):
    class HungarianMatcher:
        @torch.no_grad()
        def __call__(self, logits, boxes, targets):
            if fixed:
                return [self.cost(l, b, [t]).argmin(0).cpu() for l, b, t in zip(logits, boxes, targets)]
            cost = self.cost(logits.flatten(0, 1), boxes.flatten(0, 1), targets)
            cost = cost.view(*logits.shape[:2], -1).cpu()
            return [c[i].argmin(0) for i, c in enumerate(cost.split([len(t["boxes"]) for t in targets], -1))]

        def cost(self, logits, boxes, targets):
            ids, wanted = torch.cat([t["labels"] for t in targets]), torch.cat([t["boxes"] for t in targets])
            of_class, of_box = -logits.softmax(-1)[:, ids], torch.cdist(boxes, wanted, p=1)
            top_left = torch.max(boxes[:, None, :2], wanted[:, :2])
            bottom_right = torch.min(boxes[:, None, 2:], wanted[:, 2:])
            inside = (bottom_right - top_left).clamp(min=0).prod(-1)
            union = boxes[:, 2:].prod(-1)[:, None] + wanted[:, 2:].prod(-1) - inside
            return 5 * of_box + of_class - 2 * inside / union

    backbone = nn.Sequential(nn.Linear(256, 256), nn.ReLU()).cuda()
    to_class, to_box = nn.Linear(256, 92).cuda(), nn.Linear(256, 4).cuda()
    for _ in range(2):
        queries = backbone(torch.randn(32, 300, 256).cuda())
        targets = [{"labels": torch.zeros(180, dtype=torch.long).cuda(), "boxes": torch.rand(180, 4).cuda()} for _ in range(32)]
        indices = HungarianMatcher()(to_class(queries), to_box(queries).sigmoid(), targets)
    return len(indices)


# All rows of a Jacobian in one sweep.
@expected("vectorized_over_all", fix="chunk_size", thread="pytorch/functorch#1058")
def jacobian_in_one_sweep(fixed=False):
    points, knots = torch.rand(1200, 2, device="cuda"), torch.rand(300, 2, device="cuda")

    def residual(inputs):
        scale, weights = inputs[0].exp(), inputs[1:]
        kernel = torch.exp(-(points[:, None] - knots).square().sum(-1) / scale)
        return torch.tanh(kernel @ weights) - points[:, 0]

    inputs = torch.randn(301, device="cuda")
    for _ in range(3):
        jacobian = torch.func.jacrev(residual, chunk_size=40 if fixed else None)(inputs)
        inputs = inputs - 0.1 * jacobian.T @ residual(inputs)
    return jacobian.shape


# Images that the generator made before are shown to the discriminator again.
@expected("graph_of_earlier_steps", fix="detach", thread="junyanz/pytorch-CycleGAN-and-pix2pix#512")
def image_pool_with_graph(fixed=False):
    class ImagePool:
        def __init__(self, pool_size):
            self.pool_size, self.images = pool_size, []

        def query(self, images):
            if len(self.images) < self.pool_size:
                self.images.append(images)
                return images
            place = random.randrange(self.pool_size)
            old, self.images[place] = self.images[place], images
            return old

    netG = nn.Sequential(block(3, 32), block(32, 32), nn.Conv2d(32, 3, 3, padding=1), nn.Tanh()).cuda()
    netD = nn.Sequential(nn.Conv2d(3, 32, 4, 2), nn.LeakyReLU(0.2), nn.Conv2d(32, 1, 4, 2)).cuda()
    of_G, of_D = torch.optim.Adam(netG.parameters(), lr=2e-4), torch.optim.Adam(netD.parameters(), lr=2e-4)
    pool = ImagePool(50)
    for step in range(100):
        real_A, real_B = torch.randn(1, 3, 256, 256).cuda(), torch.randn(1, 3, 256, 256).cuda()
        fake_B = netG(real_A)
        pooled = pool.query(fake_B.detach() if fixed else fake_B)
        real, fake = netD(real_B), netD(pooled.detach())
        of_D.zero_grad()
        (F.mse_loss(real, torch.ones_like(real)) + F.mse_loss(fake, torch.zeros_like(fake))).backward()
        of_D.step()
        if step % 5 == 4:
            score = netD(netG(real_A))
            of_G.zero_grad()
            F.mse_loss(score, torch.ones_like(score)).backward()
            of_G.step()


# The auxiliary phase takes a sixteenth of all that was seen: many images.
@expected("larger_step", fix="half|batch|accumul|checkpoint|autocast", thread="openai/phasic-policy-gradient#2")
def auxiliary_phase(fixed=False):
    class Impala(nn.Module):
        def __init__(self):
            super().__init__()
            stage = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.MaxPool2d(3, 2, 1), nn.ReLU(),
                                               nn.Conv2d(b, b, 3, padding=1), nn.ReLU(), nn.Conv2d(b, b, 3, padding=1))
            self.body = nn.Sequential(stage(3, 16), stage(16, 32), stage(32, 32), nn.Flatten(), nn.ReLU(), nn.Linear(2048, 256))
            self.policy, self.value = nn.Linear(256, 15), nn.Linear(256, 1)

        def forward(self, observations):
            hidden = torch.relu(self.body(observations))
            return self.policy(hidden), self.value(hidden)

    agent = Impala().cuda()
    optimizer = torch.optim.Adam(agent.parameters(), lr=5e-4)
    rollout = torch.zeros(8192, 3, 64, 64, dtype=torch.uint8)

    def update(indices):
        logits, values = agent(rollout[indices].cuda().float() / 255)
        optimizer.zero_grad()
        (values.square().mean() - logits.log_softmax(-1).mean()).backward()
        optimizer.step()

    for indices in torch.randperm(len(rollout)).split(128)[:4]:
        update(indices)
    for indices in torch.randperm(len(rollout)).split(256 if fixed else len(rollout) // 4):
        update(indices)


# Each frame of the sound with each of the letters so far, and the whole vocabulary for all of them.
@expected("logits", fix="chunk|split|half|batch|prun|sampl", thread="NVIDIA-NeMo/Speech#5216", memory=800)
def joint_of_transducer(fixed=False):
    class Transducer(nn.Module):
        def __init__(self, vocabulary, width=256):
            super().__init__()
            self.encoder = nn.LSTM(80, width, batch_first=True)
            self.embedding, self.predictor = nn.Embedding(vocabulary, width), nn.LSTM(width, width, batch_first=True)
            self.joint = nn.Sequential(nn.Tanh(), nn.Linear(width, vocabulary))

        def forward(self, sound, text):
            encoded, _ = self.encoder(sound)
            predicted, _ = self.predictor(self.embedding(text))
            return self.joint(encoded[:, :, None] + predicted[:, None]).log_softmax(-1)

    model = Transducer(1024).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    sounds, texts = torch.randn(16, 200, 80), torch.zeros(16, 30, dtype=torch.long)
    for sound, text in DataLoader(TensorDataset(sounds, texts), batch_size=1 if fixed else 8):
        scores = model(sound.cuda(), text.cuda())
        blank, emit = scores[..., 0], scores.gather(-1, text.cuda()[:, None, :, None].expand(-1, scores.shape[1], -1, 1))
        loss = -(blank.mean() + emit.mean())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Gradients of the last batch are still there when validation begins, with a batch that is larger.
# Gradients that nobody reads any more.
@expected("gradients_kept", fix="zero_grad|set_to_none", thread="speechbrain/speechbrain#1739")
def gradients_during_validation(fixed=False):
    class Brain:
        def __init__(self, model):
            self.model = model.cuda()
            self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def fit_batch(self, batch):
            self.optimizer.zero_grad()
            loss = self.model(batch.cuda()).square().mean()
            loss.backward()
            self.optimizer.step()

        def fit(self, train_set, valid_set):
            for batch in train_set:
                self.fit_batch(batch)
            if fixed:
                self.optimizer.zero_grad(set_to_none=True)
            with torch.no_grad():
                return sum(self.model(batch.cuda()).square().mean().cpu() for batch in valid_set)

    model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.ReLU()) for _ in range(6)])
    Brain(model).fit(torch.randn(256, 4096).split(64), torch.randn(14_000, 4096).split(7_000))


# All checkpoints of a run are evaluated, one after the other.
@expected("several_models", fix=r"\bdel\b|None", thread="ThilinaRajapakse/pytorch-transformers-classification#1", memory=640)
def checkpoints_evaluated(fixed=False):
    files = []
    for _ in range(3):
        files.append(io.BytesIO())
        torch.save(language_model(1024, 6).state_dict(), files[-1])

    def from_pretrained(file):
        file.seek(0)
        model = language_model(1024, 6)
        model.load_state_dict(torch.load(file))
        return model

    def evaluate(model):
        model.eval()
        with torch.no_grad():
            return [model(batch.cuda()).mean(1).cpu() for batch in torch.randn(8, 64, 1024).split(4)]

    results, model = {}, None
    for number, file in enumerate(files):
        if fixed:
            model = None
        model = from_pretrained(file).to("cuda")
        results[number] = evaluate(model)
    return len(results)


# The network was trained with small patches; this is a photo.
@expected("batch_without_gradients", fix="split|chunk|crop|tile|patch", thread="Guaishou74851/AdcSR#7")
def picture_upscaled_at_once(fixed=False, scale=4):
    class Upscaler(nn.Module):
        def __init__(self, width=64):
            super().__init__()
            self.head = nn.Conv2d(3, width, 3, padding=1)
            self.body = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
                                                    nn.Conv2d(width, width, 3, padding=1)) for _ in range(4))
            self.tail = nn.Sequential(nn.Conv2d(width, width * scale ** 2, 3, padding=1), nn.PixelShuffle(scale),
                                      nn.Conv2d(width, 3, 3, padding=1))

        def forward(self, x):
            x = self.head(x)
            for layer in self.body:
                x = x + layer(x)
            return self.tail(x)

    model = Upscaler().cuda().eval()
    photo = torch.rand(1, 3, 300, 375)
    with torch.no_grad():
        if not fixed:
            return model(photo.cuda()).clamp(0, 1).cpu().shape
        rows = []
        for part in photo.split(64, 2):
            rows.append(torch.cat([model(patch.cuda()).clamp(0, 1).cpu() for patch in part.split(64, 3)], 3))
        return torch.cat(rows, 2).shape


# The large tensor fitted in the first step; in the second, its segment has been cut up.
@expected("fragmentation", fix="expandable_segments|max_split_size|empty_cache", thread="pytorch/pytorch#35901", memory=1060)
def large_tensor_of_second_step(fixed=False):
    class Acoustic(nn.Module):
        def __init__(self, width=512, vocabulary=512):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(8))
            self.joint = nn.Linear(width, vocabulary, bias=False)

        def forward(self, sound, letters):
            for layer in self.layers:
                sound = torch.relu(layer(sound))
            return self.joint(sound), letters

    model = Acoustic().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step, (frames, letters) in enumerate([(900, 24), (1700, 12), (2100, 10), (2600, 8)]):
        if fixed:
            torch.cuda.empty_cache()
        encoded, _ = model(torch.randn(4, frames, 512).cuda(), letters)
        joint = encoded[:, :, None] + torch.randn(4, 1, letters, 512, device="cuda")
        loss = joint.logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del encoded, joint, loss


# What the encoder found is copied for each beam, and so are the keys and values that each layer makes of it.
# The same encoder output once for each beam.
@expected("repeated_copies", fix="expand|beam", thread="facebookresearch/fairseq#1957")
def encoder_copied_for_beams(fixed=False):
    class DecoderLayer(nn.Module):
        def __init__(self, width=512):
            super().__init__()
            self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

        def static_kv(self, encoded):
            return self.k(encoded), self.v(encoded)

        def forward(self, x, kv, beams):
            k, v = kv
            q = self.q(x).view(len(k), -1, x.shape[-1])
            return x + self.out(F.scaled_dot_product_attention(q, k, v)).reshape(x.shape)

    layers = nn.ModuleList(DecoderLayer() for _ in range(6)).cuda().eval()
    words = nn.Embedding(2000, 512).cuda()

    @torch.no_grad()
    def generate(encoded, beams, steps=20):
        batch = len(encoded)
        if not fixed:
            encoded = encoded.repeat_interleave(beams, 0)
        static = [layer.static_kv(encoded) for layer in layers]
        last = torch.zeros(batch * beams, 1, dtype=torch.long, device="cuda")
        for _ in range(steps):
            x = words(last)
            for layer, kv in zip(layers, static):
                x = layer(x, kv, beams)
            last = (x[:, -1] @ words.weight.t()).argmax(-1, keepdim=True)
        return last

    return generate(torch.randn(12, 700, 512, device="cuda"), beams=5).shape
