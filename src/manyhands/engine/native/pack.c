/* Stored matrices into panels of 16 columns (kernels.h), a block of 16 rows by 32 numbers at a time, and rows out of panels. */
#include <string.h>

#include "kernels.h"
#include "lanes.h"
#include "panels.h"
#include "modes.h"
#include "plan.h"

/* A matrix [n, k] as it is stored: number (row, i) lies at rows[row] * row_step + i * k_step, or row * row_step without rows. */
typedef struct {
    const char *data;
    int64_t type, kept, n, k, row_step, k_step; /* kept: the type in panels */
    const int64_t *rows;
} StoredMatrix;

static void round_all(const void *from, uint16_t *to, int64_t count)
{
    float x;
    for (int64_t i = 0; i < count; i++) {
        memcpy(&x, (const char *)from + 4 * i, 4); /* at any address */
        to[i] = (uint16_t)(bits_of(round_bf16(x)) >> 16);
    }
}

/* `count` numbers whose bytes lie `step` apart, as the type that is kept. */
static void gather(const StoredMatrix *m, const char *from, int64_t step, int64_t count, char *to)
{
    int64_t size = size_of_type(m->type);
    float numbers[DEPTH];
    char *out = m->type == m->kept ? to : (char *)numbers;
    if (step == size && count == DEPTH) { /* sizes that the compiler knows */
        __builtin_prefetch(from + 512);
        size == 2 ? memcpy(out, from, DEPTH * 2) : memcpy(out, from, DEPTH * 4);
    } else
        for (int64_t i = 0; i < count; i++)
            size == 2 ? memcpy(out + 2 * i, from + i * step, 2) : memcpy(out + 4 * i, from + i * step, 4);
    if (out != to)
        round_all(numbers, (uint16_t *)to, count);
}

/* Rows [16 panel, ...) of columns [32 step, ...) -> [16][32], zeros beyond the edges. */
static void take_block(const StoredMatrix *m, int64_t panel, int64_t step, char *block)
{
    int64_t size = size_of_type(m->type), kept = size_of_type(m->kept), count = at_most(m->k - step * DEPTH, DEPTH);
    int64_t rows = at_most(m->n - panel * SIDE, SIDE);
    if (rows < SIDE || count < DEPTH)
        memset(block, 0, (size_t)(SIDE * DEPTH * kept));
    for (int64_t r = 0; r < rows; r++) {
        int64_t row = panel * SIDE + r, at = (m->rows ? m->rows[row] : row) * m->row_step + step * DEPTH * m->k_step;
        gather(m, m->data + at * size, m->k_step * size, count, block + r * DEPTH * kept);
    }
}

/* [16][32] -> a step of a panel (place_in_panel). */
static void put_block(int64_t type, const char *block, char *to)
{
    if (type == BF16) {
        turn_over((const uint32_t *)block, DEPTH / 2, (uint32_t *)to, SIDE, SIDE, DEPTH / 2);
        return;
    }
    if (type == F32) {
        turn_over((const uint32_t *)block, DEPTH, (uint32_t *)to, SIDE, SIDE, DEPTH);
        return;
    }
    _Alignas(64) uint32_t pairs[SIDE * SIDE];
    turn_over((const uint32_t *)block, DEPTH / 2, pairs, SIDE, SIDE, DEPTH / 2);
    for (int64_t i = 0; i < SIDE; i++)
        for (int64_t c = 0; c < SIDE; c++) {
            uint16_t *out = (uint16_t *)to + i * DEPTH;
            out[c] = (uint16_t)pairs[i * SIDE + c], out[SIDE + c] = (uint16_t)(pairs[i * SIDE + c] >> 16);
        }
}

/* The same of a matrix whose columns lie one after the other: 16 outputs of one k are together, and stay so. */
static void zip_block(const StoredMatrix *m, int64_t panel, int64_t step, char *to)
{
    int64_t size = size_of_type(m->type), kept = size_of_type(m->kept), count = at_most(m->k - step * DEPTH, DEPTH);
    _Alignas(64) uint16_t both[2 * SIDE] = {0};
    if (count < DEPTH)
        memset(to, 0, (size_t)(SIDE * DEPTH * kept));
    for (int64_t i = 0; i < count; i++) {
        const char *from = m->data + (panel * SIDE + (step * DEPTH + i) * m->k_step) * size;
        if (m->kept != BF16) {
            kept == 2 ? memcpy(to + i * SIDE * 2, from, SIDE * 2) : memcpy(to + i * SIDE * 4, from, SIDE * 4);
            continue;
        }
        uint16_t *half = both + i % 2 * SIDE;
        if (m->type == F32)
            round_all(from, half, SIDE);
        else
            memcpy(half, from, SIDE * 2);
        if (i % 2 == 0 && i + 1 < count)
            continue;
        uint32_t pairs[SIDE];
        for (int c = 0; c < SIDE; c++)
            pairs[c] = both[c] | (i % 2 ? (uint32_t)both[SIDE + c] << 16 : 0);
        memcpy(to + i / 2 * DEPTH * 2, pairs, sizeof pairs);
    }
}

static void pack_block(const StoredMatrix *m, int64_t panel, int64_t step, char *packed)
{
    _Alignas(64) char block[SIDE * DEPTH * 4];
    char *to = packed + (panel * ceil_div(m->k, DEPTH) + step) * panel_size(1) * size_of_type(m->kept);
    if (m->row_step == 1 && !m->rows && (panel + 1) * SIDE <= m->n) {
        zip_block(m, panel, step, to);
        return;
    }
    take_block(m, panel, step, block);
    put_block(m->kept, block, to);
}

/* Numbers that a packed matrix [n, k] has. n, k <= MAX_WIDTH: it cannot overflow. */
EXPORT int64_t mh_packed_size(int64_t n, int64_t k)
{
    return is_count(n, MAX_WIDTH) && is_count(k, MAX_WIDTH) ? ceil_div(n, SIDE) * panel_size(ceil_div(k, DEPTH)) : -1;
}

/* Whether every number lies within `count` numbers. Steps are bounded, so nothing overflows. */
static int is_within(const StoredMatrix *m, int64_t count)
{
    const int64_t most = (int64_t)1 << 40;
    if (m->row_step < 0 || m->row_step > most || m->k_step < 0 || m->k_step > MAX_WIDTH || count < 1 || count > most)
        return 0;
    for (int64_t row = m->rows ? 0 : m->n - 1; row < m->n; row++) {
        int64_t at = m->rows ? m->rows[row] : row;
        if (at < 0 || (m->row_step && at > (count - 1) / m->row_step) ||
            at * m->row_step + (m->k - 1) * m->k_step >= count)
            return 0;
    }
    return 1;
}

/* A stored matrix [n, k] -> panels of `kept`: its type, or bf16 for one of fp32. Rows lie one after the other where k_step is 1;
 * otherwise columns do, and all panels take a step before the next, so that memory is read in order. */
EXPORT int mh_pack(int64_t type, int64_t kept, const void *weight, int64_t count, int64_t n, int64_t k, int64_t row_step, int64_t k_step,
                   const int64_t *rows, void *packed, int64_t bytes)
{
    StoredMatrix m = {weight, type, kept, n, k, row_step, k_step, rows};
    int64_t needed = mh_packed_size(n, k), panels = ceil_div(n, SIDE), steps = ceil_div(k, DEPTH);
    if (type < BF16 || type > F32 || needed < 0 || (kept != type && (type != F32 || kept != BF16)))
        return BAD_SHAPE;
    if (!weight || !packed || bytes != needed * size_of_type(kept) || !is_within(&m, count))
        return BAD_TENSOR;
    for (int64_t i = 0; i < panels * steps; i++)
        k_step == 1 ? pack_block(&m, i / steps, i % steps, packed) : pack_block(&m, i % panels, i / panels, packed);
    return DONE;
}

static float widen_one(int64_t type, const void *at)
{
    uint16_t half;
    float number;
    if (type == F32)
        return memcpy(&number, at, 4), number;
    memcpy(&half, at, 2);
    return type == BF16 ? real_of((uint32_t)half << 16) : widen_f16(half);
}

/* [16][32] numbers -> a step of a panel. */
static void round_step(const Kernels *kernels, int64_t small, const float *rows, uint8_t *codes, uint8_t *factors)
{
    float columns[DEPTH * SIDE];
    turn_over((const uint32_t *)rows, DEPTH, (uint32_t *)columns, SIDE, SIDE, DEPTH);
    kernels->round_weights(small, columns, codes, (uint16_t *)factors);
}

static void round_block(const Kernels *kernels, const StoredMatrix *m, int64_t small, int64_t panel, int64_t step, uint8_t *packed)
{
    _Alignas(64) char block[SIDE * DEPTH * 4];
    float rows[SIDE * DEPTH];
    int64_t depth = ceil_div(m->k, DEPTH), size = size_of_type(m->type);
    uint8_t *to = packed + panel * panel_bytes(small, depth);
    take_block(m, panel, step, block);
    for (int64_t i = 0; i < SIDE * DEPTH; i++)
        rows[i] = m->type == BF16 ? widen_one(BF16, block + i * 2) : widen_one(m->type, block + i * size);
    round_step(kernels, small, rows, to + step * code_bytes(small), to + depth * code_bytes(small) + step * factor_bytes(small));
}

/* As mh_pack, rounded to `small`: W8 or W4. The result is the same on every target. */
EXPORT int mh_round(int64_t target, int64_t small, int64_t type, const void *weight, int64_t count, int64_t n, int64_t k, int64_t row_step,
                    int64_t k_step, const int64_t *rows, void *packed, int64_t bytes)
{
    StoredMatrix m = {weight, type, type, n, k, row_step, k_step, rows};
    int64_t panels = ceil_div(n, SIDE), steps = ceil_div(k, DEPTH);
    if (!plan_kernels(target))
        return BAD_KIND;
    if (type < BF16 || type > F32 || (small != W8 && small != W4) || mh_packed_bytes(small, n, k) < 0)
        return BAD_SHAPE;
    if (!weight || !packed || bytes != mh_packed_bytes(small, n, k) || !is_within(&m, count))
        return BAD_TENSOR;
    uint64_t modes = modes_enter();
    for (int64_t i = 0; i < panels * steps; i++)
        k_step == 1 ? round_block(plan_kernels(target), &m, small, i / steps, i % steps, packed)
                    : round_block(plan_kernels(target), &m, small, i % panels, i / panels, packed);
    modes_leave(modes);
    return DONE;
}

/* Bytes that a packed matrix [n, k] has; -1 for impossible ones. */
EXPORT int64_t mh_packed_bytes(int64_t type, int64_t n, int64_t k)
{
    if (type < BF16 || type >= TYPES || !is_count(n, MAX_WIDTH) || !is_count(k, MAX_WIDTH) || (is_nested(type) && k % (NEST * DEPTH)))
        return -1;
    return ceil_div(n, SIDE) * panel_bytes(type, ceil_div(k, DEPTH));
}

/* Numbers of a row of small weights as fp32: code times scale, plus the minimum, in one rounding (all before it is exact). */
static void unpack_small(int64_t type, const uint8_t *panel, int64_t depth, int64_t column, int64_t at, int64_t count, float *out)
{
    for (int64_t i = at; i < at + count; i++) {
        const uint8_t *factors = factors_at(type, panel, depth, i / DEPTH), *subs = subs_at(type, factors, i / DEPTH);
        const uint16_t *halves = (const uint16_t *)factors;
        double code = get_code(type, names_of(type), panel + i / DEPTH * code_bytes(type), i % DEPTH, column);
        double scale = type == W4F ? (factors[column] ? real_of((uint32_t)(factors[column] - 1) << 23) : 0) : widen_f16(halves[column]);
        double least = has_minima(type) ? widen_f16(halves[SIDE + column]) : 0;
        code -= type == W4Z ? zero_at(factors, column) : type == W2S ? less_at(subs, i % DEPTH, column) : 0;
        uint8_t own = has_halves(type) && type != W4H && type != W3S ? subs[2 * column + i % DEPTH / SIDE] : 0;
        if (type == W4H)
            scale = widen_f16((uint16_t)(factors[i % DEPTH / SIDE * SIDE + column] << 7)) * column_scales_at(panel, depth)[column];
        else if (type == W2K)
            scale *= own & 15, least *= -(double)(own >> 4);
        else if (type == W3S || type == W2S)
            scale *= unit_of(type) * (float)(type == W2S ? own & 15 : half_scale(subs[column], i % DEPTH / SIDE));
        else if (has_halves(type))
            scale *= (int8_t)own;
        else if (is_table_nested(type))
            scale *= unit_of(type) * (float)(int8_t)subs[column];
        else if (is_nested(type))
            scale *= subs[column], least *= -(double)subs[SIDE + column];
        out[i - at] = (float)(code * scale + least);
    }
}

const void *unpack(int64_t type, const void *packed, int64_t k, int64_t row, int64_t at, int64_t count, void *out)
{
    if (is_small(type)) {
        int64_t depth = ceil_div(k, DEPTH);
        unpack_small(type, (const uint8_t *)packed + row / SIDE * panel_bytes(type, depth), depth, row % SIDE, at, count, out);
        return out;
    }
    int64_t size = size_of_type(type), first = row / SIDE * panel_size(ceil_div(k, DEPTH));
    for (int64_t i = at; i < at + count; i++) {
        int64_t place = first + i / DEPTH * panel_size(1) + place_in_panel(type, i % DEPTH, row % SIDE);
        memcpy((char *)out + (i - at) * size, (const char *)packed + place * size, (size_t)size);
    }
    return out;
}

/* A row as it is stored, those of fp32 rounded where BF16 is kept. */
static void widen_row(const Kernels *kernels, int64_t kept, const char *row, int64_t type, int64_t k, float *out)
{
    uint16_t halves[SIDE * DEPTH];
    for (int64_t at = 0; at < k; at += SIDE * DEPTH) {
        int64_t count = at_most(k - at, SIDE * DEPTH);
        const void *from = row + at * size_of_type(type);
        if (type == F32 && kept == BF16)
            round_all(from, halves, count), from = halves;
        kernels->widen(from, from == halves ? BF16 : type, 1, out + at, count, 0);
    }
}

void widen_rows(const Kernels *kernels, int64_t kept, const char *const *rows, const int64_t *types, int64_t count, int64_t k, float *out)
{
    _Alignas(64) uint8_t panel[SIDE * (DEPTH + 2)]; /* of one step */
    float numbers[SIDE * DEPTH], row[DEPTH];
    for (int64_t r = 0; r < count; r++)
        if (is_small(types[r])) {
            widen_blocks(types[r], rows[r], k, out + r * k);
            if (kept == BF16)
                widen_row(kernels, kept, (const char *)(out + r * k), F32, k, out + r * k);
        } else if (!is_small(kept))
            widen_row(kernels, kept, rows[r], types[r], k, out + r * k);
    for (int64_t at = 0; at < k && is_small(kept); at += DEPTH) {
        int64_t left = at_most(k - at, DEPTH);
        memset(numbers, 0, sizeof numbers);
        for (int64_t r = 0; r < count; r++)
            for (int64_t i = 0; i < left && !is_small(types[r]); i++)
                numbers[r * DEPTH + i] = widen_one(types[r], rows[r] + (at + i) * size_of_type(types[r]));
        round_step(kernels, kept, numbers, panel, panel + code_bytes(kept));
        for (int64_t r = 0; r < count; r++)
            if (!is_small(types[r]))
                kernels->widen(unpack(kept, panel, DEPTH, r, 0, left, row), F32, 1, out + r * k + at, left, 0);
    }
}
