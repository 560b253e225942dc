/* Products: chains over steps of 32 numbers of K (docs/arithmetic.md). What a step adds, the sum of its even and of its odd numbers, does
 * not depend on the steps before it, so threads compute steps side by side; the sum over steps goes one after the other.
 *
 * n: k, rounds, and for groups of columns: bytes of a group's matrix, from a group's source columns to the next one's, the same of
 * targets. Grid (PANELS, or 4, panels of all parts; tiles of rows; groups). */

/* Four columns of a pair of k's: even and odd number of each. */
struct Pairs {
    float even[4], odd[4];
};

template <int TYPE> INLINE int step_bytes() { return DEPTH * SIDE * (TYPE == F32 ? 4 : 2); }

/* Of pair i of a step, columns [4 quad, 4 quad + 4) as they are stored. */
template <int TYPE> struct Stored;
template <> struct Stored<BF16> {
    uint4 words;
    INLINE Stored read(const char *step, int i, int quad) { return {*(const uint4 *)(step + i * 64 + quad * 16)}; }
    __device__ __forceinline__ Pairs widened() const
    {
        unsigned w[4] = {words.x, words.y, words.z, words.w};
        Pairs pairs;
#pragma unroll
        for (int c = 0; c < 4; c++)
            pairs.even[c] = real_of(w[c] << 16), pairs.odd[c] = real_of(w[c] & 0xFFFF0000);
        return pairs;
    }
};
template <> struct Stored<F16> {
    uint2 even, odd;
    INLINE Stored read(const char *step, int i, int quad)
    {
        return {*(const uint2 *)(step + i * 64 + quad * 8), *(const uint2 *)(step + i * 64 + 32 + quad * 8)};
    }
    __device__ __forceinline__ Pairs widened() const
    {
        unsigned e[2] = {even.x, even.y}, o[2] = {odd.x, odd.y};
        Pairs pairs;
#pragma unroll
        for (int c = 0; c < 4; c++)
            pairs.even[c] = from_f16(e[c / 2] >> 16 * (c % 2) & 0xFFFF), pairs.odd[c] = from_f16(o[c / 2] >> 16 * (c % 2) & 0xFFFF);
        return pairs;
    }
};
template <> struct Stored<F32> {
    float4 even, odd;
    INLINE Stored read(const char *step, int i, int quad)
    {
        return {*(const float4 *)(step + i * 128 + quad * 16), *(const float4 *)(step + i * 128 + 64 + quad * 16)};
    }
    __device__ __forceinline__ Pairs widened() const { return {{even.x, even.y, even.z, even.w}, {odd.x, odd.y, odd.z, odd.w}}; }
};

/* A matrix [n, k] and what its product with rows x becomes. */
struct Matrix {
    const char *packed;
    const float *bias, *x;
    float *out;
    count_t x_stride, out_stride, n, k, activation, rounds;
};

INLINE Matrix matrix_of(const Args &a, const Part *part)
{
    count_t group = blockIdx.z;
    return {part->packed + group * a.n[2], part->bias ? part->bias + group * part->n : nullptr, a.x + group * a.n[3],
            part->out + group * a.n[4], a.x_stride, part->out_stride, part->n, a.n[0], part->activation, a.n[1]};
}

INLINE void finish(const Matrix &m, count_t row, count_t column, float sum)
{
    sum = m.bias ? sum + m.bias[column] : sum;
    m.out[row * m.out_stride + column] = m.activation ? activate(m.activation, 1, sum) : sum;
}

/* Rows [first_row, first_row + ROWS), of `count`, with PANELS panels from `panel` on. Warps share the steps of a panel: 4 lanes have 16
 * columns of a step. */
template <int TYPE, int ROWS, int PANELS, bool AWAITS> INLINE void few(const Matrix &m, count_t panel, count_t first_row, count_t count)
{
    enum { WARPS = THREADS / 32 / PANELS, STEPS = 8 * WARPS, GIVEN = ROWS * SIDE * (STEPS + 1) * 2, SUMS = PANELS * ROWS * STEPS * SIDE };
    enum { APART = (GIVEN + SUMS) * 4 <= 48 << 10, ROOM = APART ? GIVEN + SUMS : GIVEN > SUMS ? GIVEN : SUMS };
    __shared__ __align__(16) float room[ROOM];
    float *const rows = room, *const sums = APART ? room + GIVEN : room;
    const int t = threadIdx.x, own = t / 32 / WARPS, sub = t / 32 % WARPS * 8 + t % 32 / 4, quad = t % 4;
    const int depth = (int)ceil_div(m.k, DEPTH), last = (int)ceil_div(m.n, SIDE) - 1, k = (int)m.k;
    const char *packed = m.packed + (panel + own < last ? panel + own : last) * depth * step_bytes<TYPE>();
    const float *x = m.x + first_row * m.x_stride;
    const int summed = t / SIDE, row = summed / PANELS, present = (int)(count - first_row < ROWS ? count - first_row : ROWS);
    float sum = 0;
    for (int first = 0; first < depth; first += STEPS) {
        const int steps = depth - first < STEPS ? depth - first : STEPS;
        Stored<TYPE> stored[SIDE];
        if (sub < steps) {
#pragma unroll
            for (int i = 0; i < SIDE; i++)
                stored[i] = Stored<TYPE>::read(packed + (count_t)(first + sub) * step_bytes<TYPE>(), i, quad);
        }
        if (AWAITS && first == 0)
            await_rows();
        if (!APART)
            __syncthreads();
#pragma unroll 4
        for (int e = t; e < ROWS * STEPS * SIDE; e += THREADS) {
            const int r = e / (STEPS * SIDE), pair = e % (STEPS * SIDE), column = first * DEPTH + 2 * pair;
            const float *at = x + r * m.x_stride + column;
            float even = r < present && column < k ? at[0] : 0, odd = r < present && column + 1 < k ? at[1] : 0;
            *(float2 *)(rows + ((r * SIDE + pair % SIDE) * (STEPS + 1) + pair / SIDE) * 2) =
                make_float2(rounded_if(m.rounds, even), rounded_if(m.rounds, odd));
        }
        __syncthreads();
        float both[ROWS][4];
        if (sub < steps) {
            float even[ROWS][4] = {}, odd[ROWS][4] = {};
#pragma unroll
            for (int i = 0; i < SIDE; i++) {
                Pairs w = stored[i].widened();
#pragma unroll
                for (int r = 0; r < ROWS; r++) {
                    float2 v = *(const float2 *)(rows + ((r * SIDE + i) * (STEPS + 1) + sub) * 2);
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        even[r][c] = fma_(v.x, w.even[c], even[r][c]), odd[r][c] = fma_(v.y, w.odd[c], odd[r][c]);
                }
            }
#pragma unroll
            for (int r = 0; r < ROWS; r++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    both[r][c] = even[r][c] + odd[r][c];
        }
        if (!APART)
            __syncthreads();
        if (sub < steps) {
#pragma unroll
            for (int r = 0; r < ROWS; r++)
                *(float4 *)(sums + ((own * ROWS + r) * STEPS + sub) * SIDE + quad * 4) = make_float4(both[r][0], both[r][1], both[r][2], both[r][3]);
        }
        __syncthreads();
        if (summed < PANELS * ROWS) {
            const float *at = sums + (summed % PANELS * ROWS + row) * STEPS * SIDE + t % SIDE;
#pragma unroll 8
            for (int step = 0; step < steps; step++)
                sum = sum + at[step * SIDE];
        }
    }
    count_t column = (panel + summed % PANELS) * SIDE + t % SIDE;
    if (summed < PANELS * ROWS && row < present && column < m.n)
        finish(m, first_row + row, column, sum);
}

/* n[5]: tiles of rows. Blocks of one panel lie side by side: its weights are read from memory once. */
#define FEW(type, rows, panels)                                                                                      \
    KERNEL(few_##type##_##rows)                                                                                      \
    {                                                                                                                \
        const count_t block = blockIdx.x / a.n[5], tile = blockIdx.x % a.n[5];                                       \
        const Part *part = part_of(a, block);                                                                        \
        few<type, rows, panels, true>(matrix_of(a, part), (block - part->first) * panels, tile * rows, a.count); \
    }
#define FEWS(type) FEW(type, 1, 1) FEW(type, 2, 1) FEW(type, 3, 1) FEW(type, 4, 2) FEW(type, 6, 2) FEW(type, 8, 2)
FEWS(BF16)
FEWS(F16)
FEWS(F32)
