/* AMX: products of 16 rows with 16 columns of small weights, the integers of a group in one instruction, TDPBSSD; the group's scales
 * and the sums are lanes'. docs/arithmetic.md ("Small weights") states it. */
#ifndef MANYHANDS_TILE_GROUPS_H
#define MANYHANDS_TILE_GROUPS_H
#include "quants.h"
#include "tiles.h"

/* A step of 16 rows: the codes of a group of each, its scale, and the scale times the sum of its codes. Rows of a Source lie as
 * [row / 16][step] of these. */
typedef struct {
    int8_t codes[SIDE][DEPTH];
    float scales[SIDE], sums[SIDE];
} RowTile;
_Static_assert(sizeof(RowTile) == SIDE * sizeof(Group), "the room is that of groups");

/* A step of a panel: signed codes without offsets or zeros, [K / 4][column][4]; scales, minima. */
typedef struct {
    int8_t codes[DEPTH * SIDE];
    float scales[SIDE], minima[SIDE];
} Signed;

enum { TURN = 4 }; /* steps of K that all rows and PANELS panels go through before the next: tiles of sums; their weights stay in L1 */

static inline RowTile *row_tile(const Source *source, int64_t step, int64_t row) { return (RowTile *)source->rows + row / SIDE * source->depth + step; }

/* A group of a row, or nothing beyond the last row, into its tile. */
static void put_group(const Group *group, RowTile *tile, int64_t row)
{
    memcpy(tile->codes[row % SIDE], group->codes, DEPTH);
    tile->scales[row % SIDE] = group->scale;
    tile->sums[row % SIDE] = group->scale * (float)group_sum(group);
}

/* 64 codes of a half of a step, of four j of it: twice E2M1's floats, or less an offset or zeros. */
INLINE void sign_codes(int64_t type, const uint8_t *codes, int half, int j, const uint8_t *less, int8_t *out)
{
    const uint8_t *highs = codes + 256;
    for (int i = 0; i < 64; i++) {
        uint8_t code = codes[j * 64 + i] >> 4 * half & 15;
        if (code_bits(type) == 5)
            code |= (uint8_t)((highs[i] >> (4 * half + j) & 1) << 4);
        if (type == W4F) {
            uint8_t power = code >> 1 & 3, size = power ? 2 | (code & 1) : code & 1;
            size = power >= 2 ? size + size : size;
            size = power == 3 ? size + size : size;
            out[i] = (int8_t)(code & 8 ? -size : size);
        } else
            out[i] = (int8_t)(code - less[i]);
    }
}

INLINE void sign_group(int64_t type, const uint8_t *panel, int64_t depth, int64_t step, Signed *out)
{
    const uint8_t *codes = panel + step * code_bytes(type), *factors = factors_at(type, panel, depth, step), *subs = subs_at(type, factors, step);
    uint8_t less[64];
    store(out->scales, scales_of(type, factors, subs));
    if (has_minima(type))
        store(out->minima, minima_of(type, factors, subs));
    for (int i = 0; i < 64; i++)
        less[i] = (uint8_t)(type == W4Z ? zero_at(factors, i / 4) : code_offset(type));
#pragma GCC unroll 4
    for (int j = 0; type != W8 && j < 4; j++) {
        sign_codes(type, codes, 0, j, less, out->codes + j * 64);
        sign_codes(type, codes, 1, j, less, out->codes + (4 + j) * 64);
    }
}

/* Steps [first, end) of a panel. */
static void sign_groups(int64_t type, const uint8_t *panel, int64_t depth, int64_t first, int64_t end, Signed *out)
{
    for (int64_t step = first; step < end; step++, out++)
        switch (type) {
#define CASE(name) \
    case name: sign_group(name, panel, depth, step, out); break;
            CASE(W8) CASE(W4) CASE(W4M) CASE(W5) CASE(W5M) CASE(W4K) CASE(W5K) CASE(W4F) CASE(W4Z)
#undef CASE
        }
}

/* 16 rows times a panel, over the steps of a turn. */
typedef struct {
    const RowTile *rows;
    const Signed *weights;
    const int8_t *codes; /* weights' own, or a panel's of W8 */
    int64_t codes_step;
    int32_t *parts; /* the integers: [step][16][16] */
    const char *ahead; /* the panel's codes of the next turn, fetched a part with each square: so many lines */
    int64_t lines;
    float *sums;
} Square;

/* Tiles 0 to 3 = the integers of a turn. */
INLINE void multiply_square(const Square *square, int64_t steps)
{
#define MULTIPLY(step, rows_tile, codes_tile)                                            \
    if (step < steps) {                                                                  \
        tile_zero(step);                                                                 \
        tile_load_group(rows_tile, square->rows[step].codes);                            \
        tile_load_quads(codes_tile, square->codes + step * square->codes_step);          \
        tile_bytes_sum(step, rows_tile, codes_tile);                                     \
    }
    MULTIPLY(0, 4, 6)
    MULTIPLY(1, 5, 7)
    MULTIPLY(2, 4, 6)
    MULTIPLY(3, 5, 7)
#undef MULTIPLY
}

/* What multiply_square left of a step -> memory. */
INLINE void put_parts(const Square *square, int step)
{
#define PUT(tile)     \
    if (tile == step) \
        tile_store(tile, square->parts + tile * SIDE * SIDE, TILE_LINE);
    PUT(0)
    PUT(1)
    PUT(2)
    PUT(3)
#undef PUT
}

/* sums += a square's integers times its scales, step by step; the next square is multiplied meanwhile, and its tiles, which take some
 * 50 cycles, are stored when they are ready. */
INLINE void fold(int with_minima, const Square *now, const Square *next, int64_t steps)
{
    V sums[SIDE];
    if (next)
        multiply_square(next, steps);
#pragma GCC unroll 16
    for (int r = 0; r < SIDE; r++)
        sums[r] = load(now->sums + r * SIDE);
#pragma GCC unroll 4
    for (int s = 0; s < TURN; s++) {
        if (s >= steps)
            break;
        const Signed *weights = now->weights + s;
        const RowTile *rows = now->rows + s;
        const int32_t *parts = now->parts + s * SIDE * SIDE;
        V scale = load(weights->scales), least = with_minima ? load(weights->minima) : scale;
#pragma GCC unroll 16
        for (int r = 0; r < SIDE; r++) {
            sums[r] = fma_(from_words(parts + r * SIDE), mul(scale, set(rows->scales[r])), sums[r]);
            if (with_minima)
                sums[r] = fma_(least, set(rows->sums[r]), sums[r]);
        }
        if (next)
            put_parts(next, s);
    }
#pragma GCC unroll 16
    for (int r = 0; r < SIDE; r++)
        store(now->sums + r * SIDE, sums[r]);
}

/* A turn of all rows and `panels` panels, a square after the other. */
INLINE void multiply_turn(int with_minima, const Source *source, int64_t step, int64_t steps, int64_t panels, Square squares[PANELS], float *sums)
{
    int32_t parts[2][TURN * SIDE * SIDE] __attribute__((aligned(64)));
    int64_t count = ceil_div(source->count, SIDE) * panels;
    Square now, next = {0};
    for (int64_t i = 0; i <= count; i++, now = next) {
        if (i < count) {
            next = squares[i % panels];
            next.rows = row_tile(source, step, i / panels * SIDE);
            next.parts = parts[i % 2];
            for (int64_t line = 0; line < next.lines; line++)
                __builtin_prefetch(next.ahead + (i / panels * next.lines + line) * LINE);
            next.sums = sums + (i % panels * CHUNK + i / panels * SIDE) * SIDE;
        }
        if (i == 0) {
            multiply_square(&next, steps);
            for (int s = 0; s < steps; s++)
                put_parts(&next, s);
        } else
            fold(with_minima, &now, i < count ? &next : 0, steps);
    }
}

/* sums [panel][row][16] += `panels` panels of small weights, of any type but W6K, times all rows. */
static void group_tiles(int64_t type, const Source *source, const uint8_t *packed, int64_t panels, float *sums)
{
    Signed weights[PANELS][TURN] __attribute__((aligned(64)));
    int64_t depth = source->depth, steps;
    for (int64_t step = 0; step < depth; step += steps) {
        Square squares[PANELS];
        steps = at_most(depth - step, TURN);
        for (int64_t p = 0; p < panels; p++) {
            const uint8_t *panel = packed + p * panel_bytes(type, depth);
            sign_groups(type, panel, depth, step, step + steps, weights[p]);
            squares[p] = (Square){.weights = weights[p], .codes = weights[p]->codes, .codes_step = sizeof(Signed)};
            squares[p].ahead = (const char *)panel + (step + TURN) * code_bytes(type);
            squares[p].lines = ceil_div(TURN * code_bytes(type), ceil_div(source->count, SIDE) * LINE);
            if (type == W8)
                squares[p].codes = (const int8_t *)panel + step * code_bytes(W8), squares[p].codes_step = code_bytes(W8);
        }
        __asm__ volatile("" ::: "memory"); /* tiles read what was written */
        if (has_minima(type))
            multiply_turn(1, source, step, steps, panels, squares, sums);
        else
            multiply_turn(0, source, step, steps, panels, squares, sums);
    }
}
#endif
