#include "extension/virtual_device/torch/operators.h"

#include <algorithm>
#include <span>
#include <string_view>
#include <unordered_map>

namespace oomdiag {
namespace {

using Argument = OperatorRules::Argument;

using Names = std::span<const std::string_view>;

bool is_one_of(Names names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

constexpr std::string_view kCopies[] = {"aten::copy_", "aten::cat", "aten::clone", "aten::_to_copy"};
constexpr std::string_view kOverwriting[] = {"aten::copy_", "aten::fill_", "aten::zero_"};

constexpr std::string_view kAnswering[] = {
    "aten::all",         "aten::any",         "aten::argmax",     "aten::argmin",      "aten::eq",
    "aten::equal",       "aten::ge",          "aten::gt",         "aten::isfinite",    "aten::isin",
    "aten::isinf",       "aten::isnan",       "aten::isneginf",   "aten::isposinf",    "aten::le",
    "aten::logical_and", "aten::logical_not", "aten::logical_or", "aten::logical_xor", "aten::lt",
    "aten::ne",          "aten::signbit"};

/// Of native_functions.yaml, beside those that it tags as pointwise.
constexpr std::string_view kComputable[] = {"aten::__iand__",
                                            "aten::__ilshift__",
                                            "aten::__ior__",
                                            "aten::__irshift__",
                                            "aten::__ixor__",
                                            "aten::_foreach_add_",
                                            "aten::_log_softmax",
                                            "aten::_softmax",
                                            "aten::_unique",
                                            "aten::_unique2",
                                            "aten::all",
                                            "aten::amax",
                                            "aten::amin",
                                            "aten::aminmax",
                                            "aten::any",
                                            "aten::arange",
                                            "aten::argmax",
                                            "aten::argmin",
                                            "aten::argsort",
                                            "aten::bincount",
                                            "aten::bucketize",
                                            "aten::cat",
                                            "aten::clone",
                                            "aten::copy_",
                                            "aten::count_nonzero",
                                            "aten::cummax",
                                            "aten::cummin",
                                            "aten::cumprod",
                                            "aten::cumsum",
                                            "aten::equal",
                                            "aten::eye",
                                            "aten::fill_",
                                            "aten::flip",
                                            "aten::gather",
                                            "aten::histc",
                                            "aten::index",
                                            "aten::index_add_",
                                            "aten::index_fill_",
                                            "aten::index_put_",
                                            "aten::index_select",
                                            "aten::isin",
                                            "aten::kthvalue",
                                            "aten::linalg_vector_norm",
                                            "aten::linspace",
                                            "aten::logsumexp",
                                            "aten::masked_fill",
                                            "aten::masked_fill_",
                                            "aten::masked_scatter",
                                            "aten::masked_select",
                                            "aten::max",
                                            "aten::mean",
                                            "aten::median",
                                            "aten::min",
                                            "aten::nonzero",
                                            "aten::prod",
                                            "aten::repeat",
                                            "aten::repeat_interleave",
                                            "aten::roll",
                                            "aten::scatter_",
                                            "aten::scatter_add",
                                            "aten::scatter_add_",
                                            "aten::searchsorted",
                                            "aten::sort",
                                            "aten::stack",
                                            "aten::std",
                                            "aten::sum",
                                            "aten::topk",
                                            "aten::tril",
                                            "aten::triu",
                                            "aten::unique_consecutive",
                                            "aten::unique_dim",
                                            "aten::zero_",
                                            "aten::_to_copy"};

/// Beside those that are pointwise.
constexpr std::string_view kOnUniformValues[] = {
    "aten::__iand__",      "aten::__ior__", "aten::__ixor__", "aten::_to_copy",    "aten::all",
    "aten::amax",          "aten::amin",    "aten::any",      "aten::clone",       "aten::copy_",
    "aten::count_nonzero", "aten::equal",   "aten::fill_",    "aten::masked_fill", "aten::masked_fill_",
    "aten::max",           "aten::mean",    "aten::min",      "aten::sum",         "aten::zero_"};
constexpr std::string_view kSumming[] = {"aten::sum", "aten::count_nonzero"};
constexpr std::string_view kComparing[] = {"aten::eq", "aten::equal", "aten::ne"};

/// Like aten::nonzero they ask the GPU for one number, how long their first result is. Of what is not known it is 1: where
/// there are numbers, some are distinct.
constexpr std::string_view kDistinct[] = {"aten::unique_consecutive", "aten::unique_dim"};
constexpr std::string_view kDistinctOrTrues[] = {"aten::_unique", "aten::_unique2"};

constexpr std::string_view kValidating[] = {"aten::cov", "aten::istft"};

/// They write sizes, names or streams, which the schema does not distinguish from contents.
constexpr std::string_view kMetadata[] = {
    "aten::resize_",     "aten::resize_as_",    "aten::_resize_output_", "aten::set_",
    "aten::set_data",    "aten::detach_",       "aten::rename_",         "aten::requires_grad_",
    "aten::retain_grad", "aten::squeeze_",      "aten::unsqueeze_",      "aten::transpose_",
    "aten::t_",          "aten::swapaxes_",     "aten::swapdims_",       "aten::as_strided_",
    "aten::view_as_",    "aten::record_stream", "aten::_coalesced_"};

bool is_view(const c10::FunctionSchema& schema) {
  return std::any_of(schema.returns().begin(), schema.returns().end(), [](const c10::Argument& result) {
    return result.alias_info() && !result.alias_info()->isWrite();
  });
}

Argument kind_of(const c10::Argument& argument, std::string_view operator_name) {
  if (!argument.alias_info() || !argument.alias_info()->isWrite()) return Argument::read;
  return argument.is_out() || is_one_of(kOverwriting, operator_name) ? Argument::overwritten : Argument::written;
}

OperatorRules make_rules(const at::RecordFunction& call) {
  OperatorRules rules;
  const auto full_name = call.operator_name();
  if (!full_name) return rules;
  const std::string_view name = full_name->name;
  const auto handle = c10::Dispatcher::singleton().findSchema(*full_name);
  rules.is_foreign = !name.starts_with("aten::") && !name.starts_with("prims::");
  if (!handle || is_one_of(kMetadata, name) || is_view(handle->schema())) return rules;
  rules.handle = handle;
  for (const c10::Argument& argument : handle->schema().arguments()) {
    rules.arguments.push_back(kind_of(argument, name));
    rules.changes_contents |= rules.arguments.back() != Argument::read;
  }
  if (rules.is_foreign) return rules;
  rules.has_kernels = handle->hasKernelForDispatchKey(c10::DispatchKey::CUDA);
  rules.answers = is_one_of(kAnswering, name) || is_one_of(kDistinct, name) || is_one_of(kDistinctOrTrues, name);
  rules.copies = is_one_of(kCopies, name);
  rules.is_computable = (handle->hasTag(at::Tag::pointwise) || is_one_of(kComputable, name)) &&
                        !handle->hasTag(at::Tag::nondeterministic_seeded);
  rules.takes_uniform_values =
      rules.is_computable && (handle->hasTag(at::Tag::pointwise) || is_one_of(kOnUniformValues, name));
  rules.sums = is_one_of(kSumming, name);
  rules.compares = is_one_of(kComparing, name);
  rules.validates = is_one_of(kValidating, name);
  if (name == "aten::nonzero") rules.asks = OperatorRules::Asks::nonzero;
  if (name == "aten::equal") rules.asks = OperatorRules::Asks::truth;
  if (is_one_of(kDistinct, name)) rules.asks = OperatorRules::Asks::distinct;
  if (is_one_of(kDistinctOrTrues, name)) rules.asks = OperatorRules::Asks::distinct_or_trues;
  return rules;
}

}  // namespace

OperatorRules& find_rules(const at::RecordFunction& call) {
  // By the address of the name, which belongs to the schema of one overload. Leaked: operators may run while thread_local objects
  // are destroyed (fork_and_exit.h).
  static thread_local auto& known = *new std::unordered_map<const char*, OperatorRules>;
  const auto [entry, is_new] = known.try_emplace(call.name());
  if (is_new) entry->second = make_rules(call);
  return entry->second;
}

}  // namespace oomdiag
