"""End to end: who holds the bytes of the GPU that PyTorch does not count, on the virtual device.

    python tests/cupti/test_outside.py --build BUILD_FOLDER [unittest arguments]
"""
import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests/virtual_device")]
from report_json import load_report  # noqa: E402
from stand_ins import CUBLAS, LIBRARIES  # noqa: E402

PROGRAMS = ROOT / "tests/cupti/programs.py"
SCHEMA = json.loads((ROOT / "profiler/report/oomdiag-report-1.schema.json").read_text())
MIB = 1 << 20
PAGE = 2 * MIB
EXTENSION, NCCL, WORKSPACE = "liboomdiag_test_extension.so", "libnccl_test.so", "liboomdiag_test_workspace.so"
build = ROOT / "build"
GPU = json.loads((ROOT / "extension/virtual_device/device_files/rtx3060.json").read_text())
CONTEXT, KERNELS = GPU["context_bytes"]["value"], GPU["first_kernel_bytes"]["value"]


def in_pages(size):
    return -(-size // PAGE) * PAGE


class OutsideTest(unittest.TestCase):
    maxDiff = None

    def setUp(self):
        self.folder = pathlib.Path(tempfile.mkdtemp(prefix="oomdiag-test-"))
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)

    def run_program(self, name, memory=None, exit_code=0, **environment):
        """Runs one of programs.py under oomdiag: what it said, the report, and the process."""
        output = self.folder / "report.json"
        gpu = ["--device", "rtx3060"] + (["--memory", memory] if memory else [])
        done = subprocess.run(
            [build / "bin/oomdiag", "run", "--folder", self.folder, *gpu, "-o", output, "--", sys.executable, PROGRAMS, name],
            capture_output=True, text=True, timeout=300,
            env=os.environ | {"OOMDIAG_TEST_LIBRARIES": str(build / "lib/test")} | environment)
        self.assertEqual(done.returncode, exit_code, done.stderr)
        report = load_report(output.read_text())
        self.check_books(report)
        return (json.loads(done.stdout) if done.stdout else {}), report, done

    def check_books(self, report):
        """What holds for every report: the GPU adds up, and so does non-PyTorch memory."""
        import jsonschema
        jsonschema.validate(report, SCHEMA)
        self.assertEqual(sum(report["card"].values()), report["device"]["total_bytes"])
        self.assertEqual(sum(owner["bytes"] for owner in report["non_pytorch"]), report["card"]["non_pytorch_bytes"])
        self.assertEqual(report["non_pytorch"][-1]["owner"], "unexplained")

    def check_all_explained(self, said, report):
        """The tracking table equals what the GPU itself said, and every byte has an owner."""
        self.assertEqual(report["device"]["total_bytes"] - report["card"]["free_bytes"], said["used"])
        self.assertEqual(report["non_pytorch"][-1]["bytes"], 0, report["non_pytorch"])

    @staticmethod
    def held(report, field="non_pytorch"):
        return {(one["owner"], one["kind"]): one["bytes"] for one in report[field]}

    def test_the_books_equal_the_gpu_to_the_byte_and_every_line_has_an_owner(self):
        said, report, _ = self.run_program("everything", OOMDIAG_OTHER_PROCESSES="999999999:trainer:1073741824,999999998:xorg:7340033")
        self.check_all_explained(said, report)
        self.assertEqual(self.held(report), {
            ("context", "device"): CONTEXT,  # as the GPU's device file has them
            ("modules", "device"): KERNELS,
            (EXTENSION, "device"): 100 * MIB,
            (EXTENSION, "pool"): 32 * MIB,
            (NCCL, "handle"): 64 * MIB,
            (CUBLAS, "device"): in_pages(8519680),  # of the backward thread's handle
            (WORKSPACE, "device"): in_pages(3 * MIB + 1),
            ("process 999999999 trainer", "process"): 1073741824,
            ("process 999999998 xorg", "process"): 7340033,
            ("unexplained", None): 0,
        })
        host = self.held(report, "host_memory")
        self.assertEqual(host[EXTENSION, "pinned"], 16 * MIB)
        self.assertEqual(host[EXTENSION, "managed"], 4 * MIB)
        self.assertIn((EXTENSION, 16 * MIB, 1), [(one["owner"], one["bytes"], one["blocks"]) for one in report["pinned_host_memory"]])
        self.assertEqual([step["step"].split(" of ")[0] for step in report["initialization_steps"]], ["cuInit", "context", "modules"])
        self.assertFalse(any("other programs" in limit for limit in report["limitations"]), report["limitations"])

    def test_expandable_segments_are_pytorchs(self):
        said, report, _ = self.run_program("expandable", PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
        self.check_all_explained(said, report)
        self.assertEqual({owner for owner, _ in self.held(report)}, {"context", NCCL, "unexplained"})

    def test_segments_that_a_library_allocated_for_pytorch_are_pytorchs(self):
        said, report, _ = self.run_program("pool_of_its_own")
        self.check_all_explained(said, report)
        self.assertNotIn((EXTENSION, "device"), self.held(report))

    def test_a_library_that_holds_what_is_missing_is_the_cause_by_name(self):
        _, report, done = self.run_program("library_in_the_way", memory="2GiB", exit_code=9)
        self.assertEqual(report["cause"]["kind"], "non_pytorch")
        self.assertEqual([(one["owner"], one["bytes"]) for one in report["cause"]["non_pytorch"]],
                         [(EXTENSION, 1024 * MIB), (NCCL, 200 * MIB)])
        self.assertEqual(self.held(report)["unexplained", None], 0)
        self.assertEqual(report["failed_driver_requests"], [{"owner": NCCL, "kind": "device", "bytes": 3000 * MIB}])
        self.assertIn(f"{EXTENSION} 1.00 GiB, {NCCL} 200.00 MiB", done.stderr)

    def test_a_handle_that_the_gpu_has_no_room_for_is_an_oom_like_others(self):
        said, report, done = self.run_program("no_room_for_a_handle", memory="2GiB", exit_code=9)
        self.assertIn("CUBLAS_STATUS_ALLOC_FAILED", said["error"])
        self.assertEqual((report["outcome"], report["failure"]["node"], report["failure"]["requested_bytes"]), ("out_of_memory", "MmBackward0", 8519680))
        self.assertEqual(report["cause"]["kind"], "workspace")
        self.assertEqual(report["cause"]["evidence"]["library"], CUBLAS)
        self.assertRegex(done.stderr, r"workspace: cuBLAS requested 8.12 MiB from the driver, and 0 B were free; .*1.\d+ GiB.*empty_cache\(\)")

    def test_another_process_that_holds_what_is_missing_is_the_cause_by_pid_and_name(self):
        _, report, done = self.run_program("process_in_the_way", memory="2GiB", exit_code=9,
                                           OOMDIAG_OTHER_PROCESSES="999999999:trainer:1073741824")
        self.assertEqual(report["cause"]["kind"], "non_pytorch")
        self.assertEqual(report["cause"]["non_pytorch"],
                         [{"owner": "process 999999999 trainer", "kind": "process", "bytes": 1 << 30}])
        self.assertIn("process 999999999 trainer 1.00 GiB", done.stderr)

    def test_who_holds_cupti_is_named_and_the_rest_of_the_books_holds(self):
        said, report, done = self.run_program("everything", OOMDIAG_CUPTI_HOLDER="CUPTI for Nsight Systems")
        warnings = [line for line in done.stderr.splitlines() if "CUPTI" in line and "warning" in line]
        self.assertEqual(len(warnings), 1, done.stderr)
        self.assertIn("held by CUPTI for Nsight Systems", warnings[0])
        self.assertTrue(any("Nsight Systems" in limit for limit in report["limitations"]), report["limitations"])
        self.assertNotIn((EXTENSION, "device"), self.held(report))
        self.assertGreaterEqual(self.held(report)["unexplained", None], 190 * MIB)
        del said

    def test_the_users_profiler_shows_the_same_and_our_books_go_on(self):
        said, report, done = self.run_program("profiled")
        self.assertNotIn("CUPTI", done.stderr)
        self.check_all_explained(said, report)
        self.assertEqual(self.held(report)[EXTENSION, "device"], (2 + 2 * 4 + 2 * 8) * MIB)
        alone = json.loads(self.run_without_us("profiled").stdout)
        self.assertEqual(said["shown"], alone["shown"])
        self.assertTrue(any("aten::" in name for name in said["shown"][1]))

    def run_without_us(self, name):
        """On the virtual device, with no recorder."""
        libraries = self.folder / "virtual_device"  # LD_PRELOAD is split at the spaces of a path
        libraries.symlink_to(build / "lib/virtual_device")
        return subprocess.run(
            [sys.executable, PROGRAMS, name], capture_output=True, text=True, timeout=300, check=True,
            env=os.environ | {"LD_PRELOAD": ":".join(str(libraries / one) for one in LIBRARIES),
                              "OOMDIAG_DEVICE_FILES": str(ROOT / "extension/virtual_device/device_files/rtx3060.json"),
                              "OOMDIAG_TEST_LIBRARIES": str(build / "lib/test")})

    def test_other_tools_share_the_slot_or_end_cupti_and_a_forked_child_leaves_the_books_alone(self):
        said, report, _ = self.run_program("tools")
        self.assertEqual((said["first"], said["second"], said["left"]), (0, 39, 0))  # 39: the slot is taken, by the first
        self.assertEqual((said["heard"], said["heard_later"]), (2, 2))               # one call: its beginning and its end
        self.check_all_explained(said, report)
        self.assertEqual(self.held(report)[EXTENSION, "device"], (2 + 4 + 8 + 16) * MIB)

    def test_a_tool_that_enables_all_domains_hears_all_and_one_that_disables_them_takes_nothing_from_us(self):
        said, report, _ = self.run_program("tool_of_all")
        self.assertEqual(said["results"], [0] * 9)
        self.assertEqual(said["heard"], [2, 0, 2, 0, 0, 2, 0, 0])  # a call: its beginning and its end
        self.assertEqual(said["enabled"], [1, 0, 1, 0, 0, 1, 0])
        self.check_all_explained(said, report)
        held = self.held(report)
        self.assertEqual((held[EXTENSION, "device"], held[WORKSPACE, "device"]), (8 * 2 * MIB, 200 * 2 * MIB))

    def test_without_cupti_or_nvml_the_gpu_still_adds_up(self):
        said, report, done = self.run_program("everything", OOMDIAG_CUPTI="0")
        self.assertNotIn("warning", done.stderr)
        self.assertEqual(self.held(report)["context", "device"], CONTEXT + KERNELS)  # modelled: nothing was measured
        del said

    def test_a_long_run_whose_beginning_was_overwritten_still_names_the_libraries(self):
        _, report, _ = self.run_program("long", OOMDIAG_TRACE_MIB="2")
        self.assertTrue(any("overwritten" in limit for limit in report["limitations"]), report["limitations"])
        self.assertEqual(self.held(report)[EXTENSION, "device"], 12 * MIB)
        self.assertEqual(self.held(report)["unexplained", None], 0)


class Doctor(unittest.TestCase):
    def doctor(self, *arguments, code=0, **environment):
        done = subprocess.run([build / "bin/oomdiag", "doctor", *arguments], capture_output=True, text=True, timeout=120,
                              env=os.environ | environment)
        self.assertEqual(done.returncode, code, done.stdout + done.stderr)
        return done.stdout

    def test_every_hook_is_tried_and_the_slot_and_the_neighbours_are_named(self):
        checkup = json.loads(self.doctor("--json", "--device", "rtx3060"))
        self.assertEqual([hook["name"] for hook in checkup["hooks"] if not hook["works"]], [])
        self.assertEqual(checkup["device"]["name"], "NVIDIA GeForce RTX 3060")
        self.assertEqual((checkup["processes"], checkup["cupti_holder"]), ([], None))
        checkup = json.loads(self.doctor("--json", "--device", "rtx3060", OOMDIAG_CUPTI_HOLDER="CUPTI for Nsight Systems",
                                      OOMDIAG_OTHER_PROCESSES="999999999:trainer:1073741824"))
        self.assertIn("Nsight Systems", checkup["cupti_holder"])
        self.assertEqual([hook["name"] for hook in checkup["hooks"] if not hook["works"]], ["driver (CUPTI)"])
        self.assertEqual(checkup["processes"], [{"pid": 999999999, "name": "trainer", "bytes": 1 << 30}])
        self.assertTrue(all(trouble["fix"] for trouble in checkup["troubles"]))

    def test_another_allocator_is_named_with_its_fix(self):
        text = self.doctor("--device", "rtx3060", PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
        self.assertIn("only PyTorch's own one can be recorded", text)


def can_be_measured(name):
    """A model has no driver of another age or system to measure, and no speed."""
    return name not in ("older_total_bytes", "wddm_total_bytes") and not name.endswith("_per_second")


class Calibrate(unittest.TestCase):
    """scripts/calibrate on the virtual device, where it measures the model. Slow: it starts python five times."""

    def test_what_the_gpu_file_says_is_measured_again_and_makes_a_gpu_that_runs(self):
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "device.json"
            environment = os.environ | {"OOMDIAG_PROGRAM": str(build / "bin/oomdiag")}
            done = subprocess.run([sys.executable, ROOT / "scripts/calibrate", "--device", "rtx3060", "-o", file],
                                  capture_output=True, text=True, timeout=600, env=environment)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertIn("numbers of the model", done.stdout)
            gpu = json.loads(file.read_text())
            model = json.loads((ROOT / "extension/virtual_device/device_files/rtx3060.json").read_text())
            expected = {name: entry["value"] for name, entry in model.items() if isinstance(entry, dict) and can_be_measured(name)}
            measured = {name: gpu[name]["value"] for name in expected}
            self.assertEqual(measured, expected)
            self.assertEqual({gpu[name]["mark"] for name in measured}, {"U"})
            self.assertEqual(len(gpu["measurements"]["cudnn"]["batch_norm"]), 20)
            self.assertTrue(all("workspace" in one for one in gpu["measurements"]["cudnn"]["rnn"]))
            trained = subprocess.run([build / "bin/oomdiag", "train", "--model", "deepcnn", "--device", file, "--folder", folder],
                                     capture_output=True, text=True, timeout=120)
            self.assertEqual(trained.returncode, 0, trained.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", type=pathlib.Path, default=build)
    options, rest = parser.parse_known_args()
    build = options.build.resolve()
    unittest.main(argv=[sys.argv[0], *rest], verbosity=2)
