"""Programs after public threads from all fields."""
import gc

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected
from programs.root_causes import no_grad_if


# Speech recognition: a recurrent acoustic model, whose errors are measured on the development set.

class LiGRULayer(nn.Module):
    def __init__(self, in_dim, hidden_dim):
        super().__init__()
        self.hidden_dim = hidden_dim
        self.wh, self.wz = nn.Linear(in_dim, hidden_dim), nn.Linear(in_dim, hidden_dim)
        self.uh, self.uz = nn.Linear(hidden_dim, hidden_dim, False), nn.Linear(hidden_dim, hidden_dim, False)

    def forward(self, x):
        wh_out, wz_out = self.wh(x), self.wz(x)
        ht, hiddens = torch.zeros(x.shape[1], self.hidden_dim, device=x.device), []
        for k in range(x.shape[0]):
            zt = torch.sigmoid(wz_out[k] + self.uz(ht))
            hcand = torch.relu(wh_out[k] + self.uh(ht))
            ht = zt * ht + (1 - zt) * hcand
            hiddens.append(ht)
        return torch.stack(hiddens)


def forward_model(nns, fea, lab):
    out_dnn = nns["softmax"](nns["ligru"](fea))
    loss_final = F.cross_entropy(out_dnn.flatten(0, 1), lab.flatten())
    with torch.no_grad():
        err_final = (out_dnn.argmax(-1) != lab).float().mean()
    return {"loss_final": loss_final, "err_final": err_final}


def run_nn_forward(nns, chunk, is_production):
    for net in nns.values():
        net.eval()
    loss_sum = err_sum = 0
    with no_grad_if(is_production):
        for fea, lab in chunk:
            outs_dict = forward_model(nns, fea.cuda(), lab.cuda())
            loss_sum = loss_sum + outs_dict["loss_final"]
            err_sum = err_sum + outs_dict["err_final"]
    return loss_sum / len(chunk), err_sum / len(chunk)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="mravanelli/pytorch-kaldi#41")
def validate_timit(fixed=False):
    """On the development set I never call backward, but gradients are still recorded, and `loss_sum = loss_sum + outs_dict["loss_final"]`
    in `run_nn_forward` keeps the recorded hidden states of every minibatch. Cured by: `torch.no_grad()` around the forward pass when not
    training.
    """
    nns = {"ligru": nn.Sequential(LiGRULayer(40, 512), LiGRULayer(512, 512)).cuda(),
           "softmax": nn.Linear(512, 1920).cuda()}
    dev_chunk = [(torch.randn(30, 96, 40), torch.randint(0, 1920, (30, 96))) for _ in range(16)]
    loss_tot, err_tot = run_nn_forward(nns, dev_chunk, is_production=fixed)
    return loss_tot.item(), err_tot.item()


# Dense matching of two photos: a coarse match is refined at a finer resolution.

def local_correlation(feature0, feature1, local_radius, coords):
    b, c, h, w = feature0.shape
    side = 2 * local_radius + 1
    step_y, step_x = 2 * local_radius / h, 2 * local_radius / w
    window = torch.meshgrid(torch.linspace(-step_y, step_y, side), torch.linspace(-step_x, step_x, side), indexing="ij")
    window = torch.stack((window[1], window[0]), -1).view(1, side ** 2, 2).cuda()
    corr = torch.empty(b, side ** 2, h, w, device=feature0.device)
    for i in range(b):
        window_coords = (coords[i, :, :, None] + window[:, None]).reshape(1, h, w * side ** 2, 2)
        window_feature = F.grid_sample(feature1[i:i + 1], window_coords, padding_mode="zeros", align_corners=False)
        window_feature = window_feature.reshape(c, h, w, side ** 2)
        corr[i] = (feature0[i, ..., None] / c ** 0.5 * window_feature).sum(0).permute(2, 0, 1)
    return corr


class RoadmapMatcher(nn.Module):
    def __init__(self, coarse_res=(560, 560), upsample_res=(1152, 1152), radius=3):
        super().__init__()
        self.coarse_res, self.upsample_res, self.radius = coarse_res, upsample_res, radius
        self.encoder = nn.Sequential(nn.Conv2d(3, 32, 7, 4, 3), nn.ReLU(), nn.Conv2d(32, 128, 3, 2, 1))
        self.refiner = nn.Sequential(nn.Conv2d((2 * radius + 1) ** 2 + 2, 64, 1), nn.ReLU(), nn.Conv2d(64, 2, 1))

    def refine(self, im_a, im_b, flow, res):
        feature_a, feature_b = (self.encoder(F.interpolate(im, res)) for im in (im_a, im_b))
        flow = F.interpolate(flow, feature_a.shape[-2:], mode="bilinear", align_corners=False)
        corr = local_correlation(feature_a, feature_b, self.radius, flow.permute(0, 2, 3, 1))
        return flow + self.refiner(torch.cat((corr, flow), 1))

    @torch.inference_mode()
    def match(self, im_a, im_b):
        flow = self.refine(im_a, im_b, torch.zeros(1, 2, 70, 70, device=im_a.device), self.coarse_res)
        return self.refine(im_a, im_b, flow, self.upsample_res)


@expected("enlarged", fix="lower resolution|smaller", thread="Parskatt/RoMa#5")
def match_photos(fixed=False):
    """`window_feature` in `local_correlation` samples the features of a whole window of neighbours (49) for every position at the fine
    resolution, and `upsample_res` of 1152 makes this one tensor (and its product) too large; nothing accumulates. Cured by: lower
    `upsample_res` (864 x 864).
    """
    model = RoadmapMatcher(upsample_res=(864, 864) if fixed else (1152, 1152)).cuda().eval()
    im_a, im_b = torch.rand(2, 1, 3, 1200, 1600).cuda().unbind(0)
    warp = model.match(im_a, im_b)
    return warp.cpu()


# The next basket of a customer: a graph of all pairs of the items that were bought, with weights for each time.

class WeightedGraphConv(nn.Module):
    def __init__(self, in_features, out_features, use_builtin):
        super().__init__()
        self.linear, self.use_builtin = nn.Linear(in_features, out_features), use_builtin

    def forward(self, node_features, edges, edges_weight):
        n, steps, _ = node_features.shape
        if self.use_builtin:
            adjacency = edges_weight.view(steps, n, n)
            pooled = torch.bmm(adjacency, node_features.transpose(0, 1)).transpose(0, 1)
        else:
            src, dst = edges
            message = node_features[src] * edges_weight.t().unsqueeze(-1)
            pooled = torch.zeros_like(node_features).index_add(0, dst, message)
        return self.linear(pooled)


class TemporalSetsNet(nn.Module):
    def __init__(self, items_total, item_embed_dim, use_builtin):
        super().__init__()
        self.item_embedding = nn.Embedding(items_total, item_embed_dim)
        self.gcns = nn.ModuleList(WeightedGraphConv(item_embed_dim, item_embed_dim, use_builtin) for _ in range(2))
        self.fc_output = nn.Linear(item_embed_dim, 1)

    def forward(self, items, edges, edges_weight):
        hidden = self.item_embedding(items).unsqueeze(1).repeat(1, edges_weight.shape[0], 1)
        for gcn in self.gcns:
            hidden = torch.relu(gcn(hidden, edges, edges_weight))
        return self.fc_output(hidden.mean(1)).squeeze(-1)


@expected("enlarged", fix="adjacency", thread="yule-BUAA/DNNTSP#1")
def train_next_basket(fixed=False, items_in_sets=320, sets=30):
    """`message` in `WeightedGraphConv.forward` writes out the features of the source node for each of the n x n edges and each time (E x T
    x F) before they are summed up. Cured by: built-in message function (multiply and sum at once, a matrix product) instead of a message
    for each edge.
    """
    model = TemporalSetsNet(8000, 32, use_builtin=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    src, dst = torch.meshgrid(torch.arange(items_in_sets), torch.arange(items_in_sets), indexing="ij")
    edges = dst.flatten().cuda(), src.flatten().cuda()
    for _ in range(4):
        items = torch.randint(0, 8000, (items_in_sets,)).cuda()
        edges_weight = torch.rand(sets, items_in_sets ** 2).cuda()
        loss = F.binary_cross_entropy_with_logits(model(items, edges, edges_weight), torch.rand(items_in_sets).cuda())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Faces in photos: each photo is seen as it is and mirrored.

class DualShotDetector(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(),
                                  nn.Conv2d(32, 64, 3, 1, 1), nn.ReLU(), nn.MaxPool2d(2))
        self.deep = nn.Sequential(nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, 128, 3, 1, 1), nn.ReLU())
        self.loc, self.conf = nn.Conv2d(128, 4, 3, padding=1), nn.Conv2d(128, 2, 3, padding=1)

    def forward(self, x):
        feature = self.deep(self.stem(x))
        boxes = self.loc(feature).flatten(2).transpose(1, 2)
        scores = self.conf(feature).softmax(1).flatten(2).transpose(1, 2)[..., 1:]
        return torch.cat((boxes, scores), -1)[0]


def infer(net, img, volatile, flip=False):
    x = img.flip(-1) if flip else img
    with no_grad_if(volatile):
        return net(x.unsqueeze(0).cuda() - 110)


def bbox_vote(det, keep=750):
    _, order = det[:, 4].topk(keep)
    return det[order]


@expected("evaluation_keeps_graphs", fix="no_grad", thread="Tencent/FaceDetection-DSFD#11", memory=1400)
def detect_faces(fixed=False):
    """`infer` runs the detector with gradients recorded, so the detections `det0`, `det1`, `dets` of the photo before still hold all its
    activations while the next photo is processed. Cured by: `torch.no_grad()` in `infer`.
    """
    net = DualShotDetector().cuda().eval()
    photos = [torch.rand(3, 960, 1280) * 255 for _ in range(2)]
    written = []
    for i in range(6):
        img = photos[i % 2]
        det0 = infer(net, img, volatile=fixed)
        det1 = infer(net, img, volatile=fixed, flip=True)
        dets = bbox_vote(torch.cat((det0, det1)))
        written.append(dets.detach().cpu().numpy())
    return written


# Brain scans: the age or sex of a person is predicted from the activity of regions over time.

class FMRILSTM(nn.Module):
    def __init__(self, input_dim, hidden_dim, fresh_hidden):
        super().__init__()
        self.hidden_dim, self.fresh_hidden = hidden_dim, fresh_hidden
        self.lstm = nn.LSTM(input_dim, hidden_dim, num_layers=1, batch_first=True)
        self.linear, self.dropout = nn.Linear(hidden_dim, 1), nn.Dropout(0.2)
        self.hidden = self.init_hidden()

    def init_hidden(self):
        return torch.randn(1, 64, self.hidden_dim).cuda(), torch.randn(1, 64, self.hidden_dim).cuda()

    def forward(self, x):
        if self.fresh_hidden:
            lstm_out, self.hidden = self.lstm(x)
        else:
            lstm_out, self.hidden = self.lstm(x, self.hidden)
        return torch.sigmoid(self.linear(self.dropout(lstm_out[:, -1]))).squeeze(-1)


@expected("recurrent_state", fix="detach", thread="sgadgil6/cnslab_fmri#4")
def train_fmri_lstm(fixed=False, windows=24, rois=22):
    """`self.hidden` is handed from batch to batch without being cut off, so with `backward(retain_graph=True)` the recorded history of all
    the batches before is kept and gets longer with each batch. Cured by: do not pass the old hidden state to the LSTM, plain `backward()`.
    """
    model = FMRILSTM(rois, 256, fresh_hidden=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    optimizer.zero_grad()
    for _ in range(windows):
        series, sex = torch.randn(64, 128, rois).cuda(), torch.randint(0, 2, (64,)).float().cuda()
        loss = F.binary_cross_entropy(model(series), sex) / windows
        if fixed:
            loss.backward()
        else:
            loss.backward(retain_graph=True)
    optimizer.step()


# Medical volumes: a partly reversible network with a second output for another resolution.

class ReversibleBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.f_block, self.g_block = (nn.Conv3d(channels // 2, channels // 2, 3, padding=1) for _ in range(2))

    def forward(self, x):
        x1, x2 = x.chunk(2, 1)
        y1 = x1 + self.f_block(x2)
        return torch.cat((y1, x2 + self.g_block(y1)), 1)

    def backward_pass(self, y, dy):
        y1, y2 = y.chunk(2, 1)
        x2 = y2 - self.g_block(y1)
        x = torch.cat((y1 - self.f_block(x2), x2), 1)
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            self(x).backward(dy)
        return x.detach(), x.grad


class ReversibleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, reversible_blocks, detach_output):
        for block in reversible_blocks:
            x = block(x)
        ctx.y = x.detach() if detach_output else x
        ctx.reversible_blocks = reversible_blocks
        return x

    @staticmethod
    def backward(ctx, dy):
        y = ctx.y
        del ctx.y
        for block in reversed(ctx.reversible_blocks):
            y, dy = block.backward_pass(y.detach(), dy)
        return dy, None, None


class PartlyReversibleUNet(nn.Module):
    def __init__(self, channels, detach_output):
        super().__init__()
        self.detach_output = detach_output
        self.first = nn.Conv3d(4, channels, 3, padding=1)
        self.rev_main, self.rev_side = (nn.ModuleList(ReversibleBlock(channels) for _ in range(2)) for _ in range(2))
        self.head = nn.Conv3d(channels, 3, 1)

    def forward(self, x):
        x = self.first(x)
        main = ReversibleFunction.apply(x, self.rev_main, self.detach_output)
        side = ReversibleFunction.apply(x, self.rev_side, self.detach_output)
        return self.head(main), side


@expected("output_on_ctx", fix="save_for_backward|detach", thread="RobinBruegger/RevTorch#1")
def segment_brats(fixed=False):
    """`ctx.y = x` in `ReversibleFunction.forward` stores the output itself on the context; for `side`, which the loss does not use,
    backward never runs and deletes it, so the output and its context hold each other and leak in each step. Cured by: store a detached
    output (`ctx.y = x.detach()`).
    """
    model = PartlyReversibleUNet(16, detach_output=fixed).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for _ in range(40):
        volume, target = torch.randn(1, 4, 80, 80, 80).cuda(), torch.randint(0, 2, (1, 3, 80, 80, 80)).float().cuda()
        prediction, _ = model(volume)
        loss = F.binary_cross_entropy_with_logits(prediction, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Street scenes: crops are trained, whole pictures are validated at several scales.

class AttentionSegmenter(nn.Module):
    def __init__(self, num_classes=19, width=48):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), nn.BatchNorm2d(width), nn.ReLU(),
                                      nn.Conv2d(width, width, 3, 1, 1), nn.BatchNorm2d(width), nn.ReLU(),
                                      nn.Conv2d(width, 2 * width, 3, 2, 1), nn.BatchNorm2d(2 * width), nn.ReLU())
        self.cls_head, self.attn_head = nn.Conv2d(2 * width, num_classes, 1), nn.Conv2d(2 * width, 1, 1)

    def forward(self, images):
        feature, size = self.backbone(images), images.shape[-2:]
        return (F.interpolate(self.cls_head(feature), size, mode="bilinear"),
                F.interpolate(self.attn_head(feature).sigmoid(), size, mode="bilinear"))

    def nscale_forward(self, images, scales):
        pred = None
        for scale in sorted(scales, reverse=True):
            cls_out, attn_out = self(F.interpolate(images, scale_factor=scale, mode="bilinear"))
            if pred is None:
                pred = cls_out
            else:
                size = cls_out.shape[-2:] if scale < 1 else pred.shape[-2:]
                cls_out, attn_out, pred = (F.interpolate(t, size, mode="bilinear") for t in (cls_out, attn_out, pred))
                pred = attn_out * cls_out + (1 - attn_out) * pred
        return F.interpolate(pred, images.shape[-2:], mode="bilinear")


@expected("larger_step", fix="scaled down|half|autocast", thread="NVIDIA/semantic-segmentation#171")
def train_cityscapes(fixed=False, fp16=False, n_scales=(0.5, 1.0, 2.0)):
    """Training on crops fits, but the validation runs the network on the whole picture enlarged by the scale 2.0 of `n_scales` in float32:
    the activations of this one forward pass are too large. Cured by: fp16 and only the scales 0.5 and 1.0.
    """
    if fixed:
        fp16, n_scales = True, (0.5, 1.0)
    net = AttentionSegmenter().cuda()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    for _ in range(4):
        crops, labels = torch.rand(2, 3, 256, 256).cuda(), torch.randint(0, 19, (2, 256, 256)).cuda()
        with torch.autocast("cuda", torch.float16, enabled=fp16):
            loss = F.cross_entropy(net(crops)[0], labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.float16, enabled=fp16):
        for _ in range(3):
            predictions = net.nscale_forward(torch.rand(1, 3, 768, 1536).cuda(), n_scales).argmax(1).cpu()
    return predictions


# Sales of many shops at once, with columns of weather and calendar.

class MultivariateForecaster(nn.Module):
    def __init__(self, n_series, input_size, h, n_columns, step_size):
        super().__init__()
        self.input_size, self.h, self.step_size = input_size, h, step_size
        self.mix_columns = nn.Linear(n_columns, 1)
        self.mix_series, self.mix_time = nn.Linear(n_series, n_series), nn.Linear(input_size, h)

    def create_windows(self, temporal, windows_batch_size):
        windows = temporal.unfold(-1, self.input_size + self.h, self.step_size)
        windows = windows.permute(2, 3, 1, 0).contiguous()
        chosen = torch.randint(0, len(windows), (windows_batch_size,), device=windows.device)
        return windows[chosen]

    def training_loss(self, temporal, windows_batch_size=32):
        windows = self.create_windows(temporal, windows_batch_size)
        insample, outsample = windows[:, :self.input_size], windows[:, self.input_size:, 0]
        mixed = torch.relu(self.mix_series(self.mix_columns(insample.transpose(2, 3)).squeeze(-1)))
        return F.l1_loss(self.mix_time(mixed.transpose(1, 2)).transpose(1, 2), outsample)


@expected("large_result", fix="larger step", thread="Nixtla/neuralforecast#1202")
def forecast_shops(fixed=False, n_series=60, n_times=3000, n_columns=14):
    """`create_windows` copies all overlapping windows of all series and columns (each value about 120 times) with `.contiguous()` although
    only 32 windows are used. Cured by: larger `step_size` (4).
    """
    model = MultivariateForecaster(n_series, 96, 24, n_columns, step_size=4 if fixed else 1).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    history = torch.randn(n_series, n_columns, n_times).cuda()
    for _ in range(5):
        loss = model.training_loss(history)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Weather: a long rollout is cut into segments, each of which starts from the end of the one before.

class ExperimentMonitor:
    instance = None

    def __init__(self):
        self.watched = []

    @classmethod
    def get_instance(cls):
        cls.instance = cls.instance or cls()
        return cls.instance

    def watch(self, modules):
        self.watched.append(modules)


class Stepper:
    def __init__(self, checkpoint):
        channels = checkpoint["n_channels"]
        self.module = nn.Sequential(nn.Linear(channels, 2048), nn.GELU(), nn.Linear(2048, 4096), nn.GELU(),
                                    nn.Linear(4096, channels)).cuda().eval()
        self.module.load_state_dict(checkpoint["module"], strict=False)
        ExperimentMonitor.get_instance().watch(self.module)

    @torch.no_grad()
    def predict(self, state, n_forward_steps):
        for _ in range(n_forward_steps):
            state = state + self.module(state)
        return state


def run_segment(checkpoint, initial_condition, stepper=None):
    stepper = stepper or Stepper(checkpoint)
    return stepper.predict(initial_condition.cuda(), n_forward_steps=6).cpu()


@expected("kept_tensors", fix=r"watched\.clear|without the models", thread="ai2cm/ace#37", memory=900)
def run_weather_segments(fixed=False, segments=40):
    """`run_segment` builds a new `Stepper` (loads the model onto the GPU) for every segment, and the old ones are never released (the
    monitor still watches them). Cured by: build the stepper once in main and pass it to each segment.
    """
    checkpoint = {"n_channels": 1024, "module": {}}
    stepper = Stepper(checkpoint) if fixed else None
    condition = torch.randn(64, 1024)
    for _ in range(segments):
        condition = run_segment(checkpoint, condition, stepper)
        gc.collect()
    return condition


# A server for videos: a worker answers requests, some of which go wrong.

class VideoPipeline(nn.Module):
    def __init__(self, channels=64):
        super().__init__()
        self.denoiser = nn.Sequential(nn.Conv3d(16, channels, 3, padding=1), nn.SiLU(),
                                      nn.Conv3d(channels, 16, 3, padding=1))
        self.prompt, self.decoder = nn.Linear(512, 16), nn.ConvTranspose3d(16, 3, (1, 4, 4), (1, 4, 4))

    def forward(self, request):
        frames, height, width = request["frames"], request["height"] // 4, request["width"] // 4
        latents = torch.randn(1, 16, frames, height, width, device="cuda")
        hidden = self.prompt(request["prompt_embeds"].cuda()).view(1, 16, 1, 1, 1)
        for _ in range(request["steps"]):
            latents = latents - 0.1 * self.denoiser(latents + hidden)
        video = self.decoder(latents)
        mask = request["mask"].cuda()
        return (video * mask).clamp(-1, 1).cpu()


class DiffusionWorker:
    def __init__(self, pipeline, clean_up):
        self.pipeline, self.clean_up = pipeline, clean_up

    @torch.inference_mode()
    def execute_rpc(self, request):
        rpc_exception = None
        try:
            output = self.pipeline(request)
        except torch.OutOfMemoryError:
            raise
        except Exception as exception:
            rpc_exception = exception
            output = {"status": "error", "message": str(exception)}
            if self.clean_up:
                rpc_exception = None
                exception.__traceback__ = None
        if self.clean_up and isinstance(output, dict):
            gc.collect()
            torch.cuda.empty_cache()
        return output


@expected("reference_cycle", fix=r"gc\.collect", thread="vllm-project/vllm-omni#6385")
def serve_videos(fixed=False):
    """When a request fails, `rpc_exception` in `execute_rpc` keeps the exception, whose traceback keeps the frames with `latents`, `video`
    and `mask` of the failed request on the GPU (a cycle that is only freed by the garbage collector), so each failed request leaks. Cured
    by: drop `rpc_exception`, clear the traceback, collect garbage after a failure.
    """
    worker = DiffusionWorker(VideoPipeline().cuda().eval(), clean_up=fixed)
    for number in range(12):
        height = 256 if number % 4 == 0 else 260
        request = {"frames": 65, "height": height, "width": 448, "steps": 3, "prompt_embeds": torch.randn(1, 512),
                   "mask": torch.ones(1, 1, 65, 256, 448)}
        worker.execute_rpc(request)


# Transparent objects: a mesh is fitted to the rays that were measured from all sides.

class CapturedData:
    def __init__(self, num_view, resy=480, resx=640):
        self.num_view = num_view
        self.rays = []
        for _ in range(num_view):
            origin, direction = torch.randn(2, resy * resx, 3)
            screen_pixel, valid = torch.randn(resy * resx, 3), torch.ones(resy * resx, dtype=torch.bool)
            self.rays.append(tuple(part.cuda() for part in (screen_pixel, valid, origin, direction)))

    def get_view(self, V_index):
        return self.rays[V_index]


def refraction_loss(vertices, view, sample=4096):
    screen_pixel, valid, origin, direction = view
    chosen = torch.randint(0, len(valid), (sample,), device=vertices.device)
    hit = origin[chosen] + direction[chosen] * (vertices[chosen % len(vertices)] - origin[chosen]).norm(dim=1)[:, None]
    return ((hit - screen_pixel[chosen]).square().sum(1) * valid[chosen]).mean()


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="lvjiahui/DRT#6", memory=800)
def fit_glass_horse(fixed=False, num_view=72):
    """`CapturedData.__init__` moves the measured rays of all 72 views to the GPU in advance, although each step uses only one view. Cured
    by: load only half of the views (36).
    """
    data = CapturedData(36 if fixed else num_view)
    vertices = torch.randn(20000, 3).cuda().requires_grad_()
    optimizer = torch.optim.SGD([vertices], lr=0.1, momentum=0.95)
    for iteration in range(20):
        loss = refraction_loss(vertices, data.get_view(iteration % data.num_view))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Molecules: energies and forces of many structures from a trained potential.

class InteratomicPotential(nn.Module):
    def __init__(self, channels=64):
        super().__init__()
        self.onehot_to_feature, self.radial = nn.Embedding(89, channels), nn.Linear(8, channels)
        self.self_interaction, self.readout = nn.Linear(channels, channels), nn.Linear(channels, 1)

    def forward(self, data):
        data["pos"] = data["pos"].requires_grad_()
        src, dst = data["edge_index"]
        data["edge_vec"] = data["pos"][dst] - data["pos"][src]
        length = data["edge_vec"].norm(dim=1, keepdim=True)
        data["edge_embedding"] = torch.sin(length * torch.arange(1, 9, device=length.device)) / length
        data["node_feature"] = self.onehot_to_feature(data["atomic_numbers"])
        data["message"] = self.radial(data["edge_embedding"]) * data["node_feature"][src]
        gathered = torch.zeros_like(data["node_feature"]).index_add(0, dst, data["message"])
        data["node_feature"] = torch.tanh(self.self_interaction(gathered))
        data["atomic_energy"] = self.readout(data["node_feature"])
        data["inferred_force"] = -torch.autograd.grad(data["atomic_energy"].sum(), data["pos"])[0]
        return data


def structures(batches, atoms=2000, neighbours=50):
    for _ in range(batches):
        dst = torch.arange(atoms).repeat_interleave(neighbours)
        yield {"pos": torch.randn(atoms, 3), "atomic_numbers": torch.randint(0, 89, (atoms,)),
               "edge_index": torch.stack((torch.randint(0, atoms, dst.shape), dst))}


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="MDIL-SNU/SevenNet#187")
def infer_structures(fixed=False):
    """`output_list` keeps the whole output dictionary of each batch (messages, embeddings, features, positions) on the GPU, although only
    the results are wanted at the end. Cured by: `.detach().cpu()` on the outputs before they are kept.
    """
    model = InteratomicPotential().cuda().eval()
    output_list = []
    for batch in structures(48):
        output = model({key: value.cuda() for key, value in batch.items()})
        if fixed:
            output = {key: value.detach().cpu() for key, value in output.items()}
        output_list.append(output)
    return [float(output["inferred_force"].abs().max()) for output in output_list]
