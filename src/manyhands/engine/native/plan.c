/* The border: what Python passes is checked here, so that no kernel reads or writes beyond what it was given. */
#define _GNU_SOURCE
#include "compressed.h"
#include "index.h"
#include "mix.h"
#include "ngrams.h"
#include "states.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "modes.h"

enum { HUGE_PAGE = 1 << 21 };
enum { PIECE = 256, PLAN_BYTES = 32 << 20, LEAST_ROWS = 24 }; /* numbers that an embedding takes at once; of registers and prepared rows */

static const Kernels *back_end(int64_t target)
{
    switch (target) {
    case 0: return &kernels_scalar;
#if defined(__x86_64__)
    case 1: return &kernels_avx2;
    case 2: return &kernels_avx512;
    case 4: return &kernels_amx;
#elif defined(__aarch64__)
    case 3: return &kernels_neon;
#endif
    default: return 0;
    }
}

const Kernels *plan_kernels(int64_t target) { return mh_supports(target) ? back_end(target) : 0; }

EXPORT int mh_version(void) { return 32; }

static uint64_t calls[5]; /* of each back end, since the library was loaded */
EXPORT uint64_t mh_calls(int64_t target) { return target >= 0 && target < 5 ? __atomic_load_n(calls + target, __ATOMIC_RELAXED) : 0; }

/* out[n] = function(x[n]), for the digests: activations by number, then 7 exp, 8 tanh, 9 erf. */
EXPORT int mh_apply(int64_t target, int64_t function, double alpha, const float *x, float *out, int64_t n)
{
    if (!mh_supports(target) || function < 0 || function > 9 || n < 0)
        return BAD_KIND;
    uint64_t modes = modes_enter();
    __atomic_fetch_add(calls + target, 1, __ATOMIC_RELAXED);
    back_end(target)->apply(function, (float)alpha, x, out, n);
    back_end(target)->narrow(out, out, F32, n);
    modes_leave(modes);
    return DONE;
}

/* Frees what a plan keeps from one step to the next for rows; the next step makes it again. Not while a step runs. */
EXPORT void mh_plan_release(Plan *plan)
{
    free(plan->registers);
    free(plan->prepared);
    free(plan->angles);
    free(plan->expert_rows);
    free(plan->index_room);
    free(plan->entry_room);
    plan->registers = plan->prepared = plan->angles = plan->expert_rows = 0, plan->index_room = plan->entry_room = 0;
    plan->rows = plan->expert_room = plan->index_bytes = plan->entry_bytes = 0;
}

EXPORT void mh_plan_free(Plan *plan)
{
    if (!plan)
        return;
    mh_plan_release(plan);
    free(plan->ops);
    free(plan);
}

/* A plan without operations. type: of rows that enter (BF16, F32); register 0 is theirs, `out` leaves as out_type.
 * offsets: where registers begin, in columns, multiples of 16; those that are not needed at once may share columns.
 * positions: that tables and caches may have. Null: a bad argument, or no memory. */
EXPORT Plan *mh_plan_new(int64_t target, int64_t type, const int64_t *widths, const int64_t *offsets, int64_t num_registers,
                         int64_t out, int64_t out_type, int64_t positions)
{
    if (!mh_supports(target) || !back_end(target) || !is_count(num_registers, MAX_REGISTERS) || out < 0 || out >= num_registers)
        return 0;
    if ((type != BF16 && type != F32) || (out_type != BF16 && out_type != F32) || !is_count(positions, MAX_POSITIONS))
        return 0;
    Plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return 0;
    plan->kernels = back_end(target), plan->target = target;
    plan->type = type, plan->rounds = type == BF16, plan->out = out, plan->out_type = out_type, plan->positions = positions;
    plan->num_registers = num_registers;
    for (int64_t i = 0; i < num_registers; i++) {
        if (!is_count(widths[i], MAX_WIDTH) || offsets[i] < 0 || offsets[i] > MAX_REGISTERS * MAX_WIDTH || offsets[i] % SIDE) {
            mh_plan_free(plan);
            return 0;
        }
        int64_t end = offsets[i] + ceil_div(widths[i], SIDE) * SIDE;
        plan->widths[i] = widths[i], plan->offsets[i] = offsets[i];
        plan->width = end > plan->width ? end : plan->width;
    }
    return plan;
}

Kind plan_kind(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers;
    return (Kind){.groups = n[4] / n[5], .width = n[6], .value_width = n[7], .window = n[11] ? 0 : n[8], .rounds = plan->rounds,
                  .is_latent = n[9], .has_codes = n[10], .extent = n[12] ? plan->widths[n[12]] / n[4] : 0, .scale = (float)op->reals[0], .soft_cap = (float)op->reals[1]};
}

static int has(const Plan *plan, int64_t number) { return number >= 0 && number < plan->num_registers; }
static int is_vector(Tensor tensor, int64_t n) { return !tensor.data || tensor.bytes == n * 4; }

static int check_norm(const Plan *plan, const Op *op) /* source, target, groups, is_layer; epsilon, offset; weight, bias */
{
    const int64_t *n = op->numbers;
    if (!has(plan, n[0]) || !has(plan, n[1]))
        return BAD_REGISTER;
    int64_t width = plan->widths[n[0]];
    if (width != plan->widths[n[1]] || !is_count(n[2], width) || width % n[2])
        return BAD_SHAPE;
    for (int i = 0; i < 2; i++)
        if (!is_vector(op->tensors[i], width) && !is_vector(op->tensors[i], width / n[2]))
            return BAD_TENSOR;
    return DONE;
}

/* Columns [column, column + count) of a register; a count of 0 stands for all of it. */
static int is_slice(const Plan *plan, int64_t number, int64_t column, int64_t *count)
{
    int64_t width = plan->widths[number];
    *count = *count ? *count : width;
    return column >= 0 && column < width && is_count(*count, width - column);
}

/* Whether `groups` such slices, `step` columns apart, lie in the register. */
static int has_slices(const Plan *plan, int64_t number, int64_t column, int64_t count, int64_t groups, int64_t step)
{
    return step >= 0 && step <= MAX_WIDTH && column + (groups - 1) * step + count <= plan->widths[number];
}

/* source, target, type, activation, source column, k, target column, n, groups (0: one), source step, target step: from a group's
 * columns to the next one's; whether groups share weights; weights packed, one group's behind the other's, biases [groups, n] */
static int check_product(Plan *plan, Op *op)
{
    int64_t *n = op->numbers;
    if (!has(plan, n[0]) || !has(plan, n[1]))
        return BAD_REGISTER;
    n[8] = n[8] ? n[8] : 1;
    if (n[2] < BF16 || n[2] >= TYPES || n[3] < 0 || n[3] > 6 || !is_slice(plan, n[0], n[4], n + 5) || !is_slice(plan, n[1], n[6], n + 7))
        return BAD_SHAPE;
    if (!is_count(n[8], MAX_HEADS) || !has_slices(plan, n[0], n[4], n[5], n[8], n[9]) || !has_slices(plan, n[1], n[6], n[7], n[8], n[10]))
        return BAD_SHAPE;
    if ((n[8] > 1 && n[10] < n[7]) || n[11] < 0 || n[11] > 1)
        return BAD_SHAPE;
    int64_t needed = mh_packed_bytes(n[2], n[7], n[5]), depth = ceil_div(n[5], DEPTH) * n[8], matrices = n[11] ? 1 : n[8];
    if (!op->tensors[0].data || op->tensors[0].bytes / matrices != needed || op->tensors[0].bytes % matrices || !is_vector(op->tensors[1], n[7] * n[8]))
        return BAD_TENSOR;
    plan->depth = depth > plan->depth ? depth : plan->depth;
    return DONE;
}

/* Digits of a row's id, in the last columns of the register (program/compressed_ops.py). */
int64_t id_of(const Plan *plan, int64_t number, int64_t row, int64_t ids)
{
    const float *digits = row_of(plan, number, row) + plan->widths[number] - ID_DIGITS;
    int64_t id = 0;
    for (int i = ID_DIGITS - 1; i >= 0; i--) {
        float digit = digits[i] * 256;
        id = id * 256 + (digit >= 0 && digit < 256 ? (int64_t)digit : 0);
    }
    return id < ids ? id : 0;
}

static int is_table(Tensor tensor, int64_t experts, int64_t top_k)
{
    const int32_t *table = tensor.data;
    if (!table || tensor.bytes < 4 * top_k || tensor.bytes % (4 * top_k))
        return 0;
    for (int64_t i = 0; i < tensor.bytes / 4; i++)
        if (table[i] < 0 || table[i] >= experts)
            return 0;
    return 1;
}

/* source, target, experts, top k, score (kernels.h), normalises, groups, top groups, the register of ids, (of the compiler), whether a
 * group ranks by its best expert alone; scale, epsilon; correction, factors, of each id the experts (int32 [ids, top k]; or null: ranks decide, and there are no ids) */
static int check_route(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers;
    if (!has(plan, n[0]) || !has(plan, n[1]) || n[0] == n[1])
        return BAD_REGISTER;
    if (!is_count(n[2], MOST_EXPERTS) || !is_count(n[6], n[2]) || n[2] % n[6] || !is_count(n[7], n[6]))
        return BAD_SHAPE;
    if (n[4] < 0 || n[4] >= SCORE_KINDS || (n[4] == BY_MIXER && n[5]))
        return BAD_SHAPE;
    if (n[10] < 0 || n[10] > 1 || (n[6] > 1 && !n[10] && n[2] / n[6] < 2) || !is_count(n[3], n[2] / n[6] * n[7]))
        return BAD_SHAPE;
    if (op->tensors[2].data && (!has(plan, n[8]) || n[8] == n[1] || plan->widths[n[8]] <= ID_DIGITS))
        return BAD_REGISTER;
    if (op->tensors[2].data && !is_table(op->tensors[2], n[2], n[3]))
        return BAD_TENSOR;
    if (plan->widths[n[0]] != n[2] || plan->widths[n[1]] != 2 * n[3])
        return BAD_SHAPE;
    return is_vector(op->tensors[0], n[2]) && is_vector(op->tensors[1], n[2]) ? DONE : BAD_TENSOR;
}

/* source, routes, target, experts, top k, inner width, type of gates and ups, activation, type of downs, scales_source, identities (what
 * routes name from `experts` on gives its source: as wide as the target, and not scaled); alpha, limit (below 0: of activated gates), offset, epsilon; gates (or none, and
 * none of the first three is used), ups, downs packed one expert behind the other, their biases [experts, n], what results are multiplied by
 * [width of the target] and then normed with epsilon (or null: neither) */
static int check_experts(Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    for (int i = 0; i < 3; i++)
        if (!has(plan, n[i]))
            return BAD_REGISTER;
    if (n[10] < 0 || n[10] > MOST_EXPERTS || (n[10] && (n[9] || w[n[0]] != w[n[2]])))
        return BAD_SHAPE;
    if (n[2] == n[0] || n[2] == n[1] || !is_count(n[3], MOST_EXPERTS) || !is_count(n[4], n[3] + n[10]) || !is_count(n[5], MAX_WIDTH))
        return BAD_SHAPE;
    if (w[n[1]] != 2 * n[4] || n[6] < BF16 || n[6] >= TYPES || n[7] < 0 || n[7] > (has_gates(op) ? SITU : SIGMOID) || n[8] < BF16 || n[8] >= TYPES)
        return BAD_SHAPE;
    if (n[9] < 0 || n[9] > 1 || (n[9] && w[n[0]] != w[n[2]]))
        return BAD_SHAPE;
    int64_t before = mh_packed_bytes(n[6], n[5], w[n[0]]), after = mh_packed_bytes(n[8], w[n[2]], n[5]);
    const Tensor *t = op->tensors;
    if (!t[1].data || !t[2].data || t[1].bytes != n[3] * before || t[2].bytes != n[3] * after)
        return BAD_TENSOR;
    if (has_gates(op) ? t[0].bytes != n[3] * before : t[3].data != 0)
        return BAD_TENSOR;
    if (!is_vector(t[3], n[3] * n[5]) || !is_vector(t[4], n[3] * n[5]) || !is_vector(t[5], n[3] * w[n[2]]) || !is_vector(t[6], w[n[2]]))
        return BAD_TENSOR;
    int64_t floats = plan_expert_floats(plan, op);
    plan->expert_floats = floats > plan->expert_floats ? floats : plan->expert_floats;
    return DONE;
}

/* source, target, source column, target column, count, times, source step, target step, whether what is written is rounded; which source columns
 * (int32 [count], behind the first one), or null: one after the other */
static int check_copy(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers;
    if (!has(plan, n[0]) || !has(plan, n[1]) || n[0] == n[1])
        return BAD_REGISTER;
    for (int i = 2; i < 8; i++)
        if (n[i] < 0 || n[i] > MAX_WIDTH)
            return BAD_SHAPE;
    if (!n[4] || !n[5] || (n[5] > 1 && !n[7]) || n[8] < 0 || n[8] > 1 || n[2] + (n[5] - 1) * n[6] + n[4] > plan->widths[n[0]] || n[3] + (n[5] - 1) * n[7] + n[4] > plan->widths[n[1]])
        return BAD_SHAPE;
    const int32_t *columns = op->tensors[0].data;
    if (columns && op->tensors[0].bytes != n[4] * 4)
        return BAD_TENSOR;
    for (int64_t i = 0; columns && i < n[4]; i++)
        if (columns[i] < 0 || columns[i] >= n[4])
            return BAD_TENSOR;
    return DONE;
}

static int check_rotary(Plan *plan, Op *op) /* target, heads, width, offset, turns, pairs, positions back; factor; frequencies */
{
    const int64_t *n = op->numbers;
    if (!has(plan, n[0]))
        return BAD_REGISTER;
    if (!is_count(n[1], MAX_HEADS) || !is_count(n[2], MAX_WIDTH) || n[1] * n[2] != plan->widths[n[0]])
        return BAD_SHAPE;
    if (n[3] < 0 || n[3] >= n[2] || !is_count(n[4], n[2]) || n[3] + 2 * n[4] > n[2] || n[6] < 0 || n[6] > MAX_POSITIONS)
        return BAD_SHAPE;
    if (!op->tensors[0].data || op->tensors[0].bytes != n[4] * 4)
        return BAD_TENSOR;
    for (int64_t i = 0; i < plan->num_ops; i++) {
        const Op *other = plan->ops + i;
        if (other->kind == ROTARY && other->tensors[0].data == op->tensors[0].data && other->numbers[4] == n[4] &&
            other->reals[0] == op->reals[0] && other->numbers[6] == n[6]) {
            op->cache = other->cache;
            return DONE;
        }
    }
    op->owns = 1, op->cache = plan->turns;
    plan->turns += n[4];
    return DONE;
}

static int64_t whole_lines(int64_t bytes) { return ceil_div(bytes, LINE) * LINE; }

/* An operation keeps so much of a block of 64 positions. */
static void keep_positions(Plan *plan, Op *op, int64_t bytes)
{
    op->cache = plan->block_bytes;
    plan->block_bytes += whole_lines(bytes);
}

/* An operation keeps so much of a block of states, and of the state behind the last position. All operations of a plan have such blocks, or
 * none has: COMPRESS goes back otherwise. */
static int keep_states(Plan *plan, Op *op, int64_t block, int64_t now)
{
    if ((plan->state_bytes || plan->now_bytes) && !plan->state_bytes != !block)
        return BAD_SHAPE;
    op->cache = plan->state_bytes, op->now = plan->now_bytes;
    plan->state_bytes += whole_lines(block), plan->now_bytes += whole_lines(now);
    return DONE;
}

/* query, key, value, target, heads, key heads, width, value width, window (0: none; -n: chunks of n), is_latent (a value is the beginning
 * of its key, and the register of values is the one of keys), has_codes (not latent), the register of chosen positions (0: all; its
 * width is how many are chosen; latent, of one key head; or of plain keys; with a window those of entries, each of as many positions as
 * it says, and the positions behind the last entry; of plain keys without one, of each key head, those of blocks of the cache), the register of
 * what is added to scores by distance (0: none; heads times their extent wide; not latent, and of all positions); scale, soft cap (0: none); sinks;
 * slopes of the heads, which are subtracted from a score for each position of distance (not with numbers by distance; not latent, and of all positions) */
static int check_attention(Plan *plan, Op *op)
{
    const int64_t *n = op->numbers;
    for (int i = 0; i < 4; i++)
        if (!has(plan, n[i]))
            return BAD_REGISTER;
    for (int i = 4; i < 8; i++)
        if (!is_count(n[i], MAX_HEADS))
            return BAD_SHAPE;
    if (n[4] % n[5] || n[8] < -MAX_POSITIONS || n[8] > MAX_POSITIONS || n[3] == n[0] || n[3] == n[1] || n[3] == n[2])
        return BAD_SHAPE;
    if (n[9] < 0 || n[9] > 1 || n[10] < 0 || n[10] > 1 || (n[9] && (n[10] || n[7] > n[6] || n[1] != n[2])))
        return BAD_SHAPE;
    if (n[11] && (!has(plan, n[11]) || n[11] == n[3]))
        return BAD_REGISTER;
    if (n[11] && (n[9] ? n[5] != 1 : !n[8] && plan->widths[n[11]] % n[5] != 0))
        return BAD_SHAPE;
    if (n[11] && n[8] && (!is_count(n[8], MOST_RATE) || n[10]))
        return BAD_SHAPE;
    if (n[11] && plan->positions > MOST_CHOSEN_FROM)
        return BAD_SHAPE;
    const int64_t *w = plan->widths;
    if (n[12] && (!has(plan, n[12]) || n[12] == n[3]))
        return BAD_REGISTER;
    if (n[12] && (n[9] || n[11] || w[n[12]] % n[4]))
        return BAD_SHAPE;
    if (w[n[0]] != n[4] * n[6] || w[n[1]] != n[5] * n[6] || (!n[9] && w[n[2]] != n[5] * n[7]) || w[n[3]] != n[4] * n[7])
        return BAD_SHAPE;
    if (!is_vector(op->tensors[0], n[4]) || !is_vector(op->tensors[1], n[4]) || (op->tensors[1].data && (n[9] || n[11] || n[12])))
        return BAD_TENSOR;
    Kind kind = plan_kind(plan, op);
    keep_positions(plan, op, n[5] * block_bytes(&kind));
    return DONE;
}

/* query, key, weights, target, heads, width, rate, positions of a block, last blocks: of each row the positions that it sees, as many as the
 * target is wide; with a rate the entries, whose keys are in the rows of their last positions; of blocks, for each head, the blocks of the
 * cache that lie in them, the last ones in any case (without weights: any register) */
static int check_index(Plan *plan, Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    for (int i = 0; i < 4; i++)
        if (!has(plan, n[i]) || (i < 3 && n[i] == n[3]))
            return BAD_REGISTER;
    if (!is_count(n[4], MAX_HEADS) || !is_count(n[5], MAX_HEADS) || plan->positions > MOST_CHOSEN_FROM)
        return BAD_SHAPE;
    if (w[n[0]] != n[4] * n[5] || w[n[1]] != n[5] || (!n[7] && w[n[2]] != n[4]))
        return BAD_SHAPE;
    if (n[6] && !is_rate(n[6]))
        return BAD_SHAPE;
    if (n[7] < 0 || n[7] > MAX_POSITIONS || n[7] % BLOCK || n[8] < 0 || n[8] > MAX_POSITIONS)
        return BAD_SHAPE;
    if (n[7] && (n[6] || w[n[3]] % (n[4] * (n[7] / BLOCK))))
        return BAD_SHAPE;
    Kind kind = index_kind(plan, op);
    keep_positions(plan, op, n[6] && !fills_panels(n[6]) ? entries_of_block(n[6]) * kept_bytes(plan, n[5]) : block_bytes(&kind) / (n[6] ? n[6] : 1));
    return DONE;
}

/* source, mixes, target, keeps, streams, iterations; epsilon of the norm, epsilon, magnitude; base, scales (streams.c) */
static int check_collapse(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    for (int i = 0; i < 3; i++)
        if (!has(plan, n[i]))
            return BAD_REGISTER;
    if (n[0] == n[1] || n[0] == n[2] || n[1] == n[2])
        return BAD_REGISTER;
    if (n[3] < 0 || n[3] > 2 || !is_count(n[4], MOST_STREAMS) || !is_count(n[5], MOST_ITERATIONS) || n[4] * w[n[2]] > w[n[0]])
        return BAD_SHAPE;
    int64_t parts = n[3] == 1 ? 3 : n[3] ? 2 : 1; /* pre, post, comb */
    if (w[n[1]] != n[4] * (parts == 3 ? 2 + n[4] : parts))
        return BAD_SHAPE;
    const Tensor *t = op->tensors;
    return t[0].data && t[0].bytes == w[n[1]] * 4 && t[1].data && t[1].bytes == parts * 4 ? DONE : BAD_TENSOR;
}

static int check_spread(const Plan *plan, const Op *op) /* source, kept, target, is_last, streams */
{
    const int64_t *n = op->numbers, *w = plan->widths;
    for (int i = 0; i < 3; i++)
        if (!has(plan, n[i]) || (i < 2 && n[i] == n[2]))
            return BAD_REGISTER;
    int64_t is_kept = is_count(n[4], MOST_STREAMS) && (w[n[1]] == (2 + n[4]) * n[4] || w[n[1]] == 2 * n[4]);
    return is_kept && n[4] * w[n[0]] <= w[n[2]] ? DONE : BAD_SHAPE;
}

static int check_compress(Plan *plan, Op *op) /* values, gates, target, rate, is_doubled; bias [rate, width of values] */
{
    const int64_t *n = op->numbers, *w = plan->widths;
    for (int i = 0; i < 3; i++)
        if (!has(plan, n[i]) || (i < 2 && n[i] == n[2]))
            return BAD_REGISTER;
    if (!is_rate(n[3]) || n[4] < 0 || n[4] > 1 || w[n[0]] != w[n[2]] * (1 + n[4]) || w[n[1]] != w[n[0]])
        return BAD_SHAPE;
    if (!op->tensors[0].data || op->tensors[0].bytes != n[3] * w[n[0]] * 4)
        return BAD_TENSOR;
    int failed = keep_states(plan, op, 0, ring_bytes(plan, op));
    if (!failed)
        keep_positions(plan, op, compress_bytes(plan, op));
    return failed;
}

/* query, key, entry, target, heads, window, rate, the register of chosen entries (0: all that a row sees); scale; sinks */
static int check_entries(Plan *plan, Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    for (int i = 0; i < 4; i++)
        if (!has(plan, n[i]) || (i < 3 && n[i] == n[3]))
            return BAD_REGISTER;
    if (n[7] && (!has(plan, n[7]) || n[7] == n[3]))
        return BAD_REGISTER;
    if (!is_count(n[4], MAX_HEADS) || !is_count(w[n[1]], MAX_HEADS) || !is_count(n[5], MAX_POSITIONS) || !is_rate(n[6]))
        return BAD_SHAPE;
    if (w[n[0]] != n[4] * w[n[1]] || w[n[2]] != w[n[1]] || w[n[3]] != w[n[0]] || plan->positions > MOST_CHOSEN_FROM)
        return BAD_SHAPE;
    if (!is_vector(op->tensors[0], n[4]))
        return BAD_TENSOR;
    keep_positions(plan, op, entries_bytes(plan, op));
    return DONE;
}

/* register, length, offset (0 or 1) of positions, growth, heads (0: the row has one factor); beta; of heads scales, biases */
static int check_scale(const Plan *plan, const Op *op)
{
    if (!has(plan, op->numbers[0]))
        return BAD_REGISTER;
    if (op->numbers[2] < 0 || op->numbers[2] > 1 || op->numbers[3] < 0 || op->numbers[3] >= GROWTHS)
        return BAD_SHAPE;
    int64_t heads = op->numbers[4];
    if (heads && (op->numbers[3] || !is_count(heads, MAX_HEADS) || plan->widths[op->numbers[0]] % heads))
        return BAD_SHAPE;
    for (int i = 0; heads && i < 2; i++)
        if (!op->tensors[i].data || op->tensors[i].bytes != heads * 4)
            return BAD_TENSOR;
    double most = op->numbers[3] == BY_POWER ? MOST_POWER : MOST_BETA;
    return is_count(op->numbers[1], INT64_MAX) && op->reals[0] >= 0 && op->reals[0] <= most ? DONE : BAD_SHAPE;
}

/* target, type, offset; of each position a row as wide as the target, as it is stored (bf16, fp16, fp32), behind `offset` others */
static int check_position(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers;
    if (!has(plan, n[0]))
        return BAD_REGISTER;
    if (n[1] < BF16 || is_small(n[1]) || n[2] < 0 || n[2] > MAX_POSITIONS)
        return BAD_SHAPE;
    int64_t rows = plan->positions + n[2];
    return op->tensors[0].data && op->tensors[0].bytes >= rows * plan->widths[n[0]] * size_of_type(n[1]) ? DONE : BAD_TENSOR;
}

static int check_xielu(const Plan *plan, const Op *op) /* register; alphas above zero and of the others, beta, epsilon (fp32) */
{
    if (!has(plan, op->numbers[0]))
        return BAD_REGISTER;
    return op->tensors[0].data && op->tensors[0].bytes == 16 ? DONE : BAD_TENSOR;
}

/* source, target, taps, activation, is_pool; weights [taps, columns], bias; of a pool entries of `taps` positions, values and gates side by side
 * in every 256 columns of the source, and what is added to gates */
static int check_convolve(Plan *plan, Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    if (!has(plan, n[0]) || !has(plan, n[1]) || n[0] == n[1])
        return BAD_REGISTER;
    if (n[4] < 0 || n[4] > 1 || w[n[0]] != w[n[1]] * (1 + n[4]) || !is_count(n[2], MOST_TAPS) || n[3] < 0 || n[3] > 6)
        return BAD_SHAPE;
    if (n[4] && (n[3] || !is_rate(n[2])))
        return BAD_SHAPE;
    if (!op->tensors[0].data || op->tensors[0].bytes != n[2] * w[n[1]] * 4 || (n[4] ? op->tensors[1].data != 0 : !is_vector(op->tensors[1], w[n[0]])))
        return BAD_TENSOR;
    return keep_states(plan, op, convolution_bytes(plan, op, STATE_BLOCK + n[2] - 1), convolution_bytes(plan, op, n[2] - 1));
}

/* source, target, form (1: of channels, in lanes; 2: likewise, bounded); bound; rates, in double (null: softplus alone) or in fp32, bias */
static int check_decay(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    if (!has(plan, n[0]) || !has(plan, n[1]))
        return BAD_REGISTER;
    if (w[n[0]] != w[n[1]] || n[2] < 0 || n[2] > 2 || (n[2] == 2 && !(op->reals[0] < 0)))
        return BAD_SHAPE;
    const Tensor *t = op->tensors;
    if (n[2] ? !t[0].data || t[0].bytes != w[n[0]] * 4 : t[0].data && t[0].bytes != w[n[0]] * 8)
        return BAD_TENSOR;
    return t[1].data && t[1].bytes == w[n[0]] * 4 ? DONE : BAD_TENSOR;
}

/* query, key, value, decay, strength, target, heads, key heads, width, value width, form (kernels.h; by channel: decays [heads * width]; a scan
 * is of one head, its decay and strength are steps of each column); skips [heads], of a scan [value width], or null; rates of a scan
 * [width, value width] */
static int check_delta(Plan *plan, Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    for (int i = 0; i < 6; i++)
        if (!has(plan, n[i]) || (i < 5 && n[i] == n[5]))
            return BAD_REGISTER;
    for (int i = 6; i < 10; i++)
        if (!is_count(n[i], MAX_HEADS))
            return BAD_SHAPE;
    if (n[6] % n[7] || w[n[0]] != n[7] * n[8] || w[n[1]] != n[7] * n[8] || w[n[2]] != n[6] * n[9] || w[n[5]] != n[6] * n[9])
        return BAD_SHAPE;
    int is_scan = n[10] == DELTA_SCAN;
    int64_t each = is_scan ? n[9] : n[6]; /* strengths of a row */
    if (n[10] < DELTA_RULE || n[10] > DELTA_SCAN || w[n[3]] != each * (n[10] == DELTA_BY_CHANNEL ? n[8] : 1) || w[n[4]] != each)
        return BAD_SHAPE;
    if (is_scan && n[6] != 1)
        return BAD_SHAPE;
    if (!is_vector(op->tensors[0], each))
        return BAD_TENSOR;
    if (is_scan && (!op->tensors[1].data || op->tensors[1].bytes != n[8] * n[9] * 4))
        return BAD_TENSOR;
    return keep_states(plan, op, delta_block_floats(op) * 4, delta_floats(op) * 4);
}

/* gate: gate, up, target, activation; alpha, limit, offset. add: source, is_last, target; scale. multiply: source, by (a column for
 * each of its equal parts), target; or its numbers [width], by not being used. soften: register; scale, soft cap (-c: numbers
 * stay between -c and c). */
static int check_columns(const Plan *plan, const Op *op)
{
    const int64_t *n = op->numbers, *w = plan->widths;
    int registers = op->kind == ADD || op->kind == SOFTEN ? 1 : 3;
    for (int i = 0; i < registers; i++)
        if (!has(plan, n[i]))
            return BAD_REGISTER;
    if (op->kind == ADD && !has(plan, n[2]))
        return BAD_REGISTER;
    if (op->kind == MULTIPLY && op->tensors[0].data && op->tensors[0].bytes != w[n[0]] * 4)
        return BAD_TENSOR;
    int is_fit = op->kind == SOFTEN     ? 1
                 : op->kind == ADD      ? w[n[0]] == w[n[2]] && n[0] != n[2]
                 : op->kind == MULTIPLY && op->tensors[0].data ? w[n[0]] == w[n[2]]
                 : op->kind == MULTIPLY ? w[n[0]] == w[n[2]] && w[n[2]] % w[n[1]] == 0 && n[1] != n[2]
                                        : w[n[0]] == w[n[2]] && w[n[1]] == w[n[2]] && n[3] >= 0 && n[3] <= SITU;
    return is_fit ? DONE : BAD_SHAPE;
}

static int check(Plan *plan, Op *op)
{
    switch (op->kind) {
    case NORM: return check_norm(plan, op);
    case PRODUCT: return check_product(plan, op);
    case ROTARY: return check_rotary(plan, op);
    case ATTENTION: return check_attention(plan, op);
    case COPY: return check_copy(plan, op);
    case ROUTE: return check_route(plan, op);
    case EXPERTS: return check_experts(plan, op);
    case CONVOLVE: return check_convolve(plan, op);
    case DECAY: return check_decay(plan, op);
    case DELTA: return check_delta(plan, op);
    case INDEX: return check_index(plan, op);
    case SCALE: return check_scale(plan, op);
    case XIELU: return check_xielu(plan, op);
    case POSITION: return check_position(plan, op);
    case COLLAPSE: return check_collapse(plan, op);
    case SPREAD: return check_spread(plan, op);
    case COMPRESS: return check_compress(plan, op);
    case ATTEND_ENTRIES: return check_entries(plan, op);
    case MIX: case RESCALE: case SPARSIFY: return check_mix(plan, op);
    case NGRAMS: return check_ngrams(plan, op);
    case ADMIT: return check_admit(plan, op);
    case ATTEND_STREAMS: return check_attend_streams(plan, op);
    case GATE: case ADD: case MULTIPLY: case SOFTEN: return check_columns(plan, op);
    default: return BAD_KIND;
    }
}

/* One more operation, of a plan that has not run: memory for rows is what its operations needed then. The tensors stay Python's. */
EXPORT int mh_plan_add(Plan *plan, int64_t kind, const int64_t numbers[MAX_NUMBERS], const double reals[MAX_REALS],
                       const Tensor tensors[MAX_TENSORS])
{
    if (plan->rows)
        return HAS_RUN;
    if (plan->num_ops == plan->room) {
        int64_t room = plan->room ? 2 * plan->room : 64;
        Op *ops = realloc(plan->ops, (size_t)room * sizeof *ops);
        if (!ops)
            return NO_MEMORY;
        plan->ops = ops, plan->room = room;
    }
    Op *op = plan->ops + plan->num_ops;
    *op = (Op){.kind = kind};
    memcpy(op->numbers, numbers, sizeof op->numbers);
    memcpy(op->reals, reals, sizeof op->reals);
    memcpy(op->tensors, tensors, sizeof op->tensors);
    int failed = check(plan, op);
    plan->num_ops += failed == DONE;
    return failed;
}

/* Bytes that a block of 64 positions takes in a session's cache, all layers together. */
EXPORT int64_t mh_plan_block_bytes(const Plan *plan) { return plan->block_bytes; }

/* Bytes of a block of states, and of the state behind the last position, all layers together. */
EXPORT int64_t mh_plan_state_bytes(const Plan *plan) { return plan->state_bytes; }
EXPORT int64_t mh_plan_now_bytes(const Plan *plan) { return plan->now_bytes; }

static int has_states(const Plan *plan, const Segment *s)
{
    if (!plan->now_bytes && !plan->state_bytes)
        return 1;
    if (!plan->state_bytes)
        return s->now != 0;
    if (!s->states || !s->now || s->num_states < 0 || s->num_states > 1 << 25 || s->start + s->count > s->num_states * STATE_BLOCK)
        return 0;
    if (s->from < 0)
        return s->from == -1;
    return s->from % STATE_BLOCK == 0 && s->from <= s->start && s->start - s->from <= STATE_BLOCK && s->states[s->from / STATE_BLOCK];
}

static int check_segments(const Plan *plan, const Segment *segments, int64_t num_segments, int64_t num_rows)
{
    int64_t row = 0;
    if (!is_count(num_segments, MAX_SEGMENTS))
        return BAD_SEGMENT;
    for (int64_t i = 0; i < num_segments; i++) {
        const Segment *s = segments + i;
        if (s->row != row || !is_count(s->count, num_rows - row) || s->num_blocks < 0 || s->num_blocks > 1 << 24)
            return BAD_SEGMENT;
        if (s->start < 0 || s->start > plan->positions - s->count)
            return BAD_POSITION;
        if (plan->block_bytes && (!s->blocks || s->start + s->count > s->num_blocks * BLOCK))
            return BAD_SEGMENT;
        for (int64_t j = 0; plan->block_bytes && j * BLOCK < s->start + s->count; j++)
            if (!s->blocks[j])
                return BAD_SEGMENT;
        if (!has_states(plan, s))
            return BAD_SEGMENT;
        for (int64_t j = 0; j < i; j++)
            if ((plan->block_bytes && segments[j].blocks == s->blocks) || (plan->now_bytes && segments[j].now == s->now))
                return BAD_SEGMENT;
        row += s->count;
    }
    return row == num_rows ? DONE : BAD_SEGMENT;
}

/* Zeros; on huge pages where the system grants them and they fill one: hundreds of rows are walked line by line. */
static float *more_room(float *old, int64_t width, int64_t rows)
{
    free(old);
    size_t bytes = (size_t)(ceil_div(width * rows, SIDE) * SIDE) * 4, align = bytes < HUGE_PAGE ? 64 : HUGE_PAGE;
    bytes = (bytes + align - 1) / align * align;
    float *room = aligned_alloc(align, bytes);
#ifdef MADV_HUGEPAGE
    if (room && align == HUGE_PAGE)
        (void)madvise(room, bytes, MADV_HUGEPAGE);
#endif
    return room ? memset(room, 0, bytes) : 0;
}

/* Rows, of num_rows, that go through the operations at once: at most CHUNK, fewer where registers are so wide that they would take more
 * than PLAN_BYTES, LEAST_ROWS at least. About as many each time, in whole blocks: every time reads all weights. */
static int64_t rows_at_once(const Plan *plan, int64_t num_rows)
{
    int64_t row = (plan->width + (plan->depth + 1) * DEPTH + 2 * plan->turns + 1) * 4, room = PLAN_BYTES / row / LEAST_ROWS * LEAST_ROWS;
    int64_t most = room < LEAST_ROWS ? LEAST_ROWS : at_most(room, CHUNK);
    return at_most(ceil_div(ceil_div(num_rows, ceil_div(num_rows, most)), 48) * 48, most);
}

static int has_room(Plan *plan, int64_t rows)
{
    if (plan->rows >= rows)
        return 1;
    plan->registers = more_room(plan->registers, plan->width, rows);
    plan->prepared = more_room(plan->prepared, (plan->depth + 1) * DEPTH, rows);
    plan->angles = more_room(plan->angles, 2 * plan->turns + 1, rows);
    int has_all = plan->registers && plan->prepared && plan->angles;
    plan->rows = has_all ? rows : 0;
    return has_all;
}

/* The part of the segments that lies in rows [first, first + rows), counted from there. */
static int64_t cut(const Segment *segments, int64_t num_segments, int64_t first, int64_t rows, Segment *out)
{
    int64_t found = 0;
    for (int64_t i = 0; i < num_segments; i++) {
        Segment s = segments[i];
        int64_t from = s.row > first ? s.row : first, until = at_most(s.row + s.count, first + rows);
        if (from >= until)
            continue;
        s.from = from > s.row ? -1 : s.from; /* `now` is the state behind the part before */
        s.start += from - s.row, s.row = from - first, s.count = until - from;
        out[found++] = s;
    }
    return found;
}

/* Rows in, rows out: at most rows_at_once at a time, each through all operations. One call at a time for a plan and for a team. */
EXPORT int mh_plan_run(Plan *plan, Team *team, int64_t threads, const Segment *segments, int64_t num_segments, const void *in,
                       int64_t in_bytes, void *out, int64_t out_bytes, int64_t num_rows)
{
    int64_t size = plan->widths[0] * size_of_type(plan->type), out_size = plan->widths[plan->out] * size_of_type(plan->out_type);
    if (!is_count(num_rows, MAX_ROWS) || in_bytes != num_rows * size || out_bytes != num_rows * out_size || !is_count(threads, 1024))
        return BAD_ROWS;
    int failed = check_segments(plan, segments, num_segments, num_rows);
    if (failed)
        return failed;
    Segment part[CHUNK];
    int64_t chunk = rows_at_once(plan, num_rows);
    if (!has_room(plan, at_most(ceil_div(num_rows, LEAST_ROWS) * LEAST_ROWS, chunk)))
        return NO_MEMORY;
    __atomic_fetch_add(calls + plan->target, 1, __ATOMIC_RELAXED);
    uint64_t modes = modes_enter();
    for (int64_t row = 0; row < num_rows && !failed; row += chunk) {
        int64_t rows = at_most(num_rows - row, chunk);
        for (int64_t i = 0; i < rows; i++)
            plan->kernels->widen((const char *)in + (row + i) * size, plan->type, 1,
                                 plan->registers + plan->offsets[0] * plan->rows + i * ceil_div(plan->widths[0], SIDE) * SIDE,
                                 plan->widths[0], 0);
        failed = plan_run_chunk(plan, team, threads, part, cut(segments, num_segments, row, rows, part), rows);
        for (int64_t i = 0; i < rows && !failed; i++)
            plan->kernels->narrow(plan->registers + plan->offsets[plan->out] * plan->rows +
                                      i * ceil_div(plan->widths[plan->out], SIDE) * SIDE,
                                  (char *)out + (row + i) * out_size, plan->out_type, plan->widths[plan->out]);
    }
    modes_leave(modes);
    return failed ? NO_MEMORY : DONE;
}

/* Rows of a table [vocab, width], row by row or packed, by id, times scale (unless 1), as bf16 or fp32. */
EXPORT int mh_embed(int64_t target, int64_t type, const void *table, int64_t bytes, int64_t vocab, int64_t width, const int64_t *ids,
                    int64_t count, int64_t row_type, void *out, int64_t out_bytes, int64_t is_packed, double scale)
{
    if (!mh_supports(target) || type < BF16 || type >= TYPES || (is_small(type) && !is_packed) || (row_type != BF16 && row_type != F32))
        return BAD_KIND;
    if (!is_count(vocab, MAX_WIDTH) || !is_count(width, MAX_WIDTH) || !table)
        return BAD_SHAPE;
    if (bytes != (is_packed ? mh_packed_bytes(type, vocab, width) : vocab * width * size_of_type(type)))
        return BAD_TENSOR;
    if (count < 0 || count > MAX_ROWS || out_bytes != count * width * size_of_type(row_type))
        return BAD_ROWS;
    float row[PIECE], unpacked[PIECE];
    uint64_t modes = modes_enter();
    for (int64_t i = 0; i < count; i++) {
        if (ids[i] < 0 || ids[i] >= vocab) {
            modes_leave(modes);
            return BAD_ROWS;
        }
        for (int64_t at = 0; at < width; at += PIECE) {
            int64_t part = at_most(width - at, PIECE);
            const void *from = is_packed ? unpack(type, table, width, ids[i], at, part, unpacked)
                                         : (const char *)table + (ids[i] * width + at) * size_of_type(type);
            back_end(target)->widen(from, is_small(type) ? F32 : type, (float)scale, row, part, 0);
            back_end(target)->narrow(row, (char *)out + (i * width + at) * size_of_type(row_type), row_type, part);
        }
    }
    __atomic_fetch_add(calls + target, 1, __ATOMIC_RELAXED);
    modes_leave(modes);
    return DONE;
}

EXPORT Team *mh_team_start(int64_t size) { return is_count(size, 1024) ? team_start(size) : 0; }
EXPORT void mh_team_stop(Team *team) { team_stop(team); }
