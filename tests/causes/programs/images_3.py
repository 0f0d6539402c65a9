"""Programs after public threads about images and video."""

import gc
import os
import random
import tempfile
from collections import defaultdict

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

from expected import expected


# --------------------------------------------------------------------------------------------
class SegResult:
    def __init__(self, orig_img, path, boxes, masks):
        self.orig_img = orig_img
        self.path = path
        self.boxes = boxes
        self.masks = masks

    def cpu(self):
        return SegResult(self.orig_img, self.path, self.boxes.cpu(), self.masks.cpu())

    def __len__(self):
        return len(self.boxes)


class ConvAct(nn.Module):
    def __init__(self, c1, c2, k=3, s=1):
        super().__init__()
        self.conv = nn.Conv2d(c1, c2, k, s, k // 2, bias=False)
        self.bn = nn.BatchNorm2d(c2)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


class YoloSeg(nn.Module):
    def __init__(self, nc=6, nm=32):
        super().__init__()
        self.nc, self.nm = nc, nm
        self.stem = nn.Sequential(ConvAct(3, 16, s=2), ConvAct(16, 32, s=2))
        self.deep = nn.Sequential(ConvAct(32, 64, s=2), ConvAct(64, 128, s=2))
        self.proto = nn.Sequential(ConvAct(32, 64), nn.Conv2d(64, nm, 1))
        self.head = nn.Conv2d(128, 4 + nc + nm, 1)

    def forward(self, x):
        p2 = self.stem(x)
        pred = self.head(self.deep(p2)).flatten(2).transpose(1, 2)
        return pred, self.proto(p2)


class SegPredictor:
    def __init__(self, model, max_det=10):
        self.model = model.eval()
        self.max_det = max_det

    def preprocess(self, frames):
        batch = torch.from_numpy(np.stack(frames)).cuda()
        return batch.permute(0, 3, 1, 2).float() / 255

    def select(self, pred):
        scores = pred[:, 4:4 + self.model.nc].amax(1)
        return pred[scores.topk(self.max_det).indices]

    def process_mask(self, proto, coeffs, shape):
        c, mh, mw = proto.shape
        masks = (coeffs @ proto.view(c, -1)).sigmoid().view(-1, mh, mw)
        masks = F.interpolate(masks[None], shape, mode="bilinear", align_corners=False)[0]
        return masks.gt_(0.5)

    def postprocess(self, preds, protos, frames, shape):
        results = []
        for i, (pred, proto) in enumerate(zip(preds, protos)):
            det = self.select(pred)
            masks = self.process_mask(proto, det[:, 4 + self.model.nc:], shape)
            results.append(SegResult(frames[i], f"frame{i}", det[:, :4 + self.model.nc], masks))
        return results

    @torch.inference_mode()
    def __call__(self, frames):
        im = self.preprocess(frames)
        preds, protos = self.model(im)
        return self.postprocess(preds, protos, frames, im.shape[2:])


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="ultralytics/ultralytics#3983", memory=400)
def yolo_seg_video(fixed=False):
    """Every batch's `Results` (with full-size masks and boxes that live on the GPU) are appended to the caller's `outputs` list, so GPU
    memory rises with each batch of frames; the model itself needs little. Cured by: `outputs.extend([r.cpu() for r in results])`: move each
    result to the CPU before storing it.
    """
    model = SegPredictor(YoloSeg().cuda())
    rng = np.random.default_rng(0)
    base = rng.integers(0, 255, (384, 640, 3), dtype=np.uint8)

    def read_batches(n_frames, size):
        for start in range(0, n_frames, size):
            yield [np.roll(base, start + k, axis=1) for k in range(size)]

    outputs = []
    for inputs in read_batches(44, 4):
        results = model(inputs)
        if fixed:
            outputs.extend([r.cpu() for r in results])
        else:
            outputs.extend(results)
    return sum(len(r) for r in outputs)


# --------------------------------------------------------------------------------------------
class PosEmbedding(nn.Module):
    def __init__(self, n_freqs):
        super().__init__()
        self.freqs = [2.0 ** k for k in range(n_freqs)]

    def forward(self, x):
        out = [x]
        for f in self.freqs:
            out += [torch.sin(f * x), torch.cos(f * x)]
        return torch.cat(out, -1)


class RadianceMLP(nn.Module):
    def __init__(self, in_xyz=39, in_dir=15, width=64, depth=4):
        super().__init__()
        layers = []
        for i in range(depth):
            layers += [nn.Linear(in_xyz if i == 0 else width, width), nn.ReLU(True)]
        self.trunk = nn.Sequential(*layers)
        self.sigma = nn.Linear(width, 1)
        self.rgb = nn.Sequential(nn.Linear(width + in_dir, width // 2), nn.ReLU(True),
                                 nn.Linear(width // 2, 3), nn.Sigmoid())

    def forward(self, xyz, dirs):
        h = self.trunk(xyz)
        return self.rgb(torch.cat([h, dirs], -1)), self.sigma(h)


def sample_pdf(bins, weights, n_new):
    cdf = torch.cumsum(weights + 1e-5, -1)
    cdf = cdf / cdf[:, -1:]
    u = torch.linspace(0, 1, n_new, device=bins.device).expand(len(bins), n_new).contiguous()
    inds = torch.searchsorted(cdf, u).clamp(0, bins.shape[1] - 1)
    return torch.gather(bins, 1, inds)


def volume_render(model, emb_xyz, emb_dir, rays_o, rays_d, z_vals):
    n_rays, n_samples = z_vals.shape
    xyz = rays_o[:, None] + rays_d[:, None] * z_vals[..., None]
    dirs = emb_dir(rays_d).repeat_interleave(n_samples, 0)
    rgbs, sigmas = model(emb_xyz(xyz.view(-1, 3)), dirs)
    deltas = torch.cat([z_vals[:, 1:] - z_vals[:, :-1], z_vals[:, -1:]], 1)
    alphas = 1 - torch.exp(-deltas * F.relu(sigmas.view(n_rays, n_samples)))
    trans = torch.cumprod(1 - alphas + 1e-10, 1)
    weights = alphas * trans
    rgb = (weights[..., None] * rgbs.view(n_rays, n_samples, 3)).sum(1)
    return rgb, (weights * z_vals).sum(1), weights


def render_rays(models, embeddings, rays, n_samples=64, n_importance=64):
    rays_o, rays_d, near, far = rays[:, :3], rays[:, 3:6], rays[:, 6:7], rays[:, 7:8]
    steps = torch.linspace(0, 1, n_samples, device=rays.device)
    z_vals = near * (1 - steps) + far * steps
    rgb, depth, weights = volume_render(models["coarse"], *embeddings, rays_o, rays_d, z_vals)
    result = {"rgb_coarse": rgb, "depth_coarse": depth, "weights_coarse": weights, "z_coarse": z_vals}
    z_new = sample_pdf(z_vals, weights, n_importance)
    z_vals, _ = torch.sort(torch.cat([z_vals, z_new], -1), -1)
    rgb, depth, weights = volume_render(models["fine"], *embeddings, rays_o, rays_d, z_vals)
    result.update({"rgb_fine": rgb, "depth_fine": depth, "weights_fine": weights, "z_fine": z_vals})
    return result


@torch.no_grad()
def batched_inference(models, embeddings, rays, chunk, store):
    results = defaultdict(list)
    for i in range(0, rays.shape[0], chunk):
        rendered = render_rays(models, embeddings, rays[i:i + chunk])
        for k, v in rendered.items():
            results[k] += [store(v)]
    for k, v in results.items():
        results[k] = torch.cat(v, 0)
    return results


class SpiralViews:
    def __init__(self, wh, n):
        self.wh, self.n = wh, n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        w, h = self.wh
        ys, xs = torch.meshgrid(torch.linspace(-1, 1, h), torch.linspace(-1, 1, w), indexing="ij")
        d = torch.stack([xs, ys, torch.ones_like(xs)], -1).view(-1, 3)
        o = torch.tensor([0.1 * i, 0.0, -2.0]).expand_as(d)
        near_far = torch.tensor([2.0, 6.0]).expand(len(d), 2)
        return torch.cat([o, d, near_far], 1)


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="kwea123/nerf_pl#61", memory=500)
def nerf_render_views(fixed=False):
    """When a full image is rendered in chunks, the outputs of all chunks (per-ray weights, depths, colours) are collected in lists on the
    GPU until they are concatenated; the higher the resolution the more they take. Cured by: `results[k] += [v.cpu()]`: move each rendered
    chunk to the CPU at once.
    """
    embeddings = [PosEmbedding(6), PosEmbedding(2)]
    models = {k: RadianceMLP().cuda().eval() for k in ("coarse", "fine")}
    store = torch.Tensor.cpu if fixed else (lambda v: v)
    dataset = SpiralViews((400, 400), 1)
    frames = []
    for i in range(len(dataset)):
        rays = dataset[i].cuda()
        results = batched_inference(models, embeddings, rays, 2048, store)
        img = results["rgb_fine"].view(400, 400, 3).cpu().numpy()
        frames.append((img * 255).astype(np.uint8))
    return len(frames)


# --------------------------------------------------------------------------------------------
class MaskHeadNet(nn.Module):
    def __init__(self, queries=80, dim=64):
        super().__init__()
        self.backbone = nn.Sequential(ConvAct(3, 16, s=2), ConvAct(16, 32, s=2), ConvAct(32, dim))
        self.queries = nn.Parameter(torch.randn(queries, dim))
        self.cls = nn.Linear(dim, 8)
        self.box = nn.Linear(dim, 4)

    def forward(self, x):
        feat = self.backbone(x)
        q = self.queries.expand(len(x), -1, -1)
        masks = torch.einsum("bqc,bchw->bqhw", q, feat)
        return self.box(q).sigmoid(), self.cls(q), masks


class LetterboxMeta:
    def __init__(self, orig_hw, input_hw):
        self.orig_hw, self.input_hw = orig_hw, input_hw
        scale = min(input_hw[0] / orig_hw[0], input_hw[1] / orig_hw[1])
        self.pad_y = int((input_hw[0] - orig_hw[0] * scale) / 2)
        self.pad_x = int((input_hw[1] - orig_hw[1] * scale) / 2)


class InstanceSegPipeline:
    def __init__(self):
        self.model = MaskHeadNet().cuda().eval()

    def pre_process(self, image, size=(640, 640)):
        meta = LetterboxMeta(image.shape[:2], size)
        x = torch.from_numpy(image).cuda().permute(2, 0, 1).float()[None] / 255
        inner = (size[0] - 2 * meta.pad_y, size[1] - 2 * meta.pad_x)
        x = F.interpolate(x, inner, mode="bilinear", align_corners=False)
        return F.pad(x, (meta.pad_x, meta.pad_x, meta.pad_y, meta.pad_y)), meta

    def upscale(self, masks, hw):
        masks = F.interpolate(masks[:, None], hw, mode="bilinear", align_corners=False)[:, 0]
        return masks > 0

    def align_results(self, boxes, masks, meta):
        sy = masks.shape[1] / meta.input_hw[0]
        py, px = int(meta.pad_y * sy), int(meta.pad_x * sy)
        masks = masks[:, py:masks.shape[1] - py, px:masks.shape[2] - px]
        h, w = meta.orig_hw
        boxes = boxes * torch.tensor([w, h, w, h], device=boxes.device)
        return boxes, self.upscale(masks, (h, w))

    def post_process(self, raw, meta):
        boxes, logits, masks = raw
        conf, labels = logits[0].sigmoid().max(-1)
        order = conf.argsort(descending=True)
        boxes, masks = self.align_results(boxes[0][order], masks[0][order], meta)
        return {"boxes": boxes, "labels": labels[order], "conf": conf[order], "masks": masks}

    @torch.inference_mode()
    def infer(self, image):
        x, meta = self.pre_process(image)
        return self.post_process(self.model(x), meta)


class ReworkedPipeline(InstanceSegPipeline):
    def upscale(self, masks, hw, n=16):
        aligned = torch.empty(len(masks), *hw, dtype=torch.bool, device=masks.device)
        for s in range(0, len(masks), n):
            aligned[s:s + n] = super().upscale(masks[s:s + n], hw)
        return aligned


@expected("enlarged", fix="split|part", thread="roboflow/inference#2682", memory=750)
def dense_mask_postprocess(fixed=False):
    """Post-processing upsamples the masks of all detections to the original image size in one float32 tensor of detections × H × W, which
    does not fit for many detections on a large image (independent of the model's size). Cured by: upsample and threshold in slices of 16
    masks, keeping only the boolean masks.
    """
    pipeline = ReworkedPipeline() if fixed else InstanceSegPipeline()
    image = np.zeros((1080, 1920, 3), dtype=np.uint8)
    found = 0
    for _ in range(3):
        out = pipeline.infer(image)
        found += len(out["boxes"].cpu())
    return found


# --------------------------------------------------------------------------------------------
class ResBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, cin), nn.Conv2d(cin, cout, 3, 1, 1)
        self.norm2, self.conv2 = nn.GroupNorm(8, cout), nn.Conv2d(cout, cout, 3, 1, 1)
        self.skip = nn.Conv2d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.skip(x) + h


class LatentDecoder(nn.Module):
    def __init__(self, chans=(128, 128, 64, 32)):
        super().__init__()
        self.conv_in = nn.Conv2d(4, chans[0], 3, 1, 1)
        blocks = []
        for cin, cout in zip(chans, chans[1:]):
            blocks += [ResBlock(cin, cout), nn.Upsample(scale_factor=2), nn.Conv2d(cout, cout, 3, 1, 1)]
        self.up = nn.Sequential(*blocks, ResBlock(chans[-1], chans[-1]))
        self.norm_out = nn.GroupNorm(8, chans[-1])
        self.conv_out = nn.Conv2d(chans[-1], 3, 3, 1, 1)

    def forward(self, z):
        h = self.up(self.conv_in(z))
        return self.conv_out(F.silu(self.norm_out(h)))


class AutoencoderLite(nn.Module):
    scaling = 0.18215

    def __init__(self):
        super().__init__()
        self.post_quant_conv = nn.Conv2d(4, 4, 1)
        self.decoder = LatentDecoder()

    def decode(self, z):
        return self.decoder(self.post_quant_conv(z))


class DenoiserLite(nn.Module):
    def __init__(self, ch=64, ctx=96):
        super().__init__()
        self.inp = nn.Conv2d(4, ch, 3, 1, 1)
        self.time = nn.Linear(1, ch)
        self.ctx = nn.Linear(ctx, ch)
        self.mid = nn.ModuleList([ResBlock(ch, ch) for _ in range(3)])
        self.out = nn.Conv2d(ch, 4, 3, 1, 1)

    def forward(self, x, t, cond):
        h = self.inp(x)
        h = h + (self.time(t[:, None]) + self.ctx(cond.mean(1)))[:, :, None, None]
        for block in self.mid:
            h = block(h)
        return self.out(h)


class TextToImagePipeline:
    def __init__(self):
        self.text_encoder = nn.Embedding(1000, 96).cuda()
        self.unet = DenoiserLite().cuda()
        self.vae = AutoencoderLite().cuda()

    def encode_prompt(self, prompts):
        ids = torch.zeros(len(prompts), 16, dtype=torch.long)
        for i, p in enumerate(prompts):
            for j, word in enumerate(p.split()[:16]):
                ids[i, j] = 1 + len(word)
        cond = self.text_encoder(ids.cuda())
        uncond = self.text_encoder(torch.zeros_like(ids).cuda())
        return torch.cat([uncond, cond])

    def denoise(self, latents, embeds, steps, guidance):
        for t in np.linspace(1, 0, steps):
            ts = torch.full((2 * len(latents),), float(t), device="cuda")
            eps = self.unet(torch.cat([latents] * 2), ts, embeds)
            eps_u, eps_c = eps.chunk(2)
            latents = latents - (eps_u + guidance * (eps_c - eps_u)) / steps
        return latents

    def decode_latents(self, latents):
        image = self.vae.decode(latents / self.vae.scaling)
        image = (image / 2 + 0.5).clamp(0, 1)
        return image.cpu().permute(0, 2, 3, 1).numpy()

    @torch.no_grad()
    def __call__(self, prompts, steps=5, guidance=7.5, size=256):
        embeds = self.encode_prompt(prompts)
        latents = torch.randn(len(prompts), 4, size // 8, size // 8, device="cuda")
        latents = self.denoise(latents, embeds, steps, guidance)
        return self.decode_latents(latents)


@expected("batch_without_gradients", fix="part|slicing", thread="huggingface/diffusers#1150", memory=500)
def txt2img_batch(fixed=False):
    """The denoising fits, but the pipeline then decodes the latents of the whole batch of prompts by the VAE at once; the decoder's
    full-resolution activations scale with the batch. Cured by: decode the latents one at a time (sliced VAE decode).
    """
    pipe = TextToImagePipeline()
    if fixed:
        decode = pipe.vae.decode
        pipe.vae.decode = lambda z: torch.cat([decode(s) for s in z.split(1)])
    images = pipe(["a lighthouse at night"] * 2)
    images = pipe(["a lighthouse at night"] * 16)
    return images.shape


# --------------------------------------------------------------------------------------------
def box_overlaps(a, b, eps=1e-6):
    lt = torch.max(a[:, None, :2], b[None, :, :2])
    rb = torch.min(a[:, None, 2:], b[None, :, 2:])
    wh = (rb - lt).clamp(min=0)
    inter = wh[..., 0] * wh[..., 1]
    area_a = (a[:, 2] - a[:, 0]) * (a[:, 3] - a[:, 1])
    area_b = (b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1])
    return inter / (area_a[:, None] + area_b[None] - inter + eps)


class SoftLabelAssigner:
    def __init__(self, num_classes, topk=13):
        self.num_classes, self.topk = num_classes, topk

    def cost_matrix(self, scores, boxes, priors, gt_boxes, gt_labels):
        n_gt = len(gt_boxes)
        centers = (gt_boxes[:, :2] + gt_boxes[:, 2:]) / 2
        dist = (priors[:, None, :2] - centers[None]).pow(2).sum(-1).sqrt() / priors[:, None, 2]
        center_cost = torch.pow(10, dist - 3.0)
        ious = box_overlaps(boxes, gt_boxes)
        iou_cost = -torch.log(ious + 1e-7) * 3
        onehot = F.one_hot(gt_labels, self.num_classes).float()[None].repeat(len(boxes), 1, 1)
        pair_scores = scores[:, None].repeat(1, n_gt, 1)
        soft_label = onehot * ious[..., None]
        scale = soft_label - pair_scores.sigmoid()
        cls_cost = F.binary_cross_entropy_with_logits(pair_scores, soft_label, reduction="none")
        cls_cost = (cls_cost * scale.abs().pow(2)).sum(-1)
        return cls_cost + iou_cost + center_cost, ious

    def assign(self, scores, boxes, priors, gt_boxes, gt_labels):
        cost, ious = self.cost_matrix(scores, boxes, priors, gt_boxes, gt_labels)
        picked = torch.zeros_like(cost)
        idx = cost.topk(self.topk, dim=0, largest=False).indices
        picked.scatter_(0, idx, 1.0)
        best = (picked * ious).argmax(1)
        is_pos = picked.amax(1)
        return best, is_pos, ious.amax(1)


class ReworkedAssigner(SoftLabelAssigner):
    def assign(self, *inputs):
        if len(inputs[3]) <= 100:
            return super().assign(*inputs)
        out = super().assign(*[t.cpu() for t in inputs])
        return [t.to(inputs[0].device) for t in out]


class RTMHead(nn.Module):
    strides = (8, 16, 32)

    def __init__(self, num_classes, ch, assigner):
        super().__init__()
        self.num_classes, self.assigner = num_classes, assigner
        self.cls = nn.ModuleList([nn.Conv2d(ch, num_classes, 1) for _ in self.strides])
        self.reg = nn.ModuleList([nn.Conv2d(ch, 4, 1) for _ in self.strides])

    def priors(self, feats):
        out = []
        for f, s in zip(feats, self.strides):
            ys, xs = torch.meshgrid(torch.arange(f.shape[2]), torch.arange(f.shape[3]), indexing="ij")
            xy = torch.stack([xs, ys], -1).view(-1, 2).float() * s
            out.append(torch.cat([xy, torch.full((len(xy), 1), float(s))], 1))
        return torch.cat(out).to(feats[0].device)

    def forward(self, feats):
        flat = lambda convs: torch.cat(
            [c(f).flatten(2).transpose(1, 2) for c, f in zip(convs, feats)], 1)
        return flat(self.cls), flat(self.reg).exp()

    def loss(self, feats, gts):
        cls, reg = self(feats)
        priors = self.priors(feats)
        xy, s = priors[:, :2], priors[:, 2:]
        boxes = torch.cat([xy - reg[..., :2] * s, xy + reg[..., 2:] * s], -1)
        total = 0
        for i, (gt_boxes, gt_labels) in enumerate(gts):
            best, pos, iou = self.assigner.assign(
                cls[i].detach(), boxes[i].detach(), priors, gt_boxes, gt_labels)
            target = F.one_hot(gt_labels[best], self.num_classes) * (pos * iou)[:, None]
            total = total + F.binary_cross_entropy_with_logits(cls[i], target)
            total = total + (F.l1_loss(boxes[i], gt_boxes[best], reduction="none").mean(1) * pos).mean()
        return total / len(gts)


class RTMDetLite(nn.Module):
    def __init__(self, num_classes, assigner, ch=48):
        super().__init__()
        self.stem = nn.Sequential(ConvAct(3, 16, s=2), ConvAct(16, 24, s=2), ConvAct(24, ch, s=2))
        self.down = nn.ModuleList([ConvAct(ch, ch, s=2), ConvAct(ch, ch, s=2)])
        self.head = RTMHead(num_classes, ch, assigner)

    def forward(self, imgs, gts):
        feats = [self.stem(imgs)]
        for d in self.down:
            feats.append(d(feats[-1]))
        return self.head.loss(feats, gts)


class FieldImages:
    counts = [(12, 30), (45, 8), (20, 60), (320, 25), (14, 40)]

    def __iter__(self):
        g = torch.Generator().manual_seed(0)
        for pair in self.counts:
            gts = []
            for n in pair:
                xy = torch.rand(n, 2, generator=g) * 600
                gts.append((torch.cat([xy, xy + 24], 1), torch.randint(0, 10, (n,), generator=g)))
            yield torch.zeros(2, 3, 640, 640), gts


@expected("all_pairs", fix="split|chunk", thread="open-mmlab/mmdetection#9616", memory=600)
def rtmdet_train(fixed=False):
    """An image with several hundred ground-truth boxes makes the label assigner (soft label cost: priors × gts × classes one-hot, scores,
    BCE) allocate huge pairwise tensors on the GPU; images with few boxes train fine. Cured by: do the assignment on the CPU when an image
    has more gts than a threshold (`gpu_assign_thr`), and move the result back.
    """
    assigner = ReworkedAssigner(10) if fixed else SoftLabelAssigner(10)
    model = RTMDetLite(10, assigner).cuda()
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for epoch in range(2):
        for imgs, gts in FieldImages():
            gts = [(b.cuda(), l.cuda()) for b, l in gts]
            loss = model(imgs.cuda(), gts)
            optim.zero_grad()
            loss.backward()
            optim.step()
    return True


# --------------------------------------------------------------------------------------------
class DarknetLite(nn.Module):
    def __init__(self, anchors=5, classes=20):
        super().__init__()
        chans = [3, 8, 16, 32, 64, 128]
        layers = []
        for cin, cout in zip(chans, chans[1:]):
            layers += [nn.Conv2d(cin, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout),
                       nn.LeakyReLU(0.1, inplace=True), nn.MaxPool2d(2)]
        self.features = nn.Sequential(*layers)
        self.pred = nn.Conv2d(128, anchors * (5 + classes), 1)
        self.anchors, self.classes = anchors, classes
        self.seen = 0

    def forward(self, x):
        return self.pred(self.features(x))


class RegionLoss(nn.Module):
    def __init__(self, anchors, classes):
        super().__init__()
        self.anchors, self.classes = anchors, classes

    def forward(self, output, target):
        b, _, h, w = output.shape
        out = output.view(b, self.anchors, 5 + self.classes, h, w)
        xy, wh, conf = out[:, :, :2].sigmoid(), out[:, :, 2:4], out[:, :, 4].sigmoid()
        t = target[:, None, :, None, None]
        loss = (xy - t[:, :, 1:3]).pow(2).mean() + (wh - t[:, :, 3:5]).pow(2).mean()
        cls = out[:, :, 5:].mean((1, 3, 4))
        return loss + conf.pow(2).mean() + F.cross_entropy(cls, target[:, 0].long())


class ListDataset:
    def __init__(self, n_images, batch_size, seen=0):
        self.n_images, self.batch_size, self.seen = n_images, batch_size, seen
        self.shape = (416, 416)
        self.canvas = torch.rand(3, 640, 640)
        self.rng = random.Random(3)

    def pick_shape(self):
        if self.seen < 120:
            width = 13 * 32
        elif self.seen < 240:
            width = (self.rng.randint(0, 3) + 11) * 32
        else:
            width = (self.rng.randint(0, 9) + 10) * 32
        self.shape = (width, width)

    def load(self, index):
        h, w = self.shape
        off = index % 16
        return self.canvas[:, off:off + h, off:off + w]

    def batches(self):
        for n, start in enumerate(range(0, self.n_images - self.batch_size + 1, self.batch_size)):
            if n % 10 == 0:
                self.pick_shape()
            imgs = torch.stack([self.load(start + k) for k in range(self.batch_size)])
            self.seen += self.batch_size
            yield imgs, torch.rand(self.batch_size, 5)


def train_epoch(model, region_loss, optimizer, dataset):
    model.train()
    for data, target in dataset.batches():
        data, target = data.cuda(), target.cuda()
        optimizer.zero_grad()
        output = model(data)
        loss = region_loss(output, target)
        loss.backward()
        optimizer.step()
        model.seen += len(data)


@expected("larger_step", fix="as large as|smaller|batch", thread="marvis/pytorch-yolo2#120", memory=700)
def yolo2_multiscale(fixed=False):
    """Multi-scale training changes the input size every 10 batches; after some epochs the larger sizes (up to 608) are drawn and the same
    batch size no longer fits. Cured by: reduce the batch size.
    """
    batch_size = 6 if fixed else 12
    model = DarknetLite().cuda()
    region_loss = RegionLoss(model.anchors, model.classes)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=5e-4)
    seen = 0
    for epoch in range(4):
        dataset = ListDataset(120, batch_size, seen)
        dataset.rng.seed(2 + epoch)
        train_epoch(model, region_loss, optimizer, dataset)
        seen = dataset.seen
    return seen


# --------------------------------------------------------------------------------------------
class SepConv(nn.Module):
    def __init__(self, c, k):
        super().__init__()
        self.op = nn.Sequential(nn.ReLU(), nn.Conv2d(c, c, k, 1, k // 2, groups=c, bias=False),
                                nn.Conv2d(c, c, 1, bias=False), nn.BatchNorm2d(c, affine=False))

    def forward(self, x):
        return self.op(x)


class PartialMixedOp(nn.Module):
    def __init__(self, c, k=4):
        super().__init__()
        self.k = k
        p = c // k
        self.ops = nn.ModuleList([
            nn.Sequential(nn.MaxPool2d(3, 1, 1), nn.BatchNorm2d(p, affine=False)),
            nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.BatchNorm2d(p, affine=False)),
            nn.Identity(), SepConv(p, 3), SepConv(p, 5)])

    def forward(self, x, weights):
        p = x.shape[1] // self.k
        part, rest = x[:, :p], x[:, p:]
        mixed = sum(w * op(part) for w, op in zip(weights, self.ops))
        out = torch.cat([mixed, rest], 1)
        b, c, h, w = out.shape
        return out.view(b, self.k, c // self.k, h, w).transpose(1, 2).reshape(b, c, h, w)


class SearchCell(nn.Module):
    def __init__(self, c_prev, c, steps=3):
        super().__init__()
        self.steps = steps
        self.pre = nn.Sequential(nn.ReLU(), nn.Conv2d(c_prev, c, 1, bias=False), nn.BatchNorm2d(c, affine=False))
        self.edges = nn.ModuleList([PartialMixedOp(c) for i in range(steps) for _ in range(1 + i)])

    def forward(self, s, alphas):
        states = [self.pre(s)]
        offset = 0
        for i in range(self.steps):
            new = sum(self.edges[offset + j](h, alphas[offset + j]) for j, h in enumerate(states))
            offset += len(states)
            states.append(new)
        return torch.cat(states[1:], 1)


class SuperNet(nn.Module):
    def __init__(self, c=32, cells=2, steps=2, classes=10):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, steps * c, 3, 1, 1, bias=False), nn.BatchNorm2d(steps * c))
        self.cells = nn.ModuleList([SearchCell(steps * c, c, steps) for _ in range(cells)])
        self.head = nn.Linear(steps * c, classes)
        self.alphas = nn.Parameter(1e-3 * torch.randn(steps * (steps + 1) // 2, 5))

    def weight_parameters(self):
        return [p for n, p in self.named_parameters() if n != "alphas"]

    def forward(self, x):
        s = self.stem(x)
        w = self.alphas.softmax(-1)
        for cell in self.cells:
            s = cell(s, w)
        return self.head(s.mean((2, 3)))


class Architect:
    def __init__(self, model, criterion):
        self.model, self.criterion = model, criterion
        self.optimizer = torch.optim.Adam([model.alphas], lr=6e-4, betas=(0.5, 0.999))

    def step(self, x, y):
        self.optimizer.zero_grad()
        self.criterion(self.model(x), y).backward()
        self.optimizer.step()


class AvgMeter:
    def __init__(self):
        self.sum = self.cnt = 0.0

    def update(self, v, n):
        self.sum, self.cnt = self.sum + v * n, self.cnt + n


def cifar_queue(n_batches, batch_size=64):
    for _ in range(n_batches):
        yield torch.zeros(batch_size, 3, 32, 32), torch.zeros(batch_size, dtype=torch.long)


def accuracy(logits, target):
    return (logits.argmax(1) == target).float().mean() * 100


def search_epoch(model, architect, optimizer, criterion):
    model.train()
    objs = AvgMeter()
    for (x, y), (xs, ys) in zip(cifar_queue(3), cifar_queue(3)):
        x, y, xs, ys = x.cuda(), y.cuda(), xs.cuda(), ys.cuda()
        architect.step(xs, ys)
        optimizer.zero_grad()
        logits = model(x)
        loss = criterion(logits, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.weight_parameters(), 5)
        optimizer.step()
        objs.update(loss.item(), len(x))


def infer(model, criterion):
    model.eval()
    objs, top1 = AvgMeter(), AvgMeter()
    for x, y in cifar_queue(4):
        x, y = x.cuda(), y.cuda()
        logits = model(x)
        loss = criterion(logits, y)
        objs.update(loss.data.item(), len(x))
        top1.update(accuracy(logits, y).item(), len(x))
    return top1.sum / top1.cnt


@expected("evaluation_keeps_graphs", fix="no_grad", thread="yuhuixu1993/PC-DARTS#16", memory=600)
def pcdarts_search(fixed=False):
    """Training/search steps fit, but `infer` (validation) runs the supernet without `torch.no_grad()`, so activations for a backward that
    never comes are kept, and the graph of the previous batch lives while the next one is built. Cured by: wrap the loop of `infer` in `with
    torch.no_grad()`.
    """
    criterion = nn.CrossEntropyLoss().cuda()
    model = SuperNet().cuda()
    optimizer = torch.optim.SGD(model.weight_parameters(), 0.1, momentum=0.9, weight_decay=3e-4)
    architect = Architect(model, criterion)
    validate = torch.no_grad()(infer) if fixed else infer
    for epoch in range(2):
        search_epoch(model, architect, optimizer, criterion)
        validate(model, criterion)
    return True


# --------------------------------------------------------------------------------------------
class Bottleneck(nn.Module):
    def __init__(self, cin, cout, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(cin, cout, 3, stride, 1, bias=False), nn.BatchNorm2d(cout)
        self.conv2, self.bn2 = nn.Conv2d(cout, cout, 3, 1, 1, bias=False), nn.BatchNorm2d(cout)
        self.down = nn.Conv2d(cin, cout, 1, stride, bias=False)

    def forward(self, x):
        h = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(h)) + self.down(x))


class SpotFPN(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 7, 2, 3, bias=False), nn.BatchNorm2d(32), nn.ReLU())
        self.layers = nn.ModuleList([Bottleneck(32, 32, 2), Bottleneck(32, 64, 2), Bottleneck(64, 128, 2)])
        self.lateral = nn.ModuleList([nn.Conv2d(c, dim, 1) for c in (32, 64, 128)])

    def forward(self, x):
        h = self.stem(x)
        maps = []
        for layer, lat in zip(self.layers, self.lateral):
            h = layer(h)
            maps.append(lat(h))
        out = maps[-1]
        for m in reversed(maps[:-1]):
            out = m + F.interpolate(out, m.shape[-2:])
        return out


class SpotRCNN(nn.Module):
    def __init__(self, dim=64, pool=7):
        super().__init__()
        self.backbone, self.pool = SpotFPN(dim), pool
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(dim * pool * pool, 128), nn.ReLU(), nn.Linear(128, 2))

    def roi_pool(self, feat, rois):
        steps = torch.linspace(0, 1, self.pool, device=rois.device)
        xs = rois[:, 0, None] + (rois[:, 1] - rois[:, 0])[:, None] * steps
        ys = rois[:, 2, None] + (rois[:, 3] - rois[:, 2])[:, None] * steps
        grid = torch.stack([xs[:, None].expand(-1, self.pool, -1), ys[:, :, None].expand(-1, -1, self.pool)], -1)
        grid = (grid * 2 - 1).view(1, len(rois) * self.pool, self.pool, 2)
        pooled = F.grid_sample(feat, grid, align_corners=False)[0]
        return pooled.view(-1, len(rois), self.pool, self.pool).transpose(0, 1)

    def forward(self, image, rois):
        return self.head(self.roi_pool(self.backbone(image[None]), rois))


class ParkingLots:
    def __init__(self, n):
        self.images = [torch.zeros(3, 3000, 4000, dtype=torch.uint8) for _ in range(n)]

    def __iter__(self):
        g = torch.Generator().manual_seed(1)
        for image in self.images:
            rois = torch.rand(20, 4, generator=g).sort(1).values
            yield image, rois, torch.randint(0, 2, (20,), generator=g)


def augment(image, rois):
    image = image.flip(-1)
    return image, torch.stack([1 - rois[:, 1], 1 - rois[:, 0], rois[:, 2], rois[:, 3]], 1)


def preprocess(image, res=None):
    if res is not None:
        w = int(image.shape[2] * res / image.shape[1])
        image = F.interpolate(image[None], (res, w), mode="nearest")[0]
    mean = torch.tensor([0.485, 0.456, 0.406], device=image.device)[:, None, None]
    return (image.float() / 255).sub_(mean)


def train_one_epoch(model, optimizer, ds, res):
    model.train()
    losses = []
    device = next(model.parameters()).device
    for image, rois, labels in ds:
        image, rois, labels = image.to(device), rois.to(device), labels.to(device)
        image, rois = augment(image, rois)
        image = preprocess(image, res=res)
        class_logits = model(image, rois)
        loss = F.cross_entropy(class_logits, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.tolist())
    return np.mean(losses)


def train_model(model, train_ds, lr=1e-4, epochs=2, res=None):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 50)
    for _ in range(epochs):
        train_one_epoch(model, optimizer, train_ds, res)
        scheduler.step()


@expected("large_images", fix="interpolate|Resize", thread="martin-marek/parking-space-occupancy#1", memory=700)
def parking_rcnn_train(fixed=False):
    """The dataset's images are 4000×3000 and this model's training passes them to the backbone unresized, so the first feature maps do not
    fit. Cured by: give `res=800`, so that images are resized before the backbone.
    """
    train_ds = ParkingLots(2)
    if fixed:
        train_model(SpotRCNN(), train_ds, res=800)
    else:
        train_model(SpotRCNN(), train_ds)
    return True


# --------------------------------------------------------------------------------------------
class Tower(nn.Module):
    def __init__(self, width, layers, heads=8):
        super().__init__()
        block = lambda: nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.ModuleList([block() for _ in range(layers)])
        self.ln = nn.LayerNorm(width)

    def forward(self, x):
        for b in self.blocks:
            x = b(x)
        return self.ln(x)


class ClipLite(nn.Module):
    def __init__(self, width=512, embed=256, vocab=4000):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 32, 32)
        self.pos = nn.Parameter(0.01 * torch.randn(1, 49, width))
        self.visual = Tower(width, 3)
        self.token = nn.Embedding(vocab, width)
        self.text = Tower(width, 2)
        self.img_proj = nn.Linear(width, embed, bias=False)
        self.txt_proj = nn.Linear(width, embed, bias=False)
        self.logit_scale = nn.Parameter(torch.tensor(2.6))

    def forward(self, images, tokens):
        v = self.visual(self.patch(images).flatten(2).transpose(1, 2) + self.pos).mean(1)
        t = self.text(self.token(tokens)).mean(1)
        v, t = F.normalize(self.img_proj(v), dim=-1), F.normalize(self.txt_proj(t), dim=-1)
        return v, t, self.logit_scale.exp()


class ClipLoss(nn.Module):
    def forward(self, v, t, scale):
        logits = scale * v @ t.T
        labels = torch.arange(len(v), device=v.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def clip_batches(n, batch_size=8):
    for _ in range(n):
        yield torch.zeros(batch_size, 3, 224, 224), torch.ones(batch_size, 24, dtype=torch.long)


def clip_train_epoch(model, loss_fn, optimizer, device, steps):
    model.train()
    for images, texts in clip_batches(steps):
        images, texts = images.to(device), texts.to(device)
        loss = loss_fn(*model(images, texts))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def clip_main(ckpt_dir, epochs, resume=None, map_location="cuda:0"):
    device = torch.device("cuda:0")
    model = ClipLite().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    start_epoch = 0
    if resume is not None:
        checkpoint = torch.load(resume, map_location=map_location)
        start_epoch = checkpoint["epoch"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    loss_fn = ClipLoss()
    path = None
    for epoch in range(start_epoch, epochs):
        clip_train_epoch(model, loss_fn, optimizer, device, steps=3)
        if resume is None:
            path = os.path.join(ckpt_dir, f"epoch_{epoch + 1}.pt")
            torch.save({"epoch": epoch + 1, "state_dict": model.state_dict(),
                        "optimizer": optimizer.state_dict()}, path)
    return path


@expected("loaded_onto_gpu", fix="map_location", thread="mlfoundations/open_clip#154", memory=500)
def clip_resume(fixed=False):
    """A resumed run needs more GPU memory than the first one: `torch.load(..., map_location=device)` puts the whole checkpoint on the GPU,
    next to the model that it is copied into, and it stays referenced during training. Cured by: load the checkpoint with
    `map_location='cpu'`.
    """
    with tempfile.TemporaryDirectory() as logs:
        last = clip_main(logs, epochs=1)
        gc.collect()
        torch.cuda.empty_cache()
        if fixed:
            clip_main(logs, epochs=2, resume=last, map_location="cpu")
        else:
            clip_main(logs, epochs=2, resume=last)
    return True


# --------------------------------------------------------------------------------------------
class FrameEncoder(nn.Module):
    def __init__(self, cin):
        super().__init__()
        self.l1, self.l2 = nn.Conv2d(cin, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)
        self.l3 = nn.Conv2d(32, 64, 3, 2, 1)

    def forward(self, x):
        c1 = F.relu(self.l1(x))
        c2 = F.relu(self.l2(c1))
        return F.relu(self.l3(c2)), c2


class MaskDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.fuse = nn.Conv2d(128, 64, 3, 1, 1)
        self.skip = nn.Conv2d(32, 64, 3, 1, 1)
        self.out = nn.Conv2d(64, 1, 3, 1, 1)

    def forward(self, feat, ref, skip, size):
        h = F.relu(self.fuse(torch.cat([feat, ref], 1)))
        h = F.relu(F.interpolate(h, skip.shape[-2:]) + self.skip(skip))
        return torch.sigmoid(F.interpolate(self.out(h), size, mode="bilinear", align_corners=False))


class ClickNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = FrameEncoder(6), MaskDecoder()

    def forward(self, frame, mask, scribble):
        x = torch.cat([frame, mask, scribble], 1)
        feat, skip = self.enc(x)
        return self.dec(feat, feat, skip, frame.shape[-2:]), feat


class PropNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc, self.dec = FrameEncoder(5), MaskDecoder()

    def forward(self, frame, prev_mask, mask, ref):
        feat, skip = self.enc(torch.cat([frame, prev_mask, mask], 1))
        return self.dec(feat, ref, skip, frame.shape[-2:])


class VideoSegmenter:
    def __init__(self, frames):
        self.click_net = ClickNet().cuda().eval()
        self.prop_net = PropNet().cuda().eval()
        self.frames = torch.from_numpy(frames).permute(0, 3, 1, 2).cuda()
        self.num_frames = len(frames)
        self.masks = [torch.zeros(1, 1, *self.frames.shape[-2:], device="cuda") for _ in range(self.num_frames)]
        self.ref = None

    def frame(self, n):
        return self.frames[n:n + 1].float() / 255

    def interact(self, target, points):
        scribble = torch.zeros(1, 2, *self.frames.shape[-2:])
        for y, x, positive in points:
            scribble[0, 0 if positive else 1, y, x] = 1
        with torch.no_grad():
            mask, ref = self.click_net(self.frame(target), self.masks[target], scribble.cuda())
        self.masks[target] = mask
        self.ref = ref if self.ref is None else torch.max(self.ref, ref)

    def prop_forward(self, target, end):
        for n in range(target + 1, end + 1):
            self.masks[n] = self.prop_net(self.frame(n), self.masks[n - 1], self.masks[n], self.ref)

    def prop_backward(self, target, end):
        for n in reversed(range(end, target)):
            self.masks[n] = self.prop_net(self.frame(n), self.masks[n + 1], self.masks[n], self.ref)

    def propagate(self, target):
        left, right = 0, self.num_frames - 1
        self.prop_forward(target, right)
        self.prop_backward(target, left)

    def result(self):
        return torch.cat([(m > 0.5).to(torch.uint8) for m in self.masks]).cpu().numpy()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="seoungwugoh/ivs-demo#1", memory=500)
def ivs_propagate(fixed=False):
    """The interactive video segmentation propagates masks from frame to frame without `torch.no_grad()` (the old `volatile` flag has no
    effect any more), so the graph of all frames is kept and memory grows with each frame. Cured by: `with torch.no_grad():` around the
    propagation.
    """
    frames = np.zeros((50, 240, 432, 3), dtype=np.uint8)
    segmenter = VideoSegmenter(frames)
    for target, points in [(20, [(100, 200, True)]), (35, [(60, 80, True), (10, 10, False)])]:
        segmenter.interact(target, points)
        if fixed:
            with torch.no_grad():
                segmenter.propagate(target)
        else:
            segmenter.propagate(target)
    return segmenter.result().shape
