/* Products of small weights: rows rounded to groups of 32 codes of 8 bit, times codes of 4 to 8 bit with scales (docs/arithmetic.md, "Small
 * weights"; how a panel holds them: engine/native/kernels.h). A group's sum of integers is exact, so its order is free; groups follow one
 * another, each an fma or two onto the sum. */

enum { W8 = 3, W4, W4M, W5, W5M, W4K, W5K, W6K, W4F, W4Z, W4N, W4X, W3K, W2K, W4H, W4S, W4T, W3S, W2S }; /* engine/library.py, TYPES */
enum { NEST = 8, SMALL_STEPS = THREADS / SIDE };

/* 32 numbers of a row: number i is codes[i] * scale, four codes in a word; sums: of the first 16 codes, and of the others. */
struct Group {
    float scale;
    short sums[2];
    int codes[DEPTH / 4];
};

/* n: k. Rows of x -> groups in out: those of all rows side by side, `out_stride` from a step's to the next one's. A block has GROUPED rows. Grid
 * (steps / (THREADS / GROUPED), rows / GROUPED). */
enum { GROUPED = 8 };
KERNEL(group_rows)
{
    await_rows();
    const count_t step = blockIdx.x * (count_t)(THREADS / GROUPED) + threadIdx.x / GROUPED, row = blockIdx.y * (count_t)GROUPED + threadIdx.x % GROUPED;
    if (step >= ceil_div(a.n[0], DEPTH) || row >= a.count)
        return;
    const float *x = a.x + row * a.x_stride + step * DEPTH;
    const int left = a.n[0] - step * DEPTH < DEPTH ? (int)(a.n[0] - step * DEPTH) : DEPTH;
    float v[DEPTH], most = 0;
#pragma unroll
    for (int i = 0; i < DEPTH; i += 4) {
        const float4 four = *(const float4 *)(x + (i < left ? i : 0));
        v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        v[i] = i < left ? v[i] : 0;
        const float size = size_of(v[i]);
        most = more(size < infinity() ? size : infinity(), most);
    }
    const bool is_large = most >= 7.8886090522101181e-31f, is_finite = most < infinity(); /* 2^-100 */
    const float inverse = is_large && is_finite ? 127 / most : 0;
    Group group = {is_large ? (is_finite ? most / 127 : real_of(0x7FC00000)) : 0, {0, 0}, {}};
#pragma unroll
    for (int i = 0; i < DEPTH; i++) {
        const float finite = size_of(v[i]) < infinity() ? v[i] : 0;
        const int code = (signed char)(bits_of(finite * inverse + WHOLE) & 0xFF); /* the low byte is the nearest whole number */
        group.sums[i / 16] += (short)code;
        group.codes[i / 4] |= (code & 0xFF) << i % 4 * 8;
    }
    ((Group *)a.out)[step * a.out_stride + row] = group;
}

template <int TYPE> INLINE constexpr int code_bits() { return TYPE == W8 ? 8 : TYPE == W6K ? 6 : TYPE == W3K || TYPE == W3S ? 3 : TYPE == W2K || TYPE == W2S ? 2 : TYPE == W5 || TYPE == W5M || TYPE == W5K ? 5 : 4; }
template <int TYPE> INLINE constexpr int code_bytes() { return code_bits<TYPE>() * DEPTH * SIDE / 8; }
template <int TYPE> INLINE constexpr bool has_floats() { return TYPE == W4F || TYPE == W4H; }
template <int TYPE> INLINE constexpr int code_offset() { return TYPE == W4 ? 8 : TYPE == W5 ? 16 : TYPE == W6K ? 32 : has_floats<TYPE>() ? 12 : TYPE == W3K ? 4 : TYPE == W2S ? 16 : 0; }
template <int TYPE> INLINE constexpr bool is_table_nested() { return TYPE == W4X || TYPE == W4S || TYPE == W4T; }
template <int TYPE> INLINE constexpr bool is_nested() { return (TYPE >= W4K && TYPE <= W6K) || is_table_nested<TYPE>() || TYPE == W3K || TYPE == W2K || TYPE == W3S || TYPE == W2S; }
template <int TYPE> INLINE constexpr bool has_halves() { return TYPE == W6K || TYPE == W3K || TYPE == W2K || TYPE == W3S || TYPE == W2S; }
template <int TYPE> INLINE constexpr bool has_table() { return TYPE == W4N || is_table_nested<TYPE>() || TYPE == W3S; }
template <int TYPE> INLINE constexpr bool has_minima() { return TYPE == W4M || TYPE == W5M || TYPE == W4K || TYPE == W5K || TYPE == W2K; }
template <int TYPE> INLINE constexpr bool has_two() { return has_minima<TYPE>() || TYPE == W4H; } /* fma's a step */
template <int TYPE> INLINE constexpr int shared_bytes() { return has_minima<TYPE>() ? 4 * SIDE : 2 * SIDE; } /* of NEST steps */
template <int TYPE> INLINE constexpr int own_bytes() { return is_table_nested<TYPE>() || TYPE == W3S ? SIDE : 2 * SIDE; } /* of each */
template <int TYPE> INLINE constexpr int factor_bytes()
{
    return is_nested<TYPE>() ? own_bytes<TYPE>() + shared_bytes<TYPE>() / NEST : TYPE == W4F ? SIDE : has_minima<TYPE>() ? 4 * SIDE : TYPE == W4Z ? 2 * SIDE + SIDE / 2 : 2 * SIDE;
}

template <int TYPE> INLINE count_t panel_bytes(int depth) { return (count_t)depth * (code_bytes<TYPE>() + factor_bytes<TYPE>()) + (TYPE == W4H ? 4 * SIDE : 0); }

/* What column c of a step is, as it is multiplied. */
struct Codes {
    int words[DEPTH / 4];
    float scale, least; /* W4H: of both halves */
    int halves[2], minima[2]; /* of both halves: scales, and of W2K minima */
    int zero;      /* that each code is more by */
};

/* Numbers of the tables E2M1, IQ4, IQ3_S, IQ3_XXS and IQ2 (kernels.h), four in a word. */
template <int TYPE> INLINE int named_by(unsigned codes)
{
    const unsigned floats[4] = {0x0F0E0D0C, 0x18141210, 0x090A0B0C, 0x00040608}, fours[4] = {0xBFAD9881, 0xF6EADDCF, 0x26190D01, 0x71594535};
    const unsigned threes[4] = {0xF7F5F3F1, 0xFFFDFBF9, 0x07050301, 0x0F0D0B09}, halves[4] = {0xDCD4CCC2, 0xFCF4ECE4, 0x1C140C04, 0x3E342C24};
    const unsigned twos[4] = {0xF8E7D500, 0x002B1908, 0, 0};
    const unsigned *tables = TYPE == W4S ? threes : TYPE == W4T ? halves : TYPE == W3S ? twos : has_floats<TYPE>() ? floats : fours;
    unsigned found = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const unsigned code = codes >> 8 * i & 15;
        found |= (tables[code / 4] >> code % 4 * 8 & 0xFF) << 8 * i;
    }
    return (int)found;
}

template <int TYPE> INLINE Codes codes_of(const unsigned char *panel, int depth, int step, int c)
{
    Codes found;
    const int *low = (const int *)(panel + (count_t)step * code_bytes<TYPE>()) + c;
    const unsigned char *factors = panel + (count_t)depth * code_bytes<TYPE>() + (count_t)(is_nested<TYPE>() ? step / NEST * NEST : step) * factor_bytes<TYPE>();
    const unsigned char *subs = factors + shared_bytes<TYPE>() + step % NEST * own_bytes<TYPE>();
    found.zero = code_offset<TYPE>();
    found.halves[0] = found.halves[1] = 1, found.least = 0;
#pragma unroll
    for (int j = 0; j < (TYPE == W8 ? 8 : code_bits<TYPE>() < 4 ? 0 : 4); j++) {
        const int both = low[j * SIDE];
        found.words[j] = TYPE == W8 ? both : both & 0x0F0F0F0F;
        if (TYPE != W8)
            found.words[j + 4] = both >> 4 & 0x0F0F0F0F;
    }
    if (code_bits<TYPE>() == 5) {
        const int fifths = low[4 * SIDE];
#pragma unroll
        for (int j = 0; j < 8; j++)
            found.words[j] |= (fifths >> j & 0x01010101) << 4;
    }
    if (TYPE == W6K) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            found.words[j] |= (low[(4 + j / 4) * SIDE] >> 2 * (j % 4) & 0x03030303) << 4;
    }
    if (code_bits<TYPE>() < 4) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            found.words[j] = (low[j / 4 * SIDE] >> 2 * (j % 4) & 0x03030303) | (code_bits<TYPE>() == 3 ? (low[2 * SIDE] >> j & 0x01010101) << 2 : 0);
    }
    if (has_halves<TYPE>()) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            if (TYPE == W3S) {
                found.halves[half] = 1 + 2 * (subs[c] >> 4 * half & 15);
                continue;
            }
            const signed char own = (signed char)subs[2 * c + half];
            found.halves[half] = code_bits<TYPE>() == 2 ? own & 15 : own, found.minima[half] = own >> 4 & 15;
            if (TYPE == W2S) { /* a bit of eight numbers: one less, not more */
#pragma unroll
                for (int j = 0; j < 4; j++)
                    found.words[4 * half + j] = (found.words[4 * half + j] << 3) + (own >> (4 + j / 2) & 1 ? 0x07070707 : 0x09090909);
            }
        }
    }
    if (has_floats<TYPE>() || has_table<TYPE>()) {
#pragma unroll
        for (int j = 0; j < 8; j++)
            found.words[j] = named_by<TYPE>((unsigned)found.words[j]);
    }
    if (TYPE == W4F) {
        found.scale = real_of(factors[c] ? (unsigned)(factors[c] - 1) << 23 : 0);
        return found;
    }
    if (TYPE == W4H) {
        const float column = *(const float *)(panel + (count_t)depth * (code_bytes<TYPE>() + factor_bytes<TYPE>()) + 4 * c);
        found.scale = from_f16((unsigned)factors[c] << 7) * column, found.least = from_f16((unsigned)factors[SIDE + c] << 7) * column;
        return found;
    }
    if (TYPE == W4Z)
        found.zero = factors[2 * SIDE + c % (SIDE / 2)] >> c / (SIDE / 2) * 4 & 15;
    found.scale = from_f16(((const half_t *)factors)[c]);
    if (has_minima<TYPE>())
        found.least = from_f16(((const half_t *)factors)[SIDE + c]);
    if (TYPE == W2K)
        found.least = minus(found.least);
    if (TYPE == W4T || TYPE == W3S || TYPE == W2S)
        found.scale = found.scale * (TYPE == W4T ? 0.25f : 0.125f);
    if (is_table_nested<TYPE>())
        found.scale = found.scale * (float)(signed char)subs[c];
    if (TYPE == W4K || TYPE == W5K) {
        found.scale = found.scale * (float)subs[c];
        found.least = minus(found.least * (float)subs[SIDE + c]);
    }
    return found;
}

/* The whole number that a group of a row and a column of a step give; of W4H `second` is that of the second half of the step. */
template <int TYPE> INLINE int whole_product(const Codes &codes, const int *row, const short *sums, int &second)
{
    int first = 0;
    second = 0;
#pragma unroll
    for (int j = 0; j < 4; j++)
        first = __dp4a(codes.words[j], row[j], first), second = __dp4a(codes.words[j + 4], row[j + 4], second);
    if (TYPE == W4H) {
        second -= codes.zero * sums[1];
        return first - codes.zero * sums[0];
    }
    if (has_halves<TYPE>())
        return codes.halves[0] * (first - codes.zero * sums[0]) + codes.halves[1] * (second - codes.zero * sums[1]);
    return first + second - codes.zero * (sums[0] + sums[1]);
}

/* W2K: what the minima of a step's halves are multiplied with, times them. */
INLINE float minima_product(int first, int second, short first_sum, short second_sum) { return (float)(first * first_sum + second * second_sum); }

/* ROWS rows of groups, of `present`, with a panel. A thread has a column of a step. m.x: the first row's first group; `x_stride`: to the next. */
template <int TYPE, int ROWS, bool AWAITS> INLINE void small(const Matrix &m, count_t panel, int present)
{
    __shared__ Group rows[SMALL_STEPS][ROWS];
    __shared__ float2 parts[has_two<TYPE>() ? 2 : 1][ROWS][SMALL_STEPS][SIDE];
    const int t = threadIdx.x, c = t % SIDE, sub = t / SIDE, depth = (int)ceil_div(m.k, DEPTH);
    const unsigned char *packed = (const unsigned char *)m.packed + panel * panel_bytes<TYPE>(depth);
    const Group *given = (const Group *)m.x;
    float sum = 0;
    for (int first = 0; first < depth; first += SMALL_STEPS) {
        const int steps = depth - first < SMALL_STEPS ? depth - first : SMALL_STEPS;
        Codes codes;
        if (sub < steps)
            codes = codes_of<TYPE>(packed, depth, first + sub, c);
        if (AWAITS && first == 0)
            await_rows();
        enum { WORDS = sizeof(Group) / 4 };
#pragma unroll
        for (int word = c; word < ROWS * WORDS; word += SIDE)
            ((int *)rows[sub])[word] = sub < steps && word < present * WORDS ? ((const int *)(given + (first + sub) * m.x_stride))[word] : 0;
        __syncthreads();
        if (sub < steps) {
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                const Group &group = rows[sub][r];
                int second;
                parts[0][r][sub][c] = make_float2((float)whole_product<TYPE>(codes, group.codes, group.sums, second), codes.scale * group.scale);
                if (TYPE == W4H)
                    parts[has_two<TYPE>() ? 1 : 0][r][sub][c] = make_float2((float)second, codes.least * group.scale);
                if (TYPE == W2K)
                    parts[has_two<TYPE>() ? 1 : 0][r][sub][c] = make_float2(minima_product(codes.minima[0], codes.minima[1], group.sums[0], group.sums[1]), codes.least * group.scale);
                else if (has_minima<TYPE>())
                    parts[has_two<TYPE>() ? 1 : 0][r][sub][c] = make_float2(codes.least, group.scale * (float)(group.sums[0] + group.sums[1]));
            }
        }
        __syncthreads();
        if (sub < ROWS) {
#pragma unroll 4
            for (int step = 0; step < steps; step++) {
                const float2 part = parts[0][sub][step][c];
                sum = fma_(part.x, part.y, sum);
                if (has_two<TYPE>()) {
                    const float2 least = parts[has_two<TYPE>() ? 1 : 0][sub][step][c];
                    sum = fma_(least.x, least.y, sum);
                }
            }
        }
    }
    const count_t column = panel * SIDE + c;
    if (sub < ROWS && sub < present && column < m.n)
        finish(m, sub, column, sum);
}

/* n as of products; x: groups. Grid (panels of all parts times tiles of rows). */
#define SMALL(type, rows_)                                                                                                        \
    KERNEL(few_##type##_##rows_)                                                                                                  \
    {                                                                                                                             \
        const count_t block = blockIdx.x / a.n[5], row = blockIdx.x % a.n[5] * rows_;                                             \
        const Part *part = part_of(a, block);                                                                                     \
        const Matrix m = {part->packed, part->bias, (const float *)((const Group *)a.x + row),                                     \
                          part->out + row * part->out_stride, a.x_stride, part->out_stride, part->n, a.n[0], part->activation, 0}; \
        small<type, rows_, true>(m, block - part->first, (int)(a.count - row < rows_ ? a.count - row : rows_));                         \
    }                                                                                                                             \

#define SMALLS(type) SMALL(type, 1) SMALL(type, 2) SMALL(type, 4) SMALL(type, 8)
SMALLS(W8)
SMALLS(W4)
SMALLS(W4M)
SMALLS(W5)
SMALLS(W5M)
SMALLS(W4K)
SMALLS(W5K)
SMALLS(W6K)
SMALLS(W4F)
SMALLS(W4Z)
SMALLS(W4N)
SMALLS(W4X)
SMALLS(W3K)
SMALLS(W2K)
SMALLS(W4H)
SMALLS(W4S)
SMALLS(W4T)
SMALLS(W3S)
SMALLS(W2S)

/* As expert_product, of groups. */
#define SMALL_EXPERT(type)                                                                                                  \
    KERNEL(expert_##type)                                                                                                   \
    {                                                                                                                       \
        await_rows();                                                                                                       \
        const count_t pair = blockIdx.y;                                                                                    \
        const int expert = expert_of(a, pair, a.n[3], a.n[4]);                                                              \
        if (expert < 0)                                                                                                     \
            return;                                                                                                         \
        const Part *part = part_of(a, blockIdx.x);                                                                          \
        const float *x = (const float *)((const Group *)a.x + (a.n[5] ? pair : pair / a.n[4]));                             \
        const Matrix m = {part->packed + expert * a.n[2], part->bias ? part->bias + expert * part->n : nullptr, x,          \
                          part->out + pair * part->out_stride, a.x_stride, 0, part->n, a.n[0], part->activation, 0};                                \
        small<type, 1, false>(m, blockIdx.x - part->first, 1);                                                                     \
    }
SMALL_EXPERT(W8)
SMALL_EXPERT(W4)
SMALL_EXPERT(W4M)
SMALL_EXPERT(W5)
SMALL_EXPERT(W5M)
SMALL_EXPERT(W4K)
SMALL_EXPERT(W5K)
SMALL_EXPERT(W6K)
SMALL_EXPERT(W4F)
SMALL_EXPERT(W4Z)
SMALL_EXPERT(W4N)
SMALL_EXPERT(W4X)
SMALL_EXPERT(W3K)
SMALL_EXPERT(W2K)
SMALL_EXPERT(W4H)
SMALL_EXPERT(W4S)
SMALL_EXPERT(W4T)
SMALL_EXPERT(W3S)
SMALL_EXPERT(W2S)
