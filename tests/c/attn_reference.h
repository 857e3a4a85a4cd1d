// Attention straight from the formula, in f64: the oracle of the C tests.
#ifndef RINGTILE_TESTS_ATTN_REFERENCE_H
#define RINGTILE_TESTS_ATTN_REFERENCE_H

#include "../../csrc/ringtile.h"

// Forward and backward, one query and one key at a time. They need no workspace and run on the calling thread.
// Arguments and errors are those of rt_attn_fwd and rt_attn_bwd.
rt_status rt_attn_fwd_reference(const rt_attn_fwd_params *p);
rt_status rt_attn_bwd_reference(const rt_attn_bwd_params *p);

#endif // RINGTILE_TESTS_ATTN_REFERENCE_H
