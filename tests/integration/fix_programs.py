"""Small programs that run out of memory, as text: somebody pastes a fix where it says HERE, or in place of OPTIONS."""
import re

_BLOCKS = """
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

# It runs out after 8 steps, in an evaluation whose graphs are kept.
LATE = _BLOCKS + """
model = Net().cuda()
# HERE
optimizer = torch.optim.AdamW(model.parameters(), OPTIONS)
def evaluate():
    return sum(model(torch.randn(4096, 512, device="cuda")).square().mean() for _ in range(4))
for index in range(8):
    optimizer.zero_grad(set_to_none=True)
    model(torch.randn(4096, 512, device="cuda")).square().mean().backward()
    optimizer.step()
evaluate()
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

# The same with a language model of transformers, and with one of a billion parameters in bfloat16.
_LANGUAGE_MODEL = """
import torch
import transformers

torch.manual_seed(0)
MODEL
# HERE
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, OPTIONS)
ids = torch.randint(0, 32000, (8, 1024), device="cuda")
for index in range(4):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""" + _TELL

GPT2 = _LANGUAGE_MODEL.replace("MODEL", "model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).cuda()")

LLAMA = _LANGUAGE_MODEL.replace("MODEL", """torch.set_default_dtype(torch.bfloat16)
with torch.device("cuda"):
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        hidden_size=2048, intermediate_size=5504, num_hidden_layers=20, num_attention_heads=16, num_key_value_heads=16,
        vocab_size=32000, use_cache=False))""")

RESNET50 = """
import torch
import torchvision

model = torchvision.models.resnet50().cuda()
# HERE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, OPTIONS)
images = torch.randn(256, 3, 224, 224, device="cuda")
labels = torch.zeros(256, dtype=torch.long, device="cuda")
for index in range(4):
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
""" + _TELL

# Batch sizes as an argument, for fit.
FITTED = {
    "resnet50": ("import torchvision", "torchvision.models.resnet50()", "torch.randn(batch, 3, 224, 224, device='cuda')"),
    "vit": ("import torchvision", "torchvision.models.vit_b_16()", "torch.randn(batch, 3, 224, 224, device='cuda')"),
    "gpt2": ("import transformers", "transformers.GPT2LMHeadModel(transformers.GPT2Config(use_cache=False))",
             "torch.randint(0, 50257, (batch, 256), device='cuda')"),
}


def fitted(name):
    """A program that trains this model with the batch size of its argument."""
    imports, model, batch = FITTED[name]
    return f"""
import sys
import torch
{imports}

batch = int(sys.argv[1])
model = {model}.cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = {batch}
for index in range(3):
    y = model(x)
    loss = getattr(y, "logits", y).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


# Every loss keeps the graph of its step.
GROWING = _BLOCKS + """
model = Net(depth=2).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.randn(8192, 512, device="cuda")
losses = []
for index in range(40):
    loss = model(x).square().mean()
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
    losses.append(loss)
""" + _TELL

# Nobody runs backward.
INFERENCE = _BLOCKS + """
model = Net().cuda().eval()
# HERE
x = torch.randn(16384, 512, device="cuda")
for index in range(4):
    scores = model(x)
""" + _TELL

# Validation keeps the graph of each of its passes.
EVALUATION = _BLOCKS + """
model = Net(depth=2).cuda()
# HERE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def validate(model):
    return sum(model(torch.randn(8192, 512, device="cuda")).square().mean() for _ in range(16))

for index in range(2):
    optimizer.zero_grad()
    loss = model(torch.randn(8192, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
validate(model)
""" + _TELL

# The model is an nn.Sequential of plain layers; the parser has the batch size.
SEQUENTIAL = """
import argparse
import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8192)
arguments = parser.parse_args()
model = nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(512, 512), nn.GELU())]).cuda()
# HERE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, OPTIONS)
for index in range(3):
    optimizer.zero_grad()
    loss = model(torch.randn(arguments.batch_size, 512, device="cuda")).square().mean()
    loss.backward()
    optimizer.step()
""" + _TELL

# Variables keep a large tensor of each step until the next one has made its own.
HELD = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 2048)).cuda()
# HERE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for index in range(4):
    inputs = torch.randn(4096, 2048, device="cuda")
    outputs = model(inputs)
    scores = torch.softmax(outputs.detach().repeat(1, 6), -1)
    loss = outputs.square().mean() + scores.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
""" + _TELL

# The names that the lines for micro-batches use.
MICRO_BATCHES = _BLOCKS + """
model = Net().cuda()
# HERE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, OPTIONS)
inputs, labels = torch.randn(16384, 512, device="cuda"), torch.zeros(16384, dtype=torch.long, device="cuda")
loss_of = nn.functional.cross_entropy
for index in range(3):
    loss = loss_of(model(inputs), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
""" + _TELL

ALL = {name.lower(): text for name, text in list(globals().items()) if name.isupper() and isinstance(text, str) and not name.startswith("_")}


def paste(program, lines):
    """The program with these lines, as somebody would write them in."""
    above, inside = [], []
    for line in lines:
        if line.startswith("optimizer = torch.optim."):
            program = program.replace("OPTIONS", line.split("..., ")[1].rstrip(")"))
        elif line.startswith("optimizer = "):
            program = re.sub(r"torch\.optim\.\w+", line.removeprefix("optimizer = ").removesuffix("(...)"), program)
        elif line.startswith("optimizer.zero_grad("):
            program = program.replace("optimizer.zero_grad(ZERO)", line)
        elif line.startswith("DataLoader("):
            program = re.sub(r"batch_size=\d+", line.split("..., ")[1].rstrip(")"), program)
            inside = lines[lines.index(line) + 1:]
            break
        elif not line.startswith("export "):
            above.append(line)
    if inside:  # the end of a step
        begin = program.index("    loss.backward()\n")
        end = program.index("    optimizer.zero_grad()\n") + len("    optimizer.zero_grad()\n")
        program = program[:begin] + "".join(f"    {line}\n" for line in inside) + program[end:]
    return as_it_is(program.replace("# HERE", "\n".join(above)))


def as_it_is(program):
    return program.replace(", OPTIONS", "").replace("ZERO", "set_to_none=False")
