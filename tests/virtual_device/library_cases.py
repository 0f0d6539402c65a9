"""Cases of test_device.py for the math libraries: every operation of PyTorch that reaches them runs, and what they cannot say is noted."""

import ctypes
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

from device_cases import MIB, Skip, case, expect, expect_equal, main
from stand_ins import CUBLAS, CUBLASLT, CUFFT, CUSOLVER, RUNTIME


def run_all(operations):
    """Runs each of {name: function}, with a backward pass through what it returns; all failures in one error."""
    failures = []
    for name, operation in operations.items():
        try:
            differentiate(operation())
        except Exception as error:  # noqa: BLE001, any failure is one
            failures.append(f"{name}: {type(error).__name__}: {str(error)[:200]}")
    expect(not failures, "; ".join(failures))


def differentiate(result):
    import torch

    outputs = result if isinstance(result, (tuple, list)) else [result]
    losses = [output.abs().sum() for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad]
    if losses:
        sum(losses).backward()


def random(*shape, dtype=None):
    import torch

    return torch.randn(*shape, device="cuda", dtype=dtype or torch.float32, requires_grad=True)


def noted():
    """A list that gets (kind, name) of every note, those of the past too."""
    notes = []
    observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(lambda kind, name: notes.append((kind.decode(), name.decode())))
    noted.keep_alive = observer  # the device calls it to the end
    ctypes.CDLL("libcuda.so.1").oomdiag_device_set_observer(observer)
    return notes


# Dense linear algebra: cuSOLVER and cuBLAS.


def linear_algebra(batch, dtype):
    import torch

    linalg = torch.linalg

    def square():
        return random(*batch, 32, 32, dtype=dtype)

    def tall():
        return random(*batch, 48, 32, dtype=dtype)

    return {
        "qr": lambda: linalg.qr(tall()),
        "qr complete": lambda: [part.detach() for part in linalg.qr(tall(), "complete")],
        "svdvals": lambda: linalg.svdvals(tall()),
        **{f"svd by {driver}": lambda driver=driver: linalg.svdvals(tall(), driver=driver) for driver in ("gesvd", "gesvdj", "gesvda")},
        "eigvalsh": lambda: linalg.eigvalsh(square()),
        "eigh": lambda: linalg.eigh(square())[0],
        "inv": lambda: linalg.inv(square()),
        "pinv": lambda: linalg.pinv(tall()),
        "solve": lambda: linalg.solve(square(), square()),
        "lstsq": lambda: linalg.lstsq(tall(), random(*batch, 48, 4, dtype=dtype))[0],
        "cholesky": lambda: linalg.cholesky(square()),
        "cholesky_solve": lambda: torch.cholesky_solve(square(), square()),
        "cholesky_inverse": lambda: torch.cholesky_inverse(square()),
        "det": lambda: linalg.det(square()),
        "slogdet": lambda: linalg.slogdet(square())[1],
        "lu": lambda: linalg.lu(square())[1:],
        "lu_factor": lambda: linalg.lu_factor(square())[0],
        "lu_solve": lambda: linalg.lu_solve(*linalg.lu_factor(square()), square()),
        "ldl_factor": lambda: linalg.ldl_factor(square())[0].detach(),
        "ldl_solve": lambda: linalg.ldl_solve(*linalg.ldl_factor(square()), square()).detach(),
        "householder_product": lambda: linalg.householder_product(tall(), random(*batch, 32, dtype=dtype)),
        "ormqr": lambda: torch.ormqr(tall(), random(*batch, 32, dtype=dtype), tall()).detach(),
        "geqrf": lambda: torch.geqrf(tall().detach()),
        "solve_triangular": lambda: linalg.solve_triangular(square(), square(), upper=True),
        "matrix_rank": lambda: linalg.matrix_rank(square()),
        "matrix_norm": lambda: linalg.matrix_norm(square(), 2),
        "cond": lambda: linalg.cond(square()),
    }


@case()
def linear_algebra_runs():
    import torch

    for batch in ((), (3,)):
        for dtype in (torch.float32, torch.complex128):
            run_all(linear_algebra(batch, dtype))


@case()
def a_factorisation_takes_a_work_area_and_says_that_it_is_estimated():
    import torch

    notes = noted()
    x = torch.randn(512, 512, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    values, vectors = torch.linalg.eigh(x)
    results = torch.cuda.memory_allocated() - before
    # LAPACK's documented workspace of a divide-and-conquer eigensolver: 1 + 6 n + 2 n^2 elements.
    expect(torch.cuda.max_memory_allocated() - before - results > 2 * 512 * 512 * 4, "no work area was taken")
    expect(any(kind == "estimate" and name.startswith("cusolverDn") for kind, name in notes), f"nothing of it was noted: {notes}")
    expect_equal((values.shape, vectors.shape), ((512,), (512, 512)))


@case()
def eigenvalues_of_any_matrix_are_found():
    """eig looks first whether all numbers are finite: of a small matrix that is answered, of a large one torch raises an error."""
    import torch

    values, vectors = torch.linalg.eig(torch.randn(64, 64, device="cuda"))
    expect_equal((values.shape, vectors.shape, torch.linalg.eigvals(torch.randn(3, 8, 8, device="cuda")).shape), ((64,), (64, 64), (3, 8)))
    try:
        torch.linalg.eig(torch.randn(512, 512, device="cuda"))
    except RuntimeError as error:
        expect("infs or NaNs" in str(error), f"another error: {error}")


# Products: cuBLAS and cuBLASLt.


@case(gpu="h100-sxm")
def products_of_every_kind_run():
    import torch

    def matrix(*shape, dtype):
        return torch.randn(*shape, device="cuda").to(dtype)

    small, one = torch.float8_e4m3fn, torch.ones(1, device="cuda")
    operations = {
        "float8": lambda: torch._scaled_mm(matrix(32, 64, dtype=small), matrix(16, 64, dtype=small).t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16),
        "int8": lambda: torch._int_mm(torch.ones(32, 32, device="cuda", dtype=torch.int8), torch.ones(32, 32, device="cuda", dtype=torch.int8)),
        "grouped": lambda: hasattr(torch, "_grouped_mm") and torch._grouped_mm(matrix(4, 32, 64, dtype=torch.bfloat16), matrix(4, 64, 32, dtype=torch.bfloat16)),
        "gelu epilogue": lambda: torch.ops.aten._addmm_activation(one.expand(8), matrix(8, 8, dtype=torch.float32), matrix(8, 8, dtype=torch.float32), use_gelu=True),
    }
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64):
        square, batch, vector = matrix(8, 8, dtype=dtype), matrix(3, 8, 8, dtype=dtype), matrix(8, dtype=dtype)
        operations |= {
            f"mm {dtype}": lambda a=square: a @ a,
            f"bmm {dtype}": lambda a=batch: torch.baddbmm(a, a, a),
            f"addmm {dtype}": lambda a=square, x=vector: torch.addmm(x, a, a),
            f"mv {dtype}": lambda a=square, x=vector: a @ x,
            f"dot {dtype}": lambda x=vector: torch.dot(x, x),
        }
    run_all(operations)
    torch.backends.cuda.preferred_blas_library("cublaslt")
    run_all(operations)
    torch.backends.cuda.preferred_blas_library("cublas")
    missing = [name for kind, name in noted() if kind == "unsupported"]
    expect_equal(missing, [], "what was not supported")


# Sparse matrices: cuSPARSE and cuSPARSELt.


def sparse_matrix(dtype=None, rows=64, columns=64, entries=200):
    import torch

    generator = torch.Generator().manual_seed(0)
    places = torch.stack([torch.randint(size, (entries,), generator=generator) for size in (rows, columns)])
    return torch.sparse_coo_tensor(places, torch.ones(entries, dtype=dtype or torch.float32), (rows, columns)).coalesce()


def sparse_operations(dtype):
    import torch

    def csr():
        return sparse_matrix(dtype).to_sparse_csr().cuda()

    def coo():
        return sparse_matrix(dtype).cuda()

    def bsr():
        return torch.sparse_bsr_tensor(torch.tensor([0, 2, 4]), torch.tensor([0, 1, 0, 1]), torch.ones(4, 8, 8, dtype=dtype), (16, 16)).cuda()

    def dense(*shape):
        return torch.randn(*shape, device="cuda", dtype=dtype)

    return {
        "csr x dense": lambda: csr() @ dense(64, 8),
        "csr x vector": lambda: csr() @ dense(64),
        "dense x csr": lambda: dense(8, 64) @ csr(),
        "csc x dense": lambda: csr().to_sparse_csc() @ dense(64, 8),
        "transposed csr x dense": lambda: csr().t() @ dense(64, 8),
        "coo x dense": lambda: coo() @ dense(64, 8),
        "bsr x dense": lambda: bsr() @ dense(16, 8),
        "bsr x vector": lambda: bsr() @ dense(16),
        "csr x csr": lambda: csr() @ csr(),
        "coo x coo": lambda: torch.sparse.mm(coo(), coo()),
        "csr + csr": lambda: csr() + csr(),
        "addmm": lambda: torch.addmm(dense(64, 8), csr(), dense(64, 8)),
        "sampled_addmm": lambda: torch.sparse.sampled_addmm(csr(), dense(64, 16), dense(16, 64)),
        "triangular solve": lambda: torch.triangular_solve(dense(64, 8), csr(), upper=True),
        "triangular solve, one vector": lambda: torch.triangular_solve(dense(64, 1), csr(), upper=True),
        "blocks, triangular solve": lambda: torch.triangular_solve(dense(16, 4), bsr(), upper=True),
        "blocks, triangular solve, one vector": lambda: torch.triangular_solve(dense(16, 1), bsr(), upper=True),
        "coalesce": lambda: torch.sparse_coo_tensor(torch.zeros(2, 5, dtype=torch.long), torch.ones(5), (4, 4)).cuda().coalesce(),
        "to_dense": lambda: csr().to_dense(),
        "backward": lambda: torch.sparse.mm(coo(), random(64, 8, dtype=dtype)),
    }


@case()
def sparse_operations_run():
    import torch

    for dtype in (torch.float32, torch.complex64):
        run_all(sparse_operations(dtype))


@case()
def a_sparse_product_has_the_entries_that_random_operands_would_give():
    import torch

    notes = noted()
    size, entries = 4096, 40_000
    left, right = (sparse_matrix(rows=size, columns=size, entries=entries).to_sparse_csr().cuda() for _ in range(2))
    product = left @ right
    # 40 000 entries each pair with 9.8 entries of a row: 390 000 products fall on 16.8 million cells.
    expect(380_000 < product._nnz() < 390_700, f"{product._nnz()} entries")
    expect(("estimate", "cusparseSpGEMM_compute") in notes, f"the estimate was not noted: {notes}")
    total = (left + right)._nnz()
    expect(left._nnz() < total <= 2 * entries, f"{total} entries of a sum of two with {left._nnz()}")


@case(gpu="a100-80")
def two_of_four_weights_are_kept():
    import torch

    if not torch.backends.cusparselt.is_available():
        raise Skip("this torch has no cuSPARSELt")
    dense = torch.zeros(1024, 1024, device="cuda", dtype=torch.float16)
    torch.empty(0, device="cuda")
    before = torch.cuda.memory_allocated()
    compressed = torch._cslt_compress(dense)
    expect_equal(torch.cuda.memory_allocated() - before, 1024 * 1024 * 2 * 9 // 16, "the compressed bytes")
    expect_equal(torch._cslt_sparse_mm(compressed, torch.ones(1024, 64, device="cuda", dtype=torch.float16)).shape, (1024, 64))


# Transforms: cuFFT.


@case()
def transforms_of_every_kind_run():
    import torch

    fft = torch.fft
    kinds = (fft.fft, fft.ifft, fft.rfft, fft.irfft, fft.hfft, fft.ihfft, fft.fft2, fft.rfft2, fft.irfft2, fft.fftn, fft.ifftn, fft.rfftn, fft.irfftn)
    for dtype in (torch.float32, torch.float64):
        run_all({kind.__name__: lambda kind=kind, dtype=dtype: kind(random(4, 64, 64, dtype=dtype)) for kind in kinds})
    window = torch.ones(512, device="cuda")
    run_all(
        {
            "half precision": lambda: fft.fft(torch.randn(4, 64, device="cuda", dtype=torch.float16)),
            "there and back": lambda: torch.istft(torch.stft(random(2, 16000), 512, window=window, return_complex=True), 512, window=window),
        }
    )


@case()
def a_transform_of_prime_length_takes_a_work_area():
    import torch

    def peak_of(length):
        x = torch.randn(length, device="cuda", dtype=torch.complex64)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        y = torch.fft.fft(x)
        return torch.cuda.max_memory_allocated() - before - y.nbytes

    notes = noted()
    expect_equal(peak_of(4096), 0, "the work area of 4096 points")
    expect(peak_of(1_000_003) >= 2 * 8 * 1_000_003, "the work area of a prime length is less than two copies")
    expect(("estimate", "cuFFT work area") in notes, f"the estimate was not noted: {notes}")


@case()
def a_plan_that_allocates_itself_takes_from_the_gpu():
    runtime, fft = ctypes.CDLL(RUNTIME), ctypes.CDLL(CUFFT)

    def free_bytes():
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        expect_equal(runtime.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)), 0)
        return free.value

    handle, complex_to_complex = ctypes.c_int(), 0x29
    expect_equal(fft.cufftPlan1d(ctypes.byref(handle), 4096, complex_to_complex, 1), 0, "a small plan")
    before = free_bytes()
    large = ctypes.c_int()
    expect_equal(fft.cufftPlan1d(ctypes.byref(large), 1 << 20, complex_to_complex, 8), 0, "a large plan")
    expect_equal(before - free_bytes(), 64 * MIB, "what the large plan took")
    expect_equal(fft.cufftDestroy(large), 0)
    expect_equal(free_bytes(), before, "free memory afterwards")
    expect_equal(fft.cufftDestroy(large), 1, "a plan destroyed twice")


# cuDNN's old interface.


def train_convolutions():
    import torch
    from torch import nn

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    for dtype in (torch.float32, torch.float16):
        layers = nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, groups=4), nn.ConvTranspose2d(64, 32, 2, stride=2))
        layers.to("cuda", dtype, memory_format=torch.channels_last)
        layers(torch.randn(16, 3, 64, 64, device="cuda", dtype=dtype)).sum().backward()
    nn.Conv3d(4, 8, 3).cuda()(torch.randn(2, 4, 8, 16, 16, device="cuda")).sum().backward()
    return torch.cuda.max_memory_allocated()


@case(TORCH_CUDNN_V8_API_DISABLED="1")
def convolutions_of_the_old_interface_take_the_workspace_of_the_new():
    import torch

    notes = noted()
    peak = train_convolutions()
    expect(("estimate", "workspace of cuDNN's v7 convolutions") in notes, f"the old interface was not used: {notes}")
    torch.backends.cudnn.benchmark = True
    train_convolutions()
    torch.backends.cudnn.benchmark = False
    expect(peak > 50 * MIB, f"the peak of {peak} bytes has no workspace in it")


@case()
def cudnn_benchmark_runs_and_is_noted():
    import torch

    notes = noted()
    benchmark = lambda: [name for _, name in notes if "cudnn.benchmark" in name]
    layer = torch.nn.Conv2d(64, 64, 3, padding=1).cuda()
    images = torch.randn(32, 64, 56, 56, device="cuda")
    for _ in range(3):
        layer(images).sum().backward()
    expect(not benchmark(), f"plans are compared without it: {notes}")
    torch.backends.cudnn.benchmark = True
    layer(images[1:]).sum().backward()
    torch.backends.cudnn.benchmark = False
    expect(benchmark(), f"it is not noted: {notes}")


@case()
def who_opens_cudnn_by_its_name_reaches_the_device():
    import torch

    own, driver = ctypes.CDLL("liboomdiag_cudnn.so"), ctypes.CDLL("libcuda.so.1")
    version = torch.backends.cudnn.version()
    real = next(line.split()[-1] for line in pathlib.Path("/proc/self/maps").read_text().splitlines() if line.endswith("/libcudnn.so.9"))
    for name in ("libcudnn.so.9", real):
        cudnn, handle, descriptor = ctypes.CDLL(name), ctypes.c_void_p(), ctypes.c_void_p()
        address = ctypes.cast(cudnn.cudnnCreate, ctypes.c_void_p).value
        expect_equal(address, ctypes.cast(own.cudnnCreate, ctypes.c_void_p).value, f"cudnnCreate of {name}")
        expect_equal((cudnn.cudnnCreate(ctypes.byref(handle)), cudnn.cudnnDestroy(handle)), (0, 0), f"a handle of {name}")
        expect_equal(cudnn.cudnnGetVersion(), version, f"the real one's version by {name}")
        expect_equal(cudnn.cudnnCreateTensorDescriptor(ctypes.byref(descriptor)), 0, f"a function that only the real one has, by {name}")
    torch.nn.functional.conv2d(torch.zeros(1, 3, 8, 8, device="cuda"), torch.zeros(4, 3, 3, 3, device="cuda"))
    lines = pathlib.Path("/proc/self/maps").read_text().splitlines()
    folders = {pathlib.Path(line.split()[-1]).parent for line in lines if "/libcudnn" in line}
    expect_equal(folders, {pathlib.Path(real).parent}, "where the parts were found that cuDNN opens itself, beside it")
    library, dlopen = ctypes.CDLL(None), ctypes.CDLL(None).dlopen
    dlopen.restype, library.dlerror.restype = ctypes.c_void_p, ctypes.c_char_p
    expect_equal(dlopen(b"libcuda.so.1", 2), driver._handle, "another library's handle")
    expect(dlopen(b"libno_such_thing.so", 2) is None and b"libno_such_thing" in library.dlerror(), "a library that is not there was opened")


# What is not there.


@case()
def none_of_these_operations_used_what_is_not_supported():
    """The cases of this GPU and environment run before it in the same process, in the order of this file."""
    expect_equal([name for kind, name in noted() if kind == "unsupported"], [], "what was not supported")


STUBS = {
    CUFFT: ("cufftXtSetGPUs", 16),
    CUSOLVER: ("cusolverSpCreate", 9),
    "libcusparse.so.12": ("cusparseBlockedEllGet", 10),
    "libcusparseLt.so.0": ("cusparseLtSpMMAPruneCheck", 10),
    CUBLAS: ("cublasGetLoggerCallback", 15),
    CUBLASLT: ("cublasLtLoggerSetMask", 15),
    "liboomdiag_cudnn.so": ("cudnnGetNormalizationTrainingReserveSpaceSize", 3000),
    RUNTIME: ("cudaArrayGetPlane", 801),
    "libcuda.so.1": ("cuCoredumpGetAttribute", 801),
    "libnvidia-ml.so.1": ("nvmlDeviceGetBrand", 3),
}


@case()
def what_a_library_does_not_have_is_rejected_and_noted_by_name():
    notes = noted()
    for library, (name, not_supported) in STUBS.items():
        del notes[:]
        for _ in range(2):
            expect_equal(getattr(ctypes.CDLL(library), name)(None, None, None, None), not_supported, f"the answer of {name}")
        expect_equal(notes, [("unsupported", name)], f"what was noted of {name}")


@case(gpu=None)
def preloaded_libraries_bring_their_own_runtime():
    folder = pathlib.Path(os.environ["LD_PRELOAD"].split(":")[0]).resolve().parent
    libraries = [*folder.glob("*.so*"), folder.parent / "liboomdiag_preload.so"]
    libraries.remove(folder / "liboomdiag_forget.so")  # loaded into programs that have torch, and its C++ library, already
    expect(len(libraries) >= 11, f"only {len(libraries)} libraries in {folder}")
    for library in libraries:
        needed = subprocess.run(["readelf", "-d", library], env=os.environ | {"LD_PRELOAD": ""}, capture_output=True, text=True, check=True).stdout
        for runtime in ("libstdc++", "libgcc_s"):
            expect(runtime not in needed, f"{library.name} needs {runtime}")


@case(gpu=None)
def a_checkout_in_a_folder_with_spaces_and_colons_works():
    """The loader splits LD_PRELOAD at both: the build is copied to such a folder and run from there. Its reports say what was estimated."""
    build = pathlib.Path(os.environ["LD_PRELOAD"].split(":")[0]).resolve().parents[2]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("LD_PRELOAD", "OOMDIAG_", "TRITON_"))}
    with tempfile.TemporaryDirectory(prefix="a folder: with spaces ") as folder:
        copy = pathlib.Path(folder) / "build"
        for part in ("bin/oomdiag", "bin/oomdiag_samples", "share", "lib"):
            source = build / part
            if source.is_dir():
                shutil.copytree(source, copy / part, symlinks=True)
            else:
                (copy / part).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, copy / part)
        report = pathlib.Path(folder) / "report.json"
        code = "import ctypes, torch; torch.fft.fft(torch.ones(1009, 64, device='cuda'), dim=0); ctypes.CDLL('libcusolver.so.12').cusolverSpCreate(None)"
        for program in (["train", "--model", "deepcnn", "--batch", "8", "--json"], ["run", "-o", report, "--", sys.executable, "-c", code]):
            command = [copy / "bin/oomdiag", program[0], "--device", "rtx3060", "--folder", folder, *program[1:]]
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            expect_equal(done.returncode, 0, f"the exit code after {done.stderr}")
            expect("ld.so" not in done.stderr and "no report" not in done.stderr, done.stderr)
            expect("RTX 3060" in done.stdout + done.stderr, f"no report: {done.stdout} {done.stderr}")
        notes = json.loads(report.read_text())["notes"]
        for kind, text in ("estimate", "cuFFT work area"), ("unsupported", "cusolverSpCreate"):
            expect(notes.count({"kind": kind, "text": text}) == 1, f"{text} is not among the report's notes: {notes}")


@case
def rnns_take_the_workspaces_that_cudnn_took_on_an_h100():
    import torch

    def sizes(layer, batch, length, hidden, layers):
        rnn = layer(hidden, hidden, layers).cuda()
        x = torch.zeros(length, batch, hidden, device="cuda")
        torch.cuda.memory._record_memory_history(context=None)
        rnn(x)
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        return {event["size"] for event in events if event["action"] == "alloc"}

    measured = [(torch.nn.LSTM, 64, 128, 1024, 1, 246153984, 167772416), (torch.nn.LSTM, 32, 64, 256, 1, 23429632, 10486016),
                (torch.nn.LSTM, 32, 64, 256, 2, 34210304, 23068928), (torch.nn.GRU, 32, 64, 256, 1, 22708736, 12583168)]
    for *rnn, workspace, reserve in measured:
        missing = {workspace, reserve} - sizes(*rnn)
        expect(not missing, f"{rnn}: no allocation of {missing}")


@case(gpu="h200")
def convolutions_take_the_workspaces_that_cudnn_took_on_an_h200():
    import torch

    def sizes(weight, *arguments, **options):
        torch.cuda.memory._record_memory_history(context=None)
        result = torch.nn.functional.conv2d(*arguments, weight, **options)
        if weight.requires_grad:
            torch.autograd.grad(result, weight, torch.ones_like(result))
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        return {event["size"] for event in events if event["action"] == "alloc"}

    def tensor(*shape, **options):
        return torch.zeros(*shape, device="cuda", **options)

    gradients = [(128, 56, 128, 3, 2, 1, 265749159), (512, 7, 512, 3, 1, 1, 43778799), (512, 28, 256, 1, 2, 0, 239600271)]
    for channels, size, outputs, window, stride, padding, workspace in gradients:  # blocks share tiles; the flags beside them are estimated
        taken = sizes(tensor(outputs, channels, window, window, requires_grad=True), tensor(128, channels, size, size), stride=stride, padding=padding)
        expect(any(abs(bytes - workspace) < 512 for bytes in taken), f"{channels} channels: no allocation of {workspace} bytes among {taken}")
    for dtype, workspace in ((torch.float32, 400), (torch.bfloat16, 272)):  # a product of cuBLASLt
        taken = sizes(tensor(128, 256, 1, 1, dtype=dtype), tensor(128, 256, 56, 56, dtype=dtype))
        expect(workspace in taken, f"{dtype}: no allocation of {workspace} bytes among {taken}")


if __name__ == "__main__":
    main()
