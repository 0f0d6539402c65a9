"""The recorder is a guest in the program: what it must not touch, break or lose.

    python tests/integration/test_guest.py --build BUILD_FOLDER [unittest arguments, as in -k fork]
"""
import argparse
import pathlib
import subprocess
import sys
import textwrap
import unittest

import test_diagnosis as base


class GuestTest(base.DiagnosisTest):
    def run_without(self, *program, **more):
        """The same program on the same virtual device, with nothing else of ours in it."""
        environment = base.DoNoHarm.virtual_environment(self)
        environment["LD_PRELOAD"] = environment["LD_PRELOAD"].split(":", 1)[1]
        return subprocess.run([sys.executable, *program], env=environment, capture_output=True, text=True, timeout=120, **more)

    def check_same(self, code, *arguments, **more):
        """Exit code and output are the same with and without recording; the report."""
        program = ("-c", textwrap.dedent(code), *arguments)
        without = self.run_without(*program)
        done, report = self.run_program(*program, **more)
        self.assertEqual((done.returncode, done.stdout), (without.returncode, without.stdout), done.stderr)
        self.assertTrue(without.stdout)
        return report


class CaughtOoms(GuestTest):
    """An OOM that the program catches."""

    # An implicit layer: backward passes inside of a backward pass, then a request that fails.
    NESTED = """
        import sys, torch
        from torch import nn
        class Inner(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x.clone()
            @staticmethod
            def backward(ctx, g):
                x, = ctx.saved_tensors
                for _ in range(3):
                    with torch.enable_grad():
                        y = x.detach().requires_grad_()
                        z = (y * 2).relu().sum()
                    gx, = torch.autograd.grad(z, y)
                    del z
                junk = [nn.functional.relu(torch.ones(4096, 64, device="cuda")) for _ in range(50)]
                big = torch.empty(40000 << 20, device="cuda")
                return g * gx
        x = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        w = torch.ones(1024, 1024, device="cuda", requires_grad=True)
        peak = 0  # of the first OOM: later ones find what the engine's thread has not let go of yet, more or less of it
        for step in range(3):
            try:
                Inner.apply(x @ w).sum().backward()
            except torch.OutOfMemoryError:
                peak = peak or torch.cuda.max_memory_allocated()
                print("oom", step)
        print(peak, flush=True)
    """

    def test_after_nested_backward_passes(self):
        report = self.check_same(self.NESTED)
        self.assertEqual(report["outcome"], "caught")
        self.assertEqual([caught["node"] for caught in report["caught"]], 3 * ["InnerBackward"])

    CUSTOM = """
        import torch
        class Big(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                {forward}
            @staticmethod
            def backward(ctx, g):
                return g
        x = torch.ones(4096, 1024, device="cuda", requires_grad=True)
        for _ in range(2):
            try:
                Big.apply(x)
                print("no exception")
            except torch.OutOfMemoryError:
                print("caught")
            torch.ones(8, device="cuda")
    """

    def test_of_a_custom_function_is_caught_and_not_recovered(self):
        report = self.check_same(self.CUSTOM.format(forward="return x.repeat(2000, 1)"))
        self.assertEqual((report["recovered_by_library"], len(report["caught"])), ([], 2))
        self.assertEqual({(caught["op"], caught["source"].rpartition(":")[2]) for caught in report["caught"]},
                         {("Big", "13")})

    def test_inside_of_a_custom_function_is_caught_and_not_recovered(self):
        forward = """
                try:
                    return x.repeat(2000, 1)
                except torch.OutOfMemoryError:
                    return x.clone()"""
        report = self.check_same(self.CUSTOM.format(forward=forward))
        self.assertEqual((report["recovered_by_library"], len(report["caught"])), ([], 2))


class Loaded(GuestTest):
    """Loading the recorder changes nothing that the program can see."""

    def test_no_library_is_made_global(self):
        code = """
            import ctypes, glob, os, subprocess, torch
            folder = os.path.join(os.path.dirname(torch.__file__), "lib")
            names = set()
            for library in ("libtorch_cpu.so", "libtorch_cuda.so", "libc10.so", "libtorch_python.so", "libc10_cuda.so"):
                table = subprocess.run(["nm", "-D", "--defined-only", os.path.join(folder, library)], capture_output=True, text=True)
                names |= {line.split()[-1] for line in table.stdout.splitlines()[::97]}
            names |= {"sgemm_", "cblas_sgemm", "mkl_serv_get_version", "pthreadpool_create", "uv_version_string"}
            def visible():
                everything = ctypes.CDLL(None)
                return sorted(name for name in names if hasattr(everything, name))
            before = visible()
            torch.ones(1, device="cuda")
            after = visible()
            print(len(names) > 1000, sorted(set(after) - set(before)))
        """
        self.check_same(code)
        done, _ = self.run_code(code)
        self.assertEqual(done.stdout, "True []\n")

    def test_the_recorder_that_is_loaded_exports_nothing_but_its_functions(self):
        table = subprocess.run(["nm", "-DC", "--defined-only", str(base.build / "lib/liboomdiag.so")], capture_output=True,
                               text=True, check=True)
        names = [line.split(maxsplit=2)[2] for line in table.stdout.splitlines()]
        self.assertEqual([name for name in names if not name.startswith("oomdiag")], [])


class Signals(GuestTest):
    """What the program's signal handlers raise arrives, whatever the recorder was doing."""

    NAMING = """
        import signal, sys, time, torch
        from torch import nn
        torch.ones(1, device="cuda")
        model = nn.Sequential(*[nn.Sequential(nn.Linear(2, 2)) for _ in range(8000)]).cuda()
        optimizer = torch.optim.Adam([{{"params": [p]}} for p in model[:50].parameters()])
        x = torch.ones(1, 2, device="cuda")
        def handler(*_):
            raise TimeoutError("the program's own")
        signal.signal(signal.SIGALRM, {handler})
        end = time.time() + 3
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        try:
            while time.time() < end:
                model[0](x); model[:1](x); model(x).sum().backward(); optimizer.step()
            print("it never came")
        except (TimeoutError, KeyboardInterrupt) as error:
            print(type(error).__name__)
    """

    def test_a_timeout_while_modules_are_named(self):
        self.check_same(self.NAMING.format(handler="handler"))

    def test_an_interrupt_while_modules_are_named(self):
        self.check_same(self.NAMING.format(handler="signal.default_int_handler"))


class Children(GuestTest):
    def test_a_forked_child_that_ends_by_exit_leaves_the_trace_alone(self):
        done, report = self.run_code("""
            import os, sys, torch
            x = torch.ones(1 << 20, device="cuda")
            for _ in range(4):
                child = os.fork()
                if child == 0:
                    torch.ones(10) + 1
                    sys.exit(3)
                assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
                keep = [torch.ones(10, device="cuda") * 2 for _ in range(2000)]
            print(torch.cuda.max_memory_allocated())
        """, env={**base.os.environ, "OOMDIAG_TRACE_MIB": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual((report["peak"]["allocated_bytes"], report["replay_error_bytes"]), (int(done.stdout), 0))


class Profiled(GuestTest):
    """torch.profiler at the same time."""

    def test_the_range_that_a_schedule_opens_hides_no_place(self):
        _, report = self.run_code("""
            import torch
            from torch import nn
            from torch.profiler import profile, schedule, ProfilerActivity
            model = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4)]).cuda()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            with profile(activities=[ProfilerActivity.CPU], schedule=schedule(wait=40, warmup=1, active=1)) as p:
                for i in range(30):
                    x = torch.randn(8 if i < 29 else 100_000_000, 64, device="cuda")
                    optimizer.zero_grad()
                    model(x).square().sum().backward()
                    optimizer.step()
                    p.step()
        """, device="h200")
        self.assertEqual((report["failure"]["phase"], report["failure"]["module"]), ("forward", "3.1"))
        self.assertRegex(report["failure"]["source"], r"<string>:11$")
        self.assertGreater(report["steady_steps"], 10)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=base.build)
    known, rest = parser.parse_known_args()
    base.build = known.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
