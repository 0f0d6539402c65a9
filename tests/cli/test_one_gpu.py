"""Every command on a machine that has a GPU, which a driver of our own reports (fake_driver.cpp): none may crash, each
ends in a way that makes sense.

Usage: test_one_gpu.py PATH/TO/oomdiag FOLDER/OF/libcuda.so.1
"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

OOMDIAG, DRIVER = sys.argv.pop(1), sys.argv.pop(1)


class OneGpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "report.json").write_text('{"schema": "oomdiag-report/1", "outcome": "ok"}')

    def oomdiag(self, *arguments, **environment):
        return subprocess.run([OOMDIAG, *arguments], capture_output=True, text=True, cwd=self.folder, timeout=120,
                              env=os.environ | {"LD_LIBRARY_PATH": DRIVER} | environment)

    def check(self, code, said, *arguments, **environment):
        result = self.oomdiag(*arguments, **environment)
        self.assertEqual(result.returncode, code, (arguments, result.stderr))
        self.assertIn(said, result.stdout + result.stderr, arguments)
        self.assertNotIn("fault of oomdiag", result.stderr, arguments)
        return result

    def test_programs_run_on_the_gpu(self):
        result = self.check(7, "out", "run", "--", "sh", "-c", "echo out; exit 7")
        self.assertNotIn("virtual", result.stderr)
        self.check(7, "out", "run", "--device", "real", "--", "sh", "-c", "echo out; exit 7")
        self.check(7, "out", "run", "--device", "rtx4090", "--", "sh", "-c", "echo out; exit 7")

    def test_a_rank_without_its_job_wants_a_virtual_device(self):
        for command in "run", "fix":
            self.check(2, "virtual device only", command, "--world-size", "8", "--rank", "1", "--", "true")
        self.check(2, "virtual device only", "fit", "--device", "real", "--vary", "world=8", "--", "true")

    def test_a_reference_model_that_cannot_run_says_why(self):
        self.check(1, "the training program ended with exit code 1", "train", "--model", "deepcnn")
        self.check(1, "the training program ended with exit code 1", "train", "--model", "deepcnn", "--device", "real")

    def test_fix_proves_on_the_gpu_and_measures_on_the_virtual_one(self):
        said = "the program fails, and not for want of memory"
        for device in [], ["--device", "real"], ["--device", "rtx4090"]:
            self.check(1, said, "fix", *device, "--", "true")
        self.check(1, said, "fix", "--model", "deepcnn")
        self.check(1, "no virtual GPU is called NVIDIA Unheard 9000", "fix", "--", "true", FAKE_GPU_NAME="NVIDIA Unheard 9000")

    def test_fit_asks_of_the_gpu_only_what_it_can_be_asked(self):
        self.check(1, "not for want of memory", "fit", "--device", "real", "--vary", "batch=1..4", "--", "true", "{batch}")
        self.check(1, "not for want of memory", "fit", "--vary", "batch=1..4", "--", "true", "{batch}")
        self.check(2, "virtual device", "fit", "--device", "real", "--smallest-card", "--", "true")
        self.check(2, "unknown device 'real'", "fit", "--devices", "real", "--vary", "batch=1..4", "--", "true", "{batch}")

    def test_what_only_reads_does_not_mind_the_gpu(self):
        self.check(0, "oomdiag", "explain", "report.json")
        self.check(1, "nothing was allocated", "check", "report.json")
        self.check(0, "", "diff", "report.json", "report.json")
        self.check(0, "", "export", "report.json", "--to", "markdown")
        self.check(0, "nothing to remove", "clean")
        self.check(0, "rtx3060", "devices")
        self.check(0, "deepcnn", "models")
        self.check(0, "OOMDIAG", "env")
        self.check(0, "oomdiag", "completion", "bash")
        self.check(2, "no such file or directory", "compare", "a.pickle", "b.pickle")
        self.check(1, "absent", "watch", "absent")

    def test_what_runs_a_little_of_cuda_by_itself_says_that_it_fails(self):
        self.check(1, "what limits a diagnosis", "doctor")
        self.check(1, "error", "devices", "--measure")


if __name__ == "__main__":
    unittest.main(verbosity=2)
