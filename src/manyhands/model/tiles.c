/* Row-invariant bf16 products with AMX tiles: out[M, N] = x[M, K] @ weight[N, K].T + bias[N].
 *
 * An element is one chain of TDPBF16PS over K in steps of 32, from zero, then the bias in fp32, then one rounding to
 * bf16. Nothing else enters: neither M, nor the row's place, nor N, nor the number of threads. K is padded with zeros.
 * (TDPBF16PS: Intel's Software Developer's Manual, vol. 2; sums of even and odd k side by side, no denormals.)
 *
 * Weights are packed as tiles of 32 k x 16 n, [N/16][K/32][16][16][2], so that a product reads them once, in order:
 * few rows are bound by memory. Many rows go in chunks whose copy stays in a core's cache (L2).
 */
#include <dlfcn.h>
#include <immintrin.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

typedef uint16_t bf16;

enum {
    SIDE = 16,               /* rows of a tile: rows of x or columns of out */
    DEPTH = 32,              /* k of a tile */
    TILE = SIDE * DEPTH,     /* elements: 1 KiB */
    LINES = TILE * 2 / 64,   /* cache lines of a tile */
    AHEAD = 8,               /* tiles that a stream of weights is fetched ahead of its use */
    CHUNK_BYTES = 1500000,   /* of x that a core keeps at hand: most of an L2 cache of 2 MiB */
    UNIT = 4, MAX_UNIT = 32, /* panels (16 columns) that a thread takes at once */
    ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18
};

typedef struct {
    const bf16 *x, *weight;
    const float *bias;
    bf16 *out;
    int64_t m, n, k, stride, panels, depth, chunk, unit, units, tasks;
    int64_t next; /* the first task that nobody has taken */
    int failed;   /* a thread got no memory */
} Job;

static void (*parallel)(void (*)(void *), void *, unsigned, unsigned);

/* 0 if this process may use AMX. Threads come from the OpenMP runtime that torch has loaded, if there is one. */
int tiles_init(void)
{
    *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA);
}

static int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

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

/* Tiles [rows/16][K/32][16][32] of x's rows [first, first + rows), zeros beyond. */
static void pack_rows(const Job *job, int64_t first, int64_t rows, bf16 *tiles)
{
    for (int64_t row = 0; row < rows; row++) {
        const bf16 *source = job->x + (first + row) * job->stride;
        bf16 *target = tiles + row / SIDE * job->depth * TILE + row % SIDE * DEPTH;
        int64_t whole = job->k / DEPTH;
        for (int64_t i = 0; i < whole; i++)
            _mm512_store_si512(target + i * TILE, _mm512_loadu_si512(source + i * DEPTH));
        if (whole < job->depth) {
            __mmask32 mask = (1u << (job->k % DEPTH)) - 1;
            _mm512_store_si512(target + whole * TILE, _mm512_maskz_loadu_epi16(mask, source + whole * DEPTH));
        }
    }
}

/* Tiles 0-3: sums of up to 16 rows. 4, 5: rows of x. 6, 7: weights. */
static void configure(int64_t rows)
{
    struct { uint8_t palette, start, reserved[14]; uint16_t bytes[16]; uint8_t rows[16]; } config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = (uint8_t)(i < 6 ? rows : SIDE);
    }
    _tile_loadconfig(&config);
}

/* Round a tile of sums into out, at `row` and the columns of `panel`. */
static void store(const Job *job, const float *sums, int64_t row, int64_t panel)
{
    int64_t column = panel * SIDE, columns = job->n - column, rows = job->m - row;
    if (columns <= 0)
        return;
    __mmask16 mask = columns >= SIDE ? 0xffff : (__mmask16)((1u << columns) - 1);
    __m512 bias = job->bias ? _mm512_maskz_loadu_ps(mask, job->bias + column) : _mm512_setzero_ps();
    for (int64_t i = 0; i < rows && i < SIDE; i++) {
        __m512 sum = _mm512_add_ps(_mm512_load_ps(sums + i * SIDE), bias);
        _mm256_mask_storeu_epi16(job->out + (row + i) * job->n + column, mask, (__m256i)_mm512_cvtneps_pbh(sum));
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
    float sums[TILE / 2] __attribute__((aligned(64)));
    const bf16 *weights[4];
    for (; panel < end; panel += 4) {
        for (int i = 0; i < 4; i++)
            weights[i] = job->weight + (panel + i < end ? panel + i : panel) * job->depth * TILE;
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        for (int64_t at = 0; at < job->depth * TILE; at += TILE) {
            _tile_loadd(4, x + at, 64);
            ADD_TILE(0, weights[0], at) ADD_TILE(1, weights[1], at)
            ADD_TILE(2, weights[2], at) ADD_TILE(3, weights[3], at)
        }
        _tile_stored(0, sums, 64); store(job, sums, row, panel);
        if (panel + 1 < end) { _tile_stored(1, sums, 64); store(job, sums, row, panel + 1); }
        if (panel + 2 < end) { _tile_stored(2, sums, 64); store(job, sums, row, panel + 2); }
        if (panel + 3 < end) { _tile_stored(3, sums, 64); store(job, sums, row, panel + 3); }
    }
}

/* A chunk of `blocks` x 16 rows, two panels and two blocks at a time; meanwhile the next two panels are fetched. */
static void many_rows(const Job *job, const bf16 *x, int64_t row, int64_t blocks, int64_t panel, int64_t end)
{
    float sums[TILE / 2] __attribute__((aligned(64)));
    int64_t size = job->depth * TILE, share = ceil_div(2 * LINES, ceil_div(blocks, 2));
    for (; panel < end; panel += 2) {
        const bf16 *left = job->weight + panel * size, *right = panel + 1 < end ? left + size : left;
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
            int64_t at = row + block * SIDE;
            _tile_stored(0, sums, 64); store(job, sums, at, panel);
            if (panel + 1 < end) { _tile_stored(1, sums, 64); store(job, sums, at, panel + 1); }
            if (block + 1 < blocks) {
                _tile_stored(2, sums, 64); store(job, sums, at + SIDE, panel);
                if (panel + 1 < end) { _tile_stored(3, sums, 64); store(job, sums, at + SIDE, panel + 1); }
            }
        }
    }
}

static __thread struct { bf16 *tiles; int64_t size; } scratch;

static void work(void *argument)
{
    Job *job = argument;
    int64_t rows = job->chunk < job->m ? job->chunk : job->m;
    int64_t size = ceil_div(rows, SIDE) * job->depth * TILE, packed = -1;
    if (scratch.size < size) {
        free(scratch.tiles);
        scratch.tiles = aligned_alloc(64, size * sizeof(bf16));
        scratch.size = scratch.tiles ? size : 0;
        if (!scratch.tiles) {
            job->failed = 1;
            return;
        }
    }
    configure(rows < SIDE ? rows : SIDE);
    for (;;) {
        int64_t task = __atomic_fetch_add(&job->next, 1, __ATOMIC_RELAXED);
        if (task >= job->tasks)
            break;
        int64_t row = task / job->units * job->chunk, panel = task % job->units * job->unit;
        int64_t end = panel + job->unit < job->panels ? panel + job->unit : job->panels;
        int64_t count = job->m - row < job->chunk ? job->m - row : job->chunk;
        if (packed != row)
            pack_rows(job, row, count, scratch.tiles);
        packed = row;
        if (count <= SIDE)
            few_rows(job, scratch.tiles, row, panel, end);
        else
            many_rows(job, scratch.tiles, row, ceil_div(count, SIDE), panel, end);
    }
    _tile_release();
}

/* x: m > 0 rows of k elements, `stride` elements apart. out[m, n] contiguous. bias: n floats or null.
 * 0, or 1 if there was no memory for a copy of some rows. */
int tiles_linear(const bf16 *x, int64_t stride, const bf16 *packed, const float *bias, bf16 *out, int64_t m, int64_t n,
                 int64_t k, int64_t threads)
{
    Job job = {.x = x, .weight = packed, .bias = bias, .out = out, .m = m, .n = n, .k = k, .stride = stride};
    job.panels = ceil_div(n, SIDE);
    job.depth = ceil_div(k, DEPTH);
    int64_t blocks = CHUNK_BYTES / (job.depth * TILE * 2) & ~1;
    job.chunk = SIDE * (blocks < 2 ? 2 : blocks);
    job.unit = job.panels / (threads * 8) & ~(UNIT - 1);
    job.unit = job.unit < UNIT ? UNIT : job.unit > MAX_UNIT ? MAX_UNIT : job.unit;
    job.units = ceil_div(job.panels, job.unit);
    job.tasks = job.units * ceil_div(m, job.chunk);
    if (threads > 1 && parallel)
        parallel(work, &job, (unsigned)threads, 0);
    else
        work(&job);
    return job.failed;
}
