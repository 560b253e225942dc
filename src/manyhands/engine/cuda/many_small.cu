/* Products with small weights of more rows: 64 rows with 64 columns, two steps at once in shared memory. The sums of integers are those of the
 * tensor cores, which are exact; what the groups add goes on in fp32, one after the other. */

enum { TILE = 64 };

/* Rows lie in shared memory as threads of a warp take 16 of them into products_of_codes: four words a thread. */
template <int TYPE> INLINE void many_small(const Matrix &m, count_t panel, count_t first_row, count_t count)
{
    enum { HIGH = 2, WIDE = 4 }; /* a warp has 2 x 16 rows of 4 x 8 columns */
    __shared__ __align__(16) uint4 rows[2][2][TILE / 16][32];
    __shared__ __align__(16) int columns[2][2][TILE][DEPTH / 4];
    __shared__ __align__(16) float2 row_factors[2][2][TILE], column_factors[2][2][TILE]; /* scale; scale times sums (W2K: both sums), or minimum */
    __shared__ int2 halves[2][2][has_halves<TYPE>() ? TILE : 1], minima[2][2][TYPE == W2K ? TILE : 1];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, depth = (int)ceil_div(m.k, DEPTH), last = (int)ceil_div(m.n, SIDE) - 1;
    const int high = warp / 2 * HIGH, column = warp % 2 * 8 * WIDE, present = (int)(count - first_row);
    const int own = (int)panel + t % TILE / SIDE, sub = t / TILE; /* this thread loads a column of a step */
    const unsigned char *packed = (const unsigned char *)m.packed + (count_t)(own < last ? own : last) * panel_bytes<TYPE>(depth);
    const Group *given = (const Group *)m.x + first_row;
    const int group = warp % 2, rest = warp / 2, factor_row = rest * 32 + lane; /* and parts of four rows' groups, and a row's factors */
    int places[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
        const int row = (rest + j / 2 * 2) * 16 + j % 2 * 8 + lane / 4;
        places[j] = (row < present ? row : present - 1) * (int)(sizeof(Group) / 8) + 1 + lane % 4;
    }
    const int factor_place = (factor_row < present ? factor_row : present - 1) * (int)(sizeof(Group) / 8);
    Codes codes;
    uint2 loaded[4], factor;
    auto load = [&](int first) {
        codes = codes_of<TYPE>(packed, depth, first + sub < depth ? first + sub : depth - 1, t % SIDE);
        const uint2 *from = (const uint2 *)(given + (first + group < depth ? first + group : depth - 1) * m.x_stride);
#pragma unroll
        for (int j = 0; j < 4; j++)
            loaded[j] = from[places[j]];
        factor = from[factor_place];
    };
    auto store = [&](int to) {
        unsigned words[DEPTH / 4];
#pragma unroll
        for (int j = 0; j < DEPTH / 4; j++) /* less zero, as bytes with a sign */
            words[j] = TYPE == W8 || has_table<TYPE>() ? codes.words[j] : (codes.words[j] + (128 - codes.zero) * 0x01010101u) ^ 0x80808080;
        *(uint4 *)columns[to][sub][t % TILE] = {words[0], words[1], words[2], words[3]};
        *(uint4 *)(columns[to][sub][t % TILE] + 4) = {words[4], words[5], words[6], words[7]};
        column_factors[to][sub][t % TILE] = make_float2(codes.scale, codes.least);
        if (has_halves<TYPE>())
            halves[to][sub][t % TILE] = {codes.halves[0], codes.halves[1]};
        if (TYPE == W2K)
            minima[to][sub][t % TILE] = {codes.minima[0], codes.minima[1]};
#pragma unroll
        for (int j = 0; j < 2; j++)
            rows[to][group][rest + j * 2][lane] = {loaded[2 * j].x, loaded[2 * j + 1].x, loaded[2 * j].y, loaded[2 * j + 1].y};
        const float scale = real_of(factor.x), sums = (float)((short)(factor.y & 0xFFFF) + (short)(factor.y >> 16));
        row_factors[to][group][factor_row] = make_float2(scale, TYPE == W2K ? real_of(factor.y) : scale * sums);
    };
    float sum[HIGH][WIDE][4] = {};
    await_rows();
    load(0);
    store(0);
    __syncthreads();
    for (int first = 0; first < depth; first += 2) {
        const int now = first / 2 % 2;
        load(first + 2);
#pragma unroll
        for (int g = 0; g < 2; g++) {
            if (first + g >= depth)
                break;
            int x[HIGH][4];
            float2 by[HIGH][2];
#pragma unroll
            for (int h = 0; h < HIGH; h++) {
                const uint4 four = rows[now][g][high + h][lane];
                x[h][0] = (int)four.x, x[h][1] = (int)four.y, x[h][2] = (int)four.z, x[h][3] = (int)four.w;
#pragma unroll
                for (int i = 0; i < 2; i++)
                    by[h][i] = row_factors[now][g][(high + h) * 16 + i * 8 + lane / 4];
            }
#pragma unroll
            for (int w = 0; w < WIDE; w++) {
                const uint2 two = *(const uint2 *)(columns[now][g][column + w * 8 + lane / 4] + lane % 4 * 2);
                const int both[2] = {(int)two.x, (int)two.y}, at = column + w * 8 + lane % 4 * 2;
                const float4 factors = *(const float4 *)(column_factors[now][g] + at);
#pragma unroll
                for (int h = 0; h < HIGH; h++) {
                    int found[4], second[4];
                    if (has_halves<TYPE>() || TYPE == W4H) { /* a thread's numbers are of one half */
                        const int half = lane % 4 / 2, zeros[2] = {};
                        products_of_codes(found, x[h], half ? zeros : both);
                        products_of_codes(second, x[h], half ? both : zeros);
#pragma unroll
                        for (int c = 0; c < 4 && TYPE != W4H; c++) {
                            const int2 scales = halves[now][g][has_halves<TYPE>() ? at + c % 2 : 0];
                            found[c] = scales.x * found[c] + scales.y * second[c];
                        }
                    } else
                        products_of_codes(found, x[h], both);
#pragma unroll
                    for (int c = 0; c < 4; c++) {
                        sum[h][w][c] = fma_((float)found[c], (c % 2 ? factors.z : factors.x) * by[h][c / 2].x, sum[h][w][c]);
                        if (TYPE == W4H)
                            sum[h][w][c] = fma_((float)second[c], (c % 2 ? factors.w : factors.y) * by[h][c / 2].x, sum[h][w][c]);
                        else if (TYPE == W2K) {
                            const int2 of_halves = minima[now][g][TYPE == W2K ? at + c % 2 : 0];
                            const unsigned sums = bits_of(by[h][c / 2].y);
                            const float least = minima_product(of_halves.x, of_halves.y, (short)(sums & 0xFFFF), (short)(sums >> 16));
                            sum[h][w][c] = fma_(least, (c % 2 ? factors.w : factors.y) * by[h][c / 2].x, sum[h][w][c]);
                        } else if (has_minima<TYPE>())
                            sum[h][w][c] = fma_(c % 2 ? factors.w : factors.y, by[h][c / 2].y, sum[h][w][c]);
                    }
                }
            }
        }
        store(now ^ 1);
        __syncthreads();
    }
#pragma unroll
    for (int h = 0; h < HIGH; h++)
#pragma unroll
        for (int w = 0; w < WIDE; w++)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const count_t at = first_row + (high + h) * 16 + c / 2 * 8 + lane / 4, to = panel * SIDE + column + w * 8 + lane % 4 * 2 + c % 2;
                if (at < count && to < m.n)
                    finish(m, at, to, sum[h][w][c]);
            }
}

/* n as of products; x: groups. Grid (tiles of columns of all parts; tiles of rows). */
#define MANY_SMALL(type)                                                                                                                 \
    KERNEL_OF(many_##type, 2 * TILE, 4)                                                                                                  \
    {                                                                                                                                    \
        const Part *part = part_of(a, blockIdx.x);                                                                                       \
        const Matrix m = {part->packed, part->bias, a.x, part->out, a.x_stride, part->out_stride, part->n, a.n[0], part->activation, 0}; \
        many_small<type>(m, (blockIdx.x - part->first) * (TILE / SIDE), (count_t)blockIdx.y * TILE, a.count);                            \
    }
MANY_SMALL(W8)
MANY_SMALL(W4)
MANY_SMALL(W4M)
MANY_SMALL(W5)
MANY_SMALL(W5M)
MANY_SMALL(W4K)
MANY_SMALL(W5K)
MANY_SMALL(W6K)
MANY_SMALL(W4F)
MANY_SMALL(W4Z)
MANY_SMALL(W4N)
MANY_SMALL(W4X)
MANY_SMALL(W3K)
MANY_SMALL(W2K)
MANY_SMALL(W4H)
MANY_SMALL(W4S)
MANY_SMALL(W4T)
MANY_SMALL(W3S)
MANY_SMALL(W2S)
