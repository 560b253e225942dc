/* What a back end computes: the table of kernels that kernels.c gives for one target, and what they are told.
 *
 * Rows are fp32, `stride` floats apart. Every kernel works on what it is given and nothing else: engine.c divides the work
 * among threads, checks shapes, and sets the modes (modes.h).
 */
#ifndef MANYHANDS_KERNELS_H
#define MANYHANDS_KERNELS_H
#include <stdint.h>

enum { SIDE = 16, DEPTH = 32, BLOCK = 64, CHUNK = 240 }; /* columns of a panel, K of a step, keys of a block, rows of a product */
enum { EXPANDED = 4, PANELS = 4 }; /* steps of K that a blocked product widens at once, and panels that take turns */
enum { SCRATCH_BYTES = (EXPANDED * DEPTH + PANELS * CHUNK) * SIDE * 4 }; /* of a product */
enum { BF16, F16, F32 };                                 /* types of stored numbers */

/* Columns [0, n) of x[rows, k] . weight[n, k]^T, packed by panels of 16 columns (pack.h); bias [n] or null. */
typedef struct {
    int64_t type, n, k, activation;
    const void *packed;
    const float *bias;
} Matrix;

/* Rows that a product reads, at most CHUNK, in steps of 32 numbers: many in blocks of block_rows, [step][block][even, odd][16][row],
 * zeros beyond `count`, or in tiles (tiles.h); few as they are, row_step and step_step numbers from a row, and a step, to the next. What the few steps of
 * one pass read lies together, or rows of some thousand numbers would meet in the same sets of a cache. */
enum { FEW_AT_ONCE, BLOCKED, TILED };
typedef struct {
    float *rows;
    int64_t count, depth, form, row_step, step_step; /* form: one of the above */
} Source;

static inline Source few_rows(float *rows, int64_t count, int64_t depth) { return (Source){rows, count, depth, 0, DEPTH, count * DEPTH}; }

/* Attention of one key head: rows of `queries` [count, groups] heads wide `width`; see attend in kernels.c. */
typedef struct {
    int64_t groups, width, value_width, window, rounds; /* rounds: to bf16 storage; else fp32 */
    int64_t is_latent;                                  /* a value is the first value_width numbers of its key, and held once */
    float scale, soft_cap;
} Kind;

/* How a row chooses experts (Route in program/ops.py); at most MOST_EXPERTS. */
enum { MOST_EXPERTS = 1024 };
typedef struct {
    int64_t experts, top_k, is_sigmoid, normalises, groups, top_groups;
    float scale;
} Routing;

typedef struct {
    const char *name;
    int64_t has_tiles;  /* for rows and weights in bf16 */
    int64_t block_rows; /* rows that a blocked product takes at once, as many as have both their sums in registers; divides 12 */
    void (*prepare)(const float *x, int64_t stride, int64_t k, int64_t rounds, const Source *to, int64_t first, int64_t count);
    void (*product)(const Matrix *matrix, const Source *source, int64_t panel, int64_t end, float *out, int64_t stride,
                    float *scratch);
    void (*norm)(const float *x, float *out, int64_t n, int64_t is_layer, float epsilon, const float *weight,
                 const float *bias, float offset);
    void (*rotate)(float *x, int64_t turns, int64_t pairs, const float *cos, const float *sin);
    void (*gate)(const float *gate, const float *up, float *out, int64_t n, int64_t activation, float alpha, float limit,
                 float offset);
    void (*add)(const float *x, const float *y, float scale, float *out, int64_t n, int64_t rounds);
    void (*multiply)(const float *x, float by, float *out, int64_t n);
    void (*remember)(const Kind *kind, const float *key, const float *value, void *cache, int64_t position);
    void (*attend)(const Kind *kind, const float *queries, int64_t query_stride, const void *cache, int64_t position,
                   int64_t rows, const float *sinks, float *out, int64_t out_stride, float *scratch);
    void (*widen)(const void *stored, int64_t type, float scale, float *out, int64_t n, int64_t rounds);
    void (*narrow)(const float *x, void *stored, int64_t type, int64_t n);
    void (*soften)(float *logits, int64_t n, float scale, float soft_cap);
    void (*route)(const Routing *routing, const float *logits, const float *correction, float *pairs);
    void (*apply)(int64_t function, float alpha, const float *x, float *out, int64_t n);
} Kernels;

extern const Kernels kernels_scalar, kernels_avx2, kernels_avx512, kernels_neon;
extern const Kernels kernels_amx __attribute__((weak)); /* absent where the compiler knows no tiles */

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t size_of_type(int64_t type) { return type == F32 ? 4 : 2; }

/* Numbers of a panel of 16 columns whose K takes `depth` steps. */
static inline int64_t panel_size(int64_t depth) { return depth * DEPTH * SIDE; }

/* Where column c, row k of a panel lies: bf16 in pairs of rows, others by even and odd rows. */
static inline int64_t place_in_panel(int64_t type, int64_t k, int64_t c)
{
    int64_t pair = k / 2 * DEPTH;
    return type == BF16 ? pair + c * 2 + k % 2 : pair + k % 2 * SIDE + c;
}

/* A block of 64 positions of one key head: 4 panels of keys, then the panels of values, whose K is the position (none where
 * values are latents). */
static inline int64_t key_numbers(const Kind *kind) { return BLOCK / SIDE * panel_size(ceil_div(kind->width, DEPTH)); }
static inline int64_t block_numbers(const Kind *kind)
{
    return key_numbers(kind) + (kind->is_latent ? 0 : ceil_div(kind->value_width, SIDE) * panel_size(BLOCK / DEPTH));
}
static inline int64_t value_bytes(const Kind *kind)
{
    return ceil_div(kind->value_width, SIDE) * panel_size(BLOCK / DEPTH) * (kind->rounds ? 2 : 4);
}

/* Bytes of scratch that attend needs. */
enum { TILE_ROWS = 24 }; /* rows (positions times query heads) that it takes at once: their scores and sums stay in L1 and L2 */
static inline int64_t attend_scratch(const Kind *kind)
{
    int64_t floats = ceil_div(kind->width, DEPTH) * DEPTH + ceil_div(kind->value_width, SIDE) * SIDE;
    return TILE_ROWS * floats * 4 + (kind->is_latent ? value_bytes(kind) : 0);
}
#endif
