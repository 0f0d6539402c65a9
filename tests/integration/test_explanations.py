"""What reports say of whom, against what the programs know themselves: categories, owners, growth.

    python tests/integration/test_explanations.py --build BUILD_FOLDER [unittest arguments]

The programs are in tests/causes; they run in forked children of one process, so that torch is imported once.
"""
import argparse
import importlib.util
import json
import pathlib
import sys
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/causes"))
from harness import run_jobs  # noqa: E402

SCHEMA = json.loads((ROOT / "profiler/report/oomdiag-report-1.schema.json").read_text())
build = ROOT / "build"


def job(name, function, memory_mib=2048, module="truth", **arguments):
    return {"name": name, "module": module, "function": function, "arguments": arguments, "memory_mib": memory_mib}


class Categories(unittest.TestCase):
    """Bytes by category are those that the program itself counts, to the byte."""

    OPTIMIZERS = ("sgd", "momentum", "adam", "adamw_foreach", "adamw_fused", "adamw_loop")

    @classmethod
    def setUpClass(cls):
        models = ("mlp", "convolutions", "transformer")
        runs = [(model, "adam", "backward") for model in models]
        runs += [("mlp", o, m) for o in cls.OPTIMIZERS for m in ("backward", "optimizer") if (o, m) != ("adam", "backward")]
        jobs = [job(" ".join(run), "held", model=run[0], optimizer=run[1], moment=run[2]) for run in runs]
        jobs += [job("witness " + m, "held", model=m, optimizer="adam", moment="backward", witness=True) for m in models]
        cls.jobs = {one["name"]: one for one in run_jobs(build, jobs)}

    def check(self, name, categories, truth):
        found = self.jobs[name]["report"]["categories"]
        for category in categories:
            with self.subTest(run=name, category=category):
                self.assertEqual(found[category], truth[category])

    def test_parameters_buffers_gradients_and_optimizer_state(self):
        for name, one in self.jobs.items():
            if not name.startswith("witness"):
                self.assertIsNotNone(one["answer"]["result"], one["answer"]["ended"])
                self.check(name, ("parameter", "buffer", "gradient", "optimizer_state"), one["answer"]["result"])

    def test_what_autograd_saved_is_what_a_witness_saw(self):
        for model in ("mlp", "convolutions", "transformer"):
            witness = self.jobs["witness " + model]["answer"]["result"]
            self.check(f"{model} adam backward", ("activation", "input"), witness)

    def test_nothing_is_unknown(self):
        for name, one in self.jobs.items():
            with self.subTest(run=name):
                self.assertEqual(one["report"]["categories"]["unknown"], 0)

    def test_every_report_follows_the_schema_and_adds_up(self):
        import jsonschema
        for name, one in self.jobs.items():
            with self.subTest(run=name):
                report = one["report"]
                jsonschema.validate(report, SCHEMA)
                allocated = sum(report["categories"].values())
                for key in ("op", "source", "shape"):
                    self.assertEqual(sum(o["bytes"] for o in report["allocated_by"][key]), allocated)


class Unknown(unittest.TestCase):
    """Of large models at most 1 % is unknown, also where the first forward pass fails."""

    def check(self, model, batches):
        if importlib.util.find_spec("torchvision" if model == "resnet50" else "transformers") is None:
            self.skipTest("not installed")
        jobs = run_jobs(build, [job("fits", "whole_steps", 24576, model_name=model, batch=batches[0]),
                                job("fails", "forward_oom", 4096, model_name=model, batch=batches[1]),
                                *(job(how, "forward_oom", 4096, model_name=model, batch=batches[2], how=how)
                                  for how in ("empty", "normalised"))])
        self.assertEqual(jobs[0]["answer"]["ended"], "ok")
        for one in jobs[1:]:
            self.assertEqual(one["answer"]["ended"], "out_of_memory")
            self.assertEqual(one["report"]["failure"]["phase"], "forward")
        for one in jobs:
            with self.subTest(run=one["name"]):
                categories = one["report"]["categories"]
                self.assertLessEqual(categories["unknown"], 0.01 * sum(categories.values()))

    def test_resnet50(self):
        self.check("resnet50", (8, 64, 2000))  # of 2000 the first layer fails

    def test_gpt2(self):
        self.check("gpt2", (2, 16, 6000))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    known, rest = parser.parse_known_args()
    build = known.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
