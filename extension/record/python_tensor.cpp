#include "extension/record/python_tensor.h"

#include <ATen/PythonTorchFunctionTLS.h>

#include "extension/python_symbols.h"

namespace oomdiag {

namespace {

using at::impl::PythonTorchFunctionTLS;

/// While it lives, tensors answer for themselves: no __torch_function__ of a subclass or mode of the program's is asked.
class NoTorchFunction {
 public:
  NoTorchFunction() { PythonTorchFunctionTLS::set_disabled_state(at::impl::TorchFunctionDisabledState::ALL_DISABLED); }
  ~NoTorchFunction() { PythonTorchFunctionTLS::set_disabled_state(before_); }
  NoTorchFunction(const NoTorchFunction&) = delete;
  NoTorchFunction& operator=(const NoTorchFunction&) = delete;

 private:
  at::impl::TorchFunctionDisabledState before_ = PythonTorchFunctionTLS::get_disabled_state();
};

}  // namespace

// A tensor gives the address of its TensorImpl, as a number, in a slot of torch._C.TensorBase. Only of a DTensor is it certain that
// its `_local_tensor` is a slot: of another class it may be a property, whose code would run.
const c10::TensorImpl* TensorReader::find(PythonObject object) {
  if (!tensor_type_) tensor_type_ = reader_.find("torch._C", "TensorBase");
  if (!reader_.is_a(object, tensor_type_.get())) return nullptr;
  const NoTorchFunction guard;
  const PythonRef distributed = reader_.find("torch.distributed.tensor", "DTensor");
  const PythonRef local =
      reader_.is_a(object, distributed.get()) ? reader_.attribute(object, "_local_tensor") : PythonRef();
  const bool has_local = reader_.is_a(local.get(), tensor_type_.get());
  const PythonRef address = reader_.attribute(has_local ? local.get() : object, "_cdata");
  return address ? static_cast<const c10::TensorImpl*>(api_.to_pointer(address.get())) : nullptr;
}

}  // namespace oomdiag
