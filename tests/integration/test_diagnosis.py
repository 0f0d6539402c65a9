"""End to end: real programs, the real wheel, the virtual device, the built command line.

    python tests/integration/test_diagnosis.py --build BUILD_FOLDER [unittest arguments, as in -k fork]
"""
import argparse
import gzip
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import unittest

import torch_in_use

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from report_json import load_report, with_main_device  # noqa: E402
PROGRAMS = ROOT / "tests/integration/programs.py"
SCHEMA = json.loads((ROOT / "profiler/report/oomdiag-report-1.schema.json").read_text())
build = ROOT / "build"


def oomdiag(*arguments, folder=None, timeout=120, **options):
    """Runs the command line; gives its completed process, as text."""
    base = ["--folder", str(folder)] if folder is not None else []
    command = [str(build / "bin/oomdiag"), arguments[0], *base, *map(str, arguments[1:])]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout, **options)


def missing(module):
    return importlib.util.find_spec(module) is None


class DiagnosisTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag test "))  # with a space: checkouts have them
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def check_report(self, report):
        """What holds for every report."""
        import jsonschema
        jsonschema.validate(report, SCHEMA)
        for device in report["devices"]:
            self.assertEqual(sum(device["card"].values()), device["device"]["total_bytes"])
            if device["failure"]:
                self.assertEqual(sum(device["categories"].values()), device["failure"]["allocated_bytes"])
        return with_main_device(report)

    def run_program(self, *program, device="rtx3060", **options):
        """`oomdiag run` of a Python program; the finished process and the report, None where there is none."""
        output = self.folder / "report.json"
        output.unlink(missing_ok=True)
        more = [f"--memory={options.pop('memory')}"] if "memory" in options else []
        done = oomdiag("run", "--device", device, *more, "-o", output, "--", sys.executable, *program, folder=self.folder,
                       **options)
        report = self.check_report(json.loads(output.read_text())) if output.exists() else None
        return done, report

    def run_code(self, code, **options):
        return self.run_program("-c", textwrap.dedent(code), **options)

    def train(self, *arguments, device="rtx3060"):
        done = oomdiag("train", "--device", device, "--json", *arguments, folder=self.folder)
        self.assertIn(done.returncode, (0, 3), done.stderr)
        return done, self.check_report(json.loads(done.stdout))


class Train(DiagnosisTest):
    """The reference models."""

    def test_deepcnn_of_64_fits(self):
        done, report = self.train("--model", "deepcnn", "--batch", 64)
        self.assertEqual(done.returncode, 0)
        self.assertEqual(report["outcome"], "ok")
        self.assertEqual({p["phase"] for p in report["phases"]} & {"forward", "backward", "optimizer"},
                         {"forward", "backward", "optimizer"})
        self.assertIsNone(report["failure"])
        self.assertGreater(report["headroom_bytes"], 10 << 30)

    def test_a_loop_that_fits_says_where_it_would_run_out_and_with_all_shows_that_report(self):
        done = oomdiag("train", "--device", "rtx3060", "--memory", "1GiB", "--model", "deepcnn", "--all", folder=self.folder)
        self.assertEqual(done.returncode, 0, done.stderr)
        said = re.search(r"with batch (\d+) it runs out of memory in backward, (\w+Backward0 .*)", done.stdout)
        self.assertIsNotNone(said, done.stdout)
        failing = done.stdout[said.end():]
        self.assertIn("oomdiag: out of memory on cuda:0 in backward", failing)
        self.assertIn(f"  where      {said[2]}\n", failing)
        again = f"oomdiag train --model deepcnn --batch {said[1]} --device rtx3060 --memory 1GiB"
        self.assertIn(f"next: {again}\n", failing)
        search = re.search(r"the largest that fits, by runs: (oomdiag fit .*)", failing)[1]
        found = oomdiag(*search.split()[1:], cwd=self.folder)
        self.assertEqual(found.returncode, 0, found.stderr)
        largest = int(re.search(r"fits up to batch = (\d+)", found.stdout)[1])
        first, last = map(int, re.search(r"batch=(\d+)\.\.(\d+)", search).groups())
        self.assertTrue(first <= largest < last == int(said[1]), search)
        done = oomdiag(*again.split()[1:], folder=self.folder)
        self.assertEqual(done.returncode, 3)
        self.assertIn(f"  where      {said[2]}\n", done.stdout)

    def test_deepcnn_runs_out_in_backward_and_names_node_op_and_module(self):
        for batch in range(6500, 7100, 100):
            done, report = self.train("--model", "deepcnn", "--batch", batch)
            if done.returncode == 3 and report["failure"]["phase"] == "backward":
                break
        else:
            self.fail("no batch of deepcnn fails in backward on an rtx3060")
        failure = report["failure"]
        self.assertEqual(report["outcome"], "out_of_memory")
        self.assertRegex(failure["node"], r"Backward\d")
        self.assertRegex(failure["op"], "^aten::")
        self.assertRegex(failure["module"], "^(conv|relu|pool)[123]$|^fc$|^loss$")
        self.assertIn(report["cause"]["kind"], ("capacity", "fragmentation"))
        self.assertGreater(report["categories"]["activation"], report["categories"]["parameter"])

    def test_deepcnn_of_16384_runs_out_in_forward_and_names_op_and_module(self):
        done, report = self.train("--model", "deepcnn", "--batch", 16384)
        self.assertEqual(done.returncode, 3)
        self.assertEqual(report["failure"]["phase"], "forward")
        self.assertRegex(report["failure"]["op"], "^aten::")
        self.assertRegex(report["failure"]["module"], "^(conv|relu|pool)[123]$")
        self.assertIsNone(report["failure"]["node"])

    def test_simplecnn_and_the_options_of_train(self):
        for options in (["--optimizer", "sgd"], ["--optimizer", "adamw", "--steps", 3], ["--amp", "bf16"], ["--amp", "fp16"]):
            with self.subTest(options=options):
                done, report = self.train("--model", "simplecnn", "--batch", 32, *options)
                self.assertEqual((done.returncode, report["outcome"]), (0, "ok"))

    def test_autocast_saves_less_than_float32(self):
        saved = {amp: self.train("--model", "deepcnn", "--batch", 256, "--amp", amp)[1]["categories"]["activation"]
                 for amp in ("none", "bf16")}
        self.assertLess(saved["bf16"], saved["none"])

    def test_every_backward_byte_of_deepcnn_has_node_and_forward_op(self):
        _, report = self.train("--model", "deepcnn", "--steps", 3)
        self.check_attribution(report)

    def check_attribution(self, report, least_in_modules=0.95):
        attribution = report["attribution"]
        self.assertGreater(attribution["backward_bytes"], 0)
        self.assertEqual(attribution["with_node_bytes"], attribution["backward_bytes"])
        self.assertEqual(attribution["with_forward_op_bytes"] + attribution["accumulate_bytes"],
                         attribution["backward_bytes"])
        if report["attribution"]["with_source_bytes"]:  # a Python program: C++ has no lines
            self.assertEqual(attribution["with_source_bytes"], attribution["with_forward_op_bytes"])
        # What has none is outside of any module, as a loss function is.
        self.assertGreaterEqual(attribution["with_module_bytes"],
                                least_in_modules * attribution["with_forward_op_bytes"])

    def test_the_cpp_samples_first_allocation_is_seen(self):
        _, report = self.train("--model", "deepcnn")
        self.assertEqual(report["replay_error_bytes"], 0)


class Peaks(DiagnosisTest):
    """What oomdiag says equals what PyTorch itself says, to the byte."""

    PROGRAMS = ["mlp", "batch_norm", "checkpointed", "reentrant", "custom_function", "amp", "compiled"]

    def peaks(self, *arguments, **options):
        done, report = self.run_program(PROGRAMS, *arguments, **options)
        self.assertEqual(done.returncode, 0, done.stderr)
        truth = json.loads(done.stdout)
        self.assertEqual(report["peak"]["allocated_bytes"], truth["max_allocated"])
        self.assertEqual(report["peak"]["reserved_bytes"], truth["max_reserved"])
        return report

    def test_peaks(self):
        for program in self.PROGRAMS:
            with self.subTest(program=program):
                report = self.peaks(program, "--batch", "64")
                Train.check_attribution(self, report)

    def test_two_threads(self):
        _, report = self.run_program(PROGRAMS, "two_threads", "--batch", "64")  # their peak depends on how they interleave
        Train.check_attribution(self, report, least_in_modules=1)

    def test_peaks_with_other_allocator_settings(self):
        for settings in ("expandable_segments:True", "roundup_power2_divisions:4", "max_split_size_mb:32"):
            with self.subTest(settings=settings):
                self.peaks("batch_norm", "--batch", "64", env={**os.environ, "PYTORCH_CUDA_ALLOC_CONF": settings})

    @unittest.skipIf(missing("torchvision"), "torchvision is not installed")
    def test_resnet50(self):
        report = self.peaks("resnet50", "--batch", "8")
        Train.check_attribution(self, report, least_in_modules=0.999)
        modules = {t["module"] for t in report["saved_tensors"]}
        self.assertIn("layer3.5.bn2", modules)

    @unittest.skipIf(missing("transformers"), "transformers is not installed")
    def test_gpt2(self):
        report = self.peaks("gpt2", "--batch", "2", device="rtx4090")
        Train.check_attribution(self, report, least_in_modules=0.999)
        lines = [line["name"] for line in report["allocated_by"]["line"]]
        self.assertTrue(any(re.fullmatch(r"transformers/models/gpt2/modeling_gpt2.py:\d+", line or "") for line in lines), lines)
        saved = [holder for holder in report["top_allocations"] if holder["category"] == "activation"]
        self.assertLessEqual(len(saved), 8)
        self.assertGreaterEqual(sum(holder["bytes"] for holder in saved), 0.8 * report["categories"]["activation"])
        self.assertTrue(any((holder["name"] or "").startswith("transformer.h.*") and holder["copies"] == 4 for holder in saved), saved)
        self.assertIn("loss", [holder["kind"] for holder in report["top_allocations"]])  # at the peak only its copies of the logits live


class OutOfMemory(DiagnosisTest):
    """Out of memory: every live byte is in exactly one category, and they add up to the allocator's own figure."""

    def run_out_of_memory(self, program, batch, memory, **options):
        done, report = self.run_program(PROGRAMS, program, "--batch", str(batch), memory=memory, **options)
        self.assertEqual(done.returncode, 9, done.stderr)
        truth = json.loads(done.stdout)
        failure = report["failure"] or report["caught"][-1]
        self.assertEqual(failure["allocated_bytes"], truth["allocated_at_oom"])
        return report, failure

    def test_categories_add_up_to_allocated_bytes(self):
        for program, batch in (("mlp", 200000), ("batch_norm", 8192), ("checkpointed", 400000),
                               ("custom_function", 400000), ("amp", 16384)):
            with self.subTest(program=program):
                report, failure = self.run_out_of_memory(program, batch, "4GiB")
                self.assertEqual(sum(report["categories"].values()), failure["allocated_bytes"])
                self.assertRegex(failure["op"] or "", "^aten::|^Square")

    def test_a_python_program_that_dies_in_backward(self):
        done, report = self.run_code("""
            import torch
            from torch import nn
            model = nn.Sequential(*[nn.Sequential(nn.Linear(4096, 4096), nn.GELU()) for _ in range(8)]).cuda()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            x = torch.randn(86500, 4096, device='cuda')
            loss = model(x).sum()
            loss.backward()
            optimizer.step()
        """, device="rtx4090")
        # torch 2.15 itself now and then aborts here: its backward thread asks for the GIL of an interpreter that ends.
        self.assertIn(done.returncode, (1, -signal.SIGABRT))
        self.assertIn("OutOfMemoryError", done.stderr)
        failure = report["failure"]
        self.assertEqual(failure["phase"], "backward")
        self.assertRegex(failure["node"], "^(Gelu|Addmm)Backward0$")
        self.assertRegex(failure["op"], "^aten::(gelu|linear)$")
        self.assertRegex(failure["module"], r"^7\.[01]$")
        self.assertEqual(failure["source"], "<string>:7")

    def test_an_oom_that_the_program_survives_is_listed_and_is_not_its_failure(self):
        done, report = self.run_code("""
            import torch
            def step(n):
                x = torch.randn(n, 1024, device='cuda', requires_grad=True)
                (x * 2).relu().sum().backward()
            try:
                step(4 << 20)
            except torch.OutOfMemoryError:
                pass
            for _ in range(3): step(1 << 10)
        """)
        self.assertEqual((done.returncode, report["outcome"]), (0, "caught"))
        self.assertIsNone(report["failure"])
        self.assertEqual(len(report["caught"]), 1)

    def test_a_server_that_survived_an_oom_long_ago_did_not_end_by_it(self):
        done, report = self.run_code("""
            import sys, torch
            model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(3)]).cuda().eval()
            with torch.no_grad():
                for request in range(20):
                    try:
                        y = model(torch.randn(4000000 if request == 3 else 64, 1024, device='cuda'))
                    except torch.OutOfMemoryError:
                        torch.cuda.empty_cache()
            sys.exit(1)
        """, device="rtx3060")
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertEqual(report["outcome"], "failed")
        self.assertEqual(len(report["caught"]), 1)
        self.assertEqual(report["caught"][0]["step"], 3)  # requests that were answered
        self.assertEqual(report["steps"], 19)

    def test_outputs_that_a_program_without_gradients_keeps_are_a_leak(self):
        done, report = self.run_code("""
            import torch
            model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(3)]).cuda().eval()
            kept = []
            with torch.no_grad():
                while True:
                    kept.append(model(torch.randn(16384, 2048, device='cuda')))
        """, device="rtx3060")
        self.assertEqual(done.returncode, 1)
        self.assertEqual(report["cause"]["kind"], "leak")
        self.assertEqual(report["growth"][0]["module"], "2")

    def test_a_request_larger_than_the_gpu_is_oversized(self):
        _, report = self.run_code("import torch; torch.empty(20 << 30, dtype=torch.uint8, device='cuda')")
        self.assertEqual(report["cause"]["kind"], "oversized_request")

    def test_under_windows_what_does_not_fit_goes_into_host_memory_and_the_report_says_so(self):
        program = """
            import torch
            kept = [torch.empty(100 << 20, dtype=torch.uint8, device="cuda") for _ in range(36)]
        """
        done, report = self.run_code(program, device="gtx1650@wddm")
        self.assertEqual((done.returncode, report["outcome"]), (0, "ok"))
        by_hand = report["peak"]["reserved_bytes"] + sum(one["bytes"] for one in report["non_pytorch"] if one["kind"]) - (4096 << 20)
        self.assertEqual(report["peak"]["host_memory_bytes"], by_hand)
        self.assertIn(f"does not fit the GPU: Windows' driver keeps {by_hand / 2**20:.2f} MiB in host memory", done.stderr)
        done, report = self.run_code(program, device="gtx1650@wddm+0")
        self.assertEqual((done.returncode, report["outcome"], report["cause"]["kind"]), (1, "out_of_memory", "capacity"))
        self.assertIn(512 << 20, [one["bytes"] for one in report["non_pytorch"] if one["owner"] == "Windows"])

    def test_free_blocks_between_live_blocks_are_fragmentation(self):
        _, report = self.run_code("""
            import torch
            pieces = [torch.empty(100 << 20, dtype=torch.uint8, device='cuda') for _ in range(100)]
            keep = []
            for i in range(0, 100):
                pieces[i] = None
                keep.append(torch.empty(60 << 20, dtype=torch.uint8, device='cuda'))
            torch.empty(3 << 30, dtype=torch.uint8, device='cuda')
        """)
        self.assertEqual(report["cause"]["kind"], "fragmentation")

    @unittest.skipUnless(torch_in_use.TELLS_WORKSPACES, "cuDNN before 9.8 asks for no workspace on a virtual GPU")
    def test_a_workspace_that_cudnn_did_not_get_is_recovered(self):
        for memory in range(2048, 2400, 26):  # deepcnn of 1024 needs about 2.2 GiB
            done = oomdiag("train", "--model", "deepcnn", "--batch", 1024, "--device", "rtx3060", "--memory", f"{memory}MiB",
                           "--json", folder=self.folder)
            report = self.check_report(json.loads(done.stdout))
            if report["recovered_by_library"]:
                break
        else:
            self.fail("no GPU near the limit makes cuDNN take another plan")
        self.assertGreater(report["recovered_by_library"][0]["requested_bytes"], 1 << 20)
        self.assertTrue(all("conv" in a["op"] for a in report["recovered_by_library"]))


class Steady(DiagnosisTest):
    """Steps that repeat are recorded without watching their ops; the report is the one that watching them gives."""

    PROGRAM = """
        import sys, torch
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 32, 3, padding=1)
                self.fc = nn.Linear(32 * 32 * 32, 10)

            def forward(self, x):
                x = nn.functional.max_pool2d(torch.relu(self.conv(x)), 2)
                return self.fc(x.flatten(1))

        net = Net().cuda()
        optimizer = torch.optim.Adam(net.parameters())
        for batch in [32] * 30 + [int(word) for word in sys.argv[1:]]:
            x = torch.empty(batch, 3, 64, 64).cuda()  # the first allocation of a step
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        """

    def both(self, *batches, program=PROGRAM):
        reports = []
        for every_step in "01":
            environment = os.environ | {"OOMDIAG_EVERY_STEP": every_step}
            done, report = self.run_program("-c", textwrap.dedent(program), *batches, memory="2GiB", env=environment)
            self.assertIsNotNone(report, done.stderr)
            reports.append(report)
        steady, watched = reports
        self.assertGreaterEqual(steady["steady_steps"], 15)
        self.assertEqual(watched["steady_steps"], 0)
        for report in reports:
            for key in ("timeline", "steady_steps", "command"):
                del report[key]
            for device in report["devices"]:
                del device["timeline"]
                if device["failure"]:
                    del device["failure"]["time_ns"]
        return steady, watched

    def test_a_run_that_fits(self):
        steady, watched = self.both("32", "16", "32")
        self.assertEqual(steady["outcome"], "ok")
        self.assertEqual(steady, watched)

    def test_memory_that_new_streams_keep_for_themselves_is_reported(self):
        code = """
            import torch
            {before}
            for epoch in range(6):
                for stream in {streams}:
                    with torch.cuda.stream(stream):
                        batch = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
            """
        made = "[torch.cuda.Stream() for _ in range(3)]"
        done, report = self.run_code(code.format(before="", streams=made))
        self.assertEqual((report["peak"]["streams"], report["peak"]["cached_for_streams_bytes"]), (17, 17 * (64 << 20)), done.stderr)
        self.assertIn("are cached for 17 streams, each for itself alone", done.stderr)
        done, report = self.run_code(code.format(before=f"streams = {made}", streams="streams"))
        self.assertEqual(report["peak"]["streams"], 2)
        self.assertNotIn("each for itself alone", done.stderr)

    def test_an_oom_in_backward_of_a_larger_batch(self):
        steady, watched = self.both("1450")
        self.assertEqual(steady["failure"]["phase"], "backward")
        self.assertEqual(steady, watched)

    def test_an_oom_in_the_very_request_that_ends_steady_training(self):
        steady, watched = self.both("50000")
        self.assertIn(steady["failure"]["op"], ("aten::to", "aten::_to_copy"))
        self.assertRegex(steady["failure"]["source"], r"<string>:18$")
        self.assertEqual(steady["failure"], watched["failure"])
        self.assertEqual(steady["categories"], watched["categories"])

    def test_an_oom_in_backward_in_the_very_request_that_ends_steady_training(self):
        program = self.PROGRAM.replace("class Net(nn.Module):", """class Scratch(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.clone()

            @staticmethod
            def backward(context, gradient):
                return gradient + torch.zeros(size, device="cuda").sum()

        class Net(nn.Module):""")
        program = program.replace("self.fc(x.flatten(1))", "self.fc(Scratch.apply(x).flatten(1))")
        program = program.replace("x = torch.empty(batch, 3", "size = batch * 4096; x = torch.empty(32, 3")
        steady, watched = self.both("200000", program=program)
        self.assertEqual(steady["failure"]["node"], "ScratchBackward")
        self.assertEqual(steady["failure"], watched["failure"])
        self.assertEqual(steady["categories"], watched["categories"])
        self.assertEqual(steady["devices"], watched["devices"])


class Places(DiagnosisTest):
    """Where in the user's program something happened."""

    def test_scopes_of_the_user_and_nvtx_ranges_are_part_of_the_path(self):
        _, report = self.run_code("""
            import torch
            def encode(x):
                with torch.profiler.record_function("encode"):
                    torch.cuda.nvtx.range_push("inner")
                    y = torch.relu(x)
                    torch.cuda.nvtx.range_pop()
                    return y
            x = torch.zeros(1 << 28, device="cuda", requires_grad=True)
            def main():
                return [encode(x) for _ in range(99)]
            main()
            """)
        self.assertEqual(report["failure"]["module"], "encode.inner")
        self.assertRegex(report["failure"]["source"], r"<string>:6$")
        calls = [call.rpartition(" in ")[2] for call in report["failure"]["stack"]]
        comprehension = ["<listcomp>"] if sys.version_info < (3, 12) else []  # since then it has no frame of its own
        self.assertEqual(calls, ["encode", *comprehension, "main", "<module>"])

    def test_scopes_that_a_dispatch_mode_opens_and_closes_inside_of_ops_end(self):
        for inside, after, module in (("", "[torch.relu(x) for _ in range(99)]", None),
                                      ("kept = [torch.relu(x) for _ in range(99)]", "", "outer.inner")):
            _, report = self.run_code(f"""
                import torch
                from torch.utils._python_dispatch import TorchDispatchMode
                class Through(TorchDispatchMode):
                    def __torch_dispatch__(self, op, types, arguments=(), named=None):
                        return op(*arguments, **(named or {{}}))
                x = torch.zeros(1 << 28, device="cuda")
                with Through():
                    with torch.profiler.record_function("outer"), torch.profiler.record_function("inner"):
                        y = torch.relu(x)
                        {inside}
                kept = {after or None}
                """)
            self.assertEqual((report["failure"]["op"], report["failure"]["module"]), ("aten::relu", module))

    def test_a_module_at_the_address_of_one_that_died_has_its_own_path(self):
        done, report = self.run_code("""
            import torch
            from torch import nn
            class Block(nn.Module):
                def forward(self, x):
                    return torch.relu(x)
            class Root(nn.Module):
                def forward(self, name, x):
                    return getattr(self, name)(x)
            def block_at(addresses):
                others = []
                while id(block := Block()) not in addresses:
                    others.append(block)
                return block
            root = Root()
            first = [f"first{i}" for i in range(100)]
            for name in first:
                setattr(root, name, Block())
                root(name, torch.zeros(8, device="cuda"))
            addresses = {id(getattr(root, name)) for name in first}
            for name in first:
                delattr(root, name)
            root.second = block_at(addresses)
            x = torch.zeros(1 << 30, device="cuda")
            kept = [root("second", x) for _ in range(8)]
            """)
        self.assertEqual(report["failure"]["module"], "second", done.stderr)

    def test_a_submodule_that_is_called_by_itself_has_its_path_in_the_model_of_a_variable(self):
        net = """
            import torch
            from torch import nn
            class Net(nn.Module):
                def __init__(self):
                    super().__init__()
                    self.encoder = nn.Sequential(nn.Linear(64, 64), nn.ReLU())
                def encode(self, x):
                    return self.encoder(x)
            class Trainer:
                def __init__(self):
                    self.net = Net().cuda()
                def step(self, x):
                    return self.net.encoder(x)
            x = torch.ones(1 << 14, 64, device="cuda")
            """
        callers = {"method": "net = Net().cuda()\nkept = [net.encode(x) for _ in range(4000)]",
                   "global": "net = Net().cuda()\nkept = [net.encoder(x) for _ in range(4000)]",
                   "attribute": "trainer = Trainer()\nkept = [trainer.step(x) for _ in range(4000)]",
                   "local": "def main():\n    net = Net().cuda()\n    return [net.encoder(x) for _ in range(4000)]\nmain()",
                   "closure": "def main():\n    net = Net().cuda()\n    def run():\n        return net.encoder(x)\n"
                              "    return [run() for _ in range(4000)]\nmain()"}
        for caller, code in callers.items():
            with self.subTest(caller):
                done, report = self.run_code(textwrap.dedent(net) + code, memory="1GiB")
                self.assertIn(report["failure"]["module"], ("encoder.0", "encoder.1"), done.stderr)

    def test_a_list_of_modules_is_no_model(self):
        done, report = self.run_code("""
            import torch
            layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(2)).cuda()
            x = torch.ones(1 << 14, 64, device="cuda")
            kept = [layer(x) for _ in range(4000) for layer in layers]
            """, memory="1GiB")
        self.assertEqual(report["failure"]["module"], "Linear", done.stderr)

    def test_an_op_at_the_address_of_one_that_was_taken_away_has_its_own_name(self):
        _, report = self.run_code("""
            import torch
            kept = []
            for i in range(64):
                library = torch.library.Library("passing", "DEF")
                name = f"an_operator_with_the_number_{i:02}"
                library.define(name + "(Tensor x) -> Tensor")
                library.impl(name, torch.clone, "CUDA")
                kept.append(getattr(torch.ops.passing, name)(torch.empty(1 << 18, device="cuda")))
                library._destroy()
            """)
        blocks = {op["name"]: op["blocks"] for op in report["allocated_by"]["op"] if op["name"].startswith("passing")}
        self.assertEqual(blocks, {f"passing::an_operator_with_the_number_{i:02}": 1 for i in range(64)})

    def test_a_backward_failure_has_the_stack_of_its_forward_line(self):
        _, report = self.run_code("""
            import torch
            def square(x):
                return x * x
            x = torch.zeros(1 << 28, device="cuda", requires_grad=True)
            y = square(x)
            rest = torch.empty(1 << 28, device="cuda")
            y.backward(y)
            """, memory="4GiB")
        self.assertEqual(report["failure"]["phase"], "backward")
        calls = [call.rpartition(" in ")[2] for call in report["failure"]["stack"]]
        self.assertEqual(calls, ["square", "<module>"])


    GROUPS = """
            import torch
            from torch import nn
            small, large = nn.Linear(512, 512, bias=False).cuda(), nn.Linear(4096, 4096, bias=False).cuda()
            groups = [{"params": small.parameters(), "name": "decay"}, {"params": large.parameters(), "weight_decay": 0.0}]
            optimizer = torch.optim.AdamW(groups)
            for _ in range(3):
                optimizer.zero_grad()
                (small(torch.randn(8, 512, device="cuda")).sum() + large(torch.randn(8, 4096, device="cuda")).sum()).backward()
                optimizer.step()
            """

    def test_frames_of_the_standard_library_are_nobodys_line(self):
        done, report = self.run_code("""
            import copy
            import torch
            weights = [torch.zeros(32 << 20, device="cuda")]
            copies = copy.deepcopy(weights)
        """)
        self.assertEqual(done.returncode, 0)
        self.assertRegex(report["peak"]["source"], r"^<string>:5$")
        self.assertIsNone(report["peak"]["inner_source"])

    def test_a_program_in_a_folder_that_is_called_as_that_of_a_standard_library_has_lines(self):
        program = self.folder / f"lib/python3.{sys.version_info.minor}/train.py"
        program.parent.mkdir(parents=True)
        program.write_text('import torch\nweights = torch.zeros(32 << 20, device="cuda")\n')
        _, report = self.run_program(program)
        self.assertRegex(report["peak"]["source"], r"train.py:2$")

    def test_what_the_parameter_groups_of_an_optimizer_take(self):
        done, report = self.run_code(self.GROUPS)
        rows = {row["name"]: row for row in report["parameter_groups"]}
        self.assertEqual(list(rows), ["AdamW, group 1", "AdamW, group 0 (decay)"])
        for name, side in (("AdamW, group 0 (decay)", 512), ("AdamW, group 1", 4096)):
            self.assertEqual(list(rows[name].values())[1:], [side * side * 4, side * side * 4, side * side * 8])

    def test_the_parameter_group_that_a_step_ran_out_at(self):
        done, report = self.run_code(self.GROUPS, memory="460MiB")
        self.assertEqual(report["failure"]["phase"], "optimizer", done.stderr)
        self.assertEqual(report["failure"]["parameter_group"], "AdamW, group 1")
        for kind in ("parameter", "gradient", "optimizer_state"):
            self.assertEqual(sum(row[kind + "_bytes"] for row in report["parameter_groups"]), report["categories"][kind])
        self.assertRegex(done.stderr, "requested .* for AdamW, group 1")
        named = {owner["shape"]: owner["parameter_group"] for owner in report["allocations"] if owner["category"] == "parameter"}
        self.assertEqual(named, {"[4096, 4096] float32": "AdamW, group 1", "[512, 512] float32": "AdamW, group 0 (decay)"})

    def test_the_parameter_groups_of_an_optimizer_that_had_no_step_yet(self):
        program = self.GROUPS.replace("optimizer.zero_grad()", "rest = torch.empty(300 << 20, dtype=torch.uint8, device='cuda')")
        _, report = self.run_code(program, memory="600MiB")
        self.assertEqual(report["failure"]["phase"], "backward")
        self.assertEqual([(row["name"], row["parameter_bytes"]) for row in report["parameter_groups"]],
                         [("AdamW, group 1", 64 << 20), ("AdamW, group 0 (decay)", 1 << 20)])

    def test_parameter_groups_are_known_where_the_first_steps_were_overwritten(self):
        done, report = self.run_code(self.GROUPS.replace("range(3)", "range(4000)"),
                                     env=dict(os.environ, OOMDIAG_TRACE_MIB="4"))
        self.assertTrue(any("were overwritten" in limit for limit in report["limitations"]), report["limitations"])
        rows = {row["name"]: row for row in report["parameter_groups"]}
        for name, side in (("AdamW, group 0 (decay)", 512), ("AdamW, group 1", 4096)):
            self.assertEqual(list(rows[name].values())[1::2], [side * side * 4, side * side * 8], done.stderr)

    def test_a_single_parameter_group_is_not_worth_a_word(self):
        done, report = self.run_code(self.GROUPS.replace("AdamW(groups)", "AdamW(groups[:1])"))
        self.assertEqual(report["parameter_groups"], [], done.stderr)


    AUTOCAST = """
            import sys, torch
            from torch import nn
            model = nn.Sequential(nn.Linear(1024, 2048), nn.ReLU(), nn.Linear(2048, 512)).cuda()
            for batch in map(int, sys.argv[1:]):
                x = torch.randn(batch, 1024, device="cuda")
                with torch.autocast("cuda", dtype=torch.bfloat16):
                    y = model(x)
                    kept = torch.zeros(batch, 1 << 20, dtype=torch.uint8, device="cuda")
                y.sum().backward()
                model.zero_grad()
            """
    CASTS = 2 * (1024 * 2048 + 2048 + 2048 * 512 + 512)  # bytes of the weights and biases in bfloat16

    def test_an_autocast_region_is_part_of_the_place_and_its_cached_casts_are_named(self):
        done, report = self.run_program("-c", textwrap.dedent(self.AUTOCAST), "64", "20000")
        self.assertEqual((report["failure"]["op"], report["failure"]["autocast"]), ("aten::zeros", "bfloat16"), done.stderr)
        autocast = report["autocast"]
        self.assertEqual((autocast["dtype"], autocast["region_open"]), ("bfloat16", True))
        self.assertEqual(autocast["cache_bytes"], self.CASTS)  # all of them are multiples of 512
        self.assertGreater(autocast["made_bytes"], autocast["cache_bytes"])
        self.assertEqual({owner["autocast"] for owner in report["allocations"] if owner["category"] == "output"}, {"bfloat16"})
        self.assertEqual({owner["autocast"] for owner in report["allocations"] if owner["category"] == "parameter"}, {None})
        self.assertIn("are casts of weights, kept until its region ends", done.stderr)

    def test_an_input_that_is_cast_is_no_cached_weight(self):
        program = textwrap.dedent(self.AUTOCAST).replace("nn.Linear(1024, 2048)", "nn.Linear(1024, 2048, bias=False)")
        _, report = self.run_program("-c", program, "2048", memory="2GiB")  # the input is as large as the first weight
        self.assertEqual(report["autocast"]["cache_bytes"], self.CASTS - 2 * 2048)

    def test_without_autocast_nothing_is_said_of_it(self):
        _, report = self.run_code("import torch; torch.ones(1 << 20, device='cuda')")
        self.assertIsNone(report["autocast"])


class DoNoHarm(DiagnosisTest):
    """The program ends as it would have without us."""

    def test_exit_code_and_output_are_the_programs(self):
        for code, expected in (("print('a'); raise SystemExit(7)", 7), ("import os; print('a', flush=True); os._exit(5)", 5),
                               ("import os, signal; print('a', flush=True); os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM)):
            with self.subTest(code=code):
                done, _ = self.run_code("import torch; x = torch.ones(1, device='cuda')\n" + code)
                self.assertEqual((done.returncode, done.stdout), (expected, "a\n"))

    def test_after_sigkill_explain_still_shows_the_last_state(self):
        done, report = self.run_code("""
            import torch, os, signal
            keep = [torch.empty(1 << 20, device='cuda') for _ in range(10)]
            os.kill(os.getpid(), signal.SIGKILL)
        """)
        self.assertEqual(done.returncode, -signal.SIGKILL)
        self.assertEqual(report["outcome"], "killed")
        trace = next(self.folder.rglob("oomdiag-[0-9]*/trace"))
        explained = load_report(oomdiag("explain", trace, "--json").stdout)
        self.assertEqual(explained["outcome"], "killed")
        self.assertEqual(explained["card"]["allocated_bytes"], 40 << 20)

    def test_a_program_that_ends_at_once_after_the_ooms_that_it_caught_has_caught_them(self):
        for end in ("os._exit(0)", "os.execvp('true', ['true'])"):
            done, report = self.run_code(f"""
                import os, torch
                for _ in range(3):
                    try: torch.empty(1 << 40, device="cuda")
                    except torch.OutOfMemoryError: pass
                {end}""")
            self.assertEqual((done.returncode, report["outcome"], report["caught_count"]), (0, "caught", 3), end)

    def test_a_file_name_that_is_no_utf8_is_escaped(self):
        program = os.fsencode(self.folder) + b"/pr\xfcg.py"
        with open(program, "w") as file: file.write("import torch\ntorch.empty(1 << 40, device='cuda')\n")
        _, report = self.run_program(os.fsdecode(program))
        self.assertEqual(os.path.basename(report["failure"]["source"]), r"pr\udcfcg.py:2")

    def test_a_retry_over_a_large_graph_costs_no_second_walk_and_the_report_nothing(self):
        code = """
            import time, torch
            h, w = (torch.ones(1 << 20, device="cuda", requires_grad=True) for _ in range(2))
            x = torch.ones(8, device="cuda", requires_grad=True)
            for i in range(6000): x = x * 2
            kept = (h * w).sin()  # keeps the product
            took = []
            for i in range(ATTEMPTS):
                begin = time.thread_time()
                try: torch.empty(1 << 40, device="cuda")
                except torch.OutOfMemoryError: took.append(time.thread_time() - begin)
            print(len(took), *took)
            torch.empty(1 << 40, device="cuda")"""
        reports = {}
        for attempts in (0, 8):
            done, reports[attempts] = self.run_code(code.replace("ATTEMPTS", str(attempts)))
        took = sorted(map(float, done.stdout.split()[1:]))
        self.assertLess(took[4], took[-1] / 2, done.stdout)
        for about in ("categories", "saved_tensors"):
            self.assertEqual(reports[8][about], reports[0][about])
        self.assertEqual(reports[8]["categories"]["activation"], 4 << 20)

    def test_an_unwritable_folder_costs_the_report_only(self):
        done, _ = self.run_program("-c", "import torch; print(torch.ones(1, device='cuda').numel())",
                                   env={**os.environ, "OOMDIAG_TEST": "1"})
        library = build / "lib/liboomdiag_preload.so"
        self.assertEqual(done.stdout, "1\n")
        environment = self.virtual_environment(OOMDIAG_OUTPUT="/proc/no-such-folder")
        self.assertTrue(library.exists())
        done = subprocess.run([sys.executable, "-c", "import torch; print(torch.ones(1, device='cuda').numel())"],
                              env=environment, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "1\n"))
        self.assertIn("not recording", done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)

    def virtual_environment(self, **more):
        """The environment that `oomdiag run` would set, for programs that are started without it."""
        done = oomdiag("run", "--device", "rtx3060", "--", "env", folder=self.folder)
        names = ("LD_PRELOAD", "OOMDIAG_", "TRITON_LIBCUDA_PATH")
        found = dict(line.split("=", 1) for line in done.stdout.splitlines() if line.startswith(names))
        libraries = build / "lib"
        link = pathlib.Path(tempfile.mkdtemp()) / "l"  # the launcher's own link is gone when it ends
        link.symlink_to(libraries)
        self.addCleanup(shutil.rmtree, link.parent, ignore_errors=True)
        preload = [str(link / "liboomdiag_preload.so")]
        preload += [str(link / "virtual_device" / pathlib.Path(p).name) for p in re.split("[: ]", found["LD_PRELOAD"])
                    if (libraries / "virtual_device" / pathlib.Path(p).name).exists()]
        return {**os.environ, **found, "LD_PRELOAD": ":".join(preload), **more}

    def small_disk(self, size):
        small = self.folder / "small"
        small.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)], capture_output=True).returncode:
            self.skipTest("no right to mount a small file system")
        self.addCleanup(subprocess.run, ["umount", "-l", str(small)], capture_output=True)
        return small

    def test_a_full_disk_switches_the_recorder_off_and_nothing_else(self):
        small = self.small_disk("1500k")
        code = ("import torch\nfor i in range(40000): x = torch.ones(10, device='cuda') * 2\n"
                "print(torch.cuda.max_memory_allocated())")
        environment = self.virtual_environment(OOMDIAG_OUTPUT=str(small))
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "1536\n"), done.stderr)
        self.assertIn("no space left", done.stderr)
        self.assertEqual(len(done.stderr.splitlines()), 1, done.stderr)

    def test_where_the_disk_is_full_the_last_line_says_so(self):
        small = self.small_disk("64k")
        done = oomdiag("run", "--device", "rtx3060", "--", sys.executable, "-c", textwrap.dedent(f"""
            import torch
            with open({str(small / "full")!r}, "wb", 0) as file:
                try:
                    while file.write(bytes(4096)): pass
                except OSError: pass
            torch.ones(1, device="cuda")"""), folder=small)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertRegex(done.stderr.splitlines()[-1], "no report: .*[Nn]o space left")

    def test_training_that_could_not_be_recorded_to_its_end_is_a_failure(self):
        small = self.small_disk("64k")
        done = oomdiag("train", "--model", "deepcnn", "--device", "rtx3060", folder=small)
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertRegex(done.stderr, "recording stopped before the training ended: no space left on the disk.*small")
        self.assertIn("--folder", done.stderr)

    def test_a_file_size_limit_is_no_signal(self):
        code = "import torch; print(torch.ones(1, device='cuda').numel())"
        done = subprocess.run(["bash", "-c", 'ulimit -f 1000; exec "$0" -c "$1"', sys.executable, code],
                              env=self.virtual_environment(OOMDIAG_OUTPUT=str(self.folder)), capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout), (0, "1\n"), done.stderr)

    def test_a_forked_child_leaves_its_parents_trace_alone(self):
        done, report = self.run_code("""
            import os, torch
            x = torch.ones(1 << 20, device='cuda')
            child = os.fork()
            if child == 0:
                for _ in range(2000): torch.ones(10) + 1
                os._exit(3)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            y = torch.ones(1 << 20, device='cuda')
            print(torch.cuda.max_memory_allocated())
        """)
        self.assertEqual((done.returncode, done.stdout), (0, f"3\n{8 << 20}\n"))
        self.assertEqual(report["peak"]["allocated_bytes"], 8 << 20)
        self.assertEqual(report["replay_error_bytes"], 0)

    def test_data_loader_workers(self):
        done, report = self.run_code("""
            import torch
            from torch.utils.data import DataLoader, TensorDataset
            loader = DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=8, num_workers=2)
            model = torch.nn.Linear(8, 8).cuda()
            for x, in loader:
                model(x.cuda()).sum().backward()
            print(torch.cuda.max_memory_allocated())
        """)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertEqual(report["peak"]["allocated_bytes"], int(done.stdout))

    def test_a_thread_that_python_does_not_know_cannot_deadlock(self):
        library = build / "lib/liboomdiag_test_foreign_thread.so"
        done, report = self.run_code(f"""
            import ctypes, torch
            x = torch.ones(1, device='cuda')
            ctypes.PyDLL({str(library)!r}).run_on_foreign_thread()  # holds the GIL and joins the thread
            print('joined')
        """)
        self.assertEqual((done.returncode, done.stdout), (0, "joined\n"), done.stderr)
        self.assertGreater(report["peak"]["allocated_bytes"], 2 * 64 * 64 * 4)

    def test_two_threads_call_backward(self):
        done, report = self.run_code("""
            import threading, torch
            from torch import nn
            model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(4)]).cuda()
            x = torch.randn(512, 256, device='cuda')
            threads = [threading.Thread(target=lambda: model(x).sum().backward()) for _ in range(2)]
            for t in threads: t.start()
            for t in threads: t.join()
        """)
        self.assertEqual(done.returncode, 0, done.stderr)
        Train.check_attribution(self, report)

    def test_a_program_without_cuda_says_so_and_runs(self):
        done, report = self.run_code("import torch; print(torch.ones(2).sum().item())")
        self.assertEqual((done.returncode, done.stdout), (0, "2.0\n"))
        self.assertIsNone(report)
        self.assertRegex(done.stderr, "no CUDA memory was used; nothing to report")

    def test_the_recorder_does_not_change_the_peak(self):
        code = ("import json, runpy, sys; sys.argv = ['programs', 'batch_norm', '--batch', '256']; "
                f"runpy.run_path({str(PROGRAMS)!r}, run_name='__main__')")
        with_us, _ = self.run_program("-c", code)
        environment = self.virtual_environment()
        environment["LD_PRELOAD"] = environment["LD_PRELOAD"].split(":", 1)[1]
        without = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
        self.assertEqual(with_us.stdout, without.stdout)


class Explain(DiagnosisTest):
    def test_a_run_that_ends_before_memory_does_prints_the_command_that_says_who_keeps_what_grows(self):
        script = self.folder / "train it.py"
        script.write_text(textwrap.dedent("""
            import torch
            def main():
                model, kept = torch.nn.Linear(1024, 1024).cuda(), []
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                for _ in range(30):
                    output = model(torch.randn(4096, 1024, device="cuda"))
                    kept.append(output.detach())
                    output.sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()
            main()"""))
        done = oomdiag("run", "--device", "rtx3060", "--", sys.executable, script, folder=self.folder)
        self.assertIn("oomdiag: fits so far, grows 16.00 MiB per step", done.stderr)
        self.assertNotIn("list 'kept'", done.stderr)
        command = re.search(r"next: oomdiag (run .*)   \(runs out, and says who keeps it\)", done.stderr)
        self.assertIsNotNone(command, done.stderr)
        again = subprocess.run([str(build / "bin/oomdiag"), *shlex.split(command[1])], capture_output=True, text=True, timeout=120,
                               cwd=self.folder)
        self.assertEqual(again.returncode, 1, again.stderr)
        self.assertRegex(again.stderr, r"because +list 'kept' in main \(train it.py:3\) keeps tensors of each step")

    def test_explain_reads_what_a_run_left(self):
        _, report = self.train("--model", "simplecnn")
        folder = next(self.folder.rglob("oomdiag-[0-9]*"))
        for what in (folder, folder / "trace", folder / "report.json"):
            with self.subTest(what=what.name):
                again = load_report(oomdiag("explain", what, "--json").stdout)
                self.assertEqual(again["peak"], report["peak"])

    def test_a_program_that_runs_has_not_ended_without_a_word(self):
        code = "import torch, time; x = torch.ones(64 << 20, device='cuda'); open('ready', 'w').close(); time.sleep(60)"
        command = [str(build / "bin/oomdiag"), "run", "--device", "rtx3060", "--", sys.executable, "-c", code]
        with subprocess.Popen(command, cwd=self.folder, stderr=subprocess.DEVNULL) as process:
            try:
                while not (self.folder / "ready").exists():
                    self.assertIsNone(process.poll())
                    time.sleep(0.1)
                (run,) = self.folder.rglob("oomdiag-[0-9]*")
                self.assertRegex(oomdiag("explain", run).stdout, "^oomdiag: still runs, step")
                self.assertTrue(json.loads(oomdiag("explain", run, "--json").stdout)["still_runs"])
                self.assertEqual((run.stat().st_mode & 0o777), 0o700)
            finally:
                process.terminate()
        self.assertRegex(oomdiag("explain", run).stdout, "^oomdiag: killed by signal 15")

    def test_a_trace_that_was_cut_off_is_an_error_and_no_empty_run(self):
        self.train("--model", "simplecnn")
        run = next(self.folder.rglob("oomdiag-[0-9]*"))
        (run / "report.json").unlink()
        for size in (4096, 5000, 20_000):
            os.truncate(run / "trace", size)
            with self.subTest(size=size):
                done = oomdiag("explain", run)
                self.assertEqual((done.returncode, done.stdout), (1, ""))
                self.assertRegex(done.stderr, rf"{re.escape(str(run))}/trace is cut off: \d+ of its \d+ bytes are missing")

    def test_a_program_that_cuts_off_its_trace_keeps_its_exit_code(self):
        done, report = self.run_code("""
            import glob, os, time, torch
            x = torch.ones(1 << 20, device="cuda")
            (trace,) = glob.glob(os.path.join(os.environ["OOMDIAG_FOLDER_OF_TEST"], "oomdiag-*", "trace"))
            os.truncate(trace, 4096)
            time.sleep(1.5)  # the command line looks at it meanwhile
            os._exit(7)
        """, env=dict(os.environ, OOMDIAG_FOLDER_OF_TEST=str(self.folder)))
        self.assertEqual((done.returncode, report), (7, None), done.stderr)
        self.assertIn("is cut off", done.stderr)

    def test_a_thousand_cells_of_a_recurrent_network_have_a_saving_node_each(self):
        done, report = self.run_code("""
            import torch
            cell = torch.nn.RNNCell(64, 64).cuda()
            optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
            def forward(cells):
                hidden, kept = torch.zeros(8, 64, device="cuda"), []
                for _ in range(cells):
                    hidden = cell(torch.zeros(8, 64, device="cuda"), hidden)
                    kept.append(hidden)
                return torch.stack(kept).sum()
            for cells in (1000, 1000, 1100):
                optimizer.zero_grad()
                loss = forward(cells)
                if cells > 1000: loss = loss + torch.empty(1 << 40, dtype=torch.uint8, device="cuda").sum()
                loss.backward()
                optimizer.step()
        """)
        self.assertEqual(report["failure"]["step"], 3, done.stderr)
        run = next(self.folder.rglob("oomdiag-[0-9]*"))
        limited = ["prlimit", f"--as={1 << 30}", str(build / "bin/oomdiag"), "explain", str(run), "--json"]
        again = subprocess.run(limited, capture_output=True, text=True)
        self.assertEqual(again.returncode, 0, again.stderr)
        self.assertEqual(load_report(again.stdout)["categories"], report["categories"])

    def test_text_reports_end_with_the_next_command(self):
        done = oomdiag("train", "--model", "deepcnn", "--device", "rtx3060", "--batch", "6720", folder=self.folder)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.assertRegex(done.stdout.splitlines()[0], r"out of memory on cuda:0 in backward, step \d.*RTX 3060 .*virtual")
        self.assertRegex(done.stdout.strip().splitlines()[-1], "next: oomdiag ")


class LongRuns(DiagnosisTest):
    """Thousands of steps in a trace that holds a few hundred."""

    def test_a_report_on_a_program_that_trains_has_its_true_peak(self):
        code = textwrap.dedent("""
            import os, torch
            from torch import nn
            model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(256, 256), nn.ReLU())]).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            step = 0
            while not os.path.exists("stop"):
                step += 1
                optimizer.zero_grad()
                model(torch.zeros((64, 256, 128)[step % 3], 256, device="cuda")).sum().backward()
                optimizer.step()
                if step == 3000: open("ready", "w").close()
            print(torch.cuda.max_memory_allocated())
        """)
        command = [str(build / "bin/oomdiag"), "run", "--device", "rtx3060", "-o", "end.json", "--", sys.executable, "-c", code]
        environment = dict(os.environ, OOMDIAG_TRACE_MIB="4")
        with subprocess.Popen(command, cwd=self.folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                              text=True) as process:
            try:
                while not (self.folder / "ready").exists():
                    self.assertIsNone(process.poll())
                    time.sleep(0.1)
                (run,) = self.folder.rglob("oomdiag-[0-9]*")
                looks = [self.check_report(json.loads(oomdiag("explain", run, "--json").stdout)) for _ in range(6)]
            finally:
                (self.folder / "stop").touch()
            peak = int(process.communicate(timeout=60)[0])
        for look in looks:
            lost = [limit for limit in look["limitations"] if "overwritten or cut off while they were read" in limit]
            self.assertTrue(any("were overwritten: peaks" in limit for limit in look["limitations"]), look["limitations"])
            self.assertEqual((look["still_runs"], look["peak"]["allocated_bytes"], lost), (True, peak, []))
        steps = [look["steps"] for look in looks]
        self.assertEqual(steps, sorted(steps))

    def test_an_oom_after_thousands_of_steps_is_still_explained(self):
        done, report = self.run_code("""
            import torch
            from torch import nn
            model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 8)).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            data, kept = torch.zeros(64, 512, device="cuda"), []
            for step in range(1, 2001):
                optimizer.zero_grad()
                loss = model(data).square().mean()
                loss.backward()
                optimizer.step()
                if step % 100 == 0: kept.append(torch.zeros(1 << 18, device="cuda"))
            hidden = model[0](data)
            torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
        """, env=dict(os.environ, OOMDIAG_TRACE_MIB="4"))
        self.assertIn("OutOfMemoryError", done.stderr)
        self.assertTrue(any("were overwritten" in limit for limit in report["limitations"]), report["limitations"])
        self.assertEqual(report["failure"]["step"], 2001)
        weights = 512 * 512 * 4 + 512 * 8 * 4 + 3 * 512 * 4  # and a bias of 512, the scale and shift of BatchNorm
        categories = report["categories"]
        self.assertEqual(categories["parameter"], weights + 512)  # the last bias has 8 floats: one block of 512
        self.assertEqual(categories["buffer"], 2 * 2048 + 512)
        self.assertEqual(categories["optimizer_state"], categories["parameter"])
        held = sum(owner["bytes"] for owner in report["allocations"] if owner["bytes"] == 1 << 20 and owner["name"] == "aten::zeros")
        self.assertEqual(held, 20 << 20)

    def test_an_oom_is_explained_with_what_grew_each_step_when_64_mib_were_overwritten_several_times(self):
        done, report = self.run_code("""
            import torch
            from torch import nn
            model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)).cuda()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            data, kept = torch.zeros(64, 64, device="cuda"), []
            for step in range(1, 20_001):
                for _ in range(60): torch.empty(64, device="cuda")  # makes the trace long
                optimizer.zero_grad()
                output = model(data)
                kept.append(output.detach())
                if step == 20_000: output = output.expand(760_000, 64, 64).clone()
                output.sum().backward()
                optimizer.step()
        """, env=dict(os.environ, OOMDIAG_TRACE_MIB="64"), timeout=400)
        self.assertIn("OutOfMemoryError", done.stderr)
        (overwritten,) = [re.search(r"the oldest (\d+) events were overwritten", limit) for limit in report["limitations"]
                          if "were overwritten" in limit]
        self.assertGreater(int(overwritten[1]), 2 << 20)  # 64 MiB hold 1 << 20
        self.assertEqual((report["failure"]["step"], report["failure"]["op"]), (20_000, "aten::clone"))
        self.assertRegex(report["failure"]["source"], "<string>:12$")
        (growth,) = report["growth"]
        self.assertEqual((growth["kind"], growth["bytes_per_step"]), ("kept_tensors", 64 * 64 * 4))
        self.assertRegex(growth["source"], "<string>:10$")
        self.assertEqual(report["categories"]["output"], 20_001 * 64 * 64 * 4)  # those kept, and that of the last ReLU
        self.assertEqual(report["categories"]["unknown"], 0)

    LOOP = """
        import torch
        from torch import nn
        model = nn.Sequential(nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU(), nn.Linear(512, 8)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        data, kept = torch.zeros(64, 512, device="cuda"), {kept}
        for step in range(1, 100_000):
            optimizer.zero_grad()
            loss = model({data}).square().mean()
            loss.backward()
            optimizer.step()
            if {now}: kept.append(torch.zeros(2 << 20, device="cuda"))
    """

    def loop(self, kept="[]", data="data", now="False"):
        _, report = self.run_code(self.LOOP.format(kept=kept, data=data, now=now), memory="2GiB",
                                  env=dict(os.environ, OOMDIAG_TRACE_MIB="2"))
        self.assertTrue(any("were overwritten" in limit for limit in report["limitations"]), report["limitations"])
        return report

    def test_a_leak_too_slow_for_the_steps_that_are_left_is_the_cause(self):
        report = self.loop(now="step % 20 == 0")
        self.assertGreater(report["failure"]["step"], 3000)
        self.assertEqual(report["cause"]["kind"], "leak")
        (growth,) = report["growth"]
        self.assertEqual((growth["kind"], growth["op"], growth["first_step"]), ("kept_tensors", "aten::zeros", 1))
        self.assertRegex(growth["source"], "<string>:12$")
        self.assertAlmostEqual(growth["bytes_per_step"], (8 << 20) / 20, delta=(8 << 20) / 100)
        self.assertGreater(growth["grown_bytes"], 1 << 30)

    def test_large_state_and_a_full_cache_are_no_growth_though_their_first_steps_were_overwritten(self):
        data = "data if step < 2500 else data.expand(2000, 64, 512).flatten(0, 1)"
        state, cache = ("torch.zeros(300 << 20, device='cuda')", "False"), ("[]", "step <= 150")
        for (kept, now), causes in ((state, ["capacity"]), (cache, ["capacity", "fragmentation"])):
            with self.subTest(now=now):
                report = self.loop(kept, data, now)
                self.assertEqual((report["failure"]["step"], report["growth"]), (2500, []))
                self.assertIn(report["cause"]["kind"], causes)


class Snapshots(DiagnosisTest):
    """PyTorch's own recording of a program beside ours, of the same process."""

    PROGRAM = """
        import sys, torch
        from torch import nn
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=1_000_000)
        model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Flatten(),
                              nn.Linear(16 * 32 * 32, 10)).cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for step in range(3):
            data = torch.zeros({batch}, 3, 32, 32, device="cuda")
            loss = model(data).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.cuda.synchronize()
        torch.cuda.memory._dump_snapshot({path!r})
    """

    def record(self, batch):
        """The snapshot of a run, its run folder and its report."""
        snapshot, before = self.folder / f"{batch}.pickle", set(self.folder.rglob("oomdiag-[0-9]*"))
        done, report = self.run_code(textwrap.dedent(self.PROGRAM).format(batch=batch, path=str(snapshot)))
        self.assertEqual(done.returncode, 0, done.stderr)
        (folder,) = set(self.folder.rglob("oomdiag-[0-9]*")) - before
        return snapshot, folder, report

    def check_packed(self, snapshot, expected, run_folder):
        """The same snapshot packed, its GPU given, and files that are none."""
        packed = self.folder / "snapshot.pickle.gz"
        packed.write_bytes(gzip.compress(snapshot.read_bytes()))
        self.assertEqual(json.loads(oomdiag("explain", packed, "--json").stdout), expected)
        named = load_report(oomdiag("explain", snapshot, "--json", "--device", "rtx4090", "--memory", "20GiB").stdout)
        self.assertEqual((named["device"]["name"], named["device"]["total_bytes"]), ("NVIDIA GeForce RTX 4090", 20 << 30))
        for arguments, said in (((snapshot, "--memory", "1MiB"), "at least"), ((run_folder, "--device", "t4"), "for snapshots")):
            rejected = oomdiag("explain", *arguments)
            self.assertEqual(rejected.returncode, 2)
            self.assertIn(said, rejected.stderr)
        for content, said in ((b"PK\x03\x04rest", "a zip archive, as torch.save writes"),
                              (b'{"schemaVersion": 1, "traceEvents": []}', 'a Chrome trace without "[memory]" events'),
                              (b"<!DOCTYPE html>", "an HTML page"), (b"loss 0.25\n", "a text"), (b"  \n", "is empty"),
                              (packed.read_bytes()[:200], "damaged or cut off")):
            other = self.folder / "other"
            other.write_bytes(content)
            rejected = oomdiag("explain", other)
            self.assertEqual(rejected.returncode, 1, content)
            self.assertIn(f"'{other}'", rejected.stderr)
            self.assertIn(said, rejected.stderr)

    def test_a_snapshot_and_our_trace_of_one_process_are_equal_and_of_two_batch_sizes_are_not(self):
        snapshot, folder, report = self.record(8)
        for sides in ((snapshot, folder), (folder / "trace", snapshot), (snapshot, snapshot)):
            with self.subTest(sides=[side.name for side in sides]):
                done = oomdiag("compare", *sides, "--json")
                self.assertEqual((done.returncode, done.stderr), (0, ""), done.stdout)
                found = json.loads(done.stdout)
                self.assertEqual((found["equal"], found["blocks"]["equal_percent"], found["segments"]["equal_percent"]),
                                 (True, 100.0, 100.0))
                self.assertGreater(found["blocks"]["equal"], 200)
                self.assertEqual(found["left"], found["right"])

        explained = oomdiag("explain", snapshot, "--json")
        of_snapshot = self.check_report(json.loads(explained.stdout))
        self.assertEqual(of_snapshot["peak"]["allocated_bytes"], report["peak"]["allocated_bytes"])
        self.assertEqual(of_snapshot["peak"]["reserved_bytes"], report["peak"]["reserved_bytes"])
        self.assertTrue(any("<string>:" in (owner["name"] or "") for owner in of_snapshot["allocations"]), of_snapshot["allocations"])
        self.assertIn("memory snapshot", oomdiag("explain", snapshot).stdout.splitlines()[0])

        self.check_packed(snapshot, json.loads(explained.stdout), folder)

        other, _, _ = self.record(16)
        done = oomdiag("compare", folder, other)
        self.assertEqual(done.returncode, 1, done.stderr)
        self.assertIn("different", done.stdout.splitlines()[0])
        first = done.stdout.split("first differences of blocks")[1].splitlines()[1:3]
        self.assertIn(f"alloc {8 * 3 * 32 * 32 * 4} bytes", first[0])
        self.assertIn(f"alloc {16 * 3 * 32 * 32 * 4} bytes  <string>:9", first[1])

    def test_a_snapshot_whose_ring_was_small_is_the_end_of_our_trace(self):
        snapshot = self.folder / "window.pickle"
        program = self.PROGRAM.replace("max_entries=1_000_000", "max_entries=200")
        done, _ = self.run_code(textwrap.dedent(program).format(batch=8, path=str(snapshot)))
        self.assertEqual(done.returncode, 0, done.stderr)
        (folder,) = self.folder.rglob("oomdiag-[0-9]*")
        compared = oomdiag("compare", snapshot, folder, "--json")
        found = json.loads(compared.stdout)
        self.assertEqual((compared.returncode, found["equal"]), (0, True), compared.stdout)
        self.assertEqual((found["window"]["side"], found["window"]["alive_elsewhere"]), ("left", 0))
        self.assertGreater(found["window"]["blocks_before"], 50)
        self.assertGreater(found["blocks"]["equal"], 60)
        self.assertIn("the left recording covers a part of the run only; compared with ", oomdiag("compare", snapshot, folder).stdout)


class Devices(DiagnosisTest):
    """What a virtual device is set to be."""

    def test_a_package_is_set_to_decide_on_the_host_unless_its_user_says_otherwise(self):
        for users_own in None, "1":
            environment = {name: value for name, value in os.environ.items() if name != "VLLM_USE_V2_MODEL_RUNNER"}
            environment |= {"VLLM_USE_V2_MODEL_RUNNER": users_own} if users_own else {}
            done = oomdiag("run", "--device", "t4", "--", "env", folder=self.folder, env=environment)
            self.assertIn(f"VLLM_USE_V2_MODEL_RUNNER={users_own or 0}\n", done.stdout)

    def test_the_gpu_that_failed_comes_first_of_several(self):
        done, report = self.run_code("""
            import torch
            kept = torch.ones(64 << 20, dtype=torch.uint8, device="cuda:0")
            first, second = torch.nn.Linear(512, 512).to("cuda:0"), torch.nn.Linear(512, 10).to("cuda:1")
            second(first(torch.randn(64, 512, device="cuda:0")).to("cuda:1")).sum().backward()
            torch.empty(20 << 30, dtype=torch.uint8, device="cuda:1")
        """, device="a100-40,t4")
        self.assertEqual((done.returncode, report["outcome"]), (1, "out_of_memory"))
        self.assertEqual([device["device"]["name"] for device in report["devices"]],
                         ["NVIDIA A100-SXM4-40GB", "Tesla T4"])
        self.assertEqual((report["device"]["index"], report["failure"]["op"]), (1, "aten::empty"))
        self.assertIsNone(report["devices"][0]["failure"])
        self.assertGreaterEqual(report["devices"][0]["peak"]["allocated_bytes"], 64 << 20)
        self.assertRegex(done.stderr, "Tesla T4 .virtual.")

    def test_sizes_and_branches_that_came_from_the_gpu_are_named(self):
        done, report = self.run_code("""
            import torch
            x = torch.randn(64, device="cuda")
            for _ in range(3):
                y = x[x > 0]
            if (x > 0).all():
                pass
            print(x.sum().item(), torch.ones(3).cuda().sum().shape, torch.tensor(3.0).cuda().item())
        """)
        self.assertEqual(done.returncode, 0)
        about = [limit for limit in report["limitations"] if "data-dependent" in limit or "read as zeros" in limit]
        self.assertEqual(len(about), 2, about)
        self.assertRegex(about[0], r"^data-dependent sizes, so that .* lower bound: index at <string>:\d+, 3 times$")
        self.assertRegex(about[1], r"were read as zeros: .* at <string>:\d+ and 1 more$")
        self.assertRegex(done.stderr, r"oomdiag: fits, as far as is known \(lower bound\), peak before the first step")

    def test_the_report_says_whether_work_takes_time(self):
        code = """
            import torch
            side = torch.cuda.Stream()
            x = torch.empty(1 << 28, device="cuda")
            with torch.cuda.stream(side):
                for _ in range(1000):  # seconds of modelled time: this machine may be slow
                    x.fill_(1)
            x.record_stream(side)
            del x
            print(torch.cuda.memory_stats()["active_bytes.all.current"] > 0)
            torch.empty(1, device="cuda")
        """
        for options, said, pending in (([], "work takes no time", "False"), (["--clocked"], "work takes modelled time", "True")):
            output = self.folder / "report.json"
            program = textwrap.dedent(code) + "\nprint(torch.cuda.memory_stats()['active_bytes.all.current'] > 1 << 20)\n"
            done = oomdiag("run", "--device", "rtx3060", *options, "-o", output, "--", sys.executable, "-c", program,
                           folder=self.folder)
            report = self.check_report(json.loads(output.read_text()))
            self.assertTrue(any(said in limit for limit in report["limitations"]), report["limitations"])
            self.assertEqual(done.stdout.split()[-1], pending, done.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--build", type=pathlib.Path, default=build)
    known, rest = parser.parse_known_args()
    build = known.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
