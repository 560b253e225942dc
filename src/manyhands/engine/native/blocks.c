/* Blocks of numbers as GGUF files hold them, or as checkpoint/dtypes.py says, into panels of the same codes and factors (kernels.h). */
#include <string.h>

#include "kernels.h"
#include "plan.h"

/* Blocks of three more forms than there are types; W3S's first is IQ2_S, W2S's IQ1_S. */
enum { IQ2_XS = TYPES, IQ2_XXS, IQ1_M, FORM_END };
static int64_t type_of(int64_t form) { return form < TYPES ? form : form == IQ1_M ? W2S : W3S; }
/* Steps of a block, its bytes, and where its low codes begin; by form, from W8 on. */
typedef struct {
    int64_t steps, bytes, codes;
} Form;
static const Form FORMS[FORM_END - W8] = {{1, 34, 2},  {1, 18, 2},      {1, 20, 4},       {1, 22, 6},   {1, 24, 8},
                                       {8, 144, 16}, {8, 176, 48}, {8, 210, 0}, {1, 17, 1},
                                       {1, 19, 3}, {1, 18, 2},  {8, 136, 8},  {8, 110, 32},
                                       {8, 84, 16}, {1, 22, 6}, {8, 110, 2}, {8, 98, 2},
                                       {8, 82, 2},  {8, 50, 2}, {8, 74, 2},  {8, 66, 2}, {8, 56, 0}};
enum { SCALES = 4, FIFTHS = 16, SIXTHS = 128, PAIRS = 192, SHARED = 208 }; /* of Q4_K and Q5_K; of Q5_K; of Q6_K */
enum { SIXES = 96, SHARED_3 = 108, SHARED_2 = 80 };                       /* of Q3_K; of Q2_K */

static uint32_t word_at(const uint8_t *at)
{
    uint32_t word;
    memcpy(&word, at, 4);
    return word;
}

static void put_word(uint32_t word, uint8_t *to) { memcpy(to, &word, 4); }

/* The low 4 bits of numbers [0, 16) of a step: low or high halves of 16 bytes; and of [16, 32), 16 bytes behind. */
static void put_halves(const uint8_t *from, int is_high, uint8_t *to)
{
    for (int64_t j = 0; j < 4; j++) {
        uint32_t a = word_at(from + 4 * j) >> 4 * is_high & 0x0F0F0F0F, b = word_at(from + 4 * j + SIDE) >> 4 * is_high & 0x0F0F0F0F;
        put_word(a | b << 4, to + j * 64);
    }
}

/* The fifth bits of a step: bit `at` of 32 bytes. */
static void put_fifths(const uint8_t *from, int64_t at, uint8_t *to)
{
    uint32_t word = 0;
    for (int64_t j = 0; j < 8; j++)
        word |= (word_at(from + 4 * j) >> at & 0x01010101) << j;
    put_word(word, to);
}

/* The same of a word that has a bit for each number. */
static void spread_fifths(uint32_t bits, uint8_t *to)
{
    uint8_t bytes[DEPTH];
    for (int64_t k = 0; k < DEPTH; k++)
        bytes[k] = bits >> k & 1;
    put_fifths(bytes, 0, to);
}

/* The fifth and sixth bits of a step, or the first two: two of each of 32 bytes. */
static void put_twos(const uint8_t *from, int64_t at, uint8_t *to)
{
    for (int64_t half = 0; half < 2; half++, to += 64) {
        uint32_t word = 0;
        for (int64_t j = 0; j < 4; j++)
            word |= (word_at(from + half * SIDE + 4 * j) >> at & 0x03030303) << 2 * j;
        put_word(word, to);
    }
}

/* A block of 32 numbers -> column c of a step. */
static void put_plain(int64_t type, const uint8_t *block, uint8_t *codes, uint8_t *factors, int64_t c)
{
    const uint8_t *from = block + FORMS[type - W8].codes;
    int64_t halves = has_floats(type) ? 0 : has_minima(type) ? 2 : 1;
    if (type == W4H)
        factors[c] = block[4], factors[SIDE + c] = block[5];
    if (type == W4F)
        factors[c] = block[0];
    if (type == W4Z) { /* the low half first */
        uint8_t *zeros = factors + 2 * SIDE + c % (SIDE / 2), zero = block[2] & 15;
        *zeros = c < SIDE / 2 ? zero : (uint8_t)(*zeros | zero << 4);
    }
    for (int64_t i = 0; i < halves; i++)
        memcpy(factors + (i * SIDE + c) * 2, block + 2 * i, 2);
    for (int64_t j = 0; j < (type == W8 ? 8 : 4); j++)
        put_word(word_at(from + 4 * j), codes + j * 64 + c * 4);
    if (code_bits(type) == 5)
        spread_fifths(word_at(block + 2 * halves), codes + 256 + c * 4);
}

/* The float that a block of W4H begins with, times 2^7 (kernels.h). */
static void put_column_scale(const uint8_t *block, uint8_t *to)
{
    float scale;
    memcpy(&scale, block, 4);
    scale *= 128;
    memcpy(to, &scale, 4);
}

/* A scale and a minimum of 6 bits out of 12 bytes. */
static void put_scales(const uint8_t *from, int64_t i, uint8_t *scale, uint8_t *least)
{
    *scale = i < 4 ? from[i] & 63 : (from[i + 4] & 15) | from[i - 4] >> 6 << 4;
    *least = i < 4 ? from[i + 4] & 63 : from[i + 4] >> 4 | from[i] >> 6 << 4;
}

/* Scale i of 6 bits, less 32, out of 12 bytes. */
static int8_t scale_of_16(const uint8_t *from, int64_t i)
{
    return (int8_t)((from[i % 8] >> i / 8 * 4 & 15) + (from[8 + i % 4] >> i / 4 * 2 & 3) * 16 - 32);
}

/* A block of 256 codes of 3 or 2 bit -> column c of NEST steps. */
static void put_threes(int64_t type, const uint8_t *block, uint8_t *codes, uint8_t *factors, int64_t c)
{
    int8_t *subs = (int8_t *)factors + shared_bytes(type) + 2 * c;
    memcpy(factors + 2 * c, block + (type == W3K ? SHARED_3 : SHARED_2), 2);
    if (type == W2K)
        memcpy(factors + 2 * (SIDE + c), block + SHARED_2 + 2, 2);
    for (int64_t i = 0; i < NEST; i++, codes += code_bytes(type), subs += own_bytes(type)) {
        put_twos(block + FORMS[type - W8].codes + i / 4 * DEPTH, 2 * (i % 4), codes + c * 4);
        if (type == W2K) {
            memcpy(subs, block + 2 * i, 2);
            continue;
        }
        put_fifths(block, i, codes + 128 + c * 4);
        subs[0] = scale_of_16(block + SIXES, 2 * i), subs[1] = scale_of_16(block + SIXES, 2 * i + 1);
    }
}

/* A block of 256 codes of a table, 32 after the other, with a scale of 6 bits, less 32, for each 32 -> column c of NEST steps. */
static void put_table(const uint8_t *block, uint8_t *codes, uint8_t *factors, int64_t c)
{
    uint8_t *subs = factors + shared_bytes(W4X) + c;
    memcpy(factors + 2 * c, block, 2);
    for (int64_t i = 0; i < NEST; i++, codes += code_bytes(W4X), subs += own_bytes(W4X)) {
        for (int64_t j = 0; j < 4; j++)
            put_word(word_at(block + FORMS[W4X - W8].codes + i * SIDE + 4 * j), codes + j * 64 + c * 4);
        *subs = (uint8_t)((block[SCALES + i / 2] >> i % 2 * 4 & 15) + (block[2 + i / 4] >> i % 4 * 2 & 3) * 16 - 32);
    }
}

/* A step of a block whose numbers are entries of a grid: which word of the grid has four numbers each, a bit for each number that is
 * negative (of IQ1 for all eight: one less), and the scales of both halves. */
typedef struct {
    uint32_t words[DEPTH / 4];
    uint8_t signs[4];
    uint8_t scales[2];
} GridStep;
enum { HIGHS_3 = 66, SIGNS_3 = 74, SCALES_3 = 106, SIGNS_3X = 66 };             /* of IQ3_S; of IQ3_XXS */
enum { SIGNS_2 = 34, HIGHS_2 = 66, SCALES_2 = 74, SCALES_2X = 66, WORDS_2 = 2 }; /* of IQ2_S; of IQ2_XS; of IQ2_XXS */

enum { HIGHS_1 = 34, HIGHS_1M = 32, SCALES_1M = 48 };                           /* of IQ1_S; of IQ1_M */

/* 7 signs -> 8: the number of them that are negative is even. */
static uint8_t even_signs(uint32_t seven) { return (uint8_t)((seven & 127) | (uint32_t)__builtin_parity(seven & 127) << 7); }

/* Step i of a block of IQ3_S or IQ3_XXS. */
static GridStep step_of_fours(int64_t type, const uint8_t *block, int64_t i)
{
    GridStep found;
    const uint32_t signs = word_at(block + SIGNS_3X + (type == W4T ? 4 * i : 0));
    for (int64_t j = 0; j < DEPTH / 4; j++)
        found.words[j] = block[2 + 8 * i + j] | (type == W4S ? (uint32_t)(block[HIGHS_3 + i] >> j & 1) << 8 : 0);
    for (int64_t j = 0; j < 4; j++)
        found.signs[j] = type == W4S ? block[SIGNS_3 + 4 * i + j] : even_signs(signs >> 7 * j);
    found.scales[0] = found.scales[1] = (uint8_t)(type == W4S ? block[SCALES_3 + i / 2] >> i % 2 * 4 & 15 : signs >> 28);
    return found;
}

/* Step i of a block of IQ2_S, IQ2_XS or IQ2_XXS: an entry of their grids is eight numbers, two words. */
static GridStep step_of_eights(int64_t form, const uint8_t *block, int64_t i)
{
    GridStep found;
    const uint8_t *own = block + WORDS_2 + 8 * i; /* of IQ2_XS and IQ2_XXS */
    const uint8_t scales = form == IQ2_XXS ? (own[7] >> 4) * 17 : block[(form == W3S ? SCALES_2 : SCALES_2X) + i];
    for (int64_t j = 0; j < 4; j++) {
        const uint32_t two = own[2 * j] | (uint32_t)own[2 * j + 1] << 8;
        const uint32_t entry = form == W3S ? block[2 + 4 * i + j] | (uint32_t)(block[HIGHS_2 + i] >> 2 * j & 3) << 8
                               : form == IQ2_XS ? two & 511 : own[j];
        found.words[2 * j] = 2 * entry, found.words[2 * j + 1] = 2 * entry + 1;
        found.signs[j] = form == W3S ? block[SIGNS_2 + 4 * i + j] : even_signs(form == IQ2_XS ? two >> 9 : word_at(own + 4) >> 7 * j);
    }
    found.scales[0] = scales & 15, found.scales[1] = scales >> 4;
    return found;
}

/* Step i of a block of IQ1_S or IQ1_M: likewise, 3 bits of each entry and the bit for its numbers apart. */
static GridStep step_of_ones(int64_t form, const uint8_t *block, int64_t i)
{
    GridStep found;
    const uint8_t *low = block + (form == IQ1_M ? 0 : 2) + 4 * i, *high = block + (form == IQ1_M ? HIGHS_1M : HIGHS_1) + 2 * i;
    const uint32_t both = high[0] | (uint32_t)high[1] << 8;
    for (int64_t j = 0; j < 4; j++) {
        const uint32_t entry = low[j] | (both >> (form == IQ1_M ? 4 : 3) * j & 7) << 8;
        found.words[2 * j] = 2 * entry, found.words[2 * j + 1] = 2 * entry + 1;
        found.signs[j] = both >> (form == IQ1_M ? 4 * j + 3 : 15) & 1;
    }
    const uint8_t *own = block + SCALES_1M + i / 2 * 2; /* of IQ1_M: four scales of 3 bit, and 4 bits of the block's */
    const uint32_t scales = form == IQ1_M ? (own[0] | (uint32_t)own[1] << 8) >> i % 2 * 6 : (both >> 12 & 7) * 9;
    found.scales[0] = scales & 7, found.scales[1] = scales >> 3 & 7;
    return found;
}

/* The fp16 of a block: IQ1_M has 4 bits of it in each of four words. */
static uint16_t shared_of_ones(int64_t form, const uint8_t *block)
{
    uint16_t found = (uint16_t)(block[0] | block[1] << 8);
    for (int64_t i = 0; i < 4 && form == IQ1_M; i++)
        found = (uint16_t)(found >> 4 | block[SCALES_1M + 2 * i + 1] >> 4 << 12);
    return found;
}

/* Four codes of a table of 2 `half` numbers: places among its positive ones, which are its second half; negative where `signs` has a bit. */
static uint32_t signed_places(uint32_t places, uint32_t signs, uint32_t half)
{
    const uint32_t each = 0x01010101;
    return ((places & each * (half - 1)) | each * half) ^ ((signs & 15) * 0x00204081 & each) * (2 * half - 1);
}

/* A block of IQ1_S or IQ1_M -> column c of NEST steps. */
static void put_ones(int64_t form, const uint8_t *block, const uint32_t *grid, uint8_t *codes, uint8_t *factors, int64_t c)
{
    uint8_t *subs = factors + shared_bytes(W2S) + 2 * c;
    const uint16_t shared = shared_of_ones(form, block);
    memcpy(factors + 2 * c, &shared, 2);
    for (int64_t i = 0; i < NEST; i++, codes += code_bytes(W2S), subs += own_bytes(W2S)) {
        const GridStep step = step_of_ones(form, block, i);
        uint8_t numbers[DEPTH];
        for (int64_t j = 0; j < DEPTH / 4; j++)
            put_word(grid[step.words[j]], numbers + 4 * j);
        put_twos(numbers, 0, codes + c * 4);
        for (int64_t half = 0; half < 2; half++)
            subs[half] = (uint8_t)(1 + 2 * step.scales[half] + step.signs[2 * half] * 16 + step.signs[2 * half + 1] * 32);
    }
}

/* A block of 256 numbers of a grid -> column c of NEST steps. */
static void put_grid(int64_t form, const uint8_t *block, const uint32_t *grid, uint8_t *codes, uint8_t *factors, int64_t c)
{
    const int64_t type = type_of(form);
    uint8_t *subs = factors + shared_bytes(type) + c;
    memcpy(factors + 2 * c, block, 2);
    for (int64_t i = 0; i < NEST; i++, codes += code_bytes(type), subs += own_bytes(type)) {
        const GridStep step = type == W3S ? step_of_eights(form, block, i) : step_of_fours(type, block, i);
        uint8_t numbers[DEPTH];
        for (int64_t j = 0; j < DEPTH / 4; j++)
            put_word(signed_places(grid[step.words[j]], step.signs[j / 2] >> j % 2 * 4, type == W3S ? 4 : 8), numbers + 4 * j);
        if (type == W3S) {
            put_twos(numbers, 0, codes + c * 4);
            put_fifths(numbers, 2, codes + 128 + c * 4);
            *subs = (uint8_t)(step.scales[0] | step.scales[1] << 4);
            continue;
        }
        for (int64_t j = 0; j < 4; j++)
            put_word(word_at(numbers + 4 * j) | word_at(numbers + SIDE + 4 * j) << 4, codes + j * 64 + c * 4);
        *subs = (uint8_t)(1 + 2 * step.scales[0]);
    }
}

/* Words of four numbers that the grid of a form has; 0: it has none. */
static int64_t grid_words(int64_t form)
{
    return form == W4S || form == IQ2_XXS ? 512 : form == W4T ? 256 : form == W3S ? 2048 : form == IQ2_XS ? 1024 : form == W2S || form == IQ1_M ? 4096 : 0;
}

/* A block of 256 numbers -> column c of NEST steps. */
static void put_nested(int64_t type, const uint8_t *block, uint8_t *codes, uint8_t *factors, int64_t c)
{
    if (type == W4X) {
        put_table(block, codes, factors, c);
        return;
    }
    if (type == W2K || type == W3K) {
        put_threes(type, block, codes, factors, c);
        return;
    }
    const uint8_t *from = block + FORMS[type - W8].codes;
    uint8_t *subs = factors + shared_bytes(type);
    memcpy(factors + 2 * c, block + (type == W6K ? SHARED : 0), 2);
    if (type != W6K)
        memcpy(factors + 2 * (SIDE + c), block + 2, 2);
    for (int64_t i = 0; i < NEST; i++, codes += code_bytes(type), subs += own_bytes(type)) {
        uint8_t *highs = codes + 256 + c * 4;
        if (type == W6K) {
            put_halves(from + i / 4 * 64 + i % 2 * DEPTH, i % 4 >= 2, codes + c * 4);
            put_twos(block + SIXTHS + i / 4 * DEPTH, 2 * (i % 4), highs);
            memcpy(subs + 2 * c, block + PAIRS + 2 * i, 2);
            continue;
        }
        put_halves(from + i / 2 * DEPTH, i % 2, codes + c * 4);
        put_scales(block + SCALES, i, subs + c, subs + SIDE + c);
        if (type == W5K)
            put_fifths(block + FIFTHS, i, highs);
    }
}

/* A block -> column c of the steps that it has. */
static void put_block(int64_t form, const uint8_t *block, const uint32_t *grid, uint8_t *codes, uint8_t *factors, int64_t c)
{
    const int64_t type = type_of(form);
    if (type == W2S)
        put_ones(form, block, grid, codes, factors, c);
    else if (grid_words(form))
        put_grid(form, block, grid, codes, factors, c);
    else if (is_nested(type))
        put_nested(type, block, codes, factors, c);
    else
        put_plain(type, block, codes, factors, c);
}

int64_t stored_row_bytes(int64_t type, int64_t k)
{
    if (type >= BF16 && type <= F32)
        return k * size_of_type(type);
    if (type < W8 || type >= TYPES || type == W4H || grid_words(type) || k % (FORMS[type - W8].steps * DEPTH))
        return -1;
    return k / (FORMS[type - W8].steps * DEPTH) * FORMS[type - W8].bytes;
}

void widen_blocks(int64_t type, const char *row, int64_t k, float *out)
{
    _Alignas(64) uint8_t panel[NEST * SIDE * (DEPTH + 4)]; /* of a block, in its first column; steps of W8 are the largest */
    const Form block = FORMS[type - W8];
    const uint8_t *from = (const uint8_t *)row;
    for (int64_t at = 0; at < k; at += block.steps * DEPTH, from += block.bytes) {
        put_block(type, from, 0, panel, panel + block.steps * code_bytes(type), 0);
        unpack(type, panel, block.steps * DEPTH, 0, 0, block.steps * DEPTH, out + at);
    }
}

/* `depth` steps of a row, rows of blocks one after the other -> panels of the form's type. rows: which rows are taken, in order; null: the
 * first n. grid: of types that have one, four places a word (signed_places), `words` of them. */
EXPORT int mh_pack_blocks(int64_t form, const void *blocks, int64_t count, int64_t n, int64_t depth, const int64_t *rows, void *packed,
                          int64_t bytes, const uint32_t *grid, int64_t words)
{
    const int64_t small = type_of(form);
    if (form < W8 || form >= FORM_END || !is_count(depth, MAX_WIDTH) || mh_packed_bytes(small, n, depth * DEPTH) < 0)
        return BAD_SHAPE;
    const Form block = FORMS[form - W8];
    int64_t line = depth / block.steps * block.bytes;
    if (words != grid_words(form) || (words && !grid) || !blocks || !packed || bytes != mh_packed_bytes(small, n, depth * DEPTH) || count < 1)
        return BAD_TENSOR;
    for (int64_t row = 0; row < n; row++)
        if (rows ? rows[row] < 0 || rows[row] >= count / line : n > count / line)
            return BAD_TENSOR;
    if (n % SIDE) /* columns that no row is: all else is written below */
        memset((uint8_t *)packed + n / SIDE * panel_bytes(small, depth), 0, (size_t)panel_bytes(small, depth));
    for (int64_t row = 0; row < n; row++) {
        const uint8_t *from = (const uint8_t *)blocks + (rows ? rows[row] : row) * line;
        uint8_t *panel = (uint8_t *)packed + row / SIDE * panel_bytes(small, depth), *factors = panel + depth * code_bytes(small);
        if (small == W4H) /* the same in all blocks of a row */
            put_column_scale(from, (uint8_t *)column_scales_at(panel, depth) + row % SIDE * 4);
        for (int64_t step = 0; step < depth; step += block.steps, from += block.bytes) {
            uint8_t *codes = panel + step * code_bytes(small), *to = factors + step * factor_bytes(small);
            put_block(form, from, grid, codes, to, row % SIDE);
        }
    }
    return DONE;
}
