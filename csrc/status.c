#include "ringtile.h"

const char *rt_status_message(rt_status status) {
    switch (status) {
#define RT_STATUS_CASE(name, text)                                                                                     \
    case name:                                                                                                         \
        return text;
        RT_STATUS_LIST(RT_STATUS_CASE)
#undef RT_STATUS_CASE
    }
    return "unknown status";
}
