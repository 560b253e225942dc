/* Attention of many rows: QUERIES queries that see the same keys share a block of threads, which reads keys and values once for all of them.
 * Queries of a key head are counted row by row, in each row the heads of its group. Two blocks of keys are scored at once, 8 x 4 scores a
 * thread, as in many.cu. A tile whose rows are of several sessions is left to `attend`. (On an H100, 64 queries with one block of keys leave
 * multiprocessors idle: slower by a tenth and more, but for 64 columns of many heads.)
 *
 * A query sees its own blocks alone: one that lies before its window or beyond its position leaves its maximum, sum and result as they are. */

enum { SHARING = 128, TILE_BLOCKS = 2, TILE_KEYS = TILE_BLOCKS * BLOCK }; /* threads of a tile; what they score at once */

/* What threads of a tile share. A line of `rows` and `weights` has a number of each query. Before they are weights, they are scores. */
struct Shared {
    float columns[2][2][SIDE / 2][TILE_KEYS + SIDE], rows[2][SIDE][QUERIES + 4], weights[TILE_KEYS][QUERIES + 4];
    float tops[TILE_BLOCKS][QUERIES], factors[TILE_BLOCKS][QUERIES], sums[TILE_BLOCKS][QUERIES], maxima[SHARING], totals[SHARING];
};

/* Half a step: lines of rows times columns, MINE x 4 numbers of a thread. Where number 2 i + odd lies: as in many.cu, or in its own line. */
template <int MINE, bool IN_ORDER, bool BEGINS>
INLINE void multiply_half(float (&halves)[2][8][4], const float *line, const float (*columns)[SIDE / 2][TILE_KEYS + SIDE], int column)
{
#pragma unroll
    for (int i = 0; i < SIDE / 2; i++)
#pragma unroll
        for (int odd = 0; odd < 2; odd++) {
            const float *x = line + (IN_ORDER ? 2 * i + odd : i / 2 * 2 + i % 2 * 8 + odd) * (QUERIES + 4);
            const float4 w = *(const float4 *)(columns[odd][i] + column), low = *(const float4 *)x, high = MINE == 8 ? *(const float4 *)(x + 16) : low;
            const float v[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w}, four[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int r = 0; r < MINE; r++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    halves[odd][r][c] = fma_(v[r], four[c], BEGINS && i == 0 ? 0 : halves[odd][r][c]);
        }
}

/* Scores of blocks from `block` on -> weights, and how results go on: by a factor, negative where a query does not see a block. A thread has
 * every second key of a block for one query, the thread beside it the others: numbers i are those of lanes 2 (i / 4), i % 4 of each. */
template <int TYPE> INLINE void weigh(const Args &a, Shared &s, int block, int position, int from)
{
    enum { PARTS = BLOCK / SIDE };
    const int t = threadIdx.x, lane = t % 32, warp = t / 32;
    const int query = lane / 8 * 8 + lane / 2 % 4 + warp % 2 * 4, odd = lane % 2, mine = warp / 2, own_block = block + mine;
    const int earliest = from - own_block * BLOCK - odd, latest = position - own_block * BLOCK - odd;
    const float cap = (float)a.reals[1], scale = cap > 0 ? 1 : (float)a.reals[0];
    float *own = s.weights[mine * BLOCK + odd] + query;
    auto at = [&](int i) { return own + (i % PARTS * SIDE + i / PARTS * 2) * (QUERIES + 4); };
    auto is_seen = [&](int block) { return from / BLOCK <= block && block <= position / BLOCK; };
    if (cap > 0)
#pragma unroll 1
        for (int i = 0; i < BLOCK / 2; i++)
            *at(i) = hyperbolic(*at(i) * (float)a.reals[0] / cap) * cap;
    auto score = [&](int i) {
        const int key = i % PARTS * SIDE + i / PARTS * 2;
        return key >= earliest && key <= latest ? *at(i) * scale : -infinity();
    };
    float top = -infinity();
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i++)
        top = fmaxf(score(i), top); /* never a NaN, as `more` of the two */
    top = more(__shfl_sync(0xFFFFFFFF, top, lane ^ 1, 32), top);
    if (odd == 0)
        s.tops[mine][query] = top;
    __syncthreads();
    float reached = s.maxima[t], before = reached, here = reached; /* the maximum as it goes from block to block */
#pragma unroll
    for (int b = 0; b < TILE_BLOCKS; b++) {
        const float after = more(s.tops[b][query], reached);
        before = b == mine ? reached : before, here = b == mine ? after : here;
        reached = is_seen(block + b) ? after : reached;
    }
    s.maxima[t] = reached;
    float lanes[SIDE / 2];
#pragma unroll
    for (int i = 0; i < BLOCK / 2; i += 2) {
        float weight[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            const float less = score(i + j) - here; /* not above zero */
            weight[j] = exponential_within(less < -104 ? -104 : less);
            lanes[i / PARTS] = ((i + j) % PARTS ? lanes[i / PARTS] : 0) + weight[j];
        }
        if (TYPE == BF16)
            round_both(weight[0], weight[1]);
        *at(i) = weight[0], *at(i + 1) = weight[1];
    }
#pragma unroll
    for (int apart = SIDE / 4; apart; apart /= 2)
#pragma unroll
        for (int i = 0; i < apart; i++)
            lanes[i] = lanes[i] + lanes[i + apart];
    const float sum = lanes[0] + __shfl_sync(0xFFFFFFFF, lanes[0], lane ^ 1, 32), less = before - here;
    if (odd == 0)
        s.factors[mine][query] = !is_seen(own_block) ? -1 : less == 0 ? 1 : exponential(less), s.sums[mine][query] = sum;
    __syncthreads();
#pragma unroll
    for (int b = 0; b < TILE_BLOCKS; b++)
        s.totals[t] = s.factors[b][query] < 0 ? s.totals[t] : s.totals[t] * s.factors[b][query] + s.sums[b][query];
}

/* WIDE columns of values. Grid (key heads, tiles, parts of values' columns). */
template <int TYPE, int WIDE> INLINE void attend_many(const Args &a)
{
    enum { WARPS = SHARING / 32, VALUE_PIECES = 2 * WIDE / SHARING, MINE = QUERIES * WIDE / SHARING / 4, STEP = DEPTH * SIDE * (TYPE == F32 ? 4 : 2) };
    __shared__ __align__(16) Shared s;
    await_rows();
    const int tile = gridDim.y - 1 - blockIdx.y; /* what takes longest comes first */
    const TileRows own_rows = rows_of_tile(a, tile);
    if (!is_of_one_session(a, own_rows))
        return;
    const Row row = a.rows[own_rows.first];
    const int t = threadIdx.x, lane = t % 32, warp = t / 32, group = (int)(a.n[0] / a.n[KEY_HEADS]), key_head = blockIdx.x;
    const int width = (int)a.n[WIDTH], value_width = (int)a.n[VALUE_WIDTH], depth = (width + DEPTH - 1) / DEPTH, window = (int)a.n[WINDOW];
    const int first = tile * QUERIES, all = (int)a.count * group, present = all - first < QUERIES ? all - first : QUERIES, start = (int)row.position - own_rows.first;
    const int first_panel = blockIdx.z * WIDE / SIDE, last_panel = (value_width + SIDE - 1) / SIDE - 1;
    const int within = lane / 16 * 8 + lane % 2 * 4, across = lane / 2 % 8 * 4; /* of a warp's 32 x 32, the thread's 8 x 4 */
    const int value_row = warp / (WIDE / 32) * MINE * 4 + within, value_column = warp % (WIDE / 32) * 32 + across; /* MINE x 4 */
    auto position_of = [&](int query) { return start + (first + query) / group; };
    auto head_of = [&](int query) { return key_head * group + (first + query) % group; };
    const int last = position_of(present - 1) / BLOCK, begin = first_seen(window, position_of(0)) / BLOCK;

    const int loading = t / 4 < present ? t / 4 : present - 1; /* the query that this thread loads four numbers of */
    const float *asked = a.x + (first + loading) / group * a.x_stride + head_of(loading) * width;
    const char *keys[TILE_BLOCKS], *next[TILE_BLOCKS];
    auto find = [&](int block) {
#pragma unroll
        for (int b = 0; b < TILE_BLOCKS; b++)
            next[b] = block_of(a, row, key_head, block + b < last ? block + b : last);
    };
    Stored<TYPE> stored[TILE_BLOCKS];
    float4 loaded;
    int left;
    auto load_keys = [&](int step, int half) {
#pragma unroll
        for (int b = 0; b < TILE_BLOCKS; b++)
            stored[b] = Stored<TYPE>::read(keys[b] + (warp * depth + step) * STEP, half * SIDE / 2 + lane / 4, lane % 4);
    };
    auto load_values = [&](int b, int step, int half) {
#pragma unroll
        for (int j = 0; j < VALUE_PIECES; j++) {
            const int panel = first_panel + warp + j * WARPS;
            stored[j] = Stored<TYPE>::read(keys[b] + (int)a.n[KEYS] + ((panel < last_panel ? panel : last_panel) * 2 + step) * STEP, half * SIDE / 2 + lane / 4, lane % 4);
        }
    };
    auto load_rows = [&](int step, int half) {
        const int at = step * DEPTH + half * SIDE + t % 4 * 4;
        left = width - at;
        loaded = *(const float4 *)(asked + (left > 0 ? at : 0));
    };
    auto store_columns = [&](int to, int pieces) {
#pragma unroll
        for (int j = 0; j < pieces; j++) {
            const Pairs w = stored[j].widened();
            const int place = (warp + j * WARPS) * SIDE + lane % 4 * 4;
            *(float4 *)(s.columns[to][0][lane / 4] + place) = make_float4(w.even[0], w.even[1], w.even[2], w.even[3]);
            *(float4 *)(s.columns[to][1][lane / 4] + place) = make_float4(w.odd[0], w.odd[1], w.odd[2], w.odd[3]);
        }
    };
    auto store_rows = [&](int to) {
        const float four[4] = {left > 0 ? loaded.x : 0, left > 1 ? loaded.y : 0, left > 2 ? loaded.z : 0, left > 3 ? loaded.w : 0};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float x = four[2 * i], y = four[2 * i + 1];
            if (TYPE == BF16)
                round_both(x, y);
            s.rows[to][t % 4 * 2 + i * 8][t / 4] = x, s.rows[to][t % 4 * 2 + i * 8 + 1][t / 4] = y;
        }
    };
    const int weighed_query = lane / 8 * 8 + lane / 2 % 4 + warp % 2 * 4, weighed_position = position_of(weighed_query);
    const float *sinks = (const float *)a.tensors[0];
    s.maxima[t] = sinks ? sinks[head_of(weighed_query)] : -infinity();
    s.totals[t] = sinks ? 1 : 0;
    float halves[2][8][4], result[MINE][4] = {}; /* halves: even and odd numbers of K */
    find(begin);
#pragma unroll
    for (int b = 0; b < TILE_BLOCKS; b++)
        keys[b] = next[b];
    load_keys(0, 0);
    load_rows(0, 0);
    store_columns(0, TILE_BLOCKS);
    store_rows(0);
    __syncthreads();
    for (int block = begin; block <= last; block += TILE_BLOCKS) {
        find(block + TILE_BLOCKS);
        float sum[8][4] = {};
        for (int step = 0; step < depth; step++) {
            load_keys(step, 1);
            load_rows(step, 1);
            multiply_half<8, false, true>(halves, s.rows[0][0] + within, s.columns[0], warp * 32 + across);
            store_columns(1, TILE_BLOCKS);
            store_rows(1);
            __syncthreads();
            const int after = step + 1 < depth ? step + 1 : step;
            load_rows(after, 0);
            load_keys(after, 0);
            multiply_half<8, false, false>(halves, s.rows[1][0] + within, s.columns[1], warp * 32 + across);
#pragma unroll
            for (int r = 0; r < 8; r++)
#pragma unroll
                for (int c = 0; c < 4; c++)
                    sum[r][c] = sum[r][c] + (halves[0][r][c] + halves[1][r][c]);
            store_columns(0, TILE_BLOCKS);
            store_rows(0);
            __syncthreads();
        }
        load_values(0, 0, 0);
#pragma unroll
        for (int c = 0; c < 4; c++)
#pragma unroll
            for (int r = 0; r < 8; r += 4)
                *(float4 *)(s.weights[warp * 32 + across + c] + within + r * 4) = make_float4(sum[r][c], sum[r + 1][c], sum[r + 2][c], sum[r + 3][c]);
        __syncthreads();
        store_columns(0, VALUE_PIECES);
        weigh<TYPE>(a, s, block, weighed_position, first_seen(window, weighed_position));
#pragma unroll
        for (int b = 0; b < TILE_BLOCKS; b++)
#pragma unroll 1
            for (int step = 0; step < 2; step++) {
                const float *line = s.weights[b * BLOCK + step * DEPTH] + value_row;
                load_values(b, step, 1);
                multiply_half<MINE, true, true>(halves, line, s.columns[0], value_column);
                store_columns(1, VALUE_PIECES);
                __syncthreads();
                const bool is_last = b + 1 == TILE_BLOCKS && step;
                if (step == 0)
                    load_values(b, 1, 0);
                else if (b + 1 < TILE_BLOCKS)
                    load_values(b + 1, 0, 0);
                else {
#pragma unroll
                    for (int other = 0; other < TILE_BLOCKS; other++)
                        keys[other] = next[other];
                    load_keys(0, 0);
                }
                multiply_half<MINE, true, false>(halves, line + SIDE * (QUERIES + 4), s.columns[1], value_column);
#pragma unroll
                for (int r = 0; r < MINE; r++) {
                    const float factor = s.factors[b][value_row + r / 4 * 16 + r % 4], by = step ? 1 : factor;
#pragma unroll
                    for (int c = 0; c < 4; c++)
                        result[r][c] = factor < 0 ? result[r][c] : result[r][c] * by + (halves[0][r][c] + halves[1][r][c]);
                }
                if (!is_last)
                    store_columns(0, VALUE_PIECES);
                else {
                    load_rows(0, 0);
                    store_columns(0, TILE_BLOCKS);
                    store_rows(0);
                }
                __syncthreads();
            }
    }
    if (lane % 2 == 0 && warp < 2)
        s.sums[0][weighed_query] = s.totals[t];
    __syncthreads();
#pragma unroll
    for (int r = 0; r < MINE; r++) {
        const int own = value_row + r / 4 * 16 + r % 4;
        if (own < present)
#pragma unroll
            for (int c = 0; c < 4; c++) {
                const int to = blockIdx.z * WIDE + value_column + c;
                if (to < value_width)
                    a.out[(first + own) / group * a.out_stride + head_of(own) * value_width + to] = result[r][c] / s.sums[0][own];
            }
    }
}

#define ATTEND_MANY(type, wide) \
    KERNEL_OF(attend_many_##type##_##wide, SHARING, 2) { attend_many<type, wide>(a); }
ATTEND_MANY(BF16, 64)
ATTEND_MANY(BF16, 128)
ATTEND_MANY(F32, 64)
ATTEND_MANY(F32, 128)
