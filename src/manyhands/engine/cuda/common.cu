/* What all kernels share: types, what a launch is told, functions of one number.
 *
 * The arithmetic is docs/arithmetic.md's, operation by operation, as the native engine's (engine/native/). It is compiled with
 * flushed denormals, without contraction, with divisions and roots rounded to nearest (source.py); sums are chains and lanes whose
 * order does not depend on how the work is cut. No kernel uses a library or an atomic addition; tensor cores add whole numbers alone.
 *
 * A kernel may begin before the one before it is over: each calls await_rows() before it reads or writes what another kernel does, by all its
 * threads, and reads nothing but weights before that.
 */
#define INLINE static __device__ __forceinline__

typedef unsigned short half_t; /* the bits of a bf16 or fp16 number */
typedef long long count_t;

enum { SIDE = 16, DEPTH = 32, BLOCK = 64, THREADS = 256 }; /* columns of a panel, K of a step, keys of a block, threads of a block */
enum { STATE_BLOCK = 32 };                                 /* positions of a block of states */
enum { BF16, F16, F32 };                                   /* types of stored numbers (engine/library.py) */
enum { BY_SOFTMAX, BY_SIGMOID, BY_MIXER, BY_ROOT, BY_LOGIT }; /* Score in engine/native/kernels.h */
enum { MOST_PARTS = 4, MOST_EXPERTS = 1024, MOST_WIDTH = 1024, MOST_VALUES = 512, BLOCKS_AT_ONCE = 4 };

/* A row of the step, and for a session with states what Segment in engine/native/plan.h says of them. */
struct Row {
    char *const *blocks;     /* of its session's keys and values */
    count_t position;        /* in its session */
    count_t left, before;    /* rows of the same session after it, and before it, in this step */
    char *now;               /* the state behind the session's last position */
    char *kept;              /* the block that keeps what changes the state at this position; null: none */
    const char *origin;      /* the block that gives the state before the session's first row of the step; null: `now` is that state */
    count_t behind;          /* positions from the first one of `origin` to that row */
};

/* A matrix of a product, packed in panels of 16 columns (engine/native/kernels.h), and where its result goes. first: its first block among
 * those of the launch. */
struct Part {
    const char *packed;
    const float *bias;
    float *out;
    count_t out_stride, n, activation, first;
};

/* What a launch is told (Args in launch.py). Rows of registers are fp32, `stride` numbers apart. */
struct Args {
    const float *x, *y;
    float *out;
    count_t x_stride, y_stride, out_stride;
    const void *tensors[3];
    count_t n[12];
    double reals[3];
    const Row *rows;
    count_t count; /* of rows */
    Part parts[MOST_PARTS];
    count_t num_parts;
};

INLINE float real_of(unsigned bits) { return __uint_as_float(bits); }
INLINE unsigned bits_of(float value) { return __float_as_uint(value); }
INLINE count_t ceil_div(count_t a, count_t b) { return (a + b - 1) / b; }
INLINE float fma_(float a, float b, float c) { return __fmaf_rn(a, b, c); }
INLINE float more(float a, float b) { return a > b ? a : b; }
INLINE bool is_nan(float a) { return (bits_of(a) & 0x7FFFFFFF) > 0x7F800000; }
INLINE float size_of(float a) { return real_of(bits_of(a) & 0x7FFFFFFF); }
INLINE float minus(float a) { return real_of(bits_of(a) ^ 0x80000000); }
INLINE float infinity() { return real_of(0x7F800000); }

/* Rounded to bf16, as fp32. */
INLINE float round_bf16(float a)
{
    unsigned x = bits_of(a);
    return is_nan(a) ? real_of(0x7FC00000) : real_of((x + 0x7FFF + (x >> 16 & 1)) & 0xFFFF0000);
}

INLINE float rounded_if(count_t rounds, float a) { return rounds ? round_bf16(a) : a; }

INLINE float from_f16(unsigned h)
{
#ifdef __CUDA_ARCH__
    float found;
    asm("cvt.f32.f16 %0, %1;" : "=f"(found) : "h"((half_t)h));
    return found;
#else
    unsigned sign = (h & 0x8000) << 16, e = h >> 10 & 31, m = h & 1023;
    if (e == 0)
        return real_of(bits_of((float)m * 5.9604644775390625e-8f) | sign); /* m 2^-24: exact */
    return real_of(sign | (e == 31 ? 0x7F800000 : (e + 112) << 23) | m << 13);
#endif
}

#define WHOLE 12582912.0f /* 1.5 2^23: added to a number it leaves the nearest whole one in the lowest bits */
INLINE float power_of_two(float whole) { return real_of((bits_of(whole) << 23) + 0x3F800000); }

/* Of a number from -104 to 89, or of none. */
INLINE float exponential_within(float x)
{
    float shifted = fma_(x, 1.44269504f, WHOLE), n = shifted - WHOLE;
    float r = fma_(n, -0.693359375f, x);
    r = fma_(n, 2.12194440e-4f, r);
    float p = 0.00019899286f;
    p = fma_(p, r, 0.0013933651f);
    p = fma_(p, r, 0.008333298f);
    p = fma_(p, r, 0.041666467f);
    p = fma_(p, r, 0.16666667f);
    p = fma_(p, r, 0.5f);
    p = fma_(r * r, p, r) + 1;
    float first = fma_(n, 0.5f, WHOLE), second = (n - (first - WHOLE)) + WHOLE;
    return (p * power_of_two(first)) * power_of_two(second);
}

INLINE float exponential(float number)
{
    float x = more(number, -104);
    x = minus(more(minus(x), -89));
    float found = exponential_within(x);
    return is_nan(number) ? number : found;
}

/* As in engine/native/functions.h. */
INLINE float expm1_less(float x)
{
    float p = fma_(0.00019899286f, x, 0.0013933651f);
    p = fma_(p, x, 0.008333298f);
    p = fma_(p, x, 0.041666467f);
    p = fma_(p, x, 0.16666667f);
    p = fma_(p, x, 0.5f);
    return size_of(x) < 0.34375f ? (x * x) * p : (exponential(x) - 1) - x;
}

INLINE float sigmoid(float x)
{
    float small = exponential(minus(size_of(x)));
    return (x < 0 ? small : 1) / (1 + small);
}

INLINE float hyperbolic(float x)
{
    float size = size_of(x), z = x * x, p = -0.0060536913f;
    p = fma_(p, z, 0.020968182f);
    p = fma_(p, z, -0.05384499f);
    p = fma_(p, z, 0.13332734f);
    p = fma_(p, z, -0.33333328f);
    float near = fma_(x * z, p, x), far = 1 - 2 / (exponential(size + size) + 1);
    return size < 0.625f ? near : x < 0 ? minus(far) : far;
}

INLINE float error_of(float x)
{
    float size = size_of(x), z = x * x, p = -9.67359e-06f, q = -8.905024e-08f;
    p = fma_(p, z, 0.00011268254f);
    p = fma_(p, z, -0.00084843964f);
    p = fma_(p, z, 0.0052210535f);
    p = fma_(p, z, -0.026865438f);
    p = fma_(p, z, 0.11283783f);
    p = fma_(p, z, -0.37612638f);
    p = fma_(p, z, 1.1283792f);
    float t = minus(more(minus(size), -4.2f));
    q = fma_(q, t, 3.6093509e-06f);
    q = fma_(q, t, -6.501158e-05f);
    q = fma_(q, t, 0.00070037664f);
    q = fma_(q, t, -0.005113663f);
    q = fma_(q, t, 0.027205212f);
    q = fma_(q, t, -0.11120332f);
    q = fma_(q, t, -0.6308233f);
    q = fma_(q, t, -1.1307392f);
    q = fma_(q, t, 0.0004299823f);
    float far = 1 - exponential(q);
    far = is_nan(x) ? x : x < 0 ? minus(far) : far;
    return size < 1 ? x * p : far;
}

enum { NONE, SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID }; /* as Activation in program/ops.py */

/* Not inlined: products have it at every number that they write. */
static __device__ __noinline__ float activate(count_t activation, float alpha, float x)
{
    switch (activation) {
    case SILU: return x * sigmoid(alpha == 1 ? x : x * alpha);
    case GELU: return (x * 0.5f) * (1 + error_of(x * 0.70710678f));
    case GELU_TANH: return x * sigmoid(fma_((x * x) * x, 0.044715f, x) * 1.5957691216f);
    case RELU: return more(x, 0);
    case RELU2: return more(x, 0) * more(x, 0);
    case SIGMOID: return sigmoid(x);
    default: return x;
    }
}

/* Lane 0 of each 16 threads gets the tree of their numbers; `with`: sum or more. All threads of the block call it. */
INLINE float tree_sum(float lane)
{
    for (int width = SIDE / 2; width; width /= 2)
        lane = lane + __shfl_down_sync(0xFFFFFFFF, lane, width, SIDE);
    return lane;
}

INLINE float tree_more(float lane)
{
    for (int width = SIDE / 2; width; width /= 2)
        lane = more(lane, __shfl_down_sync(0xFFFFFFFF, lane, width, SIDE));
    return lane;
}

INLINE float first_lane(float lane) { return __shfl_sync(0xFFFFFFFF, lane, 0, SIDE); }

/* The part whose block this is. */
INLINE const Part *part_of(const Args &a, count_t block)
{
    int part = 0;
    while (part + 1 < a.num_parts && block >= a.parts[part + 1].first)
        part++;
    return a.parts + part;
}
