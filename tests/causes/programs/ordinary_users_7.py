"""Programs after public threads of ordinary users: image compression, stochastic nodes, domains, anomalies, slides, plots, guidance."""
import copy
import itertools
import math
import random

import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


# Learned image compression: an epoch of rate-distortion training.

class Patches(Dataset):
    def __init__(self, count, size):
        self.count, self.size = count, size

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.rand(3, self.size, self.size)


class AverageMeter:
    def __init__(self, name):
        self.name, self.val, self.avg, self.sum, self.count = name, 0, 0, 0, 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


def codec_down(cin, cout):
    return nn.Sequential(nn.Conv2d(cin, cout, 5, stride=2, padding=2), nn.GroupNorm(8, cout), nn.GELU())


def codec_up(cin, cout):
    return nn.Sequential(nn.ConvTranspose2d(cin, cout, 5, stride=2, padding=2, output_padding=1), nn.GELU())


class ImageCodec(nn.Module):
    def __init__(self, n=32, m=64):
        super().__init__()
        self.g_a = nn.Sequential(codec_down(3, n), codec_down(n, n), codec_down(n, n), nn.Conv2d(n, m, 5, 2, 2))
        self.g_s = nn.Sequential(codec_up(m, n), codec_up(n, n), codec_up(n, n), nn.ConvTranspose2d(n, 3, 5, 2, 2, output_padding=1))
        self.h_a = nn.Sequential(codec_down(m, n), nn.Conv2d(n, n, 5, 2, 2))
        self.h_s = nn.Sequential(codec_up(n, n), nn.ConvTranspose2d(n, 2 * m, 5, 2, 2, output_padding=1))

    def forward(self, x):
        y = self.g_a(x)
        mean, scale = self.h_s(self.h_a(y)).chunk(2, 1)
        y_hat = y + torch.empty_like(y).uniform_(-0.5, 0.5)
        scale = F.softplus(scale) + 0.1
        return {"x_hat": self.g_s(y_hat), "bits": 0.5 * ((y_hat - mean) / scale) ** 2 + scale.log()}


class RateDistortionLoss(nn.Module):
    def __init__(self, lmbda=0.013):
        super().__init__()
        self.lmbda = lmbda

    def forward(self, out, x):
        n, _, h, w = x.shape
        res = {"bpp_loss": out["bits"].sum() / (n * h * w * math.log(2)), "mse_loss": F.mse_loss(out["x_hat"], x)}
        res["loss"] = self.lmbda * 255 ** 2 * res["mse_loss"] + res["bpp_loss"]
        res["psnr"] = -10 * torch.log10(F.mse_loss(out["x_hat"].clamp(0, 1), x) + 1e-8)
        return res


def train_codec_epoch(model, criterion, loader, optimizer, fixed):
    meters = {name: AverageMeter(name) for name in ("loss", "bpp_loss", "mse_loss", "psnr")}
    for x in loader:
        x = x.cuda()
        optimizer.zero_grad()
        res = criterion(model(x), x)
        res["loss"].backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        for name, m in meters.items():
            m.update(res[name].item() if fixed else res[name], x.size(0))
    return float(meters["loss"].avg)


@expected("graph_of_earlier_steps", fix=r"item\(\)|detach", thread="lyq133/LIC-HPCM#4", memory=640)
def train_image_codec(fixed=False):
    """The meters are fed with tensors that have their graph, and their sums go from step to step: what backward has run is freed, but no
    backward pass goes through the PSNR, whose graph stays. Cured by: `.item()` of what the meters are given.
    """
    model, criterion = ImageCodec().cuda(), RateDistortionLoss()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    loader = DataLoader(Patches(8 * 40, 256), batch_size=8, shuffle=True, drop_last=True)
    loss = train_codec_epoch(model.train(), criterion, loader, optimizer, fixed)
    scheduler.step(loss)
    return loss


# A discrete VAE whose latents are wrapped in a node that logs the gradients it gets.

def log_gradient(stats, name, logits, grad):
    p = logits.softmax(1)
    entropy = -(p * p.clamp_min(1e-6).log()).sum(1).mean()
    stats.setdefault(name, []).append((float(grad.var()), float(entropy)))


class StochasticNode:
    def __init__(self, name, sample, logits, stats, fixed):
        self.name, self.sample, self.logits, self.stats = name, sample, logits, stats
        if fixed:
            values = logits.detach()

            def on_grad(grad):
                log_gradient(stats, name, values, grad)
        else:
            def on_grad(grad):
                log_gradient(self.stats, self.name, self.logits, grad)
        self.sample.register_hook(on_grad)


class DiscreteVAE(nn.Module):
    def __init__(self, fixed, ch=32, cats=512):
        super().__init__()
        self.fixed, self.cats, self.stats = fixed, cats, {}
        self.encoder = nn.Sequential(
            nn.Conv2d(3, ch, 3, padding=1), nn.SiLU(), nn.Conv2d(ch, ch, 4, 2, 1), nn.SiLU(),
            nn.Conv2d(ch, 2 * ch, 4, 2, 1), nn.SiLU(), nn.Conv2d(2 * ch, cats, 1))
        self.decoder = nn.Sequential(
            nn.Conv2d(cats, 2 * ch, 1), nn.Conv2d(2 * ch, 2 * ch, 3, padding=1), nn.SiLU(),
            nn.ConvTranspose2d(2 * ch, ch, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(ch, 3, 4, 2, 1))

    def forward(self, x, tau):
        logits = self.encoder(x)
        u = torch.rand_like(logits).clamp(1e-6, 1 - 1e-6)
        z = ((logits - (-u.log()).log()) / tau).softmax(1)
        if self.training:
            StochasticNode("z", z, logits, self.stats, self.fixed)
        q = logits.log_softmax(1)
        kl = (q.exp() * (q + math.log(self.cats))).sum((1, 2, 3)).mean()
        return self.decoder(z), kl


@torch.no_grad()
def validate_vae(model, loader):
    model.eval()
    total = 0.0
    for x in itertools.islice(loader, 3):
        rec, kl = model(x.cuda(), 0.5)
        total += F.mse_loss(rec, x.cuda()).item() + 1e-3 * kl.item()
    model.train()
    return total / 3


@expected("reference_cycle", fix="hook", thread="HEmile/storchastic#26", memory=800)
def train_stochastic_nodes(fixed=False):
    """The hook that `StochasticNode` registers on its sample refers to the node, and the node to the sample: a cycle through a hook of
    autograd, which nothing collects, so that the sample and the logits of each step stay. Cured by: a hook of the detached logits, the
    statistics and the name, and of no node.
    """
    model, tau = DiscreteVAE(fixed).cuda(), 1.0
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    loader = DataLoader(Patches(32 * 30, 64), batch_size=32, shuffle=True)
    for x in loader:
        x = x.cuda()
        rec, kl = model(x, tau)
        loss = F.mse_loss(rec, x) + 1e-3 * kl
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tau = max(0.3, tau * 0.999)
    return validate_vae(model, loader)


# Segmentation learns from labelled images of one domain, and from images of both that are mixed by classes.

class TwoDomains(Dataset):
    def __init__(self, count, crop):
        self.count, self.crop = count, crop

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return {"img": torch.randn(3, self.crop, self.crop), "gt": torch.randint(0, 19, (self.crop, self.crop)),
                "target_img": torch.randn(3, self.crop, self.crop)}


class DomainSegNet(nn.Module):
    def __init__(self):
        super().__init__()
        r = torchvision.models.resnet50(weights=None, replace_stride_with_dilation=[False, False, True])
        self.stem = nn.Sequential(r.conv1, r.bn1, r.relu, r.maxpool)
        self.stages = nn.ModuleList([r.layer1, r.layer2, r.layer3, r.layer4])
        self.lateral = nn.ModuleList([nn.Conv2d(c, 128, 1) for c in (256, 512, 1024, 2048)])
        self.fuse = nn.Sequential(nn.Conv2d(512, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(inplace=True))
        self.cls = nn.Conv2d(128, 19, 1)

    def forward(self, x):
        h, feats = self.stem(x), []
        for stage, lateral in zip(self.stages, self.lateral):
            h = stage(h)
            feats.append(lateral(h))
        feats = [F.interpolate(f, feats[0].shape[-2:], mode="bilinear", align_corners=False) for f in feats]
        return F.interpolate(self.cls(self.fuse(torch.cat(feats, 1))), x.shape[-2:], mode="bilinear", align_corners=False)

    def loss(self, img, gt, weight=None):
        ce = F.cross_entropy(self(img), gt, ignore_index=255, reduction="none")
        return (ce if weight is None else ce * weight).mean()


class DomainTrainer:
    def __init__(self, fixed, alpha=0.99, threshold=0.968):
        self.fixed, self.alpha, self.threshold = fixed, alpha, threshold
        self.model = DomainSegNet().cuda()
        self.ema = copy.deepcopy(self.model).requires_grad_(False)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=6e-5, weight_decay=0.01)
        self.sched = torch.optim.lr_scheduler.PolynomialLR(self.opt, 1000)

    @torch.no_grad()
    def update_ema(self, it):
        a = min(1 - 1 / (it + 1), self.alpha)
        for pe, p in zip(self.ema.parameters(), self.model.parameters()):
            pe.mul_(a).add_(p, alpha=1 - a)

    @torch.no_grad()
    def pseudo_label(self, img):
        prob, label = self.ema(img).softmax(1).max(1)
        return label, (prob > self.threshold).float().mean().expand_as(prob)

    def class_mix(self, src, tgt, gt, pseudo, w):
        mask = torch.isin(gt, torch.randperm(19)[:9].to(gt.device))
        return torch.where(mask[:, None], src, tgt), torch.where(mask, gt, pseudo), torch.where(mask, torch.ones_like(w), w)

    def train_step(self, batch, it):
        img, gt, tgt = (batch[k].cuda() for k in ("img", "gt", "target_img"))
        self.update_ema(it)
        self.opt.zero_grad(set_to_none=True)
        loss_src = self.model.loss(img, gt)
        if self.fixed:
            loss_src.backward()
        pseudo, weight = self.pseudo_label(tgt)
        mixed, mixed_gt, mixed_w = self.class_mix(img, tgt, gt, pseudo, weight)
        loss_mix = self.model.loss(mixed, mixed_gt, mixed_w)
        if self.fixed:
            loss_mix.backward()
        else:
            loss = loss_src + loss_mix
            loss.backward()
        self.opt.step()
        self.sched.step()
        return {"src": loss_src.item(), "mix": loss_mix.item()}


@expected("several_forward_passes", fix=r"loss_src.*backward|backward\(\)", thread="lhoyer/DAFormer#48", memory=1500)
def adapt_street_domains(fixed=False):
    """The losses of the source images and of the mixed ones are summed and have one backward pass: the graphs of both forward passes are
    there at the same time. Cured by: `loss_src.backward()` before the second forward pass, `loss_mix.backward()` after it.
    """
    trainer = DomainTrainer(fixed)
    loader = DataLoader(TwoDomains(8, 320), batch_size=2, shuffle=True)
    return [trainer.train_step(batch, it) for it, batch in enumerate(loader)]


# Anomalies in images of a product: each pixel's distance to the nearest pixel of similar images without any.

class ProductImages(Dataset):
    def __init__(self, count, train):
        self.count, self.train = count, train

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        mask = torch.zeros(1, 224, 224)
        if not self.train:
            mask[:, 80:120, 80:140] = 1
        return torch.randn(3, 224, 224), mask


class PyramidFeatures:
    names = ("layer1", "layer2", "layer3", "avgpool")

    def __init__(self, model):
        self.model, self.now = model, []
        for name in self.names:
            getattr(model, name).register_forward_hook(lambda m, i, o: self.now.append(o))

    @torch.no_grad()
    def extract(self, loader):
        outs, masks = {name: [] for name in self.names}, []
        for x, mask in loader:
            self.model(x.cuda())
            for name, v in zip(self.names, self.now):
                outs[name].append(v.cpu())
            self.now = []
            masks.append(mask)
        return {name: torch.cat(v) for name, v in outs.items()}, torch.cat(masks)


def score_images(test, train, top_k=5):
    dist = torch.cdist(test["avgpool"].flatten(1), train["avgpool"].flatten(1))
    values, idx = torch.topk(dist, top_k, dim=1, largest=False)
    return values.mean(1), idx


def score_pixels(gallery, test_map, fixed):
    n, c, h, w = gallery.shape
    feat_gallery = gallery.permute(0, 2, 3, 1).reshape(n * h * w, c, 1, 1).cuda()
    test_map = test_map.cuda()
    if fixed:
        parts = []
        for part in feat_gallery.split(100):
            parts.append(torch.pairwise_distance(part.flatten(1)[:, None], test_map.flatten(2)[0].t()[None]))
        dist = torch.cat(parts)
    else:
        dist = torch.pairwise_distance(feat_gallery.flatten(1)[:, None], test_map.flatten(2)[0].t()[None])
    return dist.min(0).values.view(1, 1, h, w)


@expected("all_pairs", fix="split|part|chunk", thread="byungjae89/SPADE-pytorch#12", memory=1200)
def localize_anomalies(fixed=False):
    """`torch.pairwise_distance` of all pixels of the gallery with all pixels of the test image makes their differences at once, with all
    channels. Cured by: 100 pixels of the gallery at a time.
    """
    feats = PyramidFeatures(torchvision.models.resnet18(weights=None).cuda().eval())
    train, _ = feats.extract(DataLoader(ProductImages(24, True), batch_size=8))
    test, masks = feats.extract(DataLoader(ProductImages(2, False), batch_size=2))
    _, idx = score_images(test, train)
    maps = []
    for t in range(len(idx)):
        scores = [score_pixels(train[name][idx[t]], test[name][t:t + 1], fixed) for name in ("layer1", "layer2", "layer3")]
        maps.append(sum(F.interpolate(s, size=224, mode="bilinear", align_corners=False).cpu() for s in scores)[0] / 3)
    maps = torch.stack(maps)
    lo, hi = float(maps.min()), float(maps.max())
    return max(((maps > lo + (hi - lo) * k / 10) == (masks > 0)).float().mean().item() for k in range(1, 10))


# Slides of tissue, each a bag of tiles with one label.

class SlideBags(Dataset):
    def __init__(self, bag_sizes, max_bag_size=None, tile=96):
        self.bag_sizes, self.max_bag_size, self.tile = bag_sizes, max_bag_size, tile

    def __len__(self):
        return len(self.bag_sizes)

    def load_tile(self, slide, k):
        return torch.randint(0, 256, (3, self.tile, self.tile), dtype=torch.uint8)

    def __getitem__(self, i):
        tiles = list(range(self.bag_sizes[i]))
        if self.max_bag_size is not None and len(tiles) > self.max_bag_size:
            tiles = random.sample(tiles, self.max_bag_size)
        return torch.stack([self.load_tile(i, k) for k in tiles]), torch.tensor(float(i % 2)), f"slide-{i:04d}"


class TileClassifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = torchvision.models.resnet18(weights=None)
        self.net.fc = nn.Sequential(nn.Dropout(0.2), nn.Linear(512, 1))

    def forward(self, x):
        return self.net(x).squeeze(1)


class AlphaBetaLoss(nn.Module):
    """At least alpha of the tiles of a tumour's slide are tumour, and beta are not; other slides have none."""

    def __init__(self, alpha, beta):
        super().__init__()
        self.alpha, self.beta, self.bce = alpha, beta, nn.BCEWithLogitsLoss()

    def forward(self, logits, label):
        order, n = torch.sort(logits, descending=True).values, logits.numel()
        top, low = order[:max(1, int(self.alpha * n))], order[-max(1, int(self.beta * n)):]
        if label.item() > 0.5:
            return self.bce(top, torch.ones_like(top)) + self.bce(low, torch.zeros_like(low))
        return self.bce(logits, torch.zeros_like(logits))


def normalize_tiles(bag):
    mean = torch.tensor([0.70, 0.55, 0.68], device=bag.device).view(1, 3, 1, 1)
    std = torch.tensor([0.19, 0.22, 0.17], device=bag.device).view(1, 3, 1, 1)
    return (bag.float() / 255 - mean) / std


def train_slides_epoch(model, loader, optimizer, criterion):
    model.train()
    running = 0.0
    for bag, label, _ in loader:
        bag, label = normalize_tiles(bag[0].cuda()), label[0].cuda()
        logits = model(bag)
        loss = criterion(logits, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running += loss.item()
    return running / len(loader)


@torch.no_grad()
def predict_slides(model, loader):
    model.eval()
    res = {}
    for bag, _, name in loader:
        probs = [model(normalize_tiles(part.cuda())).sigmoid().cpu() for part in bag[0].split(32)]
        res[name[0]] = torch.cat(probs).mean().item()
    return res


@expected("larger_step", fix="cut|sampl|at most", thread="MarvinLer/tcga_segmentation#3", memory=1200)
def train_on_slides(fixed=False):
    """All tiles of a slide go through the network in one pass, and some slides have several times as many as the others. Cured by: a random
    sample of 50 tiles of each slide at most.
    """
    max_bag_size = 50 if fixed else None
    model = TileClassifier().cuda()
    optimizer, criterion = torch.optim.Adam(model.parameters(), lr=1e-4), AlphaBetaLoss(0.1, 0.1)
    train_loader = DataLoader(SlideBags([32, 60, 45, 100, 155, 320, 75, 240], max_bag_size), batch_size=1)
    val_loader = DataLoader(SlideBags([20, 30], max_bag_size), batch_size=1)
    train_slides_epoch(model, train_loader, optimizer, criterion)
    return predict_slides(model, val_loader)


# An image is reconstructed from diffraction patterns, with a panel of plots that is drawn again after each epoch.


class PlotCanvas:
    """What is needed of one: a register of events, and thumbnails."""

    def __init__(self):
        self._ids, self.callbacks, self.thumbnails = itertools.count(), {}, {}

    def connect(self, event, func):
        cid = next(self._ids)
        self.callbacks[cid] = event, func
        return cid

    def disconnect(self, cid):
        self.callbacks.pop(cid, None)

    def draw(self, name, image):
        self.thumbnails[name] = F.avg_pool2d(image[None, None].float(), 16)[0, 0].cpu()


class DiffractionPatterns(Dataset):
    def __init__(self, count, size, probe):
        self.count, self.size, self.probe = count, size, probe

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return torch.randint(0, self.size - self.probe, (2,)), torch.rand(self.probe, self.probe)


class Ptychography(nn.Module):
    def __init__(self, fixed, size=2048, probe=128, modes=3):
        super().__init__()
        self.fixed, self.probe_size, self.canvas = fixed, probe, None
        self.obj = nn.Parameter(torch.ones(size, size, dtype=torch.complex64))
        self.probe = nn.Parameter(torch.ones(modes, probe, probe, dtype=torch.complex64))
        self.background = nn.Parameter(torch.full((probe, probe), 1e-3))
        self.plot_list = [("object amplitude", lambda m: m.obj.abs()), ("object phase", lambda m: m.obj.angle()),
                          ("probe", lambda m: m.probe.abs().pow(2).sum(0))]

    def forward(self, pos):
        p = self.probe_size
        views = torch.stack([self.obj[int(y):int(y) + p, int(x):int(x) + p] for y, x in pos])
        far = torch.fft.fft2(views[:, None] * self.probe[None], norm="ortho")
        return far.abs().pow(2).sum(1) + self.background ** 2

    def inspect(self):
        """Hovering over a panel shows the value under the mouse."""
        if self.canvas is None:
            self.canvas = PlotCanvas()
        if self.fixed:
            for cid in list(self.canvas.callbacks):
                self.canvas.disconnect(cid)
        for name, plot in self.plot_list:
            image = plot(self).detach()
            self.canvas.draw(name, image)

            def on_motion(event, image=image, name=name):
                return f"{name}: {float(image[event['y'], event['x']]):.4g}"

            def on_resize(event, image=image, name=name):
                self.canvas.draw(name, image)

            self.canvas.connect("motion_notify", on_motion)
            self.canvas.connect("resize", on_resize)


def reconstruct_epochs(model, data, epochs, lr):
    opt = torch.optim.Adam(model.parameters(), lr=lr)
    sched = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=5)
    loader = DataLoader(data, batch_size=8, shuffle=True)
    for _ in range(epochs):
        total = 0.0
        for pos, meas in loader:
            opt.zero_grad()
            loss = ((model(pos).clamp_min(1e-8).sqrt() - meas.cuda().sqrt()) ** 2).mean()
            loss.backward()
            opt.step()
            total += loss.item()
        sched.step(total)
        yield total / len(loader)


@expected("kept_tensors", fix=r"remove|disconnect|clear", thread="cdtools-developers/cdtools#87", memory=1000)
def reconstruct_from_diffraction(fixed=False):
    """`inspect` connects handlers that have the images it has drawn, and never disconnects those of the drawing before. Cured by: the
    handlers disconnected before each drawing.
    """
    model = Ptychography(fixed).cuda()
    for loss in reconstruct_epochs(model, DiffractionPatterns(32, 2048, 128), 30, 5e-3):
        model.inspect()
    return loss


# Images from text, with a loss on the colours of the decoded image as a guide.

class TimedResBlock(nn.Module):
    def __init__(self, cin, cout, temb):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(32, cin), nn.Conv2d(cin, cout, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(32, cout), nn.Conv2d(cout, cout, 3, padding=1)
        self.t, self.skip = nn.Linear(temb, cout), nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x, t):
        h = self.c1(F.silu(self.n1(x))) + self.t(F.silu(t))[:, :, None, None]
        return self.c2(F.silu(self.n2(h))) + self.skip(x)


class TextAttention(nn.Module):
    def __init__(self, ch, ctx, heads=8):
        super().__init__()
        self.norm, self.norm2, self.norm3 = nn.LayerNorm(ch), nn.LayerNorm(ch), nn.LayerNorm(ch)
        self.self_attn = nn.MultiheadAttention(ch, heads, batch_first=True)
        self.cross = nn.MultiheadAttention(ch, heads, kdim=ctx, vdim=ctx, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(ch, 4 * ch), nn.GELU(), nn.Linear(4 * ch, ch))

    def forward(self, x, ctx):
        s = x.flatten(2).transpose(1, 2)
        q = self.norm(s)
        s = s + self.self_attn(q, q, q, need_weights=False)[0]
        s = s + self.cross(self.norm2(s), ctx, ctx, need_weights=False)[0]
        return (s + self.ff(self.norm3(s))).transpose(1, 2).reshape(x.shape)


class TextUNet(nn.Module):
    def __init__(self, ch=128, ctx=256, temb=256):
        super().__init__()
        self.temb = nn.Sequential(nn.Linear(1, temb), nn.SiLU(), nn.Linear(temb, temb))
        self.inp, dims, prev = nn.Conv2d(4, ch, 3, padding=1), [ch, 2 * ch, 4 * ch], ch
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        for d in dims:
            self.down.append(nn.ModuleList([TimedResBlock(prev, d, temb), TextAttention(d, ctx), nn.Conv2d(d, d, 3, 2, 1)]))
            prev = d
        for d in reversed(dims):
            self.up.append(nn.ModuleList([TimedResBlock(prev + d, d, temb), TextAttention(d, ctx)]))
            prev = d
        self.out = nn.Sequential(nn.GroupNorm(32, prev), nn.SiLU(), nn.Conv2d(prev, 4, 3, padding=1))

    def forward(self, x, t, ctx):
        t, h, hs = self.temb(t[:, None].float()), self.inp(x), []
        for r, a, down in self.down:
            h = a(r(h, t), ctx)
            hs.append(h)
            h = down(h)
        for r, a in self.up:
            h = F.interpolate(h, size=hs[-1].shape[-2:])
            h = a(r(torch.cat([h, hs.pop()], 1), t), ctx)
        return self.out(h)


class LatentDecoder(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(4, 4 * ch, 3, padding=1))
        for cin, cout in ((4 * ch, 2 * ch), (2 * ch, ch), (ch, ch)):
            self.net.extend([nn.Upsample(scale_factor=2), nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(16, cout), nn.SiLU()])
        self.net.append(nn.Conv2d(ch, 3, 3, padding=1))

    def forward(self, z):
        return self.net(z / 0.18215).clamp(-1, 1)


def sample_with_guide(unet, vae, text, fixed, batch=2, steps=12, scale=8.0, blue_scale=200):
    sigmas = torch.cat([torch.linspace(14.6 ** (1 / 7), 0.03 ** (1 / 7), steps) ** 7, torch.zeros(1)]).tolist()
    latents = torch.randn(batch, 4, 32, 32).cuda() * sigmas[0]
    for i, t in enumerate(torch.linspace(999, 0, steps)):
        sigma = sigmas[i]
        if not fixed:
            latents = latents.detach().requires_grad_()
        model_in = torch.cat([latents] * 2) / (sigma ** 2 + 1) ** 0.5
        with torch.set_grad_enabled(not fixed):
            noise = unet(model_in, t.expand(2 * batch).cuda(), text)
        uncond, cond = noise.chunk(2)
        noise = uncond + scale * (cond - uncond)
        if fixed:
            latents = latents.detach().requires_grad_()
        x0 = latents - sigma * noise
        if i % 2 == 0:
            loss = ((vae(x0)[:, 2] / 2 + 0.5) - 0.9).abs().mean() * blue_scale
            latents = latents.detach() - torch.autograd.grad(loss, latents)[0] * sigma ** 2
        latents = latents + noise * (sigmas[i + 1] - sigma)
    with torch.no_grad():
        return vae(latents).cpu()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="fastai/diffusion-nbs#34", memory=600)
def guide_latents(fixed=False):
    """`latents.requires_grad_()` comes before the UNet, so that each step makes the graph of the whole UNet, and that of a step without
    guidance stays until the next one has made its own. Cured by: the UNet under `torch.no_grad()`, and `requires_grad_()` after it.
    """
    unet, vae = TextUNet().cuda().eval().requires_grad_(False), LatentDecoder().cuda().eval().requires_grad_(False)
    text = torch.randn(4, 77, 256).cuda()
    return [sample_with_guide(unet, vae, text, fixed).shape for _ in range(2)]
