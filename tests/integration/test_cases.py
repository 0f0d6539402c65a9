"""The reference cases, end to end: every sample, the real wheel, a virtual GPU.

    python tests/integration/test_cases.py --build BUILD_FOLDER [unittest arguments]

The goldens in tests/golden/cases are those of torch 2.15; what another torch shows otherwise lies in a folder of its own
there. OOMDIAG_UPDATE_GOLDENS=1 writes them instead of comparing.
"""
import argparse
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

import torch_in_use

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report_json import load_report  # noqa: E402
GOLDENS = ROOT / "tests/golden/cases"
SCHEMA = json.loads((ROOT / "profiler/report/oomdiag-report-1.schema.json").read_text())
GOLDEN_TORCH = "{}.{}".format(*torch_in_use.DEFAULT)
OUT_OF_MEMORY = 3
build = ROOT / "build"

# What is not simply `train --model NAME --device rtx3060`.
ARGUMENTS = {"host_and_gpu": ["--memory", "522MiB", "--batch", "204", "--steps", "1"], "fragmented": ["--memory", "4GiB"]}
FAILS = {"host_and_gpu", "fragmented"}  # and shall
WITHOUT_CASE = {"resnet50", "gpt"}


def oomdiag(*arguments, **options):
    return subprocess.run([str(build / "bin/oomdiag"), *map(str, arguments)], capture_output=True, text=True, timeout=300,
                          **options)


def list_models():
    return json.loads(oomdiag("models", "--json").stdout)


def golden_text(model, case):
    """The note, its figures below; what the host's own memory and processor decide is masked."""
    notes, figures = list(case["notes"]), dict(case["figures"])
    if model == "host_and_gpu":
        notes = [re.sub(r"( {4}\w+ .*) [\d.]+$", r"\1 HOST", n) for n in notes]
        notes = [re.sub(r"(peak at|it has) [\d.]+ \w+", r"\1 HOST", n) for n in notes]
        figures = {k: "HOST" if k.startswith("host.") else v for k, v in figures.items()}
    return "\n".join([f"case {case['id']}: {case['about']}", *notes, "", *(f"{k} {v}" for k, v in figures.items())]) + "\n"


class CaseTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag cases "))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def train(self, model, *arguments, device="rtx3060"):
        import jsonschema
        done = oomdiag("train", "--model", model, "--device", device, "--folder", self.folder, "--json", *arguments)
        self.assertIn(done.returncode, (0, OUT_OF_MEMORY), done.stderr)
        report = load_report(done.stdout)
        jsonschema.validate(report, SCHEMA)
        return done.returncode, report

    def check_error(self, arguments, *words):
        done = oomdiag(*arguments, cwd=self.folder)
        self.assertEqual((done.returncode, done.stdout), (2, ""), done.stderr)
        for word in words:
            self.assertIn(word, done.stderr)


class Cases(CaseTest):
    def test_every_case_has_a_model(self):
        cases = {model["case"] for model in list_models()} - {""}
        self.assertEqual(cases, {f"S{n}" for n in range(1, 20)})

    def test_every_case_is_explained_as_in_its_golden(self):
        for model in list_models():
            name = model["name"]
            if name in WITHOUT_CASE:
                continue
            with self.subTest(model=name):
                code, report = self.train(name, *ARGUMENTS.get(name, []))
                torch = ".".join(report["torch"].split(".")[:2])
                if torch == GOLDEN_TORCH or name != "host_and_gpu":  # a narrow window
                    self.assertEqual(code, OUT_OF_MEMORY if name in FAILS else 0)
                self.assertEqual(report["case"]["id"], model["case"])
                self.compare(name, golden_text(name, report["case"]), torch)

    def compare(self, name, text, torch):
        usual, own = GOLDENS / f"{name}.txt", GOLDENS / f"torch-{torch}" / f"{name}.txt"
        if os.environ.get("OOMDIAG_UPDATE_GOLDENS"):
            own.unlink(missing_ok=True)
            if torch == GOLDEN_TORCH:
                usual.write_text(text)
            elif text != usual.read_text():
                own.parent.mkdir(exist_ok=True)
                own.write_text(text)
        self.assertEqual(text, (own if own.exists() else usual).read_text())

    def test_the_figures_of_a_chosen_variant_are_the_same(self):
        _, one = self.train("copy")
        _, other = self.train("copy", "--variant", "in_place")
        self.assertEqual(one["case"]["figures"], other["case"]["figures"])
        self.assertEqual(other["peak"]["allocated_bytes"], one["case"]["figures"]["in_place.peak_bytes"])

    def test_a_comparison_leaves_one_run_folder(self):
        self.train("copy")
        self.assertEqual(len(list(self.folder.iterdir())), 1)

    def test_explain_remembers_the_case(self):
        _, report = self.train("copy")
        folder, = self.folder.iterdir()
        for what in folder, folder / "report.json":
            self.assertEqual(json.loads(oomdiag("explain", what, "--json").stdout)["case"], report["case"])
        self.assertIn("case S9", oomdiag("explain", folder).stdout)

    def test_models_for_scale_fit_and_have_no_case(self):
        for name in sorted(WITHOUT_CASE):
            with self.subTest(model=name):
                code, report = self.train(name, device="h200")
                self.assertEqual((code, report["outcome"], report["case"]), (0, "ok", None))
                attribution = report["attribution"]
                self.assertEqual(attribution["with_node_bytes"], attribution["backward_bytes"])


class Options(CaseTest):
    def test_the_list_of_the_models(self):
        models = {model["name"]: model for model in list_models()}
        self.assertEqual(models["deepcnn"]["case"], "S7")
        self.assertEqual(models["copy"]["variants"], ["copy", "in_place"])
        text = oomdiag("models").stdout
        for name, model in models.items():
            self.assertIn(name, text)
            self.assertIn(model["about"], text)

    def test_wrong_names_are_answered(self):
        self.check_error(["train", "--model", "fragmentd"], "did you mean fragmented")
        self.check_error(["train", "--model", "copy", "--variant", "inplace"], "valid: copy, in_place")
        self.check_error(["train", "--model", "deepcnn", "--variant", "x"], "has no variants")

    def test_options_that_a_model_does_not_take_are_rejected(self):
        self.check_error(["train", "--model", "copy", "--batch", "3"], "copy takes no --batch")
        self.check_error(["train", "--model", "copy", "--steps", "3"], "copy takes no --steps")
        self.check_error(["train", "--model", "generator", "--optimizer", "sgd"], "generator takes no --optimizer")
        self.check_error(["train", "--model", "half", "--amp", "bf16"], "half takes no --amp")
        self.check_error(["train", "--model", "copy", "--accumulate", "2"], "copy takes no --accumulate")

    def test_micro_batches_take_less_than_the_whole_batch(self):
        peaks = []
        for options in ([], ["--accumulate", "4"]):
            done = oomdiag("train", "--model", "deepcnn", "--device", "rtx3060", "--batch", "512", "--json", *options)
            peaks.append(load_report(done.stdout)["peak"]["allocated_bytes"])
        self.assertLess(peaks[1], 0.6 * peaks[0])

    def test_on_the_host_the_cpu_allocator_counts_the_bytes(self):
        code, report = self.train("mlp", device="cpu")
        self.assertEqual((code, report["outcome"], report["devices"]), (0, "ok", []))
        figures = report["case"]["figures"]
        self.assertEqual(figures["host_peak_bytes"], max(figures["host_forward_bytes"], figures["host_backward_bytes"],
                                                         figures["host_optimizer_bytes"]))
        # parameters 100∙50 + 50∙20 + 20∙2 and biases, Adam's two states, the gradients
        self.assertGreaterEqual(figures["host_optimizer_bytes"], 4 * 4 * (100 * 50 + 50 * 20 + 20 * 2 + 72))
        text = oomdiag("train", "--model", "mlp", "--device", "cpu").stdout
        self.assertTrue(text.startswith("oomdiag: ran on the host"), text)
        self.assertRegex(text, r"The last loss is 0\.\d+\.")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    known, rest = parser.parse_known_args()
    build = known.build.resolve()
    unittest.main(argv=["test_cases.py", *rest], verbosity=2)
