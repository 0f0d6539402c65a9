"""Cases of test_device.py for the catalogue: each device file, by itself and as the device answers, and measuring one."""

import json
import os
import pathlib
import subprocess
import tempfile

from device_cases import COUNT_DEVICES, MIB, case, expect, expect_equal, main, read_gpu, run_python
from stand_ins import CUDA_MAJOR

OF_ARCHITECTURES = ("threads_per_multiprocessor", "blocks_per_multiprocessor", "shared_bytes_per_multiprocessor", "shared_bytes_per_block_optin")


def gpu_files():
    return sorted(pathlib.Path(os.environ["OOMDIAG_DEVICE_FOLDER"]).glob("*.json"))


def run_oomdiag(*arguments):
    """The command line of the build that the preloaded libraries are of, under the same device."""
    build = pathlib.Path(os.environ["LD_PRELOAD"].split(":")[0]).resolve().parents[2]
    return subprocess.run([build / "bin" / "oomdiag", *arguments], capture_output=True, text=True)


def catalogue():
    """{id: gpu} of `oomdiag devices --json --all`: with the limits that follow from the architecture."""
    return {gpu["id"]: gpu for gpu in json.loads(run_oomdiag("devices", "--all", "--json").stdout)}


# The files.


def check_figures(gpu):
    """What no GPU can be otherwise; the upper bound of memory is what the name or the box says."""
    total = gpu["total_bytes"]["value"]
    expect(any(0.86 * size < total / (1 << 30) < size for size in MARKETED_GIB), f"{total / (1 << 30):.2f} GiB is near no size that is sold")
    older = gpu.get("older_total_bytes", {"value": total})["value"]
    expect(0 <= older - total < 200 * MIB, f"with older drivers {(older - total) / MIB:.0f} MiB more")
    wddm = gpu.get("wddm_total_bytes", {"value": older + 1})["value"]
    expect(older < wddm < older + 700 * MIB, f"under Windows {(wddm - older) / MIB:.0f} MiB more")
    expect(any(0.98 * size < wddm / (1 << 30) <= size for size in MARKETED_GIB) or "wddm_total_bytes" not in gpu, "wddm_total_bytes is near no size that is sold")
    expect(1 <= gpu["multiprocessors"]["value"] <= 200, "multiprocessors")
    expect(1 << 20 <= gpu["l2_bytes"]["value"] <= 256 << 20, "l2_bytes")
    expect(600_000 <= gpu["clock_khz"]["value"] <= 3_200_000, "clock_khz")
    expect(800_000 <= gpu["memory_clock_khz"]["value"] <= 16_000_000, "memory_clock_khz")
    expect(96 <= gpu["memory_bus_bits"]["value"] <= 8192, "memory_bus_bits")
    expect(gpu["first_kernel_bytes"]["value"] % (2 * MIB) == 0, "first_kernel_bytes")


def check_rates(gpu):
    """Half the bits, the same rate or twice to eight times it; bytes as the memory's clock and bus say."""
    rates = {name: gpu[f"{name}_flops_per_second"]["value"] for name in ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")}
    expect(rates["fp32"] is not None and 1e12 < rates["fp32"] < 2e14, f"fp32 {rates['fp32']}")
    for wide, narrow in (("fp32", "tf32"), ("tf32", "fp16"), ("fp16", "fp8")):
        if rates[wide] and rates[narrow]:
            expect(1 <= rates[narrow] / rates[wide] <= 16, f"{narrow} is {rates[narrow] / rates[wide]} times {wide}")
    if rates["bf16"]:
        expect_equal(rates["bf16"], rates["fp16"], "bf16 and fp16")
    by_clock = 2e3 * gpu["memory_clock_khz"]["value"] * gpu["memory_bus_bits"]["value"] / 8
    expect(0.95 < gpu["memory_bytes_per_second"]["value"] / by_clock < 1.05, "memory_bytes_per_second")


# What the makers' data sheets say, in TFLOP/s of dense 16-bit products.
PUBLISHED_TFLOPS = {"v100-32": 125, "t4": 65, "a100-80": 312, "a30": 165, "a10": 125, "rtx3090": 71, "rtx4090": 165.2, "l4": 121, "l40s": 362,
                    "h100-sxm": 989, "rtx5090": 209.5}


@case(gpu=None)
def rates_are_plausible_and_near_the_data_sheets():
    gpus = {path.stem: json.loads(path.read_text()) for path in gpu_files()}
    for name, gpu in gpus.items():
        try:
            check_rates(gpu)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    for name, tflops in PUBLISHED_TFLOPS.items():
        ratio = gpus[name]["fp16_flops_per_second"]["value"] / 1e12 / tflops
        expect(0.98 < ratio < 1.02, f"{name} has {ratio} of {tflops} TFLOP/s")


MARKETED_GIB = (4, 6, 8, 10, 11, 12, 16, 24, 32, 40, 48, 80, 94, 96, 128, 141, 180, 192, 288)


def check_marks(gpu):
    for key, field in gpu.items():
        if isinstance(field, dict):
            expect(set(field) == {"value", "mark", "source"}, f"{key} has {sorted(field)}")
            expect(field["mark"] in tuple("SCPUM") and field["source"], f"{key} has no mark or source")
            expect(field["value"] is not None or field["source"].startswith("not known"), f"{key} is null and does not say why")
    for key in ("context_bytes", "first_kernel_bytes"):
        estimate = gpu[key]["mark"] == "U" and gpu[key]["source"].startswith("estimate")
        expect(estimate or gpu[key]["mark"] == "M", f"{key} is marked neither as an estimate nor as measured")


@case(gpu=None)
def gpu_files_are_plausible_and_marked():
    for path in gpu_files():
        gpu = json.loads(path.read_text())
        expect_equal((gpu["schema"], gpu["id"]), ("oomdiag-device/1", path.stem), "schema and id")
        try:
            check_figures(gpu)
            check_marks(gpu)
        except AssertionError as error:
            raise AssertionError(f"{path.stem}: {error}") from None


@case(gpu=None)
def names_of_gpus_are_unique():
    names = []
    for gpu in catalogue().values():
        names += [name.replace("-", "") for name in (gpu["id"], *gpu.get("aliases", []))]
    expect_equal(sorted(names), sorted(set(names)), "the names")


@case(gpu=None)
def the_catalogue_has_what_the_wheel_supports_and_names_the_rest():
    gpus = catalogue()
    supported = {name for name, gpu in gpus.items() if gpu["supported"]}
    expect(len(supported) >= 50, f"only {len(supported)} GPUs")
    for name in ("orin-agx-64", *(["v100-32", "gtx1080", "p100"] if CUDA_MAJOR >= 13 else [])):
        expect(name in gpus and name not in supported and gpus[name]["why_not"], f"{name} is not among the unsupported")
    table = run_oomdiag("devices").stdout
    expect(all(f"\n{name} " in table for name in supported), "the table lacks a GPU")


# The device that is made of them.


@case(gpu=None)
def every_gpu_says_what_its_file_says():
    code = """
import ctypes
cu = ctypes.CDLL("libcuda.so.1"); cu.cuInit(0); total = ctypes.c_size_t(); cu.cuDeviceTotalMem_v2(ctypes.byref(total), 0)
def ask(attribute):
    value = ctypes.c_int(); cu.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0); return value.value
name = ctypes.create_string_buffer(256); cu.cuDeviceGetName(name, 256, 0)
print(total.value, f"{ask(75)}.{ask(76)}", ask(16), ask(38), ask(39), ask(106), ask(81), ask(97), name.value.decode(), sep="|")
"""
    known = catalogue()
    for path in gpu_files():
        gpu = read_gpu(path.stem)
        expected = [gpu[key] for key in ("total_bytes", "compute_capability", "multiprocessors", "l2_bytes")]
        expected += [known[path.stem][key] for key in OF_ARCHITECTURES] + [gpu["name"]]
        found = run_python(code, OOMDIAG_DEVICE_FILES=str(path)).stdout.strip()
        expect_equal(found, "|".join(map(str, expected)), path.stem)
        rule = gpu["multiprocessors"] * known[path.stem]["threads_per_multiprocessor"] * 2048
        rule = -(-rule // (2 * MIB)) * 2 * MIB
        if json.loads(path.read_text())["context_bytes"]["mark"] == "M":
            expect(0.99 < gpu["context_bytes"] / rule < 1.01, f"measured context of {path.stem}: {gpu['context_bytes']}, by the rule {rule}")
        else:
            expect_equal(gpu["context_bytes"], rule, f"context of {path.stem}")


@case(gpu=None)
def kernels_are_of_the_newest_architecture_not_above_the_gpu():
    code = "import ctypes; cu = ctypes.CDLL('libcuda.so.1'); cu.cuInit(0); print(cu.oomdiag_device_architecture(0))"
    # Wheels for CUDA 13 have code for 7.5, 8.0, 8.6, 9.0, 10.0 and 12.0.
    expected = {"t4": "75", "a100-80": "80", "a10g": "86", "l4": "86", "rtx4090": "86", "h200": "90", "b200": "100", "rtx5090": "120"}
    for gpu, architecture in expected.items():
        path = pathlib.Path(os.environ["OOMDIAG_DEVICE_FOLDER"]) / f"{gpu}.json"
        expect_equal(run_python(code, OOMDIAG_DEVICE_FILES=str(path)).stdout.strip(), architecture, f"the architecture for {gpu}")


def train_a_net():
    """What the device says of itself after a step of training."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64 * 64, 10)).cuda()
    model(torch.randn(32, 3, 64, 64, device="cuda")).sum().backward()
    torch.randn(1 << 20, device="cuda").sort()
    gpu = torch.cuda.get_device_properties(0)
    return [gpu.total_memory, f"{gpu.major}.{gpu.minor}", gpu.multi_processor_count, gpu.L2_cache_size]


def in_child_with(gpu, function):
    """`function` in a forked child that has this GPU; what it returns, as JSON. One import of torch serves all."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["OOMDIAG_DEVICE_FILES"] = gpu
        try:
            answer = function()
        except BaseException as error:  # noqa: BLE001, the parent says it
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    expect_equal(os.waitpid(child, 0)[1], 0, f"the child's status with {gpu}")
    return json.loads(text)


@case(gpu=None, group="slow")
def every_gpu_trains_a_net():
    import torch  # noqa: F401, so that the children have it

    for name, known in catalogue().items():
        if known["supported"]:
            gpu = read_gpu(name)
            expected = [gpu[key] for key in ("total_bytes", "compute_capability", "multiprocessors", "l2_bytes")]
            expect_equal(in_child_with(known["file"], train_a_net), expected, name)


# Files of a user's own.

CHANGES = {
    '"total_bytes": {"value": 15637086208': ('"total_bytes": {"value": "a lot"', "total_bytes"),
    '"compute_capability": {"value": "7.5"': ('"compute_capability": {"value": "seven"', "compute_capability"),
    '"multiprocessors": {"value": 40': ('"multiprocessors": {"value": 0', "multiprocessors"),
    '"name": "Tesla T4"': ('"name": 4', "name"),
    '"l2_bytes"': ('"l3_bytes"', "l3_bytes"),
    '"context_bytes": {"value": ': ('"context_bytes": {"value": -', "context_bytes"),
    '"schema": "oomdiag-device/1"': ('"schema": "oomdiag-gpu/9"', "schema"),
    '"aliases": []': ('"aliases": "t4"', "aliases"),
}


@case(gpu=None)
def a_bad_gpu_is_one_line_that_names_the_field():
    good = (pathlib.Path(os.environ["OOMDIAG_DEVICE_FOLDER"]) / "t4.json").read_text()
    bad = [("", ""), ("[]", ""), ("{}", "name"), ("no json", ""), (good[:200], "")]
    for old, (new, field) in CHANGES.items():
        expect(old in good, f"the GPU has no {old}")
        bad.append((good.replace(old, new), f'"{field}"'))
    for text, field in bad:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(text)
            file.flush()
            expect_no_device(run_python(COUNT_DEVICES, OOMDIAG_DEVICE_FILES=file.name), field)
            answer = run_oomdiag("train", "--model", "deepcnn", "--device", file.name)
            expect_equal(answer.returncode, 1, f"the exit code after {answer.stderr}")
            expect(field in answer.stderr and answer.stderr.count("\n") == 2, f"not one line and a hint, with {field}: {answer.stderr}")
    expect_no_device(run_python(COUNT_DEVICES, OOMDIAG_DEVICE_FILES="/no/such/device.json"))
    expect_no_device(run_python(COUNT_DEVICES))
    expect_no_device(run_python(COUNT_DEVICES, OOMDIAG_DEVICE_FILES=str(pathlib.Path(os.environ["OOMDIAG_DEVICE_FOLDER"]) / "t4.json"), OOMDIAG_MEMORY="much"))


def expect_no_device(child, word=""):
    expect_equal(child.stdout.strip(), "100 0", "the device count")
    lines = child.stderr.strip().splitlines()
    is_one = len(lines) == 1 and lines[0].startswith("oomdiag: no virtual device") and word in lines[0]
    expect(is_one, f"not one clear line with {word}: {child.stderr}")


@case()
def measuring_a_virtual_gpu_gives_its_file():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "measured.json"
        done = run_oomdiag("devices", "--measure", "-o", str(path))
        expect_equal(done.returncode, 0, f"the exit code after {done.stderr}")
        measured = json.loads(path.read_text())
        own = read_gpu()
        for key, field in own.items():
            # A machine has one driver, and its rates are not known.
            if key not in ("schema", "id", "aliases", "older_total_bytes", "wddm_total_bytes") and not key.endswith("_per_second"):
                expect_equal(measured[key]["value"] if key != "name" else measured[key], field, key)
        expect_equal(measured["total_bytes"]["mark"], "M", "the mark")
        expect(run_oomdiag("run", "--device", str(path), "--", "true").returncode == 0, "the file is not taken back")


if __name__ == "__main__":
    main()
