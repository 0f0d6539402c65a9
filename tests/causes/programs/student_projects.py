"""Programs after public threads of students' projects, re-implementations of papers and tutorials."""
import copy
import io
import math
import types
from itertools import combinations

import numpy as np
import torch
import torchvision
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from expected import expected


# An index of image vectors for a search by similarity.

class Img2Vec:
    output_sizes = {"resnet18": 512, "resnet34": 512, "resnet50": 2048}

    def __init__(self, cuda=False, model="resnet18", no_grad=False):
        self.device = torch.device("cuda" if cuda else "cpu")
        self.model_name, self.layer_output_size, self.no_grad = model, self.output_sizes[model], no_grad
        self.model = getattr(torchvision.models, model)(weights=None).to(self.device)
        self.extraction_layer = self.model._modules["avgpool"]
        self.model.eval()
        self.mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        self.std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)

    def prepare(self, img):
        tensor = torch.from_numpy(img).permute(2, 0, 1).float() / 255
        tensor = F.interpolate(tensor[None], size=(224, 224), mode="bilinear", align_corners=False)[0]
        return (tensor - self.mean) / self.std

    def get_vec(self, img):
        images = torch.stack([self.prepare(im) for im in img]).to(self.device)
        my_embedding = torch.zeros(len(img), self.layer_output_size, 1, 1)

        def copy_data(module, args, output):
            my_embedding.copy_(output.data)

        handle = self.extraction_layer.register_forward_hook(copy_data)
        if self.no_grad:
            with torch.no_grad():
                self.model(images)
        else:
            self.model(images)
        handle.remove()
        return my_embedding.numpy()[:, :, 0, 0]


def read_folder(num_images):
    rng = np.random.default_rng(0)
    for _ in range(num_images):
        height, width = rng.integers(200, 320, 2)
        yield rng.integers(0, 255, (height, width, 3), dtype=np.uint8)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="christiansafka/img2vec#33", memory=700)
def embed_gallery(fixed=False):
    """`Img2Vec.get_vec` runs the ResNet on a list of images with gradients enabled, so the forward pass `self.model(images)` keeps every
    activation for a backward pass that never comes, although only the output of the `extraction_layer` is copied out. Cured by: the forward
    pass of `get_vec` under `torch.no_grad()`.
    """
    img2vec = Img2Vec(cuda=True, no_grad=fixed)
    pics, vectors = list(read_folder(96)), []
    for begin in range(0, len(pics), 48):
        vectors.append(img2vec.get_vec(pics[begin:begin + 48]))
    vectors = np.concatenate(vectors)
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True) + 1e-9
    similarity = (vectors / lengths) @ (vectors / lengths).T
    return similarity.argsort(1)[:, ::-1][:, 1:6]


# Deblurring photographs with a conditional GAN: the test script.

class ResnetBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.conv_block = nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(dim, dim, 3), nn.InstanceNorm2d(dim), nn.ReLU(True), nn.Dropout(0.5),
                                        nn.ReflectionPad2d(1), nn.Conv2d(dim, dim, 3), nn.InstanceNorm2d(dim))

    def forward(self, x):
        return x + self.conv_block(x)


class ResnetGenerator(nn.Module):
    def __init__(self, ngf=16, n_blocks=6, learn_residual=True):
        super().__init__()
        self.learn_residual = learn_residual
        model = [nn.ReflectionPad2d(3), nn.Conv2d(3, ngf, 7), nn.InstanceNorm2d(ngf), nn.ReLU(True)]
        for mult in (1, 2):
            model += [nn.Conv2d(ngf * mult, ngf * mult * 2, 3, stride=2, padding=1), nn.InstanceNorm2d(ngf * mult * 2), nn.ReLU(True)]
        model += [ResnetBlock(ngf * 4) for _ in range(n_blocks)]
        for mult in (4, 2):
            model += [nn.ConvTranspose2d(ngf * mult, ngf * mult // 2, 3, stride=2, padding=1, output_padding=1),
                      nn.InstanceNorm2d(ngf * mult // 2), nn.ReLU(True)]
        model += [nn.ReflectionPad2d(3), nn.Conv2d(ngf, 3, 7), nn.Tanh()]
        self.model = nn.Sequential(*model)

    def forward(self, input):
        output = self.model(input)
        if self.learn_residual:
            output = torch.clamp(input + output, min=-1, max=1)
        return output


class TestModel:
    def __init__(self, opt):
        self.opt = opt
        self.netG = ResnetGenerator(opt.ngf).cuda()

    def set_input(self, input):
        self.input_A = input["A"].cuda()
        self.image_paths = input["A_paths"]

    def test(self):
        self.real_A = self.input_A
        if self.opt.volatile:
            with torch.no_grad():
                self.fake_B = self.netG(self.real_A)
        else:
            self.fake_B = self.netG(self.real_A)

    def get_current_visuals(self):
        to_image = lambda tensor: ((tensor[0].detach().cpu().numpy().transpose(1, 2, 0) + 1) / 2 * 255).astype(np.uint8)
        return {"real_A": to_image(self.real_A), "fake_B": to_image(self.fake_B)}


class GoproTest(Dataset):
    def __init__(self, size=(720, 1280), num_frames=3):
        self.size, self.num_frames = size, num_frames

    def __len__(self):
        return self.num_frames

    def __getitem__(self, index):
        return {"A": torch.rand(3, *self.size) * 2 - 1, "A_paths": f"GOPR0384/{index:06d}.png"}


def psnr(first, second):
    error = np.mean((first.astype(np.float64) - second.astype(np.float64)) ** 2)
    return 20 * math.log10(255 / math.sqrt(max(error, 1e-6)))


@expected("evaluation_keeps_graphs", fix="no_grad", thread="KupynOrest/DeblurGAN#105", memory=1500)
def test_deblur(fixed=False):
    """`TestModel.test` runs the generator `netG` on whole GOPRO frames without switching autograd off (no volatile input), so the graph of
    the image, with all activations, is kept; it hangs on `self.fake_B`. Cured by: `test` without autograd (volatile input then,
    `torch.no_grad()` now).
    """
    opt = types.SimpleNamespace(ngf=16, how_many=3, volatile=fixed)
    model, avg_psnr, counter = TestModel(opt), 0.0, 0
    for data in DataLoader(GoproTest(num_frames=opt.how_many), batch_size=1):
        model.set_input(data)
        model.test()
        visuals = model.get_current_visuals()
        avg_psnr += psnr(visuals["fake_B"], visuals["real_A"])
        counter += 1
    return avg_psnr / counter


# Super resolution: EDSR on a folder of one's own pictures.

class ResBlock(nn.Module):
    def __init__(self, n_feats, res_scale):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(n_feats, n_feats, 3, padding=1), nn.ReLU(True), nn.Conv2d(n_feats, n_feats, 3, padding=1))
        self.res_scale = res_scale

    def forward(self, x):
        return self.body(x).mul(self.res_scale) + x


class Upsampler(nn.Sequential):
    def __init__(self, scale, n_feats):
        layers = []
        for _ in range(int(math.log2(scale))):
            layers += [nn.Conv2d(n_feats, 4 * n_feats, 3, padding=1), nn.PixelShuffle(2)]
        super().__init__(*layers)


class EDSR(nn.Module):
    def __init__(self, args):
        super().__init__()
        self.head = nn.Conv2d(3, args.n_feats, 3, padding=1)
        self.body = nn.Sequential(*[ResBlock(args.n_feats, args.res_scale) for _ in range(args.n_resblocks)],
                                  nn.Conv2d(args.n_feats, args.n_feats, 3, padding=1))
        self.tail = nn.Sequential(Upsampler(args.scale, args.n_feats), nn.Conv2d(args.n_feats, 3, 3, padding=1))

    def forward(self, x):
        x = self.head(x)
        return self.tail(self.body(x) + x)


class Model:
    def __init__(self, args):
        self.chop, self.scale = args.chop, args.scale
        self.model = EDSR(args).cuda().eval()

    def __call__(self, x):
        return self.forward_chop(x) if self.chop else self.model(x)

    def forward_chop(self, x, shave=10, min_size=40000):
        scale, (b, c, h, w) = self.scale, x.shape
        top, left = h // 2 + shave, w // 2 + shave
        corners = [x[..., :top, :left], x[..., :top, w - left:], x[..., h - top:, :left], x[..., h - top:, w - left:]]
        if top * left < min_size:
            patches = [self.model(corner) for corner in corners]
        else:
            patches = [self.forward_chop(corner, shave, min_size) for corner in corners]
        h, w, half_h, half_w = scale * h, scale * w, scale * (h // 2), scale * (w // 2)
        y = x.new_empty(b, c, h, w)
        y[..., :half_h, :half_w] = patches[0][..., :half_h, :half_w]
        y[..., :half_h, half_w:] = patches[1][..., :half_h, half_w - w:]
        y[..., half_h:, :half_w] = patches[2][..., half_h - h:, :half_w]
        y[..., half_h:, half_w:] = patches[3][..., half_h - h:, half_w - w:]
        return y


class Demo(Dataset):
    sizes = [(180, 240), (320, 480), (256, 384)]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        return torch.rand(3, *self.sizes[index]) * 255, f"picture{index}"


@expected("batch_without_gradients", fix="tiles|split|part", thread="sanghyun-son/EDSR-PyTorch#187", memory=800)
def upscale_demo(fixed=False):
    """The pictures of the Demo folder are large and go through the x4 network in one piece (`chop` is off), so the feature maps of
    `Upsampler` in the tail, at two and four times the size with `n_feats` (before the shuffle 4 × `n_feats`) channels, do not fit. Cured
    by: `--chop`: the picture is cut into overlapping patches which are upscaled one after another (`forward_chop`).
    """
    args = types.SimpleNamespace(scale=4, n_resblocks=8, n_feats=64, res_scale=0.1, chop=fixed, test_only=True)
    model, saved = Model(args), {}
    with torch.no_grad():
        for lr, filename in DataLoader(Demo(), batch_size=1):
            sr = model(lr.cuda())
            sr = sr.clamp(0, 255).round()
            saved[f"{filename[0]}_x{args.scale}_SR"] = sr[0].byte().permute(1, 2, 0).cpu()
    return len(saved)


# Detection of inputs unlike the training data by nearest features.

class FeatureNet(nn.Module):
    def __init__(self, dim, num_classes):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(32, 128, 3, stride=2, padding=1), nn.ReLU(),
                                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, dim), nn.ReLU())
        self.fc = nn.Linear(dim, num_classes)

    def forward(self, x):
        return self.fc(self.features(x))


class NNGuide:
    def __init__(self, encoder, head, k=10, batch_size=None, device="cuda"):
        self.encoder, self.head, self.k = encoder, head, k
        self.batch_size, self.device = batch_size, device

    @staticmethod
    def energy(logits):
        return torch.logsumexp(logits, dim=1)

    def fit_features(self, z, logits, labels):
        known = labels >= 0
        z, logits = z[known], logits[known]
        if self.batch_size is None:
            z, logits = z.to(self.device), logits.to(self.device)
            conf = self.energy(logits)
            z_norm = F.normalize(z, dim=1)
            self.bank = (z_norm * conf[:, None]).cpu()
        else:
            conf = torch.cat([self.energy(part.to(self.device)).cpu() for part in logits.split(self.batch_size)])
            bank = torch.empty_like(z)
            for begin in range(0, len(z), self.batch_size):
                end = begin + self.batch_size
                part = F.normalize(z[begin:end].to(self.device), dim=1) * conf[begin:end, None].to(self.device)
                bank[begin:end] = part.cpu()
            self.bank = bank
        return self

    @torch.no_grad()
    def fit(self, loader):
        z, logits, labels = [], [], []
        for x, y in loader:
            features = self.encoder(x.to(self.device))
            z.append(features.cpu())
            logits.append(self.head(features).cpu())
            labels.append(y)
        return self.fit_features(torch.cat(z), torch.cat(logits), torch.cat(labels))

    @torch.no_grad()
    def predict(self, x, bank_rows=4096):
        features = self.encoder(x.to(self.device))
        query, near = F.normalize(features, dim=1), []
        for part in self.bank.split(bank_rows):
            near.append((query @ part.to(self.device).T).topk(self.k, dim=1).values)
        guidance = torch.cat(near, 1).topk(self.k, dim=1).values.mean(1)
        return -guidance * self.energy(self.head(features))


class Thumbnails(Dataset):
    def __init__(self, size):
        self.images, self.labels = torch.rand(256, 3, 32, 32), torch.arange(size) % 100

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.images[index % 256], self.labels[index]


@expected("elementwise_copies", fix="part|split|chunk", thread="kkirchheim/pytorch-ood#159", memory=600)
def fit_nnguide(fixed=False):
    """`NNGuide.fit_features` puts the features and logits of the whole training set on the GPU and makes the normalized and the
    energy-scaled features of all `n` rows there at once, so the memory grows with `n`. Cured by: two passes in chunks of `batch_size` rows
    (first the energies, then the bank), so that the GPU holds one chunk at a time.
    """
    net = FeatureNet(2048, 100).cuda().eval()
    detector = NNGuide(net.features, net.fc, batch_size=4096 if fixed else None)
    detector.fit(DataLoader(Thumbnails(36000), batch_size=500))
    scores = [detector.predict(torch.rand(100, 3, 32, 32)).cpu() for _ in range(3)]
    return torch.cat(scores).shape


# A world model for robots starts: pretrained parts, then a checkpoint of our own.

class DiTBlock(nn.Module):
    def __init__(self, dim, num_heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.num_heads = num_heads
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.ffn = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, n, c))
        return x + self.ffn(self.norm2(x))


class WanDiT(nn.Module):
    def __init__(self, dim=1024, depth=7, in_dim=64):
        super().__init__()
        self.patch_embedding, self.head = nn.Linear(in_dim, dim), nn.Linear(dim, in_dim)
        self.blocks = nn.ModuleList(DiTBlock(dim, 16) for _ in range(depth))

    def forward(self, x):
        x = self.patch_embedding(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class ActionExpert(nn.Module):
    def __init__(self, dim=512, action_dim=7):
        super().__init__()
        self.inp, self.out = nn.Linear(64, dim), nn.Linear(dim, action_dim)
        self.blocks = nn.ModuleList(DiTBlock(dim, 8) for _ in range(4))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x[:, -1])


def load_state_dict(file, torch_dtype, device):
    file.seek(0)
    return {name: tensor.to(torch_dtype) for name, tensor in torch.load(file, map_location=device).items()}


def _load_registered_model(model_class, file, torch_dtype, device, load_device):
    model = model_class().to(torch_dtype)
    state_dict = load_state_dict(file, torch_dtype, load_device)
    model = model.to(device)
    model.load_state_dict(state_dict)
    return model.eval()


class FastWAM(nn.Module):
    def __init__(self, dit, action_expert, device, load_device):
        super().__init__()
        self.dit, self.action_expert = dit, action_expert
        self.device, self.load_device = device, load_device

    @classmethod
    def from_pretrained(cls, files, torch_dtype, device, load_device):
        dit = _load_registered_model(WanDiT, files["dit"], torch_dtype, device, load_device)
        action_expert = ActionExpert().to(torch_dtype).to(device)
        return cls(dit, action_expert, device, load_device)

    def load_checkpoint(self, file):
        file.seek(0)
        payload = torch.load(file, map_location=self.load_device)
        self.dit.load_state_dict(payload["dit"], strict=False)
        self.action_expert.load_state_dict(payload["action_expert"])
        return payload

    @torch.no_grad()
    def infer_action(self, latents, num_steps=4):
        for _ in range(num_steps):
            latents = latents - self.dit(latents) / num_steps
        return self.action_expert(latents)


def stored(content):
    file = io.BytesIO()
    torch.save(content, file)
    return file


@expected("loaded_onto_gpu", fix="map_location", thread="yuantianyuan01/FastWAM#20", memory=430)
def start_world_model(fixed=False):
    """The weights files are loaded with `map_location=self.device` (and `load_state_dict(path, device=device)`), so a second copy of all
    the weights is on the GPU, `state_dict` and `payload`, beside the model that they are copied into. Cured by: load the checkpoint to the
    CPU (`map_location="cpu"`).
    """
    device = torch.device("cuda")
    load_device = "cpu" if fixed else device
    weights = WanDiT().to(torch.bfloat16).state_dict()
    files = {"dit": stored(weights),
             "checkpoint": stored({"dit": weights, "action_expert": ActionExpert().to(torch.bfloat16).state_dict(), "step": 20000})}
    del weights
    model = FastWAM.from_pretrained(files, torch.bfloat16, device, load_device)
    payload = model.load_checkpoint(files["checkpoint"])
    actions = [model.infer_action(torch.randn(1, 256, 64, dtype=torch.bfloat16, device=device)).float().cpu() for _ in range(3)]
    return payload["step"], torch.cat(actions).shape


# A detector of speech is tuned on recordings with labels.

class SileroVadDataset(Dataset):
    num_samples, sr = 512, 16000

    def __init__(self, config, mode="train"):
        self.mode = mode
        self.max_train_length_samples = config.max_train_length_sec * self.sr
        self.cut = mode == "train" or config.cut_validation
        self.lengths = config.train_lengths if mode == "train" else config.val_lengths

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, idx):
        wav, gt, mask = self.load_speech_sample(idx)
        if self.cut and len(wav) > self.max_train_length_samples:
            frames = self.max_train_length_samples // self.num_samples
            wav, gt, mask = wav[:self.max_train_length_samples], gt[:frames], mask[:frames]
        return torch.from_numpy(wav), torch.from_numpy(gt), torch.from_numpy(mask)

    def load_speech_sample(self, idx):
        samples = int(self.lengths[idx] * self.sr)
        samples += -samples % self.num_samples
        wav = np.zeros(samples, dtype=np.float32)
        gt = np.zeros(samples // self.num_samples, dtype=np.float32)
        gt[len(gt) // 4:len(gt) // 2] = 1
        return wav, gt, np.where(gt > 0, 1.0, 0.5).astype(np.float32)


def SileroVadPadder(batch):
    pad = lambda column: nn.utils.rnn.pad_sequence([row[column] for row in batch], batch_first=True)
    return pad(0), pad(1), pad(2)


class VADEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.stft = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.encoder = nn.Sequential(nn.Conv1d(129, 128, 3, padding=1), nn.ReLU(), nn.Conv1d(128, 64, 3, stride=2, padding=1), nn.ReLU(),
                                     nn.Conv1d(64, 128, 3, stride=2, padding=1), nn.ReLU())

    def forward(self, x):
        spectrum = self.stft(x.unsqueeze(1))
        magnitude = torch.sqrt(spectrum[:, :129] ** 2 + spectrum[:, 129:] ** 2 + 1e-9)
        return self.encoder(magnitude).mean(-1)


class VADDecoderRNN(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTMCell(128, 128)
        self.decoder = nn.Sequential(nn.Dropout(0.1), nn.ReLU(), nn.Linear(128, 1), nn.Sigmoid())

    def forward(self, x, state=None):
        h, c = self.rnn(x, state)
        return self.decoder(h), (h, c)


def run_frames(encoder, decoder, x, context_size=64, num_samples=512):
    x = F.pad(x, (context_size, 0))
    outs, state = [], None
    for i in range(context_size, x.shape[1], num_samples):
        out, state = decoder(encoder(x[:, i - context_size:i + num_samples]), state)
        outs.append(out)
    return torch.cat(outs, dim=1)


def train(loader, encoder, decoder, criterion, optimizer, device):
    decoder.train()
    total = 0.0
    for x, targets, masks in loader:
        x, targets, masks = x.to(device), targets.to(device), masks.to(device)
        loss = (criterion(run_frames(encoder, decoder, x), targets) * masks).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / len(loader)


def validate(loader, encoder, decoder, criterion, device):
    decoder.eval()
    total, predicts = 0.0, []
    with torch.no_grad():
        for x, targets, masks in loader:
            x, targets, masks = x.to(device), targets.to(device), masks.to(device)
            stacked = run_frames(encoder, decoder, x)
            predicts.append(stacked.cpu())
            total += (criterion(stacked, targets) * masks).mean().item()
    return total / len(loader), predicts


@expected("data_on_gpu", fix="cut", thread="snakers4/silero-vad#683", memory=400)
def tune_vad(fixed=False):
    """`SileroVadDataset` cuts recordings to `max_train_length_samples` only in the mode `train`; a very long recording in the validation
    set pads the whole batch to its length (`SileroVadPadder`), and this batch `x` does not fit in `validate`. Cured by: cut the recordings
    in validation too.
    """
    device = torch.device("cuda")
    config = types.SimpleNamespace(batch_size=16, max_train_length_sec=8, num_epochs=1, cut_validation=fixed,
                                   train_lengths=[4 + i % 9 for i in range(48)], val_lengths=[5 + i % 4 for i in range(20)] + [540, 7, 6, 9])
    encoder, decoder = VADEncoder().to(device).requires_grad_(False), VADDecoderRNN().to(device)
    train_loader = DataLoader(SileroVadDataset(config, "train"), batch_size=config.batch_size, collate_fn=SileroVadPadder)
    val_loader = DataLoader(SileroVadDataset(config, "val"), batch_size=config.batch_size, collate_fn=SileroVadPadder)
    optimizer = torch.optim.Adam(decoder.parameters(), lr=5e-4)
    criterion = nn.BCELoss(reduction="none")
    for _ in range(config.num_epochs):
        train_loss = train(train_loader, encoder, decoder, criterion, optimizer, device)
        val_loss, predicts = validate(val_loader, encoder, decoder, criterion, device)
    return train_loss, val_loss


# Inspection of products: student and teacher, anomaly maps, metrics on pixels.

class FeatureExtractor(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, width, 7, stride=4, padding=3), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.layer3 = nn.Sequential(nn.Conv2d(2 * width, 4 * width, 3, stride=2, padding=1), nn.ReLU())

    def forward(self, x):
        first = self.layer1(x)
        second = self.layer2(first)
        return first, second, self.layer3(second)


class STFPMModel(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.teacher_model, self.student_model = FeatureExtractor(width).requires_grad_(False), FeatureExtractor(width)

    def forward(self, images):
        with torch.no_grad():
            teacher = self.teacher_model(images)
        student = self.student_model(images)
        if self.training:
            return sum(F.mse_loss(F.normalize(s), F.normalize(t)) for s, t in zip(student, teacher))
        anomaly_map = 1
        for s, t in zip(student, teacher):
            layer_map = (F.normalize(s) - F.normalize(t)).pow(2).sum(1, keepdim=True)
            anomaly_map = anomaly_map * F.interpolate(layer_map, size=images.shape[-2:], mode="bilinear", align_corners=False)
        return anomaly_map


class PixelAUROC:
    def __init__(self, device):
        self.device, self.preds, self.target = torch.device(device), [], []

    def update(self, preds, target):
        self.preds.append(preds.flatten().to(self.device))
        self.target.append(target.flatten().to(self.device))

    def compute(self):
        preds, target = torch.cat(self.preds), torch.cat(self.target)
        target = target[preds.argsort(descending=True).clamp(0, len(preds) - 1)].float()
        tps, fps = target.cumsum(0), (1 - target).cumsum(0)
        return torch.trapezoid(tps / tps[-1].clamp(min=1), fps / fps[-1].clamp(min=1))


class AnomalyModule(nn.Module):
    def __init__(self, metrics_device, outputs_device):
        super().__init__()
        self.model = STFPMModel()
        self.pixel_metrics, self.outputs_device = PixelAUROC(metrics_device), outputs_device

    def validation_step(self, batch):
        batch["anomaly_maps"] = self.model(batch["image"])
        batch["pred_scores"] = batch["anomaly_maps"].flatten(1).amax(1)
        return batch

    def validation_step_end(self, step_outputs):
        if self.outputs_device is not None:
            for key, value in step_outputs.items():
                step_outputs[key] = value.to(self.outputs_device)
        return step_outputs

    def validation_epoch_end(self, outputs):
        low = min(float(output["anomaly_maps"].min().cpu()) for output in outputs)
        for output in outputs:
            output["anomaly_maps"] = output["anomaly_maps"] - low
            self.pixel_metrics.update(output["anomaly_maps"], output["mask"])
        return self.pixel_metrics.compute()


class MVTec(Dataset):
    def __init__(self, number, size=256):
        self.number, self.size = number, size
        self.images = torch.rand(8, 3, size, size)

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        mask = torch.zeros(1, self.size, self.size)
        mask[:, 40:90, 60:110] = index % 3 == 0
        return {"image": self.images[index % 8], "mask": mask, "label": torch.tensor(int(index % 3 == 0))}


def fit_epoch(module, loader, optimizer):
    module.train()
    for batch in loader:
        optimizer.zero_grad()
        module.model(batch["image"].cuda()).backward()
        optimizer.step()


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="open-edge-platform/anomalib#64", memory=700)
def validate_inspection(fixed=False):
    """During validation the outputs of all batches (`outputs`, with the images, masks and anomaly maps) are collected on the GPU until the
    end of the epoch, and the pixel metrics keep all scores there as well and are computed on the GPU. Cured by: move the collected outputs
    and the metrics to the CPU.
    """
    module = AnomalyModule("cpu" if fixed else "cuda", "cpu" if fixed else None).cuda()
    optimizer = torch.optim.SGD(module.model.student_model.parameters(), lr=0.4, momentum=0.9)
    fit_epoch(module, DataLoader(MVTec(96), batch_size=16), optimizer)
    module.eval()
    outputs = []
    with torch.no_grad():
        for batch in DataLoader(MVTec(320), batch_size=32):
            batch = {key: value.cuda() for key, value in batch.items()}
            outputs.append(module.validation_step_end(module.validation_step(batch)))
        return module.validation_epoch_end(outputs).cpu()


# Images are generated by interpolants with a transformer on latents.

class SiTBlock(nn.Module):
    def __init__(self, hidden_size, num_heads):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden_size, elementwise_affine=False), nn.LayerNorm(hidden_size, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(hidden_size, num_heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(hidden_size, 4 * hidden_size), nn.GELU(approximate="tanh"), nn.Linear(4 * hidden_size, hidden_size))
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(hidden_size, 6 * hidden_size))

    def forward(self, x, c):
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.adaLN_modulation(c)[:, None].chunk(6, dim=-1)
        h = self.norm1(x) * (1 + scale_a) + shift_a
        x = x + gate_a * self.attn(h, h, h, need_weights=False)[0]
        return x + gate_m * self.mlp(self.norm2(x) * (1 + scale_m) + shift_m)


class SiT(nn.Module):
    def __init__(self, input_size, hidden_size=192, depth=4, num_classes=1000, patch_size=2):
        super().__init__()
        self.patch_size, self.grid = patch_size, input_size // patch_size
        self.x_embedder = nn.Conv2d(4, hidden_size, patch_size, stride=patch_size)
        self.pos_embed = nn.Parameter(torch.zeros(1, self.grid ** 2, hidden_size), requires_grad=False)
        self.t_embedder, self.y_embedder = nn.Sequential(nn.Linear(1, hidden_size), nn.SiLU()), nn.Embedding(num_classes + 1, hidden_size)
        self.blocks = nn.ModuleList(SiTBlock(hidden_size, 4) for _ in range(depth))
        self.final_layer = nn.Linear(hidden_size, 4 * patch_size ** 2)

    def forward(self, x, t, y):
        x = self.x_embedder(x).flatten(2).transpose(1, 2) + self.pos_embed
        c = self.t_embedder(t[:, None]) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        x = self.final_layer(x).transpose(1, 2).unflatten(2, (self.grid, self.grid))
        return F.pixel_shuffle(x, self.patch_size)


class VAEResnet(nn.Module):
    def __init__(self, dim_in, dim_out):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(8, dim_in), nn.GroupNorm(8, dim_out)
        self.conv1, self.conv2 = nn.Conv2d(dim_in, dim_out, 3, padding=1), nn.Conv2d(dim_out, dim_out, 3, padding=1)
        self.shortcut = nn.Conv2d(dim_in, dim_out, 1)

    def forward(self, x):
        h = self.conv1(F.silu(self.norm1(x)))
        return self.conv2(F.silu(self.norm2(h))) + self.shortcut(x)


class AutoencoderKL(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1), nn.SiLU(), nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.SiLU(),
                                     nn.Conv2d(32, 8, 3, stride=2, padding=1))
        layers = [nn.Conv2d(4, 64, 3, padding=1)]
        for dim_in, dim_out in ((64, 64), (64, 32), (32, 16)):
            layers += [VAEResnet(dim_in, dim_out), nn.Upsample(scale_factor=2), nn.Conv2d(dim_out, dim_out, 3, padding=1)]
        self.decoder = nn.Sequential(*layers, VAEResnet(16, 16), nn.GroupNorm(8, 16), nn.SiLU(), nn.Conv2d(16, 3, 3, padding=1))

    def encode(self, x):
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        return mean + torch.exp(0.5 * logvar) * torch.randn_like(mean)

    def decode(self, z):
        return self.decoder(z)


def training_losses(model, x1, y):
    t, x0 = torch.rand(len(x1), device=x1.device), torch.randn_like(x1)
    xt = (1 - t.view(-1, 1, 1, 1)) * x0 + t.view(-1, 1, 1, 1) * x1
    return (model(xt, t, y) - (x1 - x0)).square().mean()


def sample_ode(model_fn, zs, ys, num_steps=20):
    for step in range(num_steps):
        zs = zs + model_fn(zs, torch.full((len(zs),), step / num_steps, device=zs.device), ys) / num_steps
    return zs


def update_ema(ema, model, decay=0.9999):
    with torch.no_grad():
        for averaged, param in zip(ema.parameters(), model.parameters()):
            averaged.mul_(decay).add_(param, alpha=1 - decay)


@expected("graph_without_use", fix="no_grad", thread="willisma/SiT#43", memory=900)
def train_interpolant(fixed=False):
    """The sampling in the middle of training (every `sample_every` steps) is not under `torch.no_grad()`, so `vae.decode` of the whole
    batch of samples records a graph with all activations of the decoder (my reading: the EMA model itself is frozen, the VAE is not). Cured
    by: the sampling block under `torch.no_grad()`.
    """
    device = torch.device("cuda")
    args = types.SimpleNamespace(image_size=256, batch_size=16, sample_every=10, log_every=5)
    model = SiT(args.image_size // 8).to(device)
    ema = copy.deepcopy(model).requires_grad_(False).eval()
    vae = AutoencoderKL().to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0)
    ys = torch.randint(1000, (args.batch_size,), device=device)
    zs = torch.randn(args.batch_size, 4, args.image_size // 8, args.image_size // 8, device=device)
    logged, running_loss = [], 0.0
    for train_steps in range(1, 21):
        x, y = torch.rand(args.batch_size, 3, args.image_size, args.image_size).to(device), torch.randint(1000, (args.batch_size,)).to(device)
        with torch.no_grad():
            x = vae.encode(x) * 0.18215
        loss = training_losses(model, x, y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        update_ema(ema, model)
        running_loss += loss.item()
        if train_steps % args.sample_every == 0:
            with torch.set_grad_enabled(not fixed):
                samples = sample_ode(ema.forward, zs, ys)
                samples = vae.decode(samples / 0.18215)
                logged.append(samples.detach().clamp(-1, 1).cpu())
    return len(logged), running_loss


# Neurons in electron microscopy: inference on a volume with flips.

class UNet3D(nn.Module):
    def __init__(self, out_channels, width=12):
        super().__init__()
        block = lambda i, o: nn.Sequential(nn.Conv3d(i, o, 3, padding=1), nn.InstanceNorm3d(o), nn.ReLU(True), nn.Conv3d(o, o, 3, padding=1),
                                           nn.InstanceNorm3d(o), nn.ReLU(True))
        self.enc1, self.enc2, self.mid = block(1, width), block(width, 2 * width), block(2 * width, 4 * width)
        self.up2, self.up1 = nn.ConvTranspose3d(4 * width, 2 * width, 2, stride=2), nn.ConvTranspose3d(2 * width, width, 2, stride=2)
        self.dec2, self.dec1 = block(4 * width, 2 * width), block(2 * width, width)
        self.head = nn.Conv3d(width, out_channels, 1)

    def forward(self, x):
        first = self.enc1(x)
        second = self.enc2(F.max_pool3d(first, 2))
        x = self.mid(F.max_pool3d(second, 2))
        x = self.dec2(torch.cat([self.up2(x), second], 1))
        return self.head(self.dec1(torch.cat([self.up1(x), first], 1)))


class SlidingWindowInferer:
    def __init__(self, roi_size, overlap, out_channels):
        self.roi_size, self.overlap, self.out_channels = roi_size, overlap, out_channels

    def starts(self, size, roi):
        step = max(1, int(roi * (1 - self.overlap)))
        places = list(range(0, max(1, size - roi + 1), step))
        return places if places[-1] + roi >= size else places + [size - roi]

    def __call__(self, inputs, network):
        output = torch.zeros(inputs.shape[0], self.out_channels, *inputs.shape[2:], device=inputs.device)
        count = torch.zeros(1, 1, *inputs.shape[2:], device=inputs.device)
        for z in self.starts(inputs.shape[2], self.roi_size[0]):
            for y in self.starts(inputs.shape[3], self.roi_size[1]):
                for x in self.starts(inputs.shape[4], self.roi_size[2]):
                    window = (..., slice(z, z + self.roi_size[0]), slice(y, y + self.roi_size[1]), slice(x, x + self.roi_size[2]))
                    output[window] += network(inputs[window])
                    count[window] += 1
        return output / count


class InferenceManager:
    def __init__(self, cfg, model):
        self.cfg, self.model = cfg, model
        self.sliding_inferer = SlidingWindowInferer(cfg.window_size, cfg.overlap, cfg.out_channels)
        self.tta_flip_axes = [axes for number in range(4) for axes in combinations((2, 3, 4), number)]

    def sliding_window_predict(self, inputs):
        return self.model(inputs)

    def apply_tta_preprocessing(self, tensor):
        return torch.cat([torch.sigmoid(tensor[:, :2]), torch.tanh(tensor[:, 2:])], 1)

    def predict_flipped(self, images, axes):
        x_aug = torch.flip(images, axes) if axes else images
        pred = self.sliding_inferer(x_aug, self.sliding_window_predict)
        return self.apply_tta_preprocessing(torch.flip(pred, axes) if axes else pred)

    def predict_with_tta(self, images):
        if self.cfg.running_ensemble:
            ensemble_result, num_predictions = None, 0
            for axes in self.tta_flip_axes:
                with torch.no_grad():
                    pred = self.predict_flipped(images, axes)
                    num_predictions += 1
                    ensemble_result = pred if ensemble_result is None else ensemble_result + (pred - ensemble_result) / num_predictions
                    del pred
            return ensemble_result
        predictions = []
        for axes in self.tta_flip_axes:
            predictions.append(self.predict_flipped(images, axes))
        return torch.stack(predictions).mean(0)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="PytorchConnectomics/pytorch_connectomics#175", memory=1300)
def segment_neurons(fixed=False):
    """In test mode the network runs with gradients enabled, so each window's graph stays alive with the prediction, and the test-time
    augmentation keeps the predictions of all eight flips in `predictions` before they are stacked and averaged. Cured by: `torch.no_grad()`
    around the sliding window and a running average instead of the list.
    """
    cfg = types.SimpleNamespace(window_size=(32, 64, 64), overlap=0.25, out_channels=3, running_ensemble=fixed)
    model = UNet3D(cfg.out_channels).cuda().eval()
    manager, volumes = InferenceManager(cfg, model), []
    for _ in range(2):
        images = torch.rand(1, 1, 32, 96, 96).cuda()
        pred = manager.predict_with_tta(images)
        volumes.append((pred.detach().cpu().numpy() * 255).astype(np.uint8))
    return np.stack(volumes).shape


# Model-based reinforcement learning: an ensemble learns the dynamics of an environment.

def get_affine_params(ensemble_size, in_features, out_features):
    w = torch.randn(ensemble_size, in_features, out_features) / (2.0 * math.sqrt(in_features))
    return nn.Parameter(w), nn.Parameter(torch.zeros(ensemble_size, 1, out_features))


def swish(x):
    return x * torch.sigmoid(x)


class PtModel(nn.Module):
    def __init__(self, ensemble_size, in_features, out_features, hidden=200):
        super().__init__()
        self.num_nets, self.out_features = ensemble_size, out_features
        self.lin0_w, self.lin0_b = get_affine_params(ensemble_size, in_features, hidden)
        self.lin1_w, self.lin1_b = get_affine_params(ensemble_size, hidden, hidden)
        self.lin2_w, self.lin2_b = get_affine_params(ensemble_size, hidden, hidden)
        self.lin3_w, self.lin3_b = get_affine_params(ensemble_size, hidden, out_features)
        self.inputs_mu = nn.Parameter(torch.zeros(in_features), requires_grad=False)
        self.inputs_sigma = nn.Parameter(torch.ones(in_features), requires_grad=False)
        self.max_logvar = nn.Parameter(torch.ones(1, out_features // 2) / 2)
        self.min_logvar = nn.Parameter(-torch.ones(1, out_features // 2) * 10)

    def fit_input_stats(self, data):
        self.inputs_mu.data = torch.from_numpy(data.mean(0, keepdims=True)).float().to(self.inputs_mu.device)
        self.inputs_sigma.data = torch.from_numpy(np.maximum(data.std(0, keepdims=True), 1e-6)).float().to(self.inputs_mu.device)

    def compute_decays(self):
        weights = zip((2.5e-5, 5e-5, 7.5e-5, 1e-4), (self.lin0_w, self.lin1_w, self.lin2_w, self.lin3_w))
        return sum(factor * (weight ** 2).sum() / 2 for factor, weight in weights)

    def forward(self, inputs, ret_logvar=False):
        inputs = (inputs - self.inputs_mu) / self.inputs_sigma
        inputs = swish(inputs.matmul(self.lin0_w) + self.lin0_b)
        inputs = swish(inputs.matmul(self.lin1_w) + self.lin1_b)
        inputs = swish(inputs.matmul(self.lin2_w) + self.lin2_b)
        mean, logvar = (inputs.matmul(self.lin3_w) + self.lin3_b).chunk(2, dim=-1)
        logvar = self.max_logvar - F.softplus(self.max_logvar - logvar)
        logvar = self.min_logvar + F.softplus(logvar - self.min_logvar)
        return (mean, logvar) if ret_logvar else (mean, torch.exp(logvar))


class MPC:
    def __init__(self, dO, dU, validate_some, device):
        self.model = PtModel(5, dO + dU, 2 * dO).to(device)
        self.optim = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        self.train_in, self.train_targs = np.zeros((0, dO + dU)), np.zeros((0, dO))
        self.validate_some, self.device = validate_some, device

    def to_device(self, array):
        return torch.from_numpy(array).to(self.device).float()

    def train(self, obs_trajs, acs_trajs, epochs=2, batch_size=256):
        self.train_in = np.concatenate([self.train_in] + [np.concatenate([obs[:-1], acs], -1) for obs, acs in zip(obs_trajs, acs_trajs)])
        self.train_targs = np.concatenate([self.train_targs] + [obs[1:] - obs[:-1] for obs in obs_trajs])
        self.model.fit_input_stats(self.train_in)
        idxs = np.random.randint(len(self.train_in), size=[self.model.num_nets, len(self.train_in)])
        losses = []
        for _ in range(epochs):
            for batch_num in range(int(np.ceil(idxs.shape[-1] / batch_size))):
                batch_idxs = idxs[:, batch_num * batch_size:(batch_num + 1) * batch_size]
                loss = 0.01 * (self.model.max_logvar.sum() - self.model.min_logvar.sum()) + self.model.compute_decays()
                mean, logvar = self.model(self.to_device(self.train_in[batch_idxs]), ret_logvar=True)
                train_losses = (mean - self.to_device(self.train_targs[batch_idxs])) ** 2 * torch.exp(-logvar) + logvar
                loss = loss + train_losses.mean(-1).mean(-1).sum()
                self.optim.zero_grad()
                loss.backward()
                self.optim.step()
            idxs = np.stack([np.random.permutation(row) for row in idxs])
            val_idxs = idxs[:, :5000] if self.validate_some else idxs[:5000]
            val_in, val_targ = self.to_device(self.train_in[val_idxs]), self.to_device(self.train_targs[val_idxs])
            mean, _ = self.model(val_in)
            mse_losses = ((mean - val_targ) ** 2).mean(-1).mean(-1)
            losses.append(mse_losses.detach().cpu().numpy())
        return losses


@expected("growing_buffer", fix="limit|part", thread="quanvuong/handful-of-trials-pytorch#9", memory=900)
def learn_dynamics(fixed=False):
    """After each epoch `MPC.train` computes the validation loss on the whole data set instead of 5000 samples: `idxs[:5000]` slices the
    axis of the ensemble, so `val_in` holds all transitions collected so far for all networks and grows with each iteration. Cured by:
    validate on 5000 random samples, `idxs[:, :5000]`.
    """
    dO, dU, task_horizon = 18, 6, 1000
    policy, rng, history = MPC(dO, dU, fixed, torch.device("cuda")), np.random.default_rng(1), []
    for _ in range(5):
        obs_trajs = [rng.normal(size=(task_horizon + 1, dO)) for _ in range(4)]
        acs_trajs = [rng.uniform(-1, 1, size=(task_horizon, dU)) for _ in range(4)]
        history.append(policy.train(obs_trajs, acs_trajs)[-1])
    return len(history)


# A transformer learns codes of images, and some images are drawn for the log.

class MultiHeadSelfAttention(nn.Module):
    def __init__(self, embed_dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.key, self.query, self.value = (nn.Linear(embed_dim, embed_dim) for _ in range(3))
        self.proj = nn.Linear(embed_dim, embed_dim)

    def heads(self, x):
        return x.view(x.shape[0], x.shape[1], self.n_heads, -1).transpose(1, 2)

    def forward(self, x, layer_past=None):
        q, k, v = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        present = torch.stack([k, v])
        if layer_past is not None:
            k, v = torch.cat([layer_past[0], k], dim=-2), torch.cat([layer_past[1], v], dim=-2)
        att = q @ k.transpose(-2, -1) / math.sqrt(k.shape[-1])
        if layer_past is None:
            mask = torch.ones(att.shape[-2:], device=x.device, dtype=torch.bool).tril()
            att = att.masked_fill(~mask, float("-inf"))
        y = (F.softmax(att, dim=-1) @ v).transpose(1, 2).reshape(x.shape)
        return self.proj(y), present


class Block(nn.Module):
    def __init__(self, embed_dim, n_heads):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
        self.attn = MultiHeadSelfAttention(embed_dim, n_heads)
        self.mlp = nn.Sequential(nn.Linear(embed_dim, 4 * embed_dim), nn.GELU(), nn.Linear(4 * embed_dim, embed_dim))

    def forward(self, x, layer_past=None):
        attn, present = self.attn(self.ln1(x), layer_past)
        x = x + attn
        return x + self.mlp(self.ln2(x)), present


class GPT(nn.Module):
    def __init__(self, vocab_cond_size, vocab_img_size, embed_dim, img_num_tokens, n_heads, n_layers):
        super().__init__()
        self.img_num_tokens = img_num_tokens
        self.tok_emb_cond, self.tok_emb_code = nn.Embedding(vocab_cond_size, embed_dim), nn.Embedding(vocab_img_size, embed_dim)
        self.pos_emb_code = nn.Parameter(torch.zeros(1, img_num_tokens, embed_dim))
        self.blocks = nn.ModuleList(Block(embed_dim, n_heads) for _ in range(n_layers))
        self.layer_norm, self.head = nn.LayerNorm(embed_dim), nn.Linear(embed_dim, vocab_img_size, bias=False)

    def forward(self, codes, conds):
        x = torch.cat([self.tok_emb_cond(conds), self.tok_emb_code(codes) + self.pos_emb_code], 1)
        for block in self.blocks:
            x, _ = block(x)
        return self.head(self.layer_norm(x[:, :-1]))

    def sample_step(self, x, past):
        presents = []
        for i, block in enumerate(self.blocks):
            x, present = block(x, None if past is None else past[i])
            presents.append(present.detach())
        return self.head(self.layer_norm(x[:, -1:])), presents

    def sample(self, conds, top_k=None, softmax_temperature=1.0):
        past = codes = logits = None
        for i in range(self.img_num_tokens):
            x = self.tok_emb_cond(conds) if codes is None else self.tok_emb_code(codes[:, -1:]) + self.pos_emb_code[:, i - 1:i]
            logits_, presents = self.sample_step(x, past)
            logits_ = logits_ / softmax_temperature
            past = presents if past is None else [torch.cat([old, new], dim=-2) for old, new in zip(past, presents)]
            if top_k is not None:
                v, _ = torch.topk(logits_, top_k)
                logits_ = logits_.masked_fill(logits_ < v[..., -1:], -float("inf"))
            idx = torch.multinomial(F.softmax(logits_[:, -1].detach(), dim=-1), num_samples=1)
            codes = idx if codes is None else torch.cat([codes, idx], dim=1)
            logits = logits_ if logits is None else torch.cat([logits, logits_], dim=1)
        return logits, codes


class Stage1(nn.Module):
    def __init__(self, n_embed, dim=32, patch=16):
        super().__init__()
        self.embedding, self.patch = nn.Embedding(n_embed, dim), patch
        self.to_patch, self.to_pixels = nn.Conv2d(3, dim, patch, stride=patch), nn.ConvTranspose2d(dim, 3, patch, stride=patch)

    def encode_codes(self, images):
        return torch.cdist(self.to_patch(images).flatten(2).transpose(1, 2), self.embedding.weight[None]).argmin(-1)

    def decode_codes(self, codes):
        side = math.isqrt(codes.shape[1])
        return self.to_pixels(self.embedding(codes).transpose(1, 2).unflatten(2, (side, side)))


class CondTransformer(nn.Module):
    def __init__(self, no_grad_sampling):
        super().__init__()
        self.stage1_model = Stage1(1024).eval().requires_grad_(False)
        self.transformer = GPT(1000, 1024, 192, 256, 6, 4)
        self.no_grad_sampling = no_grad_sampling

    def sample(self, conds, top_k=100):
        with torch.set_grad_enabled(not self.no_grad_sampling):
            logits, codes = self.transformer.sample(conds, top_k=top_k)
            return self.stage1_model.decode_codes(codes).clamp(0, 1)

    def training_step(self, images, conds):
        codes = self.stage1_model.encode_codes(images).detach()
        logits = self.transformer(codes, conds)
        return F.cross_entropy(logits.flatten(0, 1), codes.flatten())

    def log_images(self, conds):
        return {"first samples": self.sample(conds).detach().cpu(), "second samples": self.sample(conds).detach().cpu()}


@expected("evaluation_keeps_graphs", fix="no_grad", thread="thuanz123/enhancing-transformers#7", memory=500)
def train_image_gpt(fixed=False):
    """The sampling for the logged images (`CondTransformer.sample`, called from `log_images`) is not under `torch.no_grad()`: the graph of
    every sampled token, with the keys and values concatenated anew at each step, is kept through `logits`, to which each step's `logits_`
    is concatenated. Cured by: `@torch.no_grad()` on `sample`.
    """
    model = CondTransformer(fixed).cuda()
    optimizer = torch.optim.Adam(model.transformer.parameters(), lr=4.5e-4, betas=(0.9, 0.96))
    for step in range(12):
        images, conds = torch.rand(4, 3, 256, 256).cuda(), torch.randint(1000, (4, 1)).cuda()
        loss = model.training_step(images, conds)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        del loss
        if step == 7:
            log = model.log_images(conds)
    return log["first samples"].shape


# A detector of objects: training, and after each epoch a test.

def conv_bn(dim_in, dim_out, kernel=3, stride=1):
    return nn.Sequential(nn.Conv2d(dim_in, dim_out, kernel, stride, kernel // 2, bias=False), nn.BatchNorm2d(dim_out), nn.LeakyReLU(0.1, inplace=True))


class Shortcut(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.layers = nn.Sequential(conv_bn(dim, dim // 2, 1), conv_bn(dim // 2, dim))

    def forward(self, x):
        return x + self.layers(x)


class Darknet(nn.Module):
    def __init__(self, nc=3, width=16, anchors=3):
        super().__init__()
        self.no, self.na = nc + 5, anchors
        self.stem = conv_bn(3, width)
        self.stages = nn.ModuleList(nn.Sequential(conv_bn(width << i, width << (i + 1), stride=2), Shortcut(width << (i + 1))) for i in range(5))
        self.heads = nn.ModuleList(nn.Conv2d(width << i, anchors * self.no, 1) for i in (3, 4, 5))

    def forward(self, x):
        x, outputs = self.stem(x), []
        for stage in self.stages:
            x = stage(x)
            outputs.append(x)
        grids = [head(out) for head, out in zip(self.heads, outputs[-3:])]
        return [grid.view(len(grid), self.na, self.no, *grid.shape[2:]).permute(0, 1, 3, 4, 2) for grid in grids]


class LoadImagesAndLabels(Dataset):
    def __init__(self, number, img_size):
        self.number, self.img_size = number, img_size

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        return torch.full((3, self.img_size, self.img_size), 0.5), torch.rand(20, 5)


def compute_loss(predictions, targets):
    loss = 0
    for p in predictions:
        wanted = torch.zeros_like(p)
        wanted[:, :, :1, :1, :4] = targets[:, None, None, :1, :4]
        loss = loss + F.mse_loss(p[..., :4].sigmoid(), wanted[..., :4]) + F.binary_cross_entropy_with_logits(p[..., 4:], wanted[..., 4:])
    return loss


def test(model, batch_size=32, img_size=416, conf_thres=0.5, number=128):
    model.eval()
    mean_loss, kept = 0.0, 0
    with torch.no_grad():
        for imgs, targets in DataLoader(LoadImagesAndLabels(number, img_size), batch_size=batch_size):
            predictions = model(imgs.cuda())
            mean_loss += compute_loss(predictions, targets.cuda()).item()
            boxes = torch.cat([p.reshape(len(p), -1, model.no) for p in predictions], 1)
            best = boxes[..., 4].sigmoid().topk(100, dim=1)
            kept += best.values.cpu().gt(conf_thres).numel()
    return mean_loss, kept


@expected("batch_without_gradients", fix="split|part", thread="ultralytics/yolov3#46", memory=600)
def train_detector(fixed=False):
    """Training fits, but the test that follows each epoch still runs with its own default settings: `test` takes a batch of `batch_size=32`
    images at once, much more than training does. Cured by: give `test` settings that suit the card (a smaller `batch_size`).
    """
    opt = types.SimpleNamespace(epochs=2, batch_size=2, img_size=416)
    model = Darknet().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    results = []
    for epoch in range(opt.epochs):
        model.train()
        for imgs, targets in DataLoader(LoadImagesAndLabels(24, opt.img_size), batch_size=opt.batch_size):
            loss = compute_loss(model(imgs.cuda()), targets.cuda())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(test(model, batch_size=opt.batch_size) if fixed else test(model))
    return results


# Faces from a generator with styles.

class EqualConv2d(nn.Module):
    def __init__(self, dim_in, dim_out, kernel):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim_out, dim_in, kernel, kernel))
        self.bias = nn.Parameter(torch.zeros(dim_out))
        self.scale, self.padding = math.sqrt(2 / (dim_in * kernel ** 2)), kernel // 2

    def forward(self, x):
        return F.conv2d(x, self.weight * self.scale, self.bias, padding=self.padding)


class AdaptiveInstanceNorm(nn.Module):
    def __init__(self, dim, style_dim):
        super().__init__()
        self.norm, self.style = nn.InstanceNorm2d(dim), nn.Linear(style_dim, 2 * dim)

    def forward(self, x, style):
        gamma, beta = self.style(style)[:, :, None, None].chunk(2, 1)
        return gamma * self.norm(x) + beta


class StyledConvBlock(nn.Module):
    def __init__(self, dim_in, dim_out, style_dim, upsample=True):
        super().__init__()
        self.upsample = upsample
        self.conv1, self.conv2 = EqualConv2d(dim_in, dim_out, 3), EqualConv2d(dim_out, dim_out, 3)
        self.noise1, self.noise2 = nn.Parameter(torch.zeros(1, dim_out, 1, 1)), nn.Parameter(torch.zeros(1, dim_out, 1, 1))
        self.adain1, self.adain2 = AdaptiveInstanceNorm(dim_out, style_dim), AdaptiveInstanceNorm(dim_out, style_dim)

    def forward(self, x, style, noise):
        if self.upsample:
            x = F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
        x = self.adain1(F.leaky_relu(self.conv1(x) + self.noise1 * noise, 0.2), style)
        return self.adain2(F.leaky_relu(self.conv2(x) + self.noise2 * noise, 0.2), style)


class StyledGenerator(nn.Module):
    def __init__(self, code_dim=256, channels=(128, 128, 128, 128, 64, 32, 16)):
        super().__init__()
        self.constant = nn.Parameter(torch.randn(1, channels[0], 4, 4))
        self.style = nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(code_dim, code_dim), nn.LeakyReLU(0.2))])
        dims = (channels[0],) + channels[:-1]
        self.progression = nn.ModuleList(StyledConvBlock(i, o, code_dim, upsample=n > 0) for n, (i, o) in enumerate(zip(dims, channels)))
        self.to_rgb = nn.ModuleList(EqualConv2d(channel, 3, 1) for channel in channels)

    def mean_style(self, code):
        return self.style(code).mean(0, keepdim=True)

    def forward(self, code, noise, step, mean_style, style_weight=0.7):
        style = mean_style + style_weight * (self.style(code) - mean_style)
        out = self.constant.repeat(len(code), 1, 1, 1)
        for block, noise_map in zip(self.progression[:step + 1], noise):
            out = block(out, style, noise_map)
        return self.to_rgb[step](out)


@torch.no_grad()
def get_mean_style(generator, device):
    styles = [generator.mean_style(torch.randn(1024, 256, device=device)) for _ in range(10)]
    return torch.stack(styles).mean(0)


@torch.no_grad()
def sample(generator, step, mean_style, n_sample, device):
    noise = [torch.randn(n_sample, 1, 4 << i, 4 << i, device=device) for i in range(step + 1)]
    return generator(torch.randn(n_sample, 256, device=device), noise, step, mean_style)


def make_grid(images, n_col):
    rows = [torch.cat(list(images[begin:begin + n_col]), -1) for begin in range(0, len(images), n_col)]
    return torch.cat(rows, -2)


@expected("batch_without_gradients", fix="split|part", thread="rosinality/style-based-gan-pytorch#96", memory=600)
def generate_faces(fixed=False):
    """`generate` makes all `n_row * n_col` pictures in a single batch (already without autograd); that many samples at the full resolution
    are too much for the card. Cured by: fewer samples, smaller `--n_row` and `--n_col`.
    """
    args = types.SimpleNamespace(size=256, n_row=1 if fixed else 4, n_col=4 if fixed else 6)
    device = torch.device("cuda")
    generator = StyledGenerator().to(device).eval()
    mean_style = get_mean_style(generator, device)
    step = int(math.log2(args.size)) - 2
    sheets = []
    for _ in range(3):
        img = sample(generator, step, mean_style, args.n_row * args.n_col, device)
        sheets.append(make_grid(img.cpu(), args.n_col).shape)
    return sheets


# Demand of many products is predicted, with quantiles.

class TemporalFusion(nn.Module):
    def __init__(self, hidden_size=64, encoder_length=48, prediction_length=24, num_inputs=40, quantiles=7):
        super().__init__()
        self.encoder_length, self.prediction_length = encoder_length, prediction_length
        self.embed, self.known = nn.Linear(num_inputs, hidden_size), nn.Linear(num_inputs, hidden_size)
        self.select = nn.Linear(num_inputs, num_inputs)
        self.lstm_encoder, self.lstm_decoder = nn.LSTM(hidden_size, hidden_size, batch_first=True), nn.LSTM(hidden_size, hidden_size, batch_first=True)
        self.query, self.keys = nn.Linear(hidden_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.output_layer = nn.Linear(2 * hidden_size, quantiles)

    def forward(self, x):
        weights_past, weights_future = self.select(x["encoder_cont"]).softmax(-1), self.select(x["decoder_cont"]).softmax(-1)
        past, state = self.lstm_encoder(self.embed(x["encoder_cont"] * weights_past))
        future, _ = self.lstm_decoder(self.known(x["decoder_cont"] * weights_future), state)
        attention = (self.query(future) @ self.keys(past).transpose(1, 2) / 8).softmax(-1)
        prediction = self.output_layer(torch.cat([future, attention @ past], -1))
        return {"prediction": prediction, "attention": attention, "encoder_variables": weights_past, "decoder_variables": weights_future}


def move_to_device(x, device):
    if isinstance(x, dict):
        return {key: move_to_device(value, device) for key, value in x.items()}
    return x.to(device)


def detach(x):
    if isinstance(x, dict):
        return {key: detach(value) for key, value in x.items()}
    return x.detach()


class PredictCallback:
    def __init__(self, return_info, to_cpu):
        self.return_info, self.to_cpu = return_info, to_cpu
        self.predictions, self.info = [], {name: [] for name in return_info}

    def keep(self, value):
        return move_to_device(detach(value), "cpu") if self.to_cpu else value

    def on_predict_batch_end(self, out, x, y):
        self.predictions.append(self.keep(out))
        for name in self.return_info:
            self.info[name].append(self.keep({"x": x, "y": y, "decoder_lengths": x["decoder_lengths"]}[name]))

    def result(self):
        self.output = {key: torch.cat([move_to_device(out[key], "cpu") for out in self.predictions]) for key in self.predictions[0]}
        return self.output


class TimeSeriesDataSet(Dataset):
    def __init__(self, number, num_inputs=40, encoder_length=48, prediction_length=24):
        self.number = number
        self.series = torch.rand(64, encoder_length + prediction_length, num_inputs)
        self.encoder_length, self.prediction_length = encoder_length, prediction_length

    def __len__(self):
        return self.number

    def __getitem__(self, index):
        series = self.series[index % 64]
        x = {"encoder_cont": series[:self.encoder_length], "decoder_cont": series[self.encoder_length:],
             "decoder_lengths": torch.tensor(self.prediction_length)}
        return x, series[self.encoder_length:, 0]


@expected("kept_tensors", fix=r"\.cpu\(\)", thread="sktime/pytorch-forecasting#2228", memory=450)
def predict_demand(fixed=False):
    """`PredictCallback.on_predict_batch_end` appends the raw output of each batch and its inputs `x` (`return_x`) as they are, on the GPU,
    so they pile up over the whole prediction run. Cured by: detach them and move them to the CPU when they are appended.
    """
    device = torch.device("cuda")
    model = TemporalFusion().to(device).eval()
    callback = PredictCallback(["x", "y", "decoder_lengths"], to_cpu=fixed)
    with torch.no_grad():
        for x, y in DataLoader(TimeSeriesDataSet(24000), batch_size=512):
            x, y = move_to_device(x, device), y.to(device)
            callback.on_predict_batch_end(model(x), x, y)
    return callback.result()["prediction"].shape
