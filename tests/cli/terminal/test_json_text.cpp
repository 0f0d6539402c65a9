#include <nlohmann/json.hpp>

#include "cli/terminal/json_text.h"
#include "tests/catch.h"

using namespace oomdiag;

TEST_CASE("bytes that are no UTF-8 are replaced and throw nothing", "[cli]") {
  const nlohmann::json json = {{"name",
                                "a\xff"
                                "b"}};
  CHECK(to_text(json, kCompact) ==
        "{\"name\":\"a\xef\xbf\xbd"
        "b\"}");
  CHECK(to_text(nlohmann::ordered_json(json)) ==
        "{\n  \"name\": \"a\xef\xbf\xbd"
        "b\"\n}");
}
