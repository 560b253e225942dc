/* Rounds rows to groups of 8-bit codes, and weights to codes of 8 and 4 bit with a scale. Included by kernels.c. */
#ifndef MANYHANDS_ROUNDING_H
#define MANYHANDS_ROUNDING_H
#include "kernels.h"
#include "lanes.h"

#define WHOLE_BYTE 12582912.0f /* 1.5 * 2^23: the low byte of x + this is x, rounded to nearest even */

static inline V finite_or(V x, float other) { return pick(below(size_of(x), set(__builtin_inff())), x, set(other)); }

enum { TRIED = 5 };
static const float EIGHTS[TRIED] = {127, 126, 125, 124, 123}; /* parts of a group's largest number that are tried as its scale */

/* The nearest integers, as floats. */
static inline V rounded(V x) { return sub(add(x, set(WHOLE_BYTE)), set(WHOLE_BYTE)); }

/* 32 numbers -> a group: scale = largest / 127; a largest below 2^-100 counts as zero; NaN where one is not finite. */
static void round_group(const float *x, Group *to)
{
    V top = set(0), part[2] = {load(x), load(x + LANES)};
    for (int i = 0; i < 2; i++)
        top = more(finite_or(size_of(part[i]), __builtin_inff()), top);
    float most = tree_more(top), inverse = most >= 0x1p-100f && most < __builtin_inff() ? 127 / most : 0, lanes[LANES];
    to->scale = most >= 0x1p-100f ? (most < __builtin_inff() ? most / 127 : real_of(NO_NUMBER)) : 0;
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
    static const float fours[TRIED] = {8, 7.5f, 8.5f, 7, 9};
    const float *parts = type == W8 ? EIGHTS : fours;
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
    for (int i = 0; i < TRIED; i++) {
        float wanted[LANES], whole[LANES], chosen[LANES];
        store(wanted, div_(type == W8 ? size_of(most) : minus(most), set(parts[i])));
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
