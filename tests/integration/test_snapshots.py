"""Snapshots that PyTorch wrote, explained alone and with their program: python tests/integration/test_snapshots.py --build BUILD
"""
import argparse
import pathlib
import subprocess
import sys
import tempfile
import unittest

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from report_json import load_report  # noqa: E402

build = pathlib.Path()

PROGRAM = """import sys
import torch
from torch import nn
if len(sys.argv) > 2:
    torch.cuda.memory._record_memory_history()
model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    optimizer.zero_grad()
    model(torch.randn(int(sys.argv[1]), 1024, device="cuda")).square().mean().backward()
    optimizer.step()
if len(sys.argv) > 2:
    torch.cuda.memory._dump_snapshot(sys.argv[2])
"""


def oomdiag(*arguments, code=0):
    done = subprocess.run([str(build / "bin/oomdiag"), *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == code, (arguments, done.stdout, done.stderr)
    return done


class Snapshots(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag-snapshots-"))
        cls.program = cls.folder / "train.py"
        cls.program.write_text(PROGRAM)
        cls.snapshot = cls.folder / "snapshot.pickle"
        oomdiag("run", "--device", "rtx3060", "--folder", cls.folder, "--", sys.executable, cls.program, 512, cls.snapshot)

    def explain(self, *options):
        return load_report(oomdiag("explain", self.snapshot, "--device", "rtx3060", "--json", *options).stdout)

    def test_categories_are_marked_as_read_from_stacks(self):
        report = self.explain()
        by_category = {}
        for part in report["from_stacks"]:
            self.assertIn(part["confidence"], ("high", "medium", "low"))
            by_category[part["category"]] = by_category.get(part["category"], 0) + part["bytes"]
        self.assertEqual(by_category, {name: size for name, size in report["categories"].items() if size and name != "unknown"})
        self.assertEqual(report["categories"]["unknown"], 0)
        self.assertIn("(from stacks: ", oomdiag("explain", self.snapshot, "--device", "rtx3060").stdout)

    def test_with_its_program_a_snapshot_has_modules_and_names_of_parameters(self):
        report = self.explain("--", sys.executable, self.program, 512)
        self.assertEqual(report["peak"]["allocated_bytes"], self.explain()["peak"]["allocated_bytes"])
        self.assertEqual(report["from_stacks"], [])
        self.assertLessEqual({"0", "0.weight", "2.weight"}, {owner["name"] for owner in report["allocations"]})
        self.assertTrue(any("(100.000 %)" in limitation for limitation in report["limitations"]), report["limitations"])

    def test_another_program_is_rejected_with_the_first_difference(self):
        rejected = oomdiag("explain", self.snapshot, "--device", "rtx3060", "--", sys.executable, self.program, 256, code=1)
        self.assertIn("the program does not do what the snapshot shows", rejected.stderr)
        self.assertIn(f"{512 * 1024 * 4} bytes", rejected.stderr)
        self.assertIn("aten::randn", rejected.stderr)
        self.assertIn("--device", oomdiag("explain", self.snapshot, "--", sys.executable, self.program, 512, code=2).stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True, type=pathlib.Path)
    options, rest = parser.parse_known_args()
    build = options.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
