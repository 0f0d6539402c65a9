# Runs once inside the diagnosed interpreter, in a module of its own. The recorder finds the module whose forward runs by
# itself, in Python's frames; it calls meet_root() here when it sees a module that it does not know, so that every module
# below that root gets its path ("layer3.5.conv2"), and names the root's parameters and buffers to the trace.
#
# Installs no hook and keeps nothing alive: the program runs exactly the code that it would run without us.
import ctypes
import sys
import weakref

_recorder = ctypes.PyDLL(None)  # the recorder is loaded globally
_recorder.oomdiag_name_module.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_recorder.oomdiag_name_module_tensor.argtypes = [
    ctypes.c_int, ctypes.c_uint64, ctypes.c_int64, ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p]

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
