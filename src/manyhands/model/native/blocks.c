/* What attention does with one block of keys: tiles of it, scores, sums of values (see attend.c). */
#include "attend.h"

void pack_tail(const Kind *kind, const bf16 *keys, int64_t width, int64_t count, bf16 *tail)
{
    __mmask32 mask = (1u << kind->key_dim % DEPTH) - 1;
    for (int64_t i = 0; i < count && mask; i++)
        _mm512_store_si512(tail + i * DEPTH, _mm512_maskz_loadu_epi16(mask, keys + i * width + kind->key_dim / DEPTH * DEPTH));
}

void pack_values(const Kind *kind, const bf16 *keys, const bf16 *values, int64_t width, int64_t count, bf16 *packed)
{
    const __m512i low = interleaving(DEPTH);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(SIDE));
    for (int64_t key = 0; key < count; key += 2, values += 2 * width, keys += 2 * width) {
        bf16 *to = packed + key / 2 * DEPTH;
        for (int64_t d = 0; d < 2 * width; d += DEPTH) {
            _mm_prefetch((const char *)(keys + BLOCK * width + d), _MM_HINT_T0);
            _mm_prefetch((const char *)(values + BLOCK * width + d), _MM_HINT_T0);
        }
        for (int64_t d = 0; d < kind->value_dim; d += DEPTH, to += 4 * TILE) {
            __mmask32 mask = kind->value_dim - d >= DEPTH ? ~0u : (1u << (kind->value_dim - d)) - 1;
            __m512i even = _mm512_maskz_loadu_epi16(mask, values + d), odd = _mm512_maskz_loadu_epi16(mask, values + width + d);
            _mm512_store_si512(to, _mm512_permutex2var_epi16(even, low, odd));
            if (kind->value_dim - d > SIDE)
                _mm512_store_si512(to + 2 * TILE, _mm512_permutex2var_epi16(even, high, odd));
        }
    }
}

void score(const Kind *kind, const bf16 *keys, int64_t width, const bf16 *tail, const bf16 *query, int halves, float *scores)
{
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    for (int64_t k = 0; k < kind->key_dim; k += DEPTH, query += TILE) {
        int whole = kind->key_dim - k >= DEPTH;
        const bf16 *from = whole ? keys + k : tail;
        int64_t stride = whole ? width : DEPTH;
        _tile_loadd(6, query, 64);
        _tile_loadd(4, from, stride * 2);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(5, from + SIDE * stride, stride * 2);
        _tile_dpbf16ps(1, 5, 6);
        if (halves < 2)
            continue;
        _tile_loadd(4, from + 2 * SIDE * stride, stride * 2);
        _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(5, from + 3 * SIDE * stride, stride * 2);
        _tile_dpbf16ps(3, 5, 6);
    }
    _tile_stored(0, scores, 64);
    _tile_stored(1, scores + SIDE * SIDE, 64);
    if (halves < 2)
        return;
    _tile_stored(2, scores + 2 * SIDE * SIDE, 64);
    _tile_stored(3, scores + 3 * SIDE * SIDE, 64);
}

#define ADD_VALUES(sum, at)                                     \
    _tile_loadd(6, values + (2 * (at) + half) * TILE, 64); \
    _tile_dpbf16ps(sum, 4, 6);

void add_values(int64_t tiles, const bf16 *weights, const bf16 *values, int halves, float *sums)
{
    for (; tiles > 0; tiles -= 4, sums += 4 * SIDE * SIDE, values += 8 * TILE) {
        int64_t second = tiles > 1, third = tiles > 2 ? 2 : 0, fourth = tiles > 3 ? 3 : 0;
        _tile_loadd(0, sums, 64);
        _tile_loadd(1, sums + second * SIDE * SIDE, 64);
        _tile_loadd(2, sums + third * SIDE * SIDE, 64);
        _tile_loadd(3, sums + fourth * SIDE * SIDE, 64);
        for (int half = 0; half < halves; half++) {
            _tile_loadd(4, weights + half * TILE, 64);
            ADD_VALUES(0, 0)
            if (second) { ADD_VALUES(1, 1) }
            if (third) { ADD_VALUES(2, 2) }
            if (fourth) { ADD_VALUES(3, 3) }
        }
        _tile_stored(0, sums, 64);
        if (second) _tile_stored(1, sums + SIDE * SIDE, 64);
        if (third) _tile_stored(2, sums + 2 * SIDE * SIDE, 64);
        if (fourth) _tile_stored(3, sums + 3 * SIDE * SIDE, 64);
    }
}

void rescale(float *sums, int64_t tiles, const float decay[SIDE])
{
    for (int64_t i = 0; i < SIDE; i++) {
        __m512 factor = _mm512_set1_ps(decay[i]);
        for (int64_t tile = 0; tile < tiles; tile++) {
            float *at = sums + (tile * SIDE + i) * SIDE;
            _mm512_store_ps(at, _mm512_mul_ps(_mm512_load_ps(at), factor));
        }
    }
}
