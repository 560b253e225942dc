/* Decoder layers one after the other: norms, attention, a gated block, and what is added to what they were given. */
#include "module.h"

#include <string.h>

/* Root mean square norm of a row; weight null: none. */
typedef struct {
    const float *weight;
    float epsilon;
} Norm;

/* As stack.py has it. */
typedef struct {
    Module attention;
    Product gated, down;
    Norm before_attention, after_attention, before_block, after_block;
} Decoder;

/* The threads of each product of a layer. */
typedef struct {
    int64_t in, out, gated, down;
} Threads;

/* `norm` of m rows of n numbers: they themselves where there is none, else in `out`. */
static const bf16 *normed(const Norm *norm, const bf16 *x, bf16 *out, int64_t m, int64_t n)
{
    if (!norm->weight)
        return x;
    tiles_norm(x, n, norm->weight, norm->epsilon, out, m, n);
    return out;
}

/* x += y, each sum rounded once. */
static void add(bf16 *x, const bf16 *y, int64_t count)
{
    for (int64_t i = 0; i < count; i += SIDE)
        put(x + i, count - i, _mm512_add_ps(get(x + i, count - i), get(y + i, count - i)));
}

/* x[m, n] -> out[m, n], which may be x, through `num_layers` of layers, on up to `threads` threads; the segments' caches are
 * written. cos, sin: of every position, `turn_stride` apart. Every row belongs to a segment. scratch, m rows: 2 n numbers and the
 * most that a layer takes inside. `then`: as in product_run. As tiles_attend returns. */
int tiles_stack(Team *team, int64_t threads, const Threads *counts, const Decoder *const *layers, int64_t num_layers,
                const Segment *segments, int64_t num_segments, const bf16 *x, int64_t m, int64_t n, const bf16 *cos,
                const bf16 *sin, int64_t turn_stride, bf16 *scratch, bf16 *out, const bf16 *then, int64_t then_n, int64_t then_k)
{
    bf16 *result = scratch + m * n, *inner = result + m * n;
    if (out != x)
        memcpy(out, x, (size_t)(m * n) * sizeof(bf16));
    Turns turns = {cos, sin, turn_stride, segments, num_segments};
    for (int64_t i = 0; i < num_layers; i++) {
        const Decoder *layer = layers[i];
        const Matrix *first = &layer->gated.matrix, *down = &layer->down.matrix;
        Matrix next = i + 1 < num_layers ? layers[i + 1]->attention.in.matrix : (Matrix){then, then_n, then_k};
        const bf16 *given = normed(&layer->before_attention, out, scratch, m, n);
        int failed = module_run(team, threads, counts[i].in, counts[i].out, &layer->attention, segments, num_segments, given, n, m,
                                turns, inner, result, *first);
        if (failed)
            return failed;
        add(out, normed(&layer->after_attention, result, result, m, n), m * n);
        given = normed(&layer->before_block, out, scratch, m, n);
        if (product_run(team, counts[i].gated, &layer->gated, given, n, m, inner, *down) ||
            product_run(team, counts[i].down, &layer->down, inner, down->k, m, result, next))
            return 1;
        add(out, normed(&layer->after_block, result, result, m, n), m * n);
    }
    tiles_team_rest(team);
    return 0;
}
