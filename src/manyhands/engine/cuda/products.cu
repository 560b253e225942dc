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

/* MANY_ROWS rows with 4 panels: a thread has 4 rows of 4 columns. Lines of shared memory are so much longer than what they hold that no
 * two threads that store or load at once meet in a bank. Of the sizes that were tried on an H100 none is faster by more than a tenth with
 * hundreds of rows, and with few rows larger ones leave multiprocessors without work. */
enum { MANY_ROWS = 32, MANY_THREADS = 128 };
template <int TYPE> INLINE void many(const Matrix &m, count_t panel, count_t first_row, count_t count)
{
    enum { LOADS = MANY_ROWS * DEPTH / MANY_THREADS, PIECES = 4 * 64 / MANY_THREADS, APART = MANY_THREADS / 32 };
    __shared__ __align__(16) float weights[2][DEPTH][4 * SIDE + SIDE], rows[2][DEPTH][MANY_ROWS + 4];
    const int t = threadIdx.x, tx = t % SIDE, ty = t / SIDE;
    const int depth = (int)ceil_div(m.k, DEPTH), last = (int)ceil_div(m.n, SIDE) - 1, k = (int)m.k, present = (int)(count - first_row);
    const int own_row = t % 32 / 8, own_k = t / 32 * 8 + t % 8; /* of what this thread loads: its first row, and its K of a step */
    const float *x = m.x + (first_row + own_row) * m.x_stride + own_k;
    const count_t apart = APART * m.x_stride;
    const char *packed[PIECES];
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        const count_t own = panel + t / 64 + 2 * j;
        packed[j] = m.packed + (own < last ? own : last) * depth * step_bytes<TYPE>();
    }
    float sum[4][4] = {}, loaded[LOADS];
    Stored<TYPE> stored[PIECES];
    auto load = [&](int step) {
#pragma unroll
        for (int j = 0; j < PIECES; j++)
            stored[j] = Stored<TYPE>::read(packed[j] + (count_t)step * step_bytes<TYPE>(), t % 64 / 4, t % 4);
        const bool is_inside = step * DEPTH + own_k < k;
#pragma unroll
        for (int j = 0; j < LOADS; j++)
            loaded[j] = is_inside && own_row + j * APART < present ? x[step * DEPTH + j * apart] : 0;
    };
    auto store = [&](int to) {
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            const Pairs w = stored[j].widened();
            const int pair = t % 64 / 4, place = (t / 64 + 2 * j) * SIDE + t % 4 * 4;
            *(float4 *)(weights[to][pair] + place) = make_float4(w.even[0], w.even[1], w.even[2], w.even[3]);
            *(float4 *)(weights[to][SIDE + pair] + place) = make_float4(w.odd[0], w.odd[1], w.odd[2], w.odd[3]);
        }
#pragma unroll
        for (int j = 0; j < LOADS; j++)
            rows[to][own_k][own_row + j * APART] = rounded_if(m.rounds, loaded[j]);
    };
    await_rows();
    load(0);
    store(0);
    __syncthreads();
    for (int step = 0; step < depth; step++) {
        const int now = step & 1;
        if (step + 1 < depth)
            load(step + 1);
        float halves[2][4][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll 1
            for (int first = 0; first < SIDE; first += 8) /* no more at once: the registers are needed for sums */
#pragma unroll
                for (int i = first; i < first + 8; i++) {
                    const float4 w = *(const float4 *)(weights[now][half * SIDE + i] + tx * 4);
                    const float4 v = *(const float4 *)(rows[now][2 * i + half] + ty * 4);
                    const float four[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
                    for (int r = 0; r < 4; r++) {
                        halves[half][r][0] = fma_(four[r], w.x, halves[half][r][0]);
                        halves[half][r][1] = fma_(four[r], w.y, halves[half][r][1]);
                        halves[half][r][2] = fma_(four[r], w.z, halves[half][r][2]);
                        halves[half][r][3] = fma_(four[r], w.w, halves[half][r][3]);
                    }
                }
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int c = 0; c < 4; c++)
                sum[r][c] = sum[r][c] + (halves[0][r][c] + halves[1][r][c]);
        if (step + 1 < depth)
            store(now ^ 1);
        __syncthreads();
    }
#pragma unroll
    for (int r = 0; r < 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            count_t row = first_row + ty * 4 + r, column = panel * SIDE + tx * 4 + c;
            if (row < count && column < m.n)
                finish(m, row, column, sum[r][c]);
        }
}

#define MANY(type)                                                                                                \
    KERNEL_OF(many_##type, MANY_THREADS, 4)                                                                       \
    {                                                                                                             \
        const Part *part = part_of(a, blockIdx.x);                                                                \
        many<type>(matrix_of(a, part), (blockIdx.x - part->first) * 4, (count_t)blockIdx.y * MANY_ROWS, a.count); \
    }
MANY(BF16)
MANY(F16)
MANY(F32)
