/* The norms of rows that others sent, for what judges them (worker/bounds.py): no bit of a result depends on them. */
#include "plan.h"

enum { LANES = 16 };

/* A number as it is stored, in fp32. */
static inline float number_at(int64_t type, const void *row, int64_t at)
{
    union {
        uint32_t bits;
        float value;
    } x;
    if (type == F32)
        return ((const float *)row)[at];
    uint32_t half = ((const uint16_t *)row)[at];
    if (type == BF16) {
        x.bits = half << 16;
        return x.value;
    }
    x.bits = (half & 0x7FFF) << 13; /* without its sign; the offsets of the exponents differ by 112 */
    return (half & 0x7C00) == 0x7C00 ? __builtin_inff() : x.value * 0x1p112f;
}

/* The sum of squares of the numbers of a row; infinite or NaN if one is, or beyond what fp32 holds. */
static inline float squares(int64_t type, const void *row, int64_t width)
{
    float sums[LANES] = {0}, sum = 0;
    for (int64_t i = 0; i < width; i += LANES) {
        float part[LANES] = {0};
        int64_t count = width - i < LANES ? width - i : LANES;
        for (int64_t lane = 0; lane < count; lane++)
            part[lane] = number_at(type, row, i + lane);
        for (int64_t lane = 0; lane < LANES; lane++)
            sums[lane] += part[lane] * part[lane];
    }
    for (int64_t lane = 0; lane < LANES; lane++)
        sum += sums[lane];
    return sum;
}

static float squares_of(int64_t type, const void *row, int64_t width)
{
    return type == F32 ? squares(F32, row, width) : type == BF16 ? squares(BF16, row, width) : squares(F16, row, width);
}

/* The smallest and the largest sum of squares of `count` rows (bf16, fp16 or fp32) -> out; both NaN if one is. */
EXPORT int mh_norms(int64_t type, const void *rows, int64_t bytes, int64_t count, double *out)
{
    if (type != BF16 && type != F16 && type != F32)
        return BAD_KIND;
    int64_t row_bytes = is_count(count, MAX_ROWS) ? bytes / count : 0;
    if (row_bytes < 1 || row_bytes * count != bytes || row_bytes % size_of_type(type))
        return BAD_ROWS;
    double least = __builtin_inf(), most = 0;
    for (int64_t i = 0; i < count && most == most; i++) {
        double sum = squares_of(type, (const char *)rows + i * row_bytes, row_bytes / size_of_type(type));
        least = sum >= least ? least : sum;
        most = sum <= most ? most : sum;
    }
    out[0] = most == most ? least : most, out[1] = most;
    return DONE;
}
