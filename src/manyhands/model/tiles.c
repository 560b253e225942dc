/* Row-invariant bf16 products with AMX tiles: out[M, N] = x[M, K] @ weight[N, K].T + bias[N].
 *
 * An element is one chain of TDPBF16PS over K in steps of 32, from zero, then the bias in fp32, then one rounding to
 * bf16. Nothing else enters: neither M, nor the row's place, nor N, nor the number of threads. K is padded with zeros.
 * (TDPBF16PS: Intel's Software Developer's Manual, vol. 2; sums of even and odd k side by side, no denormals.)
 *
 * Weights are packed as tiles of 32 k x 16 n, [N/16][K/32][16][16][2], so that a product reads them once, in order:
 * few rows are bound by memory. Many rows go in chunks whose copy stays in a core's cache (L2).
 */
#define _GNU_SOURCE
#include <immintrin.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

typedef uint16_t bf16;

enum {
    SIDE = 16,               /* rows of a tile: rows of x or columns of out */
    DEPTH = 32,              /* k of a tile */
    TILE = SIDE * DEPTH,     /* elements: 1 KiB */
    LINES = TILE * 2 / 64,   /* cache lines of a tile */
    AHEAD = 8,               /* tiles that a stream of weights is fetched ahead of its use */
    CHUNK_BYTES = 1500000,   /* of x that a core keeps at hand: most of an L2 cache of 2 MiB */
    UNIT = 4, MAX_UNIT = 32, /* panels (16 columns) that a member takes at once */
    HAND_BYTES = 1 << 20,    /* of the next weights that a member fetches while it waits for work */
    WAKE_NS = 800000,        /* that a member waits awake: longer than what a layer computes between two products */
    PAUSES = 64,             /* between two looks at the clock, when it gives way to others: about a microsecond */
    CLOSED = 1 << 30,
    ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18
};

typedef struct {
    const bf16 *weight; /* packed; null: none */
    int64_t n, k;
} Matrix;

enum { NONE, SILU, GELU_TANH }; /* activations */

typedef struct {
    const bf16 *x;
    const float *bias;
    bf16 *out;
    Matrix matrix, then;
    int64_t m, stride, width, panels, depth, chunk, unit, units; /* width: columns of out */
    int activation, members, failed;                             /* failed: one of them got no memory */
} Job;

typedef struct {
    int64_t next, end;  /* the tasks of its range that nobody has taken */
    bf16 *tiles;        /* a copy of rows of x */
    int64_t size;       /* elements that it has room for */
    pthread_t thread;
    char apart[24];     /* from the next member's cache line */
} Member;

/* Threads that share one job at a time with the thread that calls, which is member 0. The caller waits only for members that
 * have begun, so a job never waits for a thread to wake, nor for one whose core is busy with something else. */
typedef struct Team {
    int size, sleeping, quits;
    int gate;       /* members inside the job, and CLOSED when none may enter */
    unsigned round; /* raised for every job */
    Job job;
    Member *members;
    pthread_mutex_t lock;
    pthread_cond_t wake;
} Team;

/* What tiles.py asks for: a library left behind by an older build takes other arguments and gives other bits. */
int tiles_version(void) { return 4; }

/* 0 if this process may use AMX. */
int tiles_init(void) { return (int)syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA); }

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

static __m512 biased(const Job *job, const float *sums, int64_t panel)
{
    int64_t columns = job->matrix.n - panel * SIDE;
    __mmask16 mask = columns >= SIDE ? 0xffff : (__mmask16)((1u << columns) - 1);
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

/* Round 16 numbers into out, at `row` and the columns of `panel`; none beyond its edges. */
static void put(const Job *job, __m512 values, int64_t row, int64_t panel)
{
    int64_t columns = job->width - panel * SIDE;
    __mmask16 mask = columns >= SIDE ? 0xffff : (__mmask16)((1u << columns) - 1);
    _mm256_mask_storeu_epi16(job->out + row * job->width + panel * SIDE, mask, (__m256i)_mm512_cvtneps_pbh(values));
}

/* Two tiles of sums, of panels `panel` and the next (if that is before `end`), with the job's epilogue. */
static void store(const Job *job, float sums[2][TILE / 2], int64_t row, int64_t panel, int64_t end)
{
    for (int64_t i = 0; i < SIDE && row + i < job->m; i++) {
        const float *left = sums[0] + i * SIDE, *right = sums[1] + i * SIDE;
        if (job->activation) {
            __m512 gate = gate_of(job->activation, biased(job, left, panel));
            put(job, _mm512_mul_ps(gate, biased(job, right, panel + 1)), row + i, panel / 2);
            continue;
        }
        put(job, biased(job, left, panel), row + i, panel);
        if (panel + 1 < end)
            put(job, biased(job, right, panel + 1), row + i, panel + 1);
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

static int have_room(Member *member, int64_t size)
{
    if (member->size >= size)
        return 1;
    free(member->tiles);
    member->tiles = aligned_alloc(64, size * sizeof(bf16));
    member->size = member->tiles ? size : 0;
    return member->tiles != 0;
}

/* A task is one unit of panels for one chunk of rows; chunk by chunk. Members share them in equal ranges. */
static void divide(Job *job)
{
    job->panels = ceil_div(job->matrix.n, SIDE);
    job->depth = ceil_div(job->matrix.k, DEPTH);
    int64_t blocks = CHUNK_BYTES / (job->depth * TILE * 2) & ~1;
    job->chunk = SIDE * (blocks < 2 ? 2 : blocks);
    job->unit = job->panels / (job->members * 8) & ~(UNIT - 1);
    job->unit = job->unit < UNIT ? UNIT : job->unit > MAX_UNIT ? MAX_UNIT : job->unit;
    job->units = ceil_div(job->panels, job->unit);
}

static int64_t range_start(const Job *job, int member)
{
    return job->units * ceil_div(job->m, job->chunk) * member / job->members;
}

/* A member's own range first, then what is left of the others'. */
static void take_share(Job *job, Member *members, int self)
{
    int64_t rows = job->chunk < job->m ? job->chunk : job->m, packed = -1;
    if (!have_room(&members[self], ceil_div(rows, SIDE) * job->depth * TILE)) {
        __atomic_store_n(&job->failed, 1, __ATOMIC_RELAXED);
        return;
    }
    bf16 *tiles = members[self].tiles;
    configure(rows < SIDE ? rows : SIDE);
    for (int i = 0; i < job->members; i++) {
        Member *owner = &members[(self + i) % job->members];
        for (;;) {
            int64_t task = __atomic_fetch_add(&owner->next, 1, __ATOMIC_RELAXED);
            if (task >= owner->end)
                break;
            int64_t row = task / job->units * job->chunk, panel = task % job->units * job->unit;
            int64_t end = panel + job->unit < job->panels ? panel + job->unit : job->panels;
            int64_t count = job->m - row < job->chunk ? job->m - row : job->chunk;
            if (packed != row)
                pack_rows(job, row, count, tiles);
            packed = row;
            if (count <= SIDE)
                few_rows(job, tiles, row, panel, end);
            else
                many_rows(job, tiles, row, ceil_div(count, SIDE), panel, end);
        }
    }
    _tile_release();
}

/* The beginning of a member's range of the weights that come next, into its cache, until the next job is there. */
static void fetch_then(const Team *team, unsigned round, Matrix then, int members, int member)
{
    if (!then.weight)
        return;
    Job job = {.matrix = then, .m = 1, .members = members};
    divide(&job);
    int64_t panel = job.depth * TILE * 2, from = range_start(&job, member) * job.unit * panel;
    int64_t until = range_start(&job, member + 1) * job.unit, bytes = HAND_BYTES;
    until = (until < job.panels ? until : job.panels) * panel;
    until = until - from < bytes ? until : from + bytes;
    for (; from < until && __atomic_load_n(&team->round, __ATOMIC_RELAXED) == round; from += 4096)
        for (int64_t at = from; at < from + 4096 && at < until; at += 64)
            _mm_prefetch((const char *)then.weight + at, _MM_HINT_T1);
}

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Waits for a job after `round`: awake, then asleep. Its round; `quits` is set where there is none. */
static unsigned await_job(Team *team, unsigned round)
{
    for (int64_t until = now_ns() + WAKE_NS; now_ns() < until; sched_yield())
        for (int i = 0; i < PAUSES; i++) {
            if (__atomic_load_n(&team->round, __ATOMIC_ACQUIRE) != round)
                return team->round;
            _mm_pause();
        }
    pthread_mutex_lock(&team->lock);
    __atomic_fetch_add(&team->sleeping, 1, __ATOMIC_SEQ_CST); /* before the last look: give_job looks the other way round */
    while (__atomic_load_n(&team->round, __ATOMIC_SEQ_CST) == round)
        pthread_cond_wait(&team->wake, &team->lock);
    __atomic_fetch_sub(&team->sleeping, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&team->lock);
    return __atomic_load_n(&team->round, __ATOMIC_ACQUIRE);
}

static void give_job(Team *team)
{
    __atomic_fetch_add(&team->round, 1, __ATOMIC_SEQ_CST);
    if (!__atomic_load_n(&team->sleeping, __ATOMIC_SEQ_CST))
        return;
    pthread_mutex_lock(&team->lock);
    pthread_cond_broadcast(&team->wake);
    pthread_mutex_unlock(&team->lock);
}

typedef struct {
    Team *team;
    int member;
} Place;

static void *serve(void *argument)
{
    Place place = *(Place *)argument;
    Team *team = place.team;
    free(argument);
    for (unsigned round = 0; round = await_job(team, round), !__atomic_load_n(&team->quits, __ATOMIC_ACQUIRE);) {
        Matrix then = {0};
        int members = 0;
        if (!(__atomic_fetch_add(&team->gate, 1, __ATOMIC_ACQ_REL) & CLOSED) && place.member < team->job.members) {
            take_share(&team->job, team->members, place.member);
            then = team->job.then;
            members = team->job.members;
        }
        __atomic_fetch_sub(&team->gate, 1, __ATOMIC_ACQ_REL);
        fetch_then(team, round, then, members, place.member);
    }
    return 0;
}

/* Ends the threads. Only while no job runs. */
void tiles_team_stop(Team *team)
{
    __atomic_store_n(&team->quits, 1, __ATOMIC_RELEASE);
    give_job(team);
    for (int i = 1; i < team->size; i++)
        pthread_join(team->members[i].thread, 0);
    for (int i = 0; i < team->size; i++)
        free(team->members[i].tiles);
    free(team->members);
    free(team);
}

/* `size` members, the caller included; fewer where the system gives no more threads. Null: no memory. */
Team *tiles_team_start(int64_t size)
{
    Team *team = calloc(1, sizeof *team);
    Member *members = aligned_alloc(64, size * sizeof *members);
    if (!team || !members) {
        free(team);
        free(members);
        return 0;
    }
    memset(members, 0, size * sizeof *members);
    team->members = members;
    team->gate = CLOSED;
    pthread_mutex_init(&team->lock, 0);
    pthread_cond_init(&team->wake, 0);
    for (team->size = 1; team->size < size; team->size++) {
        Place *place = malloc(sizeof *place);
        if (!place)
            break;
        *place = (Place){team, team->size};
        if (pthread_create(&members[team->size].thread, 0, serve, place)) {
            free(place);
            break;
        }
        pthread_setname_np(members[team->size].thread, "manyhands-tiles");
    }
    return team;
}

/* x: m > 0 rows of k elements, `stride` elements apart. out[m, n] contiguous. bias: n floats or null. With an activation
 * panels come in pairs, and out[m, n / 2] is activation(first) * second (n: a multiple of 32). On the first `threads`
 * members of `team`, which only one thread may call. `then`: the packed weights [then_n, then_k] of the product that is
 * likely to come next, or null; they are fetched, never read. 0, or 1 if there was no memory for a copy of some rows. */
int tiles_linear(Team *team, int64_t threads, const bf16 *x, int64_t stride, const bf16 *weight, const float *bias, bf16 *out,
                 int64_t m, int64_t n, int64_t k, int64_t activation, const bf16 *then, int64_t then_n, int64_t then_k)
{
    Job job = {.x = x, .bias = bias, .out = out, .matrix = {weight, n, k}, .then = {then, then_n, then_k}, .m = m,
               .stride = stride, .width = activation ? n / 2 : n, .activation = (int)activation,
               .members = threads < team->size ? (int)threads : team->size};
    divide(&job);
    for (int i = 0; i < job.members; i++) {
        team->members[i].next = range_start(&job, i);
        team->members[i].end = range_start(&job, i + 1);
    }
    if (job.members == 1) {
        take_share(&job, team->members, 0);
        return job.failed;
    }
    team->job = job;
    __atomic_fetch_sub(&team->gate, CLOSED, __ATOMIC_ACQ_REL);
    give_job(team);
    take_share(&team->job, team->members, 0);
    __atomic_fetch_add(&team->gate, CLOSED, __ATOMIC_ACQ_REL);
    for (int i = 0; __atomic_load_n(&team->gate, __ATOMIC_ACQUIRE) != CLOSED; i++)
        i < 1000 ? _mm_pause() : (void)sched_yield();
    return team->job.failed;
}

static __m512 widened(const bf16 *x, int64_t count)
{
    __mmask16 mask = count >= SIDE ? 0xffff : (__mmask16)((1u << count) - 1);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, x)), 16));
}

/* out[i] = x[i] / sqrt(mean(x[i]^2) + epsilon) * weight for m rows of n elements, `stride` apart; in fp32, rounded once. */
void tiles_norm(const bf16 *x, int64_t stride, const float *weight, float epsilon, bf16 *out, int64_t m, int64_t n)
{
    for (int64_t row = 0; row < m; row++, x += stride, out += n) {
        __m512 squares = _mm512_setzero_ps();
        for (int64_t i = 0; i < n; i += SIDE) {
            __m512 values = widened(x + i, n - i);
            squares = _mm512_fmadd_ps(values, values, squares);
        }
        __m512 scale = _mm512_set1_ps(1 / sqrtf(_mm512_reduce_add_ps(squares) / (float)n + epsilon));
        for (int64_t i = 0; i < n; i += SIDE) {
            __mmask16 mask = n - i >= SIDE ? 0xffff : (__mmask16)((1u << (n - i)) - 1);
            __m512 values = _mm512_mul_ps(_mm512_mul_ps(widened(x + i, n - i), scale), _mm512_maskz_loadu_ps(mask, weight + i));
            _mm256_mask_storeu_epi16(out + i, mask, (__m256i)_mm512_cvtneps_pbh(values));
        }
    }
}
