// Asks for the number of GPUs as a torch of some CUDA major does: before its libraries are loaded, and after. Usage:
//   oomdiag_test_asks VERSION_NODE LIBTORCH RUNTIME

#include <dlfcn.h>

#include <cstdio>
#include <initializer_list>

namespace {

void ask(const char* node) {
  const auto count_gpus = reinterpret_cast<int (*)(int*)>(dlvsym(RTLD_DEFAULT, "cudaGetDeviceCount", node));
  int count = 0;
  const int error = count_gpus == nullptr ? -1 : count_gpus(&count);
  std::printf("error %d, %d GPUs\n", error, count);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return 2;
  ask(arguments[1]);
  for (const int library : {2, 3}) {
    if (dlopen(arguments[library], RTLD_NOW) == nullptr) return 3;
  }
  ask(arguments[1]);
}
