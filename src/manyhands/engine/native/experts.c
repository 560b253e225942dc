/* Experts of a mixture: each row goes through those that its routes name, and the results are summed in the routes' order. */
#include "plan.h"

#include <stdlib.h>
#include <string.h>

enum { EXPERT_BYTES = 24 << 20 }; /* kept for the rows that go through experts at once */

/* Pairs (row, route) are sorted by expert; pair i keeps its rounded source, gate, up, rounded inner row and result. */
typedef struct {
    const Plan *plan;
    const Op *op;
    int64_t first, rows, pairs, depth, inner_depth, inner, hidden, per_expert, num_used, matrices; /* before the activation: 2, or 1 without gates */
    float *sources, *gates, *ups, *inners, *results;
    int32_t *owners, *places, *used, *starts; /* row * top k + route of a pair, and back; experts in use, their first pairs */
} Mixture;

static int64_t whole(int64_t width) { return ceil_div(width, SIDE) * SIDE; }

/* Floats that a row and route takes: sources, gates, ups, inners, results, owner, place. */
int64_t plan_expert_floats(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    int64_t source = ceil_div(w[n[0]], DEPTH) * DEPTH, inner = ceil_div(n[5], DEPTH) * DEPTH;
    return n[4] * (source + (1 + has_gates(op)) * whole(n[5]) + inner + whole(w[n[2]]) + 2);
}

static const float *bias_of(Tensor tensor, int64_t expert, int64_t n) { return tensor.data ? (const float *)tensor.data + expert * n : 0; }

/* The pairs of an expert in use, of all its rows a step before the next. */
static Source pairs_of(const Mixture *m, int64_t used, float *rows, int64_t depth)
{
    int64_t count = m->starts[used + 1] - m->starts[used], is_grouped = is_small(m->op->numbers[rows == m->inners ? 8 : 6]);
    rows += m->starts[used] * depth * DEPTH;
    return is_grouped ? grouped_rows(rows, count, depth) : few_rows(rows, count, depth);
}

/* Rounds one pair's row into the pairs of its expert. */
static void prepare_pair(const Mixture *m, int64_t pair, const float *x, int64_t width, float *rows, int64_t depth)
{
    int64_t used = 0, end = m->num_used;
    while (end - used > 1) {
        int64_t middle = (used + end) / 2;
        m->starts[middle] <= pair ? (used = middle) : (end = middle);
    }
    Source to = pairs_of(m, used, rows, depth);
    m->plan->kernels->prepare(x, 0, width, m->plan->rounds, &to, pair - m->starts[used], 1);
}

static void gather_task(const void *argument, int64_t pair, void *scratch)
{
    const Mixture *m = argument;
    const int64_t *n = m->op->numbers;
    int64_t row = m->first + m->owners[pair] / n[4], route = m->owners[pair] % n[4], width = m->plan->widths[n[0]];
    const float *source = row_of(m->plan, n[0], row);
    (void)scratch;
    if (n[9]) { /* a result is as wide, and comes later */
        float *scaled = m->results + pair * whole(m->hidden);
        m->plan->kernels->multiply(source, row_of(m->plan, n[1], row)[2 * route + 1], scaled, width);
        source = scaled;
    }
    prepare_pair(m, pair, source, width, m->sources, m->depth);
}

/* Panels of one expert's matrix over its pairs. which: 0 gate, 1 up, 2 down. */
static void multiply_pairs(const Mixture *m, int64_t used, int which, int64_t panel, int64_t end, float *scratch)
{
    const int64_t *n = m->op->numbers;
    int64_t expert = m->used[used], first = m->starts[used], count = m->starts[used + 1] - first;
    int64_t depth = which == 2 ? m->inner_depth : m->depth, columns = which == 2 ? m->hidden : m->inner;
    int64_t type = n[which == 2 ? 8 : 6], bytes = ceil_div(columns, SIDE) * panel_bytes(type, depth);
    Matrix matrix = {.type = type, .n = columns, .k = depth * DEPTH, .packed = (const char *)m->op->tensors[which].data + expert * bytes,
                     .bias = bias_of(m->op->tensors[3 + which], expert, columns), .activation = which == 1 && m->matrices == 1 ? n[7] : 0};
    float *out = which == 0 ? m->gates : which == 1 ? m->ups : m->results;
    for (int64_t at = first; at < first + count; at += CHUNK) {
        Source source = pairs_of(m, used, which == 2 ? m->inners : m->sources, depth);
        source.rows += (at - first) * source.row_step, source.count = at_most(first + count - at, CHUNK);
        m->plan->kernels->product(&matrix, &source, panel, end, out + at * whole(columns), whole(columns), scratch);
    }
}

static void before_task(const void *argument, int64_t task, void *scratch)
{
    const Mixture *m = argument;
    int64_t panels = ceil_div(m->inner, SIDE), per = ceil_div(panels, m->per_expert), panel = task / m->matrices % m->per_expert * per;
    if (panel < panels)
        multiply_pairs(m, task / m->matrices / m->per_expert, m->matrices == 1 ? 1 : (int)(task % 2), panel, at_most(panel + per, panels), scratch);
}

static void after_task(const void *argument, int64_t task, void *scratch)
{
    const Mixture *m = argument;
    int64_t panels = ceil_div(m->hidden, SIDE), per = ceil_div(panels, m->per_expert), panel = task % m->per_expert * per;
    if (panel < panels)
        multiply_pairs(m, task / m->per_expert, 2, panel, at_most(panel + per, panels), scratch);
}

static void gate_task(const void *argument, int64_t pair, void *scratch)
{
    const Mixture *m = argument;
    const double *reals = m->op->reals;
    float *gate = m->gates + pair * whole(m->inner), *up = m->ups + pair * whole(m->inner);
    (void)scratch;
    if (m->matrices == 2)
        m->plan->kernels->gate(gate, up, up, m->inner, m->op->numbers[7], (float)reals[0], (float)reals[1], (float)reals[2]);
    prepare_pair(m, pair, up, m->inner, m->inners, m->inner_depth);
}

/* A result times numbers of its columns, then normed. */
static void norm_task(const void *argument, int64_t pair, void *scratch)
{
    const Mixture *m = argument;
    const Kernels *kernels = m->plan->kernels;
    float *result = m->results + pair * whole(m->hidden);
    (void)scratch;
    kernels->gate(result, m->op->tensors[6].data, result, m->hidden, 0, 1, 0, 0);
    kernels->norm(result, result, m->hidden, 0, (float)m->op->reals[3], 0, 0, 0);
}

static void sum_task(const void *argument, int64_t row, void *scratch)
{
    const Mixture *m = argument;
    const int64_t *n = m->op->numbers;
    const float *pairs = row_of(m->plan, n[1], m->first + row);
    float *out = row_of(m->plan, n[2], m->first + row);
    (void)scratch;
    memset(out, 0, (size_t)m->hidden * 4);
    for (int64_t route = 0; route < n[4]; route++) {
        int64_t place = m->places[row * n[4] + route];
        float number = pairs[2 * route];
        if (place < 0 && number >= (float)n[3] && number < (float)(n[3] + n[10]))
            m->plan->kernels->add(out, row_of(m->plan, n[0], m->first + row), pairs[2 * route + 1], out, m->hidden, 0);
        else if (place >= 0)
            m->plan->kernels->add(out, m->results + place * whole(m->hidden), n[9] ? 1 : pairs[2 * route + 1], out, m->hidden, 0);
    }
}

/* Pairs by expert, rows in order. A route that names no expert has no place. */
static void sort_pairs(Mixture *m)
{
    const int64_t *n = m->op->numbers;
    int64_t found = 0;
    memset(m->places, 0xFF, (size_t)(m->rows * n[4]) * 4);
    for (int64_t expert = 0; expert < n[3]; expert++) {
        int64_t before = found;
        for (int64_t row = 0; row < m->rows; row++)
            for (int64_t route = 0; route < n[4]; route++)
                if (row_of(m->plan, n[1], m->first + row)[2 * route] == (float)expert) {
                    m->places[row * n[4] + route] = (int32_t)found;
                    m->owners[found++] = (int32_t)(row * n[4] + route);
                }
        if (found > before) {
            m->used[m->num_used] = (int32_t)expert;
            m->starts[m->num_used++] = (int32_t)before;
        }
    }
    m->starts[m->num_used] = (int32_t)found;
    m->pairs = found;
}

static int has_room(Plan *plan, int64_t rows)
{
    if (plan->expert_room >= rows)
        return 1;
    free(plan->expert_rows);
    plan->expert_rows = malloc((size_t)(plan->expert_floats * rows) * 4);
    plan->expert_room = plan->expert_rows ? rows : 0;
    return plan->expert_rows != 0;
}

/* Rows [first, first + rows), for which there is room. */
static int run_rows(Plan *plan, Team *team, int64_t threads, const Op *op, int64_t first, int64_t rows)
{
    const int64_t *n = op->numbers;
    int32_t used[MOST_EXPERTS], starts[MOST_EXPERTS + 1];
    int64_t most = rows * n[4], width = plan->widths[n[0]];
    Mixture m = {.plan = plan, .op = op, .first = first, .rows = rows, .depth = ceil_div(width, DEPTH), .inner_depth = ceil_div(n[5], DEPTH),
                 .inner = n[5], .hidden = plan->widths[n[2]], .used = used, .starts = starts, .sources = plan->expert_rows,
                 .matrices = 1 + has_gates(op)};
    m.gates = m.sources + most * m.depth * DEPTH;
    m.ups = m.gates + (m.matrices - 1) * most * whole(m.inner);
    m.inners = m.ups + most * whole(m.inner);
    m.results = m.inners + most * m.inner_depth * DEPTH;
    m.owners = (int32_t *)(m.results + most * whole(m.hidden)), m.places = m.owners + most;
    sort_pairs(&m);
    int64_t members = members_for(threads, m.pairs * m.inner * width * (m.matrices + 1));
    m.per_expert = members == 1 || !m.num_used ? 1 : ceil_div(8 * members, m.num_used);
    int failed = team_run(team, members, gather_task, &m, m.pairs, 0);
    failed = failed ? failed : team_run(team, members, before_task, &m, m.num_used * m.per_expert * m.matrices, SCRATCH_BYTES);
    failed = failed ? failed : team_run(team, members, gate_task, &m, m.pairs, 0);
    failed = failed ? failed : team_run(team, members, after_task, &m, m.num_used * m.per_expert, SCRATCH_BYTES);
    if (op->tensors[6].data)
        failed = failed ? failed : team_run(team, members, norm_task, &m, m.pairs, 0);
    return failed ? failed : team_run(team, members, sum_task, &m, rows, 0);
}

int experts_run(Plan *plan, Team *team, int64_t threads, const Op *op, int64_t rows)
{
    int64_t most = EXPERT_BYTES / 4 / plan->expert_floats;
    most = most < 1 ? 1 : at_most(most, rows);
    if (!has_room(plan, most))
        return -1;
    int failed = 0;
    for (int64_t row = 0; row < rows && !failed; row += most)
        failed = run_rows(plan, team, threads, op, row, at_most(rows - row, most));
    return failed;
}
