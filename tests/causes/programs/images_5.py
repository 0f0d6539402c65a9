"""Programs after public threads about the training loops of ordinary vision projects (detection, segmentation, video,
point clouds, body models, splats), written anew.
"""
import torch
from torch import nn
from torch.nn import functional as F

from expected import expected
from programs.root_causes import no_grad_if


# Fitting a body model to the vertices of another one, joint by joint, with a second order method.

def batch_rodrigues(rot_vecs):
    angle = (rot_vecs + 1e-8).norm(dim=1, keepdim=True)
    axis = rot_vecs / angle
    rx, ry, rz = axis.unbind(1)
    zeros = torch.zeros_like(rx)
    k = torch.stack([zeros, -rz, ry, rz, zeros, -rx, -ry, rx, zeros], 1).view(-1, 3, 3)
    sin, cos = angle.sin()[:, None], angle.cos()[:, None]
    return torch.eye(3, device=rot_vecs.device) + sin * k + (1 - cos) * torch.bmm(k, k)


class SMPLX(nn.Module):
    NUM_BODY_JOINTS = 21

    def __init__(self, num_verts=10475):
        super().__init__()
        self.register_buffer("v_template", torch.randn(num_verts, 3))
        self.register_buffer("posedirs", torch.randn(self.NUM_BODY_JOINTS * 9, num_verts * 3) * 0.01)
        self.register_buffer("lbs_weights", torch.rand(num_verts, self.NUM_BODY_JOINTS).softmax(-1))

    def forward(self, body_pose):
        batch_size = body_pose.shape[0]
        pose_feature = (body_pose - torch.eye(3, device=body_pose.device)).flatten(1)
        v_posed = self.v_template + (pose_feature @ self.posedirs).view(batch_size, -1, 3)
        transforms = F.pad(body_pose, (0, 1)).flatten(2)
        vertex_transforms = (self.lbs_weights @ transforms).view(batch_size, -1, 3, 4)
        return (vertex_transforms[..., :3] @ v_posed[..., None]).squeeze(-1) + vertex_transforms[..., 3]


class TrustRegionNewtonCG:
    def __init__(self, params, max_cg_steps=2, radius=0.1):
        self.params, self.max_cg_steps, self.radius = params, max_cg_steps, radius

    def zero_grad(self):
        for p in self.params:
            p.grad = None

    def step(self, closure):
        loss = closure()
        gradients = [p.grad for p in self.params]
        direction = [-g.detach() for g in gradients]
        for _ in range(self.max_cg_steps):
            hvp = torch.autograd.grad(gradients, self.params, direction, retain_graph=True)
            direction = [d - self.radius * h for d, h in zip(direction, hvp)]
        with torch.no_grad():
            for p, d in zip(self.params, direction):
                p += self.radius * d
        return loss


def minimize(optimizer, closure, params, maxiters=3, reset=False):
    for n in range(maxiters):
        loss = optimizer.step(closure)
        if n % 10 == 0:
            print(f"[{n:05d}] Loss: {loss.item():.4f}")
    if reset:
        for p in params:
            p.grad = None


def run_fitting(body_model, vertices, edges, reset):
    body_pose = torch.zeros(len(vertices), SMPLX.NUM_BODY_JOINTS, 3, device="cuda", requires_grad=True)
    for jidx in range(SMPLX.NUM_BODY_JOINTS):
        part = torch.zeros(len(vertices), 3, device="cuda", requires_grad=True)
        optimizer = TrustRegionNewtonCG([part])

        def closure():
            optimizer.zero_grad()
            pose = batch_rodrigues(body_pose.detach().reshape(-1, 3)).reshape(len(vertices), -1, 3, 3)
            pose[:, jidx] = batch_rodrigues(part)
            est = body_model(pose)
            loss = ((est[:, edges[0]] - est[:, edges[1]]) - (vertices[:, edges[0]] - vertices[:, edges[1]])).square().sum()
            grads = torch.autograd.grad(loss, [part], create_graph=True)
            torch.autograd.backward([part], grads, create_graph=True)
            return loss

        minimize(optimizer, closure, [part], reset=reset)
        with torch.no_grad():
            body_pose[:, jidx] = part
    return body_pose.detach()


@expected("create_graph", fix=r"gc\.collect|None", thread="vchoutas/smplx#56", memory=1000, held_back=True)
def transfer_smpl_to_smplx(fixed=False):
    """The closure in `run_fitting` computes the gradients with `create_graph=True` and stores them in `part.grad`, so `part` and its
    gradient's graph hold each other. For every joint a new `part` is fitted and the graph through the whole body model of the last step of
    the old one is never freed. Cured by: `p.grad = None` for all params at the end of `minimize`.
    """
    body_model = SMPLX().cuda()
    edges = torch.randint(0, 10475, (2, 20000)).cuda()
    return [run_fitting(body_model, torch.randn(16, 10475, 3).cuda(), edges, reset=fixed).cpu() for _ in range(4)]


# Point clouds from a single view: the distance of each point to the nearest one in the other cloud.

class nnd_cuda:
    """Stands for the compiled extension, which writes into the arrays it is given."""

    @staticmethod
    def forward(xyz1, xyz2, dist1, dist2, idx1, idx2):
        torch.sum((xyz1 - xyz2).square_(), -1, out=dist1)
        dist2.copy_(dist1)
        idx1.copy_(torch.arange(xyz1.shape[1]))
        idx2.copy_(idx1)

    @staticmethod
    def backward(xyz1, xyz2, gradxyz1, gradxyz2, graddist1, graddist2, idx1, idx2):
        torch.mul(xyz1 - xyz2, 2 * (graddist1 + graddist2)[..., None], out=gradxyz1)
        torch.neg(gradxyz1, out=gradxyz2)


class NNDFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, xyz1, xyz2, attributes):
        batchsize, n, m = xyz1.shape[0], xyz1.shape[1], xyz2.shape[1]
        dist1 = torch.zeros(batchsize, n, device=xyz1.device)
        dist2 = torch.zeros(batchsize, m, device=xyz1.device)
        idx1 = torch.zeros(batchsize, n, dtype=torch.int, device=xyz1.device)
        idx2 = torch.zeros(batchsize, m, dtype=torch.int, device=xyz1.device)
        nnd_cuda.forward(xyz1, xyz2, dist1, dist2, idx1, idx2)
        ctx.save_for_backward(xyz1, xyz2, idx1, idx2, *((dist1, dist2) if not attributes else ()))
        if attributes:
            ctx.dist1, ctx.dist2 = dist1, dist2
        return dist1, dist2

    @staticmethod
    def backward(ctx, graddist1, graddist2):
        xyz1, xyz2, idx1, idx2 = ctx.saved_tensors[:4]
        gradxyz1, gradxyz2 = torch.zeros_like(xyz1), torch.zeros_like(xyz2)
        nnd_cuda.backward(xyz1, xyz2, gradxyz1, gradxyz2, graddist1, graddist2, idx1, idx2)
        return gradxyz1, gradxyz2, None


class NNDModule(nn.Module):
    def __init__(self, attributes):
        super().__init__()
        self.attributes = attributes

    def forward(self, input1, input2):
        return NNDFunction.apply(input1, input2, self.attributes)


class SVR_Baseline(nn.Module):
    def __init__(self, num_points, bottleneck_size=256):
        super().__init__()
        self.num_points = num_points
        self.encoder = nn.Sequential(
            nn.Conv2d(3, 16, 4, 4), nn.ReLU(), nn.Conv2d(16, 64, 4, 4), nn.ReLU(), nn.Conv2d(64, bottleneck_size, 4, 4),
            nn.ReLU(), nn.Flatten())
        self.decoder = nn.Linear(bottleneck_size, 3 * num_points)

    def forward(self, img):
        return self.decoder(self.encoder(img)).tanh().view(-1, self.num_points, 3)


@expected("output_on_ctx", fix="save_for_backward", thread="ThibaultGROUEIX/AtlasNet#12", memory=1000, held_back=True)
def train_SVR_AtlasNet(fixed=False):
    """`NNDFunction.forward` puts its outputs `dist1` and `dist2` on `ctx` as attributes. That is a cycle between the outputs and their own
    graph node, so both distance arrays of every iteration stay on the GPU. Cured by: `ctx.save_for_backward` instead of attributes.
    """
    network = SVR_Baseline(num_points=8192).cuda()
    distChamfer = NNDModule(attributes=not fixed)
    optimizer = torch.optim.Adam(network.parameters(), lr=1e-3)
    train_loss = []
    for epoch in range(2):
        for i in range(40):
            img, points = torch.rand(192, 3, 64, 64).cuda(), torch.rand(192, 8192, 3).cuda()
            optimizer.zero_grad()
            pointsReconstructed = network(img)
            dist1, dist2 = distChamfer(points, pointsReconstructed)
            loss_net = dist1.mean() + dist2.mean()
            loss_net.backward()
            optimizer.step()
            train_loss.append(loss_net.item())
    return sum(train_loss) / len(train_loss)


# Detection in aerial photos, each of another size.

class AnchorGenerator(nn.Module):
    def __init__(self, sizes, aspect_ratios, per_image=False):
        super().__init__()
        self.sizes, self.aspect_ratios, self.per_image = sizes, aspect_ratios, per_image
        self.cell_anchors, self._cache = None, {}

    def set_cell_anchors(self, device):
        if self.cell_anchors is None:
            ratios = torch.tensor(self.aspect_ratios, device=device).sqrt()
            self.cell_anchors = []
            for scales in self.sizes:
                scales = torch.tensor(scales, device=device)
                ws, hs = (scales[:, None] / ratios).flatten(), (scales[:, None] * ratios).flatten()
                self.cell_anchors.append(torch.stack([-ws, -hs, ws, hs], 1) / 2)

    def grid_anchors(self, grid_sizes, strides):
        anchors = []
        for (height, width), stride, base_anchors in zip(grid_sizes, strides, self.cell_anchors):
            shifts_x = torch.arange(width, device=base_anchors.device) * float(stride)
            shifts_y = torch.arange(height, device=base_anchors.device) * float(stride)
            shift_y, shift_x = torch.meshgrid(shifts_y, shifts_x, indexing="ij")
            shifts = torch.stack((shift_x, shift_y, shift_x, shift_y), -1).view(-1, 1, 4)
            anchors.append((shifts + base_anchors).reshape(-1, 4))
        return anchors

    def cached_grid_anchors(self, grid_sizes, strides):
        key = tuple(grid_sizes) + tuple(strides)
        if key not in self._cache:
            self._cache[key] = self.grid_anchors(grid_sizes, strides)
        return self._cache[key]

    def forward(self, feature_maps, strides):
        self.set_cell_anchors(feature_maps[0].device)
        anchors = torch.cat(self.cached_grid_anchors([tuple(f.shape[-2:]) for f in feature_maps], strides))
        if self.per_image:
            self._cache.clear()
        return anchors


class RegionProposalNetwork(nn.Module):
    def __init__(self, anchor_generator, channels, num_anchors, pre_nms_top_n=2000):
        super().__init__()
        self.anchor_generator, self.pre_nms_top_n = anchor_generator, pre_nms_top_n
        self.backbone = nn.ModuleList(nn.Conv2d(a, channels, k, k) for a, k in ((3, 4), (channels, 2), (channels, 2)))
        self.cls_logits, self.bbox_pred = nn.Conv2d(channels, num_anchors, 1), nn.Conv2d(channels, 4 * num_anchors, 1)

    def forward(self, images, targets):
        features, x = [], images
        for layer in self.backbone:
            x = layer(x).relu()
            features.append(x)
        objectness = torch.cat([self.cls_logits(f).permute(0, 2, 3, 1).flatten() for f in features])
        deltas = torch.cat([self.bbox_pred(f).permute(0, 2, 3, 1).reshape(-1, 4) for f in features])
        anchors = self.anchor_generator(features, (4, 8, 16))
        top = objectness.detach().topk(self.pre_nms_top_n).indices
        nearest = (anchors[top][:, None] - targets).abs().sum(-1).argmin(1)
        loss_box = F.smooth_l1_loss(deltas[top], targets[nearest] - anchors[top])
        return loss_box + F.binary_cross_entropy_with_logits(objectness[top], torch.ones(len(top), device=images.device))


@expected("kept_tensors", fix=r"_cache|\.cpu\(\)", thread="pytorch/vision#1657", memory=1000, held_back=True)
def train_rpn_aerial(fixed=False):
    """`AnchorGenerator._cache` keeps the anchors of every image size it has ever seen, and every photo has another size, so the cached
    anchors pile up on the GPU. Cured by: clearing `_cache` at the end of `forward`.
    """
    sizes = ((8., 12., 16., 20., 24.), (32., 40., 48., 56., 64.), (96., 112., 128., 144., 160.))
    rpn_anchor_generator = AnchorGenerator(sizes, (0.5, 1.0, 2.0), per_image=fixed)
    model = RegionProposalNetwork(rpn_anchor_generator, 32, num_anchors=15).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.005, momentum=0.9)
    for step in range(45):
        height, width = 800 + 16 * (step % 9), 1088 + 16 * step
        images, boxes = torch.rand(1, 3, height, width).cuda(), (torch.rand(60, 4) * 800).cuda()
        loss = model(images, boxes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# Video object segmentation with a long-term and a short-term memory of past frames.

class MultiheadAttention(nn.Module):
    def __init__(self, d_model, num_head):
        super().__init__()
        self.num_head = num_head
        self.projection = nn.Linear(d_model, d_model)

    def forward(self, Q, K, V):
        Q, K, V = (x.view(x.shape[0], self.num_head, -1).transpose(0, 1) for x in (Q, K, V))
        attn = torch.softmax(Q @ K.transpose(1, 2) / Q.shape[-1] ** 0.5, dim=-1)
        return self.projection((attn @ V).transpose(0, 1).flatten(1))


class LongShortTermTransformerBlock(nn.Module):
    def __init__(self, d_model=128, att_nhead=4):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.linear_Q, self.linear_V = nn.Linear(d_model, d_model), nn.Linear(d_model, d_model)
        self.long_term_attn, self.short_term_attn = MultiheadAttention(d_model, att_nhead), MultiheadAttention(d_model, att_nhead)

    def forward(self, tgt, id_emb, long_term_memory, short_term_memory):
        x = self.norm(tgt)
        curr_K = self.linear_Q(x)
        curr_memory = (curr_K, self.linear_V(x + id_emb))
        if long_term_memory is None:
            long_term_memory = short_term_memory = curr_memory
        tgt = tgt + self.long_term_attn(curr_K, *long_term_memory) + self.short_term_attn(curr_K, *short_term_memory)
        return tgt, curr_memory


class AOTInferEngine(nn.Module):
    def __init__(self, long_term_mem_gap, num_layers=3, d_model=128):
        super().__init__()
        self.long_term_mem_gap = long_term_mem_gap
        self.encoder = nn.Conv2d(3, d_model, 16, 16)
        self.id_bank = nn.Conv2d(11, d_model, 16, 16)
        self.layers = nn.ModuleList(LongShortTermTransformerBlock(d_model) for _ in range(num_layers))
        self.decoder = nn.Conv2d(d_model, 11, 1)
        self.long_term_memories = self.short_term_memories = None

    def update_memory(self, curr_memories, frame_step):
        self.short_term_memories = curr_memories
        if self.long_term_memories is None:
            self.long_term_memories = curr_memories
        elif frame_step % self.long_term_mem_gap == 0:
            self.long_term_memories = [tuple(torch.cat([new, last]) for new, last in zip(curr, long))
                                       for curr, long in zip(curr_memories, self.long_term_memories)]

    def propagate(self, img, mask, frame_step):
        feat = self.encoder(img)
        h, w = feat.shape[-2:]
        x, id_emb = feat.flatten(2)[0].T, self.id_bank(mask).flatten(2)[0].T
        curr_memories = []
        for i, layer in enumerate(self.layers):
            long_term = self.long_term_memories[i] if self.long_term_memories else None
            short_term = self.short_term_memories[i] if self.short_term_memories else None
            x, curr_memory = layer(x, id_emb, long_term, short_term)
            curr_memories.append(curr_memory)
        self.update_memory(curr_memories, frame_step)
        logit = F.interpolate(self.decoder(x.T.reshape(1, -1, h, w)), size=img.shape[-2:], mode="bilinear")
        return logit.softmax(1)


@expected("growing_buffer", fix="limit", thread="yoxu515/aot-benchmark#44", memory=1000, held_back=True)
@torch.no_grad()
def evaluate_aotl_davis(fixed=False):
    """Every 5 frames `update_memory` concatenates another frame to `long_term_memories`, without a limit. The longer the video, the bigger
    the keys and values, and above all the attention matrix (pixels of the frame × pixels of all remembered frames) in `long_term_attn`.
    Cured by: a larger `TEST_LONG_TERM_MEM_GAP` (fewer frames in the memory).
    """
    engine = AOTInferEngine(long_term_mem_gap=30 if fixed else 5).cuda().eval()
    pred = torch.rand(1, 11, 480, 848).cuda().softmax(1)
    masks = []
    for frame_step in range(70):
        pred = engine.propagate(torch.rand(1, 3, 480, 848).cuda(), pred, frame_step)
        masks.append(pred.argmax(1).byte().cpu())
    return torch.cat(masks)


# Instance segmentation of indoor point clouds: predictions of the validation scenes are matched at the end.

class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self._defaults = {}

    def add_state(self, name, default):
        self._defaults[name] = default
        setattr(self, name, list(default))

    def reset(self):
        for name, default in self._defaults.items():
            setattr(self, name, list(default))


class InstanceSegmentationEvaluator(Metric):
    def __init__(self, num_classes, state_device=None):
        super().__init__()
        self.num_classes, self.state_device = num_classes, state_device
        for name in ("pred_classes", "pred_scores", "pred_masks", "gt_classes", "gt_masks"):
            self.add_state(name, default=[])

    def update(self, pred, gt):
        for prefix, values in (("pred", pred), ("gt", gt)):
            for key, value in values.items():
                if self.state_device:
                    value = value.to(self.state_device)
                getattr(self, f"{prefix}_{key}").append(value)

    def compute(self):
        matched = []
        for pred_masks, gt_masks in zip(self.pred_masks, self.gt_masks):
            pred_masks, gt_masks = pred_masks.float(), gt_masks.float()
            intersection = pred_masks @ gt_masks.T
            union = pred_masks.sum(1)[:, None] + gt_masks.sum(1) - intersection
            matched.append((intersection / union).max(1).values.mean())
        return torch.stack(matched).mean()


class MaskDecoder3D(nn.Module):
    def __init__(self, num_queries=120, channels=64, num_classes=20):
        super().__init__()
        self.point_mlp = nn.Sequential(nn.Linear(6, channels), nn.ReLU(), nn.Linear(channels, channels))
        self.queries = nn.Embedding(num_queries, channels)
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, points):
        point_feats = self.point_mlp(points)
        mask_logits = self.queries.weight @ point_feats.T
        scores, classes = self.classifier(self.queries.weight).softmax(-1).max(-1)
        return {"classes": classes, "scores": scores, "masks": mask_logits > 0}


class LitInstanceSegmentor:
    def __init__(self, state_device):
        self.net = MaskDecoder3D().cuda().eval()
        self.val_evaluator = InstanceSegmentationEvaluator(20, state_device)

    @torch.no_grad()
    def validation_step(self, batch):
        pred = self.net(batch["coords_and_colors"].cuda())
        self.val_evaluator.update(pred, {k: batch[k].cuda() for k in ("classes", "masks")})

    def on_validation_epoch_end(self):
        map50 = self.val_evaluator.compute()
        self.val_evaluator.reset()
        return map50.item()


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="NVlabs/Mosaic3D#10", memory=1000, held_back=True)
def validate_scannet_instances(fixed=False):
    """`InstanceSegmentationEvaluator.update` collects the predicted and ground truth masks of all validation scenes on the GPU until the
    end of the epoch. Cured by: moving the collected results to the CPU.
    """
    module = LitInstanceSegmentor(state_device="cpu" if fixed else None)
    for scene in range(40):
        num_points, num_instances = 150000 + 1000 * (scene % 7), 30 + scene % 5
        module.validation_step({"coords_and_colors": torch.rand(num_points, 6), "classes": torch.randint(0, 20, (num_instances,)),
                                "masks": torch.zeros(num_instances, num_points, dtype=torch.bool)})
    return module.on_validation_epoch_end()


# Shape completion: the results of a category are compared with the ground truth.

def distChamfer(a, b):
    x, y = a.double(), b.double()
    bs, num_points_x, points_dim = x.size()
    num_points_y = y.size(1)
    xx, yy = x.pow(2).sum(2), y.pow(2).sum(2)
    zz = torch.bmm(x, y.transpose(2, 1))
    rx = xx.unsqueeze(1).expand(bs, num_points_y, num_points_x)
    ry = yy.unsqueeze(1).expand(bs, num_points_x, num_points_y)
    P = rx.transpose(2, 1) + ry - 2 * zz
    return torch.min(P, 2)[0].float(), torch.min(P, 1)[0].float(), torch.min(P, 2)[1].int(), torch.min(P, 1)[1].int()


def compute_cd(gt, output, batch_size):
    dist = []
    for i in range(0, gt.shape[0], batch_size):
        dist1, dist2, _, _ = distChamfer(gt[i:i + batch_size], output[i:i + batch_size])
        dist.append(dist1.mean(1) + dist2.mean(1))
    return (torch.cat(dist) * 10000).cpu().tolist()


def compute_f1(gt, output, thre=0.03):
    f1_ls = []
    for gt_pcd, out_pcd in zip(gt, output):
        dist = torch.cdist(out_pcd, gt_pcd)
        acc, comp = (dist.min(1)[0] < thre).float().mean(), (dist.min(0)[0] < thre).float().mean()
        f1_ls.append((2 * acc * comp / (acc + comp + 1e-6)).item())
    return f1_ls


@expected("all_pairs", fix="split|chunk", thread="junzhezhang/shape-inversion#12", memory=1000, held_back=True)
def eval_completion_with_gt(fixed=False):
    """`compute_cd` gives all 150 clouds to `distChamfer` at once, which builds the full 150 × 2048 × 2048 matrix of distances in double
    precision (`zz`, 4.7 GiB, and more of them). Cured by: computing the distances for a few clouds at a time.
    """
    ours_output_ls, ours_gt_ls = [], []
    for index in range(150):
        ours_output_ls.append(torch.rand(2048, 3))
        ours_gt_ls.append(torch.rand(2048, 3))
    ours_output, ours_gt = torch.stack(ours_output_ls).cuda(), torch.stack(ours_gt_ls).cuda()
    cd_ls = compute_cd(ours_gt, ours_output, batch_size=3 if fixed else 150)
    f1_ls = compute_f1(ours_gt, ours_output)
    return sum(cd_ls) / len(cd_ls), sum(f1_ls) / len(f1_ls)


# Splats trained on the photos of a phone.

class SplatfactoModel(nn.Module):
    def __init__(self, num_points):
        super().__init__()
        shapes = {"means": (3,), "scales": (3,), "quats": (4,), "features_dc": (3,), "features_rest": (15, 3), "opacities": (1,)}
        self.gauss_params = nn.ParameterDict({name: nn.Parameter(torch.rand(num_points, *shape)) for name, shape in shapes.items()})

    @property
    def num_points(self):
        return self.gauss_params["means"].shape[0]

    def get_outputs(self, camera):
        p = self.gauss_params
        viewdirs = F.normalize(p["means"].detach() - camera["position"], dim=-1)
        basis = torch.cat([viewdirs ** k for k in range(1, 6)], -1)
        rgb = p["features_dc"] + torch.einsum("nk,nkc->nc", basis, p["features_rest"])
        screen = p["means"] @ camera["rotation"].T
        weight = p["opacities"].sigmoid() * torch.exp(-p["scales"].mean(1, keepdim=True)) * F.normalize(p["quats"], dim=-1)[:, :1]
        pixel = (screen[:, 0].detach() * camera["width"]).long().clamp(0, camera["width"] * camera["height"] - 1)
        image = torch.zeros(camera["width"] * camera["height"], 3, device=rgb.device)
        return image.index_add(0, pixel, weight * torch.exp(-screen[:, 2:]) * rgb)


class MCMCStrategy:
    def __init__(self, cap_max, refine_every=2, growth=1.05):
        self.cap_max, self.refine_every, self.growth = cap_max, refine_every, growth

    @torch.no_grad()
    def add_new_gs(self, params, optimizer):
        current = params["means"].shape[0]
        n_new = int(self.growth * current) - current
        if self.cap_max is not None:
            n_new = max(0, min(n_new, self.cap_max - current))
        if n_new == 0:
            return 0
        sampled_idxs = torch.randint(current, (n_new,), device="cuda")
        for group in optimizer.param_groups:
            param = group["params"][0]
            state = optimizer.state.pop(param)
            new_param = nn.Parameter(torch.cat([param, param[sampled_idxs]]))
            for key in ("exp_avg", "exp_avg_sq"):
                state[key] = torch.cat([state[key], torch.zeros_like(new_param[current:])])
            optimizer.state[new_param] = state
            group["params"] = [new_param]
            params[group["name"]] = new_param
        return n_new

    def step_post_backward(self, params, optimizer, step):
        if step % self.refine_every == 0:
            n_new = self.add_new_gs(params, optimizer)
            print(f"Step {step}: Added {n_new} GSs. Now having {params['means'].shape[0]} GSs.")


@expected("growing_model", fix="limit", thread="escontra/gauss_gym#11", memory=1000, held_back=True)
def ns_train_splatfacto(fixed=False):
    """The MCMC strategy adds 5 % more Gaussians at each refinement and there is no cap, so the parameters, their gradients, Adam's states
    and the rendering grow all through the training. Cured by: without this strategy, with a hard cap on the number of Gaussians.
    """
    model = SplatfactoModel(num_points=150000).cuda()
    strategy = MCMCStrategy(cap_max=250000 if fixed else None)
    optimizer = torch.optim.Adam([{"params": [p], "name": name, "lr": 1e-3} for name, p in model.gauss_params.items()], eps=1e-15)
    camera = {"position": torch.rand(3).cuda(), "rotation": torch.rand(3, 3).cuda(), "width": 640, "height": 480}
    for step in range(1, 101):
        gt_img = torch.rand(640 * 480, 3).cuda()
        loss = (model.get_outputs(camera) - gt_img).abs().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        strategy.step_post_backward(model.gauss_params, optimizer, step)
    return model.num_points


# Image classification: a network written for small pictures is trained on ImageNet.

def conv_bn(cin, cout, **kwargs):
    return nn.Sequential(nn.Conv2d(cin, cout, **kwargs), nn.BatchNorm2d(cout), nn.ReLU(inplace=True))


class Inception(nn.Module):
    def __init__(self, input_channels, n1x1, n3x3_reduce, n3x3, n5x5_reduce, n5x5, pool_proj):
        super().__init__()
        self.b1 = conv_bn(input_channels, n1x1, kernel_size=1)
        self.b2 = nn.Sequential(conv_bn(input_channels, n3x3_reduce, kernel_size=1),
                                conv_bn(n3x3_reduce, n3x3, kernel_size=3, padding=1))
        self.b3 = nn.Sequential(conv_bn(input_channels, n5x5_reduce, kernel_size=1),
                                conv_bn(n5x5_reduce, n5x5, kernel_size=3, padding=1), conv_bn(n5x5, n5x5, kernel_size=3, padding=1))
        self.b4 = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), conv_bn(input_channels, pool_proj, kernel_size=1))

    def forward(self, x):
        return torch.cat([self.b1(x), self.b2(x), self.b3(x), self.b4(x)], dim=1)


class GoogleNet(nn.Module):
    def __init__(self, prelayer, num_class):
        super().__init__()
        self.prelayer = prelayer
        self.a3, self.b3 = Inception(192, 64, 96, 128, 16, 32, 32), Inception(256, 128, 128, 192, 32, 96, 64)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.a4, self.b4 = Inception(480, 192, 96, 208, 16, 48, 64), Inception(512, 160, 112, 224, 24, 64, 64)
        self.c4, self.d4 = Inception(512, 128, 128, 256, 24, 64, 64), Inception(512, 112, 144, 288, 32, 64, 64)
        self.e4 = Inception(528, 256, 160, 320, 32, 128, 128)
        self.a5, self.b5 = Inception(832, 256, 160, 320, 32, 128, 128), Inception(832, 384, 192, 384, 48, 128, 128)
        self.avgpool, self.dropout, self.linear = nn.AdaptiveAvgPool2d(1), nn.Dropout(0.4), nn.Linear(1024, num_class)

    def forward(self, x):
        output = self.maxpool(self.b3(self.a3(self.prelayer(x))))
        output = self.maxpool(self.e4(self.d4(self.c4(self.b4(self.a4(output))))))
        return self.linear(self.dropout(self.avgpool(self.b5(self.a5(output))).flatten(1)))


def cifar_prelayer():
    return conv_bn(3, 192, kernel_size=3, padding=1)


def paper_prelayer():
    return nn.Sequential(conv_bn(3, 64, kernel_size=7, stride=2, padding=3), nn.MaxPool2d(3, stride=2, padding=1),
                         conv_bn(64, 192, kernel_size=3, padding=1), nn.MaxPool2d(3, stride=2, padding=1))


@expected("large_images", fix="stride=2", thread="weiaicunzai/pytorch-cifar100#31", memory=1000, held_back=True)
def train_googlenet_imagenet(fixed=False):
    """This `GoogleNet` is made for 32 × 32 pictures: its first layer does not downsample (`cifar_prelayer`, 192 channels at full
    resolution), so with 224 × 224 images the feature maps that the forward pass keeps are enormous. Cured by: more downsampling at the
    start, five times in all, as in the paper.
    """
    net = GoogleNet(paper_prelayer() if fixed else cifar_prelayer(), num_class=1000).cuda()
    loss_function = nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4)
    net.train()
    for batch_index in range(3):
        images, labels = torch.randn(12, 3, 224, 224).cuda(), torch.randint(0, 1000, (12,)).cuda()
        optimizer.zero_grad()
        loss = loss_function(net(images), labels)
        loss.backward()
        optimizer.step()
    return loss.item()


# Segmentation with a template of a Lightning project.

class LightningModule(nn.Module):
    def training_epoch_end(self, outputs):
        pass


class SegmentationLitModule(LightningModule):
    def __init__(self, num_classes, loss_only):
        super().__init__()
        self.loss_only = loss_only
        self.net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(),
                                 nn.Conv2d(16, num_classes, 1))
        self.criterion = nn.CrossEntropyLoss()

    def step(self, batch):
        x, y = batch
        preds = self.net(x)
        return self.criterion(preds, y), preds, y

    def training_step(self, batch, batch_idx):
        loss, preds, targets = self.step(batch)
        self.logged = {"train/loss": loss.detach()}
        return {"loss": loss} if self.loss_only else {"loss": loss, "preds": preds, "targets": targets}

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Trainer:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def run_training_batch(self, model, optimizer, batch, batch_idx):
        batch = tuple(t.cuda() for t in batch)
        output = model.training_step(batch, batch_idx)
        optimizer.zero_grad()
        output["loss"].backward()
        optimizer.step()
        return {key: value.detach() for key, value in output.items()}

    def fit(self, model, train_dataloader):
        optimizer = model.configure_optimizers()
        for epoch in range(self.max_epochs):
            epoch_output = []
            for batch_idx, batch in enumerate(train_dataloader):
                epoch_output.append(self.run_training_batch(model, optimizer, batch, batch_idx))
            model.training_epoch_end(epoch_output)


@expected("kept_tensors", fix=r"\.cpu\(\)|detach", thread="HelmholtzAI-Consultants-Munich/Quicksetup-ai#26", memory=1000, held_back=True)
def train_quicksetup_segmentation(fixed=False):
    """`training_step` returns the predictions and targets along with the loss, and the trainer keeps the returned dictionaries of all
    batches in `epoch_output` until the end of the epoch, on the GPU, though nobody uses them. Cured by: returning only the loss.
    """
    model = SegmentationLitModule(num_classes=8, loss_only=fixed).cuda()
    dataset = [(torch.rand(4, 3, 384, 384), torch.randint(0, 8, (4, 384, 384))) for _ in range(30)]
    Trainer(max_epochs=2).fit(model, dataset)
    return model.logged["train/loss"].item()


# Few-shot classification with prototypes.

def conv_block(in_channels, out_channels):
    return nn.Sequential(nn.Conv2d(in_channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels), nn.ReLU(), nn.MaxPool2d(2))


class Convnet(nn.Module):
    def __init__(self, x_dim=3, hid_dim=64, z_dim=64):
        super().__init__()
        self.encoder = nn.Sequential(conv_block(x_dim, hid_dim), conv_block(hid_dim, hid_dim), conv_block(hid_dim, hid_dim),
                                     conv_block(hid_dim, z_dim))

    def forward(self, x):
        return self.encoder(x).flatten(1)


def euclidean_metric(a, b):
    return -((a[:, None] - b[None]) ** 2).sum(2)


def count_acc(logits, label):
    return (logits.argmax(1) == label).float().mean().item()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="yinboc/prototypical-network-pytorch#5", memory=1000, held_back=True)
def train_proto_mini_imagenet(fixed=False):
    """In the validation loop no backward is called (and gradients are on), so `proto`, `logits` and `loss` still hold the whole graph of
    the last batch while the forward pass of the next batch builds its own: two sets of activations at once. Cured by: `proto = None; logits
    = None; loss = None` at the end of each loop body.
    """
    shot, query, way = 1, 13, 5
    model = Convnet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    label = torch.arange(way).repeat(query).cuda()
    trlog = {"train_loss": [], "val_loss": [], "val_acc": []}
    for epoch in range(1, 3):
        model.train()
        for i in range(1, 6):
            data = torch.randn(way * (shot + query), 3, 84, 84).cuda()
            data_shot, data_query = data[:shot * way], data[shot * way:]
            proto = model(data_shot).reshape(shot, way, -1).mean(dim=0)
            logits = euclidean_metric(model(data_query), proto)
            loss = F.cross_entropy(logits, label)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            trlog["train_loss"].append(loss.item())
            if fixed:
                proto = None; logits = None; loss = None

        model.eval()
        for i in range(1, 11):
            data = torch.randn(way * (shot + query), 3, 84, 84).cuda()
            data_shot, data_query = data[:shot * way], data[shot * way:]
            proto = model(data_shot).reshape(shot, way, -1).mean(dim=0)
            logits = euclidean_metric(model(data_query), proto)
            loss = F.cross_entropy(logits, label)
            trlog["val_loss"].append(loss.item())
            trlog["val_acc"].append(count_acc(logits, label))
            if fixed:
                proto = None; logits = None; loss = None
    return trlog


# Reconstruction of moving things: the motion of hidden surface nodes is estimated frame by frame.

class GraphConv(nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.edge_mlp = nn.Sequential(nn.Linear(2 * in_channels, out_channels), nn.ReLU(), nn.Linear(out_channels, out_channels))

    def forward(self, x, neighbours):
        x_j = x[neighbours]
        x_i = x[:, None].expand_as(x_j)
        return self.edge_mlp(torch.cat([x_i, x_j - x_i], -1)).max(1).values


class OcclusionMotionNet(nn.Module):
    def __init__(self, hidden=96):
        super().__init__()
        self.conv1, self.conv2 = GraphConv(10, hidden), GraphConv(hidden, hidden)
        self.lstm = nn.LSTMCell(hidden, hidden)
        self.motion, self.confidence = nn.Linear(hidden, 3), nn.Linear(hidden, 1)

    def forward(self, node_feature, neighbours, state):
        x = self.conv2(self.conv1(node_feature, neighbours).relu(), neighbours)
        h, c = self.lstm(x, state)
        return self.motion(h), self.confidence(h).sigmoid(), (h, c)


class MotionCompletor:
    def __init__(self, num_nodes):
        self.model = OcclusionMotionNet().cuda().eval()
        self.state = tuple(torch.zeros(num_nodes, 96, device="cuda") for _ in range(2))

    def predict(self, node_position, visible_motion, visibility, neighbours):
        node_feature = torch.cat([node_position, visible_motion, visibility, node_position - node_position.mean(0)], 1)
        motion, confidence, self.state = self.model(node_feature, neighbours, self.state)
        return motion.detach(), confidence.detach()


@expected("evaluation_keeps_graphs", fix="no_grad", thread="wenbin-lin/OcclusionFusion#14", memory=1000, held_back=True)
def run_demo_occlusion_fusion(fixed=False):
    """The demo runs the network with gradients enabled and `self.state` of the LSTM goes from frame to frame, so the graph of all frames so
    far stays alive and grows with each frame, though no backward is ever called. Cured by: no gradients in the forward pass
    (`torch.no_grad`).
    """
    num_nodes = 1500
    completor = MotionCompletor(num_nodes)
    node_position = torch.rand(num_nodes, 3).cuda()
    neighbours = torch.cdist(node_position, node_position).topk(9, largest=False).indices
    results = []
    for frame_id in range(60):
        visible_motion, visibility = torch.randn(num_nodes, 3).cuda() * 0.01, torch.rand(num_nodes, 1).cuda().round()
        with no_grad_if(fixed):
            motion, confidence = completor.predict(node_position, visible_motion * visibility, visibility, neighbours)
        node_position = node_position + motion * confidence
        results.append(node_position.cpu().numpy())
    return results
