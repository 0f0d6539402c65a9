"""Small programs that run out of memory, as text: somebody pastes a remedy where it says HERE, or in place of OPTIONS."""

_BLOCKS = """
import functools
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))

class Net(nn.Module):
    def __init__(self, width=512, depth=6):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 16)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)
"""

_TELL = """
print("PEAK", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""

# Most of it is activations.
ACTIVATIONS = _BLOCKS + """
model = Net().cuda()
# HERE
optimizer = torch.optim.AdamW(model.parameters(), OPTIONS)
x = torch.randn(16384, 512, device="cuda")
for index in range(4):
    optimizer.zero_grad(set_to_none=True)
    loss = model(x).float().square().mean()
    loss.backward()
    optimizer.step()
""" + _TELL

# Most of it is parameters, their gradients and what the optimizer makes of them.
OPTIMIZER = _BLOCKS + """
model = Net(width=2048, depth=4).cuda()
# HERE
optimizer = torch.optim.Adam(model.parameters(), OPTIONS)
x = torch.randn(64, 2048, device="cuda")
for index in range(4):
    optimizer.zero_grad(set_to_none=True)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
""" + _TELL

# Gradients are kept through forward.
KEPT_GRADIENTS = _BLOCKS + """
model = Net(width=2048, depth=4).cuda()
# HERE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
x = torch.randn(12288, 2048, device="cuda")
for index in range(4):
    optimizer.zero_grad(ZERO)
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
""" + _TELL

# Images, a loader, batch norms.
IMAGES = """
import functools
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def block(channels):
    return nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.Sequential(*[block(32) for _ in range(5)]),
                      nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).cuda()
# HERE
data = TensorDataset(torch.randn(256, 3, 64, 64), torch.zeros(256, dtype=torch.long))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, OPTIONS)
for index, (images, labels) in enumerate(DataLoader(data, batch_size=64)):
    loss = nn.functional.cross_entropy(model(images.cuda()), labels.cuda())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""" + _TELL

# Nobody runs backward.
INFERENCE = _BLOCKS + """
model = Net().cuda().eval()
# HERE
x = torch.randn(16384, 512, device="cuda")
for index in range(4):
    scores = model(x)
""" + _TELL

ALL = {name.lower(): text for name, text in list(globals().items()) if name.isupper() and isinstance(text, str) and not name.startswith("_")}


def paste(program, lines):
    """The program with these lines, as somebody would write them in."""
    above = []
    for line in lines:
        if line.startswith("optimizer = torch.optim."):
            program = program.replace("OPTIONS", line.split("..., ")[1].rstrip(")"))
        elif line.startswith("optimizer.zero_grad("):
            program = program.replace("optimizer.zero_grad(ZERO)", line)
        elif not line.startswith("export "):
            above.append(line)
    return as_it_is(program.replace("# HERE", "\n".join(above)))


def as_it_is(program):
    return program.replace(", OPTIONS", "").replace("ZERO", "set_to_none=False")
