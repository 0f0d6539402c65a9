# Runs once inside the diagnosed interpreter, in a module of its own. The recorder finds the module whose forward runs by
# itself, in Python's frames; it calls meet_root() here when it sees a module that it does not know, so that every module
# below that root gets its path ("layer3.5.conv2"), and names the root's parameters and buffers to the trace. Likewise with
# optimizers: which tensor belongs to which of their parameter groups is told where a step made a new peak, every so often,
# and at an OOM.
#
# Installs no hook and keeps nothing alive: the program runs exactly the code that it would run without us.
import ctypes
import gc
import sys
import weakref

_recorder = ctypes.PyDLL(None)  # the recorder is loaded globally
_recorder.oomdiag_name_module.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_recorder.oomdiag_name_module_tensor.argtypes = [
    ctypes.c_int, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]
_recorder.oomdiag_name_group.argtypes = [ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p]

_alive = {}  # id of a named module -> a weak reference that forgets its name when it dies


def _name_module(module, path):
    key = id(module)
    if key in _alive:
        return

    def forget(_reference):
        del _alive[key]
        _recorder.oomdiag_name_module(key, None)

    _alive[key] = weakref.ref(module, forget)
    _recorder.oomdiag_name_module(key, path.encode())


def _name_tensor(tensor, path, is_buffer):
    if not tensor.is_cuda:
        return
    storage = tensor.untyped_storage()
    shape = str(list(tensor.shape)) + " " + str(tensor.dtype).removeprefix("torch.")
    _recorder.oomdiag_name_module_tensor(is_buffer, storage.data_ptr(), storage.nbytes(), tensor.device.index or 0,
                                         path.encode(), shape.encode())


def _name_rank():
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        _recorder.oomdiag_name_rank(distributed.get_rank(), distributed.get_world_size())


def meet_root(root):
    _name_rank()
    for path, module in root.named_modules():
        _name_module(module, path or type(module).__name__)
    for path, parameter in root.named_parameters():
        _name_tensor(parameter, path, 0)
    for path, buffer in root.named_buffers():
        _name_tensor(buffer, path, 1)


_optimizers = {}  # id of an optimizer that lives -> what it is called
_met = {}  # class name -> how many of its optimizers were met
_searched = False


def meet_optimizer(optimizer):
    if not isinstance(getattr(optimizer, "param_groups", None), list):
        return
    kind = type(optimizer).__name__
    _met[kind] = _met.get(kind, 0) + 1
    name = kind if _met[kind] == 1 else f"{kind} {_met[kind]}"
    _name_module(optimizer, name)
    _optimizers[id(optimizer)] = name


# Optimizers are met in their first step or zero_grad. Where memory runs out before, they are looked for, once: it takes
# some tenths of a second. `type` runs no code of the objects.
def _search_optimizers():
    global _searched
    base = getattr(sys.modules.get("torch.optim"), "Optimizer", None)
    if base is None or _searched:
        return
    _searched = True
    for each in gc.get_objects():
        if issubclass(type(each), base):
            meet_optimizer(each)


def _group_name(key, index, group):
    name = f"{_optimizers[key]}, group {index}"
    own = group.get("name")
    return (f"{name} ({own})" if isinstance(own, str) else name).encode()


def _group_tensor(value, name):
    try:
        tensor = getattr(value, "_local_tensor", value)  # of a DTensor
        if tensor is None or not tensor.is_cuda:
            return
        storage = tensor.untyped_storage()
        _recorder.oomdiag_name_group(storage.data_ptr(), storage.nbytes(), tensor.device.index or 0, name)
    except Exception:  # no tensor, or one without a storage
        pass


def _group_members(key, optimizer):
    for index, group in enumerate(optimizer.param_groups):
        name = _group_name(key, index, group)
        for parameter in group["params"]:
            _group_tensor(parameter, name)
            _group_tensor(parameter.grad, name)
            state = optimizer.state.get(parameter)
            for value in state.values() if isinstance(state, dict) else ():
                for each in value if isinstance(value, (list, tuple)) else (value,):
                    _group_tensor(each, name)


# Every torch.optim optimizer goes through its groups by `for group in self.param_groups`.
def _name_refused_group():
    frame = sys._getframe()
    while frame is not None:
        if {"self", "group"} <= set(frame.f_code.co_varnames):
            values = frame.f_locals
            optimizer, group = values.get("self"), values.get("group")
            if id(optimizer) in _optimizers and len(optimizer.param_groups) > 1:
                for index, each in enumerate(optimizer.param_groups):
                    if each is group:
                        _recorder.oomdiag_name_group(0, 0, 0, _group_name(id(optimizer), index, group))
                        return
        frame = frame.f_back


def name_groups(refused=None):
    if refused:
        if not _optimizers:
            _search_optimizers()
        _name_refused_group()
    for key in list(_optimizers):
        optimizer = _alive[key]() if key in _alive else None
        if optimizer is None:
            del _optimizers[key]
            continue
        try:
            _group_members(key, optimizer)
        except Exception:  # an optimizer with a state of another kind
            pass
