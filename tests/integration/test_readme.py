"""What README.md and the pages of docs/ have people type, typed; and what they say it prints.

    python tests/integration/test_readme.py --build BUILD_FOLDER [Readme|Docs|Tutorial|Ranks]
"""
import argparse
import importlib.util
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import unittest

import torch_in_use

ROOT = pathlib.Path(__file__).resolve().parents[2]

# A training script as anybody has one, which writes a snapshot too.
TRAIN = """
    import argparse, torch
    from torch import nn

    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--tp", type=int)
    parser.add_argument("--snapshot")
    args = parser.parse_args()
    if args.snapshot:
        torch.cuda.memory._record_memory_history()
    model = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
                          nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(4):
        images = torch.randn(args.batch_size, 3, 224, 224, device="cuda")
        labels = torch.zeros(args.batch_size, dtype=torch.long, device="cuda")
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    if args.snapshot:
        torch.cuda.memory._dump_snapshot(args.snapshot)
"""

# A project's test with a budget.
TEST = """
    import oomdiag, torch

    def test_a_step_fits():
        with oomdiag.budget("2GiB"):
            torch.nn.Linear(1024, 1024).cuda()(torch.randn(64, 1024, device="cuda")).sum().backward()
"""

# Programs that a test machine lacks: what of them the lines here use.
STAND_INS = {
    "srun": '#!/bin/sh\nexec "$@"\n',
    "jupyter": '#!/usr/bin/env python\nimport torch\ntorch.ones(1024, device="cuda")\n',
    "sbatch": """#!/usr/bin/env bash
        range=${1#--array=}
        for ((task = ${range%-*}; task <= ${range#*-}; ++task)); do SLURM_ARRAY_TASK_ID=$task bash -c "$3" || exit 1; done
        """,
    "ray.py": """
        from types import SimpleNamespace
        remote, get = lambda function: SimpleNamespace(remote=function), list
        """,
}

ELSEWHERE = {
    "pip install oomdiag-0.1.0-py3-none-manylinux_2_28_x86_64.whl": "tests/packaging/test_wheel.py does",
    "OOMDIAG=1 python train.py": "it needs a wheel: tests/packaging/test_wheel.py",
    "scripts/test": "this is a part of it",
}
EXIT_CODES = {
    "oomdiag run -- python train.py --batch-size 4096": 1,  # "my run died"
    "oomdiag diff before.json report.json": 1,  # they differ
    "oomdiag run --complete --device rtx3060 -- python finetune_gpt2.py --batch-size 8": 1,
}


def read_blocks(page):
    """The lines of each block of code, fenced or indented. One that names a language is no shell's."""
    text = re.sub(r"^```\w+\n.*?^```$", "", (ROOT / page).read_text(), flags=re.MULTILINE | re.DOTALL)
    fenced = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    without = re.sub(r"^```\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    indented = re.findall(r"(?:^ {4}\S.*\n)+", without, re.MULTILINE)
    return [block.splitlines() for block in indented + fenced]


def without_comment(line):
    return re.sub(r"\s+# .*", "", line.strip())


class Pages(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name).resolve()
        tools = self.folder / "tools"
        tools.mkdir()
        for name, text in STAND_INS.items():
            (tools / name).write_text(textwrap.dedent(text))
            (tools / name).chmod(0o755)
        (self.folder / "train.py").write_text(textwrap.dedent(TRAIN))
        (self.folder / "test_memory.py").write_text(textwrap.dedent(TEST))
        for example in (ROOT / "examples").glob("*.py"):
            shutil.copy(example, self.folder)
        path = [tools, BUILD / "bin", pathlib.Path(sys.executable).parent, os.environ["PATH"]]
        self.environment = os.environ | {"PATH": ":".join(map(str, path)), "PYTHONPATH": f"{tools}:{BUILD / 'lib/python'}",
                                         "PYTEST_PLUGINS": "oomdiag._pytest_plugin"}

    def type(self, command):
        newest = max(self.folder.rglob("oomdiag-[0-9]*"), key=lambda path: path.stat().st_mtime, default=pathlib.Path("oomdiag-4711"))
        done = subprocess.run(["bash", "-c", command.replace("oomdiag-4711", newest.name)], cwd=self.folder, env=self.environment,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
        return done.returncode, re.sub(r"oomdiag-\d+", "oomdiag-4711", done.stdout)

    def succeed(self, command):
        code, output = self.type(command.replace("scripts/oomdiag", "oomdiag"))
        self.assertEqual(code, EXIT_CODES.get(command, 0), f"{command}\n{output}")

    def print_the_same(self, command, expected):
        """Lines of … stand for any lines. How far a search has come is printed where it takes long, as on a busy machine."""
        _, output = self.type(command)
        output = re.sub(r"^oomdiag: \w+: \d+ (of about \d+ runs, .* left|runs? so far, .* s)\n", "", output, flags=re.M)
        pattern = "".join(".*" if line == "…" else re.escape(line.rstrip()) + "\n" for line in expected)
        self.assertRegex("\n".join(line.rstrip() for line in output.splitlines()) + "\n", re.compile(f"\\A{pattern}\\Z", re.DOTALL))

    def follow(self, page):
        for lines in read_blocks(page):
            if lines[0].startswith("$ "):
                with self.subTest(lines[0]):
                    self.print_the_same(lines[0][2:], lines[1:])
                continue
            for command in map(without_comment, lines):
                if command not in ELSEWHERE:
                    with self.subTest(command):
                        self.succeed(command)


@unittest.skipUnless(torch_in_use.MINOR == torch_in_use.DEFAULT, f"its figures are those of the default torch, and this is {torch_in_use.VERSION}")
class Readme(Pages):
    def test_what_it_says_to_type_works_and_prints_what_it_says(self):
        self.succeed("oomdiag run --device rtx4090 -o before.json -- python train.py --snapshot snapshot.pickle")
        self.follow("README.md")

    def test_the_counts_are_those_of_the_product(self):
        text = (ROOT / "README.md").read_text()
        for name in "devices", "models":
            said = int(re.search(rf"`(?:oomdiag )?{name}` lists (\d+)", text)[1])
            table = self.type(f"oomdiag {name}")[1].split("\n\n")[0].splitlines()
            self.assertEqual(said, sum(not line.startswith(" ") for line in table[1:]), name)


class Docs(Pages):
    def test_what_the_pages_say_to_type_works(self):
        self.succeed("oomdiag run --device rtx4090 -- python train.py")
        for page in "index", "faq", "ci", "notebooks", "clusters":
            self.follow(f"docs/{page}.md")

    def test_links_lead_somewhere(self):
        for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
            for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
                self.assertTrue((page.parent / target).exists(), f"{page.name}: {target}")

    def test_the_report_that_the_tutorial_explains_is_that_of_the_readme(self):
        for block in re.findall(r"^```text\n(.*?)^```$", (ROOT / "docs/tutorial.md").read_text(), re.MULTILINE | re.DOTALL):
            self.assertIn(block, (ROOT / "README.md").read_text())


@unittest.skipUnless(importlib.util.find_spec("transformers"), "transformers is not installed")
class Tutorial(Pages):
    def test_what_it_says_to_type_works(self):
        self.follow("docs/tutorial.md")


class Ranks(Pages):
    def test_what_the_page_says_to_type_works(self):
        self.succeed("oomdiag fit --device h100-sxm --vary world=8..16:pow2 --print-jobs -- python train.py > jobs")
        self.follow("docs/ranks.md")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    options, rest = parser.parse_known_args()
    BUILD = options.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
