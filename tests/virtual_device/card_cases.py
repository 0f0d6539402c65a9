"""Cases of test_device.py for the catalogue: each card file, by itself and as the device answers, and measuring one."""

import json
import os
import pathlib
import subprocess
import tempfile

from device_cases import COUNT_DEVICES, MIB, case, expect, expect_equal, main, read_card, run_python
from stand_ins import CUDA_MAJOR

OF_ARCHITECTURES = ("threads_per_multiprocessor", "blocks_per_multiprocessor", "shared_bytes_per_multiprocessor", "shared_bytes_per_block_optin")


def card_files():
    return sorted(pathlib.Path(os.environ["OOMDIAG_CARDS"]).glob("*.json"))


def run_oomdiag(*arguments):
    """The command line of the build that the preloaded libraries are of, under the same device."""
    build = pathlib.Path(os.environ["LD_PRELOAD"].split(":")[0]).resolve().parents[2]
    return subprocess.run([build / "bin" / "oomdiag", *arguments], capture_output=True, text=True)


def catalogue():
    """{id: card} of `oomdiag devices --json --all`: with the limits that follow from the architecture."""
    return {card["id"]: card for card in json.loads(run_oomdiag("devices", "--all", "--json").stdout)}


# The files.


def check_figures(card):
    """What no card can be otherwise; the upper bound of memory is what the name or the box says."""
    total = card["total_bytes"]["value"]
    expect(any(0.86 * size < total / (1 << 30) < size for size in MARKETED_GIB), f"{total / (1 << 30):.2f} GiB is near no size that is sold")
    older = card.get("older_total_bytes", {"value": total})["value"]
    expect(0 <= older - total < 200 * MIB, f"with older drivers {(older - total) / MIB:.0f} MiB more")
    expect(1 <= card["multiprocessors"]["value"] <= 200, "multiprocessors")
    expect(1 << 20 <= card["l2_bytes"]["value"] <= 256 << 20, "l2_bytes")
    expect(600_000 <= card["clock_khz"]["value"] <= 3_200_000, "clock_khz")
    expect(800_000 <= card["memory_clock_khz"]["value"] <= 16_000_000, "memory_clock_khz")
    expect(96 <= card["memory_bus_bits"]["value"] <= 8192, "memory_bus_bits")
    expect(card["first_kernel_bytes"]["value"] % (2 * MIB) == 0, "first_kernel_bytes")


def check_rates(card):
    """Half the bits, the same rate or twice to eight times it; bytes as the memory's clock and bus say."""
    rates = {name: card[f"{name}_flops_per_second"]["value"] for name in ("fp32", "tf32", "fp16", "bf16", "fp8", "int8")}
    expect(rates["fp32"] is not None and 1e12 < rates["fp32"] < 2e14, f"fp32 {rates['fp32']}")
    for wide, narrow in (("fp32", "tf32"), ("tf32", "fp16"), ("fp16", "fp8")):
        if rates[wide] and rates[narrow]:
            expect(1 <= rates[narrow] / rates[wide] <= 16, f"{narrow} is {rates[narrow] / rates[wide]} times {wide}")
    if rates["bf16"]:
        expect_equal(rates["bf16"], rates["fp16"], "bf16 and fp16")
    by_clock = 2e3 * card["memory_clock_khz"]["value"] * card["memory_bus_bits"]["value"] / 8
    expect(0.95 < card["memory_bytes_per_second"]["value"] / by_clock < 1.05, "memory_bytes_per_second")


# What the makers' data sheets say, in TFLOP/s of dense 16-bit products.
PUBLISHED_TFLOPS = {"v100-32": 125, "t4": 65, "a100-80": 312, "a30": 165, "a10": 125, "rtx3090": 71, "rtx4090": 165.2, "l4": 121, "l40s": 362,
                    "h100-sxm": 989, "rtx5090": 209.5}


@case(card=None)
def rates_are_plausible_and_near_the_data_sheets():
    cards = {path.stem: json.loads(path.read_text()) for path in card_files()}
    for name, card in cards.items():
        try:
            check_rates(card)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
    for name, tflops in PUBLISHED_TFLOPS.items():
        ratio = cards[name]["fp16_flops_per_second"]["value"] / 1e12 / tflops
        expect(0.98 < ratio < 1.02, f"{name} has {ratio} of {tflops} TFLOP/s")


MARKETED_GIB = (4, 6, 8, 11, 12, 16, 24, 32, 40, 48, 80, 94, 96, 128, 141, 180, 192, 288)


def check_marks(card):
    for key, field in card.items():
        if isinstance(field, dict):
            expect(set(field) == {"value", "mark", "source"}, f"{key} has {sorted(field)}")
            expect(field["mark"] in tuple("SCPUM") and field["source"], f"{key} has no mark or source")
            expect(field["value"] is not None or field["source"].startswith("not known"), f"{key} is null and does not say why")
    for key in ("context_bytes", "first_kernel_bytes"):
        estimate = card[key]["mark"] == "U" and card[key]["source"].startswith("estimate")
        expect(estimate or card[key]["mark"] == "M", f"{key} is marked neither as an estimate nor as measured")


@case(card=None)
def card_files_are_plausible_and_marked():
    for path in card_files():
        card = json.loads(path.read_text())
        expect_equal((card["schema"], card["id"]), ("oomdiag-card/1", path.stem), "schema and id")
        try:
            check_figures(card)
            check_marks(card)
        except AssertionError as error:
            raise AssertionError(f"{path.stem}: {error}") from None


@case(card=None)
def names_of_cards_are_unique():
    names = []
    for card in catalogue().values():
        names += [name.replace("-", "") for name in (card["id"], *card.get("aliases", []))]
    expect_equal(sorted(names), sorted(set(names)), "the names")


@case(card=None)
def the_catalogue_has_what_the_wheel_supports_and_names_the_rest():
    cards = catalogue()
    supported = {name for name, card in cards.items() if card["supported"]}
    expect(len(supported) >= 50, f"only {len(supported)} cards")
    for name in ("orin-agx-64", *(["v100-32", "gtx1080", "p100"] if CUDA_MAJOR >= 13 else [])):
        expect(name in cards and name not in supported and cards[name]["why_not"], f"{name} is not among the unsupported")
    table = run_oomdiag("devices").stdout
    expect(all(f"\n{name} " in table for name in supported), "the table lacks a card")


# The device that is made of them.


@case(card=None)
def every_card_says_what_its_file_says():
    code = """
import ctypes
cu = ctypes.CDLL("libcuda.so.1"); cu.cuInit(0); total = ctypes.c_size_t(); cu.cuDeviceTotalMem_v2(ctypes.byref(total), 0)
def ask(attribute):
    value = ctypes.c_int(); cu.cuDeviceGetAttribute(ctypes.byref(value), attribute, 0); return value.value
name = ctypes.create_string_buffer(256); cu.cuDeviceGetName(name, 256, 0)
print(total.value, f"{ask(75)}.{ask(76)}", ask(16), ask(38), ask(39), ask(106), ask(81), ask(97), name.value.decode(), sep="|")
"""
    known = catalogue()
    for path in card_files():
        card = read_card(path.stem)
        wanted = [card[key] for key in ("total_bytes", "compute_capability", "multiprocessors", "l2_bytes")]
        wanted += [known[path.stem][key] for key in OF_ARCHITECTURES] + [card["name"]]
        found = run_python(code, OOMDIAG_CARD=str(path)).stdout.strip()
        expect_equal(found, "|".join(map(str, wanted)), path.stem)
        rule = card["multiprocessors"] * known[path.stem]["threads_per_multiprocessor"] * 2048
        rule = -(-rule // (2 * MIB)) * 2 * MIB
        if json.loads(path.read_text())["context_bytes"]["mark"] == "M":
            expect(0.99 < card["context_bytes"] / rule < 1.01, f"measured context of {path.stem}: {card['context_bytes']}, by the rule {rule}")
        else:
            expect_equal(card["context_bytes"], rule, f"context of {path.stem}")


@case(card=None)
def kernels_are_of_the_newest_architecture_not_above_the_card():
    code = "import ctypes; cu = ctypes.CDLL('libcuda.so.1'); cu.cuInit(0); print(cu.oomdiag_device_architecture(0))"
    # Wheels for CUDA 13 have code for 7.5, 8.0, 8.6, 9.0, 10.0 and 12.0.
    wanted = {"t4": "75", "a100-80": "80", "a10g": "86", "l4": "86", "rtx4090": "86", "h200": "90", "b200": "100", "rtx5090": "120"}
    for card, architecture in wanted.items():
        path = pathlib.Path(os.environ["OOMDIAG_CARDS"]) / f"{card}.json"
        expect_equal(run_python(code, OOMDIAG_CARD=str(path)).stdout.strip(), architecture, f"the architecture for {card}")


def train_a_net():
    """What the device says of itself after a step of training."""
    import torch
    from torch import nn

    model = nn.Sequential(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten(), nn.Linear(32 * 64 * 64, 10)).cuda()
    model(torch.randn(32, 3, 64, 64, device="cuda")).sum().backward()
    torch.randn(1 << 20, device="cuda").sort()
    card = torch.cuda.get_device_properties(0)
    return [card.total_memory, f"{card.major}.{card.minor}", card.multi_processor_count, card.L2_cache_size]


def in_child_with(card, function):
    """`function` in a forked child that has this card; what it returns, as JSON. One import of torch serves all."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.environ["OOMDIAG_CARD"] = card
        try:
            answer = function()
        except BaseException as error:  # noqa: BLE001, the parent says it
            answer = f"{type(error).__name__}: {error}"
        os.write(writer, json.dumps(answer).encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    expect_equal(os.waitpid(child, 0)[1], 0, f"the child's status with {card}")
    return json.loads(text)


@case(card=None, group="slow")
def every_card_trains_a_net():
    import torch  # noqa: F401, so that the children have it

    for name, known in catalogue().items():
        if known["supported"]:
            card = read_card(name)
            wanted = [card[key] for key in ("total_bytes", "compute_capability", "multiprocessors", "l2_bytes")]
            expect_equal(in_child_with(known["file"], train_a_net), wanted, name)


# Files of a user's own.

CHANGES = {
    '"total_bytes": {"value": 15637086208': ('"total_bytes": {"value": "a lot"', "total_bytes"),
    '"compute_capability": {"value": "7.5"': ('"compute_capability": {"value": "seven"', "compute_capability"),
    '"multiprocessors": {"value": 40': ('"multiprocessors": {"value": 0', "multiprocessors"),
    '"name": "Tesla T4"': ('"name": 4', "name"),
    '"l2_bytes"': ('"l3_bytes"', "l3_bytes"),
    '"context_bytes": {"value": ': ('"context_bytes": {"value": -', "context_bytes"),
    '"schema": "oomdiag-card/1"': ('"schema": "oomdiag-card/9"', "schema"),
    '"aliases": []': ('"aliases": "t4"', "aliases"),
}


@case(card=None)
def a_bad_card_is_one_line_that_names_the_field():
    good = (pathlib.Path(os.environ["OOMDIAG_CARDS"]) / "t4.json").read_text()
    bad = [("", ""), ("[]", ""), ("{}", "name"), ("no json", ""), (good[:200], "")]
    for old, (new, field) in CHANGES.items():
        expect(old in good, f"the card has no {old}")
        bad.append((good.replace(old, new), f'"{field}"'))
    for text, field in bad:
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            file.write(text)
            file.flush()
            expect_no_device(run_python(COUNT_DEVICES, OOMDIAG_CARD=file.name), field)
            answer = run_oomdiag("train", "--model", "deepcnn", "--device", file.name)
            expect_equal(answer.returncode, 1, f"the exit code after {answer.stderr}")
            expect(field in answer.stderr and answer.stderr.count("\n") == 2, f"not one line and a hint, with {field}: {answer.stderr}")
    expect_no_device(run_python(COUNT_DEVICES, OOMDIAG_CARD="/no/such/card.json"))
    expect_no_device(run_python(COUNT_DEVICES))
    expect_no_device(run_python(COUNT_DEVICES, OOMDIAG_CARD=str(pathlib.Path(os.environ["OOMDIAG_CARDS"]) / "t4.json"), OOMDIAG_MEMORY="much"))


def expect_no_device(child, word=""):
    expect_equal(child.stdout.strip(), "100 0", "the device count")
    lines = child.stderr.strip().splitlines()
    is_one = len(lines) == 1 and lines[0].startswith("oomdiag: no virtual device") and word in lines[0]
    expect(is_one, f"not one clear line with {word}: {child.stderr}")


@case()
def measuring_a_virtual_card_gives_its_file():
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "measured.json"
        done = run_oomdiag("devices", "--measure", "-o", str(path))
        expect_equal(done.returncode, 0, f"the exit code after {done.stderr}")
        measured = json.loads(path.read_text())
        own = read_card()
        for key, field in own.items():
            # A machine has one driver, and nothing tells its rates.
            if key not in ("schema", "id", "aliases", "older_total_bytes") and not key.endswith("_per_second"):
                expect_equal(measured[key]["value"] if key != "name" else measured[key], field, key)
        expect_equal(measured["total_bytes"]["mark"], "M", "the mark")
        expect(run_oomdiag("run", "--device", str(path), "--", "true").returncode == 0, "the file is not taken back")


if __name__ == "__main__":
    main()
