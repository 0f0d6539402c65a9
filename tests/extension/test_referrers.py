"""The report names the variable of the program that keeps what grows: a list of an object, an entry of a dictionary, what a
function that raised keeps, the frames of exceptions that are kept, a tensor bound to a name.

    python tests/extension/test_referrers.py --build BUILD_FOLDER [unittest arguments]
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

DEEP = "torch.nn.Sequential(*[torch.nn.ReLU() if i % 2 else torch.nn.Linear(256, 256) for i in range(30)]).cuda()"

BEGINNING = """
import collections
import torch

class Meter:
    def __init__(self):
        self.history = []

def step(model, optimizer):
    output = model(torch.ones(1024, 256, device="cuda"))
    loss = output.square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    return output, loss

model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256)).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
"""
# Programs that keep tensors of each step, by what the report calls their keepers.
KEEPERS = {
    ("dict 'kept' in program.py", "deque 'model.outputs' in program.py"): """
        kept, model.outputs = {}, collections.deque()
        for i in range(8):
            kept[i] = (i, torch.ones(1024, 256, device="cuda"))
            model.outputs.append(step(model, optimizer)[0].detach())""",
    # More than the search comes to: what it has found tells for the rest.
    ("deque 'buffer' in program.py",): """
        buffer = collections.deque()
        for i in range(8):
            for _ in range(3_000): buffer.append((i, torch.ones(64, device="cuda")))
            step(model, optimizer)""",
    ("list 'meter.history' in train (program.py:20)",): """
        def train(meter):
            for _ in range(8):
                meter.history.append(step(model, optimizer)[1])
            raise RuntimeError("the program ends while its function runs")
        train(Meter())""",
    ("variable 'output' in evaluate(), whose frame the traceback in 'errors' keeps",): """
        errors = []
        def evaluate():
            output = step(model, optimizer)[0].detach()
            raise ValueError(output.shape)
        for _ in range(8):
            try:
                evaluate()
            except ValueError as error:
                errors.append(error)""",
    ("attribute 'last…" + ".parent" * 7 + "…" + ".parent" * 7 + ".value' in program.py",): """
        class State:
            def __init__(self, parent, value): self.parent, self.value = parent, value
        last = None
        for i in range(8):
            for _ in range(20_000): last = State(last, None)
            last = State(last, step(model, optimizer)[0].detach())""",
    ("variable 'total' in program.py",): """
        total = 0
        for _ in range(8):
            total = total + step(model, optimizer)[1]""",
}


class ReferrersTest(unittest.TestCase):
    def growth(self, program):
        return self.report(program)["growth"]

    def report(self, program, memory="12GiB"):
        with tempfile.TemporaryDirectory(prefix="oomdiag referrers ") as folder:
            folder = pathlib.Path(folder)
            (folder / "program.py").write_text(BEGINNING + textwrap.dedent(program) + "\n")
            run = folder / "run"
            done = subprocess.run([build / "bin/oomdiag", "run", "--device", "rtx3060", "--memory", memory, "--folder", run, "--", sys.executable,
                            folder / "program.py"], capture_output=True, text=True)
            self.printed = done.stdout
            said = subprocess.run([build / "bin/oomdiag", "explain", run, "--json"], capture_output=True, text=True)
            return json.loads(said.stdout)["devices"][0]

    def test_each_keeper_has_its_name(self):
        for keepers, program in KEEPERS.items():
            with self.subTest(keepers):
                growth = self.growth(program)
                self.assertLessEqual(set(keepers), {one["referrer"] for one in growth}, growth)

    def test_the_tensor_of_the_host_that_was_to_be_copied_has_the_name_of_what_the_function_has(self):
        reason = self.report("""
            def validate(batch):
                return {name: value.cuda() for name, value in batch.items()}
            validate({"history": torch.zeros(600, 1 << 20, dtype=torch.uint8), "label": torch.zeros(600)})""", "500MiB")["reason"]
        self.assertIn("copied to the GPU as a whole at program.py:21, dict 'batch' in validate (program.py:20)", reason["text"])

    def test_a_model_that_one_expression_makes_and_moves_has_the_name_of_its_class(self):
        reason = self.report("torch.nn.Sequential(*[torch.nn.Linear(2048, 2048) for _ in range(99)]).cuda()", "500MiB")["reason"]
        self.assertEqual(reason["id"], "weights_do_not_fit")
        self.assertIn("of 'Sequential' have come to the GPU at program.py:19", reason["text"])

    def test_what_a_function_of_a_package_collects_is_no_reference_cycle(self):
        reason = self.report("""
            weight = torch.ones(2000, 2000, device="cuda")
            torch.autograd.functional.jacobian(lambda x: x @ weight, torch.ones(16, 2000, device="cuda"))""", "300MiB")["reason"]
        self.assertEqual(reason["id"], "whole_jacobian")

    def test_a_result_without_elements_keeps_its_graph(self):
        reason = self.report(f"""
            deep, optimizer = {DEEP}, None
            found, none = {{}}, torch.zeros(0, dtype=torch.int64, device="cuda")
            for i in range(9999):
                found[i] = deep(torch.ones(1024, 256, device="cuda")).index_select(0, none)""", "300MiB")["reason"]
        self.assertEqual((reason["id"], reason["kept_by"]), ("evaluation_keeps_graphs", "dict 'found' in program.py"))

    def test_a_first_pass_of_a_function_that_runs_backward_later_is_no_evaluation(self):
        call = f'optimizer = None\n{DEEP}(torch.ones(1 << 16, 256, device="cuda"))'
        self.assertEqual(self.report(call, "800MiB")["reason"]["fix"], "no_grad_in_evaluation")
        self.assertNotEqual(self.report(call + ".sum().backward()", "800MiB")["reason"]["fix"], "no_grad_in_evaluation")

    def test_objects_of_the_program_are_read_and_not_asked(self):
        report = self.report("""
            class Odd:
                def __index__(self):
                    print("__index__ was called")
                    return 0
            class Own(torch.Tensor):
                @property
                def _local_tensor(self):
                    print("the property was read")
            class Failing(torch.nn.Linear):
                def forward(self, x):
                    return torch.empty(1 << 40, device="cuda")
            kept = {Odd(): torch.ones(1024, 1024, device="cuda").as_subclass(Own), 7: torch.ones(1024, 1024, device="cuda")}
            failing = Failing(8, 8).cuda()
            failing.training = Odd()
            failing(None)""")
        self.assertNotIn("was", self.printed)
        self.assertLessEqual({"dict 'kept' in program.py"}, {one.get("referrer") for one in report["top_allocations"]}, report["top_allocations"])

    def test_data_that_are_mostly_padding_are_read_where_they_lie(self):
        program = """
            body = torch.nn.Sequential(*[torch.nn.Linear(512, 512) for _ in range(40)]).cuda()
            optimizer = torch.optim.SGD(body.parameters(), 0.1)
            ids = torch.zeros(16, 1024, dtype=torch.int64)
            for i, row in enumerate(ids):
                row[:40 + i] = torch.arange(1, 41 + i)
            {keep}
            body(torch.nn.Embedding(1024, 512).cuda()(ids.cuda() if ids.is_cpu else ids))"""
        for keep in "batch = ids", "ids = ids.cuda()":
            with self.subTest(keep):
                reason = self.report(program.format(keep=keep), "1GiB")["reason"]
                self.assertEqual(reason["id"], "padding")
                self.assertIn("[16, 1024] int64, is padding: the longest of its sequences has 55 of 1024 positions", reason["text"])

    def test_training_that_keeps_nothing_names_nothing(self):
        self.assertEqual(self.growth("for _ in range(8): step(model, optimizer)"), [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=build)
    options, rest = parser.parse_known_args()
    build = options.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest])
