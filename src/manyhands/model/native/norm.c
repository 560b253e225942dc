/* Norms of rows: root mean square norms, and what rows measure. */
#include "attend.h"

#include <math.h>

static float sum_of_squares(const bf16 *x, int64_t n)
{
    __m512 squares = _mm512_setzero_ps();
    for (int64_t i = 0; i < n; i += SIDE) {
        __m512 values = get(x + i, n - i);
        squares = _mm512_fmadd_ps(values, values, squares);
    }
    return _mm512_reduce_add_ps(squares);
}

/* The smallest and the largest Euclidean norm of m >= 1 rows of n elements, `stride` apart; the largest is NaN if one is. */
void tiles_measure(const bf16 *x, int64_t stride, int64_t m, int64_t n, float range[2])
{
    range[0] = INFINITY, range[1] = 0;
    for (int64_t row = 0; row < m; row++, x += stride) {
        float norm = sqrtf(sum_of_squares(x, n));
        range[0] = fminf(range[0], norm);
        range[1] = norm <= range[1] ? range[1] : norm;
        if (isnan(norm))
            return;
    }
}

/* out[i] = x[i] / sqrt(mean(x[i]^2) + epsilon) * weight for m rows of n elements, `stride` apart; in fp32, rounded once. */
void tiles_norm(const bf16 *x, int64_t stride, const float *weight, float epsilon, bf16 *out, int64_t m, int64_t n)
{
    for (int64_t row = 0; row < m; row++, x += stride, out += n) {
        __m512 scale = _mm512_set1_ps(1 / sqrtf(sum_of_squares(x, n) / (float)n + epsilon));
        for (int64_t i = 0; i < n; i += SIDE) {
            __m512 values = _mm512_mul_ps(get(x + i, n - i), scale);
            put(out + i, n - i, _mm512_mul_ps(values, _mm512_maskz_loadu_ps(lanes(n - i), weight + i)));
        }
    }
}
