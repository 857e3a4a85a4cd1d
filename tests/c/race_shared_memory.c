// The same under the thread sanitizer.
#include "test_shared_memory.c"
