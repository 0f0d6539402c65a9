#include <algorithm>
#include <nlohmann/json.hpp>
#include <string_view>

#include "profiler/report/json/json.h"
#include "profiler/report/report.h"
#include "profiler/report/words/json_text.h"
#include "profiler/report/words/place_text.h"

// By way of its JSON: so no text of a report can be forgotten, also not one that is added later.

namespace oomdiag {
namespace {

using Json = nlohmann::ordered_json;

bool is_of_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '_'; }

/// The last part of each path: what begins with "/", "~", "./" or "../", perhaps behind a quote, a bracket, "=" or ":".
std::string shorten_paths(const std::string& text) {
  std::string result;
  for (size_t at = 0; at < text.size();) {
    const size_t end = std::min(text.find_first_of(" \n\t,;", at), text.size());
    std::string_view word(text.data() + at, end - at);
    const size_t slash = word.find('/');
    const std::string_view before = word.substr(0, std::min(slash, word.size()));
    const size_t begin = before.find_last_of("=:\"'([{") + 1;  // npos + 1 = 0
    const std::string_view first = before.substr(begin);
    const bool is_path = slash != word.npos && (first.empty() || first.front() == '~' || first == "." || first == "..");
    if (is_path) result.append(word.substr(0, begin)).append(word.substr(word.rfind('/') + 1));
    if (!is_path) result.append(word);
    if (end < text.size()) result += text[end];
    at = end + 1;
  }
  return result;
}

std::string hide(std::string text, const std::string& secret) {
  for (size_t at = 0; (at = text.find(secret, at)) != text.npos;) {
    const size_t end = at + secret.size();
    const bool whole = (at == 0 || !is_of_word(text[at - 1])) && (end == text.size() || !is_of_word(text[end]));
    if (whole) text.replace(at, secret.size(), "...");
    at += whole ? 3 : 1;
  }
  return text;
}

void redact(Json& json, const std::vector<std::string>& secrets) {
  if (json.is_structured()) {
    for (Json& element : json) redact(element, secrets);
  }
  if (!json.is_string()) return;
  std::string text = shorten_paths(json.get<std::string>());
  for (const std::string& secret : secrets) text = hide(std::move(text), secret);
  json = text;
}

}  // namespace

Report redact(const Report& report, const std::vector<std::string>& secrets) {
  Json json = Json::parse(to_json(report, -1));
  const std::string schema = json["schema"];
  redact(json, secrets);
  json["schema"] = schema;
  Report redacted = from_json(json_text(json));
  redacted.snapshot = report.snapshot;
  redacted.folder = short_source(report.folder);
  redacted.command = short_source(report.command.substr(0, report.command.find(' ')));
  return redacted;
}

}  // namespace oomdiag
