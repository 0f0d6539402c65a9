"""One rank of a job, alone: equal to the same rank among all ranks, and a clear end where it cannot be.

    python tests/integration/test_ranks.py --build BUILD_FOLDER [Quick|Slow] [unittest arguments, as in -k ddp]
"""
import argparse
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import textwrap
import time
import unittest

import test_diagnosis as base

PIPELINES = ("gpipe", "one_f_one_b", "interleaved", "zero_bubble")
PROGRAMS = base.ROOT / "tests/integration/rank_programs.py"


def processes_of(job):
    """Those that know of a job folder below this temporary folder."""
    found = []
    for process in pathlib.Path("/proc").iterdir():
        try:
            if process.name.isdigit() and str(job).encode() in (process / "environ").read_bytes():
                found.append((process.name, (process / "cmdline").read_bytes()))
        except OSError:
            pass
    return found


class RankTest(base.DiagnosisTest):
    DEVICE = ["--device", "h100-sxm", "--memory", "8GiB", "--no-progress"]

    def environment(self, **more):
        """With a temporary folder of its own: what is left in it, and who still knows it, is seen."""
        (self.folder / "tmp").mkdir(exist_ok=True)
        return {**os.environ, "TMPDIR": str(self.folder / "tmp"), **more}

    def run_alone(self, world, rank, *program, options=(), timeout=240, **more):
        done = base.oomdiag("run", *self.DEVICE, "--world-size", world, "--rank", rank, *options, "-o",
                            self.folder / "report.json", "--", sys.executable, *program, folder=self.folder,
                            env=self.environment(**more), timeout=timeout)
        self.check_nobody_is_left()
        self.assertEqual([one.name for one in (self.folder / "tmp").iterdir() if one.name.startswith("oomdiag")], [])
        return done

    def check_nobody_is_left(self):
        """A rank that was started looks for its owner three times a second."""
        deadline = time.monotonic() + 5
        while processes_of(self.folder / "tmp") and time.monotonic() < deadline:
            time.sleep(0.1)
        self.assertEqual(processes_of(self.folder / "tmp"), [])

    def run_together(self, world, *program, timeout=400, **more):
        return base.oomdiag("run", *self.DEVICE, "--count", world, "--", sys.executable, "-m", "torch.distributed.run",
                            "--nproc-per-node", world, "--master-port", random.randint(20000, 60000), *program,
                            folder=self.folder, env=self.environment(**more), timeout=timeout)

    def events(self, name, rank):
        return json.loads((self.folder / f"{name}-{rank}.json").read_text())

    def check_equal(self, program, world, ranks=None, **more):
        """The events of each rank alone are those of the same rank among all: kind, size and order."""
        done = self.run_together(world, PROGRAMS, program, EVENTS=str(self.folder / "together"), **more)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        for rank in range(world) if ranks is None else ranks:
            with self.subTest(program=program, world=world, rank=rank):
                done = self.run_alone(world, rank, PROGRAMS, program, EVENTS=str(self.folder / "alone"), **more)
                self.assertEqual(done.returncode, 0, done.stderr[-3000:])
                together, alone = self.events("together", rank), self.events("alone", rank)
                self.assertGreater(len(alone), 500)
                self.assert_same(together, alone, program)

    def assert_same(self, together, alone, program):
        # Stages send each other shapes first. When what they sent is freed depends on when the other has it: now before, now
        # after the next allocation. The sizes are the same, the order is not always.
        if program in PIPELINES:
            together, alone = sorted(together), sorted(alone)
        # What the program leaves at its end goes in no order: threads of autograd and NCCL have some of it, too.
        ends = [max(i for i, event in enumerate(events) if event[0] == "alloc") for events in (together, alone)]
        self.assertEqual(together[:ends[0] + 1], alone[:ends[1] + 1])
        self.assertEqual(sorted(together[ends[0]:]), sorted(alone[ends[1]:]))


class Quick(RankTest):
    def test_the_exit_code_is_the_ranks_whatever_happens_to_the_report(self):
        done = base.oomdiag("run", *self.DEVICE, "--world-size", 2, "--ranks", "0,1", "-o", "/dev/full", "--", sys.executable, "-c",
                            "import sys, torch; torch.zeros(1 << 20, device='cuda'); sys.exit(5)", folder=self.folder,
                            env=self.environment(), timeout=240)
        self.assertEqual(done.returncode, 5, done.stderr)
        self.assertIn("warning: cannot write '/dev/full': No space left on device", done.stderr)

    def test_a_data_parallel_rank_alone_equals_it_among_two(self):
        self.check_equal("ddp", 2, ranks=[1])

    def test_objects_that_only_rank_0_makes_come_from_it(self):
        done = self.run_alone(4, 2, PROGRAMS, "objects")
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertIn("rank 2 needs what only rank 0 makes", done.stderr)

    def test_it_is_said_where_a_rank_that_was_needed_died(self):
        done = self.run_alone(4, 2, "-c", textwrap.dedent("""
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            if dist.get_rank() == 0:
                raise SystemExit("no luck")
            objects = [None]
            dist.broadcast_object_list(objects, src=0)"""))
        self.assertEqual(done.returncode, 1)
        self.assertRegex(done.stderr, "SingleRankError: oomdiag: rank 2 runs alone and cannot know what rank 0 sends.*no luck")

    def test_ranks_that_wait_for_each_other_end(self):
        begin = time.monotonic()
        done = self.run_alone(2, 1, "-c", textwrap.dedent("""
            import torch, torch.distributed as dist
            dist.init_process_group("gloo")
            dist.recv(torch.zeros(1, dtype=torch.int64), 1 - dist.get_rank())"""))
        self.assertEqual(done.returncode, 1)
        self.assertIn("SingleRankError: oomdiag: rank 1 runs alone and cannot know what rank 0 sends", done.stderr)
        self.assertLess(time.monotonic() - begin, 60)

    def test_buffers_of_nccl_follow_the_links_of_the_job(self):
        program = textwrap.dedent("""
            import os, torch, torch.distributed as dist
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")
            dist.all_reduce(torch.ones(4, device="cuda"))
            peak = torch.empty(1 << 20, device="cuda")""")
        for topology, mib, rule in (("8x-nvlink,ib", 236 + 118 + 256, "16 channels over NVLink and over RDMA"),
                                    (",tcp", 196 + 98 + 256, "16 channels over NVLink and over TCP"),
                                    ("4x-shm,tcp", 0, None)):
            with self.subTest(topology=topology):
                done = self.run_alone(64, 5, "-c", program, options=["--topology", topology])
                self.assertEqual(done.returncode, 0, done.stderr[-3000:])
                report = base.load_report((self.folder / "report.json").read_text())
                held = sum(one["bytes"] for one in report["non_pytorch"] if one["owner"] == "libnccl.so.2")
                self.assertEqual(held, mib << 20)
                if rule:
                    self.assertIn(rule, " ".join(report["limitations"]))

    def test_ranks_that_are_killed_leave_nothing(self):
        done = base.oomdiag("run", *self.DEVICE, "--count", 2, "--", sys.executable, "-c", textwrap.dedent("""
            import ctypes, os, signal, torch
            torch.ones(1, device="cuda")
            nccl, handles = ctypes.CDLL("libnccl.so.2"), (ctypes.c_void_p * 2)()
            assert nccl.ncclCommInitAll(handles, 2, None) == 0
            print(*(line.split(maxsplit=5)[5] for line in open("/proc/self/maps") if line.endswith("-mail\\n")), flush=True)
            os.kill(os.getpid(), signal.SIGKILL)"""), folder=self.folder, env=self.environment())
        self.assertEqual(done.returncode, -signal.SIGKILL, done.stderr)
        mailbox = pathlib.Path(done.stdout.splitlines()[0])
        run, = self.folder.rglob("oomdiag-[0-9]*")
        self.assertEqual(mailbox.parent, run / "ranks")
        self.assertFalse(mailbox.parent.exists())
        self.assertEqual([one.name for one in (self.folder / "tmp").iterdir() if one.name.startswith("oomdiag")], [])

    def test_a_size_is_needed_for_a_rank(self):
        for options in (["--rank", "1"], ["--ranks", "0,1"], ["--world-size", "4", "--rank", "4"],
                        ["--world-size", "4", "--ranks", "0,x"], ["--world-size", "4", "--rank", "1", "--ranks", "0"]):
            with self.subTest(options=options):
                done = base.oomdiag("run", "--device", "h100-sxm", *options, "--", sys.executable, "-c", "")
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn("hint:", done.stderr)


class Slow(RankTest):
    def test_a_rank_is_helped_as_a_program_is(self):
        program = self.folder / "train.py"
        program.write_text(textwrap.dedent("""
            import os, torch, torch.distributed as dist
            from torch import nn
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("nccl")
            block = lambda: nn.Sequential(nn.Linear(512, 2048), nn.ReLU(), nn.Linear(2048, 512))
            model = nn.parallel.DistributedDataParallel(nn.Sequential(*[block() for _ in range(6)]).cuda())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for step in range(3):
                optimizer.zero_grad()
                model(torch.randn(131072, 512, device="cuda")).square().mean().backward()
                optimizer.step()"""))
        done = self.run_alone(4, 2, program, options=["--topology", ",tcp"])
        self.assertEqual(done.returncode, 1, done.stderr[-3000:])
        run = next(self.folder.rglob("oomdiag-[0-9]*"))
        outcomes = []
        for what in (["--world-size", "4", "--rank", "2", "--topology", ",tcp", "--device", "h100-sxm", "--memory", "8GiB", "--json",
                      "--", sys.executable, program], ["--json", run / "rank-2"]):
            done = base.oomdiag("fix", *what, env=self.environment(), timeout=300)
            self.assertEqual(done.returncode, 0, done.stderr[-3000:])
            found = json.loads(done.stdout)
            outcomes.append({tuple(one["ids"]): one["measured_peak_bytes"] for one in found["fixes"] if one["fits"]})
        self.assertIn(("checkpoint",), outcomes[0])
        self.assertEqual(outcomes[0], outcomes[1])
        self.check_nobody_is_left()

    def test_collectives_of_both_backends(self):
        for backend in ("nccl", "gloo", "cpu:gloo,cuda:nccl"):
            for eager in ({}, {"EAGER": "1"}):
                with self.subTest(backend=backend, eager=eager):
                    done = self.run_alone(4, 1, PROGRAMS, "collectives", BACKEND=backend, **eager)
                    self.assertEqual(done.returncode, 0, done.stderr[-3000:])

    def test_stores_that_are_made_by_hand(self):
        done = self.run_alone(4, 1, PROGRAMS, "stores")
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])

    def test_ctrl_c_ends_the_ranks_that_were_started_too(self):
        code = textwrap.dedent("""
            import time, torch.distributed as dist
            dist.init_process_group("gloo")
            objects = ["x" if dist.get_rank() == 0 else None]
            dist.broadcast_object_list(objects, src=0)
            print("received", flush=True)
            time.sleep(600)""")
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            with self.subTest(signal=number):
                child = subprocess.Popen(
                    [str(base.build / "bin/oomdiag"), "run", "--folder", str(self.folder), *self.DEVICE, "--world-size", "4",
                     "--rank", "3", "--", sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                    text=True, env=self.environment(), start_new_session=True,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))  # which shells ignore for who runs behind
                self.assertEqual(child.stdout.readline(), "received\n")
                ranks = [line for _, line in processes_of(self.folder / "tmp") if line.startswith(sys.executable.encode())]
                self.assertEqual(len(ranks), 2)
                os.killpg(child.pid, number)
                child.wait(timeout=10)
                child.stdout.close()
                self.check_nobody_is_left()

    def test_pytorchs_tracker_of_fsdp_counts_a_little_less_than_the_allocator(self):
        done = self.run_alone(4, 1, PROGRAMS, "tracked")
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        measured = next(json.loads(line) for line in done.stdout.splitlines() if "tracker" in line)
        print(measured, end=" ")
        self.assertGreaterEqual(measured["allocator"], measured["tracker"])  # it knows neither rounding nor workspaces
        self.assertLess(measured["allocator"], 1.1 * measured["tracker"])
        report = base.load_report((self.folder / "report.json").read_text())
        self.assertEqual(report["peak"]["allocated_bytes"], measured["allocator"])
        self.assertNotIn("fsdp", " ".join(fix["id"] for fix in report["fixes"]))

    def test_ranks_beside_each_other(self):
        report = self.folder / "report.json"
        done = base.oomdiag("run", *self.DEVICE, "--world-size", 64, "--ranks", "0,7,63", "-o", report, "--", sys.executable,
                            PROGRAMS, "fsdp2", folder=self.folder, timeout=400)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        ranks = self.check_report(json.loads(report.read_text()))["ranks"]
        self.assertEqual([rank["rank"] for rank in ranks], [0, 7, 63])

    def test_distinct_ranks_are_those_of_each_stage(self):
        report = self.folder / "report.json"
        done = base.oomdiag("run", *self.DEVICE, "--world-size", 2, "--ranks", "distinct", "-o", report, "--", sys.executable,
                            PROGRAMS, "gpipe", folder=self.folder, timeout=400)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        self.assertEqual([rank["rank"] for rank in json.loads(report.read_text())["ranks"]], [0, 1])


    def test_the_smallest_world_that_fits_is_found_here_and_by_jobs(self):
        plan = ["--device", "h100-sxm", "--memory", "2GiB", "--vary", "world=2,4", "--vary", "batch=8"]
        program = ["--", sys.executable, PROGRAMS, "plan", "{batch}"]
        done = base.oomdiag("fit", *plan, "--json", *program, cwd=self.folder, timeout=600)
        self.assertEqual(done.returncode, 0, done.stderr[-3000:])
        here = json.loads(done.stdout)
        self.assertEqual(here["smallest_world"], {"batch": 8, "world": 4})
        self.assertEqual([one["outcome"] for one in here["plans"]], ["out_of_memory", "ok"])
        jobs = base.oomdiag("fit", *plan, "--print-jobs", *program, cwd=self.folder).stdout
        self.assertEqual(len(jobs.splitlines()), 2)
        environment = {**os.environ, "PATH": f"{base.build / 'bin'}:{os.environ['PATH']}"}
        subprocess.run(["xargs", "-P", "2", "-d", "\n", "-n", "1", "sh", "-c", 'eval "$0"'], input=jobs, text=True,
                       cwd=self.folder, env=environment, capture_output=True, timeout=600)
        collected = json.loads(base.oomdiag("fit", "--collect", "plans", "--json", cwd=self.folder).stdout)
        self.assertEqual(collected["smallest_world"], here["smallest_world"])
        self.assertEqual([one["peak_allocated_bytes"] for one in collected["plans"] if one["outcome"] == "ok"],
                         [one["peak_allocated_bytes"] for one in here["plans"] if one["outcome"] == "ok"])


def add_comparison(program, world, **more):
    name = f"test_{program}_{world}" + "".join(f"_{one.lower()}" for one in more)
    setattr(Slow, name, lambda self: self.check_equal(program, world, **more))


for program, worlds in {"ddp": (2, 4, 8), "ddp_buckets": (2,), "fsdp1": (2, 4, 8), "fsdp2": (2, 4, 8), "fsdp2_kept": (2, 4, 8),
                        "fsdp2_mixed": (2, 4, 8), "hsdp": (4, 8), "tp": (2, 4, 8), "fsdp_tp": (4, 8), "gpipe": (2, 4),
                        "one_f_one_b": (2, 4), "interleaved": (2,), "zero_bubble": (2,), "symmetric": (2, 4), "context_parallel": (2, 4), "experts": (2, 4)}.items():
    for world in worlds:
        add_comparison(program, world)
add_comparison("fsdp_tp", 4, EAGER="1")

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, required=True)
    arguments, rest = parser.parse_known_args()
    base.build = arguments.build.resolve()
    unittest.main(argv=[sys.argv[0], "-v", *rest])
