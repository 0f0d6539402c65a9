"""What a metered run shows: FLOPs as torch.utils.flop_counter counts them, and the work of a step in the report.

    python tests/integration/test_cost.py --build BUILD_FOLDER [Quick | Slow] [unittest arguments]
"""
import argparse
import collections
import csv
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
DEVICES = HERE.parents[1] / "extension/virtual_device/device_files"
build = pathlib.Path("build").resolve()
QUICK = ("mlp", "conv2d_groups", "conv2d_depthwise", "conv_transpose2d", "attention_flash", "attention_efficient", "resnet18", "gpt2")

TRAIN = """
import torch
from torch import nn
net = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 16 * 16, 10)).cuda()
optimizer = torch.optim.SGD(net.parameters(), 0.1)
for _ in range(3):
    loss = net(torch.randn(64, 3, 16, 16).cuda()).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
CHECKPOINTS = """
import torch
from torch import nn
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(512, 2048), nn.Linear(2048, 512)
    def forward(self, x):
        return x + self.b(torch.relu(self.a(x)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(12)])
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x
net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(3):
    net(torch.randn(16384, 512, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LSTM = """
import torch
net = torch.nn.LSTM(16, 32, num_layers=2, bidirectional=True).cuda()
marker = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1, device="cuda"))], lr=1)
net(torch.randn(10, 4, 16, device="cuda"))[0].sum().backward()
marker.step()
"""


ORDERS = """
import torch
a, b = torch.ones(64, 32, device="cuda"), torch.ones(32, device="cuda")
a * a, a * b, a.t() * 2, torch.mm(a, a.t()), a.half()
"""


TRITON = """
import torch, triton
import triton.language as tl

@triton.jit
def scale(x, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at, mask=at < n) * 2, mask=at < n)

@triton.jit
def divide_by_sum(x, columns, BLOCK: tl.constexpr):
    row = x + tl.program_id(0) * columns
    total = 0.0
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(row + at, mask=at < columns, other=0.0))
    for begin in range(0, columns, BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(row + at, tl.load(row + at, mask=at < columns) / total, mask=at < columns)

x = torch.ones(1024, 4096, device="cuda")
y = torch.empty_like(x)
scale[(x.numel() // 1024,)](x, y, x.numel(), BLOCK=1024)
divide_by_sum[(1024,)](x, 4096, BLOCK=512)
"""


class Base(unittest.TestCase):
    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag-cost"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def oomdiag(self, *arguments):
        done = subprocess.run([build / "bin/oomdiag", *arguments], capture_output=True, text=True, timeout=1500)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        return done

    def run_program(self, *program, options=("--meter",), device="a100-80"):
        return self.oomdiag("run", "--device", device, *options, "--folder", self.folder, "-o", self.folder / "report.json", "--",
                            sys.executable, *program)

    def report(self):
        return json.loads((self.folder / "report.json").read_text())

    def work_rows(self):
        run = next(self.folder.glob("oomdiag-*"))
        return list(csv.DictReader(self.oomdiag("export", run, "--to", "work", "-o", "-").stdout.splitlines()))

    def flops_by_step(self):
        sums = collections.Counter()
        for row in self.work_rows():
            sums[int(row["step"])] += int(row["flops"]) * int(row["calls"])
            self.assertEqual(row["metered"], "1", row)
        return sums

    def check_flops(self, names):
        done = self.run_program(HERE / "flop_programs.py", *names)
        counted = dict(json.loads(line) for line in done.stdout.splitlines() if line.startswith("["))
        metered = self.flops_by_step()
        wrong = {name: (metered[2 * i + 2], flops) for i, (name, flops) in enumerate(counted.items()) if metered[2 * i + 2] != flops}
        self.assertEqual(wrong, {})
        self.assertEqual(list(counted), list(names))


class Quick(Base):
    def test_flops_are_those_of_the_flop_counter(self):
        self.check_flops(QUICK)

    def test_the_weights_of_a_recurrent_network_multiply_each_row_once_and_in_backward_twice(self):
        self.run_program("-c", LSTM)
        first = 2 * 4 * 32 * (16 + 32)  # two directions, four gates
        second = 2 * 4 * 32 * (64 + 32)
        self.assertEqual(self.flops_by_step()[1], 3 * 2 * 10 * 4 * (first + second))

    def test_a_report_has_the_work_of_the_last_step_and_how_long_it_takes(self):
        done = self.run_program("-c", TRAIN)
        work = self.report()["work"]
        self.assertEqual(work["step"], 3)
        convolution = 2 * 64 * 16 * 16 * 32 * 3 * 9
        linear = 2 * 64 * 32 * 16 * 16 * 10
        self.assertEqual(work["flops"], 2 * convolution + 3 * linear)
        self.assertEqual(work["flops_by_dtype"], {"fp32": work["flops"]})
        self.assertEqual(work["bus_bytes"], 64 * 3 * 16 * 16 * 4)
        self.assertEqual({part["name"] for part in work["phases"]}, {"forward", "backward", "optimizer"})
        self.assertEqual(sum(part["flops"] for part in work["phases"]), work["flops"])
        by_module = {part["name"]: part["flops"] for part in work["modules"]}
        self.assertEqual(by_module["0"], 2 * convolution)
        self.assertEqual(by_module["3"], 3 * linear)
        self.assertLess(work["step_time_low_ns"], work["step_time_ns"])
        self.assertLess(work["step_time_ns"], work["step_time_high_ns"])
        self.assertIn("step time", done.stderr)

    def test_operators_have_the_shapes_of_their_tensors_and_a_family_by_how_these_lie(self):
        self.run_program("-c", ORDERS)
        found = {(row["operator"], row["inputs"]): row["family"] for row in self.work_rows()}
        self.assertEqual(found["aten::mul", "Float 64x32, Float 64x32"], "elementwise")
        self.assertEqual(found["aten::mul", "Float 64x32, Float 32"], "mixed_elementwise")
        self.assertEqual(found["aten::mul", "Float 32x64~, Long"], "strided_elementwise")
        self.assertEqual(found["aten::mm", "Float 64x32, Float 32x64~"], "fp32_product")
        self.assertEqual(found["aten::copy_", "Half 64x32, Float 64x32"], "copy")

    def test_kernels_of_triton_take_what_their_code_says_that_they_read_and_write(self):
        (self.folder / "program.py").write_text(TRITON)
        self.run_program(self.folder / "program.py")
        found = {row["operator"]: row for row in self.work_rows() if row["operator"].startswith("kernel::")}
        matrix = 1024 * 4096 * 4
        self.assertEqual({name: (row["inputs"], int(row["memory_bytes"])) for name, row in found.items()},
                         {"kernel::scale": (f"Byte {matrix}", 2 * matrix), "kernel::divide_by_sum": (f"Byte {2 * matrix}", 3 * matrix)})
        self.assertEqual({row["family"] for row in found.values()}, {"fused"})
        self.assertEqual({row["metered"] for row in found.values()}, {"1"})

    def test_a_device_file_of_ones_own_has_rates_of_its_own(self):
        file = json.loads((DEVICES / "a100-80.json").read_text())
        for name in ("memory_bytes_per_second", "fp32_flops_per_second", "tf32_flops_per_second"):
            file[name]["value"] //= 1000
        (self.folder / "slow.json").write_text(json.dumps(file))
        self.run_program("-c", TRAIN, device=self.folder / "slow.json")
        slow = self.report()["work"]
        self.assertGreater(slow["step_time_ns"], slow["host_time_ns"])
        self.assertNotEqual(slow["bound_by"], "host")

    def test_the_collectives_of_a_rank_are_counted_by_their_bytes_and_have_a_time(self):
        weights = 4 * 4 * (512 * 1024 + 1024 + 1024 * 512 + 512)  # bytes of the four blocks of rank_programs.py
        for name, link_bytes in ("ddp", 2 * 3 / 4 * weights), ("fsdp2", 3 * 3 / 4 * weights):
            with self.subTest(name):
                self.run_program(HERE / "rank_programs.py", name, options=("--meter", "--world-size", "4", "--rank", "1"))
                work = self.report()["work"]
                self.assertEqual(work["link_bytes"], link_bytes)
                self.assertLess(work["exposed_communication_time_ns"], work["communication_time_ns"])
                self.assertLess(work["communication_time_ns"], 10**9)

    def work_of_reference_loop(self, *options):
        self.oomdiag("run", "--meter", "--device", "a100-80", "--folder", self.folder, "-o", self.folder / "report.json", "--",
                     build / "bin/oomdiag_samples", "--model", "deepcnn", "--batch", "64", "--steps", "2", *options)
        return self.report()["work"]

    def test_micro_batches_of_a_reference_loop_have_the_flops_of_the_batch(self):
        self.assertEqual(self.work_of_reference_loop("--accumulate", "2")["flops"], self.work_of_reference_loop()["flops"])

    def test_forward_of_a_reference_loop_is_no_part_of_its_optimizer(self):
        work = self.work_of_reference_loop()
        flops = {phase["name"]: phase["flops"] for phase in work["phases"]}
        self.assertEqual(work["step"], 2)
        self.assertGreater(flops["forward"], 0)
        self.assertGreater(flops["backward"], 1.5 * flops["forward"])
        self.assertEqual(flops["optimizer"], 0)

    def test_a_run_that_was_not_metered_has_no_work_and_leaves_no_file(self):
        self.run_program("-c", TRAIN, options=())
        self.assertIsNone(self.report()["work"])
        self.assertEqual(list(self.folder.glob("*/work")), [])

    def test_fixes_have_their_time_and_flops_and_the_fastest_that_fits_is_first(self):
        program = self.folder / "train.py"
        program.write_text(CHECKPOINTS)
        done = self.oomdiag("fix", "--device", "a100-80", "--memory", "2560MiB", "--json", "--", sys.executable, program)
        fixed = json.loads(done.stdout)
        flops = fixed["before"]["step_flops"]
        product = 2 * 16384 * 512 * 2048
        self.assertEqual(flops, (12 * 2 * 3 - 1) * product)  # the first layer's input wants no gradient
        fitting = [fix for fix in fixed["fixes"] if fix["fits"]]
        slowdowns = [fix["slowdown"] for fix in fitting]
        self.assertGreater(len(fitting), 1, fixed)
        self.assertEqual(slowdowns, sorted(slowdowns))
        checkpoint = next(fix for fix in fixed["fixes"] if fix["ids"] == ["checkpoint"] and fix["step_flops"])
        self.assertGreater(checkpoint["extra_flops"], 0)
        self.assertGreater(checkpoint["slowdown"], 1)
        autocast = next(fix for fix in fixed["fixes"] if fix["ids"] == ["autocast_bf16"])
        self.assertEqual(autocast["extra_flops"], 0)
        self.assertLess(autocast["slowdown"], 1)


class Slow(Base):
    def test_flops_of_all_models_are_those_of_the_flop_counter(self):
        sys.path.insert(0, str(HERE))
        import flop_programs
        self.check_flops(list(flop_programs.MODELS))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=build)
    options, rest = parser.parse_known_args()
    build = options.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
