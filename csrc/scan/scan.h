// The preconditions of recurrences and convolutions.
#ifndef RINGTILE_SCAN_SCAN_H
#define RINGTILE_SCAN_SCAN_H

#include "../ringtile.h"

// What the size of the workspace depends on; the entry points check all of it once, with the arrays.
rt_status rt_scan_check_sizes(const rt_scan_params *p);
rt_status rt_selective_check_sizes(const rt_selective_params *p);

rt_status rt_scan_check(const rt_scan_params *p, bool backward);
rt_status rt_selective_check(const rt_selective_params *p, bool backward);
rt_status rt_conv_check(const rt_conv_params *p, bool backward);

#endif // RINGTILE_SCAN_SCAN_H
