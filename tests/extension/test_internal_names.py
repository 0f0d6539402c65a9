"""What the recorder knows of the inside of PyTorch by its name only (extension/record/internal_names.h): where a torch has it
no more, the report and the doctor say so, and the rest of the report is as ever.

    python tests/extension/test_internal_names.py --build BUILD_FOLDER [unittest arguments]
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

build = pathlib.Path("build").resolve()

TRAINING = """
import torch

def renamed(name):
    return property(lambda self: self.__dict__[name], lambda self, value: self.__dict__.__setitem__(name, value))

""", """
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(3):
    model(torch.ones(8, 64, device="cuda")).sum().backward()
    optimizer.step()
"""
# A torch in which the name is another one, by what the report then lacks.
RENAMED = {
    "module paths": """
        call = torch.nn.Module.__call__
        call.__code__ = call.__code__.replace(co_name="_call_wrapped")""",
    "steps of optimizers": """
        torch.optim.Optimizer.profile_hook_step = staticmethod(lambda function: function)""",
    "the parameter group of an OOM in a step": """
        def step(self, closure=None): return undecorated(self, closure)
        undecorated, torch.optim.SGD.step = torch.optim.SGD.step, step""",
    "parameter groups": """
        torch.optim.SGD.param_groups = renamed("groups")""",
    "names of parameters and buffers": """
        torch.nn.Sequential._buffers = renamed("_tensors")""",
    "the rank of a process": """
        import torch.distributed.distributed_c10d as distributed
        distributed._world.__dict__["_group"] = distributed._world.__dict__.pop("_default_pg")
        type(distributed._world)._default_pg = renamed("_group")""",
}


class InternalNamesTest(unittest.TestCase):
    def limits(self, preparation):
        with tempfile.TemporaryDirectory(prefix="oomdiag names ") as folder:
            folder = pathlib.Path(folder)
            (folder / "program.py").write_text(textwrap.dedent(preparation).join(TRAINING))
            run = folder / "run"
            done = subprocess.run([build / "bin/oomdiag", "run", "--device", "rtx3060", "--folder", run, "--", sys.executable,
                                   folder / "program.py"], capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            said = subprocess.run([build / "bin/oomdiag", "explain", run, "--json"], capture_output=True, text=True)
            report = json.loads(said.stdout)
            self.assertEqual(report["devices"][0]["replay_error_bytes"], 0)
            return [limit for limit in report.get("limitations", report.get("limitations")) if "not found in" in limit]

    def test_all_names_are_there(self):
        self.assertEqual(self.limits(""), [])

    def test_the_engine_names_its_threads_as_the_virtual_device_expects(self):
        program = """
            import pathlib, torch
            torch.ones(1, device="cuda", requires_grad=True).sum().backward()
            print(sorted({task.joinpath("comm").read_text()[:12] for task in pathlib.Path("/proc/self/task").iterdir()}))"""
        with tempfile.TemporaryDirectory(prefix="oomdiag names ") as folder:
            done = subprocess.run([build / "bin/oomdiag", "run", "--device", "rtx3060", "--folder", pathlib.Path(folder) / "run",
                                   "--", sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True)
        self.assertIn("'pt_autograd_'", done.stdout, done.stderr)  # extension/virtual_device/torch/rest.cpp

    def test_the_doctor_finds_all_names(self):
        done = subprocess.run([build / "bin/oomdiag", "doctor", "--device", "rtx3060", "--json", "--", sys.executable],
                              capture_output=True, text=True)
        self.assertNotIn("not found in", done.stdout, done.stderr)
        self.assertIn('"troubles"', done.stdout)


def check(self, lost, preparation):
    found = self.limits(preparation)
    self.assertEqual(len(found), 1, found)
    self.assertRegex(found[0], rf"^{lost}: not found in torch \d+\.\d+\.\S+: ")


for lost, preparation in RENAMED.items():
    setattr(InternalNamesTest, "test_without_" + lost.replace(" ", "_"),
            lambda self, lost=lost, preparation=preparation: check(self, lost, preparation))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    known, rest = parser.parse_known_args()
    build = known.build.resolve()
    unittest.main(argv=["test_internal_names.py", *rest], verbosity=2)
