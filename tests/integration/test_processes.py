"""Programs that end in every way there is, jobs of several processes, and what a terminal shows meanwhile.

    python tests/integration/test_processes.py --build BUILD_FOLDER [--group fast|slow] [unittest arguments, as in -k fork]

Most of the programs are those of endings.cpp: a C++ program starts in half a second, `import torch` takes three.
"""
import argparse
import fcntl
import json
import os
import pathlib
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import textwrap
import unittest

import test_diagnosis as base

slow = unittest.skipUnless("slow" in sys.argv, "slow")
fast = unittest.skipIf("slow" in sys.argv, "fast")


class ProcessTest(base.DiagnosisTest):
    def setUp(self):
        super().setUp()
        self.program = str(base.build / "bin/oomdiag_test_endings")
        self.report_file = self.folder / "report.json"

    def record(self, *program, options=(), **more):
        """`oomdiag run` of any program; its completed process and the report, None where there is none."""
        self.report_file.unlink(missing_ok=True)
        done = base.oomdiag("run", "--device", "rtx3060", *options, "-o", self.report_file, "--", *program,
                            folder=self.folder, **more)
        report = json.loads(self.report_file.read_text()) if self.report_file.exists() else None
        return done, report and self.check_report(report)

    def run_without(self, *program, **more):
        """The same program on the same virtual device, with nothing else of ours in it."""
        environment = base.DoNoHarm.virtual_environment(self)
        environment["LD_PRELOAD"] = environment["LD_PRELOAD"].split(":", 1)[1]
        for name in [name for name in environment if name.startswith("OOMDIAG_") and name not in ("OOMDIAG_DEVICE_FILES",)]:
            del environment[name]
        return subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120, **more)

    def check_same(self, *program, **more):
        """Exit code and output, and with it the peak that the program prints, are the same with and without recording."""
        without = self.run_without(*program, **more)
        done, report = self.record(*program, **more)
        self.assertEqual((done.returncode, done.stdout), (without.returncode, without.stdout), done.stderr)
        self.assertTrue(without.stdout)
        # What it wrote to stderr is there as well, before ours.
        for line in without.stderr.splitlines():
            if not re.search(r"0x[0-9a-f]{6}|frame #|Exception raised|CUDA out of memory", line):
                self.assertIn(line, done.stderr)
        return done, report


@fast
class Endings(ProcessTest):
    """The program under test never differs."""

    def check_ending(self, name, outcome, **more):
        done, report = self.check_same(self.program, name, **more)
        self.assertEqual(report["outcome"], outcome)
        peak = [line for line in done.stdout.splitlines() if line.isdigit()][-1]
        self.assertEqual(report["peak"]["allocated_bytes"], int(peak))
        self.assertEqual(report["exit_code"], done.returncode if done.returncode >= 0 else 128 - done.returncode)
        self.assertEqual(report["replay_error_bytes"], 0)
        return done, report

    def test_normal_end(self):
        self.check_ending("normal", "ok")

    def test_an_exception_that_nobody_catches(self):
        self.check_ending("exception", "killed")

    def test_exit_in_the_middle(self):
        done, _ = self.check_ending("exit", "failed")
        self.assertEqual(done.returncode, 3)

    def test_exit_without_a_word(self):
        done, _ = self.check_ending("_exit", "failed")
        self.assertEqual(done.returncode, 7)

    def test_signals(self):
        for name, number in (("terminated", signal.SIGTERM), ("segmentation_fault", signal.SIGSEGV), ("killed", signal.SIGKILL)):
            with self.subTest(name=name):
                done, _ = self.check_ending(name, "killed")
                self.assertEqual(done.returncode, -number)

    def test_an_oom_that_is_caught_and_tried_again_smaller(self):
        done, report = self.check_ending("oom_retried", "caught")
        failed = done.stdout.count("smaller")
        self.assertGreaterEqual(failed, 1)
        self.assertEqual(len(report["caught"]), failed)
        for caught in report["caught"]:
            self.assertGreater(caught["requested_bytes"], caught["free_bytes"])
            self.assertGreaterEqual(caught["reserved_bytes"], caught["allocated_bytes"])
            self.assertTrue(caught["op"].startswith("aten::"))

    def test_a_closed_stdin_or_stderr_costs_no_report(self):
        for closed in ("<&-", "2>&-", "<&- >&-"):
            self.report_file.unlink(missing_ok=True)
            done = subprocess.run(["bash", "-c", f'exec "$@" {closed}', "bash", base.build / "bin/oomdiag", "run", "--device", "rtx3060",
                                   "--folder", self.folder, "-o", self.report_file, "--", self.program, "normal"],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(json.loads(self.report_file.read_text())["outcome"], "ok", closed)

    def test_a_parent_that_ignores_the_end_of_children_costs_no_report(self):
        show = '"$0" normal; grep SigIgn /proc/self/status'
        _, report = self.check_same("sh", "-c", show, self.program,
                                    preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        self.assertEqual(report["outcome"], "ok")

    def test_a_program_that_the_recorder_cannot_reach_is_not_said_to_use_no_cuda(self):
        done, report = self.record("env", "-i", "sh", "-c", "exit 3")
        self.assertEqual((done.returncode, report), (3, None))
        self.assertRegex(done.stderr, "If 'env' starts its program where LD_PRELOAD .* do not reach it .*, run oomdiag there")

    def test_the_size_of_the_trace_is_checked_before_the_program_runs(self):
        for size in "-1", "many", "0", "9" * 20:
            done, _ = self.record("echo", "it runs", env=os.environ | {"OOMDIAG_TRACE_MIB": size})
            self.assertEqual((done.returncode, done.stdout), (2, ""))
            self.assertRegex(done.stderr, rf"\Aoomdiag: error: OOMDIAG_TRACE_MIB is '{size}'\nhint: .* MiB, .*\n\Z")

    def test_an_oom_that_nobody_catches(self):
        done, report = self.check_ending("oom_uncaught", "out_of_memory")
        self.assertEqual(done.returncode, -signal.SIGABRT)
        self.assertEqual(report["failure"]["requested_bytes"], 64 << 30)

    def test_the_cpp_calls_of_an_oom_are_named_on_request(self):
        _, report = self.record(self.program, "oom_uncaught", options=["--native-stacks"])
        failure = report["failure"]
        names = [call.partition(" in ")[2] for call in failure["stack"]]
        for expected in (r"^\(anonymous namespace\)::train\(long\)", "^main$"):  # what lies between may be inlined
            self.assertTrue(any(re.search(expected, name) for name in names), failure["stack"])
        self.assertTrue(failure["stack"][0].startswith(self.program), failure["stack"])
        self.assertTrue(failure["native_stack"][0].startswith("torch/lib/libc10_cuda.so+0x"), failure["native_stack"][:3])
        self.assertTrue(any("at::_ops::" in call for call in failure["native_stack"]))
        every_table = base.oomdiag("explain", self.report_file, "--all")
        self.assertRegex(every_table.stdout, r"called +from .*train\(long\)")

    def test_without_the_request_there_are_none(self):
        _, report = self.record(self.program, "oom_uncaught")
        self.assertEqual((report["failure"]["stack"], report["failure"]["native_stack"]), ([], []))

    def test_fork_and_wait(self):
        done, _ = self.check_ending("fork", "ok")
        self.assertIn("child 5", done.stdout)

    def test_threads(self):
        self.check_ending("threads", "ok")

    def test_what_is_typed_arrives(self):
        done, _ = self.check_ending("echo", "ok", input="one\ntwo\n")
        self.assertIn("one\ntwo\n", done.stdout)

    def test_a_program_after_exec_has_a_trace_of_its_own(self):
        done, report = self.record("sh", "-c", '"$0" normal 4; exec "$0" normal 8', self.program)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(len(report["ranks"]), 2)
        self.assertEqual({rank["rank"] for rank in report["ranks"]}, {None})


@fast
class Jobs(ProcessTest):
    """Several processes make one report."""

    RANKS = 'RANK=0 WORLD_SIZE=3 "$0" normal 64 & RANK=1 WORLD_SIZE=3 "$0" {} & RANK=2 WORLD_SIZE=3 "$0" normal 72 & wait'

    def test_ranks_stand_side_by_side(self):
        done, report = self.record("sh", "-c", self.RANKS.format("normal 65"), self.program)
        self.assertEqual((done.returncode, report["outcome"]), (0, "ok"), done.stderr)
        self.assertEqual([rank["rank"] for rank in report["ranks"]], [0, 1, 2])
        self.assertEqual(sorted(done.stdout.split()), sorted(str(r["peak"]["allocated_bytes"]) for r in report["ranks"]))
        self.assertEqual((report["rank"], report["world_size"]), (2, 3))  # the fullest
        self.assertIsNone(report["imbalance"])
        self.assertRegex(done.stderr, r"(?s)processes, .*rank 0 .*rank 1 .*rank 2 ")

    def test_imbalance_is_named(self):
        done, report = self.record("sh", "-c", self.RANKS.format("normal 512"), self.program)
        imbalance = report["imbalance"]
        self.assertEqual(imbalance["rank"], 1)
        self.assertEqual(imbalance["difference_bytes"], imbalance["peak_bytes"] - imbalance["median_of_others_bytes"])
        self.assertIn("imbalance: rank 1 peaks ", done.stderr)

    def test_the_rank_that_failed_is_the_one_that_is_explained(self):
        done, report = self.record("sh", "-c", self.RANKS.format("oom_uncaught"), self.program)
        self.assertEqual((report["outcome"], report["rank"]), ("out_of_memory", 1))
        self.assertEqual([rank["outcome"] for rank in report["ranks"]], ["ok", "out_of_memory", "ok"])
        self.assertEqual(report["failure"]["requested_bytes"], 64 << 30)
        run = next(self.folder.rglob("oomdiag-[0-9]*"))
        self.assertEqual({path.name for path in run.iterdir()}, {"rank-0", "rank-1", "rank-2", "report.json", "run.json"})
        for what, rank in ((run, 1), (run / "rank-2", 2), (run / "rank-0" / "report.json", 0)):
            again = self.check_report(json.loads(base.oomdiag("explain", what, "--json").stdout))
            self.assertEqual(again["rank"], rank)
        self.assertEqual(json.loads((run / "report.json").read_text())["ranks"], report["ranks"])

    def test_programs_one_after_the_other(self):
        done, report = self.record("sh", "-c", '"$0" normal 4; "$0" normal 128; "$0" normal 8; exit 5', self.program)
        self.assertEqual((done.returncode, report["exit_code"], report["outcome"]), (5, 5, "failed"))
        self.assertEqual(len(report["ranks"]), 3)
        self.assertEqual(report["peak"]["allocated_bytes"], max(map(int, done.stdout.split())))


@fast
class AtAStep(ProcessTest):
    """--attach-at-step: what was there before is known by size."""

    def test_recording_begins_with_the_step(self):
        done, report = self.record(self.program, "steps", "32", options=["--attach-at-step", "3"])
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual({phase["step"] for phase in report["phases"]} & {1, 2}, set())
        self.assertEqual(report["steps"], 5)  # after the fourth ended
        self.assertEqual((report["peak"]["step"], report["peak"]["allocated_bytes"]), (4, int(done.stdout)))
        self.assertEqual(report["replay_error_bytes"], 0)

    def test_a_step_that_never_comes_is_said(self):
        done, report = self.record(self.program, "steps", "32", options=["--attach-at-step", "30"])
        self.assertEqual((done.returncode, report), (0, None))
        self.assertIn("recording was to begin with step 30", done.stderr)


@fast
class Terminal(ProcessTest):
    """What people see who sit before it."""

    def run_on_terminal(self, *arguments, typed=b""):
        """Everything that was written to a terminal of 24 rows, and the exit code."""
        child, terminal = pty.fork()
        if child == 0:
            os.environ["TERM"] = "xterm"
            command = [str(base.build / "bin/oomdiag"), "run", "--device", "rtx3060", "--folder", str(self.folder)]
            os.execv(command[0], command + list(map(str, arguments)))
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 120, 0, 0))
        os.write(terminal, typed)
        output = b""
        while select.select([terminal], [], [], 60)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:
                break
            if not piece:
                break
            output += piece
        os.close(terminal)
        return output.decode(), os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    # Whatever saves the cursor, writes and puts it back leaves the program's lines alone.
    APART = re.compile("\0337.*?\0338", re.DOTALL)

    def test_a_live_line_that_keeps_out_of_the_programs_lines(self):
        script = '"$0" echo & sleep 2.5; echo begin; sleep 0.7; echo end; kill -TERM $! ; exit 4'
        output, code = self.run_on_terminal("--", "sh", "-c", script.replace("echo &", "echo < /dev/tty &"), self.program)
        self.assertEqual(code, 4, output)
        shown = [part for part in self.APART.findall(output) if "oomdiag: step" in part]
        self.assertGreaterEqual(len(shown), 1, repr(output))
        self.assertRegex(shown[-1], r"\033\[24;1H.*step 2 +allocated .* reserved .* peak .* free .* of 11\.63 GiB")
        self.assertRegex(self.APART.sub("", output), r"begin\r\nend\r\n")
        self.assertIn("\0337\033[r", output)  # the terminal is as it was

    def test_no_live_line_when_it_is_not_wanted_or_stderr_is_no_terminal(self):
        output, code = self.run_on_terminal("--no-progress", "--", "sh", "-c", '"$0" normal; sleep 1', self.program)
        self.assertEqual(code, 0)
        self.assertNotIn("\0337", output)
        done, _ = self.record("sh", "-c", '"$0" normal; sleep 1', self.program)
        self.assertNotIn("\033", done.stdout + done.stderr)


@fast
class NotRecorded(ProcessTest):
    """What cannot be recorded is recognised, and runs on."""

    def check_totals_only(self, reason, **environment):
        without = self.run_without(self.program, "normal", "16") if not environment else None
        done, report = self.record(self.program, "normal", "16", env={**os.environ, **environment})
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(report["outcome"], "ok")
        self.assertIn(reason, " ".join(report["limitations"]))
        self.assertIsNone(without)
        return done, report

    def test_the_asynchronous_allocator(self):
        done, report = self.check_totals_only("cudaMallocAsync", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
        self.assertEqual(report["peak"]["allocated_bytes"], int(done.stdout))

    def test_no_caching(self):
        self.check_totals_only("PYTORCH_NO_CUDA_MEMORY_CACHING", PYTORCH_NO_CUDA_MEMORY_CACHING="1")

    def test_a_pluggable_allocator(self):
        done, report = self.record(self.program, "pluggable", "16")
        self.assertEqual((done.returncode, report["outcome"]), (0, "ok"), done.stderr)
        self.assertIn("pluggable", " ".join(report["limitations"]))
        self.assertIn("could not be recorded", done.stderr)

    def fake_torch(self, version):
        """A site-packages with the real torch under another version."""
        real = pathlib.Path(base.importlib.util.find_spec("torch").origin).parent
        site = self.folder / "site"
        (site / "torch").mkdir(parents=True)
        for entry in real.parent.iterdir():
            if entry.name != "torch":
                (site / entry.name).symlink_to(entry)
        for entry in real.iterdir():
            (site / "torch" / entry.name).symlink_to(entry)
        (site / "torch" / "version.py").unlink()
        text = (real / "version.py").read_text()
        (site / "torch" / "version.py").write_text(re.sub(r"__version__ = .*", f"__version__ = '{version}'", text))
        return {**os.environ, "PYTHONPATH": str(site)}

    def test_another_torch_where_there_is_no_compiler(self):
        code = "import torch; torch.ones(4, device='cuda'); print(torch.cuda.max_memory_allocated())"
        done, report = self.record(sys.executable, "-c", code, env=self.fake_torch("2.99.0+cu132") | {"CXX": "/nowhere/g++"})
        self.assertEqual((done.returncode, done.stdout, report), (0, "512\n", None), done.stderr)
        self.assertRegex(done.stderr, "warning: no recorder for torch 2.99.0.cu132: there is no C\\+\\+ compiler")
        self.assertRegex(done.stderr, "hint: install g.*; without a recorder the virtual device still works")
        self.assertRegex(done.stderr, "no report: no recorder for torch 2.99.0")

    def test_a_torch_without_cuda(self):
        done, report = self.record(sys.executable, "-c", "print(1)", env=self.fake_torch("2.15.0+cpu"))
        self.assertEqual((done.returncode, done.stdout, report), (0, "1\n", None), done.stderr)
        self.assertIn("built without CUDA", done.stderr)


@slow
class PythonEndings(ProcessTest):
    """The same of Python programs."""

    def check(self, code, outcome, **more):
        code = "import sys, os, torch\n" + textwrap.dedent(code)
        done, report = self.check_same(sys.executable, "-c", code, **more)
        self.assertEqual(report["outcome"], outcome)
        return done, report

    TRAIN = """
        from torch import nn
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 8)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.randn(128, 256, device='cuda')).sum().backward()
            optimizer.step()
        print(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved(), flush=True)
    """

    def test_exit_and_exception(self):
        done, _ = self.check(self.TRAIN + "\n        sys.exit(3)", "failed")
        self.assertEqual(done.returncode, 3)
        self.check(self.TRAIN + "\n        raise ValueError('of the program')", "failed")
        self.check(self.TRAIN + "\n        os._exit(7)", "failed")

    def test_input(self):
        done, _ = self.check(self.TRAIN + "\n        print(input())", "ok", input="typed\n")
        self.assertIn("typed", done.stdout)

    def test_an_environment_that_was_cleared_before_cuda_is_used(self):
        self.check("        os.environ.clear()" + self.TRAIN, "ok")

    def test_an_exception_through_backward(self):
        self.check("""
            class Odd(torch.autograd.Function):
                @staticmethod
                def forward(context, x): return x * 1
                @staticmethod
                def backward(context, gradient): raise KeyError('in backward')
            x = torch.ones(64, 64, device='cuda', requires_grad=True)
            for _ in range(3):
                try: (Odd.apply(x @ x) @ x).sum().backward()
                except KeyError as error: print(error)
            print(torch.cuda.max_memory_allocated(), flush=True)
        """, "ok")

    def test_spawned_ranks(self):
        script = self.folder / "spawn.py"
        script.write_text(textwrap.dedent("""
            import os, sys, torch
            import torch.distributed as dist, torch.multiprocessing as mp
            def work(rank, port):
                dist.init_process_group('gloo', f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
                model = torch.nn.Linear(1024, 1024 * (rank + 1)).cuda()
                model(torch.randn(1024 << (4 * rank), 1024, device='cuda')).sum().backward()
                dist.barrier(); dist.destroy_process_group()
            if __name__ == '__main__':
                import socket
                with socket.socket() as probe:
                    probe.bind(('127.0.0.1', 0))
                    port = probe.getsockname()[1]
                mp.spawn(work, (port,), nprocs=2)
                print('done')
        """))
        done, report = self.record(sys.executable, script)
        self.assertEqual((done.returncode, done.stdout), (0, "done\n"), done.stderr)
        self.assertEqual([rank["rank"] for rank in report["ranks"]], [0, 1])
        self.assertEqual([rank["folder"] for rank in report["ranks"]], ["rank-0", "rank-1"])
        self.assertEqual(report["imbalance"]["rank"], 1)

    def test_spawned_ranks_over_nccl_of_which_one_runs_out(self):
        script = self.folder / "spawn.py"
        script.write_text(textwrap.dedent("""
            import sys, time, torch
            import torch.distributed as dist, torch.multiprocessing as mp
            def work(rank, port, came_through):
                torch.cuda.set_device(rank)
                dist.init_process_group('nccl', f'tcp://127.0.0.1:{port}', rank=rank, world_size=2)
                model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 1024).cuda(), [rank])
                optimizer = torch.optim.SGD(model.parameters(), 0.1)
                for batch in (64, 1 << 18 if rank == 0 else int(sys.argv[1])):
                    if rank == 1 and batch > 64:
                        came_through.wait()
                    model(torch.randn(batch, 1024, device='cuda')).square().sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                came_through.set()
                if rank == 0 and sys.argv[2] == 'wait':
                    time.sleep(60)  # until it is ended
                dist.destroy_process_group()
                print(torch.cuda.max_memory_allocated(), flush=True)
            if __name__ == '__main__':
                import socket
                with socket.socket() as probe:
                    probe.bind(('127.0.0.1', 0))
                    port = probe.getsockname()[1]
                mp.spawn(work, (port, mp.get_context('spawn').Event()), nprocs=2)
        """))
        done, report = self.record(sys.executable, script, str(1 << 18), "go", options=["--count", "2"])
        self.assertEqual((done.returncode, report["outcome"]), (0, "ok"), done.stderr)
        self.assertEqual([rank["rank"] for rank in report["ranks"]], [0, 1])
        self.assertEqual([rank["device"]["index"] for rank in report["ranks"]], [0, 1])
        self.assertEqual(sorted(done.stdout.split()), sorted(str(r["peak"]["allocated_bytes"]) for r in report["ranks"]))
        self.assertIsNone(report["imbalance"])

        done, report = self.record(sys.executable, script, str(1 << 20), "wait", options=["--count", "2"])
        self.assertEqual((report["outcome"], report["rank"]), ("out_of_memory", 1), done.stderr)
        self.assertIsNone(report["ranks"][0]["failure"])
        self.assertEqual((report["cause"]["kind"], report["ranks"][1]["cause"]), ("imbalance", "imbalance"), done.stderr)
        self.assertEqual(report["cause"]["evidence"]["imbalance"]["others_bytes"], report["ranks"][0]["peak"]["allocated_bytes"])
        self.assertRegex(done.stderr, "why +imbalance: this GPU holds .* evenly spread it would fit")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=base.build)
    parser.add_argument("--group", default="fast")
    known, rest = parser.parse_known_args()
    base.build = known.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
