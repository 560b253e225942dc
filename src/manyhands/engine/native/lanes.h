/* Sixteen fp32 lanes: one AVX-512 register, two of AVX2, four of NEON, or an array in plain C, which is the definition.
 *
 * Every operation here is one IEEE operation a lane (round to nearest even; denormal operands and results are zero, see
 * modes.h), so a lane's bits do not depend on which of the four computes it. `more(a, b)` is a > b ? a : b, also for NaN.
 */
#ifndef MANYHANDS_LANES_H
#define MANYHANDS_LANES_H
#include <stdint.h>
#include <string.h>

enum { LANES = 16, NO_NUMBER = 0x7FC00000 }; /* the NaN that rows have */
typedef uint16_t half_t; /* the bits of a bf16 or fp16 number */

static inline float real_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline uint32_t near_bits(uint32_t x) { return (x + 0x7FFF + (x >> 16 & 1)) & 0xFFFF0000; }
static inline float round_bf16(float a) { return a != a ? real_of(NO_NUMBER) : real_of(near_bits(bits_of(a))); }

#if defined(LANES_AVX512)
#include <immintrin.h>
typedef __m512 V;
typedef __mmask16 M;
#define LANES_ROWS 12 /* rows of a chain (kernels.c) at most */
#define BOTH_ROWS 12  /* of these, rows whose even and odd sums registers hold at once */
#define TOGETHER 4    /* lanes whose exponentials are computed at once: registers hold what that takes */
#define BLOCK_ROWS 6
#define BLOCK_PANELS 2
static inline V in_register(V a)
{
    __asm__("" : "+v"(a));
    return a;
}
#define ONE(name, call) static inline V name(V a) { return call; }
#define TWO(name, call) static inline V name(V a, V b) { return call; }
static inline V set(float x) { return _mm512_set1_ps(x); }
static inline V load(const float *at) { return _mm512_loadu_ps(at); }
static inline void store(float *at, V a) { _mm512_storeu_ps(at, a); }
static inline V fma_(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
TWO(add, _mm512_add_ps(a, b))
TWO(sub, _mm512_sub_ps(a, b))
TWO(mul, _mm512_mul_ps(a, b))
TWO(div_, _mm512_div_ps(a, b))
TWO(more, _mm512_max_ps(a, b))
ONE(root, _mm512_sqrt_ps(a))
ONE(size_of, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(a), _mm512_set1_epi32(0x7FFFFFFF))))
ONE(minus, _mm512_castsi512_ps(_mm512_xor_si512(_mm512_castps_si512(a), _mm512_set1_epi32((int)0x80000000))))
static inline M below(V a, V b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
static inline M is_nan(V a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q); }
static inline V pick(M mask, V yes, V no) { return _mm512_mask_blend_ps(mask, no, yes); }
ONE(power_of_two, _mm512_castsi512_ps(_mm512_add_epi32(_mm512_slli_epi32(_mm512_castps_si512(a), 23), _mm512_set1_epi32(0x3F800000))))
static inline V from_bf16(const half_t *at)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)at)), 16));
}
static inline V from_f16(const half_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)); }
static inline V from_codes(const int8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)at))); }
static inline V from_bytes(const uint8_t *at) { return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at))); }
static inline V from_e4m3(const uint8_t *at) /* times 2^-8: an fp16 of the same bits, with three more behind them */
{
    return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at)), 7));
}
static inline V powers_at(const uint8_t *at) /* 2^(byte - 128); 0 where that is denormal */
{
    __m512i e = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)), one = _mm512_set1_epi32(1);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_sub_epi32(_mm512_max_epi32(e, one), one), 23));
}
static inline void to_bf16(half_t *at, V rounded)
{
    _mm256_storeu_si256((__m256i *)at, _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(rounded), 16)));
}
static inline V near_bf16(V a)
{
    __m512i x = _mm512_castps_si512(a), odd = _mm512_and_si512(_mm512_srli_epi32(x, 16), _mm512_set1_epi32(1));
    x = _mm512_add_epi32(_mm512_add_epi32(x, _mm512_set1_epi32(0x7FFF)), odd);
    return _mm512_castsi512_ps(_mm512_and_si512(x, _mm512_set1_epi32((int)0xFFFF0000)));
}
static inline V even_bf16(const half_t *at) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(at), 16)); }
static inline V odd_bf16(const half_t *at)
{
    return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(at), _mm512_set1_epi32((int)0xFFFF0000)));
}

#elif defined(LANES_AVX2)
#include <immintrin.h>
typedef struct {
    __m256 a, b;
} V;
typedef V M;
#define LANES_ROWS 6
#define BOTH_ROWS 3
#define TOGETHER 2
#define BLOCK_ROWS 6
#define BLOCK_PANELS 1
static inline V in_register(V x) /* not loaded again by each operation that uses it */
{
    __asm__("" : "+x"(x.a), "+x"(x.b));
    return x;
}
#define BITS(x) _mm256_castps_si256(x)
#define REAL(x) _mm256_castsi256_ps(x)
#define ONE(name, half) \
    static inline __m256 name##_half(__m256 a) { return half; } \
    static inline V name(V x) { return (V){name##_half(x.a), name##_half(x.b)}; }
#define TWO(name, half) \
    static inline __m256 name##_half(__m256 a, __m256 b) { return half; } \
    static inline V name(V x, V y) { return (V){name##_half(x.a, y.a), name##_half(x.b, y.b)}; }
static inline V set(float x) { return (V){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
static inline V load(const float *at) { return (V){_mm256_loadu_ps(at), _mm256_loadu_ps(at + 8)}; }
static inline void store(float *at, V x)
{
    _mm256_storeu_ps(at, x.a);
    _mm256_storeu_ps(at + 8, x.b);
}
static inline V fma_(V x, V y, V z) { return (V){_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
TWO(add, _mm256_add_ps(a, b))
TWO(sub, _mm256_sub_ps(a, b))
TWO(mul, _mm256_mul_ps(a, b))
TWO(div_, _mm256_div_ps(a, b))
TWO(more, _mm256_max_ps(a, b))
ONE(root, _mm256_sqrt_ps(a))
ONE(size_of, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a))
ONE(minus, _mm256_xor_ps(_mm256_set1_ps(-0.0f), a))
TWO(below, _mm256_cmp_ps(a, b, _CMP_LT_OQ))
ONE(is_nan, _mm256_cmp_ps(a, a, _CMP_UNORD_Q))
static inline V pick(M mask, V yes, V no)
{
    return (V){_mm256_blendv_ps(no.a, yes.a, mask.a), _mm256_blendv_ps(no.b, yes.b, mask.b)};
}
ONE(power_of_two, REAL(_mm256_add_epi32(_mm256_slli_epi32(BITS(a), 23), _mm256_set1_epi32(0x3F800000))))
static inline __m256 widen_bf16(const half_t *at)
{
    return REAL(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)at)), 16));
}
static inline V from_bf16(const half_t *at) { return (V){widen_bf16(at), widen_bf16(at + 8)}; }
static inline V from_f16(const half_t *at)
{
    return (V){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)), _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + 8)))};
}
static inline __m256i widen_bytes(const uint8_t *at) { return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at)); }
static inline V from_bytes(const uint8_t *at) { return (V){_mm256_cvtepi32_ps(widen_bytes(at)), _mm256_cvtepi32_ps(widen_bytes(at + 8))}; }
static inline __m256 widen_codes(const int8_t *at) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)at))); }
static inline V from_codes(const int8_t *at) { return (V){widen_codes(at), widen_codes(at + 8)}; }
static inline __m256 e4m3_half(const uint8_t *at)
{
    return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i *)at)), 7));
}
static inline V from_e4m3(const uint8_t *at) { return (V){e4m3_half(at), e4m3_half(at + 8)}; }
static inline __m256 powers_half(const uint8_t *at)
{
    __m256i one = _mm256_set1_epi32(1);
    return REAL(_mm256_slli_epi32(_mm256_sub_epi32(_mm256_max_epi32(widen_bytes(at), one), one), 23));
}
static inline V powers_at(const uint8_t *at) { return (V){powers_half(at), powers_half(at + 8)}; }
static inline void to_bf16(half_t *at, V rounded)
{
    __m256i both = _mm256_packus_epi32(_mm256_srli_epi32(BITS(rounded.a), 16), _mm256_srli_epi32(BITS(rounded.b), 16));
    _mm256_storeu_si256((__m256i *)at, _mm256_permute4x64_epi64(both, 0xD8));
}
static inline __m256 near_half(__m256 a)
{
    __m256i x = BITS(a), odd = _mm256_and_si256(_mm256_srli_epi32(x, 16), _mm256_set1_epi32(1));
    x = _mm256_add_epi32(_mm256_add_epi32(x, _mm256_set1_epi32(0x7FFF)), odd);
    return REAL(_mm256_and_si256(x, _mm256_set1_epi32((int)0xFFFF0000)));
}
static inline V near_bf16(V x) { return (V){near_half(x.a), near_half(x.b)}; }
static inline V even_bf16(const half_t *at)
{
    const __m256i *pair = (const __m256i *)at;
    return (V){REAL(_mm256_slli_epi32(_mm256_loadu_si256(pair), 16)), REAL(_mm256_slli_epi32(_mm256_loadu_si256(pair + 1), 16))};
}
static inline V odd_bf16(const half_t *at)
{
    const __m256i *pair = (const __m256i *)at, high = _mm256_set1_epi32((int)0xFFFF0000);
    return (V){REAL(_mm256_and_si256(_mm256_loadu_si256(pair), high)), REAL(_mm256_and_si256(_mm256_loadu_si256(pair + 1), high))};
}

#elif defined(LANES_NEON)
#include <arm_neon.h>
typedef struct {
    float32x4_t q[4];
} V;
typedef struct {
    uint32x4_t q[4];
} M;
#define LANES_ROWS 3
#define BOTH_ROWS 3
#define TOGETHER 2
#define BLOCK_ROWS 6
#define BLOCK_PANELS 1
static inline V in_register(V a)
{
    __asm__("" : "+w"(a.q[0]), "+w"(a.q[1]), "+w"(a.q[2]), "+w"(a.q[3]));
    return a;
}
#define EACH(type, value) ({ type r_; for (int i = 0; i < 4; i++) r_.q[i] = value; r_; })
#define ONE(name, value) static inline V name(V a) { return EACH(V, value); }
#define TWO(name, value) static inline V name(V a, V b) { return EACH(V, value); }
#define BITS(x) vreinterpretq_u32_f32(x)
#define REAL(x) vreinterpretq_f32_u32(x)
static inline V set(float x) { return EACH(V, vdupq_n_f32(x)); }
static inline V load(const float *at) { return EACH(V, vld1q_f32(at + 4 * i)); }
static inline void store(float *at, V a)
{
    for (int i = 0; i < 4; i++)
        vst1q_f32(at + 4 * i, a.q[i]);
}
static inline V fma_(V a, V b, V c) { return EACH(V, vfmaq_f32(c.q[i], a.q[i], b.q[i])); }
TWO(add, vaddq_f32(a.q[i], b.q[i]))
TWO(sub, vsubq_f32(a.q[i], b.q[i]))
TWO(mul, vmulq_f32(a.q[i], b.q[i]))
TWO(div_, vdivq_f32(a.q[i], b.q[i]))
TWO(more, vbslq_f32(vcgtq_f32(a.q[i], b.q[i]), a.q[i], b.q[i]))
ONE(root, vsqrtq_f32(a.q[i]))
ONE(size_of, vabsq_f32(a.q[i]))
ONE(minus, REAL(veorq_u32(BITS(a.q[i]), vdupq_n_u32(0x80000000))))
static inline M below(V a, V b) { return EACH(M, vcltq_f32(a.q[i], b.q[i])); }
static inline M is_nan(V a) { return EACH(M, vmvnq_u32(vceqq_f32(a.q[i], a.q[i]))); }
static inline V pick(M mask, V yes, V no) { return EACH(V, vbslq_f32(mask.q[i], yes.q[i], no.q[i])); }
ONE(power_of_two, REAL(vaddq_u32(vshlq_n_u32(BITS(a.q[i]), 23), vdupq_n_u32(0x3F800000))))
static inline V from_bf16(const half_t *at) { return EACH(V, REAL(vshll_n_u16(vld1_u16(at + 4 * i), 16))); }
static inline V from_f16(const half_t *at) { return EACH(V, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(at + 4 * i)))); }
static inline uint32x4_t widen_bytes(const uint8_t *at)
{
    uint32_t word;
    memcpy(&word, at, 4);
    return vmovl_u16(vget_low_u16(vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(word)))));
}
static inline V from_bytes(const uint8_t *at) { return EACH(V, vcvtq_f32_u32(widen_bytes(at + 4 * i))); }
static inline V from_codes(const int8_t *at)
{
    int8x16_t codes = vld1q_s8(at);
    int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_s8(vget_high_s8(codes));
    return (V){{vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
                vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))}};
}
static inline V from_e4m3(const uint8_t *at)
{
    uint16_t wide[LANES];
    vst1q_u16(wide, vshll_n_u8(vld1_u8(at), 7));
    vst1q_u16(wide + 8, vshll_n_u8(vld1_u8(at + 8), 7));
    return from_f16(wide);
}
static inline V powers_at(const uint8_t *at) { return EACH(V, REAL(vshlq_n_u32(vqsubq_u32(widen_bytes(at + 4 * i), vdupq_n_u32(1)), 23))); }
static inline void to_bf16(half_t *at, V rounded)
{
    for (int i = 0; i < 4; i++)
        vst1_u16(at + 4 * i, vshrn_n_u32(BITS(rounded.q[i]), 16));
}
static inline float32x4_t near_part(float32x4_t a)
{
    uint32x4_t x = BITS(a), odd = vandq_u32(vshrq_n_u32(x, 16), vdupq_n_u32(1));
    return REAL(vandq_u32(vaddq_u32(vaddq_u32(x, vdupq_n_u32(0x7FFF)), odd), vdupq_n_u32(0xFFFF0000)));
}
ONE(near_bf16, near_part(a.q[i]))
static inline V even_bf16(const half_t *at)
{
    return EACH(V, REAL(vshlq_n_u32(vreinterpretq_u32_u16(vld1q_u16(at + 8 * i)), 16)));
}
static inline V odd_bf16(const half_t *at)
{
    return EACH(V, REAL(vandq_u32(vreinterpretq_u32_u16(vld1q_u16(at + 8 * i)), vdupq_n_u32(0xFFFF0000))));
}

#else /* plain C */
typedef struct {
    float v[LANES];
} V;
typedef struct {
    uint32_t v[LANES];
} M;
#define LANES_ROWS 2
#define BOTH_ROWS 2
#define TOGETHER 1
#define BLOCK_ROWS 2
#define BLOCK_PANELS 1
static inline V in_register(V a) { return a; }
#define EACH(type, value) ({ type r_; for (int i = 0; i < LANES; i++) r_.v[i] = value; r_; })
#define ONE(name, value) static inline V name(V a) { return EACH(V, value); }
#define TWO(name, value) static inline V name(V a, V b) { return EACH(V, value); }

/* a b + c in one rounding: the product is exact in double, the sum rounded to odd there, then to float. */
static inline float fused(float a, float b, float c)
{
    double p = (double)a * b, s = p + c, t = s - p, error = (p - (s - t)) + (c - t);
    uint64_t bits, is_off = (uint64_t)(error < 0) | (uint64_t)(error > 0); /* neither for NaN: where s is infinite */
    memcpy(&bits, &s, 8);
    uint64_t one = is_off & ~bits & 1, grows = (uint64_t)((error > 0) == (s > 0)); /* no branches: none could be foreseen */
    bits += (one & grows) - (one & ~grows);
    memcpy(&s, &bits, 8);
    return (float)s;
}
static inline float widen_f16(half_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 0x3FF;
    if (exponent == 31)
        return real_of(sign | 0x7F800000 | mantissa << 13);
    if (exponent)
        return real_of(sign | (exponent + 112) << 23 | mantissa << 13);
    float size = (float)mantissa * 0x1p-24f;
    return real_of(sign | bits_of(size));
}
static inline V set(float x) { return EACH(V, x); }
static inline V load(const float *at) { return EACH(V, at[i]); }
static inline void store(float *at, V a) { memcpy(at, a.v, sizeof a.v); }
static inline V fma_(V a, V b, V c) { return EACH(V, fused(a.v[i], b.v[i], c.v[i])); }
TWO(add, a.v[i] + b.v[i])
TWO(sub, a.v[i] - b.v[i])
TWO(mul, a.v[i] * b.v[i])
TWO(div_, a.v[i] / b.v[i])
TWO(more, a.v[i] > b.v[i] ? a.v[i] : b.v[i])
ONE(root, root_of(a.v[i]))
ONE(size_of, real_of(bits_of(a.v[i]) & 0x7FFFFFFF))
ONE(minus, real_of(bits_of(a.v[i]) ^ 0x80000000))
static inline M below(V a, V b) { return EACH(M, a.v[i] < b.v[i]); }
static inline M is_nan(V a) { return EACH(M, a.v[i] != a.v[i]); }
static inline V pick(M mask, V yes, V no) { return EACH(V, mask.v[i] ? yes.v[i] : no.v[i]); }
ONE(power_of_two, real_of((bits_of(a.v[i]) << 23) + 0x3F800000))
static inline V from_bf16(const half_t *at) { return EACH(V, real_of((uint32_t)at[i] << 16)); }
static inline V from_f16(const half_t *at) { return EACH(V, widen_f16(at[i])); }
static inline V from_bytes(const uint8_t *at) { return EACH(V, at[i]); }
static inline V from_codes(const int8_t *at) { return EACH(V, at[i]); }
static inline V from_e4m3(const uint8_t *at) { return EACH(V, widen_f16((half_t)(at[i] << 7))); }
static inline V powers_at(const uint8_t *at) { return EACH(V, real_of(at[i] ? (uint32_t)(at[i] - 1) << 23 : 0)); }
static inline void to_bf16(half_t *at, V rounded)
{
    for (int i = 0; i < LANES; i++)
        at[i] = (half_t)(bits_of(rounded.v[i]) >> 16);
}
ONE(near_bf16, real_of(near_bits(bits_of(a.v[i]))))
static inline V even_bf16(const half_t *at) { return EACH(V, real_of((uint32_t)at[2 * i] << 16)); }
static inline V odd_bf16(const half_t *at) { return EACH(V, real_of((uint32_t)at[2 * i + 1] << 16)); }
#endif

/* Rounded to bf16, as fp32. `near_bf16` does so but for a NaN whose mantissa has more than its highest bit: it may become another number. */
static inline V as_bf16(V a) { return pick(is_nan(a), set(real_of(NO_NUMBER)), near_bf16(a)); }

/* The first `count` (0 to 16) lanes from memory, zeros beyond; and back. */
static inline V load_part(const float *at, int64_t count)
{
    float room[LANES] = {0};
    if (count >= LANES)
        return load(at);
    memcpy(room, at, (size_t)count * 4);
    return load(room);
}

static inline void store_part(float *at, V a, int64_t count)
{
    float room[LANES];
    if (count >= LANES) {
        store(at, a);
        return;
    }
    store(room, a);
    memcpy(at, room, (size_t)count * 4);
}

/* The stated tree: lane i takes lane i + 8, then i + 4, i + 2, i + 1. */
#if defined(LANES_AVX512) || defined(LANES_AVX2)
#define TREE(name, sum) \
    static inline float name(V x) \
    { \
        __m256 eight = sum(256, LOW_HALF(x), HIGH_HALF(x)); \
        __m128 four = sum(, _mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1)); \
        __m128 two = sum(, four, _mm_movehl_ps(four, four)); \
        return _mm_cvtss_f32(sum(, two, _mm_movehdup_ps(two))); \
    }
#define SUM_OF(bits, a, b) _mm##bits##_add_ps(a, b)
#define MORE_OF(bits, a, b) _mm##bits##_max_ps(a, b)
#ifdef LANES_AVX512
#define LOW_HALF(x) _mm512_castps512_ps256(x)
#define HIGH_HALF(x) _mm512_extractf32x8_ps(x, 1)
#else
#define LOW_HALF(x) (x).a
#define HIGH_HALF(x) (x).b
#endif
TREE(tree_sum, SUM_OF)
TREE(tree_more, MORE_OF)
#else
static inline float tree_sum(V a)
{
    float v[LANES];
    store(v, a);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            v[i] = v[i] + v[i + width];
    return v[0];
}

static inline float tree_more(V a)
{
    float v[LANES];
    store(v, a);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; i++)
            v[i] = v[i] > v[i + width] ? v[i] : v[i + width];
    return v[0];
}
#endif
#endif
