#include "extension/record/python_node.h"

#include <dlfcn.h>
#include <link.h>
#include <torch/csrc/autograd/function.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string_view>
#include <type_traits>
#include <typeinfo>
#include <utility>

#include "extension/python_symbols.h"
#include "extension/record/newest_nodes.h"
#include "extension/record/python_api.h"

// The object of a PyNode is given by libtorch_python's functionToPyObject, which counts a reference and does nothing else; its
// saved variables by the slot `_raw_saved_tensors`, as objects of pybind11 that point to them. How such an object lies in
// memory is the same since pybind11 2.2: after the object's head the pointer. It is believed where the size of the object, and
// with several of them the distance of what they point to, is what it ought to be.

namespace oomdiag {

namespace {

using torch::autograd::SavedVariable;
using ToPython = PythonObject (*)(const NodePtr&);

ToPython find_to_python() {
  constexpr bool is_shared = std::is_same_v<NodePtr, std::shared_ptr<torch::autograd::Node>>;
  constexpr const char* name =
      is_shared
          ? "_ZN5torch8autograd18functionToPyObjectERKSt10shared_ptrINS0_4NodeEE"
          : "_ZN5torch8autograd18functionToPyObjectERKN3c1013intrusive_ptrINS0_4NodeENS1_6detail34intrusive_target_"
            "default_null_typeIS3_EEEE";
  void* const library = dlopen("libtorch_python.so", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return nullptr;
  const auto found = reinterpret_cast<ToPython>(dlsym(library, name));
  dlclose(library);  // it stays: Python has it
  return found;
}

/// The addresses of a library.
struct Range {
  uintptr_t begin = 0, end = 0;
};

Range find_library(const char* suffix) {
  struct Search {
    std::string_view suffix;
    Range found{};
  } search{suffix};
  const auto visit = [](dl_phdr_info* info, size_t, void* in) {
    auto& [searched, found] = *static_cast<Search*>(in);
    if (!std::string_view(info->dlpi_name).ends_with(searched)) return 0;
    found.begin = found.end = info->dlpi_addr;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      found.end =
          std::max<uintptr_t>(found.end, info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz);
    }
    return 1;
  };
  dl_iterate_phdr(visit, &search);
  return search.found;
}

/// An object of pybind11 with one pointer and the usual holder.
struct Wrapped {
  void* head[2];
  const SavedVariable* value;
  void* holder[2];
  void* weak_references;
  void* flags;
};

/// The class torch._C._autograd.SavedTensor, if its objects are Wrapped.
PythonRef find_wrapped(const PythonApi& api) {
  const PythonReader reader(api);
  PythonRef type = reader.find("torch._C._autograd", "SavedTensor");
  const PythonRef size = type ? reader.attribute(type.get(), "__basicsize__") : PythonRef();
  return size && api.to_long(size.get()) == long{sizeof(Wrapped)} ? std::move(type) : PythonRef();
}

bool are_wrapped(const PythonApi& api, const std::vector<PythonRef>& objects) {
  const PythonRef searched = find_wrapped(api);
  if (!searched) return false;
  const SavedVariable* next = nullptr;
  for (const PythonRef& object : objects) {
    const PythonRef type(api, api.type(object.get()));
    const SavedVariable* const value = static_cast<const Wrapped*>(object.get())->value;
    if (type.get() != searched.get() || value == nullptr || (next != nullptr && value != next)) return false;
    next = value + 1;
  }
  return true;
}

}  // namespace

bool is_python_node(const torch::autograd::Node& node) noexcept {
  static const Range library = find_library("/libtorch_python.so");
  const auto type = reinterpret_cast<uintptr_t>(&typeid(node));
  return type >= library.begin && type < library.end;
}

bool python_nodes_are_readable(const PythonApi& api) {
  const PythonReader reader(api);
  const PythonRef base = reader.find("torch._C", "_FunctionBase");
  const PythonRef dict = base ? reader.dict_of(base.get()) : PythonRef();
  return find_to_python() != nullptr && find_wrapped(api) && dict && reader.entry(dict.get(), "_raw_saved_tensors");
}

SavedByPythonNode::SavedByPythonNode(const PythonApi& api, const NodePtr& node) {
  static const ToPython to_python = find_to_python();
  if (to_python == nullptr) return;
  const PythonReader reader(api);
  node_ = PythonRef(api, to_python(node));
  if (!node_) {
    api.clear_error();
    return;
  }
  saved_ = reader.attribute(node_.get(), "_raw_saved_tensors");
  const std::vector<PythonRef> objects = reader.items(saved_.get());
  known_ = are_wrapped(api, objects);  // also where there are none: released already
  if (!known_) return;
  for (const PythonRef& object : objects) variables_.push_back(static_cast<const Wrapped*>(object.get())->value);
}

}  // namespace oomdiag
