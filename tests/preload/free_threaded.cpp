// Stands for a free-threaded Python.

extern "C" __attribute__((visibility("default"))) const char* Py_GetVersion();
const char* Py_GetVersion() { return "3.14.0 free-threading build (main, Oct  7 2025) [GCC 12.2.0]"; }
