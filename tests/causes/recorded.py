"""Small programs that fit, of the kinds that people take memory snapshots of. snapshots.py compares what a snapshot says of each
with what our own recording of the same process says.
"""
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from failing import Gpt, Layer, Residual, Stage


def train(model, batches, optimizer, loss_of, steps=3, scaler=None):
    """The ordinary loop; `loss_of` takes the model and a batch of the host."""
    for _, batch in zip(range(steps), batches):
        optimizer.zero_grad()
        loss = loss_of(model, [part.cuda() for part in batch])
        if scaler is None:
            loss.backward()
            optimizer.step()
            continue
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def images(count, side, classes=10):
    while True:
        yield torch.randn(count, 3, side, side), torch.randint(0, classes, (count,))


def words(count, length, vocabulary=8192):
    while True:
        yield [torch.randint(0, vocabulary, (count, length))]


def classify(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def residual_net(width=32, blocks=4):
    return nn.Sequential(Stage(3, width), *[Residual(width) for _ in range(blocks)], nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                         nn.Linear(width, 10))


# Those by which the rules were written.

def cnn():
    model = residual_net().cuda()
    train(model, images(16, 64), torch.optim.Adam(model.parameters()), classify)


def gpt_adamw():
    model = Gpt(layers=4).cuda()
    train(model, words(4, 256), torch.optim.AdamW(model.parameters()), lambda m, batch: m(batch[0]))


class Tagger(nn.Module):
    def __init__(self, vocabulary=4096, width=256):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids):
        hidden, _ = self.lstm(self.embedding(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def lstm():
    model = Tagger().cuda()
    train(model, words(16, 64, 4096), torch.optim.Adam(model.parameters()), lambda m, batch: m(batch[0]))


def amp():
    model = residual_net(64).cuda()

    def loss_of(model, batch):
        with torch.autocast("cuda", torch.float16):
            return classify(model, batch)
    train(model, images(16, 64), torch.optim.SGD(model.parameters(), 0.1), loss_of, scaler=torch.amp.GradScaler("cuda"))


class Checkpointed(Gpt):
    def forward(self, ids):
        x = self.embedding(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.h:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), ids.flatten())


def checkpointing():
    model = Checkpointed().cuda()
    train(model, words(4, 256), torch.optim.AdamW(model.parameters()), lambda m, batch: m(batch[0]))


def inference():
    model = residual_net(64).cuda().eval()
    with torch.no_grad():
        for _, batch in zip(range(3), images(32, 96)):
            model(batch[0].cuda()).argmax(1).cpu()


class LowRank(nn.Module):
    """A frozen linear layer with a trained update of low rank."""

    def __init__(self, base, rank=8):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def low_rank():
    model = Gpt(layers=4).requires_grad_(False)
    for layer in model.h:
        layer.attention.qkv = LowRank(layer.attention.qkv)
        layer.mlp[0] = LowRank(layer.mlp[0])
    model = model.cuda()
    trained = [p for p in model.parameters() if p.requires_grad]
    train(model, words(4, 256), torch.optim.AdamW(trained), lambda m, batch: m(batch[0]))


def sgd_momentum():
    model = residual_net(64, 2).cuda()
    train(model, images(8, 64), torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), classify)


# Those that were kept back until the rules were there.

def auto_encoder():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 1024), nn.GELU(), nn.Linear(1024, 64), nn.GELU(),
                          nn.Linear(64, 1024), nn.GELU(), nn.Linear(1024, 3 * 32 * 32)).to("cuda")
    rebuild = lambda m, batch: F.mse_loss(m(batch[0]), batch[0].flatten(1))
    train(model, images(512, 32), torch.optim.RMSprop(model.parameters()), rebuild)


def accumulated():
    """Gradients of four micro-batches, made on the GPU from the beginning."""
    with torch.device("cuda"):
        model = Gpt(layers=3, width=192, heads=3)
    optimizer = torch.optim.NAdam(model.parameters())
    for _ in range(2):
        for _, batch in zip(range(4), words(2, 256)):
            (model(batch[0].cuda()) / 4).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


class PatchNet(nn.Module):
    def __init__(self, width=192, layers=4, patch=8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.position = nn.Parameter(torch.zeros(1, 64, width))
        self.layers = nn.ModuleList(Layer(width, 3) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2) + self.position
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


def patches_bf16():
    """Under autocast to bfloat16, with the fused optimizer, and an evaluation between the steps."""
    model = PatchNet().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def loss_of(model, batch):
        with torch.autocast("cuda", torch.bfloat16):
            return classify(model, batch)
    for _ in range(2):
        train(model, images(32, 64), optimizer, loss_of, steps=2)
        with torch.inference_mode():
            model(next(images(32, 64))[0].cuda())
