"""oomdiag from inside of a program: torch.ops.oomdiag, scripted code, the C++ header, Jupyter.

    python tests/integration/test_api.py --build BUILD_FOLDER [unittest arguments]
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import textwrap
import unittest

import test_diagnosis as base


class ApiTest(base.DiagnosisTest):
    def setUp(self):
        super().setUp()
        self.library = str(base.build / "lib/liboomdiag.so")

    def run_alone(self, code, *arguments, **environment):
        """A Python program on a virtual rtx3060 that oomdiag did not start; what it printed as JSON, line by line."""
        settings = base.DoNoHarm.virtual_environment(self)
        settings["LD_PRELOAD"] = settings["LD_PRELOAD"].split(":", 1)[1]
        for name in ("OOMDIAG_OUTPUT", "OOMDIAG_RECORDER"):
            settings.pop(name, None)
        code = f"import json, torch\nLIBRARY = {self.library!r}\n" + textwrap.dedent(code)
        script = self.folder / "program.py"  # a file: TorchScript reads the source
        script.write_text(code)
        done = subprocess.run([sys.executable, script, *map(str, arguments)], env=settings | environment,
                              capture_output=True, text=True, timeout=120, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.stderr = done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]


class InTheMiddle(ApiTest):
    """Recording begins, stops and goes on where the program says so."""

    def test_a_program_that_starts_records_stops_and_explains(self):
        printed = self.run_alone("""
            from torch import nn
            model = nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 10)).cuda()
            optimizer = torch.optim.AdamW(model.parameters())
            x = torch.randn(256, 512, device="cuda")
            junk = [torch.empty(1 << 20, device="cuda") for _ in range(5)]
            del junk[1:4]
            def step():
                optimizer.zero_grad(); loss = model(x).sum(); loss.backward(); optimizer.step()
            step()
            torch.ops.load_library(LIBRARY)
            oomdiag = torch.ops.oomdiag
            try: oomdiag.report()
            except RuntimeError as error: print(json.dumps(str(error).splitlines()[0]))
            oomdiag.start("run")
            oomdiag.mark("began")
            step()
            print(json.dumps(oomdiag.saved_tensors(model(x).sum())))
            oomdiag.stop()
            more = torch.empty(3 << 20, device="cuda"); del junk
            oomdiag.start()
            step()
            oomdiag.mark("ended")
            print(json.dumps([oomdiag.peak(), torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]))
            print(oomdiag.report().replace("\\n", ""))
            try: torch.empty(20 << 30, device="cuda")
            except torch.OutOfMemoryError: print(json.dumps(oomdiag.explain()))
            torch.ops.load_library(LIBRARY)
            oomdiag.stop()
        """)
        not_yet, saved, (peak, allocated, reserved), report, explanation = printed
        self.assertIn("nothing is recorded", not_yet)
        self.assertEqual(saved["1 → 2  [256, 2048] float32"], 256 * 2048 * 4)
        self.assertEqual((peak["allocated_bytes"], peak["reserved_bytes"]), (allocated, reserved))
        report = self.check_report(report)
        self.assertEqual((report["outcome"], report["replay_error_bytes"]), ("ok", 0))
        self.assertEqual([mark["name"] for mark in report["marks"]], ["began", "ended"])
        self.assertGreater(report["categories"]["parameter"], 0)  # named since, though made before
        self.assertGreater(report["categories"]["unknown"], 0)
        self.assertTrue(any("allocated before recording began" in limit for limit in report["limitations"]), report["limitations"])
        self.assertIn("oversized request: 80.00 GiB", explanation)
        explained = base.load_report(base.oomdiag("explain", self.folder / "run", "--json").stdout)
        self.assertEqual(explained["failure"]["requested_bytes"], 80 << 30)

    def test_a_recorder_that_waits_for_cuda(self):
        report, = self.run_alone("""
            torch.ops.load_library(LIBRARY)
            session = torch.classes.oomdiag.Session("run")
            x = torch.ones(1 << 20, device="cuda", requires_grad=True)
            (x * 2).relu().sum().backward()
            session.mark("done")
            session.stop()
            print(session.report().replace("\\n", ""))
        """)
        report = self.check_report(report)
        self.assertEqual(report["peak"]["phase"], "backward")
        self.assertEqual(report["replay_error_bytes"], 0)

    def test_a_recording_that_was_stopped_before_cuda_was_used_does_not_begin(self):
        before, between, after = self.run_alone("""
            torch.ops.load_library(LIBRARY)
            oomdiag = torch.ops.oomdiag
            oomdiag.start("run")
            print(json.dumps(oomdiag.is_recording()))
            oomdiag.stop()
            x = torch.ones(1 << 20, device="cuda")
            print(json.dumps(oomdiag.is_recording()))
            oomdiag.start("run")
            print(json.dumps(oomdiag.is_recording()))
        """)
        self.assertEqual((before, between, after), (True, False, True))

    def test_what_the_virtual_device_noted_while_nothing_was_recorded_is_in_the_report(self):
        report, = self.run_alone("""
            torch.ops.load_library(LIBRARY)
            oomdiag = torch.ops.oomdiag
            x = torch.ones(1 << 20, device="cuda")
            oomdiag.start("run")
            oomdiag.stop()
            torch.fft.fft(x)
            for _ in range(3): oomdiag.start(); oomdiag.stop()
            print(oomdiag.report().replace("\\n", ""))
        """)
        self.assertEqual(report["notes"].count({"kind": "estimate", "text": "cuFFT work area"}), 1, report["notes"])

    def test_numbered_marks_are_counted_together_after_the_first_ones(self):
        report, = self.run_alone("""
            torch.ops.load_library(LIBRARY)
            torch.ops.oomdiag.start("run")
            x = torch.ones(1 << 20, device="cuda")
            for i in range(200): torch.ops.oomdiag.mark(f"iteration {i}")
            print(torch.ops.oomdiag.report().replace("\\n", ""))
        """)
        names = [mark["name"] for mark in report["devices"][0]["marks"]]
        self.assertEqual(names, [f"iteration {i}" for i in range(128)] + ["iteration #"] * 72)
        self.assertTrue(any("marks that differ by numbers only" in limit for limit in report["limitations"]), report["limitations"])

    def test_arguments_of_operators_are_json_whatever_is_in_their_texts(self):
        text = 'a "word"\\ of\n two lines'
        self.run_alone(f"""
            torch.ops.load_library(LIBRARY)
            torch.library.define("own::say", "(Tensor x, str text) -> Tensor")
            torch.library.impl("own::say", "CUDA", lambda x, text: x.clone())
            torch.ops.oomdiag.start("run")
            torch.ops.own.say(torch.ones(4, device="cuda"), {text!r})
        """, OOMDIAG_ARGUMENTS="1")
        lines = (self.folder / "run" / "arguments").read_text().splitlines()
        calls = [json.loads(line.partition("\t")[2]) for line in lines]
        self.assertIn({"s": text}, [call["in"][1] for call in calls if call["op"][0] == "own::say"])

    def test_a_second_copy_is_recognised_and_stays_quiet(self):
        copy = self.folder / "liboomdiag.so"
        shutil.copy(self.library, copy)
        printed = self.run_alone("""
            import sys
            torch.ops.load_library(LIBRARY)
            torch.ops.load_library(sys.argv[1])
            torch.ops.oomdiag.start("run")
            x = torch.ones(1 << 20, device="cuda")
            print(torch.ops.oomdiag.peak()["allocated_bytes"])
        """, copy)
        self.assertEqual(printed, [4 << 20])
        self.assertIn("another copy of it is loaded already", self.stderr)

    def test_a_folder_that_others_may_write_into_is_not_taken_by_default(self):
        said, = self.run_alone("""
            import os
            torch.ops.load_library(LIBRARY)
            os.mkdir(f"oomdiag-{os.getpid()}")
            os.chmod(f"oomdiag-{os.getpid()}", 0o777)
            try: torch.ops.oomdiag.start()
            except RuntimeError as error: print(json.dumps(str(error).splitlines()[0]))
        """)
        self.assertIn("is there, and others may write into it", said)

    def test_under_oomdiag_run_the_recording_is_the_same(self):
        done, report = self.run_code(f"""
            import torch
            torch.ops.load_library({self.library!r})
            x = torch.ones(1 << 20, device="cuda")
            print(torch.ops.oomdiag.start())
            torch.ops.oomdiag.mark("here")
            print(torch.ops.oomdiag.peak()["allocated_bytes"])
        """)
        trace, peak = done.stdout.split("\n")[:2]
        self.assertTrue(trace.endswith("/trace"), done.stderr)
        self.assertEqual(int(peak), 4 << 20)
        self.assertEqual([mark["name"] for mark in report["marks"]], ["here"])


class Package(ApiTest):
    """`import oomdiag` in a program that is recorded already, or whose report fails."""

    def run_alone(self, code, **environment):
        return super().run_alone(code, PYTHONPATH=str(base.build / "lib/python"), OOMDIAG_LIBRARY=self.library, **environment)

    def test_a_watch_a_budget_and_an_extension_end_only_a_recording_that_they_began(self):
        printed = self.run_alone("""
            import oomdiag
            class Shell:
                def register_magic_function(self, function, magic_kind, magic_name): pass
                def set_custom_exc(self, kinds, handler): pass
            def in_an_extension():
                oomdiag.load_ipython_extension(Shell())
                oomdiag.unload_ipython_extension(Shell())
            def in_a_budget():
                with oomdiag.budget("1GiB"): pass
            def in_a_watch():
                with oomdiag.watch(): pass
            is_recording = torch.ops.oomdiag.is_recording if oomdiag.library and oomdiag._ops() else None
            for inner in in_a_watch, in_a_budget, in_an_extension:
                inner()
                alone = is_recording()
                with oomdiag.watch():
                    inner()
                    x = torch.ones(1 << 20, device="cuda")
                    inner()
                    print(json.dumps([alone, is_recording()]))
                print(json.dumps(is_recording()))
        """)
        self.assertEqual(printed, [[False, True], False] * 3)

    def test_a_report_that_fails_does_not_take_the_place_of_the_programs_error(self):
        printed = self.run_alone("""
            import oomdiag
            try:
                with oomdiag.watch("run"):
                    x = torch.empty(1 << 30, device="cuda")
                    torch.empty(1 << 40, device="cuda")
            except torch.OutOfMemoryError as error: print(json.dumps([type(error).__name__, error.__context__ is None]))
            try:
                with oomdiag.budget(1): x = torch.empty(1 << 20, device="cuda")
            except oomdiag.BudgetExceeded as error: print(json.dumps(str(error).splitlines()))
        """, OOMDIAG_REPORTS="/there/is/no/such/library.so")
        self.assertEqual(printed[0], ["OutOfMemoryError", True])
        self.assertIn("above its budget of 1 B", printed[1][0])
        for text in printed[1][1], self.stderr:
            self.assertIn("oomdiag: there is no report: oomdiag: no report can be made here", text)


class Scripted(ApiTest):
    """Scripted code calls the ops, is saved, loaded and run in C++."""

    def test_a_scripted_module_in_cpp(self):
        module = self.folder / "module.pt"
        self.run_alone("""
            import sys
            torch.ops.load_library(LIBRARY)
            class Model(torch.nn.Module):
                def __init__(self):
                    super().__init__()
                    self.first = torch.nn.Linear(256, 512)
                def forward(self, x: torch.Tensor) -> str:
                    torch.ops.oomdiag.start()
                    torch.ops.oomdiag.mark("scripted")
                    loss = self.first(x).relu().sum()
                    saved = torch.ops.oomdiag.saved_tensors(loss)
                    largest = 0
                    for name in saved:
                        largest = max(largest, saved[name])
                    loss.backward()
                    peak = torch.ops.oomdiag.peak()
                    session = torch.classes.oomdiag.Session("")
                    report = torch.ops.oomdiag.report()
                    explained = session.explain()
                    return str(largest) + " " + str(peak["allocated_bytes"]) + " " + str(len(report) > 1000) + " " + str(len(explained) > 100)
            torch.jit.script(Model()).save(sys.argv[1])
        """, module)
        settings = base.DoNoHarm.virtual_environment(self)
        settings["LD_PRELOAD"] = settings["LD_PRELOAD"].split(":", 1)[1]
        settings.pop("OOMDIAG_OUTPUT")
        done = subprocess.run([base.build / "bin/oomdiag_test_scripted", module, self.folder / "run"], env=settings,
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, 0, done.stderr)
        answer, peak, explanation = done.stdout.split("\n", 2)
        largest, at_that_time, has_report, has_text = answer.split()
        self.assertEqual((int(largest), has_report, has_text), (64 * 512 * 4, "True", "True"))
        self.assertEqual(int(peak.split()[0]), int(at_that_time))
        self.assertNotIn("out of memory", explanation)  # it happened after stop()
        report = base.load_report(base.oomdiag("explain", self.folder / "run", "--json").stdout)
        self.assertEqual([mark["name"] for mark in report["marks"]], ["scripted", "after the module"])


class Jupyter(ApiTest):
    """%load_ext oomdiag."""

    CELLS = """
        import oomdiag
        try:
            from IPython.core.interactiveshell import InteractiveShell
            shell = InteractiveShell.instance()
            run_magic = shell.run_line_magic
            run_magic("load_ext", "oomdiag")
            fails = lambda code: shell.run_cell(code)
        except ImportError:  # the same calls as IPython's
            class Shell:
                magics = {}
                def register_magic_function(self, function, magic_kind, magic_name): self.magics[magic_name] = function
                def set_custom_exc(self, kinds, handler): self.kinds, self.handler = kinds, handler
                def showtraceback(self, exception, tb_offset=None): pass
            shell = Shell()
            oomdiag.load_ipython_extension(shell)
            run_magic = lambda name, line: shell.magics[name](line)
            def fails(code):
                try: exec(code, globals())
                except shell.kinds as error: shell.handler(shell, type(error), error, error.__traceback__)
        import contextlib, io
        def printed(function, *arguments):
            with contextlib.redirect_stdout(io.StringIO()) as text: function(*arguments)
            return text.getvalue()
        x = torch.ones(1 << 20, device="cuda")
        print(json.dumps(printed(run_magic, "oomdiag", "")))
        print(json.dumps(printed(run_magic, "oomdiag", "mark here")))
        print(json.dumps(printed(fails, "import torch; torch.empty(1 << 40, device='cuda')")))
        print(json.dumps(printed(run_magic, "oomdiag", "nonsense")))
    """

    def test_a_notebook(self):
        package = base.build / "lib/python"
        paths = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        peak, mark, failure, usage = self.run_alone(self.CELLS, PYTHONPATH=paths)
        self.assertIn("4.00 MiB allocated", peak)
        self.assertEqual(mark, "")
        self.assertIn("oversized request", failure)
        self.assertIn("%oomdiag", usage)
        named = base.oomdiag("env").stdout
        self.assertIn(f"{package}", named)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=base.build)
    known, rest = parser.parse_known_args()
    base.build = known.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
