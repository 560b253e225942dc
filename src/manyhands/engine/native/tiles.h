/* AMX: products of 16 rows with a step of a panel in one instruction, TDPBF16PS. That it computes the chain of
 * docs/arithmetic.md is what Intel's manual says; a machine whose tiles do not is found by the golden digests at start.
 * With TILES_EMULATED, what the manual says, in lanes: so that all but the instruction runs where there is no AMX. */
#ifndef MANYHANDS_TILES_H
#define MANYHANDS_TILES_H
#include "kernels.h"
#include "lanes.h"

enum { TILE_BYTES = 1024, TILE_LINE = 64, PAIR = 2 * SIDE, PAIR_BYTES = 2 * TILE_BYTES }; /* PAIR: rows of two tiles */
enum { NEAR_BYTES = 5 << 18 }; /* of rows, which L2 holds beside weights and sums: every CPU with tiles has 2 MB */

#ifdef TILES_EMULATED
static __thread char tiles[8][TILE_BYTES];
#define tile_zero(n) memset(tiles[n], 0, TILE_BYTES)
#define tile_load(n, at) memcpy(tiles[n], at, TILE_BYTES)
#define tile_store(n, at, step)                                                                                                \
    for (int row_ = 0; row_ < SIDE; row_++)                                                                                    \
    memcpy((char *)(at) + row_ * (step), tiles[n] + row_ * TILE_LINE, TILE_LINE)
#define tile_product_sum(c, a, b) emulate(tiles[c], tiles[a], tiles[b])
#define tile_load_group(n, at)                                                                                                 \
    for (int row_ = 0; row_ < SIDE; row_++)                                                                                    \
    memcpy(tiles[n] + row_ * TILE_LINE, (const char *)(at) + row_ * DEPTH, DEPTH)
#define tile_load_quads(n, at) memcpy(tiles[n], at, TILE_LINE * DEPTH / 4)
#define tile_bytes_sum(c, a, b) emulate_bytes(tiles[c], (int8_t *)tiles[a], (int8_t *)tiles[b])
static void tiles_begin(int quads, int rows) { (void)quads, (void)rows; }
static void tiles_end(void) {}
static void emulate(char *sums, const char *rows, const char *panel)
{
    for (int r = 0; r < SIDE; r++) {
        V even = set(0), odd = set(0);
        half_t row[DEPTH];
        float sum[SIDE];
        memcpy(row, rows + r * TILE_LINE, sizeof row);
        memcpy(sum, sums + r * TILE_LINE, sizeof sum);
        for (int i = 0; i < SIDE; i++) {
            half_t pair[DEPTH];
            memcpy(pair, panel + i * TILE_LINE, sizeof pair);
            even = fma_(set(real_of((uint32_t)row[2 * i] << 16)), even_bf16(pair), even);
            odd = fma_(set(real_of((uint32_t)row[2 * i + 1] << 16)), odd_bf16(pair), odd);
        }
        store(sum, add(load(sum), add(even, odd)));
        memcpy(sums + r * TILE_LINE, sum, sizeof sum);
    }
}
static void emulate_bytes(char *sums, const int8_t *rows, const int8_t *panel)
{
    for (int r = 0; r < SIDE; r++)
        for (int c = 0; c < SIDE; c++) {
            int32_t sum;
            memcpy(&sum, sums + r * TILE_LINE + 4 * c, 4);
            for (int k = 0; k < DEPTH; k++)
                sum += rows[r * TILE_LINE + k] * panel[k / 4 * TILE_LINE + 4 * c + k % 4];
            memcpy(sums + r * TILE_LINE + 4 * c, &sum, 4);
        }
}
static V from_words(const int32_t *at)
{
    float lanes[LANES];
    for (int i = 0; i < LANES; i++)
        lanes[i] = (float)at[i];
    return load(lanes);
}
#else
#define tile_zero(n) _tile_zero(n)
#define tile_load(n, at) _tile_loadd(n, at, TILE_LINE)
#define tile_store(n, at, step) _tile_stored(n, at, step)
#define tile_product_sum(c, a, b) _tile_dpbf16ps(c, a, b)
#define tile_load_group(n, at) _tile_loadd(n, at, DEPTH)
#define tile_load_quads(n, at) _tile_loadd(n, at, TILE_LINE)
#define tile_bytes_sum(c, a, b) _tile_dpbssd(c, a, b)
static inline V from_words(const int32_t *at) { return _mm512_cvtepi32_ps(_mm512_loadu_si512(at)); }
/* Tiles 0 to 3 are sums; 4 and 5 rows, and 6 and 7 weights, of `quads` times 4 bytes of K. */
static void tiles_begin(int quads, int rows)
{
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t line_bytes[16];
        uint8_t lines[16];
    } all = {.palette = 1};
    for (int i = 0; i < 8; i++)
        all.line_bytes[i] = (uint16_t)(i == 4 || i == 5 ? 4 * quads : TILE_LINE), all.lines[i] = (uint8_t)(i < 6 ? rows : quads);
    __asm__ volatile("" : : "r"(&all) : "memory"); /* gcc 12 takes all but its first bytes for unread */
    _tile_loadconfig(&all);
}
static void tiles_end(void) { _tile_release(); }
#endif

/* Rows of a Source in tiles: bf16, [row / 32][step][row % 32][32]. A product reads a block of 32 rows from its first step to its last, so
 * the CPU fetches ahead. */
static inline char *tile_of(const Source *source, int64_t step, int64_t row)
{
    return (char *)source->rows + (row / PAIR * source->depth + step) * PAIR_BYTES + row % PAIR * TILE_LINE;
}

/* Tiles 0 to 3 += 32 rows (16 without `has_rows`) times two panels (one without `other`) over `depth` steps; tiles 1 and 3 are the other
 * panel's, 2 and 3 the last 16 rows'. `ahead` bytes from `next` on are fetched with each step. */
INLINE void tile_chain(const char *rows, int has_rows, const char *panel, const char *other, int64_t depth, const char *next, int64_t ahead)
{
    for (int64_t step = 0; step < depth; step++, rows += PAIR_BYTES, panel += TILE_BYTES, next += ahead) {
        for (int64_t line = 0; line < ahead; line += TILE_LINE)
            __builtin_prefetch(next + line, 0, 2);
        tile_load(4, rows);
        tile_load(6, panel);
        tile_product_sum(0, 4, 6);
        if (other) {
            tile_load(7, other);
            tile_product_sum(1, 4, 7);
            other += TILE_BYTES;
        }
        if (has_rows) {
            tile_load(5, rows + TILE_BYTES);
            tile_product_sum(2, 5, 6);
        }
        if (other && has_rows)
            tile_product_sum(3, 5, 7);
    }
}

static inline void tiles_zero(void)
{
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
}

static inline void sums_load(const float *from, int has_panel, int has_rows)
{
    tile_load(0, from);
    if (has_panel)
        tile_load(1, from + CHUNK * SIDE);
    if (has_rows)
        tile_load(2, from + SIDE * SIDE);
    if (has_panel && has_rows)
        tile_load(3, from + (CHUNK + SIDE) * SIDE);
}

static inline void sums_store(float *to, int has_panel, int has_rows)
{
    tile_store(0, to, TILE_LINE);
    if (has_panel)
        tile_store(1, to + CHUNK * SIDE, TILE_LINE);
    if (has_rows)
        tile_store(2, to + SIDE * SIDE, TILE_LINE);
    if (has_panel && has_rows)
        tile_store(3, to + (CHUNK + SIDE) * SIDE, TILE_LINE);
}

/* sums [panel][row][16] = `panels` panels of all rows: two panels and 32 rows at once, each sum in a tile through as much of K as lets
 * NEAR_BYTES of rows stay in L2; all panels go through that before the next part of K. What is read next of the weights is fetched
 * meanwhile, a part with each 32 rows. */
static void tile_product(const Source *source, const char *packed, int64_t panels, float *sums)
{
    int64_t depth = source->depth, bytes = depth * TILE_BYTES, rows = ceil_div(source->count, SIDE) * SIDE, pairs = ceil_div(rows, PAIR);
    int64_t ahead = ceil_div(PAIR_BYTES, pairs * TILE_LINE) * TILE_LINE, most = NEAR_BYTES / (pairs * PAIR_BYTES);
    int64_t steps = ceil_div(depth, ceil_div(depth, most));
    for (int64_t step = 0; step < depth; step += steps)
        for (int64_t p = 0; p < panels; p += 2) {
            int64_t count = at_most(steps, depth - step);
            int has_panel = p + 1 < panels, is_last = p + 2 >= panels, ends = step + steps >= depth;
            const char *panel = packed + p * bytes + step * TILE_BYTES;
            const char *next = !is_last ? panel + 2 * bytes : ends ? packed + panels * bytes : packed + (step + steps) * TILE_BYTES;
            for (int64_t row = 0; row < rows; row += PAIR) {
                int has_rows = row + SIDE < rows;
                float *to = sums + (p * CHUNK + row) * SIDE;
                if (step)
                    sums_load(to, has_panel, has_rows);
                else
                    tiles_zero();
                tile_chain(tile_of(source, step, row), has_rows, panel, has_panel ? panel + bytes : 0, count, next + row / PAIR * count * ahead, ahead);
                sums_store(to, has_panel, has_rows);
            }
        }
}

/* scores [row][64] = queries in tiles [step][32][32], of which 16 or 32 rows count, times the keys of a block. */
static void tile_scores(const char *queries, int has_rows, const char *const keys[BLOCK / SIDE], int64_t depth, float *scores)
{
    for (int64_t p = 0; p < BLOCK / SIDE; p += 2) {
        float *to = scores + p * SIDE;
        tiles_zero();
        tile_chain(queries, has_rows, keys[p], keys[p + 1], depth, 0, 0);
        tile_store(0, to, BLOCK * 4);
        tile_store(1, to + SIDE, BLOCK * 4);
        if (has_rows) {
            tile_store(2, to + SIDE * BLOCK, BLOCK * 4);
            tile_store(3, to + SIDE * BLOCK + SIDE, BLOCK * 4);
        }
    }
}

/* A tile -> 16 rows of sums, or those in [low, high) alone. */
#define STORE_ROWS(tile, to, low, high)                                                                                        \
    do {                                                                                                                       \
        if ((low) <= 0 && (high) >= SIDE) {                                                                                    \
            tile_store(tile, to, TILE_LINE);                                                                                   \
        } else if ((low) < SIDE && (high) > 0) {                                                                               \
            float all[SIDE * SIDE] __attribute__((aligned(64)));                                                               \
            int64_t from = (low) < 0 ? 0 : (low), until = at_most(high, SIDE);                                                 \
            tile_store(tile, all, TILE_LINE);                                                                                  \
            memcpy((to) + from * SIDE, all + from * SIDE, (size_t)((until - from) * TILE_LINE));                               \
        }                                                                                                                      \
    } while (0)

/* sums [panel][32][16] += weights in tiles [2][32][32] times the values of a block, in rows [low, high) alone. */
static void tile_weigh(const char *weights, int64_t low, int64_t high, const char *values, int64_t panels, float *sums)
{
    int64_t depth = BLOCK / DEPTH, bytes = depth * TILE_BYTES;
    for (int64_t p = 0; p < panels; p += 2, values += 2 * bytes, sums += 2 * PAIR * SIDE) {
        int has_panel = p + 1 < panels, has_rows = high > SIDE;
        float *other = sums + PAIR * SIDE;
        tile_load(0, sums);
        if (has_panel)
            tile_load(1, other);
        if (has_rows)
            tile_load(2, sums + SIDE * SIDE);
        if (has_panel && has_rows)
            tile_load(3, other + SIDE * SIDE);
        tile_chain(weights, has_rows, values, has_panel ? values + bytes : 0, depth, 0, 0);
        STORE_ROWS(0, sums, low, high);
        if (has_panel)
            STORE_ROWS(1, other, low, high);
        if (has_rows)
            STORE_ROWS(2, sums + SIDE * SIDE, low - SIDE, high - SIDE);
        if (has_panel && has_rows)
            STORE_ROWS(3, other + SIDE * SIDE, low - SIDE, high - SIDE);
    }
}
#endif
