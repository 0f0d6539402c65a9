#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

#include "profiler/error.h"
#include "profiler/snapshot/byte_stream.h"
#include "profiler/snapshot/pickle.h"
#include "profiler/trace/event_file.h"

// The pickle virtual machine (Python's pickletools documents every opcode), cut down to what plain data needs: a stack, a
// memo and marks. What a snapshot of PyTorch is made of, whichever writer: Python's pickle (protocol 4, from 3.14 on 5) or
// the C++ one of libtorch (protocol 2).

namespace oomdiag {

using Kind = PickleValue::Kind;

namespace {

/// A number of at most eight bytes, its sign in the last; the machines that this runs on are little-endian.
int64_t signed_number(const uint8_t* bytes, size_t count) {
  static_assert(std::endian::native == std::endian::little);
  if (count == 0) return 0;
  uint64_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  const auto unused = static_cast<int>(64 - 8 * count);
  return static_cast<int64_t>(bits << unused) >> unused;
}
uint64_t unsigned_number(const uint8_t* bytes, size_t count) {
  uint64_t bits = 0;
  std::memcpy(&bits, bytes, sizeof bits);
  return count == 0 ? 0 : bits & (~uint64_t{0} >> (64 - 8 * count));
}

/// What opcodes push and pop: millions of times, and once a million elements of a list.
class PickleStack {
 public:
  size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  PickleValue& operator[](size_t index) { return values_[index]; }
  const PickleValue& operator[](size_t index) const { return values_[index]; }
  PickleValue back() const { return values_[size_ - 1]; }
  void push(PickleValue value) {
    if (size_ == values_.size()) [[unlikely]]
      values_.resize(2 * size_);
    values_[size_++] = value;
  }
  void drop_to(size_t size) { size_ = size; }
  std::span<const PickleValue> above(size_t mark) const { return std::span(values_).subspan(mark, size_ - mark); }

 private:
  std::vector<PickleValue> values_ = std::vector<PickleValue>(4096);
  size_t size_ = 0;
};

/// Opcodes that run code or reach outside of the file.
const char* name_of_code(uint8_t opcode) {
  switch (opcode) {
    case 'c':
    case 0x93:
      return "GLOBAL";
    case 'R':
      return "REDUCE";
    case 'b':
      return "BUILD";
    case 'i':
    case 'o':
    case 0x81:
    case 0x92:
      return "NEWOBJ";
    case 'P':
    case 'Q':
      return "PERSID";
    case 0x82:
    case 0x83:
    case 0x84:
      return "EXT";
    default:
      return nullptr;
  }
}

}  // namespace

class PickleMachine {
 public:
  PickleMachine(Pickle& pickle, const InputFile& file, const std::string& name)
      : pickle_(pickle), stream_(file, [this] { check_size(); }), name_(name), most_(most_bytes(file)) {}

  [[gnu::flatten]] PickleValue run() {  // one loop without calls, for a snapshot has a billion opcodes
    while (true) {
      const uint8_t opcode = *take(1);
      if (opcode == '.') return pop();
      step(opcode);
    }
  }

 private:
  // What throws is kept out of the way, so that the rest stays small.
  [[noreturn, gnu::cold, gnu::noinline]] void reject(const std::string& why) const {
    throw Error(ErrorKind::input, fmt::format("'{}' is no memory snapshot: {}", name_, why),
                "write one with torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")");
  }
  [[noreturn, gnu::cold, gnu::noinline]] void reject_damage() const {
    throw Error(ErrorKind::input, fmt::format("'{}' is damaged at byte {}", name_, stream_.position()));
  }
  [[noreturn, gnu::cold, gnu::noinline]] void reject_end() const {
    throw Error(ErrorKind::input, fmt::format("'{}' is cut off after {} bytes", name_, stream_.position()),
                "copy or write it again");
  }

  // A byte of a pickle may stand for a list, or for a reference to all that was before.
  static uint64_t most_bytes(const InputFile& file) { return std::max(kMaxBytesOfSmall, 4 * file.bytes()); }
  [[gnu::cold]] void check_size() const {
    const uint64_t kept = pickle_.kept_bytes() + stack_.size() * sizeof(PickleValue);
    if (kept > most_) reject("it unfolds to more than four times its size");
  }

  [[gnu::always_inline]] const uint8_t* take(uint64_t count) {
    const uint8_t* bytes = stream_.take(count);
    if (bytes == nullptr) [[unlikely]]
      reject_end();
    return bytes;
  }
  uint64_t take_length(size_t bytes) { return unsigned_number(take(bytes), bytes); }
  int64_t take_number(size_t bytes) { return static_cast<int64_t>(take_length(bytes)); }

  void push(PickleValue value) { stack_.push(value); }
  void push(Kind kind, int64_t number) { stack_.push(PickleValue(kind, number)); }
  PickleValue pop() {
    if (stack_.size() <= bottom()) reject_damage();
    const PickleValue value = stack_.back();
    stack_.drop_to(stack_.size() - 1);
    return value;
  }
  /// What opcodes may take off the stack lies above the newest mark.
  size_t bottom() const { return marks_.empty() ? 0 : marks_.back(); }
  size_t pop_mark() {
    if (marks_.empty()) reject_damage();
    const size_t mark = marks_.back();
    marks_.pop_back();
    return mark;
  }
  std::span<const PickleValue> above(size_t mark) const { return stack_.above(mark); }
  void drop_above(size_t mark) { stack_.drop_to(mark); }
  PickleValue container(size_t end, Kind kind) const {
    if (end <= bottom() || !stack_[end - 1].is(kind)) reject_damage();
    return stack_[end - 1];
  }

  void push_text(size_t length_bytes) {
    const uint64_t length = take_length(length_bytes);
    push(pickle_.add_text({reinterpret_cast<const char*>(take(length)), length}));
  }
  void push_long(size_t length_bytes) {
    const uint64_t length = take_length(length_bytes);
    const uint8_t* bytes = take(length);
    if (length <= 8) return push(Kind::integer, signed_number(bytes, length));
    push(Kind::integer, (bytes[length - 1] & 0x80) != 0 ? INT64_MIN : INT64_MAX);
  }
  void push_real() {
    uint64_t bits = 0;
    for (int i = 0; i < 8; ++i) bits = bits << 8 | *take(1);
    push(Kind::real, static_cast<int64_t>(std::bit_cast<double>(bits) > 0 ? 1 : 0));  // only its sign is of use
  }
  void push_tuple(size_t mark) {
    const PickleValue tuple = pickle_.add_tuple(above(mark));
    drop_above(mark);
    push(tuple);
  }
  void push_tuple_of(size_t count) {
    if (stack_.size() < bottom() + count) reject_damage();
    push_tuple(stack_.size() - count);
  }
  void append(size_t mark) {
    if (!pickle_.append(container(mark, Kind::list), above(mark))) reject_damage();
    drop_above(mark);
  }
  void set_items(size_t mark) {
    const PickleValue dict = container(mark, Kind::dict);
    if ((stack_.size() - mark) % 2 != 0) reject_damage();
    const auto replaced = pickle_.set_items(dict, above(mark));
    if (!replaced) reject_damage();
    drop_above(mark);
    stack_[mark - 1] = *replaced;
  }
  void remember(uint64_t place) {
    if (stack_.empty() || place > pickle_.memo_.size() + kMaxMemoGap) reject_damage();
    pickle_.remember(stack_.back(), place);
  }
  void recall(uint64_t place) {
    if (place >= pickle_.memo_.size()) reject_damage();
    push(pickle_.recall(place));
  }

  void step(uint8_t opcode) {
    switch (opcode) {
      case 0x80:  // PROTO
        if (take_number(1) > 5) reject("its pickle protocol is newer than 5");
        return;
      case 0x95:  // FRAME
        take(8);
        return;
      case '(':
        return marks_.push_back(stack_.size());
      case '0':
        pop();
        return;
      case '1':
        return drop_above(pop_mark());
      case 'N':
        return push(Kind::none, 0);
      case 0x88:
        return push(Kind::boolean, 1);
      case 0x89:
        return push(Kind::boolean, 0);
      case 'J':  // BININT
        return push(Kind::integer, static_cast<int32_t>(take_number(4)));
      case 'K':
        return push(Kind::integer, take_number(1));
      case 'M':
        return push(Kind::integer, take_number(2));
      case 0x8a:
        return push_long(1);
      case 0x8b:
        return push_long(4);
      case 'G':
        return push_real();
      case 0x8c:  // SHORT_BINUNICODE; below: BINUNICODE, BINUNICODE8, and the byte strings of Python 2
      case 'U':
        return push_text(1);
      case 'X':
      case 'T':
        return push_text(4);
      case 0x8d:
        return push_text(8);
      case '}':
        return push(pickle_.add_container(Kind::dict));
      case ']':
        return push(pickle_.add_container(Kind::list));
      case ')':
        return push_tuple(stack_.size());
      case 't':
        return push_tuple(pop_mark());
      case 0x85:
      case 0x86:
      case 0x87:
        return push_tuple_of(opcode - 0x84u);
      case 'a':
        return need(1), append(stack_.size() - 1);
      case 'e':
        return append(pop_mark());
      case 's':
        return need(2), set_items(stack_.size() - 2);
      case 'u':
        return set_items(pop_mark());
      case 'q':  // BINPUT
        return remember(take_length(1));
      case 'r':
        return remember(take_length(4));
      case 0x94:
        return remember(pickle_.memo_.size());
      case 'h':  // BINGET
        return recall(take_length(1));
      case 'j':
        return recall(take_length(4));
      default:
        reject_opcode(opcode);
    }
  }

  void need(size_t count) const {
    if (stack_.size() < bottom() + count + 1) reject_damage();
  }
  [[noreturn, gnu::cold, gnu::noinline]] void reject_opcode(uint8_t opcode) const {
    if (const char* code = name_of_code(opcode)) {
      reject(fmt::format("it wants to run code ({} at byte {}), which plain data never needs", code,
                         stream_.position() - 1));
    }
    reject(fmt::format("unexpected opcode {:#04x} at byte {}", opcode, stream_.position() - 1));
  }

  static constexpr uint64_t kMaxMemoGap = 16;  // writers count up
  static constexpr uint64_t kMaxBytesOfSmall = uint64_t{64} << 20;

  Pickle& pickle_;
  ByteStream stream_;
  const std::string& name_;
  uint64_t most_;
  PickleStack stack_;
  std::vector<size_t> marks_;
};

PickleValue Pickle::read(const InputFile& file, const std::string& name) {
  return PickleMachine(*this, file, name).run();
}

}  // namespace oomdiag
