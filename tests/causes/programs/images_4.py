"""Programs after public threads on pictures: detection, segmentation, video, GANs, optical flow, medical volumes, point clouds."""
import random

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import SamConfig, SamMaskDecoderConfig, SamModel, SamPromptEncoderConfig, SamVisionConfig

from expected import expected


# Segment Anything out of transformers: masks for points that somebody clicked.

def build_sam(image_size=512):
    vision = SamVisionConfig(hidden_size=240, num_hidden_layers=12, num_attention_heads=6, image_size=image_size, output_channels=128, num_pos_feats=64,
                             mlp_dim=960, window_size=7, global_attn_indexes=[2, 5, 8, 11])
    prompt = SamPromptEncoderConfig(hidden_size=128, image_size=image_size, patch_size=16)
    decoder = SamMaskDecoderConfig(hidden_size=128, mlp_dim=512, num_attention_heads=8, iou_head_hidden_dim=128)
    return SamModel(SamConfig(vision_config=vision.to_dict(), prompt_encoder_config=prompt.to_dict(), mask_decoder_config=decoder.to_dict()))


class PointProcessor:
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])

    def __init__(self, size):
        self.size = size

    def __call__(self, raw_image, input_points):
        height, width = raw_image.shape[:2]
        scale = self.size / max(height, width)
        pixels = torch.from_numpy(raw_image).permute(2, 0, 1)[None].float() / 255
        pixels = (pixels - self.mean.view(3, 1, 1)) / self.std.view(3, 1, 1)
        reshaped = (round(height * scale), round(width * scale))
        pixels = F.interpolate(pixels, reshaped, mode="bilinear", align_corners=False)
        pixels = F.pad(pixels, (0, self.size - reshaped[1], 0, self.size - reshaped[0]))
        points = torch.tensor(input_points, dtype=torch.float32)[None, :, None] * scale
        return {"pixel_values": pixels, "input_points": points}, (height, width), reshaped

    def post_process_masks(self, masks, original_size, reshaped_size, mask_threshold=0.0):
        masks = F.interpolate(masks.flatten(0, 1), (self.size, self.size), mode="bilinear", align_corners=False)
        masks = masks[..., :reshaped_size[0], :reshaped_size[1]]
        return F.interpolate(masks, original_size, mode="bilinear", align_corners=False) > mask_threshold


def predict_masks(model, processor, raw_image, input_points, device):
    inputs, original_size, reshaped_size = processor(raw_image, input_points)
    inputs = {name: value.to(device) for name, value in inputs.items()}
    outputs = model(**inputs, multimask_output=False)
    masks = processor.post_process_masks(outputs.pred_masks.detach().cpu(), original_size, reshaped_size)
    return masks, outputs.iou_scores.detach().cpu()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="huggingface/transformers#27268", memory=380, held_back=True)
def segment_with_points(fixed=False):
    """`predict_masks` calls `SamModel` without `torch.no_grad()`; the HF model, other than the original one, does not switch gradients off
    itself, so autograd keeps the activations of the whole vision encoder (and of the mask decoder) for a backward that never comes. Cured
    by: the forward call is wrapped in `torch.no_grad()`.
    """
    device = torch.device("cuda")
    model = build_sam().to(device).eval()
    processor = PointProcessor(512)
    rng = np.random.default_rng(0)
    found = []
    for _ in range(3):
        raw_image = rng.integers(0, 255, (480, 640, 3), dtype=np.uint8)
        input_points = rng.integers(0, 480, (4, 2)).tolist()
        if fixed:
            with torch.no_grad():
                masks, scores = predict_masks(model, processor, raw_image, input_points, device)
        else:
            masks, scores = predict_masks(model, processor, raw_image, input_points, device)
        found.append((masks.flatten(1).float().mean(1), scores))
    return len(found)


# Optical flow on pairs of street images: the validation of a trained network.

class BasicEncoder(nn.Module):
    def __init__(self, output_dim, width=48):
        super().__init__()
        layers, dim = [], 3
        for stage in range(3):
            out = width * (stage + 1) // (1 if stage else 2) if stage < 2 else output_dim
            layers += [nn.Conv2d(dim, out, 3, stride=2, padding=1), nn.InstanceNorm2d(out), nn.ReLU(),
                       nn.Conv2d(out, out, 3, padding=1), nn.InstanceNorm2d(out), nn.ReLU()]
            dim = out
        self.layers = nn.Sequential(*layers, nn.Conv2d(output_dim, output_dim, 1))

    def forward(self, images):
        return self.layers(images)


class CostEncoder(nn.Module):
    def __init__(self, token_dim, num_tokens):
        super().__init__()
        self.patch_embed = nn.Sequential(nn.Conv2d(1, 8, 6, stride=2, padding=2), nn.ReLU(), nn.Conv2d(8, 16, 6, stride=2, padding=2),
                                         nn.ReLU(), nn.Conv2d(16, token_dim, 6, stride=2, padding=2))
        self.latents = nn.Parameter(torch.randn(1, num_tokens, token_dim))
        self.attention = nn.MultiheadAttention(token_dim, 4, batch_first=True)

    def forward(self, cost_maps):
        patches = self.patch_embed(cost_maps).flatten(2).transpose(1, 2)
        tokens, _ = self.attention(self.latents.expand(len(patches), -1, -1), patches, patches, need_weights=False)
        return tokens


class FlowFormer(nn.Module):
    def __init__(self, dim=64, token_dim=32, iters=6):
        super().__init__()
        self.iters, self.dim = iters, dim
        self.fnet, self.cnet = BasicEncoder(dim), BasicEncoder(dim)
        self.memory_encoder = CostEncoder(token_dim, 4)
        self.project = nn.Linear(4 * token_dim, dim)
        self.gru = nn.Conv2d(2 * dim + 2, dim, 3, padding=1)
        self.head = nn.Conv2d(dim, 2, 3, padding=1)

    def forward(self, inputs):
        image1, image2 = inputs["images"][:, 0], inputs["images"][:, 1]
        fmap1, fmap2 = self.fnet(image1), self.fnet(image2)
        batch, _, height, width = fmap1.shape
        corr = torch.einsum("bcn,bcm->bnm", fmap1.flatten(2), fmap2.flatten(2)) / self.dim ** 0.5
        memory = self.project(self.memory_encoder(corr.view(-1, 1, height, width)).flatten(1))
        memory = memory.view(batch, height, width, -1).permute(0, 3, 1, 2)
        net, flow = torch.tanh(self.cnet(image1)), torch.zeros(batch, 2, height, width, device=image1.device)
        for _ in range(self.iters):
            net = torch.tanh(self.gru(torch.cat([net, memory, flow], 1)))
            flow = flow + self.head(net)
        return {"flows": F.interpolate(flow, scale_factor=8, mode="bilinear", align_corners=True)[:, None] * 8}


class KittiDataset(Dataset):
    def __init__(self, num_pairs, size):
        self.num_pairs, self.size = num_pairs, size

    def __len__(self):
        return self.num_pairs

    def __getitem__(self, index):
        return {"images": torch.rand(2, 3, *self.size), "flows": torch.randn(1, 2, *self.size)}


class FlowMetrics:
    def __call__(self, preds, inputs):
        epe = torch.norm(preds["flows"] - inputs["flows"], p=2, dim=2)
        outlier = (epe > 3).float() * (epe > 0.05 * torch.norm(inputs["flows"], p=2, dim=2)).float()
        return {"val/epe": epe.mean(), "val/outlier": outlier.mean()}


def validate_one_dataloader(model, dataloader, val_metrics):
    metrics_sum = {}
    for inputs in dataloader:
        inputs = {name: value.cuda() for name, value in inputs.items()}
        preds = model(inputs)
        metrics = val_metrics(preds, inputs)
        for name, value in metrics.items():
            metrics_sum[name] = metrics_sum.get(name, 0.0) + value.item()
    return {name: value / len(dataloader) for name, value in metrics_sum.items()}


@expected("evaluation_keeps_graphs", fix="no_grad", thread="hmorimitsu/ptlflow#69", memory=1250, held_back=True)
def validate_flow(fixed=False):
    """`validate_one_dataloader` was decorated with `torch.enable_grad()`, so each prediction of `FlowFormer` records its autograd graph;
    the graph of the first image pair lives on in `preds` while the second pair is predicted. Cured by: the decorator is `torch.no_grad()`
    again.
    """
    model = FlowFormer().cuda().eval()
    dataloader = DataLoader(KittiDataset(4, (320, 960)), batch_size=1)
    decorator = torch.no_grad() if fixed else torch.enable_grad()
    return decorator(validate_one_dataloader)(model, dataloader, FlowMetrics())


# Organs in CT patches, with few voxels of some organs: a focal loss with weights per class.

class FocalLoss(nn.Module):
    def __init__(self, num_class, alpha=None, gamma=2, size_average=True, squeeze=False):
        super().__init__()
        self.num_class, self.gamma, self.size_average, self.squeeze = num_class, gamma, size_average, squeeze
        alpha = torch.ones(num_class) if alpha is None else torch.as_tensor(alpha, dtype=torch.float32)
        self.register_buffer("alpha", (alpha / alpha.sum()).view(num_class, 1))

    def forward(self, logit, target):
        if logit.dim() > 2:
            logit = logit.flatten(2).permute(0, 2, 1).reshape(-1, self.num_class)
        idx = target.reshape(-1, 1).long()
        one_hot_key = torch.zeros_like(logit).scatter_(1, idx, 1)
        pt = (one_hot_key * logit).sum(1) + 1e-10
        logpt = pt.log()
        alpha_class = self.alpha[idx]
        if self.squeeze:
            alpha_class = alpha_class.squeeze()
        loss = -1 * alpha_class * (1 - pt) ** self.gamma * logpt
        return loss.mean() if self.size_average else loss.sum()


class UNet3D(nn.Module):
    def __init__(self, num_class, width=16):
        super().__init__()
        self.enc1, self.enc2 = self.block(1, width), self.block(width, 2 * width)
        self.bottom = self.block(2 * width, 4 * width)
        self.dec2, self.dec1 = self.block(6 * width, 2 * width), self.block(3 * width, width)
        self.out = nn.Conv3d(width, num_class, 1)

    @staticmethod
    def block(dim_in, dim_out):
        return nn.Sequential(nn.Conv3d(dim_in, dim_out, 3, padding=1), nn.InstanceNorm3d(dim_out), nn.LeakyReLU(),
                             nn.Conv3d(dim_out, dim_out, 3, padding=1), nn.InstanceNorm3d(dim_out), nn.LeakyReLU())

    def forward(self, x):
        one = self.enc1(x)
        two = self.enc2(F.max_pool3d(one, 2))
        x = self.bottom(F.max_pool3d(two, 2))
        x = self.dec2(torch.cat([F.interpolate(x, scale_factor=2.0), two], 1))
        x = self.dec1(torch.cat([F.interpolate(x, scale_factor=2.0), one], 1))
        return self.out(x).softmax(1)


class OrganPatches(Dataset):
    def __init__(self, num_volumes, patch_size, num_class):
        self.patch_size = patch_size
        self.volumes = [torch.randn(1, *(2 * side for side in patch_size)) for _ in range(num_volumes)]
        self.labels = [torch.randint(0, num_class, volume.shape[1:]) for volume in self.volumes]

    def __len__(self):
        return 4 * len(self.volumes)

    def __getitem__(self, index):
        volume, label = self.volumes[index // 4], self.labels[index // 4]
        corner = [random.randint(0, side) for side in self.patch_size]
        where = tuple(slice(start, start + side) for start, side in zip(corner, self.patch_size))
        return volume[(slice(None), *where)], label[where]


@expected("all_pairs", fix="squeeze", thread="Hsuxu/Loss_ToolBox-PyTorch#8", memory=600, held_back=True)
def train_organ_segmenter(fixed=False):
    """In `FocalLoss.forward` `alpha[idx]` keeps trailing dimensions of size 1, (N, 1, 1), and is multiplied with `(1 - pt) ** gamma` and
    `logpt` of shape (N,): broadcasting makes an N x N tensor, N being the number of voxels. Cured by: `alpha[idx]` is squeezed to (N,)
    before the product.
    """
    num_class = 5
    loader = DataLoader(OrganPatches(4, (16, 32, 32), num_class), batch_size=2, shuffle=True)
    model = UNet3D(num_class).cuda()
    criterion = FocalLoss(num_class, alpha=[0.05, 0.2, 0.2, 0.25, 0.3], squeeze=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    running_loss = 0.0
    for image, label in loader:
        loss = criterion(model(image.cuda()), label.cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        running_loss += loss.item()
    return running_loss / len(loader)


# Oriented boxes in aerial images: a little training, then validation.

class OBBModel(nn.Module):
    def __init__(self, nc, width=16):
        super().__init__()
        self.nc, self.strides = nc, (8, 16, 32)
        self.stem = nn.Sequential(*[nn.Sequential(nn.Conv2d(3 if not i else width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.SiLU())
                                    for i in range(3)])
        self.down = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.SiLU()) for _ in range(2))
        self.heads = nn.ModuleList(nn.Conv2d(width, 4 + nc + 1, 1) for _ in self.strides)

    def forward(self, images):
        features = [self.stem(images)]
        for layer in self.down:
            features.append(layer(features[-1]))
        outputs = [head(feature).flatten(2) * (stride if index == 0 else 1)
                   for index, (head, feature, stride) in enumerate(zip(self.heads, features, self.strides))]
        boxes, scores, angle = torch.cat(outputs, 2).split([4, self.nc, 1], 1)
        return torch.cat([boxes.exp().clamp(max=1024), scores.sigmoid(), (angle.sigmoid() - 0.25) * np.pi], 1)


def get_covariance_matrix(boxes):
    gbbs = torch.cat([boxes[:, 2:4].pow(2) / 12, boxes[:, 4:]], -1)
    a, b, angle = gbbs.split(1, -1)
    cos, sin = angle.cos(), angle.sin()
    return a * cos ** 2 + b * sin ** 2, a * sin ** 2 + b * cos ** 2, (a - b) * cos * sin


def batch_probiou(obb1, obb2, eps=1e-7):
    x1, y1 = obb1[:, :2].split(1, -1)
    x2, y2 = (x.squeeze(-1)[None] for x in obb2[:, :2].split(1, -1))
    a1, b1, c1 = get_covariance_matrix(obb1)
    a2, b2, c2 = (x.squeeze(-1)[None] for x in get_covariance_matrix(obb2))
    determinant = (a1 + a2) * (b1 + b2) - (c1 + c2) ** 2 + eps
    t1 = ((a1 + a2) * (y1 - y2) ** 2 + (b1 + b2) * (x1 - x2) ** 2) / determinant * 0.25
    t2 = (c1 + c2) * (x2 - x1) * (y1 - y2) / determinant * 0.5
    root = ((a1 * b1 - c1 ** 2).clamp(0) * (a2 * b2 - c2 ** 2).clamp(0)).sqrt()
    t3 = (determinant / (4 * root + eps) + eps).log() * 0.5
    bd = (t1 + t2 + t3).clamp(eps, 100.0)
    return 1 - (1 - (-bd).exp() + eps).sqrt()


def nms_rotated(boxes, scores, threshold, max_det):
    sorted_idx = scores.argsort(descending=True)
    ious = batch_probiou(boxes[sorted_idx], boxes[sorted_idx]).triu_(diagonal=1)
    kept = torch.where(ious.amax(0) < threshold, scores[sorted_idx], -1.0)
    return sorted_idx[kept.topk(min(max_det, len(kept))).indices]


def non_max_suppression(prediction, conf_thres=0.25, iou_thres=0.7, nc=15, max_det=300, max_nms=30000, max_wh=7680):
    output = []
    for x in prediction.transpose(1, 2):
        box, cls, angle = x.split([4, nc, 1], 1)
        candidates = torch.where(cls > conf_thres, cls, 0.0).flatten()
        conf, picked = candidates.topk(min(max_nms, candidates.numel()))
        anchor, j = picked // nc, picked % nc
        rboxes = torch.cat([box[anchor, :2] + j[:, None] * max_wh, box[anchor, 2:], angle[anchor]], 1)
        i = nms_rotated(rboxes, conf, iou_thres, max_det)
        output.append(torch.cat([box[anchor[i]], conf[i, None], j[i, None].float(), angle[anchor[i]]], 1))
    return output


@expected("all_pairs", fix="part|split", thread="ultralytics/ultralytics#7636", memory=900, held_back=True)
def validate_rotated_boxes(fixed=False):
    """In validation nearly all candidates pass the low confidence threshold and `non_max_suppression` hands up to `max_nms` = 30000 boxes
    to `nms_rotated`, where `batch_probiou` builds matrices of all pairs of boxes on the GPU. Cured by: `max_nms=1920`.
    """
    nc = 15
    model = OBBModel(nc).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    for _ in range(4):
        images, targets = torch.rand(16, 3, 256, 256).cuda(), torch.rand(16, 4 + nc + 1, 1344).cuda()
        loss = F.smooth_l1_loss(model(images), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    limits = {"max_nms": 1920} if fixed else {}
    stats = []
    with torch.no_grad():
        for _ in range(3):
            preds = non_max_suppression(model(torch.rand(4, 3, 256, 256).cuda()), conf_thres=0.001, nc=nc, **limits)
            stats += [pred.cpu() for pred in preds]
    return len(stats)


# Instance segmentation of a video, called from Python.

class SegmentationModel(nn.Module):
    def __init__(self, nc=3, nm=16, width=16):
        super().__init__()
        self.nc = nc
        self.backbone = nn.Sequential(*[nn.Sequential(nn.Conv2d(3 if not i else width, width, 3, stride=2, padding=1), nn.BatchNorm2d(width), nn.SiLU())
                                        for i in range(3)])
        self.proto = nn.Sequential(nn.ConvTranspose2d(width, width, 2, 2), nn.SiLU(), nn.Conv2d(width, nm, 1))
        self.detect = nn.Conv2d(width, 4 + nc + nm, 1)

    def forward(self, x):
        feature = self.backbone(x)
        return self.detect(feature).flatten(2), self.proto(feature)


class Results:
    def __init__(self, orig_img, boxes, masks, names):
        self.orig_img, self.boxes, self.masks, self.names = orig_img, boxes, masks, names
        self.orig_shape = orig_img.shape[:2]

    def plot(self):
        shade = self.masks.amax(0).cpu().numpy()[..., None] * 0.5
        return (self.orig_img * (1 - shade)).astype(np.uint8)


class LoadVideo:
    def __init__(self, frames, height, width):
        self.frames, self.shape = frames, (height, width, 3)

    def __iter__(self):
        for number in range(self.frames):
            yield f"video 1/1 ({number + 1}/{self.frames}) test.mp4", np.full(self.shape, number % 255, np.uint8)


class YOLO:
    def __init__(self, imgsz=(384, 640), max_det=10):
        self.model, self.imgsz, self.max_det = SegmentationModel().cuda().eval(), imgsz, max_det
        self.names = {0: "sidewalk", 1: "road", 2: "car"}

    def __call__(self, source, stream=False, **kwargs):
        results = self.stream_inference(source, **kwargs)
        return results if stream else list(results)

    def process_mask(self, protos, masks_in, shape):
        masks = (masks_in @ protos.flatten(1)).sigmoid().view(-1, *protos.shape[1:])
        return F.interpolate(masks[None], shape, mode="bilinear", align_corners=False)[0].gt_(0.5)

    @torch.no_grad()
    def stream_inference(self, source, show=False, retina_masks=False):
        for path, img0 in source:
            im = torch.from_numpy(img0).cuda().permute(2, 0, 1)[None].float() / 255
            im = F.interpolate(im, self.imgsz, mode="bilinear", align_corners=False)
            preds, proto = self.model(im)
            pred = preds[0].T
            best = pred[:, 4:4 + self.model.nc].amax(1).topk(self.max_det).indices
            masks = self.process_mask(proto[0], pred[best, 4 + self.model.nc:], img0.shape[:2] if retina_masks else self.imgsz)
            result = Results(img0, pred[best, :4 + self.model.nc], masks, self.names)
            if show:
                result.plot()
            yield result


@expected("kept_tensors", fix=r"\.cpu\(\)|yield", thread="ultralytics/ultralytics#3375", memory=900, held_back=True)
def count_in_video(fixed=False):
    """The Python call of `YOLO` has `stream=False`: `__call__` collects the `Results` of all frames in one list, and each keeps its
    instance masks at the size of the video (`retina_masks=True`) on the GPU. Cured by: `stream=True`, so that the results come from a
    generator and are dropped frame by frame.
    """
    model = YOLO()
    video = LoadVideo(60, 720, 1280)
    results = model(video, stream=True, show=True, retina_masks=True) if fixed else model(video, show=True, retina_masks=True)
    seen = 0
    for r in results:
        seen += len(r.boxes)
    return seen


# A detection head that cuts its regions with an affine transformer.

class AffineHead(nn.Module):
    def __init__(self, dim, num_classes, pooled=7, one_by_one=False):
        super().__init__()
        self.pooled, self.one_by_one = pooled, one_by_one
        self.fc = nn.Sequential(nn.Linear(dim * pooled * pooled, 256), nn.ReLU())
        self.cls_score, self.bbox_pred = nn.Linear(256, num_classes), nn.Linear(256, 4)

    def roi_pool(self, feature, theta):
        number_of_box = len(theta)
        _, C, H, W = feature.shape
        grid = F.affine_grid(theta, (number_of_box, C, self.pooled, self.pooled), align_corners=True)
        if self.one_by_one:
            all_roi = []
            for j in range(number_of_box):
                all_roi.append(F.grid_sample(feature, grid.narrow(0, j, 1), align_corners=True))
            return torch.cat(all_roi)
        return F.grid_sample(feature.expand(number_of_box, C, H, W), grid, align_corners=True)

    def forward(self, feature, boxes):
        x1, y1, x2, y2 = boxes.unbind(1)
        zero = torch.zeros_like(x1)
        theta = torch.stack([torch.stack([x2 - x1, zero, x1 + x2 - 1], 1), torch.stack([zero, y2 - y1, y1 + y2 - 1], 1)], 1)
        x = self.fc(self.roi_pool(feature, theta).flatten(1))
        return self.cls_score(x), self.bbox_pred(x)


class BoxNet(nn.Module):
    def __init__(self, num_classes, one_by_one, dim=128):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 32, 7, stride=4, padding=3), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU(),
                                  nn.Conv2d(64, dim, 3, padding=1), nn.ReLU())
        self.head = AffineHead(dim, num_classes, one_by_one=one_by_one)

    def forward(self, image, boxes):
        return self.head(self.body(image), boxes)


class BoxDataset(Dataset):
    def __init__(self, num_images, num_boxes, num_classes):
        self.images = torch.rand(num_images, 3, 448, 608)
        corner = torch.rand(num_images, num_boxes, 2) * 0.7
        self.boxes = torch.cat([corner, corner + 0.05 + 0.2 * torch.rand(num_images, num_boxes, 2)], 2)
        self.labels = torch.randint(0, num_classes, (num_images, num_boxes))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.boxes[index], self.labels[index]


@expected("repeated_copies", fix="grid_sample", thread="pytorch/pytorch#2732", memory=700, held_back=True)
def train_box_head(fixed=False):
    """`roi_pool` expands `feature` to `number_of_box` and passes it to `F.grid_sample`, which needs contiguous input and so makes a real
    copy of the whole feature map for every box. Cured by: a loop over the boxes that samples from the one feature map with one grid each.
    """
    num_classes = 21
    net = BoxNet(num_classes, one_by_one=fixed).cuda()
    loader = DataLoader(BoxDataset(6, 512, num_classes), batch_size=1, shuffle=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    total = 0.0
    for image, boxes, labels in loader:
        image, boxes, labels = image.cuda(), boxes[0].cuda(), labels[0].cuda()
        scores, deltas = net(image, boxes)
        loss = F.cross_entropy(scores, labels) + F.smooth_l1_loss(deltas, torch.zeros_like(deltas))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


# Faces from one domain into others: a generator with an attention mask, and a picture of samples every few iterations.

class ResidualBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.main = nn.Sequential(nn.Conv2d(dim, dim, 3, padding=1, bias=False), nn.InstanceNorm2d(dim, affine=True), nn.ReLU(),
                                  nn.Conv2d(dim, dim, 3, padding=1, bias=False), nn.InstanceNorm2d(dim, affine=True))

    def forward(self, x):
        return x + self.main(x)


class Generator(nn.Module):
    def __init__(self, c_dim, conv_dim=24, repeat_num=4):
        super().__init__()
        layers, dim = [nn.Conv2d(3 + c_dim, conv_dim, 7, padding=3, bias=False), nn.InstanceNorm2d(conv_dim, affine=True), nn.ReLU()], conv_dim
        for _ in range(2):
            layers += [nn.Conv2d(dim, 2 * dim, 4, stride=2, padding=1, bias=False), nn.InstanceNorm2d(2 * dim, affine=True), nn.ReLU()]
            dim *= 2
        layers += [ResidualBlock(dim) for _ in range(repeat_num)]
        for _ in range(2):
            layers += [nn.ConvTranspose2d(dim, dim // 2, 4, stride=2, padding=1, bias=False), nn.InstanceNorm2d(dim // 2, affine=True), nn.ReLU()]
            dim //= 2
        self.main = nn.Sequential(*layers)
        self.to_image, self.to_mask = nn.Conv2d(dim, 3, 7, padding=3), nn.Conv2d(dim, 1, 7, padding=3)

    def forward(self, x, c):
        c = c[:, :, None, None].expand(-1, -1, *x.shape[2:])
        h = self.main(torch.cat([x, c], 1))
        mask = self.to_mask(h).sigmoid()
        return mask * self.to_image(h).tanh() + (1 - mask) * x, mask


class Discriminator(nn.Module):
    def __init__(self, c_dim, image_size, conv_dim=32, repeat_num=4):
        super().__init__()
        layers, dim = [], 3
        for i in range(repeat_num):
            layers += [nn.Conv2d(dim, conv_dim * 2 ** i, 4, stride=2, padding=1), nn.LeakyReLU(0.01)]
            dim = conv_dim * 2 ** i
        self.main = nn.Sequential(*layers)
        self.src, self.cls = nn.Conv2d(dim, 1, 3, padding=1), nn.Conv2d(dim, c_dim, image_size // 2 ** repeat_num)

    def forward(self, x):
        h = self.main(x)
        return self.src(h), self.cls(h).flatten(1)


class Solver:
    def __init__(self, c_dim, image_size, batch_size, detach_samples):
        self.c_dim, self.image_size, self.batch_size, self.detach_samples = c_dim, image_size, batch_size, detach_samples
        self.G, self.D = Generator(c_dim).cuda(), Discriminator(c_dim, image_size).cuda()
        self.g_optimizer = torch.optim.Adam(self.G.parameters(), 1e-4, (0.5, 0.999))
        self.d_optimizer = torch.optim.Adam(self.D.parameters(), 1e-4, (0.5, 0.999))

    def batch(self):
        return torch.rand(self.batch_size, 3, self.image_size, self.image_size).cuda() * 2 - 1, torch.randint(0, self.c_dim, (self.batch_size,))

    def one_hot(self, labels):
        return F.one_hot(labels, self.c_dim).float().cuda()

    def train_step(self):
        real_x, labels = self.batch()
        target_c = self.one_hot(labels[torch.randperm(self.batch_size)])
        out_src, out_cls = self.D(real_x)
        fake_src, _ = self.D(self.G(real_x, target_c)[0].detach())
        d_loss = -out_src.mean() + fake_src.mean() + F.binary_cross_entropy_with_logits(out_cls, self.one_hot(labels))
        self.d_optimizer.zero_grad()
        d_loss.backward()
        self.d_optimizer.step()
        fake_x, mask = self.G(real_x, target_c)
        out_src, out_cls = self.D(fake_x)
        g_loss = -out_src.mean() + F.binary_cross_entropy_with_logits(out_cls, target_c) + 0.1 * mask.mean()
        self.g_optimizer.zero_grad()
        g_loss.backward()
        self.g_optimizer.step()

    def sample(self, real_x):
        fake_list = [real_x]
        for domain in range(self.c_dim):
            target_c = self.one_hot(torch.full((len(real_x),), domain))
            fake = self.G(real_x, target_c)[0]
            if self.detach_samples:
                fake = fake.detach()
            fake_list.append(fake)
        fakes = torch.cat(fake_list, dim=3)
        return ((fakes.data.cpu() + 1) / 2).clamp_(0, 1)


@expected("evaluation_keeps_graphs", fix="detach", thread="http://39.103.169.235/p/f1bd4ff84926", memory=500, held_back=True)
def train_translator(fixed=False):
    """`Solver.sample` runs `self.G` with gradients on for each target domain and keeps the images in `fake_list`; every one holds the
    autograd graph of its whole forward pass, and the graphs pile up. Cured by: `.detach()` on the image that `self.G(real_x, target_c)[0]`
    gives.
    """
    solver = Solver(c_dim=10, image_size=128, batch_size=4, detach_samples=fixed)
    fixed_x, _ = solver.batch()
    for i in range(6):
        solver.train_step()
        if (i + 1) % 3 == 0:
            picture = solver.sample(fixed_x)
    return tuple(picture.shape)


# Region proposals: anchors are matched with the boxes of the annotation file.

class CocoBoxes(Dataset):
    def __init__(self, annotations, categories, images, once):
        self.images, self.img_to_anns = images, {}
        for category in categories:
            for ann in annotations:
                if once and ann["category_id"] != category:
                    continue
                self.img_to_anns.setdefault(ann["image_id"], []).append(ann)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        boxes = torch.tensor([ann["bbox"] for ann in self.img_to_anns[index]])
        return self.images[index], torch.cat([boxes[:, :2], boxes[:, :2] + boxes[:, 2:] - 1], 1)


def make_annotations(num_images, per_image, categories, size):
    rng = np.random.default_rng(0)
    annotations = []
    for image_id in range(num_images):
        for _ in range(per_image):
            x, y = rng.uniform(0, size[1] - 40), rng.uniform(0, size[0] - 40)
            annotations.append({"image_id": image_id, "category_id": int(rng.choice(categories)), "bbox": [x, y, *rng.uniform(8, 40, 2)]})
    return annotations


class AnchorGenerator:
    def __init__(self, sizes=(32, 64, 128, 256), strides=(4, 8, 16, 32), ratios=(0.5, 1.0, 2.0)):
        self.sizes, self.strides, self.ratios = sizes, strides, ratios

    def __call__(self, features):
        anchors = []
        for size, stride, feature in zip(self.sizes, self.strides, features):
            height, width = feature.shape[-2:]
            y, x = torch.meshgrid(torch.arange(height, device=feature.device), torch.arange(width, device=feature.device), indexing="ij")
            center = torch.stack([x, y, x, y], -1).view(-1, 1, 4) * stride
            shapes = torch.tensor([[-size * r ** -0.5, -size * r ** 0.5, size * r ** -0.5, size * r ** 0.5] for r in self.ratios])
            anchors.append((center + shapes.to(feature.device) / 2).view(-1, 4))
        return torch.cat(anchors)


def boxlist_iou(boxlist1, boxlist2):
    area1 = (boxlist1[:, 2] - boxlist1[:, 0] + 1) * (boxlist1[:, 3] - boxlist1[:, 1] + 1)
    area2 = (boxlist2[:, 2] - boxlist2[:, 0] + 1) * (boxlist2[:, 3] - boxlist2[:, 1] + 1)
    lt = torch.max(boxlist1[:, None, :2], boxlist2[:, :2])
    rb = torch.min(boxlist1[:, None, 2:], boxlist2[:, 2:])
    wh = (rb - lt + 1).clamp(min=0)
    inter = wh[:, :, 0] * wh[:, :, 1]
    return inter / (area1[:, None] + area2 - inter)


class RPN(nn.Module):
    def __init__(self, dim=48, num_anchors=3):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dim, 7, stride=4, padding=3), nn.ReLU())
        self.levels = nn.ModuleList(nn.Sequential(nn.Conv2d(dim, dim, 3, stride=2, padding=1), nn.ReLU()) for _ in range(3))
        self.conv, self.cls_logits, self.bbox_pred = nn.Conv2d(dim, dim, 3, padding=1), nn.Conv2d(dim, num_anchors, 1), nn.Conv2d(dim, 4 * num_anchors, 1)
        self.anchor_generator = AnchorGenerator()

    def prepare_targets(self, anchors, targets):
        matched, labels = [], []
        for target in targets:
            match_quality_matrix = boxlist_iou(target, anchors)
            quality, index = match_quality_matrix.max(dim=0)
            labels.append(torch.where(quality > 0.7, 1.0, torch.where(quality < 0.3, 0.0, -1.0)))
            matched.append(target[index])
        return torch.stack(labels), torch.stack(matched)

    def forward(self, images, targets):
        features = [self.stem(images)]
        for level in self.levels:
            features.append(level(features[-1]))
        hidden = [self.conv(feature).relu() for feature in features]
        objectness = torch.cat([self.cls_logits(h).permute(0, 2, 3, 1).flatten(1) for h in hidden], 1)
        regression = torch.cat([self.bbox_pred(h).permute(0, 2, 3, 1).reshape(len(h), -1, 4) for h in hidden], 1)
        anchors = self.anchor_generator(features)
        labels, matched = self.prepare_targets(anchors, targets)
        box_loss = (F.smooth_l1_loss(regression, (matched - anchors) / 32, reduction="none").sum(2) * (labels > 0)).mean()
        return F.binary_cross_entropy_with_logits(objectness, labels.clamp(min=0), weight=(labels >= 0).float()) + box_loss


@expected("all_pairs", fix="part|split", thread="facebookresearch/maskrcnn-benchmark#120", memory=700, held_back=True)
def train_proposals(fixed=False):
    """The dataset puts every annotation into `img_to_anns` several times, so that an image has a multiple of its true number of boxes, and
    `boxlist_iou` builds matrices of these ground truths by all anchors on the GPU. Cured by: each ground truth is taken once.
    """
    size, categories = (320, 416), list(range(1, 21))
    annotations = make_annotations(6, 60, categories, size)
    dataset = CocoBoxes(annotations, categories, torch.rand(6, 3, *size), once=fixed)
    loader = DataLoader(dataset, batch_size=2, shuffle=True, collate_fn=lambda batch: tuple(zip(*batch)))
    model = RPN().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0025, momentum=0.9)
    for images, targets in loader:
        loss = model(torch.stack(images).cuda(), [target.cuda() for target in targets])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return len(dataset)


# Masks of a segmentation network lose their thin remains by an erosion.

def erosion(tensor, kernel, max_val=1e4, engine="unfold"):
    se_h, se_w = kernel.shape
    pad = [se_w // 2, se_w - se_w // 2 - 1, se_h // 2, se_h - se_h // 2 - 1]
    output = F.pad(tensor, pad, mode="constant", value=max_val)
    neighborhood = torch.where(kernel == 0, -max_val, 0.0)
    if engine == "unfold":
        output = output.unfold(2, se_h, 1).unfold(3, se_w, 1)
        output = (output - neighborhood).amin(dim=(4, 5))
    else:
        height, width = tensor.shape[2:]
        padded, output = output, None
        for row in range(se_h):
            for column in range(se_w):
                shifted = padded[..., row:row + height, column:column + width] - neighborhood[row, column]
                output = shifted if output is None else torch.minimum(output, shifted)
    return output


class MaskNet(nn.Module):
    def __init__(self, num_masks, width=16):
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.up = nn.Sequential(nn.ConvTranspose2d(2 * width, width, 2, 2), nn.ReLU(), nn.ConvTranspose2d(width, num_masks, 2, 2))

    def forward(self, image):
        return self.up(self.down(image)).sigmoid()


@expected("all_pairs", fix="part|split", thread="kornia/kornia#2948", memory=600, held_back=True)
def clean_masks(fixed=False):
    """`erosion` with the engine "unfold" materialises the neighbourhood of each pixel under the kernel, so its memory is the image times
    the number of kernel elements (`output - neighborhood`). Cured by: a running minimum over shifted images, one kernel position at a time.
    """
    device = "cuda:0"
    model = MaskNet(3).to(device).eval()
    kernel = torch.ones((31, 31), device=device)
    pixels = []
    with torch.no_grad():
        for _ in range(3):
            masks = model(torch.rand(1, 3, 320, 240, device=device))
            eroded = erosion(masks, kernel, engine="shift" if fixed else "unfold")
            pixels.append((eroded > 0.5).sum(dim=(2, 3)).cpu())
    return len(pixels)


# Cars in point clouds: pillars, a 2D backbone and anchors.

def one_hot(index, classes):
    return (index.unsqueeze(-1) == torch.arange(classes, device=index.device)).float()


class AnchorFocalLoss(nn.Module):
    def __init__(self, gamma=2.0, alpha=0.25, loss_weight=1.0, any_class_count=False):
        super().__init__()
        self.gamma, self.alpha, self.loss_weight, self.any_class_count = gamma, alpha, loss_weight, any_class_count

    def forward(self, pred, target, avg_factor=None):
        pred_sigmoid = pred.sigmoid()
        if pred.dim() > 1 and (self.any_class_count or pred.shape[-1] > 1):
            target = one_hot(target, pred.shape[-1])
        target = target.type_as(pred)
        pt = (1 - pred_sigmoid) * target + pred_sigmoid * (1 - target)
        focal_weight = (self.alpha * target + (1 - self.alpha) * (1 - target)) * pt.pow(self.gamma)
        loss = F.binary_cross_entropy_with_logits(pred, target, reduction="none") * focal_weight * self.loss_weight
        return loss.mean() if avg_factor is None else loss.sum() / avg_factor


class PointPillars(nn.Module):
    def __init__(self, num_classes, grid=(96, 88), dim=32, anchors_per_cell=2, any_class_count=False):
        super().__init__()
        self.grid, self.num_classes = grid, num_classes
        self.voxel_encoder = nn.Sequential(nn.Linear(9, dim), nn.ReLU(), nn.Linear(dim, dim), nn.ReLU())
        self.backbone = nn.Sequential(nn.Conv2d(dim, 2 * dim, 3, padding=1), nn.BatchNorm2d(2 * dim), nn.ReLU(),
                                      nn.Conv2d(2 * dim, 2 * dim, 3, padding=1), nn.BatchNorm2d(2 * dim), nn.ReLU())
        self.conv_cls = nn.Conv2d(2 * dim, anchors_per_cell * num_classes, 1)
        self.conv_reg = nn.Conv2d(2 * dim, anchors_per_cell * 7, 1)
        self.loss_cls = AnchorFocalLoss(any_class_count=any_class_count)

    def extract_feats(self, pillars, coords, batch_size):
        features = self.voxel_encoder(pillars).amax(1)
        canvas = features.new_zeros(batch_size * self.grid[0] * self.grid[1], features.shape[1])
        index = (coords[:, 0] * self.grid[0] + coords[:, 1]) * self.grid[1] + coords[:, 2]
        return canvas.index_add(0, index, features).view(batch_size, *self.grid, -1).permute(0, 3, 1, 2)

    def forward(self, inputs):
        feats = self.backbone(self.extract_feats(inputs["pillars"], inputs["coords"], inputs["batch_size"]))
        return self.conv_cls(feats), self.conv_reg(feats)

    def loss(self, results, inputs):
        scores, bboxes = results
        scores = scores.permute(0, 2, 3, 1).reshape(-1, self.num_classes)
        bboxes = bboxes.permute(0, 2, 3, 1).reshape(-1, 7)
        positive = (inputs["labels"] < self.num_classes).float()
        loss_cls = self.loss_cls(scores, inputs["labels"], avg_factor=inputs["num_pos"])
        loss_bbox = (F.smooth_l1_loss(bboxes, inputs["bbox_targets"], reduction="none").sum(1) * positive).sum() / inputs["num_pos"]
        return {"loss_cls": loss_cls, "loss_bbox": loss_bbox}


def kitti_batch(batch_size, grid, num_classes, num_pillars=3000, max_num_points=32):
    coords = torch.stack([torch.randint(0, side, (batch_size * num_pillars,)) for side in (batch_size, *grid)], 1)
    num_anchors = batch_size * grid[0] * grid[1] * 2
    labels = torch.full((num_anchors,), num_classes)
    labels[torch.randperm(num_anchors)[:40]] = 0
    batch = {"pillars": torch.randn(batch_size * num_pillars, max_num_points, 9), "coords": coords, "labels": labels,
             "bbox_targets": torch.randn(num_anchors, 7)}
    return {**{name: value.cuda() for name, value in batch.items()}, "batch_size": batch_size, "num_pos": 40}


@expected("all_pairs", fix="squeeze", thread="isl-org/Open3D-ML#344", memory=800, held_back=True)
def train_pillars(fixed=False):
    """With a single class `AnchorFocalLoss` skips the one-hot conversion (`pred.shape[-1] > 1`), so `target` stays (N,) while `pred` is (N,
    1); the product broadcasts to N x N for all N anchors. Cured by: the target is made one-hot for one class as well, shape (N, 1).
    """
    classes = ["Car"]
    model = PointPillars(len(classes), any_class_count=fixed).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    losses = []
    for _ in range(5):
        inputs = kitti_batch(2, model.grid, len(classes))
        loss = model.loss(model(inputs), inputs)
        loss_sum = sum(loss.values())
        optimizer.zero_grad()
        loss_sum.backward()
        nn.utils.clip_grad_value_(model.parameters(), 2)
        optimizer.step()
        losses.append(loss_sum.item())
    return len(losses)


# A whole-body CT with many organs is predicted window by window.

def get_scan_slices(image_size, roi_size, overlap):
    starts = []
    for size, roi in zip(image_size, roi_size):
        step = max(int(roi * (1 - overlap)), 1)
        starts.append(sorted({min(start, size - roi) for start in range(0, size - roi + step, step)}))
    return [tuple(slice(begin, begin + roi) for begin, roi in zip((z, y, x), roi_size)) for z in starts[0] for y in starts[1] for x in starts[2]]


def gaussian_map(roi_size, sigma_scale=0.125):
    axes = [torch.exp(-0.5 * ((torch.arange(roi) - (roi - 1) / 2) / (roi * sigma_scale)) ** 2) for roi in roi_size]
    return axes[0][:, None, None] * axes[1][:, None] * axes[2]


def sliding_window_inference(inputs, roi_size, sw_batch_size, predictor, overlap=0.25, by_channel=False):
    slices = get_scan_slices(inputs.shape[2:], roi_size, overlap)
    importance_map = gaussian_map(roi_size).clamp(min=1e-3).to(inputs.device)
    output_image, count_map = None, torch.zeros(1, 1, *inputs.shape[2:], device=inputs.device)
    for begin in range(0, len(slices), sw_batch_size):
        windows = slices[begin:begin + sw_batch_size]
        seg_prob = predictor(torch.cat([inputs[(slice(None), slice(None), *window)] for window in windows]))
        if output_image is None:
            output_image = torch.zeros(1, seg_prob.shape[1], *inputs.shape[2:], device=inputs.device)
        for window, prob in zip(windows, seg_prob):
            output_image[(0, slice(None), *window)] += importance_map * prob
            count_map[(0, 0, *window)] += importance_map
        del seg_prob, prob
    if by_channel:
        for channel in range(output_image.shape[1]):
            output_image[:, channel:channel + 1] /= count_map
    else:
        output_image = output_image / count_map
    return output_image


class SegResNet(nn.Module):
    def __init__(self, out_channels, init_filters=8):
        super().__init__()
        self.init = nn.Conv3d(1, init_filters, 3, padding=1)
        self.down = nn.Sequential(nn.Conv3d(init_filters, 2 * init_filters, 3, stride=2, padding=1), nn.InstanceNorm3d(2 * init_filters), nn.ReLU())
        self.up = nn.ConvTranspose3d(2 * init_filters, init_filters, 2, 2)
        self.final = nn.Conv3d(init_filters, out_channels, 1)

    def forward(self, x):
        x = self.init(x)
        return self.final(F.relu(x + self.up(self.down(x))))


@expected("elementwise_copies", fix="in place|div_", thread="Project-MONAI/MONAI#6009", memory=860, held_back=True)
def segment_volume(fixed=False):
    """At the end of `sliding_window_inference` the summed `output_image` is divided by `count_map` out of place, which needs a second
    tensor of the size of the whole volume with all classes. Cured by: the division is done in place, channel by channel.
    """
    model = SegResNet(out_channels=60).cuda().eval()
    volumes = []
    with torch.no_grad():
        for _ in range(2):
            val_inputs = torch.randn(1, 1, 160, 128, 96).cuda()
            val_outputs = sliding_window_inference(val_inputs, (48, 48, 48), 2, model, overlap=0.25, by_channel=fixed)
            segmentation = val_outputs.argmax(dim=1).to(torch.uint8).cpu()
            del val_outputs
            volumes.append(segmentation.shape)
    return volumes


# Interactive segmentation, with a simulated annotator.

class DistMaps(nn.Module):
    def __init__(self, norm_radius, cpu_mode=False):
        super().__init__()
        self.norm_radius, self.cpu_mode = norm_radius, cpu_mode

    def on_cpu(self, points, rows, cols):
        row, col = np.arange(rows, dtype=np.float32)[:, None], np.arange(cols, dtype=np.float32)
        maps = np.full((len(points), 2, rows, cols), 1e6, np.float32)
        half = points.shape[1] // 2
        for image, clicks in zip(maps, points.numpy()):
            for number, (y, x) in enumerate(clicks):
                if y >= 0:
                    distance = ((row - y) / self.norm_radius) ** 2 + ((col - x) / self.norm_radius) ** 2
                    np.minimum(image[number // half], distance, out=image[number // half])
        return torch.from_numpy(maps)

    def forward(self, image, points):
        batch, rows, cols = image.shape[0], image.shape[2], image.shape[3]
        if self.cpu_mode:
            coords = self.on_cpu(points, rows, cols).to(image.device)
        else:
            points = points.to(image.device)
            num_points = points.shape[1] // 2
            points = points.view(-1, 2)
            missing = (points.amax(1) < 0).view(-1, 1, 1, 1)
            grid = torch.meshgrid(torch.arange(rows, device=image.device), torch.arange(cols, device=image.device), indexing="ij")
            coords = torch.stack(grid)[None].float().repeat(len(points), 1, 1, 1)
            coords.sub_(points.view(-1, 2, 1, 1)).div_(self.norm_radius)
            coords.mul_(coords)
            coords = coords[:, :1].add_(coords[:, 1:]).masked_fill_(missing, 1e6)
            coords = coords.view(batch * 2, num_points, rows, cols).amin(1).view(batch, 2, rows, cols)
        return coords.sqrt_().mul_(2).tanh_()


class InteractiveModel(nn.Module):
    def __init__(self, cpu_dist_maps=False, width=16):
        super().__init__()
        self.dist_maps = DistMaps(norm_radius=260, cpu_mode=cpu_dist_maps)
        self.rgb_conv = nn.Sequential(nn.Conv2d(5, 8, 1), nn.LeakyReLU(0.2), nn.Conv2d(8, 3, 1))
        self.body = nn.Sequential(nn.Conv2d(3, width, 3, stride=4, padding=1), nn.ReLU(), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU(),
                                  nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.ReLU(), nn.Conv2d(2 * width, 1, 1))

    def forward(self, image, points):
        x = self.rgb_conv(torch.cat([image, self.dist_maps(image, points)], 1))
        return F.interpolate(self.body(x), image.shape[2:], mode="bilinear", align_corners=True)


class Clicker:
    def __init__(self, size, seed=0):
        self.size, self.rng, self.clicks_list = size, np.random.default_rng(seed), []

    def make_next_click(self, pred_mask):
        is_positive = len(self.clicks_list) == 0 or bool(self.rng.integers(2))
        self.clicks_list.append((is_positive, tuple(self.rng.integers(0, self.size))))

    def get_points_nd(self, flipped):
        limit = max(sum(positive for positive, _ in self.clicks_list), sum(not positive for positive, _ in self.clicks_list), 1)
        halves = []
        for wanted in (True, False):
            clicks = [(y, self.size[1] - x - 1) if flipped else (y, x) for positive, (y, x) in self.clicks_list if positive == wanted]
            halves += clicks + [(-1, -1)] * (limit - len(clicks))
        return halves


@expected("repeated_copies", fix="as many copies|part", thread="saic-vul/fbrs_interactive_segmentation#37", memory=350, held_back=True)
def annotate_interactively(fixed=False):
    """`DistMaps` on the GPU builds coordinate maps of the size of the image for each click at once, so its memory grows linearly with the
    number of clicks, of which every round adds one. Cured by: `cpu_dist_maps=True`: the maps are made on the CPU, click by click.
    """
    size = (600, 800)
    model = InteractiveModel(cpu_dist_maps=fixed).cuda().eval()
    history = []
    with torch.no_grad():
        for number in range(2):
            image = torch.rand(1, 3, *size).cuda()
            clicker, pred_mask = Clicker(size, number), np.zeros(size)
            for _ in range(44 if number else 8):
                clicker.make_next_click(pred_mask)
                points = torch.tensor([clicker.get_points_nd(False), clicker.get_points_nd(True)], dtype=torch.float32)
                probs = model(torch.cat([image, image.flip(3)]), points).sigmoid()
                pred_mask = ((probs[0] + probs[1].flip(2)) / 2)[0].cpu().numpy()
            history.append(len(clicker.clicks_list))
    return history


# A detection transformer with groups of queries, and its matching.

def box_cxcywh_to_xyxy(boxes):
    center, size = boxes[..., :2], boxes[..., 2:]
    return torch.cat([center - size / 2, center + size / 2], -1)


def generalized_box_iou(boxes1, boxes2):
    area1 = (boxes1[..., 2] - boxes1[..., 0]) * (boxes1[..., 3] - boxes1[..., 1])
    area2 = (boxes2[..., 2] - boxes2[..., 0]) * (boxes2[..., 3] - boxes2[..., 1])
    one, two = boxes1[..., :, None, :], boxes2[..., None, :, :]
    inter = (torch.min(one[..., 2:], two[..., 2:]) - torch.max(one[..., :2], two[..., :2])).clamp(min=0).prod(-1)
    union = area1[..., :, None] + area2[..., None, :] - inter
    hull = (torch.max(one[..., 2:], two[..., 2:]) - torch.min(one[..., :2], two[..., :2])).clamp(min=0).prod(-1)
    return inter / union - (hull - union) / hull


def assign_greedily(cost):
    rows, columns = [], []
    for column in range(cost.shape[1]):
        row = int(np.nan_to_num(cost[:, column], nan=1e6).argmin())
        cost[row] = 1e6
        rows.append(row)
        columns.append(column)
    return torch.tensor(rows), torch.tensor(columns)


class HungarianMatcher(nn.Module):
    def __init__(self, cost_class=2, cost_bbox=5, cost_giou=2, compact=False):
        super().__init__()
        self.cost_class, self.cost_bbox, self.cost_giou, self.compact = cost_class, cost_bbox, cost_giou, compact

    def class_costs(self, logits):
        prob = logits.sigmoid()
        negative = 0.75 * prob ** 2 * -(1 - prob + 1e-8).log()
        return 0.25 * (1 - prob) ** 2 * -(prob + 1e-8).log() - negative

    def total(self, cost_class, out_bbox, tgt_bbox):
        cost_bbox = torch.cdist(out_bbox, tgt_bbox, p=1)
        cost_giou = -generalized_box_iou(box_cxcywh_to_xyxy(out_bbox), box_cxcywh_to_xyxy(tgt_bbox))
        return self.cost_bbox * cost_bbox + self.cost_class * cost_class + self.cost_giou * cost_giou

    @torch.no_grad()
    def forward(self, outputs, targets, group_detr):
        bs, num_queries = outputs["pred_logits"].shape[:2]
        sizes = [len(target["boxes"]) for target in targets]
        costs = self.class_costs(outputs["pred_logits"])
        if self.compact:
            tgt_ids = nn.utils.rnn.pad_sequence([target["labels"] for target in targets], batch_first=True)
            tgt_bbox = nn.utils.rnn.pad_sequence([target["boxes"] for target in targets], batch_first=True)
            cost_class = costs.gather(2, tgt_ids[:, None].expand(-1, num_queries, -1))
            C = self.total(cost_class, outputs["pred_boxes"], tgt_bbox)
            blocks = [C[i, :, :size].cpu() for i, size in enumerate(sizes)]
        else:
            tgt_ids = torch.cat([target["labels"] for target in targets])
            tgt_bbox = torch.cat([target["boxes"] for target in targets])
            C = self.total(costs.flatten(0, 1)[:, tgt_ids], outputs["pred_boxes"].flatten(0, 1), tgt_bbox).view(bs, num_queries, -1)
            blocks = [c[i].cpu() for i, c in enumerate(C.split(sizes, -1))]
        indices = []
        for block in blocks:
            picked = [assign_greedily(part.numpy().copy()) for part in block.chunk(group_detr)]
            offset = num_queries // group_detr
            indices.append((torch.cat([rows + g * offset for g, (rows, _) in enumerate(picked)]), torch.cat([columns for _, columns in picked])))
        return indices


class GroupDETR(nn.Module):
    def __init__(self, num_classes, num_queries=100, group_detr=13, dim=64):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 32, 7, stride=8, padding=3), nn.ReLU(), nn.Conv2d(32, dim, 3, stride=2, padding=1), nn.ReLU())
        self.query_feat = nn.Embedding(num_queries * group_detr, dim)
        self.attention = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.class_embed, self.bbox_embed = nn.Linear(dim, num_classes), nn.Linear(dim, 4)

    def forward(self, images):
        memory = self.backbone(images).flatten(2).transpose(1, 2)
        hs, _ = self.attention(self.query_feat.weight.expand(len(images), -1, -1), memory, memory, need_weights=False)
        return {"pred_logits": self.class_embed(hs), "pred_boxes": self.bbox_embed(hs).sigmoid()}


def set_criterion(outputs, targets, indices, num_classes):
    image = torch.cat([torch.full_like(rows, i) for i, (rows, _) in enumerate(indices)])
    query = torch.cat([rows for rows, _ in indices])
    boxes = torch.cat([target["boxes"][columns] for target, (_, columns) in zip(targets, indices)])
    labels = torch.cat([target["labels"][columns] for target, (_, columns) in zip(targets, indices)])
    wanted = torch.zeros_like(outputs["pred_logits"])
    wanted[image, query] = one_hot(labels, num_classes)
    loss_ce = F.binary_cross_entropy_with_logits(outputs["pred_logits"], wanted)
    return loss_ce + 5 * F.l1_loss(outputs["pred_boxes"][image, query], boxes)


@expected("all_pairs", fix="part|split", thread="roboflow/rf-detr#1297", memory=700, held_back=True)
def train_group_detector(fixed=False):
    """`HungarianMatcher` computes the costs of the queries of all images with the targets of all images, `[B * Q, sum(T_i)]`, although only
    the blocks of the same image are used. Cured by: the targets are padded to `max(T_i)` and the costs computed per image, `[B, Q,
    max(T_i)]`.
    """
    num_classes, group_detr, batch_size = 20, 13, 16
    model, matcher = GroupDETR(num_classes, group_detr=group_detr).cuda(), HungarianMatcher(compact=fixed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sizes = random.Random(0).choices(range(40, 81), k=3 * batch_size)
    for step in range(3):
        images = torch.rand(batch_size, 3, 224, 224).cuda()
        targets = [{"labels": torch.randint(0, num_classes, (size,)).cuda(), "boxes": torch.rand(size, 4).cuda()}
                   for size in sizes[step * batch_size:(step + 1) * batch_size]]
        outputs = model(images)
        indices = matcher(outputs, targets, group_detr)
        loss = set_criterion(outputs, targets, indices, num_classes)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return loss.item()


# Anomalies of textures: one network repairs the picture, another one compares.

def conv_block(dim_in, dim_out):
    return nn.Sequential(nn.Conv2d(dim_in, dim_out, 3, padding=1), nn.BatchNorm2d(dim_out), nn.ReLU(),
                         nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.BatchNorm2d(dim_out), nn.ReLU())


class ReconstructiveSubNetwork(nn.Module):
    def __init__(self, in_channels=3, out_channels=3, base_width=12):
        super().__init__()
        self.encoder = nn.ModuleList([conv_block(in_channels, base_width), conv_block(base_width, 2 * base_width), conv_block(2 * base_width, 4 * base_width)])
        self.decoder = nn.ModuleList([conv_block(4 * base_width, 2 * base_width), conv_block(2 * base_width, base_width)])
        self.fin_out = nn.Conv2d(base_width, out_channels, 3, padding=1)

    def forward(self, x):
        for level, block in enumerate(self.encoder):
            x = block(F.max_pool2d(x, 2) if level else x)
        for block in self.decoder:
            x = block(F.interpolate(x, scale_factor=2.0, mode="bilinear", align_corners=True))
        return self.fin_out(x)


class DiscriminativeSubNetwork(nn.Module):
    def __init__(self, in_channels=6, out_channels=2, base_channels=12):
        super().__init__()
        self.enc1, self.enc2 = conv_block(in_channels, base_channels), conv_block(base_channels, 2 * base_channels)
        self.bottom = conv_block(2 * base_channels, 4 * base_channels)
        self.dec2, self.dec1 = conv_block(6 * base_channels, 2 * base_channels), conv_block(3 * base_channels, base_channels)
        self.fin_out = nn.Conv2d(base_channels, out_channels, 3, padding=1)

    def forward(self, x):
        one = self.enc1(x)
        two = self.enc2(F.max_pool2d(one, 2))
        x = F.interpolate(self.bottom(F.max_pool2d(two, 2)), scale_factor=2.0, mode="bilinear", align_corners=True)
        x = F.interpolate(self.dec2(torch.cat([x, two], 1)), scale_factor=2.0, mode="bilinear", align_corners=True)
        return self.fin_out(self.dec1(torch.cat([x, one], 1)))


class MVTecTest(Dataset):
    def __init__(self, num_images, resize_shape):
        self.images = torch.rand(num_images, 3, *resize_shape)
        self.masks = (torch.rand(num_images, 1, *resize_shape) > 0.98).float()

    def __len__(self):
        return len(self.images)

    def __getitem__(self, idx):
        return {"image": self.images[idx], "has_anomaly": self.masks[idx].amax(), "mask": self.masks[idx]}


@expected("evaluation_keeps_graphs", fix="no_grad|detach", thread="VitjanZ/DRAEM#2", memory=800, held_back=True)
def test_anomaly_detector(fixed=False):
    """The test loop runs with gradients on and writes `gray_rec[0]`, `out_mask_sm[0]` into the `display_` tensors, which thereby keep the
    autograd graphs of both networks for every displayed image. Cured by: `.cpu().detach()` on what is written into the display tensors.
    """
    img_dim = 256
    model, model_seg = ReconstructiveSubNetwork().cuda().eval(), DiscriminativeSubNetwork().cuda().eval()
    dataloader = DataLoader(MVTecTest(40, (img_dim, img_dim)), batch_size=1)
    display_images, display_gt_images = torch.zeros(16, 3, img_dim, img_dim).cuda(), torch.zeros(16, 3, img_dim, img_dim).cuda()
    display_out_masks, display_in_masks = torch.zeros(16, 1, img_dim, img_dim).cuda(), torch.zeros(16, 1, img_dim, img_dim).cuda()
    display_indices = set(np.random.default_rng(0).choice(len(dataloader), 16, replace=False).tolist())
    cnt_display, anomaly_score_prediction, anomaly_score_gt = 0, [], []
    for i_batch, sample_batched in enumerate(dataloader):
        gray_batch, true_mask = sample_batched["image"].cuda(), sample_batched["mask"]
        anomaly_score_gt.append(float(sample_batched["has_anomaly"]))
        gray_rec = model(gray_batch)
        out_mask_sm = torch.softmax(model_seg(torch.cat((gray_rec, gray_batch), dim=1)), dim=1)
        if i_batch in display_indices:
            t_mask = out_mask_sm[:, 1:]
            if fixed:
                display_images[cnt_display] = gray_rec[0].cpu().detach()
                display_gt_images[cnt_display] = gray_batch[0].cpu().detach()
                display_out_masks[cnt_display] = t_mask[0].cpu().detach()
            else:
                display_images[cnt_display] = gray_rec[0]
                display_gt_images[cnt_display] = gray_batch[0]
                display_out_masks[cnt_display] = t_mask[0]
            display_in_masks[cnt_display] = true_mask[0]
            cnt_display += 1
        out_mask_averaged = F.avg_pool2d(out_mask_sm[:, 1:], 21, stride=1, padding=10).detach().cpu().numpy()
        anomaly_score_prediction.append(np.max(out_mask_averaged))
    return len(anomaly_score_prediction), len(anomaly_score_gt)
