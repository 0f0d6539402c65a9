// Built once for each sanitizer of the compiler. Prints a line and ends with 3; with an argument it first does what that
// sanitizer is there to find.

#include <climits>
#include <cstdio>
#include <thread>

namespace {

[[maybe_unused]] volatile int shared_number = 0;

void read_after_free() {
  int* number = new int(1);
  delete number;
  std::printf("%d\n", *static_cast<volatile int*>(number));
}

void lose_memory() {
  int* volatile lost = new int[1000];
  lost[0] = 1;
  lost = nullptr;
}

void race() {
  std::thread other([] { shared_number = shared_number + 1; });
  shared_number = shared_number + 1;
  other.join();
}

void overflow(int argument_count) {
  volatile int large = INT_MAX;
  large = large + argument_count;
}

}  // namespace

int main(int argument_count, char** arguments) {
  if (argument_count > 1) {
    switch (*arguments[1]) {
      case 'a':
        read_after_free();
        break;
      case 'l':
        lose_memory();
        break;
      case 't':
        race();
        break;
      default:
        overflow(argument_count);
    }
  }
  std::puts("the program ran");
  return 3;
}
