"""One rank of a job, alone: what PyTorch is given of ranks that are not there (oomdiag run --world-size 64 --rank 5).

They are taken to be like this one. Where that is no answer (an object, a key that only another rank makes), the rank that
makes it is started: the same command runs as that rank too, unrecorded, as long as this one does. The rules and the messages of
NCCL are in extension/virtual_device/nccl/single_rank.h; what PyTorch does beside NCCL is here. Processes of a job share a folder
(OOMDIAG_RANK_JOB). It replaces these names of torch.distributed:

  TCPStore, FileStore     one that needs no server, in all modules that have imported it: the rendezvous of env://, tcp:// and
                          file://, and stores that are made by hand, find nobody at the other end else
  ProcessGroupGloo        one whose collectives are computed here, in all modules: the real one connects to every rank of a group
  ProcessGroupNCCL        its constructor, which is given a store that knows who is in the group, and makes no communicator by
                          splitting another, which would have to ask all ranks for their colour
  split_group             tells the virtual NCCL who is in the part that the coming ncclCommSplit makes
  *_object_list           what cannot be known is an error at the call

C++ calls the methods of a backend that is written in Python since torch 2.15. Before, it calls only those of a group: there, a
group with gloo is a SingleGroup, for which distributed_c10d._new_process_group_helper is wrapped.

Symmetric memory of a group is mapped by each of its ranks, so all of them are started for it.
"""
import collections
import ctypes
import functools
import hashlib
import os
import pickle
import re
import sys
import threading
import time
import types

_PATIENCE_SECONDS = 1800  # with a rank that lives: one that has ended, or waits for this one, is not waited for
_MOST_BYTES = 4 << 20    # of a message: what is larger is no object
_kept = []               # C++ keeps half of an object of Python: without the other half its methods are gone
_last_works = collections.deque(maxlen=64)  # C++ of torch 2.6 keeps no hold of them, and waits for ever where they are gone


class SingleRankError(RuntimeError):
    """This rank runs alone and needs what only another one knows."""


def end_with_owner():
    """In a rank that was started: when the one that is diagnosed ends, however it does, so do we."""
    owner = int(os.environ.get("OOMDIAG_RANK_OWNER", "0"))

    def watch():
        while os.path.exists(f"/proc/{owner}"):
            time.sleep(0.3)
        os._exit(1)

    if owner:
        threading.Thread(target=watch, daemon=True).start()


def _job(name):
    return os.path.join(os.environ["OOMDIAG_RANK_JOB"], name)


def _digest(*parts):
    return hashlib.sha512("\0".join(str(part) for part in parts).encode())


def _own_rank():
    return int(os.environ["RANK"])


@functools.cache
def _nccl():
    return ctypes.CDLL("libnccl.so.2")  # the virtual one, which is preloaded


def _numbers(values):
    return (ctypes.c_int * len(values))(*values)


def _place():
    """The innermost line that is neither torch's nor ours."""
    import torch
    ours = (os.path.dirname(torch.__file__) + os.sep, __file__, "<")
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(ours):
        frame = frame.f_back
    return f" ({frame.f_code.co_filename}:{frame.f_lineno})" if frame else ""


def _last_words(rank):
    try:
        with open(_job(f"output-{rank}"), errors="replace") as file:
            lines = [line.strip() for line in file if line.strip()]
        return f". Rank {rank} was run as well, and the last that it said is: {lines[-1][:300]}" if lines else ""
    except OSError:
        return ""


def _refuse(what, rank=None):
    said = _last_words(rank) if rank is not None else ""
    raise SingleRankError(f"oomdiag: rank {_own_rank()} runs alone and cannot know {what}{_place()}{said}")


def _leave(name, data):
    """Writes a file of the job: whole or not at all."""
    part = f"{name}.{os.getpid()}.{threading.get_ident()}"
    with open(_job(part), "wb") as file:
        file.write(data)
    os.replace(_job(part), _job(name))


def _find(name):
    try:
        with open(_job(name), "rb") as file:
            return file.read()
    except OSError:
        return None


def _fetch(name, rank):
    """A file that `rank` leaves, which is started for it; None if it does not."""
    found = _find(name)
    if found is not None or rank == _own_rank() or not _nccl().oomdiag_nccl_start_peer(rank):
        return found
    deadline = time.monotonic() + _PATIENCE_SECONDS
    _nccl().oomdiag_nccl_wait_for(rank)
    try:
        while found is None and time.monotonic() < deadline:
            is_over = _nccl().oomdiag_nccl_has_ended(rank) or _nccl().oomdiag_nccl_wait_is_vain()
            found = _find(name)
            if is_over:
                break
            if found is None:
                time.sleep(0.01)
    finally:
        _nccl().oomdiag_nccl_wait_for(-1)
    return found


def _tells_arrival(key, count):
    """Whether it is what the last to arrive sets, where `count` counts them: PyTorch's barriers call it <count>:last_worker,
    and <group>/last_member beside <group>/num_members."""
    group = count[:count.rfind("/") + 1]
    return key.startswith(count) or bool(group) and key.startswith(group + "last_")


def _make_stores(dist):
    def symmetric_peer(key):
        """Which rank sets `key`, if it is of symmetric memory: …/<group>//CUDASymmetricMemory/<which time>/<rank in it>.
        Ranks hand each other their handles there, and none is like another."""
        found = re.search(r"([^/]+)//\w*SymmetricMemory\w*/\d+/(\d+)$", key)
        if found is None:
            return None
        group = dist.distributed_c10d._resolve_process_group(found[1])  # nothing public leads from a name to its group
        return dist.get_process_group_ranks(group)[int(found[2])]

    class SingleStore(dist.Store):
        """Keys lie in the job's folder. What a rank sets under its own number, others are taken to have set alike; a count
        that a rank adds to counts everybody, so who waits for all to arrive goes on."""

        def __init__(self, *arguments, **options):
            super().__init__()
            _kept.append(self)
            self._counts = {}
            self._own = {}
            self.host = options.get("host_name", arguments[0] if arguments else "localhost")
            self.port = options.get("port", arguments[1] if len(arguments) > 1 else 0)
            self._world = int(os.environ["WORLD_SIZE"])
            name = f"rank-{_own_rank()}"
            if "OOMDIAG_RANK_SUMMONED" not in os.environ and _find(name) is None:
                _leave(name, str(os.getpid()).encode())

        @staticmethod
        def _file(key):
            return "key-" + _digest(key).hexdigest()[:32]

        def _alike(self, key):
            """What this rank set under the same key with its own number, or a mark that everybody has arrived."""
            for own, value in self._own.items():
                if key != own and _matches(own, key):
                    return value
            return b"1" if any(_tells_arrival(key, count) for count in self._counts) else None

        def set(self, key, value):
            value = value if isinstance(value, bytes) else str(value).encode()
            self._own[key] = value
            _leave(self._file(key), value)

        def get(self, key):
            if key in self._counts:
                return str(self._counts[key]).encode()
            maker = symmetric_peer(key)
            value = self._own.get(key) or _find(self._file(key)) or (self._alike(key) if maker is None else None)
            if maker is None and _own_rank():
                maker = 0
            if value is None and maker is not None:
                value = _fetch(self._file(key), maker)
            if value is None:
                _refuse(f"the key '{key}' of the store, which another rank sets", maker)
            return value

        def add(self, key, number):
            self._counts[key] = self._counts.get(key, 0) + number * self._world
            return self._counts[key]

        def wait(self, keys, timeout=None):
            for key in keys:
                self.get(key)

        def check(self, keys):
            return all(key in self._counts or key in self._own or _find(self._file(key)) is not None
                       or self._alike(key) is not None for key in keys)

        def compare_set(self, key, expected, desired):
            now = self._own.get(key) or _find(self._file(key)) or b""
            as_bytes = expected if isinstance(expected, bytes) else str(expected).encode()
            if now != as_bytes:
                return now or as_bytes
            self.set(key, desired)
            return self._own[key]

        def append(self, key, value):
            self.set(key, (self._own.get(key) or b"") + (value if isinstance(value, bytes) else str(value).encode()))

        def multi_get(self, keys):
            return [self.get(key) for key in keys]

        def multi_set(self, keys, values):
            for key, value in zip(keys, values):
                self.set(key, value)

        def has_extended_api(self):
            return True

        def delete_key(self, key):
            return self._own.pop(key, None) is not None or self._counts.pop(key, None) is not None

        def num_keys(self):
            return len(self._own) + len(self._counts)

        def set_timeout(self, timeout):
            pass

    class GroupStore(dist.Store):
        """That of an NCCL group: all it is asked for is the id that rank 0 of the group makes. Every process of the job
        makes the same one of the group's name."""

        def __init__(self, name, ranks):
            super().__init__()
            _kept.append(self)
            self._name = name
            self._ranks = ranks

        def _tell(self, key, given=None):
            canonical = (_digest("id", self._name, self._ranks, key).digest() * 2)[:128]
            pair = re.search(r"(\d+):(\d+)$", key)  # two ranks of the group that have a communicator for themselves
            ranks = [self._ranks[int(rank)] for rank in pair.groups()] if pair else self._ranks
            _nccl().oomdiag_nccl_tell_group(given or canonical, canonical, len(ranks), _numbers(ranks))
            return canonical

        def set(self, key, value):
            if isinstance(value, (bytes, bytearray)) and len(value) == 128:
                self._tell(key, bytes(value))

        def get(self, key):
            return self._tell(key)

        def add(self, key, number):
            return number * len(self._ranks)

        def wait(self, keys, timeout=None):
            pass

        def check(self, keys):
            return False

        def delete_key(self, key):
            return True

        def set_timeout(self, timeout):
            pass

    return SingleStore, GroupStore


def _matches(own, key):
    """Whether `key` is `own` with another number in one place where that has this rank's."""
    number, at = str(_own_rank()), own.find(str(_own_rank()))
    while at >= 0:
        before, after = own[:at], own[at + len(number):]
        between = key[len(before): len(key) - len(after)] if after else key[len(before):]
        if key.startswith(before) and key.endswith(after) and between.isdigit():
            return True
        at = own.find(number, at + 1)
    return False


class _Asking(threading.local):
    """Whether objects are asked for: what is received then matters, whatever lies in its place."""
    now = False


_asking = _Asking()


def _make_backend(torch, dist, Backend):
    class Done(dist.Work):
        def __init__(self, result):
            super().__init__()
            self._future = torch.futures.Future()
            self._future.set_result(result)
            _last_works.append(self)

        def wait(self, timeout=None):
            return True

        def is_completed(self):
            return True

        def is_success(self):
            return True

        def get_future(self):
            return self._future

        def result(self):
            return self._future.value()

    def copy(to, from_):
        """As much as fits: parts of ranks may differ in size."""
        if to is not from_ and to.data_ptr() != from_.data_ptr():
            with torch.no_grad():
                if to.shape == from_.shape:
                    to.copy_(from_)
                else:
                    count = min(to.numel(), from_.numel())
                    to.reshape(-1)[:count].copy_(from_.reshape(-1)[:count])

    Gloo = dist.ProcessGroupGloo

    class PlainBackend:
        """In the place of a Backend that Python cannot derive from: SingleGroup leads to it."""

        def __init__(self, rank, size):
            self.rank, self.size = (lambda: rank), (lambda: size)

        def name(self):
            return "gloo"

        def abort(self):
            pass

        shutdown = abort

        def eager_connect_single_device(self, device):
            pass

    class SingleBackend(Backend if _is_derivable(Backend) else PlainBackend):
        """Collectives on the host, among ranks that are alike. Takes the place of ProcessGroupGloo."""

        options = None  # each has its own; what Backend calls so cannot be set

        def __init__(self, store, rank, size, *arguments, **options):
            super().__init__(rank, size)
            _kept.append(self)
            self._rank = rank
            self._sent, self._received = {}, {}
            self.options = Gloo._Options()
            if not hasattr(self.options, "group_name"):  # since torch 2.7 or 2.8
                self.options = types.SimpleNamespace(group_name="", global_ranks_in_group=[])

        @property
        def _name(self):
            return self.options.group_name

        @property
        def _ranks(self):
            return list(self.options.global_ranks_in_group) or list(range(self.size()))

        def getBackendName(self):
            return "gloo"

        supports_splitting = property(lambda self: isinstance(self, Backend))

        def split(self, store, ranks, options):
            if self._rank not in ranks:
                return None
            part = SingleBackend(store, ranks.index(self._rank), len(ranks))
            part.options.global_ranks_in_group = [self._ranks[rank] for rank in ranks]
            part.options.group_name = _digest(self._name, part.options.global_ranks_in_group).hexdigest()
            return part

        def _message(self, sender, channel, counts):
            number = counts[sender, channel] = counts.get((sender, channel), -1) + 1
            return "mail-" + _digest(self._name, self._ranks, sender, channel, number).hexdigest()[:32]

        def _send(self, channel, tensors):
            for tensor in tensors:
                name = self._message(self._rank, channel, self._sent)
                if self._is_object(tensor):
                    _leave(name, tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())

        @staticmethod
        def _is_object(tensor):
            return not tensor.dtype.is_floating_point and tensor.nbytes <= _MOST_BYTES

        def _receive(self, sender, channel, tensors, asks):
            for tensor in tensors:
                name = self._message(sender, channel, self._received)
                if not asks or not self._is_object(tensor) or tensor.nbytes == 0:
                    continue
                data = _fetch(name, self._ranks[sender])
                if data is None:
                    _refuse(f"what rank {self._ranks[sender]} sends", self._ranks[sender])
                sent = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(tensor.dtype)
                copy(tensor, sent.reshape(tensor.shape) if sent.numel() == tensor.numel() else sent)

        def broadcast(self, tensors, options):
            if options.rootRank == self._rank:
                self._send("all", tensors)
            else:
                self._receive(options.rootRank, "all", tensors, _asking.now)
            return Done(tensors)

        def allreduce(self, tensors, options):
            return Done(tensors)

        def allreduce_coalesced(self, tensors, options):
            return Done(tensors)

        def reduce(self, tensors, options):
            return Done(tensors)

        def allgather(self, outputs, inputs, options):
            for list_, own in zip(outputs, inputs):
                for one in list_:
                    copy(one, own)
            return Done(outputs)

        allgather_coalesced = allgather
        gather = allgather

        def all_gather_single(self, output, own, options):
            for part in output.reshape(self.size(), -1):
                copy(part, own.reshape(-1))
            return Done([output])

        def all_gather_single_coalesced(self, outputs, inputs, options):
            for output, own in zip(outputs, inputs):
                self.all_gather_single(output, own, options)
            return Done(outputs)

        def scatter(self, outputs, inputs, options):
            if options.rootRank == self._rank:
                for rank in range(self.size()):
                    self._send(rank, [inputs[0][rank]])
                copy(outputs[0], inputs[0][self._rank])
            else:
                self._receive(options.rootRank, self._rank, outputs, _asking.now)
            return Done(outputs)

        def reduce_scatter(self, outputs, inputs, options):
            for output, list_ in zip(outputs, inputs):
                copy(output, list_[self._rank])
            return Done(outputs)

        def reduce_scatter_single(self, output, own, options):
            copy(output, own.reshape(self.size(), -1)[self._rank].reshape(output.shape))
            return Done([output])

        def reduce_scatter_single_coalesced(self, outputs, inputs, options):
            for output, own in zip(outputs, inputs):
                self.reduce_scatter_single(output, own, options)
            return Done(outputs)

        def all_to_all_single(self, output, own, output_sizes, sizes, options):
            copy(output, own)
            return Done([output])

        def alltoall(self, outputs, inputs, options):
            for output, own in zip(outputs, inputs):
                copy(output, own)
            return Done(outputs)

        def send(self, tensors, to, tag):
            self._send(f"{to} {tag}", tensors)
            return Done(tensors)

        def recv(self, tensors, sender, tag):
            self._receive(sender, f"{self._rank} {tag}", tensors, True)
            return Done(tensors)

        def barrier(self, options):
            return Done([])

        def monitored_barrier(self, options, wait_all_ranks=False):
            pass

        def _set_sequence_number_for_group(self):
            pass

        def _get_sequence_number_for_group(self):
            return 0

        def _set_default_timeout(self, timeout):
            pass

    for name, value in vars(Gloo).items():  # options, devices: what belongs to the class
        if name not in dir(SingleBackend) and not name.startswith("_pybind11"):
            setattr(SingleBackend, name, value)
    for name in dir(Backend):  # C++ reads them from the class: what it has of Backend asks C++ again
        if "supports_" in name and name not in vars(SingleBackend) and not callable(getattr(Backend, name)):
            setattr(SingleBackend, name, False)
    return SingleBackend


_SINGLE_TENSORS = ("all_gather_single", "reduce_scatter_single", "all_to_all_single")  # these take no lists of them
_NAMES_BEFORE_2_15 = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


def _is_derivable(Backend):
    """Whether Python can derive from it and C++ then calls what is overridden: since torch 2.15."""
    return not isinstance(Backend.__init__, type(object.__init__))


def _first_tensor(torch, values):
    for value in values:
        if isinstance(value, (list, tuple)):
            value = _first_tensor(torch, value)
        if isinstance(value, torch.Tensor):
            return value
    return None


def _make_group(torch, dist, SingleBackend):
    from torch._C._distributed_c10d import FakeProcessGroup
    Kind = dist.ProcessGroup.BackendType

    class SingleGroup(dist.ProcessGroup):
        """A group whose gloo is a SingleBackend. Python and C++ call its collectives here; those of other backends are led to
        a group of PyTorch that has only these. C++ asks for a backend of each device, and gets PyTorch's own fake."""

        def __init__(self, store, rank, size):
            super().__init__(rank, size)  # with a store it would be a group of C++, which calls nothing here
            self._single = {}
            self._others = dist.ProcessGroup(store, rank, size)
            self._kinds, self._fake = {}, None

        def get_group_store(self):
            return self._others.get_group_store()

        def _set_default_backend(self, kind):
            super()._set_default_backend(Kind.CUSTOM if kind == Kind.GLOO else kind)

        def _register_backend(self, device, kind, backend=None):
            kind = Kind.CUSTOM if kind == Kind.GLOO else kind
            self._kinds[device.type] = kind
            if isinstance(backend, SingleBackend):
                self._single[device.type] = backend
                if self._fake is None:  # one for all devices, as the backend is
                    self._fake = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)(self.rank(), self.size())
                backend = self._fake
            else:
                if self.bound_device_id is not None:
                    self._others.bound_device_id = self.bound_device_id
                self._others._register_backend(device, kind, backend)
            super()._register_backend(device, kind, backend)

        def _get_backend(self, device):
            return self._single.get(torch.device(device).type) or super()._get_backend(device)

        def monitored_barrier(self, *arguments, **options):
            pass

        def split_group(self, ranks, *arguments, **options):
            """The other backends split themselves, and their part becomes a group of ours."""
            split = self._others.split_group(ranks, *arguments, **options)
            if split is None:
                return None
            part = SingleGroup(split.get_group_store(), split.rank(), split.size())
            part.bound_device_id = self.bound_device_id
            for device, kind in self._kinds.items():
                single = self._single.get(device)
                backend = single.split(None, ranks, None) if single else split._get_backend(torch.device(device))
                part._register_backend(torch.device(device), kind, backend)
                if not single:
                    part._set_default_backend(kind)
            part._set_group_name(split.group_name)
            part._set_group_desc(split.group_desc)
            return part

    def lead(name, own_name):
        own = getattr(SingleBackend, own_name)
        count = own.__code__.co_argcount - 1

        def call(group, *arguments, **options):
            tensor = _first_tensor(torch, (*arguments, *options.values()))
            backend = group._single.get(tensor.device.type) if tensor is not None else None
            if backend is None:
                return getattr(group._others, name)(*arguments, **options)
            is_short_form = own_name not in _SINGLE_TENSORS and any(isinstance(one, torch.Tensor) for one in arguments)
            if options or is_short_form or len(arguments) != count:  # C++ makes the whole form of it, and calls that
                return getattr(super(SingleGroup, group), name)(*arguments, **options)
            return own(backend, *arguments)

        setattr(SingleGroup, name, call)

    for own_name in ("broadcast", "allreduce", "allreduce_coalesced", "reduce", "allgather", "allgather_coalesced", "gather",
                     "scatter", "reduce_scatter", "alltoall", "send", "recv", *_NAMES_BEFORE_2_15):
        for name in (own_name, _NAMES_BEFORE_2_15.get(own_name, own_name)):
            if hasattr(dist.ProcessGroup, name):
                lead(name, own_name)
    return SingleGroup


def _make_groups_single(torch, dist, SingleBackend):
    """Where C++ calls no backend that is written in Python."""
    c10d = dist.distributed_c10d
    SingleGroup = _make_group(torch, dist, SingleBackend)
    make, Group = c10d._new_process_group_helper, dist.ProcessGroup

    @functools.wraps(make)
    def make_single(size, rank, ranks, backend, store, name, *arguments, **options):
        if dist.Backend.GLOO in c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map().values():
            c10d.ProcessGroup = SingleGroup
        try:
            group, store = make(size, rank, ranks, backend, store, name, *arguments, **options)
        finally:
            c10d.ProcessGroup = Group
        for single in getattr(group, "_single", {}).values():  # as torch does from 2.8 on
            single.options.group_name, single.options.global_ranks_in_group = name, ranks
        return group, store

    c10d._new_process_group_helper = make_single


def _make_nccl_single(dist, GroupStore):
    Nccl, make = dist.ProcessGroupNCCL, dist.ProcessGroupNCCL.__init__

    @functools.wraps(make)
    def make_single(group, store, rank, size, *arguments, **options):
        name, ranks = "", []
        for one in (*arguments, *options.values()):
            if isinstance(one, Nccl.Options):
                one.split_from = None
                name, ranks = one.group_name, list(one.global_ranks_in_group)
        make(group, GroupStore(name, ranks or list(range(size))), rank, size, *arguments, **options)

    Nccl.__init__ = make_single


def _replace(torch_modules, name, by):
    """In every module that has the thing by that name, as `from torch.distributed import name` copies it."""
    original = getattr(sys.modules["torch.distributed"], name)
    for module in torch_modules:
        if module.__dict__.get(name) is original:
            setattr(module, name, by)
    return original


def _check_what_is_replaced(dist):
    """That this torch has it, before anything is replaced."""
    c10d = dist.distributed_c10d
    wanted = [(dist, name) for name in ("TCPStore", "FileStore", "ProcessGroupGloo", "split_group")]
    wanted += [(c10d, "_create_process_group_wrapper"), (c10d, "_new_process_group_helper")]
    for module, name in wanted:
        if not hasattr(module, name):
            raise ImportError(f"oomdiag: --rank replaces {module.__name__}.{name}, which this torch does not have")


def _ask(function):
    @functools.wraps(function)
    def call(*arguments, **options):
        _asking.now, before = True, _asking.now
        _nccl().oomdiag_nccl_hand_objects_over(1)
        try:
            return function(*arguments, **options)
        except (EOFError, pickle.UnpicklingError) as error:
            ended = [rank for rank in range(int(os.environ["WORLD_SIZE"]))
                     if os.path.exists(_job(f"output-{rank}")) and _nccl().oomdiag_nccl_has_ended(rank)]
            _refuse(f"the objects of {function.__name__}", ended[0] if ended else None)
        finally:
            _asking.now = before
            _nccl().oomdiag_nccl_hand_objects_over(int(before))
    return call


def apply():
    """Called once torch is imported, before the program's next line."""
    import torch
    import torch.distributed as dist
    if not dist.is_available():
        return
    _check_what_is_replaced(dist)
    modules = [module for name, module in list(sys.modules.items())
               if module is not None and (name + ".").startswith(("torch.distributed.", "torch._C._distributed_c10d."))]
    SingleStore, GroupStore = _make_stores(dist)
    Backend = dist.ProcessGroupGloo.__bases__[0]  # dist.Backend is the class of names
    SingleBackend = _make_backend(torch, dist, Backend)
    _replace(modules, "TCPStore", SingleStore)
    _replace(modules, "FileStore", SingleStore)

    _replace(modules, "ProcessGroupGloo", SingleBackend)
    getattr(dist.Backend, "_ensure_backend_registered", str)("gloo")  # since 2.15 at its first use, which sets its kind
    dist.Backend.backend_type_map["gloo"] = dist.ProcessGroup.BackendType.CUSTOM  # DDP takes what has GLOO's for the real one
    dist.distributed_c10d._create_process_group_wrapper = lambda wrapped_pg, *_, **__: wrapped_pg  # it compares with other ranks
    if not _is_derivable(Backend):
        _make_groups_single(torch, dist, SingleBackend)
    if dist.is_nccl_available():
        _make_nccl_single(dist, GroupStore)

    split_group = dist.split_group

    @functools.wraps(split_group)
    def split_single_group(parent_pg=None, split_ranks=None, *arguments, **options):
        parent = parent_pg or dist.group.WORLD
        for part in split_ranks or []:
            if parent.rank() in part:
                ranks = [dist.get_global_rank(parent, rank) for rank in part]
                _nccl().oomdiag_nccl_expect_part(len(ranks), _numbers(ranks))
        return split_group(parent_pg, split_ranks, *arguments, **options)

    _replace(modules, "split_group", split_single_group)
    for name in ("broadcast_object_list", "recv_object_list", "scatter_object_list"):
        _replace(modules, name, _ask(getattr(dist, name)))
