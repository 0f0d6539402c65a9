"""Programs after public threads of all fields: users' questions with a confirmed cure and merged fixes of libraries."""
import copy

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchvision.models import resnet18
from transformers import BertConfig, BertForMaskedLM, BertModel, CLIPVisionConfig, CLIPVisionModelWithProjection

from expected import expected


# Time series are turned into features by random convolutions, which a ridge classifier takes.

class ROCKET(nn.Module):
    def __init__(self, c_in, seq_len, n_kernels=100, kss=(7, 9, 11)):
        super().__init__()
        rng = np.random.default_rng(0)
        convs = nn.ModuleList()
        for _ in range(n_kernels):
            ks = int(rng.choice(kss))
            dilation = int(2 ** rng.uniform(0, np.log2((seq_len - 1) // (ks - 1))))
            padding = (ks - 1) * dilation // 2 if rng.integers(2) else 0
            conv = nn.Conv1d(c_in, 1, ks, padding=padding, dilation=dilation)
            weight = torch.randn(1, c_in, ks)
            conv.weight = nn.Parameter(weight - weight.mean(), requires_grad=False)
            conv.bias = nn.Parameter(2 * (torch.rand(1) - 0.5), requires_grad=False)
            convs.append(conv)
        self.convs, self.n_kernels = convs, n_kernels

    def forward(self, x):
        features = []
        for conv in self.convs:
            out = conv(x)
            _max = out.max(dim=-1)[0]
            _ppv = torch.gt(out, 0).sum(dim=-1).float() / out.shape[-1]
            features += [_max, _ppv]
        return torch.cat(features, dim=1)


def load_ucr(n_series, seq_len):
    X = torch.randn(n_series // 20, 1, seq_len).repeat(20, 1, 1)
    X = (X - X.mean(-1, keepdim=True)) / X.std(-1, keepdim=True)
    return X, torch.arange(n_series) % 5


@expected("batch_without_gradients", fix="split|half", thread="timeseriesAI/tsai#5", memory=600, held_back=True)
def make_rocket_features(fixed=False):
    """All series of the data set (`X_train`) are put on the GPU and go through `ROCKET.forward` in one call, so that the input, the
    convolution output of a kernel and what is computed from it have the size of the whole data set. Cured by: The features are made batch
    by batch from the data loader (`model(xb)` under `no_grad`) and concatenated.
    """
    device = torch.device("cuda")
    X_train, y_train = load_ucr(60_000, 800)
    model = ROCKET(X_train.shape[1], X_train.shape[2]).to(device)
    if fixed:
        train_dl = DataLoader(TensorDataset(X_train, y_train), batch_size=4000)
        for j, (xb, yb) in enumerate(train_dl):
            with torch.no_grad():
                out = model(xb.to(device))
            X_train_tfm = out if j == 0 else torch.cat((X_train_tfm, out))
    else:
        X_train_tfm = model(X_train.to(device))
    mean, std = X_train_tfm.mean(0, keepdim=True), X_train_tfm.std(0, keepdim=True)
    X_train_tfm = ((X_train_tfm - mean) / std).cpu().numpy()
    return X_train_tfm.shape


# Anomalies of products are found by what their patches' features differ by from those of reference images.

class FeatureExtractor(nn.Module):
    def __init__(self):
        super().__init__()
        net = resnet18(weights=None)
        self.stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
        self.layers = nn.ModuleList([net.layer1, net.layer2, net.layer3])

    def forward(self, x):
        x, features = self.stem(x), []
        for layer in self.layers:
            x = layer(x)
            features.append(x)
        return features


class MVTEC(Dataset):
    def __init__(self, n_images, size=64):
        self.images = torch.rand(8, 3, size, size)
        self.n_images = n_images

    def __len__(self):
        return self.n_images

    def __getitem__(self, index):
        return self.images[index % 8]


def extract_ref_features(encoder, few_shot_dir, device):
    layer_features = [[], [], []]
    for images in DataLoader(few_shot_dir, batch_size=4):
        with torch.no_grad():
            features = encoder(images.to(device))
        for saved, feature in zip(layer_features, features):
            saved.append(feature.permute(0, 2, 3, 1).reshape(-1, feature.shape[1]).cpu().numpy())
    return {f"layer{i + 1}.npy": np.concatenate(saved) for i, saved in enumerate(layer_features)}


def load_reference_features(ref_feature_dir, device):
    return [torch.from_numpy(ref_feature_dir[f"layer{i}.npy"]).to(device) for i in (1, 2, 3)]


def get_matched_ref_features(features, ref_features):
    matched_ref_features = []
    for layer_id, feature in enumerate(features):
        B, C, H, W = feature.shape
        feature_n = F.normalize(feature.permute(0, 2, 3, 1).reshape(-1, C), p=2, dim=1)
        coreset = ref_features[layer_id]
        coreset_n = F.normalize(coreset, p=2, dim=1)
        dist = feature_n @ coreset_n.T
        index_feats = coreset[torch.argmax(dist, dim=1)]
        matched_ref_features.append(index_feats.reshape(B, H, W, C).permute(0, 3, 1, 2))
    return matched_ref_features


@expected("all_pairs", fix="few", thread="xcyao00/ResAD#7", memory=400, held_back=True)
def detect_defects(fixed=False):
    """The reference features were extracted from all normal training images of the class (the wrong folder was given) instead of from the
    four few-shot images, so that `dist = feature_n @ coreset_n.T` in `get_matched_ref_features` has a column for every patch of every
    training image. Cured by: `extract_ref_features` is run on the folder of the few-shot images (four images).
    """
    device = torch.device("cuda")
    bottle = {"train/good": MVTEC(209), "4shot": MVTEC(4), "test": MVTEC(48)}
    encoder = FeatureExtractor().to(device).eval()
    ref_feature_dir = extract_ref_features(encoder, bottle["4shot" if fixed else "train/good"], device)
    ref_features = load_reference_features(ref_feature_dir, device)
    score_maps = []
    for images in DataLoader(bottle["test"], batch_size=8):
        with torch.no_grad():
            features = encoder(images.to(device))
            mfeatures = get_matched_ref_features(features, ref_features)
            scores = 0
            for fi, pi in zip(features, mfeatures):
                residual = F.mse_loss(fi, pi, reduction="none").mean(1, keepdim=True)
                scores = scores + F.interpolate(residual, size=images.shape[-2:], mode="bilinear", align_corners=False)
        score_maps.append(scores.cpu())
    return torch.cat(score_maps).shape


# Photographs are upscaled by diffusion, which is conditioned on the latents of the enlarged picture.

class VAEBlock(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, dim_in), nn.Conv2d(dim_in, dim_out, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(8, dim_out), nn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.shortcut = nn.Conv2d(dim_in, dim_out, 1) if dim_in != dim_out else nn.Identity()

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        h = self.conv2(F.silu(self.norm2(h)))
        return self.shortcut(x) + h


class AutoencoderKL(nn.Module):
    def __init__(self, ch=32):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(3, ch, 3, padding=1), VAEBlock(ch, ch), nn.Conv2d(ch, ch, 3, stride=2, padding=1),
            VAEBlock(ch, 2 * ch), nn.Conv2d(2 * ch, 2 * ch, 3, stride=2, padding=1),
            VAEBlock(2 * ch, 4 * ch), nn.Conv2d(4 * ch, 4 * ch, 3, stride=2, padding=1), nn.Conv2d(4 * ch, 8, 3, padding=1))
        self.decoder = nn.Sequential(
            nn.Conv2d(4, 4 * ch, 3, padding=1), VAEBlock(4 * ch, 4 * ch), nn.Upsample(scale_factor=2), VAEBlock(4 * ch, 2 * ch),
            nn.Upsample(scale_factor=2), VAEBlock(2 * ch, ch), nn.Upsample(scale_factor=2), VAEBlock(ch, ch), nn.Conv2d(ch, 3, 3, padding=1))

    def encode(self, x):
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        return mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)


class StableDiffusionControlNetPipeline:
    def __init__(self, vae, unet, encoder_tile_size=None, latent_tile_size=48):
        self.vae, self.unet = vae, unet
        self.encoder_tile_size, self.latent_tile_size = encoder_tile_size, latent_tile_size

    def over_tiles(self, function, x, tile, scale, channels):
        out = torch.zeros(x.shape[0], channels, int(x.shape[2] * scale), int(x.shape[3] * scale), device=x.device)
        for top in range(0, x.shape[2], tile):
            for left in range(0, x.shape[3], tile):
                piece = function(x[:, :, top:top + tile, left:left + tile])
                y, z = int(top * scale), int(left * scale)
                out[:, :, y:y + piece.shape[2], z:z + piece.shape[3]] = piece
        return out

    def encode_image(self, image):
        if self.encoder_tile_size:
            return self.over_tiles(self.vae.encode, image * 2 - 1, self.encoder_tile_size, 1 / 8, 4)
        return self.vae.encode(image * 2 - 1)

    @torch.no_grad()
    def __call__(self, image, num_inference_steps):
        latents_condition_image = self.encode_image(image)
        latents = torch.randn_like(latents_condition_image)
        for _ in range(num_inference_steps):
            latent_model_input = torch.cat([latents, latents_condition_image], 1)
            noise_pred = self.over_tiles(self.unet, latent_model_input, self.latent_tile_size, 1, 4)
            latents = latents - noise_pred / num_inference_steps
        return self.over_tiles(self.vae.decoder, latents, self.latent_tile_size, 8, 3).clamp(-1, 1)


@expected("batch_without_gradients", fix="tiles", thread="cswry/SeeSR#9", memory=500, held_back=True)
def upscale_photo(fixed=False):
    """The VAE encoder takes the whole upscaled picture at once (`latents_condition_image = vae.encode(image * 2 - 1)`), so that its feature
    maps at full resolution are too large; decoder and denoiser work on tiles already. Cured by: The VAE encoder works on tiles
    (`encoder_tile_size`).
    """
    vae = AutoencoderKL().cuda().eval()
    unet = nn.Sequential(nn.Conv2d(8, 128, 3, padding=1), VAEBlock(128, 128), VAEBlock(128, 128), nn.Conv2d(128, 4, 3, padding=1)).cuda().eval()
    pipeline = StableDiffusionControlNetPipeline(vae, unet, encoder_tile_size=384 if fixed else None)
    validation_image = torch.rand(1, 3, 240, 480).cuda()
    validation_image = F.interpolate(validation_image, scale_factor=4, mode="bicubic")
    image = pipeline(validation_image, num_inference_steps=5)
    return ((image + 1) * 127.5).byte().cpu().shape


# A surface is reconstructed from a point cloud by small networks, one for each patch of it.

class MLP(nn.Module):
    def __init__(self, in_dim, out_dim):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(in_dim, 128), nn.Linear(128, 256)
        self.fc3, self.fc4 = nn.Linear(256, 512), nn.Linear(512, 512)
        self.fc5 = nn.Linear(512, out_dim)

    def forward(self, x):
        x = F.relu(self.fc1(x))
        x = F.relu(self.fc2(x))
        x = F.relu(self.fc3(x))
        x = F.relu(self.fc4(x))
        return self.fc5(x)


def sinkhorn_transport(x, y, max_iters=8, epsilon=1e-1):
    M = torch.cdist(x, y) / epsilon
    u, v = torch.zeros_like(M[:, 0]), torch.zeros_like(M[0])
    for _ in range(max_iters):
        u = -torch.logsumexp(v[None, :] - M, dim=1)
        v = -torch.logsumexp(u[:, None] - M, dim=0)
    return torch.exp(u[:, None] + v[None, :] - M)


def compute_patches(num_patches, points_per_patch, device):
    patch_uvs, patch_xs = [], []
    for _ in range(num_patches):
        patch_uvs.append(torch.rand(points_per_patch, 2, device=device, requires_grad=True))
        patch_xs.append(torch.randn(points_per_patch, 3, device=device))
    return patch_uvs, patch_xs


def fit_patches(phi, patch_uvs, patch_xs, local_epochs, lr=1e-3):
    optimizer = torch.optim.Adam(phi.parameters(), lr=lr)
    uv_optimizer = torch.optim.Adam(patch_uvs, lr=lr)
    mse_loss = nn.MSELoss()
    for epoch in range(local_epochs):
        optimizer.zero_grad()
        uv_optimizer.zero_grad()
        sum_loss = torch.tensor([0.0], device=patch_xs[0].device)
        for phi_i, uv_i, x_i in zip(phi, patch_uvs, patch_xs):
            y_i = phi_i(uv_i)
            with torch.no_grad():
                pi_i = sinkhorn_transport(x_i, y_i).max(0)[1]
            sum_loss = sum_loss + mse_loss(x_i[pi_i], y_i)
        sum_loss.backward()
        optimizer.step()
        uv_optimizer.step()


def patch_means(phi, patch_uvs):
    with torch.no_grad():
        return [phi_i(uv_i).cpu() for phi_i, uv_i in zip(phi, patch_uvs)]


@expected("several_forward_passes", fix="backward", thread="fwilliams/deep-geometric-prior#4", memory=500, held_back=True)
def reconstruct_surface(fixed=False):
    """There is one MLP per patch in `phi`, and those of all patches lie on the GPU and are fitted at the same time (with gradients, Adam's
    state, and one graph over all patches in `sum_loss`), so memory grows with the number of patches. Cured by: The patches are fitted in
    batches; a batch's MLPs are moved to the CPU when they are fitted, and `patch_means` is computed in batches too.
    """
    device = torch.device("cuda")
    num_patches, batch = 96, 12
    patch_uvs, patch_xs = compute_patches(num_patches, 400, device)
    if fixed:
        trained, means = [], []
        for begin in range(0, num_patches, batch):
            phi = nn.ModuleList([MLP(2, 3) for _ in range(batch)]).to(device)
            fit_patches(phi, patch_uvs[begin:begin + batch], patch_xs[begin:begin + batch], 3)
            trained.append(phi.to("cpu"))
        for begin, phi in zip(range(0, num_patches, batch), trained):
            means += patch_means(phi.to(device), patch_uvs[begin:begin + batch])
            phi.to("cpu")
    else:
        phi = nn.ModuleList([MLP(2, 3).to(device) for _ in range(num_patches)])
        fit_patches(phi, patch_uvs, patch_xs, 3)
        means = patch_means(phi, patch_uvs)
    return torch.stack(means).shape


# A trainer evaluates a masked language model and computes its accuracy from the predictions.

def nested_concat(tensors, new_tensors, padding_index=-100):
    if tensors.shape[1] == new_tensors.shape[1]:
        return torch.cat((tensors, new_tensors), dim=0)
    shape = (len(tensors) + len(new_tensors), max(tensors.shape[1], new_tensors.shape[1])) + tuple(tensors.shape[2:])
    result = tensors.new_full(shape, padding_index)
    result[:len(tensors), :tensors.shape[1]] = tensors
    result[len(tensors):, :new_tensors.shape[1]] = new_tensors
    return result


class Trainer:
    def __init__(self, model, eval_dataset, compute_metrics, eval_batch_size=8):
        self.model, self.compute_metrics = model.cuda(), compute_metrics
        self.eval_dataloader = DataLoader(eval_dataset, batch_size=eval_batch_size)

    def reduce_logits(self, logits):
        return logits

    def prediction_loop(self):
        self.model.eval()
        preds_host = labels_host = None
        for input_ids, labels in self.eval_dataloader:
            input_ids, labels = input_ids.cuda(), labels.cuda()
            with torch.no_grad():
                outputs = self.model(input_ids=input_ids, labels=labels)
            logits = self.reduce_logits(outputs.logits.detach())
            preds_host = logits if preds_host is None else nested_concat(preds_host, logits)
            labels_host = labels if labels_host is None else nested_concat(labels_host, labels)
        return self.compute_metrics(preds_host.cpu().numpy(), labels_host.cpu().numpy())


class ArgmaxTrainer(Trainer):
    def reduce_logits(self, logits):
        return logits.argmax(-1)


def compute_metrics(predictions, labels):
    if predictions.ndim == 3:
        predictions = predictions.argmax(-1)
    masked = labels != -100
    return {"accuracy": float((predictions == labels)[masked].mean())}


@expected("growing_buffer", fix="cpu|host", thread="huggingface/transformers#8476", memory=600, held_back=True)
def evaluate_masked_lm(fixed=False):
    """`prediction_loop` concatenates the full logits (batch x sequence x vocabulary) of every evaluation batch in `preds_host` on the GPU
    until the end, to compute the metrics from them. Cured by: `prediction_loop` is overridden: the logits are reduced by argmax over the
    vocabulary before they are concatenated.
    """
    config = BertConfig(vocab_size=8000, hidden_size=128, num_hidden_layers=2, num_attention_heads=4, intermediate_size=256)
    input_ids = torch.randint(5, config.vocab_size, (512, 64))
    labels = torch.where(torch.rand(512, 64) < 0.15, input_ids, -100)
    trainer_class = ArgmaxTrainer if fixed else Trainer
    trainer = trainer_class(BertForMaskedLM(config), TensorDataset(input_ids, labels), compute_metrics)
    return trainer.prediction_loop()


# Attributes of pedestrians, with deep supervision at four places of the network.

class ALM(nn.Module):
    def __init__(self, num_classes, width=32):
        super().__init__()
        self.stem = self.block(3, width, 1)
        self.stages = nn.ModuleList([self.block(width, width, 1), self.block(width, 2 * width, 2), self.block(2 * width, 4 * width, 2)])
        self.heads = nn.ModuleList(nn.Linear(c, num_classes) for c in (width, 2 * width, 4 * width, 4 * width))

    @staticmethod
    def block(dim_in, dim_out, stride):
        return nn.Sequential(nn.Conv2d(dim_in, dim_out, 3, stride=stride, padding=1), nn.BatchNorm2d(dim_out), nn.ReLU(inplace=True),
                             nn.Conv2d(dim_out, dim_out, 3, padding=1), nn.BatchNorm2d(dim_out), nn.ReLU(inplace=True))

    def forward(self, input):
        x, outputs = self.stem(input), []
        for stage, head in zip(self.stages, self.heads):
            x = stage(x)
            outputs.append(head(x.mean((2, 3))))
        outputs.append(self.heads[3](x.amax((2, 3))))
        return outputs


def vote(output):
    return torch.max(torch.max(torch.max(output[0], output[1]), output[2]), output[3])


class Weighted_BCELoss:
    def __init__(self, attr_num):
        self.weights = torch.rand(attr_num).cuda()

    def forward(self, output, target):
        cur_weights = torch.exp(target + (1 - target * 2) * self.weights)
        loss = cur_weights * (target * torch.log(output + 1e-12) + (1 - target) * torch.log(1 - output + 1e-12))
        return torch.neg(torch.mean(loss))


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0, 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n


def train(train_loader, model, criterion, optimizer):
    losses = AverageMeter()
    model.train()
    for input, target in train_loader:
        target = target.cuda(non_blocking=True)
        input = input.cuda(non_blocking=True)
        output = model(input)
        loss = sum(criterion.forward(torch.sigmoid(out), target) for out in output)
        losses.update(loss.data, target.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def validate(val_loader, model, criterion, no_grad):
    losses, top1 = AverageMeter(), AverageMeter()
    model.eval()
    for input, target in val_loader:
        target = target.cuda(non_blocking=True)
        input = input.cuda(non_blocking=True)
        if no_grad:
            with torch.no_grad():
                output = model(input)
        else:
            output = model(input)
        loss = sum(criterion.forward(torch.sigmoid(out), target) for out in output)
        output = vote(output)
        accu = ((torch.sigmoid(output.data) > 0.5) == target.bool()).float().mean().cpu()
        losses.update(loss.data, target.size(0))
        top1.update(accu, target.size(0))
    return top1.sum / top1.count


def test(val_loader, model, no_grad):
    model.eval()
    pos_cnt = 0
    for input, target in val_loader:
        input = input.cuda(non_blocking=True)
        if no_grad:
            with torch.no_grad():
                output = model(input)
        else:
            output = model(input)
        output = np.where(torch.sigmoid(vote(output).data).cpu().numpy() > 0.5, 1, 0)
        pos_cnt = pos_cnt + (output * target.numpy()).sum(0)
    return pos_cnt


@expected("evaluation_keeps_graphs", fix="no_grad", thread="chufengt/ALM-pedestrian-attribute#36", memory=650, held_back=True)
def train_pedestrian_attributes(fixed=False):
    """`validate` and `test` call `output = model(input)` without `torch.no_grad()`, so that a graph with all activations is kept in
    evaluation (that of the previous batch lives on through `output` and `loss` while the next is computed). Cured by: `with
    torch.no_grad():` around the model's call in `validate` and `test`.
    """
    attr_num = 35
    dataset = TensorDataset(torch.rand(96, 3, 128, 64), (torch.rand(96, attr_num) > 0.5).float())
    train_loader = DataLoader(dataset, batch_size=32, shuffle=True)
    val_loader = DataLoader(dataset, batch_size=32)
    model, criterion = ALM(attr_num).cuda(), Weighted_BCELoss(attr_num)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, weight_decay=5e-4)
    for epoch in range(2):
        train(train_loader, model, criterion, optimizer)
        validate(val_loader, model, criterion, no_grad=fixed)
        test(val_loader, model, no_grad=fixed)


# A component trains a text classifier step by step and hands back the model with the best metric.

class TextClassifier(nn.Module):
    def __init__(self, vocab, dim, num_labels):
        super().__init__()
        self.embedder = nn.Embedding(vocab, dim)
        self.encoder = nn.LSTM(dim, 128, batch_first=True, bidirectional=True)
        self.output_layer = nn.Linear(256, num_labels)

    def forward(self, data, target):
        encoding, _ = self.encoder(self.embedder(data))
        return self.output_layer(encoding.mean(1)), target


class BestModelTrainer:
    def __init__(self, train_set, val_set, model, loss_fn, metric_fn, optimizer, iter_per_step, max_steps, best_on_cpu):
        self.train_set, self.val_set, self.device = train_set, val_set, "cuda"
        self.model, self.loss_fn, self.metric_fn, self.optimizer = model, loss_fn, metric_fn, optimizer
        self.iter_per_step, self.max_steps, self.best_on_cpu = iter_per_step, max_steps, best_on_cpu
        self._step, self._best_metric, self._best_model = 0, None, None

    def _train_step(self):
        self.model.train()
        for i in range(self.iter_per_step):
            self.optimizer.zero_grad()
            data, target = self.train_set
            rows = torch.randint(0, len(data), (32,))
            pred, target = self.model(data[rows].to(self.device), target[rows].to(self.device))
            self.loss_fn(pred, target).backward()
            self.optimizer.step()
        self.optimizer.zero_grad()

    def _aggregate_preds(self):
        preds, targets = [], []
        for data, target in zip(*(t.split(32) for t in self.val_set)):
            pred, target = self.model(data.to(self.device), target.to(self.device))
            preds.append(pred.cpu())
            targets.append(target.cpu())
        return torch.cat(preds), torch.cat(targets)

    def _eval_step(self):
        self.model.eval()
        with torch.no_grad():
            preds, targets = self._aggregate_preds()
            val_metric = self.metric_fn(preds, targets)
        if self._best_metric is None or val_metric > self._best_metric:
            self._best_metric = val_metric
            if self.best_on_cpu:
                self._best_model = {k: t.cpu().detach() for k, t in self.model.state_dict().items()}
            else:
                self._best_model = copy.deepcopy(self.model.state_dict())

    def run(self):
        self._train_step()
        self._eval_step()
        self._step += 1
        continue_ = self._step < self.max_steps
        if not continue_:
            self.model.load_state_dict(self._best_model)
        return continue_


@expected("loaded_onto_gpu", fix=r"\.cpu\(\)", thread="asappresearch/flambe#168", memory=710, held_back=True)
def train_text_classifier(fixed=False):
    """`_eval_step` keeps the best model as `deepcopy(self.model.state_dict())`, a second copy of all weights on the GPU for the rest of the
    training. Cured by: The best model's tensors are kept on the CPU: `{k: t.cpu().detach() for k, t in ...}`.
    """
    vocab, num_labels = 200_000, 20
    train_set = torch.randint(0, vocab, (2000, 60)), torch.randint(0, num_labels, (2000,))
    val_set = torch.randint(0, vocab, (320, 60)), torch.randint(0, num_labels, (320,))
    model = TextClassifier(vocab, 300, num_labels).cuda()
    trainer = BestModelTrainer(train_set, val_set, model, nn.CrossEntropyLoss(), lambda p, t: float((p.argmax(1) == t).float().mean()),
                               torch.optim.SGD(model.parameters(), lr=0.1), 10, 4, best_on_cpu=fixed)
    while trainer.run():
        pass
    return trainer._best_metric


# Few-shot classification of intents: a head on the sentence embeddings of a frozen body.

class SentenceBody(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.auto_model = BertModel(config, add_pooling_layer=False)

    def forward(self, features):
        hidden = self.auto_model(**features).last_hidden_state
        mask = features["attention_mask"].unsqueeze(-1).float()
        return (hidden * mask).sum(1) / mask.sum(1)

    @torch.no_grad()
    def encode(self, sentences, batch_size=32):
        device = next(self.parameters()).device
        self.eval()
        embeddings = []
        for input_ids in sentences.split(batch_size):
            input_ids = input_ids.to(device)
            embeddings.append(self({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)}).cpu())
        return torch.cat(embeddings)


class SetFitModel:
    def __init__(self, model_body, model_head, keep_original_state):
        self.model_body, self.model_head = model_body, model_head
        if keep_original_state:
            self.model_original_state = copy.deepcopy(self.model_body.state_dict())

    @classmethod
    def from_pretrained(cls, config, num_labels, device, keep_original_state):
        model_body = SentenceBody(config).to(device)
        model_head = nn.Linear(config.hidden_size, num_labels).to(device)
        return cls(model_body, model_head, keep_original_state)

    def fit(self, x_train, y_train, num_epochs, batch_size, learning_rate):
        self.model_body.requires_grad_(False)
        optimizer = torch.optim.AdamW(self.model_head.parameters(), lr=learning_rate)
        device = self.model_head.weight.device
        for epoch in range(num_epochs):
            for input_ids, labels in zip(x_train.split(batch_size), y_train.split(batch_size)):
                input_ids, labels = input_ids.to(device), labels.to(device)
                optimizer.zero_grad()
                embedding = self.model_body({"input_ids": input_ids, "attention_mask": torch.ones_like(input_ids)})
                F.cross_entropy(self.model_head(embedding), labels).backward()
                optimizer.step()

    def predict(self, x_test):
        embeddings = self.model_body.encode(x_test)
        with torch.no_grad():
            return self.model_head(embeddings.to(self.model_head.weight.device)).argmax(-1).cpu()


@expected("copied_weights", fix="none", thread="huggingface/setfit#201", memory=430, held_back=True)
def train_intent_head(fixed=False):
    """`SetFitModel.__init__` deep-copies the body's state dict to `model_original_state`, on the GPU as the body is, and the copy is never
    used. Cured by: The deepcopy is removed.
    """
    config = BertConfig(vocab_size=60_000, hidden_size=512, num_hidden_layers=8, num_attention_heads=8, intermediate_size=2048)
    model = SetFitModel.from_pretrained(config, 77, "cuda", keep_original_state=not fixed)
    x_train, y_train = torch.randint(0, 60_000, (77 * 8, 32)), torch.arange(77).repeat(8)
    model.fit(x_train, y_train, num_epochs=1, batch_size=16, learning_rate=1e-2)
    return model.predict(torch.randint(0, 60_000, (512, 32))).shape


# A detector for pictures with crowds: boxes are assigned to anchors by classification and overlap together.

def bbox_iou(box1, box2, eps=1e-7):
    b1_x1, b1_y1, b1_x2, b1_y2 = box1.chunk(4, -1)
    b2_x1, b2_y1, b2_x2, b2_y2 = box2.chunk(4, -1)
    w1, h1, w2, h2 = b1_x2 - b1_x1, b1_y2 - b1_y1 + eps, b2_x2 - b2_x1, b2_y2 - b2_y1 + eps
    inter = (b1_x2.minimum(b2_x2) - b1_x1.maximum(b2_x1)).clamp(0) * (b1_y2.minimum(b2_y2) - b1_y1.maximum(b2_y1)).clamp(0)
    iou = inter / (w1 * h1 + w2 * h2 - inter + eps)
    cw, ch = b1_x2.maximum(b2_x2) - b1_x1.minimum(b2_x1), b1_y2.maximum(b2_y2) - b1_y1.minimum(b2_y1)
    rho2 = ((b2_x1 + b2_x2 - b1_x1 - b1_x2) ** 2 + (b2_y1 + b2_y2 - b1_y1 - b1_y2) ** 2) / 4
    return iou - rho2 / (cw ** 2 + ch ** 2 + eps)


def select_candidates_in_gts(xy_centers, gt_bboxes, eps=1e-9, roll_out=False):
    n_anchors, (bs, n_boxes, _) = len(xy_centers), gt_bboxes.shape
    if roll_out:
        bbox_deltas = torch.empty((bs, n_boxes, n_anchors), device=gt_bboxes.device)
        for b in range(bs):
            lt, rb = gt_bboxes[b].view(-1, 1, 4).chunk(2, 2)
            bbox_deltas[b] = torch.cat((xy_centers[None] - lt, rb - xy_centers[None]), dim=2).amin(2).gt_(eps)
        return bbox_deltas
    lt, rb = gt_bboxes.view(-1, 1, 4).chunk(2, 2)
    bbox_deltas = torch.cat((xy_centers[None] - lt, rb - xy_centers[None]), dim=2).view(bs, n_boxes, n_anchors, -1)
    return bbox_deltas.amin(3).gt_(eps)


class TaskAlignedAssigner(nn.Module):
    def __init__(self, topk=10, num_classes=4, alpha=0.5, beta=6.0, roll_out_thr=0):
        super().__init__()
        self.topk, self.num_classes, self.alpha, self.beta = topk, num_classes, alpha, beta
        self.roll_out_thr = roll_out_thr

    @torch.no_grad()
    def forward(self, pd_scores, pd_bboxes, anc_points, gt_labels, gt_bboxes, mask_gt):
        self.bs, self.n_max_boxes = pd_scores.size(0), gt_bboxes.size(1)
        self.roll_out = self.n_max_boxes > self.roll_out_thr if self.roll_out_thr else False
        mask_in_gts = select_candidates_in_gts(anc_points, gt_bboxes, roll_out=self.roll_out)
        align_metric, overlaps = self.get_box_metrics(pd_scores, pd_bboxes, gt_labels, gt_bboxes)
        mask_topk = self.select_topk_candidates(align_metric * mask_in_gts)
        mask_pos = mask_topk * mask_in_gts * mask_gt
        target_gt_idx = (mask_pos * overlaps).argmax(-2)
        fg_mask = mask_pos.sum(-2).gt(0)
        rows = torch.arange(self.bs, device=gt_bboxes.device)[:, None]
        target_scores = F.one_hot(gt_labels[rows, target_gt_idx].squeeze(-1).long(), self.num_classes).float()
        return gt_bboxes[rows, target_gt_idx], target_scores * fg_mask[..., None], fg_mask

    def get_box_metrics(self, pd_scores, pd_bboxes, gt_labels, gt_bboxes):
        if self.roll_out:
            align_metric = torch.empty((self.bs, self.n_max_boxes, pd_scores.shape[1]), device=pd_scores.device)
            overlaps = torch.empty_like(align_metric)
            for b in range(self.bs):
                bbox_scores = pd_scores[b][:, gt_labels[b].squeeze(-1)].T
                overlaps[b] = bbox_iou(gt_bboxes[b].unsqueeze(1), pd_bboxes[b].unsqueeze(0)).squeeze(2).clamp(0)
                align_metric[b] = bbox_scores.pow(self.alpha) * overlaps[b].pow(self.beta)
            return align_metric, overlaps
        ind = torch.arange(self.bs, device=pd_scores.device)[:, None].expand(-1, self.n_max_boxes)
        bbox_scores = pd_scores[ind, :, gt_labels.squeeze(-1)]
        overlaps = bbox_iou(gt_bboxes.unsqueeze(2), pd_bboxes.unsqueeze(1)).squeeze(3).clamp(0)
        return bbox_scores.pow(self.alpha) * overlaps.pow(self.beta), overlaps

    def select_topk_candidates(self, metrics):
        num_anchors = metrics.shape[-1]
        topk_metrics, topk_idxs = torch.topk(metrics, self.topk, dim=-1, largest=True)
        if self.roll_out:
            is_in_topk = torch.empty(metrics.shape, dtype=torch.long, device=metrics.device)
            for b in range(len(topk_idxs)):
                is_in_topk[b] = F.one_hot(topk_idxs[b], num_anchors).sum(-2)
        else:
            is_in_topk = F.one_hot(topk_idxs, num_anchors).sum(-2)
        return torch.where(is_in_topk > 1, 0, is_in_topk).to(metrics.dtype)


def make_anchors(size, strides, device):
    points = []
    for stride in strides:
        steps = torch.arange(size // stride, device=device) * stride + stride / 2
        points.append(torch.stack(torch.meshgrid(steps, steps, indexing="xy"), -1).view(-1, 2))
    return torch.cat(points)


class Detect(nn.Module):
    def __init__(self, nc, width=24):
        super().__init__()
        self.nc = nc
        conv = lambda a, b: nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.SiLU())
        self.stem = nn.Sequential(conv(3, width), conv(width, 2 * width))
        self.downs = nn.ModuleList([conv(2 * width, 4 * width), conv(4 * width, 4 * width), conv(4 * width, 4 * width)])
        self.heads = nn.ModuleList(nn.Conv2d(4 * width, 4 + nc, 1) for _ in range(3))

    def forward(self, x):
        x, out = self.stem(x), []
        for down, head in zip(self.downs, self.heads):
            x = down(x)
            out.append(head(x).flatten(2))
        return torch.cat(out, 2).permute(0, 2, 1).split((4, self.nc), 2)


@expected("one_hot", fix="image", thread="ultralytics/ultralytics#755", memory=780, held_back=True)
def train_crowd_detector(fixed=False):
    """`TaskAlignedAssigner` computes its tensors for all images of the batch at once; with many boxes per image those of batch x
    n_max_boxes x anchors (with topk in between for the one-hot of the candidates) are too large. Cured by: With more boxes than
    `roll_out_thr` the batch dimension is rolled out: the assigner loops over the images.
    """
    nc, size, batch, n_max_boxes = 4, 320, 16, 200
    model = Detect(nc).cuda()
    assigner = TaskAlignedAssigner(num_classes=nc, roll_out_thr=64 if fixed else 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    anc_points = make_anchors(size, (8, 16, 32), "cuda")
    for step in range(4):
        images = torch.rand(batch, 3, size, size).cuda()
        corner = torch.rand(batch, n_max_boxes, 2) * 290
        gt_bboxes = torch.cat((corner, corner + 8 + torch.rand(batch, n_max_boxes, 2) * 20), 2).cuda()
        gt_labels = torch.randint(0, nc, (batch, n_max_boxes, 1)).cuda()
        pred_distri, pred_scores = model(images)
        lt, rb = (pred_distri.exp() * 8).chunk(2, 2)
        pred_bboxes = torch.cat((anc_points - lt, anc_points + rb), 2)
        mask_gt = torch.ones(batch, n_max_boxes, 1, device="cuda")
        target_bboxes, target_scores, fg_mask = assigner(pred_scores.detach().sigmoid(), pred_bboxes.detach(), anc_points, gt_labels, gt_bboxes, mask_gt)
        loss = F.binary_cross_entropy_with_logits(pred_scores, target_scores)
        loss = loss + ((1 - bbox_iou(pred_bboxes, target_bboxes).squeeze(-1)) * fg_mask).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


# Keypoints of animals are learned; after each epoch the average precision is computed on the validation set.

class Metric(nn.Module):
    def __init__(self):
        super().__init__()
        self._defaults = []

    def add_state(self, name):
        self._defaults.append(name)
        setattr(self, name, [])

    def reset(self):
        for name in self._defaults:
            setattr(self, name, [])


class DetectionMAP(Metric):
    def __init__(self):
        super().__init__()
        for name in ("pred_keypoints", "pred_scores", "groundtruth_keypoints"):
            self.add_state(name)

    def update(self, preds, target):
        for item, truth in zip(preds, target):
            self.pred_keypoints.append(item["keypoints"])
            self.pred_scores.append(item["scores"])
            self.groundtruth_keypoints.append(truth["keypoints"])

    def compute(self):
        oks = []
        for keypoints, scores, truth in zip(self.pred_keypoints, self.pred_scores, self.groundtruth_keypoints):
            best = keypoints[scores.argmax()]
            oks.append(torch.exp(-(best[:, :2] - truth[0, :, :2]).pow(2).sum(-1)).mean().cpu())
        return torch.stack(oks).mean()


class MeanAveragePrecision(Metric):
    def __init__(self, n_keypoints):
        super().__init__()
        self.n_keypoints = n_keypoints
        self.metric = DetectionMAP()

    def prepare(self, outputs, labels):
        scores, keypoints = outputs
        preds = [{"scores": s, "keypoints": k.reshape(-1, self.n_keypoints, 3)} for s, k in zip(scores, keypoints)]
        return preds, [{"keypoints": label} for label in labels]

    def update(self, preds, target):
        self.metric.update(preds, target)

    def compute(self):
        return self.metric.compute()


class ResettingMeanAveragePrecision(MeanAveragePrecision):
    def reset(self):
        self.metric.reset()


class KeypointModel(nn.Module):
    def __init__(self, n_keypoints, width=32):
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, width, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Conv2d(width, 1 + 3 * n_keypoints, 1)

    def forward(self, x):
        out = self.head(self.backbone(x)).flatten(2).permute(0, 2, 1)
        return out[..., 0].sigmoid(), out[..., 1:]


class LuxonisModel:
    def __init__(self, model, metric, train_loader, val_loader):
        self.model, self.metric, self.train_loader, self.val_loader = model.cuda(), metric.cuda(), train_loader, val_loader
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

    def training_epoch(self):
        self.model.train()
        for images, labels in self.train_loader:
            scores, keypoints = self.model(images.cuda())
            target = labels.cuda().flatten(1)[:, None]
            loss = (scores[..., None] * (keypoints - target).abs()).mean()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()

    @torch.no_grad()
    def validation_epoch(self):
        self.model.eval()
        for images, labels in self.val_loader:
            outputs = self.model(images.cuda())
            self.metric.update(*self.metric.prepare(outputs, labels.cuda()))
        kpt_map = self.metric.compute()
        self.metric.reset()
        return kpt_map


@expected("kept_tensors", fix="reset", thread="luxonis/luxonis-train#25", memory=450, held_back=True)
def train_keypoint_model(fixed=False):
    """The metric that wraps another one (`self.metric`) has no `reset` of its own, so the predictions and targets that the inner metric has
    gathered on the GPU are never dropped and grow from validation epoch to validation epoch. Cured by: The missing `reset` is added: it
    resets the inner metric.
    """
    n_keypoints = 17
    dataset = TensorDataset(torch.rand(320, 3, 160, 160), torch.rand(320, 1, n_keypoints, 3))
    metric = ResettingMeanAveragePrecision(n_keypoints) if fixed else MeanAveragePrecision(n_keypoints)
    luxonis_model = LuxonisModel(KeypointModel(n_keypoints), metric, DataLoader(dataset, batch_size=16, shuffle=True), DataLoader(dataset, batch_size=16))
    history = []
    for epoch in range(6):
        luxonis_model.training_epoch()
        history.append(luxonis_model.validation_epoch())
    return history


# Image data sets are embedded by several models, to compare what the models see.

class HFDataset(Dataset):
    def __init__(self, n_images, size):
        self.pixel_values, self.n_images = torch.rand(16, 3, size, size), n_images

    def __len__(self):
        return self.n_images

    def __getitem__(self, index):
        return {"pixel_values": self.pixel_values[index % 16], "labels": index % 10}

    def __getitems__(self, indices):
        return [self[i] for i in indices]


class CLIPEmbedder:
    def __init__(self, title, device, back_to_cpu):
        self.title, self.device, self.back_to_cpu = title, device, back_to_cpu
        config = CLIPVisionConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, image_size=16,
                                  patch_size=8, projection_dim=1024)
        self.model = CLIPVisionModelWithProjection(config).to(device).eval()

    def collate_fn(self, examples):
        return {"pixel_values": torch.stack([e["pixel_values"] for e in examples]), "labels": torch.tensor([e["labels"] for e in examples])}

    def build_embedding(self, dataloader):
        all_image_embeddings, all_labels = [], []
        with torch.inference_mode():
            for batch in dataloader:
                batch = {k: v.to(self.device) for k, v in batch.items()}
                image_features = self.model(pixel_values=batch["pixel_values"]).image_embeds
                normalized = image_features / image_features.norm(p=2, dim=-1, keepdim=True)
                all_image_embeddings.append(normalized.cpu() if self.back_to_cpu else normalized)
                all_labels.append(batch["labels"])
        image_embeddings = torch.concatenate(all_image_embeddings).numpy(force=True)
        labels = torch.concatenate(all_labels).numpy(force=True)
        return image_embeddings, labels


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="encord-team/text-to-image-eval#12", memory=600, held_back=True)
def embed_image_dataset(fixed=False):
    """`build_embedding` gathers the embeddings of every batch in lists as GPU tensors and only moves them to the CPU when they are
    concatenated at the end, so memory grows with the data set. Cured by: The embeddings of each batch are moved back to the CPU after they
    are made.
    """
    embedder = CLIPEmbedder("clip-small", "cuda", back_to_cpu=fixed)
    dataset = HFDataset(150_000, 16)
    embeddings, labels = embedder.build_embedding(DataLoader(dataset, batch_size=3000, collate_fn=embedder.collate_fn))
    return embeddings.shape, labels.shape


# A worker of a project template trains a denoiser, and reports losses and metrics of each epoch.

class SNR:
    nickname = "snr"

    def clear(self):
        self.total, self.number = 0, 0

    def update(self, data, output):
        noise = output["image"] - data["clean"]
        signal_power = (data["clean"] ** 2).mean((1, 2, 3))
        noise_power = (noise ** 2).mean((1, 2, 3))
        self.total += (10 * torch.log10(signal_power / (noise_power + 1e-8) + 1e-8)).sum()
        self.number += len(noise)

    def finalize(self):
        return float(self.total) / self.number


class DnCNN(nn.Module):
    def __init__(self, width=16, depth=4):
        super().__init__()
        layers = [nn.Conv2d(3, width, 3, padding=1), nn.ReLU(inplace=True)]
        for _ in range(depth):
            layers += [nn.Conv2d(width, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        self.net = nn.Sequential(*layers, nn.Conv2d(width, 3, 3, padding=1))

    def forward(self, noisy):
        return noisy - self.net(noisy)


class WorkerTemplate:
    def __init__(self, model, data_loader, evaluation_metrics, optimizer, metrics_without_grad):
        self.model, self.data_loader, self.optimizer = model, data_loader, optimizer
        self.evaluation_metrics, self.metrics_without_grad = evaluation_metrics, metrics_without_grad

    def _update_all_metrics(self, data, output):
        if self.metrics_without_grad:
            with torch.no_grad():
                for metric in self.evaluation_metrics:
                    metric.update(data, output)
        else:
            for metric in self.evaluation_metrics:
                metric.update(data, output)

    def _run_epoch(self):
        for metric in self.evaluation_metrics:
            metric.clear()
        self.model.train()
        for (clean,) in self.data_loader:
            data = {"clean": clean.cuda()}
            data["noisy"] = data["clean"] + 0.1 * torch.randn_like(data["clean"])
            output = {"image": self.model(data["noisy"])}
            loss = F.mse_loss(output["image"], data["clean"])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self._update_all_metrics(data, output)
        return {metric.nickname: metric.finalize() for metric in self.evaluation_metrics}


@expected("graph_of_earlier_steps", fix="detach", thread="amjltc295/pytorch-golden-template#64", memory=400, held_back=True)
def train_denoiser_with_metric(fixed=False):
    """The metrics' `update` runs outside of `no_grad` on the model's output, so the sum that a metric keeps over the epoch carries the
    graph of every batch, with the tensors that the metric's operations saved. Cured by: `_update_all_metrics` calls the metrics under
    `torch.no_grad()`.
    """
    model = DnCNN().cuda()
    data_loader = DataLoader(TensorDataset(torch.rand(40, 3, 96, 96).repeat(60, 1, 1, 1)), batch_size=16, shuffle=True)
    worker = WorkerTemplate(model, data_loader, [SNR()], torch.optim.Adam(model.parameters(), lr=1e-3), metrics_without_grad=fixed)
    logs = []
    for epoch in range(2):
        logs.append(worker._run_epoch())
    return logs
