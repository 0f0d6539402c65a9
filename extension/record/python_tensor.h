#pragma once

#include "extension/python_symbols.h"
#include "extension/record/python_api.h"

namespace c10 {
struct TensorImpl;
}

namespace oomdiag {

/// Finds the tensors behind Python's. With the GIL.
class TensorReader {
 public:
  explicit TensorReader(const PythonApi& api) : api_(api), reader_(api) {}

  /// What `object` stands for, if it is a tensor; the local one of a DTensor. Null else. It lives as long as `object`.
  const c10::TensorImpl* find(PythonObject object);

 private:
  const PythonApi& api_;
  PythonReader reader_;
  PythonRef tensor_type_;
};

}  // namespace oomdiag
