"""Programs whose memory `oomdiag fit` is to know as a function of their command line. Run by test_points.py:

    python fit_programs.py NAME BATCH [LENGTH]

`@program(second=…, kept_back=True)`: what the second number is, as --vary takes it; whether the rules of the function were
written without a look at this program.
"""
import os
import sys

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

PROGRAMS = {}
STEPS = 3


def program(function=None, *, batch="1..48", second=None, kept_back=False):
    def register(function):
        function.batch, function.second, function.kept_back = batch, second, kept_back
        PROGRAMS[function.__name__] = function
        return function
    return register if function is None else register(function)


def train(model, make_loss, optimizer=torch.optim.AdamW, steps=STEPS, **options):
    kept = torch.empty(int(os.environ.get("KEPT_MIB", 0)) << 20, dtype=torch.uint8, device="cuda")  # noqa: F841, see test_borders.py
    model = model.cuda()
    optimizer = optimizer([p for p in model.parameters() if p.requires_grad], **options)
    for step in range(steps):
        make_loss(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()


def tokens(*size, most=1000):
    return torch.randint(0, most, size, device="cuda")


def images(batch, size=64, channels=3):
    return torch.randn(batch, channels, size, size, device="cuda")


def classes(batch, most=10):
    return torch.randint(0, most, (batch,), device="cuda")


# --- those that the rules were written with ---


@program
def cnn(batch):
    layers, width = [], 3
    for wider in (32, 64, 128):
        layers += [nn.Conv2d(width, wider, 3, padding=1), nn.BatchNorm2d(wider), nn.ReLU(), nn.MaxPool2d(2)]
        width = wider
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(width * 64, 10))
    train(model, lambda model, _: functional.cross_entropy(model(images(batch)), classes(batch)), torch.optim.Adam)


@program
def resnet18(batch):
    import torchvision
    model = torchvision.models.resnet18(num_classes=10)
    train(model, lambda model, _: functional.cross_entropy(model(images(batch, 96)), classes(batch)), torch.optim.SGD, momentum=0.9, lr=0.1)


@program
def vit_amp(batch):
    import torchvision
    model = torchvision.models.VisionTransformer(image_size=64, patch_size=8, num_layers=3, num_heads=4, hidden_dim=128, mlp_dim=512, num_classes=10)
    scaler = torch.amp.GradScaler()

    def loss(model, _):
        with torch.autocast("cuda", torch.float16):
            return scaler.scale(functional.cross_entropy(model(images(batch)), classes(batch)))

    train(model, loss)


@program(batch="1..24", second="length=16..256")
def gpt2(batch, length):
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=5000, n_positions=512))

    def loss(model, _):
        x = tokens(batch, length)
        return model(x, labels=x).loss

    train(model, loss)


@program(batch="1..24", second="length=16..256")
def llama_checkpointed(batch, length):
    from transformers import LlamaConfig, LlamaForCausalLM
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=3, hidden_size=128, intermediate_size=352, num_attention_heads=4,
                                         num_key_value_heads=2, vocab_size=4000, max_position_embeddings=512)).to(torch.bfloat16)
    model.gradient_checkpointing_enable()
    model.train()

    def loss(model, _):
        x = tokens(batch, length)
        return model(x, labels=x).loss

    train(model, loss)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, words=2000, width=192):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.recurrent = kind(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        return self.head(self.recurrent(self.words(x))[0])


@program(batch="1..32", second="length=8..128")
def lstm(batch, length):
    def loss(model, _):
        x = tokens(batch, length)
        return functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

    train(Recurrent(), loss)


class Unet(nn.Module):
    """Of a diffusion model: two levels with skips, attention at the bottom, a time embedding."""

    def __init__(self, width=32):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, 4 * width), nn.SiLU(), nn.Linear(4 * width, 2 * width))
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, 2 * width, 3, stride=2, padding=1))
        self.middle = nn.Sequential(nn.GroupNorm(8, 2 * width), nn.SiLU(), nn.Conv2d(2 * width, 2 * width, 3, padding=1))
        self.attention = nn.MultiheadAttention(2 * width, 4, batch_first=True)
        self.up = nn.ConvTranspose2d(2 * width, width, 2, stride=2)
        self.last = nn.Conv2d(2 * width, 3, 3, padding=1)
        self.width = width

    def forward(self, x, t):
        time = self.time(t)
        first = self.first(x)
        low = self.middle(self.down(first)) + time[:, :, None, None]
        flat = low.flatten(2).transpose(1, 2)
        low = low + self.attention(flat, flat, flat, need_weights=False)[0].transpose(1, 2).reshape(low.shape)
        return self.last(torch.cat([self.up(low), first], 1))


@program(batch="1..24", second="size=16..64:8")
def diffusion_unet(batch, size):
    def loss(model, _):
        x = images(batch, size)
        return functional.mse_loss(model(x + torch.randn_like(x), torch.randn(batch, model.width, device="cuda")), x)

    train(Unet(), loss)


class Lora(nn.Module):
    def __init__(self, linear, rank=8):
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.down = nn.Linear(linear.in_features, rank, bias=False)
        self.up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


class Blocks(nn.Module):
    """A transformer over words."""

    def __init__(self, words=3000, width=160, depth=3, adapt=lambda linear: linear):
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 4 * width, batch_first=True, dropout=0.1, norm_first=True)
                                    for _ in range(depth))
        for block in self.blocks:
            block.linear1, block.linear2 = adapt(block.linear1), adapt(block.linear2)
        self.head = nn.Linear(width, words)

    def forward(self, x):
        x = self.words(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@program(batch="1..24", second="length=16..192")
def lora(batch, length):
    model = Blocks(adapt=Lora)
    model.words.requires_grad_(False)

    def loss(model, _):
        x = tokens(batch, length)
        return functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

    train(model, loss)


@program(batch="1..24", second="length=32..192")
def variable_lengths(batch, length):
    def loss(model, step):
        x = tokens(batch, max(1, length - 7 * step))
        return functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

    train(Blocks(), loss)


@program(batch="1..48", second="length=16..192")
def fsdp_rank(batch, length):
    import torch.testing._internal.distributed.fake_pg  # registers the backend
    from torch import distributed
    from torch.distributed.fsdp import fully_shard
    distributed.init_process_group("fake", rank=0, world_size=8, store=torch.testing._internal.distributed.fake_pg.FakeStore())
    model = Blocks().cuda()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)

    def loss(model, _):
        x = tokens(batch, length)
        return functional.cross_entropy(model(x).flatten(0, 1), x.flatten())

    train(model, loss)


# --- kept back ---


@program(batch="1..24", second="length=16..192", kept_back=True)
def bert(batch, length):
    from transformers import BertConfig, BertForSequenceClassification
    model = BertForSequenceClassification(BertConfig(num_hidden_layers=3, hidden_size=144, num_attention_heads=4, intermediate_size=400,
                                                     vocab_size=3000, num_labels=3))
    train(model, lambda model, _: model(tokens(batch, length), labels=classes(batch, 3)).loss)


@program(kept_back=True)
def mobilenet(batch):
    import torchvision
    model = torchvision.models.mobilenet_v3_small(num_classes=10)
    train(model, lambda model, _: functional.cross_entropy(model(images(batch, 96)), classes(batch)), torch.optim.RMSprop)


@program(batch="1..32", second="length=8..96", kept_back=True)
def gru_with_attention(batch, length):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Recurrent(nn.GRU, 1500, 128), Recurrent(nn.GRU, 1500, 128)

        def forward(self, x, y):
            keys = self.encoder.recurrent(self.encoder.words(x))[0]
            queries = self.decoder.recurrent(self.decoder.words(y))[0]
            weights = torch.softmax(queries @ keys.transpose(1, 2), -1)
            return self.decoder.head(queries + weights @ keys)

    def loss(model, _):
        x, y = tokens(batch, length), tokens(batch, length + 5)
        return functional.cross_entropy(model(x, y).flatten(0, 1), y.flatten())

    train(Model(), loss, torch.optim.Adam)


@program(batch="2..32", second="size=32..96:16", kept_back=True)
def segmentation(batch, size):
    def block(width, wider):
        return nn.Sequential(nn.Conv2d(width, wider, 3, padding=1, bias=False), nn.BatchNorm2d(wider), nn.LeakyReLU())
    model = nn.Sequential(block(3, 24), nn.AvgPool2d(2), block(24, 48), nn.AvgPool2d(2), block(48, 96), nn.Upsample(scale_factor=2),
                          block(96, 48), nn.Upsample(scale_factor=2), nn.Conv2d(48, 7, 1))

    def loss(model, _):
        with torch.autocast("cuda", torch.bfloat16):
            return functional.cross_entropy(model(images(batch, size)), torch.randint(0, 7, (batch, size, size), device="cuda"))

    train(model, loss)


@program(batch="1..32", second="length=16..128", kept_back=True)
def mixed_head(batch, length):
    """Checkpointed blocks under bfloat16, an auxiliary loss, gradients of two micro-batches."""
    model = Blocks(words=1200, width=96)

    def loss(model, _):
        for part in range(2):
            x = tokens(batch, length)
            with torch.autocast("cuda", torch.bfloat16):
                hidden = model.words(x)
                for block in model.blocks:
                    hidden = checkpoint(block, hidden, use_reentrant=False)
                total = functional.cross_entropy(model.head(hidden).flatten(0, 1), x.flatten()) + hidden.float().square().mean()
            if part == 0:
                total.backward()
        return total

    train(model, loss)


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]](*map(int, sys.argv[2:]))
    print("PEAK", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
