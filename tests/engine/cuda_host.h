/* CUDA's kernels on the CPU, for tests: a block's threads are coroutines that take turns at its barriers, one block after the other.
 * Every operation is the same IEEE operation as on the device; what this cannot show is what threads of a GPU do at once. */
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

/* Gives way to the block's other threads until all are here. */
static void __syncthreads()
{
    unsigned own = now;
    if (!_setjmp(places[own]))
        _longjmp(main_place, 1);
    threadIdx.x = own;
}

static float exchange(float v, unsigned from)
{
    exchanged[threadIdx.x] = v;
    __syncthreads();
    float found = exchanged[from];
    __syncthreads();
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
    __syncthreads();
    for (unsigned c = 0; c < 4; c++) {
        unsigned row = lane / 4, column = lane % 4 * 2 + c % 2;
        found[c] = 0;
        for (unsigned i = 0; i < 8; i++)
            found[c] = __dp4a(fragments[warp + row * 4 + i / 2][i % 2 * 2 + c / 2], fragments[warp + column * 4 + i / 2][4 + i % 2], found[c]);
    }
    __syncthreads();
}

/* How often threads of a block were over while others waited at a barrier, and threads that did not await rows: 0 where all is well. */
static long run_block(unsigned threads)
{
    long missed = 0;
    for (unsigned i = 0; i < threads; i++)
        is_begun[i] = is_over[i] = has_awaited[i] = false;
    for (unsigned left = threads; left;) {
        unsigned over = 0;
        for (volatile unsigned i = 0; i < threads; i++) {
            if (is_over[i])
                continue;
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
            over += is_over[i];
        }
        missed += over && over < left;
        left -= over;
    }
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
    for (blockIdx.z = 0; blockIdx.z < z; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < y; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < x; blockIdx.x++)
                missed += run_block(threads);
    _mm_setcsr(modes);
    return missed;
}
