/* Mixes of parts of rows, and rows by their own size and spread (streams.c has the streams of deepseek_v4): plain C, so that all back ends have their bits. */
#include "mix.h"

/* The 16-lane sum of x - less, or of its squares (two roundings). */
static float lane_sum(const float *x, int64_t n, float less, int is_square)
{
    float lanes[SIDE] = {0};
    for (int64_t at = 0; at < n; at += SIDE)
        for (int64_t i = 0; i < at_most(n - at, SIDE); i++) {
            float v = x[at + i] - less;
            lanes[i] += is_square ? v * v : v;
        }
    for (int64_t width = SIDE / 2; width; width /= 2)
        for (int64_t i = 0; i < width; i++)
            lanes[i] += lanes[i + width];
    return lanes[0];
}

static float mean_square(const float *x, int64_t n, float less) { return lane_sum(x, n, less, 1) / (float)n; }

/* Each part of the target plus numbers times the parts of the source. */
static void mix_parts(const Plan *plan, const Op *op, int64_t row)
{
    const int64_t *n = op->numbers;
    const float offset = (float)op->reals[0], *by = n[1] < 0 ? 0 : row_of(plan, n[1], row);
    for (int64_t b = 0; b < n[5]; b++)
        for (int64_t a = 0; a < n[4]; a++) {
            float *to = row_of(plan, n[2], row) + n[7] + b * n[3], number = by ? by[b * n[4] + a] : 1;
            number = by && offset != 0 ? number + offset : number;
            plan->kernels->add(to, row_of(plan, n[0], row) + n[6] + a * n[3], number, to, n[3], 0);
        }
}

static void rescale_row(const float *x, const float *like, float least, int64_t n, int64_t like_n, float *out)
{
    float square = mean_square(x, n, 0), size = root_of(mean_square(like, like_n, 0));
    float own = root_of(square > least ? square : least);
    for (int64_t i = 0; i < n; i++)
        out[i] = x[i] * size / own;
}

static void sparsify_row(float *x, float by, int64_t n)
{
    float mean = lane_sum(x, n, 0, 0) / (float)n, spread = root_of(mean_square(x, n, mean)) * by, cut = mean + spread;
    for (int64_t i = 0; i < n; i++)
        x[i] = x[i] - cut > 0 ? x[i] - cut : 0;
}

void mix_row(const Plan *plan, const Op *op, int64_t row)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    if (op->kind == MIX)
        mix_parts(plan, op, row);
    else if (op->kind == RESCALE)
        rescale_row(row_of(plan, n[0], row), row_of(plan, n[1], row), (float)op->reals[0], w[n[0]], w[n[1]], row_of(plan, n[2], row));
    else
        sparsify_row(row_of(plan, n[0], row), (float)op->reals[0], w[n[0]]);
}

/* mix: source, numbers (-1: ones), target, width of a part, parts of the source, of the target, first columns of source and target; what is
 * added to each number. rescale: source, like, target; least. sparsify: register; by. */
int check_mix(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths, registers = op->kind == SPARSIFY ? 1 : 3;
    for (int64_t i = 0; i < registers; i++)
        if ((n[i] < 0 || n[i] >= plan->num_registers) && !(op->kind == MIX && i == 1 && n[i] == -1))
            return BAD_REGISTER;
    if (op->kind == RESCALE)
        return w[n[0]] == w[n[2]] && n[1] != n[2] ? DONE : BAD_SHAPE;
    if (op->kind == SPARSIFY)
        return DONE;
    if (n[2] == n[0] || n[2] == n[1])
        return BAD_REGISTER;
    for (int64_t i = 3; i < 8; i++)
        if (n[i] < (i < 6) || n[i] > MAX_WIDTH)
            return BAD_SHAPE;
    int is_fit = n[6] + n[4] * n[3] <= w[n[0]] && n[7] + n[5] * n[3] <= w[n[2]] && (n[1] < 0 || w[n[1]] == n[4] * n[5]);
    return is_fit ? DONE : BAD_SHAPE;
}
