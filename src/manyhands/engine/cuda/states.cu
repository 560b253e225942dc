/* Convolutions and linear attention: operations whose sessions keep a state, which each position changes. What is kept, and where it lies in a
 * block of states and in the state behind the last position ("now"), is engine/native/states.c's. */

/* -- convolutions. n: width, taps, activation, rounds, where the operation begins in a block of states, and in now (bytes). tensors: weights
 * [taps, width], bias. Grid (blocks of columns, rows). ------------------------------------------------------------------------------------ */

INLINE float kept_number(const char *kept, count_t rounds, count_t at)
{
    return rounds ? real_of((unsigned)((const half_t *)kept)[at] << 16) : ((const float *)kept)[at];
}

INLINE void keep_number(char *kept, count_t rounds, count_t at, float x)
{
    if (rounds)
        ((half_t *)kept)[at] = (half_t)(bits_of(x) >> 16);
    else
        ((float *)kept)[at] = x;
}

/* What a convolution reads of a column at the position `at` behind the session's first row of the step; before it what was kept. */
INLINE float source_of(const Args &a, const Row &session, count_t first, count_t column, count_t at)
{
    if (at >= 0)
        return rounded_if(a.n[3], a.x[(first + at) * a.x_stride + column]);
    const char *from = session.origin ? session.origin + a.n[4] : session.now + a.n[5];
    return kept_number(from, a.n[3], (session.behind + at + a.n[1] - 1) * a.n[0] + column);
}

/* A column of the row `at` behind the session's first one: its result, and what its block keeps. */
INLINE void convolve_row(const Args &a, const Row &session, count_t first, count_t column, count_t at)
{
    const count_t width = a.n[0], taps = a.n[1];
    const float *weights = (const float *)a.tensors[0], *bias = (const float *)a.tensors[1];
    const Row row = a.rows[first + at];
    float sum = 0;
    for (count_t j = 0; j < taps; j++)
        sum = fma_(weights[j * width + column], source_of(a, session, first, column, at - taps + 1 + j), sum);
    sum = bias ? sum + bias[column] : sum;
    a.out[(first + at) * a.out_stride + column] = activate(a.n[2], 1, sum);
    if (!row.kept)
        return;
    const count_t line = row.position % STATE_BLOCK; /* a block's first row is taps - 1 positions before it */
    for (count_t before = line ? 0 : taps - 1; before >= 0; before--)
        keep_number(row.kept + a.n[4], a.n[3], (line + taps - 1 - before) * width + column, source_of(a, session, first, column, at - before));
}

/* The first taps - 1 rows of a session read what was kept: one thread computes them, and then keeps what is behind the last row. Others
 * read rows of the step alone. */
KERNEL(convolve)
{
    await_rows();
    const count_t column = column_of(), number = blockIdx.y, reach = a.n[1] - 1, before = a.rows[number].before;
    if (column >= a.n[0] || (before && before < reach))
        return;
    const count_t first = number - before;
    const Row session = a.rows[first];
    if (before >= reach)
        convolve_row(a, session, first, column, before);
    for (count_t at = 0; !before && at < reach && at <= session.left; at++)
        convolve_row(a, session, first, column, at);
    for (count_t line = 0; !before && line < reach; line++)
        keep_number(session.now + a.n[5], a.n[3], line * a.n[0] + column, source_of(a, session, first, column, session.left + 1 - reach + line));
}

/* -- decays -------------------------------------------------------------------------------------------------------------------------------- */

/* n: width. tensors: rates (double), or null: softplus alone; bias. */
KERNEL(decay)
{
    await_rows();
    const count_t at = column_of(), row = blockIdx.y;
    if (at >= a.n[0])
        return;
    const double *rates = (const double *)a.tensors[0];
    double v = (double)a.x[row * a.x_stride + at] + (double)((const float *)a.tensors[1])[at];
    double soft = v > 20 ? v : logarithm_of(1 + exponential_of(v));
    float found = (float)(rates ? exponential_of(-rates[at] * soft) : soft);
    a.out[row * a.out_stride + at] = size_of(found) < real_of(0x00800000) ? 0 : found; /* flushed, whatever a conversion of doubles does */
}

/* In fp32, as in engine/native/kernels.c. n: width. reals: a bound, or 0. tensors: rates (fp32), bias. */
KERNEL(channel_decay)
{
    await_rows();
    const count_t at = column_of(), row = blockIdx.y;
    if (at >= a.n[0])
        return;
    const float x = a.x[row * a.x_stride + at] + ((const float *)a.tensors[1])[at];
    const float rate = ((const float *)a.tensors[0])[at], bound = (float)a.reals[0];
    if (bound < 0) {
        a.out[row * a.out_stride + at] = exponential(bound * sigmoid(rate * x));
        return;
    }
    const float small = exponential(minus(size_of(x))), z = small / (2 + small), square = z * z;
    float p = fma_(0.28174675f, square, 0.27961433f);
    p = fma_(p, square, 0.4002485f);
    p = fma_(p, square, 0.66666317f);
    p = fma_(p, square, 2);
    a.out[row * a.out_stride + at] = exponential(minus(rate * fma_(z, p, more(x, 0))));
}

/* -- linear attention. x: queries, y: keys; parts: values, decays, strengths. tensors: skips, or null. n: heads, key heads, width, value
 * width, form (engine/native/kernels.h), where the operation begins in a block of states, and in now (bytes). Grid (heads times tiles of columns, sessions or
 * fewer: a block has every gridDim.y-th row, and computes the sessions that begin there). ---------------------------------------------------- */

enum { TILE_COLUMNS = 32, DELTA_SUMS = 4, DELTA_THREADS = TILE_COLUMNS * DELTA_SUMS, STAGED = 8, DELTA_SUM = 1 }; /* STAGED: positions in shared memory; DELTA_SUM: a form */

/* What changes a head's state at a position; queries where it is a row of the step. */
struct Change {
    const float *query, *key, *value, *decay, *strength;
};

/* A head's tile of columns. channels: decays of a head. */
struct DeltaTile {
    int heads, key_heads, width, value_width, head, key_head, tile, channels;

    /* Floats that a position leaves in a block, and where they begin behind the states of all heads. */
    __device__ __forceinline__ count_t inputs() const { return (count_t)key_heads * width + (count_t)heads * value_width + (count_t)heads * (channels + 1); }
    __device__ __forceinline__ count_t size() const { return (count_t)width * TILE_COLUMNS; }
    __device__ __forceinline__ count_t tiles() const { return ceil_div(value_width, TILE_COLUMNS); }
    __device__ __forceinline__ count_t begin() const { return (head * tiles() + tile) * size(); }
    __device__ __forceinline__ float *inputs_in(float *block, count_t line) const { return block + heads * tiles() * size() + line * inputs(); }
    __device__ __forceinline__ Change change_in(const float *inputs) const
    {
        const float *values = inputs + key_heads * width, *decays = values + heads * value_width, *strengths = decays + heads * channels;
        return {0, inputs + key_head * width, values + head * value_width + tile * TILE_COLUMNS, decays + head * channels, strengths + head};
    }
    __device__ __forceinline__ Change change_at(const Args &a, count_t row) const
    {
        const Part *p = a.parts;
        return {a.x + row * a.x_stride + key_head * width, a.y + row * a.y_stride + key_head * width,
                p[0].out + row * p[0].out_stride + head * value_width + tile * TILE_COLUMNS, p[1].out + row * p[1].out_stride + head * channels,
                p[2].out + row * p[2].out_stride + head};
    }
};

INLINE DeltaTile delta_tile(const Args &a, bool by_channel)
{
    const int heads = (int)a.n[0], key_heads = (int)a.n[1], value_width = (int)a.n[3], tiles = (value_width + TILE_COLUMNS - 1) / TILE_COLUMNS;
    const int head = blockIdx.x / tiles;
    return {heads, key_heads, (int)a.n[2], value_width, head, head / (heads / key_heads), (int)blockIdx.x % tiles, by_channel ? (int)a.n[2] : 1};
}

/* (sum 0 + sum 1) + (sum 2 + sum 3) of four threads. */
INLINE float sum_of_four(float sum)
{
    const int own = threadIdx.x % DELTA_SUMS;
    sum = sum + __shfl_sync(0xFFFFFFFF, sum, own ^ 1, DELTA_SUMS);
    return sum + __shfl_sync(0xFFFFFFFF, sum, own ^ 2, DELTA_SUMS);
}

/* The session whose first row is `first`, keys of at most COUNT * DELTA_SUMS numbers. A thread has the numbers k = own, own + 4, ... of a
 * column of the state. */
template <int COUNT, bool BY_CHANNEL> INLINE void delta(const Args &a, const DeltaTile &d, count_t first)
{
    enum { LOADS = COUNT * DELTA_SUMS / DELTA_THREADS, VALUES = STAGED * TILE_COLUMNS / DELTA_THREADS };
    __shared__ __align__(16) float keys[STAGED][DELTA_SUMS][COUNT + 4], queries[STAGED][DELTA_SUMS][COUNT + 4];
    __shared__ __align__(16) float channels[BY_CHANNEL ? STAGED : 1][DELTA_SUMS][COUNT + 4]; /* their decays */
    __shared__ float values[STAGED][TILE_COLUMNS], decays[STAGED], strengths[STAGED];
    __shared__ char *blocks[STAGED];
    const Row session = a.rows[first];
    const int t = threadIdx.x, own = t % DELTA_SUMS, c = t / DELTA_SUMS, mine = (d.width - own + DELTA_SUMS - 1) / DELTA_SUMS;
    const int column = d.tile * TILE_COLUMNS + c, behind = (int)session.behind, end = (int)session.left + 1;
    const bool is_sum = a.n[4] == DELTA_SUM, is_there = column < d.value_width;
    const float *skips = (const float *)a.tensors[0];
    float *const origin = (float *)(session.origin ? session.origin + a.n[5] : 0), *const now = (float *)(session.now + a.n[6]) + d.begin();
    const int place = own * TILE_COLUMNS + c; /* of the thread's first number in a tile */
    float s[COUNT], key[STAGED][LOADS], query[STAGED][LOADS], by_key[STAGED][LOADS], value[VALUES], decay, strength;
    char *block;
    auto change = [&](int at) { return at < 0 ? d.change_in(d.inputs_in(origin, behind + at)) : d.change_at(a, first + at); };
    auto load = [&](int from) { /* of positions from this one on, counted from the session's first row */
#pragma unroll
        for (int i = 0; i < STAGED; i++)
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                const int at = from + i, k = t + j * DELTA_THREADS;
                const bool is_one = at < end && k < d.width;
                key[i][j] = is_one ? change(at).key[k] : 0;
                query[i][j] = is_one && at >= 0 ? change(at).query[k] : 0;
                if (BY_CHANNEL)
                    by_key[i][j] = is_one ? change(at).decay[k] : 0;
            }
#pragma unroll
        for (int j = 0; j < VALUES; j++) {
            const int at = from + t / TILE_COLUMNS + j * (STAGED / VALUES), there = t % TILE_COLUMNS;
            value[j] = at < end && d.tile * TILE_COLUMNS + there < d.value_width ? change(at).value[there] : 0;
        }
        const int at = from + t;
        decay = strength = 0, block = 0;
        if (t < STAGED && at < end)
            decay = *change(at).decay, strength = *change(at).strength, block = at < 0 ? 0 : a.rows[first + at].kept;
    };
    auto store = [&]() {
#pragma unroll
        for (int i = 0; i < STAGED; i++)
#pragma unroll
            for (int j = 0; j < LOADS; j++) {
                const int k = t + j * DELTA_THREADS;
                keys[i][k % DELTA_SUMS][k / DELTA_SUMS] = key[i][j], queries[i][k % DELTA_SUMS][k / DELTA_SUMS] = query[i][j];
                if (BY_CHANNEL)
                    channels[i][k % DELTA_SUMS][k / DELTA_SUMS] = by_key[i][j];
            }
#pragma unroll
        for (int j = 0; j < VALUES; j++)
            values[t / TILE_COLUMNS + j * (STAGED / VALUES)][t % TILE_COLUMNS] = value[j];
        if (t < STAGED)
            decays[t] = decay, strengths[t] = strength, blocks[t] = block;
    };
    auto keep = [&](int i, float *to, count_t position) { /* what a block keeps of position i of those in shared memory */
        if (position % STATE_BLOCK == 0)
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                if (j < mine)
                    to[d.begin() + place + j * DELTA_THREADS] = s[j];
        const Change kept = d.change_in(d.inputs_in(to, position % STATE_BLOCK));
        if (own == 0 && is_there)
            ((float *)kept.value)[c] = values[i][c];
        if (d.tile == 0 && t == 0)
            *(float *)kept.decay = decays[i], *(float *)kept.strength = strengths[i];
        if (BY_CHANNEL && d.tile == 0)
            for (int k = t; k < d.width; k += DELTA_THREADS)
                ((float *)kept.decay)[k] = channels[i][k % DELTA_SUMS][k / DELTA_SUMS];
        if (d.tile == 0 && d.head % (d.heads / d.key_heads) == 0)
            for (int k = t; k < d.width; k += DELTA_THREADS)
                ((float *)kept.key)[k] = keys[i][k % DELTA_SUMS][k / DELTA_SUMS];
    };
    const float *from = origin ? origin + d.begin() : now;
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        s[j] = j < mine ? from[place + j * DELTA_THREADS] : 0;
    load(-behind);
    for (int begun = -behind; begun < end; begun += STAGED) {
        __syncthreads();
        store();
        __syncthreads();
        load(begun + STAGED);
        for (int i = 0; i < STAGED && begun + i < end; i++) {
            const int at = begun + i;
            const float by = decays[i], v = values[i][c];
            if (blocks[i])
                keep(i, (float *)(blocks[i] + a.n[5]), session.position + at);
            float sum = 0, read = 0;
#pragma unroll
            for (int j = 0; j < COUNT; j++)
                s[j] = s[j] * (BY_CHANNEL ? channels[i][own][j] : by);
#pragma unroll
            for (int j = 0; j < COUNT; j += 4) {
                const float4 four = *(const float4 *)(keys[i][own] + j);
                const float k[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (j + e < mine && !is_sum)
                        sum = fma_(k[e], s[j + e], sum);
            }
            const float change = (is_sum ? v : v - sum_of_four(sum)) * strengths[i];
#pragma unroll
            for (int j = 0; j < COUNT; j += 4) {
                const float4 four = *(const float4 *)(keys[i][own] + j), asked = *(const float4 *)(queries[i][own] + j);
                const float k[4] = {four.x, four.y, four.z, four.w}, q[4] = {asked.x, asked.y, asked.z, asked.w};
#pragma unroll
                for (int e = 0; e < 4; e++)
                    if (j + e < mine)
                        s[j + e] = fma_(k[e], change, s[j + e]), read = fma_(q[e], s[j + e], read);
            }
            if (at < 0)
                continue;
            float out = sum_of_four(read);
            if (skips)
                out = out + (skips[d.head] != 1 ? v * skips[d.head] : v);
            if (own == 0 && is_there)
                a.out[(first + at) * a.out_stride + d.head * d.value_width + column] = out;
        }
    }
#pragma unroll
    for (int j = 0; j < COUNT; j++)
        if (j < mine)
            now[place + j * DELTA_THREADS] = s[j];
}

template <int COUNT, bool BY_CHANNEL = false> INLINE void deltas(const Args &a)
{
    await_rows();
    const DeltaTile d = delta_tile(a, BY_CHANNEL);
    for (count_t row = blockIdx.y; row < a.count; row += gridDim.y)
        if (!a.rows[row].before)
            delta<COUNT, BY_CHANNEL>(a, d, row);
}

KERNEL_OF(delta_128, DELTA_THREADS, 1) { deltas<128 / DELTA_SUMS>(a); }
KERNEL_OF(delta_256, DELTA_THREADS, 1) { deltas<256 / DELTA_SUMS>(a); }
KERNEL_OF(delta_by_channel_128, DELTA_THREADS, 1) { deltas<128 / DELTA_SUMS, true>(a); }
KERNEL_OF(delta_by_channel_256, DELTA_THREADS, 1) { deltas<256 / DELTA_SUMS, true>(a); }
