// The names in PTX. Only the beginnings of directives are looked at:
//
//   .visible .entry NAME (…) {…}
//   .visible .global .align 4 .v2 .b32 NAME[3][4] = {…};       .const and .attribute(.managed) alike; .extern is another's
#include <algorithm>

#include "extension/virtual_device/driver/code.h"
#include "extension/virtual_device/driver/ptx_types.h"

namespace oomdiag {
namespace {

bool is_name_part(char letter) {
  return std::isalnum(static_cast<unsigned char>(letter)) != 0 || letter == '_' || letter == '$' || letter == '.' ||
         letter == '%';
}

/// Words and single signs of the text, without its comments and strings.
class Words {
 public:
  explicit Words(std::string_view text) : text_(text) {}

  std::string_view next() {
    skip_gaps();
    if (at_ == text_.size()) return {};
    const size_t begin = at_++;
    if (!is_name_part(text_[begin])) return text_.substr(begin, 1);
    while (at_ < text_.size() && is_name_part(text_[at_])) ++at_;
    return text_.substr(begin, at_ - begin);
  }

 private:
  void skip_gaps() {
    while (at_ < text_.size()) {
      const std::string_view rest = text_.substr(at_);
      if (rest.starts_with("//")) {
        at_ = std::min(text_.find('\n', at_), text_.size());
      } else if (rest.starts_with("/*")) {
        const size_t end = text_.find("*/", at_);
        at_ = end == text_.npos ? text_.size() : end + 2;
      } else if (rest.starts_with('"')) {
        at_ = std::min(text_.find('"', at_ + 1), text_.size() - 1) + 1;
      } else if (std::isspace(static_cast<unsigned char>(rest[0])) != 0) {
        ++at_;
      } else {
        return;
      }
    }
  }

  std::string_view text_;
  size_t at_ = 0;
};

int64_t number_of(std::string_view word) { return std::strtoll(std::string(word).c_str(), nullptr, 0); }

/// Reads a variable's declaration to its end, from the word behind .global or .const.
void read_variable(Words& words, CodeNames& names, bool is_external) {
  std::string name;
  int64_t bytes = 0;
  std::string_view word = words.next();
  for (; !word.empty() && word != "=" && word != ";"; word = words.next()) {
    if (word == ".align") {
      words.next();
    } else if (word == "(") {  // of .attribute
      while (!word.empty() && word != ")") word = words.next();
    } else if (word == ".v2" || word == ".v4") {
      bytes = word == ".v2" ? 2 : 4;
    } else if (const int64_t of_type = bytes_of_ptx_type(word); of_type > 0) {
      bytes = std::max<int64_t>(bytes, 1) * of_type;
    } else if (word == "[") {
      word = words.next();
      if (word != "]") bytes *= number_of(word);
    } else if (!word.starts_with('.') && word != "]") {
      name = word;
    }
  }
  while (!word.empty() && word != ";") word = words.next();
  if (!is_external && !name.empty()) names.globals[name] = bytes;
}

}  // namespace

bool begins_as_ptx(std::string_view text) { return Words(text).next() == ".version"; }

CodeNames read_ptx(std::string_view text) {
  CodeNames names;
  Words words(text);
  bool is_external = false;
  for (std::string_view word = words.next(); !word.empty(); word = words.next()) {
    if (word == ".entry") {
      names.kernels.emplace(words.next());
    } else if (word == ".global" || word == ".const") {
      read_variable(words, names, is_external);
    }
    if (word == ".extern") is_external = true;
    if (word == ";" || word == "{" || word == "}") is_external = false;
    if (word == ".global" || word == ".const" || word == ".entry") is_external = false;
  }
  return names;
}

}  // namespace oomdiag
