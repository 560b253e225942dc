/* CUDA's kernels on the CPU, for tests: a block's threads are coroutines that take turns at its barriers, one block after the other.
 * Every operation is the same IEEE operation as on the device.
 *
 * With DRIFTS threads do not go from barrier to barrier in order: some wait there for a while, at random, and who exchanges numbers waits
 * for its warp alone; blocks run backwards. So what a missing barrier leaves to chance shows, now and then. What cannot show is what the
 * threads of a warp, which go on together, and different blocks do at once. */
#include <csetjmp>
#include <cstdint>
#include <cstring>
#include <cmath>
#include <ucontext.h>
#include <xmmintrin.h>

struct int2 { int x, y; };
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
struct Index { unsigned x, y, z; };
static Index threadIdx, blockIdx, blockDim, gridDim;

#define __device__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
static inline float __uint_as_float(unsigned bits) { float v; memcpy(&v, &bits, 4); return v; }
static inline unsigned __float_as_uint(float v) { unsigned bits; memcpy(&bits, &v, 4); return bits; }
static inline double __longlong_as_double(long long bits) { double v; memcpy(&v, &bits, 8); return v; }
static inline long long __double_as_longlong(double v) { long long bits; memcpy(&bits, &v, 8); return bits; }
static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

static inline int __dp4a(int a, int b, int sum)
{
    for (int i = 0; i < 4; i++)
        sum += (int8_t)(a >> 8 * i) * (int8_t)(b >> 8 * i);
    return sum;
}

enum { MOST_THREADS = 256, STACK = 1 << 17 };
static char stacks[MOST_THREADS][STACK];
static ucontext_t starts[MOST_THREADS], outside;
static jmp_buf places[MOST_THREADS], main_place;
static bool is_begun[MOST_THREADS], is_over[MOST_THREADS], has_awaited[MOST_THREADS];
static unsigned now;
static void (*entry)(const void *);
static const void *entry_args;
static float exchanged[MOST_THREADS];

static void begin()
{
    entry(entry_args);
    is_over[now] = true;
    _longjmp(main_place, 1);
}

/* Gives way to the block's other threads. */
static void give_way()
{
    unsigned own = now;
    if (!_setjmp(places[own]))
        _longjmp(main_place, 1);
    threadIdx.x = own;
}

#ifdef DRIFTS
enum { AT_BARRIERS, AT_EXCHANGES };
static unsigned in_block, dice = 1, arrived[2][MOST_THREADS];
static unsigned throw_dice() { return (dice = dice * 1664525u + 1013904223u) >> 16; }
static long left_early;

/* Whether threads [first, end) have come as often as this one. Those that are over never will. */
static bool have_come(unsigned which, unsigned first, unsigned end)
{
    bool all = true;
    for (unsigned i = first; i < end && i < in_block; i++)
        if (arrived[which][i] < arrived[which][now]) {
            left_early += is_over[i];
            all = all && is_over[i];
        }
    return all;
}

static void meet(unsigned which, unsigned first, unsigned end)
{
    arrived[which][now]++;
    while (!have_come(which, first, end))
        give_way();
}
static void __syncthreads() { meet(AT_BARRIERS, 0, in_block); }
static void sync_warp() { meet(AT_EXCHANGES, now / 32 * 32, now / 32 * 32 + 32); }
#else
static void __syncthreads() { give_way(); }
static void sync_warp() { give_way(); }
#endif

static float exchange(float v, unsigned from)
{
    exchanged[threadIdx.x] = v;
    sync_warp();
    float found = exchanged[from];
    sync_warp();
    return found;
}
static float __shfl_down_sync(unsigned, float v, int delta, int width)
{
    unsigned own = threadIdx.x, lane = own % width;
    return exchange(v, lane + delta < (unsigned)width ? own + delta : own);
}
static float __shfl_sync(unsigned, float v, int lane, int width) { return exchange(v, threadIdx.x / width * width + lane); }

/* As in source.py. What is exchanged: threads' parts of rows and columns. */
static int fragments[MOST_THREADS][6];
static void products_of_codes(int *found, const int *rows, const int *columns)
{
    unsigned own = threadIdx.x, warp = own / 32 * 32, lane = own % 32;
    memcpy(fragments[own], rows, 16), memcpy(fragments[own] + 4, columns, 8);
    sync_warp();
    for (unsigned c = 0; c < 4; c++) {
        unsigned row = lane / 4, column = lane % 4 * 2 + c % 2;
        found[c] = 0;
        for (unsigned i = 0; i < 8; i++)
            found[c] = __dp4a(fragments[warp + row * 4 + i / 2][i % 2 * 2 + c / 2], fragments[warp + column * 4 + i / 2][4 + i % 2], found[c]);
    }
    sync_warp();
}

/* A thread goes on to where it gives way next. Whether it is over then. */
static bool go_on(unsigned i)
{
    if (!_setjmp(main_place)) {
        now = i, threadIdx.x = i;
        if (is_begun[i])
            _longjmp(places[i], 1);
        is_begun[i] = true;
        getcontext(&starts[i]);
        starts[i].uc_stack.ss_sp = stacks[i], starts[i].uc_stack.ss_size = STACK, starts[i].uc_link = &outside;
        makecontext(&starts[i], begin, 0);
        setcontext(&starts[i]);
    }
    return is_over[now];
}

/* How often threads of a block were over while others waited at a barrier, and threads that did not await rows: 0 where all is well. */
static long run_block(unsigned threads)
{
    long missed = 0;
    for (unsigned i = 0; i < threads; i++)
        is_begun[i] = is_over[i] = has_awaited[i] = false;
#ifdef DRIFTS
    in_block = threads, left_early = 0;
    memset(arrived, 0, sizeof arrived);
    for (unsigned left = threads; left;)
        for (unsigned i = 0, first = throw_dice(), step = throw_dice() | 1, lazy = throw_dice() % 8; i < threads; i++) {
            unsigned thread = (first + i * step) % threads; /* threads: a power of two */
            if (!is_over[thread] && throw_dice() % 8 >= lazy)
                left -= go_on(thread);
        }
    missed = left_early;
#else
    for (unsigned left = threads; left;) {
        unsigned over = 0;
        for (unsigned i = 0; i < threads; i++)
            over += !is_over[i] && go_on(i);
        missed += over && over < left;
        left -= over;
    }
#endif
    for (unsigned i = 0; i < threads; i++)
        missed += !has_awaited[i];
    return missed;
}

#define await_rows() (has_awaited[threadIdx.x] = true)
#define KERNEL_OF(name, threads, blocks) KERNEL(name)
#define KERNEL(name)                                                    \
    extern "C" void body_##name(const Args &a);                         \
    extern "C" void mh_##name(const void *a) { body_##name(*(const Args *)a); } \
    extern "C" void body_##name(const Args &a)

/* Runs a kernel over a grid. Threads that leave while others wait at a barrier: as run_block. */
extern "C" long host_launch(void (*kernel)(const void *), unsigned x, unsigned y, unsigned z, unsigned threads, const void *args)
{
    unsigned modes = _mm_getcsr();
    long missed = 0;
    entry = kernel, entry_args = args;
    blockDim = {threads, 1, 1}, gridDim = {x, y, z};
    _mm_setcsr((modes | 0x8040) & ~0x3Fu); /* denormals are zero */
    for (unsigned i = 0; i < x * y * z; i++) {
#ifdef DRIFTS
        unsigned block = x * y * z - 1 - i;
#else
        unsigned block = i;
#endif
        blockIdx = {block % x, block / x % y, block / x / y};
        missed += run_block(threads);
    }
    _mm_setcsr(modes);
    return missed;
}
