"""What the fixes do to a program that knows nothing of them. No GPU: each is applied in a child that has torch."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import unittest

FIXES = pathlib.Path(__file__).resolve().parents[2] / "extension/python/fixes"
sys.path.insert(0, str(FIXES))
import oomdiag_packages  # noqa: E402


class InjectedFixes(unittest.TestCase):
    def run_with(self, fixes, code, make_folder=True):
        """What the program printed as JSON, and what the fixes reported."""
        with tempfile.TemporaryDirectory() as folder:
            run, program = pathlib.Path(folder, "run"), pathlib.Path(folder, "program.py")
            if make_folder:
                run.mkdir()
            program.write_text(textwrap.dedent(code))
            done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=120,
                                  env=os.environ | {"PYTHONPATH": str(FIXES), "OOMDIAG_FIXES": json.dumps(fixes), "OOMDIAG_OUTPUT": str(run)})
            self.assertEqual(done.returncode, 0, done.stderr)
            reported = (run / "fixes").read_text().splitlines() if make_folder else []
        return json.loads(done.stdout), [json.loads(line) for line in reported]

    OPTIMIZERS = """
        import json, torch
        parameter = torch.nn.Parameter(torch.ones(3))
        made = [torch.optim.AdamW([parameter]), torch.optim.RMSprop([parameter])]
        print(json.dumps([[each.defaults["foreach"], each.defaults.get("fused")] for each in made]))
        """

    def test_optimizers_without_fused_kernels_go_from_parameter_to_parameter_too(self):
        given, reported = self.run_with([["foreach_off", {}]], self.OPTIMIZERS)
        self.assertEqual(given, [[False, False], [False, None]])
        self.assertEqual([each["lines"] for each in reported],
                         [["optimizer = torch.optim.AdamW(..., foreach=False, fused=False)"], ["optimizer = torch.optim.RMSprop(..., foreach=False)"]])

    def test_a_program_runs_on_where_a_fix_cannot_report(self):
        given, _ = self.run_with([["foreach_off", {}]], self.OPTIMIZERS, make_folder=False)
        self.assertEqual(given, [[False, False], [False, None]])

    def test_the_loss_scale_is_that_of_a_step_for_all_optimizers_and_closures_are_called(self):
        (one, two, closure), _ = self.run_with([["look", {}]], """
            import json, torch
            done = []
            class Scaler:
                def __init__(self, device): pass
                def step(self, optimizer): done.append("step"); optimizer.step()
                def update(self): done.append("update")
            torch.amp.GradScaler = Scaler
            from oomdiag_fixes import autocast_fp16
            autocast_fp16.apply({})

            def take():
                taken = list(done)
                done.clear()
                return taken
            def backward():
                done.append("backward")
                loss = parameter.square().sum()
                loss.backward()
                return loss
            parameter = torch.nn.Parameter(torch.ones(3))
            first = torch.optim.SGD([parameter])
            for _ in range(2): backward(); first.step()
            one = take()
            second = torch.optim.SGD([parameter])
            for _ in range(2): backward(); first.step(); second.step()
            backward(); first.step(); backward(); first.step(); first.step()
            two = take()
            loss = second.step(backward)
            print(json.dumps([one, two, [take(), loss is not None]]))
            """)
        self.assertEqual(one, ["backward", "step", "update"] * 2)
        self.assertEqual(two, ["backward", "step", "step", "update"] * 2 + ["backward", "step", "backward", "update", "step", "update", "step"])
        self.assertEqual(closure, [["backward", "update", "step"], True])

    def test_files_of_packages_are_none_of_the_program(self):
        for file in (os.__file__, json.__file__, "/usr/lib/python3/dist-packages/yaml/nodes.py", "/usr/lib64/python3.11/site-packages/numpy/core.py",
                     os.path.expanduser("~/.local/lib/python3.11/site-packages/own/model.py"), oomdiag_packages.__file__):
            self.assertTrue(oomdiag_packages.is_installed(file), file)
        self.assertFalse(oomdiag_packages.is_installed(__file__))


if __name__ == "__main__":
    unittest.main(verbosity=2)
