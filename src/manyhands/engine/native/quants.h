/* Products of integers: weights of 8 and 4 bit, with scales for groups of 32 numbers of K, and rows rounded to 8 bit a group.
 * What one target computes of them, included by kernels.c. docs/arithmetic.md ("Small weights") states it; sums of integers
 * are exact, so that their order is free. */
#ifndef MANYHANDS_QUANTS_H
#define MANYHANDS_QUANTS_H
#include "kernels.h"
#include "lanes.h"

#define WHOLE_BYTE 12582912.0f /* 1.5 * 2^23: the low byte of x + this is x, rounded to nearest even */

/* Without it gcc adds integers in another order, reads rows once for both halves of a panel, and has registers for neither. */
#define IN_ORDER(vector) __asm__("" : "+v"(vector))
#define AGAIN(pointer) __asm__("" : "+r"(pointer))

/* ---- sixteen int32 sums, one a column: (4 numbers of a row) times (4 numbers of 16 columns) at a time ---- */

#if defined(LANES_AVX512)
#define MOST_TOGETHER 8 /* rows that share a reading of the weights */
typedef __m512i Sums;
static inline __m512i four_of(const int8_t *at)
{
    int32_t word;
    memcpy(&word, at, 4);
    return _mm512_set1_epi32(word);
}
static inline V to_reals(Sums a, int32_t less) { return _mm512_cvtepi32_ps(_mm512_sub_epi32(a, _mm512_set1_epi32(less))); }
static inline Sums dot_unsigned(Sums sums, __m512i codes, const int8_t *row)
{
    __m512i x = four_of(row);
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(codes), "v"(x));
    return sums;
}
static inline Sums pairs_added(Sums sums, __m512i pairs) { return _mm512_add_epi32(sums, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1))); }

INLINE void bytes_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, int first, int end, V *out)
{
    Sums sums[MOST_TOGETHER];
    for (int r = 0; r < count; r++)
        sums[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = first; j < end; j++) {
        __m512i w = _mm512_loadu_si512(codes + j * 64);
        if (has_dot) {
            __m512i shifted = _mm512_xor_si512(w, _mm512_set1_epi8((char)0x80)); /* w + 128 */
#pragma GCC unroll 8
            for (int r = 0; r < count; r++)
                sums[r] = dot_unsigned(sums[r], shifted, group_at(rows, r * step)->codes + 4 * j);
            continue;
        }
        __m512i size = _mm512_abs_epi8(w);
        __mmask64 is_less = _mm512_movepi8_mask(w);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            __m512i x = four_of(group_at(rows, r * step)->codes + 4 * j);
            x = _mm512_mask_sub_epi8(x, is_less, _mm512_setzero_si512(), x);
            sums[r] = pairs_added(sums[r], _mm512_maddubs_epi16(size, x));
        }
    }
    for (int r = 0; r < count; r++)
        out[r] = to_reals(sums[r], has_dot ? 128 * part_sum(group_at(rows, r * step), first, end) : 0);
}

INLINE void nibbles_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, int32_t offset, V *out)
{
    const __m512i low = _mm512_set1_epi8(15);
    Sums sums[MOST_TOGETHER];
    for (int r = 0; r < count; r++)
        sums[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i both = _mm512_loadu_si512(codes + j * 64), a = _mm512_and_si512(both, low);
        __m512i b = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            const int8_t *x = group_at(rows, r * step)->codes + 4 * j;
            if (has_dot)
                sums[r] = dot_unsigned(dot_unsigned(sums[r], a, x), b, x + 16);
            else /* in int16: 8 times 2 times 15 times 127 fit */
                sums[r] = _mm512_add_epi16(sums[r], _mm512_add_epi16(_mm512_maddubs_epi16(a, four_of(x)), _mm512_maddubs_epi16(b, four_of(x + 16))));
        }
    }
    for (int r = 0; r < count; r++)
        out[r] = to_reals(has_dot ? sums[r] : pairs_added(_mm512_setzero_si512(), sums[r]), offset * group_sum(group_at(rows, r * step)));
}

#elif defined(LANES_AVX2)
#define MOST_TOGETHER 4
static inline __m256i four_of(const int8_t *at)
{
    int32_t word;
    memcpy(&word, at, 4);
    return _mm256_set1_epi32(word);
}
static inline __m256 to_reals(__m256i a, int32_t less) { return _mm256_cvtepi32_ps(_mm256_sub_epi32(a, _mm256_set1_epi32(less))); }
static inline __m256i pairs_added(__m256i sums, __m256i pairs) { return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))); }

/* Eight columns: |w| is the unsigned operand, so that -128 fits, and 2 times 128 times 127 fits int16. */
INLINE void half_bytes(int count, const char *rows, int64_t step, const uint8_t *codes, int first, int end, __m256 *out)
{
    __m256i sums[MOST_TOGETHER];
    for (int r = 0; r < count; r++)
        sums[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = first; j < end; j++) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(codes + j * 64)), size = _mm256_abs_epi8(w);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            __m256i x = _mm256_sign_epi8(four_of(group_at(rows, r * step)->codes + 4 * j), w);
            sums[r] = pairs_added(sums[r], _mm256_maddubs_epi16(size, x));
            IN_ORDER(sums[r]);
        }
    }
    for (int r = 0; r < count; r++)
        out[r] = to_reals(sums[r], 0);
}

INLINE void bytes_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, int first, int end, V *out)
{
    __m256 a[MOST_TOGETHER], b[MOST_TOGETHER];
    (void)has_dot;
    for (int j = first; j < end; j++)
        __builtin_prefetch(codes + j * 64 + 4096);
    half_bytes(count, rows, step, codes, first, end, a);
    AGAIN(rows);
    half_bytes(count, rows, step, codes + 32, first, end, b);
    for (int r = 0; r < count; r++)
        out[r] = (V){a[r], b[r]};
}

INLINE void half_nibbles(int count, const char *rows, int64_t step, const uint8_t *codes, int32_t offset, __m256 *out)
{
    const __m256i low = _mm256_set1_epi8(15);
    __m256i sums[MOST_TOGETHER];
    for (int r = 0; r < count; r++)
        sums[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(codes + j * 64));
        __m256i a = _mm256_and_si256(both, low), b = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) { /* in int16: 8 times 2 times 15 times 127 fit */
            const int8_t *x = group_at(rows, r * step)->codes + 4 * j;
            sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(a, four_of(x)));
            IN_ORDER(sums[r]);
            sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(b, four_of(x + 16)));
            IN_ORDER(sums[r]);
        }
    }
    for (int r = 0; r < count; r++)
        out[r] = to_reals(pairs_added(_mm256_setzero_si256(), sums[r]), offset * group_sum(group_at(rows, r * step)));
}

INLINE void nibbles_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, int32_t offset, V *out)
{
    __m256 a[MOST_TOGETHER], b[MOST_TOGETHER];
    (void)has_dot;
    for (int j = 0; j < 4; j++)
        __builtin_prefetch(codes + j * 64 + 4096);
    half_nibbles(count, rows, step, codes, offset, a);
    AGAIN(rows);
    half_nibbles(count, rows, step, codes + 32, offset, b);
    for (int r = 0; r < count; r++)
        out[r] = (V){a[r], b[r]};
}

#elif defined(LANES_NEON)
#define MOST_TOGETHER 4
typedef struct {
    int32x4_t q[4];
} Sums;
static inline int8x16_t four_of(const int8_t *at)
{
    int32_t word;
    memcpy(&word, at, 4);
    return vreinterpretq_s8_s32(vdupq_n_s32(word));
}
static inline int32x4_t dot(int has_dot, int32x4_t sums, int8x16_t w, int8x16_t x)
{
    if (has_dot) {
        __asm__(".arch_extension dotprod\n\tsdot %0.4s, %1.16b, %2.16b" : "+w"(sums) : "w"(w), "w"(x));
        return sums;
    }
    int16x8_t a = vmull_s8(vget_low_s8(w), vget_low_s8(x)), b = vmull_s8(vget_high_s8(w), vget_high_s8(x));
    return vaddq_s32(sums, vpaddq_s32(vpaddlq_s16(a), vpaddlq_s16(b)));
}
static inline V to_reals(Sums a, int32_t less) { return EACH(V, vcvtq_f32_s32(vsubq_s32(a.q[i], vdupq_n_s32(less)))); }

INLINE void bytes_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, int first, int end, V *out)
{
    for (int r = 0; r < count; r++) {
        const Group *group = group_at(rows, r * step);
        Sums sums = EACH(Sums, vdupq_n_s32(0));
        for (int j = first; j < end; j++)
            for (int i = 0; i < 4; i++)
                sums.q[i] = dot(has_dot, sums.q[i], vld1q_s8((const int8_t *)codes + j * 64 + i * 16), four_of(group->codes + 4 * j));
        out[r] = to_reals(sums, 0);
    }
}

INLINE void nibbles_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, int32_t offset, V *out)
{
    for (int r = 0; r < count; r++) {
        const Group *group = group_at(rows, r * step);
        Sums sums = EACH(Sums, vdupq_n_s32(0));
        for (int j = 0; j < 4; j++)
            for (int i = 0; i < 4; i++) {
                uint8x16_t both = vld1q_u8(codes + j * 64 + i * 16);
                int8x16_t a = vreinterpretq_s8_u8(vandq_u8(both, vdupq_n_u8(15))), b = vreinterpretq_s8_u8(vshrq_n_u8(both, 4));
                sums.q[i] = dot(has_dot, dot(has_dot, sums.q[i], a, four_of(group->codes + 4 * j)), b, four_of(group->codes + 4 * j + 16));
            }
        out[r] = to_reals(sums, offset * group_sum(group));
    }
}

#else /* plain C */
#define MOST_TOGETHER 2
INLINE void bytes_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, int first, int end, V *out)
{
    (void)has_dot;
    for (int r = 0; r < count; r++) {
        int32_t sums[SIDE] = {0};
        for (int j = first; j < end; j++)
            for (int c = 0; c < SIDE; c++)
                for (int k = 0; k < 4; k++)
                    sums[c] += (int8_t)codes[j * 64 + c * 4 + k] * group_at(rows, r * step)->codes[4 * j + k];
        out[r] = EACH(V, (float)sums[i]);
    }
}

INLINE void nibbles_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, int32_t offset, V *out)
{
    (void)has_dot;
    for (int r = 0; r < count; r++) {
        const int8_t *x = group_at(rows, r * step)->codes;
        int32_t sums[SIDE] = {0};
        for (int j = 0; j < 4; j++)
            for (int c = 0; c < SIDE; c++)
                for (int k = 0; k < 4; k++) {
                    int both = codes[j * 64 + c * 4 + k];
                    sums[c] += ((both & 15) - offset) * x[4 * j + k] + ((both >> 4) - offset) * x[4 * j + 16 + k];
                }
        out[r] = EACH(V, (float)sums[i]);
    }
}
#endif

/* ---- the same on all targets: lanes are columns ---- */

/* sums[r] += the products of `count` rows with `steps` steps of a panel, from step `first` on. */
INLINE void group_chain(int64_t type, int has_dot, int count, const float *x, int64_t row_step, int64_t step_step, const uint8_t *panel,
                        int64_t depth, int64_t first, int64_t steps, float *sums)
{
    const uint8_t *codes = panel + first * code_bytes(type);
    const half_t *factors = (const half_t *)(panel + depth * code_bytes(type) + first * factor_bytes(type));
    const char *rows = (const char *)x;
    for (int64_t i = 0; i < steps; i++, rows += step_step * 4, codes += code_bytes(type), factors += factor_bytes(type) / 2) {
        V part[MOST_TOGETHER], scale = from_f16(factors);
        if (type == W8)
            bytes_product(has_dot, count, rows, row_step * 4, codes, 0, 8, part);
        else
            nibbles_product(has_dot, count, rows, row_step * 4, codes, type == W4 ? 8 : 0, part);
        for (int r = 0; r < count; r++) {
            const Group *group = group_at(rows, r * row_step * 4);
            V sum = fma_(part[r], mul(scale, set(group->scale)), load(sums + r * SIDE));
            if (type == W4M)
                sum = fma_(from_f16(factors + SIDE), mul(set(group->scale), set((float)group_sum(group))), sum);
            store(sums + r * SIDE, sum);
        }
    }
}

/* Rows of groups times one panel of small weights: turns of rows go through a step before the next, so that it stays in L1. */
static void group_chains(int64_t type, int has_dot, const Source *source, const uint8_t *panel, float *sums)
{
    int64_t count = source->count, depth = source->depth, steps = count > MOST_TOGETHER ? 1 : depth, rows;
#if !defined(LANES_AVX512) && !defined(LANES_NEON)
    has_dot = 0; /* the CPU's, which this target does not use */
#endif
    for (int64_t step = 0; step < depth; step += steps)
        for (int64_t row = 0; row < count; row += rows) {
            const float *x = source->rows + row * source->row_step + step * source->step_step;
            rows = at_most(count - row, MOST_TOGETHER);
            rows = rows >= 8 ? 8 : rows >= 4 ? 4 : rows >= 2 ? 2 : 1;
#define TURN(name, dot, n) \
    if (type == name && has_dot == dot && rows == n) \
        group_chain(name, dot, n, x, source->row_step, source->step_step, panel, depth, step, steps, sums + row * SIDE);
#define TURNS(name, dot) \
    TURN(name, dot, 1) \
    TURN(name, dot, 2) \
    if (MOST_TOGETHER >= 4) \
        TURN(name, dot, 4) \
    if (MOST_TOGETHER >= 8) \
        TURN(name, dot, 8)
#define TYPES_OF(dot) TURNS(W8, dot) TURNS(W4, dot) TURNS(W4M, dot)
            TYPES_OF(0)
#if defined(LANES_AVX512) || defined(LANES_NEON)
            TYPES_OF(1)
#endif
#undef TURN
#undef TURNS
#undef TYPES_OF
        }
}

static inline V finite_or(V x, float other) { return pick(below(size_of(x), set(__builtin_inff())), x, set(other)); }

/* The nearest integers, as floats. */
static inline V rounded(V x) { return sub(add(x, set(WHOLE_BYTE)), set(WHOLE_BYTE)); }

/* 32 numbers -> a group: scale = largest / 127; a largest below 2^-100 counts as zero; NaN where one is not finite. */
static void round_group(const float *x, Group *to)
{
    V top = set(0), part[2] = {load(x), load(x + LANES)};
    for (int i = 0; i < 2; i++)
        top = more(finite_or(size_of(part[i]), __builtin_inff()), top);
    float most = tree_more(top), inverse = most >= 0x1p-100f && most < __builtin_inff() ? 127 / most : 0, lanes[LANES];
    to->scale = most >= 0x1p-100f ? (most < __builtin_inff() ? most / 127 : real_of(0x7FC00000)) : 0;
    for (int i = 0; i < 2; i++) {
        int32_t sum = 0;
        store(lanes, add(mul(finite_or(part[i], 0), set(inverse)), set(WHOLE_BYTE)));
        for (int j = 0; j < LANES; j++) {
            int8_t code = (int8_t)bits_of(lanes[j]);
            to->codes[i * LANES + j] = code;
            sum += code;
        }
        to->sums[i] = (int16_t)sum;
    }
}

/* The fp16 number nearest to x (ties to even; at most 65504, so that no finite number becomes infinite). */
static half_t narrow_f16(float x)
{
    uint32_t sign = bits_of(x) >> 16 & 0x8000, size = bits_of(x) & 0x7FFFFFFF;
    if (size > 0x7F800000 - 1)
        return 0x7E00;
    if (size >= 0x477FE000)
        return (half_t)(sign | 0x7BFF);
    if (size < 0x38800000) /* a denormal of fp16, or zero: whole steps of 2^-24 */
        return (half_t)(sign | (bits_of(real_of(size) + 0.5f) - bits_of(0.5f)));
    return (half_t)(sign | (size - 0x38000000 + 0xFFF + (size >> 13 & 1)) >> 13);
}

/* Codes of a column of 32 numbers a lane, x [32][16], in `low` .. `high` for a scale and its inverse; the sum of squared errors. */
static V code_columns(const float *x, V scale, V inverse, float low, float high, float *codes)
{
    V error = set(0);
    for (int k = 0; k < DEPTH; k++) {
        V v = finite_or(load(x + k * SIDE), 0), code = rounded(mul(v, inverse));
        code = minus(more(minus(more(code, set(low))), set(-high)));
        V off = sub(v, mul(code, scale));
        error = add(error, mul(off, off));
        store(codes + k * SIDE, code);
    }
    return error;
}

/* Codes [32][16] -> a step of a panel, four of a column in a word. */
static void put_codes(int64_t type, const float *from, uint8_t *codes)
{
    const uint32_t mask = type == W8 ? 0xFF : 0x0F;
    uint32_t words[DEPTH / 4][SIDE];
    for (int j = 0; j < DEPTH / 4; j++)
        for (int c = 0; c < SIDE; c++) {
            uint32_t word = 0;
            for (int k = 0; k < 4; k++)
                word |= ((uint32_t)((int32_t)from[(4 * j + k) * SIDE + c] + (type == W8 ? 0 : 8)) & mask) << 8 * k;
            words[j][c] = word;
        }
    for (int j = 0; type != W8 && j < DEPTH / 8; j++)
        for (int c = 0; c < SIDE; c++)
            words[j][c] |= words[j + DEPTH / 8][c] << 4;
    memcpy(codes, words, (size_t)code_bytes(type));
}

/* A step of a panel out of x [32][16]: codes and factors of type W8 or W4. */
static void round_weights(int64_t type, const float *x, uint8_t *codes, half_t *factors)
{
    static const float parts[5] = {8, 7.5f, 8.5f, 7, 9}; /* of the largest, that a scale is tried as */
    float best[DEPTH * SIDE], tried[DEPTH * SIDE];
    half_t scales[SIDE];
    V most = set(0), least = set(0), is_whole = set(1);
    for (int k = 0; k < DEPTH; k++) {
        V v = load(x + k * SIDE), size = finite_or(size_of(v), __builtin_inff());
        most = pick(below(least, size), v, most);
        least = more(size, least);
        is_whole = pick(below(size, set(__builtin_inff())), is_whole, set(0));
    }
    V least_error = set(__builtin_inff());
    for (int i = 0; i < (type == W8 ? 1 : 5); i++) {
        float wanted[LANES], whole[LANES], chosen[LANES];
        store(wanted, div_(type == W8 ? size_of(most) : minus(most), set(type == W8 ? 127 : parts[i])));
        store(whole, is_whole);
        for (int c = 0; c < SIDE; c++)
            scales[c] = whole[c] != 0 ? narrow_f16(wanted[c]) : 0x7E00;
        V scale = finite_or(from_f16(scales), 0), inverse = pick(below(set(0), size_of(scale)), div_(set(1), scale), set(0));
        V error = code_columns(x, scale, inverse, type == W8 ? -127 : -8, type == W8 ? 127 : 7, tried);
        M is_better = below(error, least_error);
        store(chosen, pick(is_better, set(1), set(0)));
        least_error = pick(is_better, error, least_error);
        for (int k = 0; k < DEPTH; k++)
            store(best + k * SIDE, i ? pick(is_better, load(tried + k * SIDE), load(best + k * SIDE)) : load(tried + k * SIDE));
        for (int c = 0; c < SIDE; c++)
            factors[c] = i == 0 || chosen[c] != 0 ? scales[c] : factors[c];
    }
    put_codes(type, best, codes);
}
#endif
