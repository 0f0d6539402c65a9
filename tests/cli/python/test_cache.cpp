#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>

#include "cli/python/cache.h"
#include "profiler/error.h"
#include "tests/catch.h"
#include "tests/cli/test_folder.h"

using namespace oomdiag;
namespace fs = std::filesystem;

namespace {

/// Sets a variable, or takes it away, for one test.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    value == nullptr ? unsetenv(name) : setenv(name, value, 1);
  }
  ~Variable() { before_.empty() ? unsetenv(name_) : setenv(name_, before_.c_str(), 1); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
  std::string before_;
};

std::string error_of(const fs::path& name) {
  try {
    own_folder_in_cache(name);
  } catch (const Error& error) {
    return error.hint().empty() ? "there is no hint" : error.what();
  }
  return {};
}

bool contains(const std::string& text, const char* part) { return text.find(part) != std::string::npos; }

constexpr uid_t kSomebody = 65534;

}  // namespace

TEST_CASE("folders of the cache are made for the user alone, whatever the umask says", "[cli][cache]") {
  const TestFolder folder;
  const Variable cache("XDG_CACHE_HOME", (folder.path() / "cache").c_str());
  const mode_t before = umask(0);
  const fs::path made = own_folder_in_cache("recorders");
  umask(before);

  CHECK(made == folder.path() / "cache/oomdiag/recorders");
  for (const fs::path& path : {made, made.parent_path()}) {
    CHECK(fs::status(path).permissions() == fs::perms::owner_all);
  }
}

TEST_CASE("a folder of the cache that others can write is rejected", "[cli][cache]") {
  const TestFolder folder;
  const Variable cache("XDG_CACHE_HOME", folder.path().c_str());
  const fs::path recorders = own_folder_in_cache("recorders");
  for (const fs::path& path : {recorders, recorders.parent_path()}) {
    for (const fs::perms others : {fs::perms::group_write, fs::perms::others_write}) {
      fs::permissions(path, others, fs::perm_options::add);
      CHECK(contains(error_of("recorders"), "may be written by"));
      fs::permissions(path, fs::perms::owner_all);
    }
  }
  CHECK(error_of("recorders").empty());
}

TEST_CASE("a folder above in which everybody can put another in its place is rejected, unless it is sticky",
          "[cli][cache]") {
  const TestFolder folder;
  const Variable cache("XDG_CACHE_HOME", folder.path().c_str());
  fs::permissions(folder.path(), fs::perms::all);
  CHECK(contains(error_of("recorders"), "may be written by everybody"));
  CHECK_FALSE(fs::exists(folder.path() / "oomdiag"));

  fs::permissions(folder.path(), fs::perms::all | fs::perms::sticky_bit);
  CHECK(error_of("recorders").empty());
}

TEST_CASE("a cache of another user is rejected, and root makes none in a home that is not root's", "[cli][cache]") {
  if (geteuid() != 0) return;  // only root can give a folder away
  const TestFolder folder;
  const Variable cache("XDG_CACHE_HOME", folder.path().c_str());
  const fs::path recorders = own_folder_in_cache("recorders");
  REQUIRE(chown(recorders.c_str(), kSomebody, kSomebody) == 0);
  CHECK(contains(error_of("recorders"), "recorders' belongs to"));
  REQUIRE(chown(recorders.c_str(), 0, 0) == 0);

  const Variable none("XDG_CACHE_HOME", nullptr);
  const fs::path home = folder.path() / "home";
  fs::create_directory(home);
  const Variable kept("HOME", home.c_str());
  REQUIRE(chown(home.c_str(), kSomebody, kSomebody) == 0);
  CHECK(contains(error_of("recorders"), "not to root"));
  CHECK_FALSE(fs::exists(home / ".cache"));
}

TEST_CASE("a link in the cache that another user made is rejected", "[cli][cache]") {
  if (geteuid() != 0) return;
  const TestFolder folder;
  const Variable cache("XDG_CACHE_HOME", folder.path().c_str());
  const fs::path place = own_folder_in_cache("recorders").parent_path();
  fs::create_symlink(place / "recorders", place / "virtual");
  CHECK(error_of("virtual").empty());
  REQUIRE(lchown((place / "virtual").c_str(), kSomebody, kSomebody) == 0);
  CHECK(contains(error_of("virtual"), "belongs to"));
}

TEST_CASE("without HOME the cache is in the home that the password database has", "[cli][cache]") {
  const passwd* user = getpwuid(geteuid());
  if (user == nullptr) return;
  const fs::path home = user->pw_dir;
  const Variable cache("XDG_CACHE_HOME", nullptr);
  const Variable unset("HOME", nullptr);
  CHECK(cache_folder() == home / ".cache/oomdiag");
}
