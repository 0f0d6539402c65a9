"""Programs after public threads about images and video."""

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected

# Segmentation of objects by a plain transformer with queries, whose masks are judged at the size of the photo.


class EoMTInstanceSegmentation(nn.Module):
    def __init__(self, num_queries=100, num_classes=80, dim=192, depth=3):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 16, 16)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(dim, 3, dim * 4, 0.0, batch_first=True) for _ in range(depth))
        self.q = nn.Embedding(num_queries, dim)
        self.class_head, self.mask_head = nn.Linear(dim, num_classes + 1), nn.Linear(dim, dim)
        self.upscale = nn.Sequential(nn.ConvTranspose2d(dim, dim, 2, 2), nn.GELU(), nn.ConvTranspose2d(dim, dim, 2, 2))

    def forward(self, imgs):
        x = self.patch_embed(imgs)
        b, dim, h, w = x.shape
        x = torch.cat((self.q.weight.expand(b, -1, -1), x.flatten(2).transpose(1, 2)), 1)
        for block in self.blocks:
            x = block(x)
        q, x = x[:, : self.q.num_embeddings], x[:, self.q.num_embeddings :]
        features = self.upscale(x.transpose(1, 2).reshape(b, dim, h, w))
        return torch.einsum("bqc,bchw->bqhw", self.mask_head(q), features), self.class_head(q)


def get_labels_masks_scores(mask_logits, class_logits):
    class_scores, labels = class_logits.softmax(-1)[..., :-1].max(-1)
    masks = mask_logits > 0
    masks_fp32 = masks.float().flatten(2)
    mask_scores = (mask_logits.sigmoid().flatten(2) * masks_fp32).sum(2) / (masks_fp32.sum(2) + 1e-6)
    return labels, masks, class_scores * mask_scores


class EoMTInstanceSegmentationTrain:
    def __init__(self, revised, image_size=(640, 640)):
        self.model, self.image_size, self.revised = EoMTInstanceSegmentation().cuda(), image_size, revised
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-4)

    def training_step(self, images, masks):
        mask_logits, class_logits = self.model(images.cuda())
        target = F.interpolate(masks.cuda(), mask_logits.shape[-2:])
        loss = F.binary_cross_entropy_with_logits(mask_logits, target) + class_logits.square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    @torch.no_grad()
    def validation_step(self, image, original_size):
        mask_logits, class_logits = self.model(F.interpolate(image.cuda(), self.image_size))
        num_queries = mask_logits.shape[1]
        chunk_size = num_queries
        if self.revised:
            pixels = self.image_size[0] * self.image_size[1]
            chunk_size = max(1, num_queries * pixels // (original_size[0] * original_size[1]))
        predictions = []
        for first in range(0, num_queries, chunk_size):
            part = slice(first, first + chunk_size)
            logits = F.interpolate(mask_logits[:, part], original_size, mode="bilinear")
            labels, masks, scores = get_labels_masks_scores(logits, class_logits[:, part])
            predictions.append((labels, masks.cpu() if self.revised else masks, scores))
        return predictions


@expected("enlarged", fix="split|part|chunk", thread="lightly-ai/lightly-train#941", memory=2000)
def finetune_eomt(fixed=False):
    """`validation_step` enlarges the mask logits of all 100 queries to the size of the original photo at once, and
    `get_labels_masks_scores` makes several further float tensors of that size (masks, float masks, sigmoid, product); training only works
    at the small size of the model. Cured by: scoring the queries in chunks and moving the finished masks to the CPU.
    """
    task = EoMTInstanceSegmentationTrain(revised=fixed)
    for step in range(3):
        task.training_step(torch.rand(2, 3, 640, 640), torch.rand(2, 100, 160, 160))
    predictions = task.validation_step(torch.rand(1, 3, 1435, 1943), (1435, 1943))
    return len(predictions)


# A video made consistent by a network trained on the pairs of its frames.


class UNet(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, width, 3, 1, 1), nn.Conv2d(width, width * 2, 3, 2, 1)
        self.conv3 = nn.Conv2d(width * 2, width * 4, 3, 2, 1)
        self.up4, self.up5 = nn.ConvTranspose2d(width * 4, width * 2, 2, 2), nn.ConvTranspose2d(width * 4, width, 2, 2)
        self.conv6 = nn.Conv2d(width * 2, 6, 3, 1, 1)

    def forward(self, x):
        conv1 = F.leaky_relu(self.conv1(x), 0.2)
        conv2 = F.leaky_relu(self.conv2(conv1), 0.2)
        conv3 = F.leaky_relu(self.conv3(conv2), 0.2)
        up = torch.cat((self.up4(conv3), conv2), 1)
        return self.conv6(torch.cat((self.up5(up), conv1), 1))


class FrameFolder:
    """Stands for the folders with the input frames and the processed ones."""

    def __init__(self, num_of_frames, height=480, width=832):
        self.num_of_frames = num_of_frames
        self.pixels = torch.randint(0, 256, (8, 2, height, width, 3), dtype=torch.uint8)

    def prepare_paired_input(self, frame_id):
        net_in, net_gt = self.pixels[frame_id % 8]
        return net_in[None], net_gt[None]


def to_network(image, device):
    return image.permute(0, 3, 1, 2).float().to(device) / 255


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="yzxing87/pytorch-deep-video-prior#4", memory=1000)
def train_video_prior(fixed=False, num_of_frames=200, epochs=2, device="cuda"):
    """Before training, all pairs of frames of the video are loaded to the GPU into `data_in_memory`, so memory grows with the number of
    frames until it's full. Cured by: loading a pair of frames to the GPU just before its iteration.
    """
    net = UNet().to(device)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    folder = FrameFolder(num_of_frames)
    data_in_memory = [None] * num_of_frames
    if not fixed:
        for frame_id in range(num_of_frames):
            net_in, net_gt = folder.prepare_paired_input(frame_id)
            data_in_memory[frame_id] = to_network(net_in, device), to_network(net_gt, device)
    for epoch in range(1, epochs + 1):
        for frame_id in torch.randperm(num_of_frames).tolist():
            if fixed:
                net_in, net_gt = (to_network(image, device) for image in folder.prepare_paired_input(frame_id))
            else:
                net_in, net_gt = data_in_memory[frame_id]
            prediction = net(net_in)
            prediction_main, prediction_minor = prediction[:, :3], prediction[:, 3:]
            diff_main, diff_minor = (prediction_main - net_gt).abs(), (prediction_minor - net_gt).abs()
            confidence = torch.lt(diff_main, diff_minor).float()
            crt_loss = (diff_main * confidence).mean() + (diff_minor * (1 - confidence)).mean()
            optimizer.zero_grad()
            crt_loss.backward()
            optimizer.step()
    return crt_loss.item()


# Which parts of an image speak for a class: class activation maps with derivatives of second order.


class ActivationsAndGradients:
    def __init__(self, model, target_layers, detach=True):
        self.model, self.detach = model, detach
        self.activations, self.gradients, self.handles = [], [], []
        for target_layer in target_layers:
            self.handles.append(target_layer.register_forward_hook(self.save_activation))
            self.handles.append(target_layer.register_forward_hook(self.save_gradient))

    def save_activation(self, module, input, output):
        self.activations.append(output.cpu().detach() if self.detach else output)

    def save_gradient(self, module, input, output):
        def _store_grad(grad):
            self.gradients = [grad.cpu().detach() if self.detach else grad] + self.gradients

        output.register_hook(_store_grad)

    def __call__(self, x):
        self.gradients, self.activations = [], []
        return self.model(x)

    def release(self):
        for handle in self.handles:
            handle.remove()


class ShapleyCAM:
    def __init__(self, model, target_layers, revised=False):
        self.model, self.revised = model.eval(), revised
        self.activations_and_grads = ActivationsAndGradients(model, target_layers, detach=False)

    def get_cam_weights(self, activations, grads):
        hvp = torch.autograd.grad(grads, activations, grad_outputs=activations, retain_graph=False, allow_unused=True)[0]
        hvp = torch.zeros_like(activations) if hvp is None else hvp
        return (grads - 0.5 * hvp).mean((2, 3))

    def __call__(self, input_tensor, category):
        input_tensor = input_tensor.requires_grad_(True)
        outputs = self.activations_and_grads(input_tensor)
        loss = outputs[:, category].sum()
        torch.autograd.grad(loss, input_tensor, retain_graph=True, create_graph=True)
        activations, grads = self.activations_and_grads.activations[-1], self.activations_and_grads.gradients[-1]
        weights = self.get_cam_weights(activations, grads)
        cam = (weights[:, :, None, None] * activations).sum(1).relu()
        return F.interpolate(cam[:, None], input_tensor.shape[-2:], mode="bilinear").detach().cpu()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.activations_and_grads.release()
        if self.revised:
            self.activations_and_grads.activations.clear()
            self.activations_and_grads.gradients.clear()


class SmallResNet(nn.Module):
    def __init__(self, num_classes=100):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2))
        self.layer3 = nn.Sequential(nn.Conv2d(64, 128, 3, 1, 1), nn.BatchNorm2d(128), nn.SiLU())
        self.layer4 = nn.Sequential(nn.Conv2d(128, 256, 3, 2, 1), nn.BatchNorm2d(256), nn.SiLU())
        self.fc = nn.Linear(256, num_classes)

    def forward(self, x):
        x = self.layer4(self.layer3(self.stem(x)))
        return self.fc(F.gelu(x).mean((2, 3))).softmax(-1)


@expected("reference_cycle", fix=r"weakref|detach|gc\.collect", thread="jacobgil/pytorch-grad-cam#575", memory=1000)
def explain_validation_images(fixed=False):
    """Each image gets a `ShapleyCAM`, whose `ActivationsAndGradients` keeps activations and gradients that were made with
    `create_graph=True` and still hang on their graph; the hook `_store_grad` in that graph refers back to the object, so graph and object
    hold each other and stay after the `with` block (only the handles are removed). Memory grows with each image. Cured by: breaking the
    graph explicitly on release: clearing/detaching the stored activations and gradients.
    """
    model = SmallResNet().cuda()
    maps = []
    for image_id in range(60):
        input_tensor = torch.rand(4, 3, 224, 224).cuda()
        with ShapleyCAM(model, [model.layer4], revised=fixed) as cam:
            maps.append(cam(input_tensor, category=image_id))
    return len(maps)


# Training of a tracker that segments its target, with meters of losses and accuracies for the printout.


class AverageMeter:
    def __init__(self):
        self.val, self.avg, self.sum, self.count, self.history = 0, 0, 0, 0, []

    def update(self, val, n=1):
        self.val = val
        self.sum = self.sum + val * n
        self.count += n
        self.avg = self.sum / self.count

    def new_epoch(self):
        self.history.append(self.avg if self.count else None)
        self.val, self.avg, self.sum, self.count = 0, 0, 0, 0


class SegmNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.feature_extractor = nn.Sequential(nn.Conv2d(3, 32, 7, 4, 3), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
        self.mask_encoder = nn.Conv2d(1, 64, 8, 8)
        self.decoder = nn.Sequential(nn.Conv2d(128, 64, 3, 1, 1), nn.ReLU(), nn.Conv2d(64, 1, 3, 1, 1))

    def forward(self, train_masks, test_imgs):
        feat = self.feature_extractor(test_imgs)
        scores = self.decoder(torch.cat((feat, self.mask_encoder(train_masks)), 1))
        return F.interpolate(scores, test_imgs.shape[-2:], mode="bilinear")


class LWLActor:
    def __init__(self, net):
        self.net = net

    def __call__(self, data):
        segm_pred = self.net(data["train_masks"], data["test_images"])
        loss = F.binary_cross_entropy_with_logits(segm_pred, data["test_masks"])
        prob = segm_pred.sigmoid()
        inter = (prob * data["test_masks"]).sum((1, 2, 3))
        union = (prob + data["test_masks"]).sum((1, 2, 3)) - inter
        return loss, {"Loss/total": loss.item(), "Stats/acc": (inter / (union + 1e-6)).mean()}


class LTRTrainer:
    def __init__(self, actor, loaders, optimizer, revised):
        self.actor, self.loaders, self.optimizer, self.revised = actor, loaders, optimizer, revised
        self.stats = {name: {} for name in loaders}

    def cycle_dataset(self, name):
        training = name == "train"
        self.actor.net.train(training)
        with torch.set_grad_enabled(training):
            for i, data in enumerate(self.loaders[name], 1):
                data = {key: value.cuda() for key, value in data.items()}
                loss, stats = self.actor(data)
                if training:
                    self.optimizer.zero_grad()
                    loss.backward()
                    self.optimizer.step()
                self._update_stats(stats, len(data["test_images"]), name)
                self._print_stats(i, name)

    def _update_stats(self, new_stats, batch_size, name):
        for key, val in new_stats.items():
            if self.revised and torch.is_tensor(val):
                val = val.item()
            self.stats[name].setdefault(key, AverageMeter()).update(val, batch_size)

    def _print_stats(self, i, name, print_interval=10):
        if i % print_interval == 0:
            return f"[{name}: {i}] " + ", ".join(f"{key}: {float(meter.avg):.5f}" for key, meter in self.stats[name].items())

    def train(self, max_epochs):
        for epoch in range(max_epochs):
            for name in self.loaders:
                self.cycle_dataset(name)
            for meters in self.stats.values():
                for meter in meters.values():
                    meter.new_epoch()


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="visionml/pytracking#313", memory=1000)
def train_segmenting_tracker(fixed=False):
    """`_update_stats` gives the meter `Stats/acc` as a tensor with its graph to `AverageMeter.update`, whose `sum` adds them up, so the
    graph of the accuracy (probabilities, products with the masks) of every iteration stays. Cured by: detaching / taking the value
    (`.item()`) if it's a tensor before the meter is updated.
    """
    sample = lambda: {
        "train_masks": torch.rand(8, 1, 480, 832),
        "test_images": torch.rand(8, 3, 480, 832),
        "test_masks": torch.rand(8, 1, 480, 832),
    }
    train, val = [sample() for _ in range(3)] * 12, [sample()] * 2
    net = SegmNet().cuda()
    trainer = LTRTrainer(LWLActor(net), {"train": train, "val": val}, torch.optim.Adam(net.parameters(), 1e-4), fixed)
    trainer.train(max_epochs=1)
    return len(trainer.stats["train"])


# Evaluation of found objects with masks against the annotated ones.


class SegmentationHead(nn.Module):
    def __init__(self, num_queries=200, dim=128):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, dim, 16, 16), nn.GELU(), nn.Conv2d(dim, dim, 3, 1, 1))
        self.queries, self.bbox = nn.Embedding(num_queries, dim), nn.Linear(dim, 4)

    def forward(self, samples):
        spatial = F.interpolate(self.backbone(samples), scale_factor=4, mode="bilinear")
        masks = torch.einsum("qc,bchw->bqhw", self.queries.weight, spatial)
        return {"pred_masks": masks, "pred_boxes": self.bbox(self.queries.weight).sigmoid()}


class PostProcess:
    def __init__(self, eval_max_dets=180):
        self.eval_max_dets = eval_max_dets

    def __call__(self, outputs, target_size):
        masks = outputs["pred_masks"][0, : self.eval_max_dets, None]
        masks = torch.cat([F.interpolate(part, target_size, mode="bilinear") > 0 for part in masks.split(10)])
        labels = [0 if i < 160 else 1 for i in range(self.eval_max_dets)]
        return {"masks": masks.squeeze(1), "labels": labels}


def _compute_mask_iou(pred_masks, gt_masks, chunk=None):
    n, m = len(pred_masks), len(gt_masks)
    if chunk is None:
        pred_flat = pred_masks.bool().view(n, -1).float()
        gt_flat = gt_masks.bool().view(m, -1).float()
        inter = pred_flat @ gt_flat.t()
        area = pred_flat.sum(1)[:, None] + gt_flat.sum(1)[None]
        return inter / (area - inter).clamp(min=1e-6)
    rows = []
    for preds in pred_masks.split(chunk):
        preds = preds.bool().view(len(preds), -1).float()
        row = []
        for gts in gt_masks.split(chunk):
            gts = gts.bool().view(len(gts), -1).float()
            inter = preds @ gts.t()
            area = preds.sum(1)[:, None] + gts.sum(1)[None]
            row.append(inter / (area - inter).clamp(min=1e-6))
        rows.append(torch.cat(row, 1))
    return torch.cat(rows)


def match_predictions(results, target, chunk):
    matched = {}
    for label in sorted(set(target["labels"])):
        preds = results["masks"][[i for i, value in enumerate(results["labels"]) if value == label]]
        gts = target["masks"][[i for i, value in enumerate(target["labels"]) if value == label]]
        matched[label] = _compute_mask_iou(preds, gts, chunk).cpu()
    return matched


@expected("large_cast", fix="split|part|chunk", thread="roboflow/rf-detr#1463", memory=1500)
@torch.no_grad()
def evaluate_segmentation(fixed=False, size=(1080, 1400)):
    """`_compute_mask_iou` turns all predicted masks of a class (160 at the size of the photo) from bool to float32 at once for the matrix
    product, four times their size (924 MiB), and the annotated masks too. Cured by: converting predictions and ground truths in chunks.
    """
    model, postprocess = SegmentationHead().cuda().eval(), PostProcess()
    matched = []
    for _ in range(2):
        outputs = model(torch.rand(1, 3, 432, 432).cuda())
        target = {"masks": torch.zeros(30, *size, dtype=torch.bool).cuda(), "labels": [0] * 25 + [1] * 5}
        matched.append(match_predictions(postprocess(outputs, size), target, chunk=16 if fixed else None))
    return len(matched)


# A GAN with gradients at several scales, whose progress is drawn as grids of samples.


class PixelwiseNorm(nn.Module):
    def forward(self, x, alpha=1e-8):
        return x / x.pow(2).mean(1, keepdim=True).add(alpha).sqrt()


class GenGeneralConvBlock(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv_1, self.conv_2 = nn.Conv2d(in_channels, out_channels, 3, 1, 1), nn.Conv2d(
            out_channels, out_channels, 3, 1, 1
        )
        self.pixNorm, self.lrelu = PixelwiseNorm(), nn.LeakyReLU(0.2)

    def forward(self, x):
        y = F.interpolate(x, scale_factor=2)
        y = self.pixNorm(self.lrelu(self.conv_1(y)))
        return self.pixNorm(self.lrelu(self.conv_2(y)))


class Generator(nn.Module):
    def __init__(self, widths=(128, 128, 64, 32, 16, 8), latent_size=128):
        super().__init__()
        self.initial = nn.ConvTranspose2d(latent_size, widths[0], 8)
        self.layers = nn.ModuleList(GenGeneralConvBlock(a, b) for a, b in zip(widths, widths[1:]))
        self.rgb_converters = nn.ModuleList(nn.Conv2d(width, 3, 1) for width in widths)

    def forward(self, x):
        y = self.initial(x[:, :, None, None])
        outputs = [self.rgb_converters[0](y)]
        for block, converter in zip(self.layers, self.rgb_converters[1:]):
            y = block(y)
            outputs.append(converter(y))
        return outputs


class Discriminator(nn.Module):
    def __init__(self, widths=(8, 16, 32, 64, 128, 128)):
        super().__init__()
        self.rgb_to_features = nn.ModuleList(nn.Conv2d(3, width, 1) for width in widths)
        self.layers = nn.ModuleList(
            nn.Conv2d(2 * a if i else a, b, 3, 1, 1) for i, (a, b) in enumerate(zip(widths, widths[1:]))
        )
        self.final = nn.Linear(widths[-1] * 2, 1)

    def forward(self, inputs):
        y = self.rgb_to_features[0](inputs[-1])
        for layer, converter, image in zip(self.layers, self.rgb_to_features[1:], inputs[-2::-1]):
            y = F.avg_pool2d(F.leaky_relu(layer(y), 0.2), 2)
            y = torch.cat((y, converter(image)), 1)
        return self.final(y.mean((2, 3)))


class MSG_GAN:
    def __init__(self, revised):
        self.gen, self.dis, self.revised = Generator().cuda(), Discriminator().cuda(), revised
        self.gen_optim, self.dis_optim = (
            torch.optim.Adam(net.parameters(), 3e-3, (0.0, 0.99)) for net in (self.gen, self.dis)
        )

    def optimize_discriminator(self, noise, real_batch):
        fake_samples = [sample.detach() for sample in self.gen(noise)]
        loss = F.softplus(self.dis(fake_samples)).mean() + F.softplus(-self.dis(real_batch)).mean()
        self.dis_optim.zero_grad()
        loss.backward()
        self.dis_optim.step()
        return loss.item()

    def optimize_generator(self, noise):
        loss = F.softplus(-self.dis(self.gen(noise))).mean()
        self.gen_optim.zero_grad()
        loss.backward()
        self.gen_optim.step()
        return loss.item()

    @staticmethod
    def create_grid(samples):
        samples = [torch.clamp(sample.detach() / 2 + 0.5, min=0, max=1) for sample in samples]
        return [sample.cpu() for sample in samples]

    def train(self, data, num_epochs, feedback_factor=5, num_samples=36):
        fixed_input = torch.randn(num_samples, 128).cuda()
        for epoch in range(num_epochs):
            for i, batch in enumerate(data, 1):
                images = batch.cuda()
                real = [F.avg_pool2d(images, 2**k) if k else images for k in range(5, -1, -1)]
                noise = torch.randn(len(images), 128).cuda()
                self.optimize_discriminator(noise, real)
                self.optimize_generator(noise)
                if i % feedback_factor == 0:
                    if self.revised:
                        with torch.no_grad():
                            self.create_grid(self.gen(fixed_input))
                    else:
                        self.create_grid(self.gen(fixed_input))


@expected("evaluation_keeps_graphs", fix="no_grad", thread="akanimax/msg-gan-v1#2", memory=1000)
def train_msg_gan(fixed=False):
    """For the grids of samples `train` calls `self.gen(fixed_input)` with gradients enabled, so the activations of all layers of the
    generator for the 36 large samples are kept for a backward pass that never comes; `create_grid` only detaches the finished pictures.
    Training itself (4 images) needs far less. Cured by: `with torch.no_grad()` around the sampling.
    """
    msg_gan = MSG_GAN(revised=fixed)
    msg_gan.train([torch.rand(4, 3, 256, 256) * 2 - 1 for _ in range(10)], num_epochs=1)


# A video made by a diffusion model: the last stage turns its latents into frames.


class WanResidualBlock(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.conv, self.shortcut = nn.Conv3d(in_dim, out_dim, 3, padding=1), nn.Conv3d(in_dim, out_dim, 1)

    def forward(self, x):
        return self.shortcut(x) + self.conv(F.silu(x))


class WanDecoder3d(nn.Module):
    def __init__(self, z_dim=16, dims=(32, 16, 16, 8)):
        super().__init__()
        self.conv_in = nn.Conv3d(z_dim, dims[0], 3, padding=1)
        self.up_blocks = nn.ModuleList(WanResidualBlock(a, b) for a, b in zip(dims, dims[1:]))
        self.conv_out = nn.Conv3d(dims[-1], 3, 3, padding=1)

    def forward(self, x):
        x = self.conv_in(x)
        for i, block in enumerate(self.up_blocks):
            x = F.interpolate(block(x), scale_factor=(2 if i < 2 else 1, 2, 2))
        return self.conv_out(F.silu(x))


class AutoencoderKLWan(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder, self.post_quant_conv = WanDecoder3d(), nn.Conv3d(16, 16, 1)

    def decode(self, z):
        x = self.post_quant_conv(z)
        frames = []
        for i in range(x.shape[2]):
            frames.append(self.decoder(x[:, :, i : i + 1]))
        return torch.cat(frames, 2)


class DenoisingStage:
    def __init__(self, num_inference_steps=4):
        self.transformer = nn.Conv3d(16, 16, 3, padding=1).cuda()
        self.num_inference_steps = num_inference_steps

    def forward(self, batch):
        latents = batch["latents"]
        for _ in range(self.num_inference_steps):
            latents = latents - self.transformer(latents) / self.num_inference_steps
        batch["latents"] = latents
        return batch


class DecodingStage:
    def __init__(self, vae, revised):
        self.vae, self.revised = vae, revised

    def decode(self, latents, chunk=2):
        if not self.revised:
            return self.vae.decode(latents)
        return torch.cat([self.vae.decode(part).cpu() for part in latents.split(chunk, 2)], 2)

    def forward(self, batch):
        image = self.decode(batch["latents"])
        batch["output"] = image.div_(2).add_(0.5).clamp_(0, 1).cpu().float()
        return batch


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="sgl-project/sglang#16704", memory=500)
@torch.no_grad()
def generate_video(fixed=False, num_frames=96, height=480, width=832):
    """`AutoencoderKLWan.decode` decodes the latents piece by piece but collects all the finished frames on the GPU (`frames`, then
    `torch.cat`), so a video with many frames doesn't fit, although one piece needs little. Cured by: decoding small chunks of latents and
    moving each to the CPU before they are concatenated.
    """
    stages = [DenoisingStage(), DecodingStage(AutoencoderKLWan().cuda(), revised=fixed)]
    batch = {"latents": torch.randn(1, 16, num_frames // 4, height // 8, width // 8).cuda()}
    for stage in stages:
        batch = stage.forward(batch)
    return tuple(batch["output"].shape)


# Recognition of lines of text: images of one height, as wide as their text is long.


class TextLineDataset:
    def __init__(self, widths, max_width=None, height=32):
        self.widths = [width for width in widths if max_width is None or width <= max_width]
        self.height = height

    def __len__(self):
        return len(self.widths)

    def __getitem__(self, index):
        width = self.widths[index]
        return torch.rand(3, self.height, width), torch.randint(1, 2000, (max(width // 32, 1),))


def rec_collate(samples):
    widest = max(img.shape[-1] for img, _ in samples)
    imgs = torch.stack([F.pad(img, (0, widest - img.shape[-1])) for img, _ in samples])
    lengths = torch.tensor([len(label) for _, label in samples])
    return {"img": imgs, "label": torch.cat([label for _, label in samples]), "length": lengths}


class CRNN(nn.Module):
    def __init__(self, n_class=2000, hidden=128):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 32, 3, 1, 1),
            nn.BatchNorm2d(32),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 3, 1, 1),
            nn.BatchNorm2d(64),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, 1, 1),
            nn.BatchNorm2d(128),
            nn.ReLU(),
            nn.MaxPool2d((8, 1)),
        )
        self.neck, self.head = nn.LSTM(128, hidden, bidirectional=True), nn.Linear(2 * hidden, n_class)

    def forward(self, x):
        x = self.backbone(x).squeeze(2).permute(2, 0, 1)
        return self.head(self.neck(x)[0])


class CTCLoss(nn.Module):
    def forward(self, pred, label, length):
        log_probs = pred.log_softmax(-1)
        steps = torch.full((pred.shape[1],), pred.shape[0], dtype=torch.long)
        return F.ctc_loss(log_probs, label, steps, length, zero_infinity=True)


@expected("larger_step", fix="split|cut|as large", thread="WenmuZhou/PytorchOCR#95", memory=1000)
def train_recognizer(fixed=False, batch_size=32):
    """One line of text is far wider (3600 pixels) than all others, and `rec_collate` pads the whole batch of 32 to the widest image, so
    that one batch is more than ten times as large as the others. Cured by: leaving out the images that are too wide (or a smaller batch
    size).
    """
    widths = torch.randint(64, 321, (480,)).tolist()
    widths[300] = 3600
    train_dataset = TextLineDataset(widths, max_width=640 if fixed else None)
    train_loader = torch.utils.data.DataLoader(train_dataset, batch_size, collate_fn=rec_collate)
    net, loss_func = CRNN().cuda(), CTCLoss()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    for epoch in range(1):
        for data in train_loader:
            data = {key: value.cuda() if key != "length" else value for key, value in data.items()}
            output = net(data["img"])
            loss = loss_func(output, data["label"], data["length"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return loss.item()


# Old footage enlarged by a recurrent network that goes through the video in both directions.


class ResidualBlocksWithInputConv(nn.Module):
    def __init__(self, in_channels, out_channels=32, num_blocks=3):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, 1, 1)
        self.blocks = nn.ModuleList(nn.Conv2d(out_channels, out_channels, 3, 1, 1) for _ in range(num_blocks))

    def forward(self, x):
        x = F.leaky_relu(self.conv(x), 0.1)
        for block in self.blocks:
            x = x + F.relu(block(x))
        return x


class BasicVSRPlusPlus(nn.Module):
    def __init__(self, mid_channels=32):
        super().__init__()
        self.feat_extract = ResidualBlocksWithInputConv(3, mid_channels)
        self.spynet = nn.Conv2d(6, 2, 7, 1, 3)
        self.backbone = nn.ModuleDict(
            {
                name: ResidualBlocksWithInputConv((2 + i) * mid_channels, mid_channels)
                for i, name in enumerate(("backward_1", "forward_1"))
            }
        )
        self.reconstruction = ResidualBlocksWithInputConv(3 * mid_channels, mid_channels)
        self.upsample = nn.Sequential(nn.Conv2d(mid_channels, 48, 3, 1, 1), nn.PixelShuffle(4))
        self.mid_channels = mid_channels

    def flow_warp(self, x, flow):
        n, _, h, w = x.shape
        ys, xs = torch.meshgrid(
            torch.linspace(-1, 1, h, device=x.device), torch.linspace(-1, 1, w, device=x.device), indexing="ij"
        )
        grid = torch.stack((xs, ys), -1).expand(n, -1, -1, -1) + flow.permute(0, 2, 3, 1) / w
        return F.grid_sample(x, grid, align_corners=True)

    def propagate(self, feats, flows, module_name):
        order = list(range(len(feats["spatial"])))
        order = order[::-1] if module_name == "backward_1" else order
        feat_prop, feats[module_name] = torch.zeros_like(feats["spatial"][0]), []
        for step, i in enumerate(order):
            if step > 0:
                feat_prop = self.flow_warp(feat_prop, flows[min(i, order[step - 1])])
            known = [feats["spatial"][i]] + ([feats["backward_1"][i]] if module_name == "forward_1" else [])
            feat_prop = feat_prop + self.backbone[module_name](torch.cat(known + [feat_prop], 1))
            feats[module_name].append(feat_prop)
        if module_name == "backward_1":
            feats[module_name] = feats[module_name][::-1]

    def forward(self, lqs):
        frames = lqs.unbind(1)
        flows = [self.spynet(torch.cat(pair, 1)) for pair in zip(frames[:-1], frames[1:])]
        feats = {"spatial": [self.feat_extract(frame) for frame in frames]}
        for module_name in ("backward_1", "forward_1"):
            self.propagate(feats, flows, module_name)
        outputs = []
        for i, frame in enumerate(frames):
            hr = self.reconstruction(torch.cat([feats[key][i] for key in ("spatial", "backward_1", "forward_1")], 1))
            outputs.append(self.upsample(hr) + F.interpolate(frame, scale_factor=4, mode="bilinear"))
        return torch.stack(outputs, 1)


def restoration_video_inference(model, data, max_seq_len=None):
    with torch.no_grad():
        if max_seq_len is None:
            return model(data.cuda()).cpu()
        result = [model(part.cuda()).cpu() for part in data.split(max_seq_len, 1)]
        return torch.cat(result, 1)


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="open-mmlab/mmagic#698", memory=1000)
def restore_footage(fixed=False, frames=24):
    """The whole video goes through `BasicVSRPlusPlus` at once; the bidirectional propagation keeps the features of all frames (spatial,
    backward, forward) and all enlarged frames on the GPU, so memory grows with the number of frames. Cured by: separating the sequence into
    smaller segments (`max_seq_len`), results to the CPU.
    """
    model = BasicVSRPlusPlus().cuda().eval()
    output = restoration_video_inference(model, torch.rand(1, frames, 3, 216, 384), max_seq_len=6 if fixed else None)
    return tuple(output.shape)


# A denoising network, whose pictures are judged by their structural similarity.


def structural_similarity_index_measure(preds, target, kernel_size=11, data_range=1.0):
    channel = preds.shape[1]
    gauss = torch.exp(-(torch.arange(kernel_size) - kernel_size // 2).float().pow(2) / 4.5)
    kernel = torch.outer(gauss, gauss).div(gauss.sum() ** 2).expand(channel, 1, -1, -1).to(preds.device)
    stacked = torch.cat((preds, target, preds * preds, target * target, preds * target))
    mu_p, mu_t, pp, tt, pt = F.conv2d(stacked, kernel, groups=channel).chunk(5)
    c1, c2 = (0.01 * data_range) ** 2, (0.03 * data_range) ** 2
    sigma_p, sigma_t, sigma_pt = pp - mu_p.pow(2), tt - mu_t.pow(2), pt - mu_p * mu_t
    return (
        (2 * mu_p * mu_t + c1) * (2 * sigma_pt + c2) / ((mu_p.pow(2) + mu_t.pow(2) + c1) * (sigma_p + sigma_t + c2))
    ).mean()


class StructuralSimilarityIndexMeasure(nn.Module):
    def __init__(self):
        super().__init__()
        self.preds, self.target = [], []

    def update(self, preds, target):
        self.preds.append(preds)
        self.target.append(target)

    def forward(self, preds, target):
        self.update(preds, target)
        return structural_similarity_index_measure(preds, target)

    def compute(self):
        return structural_similarity_index_measure(torch.cat(self.preds), torch.cat(self.target))

    def reset(self):
        self.preds.clear()
        self.target.clear()


class DnCNN(nn.Module):
    def __init__(self, features=32, num_of_layers=5):
        super().__init__()
        layers = [nn.Conv2d(3, features, 3, 1, 1), nn.ReLU()]
        for _ in range(num_of_layers - 2):
            layers += [nn.Conv2d(features, features, 3, 1, 1), nn.BatchNorm2d(features), nn.ReLU()]
        self.dncnn = nn.Sequential(*layers, nn.Conv2d(features, 3, 3, 1, 1))

    def forward(self, x):
        return x - self.dncnn(x)


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|clear|None", thread="Lightning-AI/torchmetrics#1094", memory=1000)
def judge_denoiser(fixed=False):
    """The metric object `StructuralSimilarityIndexMeasure` stores the restored and the clean images of every batch on the GPU
    (`self.preds`, `self.target`) in each call, for a `compute` over everything, though only the value of each batch is wanted; memory grows
    with each batch. Cured by: using the functional `structural_similarity_index_measure` for the value of the batch.
    """
    model, ssim = DnCNN().cuda().eval(), StructuralSimilarityIndexMeasure().cuda()
    measure = structural_similarity_index_measure if fixed else ssim
    test_loader = [torch.rand(8, 3, 256, 384) for _ in range(4)] * 16
    scores = []
    with torch.no_grad():
        for clean in test_loader:
            clean = clean.cuda()
            restored = model(clean + 0.1 * torch.randn_like(clean)).clamp(0, 1)
            scores.append(measure(restored, clean).item())
    return sum(scores) / len(scores)
