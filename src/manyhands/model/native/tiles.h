/* What the kernels share: the shape of AMX tiles, and lanes of 16 numbers. See product.c, norm.c. */
#ifndef MANYHANDS_TILES_H
#define MANYHANDS_TILES_H
#include <immintrin.h>
#include <stdint.h>

typedef uint16_t bf16;

enum {
    SIDE = 16,             /* rows of a tile; lanes of a register */
    DEPTH = 32,            /* numbers in a tile's row of bf16 */
    TILE = SIDE * DEPTH,   /* elements: 1 KiB */
    LINES = TILE * 2 / 64, /* cache lines of a tile */
};

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* Tiles 0-3: sums of up to `rows` rows. 4, 5: the rows. 6, 7: what they are multiplied with, in whole. */
static inline void configure(int64_t rows)
{
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = (uint8_t)(i < 6 ? rows : SIDE);
    }
    _tile_loadconfig(&config);
}

/* The first `count` lanes, or all. */
static inline __mmask16 lanes(int64_t count) { return count >= SIDE ? 0xffff : (__mmask16)((1u << count) - 1); }

static inline __m512 widened(__m256i x) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16)); }

/* `count` numbers of x, or 16; zeros behind. */
static inline __m512 get(const bf16 *x, int64_t count) { return widened(_mm256_maskz_loadu_epi16(lanes(count), x)); }

/* Rounds the first `count` of `values`, or all, into x. */
static inline void put(bf16 *x, int64_t count, __m512 values)
{
    _mm256_mask_storeu_epi16(x, lanes(count), (__m256i)_mm512_cvtneps_pbh(values));
}
#endif
