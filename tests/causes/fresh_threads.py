"""Programs after public threads, each written as its asker had it: a model of its own, its loader, its loop and the mistake. What
is wrong with each, and what cured it in the thread, was written down in fresh_rows.py before the first run, by someone who had
not read the rules. The form is that of patterns.py.
"""
import collections
import copy
import io
import pickle
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from patterns import no_grad_if


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
def windows_stay_on_card(fixed=False, classes=24, size=48, step=24):
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
def trials_of_search(fixed=False):
    class Trainer:
        def __init__(self, model_init):
            self.model_init, self.model, self.optimizer = model_init, None, None

        def train(self, learning_rate):
            self.model = self.model_init().to("cuda")
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=learning_rate)
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


def optimizer_state_onto_card(fixed=False):
    first = language_model().to("cuda")
    optimizer = torch.optim.AdamW(first.parameters(), lr=5e-5)
    first(torch.randn(1, 16, 768).cuda()).square().mean().backward()
    optimizer.step()
    weights_file, optimizer_file = io.BytesIO(), io.BytesIO()
    torch.save(first.state_dict(), weights_file)
    torch.save(optimizer.state_dict(), optimizer_file)
    del first, optimizer
    torch.cuda.empty_cache()
    weights_file.seek(0), optimizer_file.seek(0)

    model = language_model()
    model.load_state_dict(torch.load(weights_file, map_location="cpu"))
    model.to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5)
    optimizer.load_state_dict(torch.load(optimizer_file, map_location="cpu" if fixed else "cuda"))
    for _ in range(2):
        loss = model(torch.randn(1, 64, 768).cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# What was predicted in a fold is not needed in the next.
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
