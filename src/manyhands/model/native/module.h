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

/* x[num_rows, hidden], `stride` elements apart -> out (contiguous) likewise; the segments' caches are written. cos, sin: as in
 * tiles_front. scratch: for each row what the product in and attention give; zero if some rows belong to no segment. `then`: as in product_run. As
 * tiles_attend returns. */
int tiles_module(Team *team, int64_t threads, int64_t threads_in, int64_t threads_out, const Module *module,
                 const Segment *segments, int64_t num_segments, const bf16 *x, int64_t stride, int64_t num_rows, const bf16 *cos,
                 const bf16 *sin, int64_t turn_stride, bf16 *scratch, bf16 *out, const bf16 *then, int64_t then_n, int64_t then_k);
#endif
