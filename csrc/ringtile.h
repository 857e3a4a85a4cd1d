// The C API of ringtile's core, one header for each subject. It works on raw pointers, shapes and strides, and knows
// nothing of PyTorch, Python or processes.
//
// Conventions
//   Shape letters  B batch, S global tokens, N local queries, K keys of this block, H query heads,
//                  G kv heads (H is a multiple of G), D head dim, Dv value head dim, W ranks,
//                  T tokens of a tile, F MLP intermediate size, V vocabulary, R runs.
//   Strides        counted in elements; the last dim always has stride 1.
//   Errors         every function that can fail returns an rt_status. rt_status_message() says what was expected, and
//                  rt_wrong_argument() of which argument.
//                  These functions check every precondition, once: RT_TOO_LARGE, RT_BAD_POINTER and
//                  RT_SHARED_MEMORY are possible everywhere. They trust that an array has the size that its params
//                  describe, and find arrays that share memory, except two with gaps that interleave.
//   Memory         nothing here allocates, prints, aborts, or keeps state between calls, but for the name of a wrong
//                  argument. A function that needs scratch takes a workspace; a *_bytes function returns its size.
//   Determinism    the same inputs give the same bits for any number of workers.
#ifndef RINGTILE_H
#define RINGTILE_H

#include "ringtile/base.h" // status, element types, threads, instruction sets

#include "ringtile/attn.h"          // attention over one block of keys
#include "ringtile/cross_entropy.h" // softmax cross entropy
#include "ringtile/glu.h"           // gated MLP
#include "ringtile/recurrence.h"    // recurrences and their convolution
#include "ringtile/sequence.h"      // runs, layouts, shard and unshard, plan, digest
#include "ringtile/weight_grad.h"   // of a linear layer

#endif // RINGTILE_H
