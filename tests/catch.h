#pragma once

// Catch2 v3, or v2 where the distribution has only that.
#if __has_include(<catch2/catch_all.hpp>)
#include <catch2/catch_all.hpp>
#define OOMDIAG_CATCH_V3 1
#else
#include <catch2/catch.hpp>
#endif
