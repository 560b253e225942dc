/* Residual streams: several rows in one, collapsed before attention or experts and spread behind them. */
#include "compressed.h"
#include "ngrams.h"

#include <string.h>

enum { SIGMOIDS = 6, POWERS = 7, PIECE = 256 }; /* functions of `apply`; columns at once */

/* values / (their sum, from zero in order, + epsilon): `count` of them, `step` apart. */
static void share(float *values, int64_t count, int64_t step, float epsilon)
{
    float sum = 0;
    for (int64_t i = 0; i < count; i++)
        sum = sum + values[i * step];
    for (int64_t i = 0; i < count; i++)
        values[i * step] = values[i * step] / (sum + epsilon);
}

/* Each of `count` runs of n values becomes its softmax. */
static void soften_runs(const Plan *plan, float *values, int64_t count, int64_t n)
{
    for (int64_t i = 0; i < count; i++) {
        float top = values[i * n];
        for (int64_t k = 1; k < n; k++)
            top = values[i * n + k] > top ? values[i * n + k] : top;
        for (int64_t k = 0; k < n; k++)
            values[i * n + k] = values[i * n + k] - top;
    }
    plan->kernels->apply(POWERS, 1, values, values, count * n);
    for (int64_t i = 0; i < count; i++)
        share(values + i * n, n, 1, 0);
}

/* Rows softened, then columns and rows shared in turns. */
static void balance(const Plan *plan, float *comb, int64_t n, float epsilon, int64_t iterations)
{
    soften_runs(plan, comb, n, n);
    for (int64_t i = 0; i < n * n; i++)
        comb[i] = comb[i] + epsilon;
    for (int64_t turn = 0; turn < iterations; turn++) {
        for (int64_t i = 0; turn && i < n; i++)
            share(comb + i * n, n, 1, epsilon);
        for (int64_t k = 0; k < n; k++)
            share(comb + k, n, n, epsilon);
    }
}

/* source, mixes, target, keeps (1: all; 2: no comb), streams, iterations; epsilon of the norm, epsilon, magnitude; base, scales. What comes of
 * the mixes takes their place. */
void collapse_row(const Plan *plan, const Op *op, int64_t row)
{
    const Kernels *kernels = plan->kernels;
    const int64_t *n = op->numbers;
    const float *x = row_of(plan, n[0], row), *base = op->tensors[0].data, *scales = op->tensors[1].data;
    int64_t streams = n[4], width = plan->widths[n[2]], count = plan->widths[n[1]];
    float by = kernels->inverse(x, streams * width, (float)op->reals[0]), epsilon = (float)op->reals[1];
    float *values = row_of(plan, n[1], row), *out = row_of(plan, n[2], row);
    for (int64_t i = 0; i < count; i++) {
        float value = values[i] * by, scaled = value * scales[i < streams ? 0 : i < 2 * streams ? 1 : 2];
        values[i] = scaled + base[i];
    }
    kernels->apply(SIGMOIDS, 1, values, values, at_most(count, 2 * streams));
    for (int64_t i = 0; i < streams; i++) {
        values[i] = values[i] + epsilon;
        if (i == 0)
            kernels->multiply(x, values[i], out, width);
        else
            kernels->add(out, x + i * width, values[i], out, width, 0);
    }
    if (!n[3])
        return;
    for (int64_t i = streams; i < 2 * streams; i++)
        values[i] = n[3] == 2 ? values[i] * (float)op->reals[2] + epsilon : 2 * values[i];
    if (n[3] == 1)
        balance(plan, values + 2 * streams, streams, epsilon, n[5]);
}

/* source, kept, target, is_last, streams; without comb each stream goes on as it is */
void spread_row(const Plan *plan, const Op *op, int64_t row)
{
    const Kernels *kernels = plan->kernels;
    const int64_t *n = op->numbers;
    int64_t streams = n[4], width = plan->widths[n[0]];
    const float *source = row_of(plan, n[0], row), *kept = row_of(plan, n[1], row);
    float *x = row_of(plan, n[2], row), room[MOST_STREAMS][PIECE];
    int64_t is_apart = plan->widths[n[1]] == 2 * streams;
    for (int64_t k = 0; is_apart && k < streams; k++)
        kernels->add(x + k * width, source, kept[streams + k], x + k * width, width, n[3] && plan->rounds);
    if (is_apart)
        return;
    for (int64_t at = 0; at < width; at += PIECE) {
        int64_t count = at_most(width - at, PIECE);
        for (int64_t k = 0; k < streams; k++) {
            kernels->multiply(source + at, kept[streams + k], room[k], count);
            for (int64_t j = 0; j < streams; j++)
                kernels->add(room[k], x + j * width + at, kept[(2 + j) * streams + k], room[k], count,
                             n[3] && plan->rounds && j + 1 == streams);
        }
        for (int64_t k = 0; k < streams; k++)
            memcpy(x + k * width + at, room[k], (size_t)count * 4);
    }
}

int check_attend_streams(const Plan *plan, const Op *op) /* source, target, streams; epsilon; what normed streams are multiplied by */
{
    const int64_t *n = op->numbers, *w = plan->widths;
    if (n[0] < 0 || n[0] >= plan->num_registers || n[1] < 0 || n[1] >= plan->num_registers || n[0] == n[1])
        return BAD_REGISTER;
    if (n[2] < 1 || n[2] > MOST_ATTENDED || n[2] * w[n[1]] > w[n[0]])
        return BAD_SHAPE;
    return op->tensors[0].data && op->tensors[0].bytes == w[n[1]] * 4 ? DONE : BAD_TENSOR;
}

void attend_streams_row(const Plan *plan, const Op *op, int64_t row)
{
    const Kernels *kernels = plan->kernels;
    const int64_t *n = op->numbers;
    int64_t width = plan->widths[n[1]];
    const float *x = row_of(plan, n[0], row);
    float *out = row_of(plan, n[1], row), weights[MOST_ATTENDED];
    for (int64_t i = 0; i < n[2]; i++) {
        float size = kernels->inverse(x + i * width, width, (float)op->reals[0]);
        weights[i] = lane_products(x + i * width, op->tensors[0].data, width) * size;
    }
    soften_runs(plan, weights, 1, n[2]);
    kernels->multiply(x, weights[0], out, width);
    for (int64_t i = 1; i < n[2]; i++)
        kernels->add(out, x + i * width, weights[i], out, width, 0);
}
