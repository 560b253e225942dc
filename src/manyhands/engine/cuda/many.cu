/* Products of more rows: tiles in shared memory. A thread has 8 x 4 numbers of a tile: with 4 x 4 half of what it does is to read them from
 * there. No branch lies inside a step: a compiler moves multiplications across one, away from the numbers they read, which then are kept in
 * memory. Packed pairs of bf16 in shared memory are slower on an H100 than fp32, as are 8 x 8 numbers, which leave room for fewer threads. */

/* Both rounded to bf16; a NaN stays one. */
INLINE void round_both(float &a, float &b)
{
#if __CUDA_ARCH__ >= 800
    unsigned both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(b), "f"(a));
    a = real_of(both << 16), b = real_of(both & 0xFFFF0000);
#else
    a = round_bf16(a), b = round_bf16(b);
#endif
}

/* ROWS rows with PANELS panels, half a step at a time; a warp has 32 rows of 32 columns. TEAMS of threads compute steps side by side, whose
 * sums then go through shared memory. Lines there are so much longer than what they hold that threads which store at once meet in few banks. */
template <int TYPE, int ROWS, int PANELS, int TEAMS> INLINE void many(const Matrix &m, count_t panel, count_t first_row, count_t count)
{
    enum { COLUMNS = PANELS * SIDE, TEAM = ROWS * COLUMNS / 32, HALF = SIDE / 2, LOADS = ROWS * SIDE / 4 / TEAM, PIECES = 2 * COLUMNS / TEAM };
    enum { BUFFERS = TEAMS > 1 ? 1 : 2, OWN = 32 / TEAMS, ACROSS = COLUMNS / 32 };
    __shared__ __align__(16) float columns[TEAMS][BUFFERS][2][HALF][COLUMNS + SIDE], rows[TEAMS][BUFFERS][SIDE][ROWS + 4], parts[TEAMS > 1 ? TEAMS * ROWS * COLUMNS : 1];
    const int team = threadIdx.x / TEAM, t = threadIdx.x % TEAM, lane = t % 32, warp = t / 32;
    const int row = warp / ACROSS * 32 + lane / 16 * 8 + lane % 2 * 4, column = warp % ACROSS * 32 + lane / 2 % 8 * 4;
    const int depth = (int)ceil_div(m.k, DEPTH), last = (int)ceil_div(m.n, SIDE) - 1, k = (int)m.k, present = (int)(count - first_row);
    const float *x = m.x + first_row * m.x_stride;
    const char *packed[PIECES];
#pragma unroll
    for (int j = 0; j < PIECES; j++) {
        const int own = (int)panel + (t + j * TEAM) / 32;
        packed[j] = m.packed + (count_t)(own < last ? own : last) * depth * step_bytes<TYPE>();
    }
    Stored<TYPE> stored[PIECES];
    float4 loaded[LOADS];
    int left; /* of K where this thread loads; what lies behind is zeros */
    auto load = [&](int step, int half) {
        step = step < depth ? step : depth - 1;
#pragma unroll
        for (int j = 0; j < PIECES; j++)
            stored[j] = Stored<TYPE>::read(packed[j] + (count_t)step * step_bytes<TYPE>(), half * HALF + lane / 4, lane % 4);
        const int at = step * DEPTH + half * SIDE + t % 4 * 4;
        left = k - at;
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            const int own = t / 4 + j * (TEAM / 4), there = own < present ? own : present - 1;
            loaded[j] = *(const float4 *)(x + (count_t)there * m.x_stride + (left > 0 ? at : 0));
        }
    };
    auto store = [&](int to) { /* number 2 i + odd of half a step lies in line i / 2 * 2 + i % 2 * 8 + odd: four numbers of a row in four banks */
        to = to % BUFFERS;
#pragma unroll
        for (int j = 0; j < PIECES; j++) {
            const Pairs w = stored[j].widened();
            const int place = (t + j * TEAM) / 32 * SIDE + t % 4 * 4;
            *(float4 *)(columns[team][to][0][lane / 4] + place) = make_float4(w.even[0], w.even[1], w.even[2], w.even[3]);
            *(float4 *)(columns[team][to][1][lane / 4] + place) = make_float4(w.odd[0], w.odd[1], w.odd[2], w.odd[3]);
        }
#pragma unroll
        for (int j = 0; j < LOADS; j++) {
            const float four[4] = {left > 0 ? loaded[j].x : 0, left > 1 ? loaded[j].y : 0, left > 2 ? loaded[j].z : 0, left > 3 ? loaded[j].w : 0};
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float a = four[2 * i], b = four[2 * i + 1];
                round_both(a, b);
                rows[team][to][t % 4 * 2 + i * 8][t / 4 + j * (TEAM / 4)] = m.rounds ? a : four[2 * i];
                rows[team][to][t % 4 * 2 + i * 8 + 1][t / 4 + j * (TEAM / 4)] = m.rounds ? b : four[2 * i + 1];
            }
        }
    };
    float sum[8][4] = {}; /* TEAMS > 1: the first OWN of these, of one row after the other */
    await_rows();
    load(team, 0);
    store(0);
    __syncthreads();
    for (int first = 0; first < depth; first += TEAMS) {
        float halves[2][8][4]; /* even and odd numbers of K */
#pragma unroll
        for (int half = 0; half < 2; half++) {
            load(first + team + (half ? TEAMS : 0), !half);
#pragma unroll
            for (int i = 0; i < HALF; i++) {
                const float *line = rows[team][half % BUFFERS][i / 2 * 2 + i % 2 * 8] + row;
#pragma unroll
                for (int odd = 0; odd < 2; odd++) {
                    const float4 w = *(const float4 *)(columns[team][half % BUFFERS][odd][i] + column);
                    const float4 low = *(const float4 *)(line + odd * (ROWS + 4)), high = *(const float4 *)(line + odd * (ROWS + 4) + 16);
                    const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, four[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
                    for (int r = 0; r < 8; r++)
#pragma unroll
                        for (int c = 0; c < 4; c++)
                            halves[odd][r][c] = fma_(v[r], four[c], half || i ? halves[odd][r][c] : 0);
                }
            }
            if (half)
#pragma unroll
                for (int r = 0; r < 8; r++) {
                    float both[4];
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        both[c] = halves[0][r][c] + halves[1][r][c];
                    if constexpr (TEAMS > 1)
                        *(float4 *)(parts + (team * ROWS + row + r / 4 * 16 + r % 4) * COLUMNS + column) = make_float4(both[0], both[1], both[2], both[3]);
                    else
#pragma unroll
                        for (int c = 0; c < 4; c++)
                            sum[r][c] = sum[r][c] + both[c];
                }
            if (BUFFERS == 1)
                __syncthreads();
            if (TEAMS > 1 && half)
#pragma unroll
                for (int other = 0; other < TEAMS; other++)
                    if (first + other < depth)
#pragma unroll
                        for (int r = 0; r < OWN / 4; r++) {
                            const float4 four = ((const float4 *)parts)[(other * OWN / 4 + r) * TEAM * TEAMS + threadIdx.x];
                            sum[r][0] = sum[r][0] + four.x, sum[r][1] = sum[r][1] + four.y, sum[r][2] = sum[r][2] + four.z, sum[r][3] = sum[r][3] + four.w;
                        }
            store(!half);
            __syncthreads();
        }
    }
#pragma unroll
    for (int r = 0; r < OWN / 4; r++)
#pragma unroll
        for (int c = 0; c < 4; c++) {
            const int place = (r * TEAM * TEAMS + threadIdx.x) * 4 + c;
            const count_t at = first_row + (TEAMS > 1 ? place / COLUMNS : row + r / 4 * 16 + r % 4);
            const count_t to = panel * SIDE + (TEAMS > 1 ? place % COLUMNS : column + c);
            if (at < count && to < m.n)
                finish(m, at, to, sum[r][c]);
        }
}

/* n as of products. Grid (tiles of columns of all parts; tiles of rows; groups). */
#define MANY_OF(name, type, rows, panels, teams, blocks)                                                                                       \
    KERNEL_OF(name##_##type, rows *panels *teams / 2, blocks)                                                                                  \
    {                                                                                                                                          \
        const Part *part = part_of(a, blockIdx.x);                                                                                             \
        many<type, rows, panels, teams>(matrix_of(a, part), (blockIdx.x - part->first) * panels, (count_t)blockIdx.y * rows, a.count); \
    }
#define MANY(type) MANY_OF(many, type, 64, 4, 1, 3) MANY_OF(some, type, 32, 2, 4, 3)
MANY(BF16)
MANY(F16)
MANY(F32)
