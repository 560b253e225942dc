/* What attention is told (attend.py has the same); one block of keys (blocks.c) and its softmax (soften.c), for 16 rows. */
#ifndef MANYHANDS_ATTEND_H
#define MANYHANDS_ATTEND_H
#include "team.h"
#include "tiles.h"

enum {
    BLOCK = 64,      /* keys that the running softmax takes at once; blocks begin at multiples of it */
    HALF = BLOCK / 2 /* keys of a tile of weights */
};

/* One kind of attention: of a layer, for good. window, softcap: 0: none. */
typedef struct {
    int64_t layer, heads, key_heads, key_dim, value_dim, window;
    float scale, softcap;
} Kind;

/* What comes before attention, of a layer. `turns`: rotations of a head, each of numbers i and turns + i, or of 2 i and
 * 2 i + 1 (pairs). Norms of a head: weights [D], or null. sinks: [heads], or null. */
typedef struct {
    int64_t turns, pairs;
    const float *query_norm, *key_norm;
    const bf16 *sinks;
    float query_epsilon, key_epsilon;
} Front;

/* What a session caches of a layer: [heads, positions, width]. A session's table has one for every layer up to its last. */
typedef struct {
    bf16 *keys, *values;
    int64_t heads, width;
} Layer;

/* Rows [row, row + count) of the step are the positions from `start` on of the session whose caches have `capacity`. */
typedef struct {
    const Layer *layers;
    int64_t num_layers, capacity, start, row, count;
} Segment;

/* Cosines and sines [at least turns], `stride` elements apart: of every position of a segment, or, without segments, of every row
 * of the step. */
typedef struct {
    const bf16 *cos, *sin;
    int64_t stride;
    const Segment *segments;
    int64_t num_segments;
} Turns;

/* The running softmax of 16 rows, a row a lane. */
typedef struct {
    __m512 max, sum;         /* of scores in units of ln 2; of 2^(score - max) */
    __m512i position, oldest; /* what a row may see: oldest <= key <= position */
} Rows;

static inline int64_t key_tiles(const Kind *kind) { return ceil_div(kind->key_dim, DEPTH); }
static inline int64_t value_tiles(const Kind *kind) { return ceil_div(kind->value_dim, SIDE); }

/* The last numbers of `count` keys, where they fill no tile: [count][32], zeros behind. */
void pack_tail(const Kind *kind, const bf16 *keys, int64_t width, int64_t count, bf16 *tail);

/* `count` values as tiles [Dv/16][2 halves][16 pairs of keys][16][2], zeros behind. Those of the next block are fetched. */
void pack_values(const Kind *kind, const bf16 *keys, const bf16 *values, int64_t width, int64_t count, bf16 *packed);

/* Keys of a block x queries of 16 rows: scores [keys][16]. */
void score(const Kind *kind, const bf16 *keys, int64_t width, const bf16 *tail, const bf16 *query, int halves, float *scores);

/* sums [Dv/16][16 rows][16] += weights of 16 rows x values of a block. */
void add_values(int64_t tiles, const bf16 *weights, const bf16 *values, int halves, float *sums);

void rescale(float *sums, int64_t tiles, const float decay[SIDE]);

/* Scores [keys][16], `halves` of a block from `key` on -> weights, a tile [16][32] for each half; `masked`: some row may not
 * see some of them. In `decay`, what the sums of earlier blocks are to be multiplied with; 0 if by one alone. */
int soften(const Kind *kind, Rows *rows, float *scores, int64_t key, int halves, int masked, bf16 *weights, float decay[SIDE]);

/* norm.c */
void tiles_norm(const bf16 *x, int64_t stride, const float *weight, float epsilon, bf16 *out, int64_t m, int64_t n);

/* front.c */
void front_run(Team *team, int64_t threads, const Kind *kind, const Front *front, bf16 *rows, int64_t num_rows, Turns turns);

/* attend.c */
int tiles_attend(Team *team, int64_t threads, const Kind *kind, const Segment *segments, int64_t num_segments, int64_t num_rows,
                 const bf16 *query, int64_t query_head, int64_t query_row, const bf16 *key, int64_t key_head, int64_t key_row,
                 const bf16 *value, int64_t value_head, int64_t value_row, const bf16 *sinks, bf16 *out);

/* 0, second, 1, second + 1, ... 15, second + 15 */
static inline __m512i interleaving(int second)
{
    __m512i first = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    return _mm512_or_si512(first, _mm512_slli_epi32(_mm512_add_epi32(first, _mm512_set1_epi32(second)), 16));
}

/* 16 rows of 16 pairs of numbers -> 16 columns, in place. */
static inline void transpose(__m512i r[SIDE])
{
    __m512i t[SIDE];
#pragma GCC unroll 8
    for (int i = 0; i < SIDE; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < SIDE; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(r[i], r[4 + i], 0xdd);
        t[8 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0x88);
        t[12 + i] = _mm512_shuffle_i32x4(r[8 + i], r[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0x88);
        r[4 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0x88);
        r[8 + i] = _mm512_shuffle_i32x4(t[i], t[8 + i], 0xdd);
        r[12 + i] = _mm512_shuffle_i32x4(t[4 + i], t[12 + i], 0xdd);
    }
}
#endif
