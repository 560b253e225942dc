/* The kernels of one target: compiled once for each, with -DTARGET=name and the target's -m flags (setup.py).
 * docs/arithmetic.md states what is computed here, operation by operation. */
#include "kernels.h"

#include <stddef.h>

#ifdef TILES /* what tiles do not compute is left out: AVX-512's kernels do (machine.c) */
#pragma GCC diagnostic ignored "-Wunused-function"
#pragma GCC diagnostic ignored "-Wunused-const-variable"
#endif

#include "functions.h"
#include "panels.h"
#include "quants.h"
#include "rounding.h"
#ifdef TILES
#include "tile_groups.h"
#endif

#ifdef LANES_AVX2
#define HAS_DOT mh_has_avx_dot
#else
#define HAS_DOT mh_has_dot
#endif

INLINE V even_of(int64_t type, const char *at)
{
    return type == BF16    ? even_bf16((const half_t *)at)
           : type == F16   ? from_f16((const half_t *)at)
           : type < 0      ? from_codes((const int8_t *)at)
                           : load((const float *)at);
}

INLINE V odd_of(int64_t type, const char *at)
{
    return type == BF16    ? odd_bf16((const half_t *)at)
           : type == F16   ? from_f16((const half_t *)at + SIDE)
           : type < 0      ? from_codes((const int8_t *)at + SIDE)
                           : load((const float *)at + SIDE);
}

/* sums[r] += the chain of x's row r with a panel, over `depth` steps, of SCALED each times its scales; count is a constant wherever this is
 * inlined. Registers hold the even and odd sums of BOTH_ROWS rows and one row of weights; of more rows, all even numbers of a step come
 * before its odd ones. */
INLINE void chain(int64_t type, int count, Fetch how, const float *x, int64_t row_step, int64_t step_step, const char *panel, int64_t depth,
                  float *sums, int64_t sum_step)
{
    const int64_t pair = 2 * SIDE * size_of_type(type);
    const int passes = count > BOTH_ROWS ? 2 : 1, halves = 2 / passes; /* of a step: even numbers, odd ones */
    for (int64_t step = 0; step < depth; step++, panel += step_bytes(type), x += step_step) {
        V all[2][LANES_ROWS];
#pragma GCC unroll 2
        for (int pass = 0; pass < passes; pass++) {
#pragma GCC unroll 2
            for (int half = pass; half < pass + halves; half++)
#pragma GCC unroll 16
                for (int r = 0; r < count; r++)
                    all[half][r] = set(0);
#pragma GCC unroll 4
            for (int i = 0; i < SIDE; i++) {
                const char *at = panel + i * pair;
                if (pass == 0)
                    fetch_weights(how, at);
#pragma GCC unroll 2
                for (int half = pass; half < pass + halves; half++) {
                    V w = half ? odd_of(type, at) : even_of(type, at);
                    w = passes == 2 ? in_register(w) : w;
#pragma GCC unroll 16
                    for (int r = 0; r < count; r++)
                        all[half][r] = fma_(set(x[r * row_step + 2 * i + half]), w, all[half][r]);
                    if (half == 0)
                        __asm__("" : "+r"(at)); /* loads it again: kept for both, it would push a sum out of the registers */
                }
            }
        }
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            V sum = load(sums + r * sum_step), both = add(all[0][r], all[1][r]);
            store(sums + r * sum_step, type == SCALED ? fma_(both, from_bf16((const half_t *)(panel + pair * SIDE)), sum) : add(sum, both));
        }
        __asm__("" ::: "memory"); /* the sums stay where they are: kept for the next step, they would only lie on the stack */
    }
}

/* `chain` for each type and number of rows: functions of their own, or variables of all of them would fill the registers of each. Those of
 * attention, `near`, know that nothing is fetched far and where rows lie: a tenth fewer cycles with what L1 holds. With weights from
 * memory, 4 rows were slower so. */
typedef void Chain(int amd, const float *x, int64_t row_step, int64_t step_step, const char *panel, int64_t depth, float *sums, int64_t sum_step);
#define EACH_CHAIN(name, type, n, on_amd, row_step)                                                                                        \
    static __attribute__((noinline)) void name##_##type##_##n(int amd, const float *x, int64_t apart, int64_t step_step,                   \
                                                              const char *panel, int64_t depth, float *sums, int64_t sum_step)             \
    {                                                                                                                                      \
        (void)apart;                                                                                                                       \
        if (n <= 2 && (on_amd) != SOON && amd >= ZEN5) /* a loop of its own: a fetch in a branch was 2 % slower */                         \
            chain(type, n, on_amd, x, row_step, step_step, panel, depth, sums, sum_step);                                                  \
        else                                                                                                                               \
            chain(type, n, n > 2 && amd ? on_amd : SOON, x, row_step, step_step, panel, depth, sums, sum_step);                            \
    }
#define CHAIN(type, n) EACH_CHAIN(chain, type, n, (n > 2 ? FAR : ONCE), apart)
#define NEAR_CHAIN(type, n) EACH_CHAIN(near, type, n, SOON, DEPTH)
#if LANES_ROWS == 2
#define COUNTS(name, type) name(type, 1) name(type, 2)
#elif LANES_ROWS == 3
#define COUNTS(name, type) name(type, 1) name(type, 2) name(type, 3)
#elif LANES_ROWS == 6
#define COUNTS(name, type) name(type, 1) name(type, 2) name(type, 3) name(type, 4) name(type, 5) name(type, 6)
#elif LANES_ROWS == 12
#define COUNTS(name, type)                                                                            \
    name(type, 1) name(type, 2) name(type, 3) name(type, 4) name(type, 5) name(type, 6) name(type, 7) \
    name(type, 8) name(type, 9) name(type, 10) name(type, 11) name(type, 12)
#endif
COUNTS(CHAIN, BF16)
COUNTS(CHAIN, F16)
COUNTS(CHAIN, F32)
#define NAME(type, n) chain_##type##_##n,
#define NEAR(type, n) near_##type##_##n,
typedef Chain *const Chains[LANES_ROWS];
static Chains PRODUCT[] = {{COUNTS(NAME, BF16)}, {COUNTS(NAME, F16)}, {COUNTS(NAME, F32)}}; /* by type */
#ifdef TILES
#define ATTENTION ((Chains *)kernels_avx512.attention)
#else
COUNTS(NEAR_CHAIN, BF16)
COUNTS(NEAR_CHAIN, F32)
COUNTS(NEAR_CHAIN, CODES)
COUNTS(NEAR_CHAIN, SCALED)
static Chains ATTENTION[] = {{COUNTS(NEAR, SCALED)}, {COUNTS(NEAR, CODES)}, {COUNTS(NEAR, BF16)}, {0}, {COUNTS(NEAR, F32)}}; /* by type, less SCALED */
#endif
#undef NEAR
#undef NAME
#undef COUNTS
#undef NEAR_CHAIN
#undef CHAIN
#undef EACH_CHAIN

enum { TURN_ROWS = LANES_ROWS < 6 ? LANES_ROWS : 6 }; /* rows of a chain where they take turns */

/* sums[r * sum_step] += chains of `count` rows (any number), DEPTH apart, with a panel. More than registers have sums for take turns, about as many
 * in each, and go through some steps of K before the next. all: the chains of the panel's type. Other panels lie behind this
 * one. */
static void chains(int64_t type, Chains all, int64_t count, int amd, const float *x, int64_t step_step, const char *panel, int64_t depth,
                   float *sums, int64_t sum_step)
{
    int64_t bytes = step_bytes(type), steps = count > LANES_ROWS ? TURN_BYTES / bytes : depth;
    for (int64_t step = 0; step < depth; step += steps)
        for (int64_t row = 0, rows; row < count; row += rows) {
            int64_t left = count - row;
            rows = left <= LANES_ROWS ? left : ceil_div(left, ceil_div(left, TURN_ROWS));
            rows += left > rows && rows == BOTH_ROWS + 1; /* AVX2: sums of four rows wait for each other, those of five and three do not */
            all[rows - 1](amd, x + row * DEPTH + step * step_step, DEPTH, step_step, panel + step * bytes, at_most(depth - step, steps),
                          sums + row * sum_step, sum_step);
        }
}

/* A panel's steps as fp32: of each 16 even rows, then 16 odd ones. Those of `apart` panels lie beside each other. */
static void expand(int64_t type, const char *panel, int64_t steps, float *out, int64_t apart)
{
    const int64_t pair = 2 * SIDE * size_of_type(type);
    for (int64_t step = 0; step < steps; step++, out += apart * DEPTH * SIDE)
        for (int64_t i = 0; i < SIDE; i++, panel += pair) {
            V e = type == BF16 ? even_bf16((const half_t *)panel) : even_of(type, panel);
            V o = type == BF16 ? odd_bf16((const half_t *)panel) : odd_of(type, panel);
            store(out + i * SIDE, e);
            store(out + (SIDE + i) * SIDE, o);
        }
}

/* What is fetched meanwhile: so many lines of each panel with each half of a step. */
typedef struct {
    const char *at;
    int64_t apart, lines;
} Ahead;

/* all[p][r] = the chain of x's row r with panel p over the even numbers of an expanded step, or the odd ones. */
INLINE void half_chain(int count, int panels, const float *x, const float *panel, V all[BLOCK_PANELS][BLOCK_ROWS], Ahead *ahead)
{
    for (int64_t i = 0; i < ahead->lines; i++, ahead->at += LINE)
        for (int p = 0; p < panels; p++)
            __builtin_prefetch(ahead->at + p * ahead->apart);
#pragma GCC unroll 16
    for (int r = 0; r < count; r++)
        for (int p = 0; p < panels; p++)
            all[p][r] = set(0);
#pragma GCC unroll 4
    for (int i = 0; i < SIDE; i++) {
        V w[BLOCK_PANELS];
        for (int p = 0; p < panels; p++)
            w[p] = in_register(load(panel + (p * DEPTH + i) * SIDE));
#pragma GCC unroll 16
        for (int r = 0; r < count; r++) {
            V number = set(x[r * DEPTH + 2 * i]);
            for (int p = 0; p < panels; p++)
                all[p][r] = fma_(number, w[p], all[p][r]);
        }
    }
}

/* sums[p][r] += chains of `count` rows with panels of `steps` expanded steps. All even numbers before the odd ones: registers then hold
 * twice the rows. Of a panel each number is loaded once for all rows, of a row once for all panels: a load for each product would be
 * more than a CPU can do beside two products in a cycle. */
INLINE void block_chain(int count, int panels, const float *rows, int64_t step_step, const float *panel, int64_t steps, float *sums, Ahead *ahead)
{
    for (int64_t step = 0; step < steps; step++, rows += step_step, panel += panels * DEPTH * SIDE) {
        V even[BLOCK_PANELS][BLOCK_ROWS], odd[BLOCK_PANELS][BLOCK_ROWS];
        half_chain(count, panels, rows, panel, even, ahead);
        half_chain(count, panels, rows + 1, panel + SIDE * SIDE, odd, ahead);
#pragma GCC unroll 16
        for (int r = 0; r < count; r++)
            for (int p = 0; p < panels; p++) {
                float *to = sums + (p * CHUNK + r) * SIDE;
                store(to, add(load(to), add(even[p][r], odd[p][r])));
            }
        __asm__("" ::: "memory"); /* the sums stay where they are: registers are needed for the next step */
    }
}

static void block_chains(int64_t count, int64_t panels, const float *rows, int64_t step_step, const float *panel, int64_t steps, float *sums,
                         Ahead *ahead)
{
#define COUNT(n, p) \
    if (count == n && panels == p) \
        block_chain(n, p, rows, step_step, panel, steps, sums, ahead);
#if BLOCK_ROWS >= 6
#define COUNTS(p) COUNT(1, p) COUNT(2, p) COUNT(3, p) COUNT(4, p) COUNT(5, p) COUNT(6, p)
#else
#define COUNTS(p) COUNT(1, p) COUNT(2, p)
#endif
    COUNTS(1)
#if BLOCK_PANELS >= 2
    COUNTS(2)
#endif
#undef COUNT
#undef COUNTS
}

/* sums += `panels` panels of more than FEW_ROWS rows, a few steps of all panels before the next, so that rows stay in L2 meanwhile. What
 * is fetched is the same panels' next steps: it has the time of the other panels to come. */
static void block_product(const Matrix *matrix, const Source *source, const char *packed, int64_t panels, float *sums, float *expanded)
{
    int64_t depth = source->depth, bytes = step_bytes(matrix->type), turns = ceil_div(source->count, BLOCK_ROWS), wide, rows;
    for (int64_t step = 0; step < depth; step += EXPANDED)
        for (int64_t p = 0; p < panels; p += wide) {
            int64_t steps = at_most(depth - step, EXPANDED), is_last = step + EXPANDED >= depth;
            Ahead ahead = {packed + (is_last ? (p + panels) * depth : p * depth + step + EXPANDED) * bytes, depth * bytes,
                           ceil_div(bytes, 2 * LINE * turns)};
            wide = at_most(panels - p, BLOCK_PANELS);
            for (int64_t i = 0; i < wide; i++)
                expand(matrix->type, packed + ((p + i) * depth + step) * bytes, steps, expanded + i * DEPTH * SIDE, wide);
            for (int64_t row = 0, left = turns; row < source->count; row += rows) {
                rows = ceil_div(source->count - row, left--);
                block_chains(rows, wide, source->rows + step * source->step_step + row * DEPTH, source->step_step, expanded, steps,
                             sums + (p * CHUNK + row) * SIDE, &ahead);
            }
        }
}

/* The groups of a row of k numbers, where they lie or into tiles; of a row beyond the last one, null, zeros. */
static void prepare_groups(const float *x, int64_t k, const Source *to, int64_t row)
{
    for (int64_t step = 0; step < to->depth; step++) {
        float room[DEPTH] = {0};
        Group group = {0}, *place = to->form == GROUPED ? (Group *)(to->rows + row * to->row_step + step * to->step_step) : &group;
        int64_t left = at_most(k - step * DEPTH, DEPTH);
        if (x)
            round_group(left < DEPTH ? memcpy(room, x + step * DEPTH, (size_t)left * 4) : x + step * DEPTH, place);
#ifdef TILES
        if (to->form == TILED_GROUPS)
            put_group(place, row_tile(to, step, row), row);
#endif
    }
}

/* Rows [first, first + count) of x [to->count, k], rounded, zeros beyond k; in tiles also beyond the last row. */
static void prepare(const float *x, int64_t stride, int64_t k, int64_t rounds, const Source *to, int64_t first, int64_t count)
{
    for (int64_t row = first; row < first + count; row++) {
        if (to->form == GROUPED || to->form == TILED_GROUPS) {
            prepare_groups(row < to->count ? x + row * stride : 0, k, to, row);
            continue;
        }
#ifdef TILES
        for (int64_t at = 0; to->form == TILED && at < to->depth * DEPTH; at += LANES) {
            V v = row < to->count && at < k ? load_part(x + row * stride + at, k - at) : set(0);
            to_bf16((half_t *)tile_of(to, at / DEPTH, row) + at % DEPTH, as_bf16(v));
        }
        if (to->form == TILED)
            continue;
#endif
        for (int64_t at = 0; at < to->depth * DEPTH; at += LANES) {
            V v = at < k ? load_part(x + row * stride + at, k - at) : set(0);
            store(to->rows + row * to->row_step + at / DEPTH * to->step_step + at % DEPTH, rounds ? as_bf16(v) : v);
        }
    }
}

/* Zeros for the sums of `panels` panels and `rows` rows, and of those that fill up a tile. */
static float *clear_sums(float *sums, int64_t panels, int64_t rows)
{
    for (int64_t p = 0; p < panels; p++)
        memset(sums + p * CHUNK * SIDE, 0, (size_t)(ceil_div(rows, SIDE) * SIDE * SIDE) * 4);
    return sums;
}

/* Rows of sums of panels [panel, panel + panels) -> out, with bias and activation. */
static void finish(const Matrix *matrix, int64_t panel, int64_t panels, int64_t rows, const float *sums, float *out, int64_t stride)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t p = 0; p < panels; p++) {
            int64_t column = (panel + p) * SIDE, left = at_most(matrix->n - column, SIDE);
            V sum = load(sums + (p * CHUNK + row) * SIDE);
            sum = matrix->bias ? add(sum, load_part(matrix->bias + column, left)) : sum;
            sum = matrix->activation ? activate(matrix->activation, 1, sum) : sum;
            store_part(out + row * stride + column, sum, left);
        }
}

/* Panels [panel, end) of a product; scratch: SCRATCH_BYTES. */
static void product(const Matrix *matrix, const Source *source, int64_t panel, int64_t end, float *out, int64_t stride,
                    float *scratch)
#ifdef TILES
{
    int64_t bytes = panel_bytes(matrix->type, source->depth), most = source->form == TILED ? TILED_PANELS : source->count > SIDE ? PANELS : 1;
    float *sums = scratch + EXPANDED_FLOATS;
    if (source->form != TILED && source->form != TILED_GROUPS) {
        kernels_avx512.product(matrix, source, panel, end, out, stride, scratch);
        return;
    }
    tiles_begin(source->form == TILED ? SIDE : DEPTH / 4, tile_lines(source));
    for (int64_t panels; panel < end; panel += panels) {
        const char *packed = (const char *)matrix->packed + panel * bytes;
        panels = at_most(end - panel, most);
        if (source->form == TILED)
            tile_product(source, packed, panels, sums);
        else
            group_tiles(matrix->type, source, (const uint8_t *)packed, panels, clear_sums(sums, panels, source->count));
        finish(matrix, panel, panels, source->count, sums, out, stride);
    }
    tiles_end();
}
#else
{
    int64_t depth = source->depth, bytes = panel_bytes(matrix->type, depth), is_many = source->form == AS_THEY_ARE && source->count > FEW_ROWS;
    float *sums = scratch + EXPANDED_FLOATS;
    for (int64_t panels; panel < end; panel += panels) {
        const char *packed = (const char *)matrix->packed + panel * bytes;
        panels = is_many ? at_most(end - panel, PANELS) : 1;
        clear_sums(sums, panels, source->count);
        if (is_many)
            block_product(matrix, source, packed, panels, sums, scratch);
        else if (source->form == GROUPED)
            group_chains(matrix->type, HAS_DOT, source, (const uint8_t *)packed, sums);
        else
            chains(matrix->type, PRODUCT[matrix->type], source->count, mh_amd, source->rows, source->step_step, packed, depth, sums, SIDE);
        finish(matrix, panel, panels, source->count, sums, out, stride);
    }
}
#endif

/* A sum over n numbers: lane i takes numbers i, i + 16, ... in order, then the tree. */
static float square_sum(const float *x, int64_t n, float mean)
{
    V sum = set(0);
    for (int64_t at = 0; at < n; at += LANES) {
        int64_t left = at_most(n - at, LANES);
        V v = sub(load_part(x + at, left), set(mean));
        if (left < LANES) { /* lanes beyond the row count nothing */
            float lanes[LANES] = {0};
            store_part(lanes, v, left);
            v = load(lanes);
        }
        sum = fma_(v, v, sum);
    }
    return tree_sum(sum);
}

static float plain_sum(const float *x, int64_t n)
{
    V sum = set(0);
    for (int64_t at = 0; at < n; at += LANES)
        sum = add(sum, load_part(x + at, n - at));
    return tree_sum(sum);
}

static float first_lane(V v)
{
    float lanes[LANES];
    store(lanes, v);
    return lanes[0];
}

static void norm(const float *x, float *out, int64_t n, int64_t is_layer, float epsilon, const float *weight, const float *bias,
                 float offset)
{
    float mean = is_layer ? plain_sum(x, n) / (float)n : 0, square = square_sum(x, n, mean) / (float)n;
    V scale = div_(set(1), root(set(square + epsilon)));
    for (int64_t at = 0; at < n; at += LANES) {
        int64_t left = n - at;
        V v = mul(sub(load_part(x + at, left), set(mean)), scale);
        if (weight) {
            V w = load_part(weight + at, left);
            v = mul(v, offset != 0 ? add(set(offset), w) : w);
        }
        v = bias ? add(v, load_part(bias + at, left)) : v;
        store_part(out + at, v, left);
    }
}

/* 1 / sqrt(mean of squares + epsilon). */
static float inverse(const float *x, int64_t n, float epsilon)
{
    return first_lane(div_(set(1), root(set(square_sum(x, n, 0) / (float)n + epsilon))));
}

/* out[n] = of each column the sum over `count` rows, in order, of softmax of gates times values; rows are `stride` apart. */
static void pool(const float *gates, const float *values, int64_t count, int64_t stride, int64_t n, float *out)
{
    for (int64_t at = 0; at < n; at += LANES) {
        V top = set(-__builtin_inff()), total = set(0), sum = set(0);
        for (int64_t r = 0; r < count; r++)
            top = more(load_part(gates + r * stride + at, n - at), top);
        for (int64_t r = 0; r < count; r++) {
            V weight = exponential_down(sub(load_part(gates + r * stride + at, n - at), top));
            total = add(total, weight);
            sum = fma_(weight, load_part(values + r * stride + at, n - at), sum);
        }
        store_part(out + at, div_(sum, total), n - at);
    }
}

/* Turns columns (i, turns + i), or pairs (2 i, 2 i + 1): a c - b s, b c + a s, each product rounded. */
static void rotate(float *x, int64_t turns, int64_t pairs, const float *cos, const float *sin)
{
    int64_t step = pairs ? 2 : 1, other = pairs ? 1 : turns;
    for (int64_t at = 0; at < turns; at += LANES) {
        int64_t left = at_most(turns - at, LANES);
        float first[LANES] = {0}, second[LANES] = {0};
        for (int64_t i = 0; i < left; i++)
            first[i] = x[(at + i) * step], second[i] = x[(at + i) * step + other];
        V a = load(first), b = load(second), c = load_part(cos + at, left), s = load_part(sin + at, left);
        store(first, sub(mul(a, c), mul(b, s)));
        store(second, add(mul(b, c), mul(a, s)));
        for (int64_t i = 0; i < left; i++)
            x[(at + i) * step] = first[i], x[(at + i) * step + other] = second[i];
    }
}

/* limit: 0 for none, below 0 one of activated gates. */
static void gate(const float *gates, const float *ups, float *out, int64_t n, int64_t activation, float alpha, float limit,
                 float offset)
{
    V most = set(limit < 0 ? -limit : limit);
    for (int64_t at = 0; at < n; at += LANES) {
        V g = load_part(gates + at, n - at), u = load_part(ups + at, n - at);
        if (activation == SITU) {
            u = limit > 0 ? mul(most, hyperbolic(div_(u, most))) : u;
            g = mul(mul(set(alpha), hyperbolic(div_(g, set(alpha)))), sigmoid(g));
            store_part(out + at, mul(g, u), n - at);
            continue;
        }
        g = limit > 0 ? pick(below(most, g), most, g) : g;
        if (limit != 0) {
            u = pick(below(most, u), most, u);
            u = pick(below(u, minus(most)), minus(most), u);
        }
        u = offset != 0 ? add(u, set(offset)) : u;
        g = activate(activation, alpha, g);
        g = limit < 0 ? pick(below(most, g), most, g) : g;
        store_part(out + at, mul(g, u), n - at);
    }
}

static void add_rows(const float *x, const float *y, float scale, float *out, int64_t n, int64_t rounds)
{
    for (int64_t at = 0; at < n; at += LANES) {
        V v = load_part(y + at, n - at);
        v = add(load_part(x + at, n - at), scale != 1 ? mul(v, set(scale)) : v);
        store_part(out + at, rounds ? as_bf16(v) : v, n - at);
    }
}

static void multiply(const float *x, float by, float *out, int64_t n)
{
    for (int64_t at = 0; at < n; at += LANES)
        store_part(out + at, mul(load_part(x + at, n - at), set(by)), n - at);
}

/* In place. by: alpha of numbers above zero, alpha of the others, beta, epsilon. */
static void xielu(float *x, const float *by, int64_t n)
{
    for (int64_t at = 0; at < n; at += LANES) {
        V v = load_part(x + at, n - at), linear = mul(v, set(by[2]));
        V above = add(mul(mul(v, set(by[0])), v), linear);
        V t = minus(more(set(-by[3]), minus(v))), curve = expm1_less(t);
        V below_zero = add(mul(add(curve, sub(t, v)), set(by[1])), linear);
        store_part(x + at, pick(below(set(0), v), above, below_zero), n - at);
    }
}

/* A number as caches hold it: rounded, the largest one for an infinity, zero for what is none. */
INLINE void put(void *cache, int64_t rounds, int64_t at, float x)
{
    float largest = real_of(rounds ? 0x7F7F0000 : 0x7F7FFFFF);
    x = rounds ? round_bf16(x) : x;
    x = x != x ? 0 : x > largest ? largest : x < -largest ? -largest : x;
    if (rounds)
        ((half_t *)cache)[at] = (half_t)(bits_of(x) >> 16);
    else
        ((float *)cache)[at] = x;
}

/* The largest number for an infinity, zero for what is none. */
INLINE float finite_of(float x)
{
    float largest = real_of(0x7F7FFFFF);
    return x != x ? 0 : x > largest ? largest : x < -largest ? -largest : x;
}

/* n numbers, at most 32 -> codes of 8 bit, number i at i / 16 * far + i % 16 * near, and their scale in bf16: of those tried the one of
 * the least squared error; zeros where the largest is below 2^-100. */
static half_t put_codes_of(const float *x, int64_t n, int8_t *codes, int64_t near, int64_t far)
{
    V part[2] = {load_part(x, n), n > LANES ? load_part(x + LANES, n - LANES) : set(0)}, best[2] = {set(0), set(0)};
    float most = tree_more(more(size_of(part[1]), size_of(part[0]))), scale = 0, least = 0;
    for (int i = 0; most >= 0x1p-100f && i < TRIED; i++) {
        float tried = round_bf16(most / EIGHTS[i]), inverse = 1 / tried;
        V code[2], error = set(0);
        for (int j = 0; j < 2; j++) {
            code[j] = rounded(mul(part[j], set(inverse)));
            V off = sub(part[j], mul(code[j], set(tried)));
            error = add(error, mul(off, off));
        }
        float sum = tree_sum(error);
        if (i == 0 || sum < least)
            least = sum, scale = tried, best[0] = code[0], best[1] = code[1];
    }
    for (int64_t at = 0; at < n; at += LANES) {
        float lanes[LANES];
        store(lanes, best[at / LANES]);
        for (int64_t i = 0; i < at_most(n - at, LANES); i++)
            codes[at / LANES * far + i * near] = (int8_t)lanes[i];
    }
    return (half_t)(bits_of(scale) >> 16);
}

enum { SPREAD = 256 }; /* numbers that are spread over each other at once; a multiple of DEPTH */

/* Numbers times Hadamard matrices: parts as wide as powers of two, the largest first. `divides`: finite numbers that are less by a part's
 * width before; to do it once with and once without gives the numbers again. n: at most SPREAD; `to` may be x. */
static void spread(const float *x, int64_t n, int divides, float *to)
{
    for (int64_t size; n > 0; x += size, to += size, n -= size) {
        for (size = 1; 2 * size <= n; size *= 2)
            continue;
        for (int64_t i = 0; i < size; i++)
            to[i] = divides ? finite_of(x[i]) * (1.0f / (float)size) : x[i];
        for (int64_t half = 1; half < size; half *= 2)
            for (int64_t i = 0; i < size; i += 2 * half)
                for (int64_t j = i; j < i + half; j++) {
                    float first = to[j], second = to[j + half];
                    to[j] = first + second, to[j + half] = first - second;
                }
    }
}

/* A key or value of a head -> codes, 32 numbers of it `step_bytes` on, and their scales `step_scales` on (see put_codes_of). */
static void put_spread(const float *x, int64_t n, int8_t *codes, int64_t step_bytes, int64_t near, int64_t far, half_t *scales, int64_t step_scales)
{
    float room[SPREAD];
    for (int64_t at = 0; at < n; at += DEPTH) {
        if (at % SPREAD == 0)
            spread(x + at, at_most(n - at, SPREAD), 1, room);
        scales[at / DEPTH * step_scales] = put_codes_of(room + at % SPREAD, at_most(n - at, DEPTH), codes + at / DEPTH * step_bytes, near, far);
    }
}

/* A query of keys that are codes, spread as they are, not rounded. */
static void put_query(const float *query, int64_t n, const Source *to, int64_t row)
{
    float room[SPREAD];
    for (int64_t at = 0; at < to->depth * DEPTH; at += DEPTH) {
        if (at % SPREAD == 0) {
            memset(room, 0, sizeof room);
            spread(query + at, at_most(n - at, SPREAD), 0, room);
        }
        memcpy(to->rows + row * to->row_step + at / DEPTH * to->step_step, room + at % SPREAD, DEPTH * 4);
    }
}

/* A position's key and value of one head, into the head's part of its block, of which it is position `within`. */
static void remember(const Kind *kind, const float *key, const float *value, char *keys, int64_t within)
{
    int64_t type = plain_type(kind), depth = ceil_div(kind->width, DEPTH), column = within % SIDE;
    char *values = keys + key_bytes(kind);
    int64_t panel = within / SIDE * panel_size(depth), wide = panel_size(BLOCK / DEPTH);
    if (kind->has_codes) {
        char *step = keys + within / SIDE * depth * step_bytes(SCALED);
        half_t *scales = (half_t *)(step + panel_size(1)) + column;
        put_spread(key, kind->width, (int8_t *)step + column, step_bytes(SCALED), SIDE, SIDE * SIDE, scales, step_bytes(SCALED) / 2);
        scales = (half_t *)(values + value_codes(kind)) + within;
        put_spread(value, kind->value_width, (int8_t *)values + within * SIDE, DEPTH / SIDE * wide, 1, wide, scales, BLOCK);
        return;
    }
    for (int64_t i = 0; i < kind->width; i++)
        put(keys, kind->rounds, panel + place_in_panel(type, i, column), key[i]);
    for (int64_t i = 0; i < kind->value_width && !kind->is_latent; i++)
        put(values, kind->rounds, i / SIDE * wide + place_in_panel(type, within, i % SIDE), value[i]);
}

/* Lanes [from, until) of scores, -infinity elsewhere. */
static V seen(V v, int64_t from, int64_t until)
{
    float lanes[LANES];
    store(lanes, v);
    for (int i = 0; i < LANES; i++)
        if (i < from || i >= until)
            lanes[i] = -__builtin_inff();
    return load(lanes);
}

/* Scores of a row with a block -> scaled, with `biases` (or null), -infinity where the row does not see; the maximum so far. */
INLINE float score_row(const Kind *kind, int is_plain, float *scores, const float *biases, int64_t from, int64_t until, float max)
{
    V top = set(max);
    for (int p = 0; p < BLOCK / LANES; p++) {
        V v = mul(load(scores + p * LANES), set(kind->scale));
        if (!is_plain && kind->soft_cap > 0)
            v = mul(hyperbolic(div_(v, set(kind->soft_cap))), set(kind->soft_cap));
        if (!is_plain && biases)
            v = add(v, load(biases + p * LANES));
        v = is_plain || (from <= p * LANES && until >= (p + 1) * LANES) ? v : seen(v, from - p * LANES, until - p * LANES);
        store(scores + p * LANES, v);
        top = more(v, top);
    }
    return tree_more(top);
}

/* A row's weights over a block, from its scores and their maximum, as `type`, 32 of them `step` bytes on; their sum. Of those to be rounded
 * a NaN is one that an operation or as_bf16 gives. */
INLINE float weigh_row(int64_t type, int rounds, const float *scores, float max, char *weights, int64_t step)
{
    V total = set(0), w[TOGETHER];
    FOR_EACH(p, BLOCK / LANES) {
        w[p % TOGETHER] = sub(load(scores + p * LANES), set(max));
        if ((p + 1) % TOGETHER)
            continue;
        exponentials_down(TOGETHER, w);
        FOR_EACH(i, TOGETHER) {
            int64_t at = p + 1 - TOGETHER + i;
            V weight = rounds ? near_bf16(w[i]) : w[i];
            total = add(total, w[i]);
            if (type == BF16)
                to_bf16((half_t *)(weights + at / 2 * step) + at % 2 * LANES, weight);
            else
                store((float *)(weights + at / 2 * step) + at % 2 * LANES, weight);
        }
    }
    return tree_sum(total);
}

/* A block's latents as panels of values: from panels of 16 positions, whose K is the column, to panels of 16 columns. */
static void turn_latents(const Kind *kind, const char *keys, char *values)
{
    int64_t depth = ceil_div(kind->width, DEPTH), panels = ceil_div(kind->value_width, SIDE);
    for (int64_t p = 0; p < panels; p++)
        for (int64_t q = 0; q < BLOCK / SIDE; q++) {
            if (!kind->rounds) {
                const uint32_t *from = (const uint32_t *)keys + q * panel_size(depth) + p * SIDE * SIDE;
                turn_over(from, SIDE, (uint32_t *)values + p * panel_size(BLOCK / DEPTH) + q * SIDE * SIDE, SIDE, SIDE, SIDE);
                continue;
            }
            uint32_t rows[SIDE * SIDE / 2]; /* of a position: 16 columns, two in a word */
            turn_over((const uint32_t *)keys + (q * panel_size(depth) + p * SIDE * SIDE) / 2, SIDE, rows, SIDE / 2, SIDE / 2, SIDE);
            uint32_t *to = (uint32_t *)values + (p * panel_size(BLOCK / DEPTH) + q * SIDE * SIDE) / 2;
            for (int t = 0; t < SIDE / 2; t++) {
                half_t both[2 * SIDE];
                memcpy(both, rows + t * SIDE, sizeof both);
                for (int c = 0; c < SIDE; c++)
                    to[t * SIDE + c] = both[c] | (uint32_t)both[SIDE + c] << 16;
            }
        }
}

/* Weights [2][rows][32] times the scales of a group of columns of the values, one for each position. */
static void scale_weights(const float *weights, int64_t rows, int64_t low, int64_t high, const half_t *scales, float *out)
{
    for (int64_t p = 0; p < BLOCK / LANES; p++) {
        V scale = from_bf16(scales + p * LANES);
        for (int64_t r = low; r < high; r++) {
            int64_t at = (p / 2 * rows + r) * DEPTH + p % 2 * LANES;
            store(out + at, mul(load(weights + at), scale));
        }
    }
}

/* Whether so many rows of attention go into tiles. */
static int in_tiles(const Kind *kind, int64_t rows)
{
#ifdef TILES
    return kind->rounds && !kind->has_codes && rows > FEW_TILED;
#else
    (void)kind, (void)rows;
    return 0;
#endif
}

/* Rows of (position, query head) pairs, `first` the first one's number from `position` on, and their running softmax. */
typedef struct {
    int64_t first, count, position, is_tiled;
    float max[TILE_ROWS], total[TILE_ROWS];
    float scores[TILE_ROWS * BLOCK] __attribute__((aligned(64)));  /* [row][64] */
    float weights[TILE_ROWS * BLOCK] __attribute__((aligned(64))); /* [2][count][32], in tiles as rows of a product are */
} Rows;

static inline int64_t position_of(const Kind *kind, const Rows *rows, int64_t r) { return rows->position + (rows->first + r) / kind->groups; }

/* The first position that the row at `position` sees: all before it, those of a window, or (window < 0) of chunks of -window positions. */
static inline int64_t first_seen(const Kind *kind, int64_t position)
{
    if (kind->window < 0)
        return position - position % -kind->window;
    return kind->window && position >= kind->window ? position - kind->window + 1 : 0;
}

/* What row r adds to the scores of the block that begins at `begin` -> out; null where all of it lies beyond the extent. */
static const float *block_biases(const Kind *kind, const Rows *rows, int64_t r, int64_t begin, float out[BLOCK])
{
    int64_t last = position_of(kind, rows, r) - begin; /* its own position's place, or beyond the block */
    for (int64_t j = 0; j < BLOCK && kind->slopes; j++)
        out[j] = kind->slopes[(rows->first + r) % kind->groups] * (float)(int)(j - last);
    if (kind->slopes)
        return out;
    if (!kind->biases || last - (BLOCK - 1) >= kind->extent)
        return 0;
    const float *own = kind->biases + (rows->first + r) / kind->groups * kind->bias_stride + (rows->first + r) % kind->groups * kind->extent;
    for (int64_t j = 0; j < BLOCK; j++)
        out[j] = j <= last && last - j < kind->extent ? own[last - j] : 0;
    return out;
}

/* The running softmax of rows [low, high) over one block: scores -> weights (rounded, but for codes); sums [panels][room][16], what came
 * before, are scaled. All maxima come before the weights: one row's tree takes long and leaves room for the others. */
static void soften_rows(const Kind *kind, Rows *rows, int64_t low, int64_t high, int64_t block, int64_t panels, int64_t room, float *sums)
{
    const int64_t begin = block * BLOCK, is_plain = kind->soft_cap <= 0 && !kind->biases && !kind->slopes && position_of(kind, rows, low) >= begin + BLOCK - 1 &&
                                                    first_seen(kind, position_of(kind, rows, high - 1)) <= begin;
    float max[TILE_ROWS], biases[BLOCK];
    for (int64_t r = low; r < high && is_plain; r++)
        max[r] = score_row(kind, 1, rows->scores + r * BLOCK, 0, 0, BLOCK, rows->max[r]);
    for (int64_t r = low; r < high && !is_plain; r++) {
        int64_t position = position_of(kind, rows, r);
        max[r] = score_row(kind, 0, rows->scores + r * BLOCK, block_biases(kind, rows, r, begin, biases), first_seen(kind, position) - begin,
                           position + 1 - begin, rows->max[r]);
    }
    for (int64_t r = low; r < high; r++) {
        const float *scores = rows->scores + r * BLOCK;
        char *to = (char *)(rows->weights + r * DEPTH);
        float less = rows->max[r] - max[r], scale = less == 0 ? 1 : first_lane(exponential_down(set(less))), sum; /* e^0 is 1 */
        if (rows->is_tiled)
            sum = weigh_row(BF16, 1, scores, max[r], (char *)rows->weights + r * DEPTH * 2, TILE_ROWS * DEPTH * 2);
        else if (kind->rounds && !kind->has_codes)
            sum = weigh_row(F32, 1, scores, max[r], to, rows->count * DEPTH * 4);
        else
            sum = weigh_row(F32, 0, scores, max[r], to, rows->count * DEPTH * 4);
        rows->total[r] = rows->total[r] * scale + sum;
        rows->max[r] = max[r];
        for (int64_t p = 0; scale != 1 && p < panels; p++)
            store(sums + (p * room + r) * SIDE, mul(load(sums + (p * room + r) * SIDE), set(scale)));
    }
}

/* The panels of keys of a block. */
static void panels_of(const Kind *kind, const Keys *cached, int64_t block, const char *out[BLOCK / SIDE])
{
    int64_t each = key_bytes(kind) / (BLOCK / SIDE);
    for (int64_t p = 0; p < BLOCK / SIDE; p++)
        out[p] = cached->has_panels ? cached->blocks[block * (BLOCK / SIDE) + p] : cached->blocks[block] + cached->offset + p * each;
}

/* `rows` over the blocks they see. sums: [value panels][rows][16], in tiles of TILE_ROWS. */
static void attend_rows(const Kind *kind, const float *queries, Rows *rows, const Keys *cached, const float *sinks, char *turned, float *sums)
{
    int64_t depth = ceil_div(kind->width, DEPTH), panel = BLOCK / DEPTH * step_bytes(value_type(kind)), count = rows->count;
    int64_t panels = ceil_div(kind->value_width, SIDE), is_tiled = rows->is_tiled, room = is_tiled ? TILE_ROWS : count;
    int64_t least = position_of(kind, rows, 0), last = position_of(kind, rows, count - 1);
    int64_t start = first_seen(kind, least);
    for (int64_t r = 0; r < count; r++) {
        float sink = sinks ? sinks[(rows->first + r) % kind->groups] : -__builtin_inff();
        rows->max[r] = sink == sink ? sink : real_of(NO_NUMBER);
        rows->total[r] = sinks ? 1 : 0;
    }
    memset(sums, 0, (size_t)(panels * room * SIDE) * 4);
    for (int64_t block = start / BLOCK; block <= last / BLOCK; block++) {
        const char *keys = cached->blocks[block] + cached->offset, *values = keys + key_bytes(kind), *each[BLOCK / SIDE];
        const half_t *scales = (const half_t *)(values + value_codes(kind));
        if (kind->is_latent) {
            turn_latents(kind, keys, turned);
            values = turned;
        }
        int64_t low = 0, high = count; /* of the rows that see a key of this block: both ends are runs of positions */
        while (low < count && position_of(kind, rows, low) < block * BLOCK)
            low++;
        while (high > low && first_seen(kind, position_of(kind, rows, high - 1)) >= (block + 1) * BLOCK)
            high--;
        panels_of(kind, cached, block, each);
#ifdef TILES
        if (is_tiled)
            tile_scores((const char *)queries, count > SIDE, each, depth, rows->scores);
#endif
        if (!is_tiled)
            memset(rows->scores + low * BLOCK, 0, (size_t)((high - low) * BLOCK) * 4);
        for (int64_t p = 0; p < BLOCK / SIDE && !is_tiled; p++)
            chains(key_type(kind), ATTENTION[key_type(kind) - SCALED], high - low, 0, queries + low * DEPTH, count * DEPTH, each[p], depth,
                   rows->scores + low * BLOCK + p * SIDE, BLOCK);
        for (int64_t at = 0; block < last / BLOCK && at < 4096; at += LINE) /* as fetch_weights does within a block */
            __builtin_prefetch(cached->blocks[block + 1] + cached->offset + at);
        if (low < high)
            soften_rows(kind, rows, low, high, block, panels, room, sums);
#ifdef TILES
        if (is_tiled)
            tile_weigh((const char *)rows->weights, low, high, values, panels, sums);
#endif
        for (int64_t p = 0; p < panels && !is_tiled; p++) {
            const float *weights = kind->has_codes ? rows->scores : rows->weights; /* scores are there no more */
            if (kind->has_codes && p % (DEPTH / SIDE) == 0)
                scale_weights(rows->weights, count, low, high, scales + p * SIDE / DEPTH * BLOCK, rows->scores);
            chains(value_type(kind), ATTENTION[value_type(kind) - SCALED], high - low, 0, weights + low * DEPTH, count * DEPTH, values + p * panel, BLOCK / DEPTH,
                   sums + (p * room + low) * SIDE, SIDE);
        }
    }
}

/* `rows` positions from `position` on, `groups` heads each, over one key head. A row of queries holds its heads one
 * after the other, so does out. sinks: [groups] or null. scratch: attend_scratch bytes. */
static void attend(const Kind *kind, const float *queries, int64_t query_stride, const Keys *cached, int64_t position, int64_t rows,
                   const float *sinks, float *out, int64_t out_stride, float *scratch)
{
    int64_t depth = ceil_div(kind->width, DEPTH), panels = ceil_div(kind->value_width, SIDE);
    float *sums = scratch + TILE_ROWS * depth * DEPTH;
    char *turned = (char *)(sums + TILE_ROWS * panels * SIDE);
    int64_t most = in_tiles(kind, rows * kind->groups) ? TILE_ROWS : CHAIN_ROWS;
#ifdef TILES
    if (most == TILE_ROWS)
        tiles_begin(SIDE, SIDE);
#endif
    for (int64_t first = 0; first < rows * kind->groups; first += most) {
        int64_t count = at_most(rows * kind->groups - first, most), is_tiled = in_tiles(kind, count);
        Rows all;
        all.first = first, all.count = count, all.position = position, all.is_tiled = is_tiled;
        Source source = few_rows(scratch, count, depth);
        source.form = is_tiled ? TILED : AS_THEY_ARE;
        for (int64_t r = 0; r < count; r++) {
            int64_t row = (first + r) / kind->groups, head = (first + r) % kind->groups;
            const float *query = queries + row * query_stride + head * kind->width;
            if (kind->has_codes)
                put_query(query, kind->width, &source, r);
            else
                prepare(query, 0, kind->width, kind->rounds, &source, r, 1);
        }
        attend_rows(kind, scratch, &all, cached, sinks, turned, sums);
        for (int64_t r = 0; r < count; r++) {
            float *to = out + (first + r) / kind->groups * out_stride + (first + r) % kind->groups * kind->value_width;
            for (int64_t p = 0; p < panels; p++)
                store_part(to + p * SIDE, div_(load(sums + (p * (is_tiled ? TILE_ROWS : count) + r) * SIDE), set(all.total[r])),
                           kind->value_width - p * SIDE);
            for (int64_t at = 0; kind->has_codes && at < kind->value_width; at += SPREAD)
                spread(to + at, at_most(kind->value_width - at, SPREAD), 0, to + at);
        }
    }
#ifdef TILES
    if (most == TILE_ROWS)
        tiles_end();
#endif
}

/* Scores of the positions of `blocks` blocks from `first` on: of each the sum over query heads, in order, of weight times what is positive of
 * the chain of query and key; -infinity where that is no number. Without weights the chains [block][heads][64]. queries: [groups][width]; scratch: index_scratch bytes. */
static void index_blocks(const Kind *kind, const float *queries, const float *weights, const Keys *cached, int64_t first, int64_t blocks,
                         float *scores, float *scratch)
{
    int64_t depth = ceil_div(kind->width, DEPTH), heads = kind->groups, is_tiled = in_tiles(kind, heads);
    float *products = scratch + ceil_div(heads, TILE_ROWS) * TILE_ROWS * depth * DEPTH;
    Source source = few_rows(scratch, heads, depth);
    source.form = is_tiled ? TILED : AS_THEY_ARE;
    prepare(queries, kind->width, kind->width, kind->rounds, &source, 0, heads);
#ifdef TILES
    if (is_tiled)
        tiles_begin(SIDE, SIDE);
#endif
    for (int64_t block = first; block < first + blocks; block++, scores += weights ? BLOCK : heads * BLOCK) {
        const char *each[BLOCK / SIDE];
        panels_of(kind, cached, block, each);
#ifdef TILES
        for (int64_t h = 0; is_tiled && h < heads; h += TILE_ROWS)
            tile_scores(tile_of(&source, 0, h), heads - h > SIDE, each, depth, products + h * BLOCK);
#endif
        if (!is_tiled)
            memset(products, 0, (size_t)(heads * BLOCK) * 4);
        for (int64_t p = 0; p < BLOCK / SIDE; p++) {
            V total = set(0);
            if (!is_tiled)
                chains(plain_type(kind), ATTENTION[plain_type(kind) - SCALED], heads, 0, source.rows, source.step_step,
                       each[p], depth, products + p * SIDE, BLOCK);
            for (int64_t h = 0; weights && h < heads; h++)
                total = fma_(set(weights[h]), more(load(products + h * BLOCK + p * SIDE), set(0)), total);
            if (weights)
                store(scores + p * SIDE, pick(is_nan(total), set(-__builtin_inff()), total));
        }
        if (!weights)
            memcpy(scores, products, (size_t)(heads * BLOCK) * 4);
    }
#ifdef TILES
    if (is_tiled)
        tiles_end();
#endif
}

/* Stored numbers -> fp32, times `scale` (if it is not 1). */
static void widen(const void *stored, int64_t type, float scale, float *out, int64_t n, int64_t rounds)
{
    for (int64_t at = 0; at < n; at += LANES) {
        int64_t left = at_most(n - at, LANES), size = size_of_type(type);
        _Alignas(4) char room[LANES * 4] = {0};
        if (left == LANES && size == 2) /* sizes that the compiler knows */
            memcpy(room, (const char *)stored + at * 2, LANES * 2);
        else if (left == LANES)
            memcpy(room, (const char *)stored + at * 4, LANES * 4);
        else
            memcpy(room, (const char *)stored + at * size, (size_t)(left * size));
        V v = type == BF16 ? from_bf16((half_t *)room) : type == F16 ? from_f16((half_t *)room) : load((float *)room);
        v = scale != 1 ? mul(v, set(scale)) : v;
        store_part(out + at, rounds ? as_bf16(v) : v, left);
    }
}

/* fp32 -> stored bf16 or fp32; every NaN becomes the one of 0x7FC0 or 0x7FC00000. */
static void narrow(const float *x, void *stored, int64_t type, int64_t n)
{
    for (int64_t at = 0; at < n; at += LANES) {
        int64_t left = at_most(n - at, LANES);
        V v = load_part(x + at, left);
        half_t room[LANES];
        if (type == BF16) {
            to_bf16(room, as_bf16(v));
            if (left == LANES)
                memcpy((half_t *)stored + at, room, LANES * 2);
            else
                memcpy((half_t *)stored + at, room, (size_t)left * 2);
        } else
            store_part((float *)stored + at, pick(is_nan(v), set(real_of(NO_NUMBER)), v), left);
    }
}

/* Not by two comparisons with v: of these clang makes a minimum and a maximum, which x86 flushes a denormal in. */
static V clip(V v, float limit)
{
    return pick(below(set(limit), size_of(v)), pick(below(v, set(0)), set(-limit), set(limit)), v);
}

static void soften(float *logits, int64_t n, float scale, float soft_cap)
{
    for (int64_t at = 0; at < n; at += LANES) {
        V v = load_part(logits + at, n - at);
        v = scale != 1 ? mul(v, set(scale)) : v;
        v = soft_cap > 0   ? mul(hyperbolic(div_(v, set(soft_cap))), set(soft_cap))
            : soft_cap < 0 ? clip(v, -soft_cap)
                           : v;
        store_part(logits + at, v, n - at);
    }
}

/* The `count` highest of ranks [n] that are not taken yet, of equals the first, in order: their indices. */
static void choose(const float *ranks, int64_t n, int64_t count, char *taken, int64_t *chosen)
{
    for (int64_t i = 0; i < count; i++) {
        int64_t best = -1;
        for (int64_t e = 0; e < n; e++)
            if (!taken[e] && (best < 0 || ranks[e] > ranks[best]))
                best = e;
        taken[best] = 1;
        chosen[i] = best;
    }
}

/* Takes all experts but those of the best groups, a group's rank being its highest or the sum of its two highest. */
static void take_groups(const Routing *routing, const float *ranks, char *taken)
{
    float sums[MOST_EXPERTS];
    char is_kept[MOST_EXPERTS] = {0};
    int64_t size = routing->experts / routing->groups, chosen[MOST_EXPERTS];
    for (int64_t group = 0; group < routing->groups; group++) {
        char seen[MOST_EXPERTS] = {0};
        int64_t two[2];
        choose(ranks + group * size, size, routing->is_by_best ? 1 : 2, seen, two);
        sums[group] = routing->is_by_best ? ranks[group * size + two[0]] : ranks[group * size + two[0]] + ranks[group * size + two[1]];
    }
    choose(sums, routing->groups, routing->top_groups, is_kept, chosen);
    for (int64_t e = 0; e < routing->experts; e++)
        taken[e] = !is_kept[e / size];
}

/* Scores of all experts: sigmoids, square roots, or a softmax whose sum is kept in lanes. */
static void score_all(const Routing *routing, const float *logits, float *scores)
{
    int64_t n = routing->experts, is_root = routing->score == BY_ROOT;
    int64_t is_sigmoid = is_root || routing->score == BY_SIGMOID || routing->score == BY_LOGIT; /* each by itself */
    V top = set(-__builtin_inff()), total = set(0);
    for (int64_t at = 0; at < n; at += LANES)
        for (int64_t i = at; i < at + LANES && i < n; i++)
            scores[i] = logits[i];
    if (!is_sigmoid) {
        for (int64_t i = n; i % LANES; i++)
            scores[i] = -__builtin_inff();
        for (int64_t at = 0; at < n; at += LANES)
            top = more(load(scores + at), top);
        top = set(tree_more(top));
    }
    for (int64_t at = 0; at < n; at += LANES) {
        V v = is_root      ? root(load_part(scores + at, n - at))
              : is_sigmoid ? sigmoid(load_part(scores + at, n - at))
                           : exponential_down(sub(load(scores + at), top));
        total = add(total, v);
        store(scores + at, v);
    }
    V sum = set(tree_sum(total));
    for (int64_t at = 0; !is_sigmoid && at < n; at += LANES)
        store(scores + at, div_(load(scores + at), sum));
}

/* Of a mixer: the weight of number i of those that are chosen, in a softmax over those not chosen before it, without any that lie further below
 * it than the threshold, in parts of the larger of both sizes. */
static float mixed(const Routing *routing, const float *logits, const int64_t *chosen, int64_t i)
{
    char is_before[MOST_EXPERTS] = {0};
    float most = logits[chosen[i]], sum = 0;
    for (int64_t j = 0; j < i; j++)
        is_before[chosen[j]] = 1;
    for (int64_t e = 0; e < routing->experts; e++) {
        float size = logits[e] < 0 ? -logits[e] : logits[e], larger = size > most ? size : most;
        if (!is_before[e] && !((most - logits[e]) / larger > routing->epsilon))
            sum = sum + first_lane(exponential(set(logits[e] - most)));
    }
    return 1 / sum;
}

/* pairs [top_k, 2]: expert and weight, in order of rank, or those `given`. */
static void route(const Routing *routing, const float *logits, const float *correction, const int32_t *given, float *pairs)
{
    float scores[MOST_EXPERTS + LANES], ranks[MOST_EXPERTS];
    char taken[MOST_EXPERTS] = {0};
    int64_t chosen[MOST_EXPERTS], is_softmax = routing->score == BY_SOFTMAX || routing->score == BY_MIXER;
    const float *ranked = routing->score == BY_LOGIT || (is_softmax && !correction) ? logits : scores;
    score_all(routing, logits, scores);
    for (int64_t e = 0; e < routing->experts; e++)
        ranks[e] = correction ? ranked[e] + correction[e] : ranked[e];
    if (routing->groups > 1)
        take_groups(routing, ranks, taken);
    if (!given)
        choose(ranks, routing->experts, routing->top_k, taken, chosen);
    for (int64_t i = 0; given && i < routing->top_k; i++)
        chosen[i] = given[i];
    float most = logits[chosen[0]], sum = 0;
    for (int64_t i = 1; i < routing->top_k; i++)
        most = logits[chosen[i]] > most ? logits[chosen[i]] : most;
    for (int64_t i = 0; i < routing->top_k; i++) {
        float weight = routing->score == BY_MIXER ? mixed(routing, logits, chosen, i) : scores[chosen[i]];
        if (routing->normalises && is_softmax)
            weight = first_lane(exponential(set(logits[chosen[i]] - most)));
        sum = sum + weight;
        pairs[2 * i] = (float)chosen[i], pairs[2 * i + 1] = weight;
    }
    float by = !routing->normalises ? 1 : is_softmax ? sum : sum + routing->epsilon;
    for (int64_t i = 0; i < routing->top_k; i++)
        pairs[2 * i + 1] = pairs[2 * i + 1] / by * routing->scale;
}

/* out[n] = activation(sum over rows of weights [taps, stride] times row + bias): rows[0] is the oldest. */
static void convolve(const float *const *rows, int64_t taps, const float *weights, int64_t stride, const float *bias, int64_t activation,
                     int64_t n, float *out)
{
    for (int64_t at = 0; at < n; at += LANES) {
        int64_t left = n - at;
        V sum = set(0);
        for (int64_t j = 0; j < taps; j++) {
            const float *weight = weights + j * stride + at;
            sum = left < LANES ? fma_(load_part(weight, left), load_part(rows[j] + at, left), sum) : fma_(load(weight), load(rows[j] + at), sum);
        }
        sum = bias ? add(sum, load_part(bias + at, left)) : sum;
        store_part(out + at, activation == SILU ? activate(SILU, 1, sum) : activate(activation, 1, sum), left);
    }
}

enum { DELTA_SUMS = 4 }; /* of a column, for k modulo 4: no addition waits for the one before it */
#ifdef LANES_AVX512
enum { DELTA_PANELS = 2 }; /* panels of a tile whose sums registers hold at once */
#else
enum { DELTA_PANELS = 1 };
#endif

typedef struct {
    V sums[DELTA_PANELS][DELTA_SUMS];
} PanelSums;

INLINE V sum_of_four(const V *sums) { return add(add(sums[0], sums[1]), add(sums[2], sums[3])); }

/* What the state of k-th rows, which decays, gives for a key: to sum j. */
INLINE void read_row(const float *row, V by, float key, PanelSums *to, const int j)
{
    V factor = set(key);
    for (int c = 0; c < DELTA_PANELS; c++)
        to->sums[c][j] = fma_(factor, mul(load(row + c * LANES), by), to->sums[c][j]);
}

/* The same row decays and changes; what the new one gives for a query, if there is one. */
INLINE void change_row(float *row, V by, float key, const V *change, const float *query, PanelSums *to, const int j)
{
    V factor = set(key);
    for (int c = 0; c < DELTA_PANELS; c++) {
        V s = fma_(factor, change[c], mul(load(row + c * LANES), by));
        store(row + c * LANES, s);
        if (query)
            to->sums[c][j] = fma_(set(*query), s, to->sums[c][j]);
    }
}

/* One position for DELTA_PANELS panels of a tile: the state decays and changes; out, if there is a query, is what it reads then. */
INLINE void delta_panels(int64_t width, const int is_sum, float *state, const float *query, const float *key, const V *value, float decay, float strength,
                         V *out)
{
    V by = set(decay), change[DELTA_PANELS];
    PanelSums sums, read;
    int64_t k = 0;
    for (int c = 0; c < DELTA_PANELS; c++)
        for (int j = 0; j < DELTA_SUMS; j++)
            sums.sums[c][j] = read.sums[c][j] = set(0);
    for (; !is_sum && k + DELTA_SUMS <= width; k += DELTA_SUMS)
        for (int j = 0; j < DELTA_SUMS; j++)
            read_row(state + (k + j) * DELTA_COLUMNS, by, key[k + j], &sums, j);
    for (int j = 0; !is_sum && j < DELTA_SUMS - 1; j++)
        if (k + j < width)
            read_row(state + (k + j) * DELTA_COLUMNS, by, key[k + j], &sums, j);
    for (int c = 0; c < DELTA_PANELS; c++)
        change[c] = mul(is_sum ? value[c] : sub(value[c], sum_of_four(sums.sums[c])), set(strength));
    for (k = 0; k + DELTA_SUMS <= width; k += DELTA_SUMS)
        for (int j = 0; j < DELTA_SUMS; j++)
            change_row(state + (k + j) * DELTA_COLUMNS, by, key[k + j], change, query ? query + k + j : 0, &read, j);
    for (int j = 0; j < DELTA_SUMS - 1; j++)
        if (k + j < width)
            change_row(state + (k + j) * DELTA_COLUMNS, by, key[k + j], change, query ? query + k + j : 0, &read, j);
    for (int c = 0; c < DELTA_PANELS && query; c++)
        out[c] = sum_of_four(read.sums[c]);
}

/* One position of linear attention, columns [0, n) of a tile of a head's state [width, DELTA_COLUMNS]; query null: nothing is read. */
static void delta(int64_t width, int64_t form, float *state, int64_t n, const float *query, const float *key, const float *value, const float *decay,
                  float strength, float *out)
{
    float by = form == DELTA_BY_CHANNEL ? 1 : *decay; /* rows have decayed by then, and 1 changes no bit */
    for (int64_t at = 0; form == DELTA_BY_CHANNEL && at < width * DELTA_COLUMNS; at += LANES)
        store(state + at, mul(load(state + at), set(decay[at / DELTA_COLUMNS])));
    for (int64_t at = 0; at < n; at += DELTA_PANELS * LANES) {
        V v[DELTA_PANELS], o[DELTA_PANELS];
        for (int c = 0; c < DELTA_PANELS; c++)
            v[c] = n > at + c * LANES ? load_part(value + at + c * LANES, n - at - c * LANES) : set(0);
        if (form == DELTA_SUM)
            delta_panels(width, 1, state + at, query, key, v, by, strength, o);
        else if (query)
            delta_panels(width, 0, state + at, query, key, v, by, strength, o);
        else
            delta_panels(width, 0, state + at, 0, key, v, by, strength, o);
        for (int c = 0; c < DELTA_PANELS && query; c++)
            if (n > at + c * LANES)
                store_part(out + at + c * LANES, o[c], n - at - c * LANES);
    }
}

/* Decays of channels: rates and biases are fp32 [n]; with a bound (below zero) e^bound is the least. */
static void decay(const float *x, const float *rates, const float *bias, float bound, float *out, int64_t n)
{
    for (int64_t at = 0; at < n; at += LANES) {
        V v = add(load_part(x + at, n - at), load_part(bias + at, n - at)), rate = load_part(rates + at, n - at);
        store_part(out + at, bound < 0 ? exponential_down(mul(set(bound), sigmoid(mul(rate, v)))) : decay_of(v, rate), n - at);
    }
}

/* One position of a selective scan, columns [0, n) of a tile of its state [width, DELTA_COLUMNS], each number of which decays at a rate of
 * its own (rates [width, stride], below zero) times its column's step; query null: nothing is read. */
static void scan(int64_t width, float *state, int64_t n, const float *query, const float *key, const float *value, const float *step,
                 const float *rates, int64_t stride, const float *skips, float *out)
{
    for (int64_t at = 0; at < n; at += LANES) {
        int64_t left = n - at;
        V v = load_part(value + at, left), dt = load_part(step + at, left), change = mul(v, dt), sums[DELTA_SUMS];
        for (int j = 0; j < DELTA_SUMS; j++)
            sums[j] = set(0);
        for (int64_t k = 0; k < width; k++) {
            float *row = state + k * DELTA_COLUMNS + at;
            V by = exponential_down(mul(dt, load_part(rates + k * stride + at, left)));
            V s = fma_(set(key[k]), change, mul(load(row), by));
            store(row, s);
            if (query)
                sums[k % DELTA_SUMS] = fma_(set(query[k]), s, sums[k % DELTA_SUMS]);
        }
        V sum = sum_of_four(sums);
        if (query)
            store_part(out + at, skips ? add(sum, mul(v, load_part(skips + at, left))) : sum, left);
    }
}

/* Activations by number, then exp, tanh, erf. */
static void apply(int64_t function, float alpha, const float *x, float *out, int64_t n)
{
    for (int64_t at = 0; at < n; at += LANES) {
        V v = load_part(x + at, n - at);
        v = function == 7 ? exponential(v) : function == 8 ? hyperbolic(v) : function == 9 ? error_of(v) : activate(function, alpha, v);
        store_part(out + at, v, n - at);
    }
}

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)
#define TEXT_(a) #a
#define TEXT(a) TEXT_(a)
#ifdef TILES
Kernels kernels_amx = {.name = "amx", .has_tiles = 1, .prepare = prepare, .product = product, .attend = attend, .index = index_blocks};
#else
const Kernels JOIN(kernels_, TARGET) = {TEXT(TARGET), 0, prepare, product, norm, rotate, gate, add_rows, multiply, xielu, remember,
                                        attend, index_blocks, widen, narrow, soften, route, convolve, delta, scan, decay, pool, inverse, apply,
                                        round_weights, ATTENTION};
#endif
