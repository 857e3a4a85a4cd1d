// The recurrences, compiled once per instruction set for its math type (vec.h).
#include "backward.h"
