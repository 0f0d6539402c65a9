"""oomdiag fit by a function that is learned from a few runs: what it computes is what runs show, and where it cannot know, runs decide.

Usage: test_fit.py --build BUILD [Quick | Slow]. Runs on the virtual device.
"""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

BUILD = pathlib.Path(sys.argv[sys.argv.index("--build") + 1]).absolute() if "--build" in sys.argv else pathlib.Path("build").absolute()
OOMDIAG = BUILD / "bin" / "oomdiag"
GPU = ["--device", "rtx3060", "--memory", "2GiB"]

# WIDTH is an expression of batch and length.
PROGRAM = """
    import sys
    import torch
    from torch import nn

    def train(batch, length=64):
        model = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.LayerNorm(2048), nn.Linear(2048, 512)).cuda()
        optimizer = torch.optim.AdamW(model.parameters())
        for index in range(4):
            x = torch.randn(WIDTH, 512, device="cuda")
            (model(x) - x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    if __name__ == "__main__":
        train(*map(int, sys.argv[1:]))
        print("PEAK", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""

# LENGTHS is an expression: of each sample.
LOADER_PROGRAM = """
    import sys
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pad_sequence
    from torch.utils.data import DataLoader, Dataset

    class Sentences(Dataset):
        def __init__(self, lengths):
            self.lengths = lengths
        def __len__(self):
            return len(self.lengths)
        def __getitem__(self, place):
            return {"tokens": torch.arange(self.lengths[place]) % 512, "weight": 1.0}

    def collate(samples):
        return {"weight": torch.tensor([each["weight"] for each in samples]), "tokens": pad_sequence([each["tokens"] for each in samples], batch_first=True)}

    batch = int(sys.argv[1])
    model = nn.Sequential(nn.Embedding(512, 256), nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    checks = DataLoader(Sentences([16, 24, 16]), batch_size=1, collate_fn=collate)
    for index, found in zip(range(3), DataLoader(Sentences(LENGTHS), batch_size=batch, shuffle=True, collate_fn=collate)):
        model(found["tokens"].cuda()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for check in checks:
                model(check["tokens"].cuda())
    print("PEAK", torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
"""


class Fit(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def write(self, width="batch * length"):
        return self.write_program(PROGRAM.replace("WIDTH", width))

    def write_program(self, text, name="program.py"):
        (self.folder / name).write_text(textwrap.dedent(text))
        return [sys.executable, self.folder / name]

    def oomdiag(self, *arguments):
        done = subprocess.run([OOMDIAG, *map(str, arguments)], capture_output=True, text=True, cwd=self.folder, timeout=800)
        self.assertIn(done.returncode, (0, 3), done.stderr)
        return done.stdout

    def fit(self, *arguments):
        return json.loads(self.oomdiag("fit", *GPU, "--json", *arguments))

    def peaks(self, *program):
        """Those that PyTorch itself counts in a run; None where it runs out of memory."""
        for line in self.oomdiag("run", *GPU, "--no-progress", "--oom-exit-code", "3", "--", *program).splitlines():
            if line.startswith("PEAK"):
                return tuple(map(int, line.split()[1:]))
        return None

    def check_estimate(self, at, peaks):
        """Equal where it claims so; else it names the place, a reduction's buffer, and misses by what that holds."""
        for kind, did in zip(("allocated", "reserved"), peaks):
            self.assertAlmostEqual(at[f"peak_{kind}_bytes"] / did, 1, delta=0 if at[f"{kind}_exact"] else 0.03)
        self.assertEqual(at["allocated_exact"] and at["reserved_exact"], not at["doubt"])


class Quick(Fit):
    def test_the_border_is_computed_to_the_byte_and_other_points_say_how_far_they_are_known(self):
        program = self.write()
        found = self.fit("--vary", "batch=1..4096", "--at", "batch=37", "--", *program, "{batch}")
        border = found["largest"]["batch"]
        self.assertEqual(([one["batch"] for one in found["tried"]], [one["fits"] for one in found["tried"]]),
                         ([border, border + 1], [True, False]))
        self.assertTrue(found["as_computed"])
        self.assertLessEqual(found["runs"], 6)
        self.assertRegex(found["formula"], r"iB \+ [\d.]+ [KMG]iB·batch$")
        (at,) = found["computed"]
        self.check_estimate(at, self.peaks(*program, 37))
        self.assertIsNone(self.peaks(*program, border + 1))

    def test_a_program_that_never_ends_is_ended_once_its_peak_is_steady(self):
        program = self.write_program("import itertools\n" + textwrap.dedent(PROGRAM).replace("WIDTH", "batch * length").replace("range(4)", "itertools.count()"))
        found = json.loads(self.oomdiag("fit", "--smallest-card", "--json", "--", *program, 200))
        self.assertEqual([one["fits"] for one in found["tried"]], [False, True, True])  # the last one for a minute

    def test_what_runs_out_after_the_steps_that_are_steady_does_not_fit(self):
        later = "            if index == 14:\n                kept = torch.empty(batch << 25, dtype=torch.uint8, device='cuda')\n"
        text = PROGRAM.replace("range(4)", "range(16)").replace("            x = torch.randn", later + "            time.sleep(0.2)\n            x = torch.randn")
        program = self.write_program("import time\n" + textwrap.dedent(text).replace("WIDTH", "batch * length"))
        found = self.fit("--vary", "batch=8..60", "--", *program, "{batch}")
        border = found["largest"]["batch"]
        self.assertIs(found["whole_run"], True)
        self.assertIsNotNone(self.peaks(*program, border))
        self.assertIsNone(self.peaks(*program, border + 1))

    def test_each_run_has_what_stdin_has(self):
        program = self.write_program("import sys, torch\nx = torch.empty(int(sys.stdin.read()) * int(sys.argv[1]) << 20, dtype=torch.uint8, device='cuda')")
        done = subprocess.run([OOMDIAG, "fit", *GPU, "--json", "--vary", "batch=1..2", "--", *map(str, program), "{batch}"], input="30", capture_output=True,
                              text=True, cwd=self.folder, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual({one["batch"]: one["peak_allocated_bytes"] >> 20 for one in json.loads(done.stdout)["tried"]}, {1: 30, 2: 60})

    def test_estimate_asks_from_inside_of_python(self):
        self.write()
        code = """
            import oomdiag, program, torch
            found = oomdiag.estimate(program.train, {"batch": 20}, device="rtx3060")
            print(found.fits, found.peak_allocated_bytes, sum(found.categories.values()) == found.peak_allocated_bytes)
            print(torch.cuda.is_initialized())
            print(oomdiag.estimate(program.train, {"batch": 20}, device="rtx3060", vary="batch=1..64").largest["batch"])
        """
        done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=self.folder,
                              env=os.environ | {"PYTHONPATH": str(BUILD / "lib/python")}, timeout=300)
        self.assertEqual(done.returncode, 0, done.stderr)
        fits, peak, adds_up, initialized, largest = done.stdout.split()
        self.assertEqual((fits, adds_up, initialized), ("True", "True", "False"))
        self.assertEqual(int(peak), self.peaks(sys.executable, "program.py", 20)[0])
        self.assertEqual(largest, "64")  # all of them fit


class Slow(Fit):
    def test_two_variables_are_learned_together(self):
        program = self.write()
        found = self.fit("--vary", "batch=1..4096", "--vary", "length=16,32,64,96", "--at", "batch=21,length=77", "--", *program,
                         "{batch}", "{length}")
        self.assertLessEqual(found["runs"], 14)  # six to learn from, and two at each border
        borders = {one["length"]: one["batch"] for one in found["of_each"]}
        self.assertEqual(sorted(borders), [16, 32, 64, 96])
        self.assertEqual(borders[16], max(borders.values()))
        self.assertIsNotNone(self.peaks(*program, borders[96], 96))
        self.assertIsNone(self.peaks(*program, borders[96] + 1, 96))
        (at,) = found["computed"]
        self.check_estimate(at, self.peaks(*program, 21, 77))

    def test_two_variables_are_drawn_with_their_border(self):
        page = self.folder / "page.html"
        found = self.fit("--vary", "batch=1..512", "--vary", "length=32,64,96", "--html", page, "--", *self.write(), "{batch}", "{length}")
        html = page.read_text()
        self.assertIn('aria-label="peak by batch and length"', html)
        self.assertIn('class="border"', html)
        for one in found["of_each"]:
            self.assertIn(f"fits up to {one['batch']}", html)

    def test_the_gpus_that_it_fits_on_come_from_one_run_and_the_smallest_is_proved(self):
        found = json.loads(self.oomdiag("fit", "--smallest-card", "--devices", "all", "--json", "--", *self.write(), 2500))
        gpus = found["devices"]
        first = next(i for i, gpu in enumerate(gpus) if gpu["fits"])
        self.assertEqual(gpus[first]["device"], found["smallest_device"])
        self.assertTrue(all(gpu["fits"] for gpu in gpus[first:]))
        self.assertTrue(gpus[first]["measured"])
        self.assertTrue(first == 0 or gpus[first - 1]["measured"])
        self.assertEqual(found["runs"], 1 + sum(gpu["measured"] for gpu in gpus))

    def test_a_size_that_no_polynomial_gives_is_found_by_runs(self):
        program = self.write("2 ** (batch * length - 1).bit_length()")
        found = self.fit("--vary", "batch=505..520", "--", *program, "{batch}")
        self.assertEqual(found["largest"]["batch"], 512)
        self.assertEqual([one["fits"] for one in found["tried"] if one["batch"] in (512, 513)], [True, False])

    def test_lengths_give_the_worst_batch_and_a_budget_of_tokens(self):
        program = self.write("batch * length")
        (self.folder / "lengths.txt").write_text("\n".join(str(16 + 7 * i % 80) for i in range(500)))
        found = self.fit("--vary", "batch=1..4096", "--lengths", "lengths.txt", "--", *program, "{batch}", "{length}")
        largest, tokens = found["largest"], found["token_budget"]
        self.assertEqual(largest["length"], 95)
        self.assertIsNone(self.peaks(*program, largest["batch"] + 1, 95))
        self.assertLessEqual(largest["batch"] * 95, tokens)
        self.assertLess(tokens, (largest["batch"] + 1) * 95)

    def test_the_lengths_of_a_data_loader_give_the_worst_batch_of_the_unchanged_program(self):
        lengths = "[16 + 7 * i % 80 for i in range(4000)]"
        program = self.write_program(LOADER_PROGRAM.replace("LENGTHS", lengths))
        found = self.fit("--vary", "batch=1..4000", "--lengths", "loader", "--", *program, "{batch}")
        largest, tokens = found["largest"], found["token_budget"]
        self.assertEqual(largest["length"], 95)
        self.assertLessEqual(largest["batch"] * 95, tokens)
        self.assertLess(tokens, (largest["batch"] + 1) * 95)
        longest = self.write_program(LOADER_PROGRAM.replace("LENGTHS", "[95] * 4000"), "longest.py")
        self.assertIsNotNone(self.peaks(*longest, largest["batch"]))
        self.assertIsNone(self.peaks(*longest, largest["batch"] + 1))

    def test_lengths_of_a_loader_that_has_none_are_rejected_with_the_fix(self):
        of_one_size = self.write_program(LOADER_PROGRAM.replace("LENGTHS", "[95] * 4000").replace("[16, 24, 16]", "[16]"), "one_size.py")
        of_pairs = self.write_program(LOADER_PROGRAM.replace("LENGTHS", "[16, 95] * 2000").replace("batch_size=1,", "batch_size=2,")
                                      .replace("[16, 24, 16]", "[16, 24]").replace("def collate(samples):", "def collate(samples):\n        samples[1]"),
                                      "pairs.py")
        without = [*self.write(), "{batch}"]
        for program, why in ([*of_one_size, "{batch}"], "are of one size"), ([*of_pairs, "{batch}"], "of one sample"), (without, "goes through no DataLoader"), ([*without, "{length}"], "without {length}"):
            done = subprocess.run([OOMDIAG, "fit", *GPU, "--vary", "batch=2..64", "--lengths", "loader", "--", *map(str, program)],
                                  capture_output=True, text=True, cwd=self.folder, timeout=800)
            error, hint = done.stderr.splitlines()[-2:]
            self.assertIn(why, error)
            self.assertIn("--lengths", hint)

    def test_the_smallest_gpu_takes_three_runs_and_is_the_same_where_each_starts_anew(self):
        forked, anew = (json.loads(self.oomdiag("fit", *options, "--smallest-card", "--json", "--", *self.write(), 200))
                        for options in ([], ["--no-fork"]))
        for found in forked, anew:
            self.assertEqual(found["runs"], 3)
            self.assertEqual([(one["memory_bytes"] - found["smallest_gpu_bytes"], one["fits"]) for one in found["tried"]],
                             [(-(2 << 20), False), (0, True)])
        self.assertEqual(forked["smallest_gpu_bytes"], anew["smallest_gpu_bytes"])


if __name__ == "__main__":
    if "--build" in sys.argv:
        del sys.argv[sys.argv.index("--build"):sys.argv.index("--build") + 2]
    unittest.main(verbosity=2)
