"""Programs after public threads of ordinary users: vessels, a clip, a memory bank, cached cases, volumes, codes, scenes, faces."""
import contextlib
import dataclasses
import math
import os
import random
import tempfile

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from torchvision.models import resnet18, resnet50
from torchvision.utils import save_image

from expected import expected


# The vessels of retinas are segmented by a small U-Net, which is validated after each epoch.

class FundusImages(Dataset):
    def __init__(self, n, size):
        self.n, self.size = n, size

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        img = torch.rand(3, self.size, self.size, generator=g)
        mask = (torch.rand(1, self.size, self.size, generator=g) > 0.88).float()
        return img, mask


class VesselConvBlock(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(cout)

    def forward(self, x):
        x = F.relu(self.bn1(self.conv1(x)))
        return F.relu(self.bn2(self.conv2(x)))


class VesselUNet(nn.Module):
    def __init__(self, base=32):
        super().__init__()
        w = [base, base * 2, base * 4, base * 8]
        self.down = nn.ModuleList([VesselConvBlock(3, w[0]), VesselConvBlock(w[0], w[1]), VesselConvBlock(w[1], w[2])])
        self.mid = VesselConvBlock(w[2], w[3])
        self.up = nn.ModuleList([nn.ConvTranspose2d(w[i + 1], w[i], 2, stride=2) for i in (2, 1, 0)])
        self.dec = nn.ModuleList([VesselConvBlock(w[i] * 2, w[i]) for i in (2, 1, 0)])
        self.head = nn.Conv2d(w[0], 1, 1)

    def forward(self, x):
        skips = []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.mid(x)
        for up, dec, skip in zip(self.up, self.dec, reversed(skips)):
            x = dec(torch.cat([up(x), skip], dim=1))
        return self.head(x)


class BceAndDice(nn.Module):
    def __init__(self):
        super().__init__()
        self.bce = nn.BCEWithLogitsLoss()

    def forward(self, logits, target):
        p = torch.sigmoid(logits)
        inter = (p * target).sum()
        dice = 1 - (2 * inter + 1) / (p.sum() + target.sum() + 1)
        return self.bce(logits, target) + dice


def train_vessels_epoch(model, loader, criterion, optimizer, device):
    model.train()
    running = 0.0
    for img, mask in loader:
        img, mask = img.to(device), mask.to(device)
        optimizer.zero_grad()
        loss = criterion(model(img), mask)
        loss.backward()
        optimizer.step()
        running += loss.item()
    return running / len(loader)


def validate_vessels(model, loader, criterion, device):
    model.eval()
    val_loss = 0
    correct = 0
    total = 0
    for img, mask in loader:
        img, mask = img.to(device), mask.to(device)
        out = model(img)
        val_loss += criterion(out, mask)
        pred = (torch.sigmoid(out) > 0.5).float()
        correct += (pred == mask).sum().item()
        total += mask.numel()
    return val_loss / len(loader), correct / total


@expected("evaluation_keeps_graphs", fix="no_grad", thread="stackoverflow.com/questions/54374935", memory=4096)
def segment_vessels_of_retinas(fixed=False):
    """The validation has no `torch.no_grad()` and sums the losses as tensors: the sum keeps the graph of each image. Cured by:
    `@torch.no_grad()` on the function that validates.
    """
    device = torch.device("cuda")
    train_loader = DataLoader(FundusImages(16, 512), batch_size=4, shuffle=True)
    val_loader = DataLoader(FundusImages(20, 512), batch_size=1)
    validate = torch.no_grad()(validate_vessels) if fixed else validate_vessels
    model = VesselUNet().to(device)
    criterion = BceAndDice()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.5)
    best = None
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            train_vessels_epoch(model, train_loader, criterion, optimizer, device)
            vl, acc = validate(model, val_loader, criterion, device)
            scheduler.step()
            if best is None or float(vl) < best:
                best = float(vl)
                torch.save(model.state_dict(), os.path.join(folder, "unet.pth"))
    return best, acc


# Streaks of rain are removed from a clip, frame by frame, and each clean frame is written to a file.

class PipeOfFrames:
    """Raw rgb24 bytes, one frame per read."""

    def __init__(self, n_frames):
        self.left = n_frames

    def read(self, n_bytes):
        if self.left == 0:
            return b""
        self.left -= 1
        return os.urandom(n_bytes)


class SqueezeGate(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(nn.Conv2d(ch, ch // 8, 1), nn.ReLU(), nn.Conv2d(ch // 8, ch, 1), nn.Sigmoid())

    def forward(self, x):
        return x * self.fc(self.pool(x))


class GatedResBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = nn.Conv2d(ch, ch, 3, padding=1)
        self.conv2 = nn.Conv2d(ch, ch, 3, padding=1)
        self.act = nn.LeakyReLU(0.2)
        self.gate = SqueezeGate(ch)

    def forward(self, x):
        return x + self.gate(self.conv2(self.act(self.conv1(x))))


class StreakRemover(nn.Module):
    def __init__(self, ch=48, blocks=4):
        super().__init__()
        self.head = nn.Conv2d(3, ch, 3, padding=1)
        self.body = nn.Sequential(*[GatedResBlock(ch) for _ in range(blocks)])
        self.tail = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, x):
        streaks = self.tail(self.body(self.head(x)))
        return (x - streaks).clamp(0, 1)


def load_streak_remover(folder, device):
    model = StreakRemover()
    ckpt = os.path.join(folder, "derain.pth")
    torch.save(model.state_dict(), ckpt)
    model.load_state_dict(torch.load(ckpt, map_location="cpu"))
    model.eval()
    return model.to(device)


def frame_of_bytes(raw, width, height, device):
    frame = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    frame = frame.reshape(height, width, 3).permute(2, 0, 1)
    return frame.to(device).float().div(255).unsqueeze(0)


def clean_frames(reader, model, out_dir, device, fixed, width=960, height=540):
    index = 0
    while True:
        in_bytes = reader.read(width * height * 3)
        if not in_bytes:
            break
        in_frame = frame_of_bytes(in_bytes, width, height, device)
        with torch.no_grad() if fixed else contextlib.nullcontext():
            out_frame = model(in_frame)
        torch.save(out_frame.mul(255).byte(), os.path.join(out_dir, f"frame_{index:05d}.pt"))
        index += 1
    return index


@expected("evaluation_keeps_graphs", fix="no_grad", memory=3072,
          thread="devgem.vercel.app/posts/efficient-frame-by-frame-rain-streak-removal-in-videos-using-pytorch-and-ffmpeg")
def remove_rain_from_clip(fixed=False):
    """Nothing is learned, but each frame has a graph, and that of the frame before is alive while the next one is made. Cured by:
    `with torch.no_grad():` around the call of the model.
    """
    device = torch.device("cuda:0")
    with tempfile.TemporaryDirectory() as folder:
        model = load_streak_remover(folder, device)
        return clean_frames(PipeOfFrames(8), model, folder, device, fixed)


# Faults of parts are found with a memory bank: the features of patches of good parts, by a frozen ResNet-50.

class ImagesOfGoodParts(Dataset):
    def __init__(self, n):
        self.n = n

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        return torch.rand(3, 224, 224), i


class HookedFeatures:
    """layer2 and layer3 of the backbone, by forward hooks."""

    def __init__(self, device, layers=("layer2", "layer3")):
        self.net = resnet50(weights=None).to(device).eval()
        self.layers = layers
        self.out = {}
        for name in layers:
            getattr(self.net, name).register_forward_hook(self._hook(name))

    def _hook(self, name):
        def fn(module, inputs, output):
            self.out[name] = output
        return fn

    @torch.no_grad()
    def __call__(self, images):
        self.out.clear()
        self.net(images)
        return [self.out[n] for n in self.layers]


def embed_patches(maps):
    """Pools locally, brings the maps to one grid and concatenates their channels: (B * H * W, C)."""
    maps = [F.avg_pool2d(m, 3, 1, 1) for m in maps]
    size = maps[0].shape[-2:]
    maps = [maps[0]] + [F.interpolate(m, size=size, mode="bilinear", align_corners=False) for m in maps[1:]]
    emb = torch.cat(maps, dim=1)
    return emb.permute(0, 2, 3, 1).reshape(-1, emb.shape[1])


def build_patch_bank(extractor, loader, device, fixed):
    bank = []
    for images, _ in loader:
        images = images.to(device)
        features = embed_patches(extractor(images))
        bank.append(features.cpu() if fixed else features)
    return torch.cat(bank)


def coreset_of_bank(bank, ratio, seed=0):
    g = torch.Generator().manual_seed(seed)
    keep = torch.randperm(bank.shape[0], generator=g)[:int(bank.shape[0] * ratio)]
    return bank[keep.to(bank.device)]


@torch.no_grad()
def score_parts(extractor, coreset, loader, device):
    out = []
    for images, _ in loader:
        q = embed_patches(extractor(images.to(device)))
        best = [torch.cdist(chunk, coreset).min(dim=1).values for chunk in q.split(1024)]
        out.append(torch.cat(best).view(images.shape[0], -1).max(dim=1).values.cpu())
    return torch.cat(out)


@expected("kept_tensors", fix="cpu", thread="stackoverflow.com/questions/61813730", memory=2048)
def score_parts_by_memory_bank(fixed=False):
    """The bank is a list that has the features of the patches of every batch, all of them on the GPU. Cured by:
    `bank.append(features.cpu())`, and the small coreset of the bank brought back.
    """
    device = torch.device("cuda")
    train_loader = DataLoader(ImagesOfGoodParts(384), batch_size=32)
    test_loader = DataLoader(ImagesOfGoodParts(32), batch_size=16)
    extractor = HookedFeatures(device)
    bank = build_patch_bank(extractor, train_loader, device, fixed)
    coreset = coreset_of_bank(bank, 0.05).to(device)
    del bank
    return score_parts(extractor, coreset, test_loader, device).mean().item()


# Spleens are segmented, with a data set that runs the transforms without chance once and caches what they make.

def load_spleen_case(i):
    g = torch.Generator().manual_seed(i)
    image = torch.randn(1, 192, 192, 96, generator=g).mul_(300)
    return image, (image > 350).float()


class ScaleOfIntensity:
    def __init__(self, lo=-57, hi=164):
        self.lo, self.hi = lo, hi

    def __call__(self, image, label):
        return image.sub(self.lo).div(self.hi - self.lo).clamp(0, 1), label


class ToDeviceTransform:
    def __init__(self, device):
        self.device = device

    def __call__(self, image, label):
        return image.to(self.device), label.to(self.device)


class RandomCropsOfCase:
    def __init__(self, roi, num_samples):
        self.roi, self.num_samples = roi, num_samples

    def __call__(self, image, label):
        ims, labs = [], []
        for _ in range(self.num_samples):
            s = [random.randint(0, d - r) for d, r in zip(image.shape[1:], self.roi)]
            sl = (slice(None),) + tuple(slice(a, a + r) for a, r in zip(s, self.roi))
            ims.append(image[sl])
            labs.append(label[sl])
        return torch.stack(ims), torch.stack(labs)


class CachedCases(Dataset):
    def __init__(self, indices, transforms, random_transform=None):
        self.random_transform = random_transform
        self.cache = []
        for i in indices:
            item = load_spleen_case(i)
            for t in transforms:
                item = t(*item)
            self.cache.append(item)

    def __len__(self):
        return len(self.cache)

    def __getitem__(self, i):
        image, label = self.cache[i]
        if self.random_transform is not None:
            return self.random_transform(image, label)
        return image[None], label[None]


def spleen_block(cin, cout, stride=1):
    return nn.Sequential(nn.Conv3d(cin, cout, 3, stride, 1), nn.InstanceNorm3d(cout), nn.PReLU())


class SpleenUNet(nn.Module):
    def __init__(self, ch=(16, 32, 64, 128)):
        super().__init__()
        self.enc = nn.ModuleList([spleen_block(1, ch[0])] + [spleen_block(a, b, 2) for a, b in zip(ch, ch[1:])])
        self.dec = nn.ModuleList([spleen_block(b + a, a) for a, b in zip(ch, ch[1:])][::-1])
        self.out = nn.Conv3d(ch[0], 2, 1)

    def forward(self, x):
        feats = []
        for e in self.enc:
            x = e(x)
            feats.append(x)
        for d, skip in zip(self.dec, feats[-2::-1]):
            x = d(torch.cat([F.interpolate(x, scale_factor=2.0), skip], 1))
        return self.out(x)


def dice_and_entropy(logits, label):
    prob = logits.softmax(1)[:, 1:]
    dice = 1 - (2 * (prob * label).sum() + 1) / (prob.sum() + label.sum() + 1)
    return dice + F.cross_entropy(logits, label[:, 0].long())


def join_crops(batch):
    return torch.cat([b[0] for b in batch]), torch.cat([b[1] for b in batch])


@expected("data_on_gpu", fix="no move|each batch", thread="Project-MONAI/tutorials#401", memory=3072)
def segment_cached_spleens(fixed=False):
    """The last of the transforms whose results are cached moves a case to the GPU: the cache has all 56 cases there. Cured by: the cache
    on the CPU, as the loop moves each batch anyway.
    """
    device = torch.device("cuda:0")
    det = [ScaleOfIntensity()] if fixed else [ScaleOfIntensity(), ToDeviceTransform(device)]
    train_ds = CachedCases(range(48), det, RandomCropsOfCase((96, 96, 96), 2))
    val_ds = CachedCases(range(48, 56), det)
    train_loader = DataLoader(train_ds, batch_size=2, shuffle=True, collate_fn=join_crops)
    val_loader = DataLoader(val_ds, batch_size=1, collate_fn=join_crops)
    model = SpleenUNet().to(device)
    opt = torch.optim.Adam(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    for image, label in train_loader:
        image, label = image.to(device), label.to(device)
        opt.zero_grad()
        with torch.autocast("cuda"):
            loss = dice_and_entropy(model(image), label)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    model.eval()
    with torch.no_grad():
        for image, label in val_loader:
            pred = model(image.to(device)).argmax(1)
    return tuple(pred.shape)


# Tumours are segmented in T1 volumes, with a residual 3D U-Net and one patch per step.

class SettingsOfVolumes:
    def __init__(self, pad_crop_shape, folder):
        self.device = torch.device("cuda:0")
        self.train_batch_size = 1
        self.num_epochs = 2
        self.initial_learning_rate = 1e-4
        self.weight_decay = 1e-7
        self.pad_crop_shape = pad_crop_shape
        self.channels = (16, 32, 48, 64, 80)
        self.results_folder = folder


class CroppedVolumes(Dataset):
    def __init__(self, n, crop):
        self.n, self.crop = n, crop

    def __len__(self):
        return self.n

    def pad_or_crop(self, vol):
        out = vol
        for dim, want in zip((1, 2, 3), self.crop):
            have = out.shape[dim]
            if have > want:
                out = out.narrow(dim, (have - want) // 2, want)
        return out.contiguous()

    def __getitem__(self, i):
        vol = torch.rand(1, 448, 448, 80)
        seg = (vol > 0.98)
        return self.pad_or_crop(vol), self.pad_or_crop(seg).long()


class VolumeResUnit(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1 = nn.Conv3d(cin, cout, 3, padding=1)
        self.norm1 = nn.BatchNorm3d(cout)
        self.act1 = nn.PReLU()
        self.conv2 = nn.Conv3d(cout, cout, 3, padding=1)
        self.norm2 = nn.BatchNorm3d(cout)
        self.act2 = nn.PReLU()
        self.skip = nn.Conv3d(cin, cout, 1) if cin != cout else nn.Identity()

    def forward(self, x):
        y = self.act1(self.norm1(self.conv1(x)))
        y = self.act2(self.norm2(self.conv2(y)))
        return y + self.skip(x)


class VolumeUNet(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.enc = nn.ModuleList([VolumeResUnit(a, b) for a, b in zip((1,) + ch, ch)])
        self.up = nn.ModuleList([nn.ConvTranspose3d(b, a, 2, 2) for a, b in zip(ch, ch[1:])][::-1])
        self.dec = nn.ModuleList([VolumeResUnit(2 * a, a) for a in ch[:-1]][::-1])
        self.out = nn.Conv3d(ch[0], 2, 1)

    def forward(self, x):
        skips = []
        for i, e in enumerate(self.enc):
            x = e(x if i == 0 else F.max_pool3d(x, 2))
            skips.append(x)
        for up, dec, s in zip(self.up, self.dec, skips[-2::-1]):
            x = dec(torch.cat((up(x), s), 1))
        return self.out(x)


class DiceOfVolumes(nn.Module):
    def forward(self, logits, seg):
        prob = torch.softmax(logits, 1)[:, 1]
        tgt = seg[:, 0].float()
        return 1 - (2 * (prob * tgt).sum() + 1e-5) / (prob.sum() + tgt.sum() + 1e-5)


def train_volumes_epoch(p, model, loader, loss_fn, opt):
    model.train()
    total = 0.0
    for vol, seg in loader:
        vol, seg = vol.to(p.device), seg.to(p.device)
        opt.zero_grad()
        loss = loss_fn(model(vol), seg)
        loss.backward()
        opt.step()
        total += loss.item()
    return total / len(loader)


def validate_volumes(p, model, loader):
    model.eval()
    scores = []
    with torch.no_grad():
        for vol, seg in loader:
            pred = model(vol.to(p.device)).argmax(1).cpu()
            inter = (pred * seg[:, 0]).sum().item()
            scores.append(2 * inter / (pred.sum().item() + seg.sum().item() + 1e-5))
    return sum(scores) / len(scores)


@expected("many_rows", fix="patches|crops", thread="KCL-BMEIS/VS_Seg#6", memory=12288)
def segment_tumours_in_volumes(fixed=False):
    """A patch of 384 × 384 × 64 voxels is too much for the GPU, and there is only one in a batch. Cured by: a smaller patch,
    `pad_crop_shape = [256, 256, 64]`.
    """
    with tempfile.TemporaryDirectory() as folder:
        p = SettingsOfVolumes([256, 256, 64] if fixed else [384, 384, 64], folder)
        train_loader = DataLoader(CroppedVolumes(3, p.pad_crop_shape), batch_size=p.train_batch_size, shuffle=True)
        val_loader = DataLoader(CroppedVolumes(1, p.pad_crop_shape), batch_size=1)
        model = VolumeUNet(p.channels).to(p.device)
        loss_fn = DiceOfVolumes()
        opt = torch.optim.Adam(model.parameters(), p.initial_learning_rate, weight_decay=p.weight_decay)
        best = -1
        for _ in range(p.num_epochs):
            train_volumes_epoch(p, model, train_loader, loss_fn, opt)
            dice = validate_volumes(p, model, val_loader)
            if dice > best:
                best = dice
                torch.save(model.state_dict(), os.path.join(p.results_folder, "volumes.pth"))
    return best


# A language model of the codes of a neural codec: 50 frames per second, and 4 codes of each frame.

class CodesOfUtterances(Dataset):
    def __init__(self, n, frame_rate, vocab, books, longest_s=None, seed=3, min_s=2.0):
        rng = random.Random(seed)
        self.frame_rate, self.vocab, self.books = frame_rate, vocab, books
        self.items = []
        for i in range(n):
            sec = min(15.5, max(min_s, rng.gauss(9, 3)))
            if rng.random() < 0.03:
                sec = rng.uniform(45, 75)  # podcasts that were never cut
            self.items.append((f"utt{i:05d}", sec))
        if longest_s is not None:
            self.items = [item for item in self.items if item[1] <= longest_s]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        _, sec = self.items[i]
        frames = int(sec * self.frame_rate)
        return torch.randint(0, self.vocab, (self.books, frames))


class CollateCodes:
    def __init__(self, books, pad):
        self.books, self.pad = books, pad

    def __call__(self, batch):
        longest = max(x.shape[1] for x in batch)
        codes = torch.full((len(batch), self.books, longest), self.pad)
        lens = torch.zeros(len(batch), dtype=torch.long)
        for i, x in enumerate(batch):
            codes[i, :, :x.shape[1]] = x
            lens[i] = x.shape[1]
        return codes, lens


class SinesOfFrames(nn.Module):
    def __init__(self, dim, max_len=8000):
        super().__init__()
        pos = torch.arange(max_len)[:, None]
        div = torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        pe = torch.zeros(max_len, dim)
        pe[:, 0::2], pe[:, 1::2] = torch.sin(pos * div), torch.cos(pos * div)
        self.register_buffer("pe", pe)

    def forward(self, x):
        return x + self.pe[:x.shape[1]]


class LanguageModelOfCodes(nn.Module):
    def __init__(self, vocab, books, dim=512, layers=8, heads=8):
        super().__init__()
        self.emb = nn.ModuleList([nn.Embedding(vocab + 1, dim, padding_idx=vocab) for _ in range(books)])
        self.pos = SinesOfFrames(dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, dropout=0.1, batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.heads = nn.ModuleList([nn.Linear(dim, vocab) for _ in range(books)])

    def forward(self, codes):
        x = self.pos(sum(e(codes[:, k]) for k, e in enumerate(self.emb)))
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device)
        x = self.trunk(x, mask=mask, is_causal=True)
        return torch.stack([h(x) for h in self.heads], dim=1)


def loss_of_next_codes(logits, codes, vocab):
    target = codes[:, :, 1:].clone()
    target[target == vocab] = -100
    return F.cross_entropy(logits[:, :, :-1].reshape(-1, vocab), target.reshape(-1), ignore_index=-100)


def warmup_and_cosine(opt, warmup, total):
    def scale(s):
        return s / warmup if s < warmup else 0.5 * (1 + math.cos(math.pi * (s - warmup) / (total - warmup)))
    return torch.optim.lr_scheduler.LambdaLR(opt, scale)


@expected("padding", fix="longest|cut", thread="jasonppy/VoiceCraft#84", memory=8192)
def train_on_codes_of_speech(fixed=False):
    """A few recordings of 45 to 75 seconds are among utterances of about 9, and all sequences of a batch are padded to the longest one.
    Cured by: utterances of more than 16 seconds left out of the data set.
    """
    torch.manual_seed(0)
    device = torch.device("cuda")
    vocab, books = 1024, 4
    data = CodesOfUtterances(160, 50, vocab, books, longest_s=16.0 if fixed else None)
    loader = DataLoader(data, batch_size=8, shuffle=True, collate_fn=CollateCodes(books, vocab))
    model = LanguageModelOfCodes(vocab, books).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4)
    sched = warmup_and_cosine(opt, 5, 200)
    seen = 0
    for codes, lens in loader:
        codes = codes.to(device, non_blocking=True)
        loss = loss_of_next_codes(model(codes), codes, vocab)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        seen += int(lens.sum())
    return seen, loss.item()


# A parser of scenes with 150 classes is tuned on crops, and evaluated on photos of full size.

@dataclasses.dataclass
class SampleOfScene:
    name: str
    gt: torch.Tensor
    seg_logits: torch.Tensor = None
    pred: torch.Tensor = None


class ScenesToParse(Dataset):
    def __init__(self, n, size, classes):
        self.n, self.size, self.classes = n, size, classes

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        h, w = self.size
        return torch.rand(3, h, w), torch.randint(0, self.classes, (h, w)), f"scene_{i:04d}"


class SceneSegmentor(nn.Module):
    def __init__(self, classes, fixed):
        super().__init__()
        self.fixed = fixed
        net = resnet18(weights=None)
        self.stem = nn.Sequential(net.conv1, net.bn1, net.relu, net.maxpool)
        self.stages = nn.ModuleList([net.layer1, net.layer2, net.layer3, net.layer4])
        self.lateral = nn.ModuleList([nn.Conv2d(c, 128, 1) for c in (64, 128, 256, 512)])
        self.fuse = nn.Sequential(nn.Conv2d(512, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU())
        self.cls = nn.Conv2d(128, classes, 1)

    def encode_decode(self, x):
        x = self.stem(x)
        maps = []
        for stage, lat in zip(self.stages, self.lateral):
            x = stage(x)
            maps.append(lat(x))
        size = maps[0].shape[-2:]
        maps = [F.interpolate(m, size=size, mode="bilinear", align_corners=False) for m in maps]
        return self.cls(self.fuse(torch.cat(maps, 1)))

    def loss(self, images, labels):
        logits = F.interpolate(self.encode_decode(images), size=labels.shape[-2:], mode="bilinear")
        return F.cross_entropy(logits, labels)

    def predict(self, images, samples):
        return self.postprocess_result(self.encode_decode(images), samples)

    def postprocess_result(self, seg_logits, samples):
        for i, sample in enumerate(samples):
            logits = F.interpolate(seg_logits[i:i + 1], size=sample.gt.shape, mode="bilinear")[0]
            if not self.fixed:
                sample.seg_logits = logits
            sample.pred = logits.argmax(dim=0)
        return samples


class MeanIoUOfScenes:
    def __init__(self, classes):
        self.classes = classes
        self.results = []

    def process(self, samples):
        self.results.extend(samples)

    def counts(self, labels):
        return torch.bincount(labels, minlength=self.classes)[:self.classes]

    def evaluate(self):
        inter = torch.zeros(self.classes)
        union = torch.zeros(self.classes)
        for s in self.results:
            pred, gt = s.pred.cpu().flatten(), s.gt.flatten()
            hits = self.counts(pred[pred == gt])
            inter += hits
            union += self.counts(pred) + self.counts(gt) - hits
        return (inter / union.clamp(min=1)).mean().item()


def tune_parser(model, loader, device):
    opt = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    model.train()
    for images, labels, _ in loader:
        loss = model.loss(images.to(device), labels.to(device))
        opt.zero_grad()
        loss.backward()
        opt.step()


@torch.no_grad()
def evaluate_parser(model, loader, classes, device):
    model.eval()
    metric = MeanIoUOfScenes(classes)
    for images, labels, names in loader:
        samples = [SampleOfScene(n, g) for n, g in zip(names, labels)]
        samples = model.predict(images.to(device), samples)
        metric.process(samples)
    return metric.evaluate()


@expected("kept_tensors", fix="no such attribute|cpu", thread="blog.youkuaiyun.com/qq_40714949/article/details/144024842", memory=6144)
def parse_scenes_of_full_size(fixed=False):
    """The metric keeps the results of all photos until its end, and each result has the logits of 150 classes at full size, of which only
    the argmax is needed. Cured by: the logits not put into the result.
    """
    device, classes = torch.device("cuda"), 150
    model = SceneSegmentor(classes, fixed).to(device)
    tune_parser(model, DataLoader(ScenesToParse(6, (512, 512), classes), batch_size=2), device)
    return evaluate_parser(model, DataLoader(ScenesToParse(10, (1080, 1920), classes), batch_size=1), classes, device)


# A grid of faces is sampled from a trained generator with styles.

class AdaptiveStyleNorm(nn.Module):
    def __init__(self, ch, style_dim):
        super().__init__()
        self.norm = nn.InstanceNorm2d(ch)
        self.style = nn.Linear(style_dim, ch * 2)

    def forward(self, x, w):
        gamma, beta = self.style(w)[:, :, None, None].chunk(2, 1)
        return (1 + gamma) * self.norm(x) + beta


class BlockWithStyle(nn.Module):
    def __init__(self, cin, cout, style_dim, upsample=True):
        super().__init__()
        self.upsample = upsample
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1)
        self.noise1 = nn.Parameter(torch.zeros(1, cout, 1, 1))
        self.noise2 = nn.Parameter(torch.zeros(1, cout, 1, 1))
        self.adain1 = AdaptiveStyleNorm(cout, style_dim)
        self.adain2 = AdaptiveStyleNorm(cout, style_dim)

    def forward(self, x, w):
        if self.upsample:
            x = F.interpolate(x, scale_factor=2.0, mode="nearest")
        x = self.conv1(x)
        x = x + self.noise1 * torch.randn(x.shape[0], 1, *x.shape[2:], device=x.device)
        x = self.adain1(F.leaky_relu(x, 0.2), w)
        x = self.conv2(x)
        x = x + self.noise2 * torch.randn(x.shape[0], 1, *x.shape[2:], device=x.device)
        return self.adain2(F.leaky_relu(x, 0.2), w)


class GeneratorWithStyles(nn.Module):
    CH = {4: 512, 8: 512, 16: 512, 32: 512, 64: 256, 128: 128, 256: 64, 512: 32, 1024: 16}

    def __init__(self, dim=512, size=1024):
        super().__init__()
        layers = []
        for _ in range(8):
            layers += [nn.Linear(dim, dim), nn.LeakyReLU(0.2)]
        self.mapping = nn.Sequential(*layers)
        self.const = nn.Parameter(torch.randn(1, 512, 4, 4))
        res = [r for r in self.CH if r <= size]
        self.blocks = nn.ModuleList([BlockWithStyle(self.CH[max(r // 2, 4)], self.CH[r], dim, upsample=r > 4) for r in res])
        self.to_rgb = nn.Conv2d(self.CH[size], 3, 1)

    def mean_style(self, z):
        return self.mapping(z).mean(0, keepdim=True)

    def forward(self, z, mean_style=None, style_weight=0.7):
        w = self.mapping(z)
        if mean_style is not None:
            w = mean_style + style_weight * (w - mean_style)
        x = self.const.expand(z.shape[0], -1, -1, -1)
        for b in self.blocks:
            x = b(x, w)
        return self.to_rgb(x)


@torch.no_grad()
def mean_style_of(generator, device):
    total = None
    for _ in range(10):
        s = generator.mean_style(torch.randn(1024, 512, device=device))
        total = s if total is None else total + s
    return total / 10


@torch.no_grad()
def sample_faces(generator, mean_style, n_sample, device):
    z = torch.randn(n_sample, 512, device=device)
    return generator(z, mean_style=mean_style)


@expected("batch_without_gradients", fix="split", thread="rosinality/style-based-gan-pytorch#96", memory=6144)
def sample_grid_of_faces(fixed=False):
    """All 32 faces of the grid, of 1024 × 1024 pixels, are made in one forward pass. Cured by: a grid of 2 rows and 4 columns, as fewer
    faces are made at once.
    """
    device = "cuda"
    n_row, n_col = (2, 4) if fixed else (4, 8)
    generator = GeneratorWithStyles()
    with tempfile.TemporaryDirectory() as folder:
        ckpt = os.path.join(folder, "style.model")
        torch.save(generator.state_dict(), ckpt)
        generator.load_state_dict(torch.load(ckpt, map_location="cpu"))
        generator = generator.to(device).eval()
        mean_style = mean_style_of(generator, device)
        img = sample_faces(generator, mean_style, n_row * n_col, device)
        out = os.path.join(folder, "sample.png")
        save_image(img[:, :, ::4, ::4].cpu(), out, nrow=n_col, normalize=True, value_range=(-1, 1))
    return tuple(img.shape)
