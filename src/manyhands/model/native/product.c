/* Row-invariant bf16 products with AMX tiles: out[M, N] = x[M, K] @ weight[N, K].T + bias[N].
 *
 * An element is one chain of TDPBF16PS over K in steps of 32, from zero, then the bias in fp32, then one rounding to
 * bf16. Nothing else enters: neither M, nor the row's place, nor N, nor the number of threads. K is padded with zeros.
 * (TDPBF16PS: Intel's Software Developer's Manual, vol. 2; sums of even and odd k side by side, no denormals.)
 *
 * Weights are packed as tiles of 32 k x 16 n, [N/16][K/32][16][16][2], so that a product reads them once, in order:
 * few rows are bound by memory. Many rows go in chunks whose copy stays in a core's cache (L2).
 */
#include "product.h"

#include <string.h>

enum {
    AHEAD = 8,               /* tiles that a stream of weights is fetched ahead of its use */
    CHUNK_BYTES = 1500000,   /* of x that a core keeps at hand: most of an L2 cache of 2 MiB */
    UNIT = 4, MAX_UNIT = 32, /* panels (16 columns) that a member takes at once */
};

typedef struct {
    Work work;
    const bf16 *x;
    const float *bias;
    bf16 *out;
    Matrix matrix, then;
    int64_t m, stride, width, panels, depth, chunk, unit, units; /* width: columns of out */
    int activation;
} Job;

/* Elements that tiles_pack writes for a matrix [n, k]. */
int64_t tiles_size(int64_t n, int64_t k) { return ceil_div(n, SIDE) * ceil_div(k, DEPTH) * TILE; }

/* Tiles of weight[n, k] (contiguous) -> packed[tiles_size(n, k)], zeros beyond its edges. */
void tiles_pack(const bf16 *weight, bf16 *packed, int64_t n, int64_t k)
{
    for (int64_t n0 = 0; n0 < n; n0 += SIDE)
        for (int64_t k0 = 0; k0 < k; k0 += DEPTH, packed += TILE) {
            int64_t columns = n - n0 < SIDE ? n - n0 : SIDE, depth = k - k0 < DEPTH ? k - k0 : DEPTH;
            if (columns < SIDE || depth < DEPTH)
                memset(packed, 0, TILE * sizeof(bf16));
            for (int64_t c = 0; c < columns; c++) {
                const bf16 *row = weight + (n0 + c) * k + k0;
                int64_t i = 0;
                for (; i + 1 < depth; i += 2)
                    memcpy(packed + (i / 2 * SIDE + c) * 2, row + i, 2 * sizeof(bf16));
                if (i < depth)
                    packed[(i / 2 * SIDE + c) * 2] = row[i];
            }
        }
}

/* Tiles [rows/16][K/32][16][32] of x's rows [first, first + rows). What stands beyond in the last ones is never stored. */
static void pack_rows(const Job *job, int64_t first, int64_t rows, bf16 *tiles)
{
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *source = job->x + (first + row) * job->stride;
        bf16 *target = tiles + row / SIDE * job->depth * TILE + row % SIDE * DEPTH;
        int64_t whole = job->matrix.k / DEPTH;
        for (int64_t i = 0; i < whole; i++)
            _mm512_store_si512(target + i * TILE, _mm512_loadu_si512(source + i * DEPTH));
        if (whole < job->depth) {
            __mmask32 mask = (1u << (job->matrix.k % DEPTH)) - 1;
            _mm512_store_si512(target + whole * TILE, _mm512_maskz_loadu_epi16(mask, source + whole * DEPTH));
        }
    }
}

static __m512 biased(const Job *job, const float *sums, int64_t panel)
{
    __mmask16 mask = lanes(job->matrix.n - panel * SIDE);
    __m512 bias = job->bias ? _mm512_maskz_loadu_ps(mask, job->bias + panel * SIDE) : _mm512_setzero_ps();
    return _mm512_add_ps(_mm512_load_ps(sums), bias);
}

/* e^x for x <= 0: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2] (Cephes' expf), 2 units in the last place of fp32. */
static __m512 exponential(__m512 x)
{
    x = _mm512_max_ps(x, _mm512_set1_ps(-200));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1)));
    return _mm512_scalef_ps(p, n);
}

/* x * sigmoid(z): silu where z = x; gelu, as tanh approximates it, where z = 2 sqrt(2 / pi) (x + 0.044715 x^3). */
static __m512 gate_of(int activation, __m512 x)
{
    __m512 z = x;
    if (activation == GELU_TANH) {
        __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
        z = _mm512_mul_ps(_mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x), _mm512_set1_ps(1.5957691216f));
    }
    __m512 small = exponential(_mm512_sub_ps(_mm512_setzero_ps(), _mm512_abs_ps(z)));
    __mmask16 negative = _mm512_cmp_ps_mask(z, _mm512_setzero_ps(), _CMP_LT_OQ);
    __m512 above = _mm512_mask_blend_ps(negative, _mm512_set1_ps(1), small);
    return _mm512_mul_ps(x, _mm512_div_ps(above, _mm512_add_ps(_mm512_set1_ps(1), small)));
}

/* Rounds a panel of row `row` into out; nothing beyond its edges. */
static void put_panel(const Job *job, __m512 values, int64_t row, int64_t panel)
{
    put(job->out + row * job->width + panel * SIDE, job->width - panel * SIDE, values);
}

/* Two tiles of sums, of panels `panel` and the next (if that is before `end`), with the job's epilogue. */
static void store(const Job *job, float sums[2][TILE / 2], int64_t row, int64_t panel, int64_t end)
{
    for (int64_t i = 0; i < SIDE && row + i < job->m; i++) {
        const float *left = sums[0] + i * SIDE, *right = sums[1] + i * SIDE;
        if (job->activation) {
            __m512 gate = gate_of(job->activation, biased(job, left, panel));
            put_panel(job, _mm512_mul_ps(gate, biased(job, right, panel + 1)), row + i, panel / 2);
            continue;
        }
        put_panel(job, biased(job, left, panel), row + i, panel);
        if (panel + 1 < end)
            put_panel(job, biased(job, right, panel + 1), row + i, panel + 1);
    }
}

static void fetch(const bf16 *line, int64_t lines)
{
    for (int64_t i = 0; i < lines; i++)
        _mm_prefetch((const char *)(line + i * DEPTH), _MM_HINT_T0);
}

#define ADD_TILE(sum, weights, at)               \
    fetch((weights) + (at) + AHEAD * TILE, LINES); \
    _tile_loadd(6, (weights) + (at), 64);        \
    _tile_dpbf16ps(sum, 4, 6);

/* Up to 16 rows, four panels at a time: four streams of weights. Panels past the last are computed again, not stored. */
static void few_rows(const Job *job, const bf16 *x, int64_t row, int64_t panel, int64_t end)
{
    float sums[4][TILE / 2] __attribute__((aligned(64)));
    const bf16 *weights[4];
    for (; panel < end; panel += 4) {
        for (int i = 0; i < 4; i++)
            weights[i] = job->matrix.weight + (panel + i < end ? panel + i : panel) * job->depth * TILE;
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (int64_t at = 0; at < job->depth * TILE; at += TILE) {
            _tile_loadd(4, x + at, 64);
            ADD_TILE(0, weights[0], at) ADD_TILE(1, weights[1], at)
            ADD_TILE(2, weights[2], at) ADD_TILE(3, weights[3], at)
        }
        _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
        _tile_stored(2, sums[2], 64); _tile_stored(3, sums[3], 64);
        store(job, sums, row, panel, end);
        if (panel + 2 < end)
            store(job, sums + 2, row, panel + 2, end);
    }
}

/* A chunk of `blocks` x 16 rows, two panels and two blocks at a time; meanwhile the next two panels are fetched. */
static void many_rows(const Job *job, const bf16 *x, int64_t row, int64_t blocks, int64_t panel, int64_t end)
{
    float sums[2][TILE / 2] __attribute__((aligned(64)));
    int64_t size = job->depth * TILE, share = ceil_div(2 * LINES, ceil_div(blocks, 2));
    for (; panel < end; panel += 2) {
        const bf16 *left = job->matrix.weight + panel * size, *right = panel + 1 < end ? left + size : left;
        for (int64_t block = 0; block < blocks; block += 2) {
            const bf16 *upper = x + block * size, *lower = block + 1 < blocks ? upper + size : upper;
            int64_t lines = panel + 2 < end ? 2 * LINES - block / 2 * share : 0;
            const bf16 *next = left + 2 * size + block / 2 * share * DEPTH;
            lines = lines < share ? lines : share;
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
            for (int64_t at = 0; at < size; at += TILE) {
                _tile_loadd(6, left + at, 64);
                _tile_loadd(4, upper + at, 64);
                _tile_dpbf16ps(0, 4, 6);
                _tile_loadd(7, right + at, 64);
                _tile_dpbf16ps(1, 4, 7);
                _tile_loadd(5, lower + at, 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
                for (int64_t i = 0; i < lines; i++)
                    _mm_prefetch((const char *)(next + 2 * at + i * DEPTH), _MM_HINT_T1);
            }
            _tile_stored(0, sums[0], 64); _tile_stored(1, sums[1], 64);
            store(job, sums, row + block * SIDE, panel, end);
            if (block + 1 < blocks) {
                _tile_stored(2, sums[0], 64); _tile_stored(3, sums[1], 64);
                store(job, sums, row + (block + 1) * SIDE, panel, end);
            }
        }
    }
}

/* A task is one unit of panels for one chunk of rows; chunk by chunk. */
static void divide(Job *job, int members)
{
    job->panels = ceil_div(job->matrix.n, SIDE);
    job->depth = ceil_div(job->matrix.k, DEPTH);
    int64_t blocks = CHUNK_BYTES / (job->depth * TILE * 2) & ~1;
    job->chunk = SIDE * (blocks < 2 ? 2 : blocks);
    job->unit = job->panels / (members * 8) & ~(UNIT - 1);
    job->unit = job->unit < UNIT ? UNIT : job->unit > MAX_UNIT ? MAX_UNIT : job->unit;
    job->units = ceil_div(job->panels, job->unit);
    job->work.tasks = job->units * ceil_div(job->m, job->chunk);
}

static void share(Work *work, Member *members, int self)
{
    Job *job = (Job *)work;
    int64_t rows = at_most(job->chunk, job->m), packed = -1;
    bf16 *tiles = room_of(work, &members[self], ceil_div(rows, SIDE) * job->depth * TILE * (int64_t)sizeof(bf16));
    if (!tiles)
        return;
    configure(at_most(rows, SIDE));
    int turn = 0;
    for (int64_t task; (task = take_task(work, members, self, &turn)) >= 0;) {
        int64_t row = task / job->units * job->chunk, panel = task % job->units * job->unit;
        int64_t end = at_most(panel + job->unit, job->panels), count = at_most(job->m - row, job->chunk);
        if (packed != row)
            pack_rows(job, row, count, tiles);
        packed = row;
        if (count <= SIDE)
            few_rows(job, tiles, row, panel, end);
        else
            many_rows(job, tiles, row, ceil_div(count, SIDE), panel, end);
    }
    _tile_release();
}

/* A member's range of the weights that come next. */
static Bytes ahead(const Work *work, int members, int self)
{
    Job job = {.matrix = ((const Job *)work)->then, .m = 1};
    if (!job.matrix.weight)
        return (Bytes){0};
    divide(&job, members);
    const char *weight = (const char *)job.matrix.weight;
    int64_t panel = job.depth * TILE * 2, from = range_start(job.units, members, self) * job.unit;
    int64_t until = at_most(range_start(job.units, members, self + 1) * job.unit, job.panels);
    return (Bytes){weight + from * panel, weight + until * panel};
}

int product_run(Team *team, int64_t threads, const Product *product, const bf16 *x, int64_t stride, int64_t m, bf16 *out,
                Matrix then)
{
    Matrix matrix = product->matrix;
    if (m == 0)
        return 0;
    Job job = {.work = {.share = share, .ahead = ahead, .members = team_members(team, threads)}, .x = x,
               .bias = product->bias, .out = out, .matrix = matrix, .then = then, .m = m, .stride = stride,
               .width = product->activation ? matrix.n / 2 : matrix.n, .activation = (int)product->activation};
    divide(&job, job.work.members);
    return team_run(team, &job.work);
}

/* As product_run, for callers that have no structs: weight[n, k] packed, then[then_n, then_k] likewise. */
int tiles_linear(Team *team, int64_t threads, const bf16 *x, int64_t stride, const bf16 *weight, const float *bias, bf16 *out,
                 int64_t m, int64_t n, int64_t k, int64_t activation, const bf16 *then, int64_t then_n, int64_t then_k)
{
    Product product = {{weight, n, k}, bias, activation};
    return product_run(team, threads, &product, x, stride, m, out, (Matrix){then, then_n, then_k});
}
