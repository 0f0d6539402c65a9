"""Programs after public threads of ordinary users: candidates, own functions, tiles, callbacks, explanations, ranks, a critic, a notebook."""
import collections
import itertools
import json
import math
import random

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from expected import expected


# A validator scores the language models of its candidates on the same pages, and ranks them.

class CandidateTracker:
    """Remembers which candidate had which losses."""

    def __init__(self):
        self.losses = {}

    def on_evaluated(self, uid, losses):
        self.losses[uid] = losses

    def wins(self):
        table = dict.fromkeys(self.losses, 0)
        for a, b in itertools.combinations(self.losses, 2):
            for la, lb in zip(self.losses[a], self.losses[b]):
                table[a if la < lb else b] += 1
        return table


def make_pages(count, vocab, batch=2, length=1024):
    g = torch.Generator().manual_seed(17)
    return [torch.randint(0, vocab, (batch, length), generator=g) for _ in range(count)]


def build_candidate(uid):
    torch.manual_seed(uid)
    return GPT2LMHeadModel(GPT2Config(n_layer=12, n_embd=512, n_head=8, n_positions=1024, vocab_size=16_000))


def compute_candidate_losses(model, batches, device):
    model.to(device)
    model.eval()
    loss_fct = nn.CrossEntropyLoss()
    losses = []
    for batch in batches:
        try:
            inputs = batch.to(device)
            logits = model(inputs).logits
            shift_logits = logits[..., :-1, :].contiguous()
            shift_labels = inputs[..., 1:].contiguous()
            shift_logits = shift_logits.view(-1, model.config.vocab_size)
            shift_labels = shift_labels.view(-1)
            loss = loss_fct(shift_logits, shift_labels).item()
            losses.append(loss)
        except ValueError:
            losses.append(math.inf)
    return losses


@expected("evaluation_keeps_graphs", fix="no_grad", thread="macrocosm-os/pretraining#104", memory=1500)
def rank_candidate_models(fixed=False):
    """The losses of the candidates are only compared, and are computed with graphs of the whole model, each of which stays until the
    logits of the next page have theirs. Cured by: `torch.no_grad()` around what computes the losses.
    """
    tracker, pages = CandidateTracker(), make_pages(3, 16_000)
    losses_of = torch.no_grad()(compute_candidate_losses) if fixed else compute_candidate_losses
    random.shuffle(pages)
    for uid in (3, 8):
        model = build_candidate(uid)
        tracker.on_evaluated(uid, losses_of(model, pages, "cuda"))
        del model
        torch.cuda.empty_cache()
    return tracker.wins()


# Speech is recognized, and the scores of each frame are normalized by a function with a backward pass of its own.

class FramedUtterances(Dataset):
    def __init__(self, count, frames=500, feats=80, vocab=2000):
        self.count, self.frames, self.feats, self.vocab = count, frames, feats, vocab

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.randn(self.frames, self.feats), torch.randint(0, self.vocab, (self.frames,))


class NormalizeScoresFunction(torch.autograd.Function):
    """Normalizes along the arcs that leave one state."""

    @staticmethod
    def forward(ctx, scores, use_log, fixed):
        m = scores.max(dim=-1, keepdim=True).values
        z = (scores - m).exp_().sum(dim=-1, keepdim=True).log_()
        out = scores - (z + m)
        ctx.use_log = use_log
        if fixed:
            ctx.out = out.detach()
        else:
            ctx.out = out  # save for backward
        return out

    @staticmethod
    def backward(ctx, out_grad):
        probs = ctx.out.exp()
        grad = out_grad - probs * out_grad.sum(dim=-1, keepdim=True)
        return grad, None, None


class FrameEncoderOfSpeech(nn.Module):
    def __init__(self, feats=80, dim=256, vocab=2000):
        super().__init__()
        self.subsample = nn.Sequential(nn.Linear(feats, dim), nn.ReLU())
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 4, 4 * dim, dropout=0.0, batch_first=True) for _ in range(3))
        self.out = nn.Linear(dim, vocab)

    def forward(self, x):
        x = self.subsample(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def loss_of_frames(model, x, y, fixed):
    p_scores = NormalizeScoresFunction.apply(model(x), True, fixed)
    return -p_scores.gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()


@torch.no_grad()
def validate_frames(model, loader, fixed):
    model.eval()
    losses = [loss_of_frames(model, x.cuda(), y.cuda(), fixed).item() for x, y in loader]
    return sum(losses) / len(losses)


@expected("output_on_ctx", fix="save_for_backward|detach", thread="k2-fsa/k2#706", memory=1200)
def train_on_normalized_scores(fixed=False):
    """`ctx.out = out` puts the output itself on the context: the output refers to its node, the node to the context and the context to the
    output, so that the scores of each step stay. Cured by: `ctx.out = out.detach()`.
    """
    train_dl = DataLoader(FramedUtterances(16 * 15), batch_size=16, shuffle=True)
    valid_dl = DataLoader(FramedUtterances(32), batch_size=16)
    model = FrameEncoderOfSpeech().cuda()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.ExponentialLR(optim, 0.9)
    valid = []
    for epoch in range(2):
        model.train()
        total = 0.0
        for x, y in train_dl:
            x, y = x.cuda(), y.cuda()
            optim.zero_grad()
            loss = loss_of_frames(model, x, y, fixed)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optim.step()
            total += loss.item()
        sched.step()
        valid.append(validate_frames(model, valid_dl, fixed))
    return valid


# Segmentation with a frozen backbone: crops are trained on, and wide images are cut into tiles for the validation.

class LabelledViews(Dataset):
    def __init__(self, count, size, classes=32):
        self.count, self.size, self.classes = count, size, classes

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.randn(3, *self.size), torch.randint(0, self.classes, self.size)


class FrozenPatchBackbone(nn.Module):
    def __init__(self, dim=384, depth=6, patch=16):
        super().__init__()
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 6, 4 * dim, dropout=0.0, batch_first=True, norm_first=True) for _ in range(depth))

    def forward(self, x):
        x = self.embed(x)
        b, c, h, w = x.shape
        t = x.flatten(2).transpose(1, 2)
        for layer in self.layers:
            t = layer(t)
        return t.transpose(1, 2).reshape(b, c, h, w)


class LinearSegmenter(nn.Module):
    def __init__(self, classes=32):
        super().__init__()
        self.backbone = FrozenPatchBackbone()
        self.backbone.requires_grad_(False)
        self.head = nn.Conv2d(384, classes, 1)

    def forward(self, x):
        with torch.no_grad():
            f = self.backbone(x)
        return F.interpolate(self.head(f), size=x.shape[-2:], mode="bilinear")


def cut_into_crops(images, crop, stride):
    crops, origins = [], []
    for i, img in enumerate(images):
        h, w = img.shape[-2:]
        for top in range(0, h - crop + 1, stride):
            for left in range(0, w - crop + 1, stride):
                crops.append(img[:, top:top + crop, left:left + crop])
                origins.append((i, top, left))
    return torch.stack(crops), origins


class SumsOfCrops:
    def __init__(self, sizes, classes, crop, device):
        self.crop = crop
        self.sums = [torch.zeros(classes, h, w, device=device) for h, w in sizes]
        self.counts = [torch.zeros(1, h, w, device=device) for h, w in sizes]

    def add(self, crop_logits, origins):
        for logits, (i, top, left) in zip(crop_logits, origins):
            self.sums[i][:, top:top + self.crop, left:left + self.crop] += logits
            self.counts[i][:, top:top + self.crop, left:left + self.crop] += 1

    def mean(self):
        return [s.div_(c) for s, c in zip(self.sums, self.counts)]


@torch.no_grad()
def validate_wide_images(model, images, masks, batch_size, fixed, crop=512, stride=256):
    crops, origins = cut_into_crops(images, crop, stride)
    sizes = [tuple(img.shape[-2:]) for img in images]
    if fixed:
        merged = SumsOfCrops(sizes, 32, crop, images.device)
        for k in range(0, len(crops), batch_size):
            merged.add(model(crops[k:k + batch_size]), origins[k:k + batch_size])
    else:
        crop_logits = model(crops)
        merged = SumsOfCrops(sizes, 32, crop, images.device)
        merged.add(crop_logits, origins)
    hits = [(logits.argmax(0) == mask).sum().item() for logits, mask in zip(merged.mean(), masks)]
    return sum(hits), masks.numel()


@expected("larger_step", fix="part|split", thread="lightly-ai/lightly-train#880", memory=1800)
def segment_wide_views(fixed=False):
    """The validation has a batch of one image, but all tiles of the wide image go through the model at once, and the logits of all of them
    have the size of the tiles. Cured by: as many tiles at a time as the batch has in training, each part added to the sums at once.
    """
    batch_size = 4
    model = LinearSegmenter().cuda()
    opt = torch.optim.AdamW(model.head.parameters(), lr=1e-3)
    model.train()
    for x, y in DataLoader(LabelledViews(12, (512, 512)), batch_size=batch_size, shuffle=True):
        loss = F.cross_entropy(model(x.cuda()), y.cuda())
        opt.zero_grad()
        loss.backward()
        opt.step()
    model.eval()
    correct = total = 0
    for x, y in DataLoader(LabelledViews(2, (768, 5120)), batch_size=1):
        c, t = validate_wide_images(model, x.cuda(), y.cuda(), batch_size, fixed)
        correct, total = correct + c, total + t
    return correct / total


# A forecasting model with a small trainer, whose predictions a callback gathers.

class WindowsOfSeries(Dataset):
    def __init__(self, count, enc=168, dec=24, feats=32):
        self.count, self.enc, self.dec, self.feats = count, enc, dec, feats

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        x = {"encoder_cont": torch.randn(self.enc, self.feats), "decoder_cont": torch.randn(self.dec, self.feats),
             "decoder_lengths": torch.tensor(self.dec)}
        return x, torch.randn(self.dec)


class QuantileForecaster(nn.Module):
    def __init__(self, feats=32, hidden=128, heads=4, quantiles=7):
        super().__init__()
        self.proj = nn.Linear(feats, hidden)
        self.encoder = nn.TransformerEncoderLayer(hidden, heads, 256, dropout=0.0, batch_first=True)
        self.attn = nn.MultiheadAttention(hidden, heads, batch_first=True)
        self.out = nn.Linear(hidden, quantiles)

    def forward(self, x):
        enc = self.encoder(self.proj(x["encoder_cont"]))
        dec = self.proj(x["decoder_cont"])
        ctx, w = self.attn(dec, enc, enc, need_weights=True, average_attn_weights=False)
        return {"prediction": self.out(dec + ctx), "encoder_attention": w, "encoder_output": enc}


class CountBatchesCallback:
    def __init__(self):
        self.seen = 0

    def on_predict_batch_end(self, model, outputs, batch):
        self.seen += 1

    def on_predict_epoch_end(self):
        pass


def detached_on_cpu(obj):
    return {k: v.detach().cpu() for k, v in obj.items()} if isinstance(obj, dict) else obj.detach().cpu()


class GatherPredictionsCallback:
    def __init__(self, fixed, mode="raw", return_x=False, return_y=False):
        self.fixed, self.mode, self.return_x, self.return_y = fixed, mode, return_x, return_y
        self.predictions, self.info, self.result = [], {"x": [], "y": []}, None

    def on_predict_batch_end(self, model, outputs, batch):
        x, y = batch
        processed = outputs if self.mode == "raw" else outputs["prediction"][..., 3]
        if self.fixed:
            processed, x, y = (detached_on_cpu(obj) for obj in (processed, x, y))
        self.predictions.append(processed)
        if self.return_x:
            self.info["x"].append(x)
        if self.return_y:
            self.info["y"].append(y)

    def on_predict_epoch_end(self):
        if self.mode == "raw":
            self.result = {k: torch.cat([p[k] for p in self.predictions]) for k in self.predictions[0]}
        else:
            self.result = torch.cat(self.predictions)


class ForecastTrainer:
    def __init__(self, device, callbacks=()):
        self.device, self.callbacks = device, list(callbacks)

    def move(self, batch):
        x, y = batch
        return {k: v.to(self.device) for k, v in x.items()}, y.to(self.device)

    def fit(self, model, loader):
        opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        model.to(self.device).train()
        for batch in loader:
            x, y = self.move(batch)
            err = y.unsqueeze(-1) - model(x)["prediction"]
            loss = torch.maximum(0.3 * err, -0.7 * err).mean()
            opt.zero_grad()
            loss.backward()
            opt.step()

    @torch.no_grad()
    def predict(self, model, loader):
        model.eval()
        for batch in loader:
            batch = self.move(batch)
            outputs = model(batch[0])
            for callback in self.callbacks:
                callback.on_predict_batch_end(model, outputs, batch)
        for callback in self.callbacks:
            callback.on_predict_epoch_end()


@expected("kept_tensors", fix="cpu", thread="sktime/pytorch-forecasting#2086", memory=2048)
def gather_raw_forecasts(fixed=False):
    """The callback appends the raw outputs of each batch, with the states of the encoder and its attention, and its data as well, all of
    them on the GPU. Cured by: `detach().cpu()` of what is appended.
    """
    collect = GatherPredictionsCallback(fixed, mode="raw", return_x=True, return_y=True)
    trainer = ForecastTrainer("cuda", [CountBatchesCallback(), collect])
    model = QuantileForecaster()
    trainer.fit(model, DataLoader(WindowsOfSeries(512), batch_size=128, shuffle=True))
    trainer.predict(model, DataLoader(WindowsOfSeries(256 * 32), batch_size=256))
    return {k: tuple(v.shape) for k, v in collect.result.items()}


# One picture is explained by Grad-CAM, and then a folder of pictures is classified.

class FolderOfPictures(Dataset):
    def __init__(self, count):
        self.count, self.pool = count, torch.randn(8, 3, 224, 224)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.pool[i % 8], i % 1000


class LayerGradCam:
    def __init__(self, model, fixed, layer_name="layer3"):
        self.model, self.fixed = model, fixed
        self.target_layer = dict(model.named_modules())[layer_name]
        self.activations = []
        self.gradients = []

    def _register(self):
        def forward_hook(module, inp, out):
            self.activations.append(out)

        def backward_hook(module, grad_in, grad_out):
            self.gradients.append(grad_out[0])

        self.handle_forward_hook = self.target_layer.register_forward_hook(forward_hook)
        self.handle_backward_hook = self.target_layer.register_full_backward_hook(backward_hook)

    def explain(self, image, target=None):
        self._register()
        self.model.zero_grad()
        logits = self.model(image)
        if target is None:
            target = logits.argmax(1)
        one_hot = F.one_hot(target, logits.shape[1]).float()
        logits.backward(one_hot)
        act, grad = self.activations[-1], self.gradients[-1]
        weight = grad.mean((2, 3), keepdim=True)
        cam = F.relu((weight * act).sum(1, keepdim=True))
        cam = F.interpolate(cam, image.shape[-2:], mode="bilinear")
        self.model.zero_grad()
        if self.fixed:
            self.handle_forward_hook.remove()
            self.handle_backward_hook.remove()
        return cam.detach().cpu()


def explain_by_methods(model, image, label, fixed, methods=("gradcam",)):
    return {method: LayerGradCam(model, fixed).explain(image, label) for method in methods if method == "gradcam"}


def predict_pictures(model, batch):
    with torch.no_grad():
        return F.softmax(model(batch), dim=1)


@expected("kept_tensors", fix="remove", thread="microsoft/tensorwatch#73", memory=1150)
def explain_then_classify(fixed=False):
    """The hook that Grad-CAM puts on a layer is never removed, so that each batch that is classified later adds its activations to the list
    of an explanation that ended. Cured by: the handles' `remove()` when the picture is explained.
    """
    model = torchvision.models.resnet50(weights=None).cuda().eval()
    image = torch.randn(1, 3, 224, 224).cuda()
    results = explain_by_methods(model, image, torch.tensor([239], device="cuda"), fixed)
    hits = total = 0
    for x, y in DataLoader(FolderOfPictures(32 * 40), batch_size=32):
        top = predict_pictures(model, x.cuda()).topk(5).indices.cpu()
        hits += (top == y[:, None]).any(1).sum().item()
        total += len(y)
    return hits / total, tuple(results["gradcam"].shape)


# Embeddings of the nodes of a graph predict its edges, and each edge held out is ranked among false ones.

class EdgesToPredict:
    def __init__(self, nodes=200_000, edges=400_000, feats=64):
        g = torch.Generator().manual_seed(0)
        self.nodes, self.feat = nodes, torch.randn(nodes, feats, generator=g)
        self.src, self.dst = torch.randint(0, nodes, (2, edges), generator=g)

    def test_edges(self, count):
        return torch.randint(0, self.nodes, (2, count), generator=torch.Generator().manual_seed(1))


class EdgeBatches:
    """Batches of true edges, each with negatives that its edges share."""

    def __init__(self, edges, nodes, batch_size, num_neg):
        self.edges, self.nodes, self.batch_size, self.num_neg = edges, nodes, batch_size, num_neg

    def __iter__(self):
        for i in range(0, self.edges.shape[1], self.batch_size):
            src, dst = self.edges[:, i:i + self.batch_size]
            yield src, dst, torch.randint(0, self.nodes, (self.num_neg,))


class NodeEncoder(nn.Module):
    def __init__(self, feats=64, hidden=64):
        super().__init__()
        self.w0, self.w1 = nn.Linear(feats, hidden), nn.Linear(hidden, hidden)

    def conv(self, lin, x, src, dst):
        msg = lin(x)[src]
        out = torch.zeros_like(x).index_add_(0, dst, msg)
        return F.relu(out + x)

    def forward(self, x, src, dst):
        x = self.conv(self.w0, x, src, dst)
        return self.conv(self.w1, x, src, dst)


class DotOfEdges(nn.Module):
    def forward(self, emb, src, dst, neg):
        s = emb[src]
        pos = (s * emb[dst]).sum(-1, keepdim=True)
        negs = s @ emb[neg].t()
        return pos, negs


def train_on_edges(encoder, decoder, g, feat, src, dst, steps=3):
    opt = torch.optim.Adam(encoder.parameters(), lr=1e-2)
    for _ in range(steps):
        emb = encoder(feat, src, dst)
        pick = torch.randint(0, len(src), (4096,)).cuda()
        pos, negs = decoder(emb, src[pick], dst[pick], torch.randint(0, g.nodes, (64,)).cuda())
        loss = F.softplus(-pos).mean() + F.softplus(negs).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()


def calc_ranking(pos, neg):
    return (neg >= pos).sum(dim=1) + 1


@torch.no_grad()
def predict_edges(encoder, decoder, loader, feat, src, dst):
    emb = encoder(feat, src, dst)
    pos_scores, neg_scores = [], []
    for s, d, neg in loader:
        pos, negs = decoder(emb, s.cuda(), d.cuda(), neg.cuda())
        pos_scores.append(pos)
        neg_scores.append(negs)
    return torch.cat([calc_ranking(p, n) for p, n in zip(pos_scores, neg_scores)])


@torch.no_grad()
def predict_ranks_of_edges(encoder, decoder, loader, feat, src, dst):
    emb = encoder(feat, src, dst)
    ranking = []
    for s, d, neg in loader:
        pos, negs = decoder(emb, s.cuda(), d.cuda(), neg.cuda())
        ranking.append(calc_ranking(pos, negs))
    return torch.cat(ranking)


@expected("kept_tensors", fix="only|cpu", thread="awslabs/graphstorm#161", memory=1300)
def rank_held_out_edges(fixed=False):
    """The scores of all edges and of all their negatives are kept until the evaluation, which needs one rank of each edge. Cured by: the
    ranks computed of each batch, and only they kept.
    """
    g = EdgesToPredict()
    encoder, decoder = NodeEncoder().cuda(), DotOfEdges().cuda()
    feat, src, dst = g.feat.cuda(), g.src.cuda(), g.dst.cuda()
    train_on_edges(encoder, decoder, g, feat, src, dst)
    loader = EdgeBatches(g.test_edges(700_000), g.nodes, 10_000, 1000)
    predict = predict_ranks_of_edges if fixed else predict_edges
    ranking = predict(encoder, decoder, loader, feat, src, dst)
    return (1.0 / ranking.float()).mean().item()


# Images are translated into another domain, and what the critic says is divided by the norm of its gradient.

def upload_domain(count, batch=4, size=256, shift=0.0):
    """The set is small, so that all batches are on the GPU."""
    return [(torch.rand(batch, 3, size, size) * 2 - 1 + shift).cuda() for _ in range(count)]


class DomainTranslator(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, ch, 7, padding=3), nn.InstanceNorm2d(ch), nn.ReLU(),
            nn.Conv2d(ch, 2 * ch, 3, 2, 1), nn.InstanceNorm2d(2 * ch), nn.ReLU(),
            nn.Conv2d(2 * ch, 2 * ch, 3, padding=1), nn.InstanceNorm2d(2 * ch), nn.ReLU(),
            nn.ConvTranspose2d(2 * ch, ch, 4, 2, 1), nn.ReLU(), nn.Conv2d(ch, 3, 7, padding=3), nn.Tanh())

    def forward(self, x):
        return self.net(x)


class SoftplusCritic(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, ch, 4, 2, 1), nn.Softplus(), nn.Conv2d(ch, 2 * ch, 4, 2, 1), nn.Softplus(),
            nn.Conv2d(2 * ch, 4 * ch, 4, 2, 1), nn.Softplus())
        self.head = nn.Linear(4 * ch, 1)

    def forward(self, x):
        return self.head(self.net(x).mean((2, 3)))


def normalize_gradient(net_D, x):
    """f / (|grad f| + |f|)"""
    x.requires_grad_(True)
    f = net_D(x)
    grad = torch.autograd.grad(f, [x], torch.ones_like(f), create_graph=True, retain_graph=True)[0]
    grad_norm = torch.norm(torch.flatten(grad, start_dim=1), p=2, dim=1).view(-1, 1)
    return f / (grad_norm + torch.abs(f))


class ReplayPool:
    def __init__(self, size=4):
        self.size, self.items = size, collections.deque()

    def query(self, img):
        self.items.append(img.detach())
        if len(self.items) <= self.size:
            return self.items[-1]
        return self.items.popleft().clone()


def train_translator_epoch(loader_A, loader_B, G, D, opt_G, opt_D, pool, fixed):
    for real_A, real_B in zip(loader_A, loader_B):
        D.requires_grad_(False)
        fake_B = G(real_A)
        loss_G = -normalize_gradient(D, fake_B).mean() + 5 * F.l1_loss(G(real_B), real_B)
        opt_G.zero_grad()
        loss_G.backward()
        opt_G.step()
        D.requires_grad_(True)
        pred_real = normalize_gradient(D, real_B.detach() if fixed else real_B)
        pred_fake = normalize_gradient(D, pool.query(fake_B))
        loss_D = -pred_real.mean() + pred_fake.mean()
        opt_D.zero_grad()
        loss_D.backward()
        opt_D.step()
        del fake_B, pred_real, pred_fake
    return loss_G.item(), loss_D.item()


@expected("kept_tensors", fix="grad = None|detach", thread="basiclab/GNGAN-PyTorch#2", memory=1400)
def train_normalized_critic(fixed=False):
    """`x.requires_grad_(True)` is done to the batch that the caller has, and the backward pass of the critic leaves a `.grad` on each batch
    of the list, which keeps it. Cured by: `real_B.detach()` given to the critic.
    """
    loader_A, loader_B = upload_domain(80), upload_domain(80, shift=0.1)
    G, D = DomainTranslator().cuda(), SoftplusCritic().cuda()
    opt_G = torch.optim.Adam(G.parameters(), lr=2e-4, betas=(0.5, 0.999))
    opt_D = torch.optim.Adam(D.parameters(), lr=2e-4, betas=(0.5, 0.999))
    pool = ReplayPool()
    return [train_translator_epoch(loader_A, loader_B, G, D, opt_G, opt_D, pool, fixed) for _ in range(2)]


# A notebook whose cells declare what they define: where one is edited, those that depend on it run again.

class NotebookCell:
    def __init__(self, name, fn, refs, defs):
        self.name, self.fn, self.refs, self.defs = name, fn, refs, defs


class NotebookKernel:
    def __init__(self, cells, fixed):
        self.cells, self.fixed, self.glbls, self.log = cells, fixed, {}, []

    def descendants(self, root):
        names, out = set(root.defs), [root]
        for cell in self.cells[self.cells.index(root) + 1:]:
            if names & set(cell.refs):
                out.append(cell)
                names |= set(cell.defs)
        return out

    def run_cell(self, cell):
        args = {k: self.glbls[k] for k in cell.refs}
        result = cell.fn(**args)
        self.glbls.update(result)
        self.log.append((cell.name, torch.cuda.memory_allocated()))

    def run_queue(self, queue):
        if self.fixed:
            for name in itertools.chain(*(cell.defs for cell in queue)):
                self.glbls.pop(name, None)
        for cell in queue:
            self.run_cell(cell)

    def edit(self, name, fn):
        cell = next(cell for cell in self.cells if cell.name == name)
        cell.fn = fn
        self.run_queue(self.descendants(cell))


def cell_settings():
    return {"settings": {"layers": 12, "dim": 768, "heads": 12, "max_new": 8}}


def cell_settings_edited():
    return {"settings": json.loads('{"layers": 12, "dim": 768, "heads": 12, "max_new": 16}')}


def cell_load_model(settings):
    torch.cuda.empty_cache()
    config = GPT2Config(n_layer=settings["layers"], n_embd=settings["dim"], n_head=settings["heads"])
    with torch.device("cuda"):
        model = GPT2LMHeadModel(config)
    model.eval()
    return {"model": model}


def cell_prompt():
    return {"prompt": torch.randint(0, 50257, (1, 64))}


def cell_generate(model, prompt, settings):
    ids = prompt.to("cuda")
    with torch.no_grad():
        for _ in range(settings["max_new"]):
            logits = model(ids[:, -512:]).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    return {"text": ids.cpu()}


@expected("several_models", fix="glbls", thread="marimo-team/marimo#806", memory=1000)
def rerun_notebook_cells(fixed=False):
    """The cell that loads the model runs again because the settings were edited, and makes a new model while the one before is still a value
    of the kernel's `glbls`. Cured by: the names that the cells of the queue define are dropped before it runs.
    """
    kernel = NotebookKernel([
        NotebookCell("settings", cell_settings, [], ["settings"]),
        NotebookCell("load_model", cell_load_model, ["settings"], ["model"]),
        NotebookCell("prompt", cell_prompt, [], ["prompt"]),
        NotebookCell("generate", cell_generate, ["model", "prompt", "settings"], ["text"]),
    ], fixed)
    kernel.run_queue(kernel.cells)
    kernel.edit("settings", cell_settings_edited)
    return kernel.log
