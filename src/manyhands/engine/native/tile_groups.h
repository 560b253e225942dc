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

/* A step of a panel: signed codes without offsets or zeros, [K / 4][column][4]; scales, minima. A step of W4H is two of these, each half of it
 * with zeros in place of the other. */
typedef struct {
    int8_t codes[DEPTH * SIDE];
    float scales[SIDE], minima[SIDE];
} Signed;

enum { TURN = 4 }; /* steps of K that all rows and the panels in turn go through before the next: tiles of sums; their weights stay in L1 */
enum { BYTES_STEP = DEPTH * SIDE + 2 * SIDE, FEWER_STEP = 6 * LINE }; /* bytes of a step of W8, and at most of others in tiles */

/* Lines of its tiles: of few rows half are left out. */
static inline int tile_lines(const Source *source) { return source->form == TILED_GROUPS && source->count <= SIDE / 2 ? SIDE / 2 : SIDE; }

static inline RowTile *row_tile(const Source *source, int64_t step, int64_t row) { return (RowTile *)source->rows + row / SIDE * source->depth + step; }

/* A group of a row, or nothing beyond the last row, into its tile. */
static void put_group(const Group *group, RowTile *tile, int64_t row)
{
    memcpy(tile->codes[row % SIDE], group->codes, DEPTH);
    tile->scales[row % SIDE] = group->scale;
    tile->sums[row % SIDE] = group->scale * (float)group_sum(group);
}

/* 64 codes of a half of a step, of four j of it, less an offset or zeros. */
INLINE void sign_codes(int64_t type, const uint8_t *codes, int half, int j, const uint8_t *less, int8_t *out)
{
    const uint8_t *highs = codes + 256;
    for (int i = 0; i < 64; i++) {
        uint8_t code = codes[j * 64 + i] >> 4 * half & 15;
        if (code_bits(type) == 5)
            code |= (uint8_t)((highs[i] >> (4 * half + j) & 1) << 4);
        out[i] = (int8_t)(code - less[i]);
    }
}

/* The same of codes of a table, both halves of a step: a table's numbers, or twice E2M1's floats. */
INLINE void name_codes(int64_t type, const uint8_t *codes, int j, int8_t *first, int8_t *second)
{
    const __m128i table = _mm_loadu_si128((const __m128i *)names_of(type));
    const __m512i numbers = _mm512_broadcast_i32x4(_mm_sub_epi8(table, _mm_set1_epi8((char)code_offset(type)))), low = _mm512_set1_epi8(15);
    __m512i both = _mm512_loadu_si512(codes + j * 64);
    _mm512_storeu_si512(first + j * 64, _mm512_shuffle_epi8(numbers, _mm512_and_si512(both, low)));
    _mm512_storeu_si512(second + (4 + j) * 64, _mm512_shuffle_epi8(numbers, _mm512_and_si512(_mm512_srli_epi16(both, 4), low)));
}

/* A step of W4H -> two. */
INLINE void sign_halves(const uint8_t *panel, int64_t depth, int64_t step, Signed *out)
{
    const uint8_t *codes = panel + step * code_bytes(W4H), *factors = factors_at(W4H, panel, depth, step);
    const V columns = load(column_scales_at(panel, depth));
    for (int half = 0; half < 2; half++) {
        store(out[half].scales, mul(from_e4m3(factors + half * SIDE), columns));
        memset(out[half].codes + (1 - half) * (DEPTH * SIDE / 2), 0, DEPTH * SIDE / 2);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++)
        name_codes(W4H, codes, j, out[0].codes, out[1].codes);
}

INLINE void sign_group(int64_t type, const uint8_t *panel, int64_t depth, int64_t step, Signed *out)
{
    const uint8_t *codes = panel + step * code_bytes(type), *factors = factors_at(type, panel, depth, step), *subs = subs_at(type, factors, step);
    uint8_t less[64];
    store(out->scales, scales_of(type, factors, subs));
    if (has_minima(type))
        store(out->minima, minima_of(type, factors, subs));
    if (type == W4Z) {
        __m512i zeros = zeros_of(factors);
        _mm512_storeu_si512(less, _mm512_or_si512(zeros, _mm512_slli_epi32(zeros, 8)));
    } else {
        memset(less, code_offset(type), sizeof less);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        if (has_table(type) || has_floats(type)) {
            name_codes(type, codes, j, out->codes, out->codes);
            continue;
        }
        sign_codes(type, codes, 0, j, less, out->codes + j * 64);
        sign_codes(type, codes, 1, j, less, out->codes + (4 + j) * 64);
    }
}

/* Of how many steps in tiles a step of a panel is. */
INLINE int tile_steps(int64_t type) { return type == W4H ? 2 : 1; }

/* Steps [first, end) of a panel, of all types in tiles but W8, whose codes are signed. */
static void sign_groups(int64_t type, const uint8_t *panel, int64_t depth, int64_t first, int64_t end, Signed *out)
{
    for (int64_t step = first; step < end; step++, out += tile_steps(type))
        switch (type) {
        case W4H: sign_halves(panel, depth, step, out); break;
#define CASE(name) \
    case name: sign_group(name, panel, depth, step, out); break;
            CASE(W4) CASE(W4M) CASE(W5) CASE(W5M) CASE(W4K) CASE(W5K) CASE(W4F) CASE(W4Z) CASE(W4N) CASE(W4X) CASE(W4S) CASE(W4T)
#undef CASE
        }
}

/* 16 rows times a panel, over the steps of a turn. */
typedef struct {
    const RowTile *rows;
    const Signed *weights;
    const int8_t *codes; /* weights' own, or a panel's of W8 */
    int64_t codes_step, steps;
    int32_t *parts; /* the integers: [step][16][16] */
    const char *ahead; /* what is fetched meanwhile, or null: of as many steps */
    float *sums;
} Square;

/* Tiles 0 to 3 = the integers of a turn. */
INLINE void multiply_square(int like, const Square *square)
{
#define MULTIPLY(step, rows_tile, codes_tile)                                            \
    if (step < square->steps) {                                                          \
        tile_zero(step);                                                                 \
        tile_load_group(rows_tile, square->rows[(step) / tile_steps(like)].codes);       \
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

/* What is read of weights in one step, to L2: to L1 it would take the place of what is read now. */
INLINE void fetch(int like, const char *ahead, int step)
{
    for (int64_t at = 0; at < (like == W8 ? BYTES_STEP : FEWER_STEP); at += LINE)
        __builtin_prefetch(ahead + step * (like == W8 ? BYTES_STEP : FEWER_STEP) + at, 0, 2);
}

/* sums += a square's integers times its scales, step by step; the next square is multiplied meanwhile, and its tiles, which take some
 * 50 cycles, are stored when they are ready. like: W8 or W4H, or a type with minima, or one without; lines: rows of a tile. */
INLINE void fold(int like, int lines, const Square *now, const Square *next)
{
    V sums[SIDE];
    multiply_square(like, next);
#pragma GCC unroll 16
    for (int r = 0; r < lines; r++)
        sums[r] = load(now->sums + r * SIDE);
#pragma GCC unroll 4
    for (int s = 0; s < TURN; s++) {
        const Signed *weights = now->weights + s;
        const RowTile *rows = now->rows + s / tile_steps(like);
        const int32_t *parts = now->parts + s * SIDE * SIDE;
        if (now->ahead && s % tile_steps(like) == 0)
            fetch(like, now->ahead, s / tile_steps(like));
        if (s < now->steps) {
            V scale = load(weights->scales), least = has_minima(like) ? load(weights->minima) : scale;
#pragma GCC unroll 16
            for (int r = 0; r < lines; r++) {
                sums[r] = fma_(from_words(parts + r * SIDE), mul(scale, set(rows->scales[r])), sums[r]);
                if (has_minima(like))
                    sums[r] = fma_(least, set(rows->sums[r]), sums[r]);
            }
        }
        if (s < next->steps)
            put_parts(next, s);
    }
#pragma GCC unroll 16
    for (int r = 0; r < lines; r++)
        store(now->sums + r * SIDE, sums[r]);
}

/* sums += `panels` panels times all rows: turn after turn of K, and of a turn square after square. Meanwhile the same steps of the panels
 * that follow are fetched. */
INLINE void multiply_squares(int like, int lines, int64_t type, const Source *source, const uint8_t *packed, int64_t panels, float *sums)
{
    Signed weights[2][PANELS][TURN] __attribute__((aligned(64)));
    int32_t parts[2][TURN * SIDE * SIDE] __attribute__((aligned(64)));
    int64_t depth = source->depth, bytes = panel_bytes(type, depth), blocks = ceil_div(source->count, SIDE), count = 0;
    Square now = {.rows = row_tile(source, 0, 0), .weights = weights[0][0], .parts = parts[1], .sums = sums}, next;
    const int64_t per_turn = TURN / tile_steps(like);
    for (int64_t step = 0; step < depth; step += per_turn) {
        Signed(*turn)[TURN] = weights[step / per_turn % 2];
        next.steps = at_most(depth - step, per_turn) * tile_steps(like);
        for (int64_t p = 0; p < panels; p++)
            if (like == W8)
                for (int64_t s = 0; s < next.steps; s++)
                    store(turn[p][s].scales, scales_of(W8, factors_at(W8, packed + p * bytes, depth, step + s), 0));
            else
                sign_groups(type, packed + p * bytes, depth, step, at_most(step + per_turn, depth), turn[p]);
        __asm__ volatile("" ::: "memory"); /* tiles read what was written */
        for (int64_t block = 0; block < blocks; block++)
            for (int64_t p = 0; p < panels; p++, now = next) {
                const uint8_t *panel = packed + p * bytes;
                next.rows = row_tile(source, step, block * SIDE);
                next.weights = turn[p];
                next.codes = like == W8 ? (const int8_t *)panel + step * code_bytes(W8) : turn[p]->codes;
                next.codes_step = like == W8 ? code_bytes(W8) : (int64_t)sizeof(Signed);
                next.parts = parts[count++ % 2];
                next.ahead = block ? 0 : (const char *)panel + panels * bytes + step * (code_bytes(type) + factor_bytes(type));
                next.sums = sums + (p * CHUNK + block * SIDE) * SIDE;
                fold(like, lines, &now, &next);
            }
    }
    next.steps = 0;
    fold(like, lines, &now, &next);
}

/* sums [panel][row][16] += `panels` panels of small weights that fit tiles times all rows. */
static void group_tiles(int64_t type, const Source *source, const uint8_t *packed, int64_t panels, float *sums)
{
    int is_half = tile_lines(source) < SIDE;
#define LIKE(name)                                                              \
    is_half ? multiply_squares(name, SIDE / 2, type, source, packed, panels, sums) \
            : multiply_squares(name, SIDE, type, source, packed, panels, sums)
    if (type == W8)
        LIKE(W8);
    else if (type == W4H)
        LIKE(W4H);
    else if (has_minima(type))
        LIKE(W4M);
    else
        LIKE(W4);
#undef LIKE
}
#endif
