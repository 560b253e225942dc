/* An attention module from end to end (module.c). */
#ifndef MANYHANDS_MODULE_H
#define MANYHANDS_MODULE_H
#include "attend.h"
#include "product.h"

/* As attend.py has it. */
typedef struct {
    Kind kind;
    Front front;
    Product in, out;
} Module;

/* x[num_rows, hidden], `stride` elements apart -> out (contiguous) likewise; the segments' caches are written. scratch: for each
 * row what the product in and attention give; zero if some rows belong to no segment. `then`: as in product_run. As tiles_attend
 * returns. */
int module_run(Team *team, int64_t threads, int64_t threads_in, int64_t threads_out, const Module *module, const Segment *segments,
               int64_t num_segments, const bf16 *x, int64_t stride, int64_t num_rows, Turns turns, bf16 *scratch, bf16 *out,
               Matrix then);
#endif
