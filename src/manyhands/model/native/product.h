/* Products with packed weights (product.c). */
#ifndef MANYHANDS_PRODUCT_H
#define MANYHANDS_PRODUCT_H
#include "team.h"
#include "tiles.h"

typedef struct {
    const bf16 *weight; /* packed; null: none */
    int64_t n, k;
} Matrix;

enum { NONE, SILU, GELU_TANH }; /* activations */

typedef struct {
    Matrix matrix;
    const float *bias; /* [n], or null */
    int64_t activation;
} Product;

/* x: m rows of k elements, `stride` elements apart. out[m, n] contiguous. With an activation panels come in pairs, and
 * out[m, n / 2] is activation(first) * second (n: a multiple of 32). On the first `threads` members of `team`, which only
 * one thread may call. `then`: the product that is likely to come next, or none; its weights are fetched, never read.
 * 0, or 1 if there was no memory for a copy of some rows. */
int product_run(Team *team, int64_t threads, const Product *product, const bf16 *x, int64_t stride, int64_t m, bf16 *out,
                Matrix then);
#endif
