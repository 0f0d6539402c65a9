"""What is known of contents, and what is not: cases of test_device.py."""

import ctypes

from device_cases import MIB, case, expect, expect_equal, load_optional, main
from stand_ins import RUNTIME

DRIVER = "libcuda.so.1"


def reads_of(look):
    """What `look` gives, and whether the read was noted as one of what no host had written."""
    driver, heard = ctypes.CDLL(DRIVER), []
    observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(lambda kind, name: heard.append(kind))
    driver.oomdiag_device_set_observer(observer)
    del heard[:]
    found = look()
    driver.oomdiag_device_set_observer(None)
    return found, b"read" in heard


@case()
def an_operator_that_runs_out_of_memory_is_not_computed_on_the_host():
    import resource

    import torch

    def peak_kib():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    torch.zeros(1, device="cuda")
    before = peak_kib()
    try:
        torch.eye(200_000, device="cuda")  # 149 GiB
    except torch.OutOfMemoryError:
        pass
    else:
        raise AssertionError("149 GiB fit")
    expect_equal(peak_kib() - before < 1 << 20, True, "less than a gibibyte on the host")


@case()
def an_optimizer_whose_counts_of_steps_were_loaded_onto_the_gpu_goes_on_with_them():
    import io

    import torch

    counts = [torch.tensor(float(i), device="cuda") for i in range(3)]
    torch._foreach_add_(counts, 1)
    torch._foreach_add_(counts, [torch.tensor(2.0, device="cuda")] * 3)
    expect_equal([count.item() for count in counts], [3, 4, 5], "counts")
    unknown = torch.randn(4, device="cuda")
    torch._foreach_add_([counts[0], unknown], 1)
    expect_equal(reads_of(counts[0].item)[1], True, "a read beside what is not known")

    weights = [torch.nn.Parameter(torch.randn(1 << 18, device="cuda")) for _ in range(3)]

    def train(state=None):
        optimizer = torch.optim.Adam(weights, foreach=True)
        if state is not None:
            optimizer.load_state_dict(state)
        for _ in range(2):
            for weight in weights:
                weight.grad = torch.randn_like(weight)
            optimizer.step()
        return optimizer

    file = io.BytesIO()
    torch.save(train().state_dict(), file)
    file.seek(0)
    optimizer = train(torch.load(file, map_location="cuda"))  # divides by 1 - beta ** step
    expect_equal(optimizer.state[weights[0]]["step"].item(), 4, "steps")


@case()
def sizes_follow_from_what_the_host_wrote():
    import torch

    edges = torch.tensor([[0, 1, 2, 3, 4], [0, 2, 2, 4, 4]])
    there, mask = edges.cuda(), edges[0] != edges[1]
    expected = {
        "a mask": (lambda: there[:, there[0] != there[1]].shape, (2, 2)),
        "a mask of the host": (lambda: there[0][mask.cuda()].tolist(), [1, 3]),
        "nonzero": (lambda: (there[0] > 2).nonzero().tolist(), [[3], [4]]),
        "argwhere": (lambda: torch.argwhere(there[0] > 2).shape, (2, 1)),
        "masked_select": (lambda: there[1].masked_select(there[1] == 4).tolist(), [4, 4]),
        "where": (lambda: torch.where(there[0] == 1)[0].tolist(), [1]),
        "unique": (lambda: there[1].unique().tolist(), [0, 2, 4]),
        "unique with counts": (lambda: [x.tolist() for x in there[1].unique(return_inverse=True, return_counts=True)], [[0, 2, 4], [0, 1, 1, 2, 2], [1, 2, 2]]),
        "unique_consecutive": (lambda: there[1].unique_consecutive().tolist(), [0, 2, 4]),
        "unique of rows": (lambda: torch.tensor([[1, 2], [1, 2], [3, 4]]).cuda().unique(dim=0).shape, (2, 2)),
        "bincount": (lambda: torch.bincount(there[1]).tolist(), [1, 0, 2, 0, 2]),
        "repeat_interleave": (lambda: torch.repeat_interleave(there[0], there[0]).tolist(), [1, 2, 2, 3, 3, 3, 4, 4, 4, 4]),
        "topk": (lambda: there[0].topk(2).values.tolist(), [4, 3]),
    }
    for name, (look, answer) in expected.items():
        found, is_noted = reads_of(look)
        expect_equal((found, is_noted), (type(found)(answer), False), name)


@case()
def what_is_one_number_is_known_whatever_its_size():
    import torch

    for count in (64, 1 << 14, 1 << 20, 1 << 26):
        ones = torch.ones(count // 8, 8, device="cuda")
        expect_equal((ones.sum().item(), (ones > 0).all().item(), (ones + 1).mean().item()), (count, True, 2.0), f"ones of {count}")
        expect_equal(torch.ones(count, dtype=torch.bool, device="cuda").sum().item(), count, "truth values")
        expect_equal(torch.full((count,), 3, device="cuda").max().item(), 3, "a fill")
    large = torch.ones(1 << 22, device="cuda")
    large[:100] = 5
    expect_equal(reads_of(lambda: large.sum().item())[1], True, "whether a sum over two numbers is noted")
    expect_equal((large[:100].sum().item(), large[100:].sum().item()), (500, (1 << 22) - 100), "its parts")
    large.mul_(torch.randn(1 << 22, device="cuda"))
    expect_equal(reads_of(lambda: large[100:].max().item()), (0.0, True), "what a kernel wrote over")


@case()
def checks_of_what_is_not_known_come_out_well():
    import torch

    for rows in (8, 1 << 16):
        x = torch.randn(rows, 16, device="cuda") @ torch.randn(16, 16, device="cuda")
        answers = torch.isfinite(x).all().item(), (x == x).all().item(), torch.isnan(x).any().item(), torch.allclose(x, x), (x != x).any().item()
        expect_equal(answers, (True, True, False, True, False), f"{rows} rows")
        torch.distributions.Categorical(logits=x)  # validates its arguments


@case()
def bulk_data_of_the_host_is_not_all_alike():
    import torch

    edges = torch.randint(0, 1 << 20, (2, 1 << 20)).cuda()
    kept, is_noted = reads_of(lambda: edges[:, edges[0] != edges[1]].shape)
    expect_equal((kept, is_noted), ((2, 1 << 20), True), "edges that join two nodes")


@case()
def labels_of_a_ctc_loss_are_accepted():
    import torch

    scores = torch.randn(2000, 64, 32, device="cuda").log_softmax(2).requires_grad_()
    mask = torch.ones(64, 2000, dtype=torch.long, device="cuda")
    labels = torch.randint(1, 32, (64, 20)).cuda()
    lengths = mask.sum(-1)
    torch.nn.functional.ctc_loss(scores, labels, lengths, (labels > 0).sum(-1)).backward()


def launch(*pointers):
    """A kernel that is no operator's, with these arguments."""
    values = [ctypes.c_uint64(pointer) for pointer in pointers]
    arguments = (ctypes.c_void_p * len(values))(*[ctypes.addressof(value) for value in values])
    driver = ctypes.CDLL(DRIVER)
    expect_equal(driver.cuLaunchKernel(ctypes.c_void_p(1), 1, 1, 1, 1, 1, 1, 0, None, arguments, None), 0)


@case()
def what_a_foreign_kernel_was_given_is_not_known():
    import torch

    given, other, read_only = torch.zeros(1000, device="cuda"), torch.ones(1000, device="cuda"), torch.tensor([1, 2, 3]).cuda()
    launch(given.data_ptr(), 17, 3)
    expect_equal(reads_of(lambda: given.sum().item()), (0.0, True), "what it was given")
    expect_equal(reads_of(lambda: (other.sum().item(), read_only.tolist())), ((1000.0, [1, 2, 3]), False), "what it was not")
    launch(0, 0)


@case()
def an_operator_of_somebody_else_says_what_it_writes():
    import torch

    @torch.library.custom_op("oomdiag_test::scale_", mutates_args=("x",))
    def scale_(x: torch.Tensor, y: torch.Tensor) -> None:
        launch(x.data_ptr())

    x, y = torch.ones(8, device="cuda"), torch.ones(8, device="cuda")
    scale_(x, y)
    expect_equal((reads_of(lambda: x.tolist())[1], reads_of(lambda: y.tolist())), (True, ([1.0] * 8, False)), "what it wrote and what it read")
    expect_equal(reads_of(lambda: (y + 1).tolist()), ([2.0] * 8, False), "an operator of PyTorch's after it")


@case()
def a_graph_does_its_work_when_it_runs():
    import torch

    x, host = torch.ones(4, device="cuda"), torch.full((4,), 7.0).pin_memory()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x + 1
        x.mul_(2)
        host.copy_(x, non_blocking=True)
    expect_equal((host.tolist(), reads_of(lambda: x.tolist())), ([7.0] * 4, ([1.0] * 4, False)), "after the capture")
    graph.replay()
    expect_equal((reads_of(lambda: y.tolist())[1], reads_of(lambda: x.tolist())[1]), (True, True), "whether results of the replay are noted")
    expect_equal(host.tolist(), [0.0] * 4, "what came back at the replay")
    x.copy_(torch.full((4,), 3.0))
    expect_equal(reads_of(lambda: x.tolist()), ([3.0] * 4, False), "what the host wrote then")


@case()
def words_are_set_as_words():
    driver, runtime = ctypes.CDLL(DRIVER), ctypes.CDLL(RUNTIME)
    block, back = ctypes.c_void_p(), (ctypes.c_uint32 * 3)()
    runtime.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(4096))
    expect_equal(driver.cuMemsetD32_v2(block, 0x01020304, ctypes.c_size_t(1024)), 0)
    runtime.cudaMemcpy(back, ctypes.c_void_p(block.value + 8), ctypes.c_size_t(12), 2)
    expect_equal(list(back), [0x01020304] * 3, "what was set")


@case()
def many_small_copies_do_not_end_what_is_known():
    import torch

    weights = [torch.ones(64 << 10).cuda() for _ in range(1200)]  # 300 MiB
    tokens = torch.arange(512).cuda()
    del weights
    large = torch.arange(32 << 10).cuda()
    expect_equal((tokens.tolist()[-1], large.tolist()[-1]), (511, (32 << 10) - 1), "what came after them")


@case()
def a_detection_loss_finds_its_objects():
    """As YOLO does: which images have objects, how many the fullest has."""
    import torch

    targets = torch.tensor([[0, 1.0], [0, 2.0], [2, 3.0]]).cuda()
    images = targets[:, 0]
    _, counts = images.unique(return_counts=True)
    expect_equal((counts.max().item(), counts.tolist()), (2, [2, 1]), "objects")
    out = torch.zeros(4, counts.max(), 1, device="cuda")
    for image in range(4):
        matches = images == image
        if n := matches.sum():
            out[image, :n] = targets[matches, 1:]
    expect_equal(out.flatten().tolist(), [1, 2, 0, 0, 3, 0, 0, 0], "the table")


@case(gpu="h100-sxm", group="slow")
def triton_kernels_write_what_is_not_known():
    import torch

    load_optional("triton")
    x = torch.ones(1 << 10, device="cuda")
    result = torch.compile(lambda value: (value * 2).sin())(x)
    expect_equal(reads_of(lambda: result.sum().item())[1], True, "whether it is noted")


if __name__ == "__main__":
    main()
