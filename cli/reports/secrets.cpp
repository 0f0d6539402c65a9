#include "cli/reports/secrets.h"

#include <pwd.h>
#include <unistd.h>

#include <array>

#include "cli/process/environment.h"

namespace oomdiag {

std::vector<std::string> find_secrets() {
  std::vector<std::string> secrets;
  const auto add = [&](const std::string& secret) {
    constexpr size_t kShortest = 3;
    if (secret.size() >= kShortest && secret != "root") secrets.push_back(secret);
  };
  for (const char* name : {"USER", "LOGNAME", "HOSTNAME"}) add(environment(name));
  if (const passwd* const user = getpwuid(geteuid()); user != nullptr) add(user->pw_name);
  std::array<char, 256> host{};
  if (gethostname(host.data(), host.size() - 1) == 0) add(host.data());
  return secrets;
}

}  // namespace oomdiag
