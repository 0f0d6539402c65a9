"""Small programs after public threads from all fields."""
import gc
import random
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
from transformers import CLIPConfig, CLIPModel, CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaForCausalLM

from expected import expected


# Papers of a citation graph are classified with dense graph attention.

class GraphAttentionLayer(nn.Module):
    def __init__(self, in_features, out_features, dropout, alpha, concat, broadcast):
        super().__init__()
        self.out_features, self.dropout, self.concat, self.broadcast = out_features, dropout, concat, broadcast
        self.W = nn.Parameter(nn.init.xavier_uniform_(torch.empty(in_features, out_features), gain=1.414))
        self.a = nn.Parameter(nn.init.xavier_uniform_(torch.empty(2 * out_features, 1), gain=1.414))
        self.leakyrelu = nn.LeakyReLU(alpha)

    def _prepare_attentional_mechanism_input(self, Wh):
        if self.broadcast:
            from_node = Wh @ self.a[:self.out_features]
            to_node = Wh @ self.a[self.out_features:]
            return self.leakyrelu(from_node + to_node.T)
        nodes = len(Wh)
        left = Wh.repeat_interleave(nodes, dim=0)
        right = Wh.repeat(nodes, 1)
        pairs = torch.cat([left, right], dim=1).view(nodes, nodes, 2 * self.out_features)
        return self.leakyrelu((pairs @ self.a).squeeze(2))

    def forward(self, h, adj):
        Wh = h @ self.W
        e = self._prepare_attentional_mechanism_input(Wh)
        attention = e.masked_fill(adj == 0, -9e15).softmax(dim=1)
        h_prime = F.dropout(attention, self.dropout, self.training) @ Wh
        return F.elu(h_prime) if self.concat else h_prime


class GAT(nn.Module):
    def __init__(self, nfeat, nhid, nclass, dropout, alpha, nheads, broadcast):
        super().__init__()
        self.dropout = dropout
        layer = partial(GraphAttentionLayer, dropout=dropout, alpha=alpha, broadcast=broadcast)
        self.attentions = nn.ModuleList(layer(nfeat, nhid, concat=True) for _ in range(nheads))
        self.out_att = layer(nhid * nheads, nclass, concat=False)

    def forward(self, x, adj):
        x = F.dropout(x, self.dropout, self.training)
        x = torch.cat([att(x, adj) for att in self.attentions], dim=1)
        x = F.dropout(x, self.dropout, self.training)
        return F.log_softmax(F.elu(self.out_att(x, adj)), dim=1)


def load_cora(num_papers, num_words, num_classes):
    rng = np.random.default_rng(72)
    adj = np.eye(num_papers, dtype=np.float32)
    cited = rng.integers(0, num_papers, (2, 3 * num_papers))
    adj[cited[0], cited[1]] = adj[cited[1], cited[0]] = 1
    features = torch.from_numpy((rng.random((num_papers, num_words)) < 0.02).astype(np.float32))
    return torch.from_numpy(adj), features, torch.from_numpy(rng.integers(0, num_classes, num_papers))


@expected("all_pairs", fix=r"broadcast|\.T\b", thread="diegoantognini/pyGAT#63", memory=600, held_back=True)
def train_citation_gat(fixed=False):
    """`_prepare_attentional_mechanism_input` repeats `Wh` for every pair of nodes and concatenates the two copies to `pairs` (nodes × nodes
    × 2·out_features), once per attention head, although the scores need only a sum of two vectors; autograd keeps `pairs` of every head
    until the backward. Cured by: Add the two halves of the score by broadcasting (`from_node + to_node.T`).
    """
    adj, features, labels = load_cora(1500, 700, 7)
    idx_train, idx_val = torch.arange(140).cuda(), torch.arange(200, 500).cuda()
    model = GAT(features.shape[1], 8, 7, dropout=0.6, alpha=0.2, nheads=6, broadcast=fixed).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.005, weight_decay=5e-4)
    features, adj, labels = features.cuda(), adj.cuda(), labels.cuda()
    for epoch in range(5):
        model.train()
        optimizer.zero_grad()
        output = model(features, adj)
        loss_train = F.nll_loss(output[idx_train], labels[idx_train])
        loss_train.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            loss_val = F.nll_loss(model(features, adj)[idx_val], labels[idx_val])
    return float(loss_val)


# The image part of an embedding benchmark: a corpus of pictures and captions is embedded for retrieval.

class ImageTextCorpus(Dataset):
    def __init__(self, size, crop, max_tokens, vocab):
        self.size = size
        self.picture = torch.rand(3, crop, crop)
        self.tokens = torch.randint(0, vocab, (size, max_tokens))

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"image": self.picture, "text": self.tokens[index]}


class CLIPModelWrapper:
    def __init__(self, config, device, grad_mode):
        self.model, self.device, self.grad_mode = CLIPModel(config).to(device).eval(), device, grad_mode

    def get_text_embeddings(self, texts, batch_size):
        all_text_embeddings = []
        with self.grad_mode():
            for batch in DataLoader(texts, batch_size):
                hidden = self.model.text_model(input_ids=batch["text"].to(self.device)).pooler_output
                all_text_embeddings.append(self.model.text_projection(hidden).cpu())
        return torch.cat(all_text_embeddings)

    def get_image_embeddings(self, images, batch_size):
        all_image_embeddings = []
        with self.grad_mode():
            for batch in DataLoader(images, batch_size):
                hidden = self.model.vision_model(pixel_values=batch["image"].to(self.device)).pooler_output
                all_image_embeddings.append(self.model.visual_projection(hidden).cpu())
        return torch.cat(all_image_embeddings)


@expected("evaluation_keeps_graphs", fix="no_grad", thread="embeddings-benchmark/mteb#1378", memory=500, held_back=True)
def embed_image_corpus(fixed=False):
    """The embeddings are computed with gradients: `get_image_embeddings` (and `get_text_embeddings`) run the model without
    `torch.no_grad()`, so the graph with the activations of each batch is kept, and the embeddings in `all_image_embeddings` hold the graphs
    of all batches. Cured by: `torch.no_grad()` around the loops.
    """
    small = dict(hidden_size=192, intermediate_size=768, num_hidden_layers=6, num_attention_heads=3)
    config = CLIPConfig(text_config=dict(small, vocab_size=8000, max_position_embeddings=32),
                        vision_config=dict(small, image_size=160, patch_size=16), projection_dim=128)
    wrapper = CLIPModelWrapper(config, "cuda", torch.no_grad if fixed else nullcontext)
    corpus = ImageTextCorpus(160, 160, 32, 8000)
    image_embeddings = wrapper.get_image_embeddings(corpus, batch_size=16)
    text_embeddings = wrapper.get_text_embeddings(corpus, batch_size=16)
    scores = F.normalize(text_embeddings, dim=1) @ F.normalize(image_embeddings, dim=1).T
    return scores.topk(10, dim=1).indices


# Pictures are synthesized from label maps: the generator scales its features with parameters of each pixel's class.

class ClassAffine(nn.Module):
    def __init__(self, label_nc, affine_nc, lookup):
        super().__init__()
        self.label_nc, self.affine_nc, self.lookup = label_nc, affine_nc, lookup
        self.weight = nn.Parameter(torch.rand(label_nc, affine_nc))
        self.bias = nn.Parameter(torch.zeros(label_nc, affine_nc))

    def affine_gather(self, mask):
        n, h, w = mask.shape
        index = mask.view(n, 1, h * w).expand(n, self.affine_nc, h * w)
        picked = []
        for parameter in (self.weight, self.bias):
            everywhere = parameter[:, :, None].expand(self.label_nc, self.affine_nc, h * w)
            picked.append(everywhere.gather(0, index).view(n, self.affine_nc, h, w))
        return picked

    def affine_embed(self, mask):
        return [F.embedding(mask, parameter).permute(0, 3, 1, 2) for parameter in (self.weight, self.bias)]

    def forward(self, normalized, segmap):
        mask = segmap.argmax(1)
        gamma, beta = self.affine_embed(mask) if self.lookup == "embed" else self.affine_gather(mask)
        return normalized * gamma + beta


class CladeBlock(nn.Module):
    def __init__(self, fin, fout, label_nc, lookup):
        super().__init__()
        self.norm_0, self.affine_0 = nn.BatchNorm2d(fin, affine=False), ClassAffine(label_nc, fin, lookup)
        self.norm_1, self.affine_1 = nn.BatchNorm2d(fout, affine=False), ClassAffine(label_nc, fout, lookup)
        self.conv_0, self.conv_1 = nn.Conv2d(fin, fout, 3, padding=1), nn.Conv2d(fout, fout, 3, padding=1)
        self.conv_s = nn.Conv2d(fin, fout, 1, bias=False)

    def forward(self, x, seg):
        seg = F.interpolate(seg, size=x.shape[2:], mode="nearest")
        dx = self.conv_0(F.leaky_relu(self.affine_0(self.norm_0(x), seg), 0.2))
        dx = self.conv_1(F.leaky_relu(self.affine_1(self.norm_1(dx), seg), 0.2))
        return self.conv_s(x) + dx


class CladeGenerator(nn.Module):
    def __init__(self, label_nc, ngf, lookup):
        super().__init__()
        self.fc = nn.Conv2d(label_nc, 8 * ngf, 3, padding=1)
        widths = [8 * ngf, 4 * ngf, 2 * ngf, ngf]
        self.up = nn.ModuleList(CladeBlock(fin, fout, label_nc, lookup) for fin, fout in zip(widths, widths[1:]))
        self.conv_img = nn.Conv2d(ngf, 3, 3, padding=1)

    def forward(self, seg):
        x = self.fc(F.interpolate(seg, scale_factor=1 / 16, mode="nearest"))
        for block in self.up:
            x = block(F.interpolate(x, scale_factor=2), seg)
        x = F.interpolate(x, scale_factor=2)
        return self.conv_img(F.leaky_relu(x, 0.2)).tanh()


def preprocess_input(label_map, label_nc):
    label_map = label_map.cuda()
    zeros = torch.zeros(len(label_map), label_nc, *label_map.shape[2:], device="cuda")
    return zeros.scatter_(1, label_map, 1.0)


@expected("enlarged", fix="embedding", thread="tzt101/CLADE#1", memory=520, held_back=True)
def train_label_to_image(fixed=False):
    """`affine_gather` expands the class parameters to label_nc × affine_nc × pixels (`everywhere`) only to be able to use `gather`; in the
    backward the gradient of that expanded tensor takes its full size. Cured by: Equivalent functions that need less memory: `affine_embed`
    (`F.embedding`).
    """
    label_nc = 151
    netG = CladeGenerator(label_nc, 32, "embed" if fixed else "gather").cuda()
    netD = nn.Sequential(nn.Conv2d(label_nc + 3, 32, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(32, 64, 4, 2, 1), nn.LeakyReLU(0.2),
                         nn.Conv2d(64, 1, 4, 1, 1)).cuda()
    optimizer_G = torch.optim.Adam(netG.parameters(), lr=1e-4, betas=(0.0, 0.9))
    optimizer_D = torch.optim.Adam(netD.parameters(), lr=4e-4, betas=(0.0, 0.9))
    for step in range(4):
        input_semantics = preprocess_input(torch.randint(0, label_nc, (1, 1, 256, 256)), label_nc)
        real_image = torch.rand(1, 3, 256, 256).cuda() * 2 - 1
        optimizer_G.zero_grad()
        fake_image = netG(input_semantics)
        g_loss = -netD(torch.cat([input_semantics, fake_image], 1)).mean() + 10 * F.l1_loss(fake_image, real_image)
        g_loss.backward()
        optimizer_G.step()
        optimizer_D.zero_grad()
        with torch.no_grad():
            fake_image = netG(input_semantics)
        d_fake = F.relu(1 + netD(torch.cat([input_semantics, fake_image], 1))).mean()
        d_real = F.relu(1 - netD(torch.cat([input_semantics, real_image], 1))).mean()
        (d_fake + d_real).backward()
        optimizer_D.step()
    return float(g_loss)


# Speech synthesis with a neural hidden Markov model, run by a general trainer.

class OutputNet(nn.Module):
    def __init__(self, encoder_dim, memory_rnn_dim, frame_channels, hidden):
        super().__init__()
        self.frame_channels = frame_channels
        self.net = nn.Sequential(nn.Linear(encoder_dim + memory_rnn_dim, hidden), nn.ReLU(), nn.Linear(hidden, 2 * frame_channels + 1))

    def forward(self, ar_mel, inputs):
        states = torch.cat([inputs, ar_mel[:, None].expand(-1, inputs.shape[1], -1)], -1)
        mean, std, transition_vector = self.net(states).split([self.frame_channels, self.frame_channels, 1], -1)
        return mean, F.softplus(std), transition_vector.squeeze(-1)


class NeuralHMM(nn.Module):
    def __init__(self, vocab, encoder_dim=24, memory_rnn_dim=24, frame_channels=80):
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(vocab, encoder_dim), nn.Linear(encoder_dim, encoder_dim), nn.ReLU())
        self.memory_rnn = nn.LSTMCell(frame_channels, memory_rnn_dim)
        self.output_net = OutputNet(encoder_dim, memory_rnn_dim, frame_channels, 32)

    def forward(self, text, mels):
        inputs, memory = self.encoder(text), None
        log_c, log_alpha_scaled, transition_vectors, means = [], [], [], []
        frame = torch.zeros_like(mels[:, 0])
        for t in range(mels.shape[1]):
            memory = self.memory_rnn(frame, memory)
            mean, std, transition_vector = self.output_net(memory[0], inputs)
            z = (mels[:, t, None] - mean) / std
            emission = -(0.5 * z.square() + std.log()).sum(-1)
            if t == 0:
                log_alpha = emission
            else:
                stay = log_alpha + F.logsigmoid(-transition_vector)
                leave = F.pad((log_alpha + F.logsigmoid(transition_vector))[:, :-1], (1, 0), value=-1e4)
                log_alpha = emission + torch.logaddexp(stay, leave)
            scale = log_alpha.logsumexp(1)
            log_alpha = log_alpha - scale[:, None]
            log_c.append(scale)
            log_alpha_scaled.append(log_alpha)
            transition_vectors.append(transition_vector.detach())
            means.append(mean.detach())
            frame = mels[:, t]
        log_probs = torch.stack(log_c, 1).sum(1)
        return {"hmm_outputs": log_probs, "alignments": torch.stack(log_alpha_scaled, 1),
                "transition_vectors": torch.stack(transition_vectors, 1), "means": means}

    def train_step(self, batch, criterion):
        outputs = self(batch["text_input"], batch["mel_input"])
        return outputs, {"loss": criterion(outputs["hmm_outputs"] / batch["mel_input"].shape[1])}


class TTSTrainer:
    def __init__(self, model, train_loader, free_outputs):
        self.model, self.train_loader, self.free_outputs = model, train_loader, free_outputs
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.keep_avg_train = {}

    def train_step(self, batch):
        batch = {key: value.cuda(non_blocking=True) for key, value in batch.items()}
        self.optimizer.zero_grad(set_to_none=True)
        outputs, loss_dict = self.model.train_step(batch, lambda log_probs: -log_probs.mean())
        loss_dict["loss"].backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 40000.0)
        self.optimizer.step()
        loss_dict = {key: float(value.detach()) for key, value in loss_dict.items()}
        return outputs, loss_dict

    def train_epoch(self):
        for batch in self.train_loader:
            outputs, loss_dict = self.train_step(batch)
            if outputs is None:
                continue
            for key, value in loss_dict.items():
                self.keep_avg_train["avg_" + key] = 0.99 * self.keep_avg_train.get("avg_" + key, value) + 0.01 * value
            if self.free_outputs:
                del outputs


@expected("kept_tensors", fix=r"\bdel\b", thread="coqui-ai/Trainer#104", memory=1210, held_back=True)
def train_neural_hmm_tts(fixed=False):
    """In `train_epoch` the variable `outputs` still holds the model outputs of the previous step (`means` and so the output of the
    `output_net` for every frame) while `train_step` computes the next one; they can be freed only after the next step is done. Cured by:
    Free `outputs` at the end of each turn of the loop.
    """
    train_loader = [{"text_input": torch.randint(0, 60, (48, 60)), "mel_input": torch.randn(48, frames, 80)} for frames in (150, 160, 156, 160)]
    trainer = TTSTrainer(NeuralHMM(60).cuda(), train_loader, free_outputs=fixed)
    trainer.train_epoch()
    return trainer.keep_avg_train


# A scene is reconstructed with surfels from a few hundred photographs.

class Camera(nn.Module):
    def __init__(self, uid, image, world_view_transform, data_device):
        super().__init__()
        self.uid = uid
        self.original_image = image.clamp(0.0, 1.0).to(data_device)
        self.image_height, self.image_width = image.shape[1:]
        self.world_view_transform = world_view_transform.cuda()


class SurfelModel:
    def __init__(self, num_points):
        points = torch.rand(num_points, 3, device="cuda") * 2 - 1
        self._xyz = nn.Parameter(points)
        self._features_dc = nn.Parameter(torch.rand(num_points, 3, device="cuda"))
        self._scaling = nn.Parameter(torch.zeros(num_points, 1, device="cuda"))
        self._opacity = nn.Parameter(torch.zeros(num_points, 1, device="cuda"))

    def training_setup(self):
        groups = [{"params": [self._xyz], "lr": 1e-4}, {"params": [self._features_dc], "lr": 2.5e-3},
                  {"params": [self._scaling], "lr": 5e-3}, {"params": [self._opacity], "lr": 5e-2}]
        self.optimizer = torch.optim.Adam(groups, lr=0.0, eps=1e-15)


def render(viewpoint_camera, pc, radius=2):
    height, width = viewpoint_camera.image_height, viewpoint_camera.image_width
    view = pc._xyz @ viewpoint_camera.world_view_transform[:3, :3] + viewpoint_camera.world_view_transform[3, :3]
    depth = view[:, 2:].clamp(min=0.2)
    centre = (view[:, :2] / depth * 0.5 + 0.5) * torch.tensor([width, height], device="cuda")
    steps = torch.arange(-radius, radius + 1, device="cuda")
    offsets = torch.cartesian_prod(steps, steps)
    pixel = centre.detach().round()[:, None] + offsets
    distance = (pixel - centre[:, None]).square().sum(-1)
    alpha = pc._opacity.sigmoid() * torch.exp(-distance / (2 * pc._scaling.exp().square()))
    column, row = pixel[..., 0].clamp(0, width - 1).long(), pixel[..., 1].clamp(0, height - 1).long()
    index = (row * width + column).flatten()
    colour = (alpha[..., None] * pc._features_dc[:, None]).reshape(-1, 3)
    canvas = torch.zeros(height * width, 3, device="cuda").index_add(0, index, colour)
    weight = torch.zeros(height * width, 1, device="cuda").index_add(0, index, alpha.reshape(-1, 1))
    return (canvas / (weight + 1e-6)).T.view(3, height, width)


def ssim(img1, img2, window):
    blur = lambda image: F.conv2d(image, window, padding=5, groups=3)
    mu1, mu2 = blur(img1), blur(img2)
    var1, var2, cov = blur(img1 * img1) - mu1 ** 2, blur(img2 * img2) - mu2 ** 2, blur(img1 * img2) - mu1 * mu2
    return ((2 * mu1 * mu2 + 1e-4) * (2 * cov + 9e-4) / ((mu1 ** 2 + mu2 ** 2 + 1e-4) * (var1 + var2 + 9e-4))).mean()


def load_cameras(num_images, height, width, data_device):
    cameras = []
    for uid in range(num_images):
        angle = 2 * np.pi * uid / num_images
        transform = torch.eye(4)
        transform[0, 0] = transform[2, 2] = float(np.cos(angle))
        transform[0, 2], transform[2, 0], transform[3, 2] = float(np.sin(angle)), -float(np.sin(angle)), 4.0
        cameras.append(Camera(uid, torch.rand(3, height, width), transform, data_device))
    return cameras


@expected("data_on_gpu", fix="host", thread="hbb1/2d-gaussian-splatting#45", memory=450, held_back=True)
def train_surfel_scene(fixed=False):
    """Every `Camera` puts its photograph (`original_image`) on the GPU when it is made, so all photographs of the scene lie on the GPU for
    the whole training, although an iteration needs one. Cured by: Leave `original_image` on the CPU; the training loop moves the one it
    needs to the GPU.
    """
    train_cameras = load_cameras(130, 480, 640, "cpu" if fixed else "cuda")
    gaussians = SurfelModel(40000)
    gaussians.training_setup()
    window = torch.ones(3, 1, 11, 11, device="cuda") / 121
    viewpoint_stack = None
    for iteration in range(1, 16):
        if not viewpoint_stack:
            viewpoint_stack = train_cameras.copy()
        viewpoint_cam = viewpoint_stack.pop(random.randint(0, len(viewpoint_stack) - 1))
        image = render(viewpoint_cam, gaussians)
        gt_image = viewpoint_cam.original_image.cuda()
        Ll1 = F.l1_loss(image, gt_image)
        loss = 0.8 * Ll1 + 0.2 * (1.0 - ssim(image[None], gt_image[None], window))
        loss.backward()
        with torch.no_grad():
            gaussians.optimizer.step()
            gaussians.optimizer.zero_grad(set_to_none=True)
    return float(loss)


# A diffusion model is fine-tuned on a handful of pictures of one subject.

class AutoencoderKL(nn.Module):
    def __init__(self, width):
        super().__init__()
        down = [nn.Conv2d(3, width, 3, padding=1)]
        for factor in (1, 2, 4):
            down += [nn.GroupNorm(16, factor * width), nn.SiLU(), nn.Conv2d(factor * width, 2 * factor * width, 3, 2, 1)]
        self.encoder = nn.Sequential(*down, nn.GroupNorm(16, 8 * width), nn.SiLU(), nn.Conv2d(8 * width, 8, 3, padding=1))
        up = [nn.Conv2d(4, 8 * width, 3, padding=1)]
        for factor in (8, 4, 2):
            up += [nn.GroupNorm(16, factor * width), nn.SiLU(), nn.Upsample(scale_factor=2), nn.Conv2d(factor * width, factor * width // 2, 3, padding=1)]
        self.decoder = nn.Sequential(*up, nn.SiLU(), nn.Conv2d(width, 3, 3, padding=1))

    def encode(self, pixel_values):
        mean, logvar = self.encoder(pixel_values).chunk(2, 1)
        return mean + torch.randn_like(mean) * (0.5 * logvar).exp()


class CrossAttnBlock(nn.Module):
    def __init__(self, channels, cross_attention_dim):
        super().__init__()
        self.norm, self.conv = nn.GroupNorm(16, channels), nn.Conv2d(channels, channels, 3, padding=1)
        self.time_emb_proj = nn.Linear(256, channels)
        self.attn2 = nn.MultiheadAttention(channels, 4, kdim=cross_attention_dim, vdim=cross_attention_dim, batch_first=True)

    def forward(self, x, temb, encoder_hidden_states):
        x = x + self.conv(F.silu(self.norm(x))) + self.time_emb_proj(temb)[:, :, None, None]
        tokens = x.flatten(2).transpose(1, 2)
        tokens = tokens + self.attn2(tokens, encoder_hidden_states, encoder_hidden_states, need_weights=False)[0]
        return tokens.transpose(1, 2).reshape(x.shape)


class UNet2DConditionModel(nn.Module):
    def __init__(self, channels, cross_attention_dim):
        super().__init__()
        self.conv_in, self.conv_out = nn.Conv2d(4, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        self.time_embedding = nn.Sequential(nn.Embedding(1000, 256), nn.Linear(256, 256), nn.SiLU())
        self.blocks = nn.ModuleList(CrossAttnBlock(channels, cross_attention_dim) for _ in range(12))

    def forward(self, sample, timestep, encoder_hidden_states):
        x, temb = self.conv_in(sample), self.time_embedding(timestep)
        for block in self.blocks:
            x = block(x, temb, encoder_hidden_states)
        return self.conv_out(F.silu(x))


class DreamBoothDataset(Dataset):
    def __init__(self, num_instance_images, size, vocab):
        self.images = torch.rand(num_instance_images, 3, size, size) * 2 - 1
        self.prompt_ids = torch.randint(0, vocab, (77,))

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"pixel_values": self.images[index], "input_ids": self.prompt_ids}


@expected("idle_model", fix=r"cpu\(\)", thread="TheLastBen/diffusers#1", memory=830, held_back=True)
def train_subject_unet(fixed=False):
    """`vae` and `text_encoder` stay on the GPU during the training of the `unet`, although they are frozen and give the same latents and
    text encodings of the few pictures in every epoch. Cured by: Compute latents and encodings before the training, then unload `vae` and
    `text_encoder`.
    """
    device, vocab = "cuda", 49408
    text_encoder = CLIPTextModel(CLIPTextConfig(vocab_size=vocab, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8))
    vae, unet = AutoencoderKL(96), UNet2DConditionModel(384, 512)
    vae.requires_grad_(False)
    text_encoder.requires_grad_(False)
    unet.to(device)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=5e-6)
    alphas_cumprod = torch.cumprod(1 - torch.linspace(0.00085 ** 0.5, 0.012 ** 0.5, 1000) ** 2, 0).to(device)
    vae.to(device)
    text_encoder.to(device)
    train_dataloader = DataLoader(DreamBoothDataset(4, 256, vocab), batch_size=1)

    def encode(batch):
        latents = vae.encode(batch["pixel_values"].to(device)) * 0.18215
        return latents, text_encoder(batch["input_ids"].to(device))[0]

    cached = None
    if fixed:
        cached = [encode(batch) for batch in train_dataloader]
        del vae, text_encoder
        gc.collect()
        torch.cuda.empty_cache()
    for epoch in range(3):
        unet.train()
        for latents, encoder_hidden_states in cached or map(encode, train_dataloader):
            noise = torch.randn_like(latents)
            timesteps = torch.randint(0, 1000, (len(latents),), device=device)
            level = alphas_cumprod[timesteps][:, None, None, None]
            noisy_latents = level.sqrt() * latents + (1 - level).sqrt() * noise
            noise_pred = unet(noisy_latents, timesteps, encoder_hidden_states)
            loss = F.mse_loss(noise_pred.float(), noise.float())
            loss.backward()
            nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    return float(loss)


# The quality of photographs is judged with CLIP: each crop is compared with a text for every quality, scene and distortion.

dists_map = ["jpeg2000 compression", "jpeg compression", "noise", "blur", "color", "contrast", "overexposure", "underexposure",
             "spatial", "quantization", "other"]
scenes = ["animal", "cityscape", "human", "indoor", "landscape", "night", "plant", "still_life", "others"]
qualitys = ["bad", "poor", "fair", "good", "perfect"]


class ResidualAttentionBlock(nn.Module):
    def __init__(self, d_model, n_head, attn_mask=None):
        super().__init__()
        self.attn = nn.MultiheadAttention(d_model, n_head, batch_first=True)
        self.ln_1, self.ln_2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mlp = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.GELU(), nn.Linear(4 * d_model, d_model))
        self.register_buffer("attn_mask", attn_mask)

    def forward(self, x):
        y = self.ln_1(x)
        x = x + self.attn(y, y, y, need_weights=False, attn_mask=self.attn_mask)[0]
        return x + self.mlp(self.ln_2(x))


class VisionTransformer(nn.Module):
    def __init__(self, resolution, patch_size, width, layers, output_dim):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, patch_size, patch_size, bias=False)
        self.positional_embedding = nn.Parameter(torch.randn((resolution // patch_size) ** 2, width) * width ** -0.5)
        self.transformer = nn.Sequential(*(ResidualAttentionBlock(width, 4) for _ in range(layers)))
        self.proj = nn.Parameter(torch.randn(width, output_dim) * width ** -0.5)

    def forward(self, x):
        x = self.conv1(x).flatten(2).transpose(1, 2) + self.positional_embedding
        return self.transformer(x).mean(1) @ self.proj


class CLIP(nn.Module):
    def __init__(self, width=128, layers=3, context_length=77, vocab_size=2000, embed_dim=128):
        super().__init__()
        mask = torch.full((context_length, context_length), float("-inf")).triu(1)
        self.visual = VisionTransformer(112, 16, width, layers, embed_dim)
        self.token_embedding = nn.Embedding(vocab_size, width)
        self.positional_embedding = nn.Parameter(torch.randn(context_length, width) * 0.01)
        self.transformer = nn.Sequential(*(ResidualAttentionBlock(width, 2, mask) for _ in range(layers)))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, embed_dim) * width ** -0.5)
        self.logit_scale = nn.Parameter(torch.tensor(2.6593))

    def encode_text(self, text):
        x = self.transformer(self.token_embedding(text) + self.positional_embedding)
        return self.ln_final(x)[:, -1] @ self.text_projection

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=1)
        text_features = F.normalize(self.encode_text(text), dim=1)
        return self.logit_scale.exp() * image_features @ text_features.T


def freeze_model(model, opt):
    model.logit_scale.requires_grad = False
    if opt == 1:
        for part in (model.token_embedding, model.transformer, model.ln_final):
            part.requires_grad_(False)
        model.positional_embedding.requires_grad = False
        model.text_projection.requires_grad = False


def do_batch(model, x, text):
    batch_size, num_patch = x.shape[:2]
    logits_per_image = model(x.flatten(0, 1), text)
    return logits_per_image.view(batch_size, num_patch, -1).mean(1).softmax(1)


def fidelity_loss(quality, gmos):
    p = torch.sigmoid(quality[:, None] - quality[None])
    g = (gmos[:, None] > gmos[None]).float()
    return (1 - (p * g + 1e-8).sqrt() - ((1 - p) * (1 - g) + 1e-8).sqrt()).mean()


@expected("trained_encoder", fix="freeze|requires_grad", thread="zwx8981/LIQE#27", memory=800, held_back=True)
def train_blind_iqa(fixed=False):
    """The text encoder of `model` is trained too (`opt` 0), so each step keeps its activations for all 495 `joint_texts` for the backward.
    Cured by: `opt = 1` in `freeze_model`, which freezes the text encoder.
    """
    model = CLIP().cuda()
    freeze_model(model, opt=1 if fixed else 0)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-6, weight_decay=0.001)
    joint_texts = torch.randint(0, 2000, (len(qualitys) * len(scenes) * len(dists_map), 77)).cuda()
    grades = torch.arange(1, len(qualitys) + 1).float().cuda()
    model.eval()
    for step in range(5):
        x, gmos = torch.rand(16, 3, 3, 112, 112).cuda(), torch.rand(16).cuda()
        scene_gt, dist_gt = torch.rand(16, len(scenes)).cuda(), torch.rand(16, len(dists_map)).cuda()
        optimizer.zero_grad()
        logits = do_batch(model, x, joint_texts).view(-1, len(qualitys), len(scenes), len(dists_map))
        logits_quality = logits.sum((2, 3)) @ grades
        total_loss = fidelity_loss(logits_quality, gmos)
        total_loss = total_loss + F.binary_cross_entropy_with_logits(logits.sum((1, 3)), scene_gt)
        total_loss = total_loss + F.binary_cross_entropy_with_logits(logits.sum((1, 2)), dist_gt)
        total_loss.backward()
        optimizer.step()
    return float(total_loss)


# Names are marked in sentences; the heads of a text library are run by a training loop that collects the outputs of an epoch.

class TokenClassification(nn.Module):
    def __init__(self, hidden_size, num_labels, lean_output):
        super().__init__()
        self.lean_output = lean_output
        self.label_projection = nn.Linear(hidden_size, num_labels)

    def forward(self, encoded, mask, tags):
        logits = self.label_projection(encoded)
        loss = F.cross_entropy(logits.flatten(0, 1), tags.flatten(), reduction="none")
        loss = (loss * mask.flatten()).sum() / mask.sum()
        if self.training and self.lean_output:
            return {"loss": loss}
        return {"logits": logits, "class_probabilities": logits.softmax(-1), "mask": mask, "loss": loss}


class PipelineModel(nn.Module):
    def __init__(self, vocab_size, num_labels, lean_output):
        super().__init__()
        self.embedder = nn.Embedding(vocab_size, 48)
        self.encoder = nn.GRU(48, 64, batch_first=True, bidirectional=True)
        self.head = TokenClassification(128, num_labels, lean_output)

    def forward(self, text, mask, tags):
        return self.head(self.encoder(self.embedder(text))[0], mask, tags)

    def training_step(self, batch, batch_idx):
        return self(**batch)

    def training_epoch_end(self, outputs):
        return {"training_loss": torch.stack([output["loss"] for output in outputs]).mean()}


class PipelineTrainer:
    def __init__(self, max_epochs):
        self.max_epochs = max_epochs

    def run_training_epoch(self, model, optimizer, train_dataloader):
        epoch_output = []
        for batch_idx, batch in enumerate(train_dataloader):
            batch = {key: value.cuda() for key, value in batch.items()}
            training_step_output = model.training_step(batch, batch_idx)
            optimizer.zero_grad()
            training_step_output["loss"].backward()
            optimizer.step()
            epoch_output.append({key: value.detach() for key, value in training_step_output.items()})
        return model.training_epoch_end(epoch_output)

    def fit(self, model, train_dataloader):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for epoch in range(self.max_epochs):
            model.train()
            metrics = self.run_training_epoch(model, optimizer, train_dataloader)
        return {name: float(value) for name, value in metrics.items()}


def conll_batches(num_batches, batch_size, length, vocab_size, num_labels):
    for _ in range(num_batches):
        lengths = torch.randint(5, length + 1, (batch_size, 1))
        yield {"text": torch.randint(0, vocab_size, (batch_size, length)), "mask": (torch.arange(length) < lengths).float(),
               "tags": torch.randint(0, num_labels, (batch_size, length))}


@expected("kept_tensors", fix="detach|only", thread="argilla-io/biome-text#561", memory=450, held_back=True)
def train_token_tagger(fixed=False):
    """The trainer stores the output dicts of all training steps until the epoch ends (`epoch_output`), and the head `TokenClassification`
    puts more into the dict than the loss: `logits` and `class_probabilities` of every batch stay on the GPU. Cured by: During training the
    head returns only the loss.
    """
    batches = list(conll_batches(130, 64, 120, 6000, 74))
    model = PipelineModel(6000, 74, lean_output=fixed).cuda()
    return PipelineTrainer(max_epochs=1).fit(model, batches)


# Digits are drawn pixel after pixel by an autoregressive model, after some training.

class MaskedConv2d(nn.Conv2d):
    def __init__(self, mask_type, nin, nout, kernel_size):
        super().__init__(nin, nout, kernel_size, padding=kernel_size // 2)
        mask = torch.ones_like(self.weight)
        middle = kernel_size // 2
        mask[:, :, middle, middle + (mask_type == "B"):] = 0
        mask[:, :, middle + 1:] = 0
        self.register_buffer("mask", mask)

    def forward(self, x):
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


class gated_resnet(nn.Module):
    def __init__(self, nr_filters):
        super().__init__()
        self.conv_input = MaskedConv2d("B", 2 * nr_filters, nr_filters, 3)
        self.conv_out = MaskedConv2d("B", 2 * nr_filters, 2 * nr_filters, 3)

    def forward(self, og_x):
        x = self.conv_input(concat_elu(og_x))
        a, b = self.conv_out(concat_elu(x)).chunk(2, dim=1)
        return og_x + a * torch.sigmoid(b)


def concat_elu(x):
    return F.elu(torch.cat([x, -x], dim=1))


class PixelCNN(nn.Module):
    def __init__(self, nr_resnet, nr_filters, input_channels, nr_logistic_mix):
        super().__init__()
        self.ul_init = MaskedConv2d("A", input_channels, nr_filters, 7)
        self.up_layers = nn.ModuleList(gated_resnet(nr_filters) for _ in range(nr_resnet))
        self.nin_out = nn.Conv2d(nr_filters, 3 * nr_logistic_mix, 1)

    def forward(self, x):
        x = self.ul_init(x)
        for layer in self.up_layers:
            x = layer(x)
        return self.nin_out(F.elu(x))


def discretized_mix_logistic_loss_1d(x, l):
    logit_probs, means, log_scales = l.chunk(3, 1)
    centered, inv_stdv = x - means, torch.exp(-log_scales.clamp(min=-7))
    delta = torch.sigmoid(inv_stdv * (centered + 1 / 255)) - torch.sigmoid(inv_stdv * (centered - 1 / 255))
    return -(logit_probs.log_softmax(1) + delta.clamp(min=1e-12).log()).logsumexp(1).sum()


def sample_from_discretized_mix_logistic_1d(l):
    logit_probs, means, log_scales = l.chunk(3, 1)
    gumbel = -torch.log(-torch.log(torch.rand_like(logit_probs).clamp(1e-5, 1 - 1e-5)))
    chosen = (logit_probs + gumbel).argmax(1, keepdim=True)
    u = torch.rand_like(means[:, :1]).clamp(1e-5, 1 - 1e-5)
    scale = log_scales.gather(1, chosen).clamp(min=-7).exp()
    return (means.gather(1, chosen) + scale * (u.log() - torch.log1p(-u))).clamp(-1, 1)


def sample_digits(model, sample_batch_size, obs):
    model.train(False)
    data = torch.zeros(sample_batch_size, *obs).cuda()
    for i in range(obs[1]):
        for j in range(obs[2]):
            out = model(data)
            out_sample = sample_from_discretized_mix_logistic_1d(out)
            data[:, :, i, j] = out_sample.data[:, :, i, j]
    return data


@expected("evaluation_keeps_graphs", fix="no_grad", thread="pclucas14/pixel-cnn-pp#25", memory=700, held_back=True)
def train_and_sample_digits(fixed=False):
    """`sample_digits` runs the model with gradients enabled, so each forward for the 144 samples keeps all activations for a backward that
    never comes (and that of the previous pixel is still held by `out`). Cured by: `@torch.no_grad()` on the sampling function.
    """
    obs = (1, 20, 20)
    draw = torch.no_grad()(sample_digits) if fixed else sample_digits
    model = PixelCNN(nr_resnet=5, nr_filters=40, input_channels=1, nr_logistic_mix=10).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4)
    for epoch in range(1):
        model.train(True)
        for batch_idx in range(12):
            input = torch.rand(32, *obs).cuda() * 2 - 1
            loss = discretized_mix_logistic_loss_1d(input, model(input))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        samples = draw(model, 144, obs)
    return samples.cpu().numpy().shape


# The scales of the activations of a language model are measured for FP8.

def per_tensor_quantize(tensor):
    finfo = torch.finfo(torch.float8_e4m3fn)
    min_val, max_val = tensor.aminmax()
    scale = finfo.max / torch.maximum(min_val.abs(), max_val.abs()).clamp(min=1e-12)
    qweight = (tensor * scale).clamp(finfo.min, finfo.max).to(torch.float8_e4m3fn)
    return qweight, scale.float().reciprocal()


class FP8StaticLinearQuantizer(nn.Module):
    def __init__(self, qweight, weight_scale, bias):
        super().__init__()
        self.weight = nn.Parameter(qweight, requires_grad=False)
        self.weight_scale = nn.Parameter(weight_scale, requires_grad=False)
        self.bias, self.input_scale = bias, None

    def forward(self, x):
        qinput, x_input_scale = per_tensor_quantize(x)
        if self.input_scale is None:
            self.input_scale = nn.Parameter(x_input_scale.detach(), requires_grad=False)
        else:
            self.input_scale.data.copy_(torch.maximum(self.input_scale, x_input_scale.detach()))
        weight = self.weight.to(x.dtype) * self.weight_scale.to(x.dtype)
        return F.linear(qinput.to(x.dtype) * self.input_scale.to(x.dtype), weight, self.bias)


def replace_module(model, name, new_module):
    parent_name, _, child_name = name.rpartition(".")
    setattr(model.get_submodule(parent_name), child_name, new_module)


def quantize_weights(model, ignored_layers):
    for name, linear in list(model.named_modules()):
        if isinstance(linear, nn.Linear) and name not in ignored_layers:
            qweight, weight_scale = per_tensor_quantize(linear.weight.data)
            replace_module(model, name, FP8StaticLinearQuantizer(qweight, weight_scale, linear.bias))
    cleanup_memory()


def cleanup_memory():
    gc.collect()
    torch.cuda.empty_cache()


def quantize_activations(model, calibration_tokens, calibrating):
    with calibrating():
        for row_idx in range(calibration_tokens.shape[0]):
            model(calibration_tokens[row_idx].reshape(1, -1))
            cleanup_memory()
    return {name: module.input_scale for name, module in model.named_modules() if isinstance(module, FP8StaticLinearQuantizer)}


@expected("many_rows", fix="no_grad", thread="neuralmagic/AutoFP8#20", memory=600, held_back=True)
def calibrate_fp8_scales(fixed=False):
    """`quantize_activations` runs the calibration forwards with gradients enabled, so a forward over a long sequence keeps the activations
    of all layers. Cured by: `torch.inference_mode()` around the calibration loop.
    """
    config = LlamaConfig(vocab_size=8000, hidden_size=512, intermediate_size=1376, num_hidden_layers=8, num_attention_heads=8,
                         num_key_value_heads=4, max_position_embeddings=4096)
    model = LlamaForCausalLM(config).to(torch.bfloat16).cuda().eval()
    quantize_weights(model, ignored_layers=["lm_head"])
    examples = torch.randint(0, 8000, (2, 3072)).cuda()
    scales = quantize_activations(model, examples, torch.inference_mode if fixed else nullcontext)
    return len(scales)


# A printable patch is optimized that fools a classifier of video clips.

class VideoClassifier(nn.Module):
    def __init__(self, width, nb_classes):
        super().__init__()
        layers, channels = [], 3
        for factor in (1, 2, 4):
            layers += [nn.Conv3d(channels, factor * width, 3, stride=(1, 2, 2), padding=1), nn.BatchNorm3d(factor * width), nn.ReLU(),
                       nn.Conv3d(factor * width, factor * width, 3, padding=1), nn.BatchNorm3d(factor * width), nn.ReLU()]
            channels = factor * width
        self.features, self.fc = nn.Sequential(*layers), nn.Linear(channels, nb_classes)

    def forward(self, x):
        return self.fc(self.features(x.transpose(1, 2)).mean((2, 3, 4)))


class AdversarialPatchPyTorch:
    def __init__(self, classifier, patch_size, learning_rate, max_iter, batch_size, retain_graph):
        self.estimator, self.max_iter, self.batch_size, self.retain_graph = classifier, max_iter, batch_size, retain_graph
        self._patch = torch.full((3, patch_size, patch_size), 0.5, device="cuda", requires_grad=True)
        self._optimizer = torch.optim.Adam([self._patch], lr=learning_rate)

    def _random_overlay(self, images, patch):
        size, (height, width) = patch.shape[1], images.shape[-2:]
        overlaid = []
        for clip in images:
            scaled = F.interpolate(patch[None], scale_factor=random.uniform(0.5, 1.0), mode="bilinear")[0]
            top, left = random.randint(0, height - size), random.randint(0, width - size)
            padding = (left, width - left - scaled.shape[2], top, height - top - scaled.shape[1])
            image_mask = F.pad(torch.ones_like(scaled[:1]), padding)
            overlaid.append(clip * (1 - image_mask) + F.pad(scaled, padding) * image_mask)
        return torch.stack(overlaid)

    def _loss(self, images, target):
        patched_input = self._random_overlay(images, self._patch).clamp(0.0, 1.0)
        return F.cross_entropy(self.estimator(patched_input), target)

    def _train_step(self, images, target):
        self._optimizer.zero_grad()
        loss = self._loss(images, target)
        loss.backward(retain_graph=self.retain_graph)
        self._optimizer.step()
        with torch.no_grad():
            self._patch.clamp_(0.0, 1.0)
        return loss

    def generate(self, x, y):
        self.estimator.eval()
        for i_iter in range(self.max_iter):
            for begin in range(0, len(x), self.batch_size):
                images, target = x[begin:begin + self.batch_size].cuda(), y[begin:begin + self.batch_size].cuda()
                loss = self._train_step(images, target)
        return self._patch.detach().cpu().numpy(), float(loss)


@expected("retained_graph", fix="retain_graph", thread="Trusted-AI/adversarial-robustness-toolbox#2220", memory=580, held_back=True)
def make_adversarial_patch(fixed=False):
    """`_train_step` calls `loss.backward(retain_graph=True)`, so the graph with the activations is not freed by the backward; `generate`
    holds it through `loss` while the next step builds its own. Cured by: `retain_graph=False`.
    """
    classifier = VideoClassifier(32, 10).cuda().requires_grad_(False)
    attack = AdversarialPatchPyTorch(classifier, 48, learning_rate=0.05, max_iter=3, batch_size=4, retain_graph=not fixed)
    patch, loss = attack.generate(torch.rand(8, 16, 3, 128, 128), torch.randint(0, 10, (8,)))
    return loss


# The weights of a language model are rounded to four bits, layer by layer, with scales that suit samples of text.

class AwqAttention(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x):
        q, k, v = (proj(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class AwqMLP(nn.Module):
    def __init__(self, hidden, intermediate):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(hidden, intermediate, bias=False), nn.Linear(hidden, intermediate, bias=False)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class AwqBlock(nn.Module):
    def __init__(self, hidden, intermediate, heads):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.self_attn, self.mlp = AwqAttention(hidden, heads), AwqMLP(hidden, intermediate)

    def forward(self, x):
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x))


class AwqQuantizer:
    def __init__(self, modules, inps, group_size, w_bit, n_parallel_calib_samples):
        self.modules, self.inps, self.group_size, self.w_bit = modules, inps, group_size, w_bit
        self.n_parallel_calib_samples = n_parallel_calib_samples

    def pseudo_quantize_tensor(self, w):
        groups = w.reshape(-1, self.group_size)
        low, high = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
        scales = (high - low).clamp(min=1e-5) / (2 ** self.w_bit - 1)
        return ((groups / scales).round() * scales).reshape(w.shape)

    @torch.no_grad()
    def _module_forward(self, x, module):
        if self.n_parallel_calib_samples is None:
            return module(x)
        outputs = [module(part).cpu() for part in x.split(self.n_parallel_calib_samples)]
        return torch.cat(outputs).to(x.device)

    def _get_input_feat(self, layer, names):
        input_feat, handles = {name: [] for name in names}, []
        for name in names:
            keep = lambda module, args, output, name=name: input_feat[name].append(args[0].detach().cpu())
            handles.append(layer.get_submodule(name).register_forward_hook(keep))
        self.inps = self._module_forward(self.inps, layer)
        for handle in handles:
            handle.remove()
        return {name: torch.cat(parts) for name, parts in input_feat.items()}

    @torch.no_grad()
    def _search_best_scale(self, module2inspect, layers, inp):
        x_mean = inp.abs().flatten(0, 1).float().mean(0).cuda().half()
        inp = inp.cuda()
        fp16_output = self._module_forward(inp, module2inspect)
        org_sd = {name: value.cpu() for name, value in module2inspect.state_dict().items()}
        errors = []
        for ratio in (0.0, 0.25, 0.5, 0.75):
            scales = x_mean.pow(ratio).clamp(min=1e-4)
            for fc in layers:
                fc.weight.mul_(scales)
                fc.weight.copy_(self.pseudo_quantize_tensor(fc.weight) / scales)
            int_w_output = self._module_forward(inp, module2inspect)
            errors.append(sum((a - b).float().square().mean() for a, b in zip(fp16_output, int_w_output)))
            module2inspect.load_state_dict(org_sd)
        return torch.stack(errors).argmin()

    def quantize(self):
        best = []
        for i, module in enumerate(self.modules):
            module.cuda()
            self.inps = self.inps.cuda()
            input_feat = self._get_input_feat(module, ["self_attn.q_proj", "mlp.gate_proj"])
            attn, mlp = module.self_attn, module.mlp
            best.append(self._search_best_scale(attn, [attn.q_proj, attn.k_proj, attn.v_proj], input_feat["self_attn.q_proj"]))
            best.append(self._search_best_scale(mlp, [mlp.gate_proj, mlp.up_proj], input_feat["mlp.gate_proj"]))
            for linear in module.modules():
                if isinstance(linear, nn.Linear):
                    linear.weight.data = self.pseudo_quantize_tensor(linear.weight.data)
            module.cpu()
            torch.cuda.empty_cache()
        return best


@expected("batch_without_gradients", fix="split", thread="casper-hansen/AutoAWQ#516", memory=600, held_back=True)
def quantize_decoder_blocks(fixed=False):
    """All calibration samples are run through a module at once (`_module_forward` on the whole of `self.inps` / `inp`), so the activations
    inside the module, above all of the `mlp`, are as large as the number of samples. Cured by: Split the samples into batches of
    `n_parallel_calib_samples`, outputs collected on the CPU.
    """
    n_samples, seq_len, hidden = 128, 512, 384
    modules = [AwqBlock(hidden, 1536, 6).half() for _ in range(2)]
    calib = torch.randn(n_samples, seq_len, hidden, dtype=torch.half)
    quantizer = AwqQuantizer(modules, calib, group_size=128, w_bit=4, n_parallel_calib_samples=8 if fixed else None)
    return len(quantizer.quantize())


# Speech is recognized with a transducer; batches are made up of recordings of a given total duration.

class ConformerLayer(nn.Module):
    def __init__(self, d_model, nhead):
        super().__init__()
        self.norm1, self.norm2, self.norm3 = nn.LayerNorm(d_model), nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.self_attn = nn.MultiheadAttention(d_model, nhead, batch_first=True)
        self.depthwise = nn.Conv1d(d_model, d_model, 15, padding=7, groups=d_model)
        self.feed_forward = nn.Sequential(nn.Linear(d_model, 4 * d_model), nn.SiLU(), nn.Linear(4 * d_model, d_model))

    def forward(self, x, key_padding_mask):
        y = self.norm1(x)
        x = x + self.self_attn(y, y, y, key_padding_mask=key_padding_mask, need_weights=False)[0]
        x = x + self.depthwise(self.norm2(x).transpose(1, 2)).transpose(1, 2)
        return x + self.feed_forward(self.norm3(x))


class Transducer(nn.Module):
    def __init__(self, d_model, vocab_size, num_layers, prune_range=5):
        super().__init__()
        self.prune_range = prune_range
        self.encoder_embed = nn.Sequential(nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, 2, 1), nn.ReLU())
        self.out = nn.Linear(16 * 20, d_model)
        self.layers = nn.ModuleList(ConformerLayer(d_model, 4) for _ in range(num_layers))
        self.decoder = nn.Embedding(vocab_size, d_model)
        self.output_linear = nn.Linear(d_model, vocab_size)

    def forward(self, x, x_lens, y):
        x = self.out(self.encoder_embed(x[:, None]).transpose(1, 2).flatten(2))
        lengths = (x_lens // 4).clamp(min=1).to(x.device)
        key_padding_mask = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        for layer in self.layers:
            x = layer(x, key_padding_mask)
        start = (torch.linspace(0, 1, x.shape[1]) * (y.shape[1] - self.prune_range)).long()
        window = (start[:, None] + torch.arange(self.prune_range)).to(x.device)
        logits = self.output_linear(torch.tanh(x[:, :, None] + self.decoder(y)[:, window]))
        symbols = y[:, window][..., None]
        log_probs = logits.log_softmax(-1)
        frame_loss = -torch.logaddexp(log_probs[..., 0], log_probs.gather(-1, symbols)[..., 0]).mean(-1)
        return frame_loss.masked_fill(key_padding_mask, 0.0).sum()


class SimpleCutSampler:
    def __init__(self, durations, max_duration):
        self.durations, self.max_duration = durations, max_duration

    def __iter__(self):
        cuts, total = [], 0.0
        for duration in self.durations:
            if cuts and total + duration > self.max_duration:
                yield sorted(cuts, reverse=True)
                cuts, total = [], 0.0
            cuts.append(duration)
            total += duration
        yield sorted(cuts, reverse=True)


def collate_features(cuts):
    num_frames = torch.tensor([int(duration * 100) for duration in cuts])
    num_tokens = max(int(max(cuts) * 4), 8)
    return {"inputs": torch.randn(len(cuts), int(num_frames.max()), 80),
            "supervisions": {"num_frames": num_frames, "tokens": torch.randint(1, 500, (len(cuts), num_tokens))}}


def filter_uneven_sized_batch(batch, allowed_max_frames):
    inputs, supervisions = batch["inputs"], batch["supervisions"]
    keep_num_utt = max(1, allowed_max_frames // inputs.shape[1])
    if keep_num_utt >= len(inputs):
        return batch
    return {"inputs": inputs[:keep_num_utt], "supervisions": {key: value[:keep_num_utt] for key, value in supervisions.items()}}


def compute_loss(params, model, batch):
    if params.filter_uneven_sized_batch:
        max_frames = params.max_duration * 100
        batch = filter_uneven_sized_batch(batch, int(max_frames * (1.0 + params.allow_excess_duration_ratio)))
    supervisions = batch["supervisions"]
    return model(batch["inputs"].cuda(), supervisions["num_frames"], supervisions["tokens"].cuda())


@expected("larger_step", fix="sizes|tokens", thread="k2-fsa/icefall#843", memory=800, held_back=True)
def train_zipformer(fixed=False):
    """A batch is limited by the sum of the durations, but its recordings are padded to the longest: the batch with one recording of 19.6 s
    among many short ones becomes several times larger after padding than the others. Cured by: `filter_uneven_sized_batch`: drop the
    shortest recordings so that the padded frames stay within the allowed number.
    """
    params = SimpleNamespace(max_duration=100, filter_uneven_sized_batch=fixed, allow_excess_duration_ratio=0.1)
    rng = np.random.default_rng(20)
    durations = list(rng.uniform(10, 16, 24)) + list(rng.uniform(1.2, 2.4, 32)) + [19.6] + list(rng.uniform(10, 16, 20))
    model = Transducer(144, 500, 4).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    tot_loss, frames = 0.0, 0
    for cuts in SimpleCutSampler(durations, params.max_duration):
        batch = collate_features(cuts)
        loss = compute_loss(params, model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        tot_loss, frames = tot_loss + loss.item(), frames + int(batch["supervisions"]["num_frames"].sum())
    return tot_loss / frames


# A segmentation model of 150 classes is tested on photographs; the label maps are wanted at the size of the photograph.

class FCNHead(nn.Module):
    def __init__(self, in_channels, channels, num_classes):
        super().__init__()
        self.convs = nn.Sequential(nn.Conv2d(in_channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())
        self.conv_seg = nn.Conv2d(channels, num_classes, 1)

    def forward(self, x):
        return self.conv_seg(self.convs(x))


class EncoderDecoder(nn.Module):
    def __init__(self, num_classes, width=32):
        super().__init__()
        stages, channels = [], 3
        for factor in (1, 2, 4):
            stages += [nn.Conv2d(channels, factor * width, 3, 2, 1), nn.BatchNorm2d(factor * width), nn.ReLU()]
            channels = factor * width
        self.backbone, self.decode_head = nn.Sequential(*stages), FCNHead(channels, channels, num_classes)

    def encode_decode(self, img):
        out = self.decode_head(self.backbone(img))
        return F.interpolate(out, size=img.shape[2:], mode="bilinear", align_corners=False)

    def whole_inference(self, img, img_meta, rescale):
        seg_logit = self.encode_decode(img)
        if rescale:
            seg_logit = F.interpolate(seg_logit, size=img_meta["ori_shape"], mode="bilinear", align_corners=False)
        return seg_logit

    def simple_test(self, img, img_meta, rescale=True):
        seg_logit = self.whole_inference(img, img_meta, rescale)
        return F.softmax(seg_logit, dim=1).argmax(dim=1).cpu().numpy()


class ADE20KDataset(Dataset):
    sizes = [(683, 1024), (960, 1280), (768, 1024), (1024, 1536)]

    def __len__(self):
        return len(self.sizes)

    def __getitem__(self, index):
        height, width = self.sizes[index]
        image = torch.rand(1, 3, height, width)
        ratio = 320 / min(height, width)
        img = F.interpolate(image, size=(int(height * ratio), int(width * ratio)), mode="bilinear", align_corners=False)
        return img, {"ori_shape": (height, width)}


def imresize_nearest(label_map, size):
    rows = np.arange(size[0]) * label_map.shape[0] // size[0]
    columns = np.arange(size[1]) * label_map.shape[1] // size[1]
    return label_map[rows[:, None], columns[None]]


def single_gpu_test(model, dataset, rescale):
    model.eval()
    results = []
    for index in range(len(dataset)):
        img, img_meta = dataset[index]
        with torch.no_grad():
            result = model.simple_test(img.cuda(), img_meta, rescale=rescale)
        if not rescale:
            result = [imresize_nearest(label_map, img_meta["ori_shape"]) for label_map in result]
        results.extend(label_map.astype(np.uint8) for label_map in result)
    return results


@expected("enlarged", fix="split|cpu", thread="open-mmlab/mmsegmentation#1586", memory=800, held_back=True)
def test_ade_photographs(fixed=False):
    """With `rescale=True`, `whole_inference` resizes the logits of all 150 classes on the GPU to the size of the original photograph, which
    is far larger than the network's input; softmax and argmax are done at that size. Cured by: `rescale=False`, and resize the finished
    label map on the CPU.
    """
    model = EncoderDecoder(150).cuda()
    results = single_gpu_test(model, ADE20KDataset(), rescale=not fixed)
    return sum(result.size for result in results)
