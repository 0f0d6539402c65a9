#include "cli/python/cache.h"

#include <fmt/format.h>
#include <pwd.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "cli/process/environment.h"
#include "cli/process/files.h"
#include "profiler/error.h"

namespace oomdiag {
namespace {

namespace fs = std::filesystem;

constexpr const char* kTakeAnother =
    "oomdiag loads code from there, so only you may be able to write it: set XDG_CACHE_HOME to such a folder; with "
    "sudo, sudo -H";

Error cannot_use(const fs::path& path, const std::string& why) {
  return {ErrorKind::environment, fmt::format("'{}' {}", path.string(), why), kTakeAnother};
}

fs::path home_folder() {
  if (fs::path home = environment("HOME"); home.is_absolute()) return home;
  const passwd* user = getpwuid(geteuid());
  fs::path home = user == nullptr || user->pw_dir == nullptr ? "" : user->pw_dir;
  if (home.is_absolute()) return home;
  throw Error(ErrorKind::environment, "there is no home folder to keep things in: HOME is not set",
              "set HOME, or XDG_CACHE_HOME to a folder of your own");
}

bool is_trusted(uid_t owner) { return owner == geteuid() || owner == 0; }

std::string name_of(uid_t owner) {
  const passwd* user = getpwuid(owner);
  return user == nullptr ? fmt::format("user {}", owner) : fmt::format("'{}'", user->pw_name);
}

// Who may rename entries of a folder above ours could put another in its place. Root does not enter a folder below another
// user's, as that of a HOME that sudo kept.
void check_above(fs::path folder) {
  for (; folder != folder.parent_path(); folder = folder.parent_path()) {
    struct stat info {};
    if (stat(folder.parent_path().c_str(), &info) != 0) continue;
    if ((info.st_mode & (S_IWOTH | S_ISVTX)) == S_IWOTH) {
      throw cannot_use(folder.parent_path(), "may be written by everybody");
    }
    if (geteuid() == 0 && info.st_uid != 0) {
      throw cannot_use(folder.parent_path(), fmt::format("belongs to {}, not to root", name_of(info.st_uid)));
    }
  }
}

/// The names below it are the owner's to choose, so each is made by itself: with the umask of the user others could write it.
void make_private(const fs::path& folder) {
  if (is_folder(folder)) return;
  if (folder != folder.parent_path()) make_private(folder.parent_path());
  if (mkdir(folder.c_str(), S_IRWXU) != 0 && errno != EEXIST) {
    throw cannot_use(folder, fmt::format("cannot be made: {}", std::strerror(errno)));
  }
}

}  // namespace

fs::path cache_folder() {
  if (const fs::path cache = environment("XDG_CACHE_HOME"); cache.is_absolute()) return cache / "oomdiag";
  return home_folder() / ".cache" / "oomdiag";
}

void check_only_own(const fs::path& path) {
  struct stat link {};
  struct stat info {};
  if (lstat(path.c_str(), &link) != 0 || stat(path.c_str(), &info) != 0) {
    throw cannot_use(path, fmt::format("cannot be read: {}", std::strerror(errno)));
  }
  for (const uid_t owner : {link.st_uid, info.st_uid}) {
    if (!is_trusted(owner)) throw cannot_use(path, fmt::format("belongs to {}", name_of(owner)));
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    throw cannot_use(path, fmt::format("may be written by others (mode {:o})", info.st_mode & 07777));
  }
}

fs::path own_folder_in_cache(const fs::path& name) {
  const fs::path cache = cache_folder();
  std::error_code ignored;
  check_above(fs::weakly_canonical(cache, ignored));
  make_private(cache / name);
  check_above(fs::weakly_canonical(cache, ignored));
  fs::path folder = cache;
  check_only_own(folder);
  for (const fs::path& part : name) check_only_own(folder /= part);
  return folder;
}

}  // namespace oomdiag
