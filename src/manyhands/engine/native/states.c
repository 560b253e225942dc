/* Convolutions and linear attention: operations whose sessions keep a state, which each position changes.
 *
 * A session has the state behind its last position ("now"), and blocks of STATE_BLOCK positions, some of which it keeps: in a block
 * the state before its first position, and what changed the state at each position. So a step that begins where the last one did
 * not end takes the state of a block and goes through what the block's positions were, without a product.
 */
#include "states.h"

#include <string.h>

enum { COLUMNS = 256 }; /* of a task of a convolution */

typedef struct {
    const Plan *plan;
    const Op *op;
    const Segment *segments;
    int64_t num_segments, parts, per_task; /* parts: of a segment; per_task: of them */
} Work;

static char *block_of(const Segment *s, int64_t position) { return s->states[position / STATE_BLOCK]; }

/* -- convolutions: source, target, taps, activation, is_pool; weights [taps, columns], bias; of a pool what is added to gates [taps, columns of
 * the target] -- */

int64_t convolution_bytes(const Plan *plan, const Op *op, int64_t rows)
{
    return rows * plan->widths[op->numbers[0]] * size_of_type(plan->type);
}

/* Where a block, or "now", has `row` of a convolution, from `column` on. A block's first row is taps - 1 positions before it. */
static char *kept_row(const Plan *plan, const Op *op, char *kept, int64_t row, int64_t column)
{
    return kept + (row * plan->widths[op->numbers[0]] + column) * size_of_type(plan->type);
}

typedef struct {
    float rows[MOST_TAPS][COLUMNS]; /* the last `taps` rows, by position modulo taps */
    float gates[MOST_TAPS][COLUMNS];
} Window;

static float *slot(Window *window, int64_t position, int64_t taps) { return window->rows[(position + MOST_TAPS * taps) % taps]; }

/* Of a pool, `count` columns of values and gates at the last position of an entry: those of the entry's other positions are the rows before. */
static void pool_rows(const Plan *plan, const Op *op, int64_t column, int64_t count, Window *window, float *out)
{
    int64_t taps = op->numbers[2], half = count / 2, width = plan->widths[op->numbers[1]];
    const float *bias = op->tensors[0].data;
    for (int64_t j = 0; j < taps; j++)
        plan->kernels->add(window->rows[j] + half, bias + j * width + column / 2, 1, window->gates[j], half, 0);
    plan->kernels->pool(window->gates[0], window->rows[0], taps, COLUMNS, half, out + column / 2);
}

static void convolve_part(const Plan *plan, const Op *op, const Segment *s, int64_t column, Window *window)
{
    const Kernels *kernels = plan->kernels;
    const int64_t *n = op->numbers;
    int64_t width = plan->widths[n[0]], taps = n[2], count = at_most(width - column, COLUMNS);
    const float *weights = op->tensors[0].data, *bias = op->tensors[1].data, *rows[MOST_TAPS];
    char *now = s->now + op->now;
    for (int64_t p = s->start - taps + 1; p < s->start; p++) {
        char *from = s->from < 0 ? kept_row(plan, op, now, p - s->start + taps - 1, column)
                                 : kept_row(plan, op, block_of(s, s->from) + op->cache, p - s->from + taps - 1, column);
        kernels->widen(from, plan->type, 1, slot(window, p, taps), count, 0);
    }
    for (int64_t p = s->start; p < s->start + s->count; p++) {
        int64_t row = s->row + p - s->start;
        char *block = block_of(s, p) ? block_of(s, p) + op->cache : 0;
        for (int64_t before = taps - 1; block && p % STATE_BLOCK == 0 && before; before--)
            kernels->narrow(slot(window, p - before, taps), kept_row(plan, op, block, taps - 1 - before, column), plan->type, count);
        kernels->widen(row_of(plan, n[0], row) + column, F32, 1, slot(window, p, taps), count, plan->rounds);
        if (block)
            kernels->narrow(slot(window, p, taps), kept_row(plan, op, block, p % STATE_BLOCK + taps - 1, column), plan->type, count);
        float *out = row_of(plan, n[1], row);
        if (n[4]) {
            memset(out + column / 2, 0, (size_t)count / 2 * 4);
            if ((p + 1) % taps == 0)
                pool_rows(plan, op, column, count, window, out);
            continue;
        }
        for (int64_t j = 0; j < taps; j++)
            rows[j] = slot(window, p - taps + 1 + j, taps);
        kernels->convolve(rows, taps, weights + column, width, bias ? bias + column : 0, n[3], count, out + column);
    }
    int64_t end = s->start + s->count;
    for (int64_t before = taps - 1; before; before--)
        kernels->narrow(slot(window, end - before, taps), kept_row(plan, op, now, taps - 1 - before, column), plan->type, count);
}

static void convolve_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    for (int64_t i = task * work->per_task; i < (task + 1) * work->per_task && i < work->parts * work->num_segments; i++)
        convolve_part(work->plan, work->op, work->segments + i / work->parts, i % work->parts * COLUMNS, scratch);
}

/* -- linear attention and selective scans (check_delta in plan.c) --------------------------------------------------------------- */

static int is_scan(const Op *op) { return op->numbers[10] == DELTA_SCAN; }
static int64_t tiles_of(const Op *op) { return ceil_div(op->numbers[9], DELTA_COLUMNS); }
static int64_t tile_floats(const Op *op) { return op->numbers[8] * DELTA_COLUMNS; }
int64_t delta_floats(const Op *op) { return op->numbers[6] * tiles_of(op) * tile_floats(op); }

/* Decays of a head: one, or one for each number of its keys; of a scan the steps of its columns. */
static int64_t decays_of(const Op *op)
{
    const int64_t *n = op->numbers;
    return is_scan(op) ? n[9] : n[10] == DELTA_BY_CHANNEL ? n[8] : 1;
}

/* What a position leaves in a block: keys, values, decays, strengths, which a scan has none of. */
static int64_t inputs_of(const Op *op)
{
    const int64_t *n = op->numbers;
    return n[7] * n[8] + n[6] * n[9] + n[6] * (decays_of(op) + !is_scan(op));
}
int64_t delta_block_floats(const Op *op) { return delta_floats(op) + STATE_BLOCK * inputs_of(op); }

/* Columns of one head at one position: what changes its state. */
typedef struct {
    float *key, *value, *decay, *strength;
} Change;

static Change change_in(const Op *op, float *inputs, int64_t head, int64_t column)
{
    const int64_t *n = op->numbers;
    float *values = inputs + n[7] * n[8], *decays = values + n[6] * n[9], *strengths = decays + n[6] * decays_of(op);
    return (Change){inputs + head / (n[6] / n[7]) * n[8], values + head * n[9] + column, decays + head * decays_of(op) + (is_scan(op) ? column : 0),
                    strengths + head};
}

static Change change_at(const Plan *plan, const Op *op, int64_t row, int64_t head, int64_t column)
{
    const int64_t *n = op->numbers;
    return (Change){row_of(plan, n[1], row) + head / (n[6] / n[7]) * n[8], row_of(plan, n[2], row) + head * n[9] + column,
                    row_of(plan, n[3], row) + head * decays_of(op) + (is_scan(op) ? column : 0), row_of(plan, n[4], row) + head};
}

/* A state at one position, of columns from `column` on; what it gives to `out` for a query, if there is one. */
static void change_state(const Plan *plan, const Op *op, float *state, int64_t column, int64_t count, const float *query, const Change *c, float *out)
{
    const int64_t *n = op->numbers;
    const float *skips = op->tensors[0].data, *rates = op->tensors[1].data;
    if (is_scan(op))
        plan->kernels->scan(n[8], state, count, query, c->key, c->value, c->decay, rates + column, n[9], skips ? skips + column : 0, out);
    else
        plan->kernels->delta(n[8], n[10], state, count, query, c->key, c->value, c->decay, *c->strength, out);
}

static void keep_change(const Op *op, const Change *c, const Change *kept, int64_t column, int64_t count, int64_t has_keys)
{
    memcpy(kept->value, c->value, (size_t)count * 4);
    if (is_scan(op))
        memcpy(kept->decay, c->decay, (size_t)count * 4);
    else if (column == 0) {
        memcpy(kept->decay, c->decay, (size_t)decays_of(op) * 4);
        *kept->strength = *c->strength;
    }
    if (has_keys)
        memcpy(kept->key, c->key, (size_t)op->numbers[8] * 4);
}

/* Columns [column, column + count) of a head, of all rows of a segment. */
static void delta_part(const Plan *plan, const Op *op, const Segment *s, int64_t head, int64_t column)
{
    const int64_t *n = op->numbers;
    int64_t width = n[8], count = at_most(n[9] - column, DELTA_COLUMNS), floats = tile_floats(op);
    int64_t tile = (head * tiles_of(op) + column / DELTA_COLUMNS) * floats, is_first = head % (n[6] / n[7]) == 0 && column == 0;
    float *state = (float *)(s->now + op->now) + tile;
    const float *skips = op->tensors[0].data;
    if (s->from >= 0) {
        float *block = (float *)(block_of(s, s->from) + op->cache);
        memcpy(state, block + tile, (size_t)floats * 4);
        for (int64_t p = s->from; p < s->start; p++) {
            Change c = change_in(op, block + delta_floats(op) + (p - s->from) * inputs_of(op), head, column);
            change_state(plan, op, state, column, count, 0, &c, 0);
        }
    }
    for (int64_t p = s->start; p < s->start + s->count; p++) {
        int64_t row = s->row + p - s->start;
        Change c = change_at(plan, op, row, head, column);
        float *block = block_of(s, p) ? (float *)(block_of(s, p) + op->cache) : 0;
        if (block && p % STATE_BLOCK == 0)
            memcpy(block + tile, state, (size_t)floats * 4);
        if (block) {
            Change kept = change_in(op, block + delta_floats(op) + p % STATE_BLOCK * inputs_of(op), head, column);
            keep_change(op, &c, &kept, column, count, is_first);
        }
        float *out = row_of(plan, n[5], row) + head * n[9] + column;
        change_state(plan, op, state, column, count, row_of(plan, n[0], row) + head / (n[6] / n[7]) * width, &c, out);
        if (skips && !is_scan(op))
            plan->kernels->add(out, c.value, skips[head], out, count, 0);
    }
}

static void delta_task(const void *argument, int64_t task, void *scratch)
{
    const Work *work = argument;
    int64_t tiles = tiles_of(work->op);
    (void)scratch;
    for (int64_t i = task * work->per_task; i < (task + 1) * work->per_task && i < work->parts * work->num_segments; i++)
        delta_part(work->plan, work->op, work->segments + i / work->parts, i % work->parts / tiles, i % tiles * DELTA_COLUMNS);
}

static int run(Team *team, int64_t members, Task task, Work work, int64_t scratch_bytes)
{
    int64_t parts = work.parts * work.num_segments;
    work.per_task = ceil_div(parts, members == 1 ? 1 : 4 * members);
    return team_run(team, members, task, &work, ceil_div(parts, work.per_task), scratch_bytes);
}

int states_run(const Plan *plan, Team *team, int64_t threads, const Op *op, const Segment *segments, int64_t num_segments, int64_t rows)
{
    const int64_t *n = op->numbers;
    Work work = {.plan = plan, .op = op, .segments = segments, .num_segments = num_segments};
    if (op->kind == CONVOLVE) {
        work.parts = ceil_div(plan->widths[n[0]], COLUMNS);
        return run(team, members_for(threads, rows * plan->widths[n[0]] * n[2] * 4), convolve_task, work, sizeof(Window));
    }
    work.parts = n[6] * tiles_of(op);
    return run(team, members_for(threads, rows * n[6] * n[8] * n[9] * 4), delta_task, work, 0);
}
