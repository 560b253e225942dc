/* Attention over caches in blocks of 64 positions (docs/arithmetic.md; the layout of a block: engine/native/kernels.h). */

/* How heads are cached: n of the kernels below. */
enum { KEY_HEADS = 1, WIDTH, VALUE_WIDTH, WINDOW, IS_LATENT, ROUNDS, LAYER, HEAD, KEYS, IN_TILES }; /* n[0]: heads. LAYER: where the layer's heads begin in a
    block of all layers, HEAD: bytes of a head's block, KEYS: of its keys; IN_TILES: whether attend_many computes what it can */
enum { QUERIES = 32 }; /* of a tile of attend_many */

INLINE char *block_of(const Args &a, const Row &row, count_t head, count_t block)
{
    return row.blocks[block] + a.n[LAYER] + head * a.n[HEAD];
}

/* As first_seen in engine/native/kernels.c. */
INLINE int first_seen(int window, int position)
{
    if (window < 0)
        return position - position % -window;
    return window && position >= window ? position - window + 1 : 0;
}

/* Rows that a tile has a part of: the first, and how many. */
struct TileRows {
    int first, count;
};

INLINE TileRows rows_of_tile(const Args &a, int tile)
{
    const int group = (int)(a.n[0] / a.n[KEY_HEADS]), end = (int)a.count - 1, first = tile * QUERIES / group;
    const int last = (tile * QUERIES + QUERIES - 1) / group;
    return {first, (last < end ? last : end) - first + 1};
}

INLINE bool is_of_one_session(const Args &a, TileRows rows) { return a.rows[rows.first].left >= rows.count - 1; }

/* Where column c, row k of a panel lies: bf16 in pairs of rows, fp32 by even and odd rows. */
INLINE count_t place_in_panel(count_t rounds, count_t k, count_t c)
{
    count_t pair = k / 2 * DEPTH;
    return rounds ? pair + c * 2 + k % 2 : pair + k % 2 * SIDE + c;
}

/* A number as caches hold it: rounded, the largest one for an infinity, zero for what is none. */
INLINE void put(char *to, count_t rounds, count_t at, float x)
{
    float largest = real_of(rounds ? 0x7F7F0000 : 0x7F7FFFFF);
    x = rounded_if(rounds, x);
    x = is_nan(x) ? 0 : x > largest ? largest : x < -largest ? -largest : x;
    if (rounds)
        ((half_t *)to)[at] = (half_t)(bits_of(x) >> 16);
    else
        ((float *)to)[at] = x;
}

/* Keys (x) and values (y) of the rows -> their caches. Grid (key heads, rows). */
KERNEL(remember)
{
    await_rows();
    const Row row = a.rows[blockIdx.y];
    count_t head = blockIdx.x, within = row.position % BLOCK, width = a.n[WIDTH], value_width = a.n[VALUE_WIDTH], rounds = a.n[ROUNDS];
    char *keys = block_of(a, row, head, row.position / BLOCK), *values = keys + a.n[KEYS];
    const float *key = a.x + blockIdx.y * a.x_stride + head * width, *value = a.y + blockIdx.y * a.y_stride + head * value_width;
    count_t panel = within / SIDE * ceil_div(width, DEPTH) * DEPTH * SIDE, wide = BLOCK * SIDE;
    for (count_t i = threadIdx.x; i < width; i += THREADS)
        put(keys, rounds, panel + place_in_panel(rounds, i, within % SIDE), key[i]);
    for (count_t i = threadIdx.x; i < value_width && !a.n[IS_LATENT]; i += THREADS)
        put(values, rounds, i / SIDE * wide + place_in_panel(rounds, within, i % SIDE), value[i]);
}

/* Numbers 2 i and 2 i + 1 of K in column c of a step of a panel. */
template <int TYPE> INLINE float2 pair_of(const char *step, int i, int c)
{
    if (TYPE == BF16) {
        unsigned both = ((const unsigned *)step)[i * SIDE + c];
        return make_float2(real_of(both << 16), real_of(both & 0xFFFF0000));
    }
    return make_float2(((const float *)step)[i * DEPTH + c], ((const float *)step)[i * DEPTH + SIDE + c]);
}

/* What 32 positions of a block add to column d: the sum of even and of odd ones. LATENT: a value is the beginning of its key. */
template <int TYPE, bool LATENT> INLINE float weighed(const char *keys, const char *values, int depth, int part, int d, const float *weights)
{
    float2 pairs[SIDE];
    if (LATENT) {
        const char *step = keys + (part * 2 * depth + d / DEPTH) * step_bytes<TYPE>();
#pragma unroll
        for (int i = 0; i < SIDE; i++) {
            const char *panel = step + i / 8 * depth * step_bytes<TYPE>();
            float2 first = pair_of<TYPE>(panel, d % DEPTH / 2, 2 * i % SIDE), second = pair_of<TYPE>(panel, d % DEPTH / 2, 2 * i % SIDE + 1);
            pairs[i] = d % 2 ? make_float2(first.y, second.y) : make_float2(first.x, second.x);
        }
    } else {
        const char *step = values + (d / SIDE * (BLOCK / DEPTH) + part) * step_bytes<TYPE>();
#pragma unroll
        for (int i = 0; i < SIDE; i++)
            pairs[i] = pair_of<TYPE>(step, i, d % SIDE);
    }
    float even = 0, odd = 0;
#pragma unroll
    for (int i = 0; i < SIDE; i++) {
        float2 w = *(const float2 *)(weights + 2 * i);
        even = fma_(w.x, pairs[i].x, even), odd = fma_(w.y, pairs[i].y, odd);
    }
    return even + odd;
}

/* One query head of one row. BLOCKS_AT_ONCE blocks of keys side by side: scores, weights and what each 32 positions add to the result do
 * not depend on each other; the running maximum, sum and result go from block to block. */
template <int TYPE, bool LATENT> INLINE void attend_row(const Args &a, int row_number, int head, int key_head)
{
    __shared__ __align__(16) float query[MOST_WIDTH], scores[THREADS], weights[THREADS], parts[BLOCKS_AT_ONCE * 2 * MOST_VALUES],
        maxima[BLOCKS_AT_ONCE], totals[BLOCKS_AT_ONCE], factors[BLOCKS_AT_ONCE];
    const Row row = a.rows[row_number];
    const int t = threadIdx.x, own = t / BLOCK, width = (int)a.n[WIDTH], value_width = (int)a.n[VALUE_WIDTH], depth = (width + DEPTH - 1) / DEPTH;
    const int position = (int)row.position, from = first_seen((int)a.n[WINDOW], position), last = position / BLOCK;
    const char *next = from / BLOCK + own <= last ? block_of(a, row, key_head, from / BLOCK + own) : 0; /* of the thread, in the next turn */
    const float *sinks = (const float *)a.tensors[0], *slopes = (const float *)a.tensors[1], *given = a.x + row_number * a.x_stride + head * width;
    const float scale = (float)a.reals[0], cap = (float)a.reals[1];
    for (int i = t; i < depth * DEPTH; i += THREADS)
        query[i] = i < width ? rounded_if(a.n[ROUNDS], given[i]) : 0;
    float most = sinks ? sinks[head] : -infinity(), total = sinks ? 1 : 0, result[MOST_VALUES / THREADS] = {};
    for (int block = from / BLOCK; block <= last; block += BLOCKS_AT_ONCE) {
        const int blocks = last - block + 1 < BLOCKS_AT_ONCE ? last - block + 1 : BLOCKS_AT_ONCE;
        const int at = (block + own) * BLOCK + t % BLOCK;
        const char *mine = next;
        next = block + BLOCKS_AT_ONCE + own <= last ? block_of(a, row, key_head, block + BLOCKS_AT_ONCE + own) : 0;
        __syncthreads();
        float score = -infinity();
        if (own < blocks && at >= from && at <= position) {
            const char *keys = mine + t % BLOCK / SIDE * depth * step_bytes<TYPE>();
            float sum = 0;
            for (int step = 0; step < depth; step++, keys += step_bytes<TYPE>()) {
                float2 pairs[SIDE];
#pragma unroll
                for (int i = 0; i < SIDE; i++)
                    pairs[i] = pair_of<TYPE>(keys, i, t % SIDE);
                float even = 0, odd = 0;
#pragma unroll
                for (int i = 0; i < SIDE; i++) {
                    float2 q = *(const float2 *)(query + step * DEPTH + 2 * i);
                    even = fma_(q.x, pairs[i].x, even), odd = fma_(q.y, pairs[i].y, odd);
                }
                sum = sum + (even + odd);
            }
            score = sum * scale;
            score = cap > 0 ? hyperbolic(score / cap) * cap : score;
            score = slopes ? score + slopes[head] * (float)(at - position) : score;
        }
        scores[t] = score;
        __syncthreads();
        float top = -infinity();
#pragma unroll
        for (int p = 0; p < BLOCK / SIDE; p++)
            top = more(scores[own * BLOCK + p * SIDE + t % SIDE], top);
        top = tree_more(top);
        if (t % BLOCK == 0)
            maxima[own] = top;
        __syncthreads();
        float before = most, here = most;
        for (int b = 0; b <= own; b++)
            before = here, here = more(maxima[b], here);
        for (int b = 0; b < blocks; b++)
            most = more(maxima[b], most);
        float weight = exponential(score - here), less = before - here;
        scores[t] = weight;
        weights[t] = rounded_if(a.n[ROUNDS], weight);
        if (t % BLOCK == 0)
            factors[own] = less == 0 ? 1 : exponential(less);
        __syncthreads();
        float lane = 0;
#pragma unroll
        for (int p = 0; p < BLOCK / SIDE; p++)
            lane = lane + scores[own * BLOCK + p * SIDE + t % SIDE];
        lane = tree_sum(lane);
        if (t % BLOCK == 0)
            totals[own] = lane;
        const int part = t / DEPTH; /* 32 positions of the thread's own block */
        for (int d = t % DEPTH; own < blocks && d < value_width; d += DEPTH)
            parts[part * value_width + d] = weighed<TYPE, LATENT>(mine, mine + a.n[KEYS], depth, part % 2, d, weights + part * DEPTH);
        __syncthreads();
        for (int b = 0; b < blocks; b++) {
            const float by = factors[b];
            total = total * by + totals[b];
#pragma unroll
            for (int j = 0; j < MOST_VALUES / THREADS; j++)
                if (t + j * THREADS < value_width) {
                    const float *add = parts + b * 2 * value_width + t + j * THREADS;
                    result[j] = by != 1 ? result[j] * by : result[j];
                    result[j] = (result[j] + add[0]) + add[value_width];
                }
        }
    }
#pragma unroll
    for (int j = 0; j < MOST_VALUES / THREADS; j++)
        if (t + j * THREADS < value_width)
            a.out[row_number * a.out_stride + head * value_width + t + j * THREADS] = result[j] / total;
}

/* Grid (heads, rows or fewer): a block computes every gridDim.y-th row, but those that are attend_many's. */
template <int TYPE, bool LATENT> INLINE void attend(const Args &a)
{
    await_rows();
    const int group = (int)(a.n[0] / a.n[KEY_HEADS]), head = blockIdx.x;
    for (int row = blockIdx.y; row < (int)a.count; row += gridDim.y) {
        if (a.n[IN_TILES] && is_of_one_session(a, rows_of_tile(a, (row * group + head % group) / QUERIES)))
            continue;
        attend_row<TYPE, LATENT>(a, row, head, head / group);
        __syncthreads();
    }
}

KERNEL(attend_BF16) { attend<BF16, false>(a); }
KERNEL(attend_F32) { attend<F32, false>(a); }
KERNEL(attend_latents_BF16) { attend<BF16, true>(a); }
KERNEL(attend_latents_F32) { attend<F32, true>(a); }
