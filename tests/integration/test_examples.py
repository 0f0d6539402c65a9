"""Each program of examples/, run as its page says.

    python tests/integration/test_examples.py --build BUILD_FOLDER [unittest arguments]
"""
import argparse
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report_json import load_report  # noqa: E402
EXAMPLES = ROOT / "examples"


def needs(*packages):
    missing = [name for name in packages if not importlib.util.find_spec(name)]
    return unittest.skipIf(missing, f"not installed: {', '.join(missing)}")


class Examples(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_example(self, *program, device="t4"):
        """Ends as the program does; the report."""
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"
        search = os.pathsep.join([str(build / "lib/python"), *filter(None, [os.environ.get("PYTHONPATH")])])
        command = [build / "bin/oomdiag", "run", "--device", device, "--no-progress", "-o", self.folder / "report.json", "--", *program]
        self.done = subprocess.run(list(map(str, command)), cwd=self.folder, capture_output=True, text=True, timeout=800,
                                   env=os.environ | {"PATH": path, "PYTHONPATH": search})
        return load_report((self.folder / "report.json").read_text())

    @needs("transformers")
    def test_a_plain_loop_runs_out_of_memory_and_fits_with_half_of_the_batch(self):
        report = self.run_example("python", EXAMPLES / "finetune_gpt2.py", "--batch-size", 8, device="rtx3060")
        self.assertEqual((self.done.returncode, report["outcome"]), (1, "out_of_memory"), self.done.stderr)
        self.assertRegex(report["failure"]["source"], r"finetune_gpt2\.py:\d+|loss_utils\.py:\d+")
        report = self.run_example("python", EXAMPLES / "finetune_gpt2.py", "--batch-size", 4, "--steps", 1, device="rtx3060")
        self.assertEqual((self.done.returncode, report["outcome"]), (0, "ok"), self.done.stderr)

    @needs("transformers", "accelerate")
    def test_a_trainer(self):
        report = self.run_example("python", EXAMPLES / "trainer.py", "--batch-size", 8, device="rtx3060")
        self.assertEqual((self.done.returncode, report["outcome"]), (1, "out_of_memory"), self.done.stderr)

    @needs("lightning")
    def test_a_lightning_module(self):
        report = self.run_example("python", EXAMPLES / "lightning_module.py")
        self.assertEqual((self.done.returncode, report["outcome"]), (0, "ok"), self.done.stderr)
        self.assertGreater(report["peak"]["allocated_bytes"], 64 << 20)

    @needs("nbclient", "ipykernel")
    def test_a_notebook(self):
        report = self.run_example("python", "-m", "jupyter", "execute", EXAMPLES / "notebook.ipynb")
        self.assertEqual(self.done.returncode, 0, self.done.stderr)
        self.assertEqual([mark["name"] for mark in report["marks"]], ["a small step"])

    def test_the_cells_of_the_notebook_run_one_after_the_other(self):
        """Without Jupyter: magics are replaced by the calls that they make."""
        cells = json.loads((EXAMPLES / "notebook.ipynb").read_text())["cells"]
        code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
        calls = {"%load_ext oomdiag": "import oomdiag", "%oomdiag mark a small step": "oomdiag.mark('a small step')", "%oomdiag": "print(oomdiag.explain())"}
        code = re.sub(r"^%.*$", lambda line: calls[line[0]], code, flags=re.MULTILINE)
        (self.folder / "cells.py").write_text(code)
        report = self.run_example("python", "cells.py")
        self.assertEqual(self.done.returncode, 0, self.done.stderr)
        self.assertIn("out of memory", self.done.stdout)
        self.assertEqual([mark["name"] for mark in report["marks"]], ["a small step"])


class Action(unittest.TestCase):
    """The composite action, step by step as the runner would: what GitHub puts in for the inputs is put in here."""

    def steps(self, **inputs):
        import yaml
        action = yaml.safe_load((ROOT / ".github/actions/oomdiag/action.yml").read_text())
        given = {name: inputs.get(name.replace("-", "_"), entry.get("default", "")) for name, entry in action["inputs"].items()}
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "train.py").write_text("import torch\nx = torch.zeros(1 << 28, device='cuda')\n")
            environment = os.environ | {"GITHUB_STEP_SUMMARY": f"{folder}/summary", "PYTHONPATH": str(build / "lib/python"),
                                        "PATH": f"{build / 'bin'}:{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"}
            for step in action["runs"]["steps"][1:]:  # the first installs
                names = re.findall(r"inputs\.([\w-]+) != ''", step.get("if", ""))
                if names and not any(given[name] for name in names):
                    continue
                values = {name: given[re.search(r"inputs\.([\w-]+)", value)[1]] for name, value in step["env"].items()}
                done = subprocess.run(["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]], cwd=folder,
                                      env=environment | values, capture_output=True, text=True, timeout=300)
                if done.returncode != 0:
                    break
            summary = pathlib.Path(folder, "summary")
            return done, summary.read_text() if summary.exists() else ""

    @needs("yaml")
    def test_it_checks_budgets_and_writes_the_summary(self):
        done, summary = self.steps(run="python train.py", max_allocated="2GiB")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("1.00", summary)
        done, _ = self.steps(run="python train.py", max_allocated="512MiB")
        self.assertEqual(done.returncode, 1)
        self.assertIn("512.00 MiB", done.stdout + done.stderr)

    @needs("yaml")
    def test_a_program_that_fails_fails_the_job_with_its_report_in_the_summary(self):
        done, summary = self.steps(run="python train.py; exit 7", max_allocated="2GiB")
        self.assertEqual(done.returncode, 7)
        self.assertIn("1.00", summary)

    @needs("yaml")
    def test_the_workflows_are_yaml_and_name_what_is_there(self):
        import yaml
        for file in [*(ROOT / ".github/workflows").glob("*.yml"), EXAMPLES / "github-actions.yml"]:
            workflow = yaml.safe_load(file.read_text())
            for job in workflow["jobs"].values():
                for step in job["steps"]:
                    script = step.get("run", "").split()[:1]
                    if script and "/" in script[0]:
                        self.assertTrue((ROOT / script[0]).exists(), script)
                    if step.get("uses", "").startswith("./"):
                        self.assertTrue((ROOT / step["uses"] / "action.yml").exists())


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    arguments, rest = parser.parse_known_args()
    build = arguments.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
