"""What holds for every torch: run by `oomdiag run` in the Python that has it, as its user would.

    python tests/packaging/test_torch.py --oomdiag COMMAND --python INTERPRETER [unittest arguments]
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))
from report_json import load_report  # noqa: E402
oomdiag, python = "oomdiag", "python3"


class TorchTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_program(self, *program, device="rtx4090", memory=None, options=(), **environment):
        """Ends as the program does; the report, or None."""
        command = [oomdiag, "run", "--device", device, "-o", self.folder / "report.json", "--folder", self.folder, "--no-progress"]
        command += options
        command += ["--memory", memory] if memory else []
        begin = time.monotonic()
        self.done = subprocess.run([*map(str, command), "--", python, *map(str, program)], capture_output=True, text=True,
                                   timeout=900, cwd=self.folder, env=os.environ | environment)
        self.seconds = time.monotonic() - begin
        file = self.folder / "report.json"
        return load_report(file.read_text()) if file.exists() else None

    def train(self, batch, **more):
        return self.run_program(HERE / "train.py", "--batch-size", batch, **more)

    def run_code(self, code, **more):
        (self.folder / "program.py").write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(code))
        report = self.run_program(self.folder / "program.py", **more)
        self.assertEqual(self.done.returncode, 0, self.done.stderr[-3000:])
        return report


class Recording(TorchTest):
    def test_peaks_are_those_of_pytorch_to_the_byte(self):
        report = self.train(64)
        self.assertEqual(self.done.returncode, 0, self.done.stderr)
        said = json.loads(self.done.stdout)
        self.assertEqual(report["torch"].split("+")[0], said["torch"].split("+")[0])
        self.assertEqual((report["peak"]["allocated_bytes"], report["peak"]["reserved_bytes"]), (said["allocated"], said["reserved"]))
        self.assertEqual((report["outcome"], report["replay_error_bytes"]), ("ok", 0))
        self.assertGreater(report["categories"]["activation"], 0)
        self.assertGreater(report["categories"]["optimizer_state"], 0)

    def test_an_oom_has_its_line_and_module(self):
        report = self.train(8000, memory="8GiB")
        self.assertEqual((self.done.returncode, report["outcome"]), (1, "out_of_memory"), self.done.stderr)
        failure = report["failure"]
        self.assertRegex(failure["source"], r"train\.py:\d+")
        self.assertIn(failure["module"], ("conv1", "norm", "conv2", ""))
        self.assertTrue(failure["op"])
        self.assertEqual(sum(report["categories"].values()), failure["allocated_bytes"])
        self.assertIn("GPU memory at the failure", self.done.stderr)

    def test_an_oom_in_backward_has_node_and_forward_line(self):
        code = """
            class Model(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.pool = nn.MaxPool2d(2)
                def forward(self, x):
                    y = torch.relu(x)
                    return self.pool(y).sum()  # here
            x = torch.zeros(64, 16, 512, 512, device="cuda", requires_grad=True)
            loss = Model()(x)
            try: loss.backward()
            except torch.OutOfMemoryError: raise SystemExit(7)
        """
        (self.folder / "program.py").write_text("import torch\nfrom torch import nn\n" + textwrap.dedent(code))
        report = self.run_program(self.folder / "program.py", memory="3600MiB")
        failure = report["failure"] or report["caught"][0]
        self.assertEqual((self.done.returncode, failure["phase"]), (7, "backward"), self.done.stderr)
        self.assertIn("Backward", failure["node"])
        self.assertRegex(failure["source"], r"program\.py:\d+")

    def test_expandable_segments_and_autocast_and_checkpointing(self):
        report = self.run_code("""
            from torch.utils.checkpoint import checkpoint
            block = nn.Sequential(nn.Linear(512, 2048), nn.GELU(), nn.Linear(2048, 512)).cuda()
            optimizer = torch.optim.Adam(block.parameters())
            for _ in range(3):
                with torch.autocast("cuda", torch.bfloat16):
                    loss = checkpoint(block, torch.randn(64, 512, device="cuda"), use_reentrant=False).float().sum()
                loss.backward(); optimizer.step(); optimizer.zero_grad()
            print(torch.cuda.max_memory_allocated())
        """, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        self.assertEqual(report["peak"]["allocated_bytes"], int(self.done.stdout))
        self.assertEqual(report["replay_error_bytes"], 0)


class VirtualDevice(TorchTest):
    def test_libraries_answer(self):
        self.run_code("""
            x = torch.randn(32, 64, 64, device="cuda", requires_grad=True)
            nn.LSTM(64, 32, batch_first=True).cuda()(x)[0].sum().backward()
            torch.fft.fft(x); torch.linalg.solve(x[0], x[0]); torch.linalg.svd(x[0])
            torch.sparse.mm(torch.eye(64, device="cuda").to_sparse_csr(), x[0])
            nn.functional.scaled_dot_product_attention(x[None].half(), x[None].half(), x[None].half())
            nn.functional.gelu(nn.Linear(64, 64).cuda()(x))
            y = torch.sort(x.flatten())[0].cumsum(0)
        """)

    def test_memory_knows_what_the_host_wrote(self):
        self.run_code("""
            x = torch.tensor([3, 1, 0]).cuda()
            assert x.max().item() == 3 and x.nonzero().shape[0] == 2 and (x + 1).tolist() == [4, 2, 1]
        """)

    def test_graphs_are_captured(self):
        self.run_code("""
            x = torch.zeros(1024, device="cuda"); graph = torch.cuda.CUDAGraph()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream): x.add_(1)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph): y = x * 2
            graph.replay(); torch.cuda.synchronize()
        """)

    def test_the_profiler_of_pytorch_works_beside_it(self):
        self.run_code("""
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]) as p:
                torch.randn(64, 64, device="cuda").relu().sum().item()
            assert any(e.key == "aten::relu" for e in p.key_averages())
        """)

    def test_two_processes_talk_by_nccl(self):
        (self.folder / "ddp.py").write_text(textwrap.dedent("""
            import os, torch, torch.distributed as dist
            from torch import nn
            dist.init_process_group("nccl")
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            model = nn.parallel.DistributedDataParallel(nn.Linear(512, 512).cuda())
            for _ in range(2): model(torch.randn(8, 512, device="cuda")).sum().backward()
            dist.destroy_process_group()
        """))
        report = self.run_program("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", self.folder / "ddp.py",
                                  device="rtx4090,rtx4090")
        self.assertEqual(self.done.returncode, 0, self.done.stderr[-3000:])
        self.assertEqual(report["world_size"], 2)


    def test_a_rank_alone_has_a_copy_or_its_shard(self):
        (self.folder / "ranks.py").write_text(textwrap.dedent("""
            import os, torch, torch.distributed as dist
            from torch import nn
            from torch.distributed.fsdp import fully_shard
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
            dist.init_process_group("cpu:gloo,cuda:nccl")
            for wrap in nn.parallel.DistributedDataParallel, fully_shard:
                model = wrap(nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).cuda())
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(2):
                    model(torch.randn(8, 512, device="cuda")).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
                print(sum(getattr(one, "to_local", lambda: one)().nbytes for one in model.parameters()))
            everybody = [None] * dist.get_world_size()
            dist.all_gather_object(everybody, "here", group=dist.new_group(backend="gloo"))
            assert everybody == ["here"] * len(everybody), everybody
            counts = torch.ones(1)
            dist.all_reduce(counts)
            dist.barrier()
            print(torch.cuda.max_memory_allocated())
            dist.destroy_process_group()
        """))
        parameters = 8 * (512 * 512 + 512) * 4
        for world, rank in (4, 1), (1, 0):
            report = self.run_program(self.folder / "ranks.py", options=["--world-size", str(world), "--rank", str(rank)])
            self.assertEqual(self.done.returncode, 0, self.done.stderr[-3000:])
            copy, shard, peak = map(int, self.done.stdout.split())
            self.assertEqual((copy, shard), (parameters, parameters // world))
            self.assertEqual((report["rank"], report["world_size"]), (rank, world))
            self.assertEqual((report["peak"]["allocated_bytes"], report["replay_error_bytes"]), (peak, 0))


class Start(TorchTest):
    def test_the_second_run_builds_nothing(self):
        self.train(8)
        self.train(8)
        self.assertNotIn("building", self.done.stderr)
        self.assertRegex(self.done.stderr, re.escape(f"running your '{python}' with torch"))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--oomdiag", default=oomdiag)
    parser.add_argument("--python", default=python)
    known, rest = parser.parse_known_args()
    oomdiag, python = known.oomdiag, known.python
    unittest.main(argv=["test_torch.py", *rest], verbosity=2)
