/* What Python writes down a second time (engine/layout.py): sizes and offsets of structs in bytes, limits, kinds of operations,
 * types of numbers. */
#include "plan.h"
#include <stddef.h>
#include <string.h>

/* Writes them to `out`, if it has room for all; gives their number. */
EXPORT int64_t mh_layout(int64_t *out, int64_t room)
{
    static const int64_t found[] = {
        sizeof(Tensor),
        offsetof(Tensor, data),
        offsetof(Tensor, bytes),
        sizeof(Segment),
        offsetof(Segment, blocks),
        offsetof(Segment, num_blocks),
        offsetof(Segment, start),
        offsetof(Segment, row),
        offsetof(Segment, count),
        offsetof(Segment, states),
        offsetof(Segment, now),
        offsetof(Segment, num_states),
        offsetof(Segment, from),
        MAX_NUMBERS,
        MAX_REALS,
        MAX_TENSORS,
        KINDS,
        STATE_BLOCK,
    };
    int64_t count = sizeof found / sizeof *found;
    if (room >= count)
        memcpy(out, found, sizeof found);
    return count;
}

#define TEXT(...) #__VA_ARGS__
#define TEXT_OF(names) TEXT(names)
/* The names of the types, and of the kinds of operations, by number. */
EXPORT const char *mh_types(void) { return TEXT_OF(TYPE_NAMES); }
EXPORT const char *mh_kinds(void) { return TEXT_OF(KIND_NAMES); }
