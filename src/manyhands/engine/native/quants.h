/* Products of integers: weights of 8 and 4 bit, with scales for groups of 32 numbers of K, and rows rounded to 8 bit a group.
 * What one target computes of them, included by kernels.c. docs/arithmetic.md ("Small weights") states it; sums of integers
 * are exact, so that their order is free. */
#ifndef MANYHANDS_QUANTS_H
#define MANYHANDS_QUANTS_H
#include "kernels.h"
#include "lanes.h"

/* Without it gcc adds integers in another order, reads rows once for both halves of a panel, and has registers for neither. */
#define IN_ORDER(vector) __asm__("" : "+v"(vector))
#define AGAIN(pointer) __asm__("" : "+r"(pointer))

/* What is added to each code of nibbles_product, whose dot product takes unsigned ones. */
INLINE int32_t added_to(int64_t type, int has_dot) { return has_table(type) && has_dot ? 128 : code_offset(type); }
/* The same of halves_product, as a power of two; -1: nothing. */
INLINE int added_power(int64_t type, int has_dot) { return type == W6K ? 5 : type == W2S ? 4 : type == W3K ? 2 : type == W3S && has_dot ? 7 : -1; }

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
static inline __m512i pairs_signed(__m512i w, const int8_t *row) /* of w from -127 on, without an instruction of its own */
{
    __m512i x = four_of(row);
    x = _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x);
    return _mm512_maddubs_epi16(_mm512_abs_epi8(w), x);
}
static inline Sums dot_signed(Sums sums, __m512i w, const int8_t *row) { return pairs_added(sums, pairs_signed(w, row)); }

INLINE void bytes_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, V *out)
{
    Sums sums[MOST_TOGETHER];
    for (int r = 0; r < count; r++)
        sums[r] = _mm512_setzero_si512();
#pragma GCC unroll 8
    for (int j = 0; j < DEPTH / 4; j++) {
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
        out[r] = to_reals(sums[r], has_dot ? 128 * group_sum(group_at(rows, r * step)) : 0);
}

/* Sixteen zeros of W4Z, each in both halves of an int32. */
static inline __m512i zeros_of(const uint8_t *factors)
{
    __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(factors + 2 * SIDE)));
    __m256i low = _mm256_and_si256(both, _mm256_set1_epi32(15)), high = _mm256_srli_epi32(both, 4);
    __m512i zeros = _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
    return _mm512_or_si512(zeros, _mm512_slli_epi32(zeros, 16));
}

/* What codes name, for shuffles; for a dot product as unsigned bytes. own: the type itself, where `type` stands for others too. */
typedef __m512i Names;
INLINE Names names_at(int64_t type, int64_t own, int has_dot)
{
    const __m512i named = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)names_of(own)));
    return _mm512_xor_si512(named, _mm512_set1_epi8(has_table(type) && has_dot ? (char)0x80 : 0));
}

/* Codes of 4 and 5 bit, or numbers that they name (W4H: of each half of a step by itself); sums of half a step of those of 5 fit into int16, not of a whole one. */
INLINE void nibbles_product(int64_t type, Names names, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *factors, V *out, V *second)
{
    const int is_wide = code_bits(type) == 5 || has_floats(type);
    const __m512i low = _mm512_set1_epi8(15), fifth = _mm512_set1_epi8(16);
    __m512i highs = code_bits(type) == 5 ? _mm512_loadu_si512(codes + 256) : low, zeros = type == W4Z ? zeros_of(factors) : low;
    Sums sums[MOST_TOGETHER], others[MOST_TOGETHER];
    for (int r = 0; r < count; r++)
        sums[r] = others[r] = _mm512_setzero_si512();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i both = _mm512_loadu_si512(codes + j * 64), a = _mm512_and_si512(both, low);
        __m512i b = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
        if (code_bits(type) == 5) {
            a = _mm512_or_si512(a, _mm512_and_si512(_mm512_slli_epi16(highs, 4 - j), fifth));
            b = _mm512_or_si512(b, _mm512_and_si512(_mm512_srli_epi16(highs, j), fifth));
        }
        if (has_floats(type) || has_table(type))
            a = _mm512_shuffle_epi8(names, a), b = _mm512_shuffle_epi8(names, b);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            const int8_t *x = group_at(rows, r * step)->codes + 4 * j;
            if (has_dot && type == W4H) {
                sums[r] = dot_unsigned(sums[r], a, x), others[r] = dot_unsigned(others[r], b, x + 16);
                continue;
            }
            if (has_dot) {
                sums[r] = dot_unsigned(dot_unsigned(sums[r], a, x), b, x + 16);
                continue;
            }
            if (has_table(type)) {
                sums[r] = dot_signed(dot_signed(sums[r], a, x), b, x + 16);
                continue;
            }
            sums[r] = _mm512_add_epi16(sums[r], _mm512_maddubs_epi16(a, four_of(x)));
            if (is_wide)
                others[r] = _mm512_add_epi16(others[r], _mm512_maddubs_epi16(b, four_of(x + 16)));
            else /* 8 times 2 times 15 times 127 fit */
                sums[r] = _mm512_add_epi16(sums[r], _mm512_maddubs_epi16(b, four_of(x + 16)));
        }
    }
    for (int r = 0; r < count; r++) {
        Sums sum = has_dot || has_table(type) ? sums[r] : pairs_added(_mm512_setzero_si512(), sums[r]);
        if (type == W4H) {
            const Group *group = group_at(rows, r * step);
            out[r] = to_reals(sum, code_offset(type) * group->sums[0]);
            second[r] = to_reals(has_dot ? others[r] : pairs_added(_mm512_setzero_si512(), others[r]), code_offset(type) * group->sums[1]);
            continue;
        }
        sum = is_wide && !has_dot ? pairs_added(sum, others[r]) : sum;
        if (type == W4Z)
            sum = _mm512_sub_epi32(sum, _mm512_madd_epi16(zeros, four_of((const int8_t *)group_at(rows, r * step)->sums)));
        out[r] = to_reals(sum, added_to(type, has_dot) * group_sum(group_at(rows, r * step)));
    }
}

/* Four codes of 3 or 2 bit of each column: numbers 4 four .. 4 four + 3 of a half of a step; of W2S those numbers more by its offset. */
INLINE __m512i threes_of(int64_t type, const uint8_t *codes, const uint8_t *subs, int half, int four)
{
    __m512i twos = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(codes + half * 64), 2 * four), _mm512_set1_epi8(3));
    if (type == W2S) {
        const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)subs));
        const __mmask16 is_less = _mm512_test_epi32_mask(pairs, _mm512_set1_epi32(1 << (16 * half + 4 + four / 2)));
        return _mm512_add_epi8(_mm512_slli_epi16(twos, 3), _mm512_mask_blend_epi32(is_less, _mm512_set1_epi8(9), _mm512_set1_epi8(7)));
    }
    if (type == W2K)
        return twos;
    __m512i thirds = _mm512_loadu_si512(codes + 128);
    thirds = half || four >= 2 ? _mm512_srli_epi16(thirds, 4 * half + four - 2) : _mm512_slli_epi16(thirds, 2 - four);
    return _mm512_or_si512(twos, _mm512_and_si512(thirds, _mm512_set1_epi8(4)));
}

/* W2K: what the minima of a step's halves are multiplied with, times them: whole numbers. */
INLINE V minima_product(const uint8_t *subs, const Group *group)
{
    __m256i minima = _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i *)subs), 4), _mm256_set1_epi8(15));
    return to_reals(_mm512_madd_epi16(_mm512_cvtepu8_epi16(minima), four_of((const int8_t *)group->sums)), 0);
}

/* The scales of a step's halves, as numbers of 16 bit: a pair a column. */
INLINE __m512i pairs_of(int64_t type, const uint8_t *scales)
{
    if (type == W3S) {
        __m512i both = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)scales)), low = _mm512_set1_epi32(15);
        __m512i pairs = _mm512_or_si512(_mm512_and_si512(both, low), _mm512_slli_epi32(_mm512_srli_epi32(both, 4), 16));
        return _mm512_or_si512(_mm512_slli_epi32(pairs, 1), _mm512_set1_epi32(0x10001));
    }
    __m256i own = _mm256_loadu_si256((const __m256i *)scales);
    return _mm512_cvtepi8_epi16(code_bits(type) == 2 ? _mm256_and_si256(own, _mm256_set1_epi8(15)) : own);
}

INLINE __m512i pairs_product(int64_t type, __m512i w, const int8_t *row)
{
    return has_table(type) ? pairs_signed(w, row) : _mm512_maddubs_epi16(w, four_of(row));
}

/* Codes of 6, 3 or 2 bit, or numbers that they name, each half of a step times its scale: sums of two products fit into int16. */
INLINE void halves_product(int64_t type, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *scales, V *out)
{
    const __m512i low = _mm512_set1_epi8(15), top = _mm512_set1_epi8(48);
    const __m512i names = names_at(type, type, has_dot), pairs = pairs_of(type, scales);
    __m512i first = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(pairs, 0xA0), 0xA0);
    __m512i second = _mm512_shufflehi_epi16(_mm512_shufflelo_epi16(pairs, 0xF5), 0xF5);
    __m512i highs[2] = {low, low};
    if (type == W6K)
        highs[0] = _mm512_loadu_si512(codes + 256), highs[1] = _mm512_loadu_si512(codes + 320);
    Sums sums[MOST_TOGETHER], others[MOST_TOGETHER];
    for (int r = 0; r < count; r++)
        sums[r] = others[r] = _mm512_setzero_si512();
#pragma GCC unroll 2
    for (int j = 0; j < 4; j += 2) {
        __m512i w[2][2]; /* [half][four] */
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            if (type != W6K) {
                w[0][i] = threes_of(type, codes, scales, 0, j + i), w[1][i] = threes_of(type, codes, scales, 1, j + i);
                if (has_table(type))
                    w[0][i] = _mm512_shuffle_epi8(names, w[0][i]), w[1][i] = _mm512_shuffle_epi8(names, w[1][i]);
                continue;
            }
            __m512i both = _mm512_loadu_si512(codes + (j + i) * 64);
            w[0][i] = _mm512_and_si512(both, low), w[1][i] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
#pragma GCC unroll 2
            for (int half = 0; half < 2; half++) {
                __m512i moved = j ? _mm512_srli_epi16(highs[half], 2 * i) : _mm512_slli_epi16(highs[half], 4 - 2 * i);
                w[half][i] = _mm512_or_si512(w[half][i], _mm512_and_si512(moved, top));
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            const int8_t *x = group_at(rows, r * step)->codes + 4 * j;
            if (has_dot) {
                sums[r] = dot_unsigned(dot_unsigned(sums[r], w[0][0], x), w[0][1], x + 4);
                others[r] = dot_unsigned(dot_unsigned(others[r], w[1][0], x + 16), w[1][1], x + 20);
                continue;
            }
            __m512i a = _mm512_add_epi16(pairs_product(type, w[0][0], x), pairs_product(type, w[0][1], x + 4));
            __m512i b = _mm512_add_epi16(pairs_product(type, w[1][0], x + 16), pairs_product(type, w[1][1], x + 20));
            sums[r] = _mm512_add_epi32(sums[r], _mm512_add_epi32(_mm512_madd_epi16(a, first), _mm512_madd_epi16(b, second)));
        }
    }
    for (int r = 0; r < count; r++) {
        if (has_dot) {
            sums[r] = _mm512_mullo_epi32(sums[r], _mm512_srai_epi32(first, 16));
            sums[r] = _mm512_add_epi32(sums[r], _mm512_mullo_epi32(others[r], _mm512_srai_epi32(second, 16)));
        }
        __m512i less = _mm512_madd_epi16(pairs, four_of((const int8_t *)group_at(rows, r * step)->sums));
        const int power = added_power(type, has_dot);
        out[r] = to_reals(power < 0 ? sums[r] : _mm512_sub_epi32(sums[r], _mm512_slli_epi32(less, power < 0 ? 0 : power)), 0);
    }
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
static inline __m256i dot_unsigned(__m256i sums, __m256i codes, const int8_t *row)
{
    __m256i x = four_of(row);
#ifndef NO_AVX_DOT /* of an assembler that knows no AVX-VNNI: then this is not called */
    __asm__("%{vex%} vpdpbusd %2, %1, %0" : "+x"(sums) : "x"(codes), "x"(x));
#endif
    return sums;
}
static inline __m256i pairs_signed(__m256i w, const int8_t *row) /* of w from -127 on, without an instruction of its own */
{
    return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(four_of(row), w));
}
static inline __m256i dot_signed(__m256i sums, __m256i w, const int8_t *row) { return pairs_added(sums, pairs_signed(w, row)); }

/* Eight columns. The unsigned operand is w + 128 or, without a dot product, |w|: so -128 fits, and 2 times 128 times 127 fits int16. */
INLINE void half_bytes(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, __m256 *out)
{
    __m256i sums[MOST_TOGETHER];
    for (int r = 0; r < count; r++)
        sums[r] = _mm256_setzero_si256();
#pragma GCC unroll 8
    for (int j = 0; j < DEPTH / 4; j++) {
        __m256i w = _mm256_loadu_si256((const __m256i *)(codes + j * 64)), size = _mm256_abs_epi8(w);
        __m256i shifted = _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80));
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            if (has_dot) {
                sums[r] = dot_unsigned(sums[r], shifted, group_at(rows, r * step)->codes + 4 * j);
                continue;
            }
            __m256i x = _mm256_sign_epi8(four_of(group_at(rows, r * step)->codes + 4 * j), w);
            sums[r] = pairs_added(sums[r], _mm256_maddubs_epi16(size, x));
            IN_ORDER(sums[r]);
        }
    }
    for (int r = 0; r < count; r++)
        out[r] = to_reals(sums[r], has_dot ? 128 * group_sum(group_at(rows, r * step)) : 0);
}

INLINE void bytes_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, V *out)
{
    __m256 a[MOST_TOGETHER], b[MOST_TOGETHER];
    half_bytes(has_dot, count, rows, step, codes, a);
    AGAIN(rows);
    half_bytes(has_dot, count, rows, step, codes + 32, b);
    for (int r = 0; r < count; r++)
        out[r] = (V){a[r], b[r]};
}

/* Eight zeros of W4Z, each in both halves of an int32: those of columns 8 half, ... */
static inline __m256i zeros_of(const uint8_t *factors, int half)
{
    __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(factors + 2 * SIDE)));
    __m256i zeros = half ? _mm256_srli_epi32(both, 4) : _mm256_and_si256(both, _mm256_set1_epi32(15));
    return _mm256_or_si256(zeros, _mm256_slli_epi32(zeros, 16));
}

typedef __m256i Names;
INLINE Names names_at(int64_t type, int64_t own, int has_dot)
{
    const __m256i named = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)names_of(own)));
    return _mm256_xor_si256(named, _mm256_set1_epi8(has_table(type) && has_dot ? (char)0x80 : 0));
}

/* Codes of 4 and 5 bit, or numbers that they name, of columns 8 half, ...; sums of half a step of those of 5 fit into int16, not of a whole one. */
INLINE void half_nibbles(int64_t type, Names names, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *factors, int half, __m256 *out, __m256 *second)
{
    const int is_wide = code_bits(type) == 5 || has_floats(type);
    const __m256i low = _mm256_set1_epi8(15), fifth = _mm256_set1_epi8(16);
    __m256i highs = code_bits(type) == 5 ? _mm256_loadu_si256((const __m256i *)(codes + 256)) : low;
    __m256i zeros = type == W4Z ? zeros_of(factors, half) : low;
    __m256i sums[MOST_TOGETHER], others[MOST_TOGETHER];
    for (int r = 0; r < count; r++)
        sums[r] = others[r] = _mm256_setzero_si256();
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m256i both = _mm256_loadu_si256((const __m256i *)(codes + j * 64));
        __m256i a = _mm256_and_si256(both, low), b = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
        if (code_bits(type) == 5) {
            a = _mm256_or_si256(a, _mm256_and_si256(_mm256_slli_epi16(highs, 4 - j), fifth));
            b = _mm256_or_si256(b, _mm256_and_si256(_mm256_srli_epi16(highs, j), fifth));
        }
        if (has_floats(type) || has_table(type))
            a = _mm256_shuffle_epi8(names, a), b = _mm256_shuffle_epi8(names, b);
#pragma GCC unroll 8
        for (int r = 0; r < count; r++) {
            const int8_t *x = group_at(rows, r * step)->codes + 4 * j;
            if (has_dot && type == W4H) {
                sums[r] = dot_unsigned(sums[r], a, x), others[r] = dot_unsigned(others[r], b, x + 16);
                continue;
            }
            if (has_dot) {
                sums[r] = dot_unsigned(dot_unsigned(sums[r], a, x), b, x + 16);
                continue;
            }
            if (has_table(type)) {
                sums[r] = dot_signed(dot_signed(sums[r], a, x), b, x + 16);
                IN_ORDER(sums[r]);
                continue;
            }
            sums[r] = _mm256_add_epi16(sums[r], _mm256_maddubs_epi16(a, four_of(x)));
            IN_ORDER(sums[r]);
            __m256i *to = is_wide ? others + r : sums + r; /* 8 times 2 times 15 times 127 fit */
            *to = _mm256_add_epi16(*to, _mm256_maddubs_epi16(b, four_of(x + 16)));
            IN_ORDER(*to);
        }
    }
    for (int r = 0; r < count; r++) {
        __m256i sum = has_dot || has_table(type) ? sums[r] : pairs_added(_mm256_setzero_si256(), sums[r]);
        if (type == W4H) {
            const Group *group = group_at(rows, r * step);
            out[r] = to_reals(sum, code_offset(type) * group->sums[0]);
            second[r] = to_reals(has_dot ? others[r] : pairs_added(_mm256_setzero_si256(), others[r]), code_offset(type) * group->sums[1]);
            continue;
        }
        sum = is_wide && !has_dot ? pairs_added(sum, others[r]) : sum;
        if (type == W4Z)
            sum = _mm256_sub_epi32(sum, _mm256_madd_epi16(zeros, four_of((const int8_t *)group_at(rows, r * step)->sums)));
        out[r] = to_reals(sum, added_to(type, has_dot) * group_sum(group_at(rows, r * step)));
    }
}

INLINE void nibbles_product(int64_t type, Names names, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *factors, V *out, V *second)
{
    __m256 a[MOST_TOGETHER], b[MOST_TOGETHER], c[MOST_TOGETHER], d[MOST_TOGETHER];
    half_nibbles(type, names, has_dot, count, rows, step, codes, factors, 0, a, c);
    AGAIN(rows);
    half_nibbles(type, names, has_dot, count, rows, step, codes + 32, factors, 1, b, d);
    for (int r = 0; r < count; r++) {
        out[r] = (V){a[r], b[r]};
        if (type == W4H)
            second[r] = (V){c[r], d[r]};
    }
}

/* Four codes of 3 or 2 bit of each of eight columns: numbers 4 four .. 4 four + 3 of a half of a step; of W2S those numbers more by its offset. */
INLINE __m256i threes_of(int64_t type, const uint8_t *codes, const uint8_t *subs, int half, int four)
{
    __m256i twos = _mm256_srli_epi16(_mm256_loadu_si256((const __m256i *)(codes + half * 64)), 2 * four);
    twos = _mm256_and_si256(twos, _mm256_set1_epi8(3));
    if (type == W2S) {
        const __m256i bit = _mm256_set1_epi32(1 << (16 * half + 4 + four / 2)), pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)subs));
        const __m256i less = _mm256_and_si256(_mm256_cmpeq_epi32(_mm256_and_si256(pairs, bit), bit), _mm256_set1_epi8(2));
        return _mm256_add_epi8(_mm256_slli_epi16(twos, 3), _mm256_sub_epi8(_mm256_set1_epi8(9), less));
    }
    if (type == W2K)
        return twos;
    __m256i thirds = _mm256_loadu_si256((const __m256i *)(codes + 128));
    thirds = half || four >= 2 ? _mm256_srli_epi16(thirds, 4 * half + four - 2) : _mm256_slli_epi16(thirds, 2 - four);
    return _mm256_or_si256(twos, _mm256_and_si256(thirds, _mm256_set1_epi8(4)));
}

/* W2K: what the minima of a step's halves are multiplied with, times them: whole numbers. */
INLINE V minima_product(const uint8_t *subs, const Group *group)
{
    __m256i minima = _mm256_and_si256(_mm256_srli_epi16(_mm256_loadu_si256((const __m256i *)subs), 4), _mm256_set1_epi8(15));
    __m256i a = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(minima)), b = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(minima, 1));
    __m256i sums = four_of((const int8_t *)group->sums);
    return (V){to_reals(_mm256_madd_epi16(a, sums), 0), to_reals(_mm256_madd_epi16(b, sums), 0)};
}

/* The scales of a step's halves, of eight columns, as numbers of 16 bit: a pair a column. */
INLINE __m256i pairs_of(int64_t type, const uint8_t *scales)
{
    if (type == W3S) {
        __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)scales)), low = _mm256_set1_epi32(15);
        __m256i pairs = _mm256_or_si256(_mm256_and_si256(both, low), _mm256_slli_epi32(_mm256_srli_epi32(both, 4), 16));
        return _mm256_or_si256(_mm256_slli_epi32(pairs, 1), _mm256_set1_epi32(0x10001));
    }
    __m128i own = _mm_loadu_si128((const __m128i *)scales);
    return _mm256_cvtepi8_epi16(code_bits(type) == 2 ? _mm_and_si128(own, _mm_set1_epi8(15)) : own);
}

INLINE __m256i pairs_product(int64_t type, __m256i w, const int8_t *row)
{
    return has_table(type) ? pairs_signed(w, row) : _mm256_maddubs_epi16(w, four_of(row));
}

/* Codes of 6, 3 or 2 bit, or numbers that they name, each half of a step times its scale: sums of two products fit into int16. */
INLINE void half_columns(int64_t type, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *scales, __m256 *out)
{
    const __m256i low = _mm256_set1_epi8(15), top = _mm256_set1_epi8(48);
    const __m256i names = names_at(type, type, has_dot), pairs = pairs_of(type, scales);
    __m256i sums[MOST_TOGETHER];
    __m256i first = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(pairs, 0xA0), 0xA0);
    __m256i second = _mm256_shufflehi_epi16(_mm256_shufflelo_epi16(pairs, 0xF5), 0xF5);
    __m256i others[MOST_TOGETHER]; /* has_dot: of the second half of a step */
    for (int r = 0; r < count; r++)
        sums[r] = others[r] = _mm256_setzero_si256();
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
        __m256i highs = type == W6K ? _mm256_loadu_si256((const __m256i *)(codes + 256 + half * 64)) : low;
#pragma GCC unroll 2
        for (int j = 0; j < 4; j += 2) {
            __m256i a, b;
            if (type != W6K)
                a = threes_of(type, codes, scales, half, j), b = threes_of(type, codes, scales, half, j + 1);
            if (type == W3S)
                a = _mm256_shuffle_epi8(names, a), b = _mm256_shuffle_epi8(names, b);
            if (type == W6K) {
                a = _mm256_loadu_si256((const __m256i *)(codes + j * 64)), b = _mm256_loadu_si256((const __m256i *)(codes + j * 64 + 64));
                a = _mm256_and_si256(half ? _mm256_srli_epi16(a, 4) : a, low), b = _mm256_and_si256(half ? _mm256_srli_epi16(b, 4) : b, low);
                a = _mm256_or_si256(a, _mm256_and_si256(j ? highs : _mm256_slli_epi16(highs, 4), top));
                b = _mm256_or_si256(b, _mm256_and_si256(j ? _mm256_srli_epi16(highs, 2) : _mm256_slli_epi16(highs, 2), top));
            }
#pragma GCC unroll 8
            for (int r = 0; r < count; r++) {
                const int8_t *x = group_at(rows, r * step)->codes + 16 * half + 4 * j;
                if (has_dot) {
                    __m256i *to = half ? others + r : sums + r;
                    *to = dot_unsigned(dot_unsigned(*to, a, x), b, x + 4);
                    continue;
                }
                __m256i both = _mm256_add_epi16(pairs_product(type, a, x), pairs_product(type, b, x + 4));
                sums[r] = _mm256_add_epi32(sums[r], _mm256_madd_epi16(both, half ? second : first));
                IN_ORDER(sums[r]);
            }
        }
    }
    for (int r = 0; r < count; r++) {
        if (has_dot) {
            sums[r] = _mm256_mullo_epi32(sums[r], _mm256_srai_epi32(first, 16));
            sums[r] = _mm256_add_epi32(sums[r], _mm256_mullo_epi32(others[r], _mm256_srai_epi32(second, 16)));
        }
        __m256i less = _mm256_madd_epi16(pairs, four_of((const int8_t *)group_at(rows, r * step)->sums));
        const int power = added_power(type, has_dot);
        out[r] = to_reals(power < 0 ? sums[r] : _mm256_sub_epi32(sums[r], _mm256_slli_epi32(less, power < 0 ? 0 : power)), 0);
    }
}

INLINE void halves_product(int64_t type, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *scales, V *out)
{
    __m256 a[MOST_TOGETHER], b[MOST_TOGETHER];
    half_columns(type, has_dot, count, rows, step, codes, scales, a);
    AGAIN(rows);
    half_columns(type, has_dot, count, rows, step, codes + 32, scales + (type == W3S ? SIDE / 2 : SIDE), b);
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

INLINE void bytes_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, V *out)
{
    for (int r = 0; r < count; r++) {
        const Group *group = group_at(rows, r * step);
        Sums sums = EACH(Sums, vdupq_n_s32(0));
        for (int j = 0; j < DEPTH / 4; j++)
            for (int i = 0; i < 4; i++)
                sums.q[i] = dot(has_dot, sums.q[i], vld1q_s8((const int8_t *)codes + j * 64 + i * 16), four_of(group->codes + 4 * j));
        out[r] = to_reals(sums, 0);
    }
}

typedef int8x16_t Names;
INLINE Names names_at(int64_t type, int64_t own, int has_dot)
{
    (void)type, (void)has_dot;
    return vld1q_s8(names_of(own));
}

/* Sixteen codes of numbers 4 j .. 4 j + 3 of a half of a step, of columns 4 i .. 4 i + 3; of W2S those numbers more by its offset. */
INLINE int8x16_t codes_of(int64_t type, Names names, const uint8_t *codes, const uint8_t *subs, int half, int j, int i)
{
    if (code_bits(type) < 4) {
        uint8x16_t twos = vandq_u8(vshlq_u8(vld1q_u8(codes + half * 64 + i * 16), vdupq_n_s8((int8_t)(-2 * j))), vdupq_n_u8(3));
        if (type == W2S) {
            uint32x4_t is_less = vtstq_u32(vreinterpretq_u32_u16(vmovl_u8(vld1_u8(subs + 8 * i))), vdupq_n_u32(1u << (16 * half + 4 + j / 2)));
            uint8x16_t less = vandq_u8(vreinterpretq_u8_u32(is_less), vdupq_n_u8(2));
            return vreinterpretq_s8_u8(vaddq_u8(vshlq_n_u8(twos, 3), vsubq_u8(vdupq_n_u8(9), less)));
        }
        if (type == W2K)
            return vreinterpretq_s8_u8(twos);
        uint8x16_t thirds = vshlq_u8(vld1q_u8(codes + 128 + i * 16), vdupq_n_s8((int8_t)(2 - 4 * half - j)));
        uint8x16_t code = vorrq_u8(twos, vandq_u8(thirds, vdupq_n_u8(4)));
        return has_table(type) ? vqtbl1q_s8(names, code) : vreinterpretq_s8_u8(code);
    }
    uint8x16_t both = vld1q_u8(codes + j * 64 + i * 16), code = half ? vshrq_n_u8(both, 4) : vandq_u8(both, vdupq_n_u8(15));
    if (code_bits(type) == 5) {
        uint8x16_t highs = vshlq_u8(vld1q_u8(codes + 256 + i * 16), vdupq_n_s8((int8_t)(half ? -j : 4 - j)));
        code = vorrq_u8(code, vandq_u8(highs, vdupq_n_u8(16)));
    }
    if (type == W6K) {
        uint8x16_t highs = vshlq_u8(vld1q_u8(codes + 256 + half * 64 + i * 16), vdupq_n_s8((int8_t)(4 - 2 * j)));
        code = vorrq_u8(code, vandq_u8(highs, vdupq_n_u8(48)));
    }
    if (has_table(type))
        return vqtbl1q_s8(names, code);
    return vreinterpretq_s8_u8(has_floats(type) ? vqtbl1q_u8(vld1q_u8(E2M1), code) : code);
}

/* Zeros of W4Z of columns 4 i .. 4 i + 3. */
INLINE int32x4_t zeros_of(const uint8_t *factors, int i)
{
    uint8x8_t both = vld1_u8(factors + 2 * SIDE);
    uint16x8_t zeros = vmovl_u8(i < 2 ? vand_u8(both, vdup_n_u8(15)) : vshr_n_u8(both, 4));
    return vreinterpretq_s32_u32(vmovl_u16(i % 2 ? vget_high_u16(zeros) : vget_low_u16(zeros)));
}

INLINE int32x4_t half_product(int64_t type, Names names, int has_dot, const Group *group, const uint8_t *codes, const uint8_t *subs, int half, int i)
{
    int32x4_t sums = vdupq_n_s32(0);
    for (int j = 0; j < 4; j++)
        sums = dot(has_dot, sums, codes_of(type, names, codes, subs, half, j, i), four_of(group->codes + 16 * half + 4 * j));
    return sums;
}

INLINE void nibbles_product(int64_t type, Names names, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *factors, V *out, V *second)
{
    for (int r = 0; r < count; r++) {
        const Group *group = group_at(rows, r * step);
        if (type == W4H) {
            out[r] = to_reals(EACH(Sums, half_product(type, names, has_dot, group, codes, factors, 0, i)), code_offset(type) * group->sums[0]);
            second[r] = to_reals(EACH(Sums, half_product(type, names, has_dot, group, codes, factors, 1, i)), code_offset(type) * group->sums[1]);
            continue;
        }
        Sums sums = EACH(Sums, vaddq_s32(half_product(type, names, has_dot, group, codes, factors, 0, i), half_product(type, names, has_dot, group, codes, factors, 1, i)));
        if (type == W4Z)
            sums = EACH(Sums, vmlsq_s32(sums.q[i], zeros_of(factors, i), vdupq_n_s32(group_sum(group))));
        out[r] = to_reals(sums, code_offset(type) * group_sum(group));
    }
}

/* W2K: what the minima of a step's halves are multiplied with, times them: whole numbers. */
INLINE V minima_product(const uint8_t *subs, const Group *group)
{
    Sums sums;
    for (int i = 0; i < 4; i++) {
        int32x4_t pairs = vreinterpretq_s32_u16(vmovl_u8(vshr_n_u8(vld1_u8(subs + 8 * i), 4)));
        int32x4_t a = vmulq_n_s32(vandq_s32(pairs, vdupq_n_s32(15)), group->sums[0]);
        sums.q[i] = vmlaq_n_s32(a, vshrq_n_s32(pairs, 16), group->sums[1]);
    }
    return to_reals(sums, 0);
}

/* The scales of a step's halves, of columns 4 i .. 4 i + 3, as numbers of 16 bit: a pair a column. */
INLINE int32x4_t pairs_of(int64_t type, const uint8_t *scales, int i)
{
    if (type == W3S) {
        uint32x4_t both = widen_bytes(scales + 4 * i);
        uint32x4_t pairs = vorrq_u32(vandq_u32(both, vdupq_n_u32(15)), vshlq_n_u32(vshrq_n_u32(both, 4), 16));
        return vreinterpretq_s32_u32(vorrq_u32(vshlq_n_u32(pairs, 1), vdupq_n_u32(0x10001)));
    }
    int8x8_t own = vld1_s8((const int8_t *)scales + 8 * i);
    return vreinterpretq_s32_s16(vmovl_s8(code_bits(type) == 2 ? vand_s8(own, vdup_n_s8(15)) : own));
}

/* Codes of 6, 3 or 2 bit, or numbers that they name, each half of a step times its scale. */
INLINE void halves_product(int64_t type, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *scales, V *out)
{
    const Names names = names_at(type, type, has_dot);
    for (int r = 0; r < count; r++) {
        const Group *group = group_at(rows, r * step);
        Sums sums;
        for (int i = 0; i < 4; i++) {
            int32x4_t pairs = pairs_of(type, scales, i);
            int32x4_t a = vsubq_s32(half_product(type, names, has_dot, group, codes, scales, 0, i), vdupq_n_s32(code_offset(type) * group->sums[0]));
            int32x4_t b = vsubq_s32(half_product(type, names, has_dot, group, codes, scales, 1, i), vdupq_n_s32(code_offset(type) * group->sums[1]));
            sums.q[i] = vmlaq_s32(vmulq_s32(a, vshrq_n_s32(vshlq_n_s32(pairs, 16), 16)), b, vshrq_n_s32(pairs, 16));
        }
        out[r] = to_reals(sums, 0);
    }
}

#else /* plain C */
#define MOST_TOGETHER 2
INLINE void bytes_product(int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, V *out)
{
    (void)has_dot;
    for (int r = 0; r < count; r++) {
        int32_t sums[SIDE] = {0};
        for (int j = 0; j < DEPTH / 4; j++)
            for (int c = 0; c < SIDE; c++)
                for (int k = 0; k < 4; k++)
                    sums[c] += (int8_t)codes[j * 64 + c * 4 + k] * group_at(rows, r * step)->codes[4 * j + k];
        out[r] = EACH(V, (float)sums[i]);
    }
}

typedef const int8_t *Names;
INLINE Names names_at(int64_t type, int64_t own, int has_dot)
{
    (void)type, (void)has_dot;
    return names_of(own);
}

/* Of 16 columns: the sum of numbers [first, end) of a step. */
INLINE void sum_codes(int64_t type, Names names, const Group *group, const uint8_t *codes, const uint8_t *subs, int first, int end, int32_t *sums)
{
    for (int k = first; k < end; k++)
        for (int c = 0; c < SIDE; c++)
            sums[c] += (get_code(type, names, codes, k, c) - (type == W2S ? less_at(subs, k, c) : 0)) * group->codes[k];
}

INLINE void nibbles_product(int64_t type, Names names, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *factors, V *out, V *second)
{
    (void)has_dot;
    for (int r = 0; r < count; r++) {
        int32_t sums[SIDE] = {0}, others[SIDE] = {0};
        sum_codes(type, names, group_at(rows, r * step), codes, factors, 0, type == W4H ? DEPTH / 2 : DEPTH, sums);
        if (type == W4H) {
            sum_codes(type, names, group_at(rows, r * step), codes, factors, DEPTH / 2, DEPTH, others);
            second[r] = EACH(V, (float)others[i]);
        }
        for (int c = 0; type == W4Z && c < SIDE; c++)
            sums[c] -= zero_at(factors, c) * group_sum(group_at(rows, r * step));
        out[r] = EACH(V, (float)sums[i]);
    }
}

/* W2K: what the minima of a step's halves are multiplied with, times them: whole numbers. */
INLINE V minima_product(const uint8_t *subs, const Group *group)
{
    return EACH(V, (float)((subs[2 * i] >> 4) * group->sums[0] + (subs[2 * i + 1] >> 4) * group->sums[1]));
}

/* The scale of half a step of column c. */
INLINE int scale_of_half(int64_t type, const uint8_t *scales, int64_t c, int half)
{
    if (type == W3S)
        return half_scale(scales[c], half);
    return code_bits(type) == 2 ? scales[2 * c + half] & 15 : (int8_t)scales[2 * c + half];
}

/* Codes of 6, 3 or 2 bit, or numbers that they name, each half of a step times its scale. */
INLINE void halves_product(int64_t type, int has_dot, int count, const char *rows, int64_t step, const uint8_t *codes, const uint8_t *scales, V *out)
{
    const Names names = names_at(type, type, has_dot);
    for (int r = 0; r < count; r++) {
        int32_t a[SIDE] = {0}, b[SIDE] = {0};
        sum_codes(type, names, group_at(rows, r * step), codes, scales, 0, DEPTH / 2, a);
        sum_codes(type, names, group_at(rows, r * step), codes, scales, DEPTH / 2, DEPTH, b);
        out[r] = EACH(V, (float)(a[i] * scale_of_half(type, scales, i, 0) + b[i] * scale_of_half(type, scales, i, 1)));
    }
}
#endif

/* ---- the same on all targets: lanes are columns ---- */

/* What a group's integers are multiplied by, a column in a lane. */
INLINE V scales_of(int64_t type, const uint8_t *factors, const uint8_t *subs)
{
    if (type == W4F)
        return powers_at(factors);
    V scale = from_f16((const half_t *)factors);
    if (unit_of(type) != 1)
        scale = mul(scale, set(unit_of(type)));
    return is_table_nested(type) ? mul(scale, from_codes((const int8_t *)subs)) : type == W4K || type == W5K ? mul(scale, from_bytes(subs)) : scale;
}

INLINE V minima_of(int64_t type, const uint8_t *factors, const uint8_t *subs)
{
    V least = from_f16((const half_t *)factors + SIDE);
    if (type == W2K)
        return minus(least);
    return is_nested(type) ? minus(mul(least, from_bytes(subs + SIDE))) : least;
}

enum { LEAST_AHEAD = 8192, MOST_AHEAD = 131072 }; /* bytes: what is fetched so far ahead stays in L2 */
/* Fetches, of a panel and those behind it, what comes a while after a step, as many bytes as a step has. On AMD a whole panel later, so that also
 * the factors, which lie behind all codes of a panel, are there for its first step: into L2, and, for few rows, into L1 what comes soon. Zen 5
 * takes those of fewer than MOST_TOGETHER rows into L1 at once, of one row past the other caches (see ONCE): it drops many fetches into L2, and
 * these steps take a sixth less so. */
INLINE void fetch_step(int64_t type, int amd, int count, const uint8_t *panel, int64_t depth, int64_t step)
{
    const int64_t bytes = code_bytes(type) + factor_bytes(type);
    const uint8_t *far = panel + at_most(panel_bytes(type, depth), MOST_AHEAD) + LEAST_AHEAD + step * bytes;
    const uint8_t *near = panel + step * code_bytes(type) + (amd ? 2048 : 4096);
    const int is_few = count <= MOST_TOGETHER / 2, is_at_once = amd >= ZEN5 && count < MOST_TOGETHER;
    for (int64_t at = 0; at < bytes && amd; at += LINE)
        if (is_at_once && count == 1)
            __builtin_prefetch(far + at, 0, 0);
        else if (is_at_once)
            __builtin_prefetch(far + at);
        else
            __builtin_prefetch(far + at, 0, 2);
    for (int64_t at = 0; at < code_bytes(type) && (!amd || is_few) && !is_at_once; at += LINE)
        __builtin_prefetch(near + at);
}

/* sums[r] += the products of `count` rows with steps [first, end) of a panel; count is a constant wherever this is inlined, and type, which is
 * W4X for all types with a nested table: `own` says which. */
INLINE void group_chain(int64_t type, int64_t own, int has_dot, int count, const float *x, int64_t row_step, int64_t step_step, const uint8_t *panel,
                        int64_t depth, int64_t first, int64_t end, float *sums)
{
    const char *rows = (const char *)x;
    const int amd = mh_amd;
    const Names names = names_at(type, is_table_nested(type) ? own : type, has_dot);
    const V unit = set(unit_of(own)), columns = type == W4H ? load(column_scales_at(panel, depth)) : set(0);
    for (int64_t step = first; step < end; step++, rows += step_step * 4) {
        fetch_step(type, amd, count, panel, depth, step);
        __asm__("" ::: "memory"); /* nothing below is read before, or registers of AVX2 would not do */
        const uint8_t *codes = panel + step * code_bytes(type), *factors = factors_at(type, panel, depth, step), *subs = subs_at(type, factors, step);
        V part[MOST_TOGETHER], second[MOST_TOGETHER]; /* W4H: second halves of a step, whose scales are `least` */
        V scale = type == W4H ? mul(from_e4m3(factors), columns) : scales_of(type, factors, subs), least = scale;
        scale = is_table_nested(type) ? mul(scale, unit) : scale;
        if (type == W4H)
            least = mul(from_e4m3(factors + SIDE), columns);
        else if (has_minima(type))
            least = minima_of(type, factors, subs);
        if (type == W8)
            bytes_product(has_dot, count, rows, row_step * 4, codes, part);
        else if (has_halves(type) && type != W4H)
            halves_product(type, has_dot, count, rows, row_step * 4, codes, subs, part);
        else
            nibbles_product(type, names, has_dot, count, rows, row_step * 4, codes, factors, part, second);
        for (int r = 0; r < count; r++) {
            const Group *group = group_at(rows, r * row_step * 4);
            V sum = fma_(part[r], mul(scale, set(group->scale)), load(sums + r * SIDE));
            if (type == W4H)
                sum = fma_(second[r], mul(least, set(group->scale)), sum);
            else if (type == W2K)
                sum = fma_(minima_product(subs, group), mul(least, set(group->scale)), sum);
            else if (has_minima(type))
                sum = fma_(least, mul(set(group->scale), set((float)group_sum(group))), sum);
            store(sums + r * SIDE, sum);
        }
    }
}

/* `group_chain` for each type and number of rows, without and with a dot product of bytes: functions of their own, as chains in kernels.c. */
typedef void GroupChain(int64_t own, const float *x, int64_t row_step, int64_t step_step, const uint8_t *panel, int64_t depth, int64_t first, int64_t end, float *sums);
#define GROUP_CHAIN(type, dot, n)                                                                                                                 \
    static __attribute__((noinline)) void group_chain_##type##_##dot##_##n(int64_t own, const float *x, int64_t row_step, int64_t step_step,          \
                                                                           const uint8_t *panel, int64_t depth, int64_t first, int64_t end,     \
                                                                           float *sums)                                                         \
    {                                                                                                                                             \
        group_chain(type, own, dot, n, x, row_step, step_step, panel, depth, first, end, sums);                                                   \
    }
#define GROUP_NAME(type, dot, n) group_chain_##type##_##dot##_##n,
#define TWO_COUNTS(name, type, dot) name(type, dot, 1) name(type, dot, 2)
#define FOUR_COUNTS(name, type, dot) TWO_COUNTS(name, type, dot) name(type, dot, 3) name(type, dot, 4)
#if MOST_TOGETHER == 2
#define EACH_COUNT TWO_COUNTS
#elif MOST_TOGETHER == 4
#define EACH_COUNT FOUR_COUNTS
#elif MOST_TOGETHER == 8
#define EACH_COUNT(name, type, dot) FOUR_COUNTS(name, type, dot) name(type, dot, 5) name(type, dot, 6) name(type, dot, 7) name(type, dot, 8)
#endif
#if defined(LANES_AVX512) || (defined(LANES_AVX2) && !defined(NO_AVX_DOT)) || defined(LANES_NEON)
/* Rows together without the dot product: more of them took 190 kB, for AVX-512 CPUs of before 2019. */
enum { DOTS = 2, MOST_WITHOUT = 4 };
#define EACH_DOT(type) FOUR_COUNTS(GROUP_CHAIN, type, 0) EACH_COUNT(GROUP_CHAIN, type, 1)
#define NAMES_OF(type) {{FOUR_COUNTS(GROUP_NAME, type, 0)}, {EACH_COUNT(GROUP_NAME, type, 1)}},
#else
enum { DOTS = 1, MOST_WITHOUT = MOST_TOGETHER };
#define EACH_DOT(type) EACH_COUNT(GROUP_CHAIN, type, 0)
#define NAMES_OF(type) {{EACH_COUNT(GROUP_NAME, type, 0)}},
#endif
/* Those whose chains differ; and all, as they are numbered. */
#define EACH_KIND(each) each(W8) each(W4) each(W4M) each(W5) each(W5M) each(W4K) each(W5K) each(W6K) each(W4F) each(W4Z) each(W4N) \
    each(W4X) each(W3K) each(W2K) each(W4H) each(W3S) each(W2S)
#define EACH_SMALL(each) each(W8) each(W4) each(W4M) each(W5) each(W5M) each(W4K) each(W5K) each(W6K) each(W4F) each(W4Z) each(W4N) \
    each(W4X) each(W3K) each(W2K) each(W4H) each(W4X) each(W4X) each(W3S) each(W2S)
EACH_KIND(EACH_DOT)
static GroupChain *const GROUP_CHAINS[TYPES - W8][DOTS][MOST_TOGETHER] = {EACH_SMALL(NAMES_OF)};
#undef GROUP_CHAIN
#undef GROUP_NAME
#undef EACH_COUNT
#undef TWO_COUNTS
#undef FOUR_COUNTS
#undef EACH_DOT
#undef NAMES_OF
#undef EACH_SMALL
#undef EACH_KIND

/* Rows of groups times one panel of small weights: turns of rows, about as many in each, go through some steps before the next.
 * has_dot: whether the target's dot product of bytes is to be used, if it has one. */
static void group_chains(int64_t type, int has_dot, const Source *source, const uint8_t *panel, float *sums)
{
    const int is_dot = has_dot && DOTS == 2;
    int64_t count = source->count, depth = source->depth, turns = ceil_div(count, is_dot ? MOST_TOGETHER : MOST_WITHOUT);
    int64_t most = turns ? ceil_div(count, turns) : 1, steps = turns > 1 ? TURN_BYTES / (code_bytes(type) + factor_bytes(type)) : depth;
    for (int64_t step = 0; step < depth; step += steps)
        for (int64_t row = 0; row < count; row += most)
            GROUP_CHAINS[type - W8][is_dot][at_most(count - row, most) - 1](
                type, source->rows + row * source->row_step + step * source->step_step, source->row_step, source->step_step, panel, depth, step,
                at_most(step + steps, depth), sums + row * SIDE);
}

#endif
