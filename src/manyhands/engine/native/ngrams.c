/* Embeddings of the last tokens of a row's session, and values that streams let in (program/row_ops.py). Plain C, but for what kernels round. */
#include "ngrams.h"

#include <string.h>

enum { SIGMOIDS = 6 }; /* a function of `apply` */

static int64_t heads_of(const Op *op) { return (op->numbers[2] - 1) * op->numbers[3]; }

/* Whether each part of the table, where it is stored, has `rows` rows of `width` numbers of its type (stored_row_bytes). */
static int has_parts(Tensor parts, Tensor types, int64_t rows, int64_t width)
{
    int64_t count = parts.bytes / (int64_t)sizeof(Tensor);
    if (!parts.data || !types.data || !is_count(count, MAX_WIDTH) || parts.bytes % (int64_t)sizeof(Tensor) || types.bytes != 8 * count)
        return 0;
    for (int64_t i = 0; i < count; i++) {
        const Tensor *part = (const Tensor *)parts.data + i;
        int64_t type = ((const int64_t *)types.data)[i];
        if (!part->data || stored_row_bytes(type, width) < 0 || part->bytes != rows * stored_row_bytes(type, width))
            return 0;
    }
    return 1;
}

/* register of the row's id, target, tokens of the longest n-gram, heads of each length, how numbers are kept (widen_rows), rows of a part of the
 * table, the id of an end, ids, registers of the ids 1, 2 .. positions before; multipliers of each token, sizes and first rows of each head (int64);
 * the table's parts (a Tensor of each), row by row as they are stored, and their types (int64) */
int check_ngrams(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    const Tensor *t = op->tensors;
    if (n[2] < 2 || n[2] > MOST_TOKENS || !is_count(n[3], MAX_WIDTH) || !is_count(n[5], MAX_WIDTH))
        return BAD_SHAPE;
    if (n[4] != BF16 && n[4] != F32 && n[4] != W8 && n[4] != W4)
        return BAD_SHAPE;
    for (int64_t i = 0; i < n[2]; i++) {
        int64_t ids = i ? n[7 + i] : n[0];
        if (ids < 0 || ids >= plan->num_registers || w[ids] < ID_DIGITS || ids == n[1])
            return BAD_REGISTER;
    }
    if (n[1] < 0 || n[1] >= plan->num_registers)
        return BAD_REGISTER;
    if (w[n[1]] % heads_of(op) || !is_count(n[7], (int64_t)1 << 32) || n[6] < 0 || n[6] >= n[7])
        return BAD_SHAPE;
    if (!has_parts(t[3], t[4], n[5], w[n[1]] / heads_of(op)))
        return BAD_TENSOR;
    for (int i = 0; i < 3; i++)
        if (!t[i].data || t[i].bytes != 8 * (i ? heads_of(op) : n[2]))
            return BAD_TENSOR;
    const int64_t *sizes = t[1].data, *firsts = t[2].data, rows = t[3].bytes / (int64_t)sizeof(Tensor) * n[5];
    for (int64_t head = 0; head < heads_of(op); head++)
        if (!is_count(sizes[head], rows) || firsts[head] < 0 || firsts[head] > rows - sizes[head])
            return BAD_TENSOR;
    return DONE;
}

void ngrams_row(const Plan *plan, const Op *op, int64_t position, int64_t row)
{
    const int64_t *n = op->numbers, *multipliers = op->tensors[0].data, *sizes = op->tensors[1].data, *firsts = op->tensors[2].data;
    const int64_t *types = op->tensors[4].data;
    const Tensor *parts = op->tensors[3].data;
    int64_t width = plan->widths[n[1]] / heads_of(op), before = n[6], found = 0, found_types[SIDE];
    const char *found_rows[SIDE];
    float *out = row_of(plan, n[1], row);
    uint64_t mixed = (uint64_t)id_of(plan, n[0], row, n[7]) * (uint64_t)multipliers[0];
    for (int64_t i = 1; i < n[2]; i++) {
        before = i > position || (i > 1 && before == n[6]) ? n[6] : id_of(plan, n[7 + i], row, n[7]);
        mixed ^= (uint64_t)before * (uint64_t)multipliers[i];
        for (int64_t head = (i - 1) * n[3]; head < i * n[3]; head++) {
            int64_t at = firsts[head] + (int64_t)(mixed % (uint64_t)sizes[head]), type = types[at / n[5]];
            found_rows[found] = (const char *)parts[at / n[5]].data + at % n[5] * stored_row_bytes(type, width);
            found_types[found++] = type;
            if (found < SIDE && head + 1 < heads_of(op))
                continue;
            widen_rows(plan->kernels, n[4], found_rows, found_types, found, width, out);
            out += found * width, found = 0;
        }
    }
}

int check_admit(const Plan *plan, const Op *op) /* keys, queries, value, target, streams; what products are multiplied by */
{
    const int64_t *n = op->numbers, *w = plan->widths;
    for (int i = 0; i < 4; i++)
        if (n[i] < 0 || n[i] >= plan->num_registers || (i < 3 && n[i] == n[3]))
            return BAD_REGISTER;
    if (!is_count(n[4], MOST_ADMITTING))
        return BAD_SHAPE;
    return w[n[0]] == w[n[1]] && w[n[0]] == w[n[3]] && w[n[3]] == n[4] * w[n[2]] ? DONE : BAD_SHAPE;
}

/* The 16-lane sum of x y, two roundings each. */
float lane_products(const float *x, const float *y, int64_t n)
{
    float lanes[SIDE] = {0};
    for (int64_t at = 0; at < n; at += SIDE)
        for (int64_t i = 0; i < at_most(n - at, SIDE); i++) {
            float v = x[at + i] * y[at + i];
            lanes[i] += v;
        }
    for (int64_t width = SIDE / 2; width; width /= 2)
        for (int64_t i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

void admit_row(const Plan *plan, const Op *op, int64_t row)
{
    const int64_t *n = op->numbers;
    int64_t width = plan->widths[n[2]];
    float gates[MOST_ADMITTING];
    for (int64_t i = 0; i < n[4]; i++) {
        float v = lane_products(row_of(plan, n[0], row) + i * width, row_of(plan, n[1], row) + i * width, width) * (float)op->reals[0];
        float size = v < 0 ? -v : v, root = root_of(size < 1e-6f ? 1e-6f : size);
        gates[i] = v < 0 ? -root : v > 0 ? root : v;
    }
    plan->kernels->apply(SIGMOIDS, 1, gates, gates, n[4]);
    for (int64_t i = 0; i < n[4]; i++)
        plan->kernels->multiply(row_of(plan, n[2], row), gates[i], row_of(plan, n[3], row) + i * width, width);
}
