"""Programs after public threads about images and video."""

import torch
from torch import nn
from torch.nn import functional as F

from expected import expected

# Faces: a DCGAN, of which some samples are kept after each epoch to be looked at later.


class Discriminator(nn.Module):
    def __init__(self, conv_dim=32):
        super().__init__()
        self.conv1 = nn.Conv2d(3, conv_dim, 4, 2, 1)
        self.conv2 = nn.Conv2d(conv_dim, conv_dim * 2, 4, 2, 1, bias=False)
        self.conv3 = nn.Conv2d(conv_dim * 2, conv_dim * 4, 4, 2, 1, bias=False)
        self.bn2, self.bn3 = nn.BatchNorm2d(conv_dim * 2), nn.BatchNorm2d(conv_dim * 4)
        self.fc = nn.Linear(conv_dim * 4 * 8 * 8, 1)

    def forward(self, x):
        out = F.leaky_relu(self.conv1(x), 0.2)
        out = F.leaky_relu(self.bn2(self.conv2(out)), 0.2)
        out = F.leaky_relu(self.bn3(self.conv3(out)), 0.2)
        return self.fc(out.flatten(1))


class Generator(nn.Module):
    def __init__(self, z_size=100, conv_dim=64):
        super().__init__()
        self.conv_dim = conv_dim
        self.fc = nn.Linear(z_size, conv_dim * 8 * 4 * 4)
        self.t_conv1 = nn.ConvTranspose2d(conv_dim * 8, conv_dim * 4, 4, 2, 1, bias=False)
        self.t_conv2 = nn.ConvTranspose2d(conv_dim * 4, conv_dim * 2, 4, 2, 1, bias=False)
        self.t_conv3 = nn.ConvTranspose2d(conv_dim * 2, conv_dim, 4, 2, 1, bias=False)
        self.t_conv4 = nn.ConvTranspose2d(conv_dim, 3, 4, 2, 1)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(conv_dim * k) for k in (4, 2, 1))

    def forward(self, z):
        out = self.fc(z).view(-1, self.conv_dim * 8, 4, 4)
        out = F.relu(self.bn1(self.t_conv1(out)))
        out = F.relu(self.bn2(self.t_conv2(out)))
        out = F.relu(self.bn3(self.t_conv3(out)))
        return torch.tanh(self.t_conv4(out))


def real_loss(D_out):
    return F.binary_cross_entropy_with_logits(D_out, torch.full_like(D_out, 0.9))


def fake_loss(D_out):
    return F.binary_cross_entropy_with_logits(D_out, torch.zeros_like(D_out))


@expected("graph_of_earlier_steps", fix=r"detach|item\(\)", thread="udacity/deep-learning-v2-pytorch#106", memory=1000)
def train_face_gan(fixed=False, n_epochs=30, sample_size=64, z_size=100):
    """After each epoch `train_face_gan` appends `samples_z = G(fixed_z)` to `samples` as it comes out of the generator, with its autograd
    graph, so the activations of every sampling pass of all epochs stay on the GPU. Cured by: sampling under `torch.no_grad()` and keeping
    `samples_z.detach().cpu()`.
    """
    D, G = Discriminator().cuda(), Generator(z_size).cuda()
    d_optimizer = torch.optim.Adam(D.parameters(), 2e-4, (0.5, 0.999))
    g_optimizer = torch.optim.Adam(G.parameters(), 2e-4, (0.5, 0.999))
    celeba_train_loader = [torch.rand(32, 3, 64, 64) for _ in range(3)]
    fixed_z = torch.rand(sample_size, z_size).cuda() * 2 - 1
    samples, losses = [], []
    for epoch in range(n_epochs):
        for real_images in celeba_train_loader:
            real_images = real_images.cuda() * 2 - 1
            d_optimizer.zero_grad()
            z = torch.rand(len(real_images), z_size, device="cuda") * 2 - 1
            d_loss = real_loss(D(real_images)) + fake_loss(D(G(z).detach()))
            d_loss.backward()
            d_optimizer.step()
            g_optimizer.zero_grad()
            z = torch.rand(len(real_images), z_size, device="cuda") * 2 - 1
            g_loss = real_loss(D(G(z)))
            g_loss.backward()
            g_optimizer.step()
        losses.append((d_loss.item(), g_loss.item()))
        G.eval()
        if fixed:
            with torch.no_grad():
                samples_z = G(fixed_z)
                samples.append(samples_z.detach().cpu())
        else:
            samples_z = G(fixed_z)
            samples.append(samples_z)
        G.train()
    return len(samples), losses[-1]


# Enlargement of photos by a network, tile by tile.


class ResidualDenseBlock(nn.Module):
    def __init__(self, num_feat=32, num_grow_ch=16):
        super().__init__()
        self.conv1 = nn.Conv2d(num_feat, num_grow_ch, 3, 1, 1)
        self.conv2 = nn.Conv2d(num_feat + num_grow_ch, num_feat, 3, 1, 1)

    def forward(self, x):
        x1 = F.leaky_relu(self.conv1(x), 0.2)
        return self.conv2(torch.cat((x, x1), 1)) * 0.2 + x


class RRDBNet(nn.Module):
    def __init__(self, num_feat=32, num_block=3):
        super().__init__()
        self.conv_first = nn.Conv2d(3, num_feat, 3, 1, 1)
        self.body = nn.Sequential(*(ResidualDenseBlock(num_feat) for _ in range(num_block)))
        self.conv_up, self.conv_last = nn.Conv2d(num_feat, num_feat, 3, 1, 1), nn.Conv2d(num_feat, 3, 3, 1, 1)

    def forward(self, x):
        feat = self.conv_first(x)
        feat = feat + self.body(feat)
        feat = F.leaky_relu(self.conv_up(F.interpolate(feat, scale_factor=2, mode="nearest")), 0.2)
        return self.conv_last(feat)


class RealESRGANer:
    def __init__(self, scale=2, tile=400, tile_pad=10, pre_pad=10):
        self.scale, self.tile_size, self.tile_pad, self.pre_pad = scale, tile, tile_pad, pre_pad
        self.device = torch.device("cuda")
        self.model = RRDBNet().eval().to(self.device)

    def pre_process(self, img):
        img = img.permute(2, 0, 1).float() / 255
        self.img = img.unsqueeze(0).to(self.device)
        if self.pre_pad != 0:
            self.img = F.pad(self.img, (0, self.pre_pad, 0, self.pre_pad), "reflect")

    def process(self):
        self.output = self.model(self.img)

    def tiles(self, height, width):
        for y in range(0, height, self.tile_size):
            for x in range(0, width, self.tile_size):
                y_end, x_end = min(y + self.tile_size, height), min(x + self.tile_size, width)
                yield y, x, y_end, x_end, max(y - self.tile_pad, 0), max(x - self.tile_pad, 0)

    def place(self, output_tile, y, x, y_end, x_end, y_pad, x_pad):
        s, top, left = self.scale, (y - y_pad) * self.scale, (x - x_pad) * self.scale
        return output_tile[:, :, top : top + (y_end - y) * s, left : left + (x_end - x) * s]

    def tile_process(self):
        batch, channel, height, width = self.img.shape
        self.output = self.img.new_zeros(batch, channel, height * self.scale, width * self.scale)
        for y, x, y_end, x_end, y_pad, x_pad in self.tiles(height, width):
            input_tile = self.img[:, :, y_pad : y_end + self.tile_pad, x_pad : x_end + self.tile_pad]
            output_tile = self.place(self.model(input_tile), y, x, y_end, x_end, y_pad, x_pad)
            self.output[:, :, y * self.scale : y_end * self.scale, x * self.scale : x_end * self.scale] = output_tile

    @torch.no_grad()
    def enhance(self, img):
        self.pre_process(img)
        if self.tile_size > 0:
            self.tile_process()
        else:
            self.process()
        output_img = self.output.squeeze(0).clamp(0, 1).mul(255).round().byte()
        return output_img.cpu().permute(1, 2, 0)


def enhance_by_tile_generator(upsampler, img):
    height, width, _ = img.shape
    s, pad = upsampler.scale, upsampler.tile_pad
    stitched = torch.zeros(height * s, width * s, 3, dtype=torch.uint8)
    grid = list(upsampler.tiles(height, width))
    upsampler.tile_size = upsampler.pre_pad = 0
    for y, x, y_end, x_end, y_pad, x_pad in grid:
        piece = upsampler.enhance(img[y_pad : y_end + pad, x_pad : x_end + pad])
        top, left = (y - y_pad) * s, (x - x_pad) * s
        stitched[y * s : y_end * s, x * s : x_end * s] = piece[top : top + (y_end - y) * s, left : left + (x_end - x) * s]
    return stitched


@expected("data_on_gpu", fix=r"on the host|\.cpu\(\)|DataLoader|part", thread="xinntao/Real-ESRGAN#184", memory=600)
def enlarge_photo(fixed=False):
    """`pre_process` uploads the whole photo as float to the GPU (and `F.pad` copies it there once more) before `tile_process` cuts
    anything, so the size of the tiles does not help: the image itself is too large. Cured by: cutting and padding the tiles on the host and
    giving the upsampler one tile at a time, stitching the results on the host.
    """
    upsampler = RealESRGANer(scale=2, tile=400)
    img = torch.randint(0, 256, (5200, 5200, 3), dtype=torch.uint8)
    output = enhance_by_tile_generator(upsampler, img) if fixed else upsampler.enhance(img)
    return tuple(output.shape)


# Finding faults in pictures of products: patches are compared with a bank of good ones.


class PatchcoreModel(nn.Module):
    def __init__(self, num_neighbors=9):
        super().__init__()
        self.layer1 = nn.Sequential(nn.Conv2d(3, 64, 7, 4, 3), nn.ReLU())
        self.layer2 = nn.Sequential(nn.Conv2d(64, 512, 3, 2, 1), nn.ReLU())
        self.layer3 = nn.Sequential(nn.Conv2d(512, 1024, 3, 2, 1), nn.ReLU())
        self.num_neighbors = num_neighbors
        self.register_buffer("memory_bank", torch.empty(0))

    def generate_embedding(self, input_tensor):
        layer2 = self.layer2(self.layer1(input_tensor))
        layer3 = F.interpolate(self.layer3(layer2), layer2.shape[-2:], mode="bilinear", align_corners=False)
        embedding = torch.cat((layer2, layer3), 1)
        return embedding.permute(0, 2, 3, 1).reshape(-1, embedding.shape[1])

    def subsample_embedding(self, embeddings, sampling_ratio):
        chosen = torch.randperm(len(embeddings))[: int(len(embeddings) * sampling_ratio)]
        self.memory_bank = embeddings[chosen.to(embeddings.device)]

    @staticmethod
    def euclidean_dist(x, y):
        x_norm, y_norm = x.pow(2).sum(-1, keepdim=True), y.pow(2).sum(-1, keepdim=True)
        res = x_norm - 2 * torch.matmul(x, y.t()) + y_norm.t()
        return res.clamp_min_(0).sqrt_()

    def forward(self, input_tensor):
        embedding = self.generate_embedding(input_tensor)
        if self.training:
            return embedding
        distances = self.euclidean_dist(embedding, self.memory_bank)
        patch_scores = distances.topk(self.num_neighbors, largest=False, dim=1).values[:, 0]
        return patch_scores.view(len(input_tensor), -1).amax(1)


class Patchcore:
    def __init__(self, coreset_sampling_ratio=0.1, revised=False):
        self.model = PatchcoreModel().cuda()
        self.coreset_sampling_ratio, self.revised = coreset_sampling_ratio, revised
        self.embeddings = []

    def training_step(self, batch):
        self.embeddings.append(self.model(batch.cuda()))

    def fit(self):
        embeddings = torch.vstack(self.embeddings)
        self.model.subsample_embedding(embeddings, self.coreset_sampling_ratio)
        if self.revised:
            self.embeddings.clear()

    def validation_step(self, batch):
        return self.model(batch.cuda()).cpu()


@expected("kept_tensors", fix=r"\.cpu\(\)|\bdel\b|None", thread="open-edge-platform/anomalib#2806", memory=1200)
@torch.no_grad()
def fit_patchcore(fixed=False):
    """After `fit` has chosen the coreset for `memory_bank`, the embeddings of all the training batches are still in the list
    `self.embeddings` on the GPU (about 370 MiB), although nobody needs them any more, and validation (the distance matrix of
    `euclidean_dist`) no longer has room. Cured by: deleting the collected embeddings once the memory bank is built.
    """
    engine = Patchcore(revised=fixed)
    train_data = [torch.rand(8, 3, 224, 224) for _ in range(10)]
    val_data = [torch.rand(12, 3, 224, 224) for _ in range(3)]
    engine.model.train()
    for batch in train_data:
        engine.training_step(batch)
    engine.fit()
    engine.model.eval()
    scores = torch.cat([engine.validation_step(batch) for batch in val_data])
    return len(scores)


# A portrait edited by a sentence: the latent code of a picture is optimized against a text.


class StyledConv(nn.Module):
    def __init__(self, in_channel, out_channel, style_dim=512, upsample=False):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, out_channel, in_channel, 3, 3) / (in_channel * 9) ** 0.5)
        self.modulation, self.upsample = nn.Linear(style_dim, in_channel), upsample
        self.noise_weight = nn.Parameter(torch.zeros(1))

    def forward(self, input, style):
        if self.upsample:
            input = F.interpolate(input, scale_factor=2, mode="bilinear")
        batch, in_channel, height, width = input.shape
        weight = self.weight * self.modulation(style).view(batch, 1, in_channel, 1, 1)
        demod = torch.rsqrt(weight.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8)
        weight = (weight * demod).view(-1, in_channel, 3, 3)
        out = F.conv2d(input.reshape(1, -1, height, width), weight, padding=1, groups=batch)
        out = out.view(batch, -1, height, width)
        noise = torch.randn(batch, 1, height, width, device=out.device)
        return F.leaky_relu(out + self.noise_weight * noise, 0.2)


class StyleGenerator(nn.Module):
    def __init__(self, channels=(256, 256, 256, 256, 128, 64, 32), style_dim=512):
        super().__init__()
        self.input = nn.Parameter(torch.randn(1, channels[0], 4, 4))
        self.conv1 = StyledConv(channels[0], channels[0], style_dim)
        self.convs = nn.ModuleList()
        for in_channel, out_channel in zip(channels, channels[1:]):
            self.convs.append(StyledConv(in_channel, out_channel, style_dim, upsample=True))
            self.convs.append(StyledConv(out_channel, out_channel, style_dim))
        self.to_rgb = nn.Conv2d(channels[-1], 3, 1)
        self.n_latent = len(self.convs) + 1

    def forward(self, styles):
        latent = styles[0]
        if latent.ndim < 3:
            latent = latent.unsqueeze(1).repeat(1, self.n_latent, 1)
        out = self.conv1(self.input.repeat(latent.shape[0], 1, 1, 1), latent[:, 0])
        for i, conv in enumerate(self.convs, 1):
            out = conv(out, latent[:, i])
        return self.to_rgb(out), latent


class CLIPLoss(nn.Module):
    def __init__(self, stylegan_size, width=256):
        super().__init__()
        self.upsample, self.avg_pool = nn.Upsample(scale_factor=7), nn.AvgPool2d(stylegan_size // 32)
        self.visual = nn.Sequential(nn.Conv2d(3, width, 32, 32), nn.Flatten(2))
        self.proj = nn.Linear(width, 512)

    def forward(self, image, text):
        image = self.avg_pool(self.upsample(image))
        image_features = self.proj(self.visual(image).mean(-1))
        return 1 - F.cosine_similarity(image_features, text.expand_as(image_features)).mean()


def load_latent(own_latent, revised):
    latent = torch.load(own_latent) if isinstance(own_latent, str) else own_latent
    return latent.unsqueeze(0) if revised else latent


@expected("wrong_shape", fix="unsqueeze", thread="orpatashnik/StyleCLIP#11", memory=1000)
def edit_portrait(fixed=False, step=20):
    """The own latent code has the shape [n_latent, 512] without a batch dimension, so the generator takes its 13 rows for 13 different
    latents (`latent.ndim < 3`, each repeated) and makes 13 images at once instead of one. Cured by: `.unsqueeze(0)` on the latent code
    before it's used.
    """
    g_ema = StyleGenerator().eval().requires_grad_(False).cuda()
    clip_loss = CLIPLoss(stylegan_size=256).requires_grad_(False).cuda()
    own_latent = torch.randn(g_ema.n_latent, 512)
    latent_code_init = load_latent(own_latent, revised=fixed).cuda()
    text_features = torch.randn(1, 512).cuda()
    latent = latent_code_init.detach().clone().requires_grad_(True)
    optimizer = torch.optim.Adam([latent], lr=0.1)
    for i in range(step):
        img_gen, _ = g_ema([latent])
        c_loss = clip_loss(img_gen, text_features)
        l2_loss = ((latent_code_init - latent) ** 2).sum()
        loss = c_loss + 0.008 * l2_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return tuple(img_gen.shape)


# Panoramas from text: small layers between two branches of a diffusion model are trained.


class ResnetBlock2D(nn.Module):
    def __init__(self, channels, temb_channels=256):
        super().__init__()
        self.norm1, self.norm2 = nn.GroupNorm(32, channels), nn.GroupNorm(32, channels)
        self.conv1, self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1), nn.Conv2d(channels, channels, 3, 1, 1)
        self.time_emb_proj = nn.Linear(temb_channels, channels)

    def forward(self, x, temb):
        h = self.conv1(F.silu(self.norm1(x))) + self.time_emb_proj(temb)[:, :, None, None]
        return x + self.conv2(F.silu(self.norm2(h)))


class UNet2DConditionModel(nn.Module):
    def __init__(self, channels=640, blocks=6):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, channels, 3, 2, 1), nn.ConvTranspose2d(channels, 4, 2, 2)
        self.resnets = nn.ModuleList(ResnetBlock2D(channels) for _ in range(blocks))


class WarpAttn(nn.Module):
    def __init__(self, dim, rank=64):
        super().__init__()
        self.down, self.up = nn.Conv2d(2 * dim, rank, 1), nn.Conv2d(rank, 2 * dim, 1)

    def forward(self, pers_x, equi_x):
        joint = torch.cat((pers_x, equi_x), 1)
        return (joint + self.up(F.silu(self.down(joint)))).chunk(2, 1)


class MultiViewBaseModel(nn.Module):
    def __init__(self, unet, pano_unet):
        super().__init__()
        self.unet, self.pano_unet = unet, pano_unet
        channels = unet.conv_in.out_channels
        self.cp_blocks = nn.ModuleList(WarpAttn(channels) for _ in unet.resnets)
        self.trainable_parameters = list(self.cp_blocks.parameters())

    def forward(self, latents, pano_latent, temb):
        pers_x, equi_x = self.unet.conv_in(latents), self.pano_unet.conv_in(pano_latent)
        for resnet, pano_resnet, cp_block in zip(self.unet.resnets, self.pano_unet.resnets, self.cp_blocks):
            pers_x, equi_x = cp_block(resnet(pers_x, temb), pano_resnet(equi_x, temb))
        return self.unet.conv_out(pers_x), self.pano_unet.conv_out(equi_x)


class PanFusion:
    def __init__(self, revised):
        unet, pano_unet = UNet2DConditionModel(), UNet2DConditionModel()
        if revised:
            unet.requires_grad_(False)
            pano_unet.requires_grad_(False)
        self.mv_base_model = MultiViewBaseModel(unet, pano_unet).cuda()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.mv_base_model.trainable_parameters, lr=1e-4)

    def training_step(self, batch):
        latents, pano_latent, temb = (value.cuda() for value in batch)
        noise, pano_noise = torch.randn_like(latents), torch.randn_like(pano_latent)
        denoise, pano_denoise = self.mv_base_model(latents + noise, pano_latent + pano_noise, temb)
        return F.mse_loss(denoise, noise) + F.mse_loss(pano_denoise, pano_noise)


@expected("gradients_of_frozen", fix="requires_grad", thread="chengzhag/PanFusion#17", memory=1000)
def train_panorama(fixed=False, steps=4):
    """Only the `WarpAttn` blocks are trained, but the parameters of `unet` and `pano_unet` still require gradients; they aren't in the
    optimizer, yet backward computes and keeps a `.grad` as large as the weights for them (and saves activations for it). Cured by:
    `requires_grad_(False)` on both UNets.
    """
    module = PanFusion(revised=fixed)
    optimizer = module.configure_optimizers()
    for _ in range(steps):
        loss = module.training_step((torch.randn(2, 4, 32, 32), torch.randn(2, 4, 32, 32), torch.randn(2, 256)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()
