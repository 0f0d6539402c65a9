"""oomdiag fix --budget and fit --fastest: the plan that is called the fastest fits, and takes what was predicted.

Usage: test_plan.py --build BUILD [GROUP]. Runs on the virtual device.
"""
import contextlib
import functools
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import types
import unittest
import weakref

import torch
from torch import nn

import fix_programs

BUILD = pathlib.Path(sys.argv[sys.argv.index("--build") + 1]).absolute() if "--build" in sys.argv else pathlib.Path("build").absolute()
OOMDIAG = BUILD / "bin" / "oomdiag"
ROOT = pathlib.Path(__file__).resolve().parents[2]
GPU = ["--device", "rtx3060"]
MIB = 2**20

# A language model of eight equal blocks.
GPT = """
import torch
from torch import nn
from torch.nn import functional as F

class Block(nn.Module):
    def __init__(self, width=256, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

class GPT(nn.Module):
    def __init__(self, vocabulary=512, width=256, depth=8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

model = GPT().cuda()
# HERE
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
tokens = torch.randint(0, 512, (16, 513), device="cuda")
for step in range(3):
    optimizer.zero_grad(set_to_none=True)
    logits = model(tokens[:, :-1]).float()
    loss = F.cross_entropy(logits.reshape(-1, 512), tokens[:, 1:].reshape(-1))
    loss.backward()
    optimizer.step()
print("PEAK", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


class Plan(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def oomdiag(self, command, *options, program=GPT, code=0):
        file = self.folder / "program.py"
        file.write_text(program)
        done = subprocess.run([OOMDIAG, command, *GPU, *map(str, options), "--", sys.executable, file], capture_output=True, text=True,
                              cwd=self.folder, timeout=1500)
        self.assertEqual(done.returncode, code, done.stderr + done.stdout)
        return done.stdout

    def plan(self, budget, *options):
        found = json.loads(self.oomdiag("fix", "--budget", budget, "--json", *options))
        self.assertEqual(found["schema"], "oomdiag-plan/1")
        return found

    def peaks(self, program, memory):
        output = self.oomdiag("run", "--memory", memory, "--no-progress", program=program)
        return [int(word) for word in re.search("PEAK (.*)", output).group(1).split()]

    def check_plan(self, plan, available):
        self.assertTrue(plan["fits"])
        self.assertLessEqual(plan["measured_reserved_bytes"], available)
        self.assertAlmostEqual(plan["measured_peak_bytes"] / plan["predicted_peak_bytes"], 1, delta=0.03)
        # A checkpoint stops at the last tensor that backward needs; what that leaves out is not predicted.
        self.assertAlmostEqual(plan["step_time_ns"] / plan["predicted_step_time_ns"], 1, delta=0.05)


class OffloadedBlocks:
    """The lines to write, with copies to the host that are clones: tensors are those of the host."""

    def test_gradients_of_offloaded_blocks_are_those_of_blocks_that_keep_their_tensors(self):
        plain = self.gradients([])
        for chosen in ([0], [0, 2, 4], [0, 1, 2, 3, 4], [5], [1, 4]):
            self.assertTrue(all(map(torch.equal, plain, self.gradients(chosen))), chosen)

    def gradients(self, chosen):
        """Of three steps of training."""
        torch.manual_seed(0)
        model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.3), nn.Linear(64, 32)) for _ in range(6)])
        self.functions()["keep_on_host"](model, [model[i] for i in chosen])
        optimizer, x, found = torch.optim.SGD(model.parameters(), 0.1), torch.randn(16, 32), []
        for _ in range(3):
            optimizer.zero_grad()
            y = x
            for block in model:
                y = block(y)
            y.square().sum().backward()
            optimizer.step()
            found += [parameter.grad.clone() for parameter in model.parameters()]
        return found

    def functions(self):
        text = (ROOT / "extension/python/fixes/oomdiag_fixes/offload_blocks.py").read_text()
        text = text[text.index("class HostBlock"):text.index("def apply")]
        for plain, here in (("not tensor.is_cuda or tensor.nbytes < 1 << 20", "tensor.nbytes < 64"), (", pin_memory=True", ""),
                            ('device="cuda"', 'device="cpu"'), ("torch.cuda.", "cuda.")):
            self.assertIn(plain, text)
            text = text.replace(plain, here)
        stream = types.SimpleNamespace(wait_stream=lambda other: None)
        cuda = types.SimpleNamespace(Stream=lambda: stream, current_stream=lambda: stream, stream=lambda stream: contextlib.nullcontext())
        names = {"torch": torch, "cuda": cuda, "functools": functools, "weakref": weakref}
        exec(text, names)
        return names


class Quick(Plan, OffloadedBlocks):
    def test_the_fastest_plan_fits_takes_what_was_predicted_and_is_what_its_lines_do(self):
        budget = 800 * MIB
        found = self.plan(budget, "--html", "page.html")
        available = found["before"]["available_bytes"]
        self.assertEqual(found["before"]["outcome"], "out_of_memory")
        for name in "fastest", "fastest_with_same_numerics":
            self.check_plan(found["plans"][found[name]], available)
        self.assertLess(found["gap"], 0.03)

        same = found["plans"][found["fastest_with_same_numerics"]]
        # What the bus can copy beside compute goes to the host, and the first of the others run again.
        others = [f"blocks.{i}" for i in range(8) if f"blocks.{i}" not in same["offloaded_blocks"]]
        count = len(same["recomputed_blocks"])
        self.assertEqual(same["recomputed_blocks"], others[:count])
        self.assertEqual(same["offloaded_blocks"], ["blocks.0", "blocks.2", "blocks.4"])
        self.assertIn("keep_on_host([*model.blocks], [model.blocks[0], model.blocks[2], model.blocks[4]])", same["how"])
        self.assertEqual(self.peaks(fix_programs.paste(GPT, same["how"]), budget),
                         [same["measured_peak_bytes"], same["measured_reserved_bytes"]])
        # One block less was run, and does not fit.
        less = next(plan for plan in found["plans"]
                    if plan["ids"] == same["ids"] and len(plan["recomputed_blocks"]) == count - 1)
        self.assertEqual(less["fits"], False)

        page = (self.folder / "page.html").read_text()
        self.assertEqual(page.count("<circle"), len(found["plans"]))
        self.assertNotRegex(page, "<script|src=|href=")

    def test_a_program_that_fits_keeps_its_blocks(self):
        found = json.loads(self.oomdiag("fit", "--fastest", "--json"))
        self.assertEqual(found["plans"][found["fastest_with_same_numerics"]]["label"], "as it is")
        self.assertTrue(all(not plan["recomputed_blocks"] for plan in found["plans"] if plan["fits"]))

    def test_where_nothing_fits_the_answer_is_no(self):
        said = self.oomdiag("fix", "--budget", 256 * MIB, code=3)
        self.assertIn("no plan that was found fits", said)


class Slow(Plan):
    def test_eight_budgets_give_rising_peaks_and_falling_times(self):
        plans = []
        for budget in range(500, 1300, 100):
            found = self.plan(budget * MIB)
            plans.append(found["plans"][found["fastest_with_same_numerics"]])
            self.check_plan(plans[-1], found["before"]["available_bytes"])
        peaks, times = ([plan[key] for plan in plans] for key in ("measured_peak_bytes", "step_time_ns"))
        print([(plan["label"], plan["predicted_peak_bytes"], plan["measured_peak_bytes"]) for plan in plans])
        self.assertEqual(peaks, sorted(peaks))
        self.assertEqual(times, sorted(times, reverse=True))


if __name__ == "__main__":
    if "--build" in sys.argv:
        del sys.argv[sys.argv.index("--build"):sys.argv.index("--build") + 2]
    unittest.main(verbosity=2)
