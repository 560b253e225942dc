/* The softmax of attention, 16 rows side by side: a row is a lane of every register here, so no row can know another, and
 * a key that a row may not see has the weight zero, whose sums are exact.
 */
#include "attend.h"

#include <math.h>

static const float LOG2_E = 1.44269504f;

/* A polynomial on [0, 1), within 1e-7 of 2^x and 1 at 0 (so that a maximum that stays decays nothing), times 2^floor(x). */
static __m512 power_of_two(__m512 x)
{
    __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); /* x - floor(x); 0 where x is infinite */
    __m512 p = _mm512_set1_ps(1.867130213e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.017030019e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.579991332e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.401644501e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931513118e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, x);
}

/* cap * tanh(x / cap) */
static __m512 capped(__m512 x, float cap)
{
    __m512 y = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(-2 * LOG2_E / cap)), one = _mm512_set1_ps(1);
    __m512 e = power_of_two(y);
    __m512 tanh = _mm512_div_ps(_mm512_sub_ps(one, e), _mm512_add_ps(one, e));
    __m512 sign = _mm512_and_ps(x, _mm512_set1_ps(-0.0f));
    return _mm512_or_ps(_mm512_mul_ps(tanh, _mm512_set1_ps(cap)), sign);
}

static __mmask16 visible(const Rows *rows, int64_t key)
{
    __m512i at = _mm512_set1_epi32((int)key);
    return _mm512_cmple_epi32_mask(at, rows->position) & _mm512_cmple_epi32_mask(rows->oldest, at);
}

/* The greatest score of each row that it may see, or -inf; scores that it may not see become -inf. */
static __m512 greatest(const Kind *kind, const Rows *rows, float *scores, int64_t key, int count, int masked)
{
    __m512 hidden = _mm512_set1_ps(-INFINITY), max[4] = {hidden, hidden, hidden, hidden};
    for (int i = 0; i < count; i += 4)
#pragma GCC unroll 4
        for (int j = 0; j < 4; j++) {
            __m512 score = _mm512_load_ps(scores + (i + j) * SIDE);
            if (kind->softcap > 0)
                score = capped(_mm512_mul_ps(score, _mm512_set1_ps(kind->scale)), kind->softcap);
            if (masked)
                score = _mm512_mask_blend_ps(visible(rows, key + i + j), hidden, score);
            if (masked || kind->softcap > 0)
                _mm512_store_ps(scores + (i + j) * SIDE, score);
            max[j] = _mm512_max_ps(max[j], score);
        }
    return _mm512_max_ps(_mm512_max_ps(max[0], max[1]), _mm512_max_ps(max[2], max[3]));
}

int soften(const Kind *kind, Rows *rows, float *scores, int64_t key, int halves, int masked, bf16 *weights, float decay[SIDE])
{
    __m512 unit = _mm512_set1_ps(kind->softcap > 0 ? LOG2_E : kind->scale * LOG2_E), sums[4] = {0};
    __m512 max = _mm512_max_ps(rows->max, _mm512_mul_ps(greatest(kind, rows, scores, key, halves * HALF, masked), unit));
    /* A row that has seen nothing yet keeps -inf, and its weights are 2^(-inf - 0) = 0. */
    __mmask16 blind = _mm512_cmp_ps_mask(max, _mm512_set1_ps(-INFINITY), _CMP_EQ_OQ);
    __m512 base = _mm512_mask_blend_ps(blind, max, _mm512_setzero_ps());
    __m512 fall = power_of_two(_mm512_sub_ps(rows->max, base));
    const __m512i pairs = interleaving(SIDE);
    for (int half = 0; half < halves; half++) {
        const float *from = scores + half * HALF * SIDE;
        __m512i columns[SIDE];
#pragma GCC unroll 16
        for (int i = 0; i < SIDE; i++) {
            /* Two roundings, as the maximum had: what is greatest is zero apart from it, were it 1e38. */
            __m512 even = power_of_two(_mm512_sub_ps(_mm512_mul_ps(_mm512_load_ps(from + 2 * i * SIDE), unit), base));
            __m512 odd = power_of_two(_mm512_sub_ps(_mm512_mul_ps(_mm512_load_ps(from + (2 * i + 1) * SIDE), unit), base));
            sums[i % 2 * 2] = _mm512_add_ps(sums[i % 2 * 2], even);
            sums[i % 2 * 2 + 1] = _mm512_add_ps(sums[i % 2 * 2 + 1], odd);
            columns[i] = _mm512_permutexvar_epi16(pairs, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
        }
        transpose(columns);
        for (int i = 0; i < SIDE; i++)
            _mm512_store_si512(weights + half * TILE + i * DEPTH, columns[i]);
    }
    __m512 sum = _mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3]));
    rows->sum = _mm512_fmadd_ps(rows->sum, fall, sum);
    rows->max = max;
    _mm512_storeu_ps(decay, fall);
    return _mm512_cmp_ps_mask(fall, _mm512_set1_ps(1), _CMP_NEQ_UQ) != 0;
}
