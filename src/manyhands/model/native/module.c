/* An attention module from end to end: a product, what comes before attention, attention, a product. */
#include "module.h"

int module_run(Team *team, int64_t threads, int64_t threads_in, int64_t threads_out, const Module *module, const Segment *segments,
               int64_t num_segments, const bf16 *x, int64_t stride, int64_t num_rows, Turns turns, bf16 *scratch, bf16 *out,
               Matrix then)
{
    const Kind *kind = &module->kind;
    int64_t queries = kind->heads * kind->key_dim, keys = kind->key_heads * kind->key_dim, row = module->in.matrix.n;
    bf16 *attended = scratch + num_rows * row;
    if (product_run(team, threads_in, &module->in, x, stride, num_rows, scratch, module->out.matrix))
        return 1;
    front_run(team, threads, kind, &module->front, scratch, num_rows, turns);
    int failed = tiles_attend(team, threads, kind, segments, num_segments, num_rows, scratch, kind->key_dim, row,
                              scratch + queries, kind->key_dim, row, scratch + queries + keys, kind->value_dim, row,
                              module->front.sinks, attended);
    if (failed)
        return failed;
    return product_run(team, threads_out, &module->out, attended, kind->heads * kind->value_dim, num_rows, out, then);
}

/* As module_run; cos, sin: of every row, `turn_stride` apart. */
int tiles_module(Team *team, int64_t threads, int64_t threads_in, int64_t threads_out, const Module *module,
                 const Segment *segments, int64_t num_segments, const bf16 *x, int64_t stride, int64_t num_rows, const bf16 *cos,
                 const bf16 *sin, int64_t turn_stride, bf16 *scratch, bf16 *out, const bf16 *then, int64_t then_n, int64_t then_k)
{
    return module_run(team, threads, threads_in, threads_out, module, segments, num_segments, x, stride, num_rows,
                      (Turns){cos, sin, turn_stride, 0, 0}, scratch, out, (Matrix){then, then_n, then_k});
}
