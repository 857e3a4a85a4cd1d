#include "arrays.h"
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

static _Thread_local rt_status wrong_status;
static _Thread_local const char *wrong_names[2];

rt_status rt_wrong_pair(const char *output, const char *other) {
    const rt_status status = rt_wrong(RT_SHARED_MEMORY, output);
    wrong_names[1] = other;
    return status;
}

rt_status rt_wrong(rt_status status, const char *argument) {
    wrong_status = status;
    wrong_names[0] = argument;
    wrong_names[1] = "";
    return status;
}

const char *rt_wrong_argument(rt_status status, int number) {
    return status == wrong_status && status != RT_OK ? wrong_names[number] : "";
}
